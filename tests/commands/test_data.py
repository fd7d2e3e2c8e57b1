"""The command `data`: a card whose every number is worked by hand, a window as the model reads it,
and exports.
"""

import os
import subprocess
import sys

import gymnasium
import minari
import numpy as np
import pytest
from gymnasium.envs.registration import EnvSpec

from decisionllm.commands.data import card, data, format_values, window_lines
from decisionllm.datasets.action_spaces import action_spec
from decisionllm.datasets.arrays import from_episodes
from decisionllm.datasets.store import open_store
from decisionllm.datasets.store_writer import write_store
from decisionllm.eval.gymnasium import make
from decisionllm.eval.rollout import rollout
from decisionllm.protocols import Source
from decisionllm.registry import build, choice
from decisionllm.schema import Episode, Spec
from decisionllm.worlds.maze2d.dataset import load, name_in, read_hdf5
from tests.conftest import PATIENCE, command, episode, make_store, node


def lines(store, **options):
    """The card as {first word: rest of the line}."""
    title, *rest = card(store, **options)
    return {"title": title} | {
        line.split()[0]: line.strip().partition(" ")[2].strip() for line in rest
    }


def test_a_card_by_hand(tmp_path):
    ended = {"terminated": True, "truncated": False, "task": "Go."}
    store = make_store(
        tmp_path / "s",
        [episode([1, 2, 3]), episode([4], start=100, **ended), episode([0], start=-100, **ended)],
    )
    lines_by_name = lines(store)
    assert (
        lines_by_name["title"] == "test"
        and lines_by_name["path"] == str(store.path)
        and lines_by_name["fingerprint"] == store.fingerprint
    )
    assert lines_by_name["episodes"] == "3 in 1 groups, 5 steps"
    assert lines_by_name["length"] == "mean 1.7, 1 .. 3, horizon 50"
    assert lines_by_name["ended"] == "66.7 % terminated, 33.3 % truncated"
    assert (
        lines_by_name["return"]
        == "0 %: 0.00, 10 %: 0.80, 50 %: 4.00, 90 %: 5.60, 99 %: 5.96, 100 %: 6.00"
    )
    assert lines_by_name["reward"] == "mean 2.0000, 80.0 % of steps not 0"
    assert lines_by_name["observation"] == "2 numbers, mean [0.6, 0.6], deviation [63.25, 63.25]", (
        "of 0, 1, 2, 100 and -100"
    )
    assert (
        lines_by_name["action"]
        == "1 numbers within [-1.0] .. [1.0], seen [-1.0] .. [1.0], 40.0 % at a bound"
    )
    assert lines_by_name["text"] == "2 different, 0 .. 2 tokens; of episode 0: ''"
    assert "next" not in lines_by_name


def test_a_card_shows_the_returns_of_the_next_steps(tmp_path):
    store = make_store(
        tmp_path / "s", [episode([1, 2, 3]), episode([4], terminated=True, truncated=False)]
    )
    rest = lines(store, return_horizon=2)["next"]
    assert rest.split(maxsplit=1) == [
        "2",
        "0 %: 3.00, 10 %: 3.20, 50 %: 4.00, 90 %: 4.80, 99 %: 4.98, 100 %: 5.00",
    ], "of 3, 5 and 4"
    with pytest.raises(
        ValueError,
        match="model.return_horizon: expected episodes of at least 9 steps, the longest has 3",
    ):
        list(card(make_store(tmp_path / "s", [episode([1, 2, 3])]), return_horizon=9))


def test_a_card_counts_discrete_actions(tmp_path):
    actions = np.array([[0], [2], [2]], np.float32)
    spec = Spec(observation_dim=1, action_dim=1, horizon=3, num_actions=4)
    store = write_store(
        tmp_path / "s",
        Source(
            spec,
            [Episode(actions, actions, actions[:, 0])],
            {"name": "test", "seed": 7, "cut": "run"},
        ),
    )
    assert (
        lines(store)["action"] == "one of 4, taken [1, 0, 2, 0]"
        and lines(store)["options"] == "seed=7, cut=run"
    )


def test_the_mean_of_millions_of_steps_is_exact(tmp_path):
    n = 2_000_000
    seen = np.full((n, 2), 16.3, np.float32)
    spec = Spec(observation_dim=2, action_dim=1, horizon=n, low=(-1.0,), high=(1.0,))
    store = write_store(
        tmp_path / "s",
        Source(
            spec,
            [Episode(seen, np.zeros((n, 1), np.float32), np.zeros(n, np.float32))],
            {"name": "test"},
        ),
    )
    assert lines(store)["observation"] == "2 numbers, mean [16.3, 16.3], deviation [0.0, 0.0]"


