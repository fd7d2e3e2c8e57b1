"""The command `compare`: runs are ranked from held-out episodes of a log, and what cannot be
compared is refused in one line.
"""

import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from decisionllm.datasets.arrays import from_episodes
from decisionllm.estimates.compare import compare, log_return, make_candidate
from decisionllm.estimates.compared_log import print_log
from decisionllm.estimates.comparison_report import (
    ComparedPolicy,
    list_warnings,
    make_table,
    rank_policies,
)
from decisionllm.estimates.logged_episodes import build_logged
from decisionllm.policy.open_runs import OpenedRun
from decisionllm.protocols import Estimate, Logged
from decisionllm.schema import Episode, Spec
from tests.conftest import LOOP, NANO, command, episode, make_policy, make_store, node

QUICK = (
    "+options.fqe.steps=20",
    "+options.fqe.width=8",
    "+options.model.steps=20",
    "+options.model.width=8",
    "picture=false",
)


def estimate(value):
    return Estimate(value, value - 1, value + 1)


def test_the_best_estimate_has_rank_one_and_equal_ones_share_it():
    judged = [ComparedPolicy(str(v), 0.0, {"fqe": estimate(v)}) for v in (2.0, 5.0, 5.0, 1.0)]
    assert rank_policies(judged, "fqe") == [3, 1, 1, 4]


def test_a_policy_that_leaves_the_log_is_warned_about():
    judged = [ComparedPolicy("near", 0.2, {"fqe": estimate(1.0)}), ComparedPolicy("away", 0.31, {})]
    (line,) = list_warnings(judged, 0.2)
    assert line.startswith("warning: away leaves the log, 31 % of its actions")


def test_the_table_has_the_return_of_the_log_and_a_column_for_each_estimator():
    log = Logged(
        spec=Spec(1, 1, 2, num_actions=2),
        observations=np.zeros((3, 1)),
        actions=np.zeros((3, 1)),
        rewards=np.array([5.0, 1.0, 2.0]),
        offsets=np.array([0, 1, 3]),
        terminated=np.zeros(2, bool),
        held_out=np.array([False, True]),
        tasks=["", ""],
        recorded=np.ones(3, bool),
    )
    judged = [ComparedPolicy("a", 0.5, {"fqe": estimate(2.0), "model": estimate(4.0)})]
    made = make_table(judged, log, log_return(log, 1.0), "d", 1.0)
    assert [column.header for column in made.columns] == [
        "policy",
        "fqe",
        "model",
        "far",
    ]
    assert [next(column.cells) for column in made.columns] == [
        "a",
        "1. 2\n1..3",
        "1. 4\n3..5",
        "50 %",
    ]
    assert "the log itself: 3 (3..3)" in made.title
    # rewards 1 and 2 of the held-out episode
    discounted = log_return(log, 0.5)
    made = make_table([ComparedPolicy("a", 0.5, {"fqe": estimate(2.0)})], log, discounted, "d", 0.5)
    assert "the log itself: 2 (2..2); discount 0.5" in made.title


