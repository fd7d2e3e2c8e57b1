"""Baselines: transitions of a store by hand, and runs of d3rlpy's algorithms that evaluate like any
other.
"""

import json
import shutil
import sys

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

from decisionllm.baselines.d3rlpy import ALGORITHMS, actor_mean, build_transitions, fit_scales
from decisionllm.policy import loading
from decisionllm.runs import checkpoint
from decisionllm.schema import Episode
from tests.conftest import LOOP, NANO, command, damage, episode, make_store

pytestmark = [pytest.mark.numeric, pytest.mark.slow]

SYNTHETIC = (
    "dataset=synthetic",
    "dataset.episodes=60",
    "optim.batch_size=32",
    "seed=7",
    "device=cpu",
)


def trained(path, *words):
    assert (
        command("baseline", *SYNTHETIC, f"run={path}", f"cache_dir={path.parent}/data", *words) == 0
    )
    return path


@pytest.fixture(scope="module")
def short_run(tmp_path_factory):
    """A run of one step."""
    return trained(tmp_path_factory.mktemp("short") / "run", "steps=1")


@pytest.fixture
def run(short_run, tmp_path):
    """A copy of it, which a test may change."""
    return shutil.copytree(short_run, tmp_path / "run")


@pytest.fixture
def store(tmp_path):
    """Steps 0, 1, 2 end by the task, 10, 11 by the clock; rewards count them from 1."""
    first = episode([1, 2, 3], terminated=True, truncated=False)
    return make_store(tmp_path / "store", [first, episode([4, 5], start=10.0, group=1)])


def test_a_step_leads_to_the_next_and_a_terminated_episode_to_nothing(store):
    log = build_transitions(store, [0])
    assert log[0].tolist() == [[0, 0], [1, 1], [2, 2]] and log[2][:, 0].tolist() == [1, 2, 3]
    assert np.allclose(log[1], [[0], [0.01], [0.02]])
    assert log[3][:2].tolist() == [[1, 1], [2, 2]] and log[5][:, 0].tolist() == [0, 0, 1]


def test_a_truncated_step_without_next_observation_is_left_out(store):
    log = build_transitions(store, [0, 1])
    assert log[2][:, 0].tolist() == [1, 2, 3, 4] and log[5][:, 0].tolist() == [0, 0, 1, 0]
    assert log[3][-1].tolist() == [11, 11]


def test_a_final_observation_is_what_the_last_step_leads_to(tmp_path):
    final = {"final_observation": np.array([7, 8], np.float32)}
    log = build_transitions(
        make_store(
            tmp_path / "store", [episode([1, 2], **final), episode([3], start=5.0, **final)]
        ),
        [0, 1],
    )
    assert log[2][:, 0].tolist() == [1, 2, 3] and log[5][:, 0].tolist() == [0, 0, 0]
    assert log[3].tolist() == [[1, 1], [7, 8], [7, 8]]


def test_the_action_that_follows_a_step_is_its_next_action(store):
    log = build_transitions(store, [0, 1], next_actions=True)
    assert log[2][:, 0].tolist() == [1, 2, 3, 4]  # the step 11 is followed by none that is known
    assert np.allclose(log[4], [[0.01], [0.02], [0.02], store.actions[4]])


def test_a_last_step_is_left_out_where_its_next_action_is_read(tmp_path):
    final = {"final_observation": np.array([7, 8], np.float32)}
    log = build_transitions(
        make_store(tmp_path / "store", [episode([1, 2], **final)]), [0], next_actions=True
    )
    assert log[2][:, 0].tolist() == [1] and np.allclose(log[4], [[0.01]])


def test_truncation_can_count_as_terminal(store):
    log = build_transitions(store, [1], ends=True)
    assert log[2][:, 0].tolist() == [4, 5] and log[5][:, 0].tolist() == [0, 1]


def test_a_step_without_a_recorded_action_is_left_out(tmp_path):
    gap = Episode(
        np.arange(3.0)[:, None],
        np.array([[0.5], [np.nan], [0.25]]),
        np.ones(3),
        terminated=True,
        truncated=False,
    )
    log = build_transitions(make_store(tmp_path / "store", [gap]), [0])
    assert (
        log[0][:, 0].tolist() == [0, 2]
        and log[1][:, 0].tolist() == [0.5, 0.25]
        and log[3][0].tolist() == [1]
    )


