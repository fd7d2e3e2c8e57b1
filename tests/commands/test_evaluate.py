"""Evaluation: runs are rolled out by their own config, rows describe themselves, the report is one
file.
"""

import hashlib
import json
import shutil
from contextlib import contextmanager
from dataclasses import asdict
from inspect import signature
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from decisionllm.command_line import fill_defaults
from decisionllm.commands.evaluate import evaluate, evaluate_runs, published_scores
from decisionllm.commands.evaluate_env import build_env_node
from decisionllm.commands.evaluate_warnings import constant_action_warnings, option_warnings
from decisionllm.datasets.mixture_parts import ONLY
from decisionllm.datasets.store_cache import prepare_store
from decisionllm.eval import report
from decisionllm.eval.synthetic import PointEnv
from decisionllm.files import DIGESTS
from decisionllm.policy.open_runs import OpenedRun
from decisionllm.registry import build, choice
from decisionllm.runs import directory
from decisionllm.schema import Spec
from decisionllm.worlds.maze2d.dataset import save
from tests.conftest import LOOP, NANO, command, episode, node

pytestmark = pytest.mark.slow

KEYS = {
    "world",
    "dataset",
    "policy",
    "protocol",
    "text",
    "seed",
    "target_return",
    "return",
    "score",
    "low",
    "high",
    "n",
    "seconds",
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Three short runs on synthetic data and one on a small maze log: folder -> each by its
    name.
    """
    path = tmp_path_factory.mktemp("trained")
    maze = ("dataset=maze2d-umaze", "dataset.steps=800", "env.maze=umaze")
    words_by_run = {
        "plain": (),
        "goal-text": ("text=goal",),
        "cloned": ("model.condition_on=none", "seed=8"),
        "maze": maze,
        "no-env": ("env=none",),
    }
    for name, words in words_by_run.items():
        loop = [word for word in LOOP if not (name == "maze" and word.startswith("dataset"))]
        assert (
            command(
                "train",
                *loop,
                *NANO,
                *words,
                f"name={name}",
                f"run={path}/{name}",
                f"cache_dir={path}/data",
            )
            == 0
        )
    return path


def evaluated(out, *words):
    """The rows of an evaluation, without baselines unless it is given baselines=true."""
    short = ("episodes=3", "report=false", "baselines=false")
    assert command("evaluate", f"out={out}", *short, *words) == 0
    return [
        json.loads(line)
        for line in (out / "results.jsonl").read_text(encoding="utf-8").splitlines()
    ]


@pytest.mark.parametrize(
    ("second", "num_actions", "expected"),
    [
        (-1.0, 0, ["runs/a: columns [1] of the action are [-1.0] at every step; at a bound"]),
        (-0.99, 0, []),
        (-1.0, 3, []),
    ],
)
def test_a_policy_that_always_does_the_same_is_told(second, num_actions, expected):
    episodes = [episode([0.0, 0.0], A=2), episode([0.0], A=2)]
    for each in episodes:
        each.actions[:, 1] = -1.0
    episodes[1].actions[0] = (9.0, second)
    run = SimpleNamespace(path="runs/a", info={"spec": {"num_actions": num_actions}})
    lines = constant_action_warnings(run, episodes)
    assert [line.partition(" the mean")[0] for line in lines] == expected


def test_a_file_of_unknown_content_is_not_compared_with_published_scores():
    env = build(node("env", "maze2d-umaze"), 1)
    assert published_scores(env, {"recognised": False}) == {}
    assert (
        published_scores(env, {"recognised": True})
        == published_scores(env, {})
        == env.published
        != {}
    )


def test_rows_name_the_bytes_of_a_file(tmp_path):
    store = prepare_store(node("dataset", "maze2d-umaze", steps=800), tmp_path / "data")
    save(tmp_path / "log.hdf5", store)
    loop = [word for word in LOOP if not word.startswith("dataset")]
    maze = ("dataset=maze2d-umaze", f"dataset.path={tmp_path}/log.hdf5")
    assert command("train", *loop, *NANO, *maze, f"run={tmp_path}/run") == 0
    digest = hashlib.blake2b((tmp_path / "log.hdf5").read_bytes(), digest_size=16).hexdigest()
    rows = evaluated(tmp_path, f"run={tmp_path}/run")
    assert [row["file_digest"] for row in rows] == [digest]


def test_a_row_describes_its_evaluation(runs, tmp_path):
    (row,) = evaluated(tmp_path, f"run={runs}/plain")
    info = directory.read(runs / "plain")[1]["embodiments"][ONLY]
    assert row.keys() >= KEYS
    expected = {
        "world": "synthetic",
        "dataset": "synthetic",
        "policy": "plain",
        "protocol": "standard",
        "text": "none",
        "seed": 7,
        "n": 3,
        "headline": True,
    }
    assert expected.items() <= row.items()
    assert (
        row["target_return"] == info["targets"]["0.9"] and row["fingerprint"] == info["fingerprint"]
    )
    assert row["low"] <= row["score"] <= row["high"] < 0 <= row["seconds"]
    assert row["score"] == pytest.approx(row["return"])  # the point's score is its return
    assert {"torch", "transformers", "decisionllm", "commit"} <= row["versions"].keys()


def test_an_evaluation_repeats_even_with_sampled_actions(runs, tmp_path):
    first, second = (
        evaluated(tmp_path / str(i), f"run={runs}/plain", "act.decode=sample")[0] for i in (1, 2)
    )
    mode, other = (
        evaluated(tmp_path / word[:4], f"run={runs}/plain", word)[0]
        for word in ("act.decode=mode", "seed=1")
    )
    assert first["return"] == second["return"] and first["decode"] == "sample"
    assert len({first["return"], mode["return"], other["return"]}) == 3


def test_samples_do_not_depend_on_what_is_evaluated_before(runs, tmp_path):
    sampled = "act.decode=sample"
    (alone,) = evaluated(tmp_path / "alone", f"run={runs}/cloned", sampled)
    both = evaluated(tmp_path / "both", f"run=[{runs}/plain,{runs}/cloned]", sampled)
    assert both[-1]["return"] == alone["return"]


def test_the_report_is_one_page_with_its_pictures(runs, tmp_path):
    evaluated(tmp_path, f"run={runs}/plain", "report=true")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    pictures = sorted(path.name for path in tmp_path.glob("*.png"))
    assert pictures == ["learning.png", "scores.png"] and page.count("data:image/png;base64,") == 2
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in pictures)
    assert (
        "plain" in page
        and "synthetic" in page
        and "http" not in page.replace("http://www.w3.org", "")
    )


def test_a_probe_of_words_is_a_table_a_picture_and_a_line_of_json(runs, tmp_path, capsys):
    pairs = tmp_path / "pairs.csv"
    text = "Walk to the goal in the north."
    pairs.write_text(f"text,other,same\n{text},Go north,true\n", encoding="utf-8")
    words = ("probe=words", f"probe_pairs={pairs}", "report=true")
    evaluated(tmp_path, f"run={runs}/goal-text", *words)
    evaluated(tmp_path, f"run={runs}/goal-text", *words)
    (_, line) = (tmp_path / "word_probe.jsonl").read_text(encoding="utf-8").splitlines()
    probe = json.loads(line)
    assert (probe["policy"], probe["world"], probe["n"]) == ("goal-text", "synthetic", 3)
    variants = {row["variant"]: row for row in probe["variants"]}
    assert variants["other task"]["should"] == "change" and variants["own pairs, same"]["n"] == 3
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<td>contrast, reversed</td><td>act as other task</td>" in page
    assert 'alt="Instruction probe"' in page
    printed = capsys.readouterr().out
    assert printed.count("typing error") == 2, "a table has the last line of a run alone"


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("plain", ["probe=words"], "this one reads no text"),
        ("goal-text", ["probe=texts"], "probe: expected one of words, got 'texts'"),
        ("goal-text", ["probe_pairs=a.csv"], "needs probe=words, got probe=null"),
        ("goal-text", ["probe=words", "+env.text=none"], "its environment synthetic has none"),
    ],
)
def test_a_probe_that_cannot_be_is_an_error_before_the_rollouts(
    runs, tmp_path, capsys, name, words, message
):
    assert command("evaluate", f"run={runs}/{name}", f"out={tmp_path}/out", *words) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out" / "results.jsonl").exists()


def test_of_several_targets_one_is_the_headline(runs, tmp_path):
    rows = evaluated(
        tmp_path, f"run={runs}/plain", "target_quantiles=[0.5,1,0.9]", "target_returns=[-7]"
    )
    targets = directory.read(runs / "plain")[1]["embodiments"][ONLY]["targets"]
    # 0.9 is not played twice
    assert [row["target_return"] for row in rows] == [
        targets["0.9"],
        targets["0.5"],
        targets["1.0"],
        -7.0,
    ]
    assert [row["headline"] for row in rows] == [True, False, False, False]
    assert len({row["return"] for row in rows}) == 4  # the policy conditions on the target


def test_behaviour_cloning_has_no_target_return(runs, tmp_path):
    (row,) = evaluated(
        tmp_path, f"run={runs}/cloned", "target_quantiles=[0.5]", "target_returns=[-7]"
    )
    assert row["target_return"] is None and row["headline"]


def test_several_runs_are_in_one_table(runs, tmp_path, capsys):
    rows = evaluated(tmp_path, f"run=[{runs}/plain,{runs}/goal-text,{runs}/cloned]")
    assert [(row["policy"], row["protocol"], row["text"], row["seed"]) for row in rows] == [
        ("plain", "standard", "none", 7),
        ("goal-text", "goal-text", "goal", 7),
        ("cloned", "standard", "none", 8),
    ]
    table = capsys.readouterr().out
    assert all(name in table for name in ("plain", "goal-text", "cloned"))


def test_a_text_that_was_not_in_the_data_is_said(runs, tmp_path, capsys):
    evaluated(tmp_path / "a", f"run={runs}/goal-text")
    assert "not in its data" not in capsys.readouterr().out
    evaluated(tmp_path / "b", f"run={runs}/goal-text", "+env.text=none")
    assert "1 task texts of the environment were not in its data, such as ''" in " ".join(
        capsys.readouterr().out.split()
    )


def test_rows_are_appended(runs, tmp_path):
    evaluated(tmp_path, f"run={runs}/plain")
    assert [row["policy"] for row in evaluated(tmp_path, f"run={runs}/goal-text")] == [
        "plain",
        "goal-text",
    ]


@contextmanager
def edited(run, **changes):
    """The config of a run, changed by hand for a block: without its digest, as the error says that
    one goes on.
    """
    files = {name: (run / name).read_text(encoding="utf-8") for name in ("config.yaml", DIGESTS)}
    (run / "config.yaml").write_text(
        yaml.safe_dump(yaml.safe_load(files["config.yaml"]) | changes), encoding="utf-8"
    )
    (run / DIGESTS).unlink()
    try:
        yield
    finally:
        for name, text in files.items():
            (run / name).write_text(text, encoding="utf-8")


def test_a_damaged_row_is_named_before_anything_is_played(runs, tmp_path, capsys):
    (tmp_path / "results.jsonl").write_text('{"world"{}\n', encoding="utf-8")
    assert command("evaluate", f"out={tmp_path}", f"run={runs}/plain") == 1
    printed = capsys.readouterr()
    assert "results.jsonl: line 1 is damaged" in printed.err and "score" not in printed.out


@pytest.mark.parametrize("name", ["results.jsonl", "report.html"])
def test_results_that_cannot_be_written_are_known_before_anything_is_played(
    name, runs, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(PointEnv, "reset", lambda *arguments: 1 / 0)
    (tmp_path / "file").touch()
    (tmp_path / "out" / name).mkdir(parents=True)
    for out in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / "out"):
        assert command("evaluate", f"run={runs}/plain", f"out={out}") == 1
        printed = capsys.readouterr().err
        assert printed.count("\n") == 1 and "could not be written" in printed
        assert "choose another out=..." in printed


class Measured(PointEnv):
    """An environment of a user's own, with a metric."""

    def metrics(self, episodes):
        return {"texts": sorted({episode.task for episode in episodes})}


def test_an_environment_of_ones_own_takes_the_text_of_the_run(runs, tmp_path):
    own = f"+env._target_={__name__}.Measured"
    words = (f"run={runs}/goal-text", own)
    (row,) = evaluated(tmp_path / "goal", *words)
    assert row["text"] == "goal" and "" not in row["texts"]
    (row,) = evaluated(tmp_path / "none", *words, "+env.text=none")
    assert row["text"] == "none" and row["texts"] == [""]


def test_the_runs_own_env_is_used_and_can_be_changed(runs, tmp_path):
    env = yaml.safe_load((runs / "plain" / "config.yaml").read_text(encoding="utf-8"))["env"]
    north = evaluated(tmp_path / "a", f"run={runs}/plain")[0]["return"]
    south = evaluated(tmp_path / "b", f"run={runs}/plain", "+env.goal=south")[0]["return"]
    with edited(runs / "plain", env=env | {"goal": "south"}):
        assert evaluated(tmp_path / "c", f"run={runs}/plain")[0]["return"] == south != north


class Chosen(PointEnv):
    """A point with its goal in a nested option that has a second key."""

    def __init__(self, num_episodes, *, where):
        super().__init__(num_episodes, goal=where["goal"])
        self.protocol = where["protocol"]


def test_a_nested_option_of_the_env_is_changed_alone(runs, tmp_path):
    south = evaluated(tmp_path / "a", f"run={runs}/plain", "+env.goal=south")[0]["return"]
    where = {"goal": "north", "protocol": "chosen"}
    with edited(
        runs / "plain", env={"_target_": "tests.commands.test_evaluate.Chosen", "where": where}
    ):
        words = ("+env.where.goal=south", "trust=[tests]")
        row = evaluated(tmp_path / "b", f"run={runs}/plain", *words)[0]
    assert (row["protocol"], row["return"]) == ("chosen", south) and row[
        "changed"
    ] == "where={'goal': 'south'}"


def test_scripted_players_are_played_once(runs, tmp_path):
    assert (
        command("evaluate", f"run=[{runs}/maze,{runs}/maze]", f"out={tmp_path}", "episodes=2") == 0
    )
    rows = [
        json.loads(line)
        for line in (tmp_path / "results.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert [(row["policy"], row["protocol"]) for row in rows] == [
        ("maze", "standard"),
        ("random", "scripted"),
        ("planner", "scripted"),
        ("maze", "standard"),
    ]
    scores = {row["policy"]: row["score"] for row in rows}
    assert scores["planner"] > 50 > scores["random"]
    assert {path.name for path in tmp_path.glob("rollout-*.png")} == {
        "rollout-maze-standard-7.png",
        "rollout-random-scripted-0.png",
        "rollout-planner-scripted-0.png",
    }
    assert [row["policy"] for row in evaluated(tmp_path / "b", f"run={runs}/maze")] == ["maze"]
    # without a report there are no pictures
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["results.jsonl"]


def test_scripted_players_play_once_in_a_world_though_two_runs_name_their_data_differently(
    runs, tmp_path
):
    maze = ("dataset=maze2d-umaze", "dataset.steps=1200", "env.maze=umaze")
    loop = [word for word in LOOP if not word.startswith("dataset")]
    other = f"run={tmp_path}/other"
    assert command("train", *loop, *NANO, *maze, "name=other", other) == 0
    rows = evaluated(tmp_path, f"run=[{runs}/maze,{tmp_path}/other]", "baselines=true")
    learned = [row for row in rows if "run" in row]
    assert [row["policy"] for row in learned] == ["maze", "other"]
    assert len({row["dataset"] for row in learned}) == 2
    scripted = [row for row in rows if "run" not in row]
    names = [row["policy"] for row in scripted]
    assert len(names) == len(set(names)) > 0
    assert {row["world"] for row in rows} == {"maze2d-umaze"}
    assert {row["dataset"] for row in scripted} == {"maze2d-umaze"}
    assert len(report.tables(report.summarise(report.read_rows(tmp_path)))) == 1


@pytest.mark.parametrize(
    ("run", "words", "message"),
    [
        ("plain", ["target_quantiles=[0.7]"], "knows those of 0.5, 0.9, 0.99, 1.0, got 0.7"),
        ("plain", ["episodes=0"], "episodes: expected 1 or more, got 0"),
        ("plain", ["act.stride=9"], "stride: expected 1 .. 5"),
        ("plain", ["act.decode=guess"], "decode: expected one of mode, mean"),
        ("plain", ["device=tpu"], "device: expected one of auto, cpu, cuda, got 'tpu'"),
        ("plain", ["+env.goa=south"], "unexpected keyword argument 'goa'"),
        ("no-env", [], "env=none, there is no environment to roll out in"),
        ("nowhere", [], "nowhere: expected a run directory"),
    ],
)
def test_a_wrong_option_fails_in_one_line(run, words, message, runs, tmp_path, capsys):
    capsys.readouterr()
    assert command("evaluate", f"run={runs}/{run}", f"out={tmp_path}", *words) == 1
    printed = capsys.readouterr().err
    assert message in printed and printed.count("\n") == 1


def test_targets_that_are_no_numbers_are_refused_before_a_run_is_read():
    with pytest.raises(
        ValueError,
        match="target_returns: expected numbers .could not convert string to float: 'high'",
    ):
        evaluate("nowhere", target_returns=["high"])


def test_in_python_an_option_left_out_has_its_default():
    options = fill_defaults("evaluate", {"run": "runs/x", "episodes": 7, "act": {"decode": "mean"}})
    assert options["episodes"] == 7 and options["target_returns"] == [] and options["env"] == {}
    assert options["act"] == {
        "stride": None,
        "decode": "mean",
        "planning_horizon": None,
        "planning_value": None,
    }
    with pytest.raises(ValueError, match="no key 'episode' in the config; did you mean episodes"):
        evaluate_runs({"run": "runs/x", "episode": 7})


def test_the_function_has_the_options_and_the_defaults_of_the_command():
    """None or () stand for {} and []."""
    parameters = dict(signature(evaluate).parameters)
    for name, value in fill_defaults("evaluate", {}).items():
        default = parameters.pop(name).default
        if isinstance(value, list | dict):
            assert not default, name
        elif name != "run":
            assert default == value, name
    assert not parameters


def test_another_environment_by_its_name_takes_the_options_of_the_run(runs, tmp_path):
    (row,) = evaluated(tmp_path / "named", f"run={runs}/plain", "env=synthetic")
    (own,) = evaluated(tmp_path / "own", f"run={runs}/plain")
    assert (
        row["return"] == own["return"] and row["protocol"] == "standard" and row["text"] == "none"
    )
    assert command("evaluate", f"run={runs}/plain", "env=maze3d") == 2


def test_what_is_not_the_runs_own_makes_another_result(runs, tmp_path):
    for words in (
        ["+env.goal=north"],
        ["+env.goal=south"],
        ["act.stride=3", "act.decode=sample"],
        ["act.stride=0"],
    ):
        rows = evaluated(tmp_path, f"run={runs}/plain", *words)
    assert [row.get("changed") for row in rows] == [None, "goal=south", "act.stride=3", None], (
        "north and 0 are the run's own"
    )
    rows_shown = {
        (r["protocol"], r["decode"]) for r in report.summarise(report.read_rows(tmp_path))
    }
    assert rows_shown == {
        ("standard", "mode"),
        ("standard, goal=south", "mode"),
        ("standard, act.stride=3", "sample"),
    }


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """Two learning rates x two seeds, trained by one command."""
    path = tmp_path_factory.mktemp("sweep")
    loop = [word for word in LOOP if not word.startswith(("steps", "seed"))]
    words = (
        *loop,
        *NANO,
        "steps=1",
        "seed=0,1",
        "optim.lr=0.001,0.002",
        f"cache_dir={path}/data",
        f"hydra.sweep.dir={path}",
    )
    assert command("train", "--multirun", *words, f"run='{path}/x/${{optim.lr}}-${{seed}}'") == 0
    return path / "x"


def test_a_sweep_of_learning_rates_and_seeds_is_two_results_of_two_seeds(sweep, tmp_path, capsys):
    words = (f"out={tmp_path}", "episodes=3", "baselines=false")
    assert command("evaluate", f"run={sweep}/*", *words) == 0
    results = report.summarise(report.read_rows(tmp_path))
    assert sorted((r["policy"], r["seeds"], r["n"]) for r in results) == [
        ("nano, optim.lr=0.001", 2, 6),
        ("nano, optim.lr=0.002", 2, 6),
    ]
    printed = capsys.readouterr().out
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "seeds x episodes: 2 x 3" in printed
    for name in ("nano, optim.lr=0.001", "nano, optim.lr=0.002"):
        assert sum(name in line for line in printed.splitlines()) == 1 and name in page


def test_a_pattern_names_the_runs_that_match_it_in_order(sweep, tmp_path, capsys):
    (sweep / "notes").mkdir()
    rows = evaluated(tmp_path, f"run=[{sweep}/0.002-?,{sweep}/0.001-1]")
    assert [row["run"].rpartition("/")[2] for row in rows] == ["0.002-0", "0.002-1", "0.001-1"]
    assert command("evaluate", f"run={sweep}/n*", f"out={tmp_path}") == 1
    printed = capsys.readouterr().err
    assert (
        f"run={sweep}/n*: expected a pattern of run directories" in printed
        and "matches 1 files or folders and none" in printed
    )


def test_another_seed_of_the_environment_is_another_result(runs, tmp_path):
    for words in ([], ["seed=3"], ["episodes=4"]):
        evaluated(tmp_path, f"run={runs}/plain", *words)
    results = report.summarise(report.read_rows(tmp_path))
    assert {(r["policy"], r["n"]) for r in results} == {
        ("plain, env seed 0", 4),
        ("plain, env seed 3", 3),
    }


def test_runs_of_one_environment_build_it_once(runs, tmp_path, monkeypatch):
    built, make = [], PointEnv.__init__
    monkeypatch.setattr(
        PointEnv,
        "__init__",
        lambda env, *args, **options: built.append(args) or make(env, *args, **options),
    )
    rows = evaluated(tmp_path, f"run=[{runs}/plain,{runs}/cloned]")
    assert built == [(3,)] and len({row["run"] for row in rows}) == 2


def changed(own, env_options, A=2):
    """How `evaluate` labels this environment in place of a run's own."""
    info = {"spec": asdict(Spec(3, A, 20, (-2.0,) * A, (2.0,) * A)), "dataset": {}}
    policy = SimpleNamespace(config={"env": own, "text": "none"}, info=info)
    run = OpenedRun(Path("x"), policy)
    return ", ".join(build_env_node(run, env_options)[1])


def test_another_environment_is_named_without_its_defaults():
    pytest.importorskip("gymnasium")
    pendulum = choice("env", "gymnasium", id="Pendulum-v1", horizon=2, text="none")
    pendulum_label = "env=gymnasium, id=Pendulum-v1, horizon=2"
    assert changed({"_target_": "none"}, pendulum, A=1) == pendulum_label
    own = choice("env", "synthetic", text="none", goal="south")
    north = choice("env", "synthetic", text="none")
    assert changed(own, north) == "goal=north", "a default, and not the run's own"
    assert changed({"_target_": own["_target_"]}, north) == ""


@pytest.mark.parametrize(
    ("keep_best", "seed", "warned"), [("score", 0, True), ("score", 1, False), ("loss", 0, False)]
)
def test_a_score_from_the_starts_that_chose_the_weights_is_named(keep_best, seed, warned):
    policy = SimpleNamespace(config={"log": {"keep_best": keep_best}})
    run = OpenedRun(Path("runs/a"), policy)
    warnings = option_warnings(run, {"act": {}, "team": {}}, seed)
    assert any("rollouts of seed=0 chose its weights" in line for line in warnings) is warned


def test_a_run_that_is_not_finished_is_no_further_seed(runs, tmp_path, capsys):
    run = tmp_path / "stopped"
    shutil.copytree(runs / "plain", run)
    file = run / "checkpoint" / "trainer.json"
    file.write_text(
        json.dumps(json.loads(file.read_text(encoding="utf-8")) | {"step": 2, "finished": False}),
        encoding="utf-8",
    )
    (run / "checkpoint" / DIGESTS).unlink()  # as for a file that is edited by hand
    rows = evaluated(tmp_path / "out", f"run=[{run},{runs}/plain]")
    assert [row.get("changed") for row in rows] == ["stopped at step 2", None]
    assert "the training is not finished, it has stopped at step 2" in capsys.readouterr().out