def test_of_a_wide_observation_the_first_numbers_are_printed():
    assert format_values(np.arange(26.0), ".1f")[22:] == ["22.0", "23.0", "... 2 more"]
    assert format_values(np.arange(24.0))[23:] == ["23.0"]


def test_a_window_by_hand(tmp_path):
    store = make_store(
        tmp_path / "s", [episode([4.5], start=50, task="Walk to the goal in the north.")]
    )
    head, shown, step, rest = window_lines(store, 3)
    pieces = shown.removeprefix("  text ").split("|")
    assert "".join(pieces) == "Walk to the goal in the north." and len(pieces) > 1
    assert (
        head == f"one window of 3 steps: {len(pieces)} text tokens, then 1 steps of the trajectory "
        "(R return-to-go, o observation, a action; raw units)"
    )
    assert step.split() == ["t=0", "R", "4.50", "o", "50.000", "50.000", "a", "0.500"]
    assert rest == "  2 steps of padding, masked"


def test_a_window_begins_at_any_step(tmp_path):
    store = make_store(tmp_path / "s", [episode([1, 2, 3])])
    heads = set()
    for seed in range(20):
        head, shown, *steps = window_lines(store, 3, seed=seed)
        start = int(steps[0].split()[0].removeprefix("t="))
        expected = [
            ["t=0", "R", "6.00"],
            ["t=1", "R", "5.00"],
            ["t=2", "R", "3.00"],
            [str(start), "steps", "of"],
        ][start:]
        assert [step.split()[:3] for step in steps] == expected[: 3 if start == 0 else 4]
        assert (
            shown == "  no text"
            and head
            == f"one window of 3 steps: 0 text tokens, then {3 - start} steps of the trajectory "
            "(R return-to-go, o observation, a action; raw units)"
        )
        heads.add(head)
    assert len(heads) == 3


def config(tmp_path, dataset, **changed):
    return {
        "dataset": dataset,
        "cache_dir": str(tmp_path / "home"),
        "model": {"return_horizon": 0},
        "window": 4,
        "seed": 0,
        "export": "",
    } | changed


def test_the_command_prints_what_the_functions_say(tmp_path, capsys):
    store = data(
        config(
            tmp_path,
            node("dataset", "synthetic", episodes=6, text="goal"),
            model={"return_horizon": 3},
        )
    )
    printed = capsys.readouterr().out.splitlines()
    assert printed == [*card(store, return_horizon=3), *window_lines(store, 4, return_horizon=3)]
    assert open_store(store.path).fingerprint == store.fingerprint


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"window": -1}, "window: expected more than 0, got -1"),
        ({"model": {"return_horizon": -3}}, "model.return_horizon: expected 0 or more, got -3"),
    ],
)
def test_the_command_has_the_rules_of_training(tmp_path, changed, message):
    with pytest.raises(ValueError, match=message):
        data(config(tmp_path, node("dataset", "synthetic", episodes=6), **changed))


def test_the_command_exports_to_minari(tmp_path, capsys):
    store = data(
        config(tmp_path, node("dataset", "synthetic", episodes=6), export="minari:mine/points-v0")
    )
    assert (
        capsys.readouterr().out.splitlines()[-1]
        == f"written: minari:mine/points-v0, 6 episodes, {store.lengths.sum()} steps"
    )
    dataset = minari.load_dataset("mine/points-v0")
    assert [len(e) for e in dataset] == store.lengths.tolist()
    back = data(config(tmp_path, node("dataset", "minari", minari_id="mine/points-v0")))
    assert (
        back.rewards.tolist() == store.rewards.tolist()
        and back.observations.tolist() == store.observations.tolist()
    )