def test_data_without_transitions_is_refused(tmp_path):
    with pytest.raises(
        ValueError,
        match="test: expected steps with a next observation, got 1 truncated episodes of one step",
    ):
        build_transitions(make_store(tmp_path / "one", [episode([1])]), [0])
    with pytest.raises(
        ValueError, match="test: a baseline needs continuous actions, these are one of 3"
    ):
        build_transitions(make_store(tmp_path / "discrete", [episode([1])], num_actions=3), [0])


def test_scales_are_mean_deviation_and_action_bounds(tmp_path):
    one = episode([0, 0, 0], S=1)
    steady = np.hstack([one.observations, np.full((3, 1), 5, np.float32)])
    actions = np.array([[-0.5], [0.0], [0.5]])
    steady_store = make_store(tmp_path / "store", [type(one)(steady, actions, one.rewards)])
    scale = fit_scales(steady_store.spec, steady_store.observations, steady_store.actions)
    assert np.allclose(scale["mean"], [1, 5]) and np.allclose(
        scale["deviation"], [(2 / 3) ** 0.5, 1]
    )
    assert scale["low"].tolist() == [-1] and scale["high"].tolist() == [1]


def test_a_few_extreme_actions_can_be_left_outside_the_range(store):
    actions = np.append(np.arange(100), 10_000.0)[:, None]
    scale = fit_scales(store.spec, store.observations, actions, action_clip_quantile=0.05)
    assert scale["low"].tolist() == [5] and scale["high"].tolist() == [95]
    for share, message in (
        (0.5, "expected a share from 0"),
        (0.4, "expected actions that differ, at action_clip_quantile=0.4"),
    ):
        with pytest.raises(ValueError, match=message):
            fit_scales(
                store.spec,
                store.observations,
                np.append(np.zeros(99), 1.0)[:, None],
                action_clip_quantile=share,
            )


def test_an_actors_mean_by_hand():
    numbers = {
        "mean": [1],
        "deviation": [2],
        "low": [2],
        "high": [12],
        "0.weight": [[1], [-1]],
        "0.bias": [0, 0],
        "1.weight": [[1, 3]],
        "1.bias": [-1],
    }
    weights = {name: torch.tensor(x, dtype=torch.float32) for name, x in numbers.items()}
    # 5 -> 2 -> (2, 0) -> 2 - 1; -1 -> -1 -> (0, 1) -> 3 - 1
    assert np.allclose(
        actor_mean(weights, np.array([[5.0], [-1.0]])), [[7 + 5 * np.tanh(1)], [7 + 5 * np.tanh(2)]]
    )


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_finds_the_better_actions(algorithm, tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    seen = rng.normal(size=(500, 1, 2)).astype(np.float32)
    done = rng.uniform(-1, 1, (500, 1, 1)).astype(np.float32)
    log = [
        Episode(o, a, 10 * a[:, 0], terminated=True, truncated=False)
        for o, a in zip(seen, done, strict=True)
    ]
    monkeypatch.setattr(
        "decisionllm.commands.baseline.prepare_store",
        lambda *_: make_store(tmp_path / "store", log),
    )
    rates = ("+options.actor_learning_rate=3e-3", "+options.critic_learning_rate=3e-3")
    run = trained(tmp_path / "run", f"algorithm={algorithm}", "steps=100", "log.every=40", *rates)
    policy = loading.load(run)
    written = (run / "losses.jsonl").read_text(encoding="utf-8").splitlines()
    assert policy.act(seen[:, 0]).mean() > 0.3  # those of the log are 0 on average
    assert [json.loads(line)["step"] for line in written] == [40, 80, 100]
    assert policy.info["versions"]["d3rlpy"]


def test_a_run_is_evaluated_beside_others_and_without_the_library(tmp_path, monkeypatch):
    run = trained(tmp_path / "iql", "steps=2")
    assert command("train", *LOOP, *NANO, f"run={tmp_path}/nano", f"cache_dir={tmp_path}/data") == 0
    monkeypatch.setitem(sys.modules, "d3rlpy", None)
    words = ("episodes=5", "act.decode=sample", "baselines=false")
    assert command("evaluate", f"run=[{run},{tmp_path}/nano]", *words) == 0
    row, other = (
        json.loads(line)
        for line in (tmp_path / "results.jsonl").read_text(encoding="utf-8").splitlines()
    )
    assert row.keys() == other.keys() and (row["decode"], other["decode"]) == ("mode", "sample")
    assert (row["policy"], row["seed"], row["target_return"], row["headline"], row["n"]) == (
        "iql",
        7,
        None,
        True,
        5,
    )
    assert (
        row["fingerprint"]
        == json.loads((run / "run.json").read_text(encoding="utf-8"))["fingerprint"]
    )
    assert (tmp_path / "report.html").is_file()
    quick = ("estimators=[fqe]", "+options.fqe.steps=2", "held_out=0.5", "picture=false")
    assert command("compare", f"run=[{run},{tmp_path}/nano]", *quick) == 0
    comparison = json.loads((tmp_path / "compare.json").read_text(encoding="utf-8"))
    assert {row["policy"] for row in comparison["rows"]} == {"iql", "nano"}


def test_the_same_seed_trains_the_same_actor(tmp_path):
    runs = {
        name: trained(tmp_path / name, "steps=3", seed)
        for name, seed in (("a", "seed=1"), ("b", "seed=1"), ("c", "seed=2"))
    }
    a, b, c = (load_file(run / "checkpoint" / "model.safetensors") for run in runs.values())
    assert all(torch.equal(a[name], b[name]) for name in a) and not torch.equal(
        a["0.weight"], c["0.weight"]
    )


def test_options_reach_d3rlpy_and_fraction_the_data(tmp_path, capsys):
    run = trained(
        tmp_path / "run", "steps=1", "+options.gamma=0.5", "data.fraction=0.5", "name=mine"
    )
    assert yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))["options"] == {
        "gamma": 0.5
    }
    assert "30 episodes" in capsys.readouterr().out