def test_a_policy_that_plans_has_no_density():
    """Its head does not say how likely a plan is."""
    spec = Spec(2, 1, 6, low=(-1.0,), high=(1.0,))
    log = Logged(
        spec=spec,
        observations=np.zeros((4, 2), np.float32),
        actions=np.zeros((4, 1), np.float32),
        rewards=np.ones(4, np.float32),
        offsets=np.array([0, 2, 4]),
        terminated=np.zeros(2, bool),
        held_out=np.array([False, True]),
        tasks=["", ""],
        recorded=np.ones(4, bool),
    )
    actual = {}
    for horizon in (0, 2):
        planner = node("planner", "value")
        policy = make_policy(spec, planner=planner, decode="sample", planning_horizon=horizon)
        actual[horizon] = make_candidate(OpenedRun(Path(), policy), log, "x").log_prob
    assert actual[0] is not None and actual[2] is None


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Short runs on synthetic data, one on discrete actions, one that reads a goal: folder -> each
    by its name.
    """
    path = tmp_path_factory.mktemp("trained")
    shared = (*LOOP, *NANO, f"cache_dir={path}/data", "data.held_out=0.3")
    words = {
        "one": (),
        "two": ("seed=8",),
        "discrete": ("dataset=synthetic-discrete",),
        "goal": ("text=goal",),
    }
    for name, more in words.items():
        if name == "discrete":
            more = (*more, "head=discrete")
        assert command("train", *shared, *more, f"name={name}", f"run={path}/{name}") == 0
    return path


@pytest.mark.slow
def test_runs_are_compared_on_their_held_out_episodes(runs, tmp_path, capsys):
    words = (f"run=[{runs}/one,{runs}/two]", f"out={tmp_path}", "least_episodes=12", *QUICK)
    assert command("compare", *words, "picture=true") == 0
    said = capsys.readouterr().out
    actual = json.loads((tmp_path / "compare.json").read_text(encoding="utf-8"))
    assert (actual["episodes"], actual["fit_episodes"], actual["dataset"]) == (12, 28, "synthetic")
    assert sorted(row["policy"] for row in actual["rows"]) == ["one", "two"]
    for name in ("fqe", "model"):
        each = [row["estimates"][name] for row in actual["rows"]]
        assert sorted(one["rank"] for one in each) == [1, 2]
        assert all(one["low"] < one["value"] < one["high"] for one in each)
    assert "28" in said and "note:" not in said
    assert (tmp_path / "compare.png").stat().st_size > 1000


def test_episodes_that_share_a_few_groups_are_named(tmp_path):
    """Days of so many campaigns: intervals over 30 episodes of a day say nothing about other days."""
    for size, words in [
        (30, "the 30 held-out episodes are of 1 groups, such as days; too few to resample"),
        (5, "the 30 held-out episodes are of 6 groups, such as days; intervals resample groups"),
        (1, ""),
    ]:
        episodes = [episode([float(i)], group=i // size) for i in range(60)]
        store = make_store(tmp_path / f"store-{size}", episodes)
        console = Console(file=io.StringIO(), width=1000)
        print_log(console, store, build_logged(store, np.arange(30), np.arange(30, 60)))
        said = console.file.getvalue()
        assert words in said if words else "note" not in said


@pytest.mark.slow
def test_another_log_is_halved_and_a_run_on_judged_episodes_is_named(runs, tmp_path, capsys):
    words = (f"run={runs}/one", f"out={tmp_path}", *QUICK, "estimators=[fqe]")
    assert command("compare", *words[:-3], "picture=false", "+dataset.episodes=60") == 0
    assert json.loads((tmp_path / "compare.json").read_text(encoding="utf-8"))["episodes"] == 30
    words = (f"run={runs}/one", f"out={tmp_path}", *QUICK[:2], "estimators=[fqe]", "held_out=0.5")
    assert command("compare", *words, "picture=false") == 0
    assert "was trained on" in capsys.readouterr().out


@pytest.mark.slow
def test_what_cannot_be_compared_is_refused_in_one_line(runs, tmp_path, capsys):
    unpaid = Episode(np.zeros((2, 2)), np.eye(2), np.zeros(2))
    data = from_episodes(
        [replace(unpaid, group=i) for i in range(9)], tmp_path / "log", name="unpaid"
    )
    several = tmp_path / "several"
    several.mkdir()
    (several / "config.yaml").write_text("run: several", encoding="utf-8")
    (several / "run.json").write_text(
        json.dumps({"format": 5, "embodiments": {"a": {}, "b": {}}}), encoding="utf-8"
    )
    cases = {
        f"run={runs}/none": "expected a run directory (with run.json), found none",
        f"run={several}": "expected a run of one space, got one of dataset=embodiments (a, b)",
        f"run=[{runs}/one,{runs}/goal]": "goal: expected a run of text=none, as the log is read",
        f"run=[{runs}/one,{runs}/discrete]": "discrete: expected a run of action_dim=2",
        "": "expected 20 held-out episodes or more (least_episodes), got 12 of 40 in synthetic",
        "estimators=[fqee]": "no estimator 'fqee'; did you mean fqe?",
        "estimators=[]": "expected one or more of fqe, importance, model",
        "+options.fqe.stepps=3": "unexpected keyword argument 'stepps'",
        "+options.importance.x=3": "options.importance: expected options of fqe, model",
        "estimators=[importance]": "expected a log with propensities",
        f"dataset=store dataset.path={data['path']}": "unpaid: expected rewards that tell policies",
        "discount=1.5": "discount: expected above 0 and at most 1, got 1.5",
        "held_out=1.0": "held_out: expected a share above 0 and below 1, got 1.0",
    }
    for words, message in cases.items():
        args = words.split() if words.startswith("run") else [f"run={runs}/one", *words.split()]
        if words != "":
            args.append("least_episodes=2")
        assert command("compare", *args, f"out={tmp_path}", "picture=false") == 1, words
        said = capsys.readouterr().err
        assert message in said and said.count("\n") == 1, (words, said)


@pytest.mark.slow
def test_results_that_cannot_be_written_are_known_before_anything_is_fitted(runs, tmp_path, capsys):
    (tmp_path / "compare.json").mkdir()
    (tmp_path / "file").touch()
    for out in (tmp_path, tmp_path / "file"):
        assert command("compare", f"run=[{runs}/one,{runs}/two]", *QUICK, f"out={out}") == 1
        said = capsys.readouterr()
        assert "log:" not in said.out and "could not be written" in said.err


def test_propensities_of_a_log_are_read(runs, tmp_path):
    rng = np.random.default_rng(0)
    episodes = []
    for group in range(30):
        actions = rng.uniform(-1, 1, (5, 2)).astype(np.float32)
        episode = Episode(
            rng.normal(size=(5, 2)).astype(np.float32),
            actions,
            actions.sum(1),
            group=group,
            action_log_prob=np.full(5, np.log(0.25), np.float32),
        )
        episodes.append(episode)
    data = from_episodes(episodes, tmp_path / "log", name="drawn")
    config = {
        "run": f"{runs}/one",
        "dataset": data,
        "estimators": ["importance"],
        "least_episodes": 15,
        "out": str(tmp_path),
    }
    with pytest.raises(ValueError, match="give act.decode=sample"):
        compare(config)
    actual = json.loads(compare(config | {"act": {"decode": "sample"}}).read_text(encoding="utf-8"))
    (row,) = actual["rows"]
    (name,) = row["estimates"]
    assert name == "importance" and -10 <= row["estimates"][name]["value"] <= 10