def test_an_exported_maze_can_be_scored(tmp_path):
    env = node("env", "maze2d-umaze", text="none", frames=0)
    store = data(
        config(
            tmp_path,
            node("dataset", "maze2d-umaze", steps=1000),
            env=env,
            export="minari:mine/maze-v0",
        )
    )
    back = data(config(tmp_path, node("dataset", "minari", minari_id="mine/maze-v0")))
    first = store.offsets[1:-1]  # in a continuous log an episode ends where the next one begins
    np.testing.assert_allclose(back.final_observation[:-1], store.observations[first], atol=1e-5)
    recovered = build(choice("env", "minari", minari_id="mine/maze-v0", goal="fixed"), 2)
    own = build(env, 2)
    assert recovered.horizon == 300 and recovered.reference == own.reference == (23.85, 161.86)
    recovered.envs[1].reset(seed=3_000_001)
    starts = np.stack([recovered.envs[1].unwrapped.env.states[0], *recovered.reset(3)[1:]])
    np.testing.assert_allclose(starts[1], starts[0], atol=1e-6)
    own.reset(0)
    own.states = np.stack([each.unwrapped.env.states[0] for each in recovered.envs])
    for got, expected in zip(
        recovered.step(np.ones((2, 2))), own.step(np.ones((2, 2))), strict=True
    ):
        np.testing.assert_allclose(got, expected, atol=1e-6)


def test_an_export_without_its_environment_says_how(tmp_path):
    points = node("dataset", "synthetic", episodes=6)
    with pytest.raises(
        ValueError,
        match="export=minari: the environment could not be made .*env=none exports without one",
    ):
        data(
            config(
                tmp_path,
                points,
                env=node("env", "synthetic", goal="up"),
                export="minari:mine/points-v0",
            )
        )


def test_the_command_exports_to_d4rls_format(tmp_path, capsys):
    path = tmp_path / "log.hdf5"
    store = data(
        config(tmp_path, node("dataset", "maze2d-umaze", steps=1000), export=f"hdf5:{path}")
    )
    assert (
        capsys.readouterr().out.splitlines()[-1]
        == f"written: hdf5:{path}, {len(store.lengths)} episodes, 1,000 steps"
    )
    (log,) = read_hdf5(path)
    assert name_in(path) == store.info["name"] and log["rewards"].tolist() == store.rewards.tolist()
    with pytest.raises(ValueError, match="export=hdf5: expected a Maze2D dataset"):
        data(
            config(
                tmp_path,
                node("dataset", "synthetic", episodes=6),
                export=f"hdf5:{tmp_path / 'other.hdf5'}",
            )
        )
    assert not (tmp_path / "other.hdf5").exists()


@pytest.mark.parametrize("export", ["csv:x", "minari", "hdf5:", ":x", "log.hdf5"])
def test_an_unknown_export_is_refused_at_once(tmp_path, export):
    with pytest.raises(
        ValueError,
        match=(
            "export: expected one of hdf5:TARGET, minari:TARGET, replay:TARGET, team:TARGET, "
            "trajectories:TARGET, got"
        ),
    ):
        data(config(tmp_path, node("dataset", "synthetic", episodes=6), export=export))
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("kind", ["hdf5", "team", "trajectories", "replay"])
def test_an_export_that_cannot_be_written_is_known_before_the_data_are_made(kind, tmp_path, capsys):
    (tmp_path / "file").touch()
    words = ("dataset=synthetic", f"cache_dir={tmp_path}/cache", f"export={kind}:{tmp_path}/file/x")
    assert command("data", *words) == 1
    assert f"choose another export={kind}:..." in capsys.readouterr().err
    assert not (tmp_path / "cache").exists()


def test_a_card_and_a_window_of_paraphrased_texts(tmp_path):
    source = load(
        maze="umaze", text="paraphrased", source="regenerate", steps=2000, without_goals="1,1; 3,1"
    )
    store = write_store(tmp_path / "s", source)
    assert len(store.tasks) == 5 == len(store.info["wordings"]) and not any(
        "row 1, column 1 " in task for task in store.tasks
    )
    assert "wordings" not in lines(store)["options"] and "5 different" in lines(store)["text"]
    shown = {list(window_lines(store, 2, seed=seed))[1].replace("|", "") for seed in range(9)}
    assert len(shown) > 5, "of more wordings than goals"


def test_the_printed_window_has_as_many_wordings_as_the_option_says(tmp_path):
    maze = {"source": "regenerate", "steps": 2000, "text": "paraphrased"}
    with pytest.raises(ValueError, match="text_wordings=1000: .* trained frames fit the facts"):
        data(config(tmp_path, node("dataset", "maze2d-umaze", **maze), text_wordings=1000))