def test_a_run_is_only_replaced_with_fresh(run, capsys):
    assert command("baseline", *SYNTHETIC, "steps=1", f"run={run}") == 1
    assert "holds a run: choose another run=..., or fresh=true" in capsys.readouterr().err
    trained(run, "steps=1", "fresh=true")


def test_what_needs_a_model_refuses_a_baseline(run):
    with pytest.raises(
        ValueError, match=f"run={run}: expected a run of `decisionllm train`, got a baseline"
    ):
        loading.load_policy(run)


def test_a_place_that_cannot_be_written_is_known_before_the_data_are_read(tmp_path, capsys):
    (tmp_path / "file").touch()
    place = (f"run={tmp_path}/file/run", f"cache_dir={tmp_path}/cache")
    assert command("baseline", "dataset=synthetic", *place) == 1
    assert "could not be written" in capsys.readouterr().err
    assert not (tmp_path / "cache").exists()


def test_a_damaged_actor_is_refused(run):
    damage(run / "checkpoint" / "model.safetensors")
    with pytest.raises(
        ValueError, match=r"model.safetensors is damaged .*not those that were written"
    ):
        loading.load(run)


def test_a_run_without_weights_says_so(run):
    (run / "checkpoint" / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="damaged or missing"):
        loading.load(run)
    shutil.rmtree(run / "checkpoint")
    with pytest.raises(FileNotFoundError, match="expected a run with a checkpoint, found none"):
        loading.load(run)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["algorithm=sac"], "algorithm: expected one of awac, cql, iql, rebrac, td3bc, got 'sac'"),
        (["text=goal"], "text: expected one of auto, got 'goal'"),
        (["time_limits=maybe"], "time_limits: expected one of bootstrap, terminal, got 'maybe'"),
        (["steps=0"], "steps: expected more than 0, got 0"),
        (
            ["+options.gama=1"],
            "options: IQLConfig.__init__() got an unexpected keyword argument 'gama'",
        ),
        (
            ["dataset=synthetic-discrete"],
            "synthetic: a baseline needs continuous actions, these are one of 5",
        ),
        (
            ["algorithm=td3bc", "+options.critic_learning_rate=1e30", "steps=9"],
            "losses are not finite",
        ),
    ],
)
def test_wrong_options_fail_in_one_line(words, message, tmp_path, capsys):
    assert command("baseline", *SYNTHETIC, "steps=1", f"run={tmp_path}/run", *words) == 1
    printed = capsys.readouterr().err
    assert message in printed and printed.count("\n") == 1
    assert not checkpoint.find(tmp_path / "run")


def test_without_the_library_one_line_says_what_to_install(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "d3rlpy", None)
    assert command("baseline", *SYNTHETIC, f"run={tmp_path}/run") == 1
    printed = capsys.readouterr().err
    assert "pip install -e '.[baselines]'" in printed and printed.count("\n") == 1