def record(tmp_path, monkeypatch, world, **options):
    """Its id, the config node of four random episodes in a world of tests/eval/test_gymnasium.py,
    and of the environment.
    """
    name = f"{world}-v0"
    spec = EnvSpec(name, f"tests.eval.test_gymnasium:{world}", max_episode_steps=3, kwargs=options)
    monkeypatch.setitem(gymnasium.registry, name, spec)
    env = make(4, id=name)
    log = rollout(env.baselines(0)["random"], env, seed=0)
    facts = Spec(observation_dim=log[0].observations.shape[1], **action_spec(env.space), horizon=3)
    dataset = from_episodes(
        log, tmp_path / world, name=world, spec=facts, observation_parts=env.observation_parts
    )
    return dataset, choice("env", "gymnasium", id=name)


@pytest.mark.parametrize(
    ("world", "options"),
    [
        ("Reach", {}),
        ("Buttons", {}),
        ("Counter", {}),
        ("Counter", {"square": True}),
        ("Bounded", {}),
    ],
)
def test_an_export_has_the_spaces_of_its_environment(tmp_path, monkeypatch, capsys, world, options):
    dataset, env = record(tmp_path, monkeypatch, world, **options)
    store = data(config(tmp_path, dataset, env=env, export="minari:mine/world-v0"))
    written = minari.load_dataset("mine/world-v0")
    world = written.recover_environment()
    assert (
        written.observation_space == world.observation_space
        and written.action_space == world.action_space
    )
    steps = 0
    for logged in written:
        seen = [pick(logged.observations, t) for t in range(len(logged) + 1)]
        assert all(one in world.observation_space for one in seen) and all(
            one in world.action_space for one in logged.actions
        )
        steps += len(logged)
    assert steps == store.offsets[-1] > 4
    back = data(config(tmp_path, node("dataset", "minari", minari_id="mine/world-v0")))
    for name in ("observations", "actions", "rewards", "final_observation", "terminated"):
        np.testing.assert_array_equal(vars(back)[name], vars(store)[name], err_msg=name)
    assert back.info["observation_parts"] == store.info["observation_parts"]
    assert "names no environment" not in capsys.readouterr().out


def pick(values, t):
    """Observation t of an episode."""
    return (
        {key: pick(part, t) for key, part in values.items()}
        if isinstance(values, dict)
        else values[t]
    )


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"observations": 10.0}, "an observation is not in Dict"),
        ({"actions": 0.25}, "trained on continuous actions, the environment has 4 discrete ones"),
        (
            {"parts": [("pos", 2), ("goal", 1)]},
            "laid out as pos 2, goal 1, the environment's as goal 1, pos 2",
        ),
    ],
)
def test_an_export_that_does_not_fit_names_no_environment(
    tmp_path, monkeypatch, capsys, changed, why
):
    _, env = record(tmp_path, monkeypatch, "Reach")
    rows = np.full((2, 3), changed.get("observations", 1.0), np.float32)
    actions = np.full((2, 1), changed.get("actions", 0), np.float32)
    space = {"low": (0.0,), "high": (0.5,)} if "actions" in changed else {"num_actions": 4}
    spec = Spec(observation_dim=3, action_dim=1, horizon=3, **space)
    log = [Episode(rows, actions, np.ones(2, np.float32))]
    dataset = from_episodes(
        log, tmp_path / "log", name="log", spec=spec, observation_parts=changed.get("parts", ())
    )
    data(config(tmp_path, dataset, env=env | {"reference": [0, 1]}, export="minari:mine/world-v0"))
    (note,) = [
        line for line in capsys.readouterr().out.splitlines() if "names no environment" in line
    ]
    assert why in note
    written = minari.load_dataset("mine/world-v0")
    assert written.observation_space.shape == (3,) and "env_spec" not in written.storage.metadata
    assert written.storage.metadata["ref_max_score"] == 1


ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.slow
def test_a_card_of_letters_that_the_terminal_lacks_is_printed(tmp_path):
    task = "Fahre nach Köln."
    path = make_store(tmp_path / "store", [episode([1.0, 0.0], task=task) for _ in range(4)]).path
    words = ["data", "dataset=store", f"dataset.path={path}"]
    done = subprocess.run(
        [sys.executable, "-m", "decisionllm", *words],
        env=os.environ | ASCII,
        capture_output=True,
        encoding="ascii",
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    assert r"Fahre nach K\xf6ln." in done.stdout
    code = f"from decisionllm.datasets.store import open_store; print(ascii(open_store({str(path)!r}).tasks))"
    read = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | ASCII,
        capture_output=True,
        encoding="ascii",
        timeout=PATIENCE,
    )
    assert ascii(task) in read.stdout, read.stderr
