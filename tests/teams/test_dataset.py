"""A log of many agents becomes episodes: teams that vary, agents that leave, rewards after an exit,
and every bad row by name.
"""

import json
from dataclasses import replace

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Sequence, Text, Tuple

from decisionllm.commands.data import data
from decisionllm.datasets import sampling, windows
from decisionllm.datasets.store_cache import prepare_store
from decisionllm.datasets.store_writer import write_store
from decisionllm.teams import dataset as team
from decisionllm.teams.dataset import Log, collect, load, read, source
from decisionllm.teams.entity_layout import build_entity_schema, to_entity_layout
from decisionllm.teams.formats.team_log import concat_logs
from tests.conftest import near, node

META = {
    "name": "toy",
    "horizon": 9,
    "task": "Hold the bridge.",
    "reward_rule": "one for each step that it stands.",
    "types": {"guard": {"num_actions": 3, "role": "You carry a shield"}},
}


def blocks(n):
    """Of a team of n: two numbers of one's own, then two of each other agent."""
    return [["own", 2, 1], ["mate", 2, n - 1]]


def toy(sizes=(3, 4, 5), steps=6, *, gone=(), busy=(), **meta):
    """Worlds of `sizes` agents, with team rewards 1, 2, 3, ... gone: (group, agent, first step
    away, its end or None). busy: keys.

    An observation is of the numbers of (group, step, agent), so that each row is known; actions
    count up.
    """
    rng, keys, seen = np.random.default_rng(0), [], []
    for g, n in enumerate(sizes):
        for t in range(steps):
            for i in range(n):
                if not any(g == h and i == j and a <= t < (b or steps) for h, j, a, b in gone):
                    keys.append((g, t, i))
                    seen.append(np.append([10 * g + t, i], rng.normal(size=2 * (n - 1))))
    order = rng.permutation(len(keys))  # rows come in any order
    keys, seen = np.array(keys)[order], [seen[k] for k in order]
    last = {(g, i): a - 1 for g, i, a, b in gone if b is None}
    agents = dict(zip(("group", "step", "agent"), keys.T, strict=True)) | {
        "observation": np.concatenate(seen).astype(np.float32),
        "observation_offsets": np.cumsum([0, *map(len, seen)]),
        "action": keys.sum(1) % 3,
        "available": np.ones((len(keys), 3), bool),
        "reward": keys[:, 2].astype(np.float32),
        "loss_mask": np.array([tuple(key) not in busy for key in keys.tolist()]),
        "terminated": np.array([last.get((g, i)) == t for g, t, i in keys.tolist()]),
    }
    group, step = (x.ravel() for x in np.meshgrid(range(len(sizes)), range(steps), indexing="ij"))
    clock = {
        "group": group,
        "step": step,
        "reward": step + 1.0,
        "terminated": np.zeros(len(step), bool),
        "truncated": step == steps - 1,
    }
    observed = {str(2 * n): blocks(n) for n in sorted(set(sizes))}
    types = {"guard": META["types"]["guard"] | {"observations": observed}}
    return Log(META | {"types": types} | meta, clock, agents)


def changed(log, table, row, **values):
    """The same log, but for this row of a table, given by its key."""
    columns = {name: column.copy() for name, column in getattr(log, table).items()}
    names = ("group", "step", "agent")[: len(row)]
    at = np.flatnonzero(
        np.all([columns[name] == k for name, k in zip(names, row, strict=True)], axis=0)
    )
    for name, value in values.items():
        columns[name][at] = value
    return replace(log, **{table: columns}), f"row {at[0] + 1} "


def without(log, table, row):
    columns = getattr(log, table)
    names = ("group", "step", "agent")[: len(row)]
    keep = ~np.all([columns[name] == k for name, k in zip(names, row, strict=True)], axis=0)
    return replace(log, **{table: {name: column[keep] for name, column in columns.items()}})


def even(log):
    """The same with observations in one matrix, for worlds of one size."""
    agents = {name: column for name, column in log.agents.items() if name != "observation_offsets"}
    return replace(
        log,
        agents=agents
        | {"observation": log.agents["observation"].reshape(len(agents["group"]), -1)},
    )


def test_one_batch_holds_groups_of_3_4_and_5_agents(tmp_path):
    store = write_store(tmp_path / "s", source(toy()))
    assert store.group.tolist() == [0] * 3 + [1] * 4 + [2] * 5 and store.agent.tolist() == [
        0,
        1,
        2,
        0,
        1,
        2,
        3,
        0,
        1,
        2,
        3,
        4,
    ]
    assert (
        store.spec.entity_schema == (("own", 2, 1), ("mate", 3, 6))
        and store.spec.observation_dim == 2 + 6 * 3
    )
    for e in range(12):
        g, i = store.group[e], store.agent[e]
        episode = store.episode(e)
        np.testing.assert_array_equal(
            episode.observations[:, :2], [[10 * g + t, i] for t in range(6)]
        )
        assert (episode.observations[:, 2::3] == (np.arange(6) < (3, 4, 5)[g] - 1)).all()  # present
        np.testing.assert_array_equal(episode.actions[:, 0], (g + np.arange(6) + i) % 3)
    window = sampling.Sampler(windows.load_steps(store), np.arange(12), T=4, batch_size=64, seed=0)(
        0
    )
    assert set(store.group[window.episodes]) == {0, 1, 2} and window.observations.shape == (
        64,
        4,
        20,
    )


def test_rewards_after_a_death_are_part_of_every_return_to_go(tmp_path):
    """Agent 1 of world 0 dies in its step 1: it got 1 + 2 of 21, and all of 21 is its return."""
    store = write_store(tmp_path / "s", source(toy((2, 2), gone=[(0, 1, 2, None)])))
    assert store.lengths.tolist() == [6, 2, 6, 6] and store.return_after_exit.tolist() == [
        0,
        18,
        0,
        0,
    ]
    assert store.returns.tolist() == [21] * 4 and store.rewards[6:8].tolist() == [1, 2]
    assert store.terminated.tolist() == [
        False,
        True,
        False,
        False,
    ] and store.truncated.tolist() == [True, False, True, True]
    steps = windows.load_steps(store)
    assert steps.returns_to_go[6:8].tolist() == [21, 20]


def test_a_huge_reward_of_one_world_leaves_the_others_exact(tmp_path):
    log = toy((2, 2), gone=[(0, 1, 2, None), (1, 1, 2, None)])
    log, _ = changed(log, "steps", (0, 0), reward=-1e17)
    store = write_store(tmp_path / "s", source(log))
    assert store.return_after_exit.tolist() == [0, 18, 0, 18]


def test_a_team_return_is_that_of_the_world_whichever_agent_dies(tmp_path):
    rng = np.random.default_rng(1)
    gone = [
        (g, i, int(rng.integers(1, 6)), None)
        for g in range(20)
        for i in range(3)
        if rng.random() < 0.7
    ]
    log = toy((4,) * 20, gone=gone)
    paid = rng.normal(size=len(log.steps["step"])).astype(np.float32)
    log = replace(log, steps=log.steps | {"reward": paid})
    store = write_store(tmp_path / "s", source(log))
    world = paid.reshape(20, 6).sum(1, dtype=np.float64)
    near(store.returns, world[store.group], 1e-6)
    living = np.add.reduceat(store.rewards, store.offsets[:-1])
    # without what came later, it would not be
    assert np.abs(living - world[store.group]).max() > 0.5


def test_the_dead_have_no_row_and_the_busy_are_no_targets(tmp_path):
    store = write_store(
        tmp_path / "s", source(toy((3,), gone=[(0, 2, 4, None)], busy=[(0, 1, 0), (0, 2, 0)]))
    )
    assert store.lengths.tolist() == [6, 6, 4]
    assert (
        store.loss_mask[:6].tolist() == [True, False, False, True, True, True]
        and store.loss_mask[6:].all()
    )
    window = windows.cut_windows(windows.load_steps(store), np.array([0, 2]), np.array([0, 0]), 6)
    assert window.loss_mask.tolist() == [
        [True, False, False, True, True, True],
        [True] * 4 + [False] * 2,
    ]
    # the busy one is still observed
    assert window.mask.tolist() == [[True] * 6, [True] * 4 + [False] * 2]


def test_an_agent_that_comes_late_or_back_has_an_episode_a_stay(tmp_path):
    store = write_store(tmp_path / "s", source(toy((2,), gone=[(0, 0, 0, 1), (0, 1, 2, 4)])))
    assert (
        store.agent.tolist() == [0, 1, 1]
        and store.start.tolist() == [1, 0, 4]
        and store.lengths.tolist() == [5, 2, 2]
    )
    assert store.return_after_exit.tolist() == [0, 3 + 4 + 5 + 6, 0] and store.returns.tolist() == [
        20,
        21,
        11,
    ]
    assert not store.terminated.any()  # it left, or the clock ran out


def test_an_action_that_was_not_recorded_is_no_target(tmp_path):
    log, _ = changed(toy((2,)), "agents", (0, 3, 1), action=-1, available=[False, True, True])
    agents = {name: column for name, column in log.agents.items() if name != "loss_mask"}
    store = write_store(tmp_path / "s", source(replace(log, agents=agents)))
    # stored as the first that was allowed
    assert np.flatnonzero(~store.loss_mask).tolist() == [9] and store.actions[9] == 1
    none, _ = changed(log, "agents", (0, 3, 1), available=False, loss_mask=False)
    # without a choice, nothing is forbidden
    assert write_store(tmp_path / "t", source(none)).action_masks is None


def test_individual_rewards_are_own_or_the_mean_of_the_team(tmp_path):
    log = toy((3,), gone=[(0, 2, 1, None)])  # agent i is paid i a step
    own = write_store(tmp_path / "own", source(log, returns="own"))
    assert own.returns.tolist() == [0, 6, 2] and own.return_after_exit.tolist() == [0, 0, 0]
    mean = write_store(tmp_path / "mean", source(log, returns="mean"))
    np.testing.assert_allclose(mean.returns, (0 + 6 + 2) / 3, rtol=1e-6)
    lacking = replace(
        log, steps={name: column for name, column in log.steps.items() if name != "reward"}
    )
    assert source(lacking).info["returns"] == "own"
    with pytest.raises(
        ValueError,
        match="log, steps: expected a column reward, which dataset.returns=team needs, got none",
    ):
        source(lacking, returns="team")


def test_the_other_team_is_part_of_the_world(tmp_path):
    log = toy((4,))
    side = log.agents["agent"] // 2
    both = {name: np.concatenate([column, column]) for name, column in log.steps.items()} | {
        "team": np.repeat([0, 1], 6)
    }
    both["reward"] = np.concatenate([log.steps["reward"], -log.steps["reward"]])
    log = replace(log, agents=log.agents | {"team": side}, steps=both)
    mine, theirs = (write_store(tmp_path / str(team), source(log, team=team)) for team in (0, 1))
    assert mine.agent.tolist() == [0, 1] and mine.returns.tolist() == [21, 21]
    assert theirs.agent.tolist() == [2, 3] and theirs.returns.tolist() == [-21, -21]
    with pytest.raises(
        ValueError, match=r"dataset.team: expected one of \[0, 1\], the teams of log, got 2"
    ):
        source(log, team=2)
    early = replace(log, steps={name: column[np.arange(12) != 11] for name, column in both.items()})
    early.steps["truncated"][10] = True
    with pytest.raises(
        ValueError,
        match=r"row 11 \(group 0, step 4, team 1\): expected the world to end for all of its teams",
    ):
        source(early)


def test_observations_are_put_into_the_slots_of_their_kind():
    raw = np.array([[1, 2, 3, 4, 0, 0, 9, 5], [1, 2, 0, 0, 5, 6, 9, 5]], np.float32)
    parts = [["own", 2, 1], ["tree", 2, 2], ["", 1, 1], ["own", 1, 1]]
    shape = (("own", 4, 1), ("tree", 3, 3))
    np.testing.assert_array_equal(
        to_entity_layout(raw, parts, shape),
        [[1, 2, 5, 0, 1, 3, 4, 0, 0, 0, 0, 0, 0], [1, 2, 5, 0, 0, 0, 0, 1, 5, 6, 0, 0, 0]],
    )
    # any number of axes
    np.testing.assert_array_equal(
        to_entity_layout(raw[:, None], parts, shape)[:, 0], to_entity_layout(raw, parts, shape)
    )
    typed = to_entity_layout(raw[:, :7], parts[:3], shape, agent_type=np.array([1, 0]), types=2)
    np.testing.assert_array_equal(typed[:, :4], [[1, 2, 0, 1], [1, 2, 1, 0]])


def test_an_entity_schema_has_the_capacity_or_more_if_observed():
    types = {
        "a": {"observations": {"8": [["own", 2, 1], ["tree", 2, 3]]}},
        "b": {"observations": {"7": [["own", 5, 1], ["rock", 1, 2]]}},
    }
    assert build_entity_schema({"types": types}, 2) == (
        ("own", 7, 1),
        ("tree", 3, 3),
        ("rock", 2, 2),
    )
    assert build_entity_schema({"types": {"a": types["a"]}}, 6) == (("own", 2, 1), ("tree", 3, 6))
    for args, message in (
        (
            [["own", 2, 1], ["rock", 2, 2]],
            "type c: expected rock entities of 1 numbers as elsewhere, got 2",
        ),
        ([["own", 2, 1]], "type c: expected blocks of 6 numbers in all, as observed, got"),
    ):
        with pytest.raises(ValueError, match=message):
            build_entity_schema({"types": types | {"c": {"observations": {"6": args}}}}, 2)


def test_types_of_different_sizes_and_actions_share_a_model(tmp_path):
    log = toy((2, 3))
    types = {"guard": META["types"]["guard"], "scout": {"num_actions": 2, "role": "You are fast"}}
    scout = log.agents["group"] == 1
    agents = log.agents | {"agent_type": scout.astype(np.int8), "action": log.agents["action"] % 2}
    store = write_store(
        tmp_path / "s",
        source(replace(log, meta=log.meta | {"types": types}, agents=agents), text="informative"),
    )
    assert store.spec.entity_schema == (("own", 8, 1),)  # six numbers at most, and which type it is
    first, last = store.episode(0), store.episode(4)
    np.testing.assert_array_equal(first.observations[:, 6:], [[1, 0]] * 6)
    np.testing.assert_array_equal(last.observations[:, 6:], [[0, 1]] * 6)
    assert (first.observations[:, 4:6] == 0).all() and (last.observations[:, 4:6] != 0).all()
    assert first.action_masks.all() and last.action_masks[0].tolist() == [True, True, False]
    assert "Role: You carry a shield." in first.task and "Role: You are fast." in last.task


def test_each_text_option_makes_its_text(tmp_path):
    texts = {text: [e.task for e in source(toy((2, 3)), text=text).episodes] for text in team.TEXTS}
    assert texts["none"] == [""] * 5
    common = "Hold the bridge. At most 9 steps. Reward: one for each step that it stands."
    assert texts["constant"] == [f"toy. {common}"] * 5
    assert texts["informative"] == [
        f"toy. A team of {n}. {common} Role: You carry a shield." for n in (2, 2, 3, 3, 3)
    ]
    assert texts["shuffled"] != texts["informative"] and sorted(texts["shuffled"]) == sorted(
        texts["informative"]
    )
    with pytest.raises(
        ValueError,
        match=(
            "dataset.text: expected one of none, constant, informative, paraphrased, shuffled, "
            "got 'goal'"
        ),
    ):
        source(toy((2,)), text="goal")


def test_a_log_comes_back_from_parquet_as_it_was(tmp_path):
    from pyarrow import parquet

    log = toy(gone=[(1, 2, 3, None)], busy=[(0, 1, 1)], behaviours=["calm", "wild"], note="ünïcode")
    log, _ = changed(log, "agents", (0, 1, 1), action=-1, reward=np.nan)
    log = replace(
        log,
        agents=log.agents
        | {"agent_type": 0 * log.agents["agent"], "behaviour": log.agents["group"] % 2},
        steps=log.steps | {"state": np.arange(36.0).reshape(18, 2), "won": log.steps["step"] == 5},
    )
    team.write(tmp_path / "log", log)
    again = read(tmp_path / "log")
    nulls = parquet.read_table(tmp_path / "log/agents.parquet")
    assert [nulls[name].null_count for name in ("action", "reward", "step")] == [1, 1, 0]
    assert again.meta == {"format": 1} | json.loads(json.dumps(log.meta))
    order = np.lexsort([log.agents[name] for name in ("agent", "step", "group")])
    assert again.agents.keys() == log.agents.keys() and again.steps.keys() == log.steps.keys()
    for name, column in log.agents.items():
        if not name.startswith("observation"):
            np.testing.assert_array_equal(again.agents[name], column[order], err_msg=name)
    parts = np.split(log.agents["observation"], log.agents["observation_offsets"][1:-1])
    np.testing.assert_array_equal(
        again.agents["observation"], np.concatenate([parts[k] for k in order])
    )
    for name, column in log.steps.items():
        np.testing.assert_array_equal(again.steps[name], column, err_msg=name)
    before, after = (
        write_store(tmp_path / name, source(each)) for name, each in (("a", log), ("b", again))
    )
    assert before.fingerprint == after.fingerprint


def test_a_log_is_written_part_by_part_in_groups_of_rows(tmp_path, monkeypatch):
    from pyarrow import parquet

    monkeypatch.setattr("decisionllm.teams.formats.team_parquet.ROWS", 10)
    parts = [toy((2,)), toy((2, 2))]
    parts[1].agents["group"] += 1
    parts[1].steps["group"] += 1
    team.write(tmp_path / "log", (part for part in parts))
    file = parquet.ParquetFile(tmp_path / "log/agents.parquet").metadata
    assert [file.row_group(k).num_rows for k in range(file.num_row_groups)] == [10, 2, 10, 10, 4]
    assert {file.row_group(k).column(0).compression for k in range(5)} == {"ZSTD"}
    assert write_store(tmp_path / "s", load(path=str(tmp_path / "log"))).group.tolist() == [
        0,
        0,
        1,
        1,
        2,
        2,
    ]
    with pytest.raises(FileExistsError, match="log: is there already"):
        team.write(tmp_path / "log", parts)


def test_parts_with_observations_of_several_sizes_are_joined(tmp_path):
    parts = [toy((2, 3)), toy((3, 2))]
    for columns in (parts[1].agents, parts[1].steps):
        columns["group"] += 2
    one = write_store(tmp_path / "one", source(concat_logs(parts)))
    assert one.fingerprint == write_store(tmp_path / "several", source(lambda: parts)).fingerprint


def test_a_log_that_could_not_be_written_leaves_nothing(tmp_path):
    with pytest.raises(RuntimeError):
        team.write(
            tmp_path / "log",
            (
                toy((2,)) if k == 0 else (_ for _ in ()).throw(RuntimeError) and None
                for k in range(2)
            ),
        )
    assert not list(tmp_path.iterdir())


def test_continuous_actions_come_back_and_unrecorded_ones_are_masked(tmp_path):
    log = toy((2,))
    values = np.random.default_rng(0).uniform(-1, 1, (12, 2)).astype(np.float32)
    values[3] = np.nan
    log = continuous(log, values)
    team.write(tmp_path / "log", log)
    store = write_store(tmp_path / "s", load(path=str(tmp_path / "log")))
    order = np.lexsort([log.agents[name] for name in ("step", "agent", "group")])
    np.testing.assert_array_equal(store.actions, np.nan_to_num(values)[order])
    assert (
        (store.loss_mask == (order != 3)).all()
        and store.spec.high == (1, 1)
        and store.spec.num_actions == 0
    )
    assert store.spec.entity_schema == (("own", 4, 1),)


def continuous(log, values):
    """The same log with `action_values` in place of its discrete actions."""
    discrete = ("action", "available", "loss_mask")
    agents = {name: column for name, column in log.agents.items() if name not in discrete}
    types = {"guard": {"low": [-1, -1], "high": [1, 1]}}
    return replace(log, meta=log.meta | {"types": types}, agents=agents | {"action_values": values})


@pytest.mark.parametrize("bad", [[0.5], [0.5, None], [np.nan, 0.5], [np.inf, 0.5]])
def test_a_continuous_action_is_there_as_a_whole_or_not_at_all(tmp_path, bad):
    import pyarrow as pa
    from pyarrow import parquet

    team.write(tmp_path / "log", continuous(toy((2,)), np.zeros((12, 2))))
    file = tmp_path / "log/agents.parquet"
    table = parquet.read_table(file)
    at = table.column_names.index("action_values")

    def args(*values):
        lists = [*values, *[[0.5, 0.2]] * (12 - len(values))]
        column = pa.array(lists, pa.list_(pa.float32()))
        parquet.write_table(table.set_column(at, "action_values", column), file)
        return load(path=str(tmp_path / "log"))

    store = write_store(tmp_path / "s", args(None, [], [np.nan, np.nan]))
    # rows of a file are sorted by step, then by agent
    assert np.flatnonzero(~store.loss_mask).tolist() == [0, 1, 6]
    expected = r"agents, row 1 \(group 0, step 0, agent 0\): action_values: expected finite numbers"
    with pytest.raises(ValueError, match=expected):
        args(bad)


@pytest.mark.parametrize("width", [1, 3])
def test_a_continuous_action_has_as_many_numbers_as_its_bounds(width):
    expected = (
        f"agents, action_values: expected 2 numbers, as low and high in meta have, got {width}"
    )
    with pytest.raises(ValueError, match=expected):
        source(continuous(toy((2,)), np.zeros((12, width))))


BAD = {
    "an agent that is not in steps": (
        "agents",
        (1, 5, 3),
        {"step": 6},
        "expected a row of this group, step and team in the table of steps, got none",
    ),
    "a world that is not in steps": (
        "agents",
        (1, 5, 3),
        {"group": 7},
        "expected a row of this group, step and team in the table of steps, got none",
    ),
    "a mask that forbids everything": (
        "agents",
        (0, 2, 1),
        {"available": False},
        "available: expected an action that is allowed, got a mask that forbids every",
    ),
    "a mask that forbids the action": (
        "agents",
        (0, 2, 1),
        {"available": [True, True, True], "action": 0, "agent": 1},
        None,
    ),
    "the same key twice": (
        "agents",
        (0, 2, 1),
        {"agent": 0},
        "expected one row for each group, step and agent, got a second one",
    ),
    "the same step twice": (
        "steps",
        (0, 2),
        {"step": 1},
        "expected one row for each group, step and team, got a second one",
    ),
    "a step that is missing": (
        "steps",
        (0, 2),
        {"group": 9, "step": 0, "truncated": True},
        "expected the steps of a world to count from 0 without a gap",
    ),
    "an end before the end": (
        "steps",
        (1, 2),
        {"terminated": True},
        "expected the world's last step, since it ended here, got another one",
    ),
    "a world that does not end": (
        "steps",
        (2, 5),
        {"truncated": False},
        "expected terminated or truncated on a world's last step; if the log was cut",
    ),
    "a row after a death": (
        "agents",
        (2, 2, 4),
        {"terminated": True},
        "terminated: expected no row of this agent in the next step, got one",
    ),
    "an action out of range": (
        "agents",
        (2, 2, 4),
        {"action": 3},
        "action: expected an index below 3, or -1 where no action was recorded, got 3",
    ),
    "an action below -1": (
        "agents",
        (2, 2, 4),
        {"action": -7},
        "action: expected an index below 3, or -1 where no action was recorded, got -7",
    ),
    "no action though it is a target": (
        "agents",
        (2, 2, 4),
        {"action": -1},
        "action: expected an action, since loss_mask is true, got -1",
    ),
    "a reward that is no number": (
        "steps",
        (2, 2),
        {"reward": np.nan},
        "reward: expected a finite number, got nan",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_a_row_that_cannot_be_is_refused_by_file_row_and_key(tmp_path, what):
    table, key, values, message = BAD[what]
    if message is None:
        values = {"available": [True, True, True]}
        message = "available: forbids the recorded action"
        taken = (key[0] + key[1] + key[2]) % 3
        values["available"][taken] = False
    log, row = changed(toy(), table, key, **values)
    with pytest.raises(ValueError, match=message) as error:
        source(log)
    assert f"log, {table}, {row}" in str(error.value) or "second one" in message or "gap" in message
    team.write(tmp_path / "bad", log)
    with pytest.raises(ValueError, match=message) as error:
        load(path=str(tmp_path / "bad"))
    assert f"{tmp_path / 'bad'}, {table}, row " in str(error.value)


def test_more_agents_than_the_capacity_are_refused():
    with pytest.raises(
        ValueError,
        match=r"agents, row \d+ \(group 2, step 0, agent 0\): expected at most 4 agents in a team, got 5; raise dataset.capacity",
    ):
        source(toy(), capacity=4)


def test_a_world_longer_than_the_horizon_is_refused():
    with pytest.raises(
        ValueError,
        match=r"steps, row 6 \(group 0, step 5\): expected at most 5 steps \(the horizon\), got 6",
    ):
        source(toy((2,), horizon=5))


def test_observations_of_other_sizes_need_blocks_or_another_type():
    log = toy((2, 3))
    types = {"guard": META["types"]["guard"]}
    with pytest.raises(
        ValueError,
        match=r"\(group 1, step 0, agent 0\): observation: expected 4 numbers, got 6; say the blocks of each length of type guard",
    ):
        source(replace(log, meta=log.meta | {"types": types}))
    flat = source(even(replace(toy((3,)), meta=log.meta | {"types": types})))
    assert flat.spec.entity_schema == (("own", 6, 1),)
    broken = even(toy((3,)))
    broken.agents["observation"][7, 2] = np.inf
    with pytest.raises(
        ValueError,
        match=r"agents, row 8 \(group 0, step \d, agent \d\): observation: expected finite numbers, got \[.*inf",
    ):
        source(broken)


def test_columns_that_do_not_fit_are_refused_by_name():
    log = toy((2,))
    for table, columns, message in (
        (
            "steps",
            {"terminated": None},
            "log, steps: expected columns .*; lacking terminated, unknown none",
        ),
        (
            "agents",
            {"colour": log.agents["step"]},
            "log, agents: expected columns .*; lacking none, unknown colour",
        ),
        (
            "steps",
            {"truncated": 1 * log.steps["truncated"]},
            "log, steps, truncated: expected true and false, got int64",
        ),
        (
            "agents",
            {"action": log.agents["action"][1:]},
            "log, agents, action: expected 12 rows, got 11",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            replace(
                log,
                **{
                    table: {
                        k: v for k, v in (getattr(log, table) | columns).items() if v is not None
                    }
                },
            )
    for name, value in {"action": 1.5, "agent": 40_000, "group": np.nan, "agent_type": 3}.items():
        column = np.full(12, value)
        expected = f"log, agents, {name}, row 1: expected a whole number within .*, got {value}"
        with pytest.raises(ValueError, match=expected):
            replace(log, agents=log.agents | {name: column})
    many = log.meta | {"behaviours": [*map(str, range(200))]}
    with pytest.raises(ValueError, match=r"behaviour, row 1: .* within 0 .. 127, got 128"):
        replace(log, meta=many, agents=log.agents | {"behaviour": np.full(12, 128)})
    with pytest.raises(ValueError, match="expected meta to have types and horizon, got name"):
        replace(log, meta={"name": "x"})
    with pytest.raises(ValueError, match="agents, available: expected 3 actions, got 2"):
        source(replace(log, agents=log.agents | {"available": np.ones((12, 2), bool)}))


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ({"horizon": "5"}, "horizon: expected a whole number above 0, got '5'"),
        ({"horizon": None}, "horizon: expected a whole number above 0, got None"),
        ({"types": ["guard"]}, r"types: expected {NAME: DESCRIPTION}, got \['guard'\]"),
        ({"task": 5}, "task: expected text, got 5"),
    ],
)
def test_meta_of_other_types_is_refused_by_its_key(meta, message):
    with pytest.raises(ValueError, match=f"log, meta, {message}"):
        toy((2,), **meta)


@pytest.mark.parametrize(
    ("description", "message"),
    [
        (3, ": expected {KEY: VALUE}, got 3"),
        ({"num_actions": "3"}, ", num_actions: expected a whole number above 0, got '3'"),
        ({"num_actions": 3.0}, ", num_actions: expected a whole number above 0, got 3.0"),
        ({"num_actions": 0}, ", num_actions: expected a whole number above 0, got 0"),
        ({"low": -1, "high": 1}, r", low, high: expected \[NUMBER, ...\] each, of one length"),
        ({"low": [-1], "high": [1, 1]}, r", low, high: expected .* got \[-1\] and \[1, 1\]"),
        ({"low": [-1, "a"], "high": [1, 1]}, r", low, high: expected .* got \[-1, 'a'\] and"),
        ({"observations": [["own", 2, 1]]}, ", observations: expected {length: "),
        ({"observations": {"two": [["own", 2, 1]]}}, ", observations: expected .* got {'two': "),
        ({"observations": {"2": [["own", 2]]}}, ", observations: expected .* got {'2': "),
        ({"observations": {"2": [["own", "2", 1]]}}, ", observations: expected .* got {'2': "),
        ({"observations": {"2": [["own", -2, 1]]}}, ", observations: expected .* got {'2': "),
        ({"role": None}, ", role: expected text, got None"),
    ],
)
def test_a_type_of_agents_of_other_values_is_refused(description, message):
    with pytest.raises(ValueError, match=f"log, meta, type guard{message}"):
        toy((2,), types={"guard": description})


def test_a_table_without_rows_is_refused(tmp_path):
    for table in ("steps", "agents"):
        log = even(toy((2,)))
        nothing = {name: column[:0] for name, column in getattr(log, table).items()}
        with pytest.raises(ValueError, match=f"log, {table}: expected at least one row, got none"):
            replace(log, **{table: nothing})
    log = even(toy((2,)))
    blind = replace(log, agents=log.agents | {"observation": np.ones((12, 0))})
    with pytest.raises(ValueError, match="observation: expected at least one number, got none"):
        source(blind)


def test_a_damaged_file_is_refused_by_file_row_and_column(tmp_path):
    import pyarrow as pa
    from pyarrow import parquet

    log = even(toy((2,)))
    team.write(tmp_path / "log", log)
    file = tmp_path / "log/agents.parquet"
    table, whole = parquet.read_table(file), file.read_bytes()

    def refused(message):
        with pytest.raises(ValueError, match=message):
            read(tmp_path / "log")

    steps = table["step"].to_pylist()
    parquet.write_table(
        table.set_column(1, "step", pa.array([*steps[:4], None, *steps[5:]], pa.int32())), file
    )
    refused("agents.parquet, row 5, step: expected a number of int32, got none")
    parquet.write_table(table.set_column(1, "step", pa.array([2**40] * 12)), file)
    refused("agents.parquet, step: expected int32, got int64")
    parquet.write_table(
        table.append_column("agent_type", pa.array(["guard"] * 11 + ["thief"])), file
    )
    refused("agents.parquet, row 12, agent_type: expected one of guard, as meta.json says")
    at = table.column_names.index("observation")
    for column, got in (
        (pa.nulls(12), "null"),
        (pa.array([[("a", 1.0)]] * 12, pa.map_(pa.string(), pa.float64())), "map<"),
        (pa.array([[1.0]] * 12, pa.list_view(pa.float32())), "list_view<"),
    ):
        parquet.write_table(table.set_column(at, "observation", column), file)
        refused(f"agents.parquet, observation: expected lists of float, got {got}")
    file.write_bytes(whole[: len(whole) // 2])
    refused("agents.parquet: not a readable Parquet file, perhaps cut")
    (tmp_path / "log/meta.json").write_text('{"format": 2}', encoding="utf-8")
    refused("meta.json: expected format 1, got 2")
    (tmp_path / "log/meta.json").write_text("[]", encoding="utf-8")
    refused(r"meta.json: expected {KEY: VALUE}, got \[\]")
    (tmp_path / "log/meta.json").write_text("{", encoding="utf-8")
    refused("meta.json: expected JSON that describes a log")


def test_a_foreign_table_has_other_lists_and_further_columns(tmp_path):
    import pyarrow as pa
    from pyarrow import parquet

    log = toy((2, 2))
    team.write(tmp_path / "log", log)
    file = tmp_path / "log/agents.parquet"
    table = parquet.read_table(file)
    lists = {"observation": pa.list_(pa.float64()), "available": pa.list_(pa.bool_())}
    for name, kind in lists.items():
        table = table.set_column(table.column_names.index(name), name, table[name].cast(kind))
    parquet.write_table(
        table.append_column("colour", pa.array(["red"] * 24)).take(
            np.random.default_rng(0).permutation(24)
        ),
        file,
    )
    assert (
        write_store(tmp_path / "a", load(path=str(tmp_path / "log"))).fingerprint
        == write_store(tmp_path / "b", source(log)).fingerprint
    )


@pytest.mark.parametrize("start", [1.7e9, 0.0])
@pytest.mark.parametrize("sizes", [(2, 2), (2, 3)])
def test_numbers_of_a_foreign_table_that_float32_rounds_are_a_fault(start, sizes, tmp_path):
    import pyarrow as pa
    from pyarrow import parquet

    team.write(tmp_path / "log", toy(sizes))
    file = tmp_path / "log/agents.parquet"
    table = parquet.read_table(file)
    lists = table["observation"].to_pylist()
    timed = [[start + 30 * row, *numbers[1:]] for row, numbers in enumerate(lists)]
    place = table.column_names.index("observation")
    parquet.write_table(table.set_column(place, "observation", pa.array(timed)), file)
    store = write_store(tmp_path / "store", load(path=str(tmp_path / "log")))
    faults = store.info.get("faults", [])
    assert all(fault.startswith("observation [0]: rounded by up to") for fault in faults)
    assert len(faults) == (len(set(sizes)) if start else 0)  # one for each layout


def test_a_json_file_says_more_of_a_log(tmp_path):
    team.write(tmp_path / "log", toy((2,)))
    more = {"task": "Hold the gate.", "types": {"guard": {"role": "You stand still"}}}
    (tmp_path / "more.json").write_text(json.dumps(more), encoding="utf-8")
    actual = load(path=str(tmp_path / "log"), meta=str(tmp_path / "more.json"), text="informative")
    assert (
        "Hold the gate." in next(iter(actual.episodes)).task
        and "Role: You stand still." in next(iter(actual.episodes)).task
    )
    (tmp_path / "bom.json").write_text(json.dumps(more), encoding="utf-8-sig")
    again = load(path=str(tmp_path / "log"), meta=str(tmp_path / "bom.json"), text="informative")
    assert "Hold the gate." in next(iter(again.episodes)).task
    # what it does not say is as before
    assert actual.spec.entity_schema == (("own", 2, 1), ("mate", 3, 6))
    (tmp_path / "other.json").write_text('{"types": {"guard": 3}}', encoding="utf-8")
    (tmp_path / "latin.json").write_text('{"task": "Köln"}', encoding="latin-1")
    for file in ("none.json", "other.json", "latin.json"):
        with pytest.raises(ValueError, match="dataset.meta: expected a JSON file that describes"):
            load(path=str(tmp_path / "log"), meta=str(tmp_path / file))
    (tmp_path / "typo.json").write_text(
        '{"types": {"gaurd": {"role": "You stand still"}}}', encoding="utf-8"
    )
    with pytest.raises(ValueError, match="dataset.meta, types: expected one of guard, got 'gaurd'"):
        load(path=str(tmp_path / "log"), meta=str(tmp_path / "typo.json"))


def test_the_card_says_how_agents_come_go_and_repeat(tmp_path, capsys):
    log, _ = changed(
        toy((2, 3), gone=[(1, 2, 2, None)], busy=[(0, 0, 0)]),
        "agents",
        (0, 1, 0),
        available=[False, True, True],
    )
    team.write(tmp_path / "log", log)
    config = {
        "dataset": node("dataset", "team", path=str(tmp_path / "log")),
        "cache_dir": str(tmp_path),
        "model": {"return_horizon": 0},
        "window": 3,
        "seed": 0,
        "export": f"team:{tmp_path / 'copy'}",
    }
    data(config)
    said = " ".join(capsys.readouterr().out.split())
    assert "5 in 2 groups, 26 steps" in said
    assert "agents 2 in 83.3 %, 3 in 16.7 % of the 12 joint steps" in said
    assert "episodes 0.0 % begin late, 20.0 % have rewards after their end" in said
    # joint actions: world 0 has (t, t + 1) twice over; world 1 begins with threes, then (t + 1, t +
    # 2), as world 0 one step on
    assert "joint action 5 different, 83.3 % of steps repeat one" in said
    assert "joint both 12 different, 0.0 % of steps repeat one" in said
    assert (
        f"{100 / (3 * 26):.1f} % of actions are masked, {100 / 26:.1f} % of steps are no training "
        "targets" in said
    )
    assert read(tmp_path / "copy").meta == read(tmp_path / "log").meta


def test_a_log_that_was_written_again_is_read_again(tmp_path):
    team.write(tmp_path / "log", toy((2,)))
    dataset = node("dataset", "team", path=str(tmp_path / "log"))
    first = prepare_store(dataset, tmp_path)
    assert prepare_store(dataset, tmp_path).path == first.path
    meta = tmp_path / "log/meta.json"
    meta.write_text(meta.read_text(encoding="utf-8") + " ", encoding="utf-8")
    assert prepare_store(dataset, tmp_path).path != first.path


class Meadow:
    """A parallel world of PettingZoo's kind: two wolves and a sheep, which is caught in step 1; all
    is over in step 3.
    """

    possible_agents = ["wolf_0", "wolf_1", "sheep_0"]

    def __init__(self, *, masked=False, by_clock=True):
        self.masked, self.by_clock = masked, by_clock

    def action_space(self, agent):
        return Discrete(2 if agent == "sheep_0" else 4)

    def reset(self, seed=None):
        self.agents = list(self.possible_agents)
        self.step_now = 0
        self.seed = seed
        return self.seen(), {agent: {} for agent in self.agents}

    def seen(self):
        numbers = {
            agent: np.full((1, 2 + agent.startswith("wolf")), self.step_now + self.seed)
            for agent in self.agents
        }
        mask = {agent: np.arange(self.action_space(agent).n) != 1 for agent in self.agents}
        return {
            agent: {"observation": numbers[agent], "action_mask": mask[agent]}
            if self.masked
            else numbers[agent]
            for agent in self.agents
        }

    def step(self, actions):
        assert actions.keys() == set(self.agents)
        present, t = self.agents, self.step_now
        self.step_now += 1
        terminated = {
            agent: t == (1 if agent == "sheep_0" else 99 if self.by_clock else 3)
            for agent in present
        }
        truncated = dict.fromkeys(present, t == 3 and self.by_clock)
        self.agents = [agent for agent in present if not (terminated[agent] or truncated[agent])]
        return (
            self.seen(),
            {agent: 1.0 + t if agent == "wolf_0" else -1.0 for agent in present},
            terminated,
            truncated,
            dict.fromkeys(present, {}),
        )


@pytest.mark.parametrize("masked", [True, False])
def test_a_pettingzoo_world_is_played_into_a_log(tmp_path, masked):
    log = collect(
        Meadow(masked=masked),
        lambda observations, infos: dict.fromkeys(observations, 0),
        episodes=2,
        seed=5,
        teams={"wolf": 0, "sheep": 1},
        task="Catch the sheep.",
    )
    team.write(tmp_path / "log", log)
    store = write_store(
        tmp_path / "s", load(path=str(tmp_path / "log"), returns="team", text="informative")
    )
    assert (
        store.agent.tolist() == [0, 1, 0, 1]
        and store.lengths.tolist() == [4] * 4
        and store.truncated.all()
    )
    assert (
        store.returns.tolist() == [(1 + 2 + 3 + 4 - 4) / 2] * 4
        and store.spec.horizon == 4
        and store.spec.num_actions == 4
    )
    np.testing.assert_array_equal(store.observations[:4, :3], np.repeat([[5], [6], [7], [8]], 3, 1))
    assert (
        store.tasks[0].startswith("log.") is False
        and "Catch the sheep. At most 4 steps. Role: wolf." in store.tasks[0]
    )
    assert (store.action_masks is not None) == masked and (
        not masked or store.action_masks[0].tolist() == [True, False, True, True]
    )
    sheep = write_store(tmp_path / "t", load(path=str(tmp_path / "log"), team=1))
    assert (
        sheep.terminated.all()
        and sheep.lengths.tolist() == [2, 2]
        and sheep.returns.tolist() == [-2, -2]
    )
    assert sheep.return_after_exit.tolist() == [0, 0]


def test_a_world_that_is_played_ends_by_the_clock_or_by_itself():
    for by_clock in (True, False):
        log = collect(
            Meadow(by_clock=by_clock),
            lambda observations, infos: dict.fromkeys(observations, 0),
            episodes=1,
        )
        assert log.steps["truncated"].tolist() == [False, False, False, by_clock]
        assert log.steps["terminated"].tolist() == [False, False, False, not by_clock]


class Counting:
    """A parallel world of two steps. Every agent observes the step, in one array that the world
    writes anew, and is paid 1.
    """

    def __init__(self, spaces, *, seen=None):
        self.spaces = spaces
        self.possible_agents = list(spaces)
        self.seen = np.zeros(1, np.float32) if seen is None else seen

    def action_space(self, agent):
        return self.spaces[agent]

    def reset(self, seed=None):
        self.agents = self.possible_agents
        if isinstance(self.seen, np.ndarray):
            self.seen[:] = 0
        return dict.fromkeys(self.agents, self.seen), {}

    def step(self, actions):
        present = self.agents
        self.seen += 1
        if self.seen[0] == 2:
            self.agents = []
        over = dict.fromkeys(present, not self.agents)
        return (
            dict.fromkeys(present, self.seen),
            dict.fromkeys(present, 1.0),
            dict.fromkeys(present, False),
            over,
            {},
        )


def test_what_a_world_writes_anew_is_recorded_as_it_was():
    log = collect(
        Counting({"a_0": Discrete(2)}), lambda seen, infos: {"a_0": np.array([1])}, episodes=2
    )
    assert log.agents["observation"].tolist() == [0, 1, 0, 1]
    # an array of one number is an index, too
    assert log.agents["action"].tolist() == [1] * 4


@pytest.mark.parametrize(
    ("spaces", "message"),
    [
        (
            {"a_0": Discrete(3), "a_1": Discrete(5)},
            r"a_1: expected the actions of type a, {'num_actions': 3}, got {'num_actions': 5}",
        ),
        ({"a_0": Box(-1, 1, (2,)), "a_1": Box(-5, 5, (2,))}, r"a_1: expected .* got .*5.0"),
        ({"a_0": Box(-1, 1, (2,)), "a_1": Discrete(2)}, r"a_1: expected .* got {'num_actions': 2}"),
    ],
)
def test_agents_of_a_type_with_other_actions_are_refused(spaces, message):
    with pytest.raises(ValueError, match=message):
        collect(Counting(spaces), lambda seen, infos: {}, episodes=1)


@pytest.mark.parametrize(
    ("seen", "options", "message"),
    [
        (
            {"position": 1},
            {},
            "expected an observation to be numbers, or .* got a dict of position",
        ),
        (None, {"teams": {"aa": 1}}, "teams: expected one of a, got 'aa'"),
        (None, {"behaviours": 129}, "act: expected 1 to 128 behaviours, got 129"),
        (None, {"behaviours": 0}, "act: expected 1 to 128 behaviours, got 0"),
        (None, {"episodes": 0}, "episodes: expected 1 or more, got 0"),
    ],
)
def test_what_cannot_be_collected_is_refused_before_play(seen, options, message):
    act = lambda seen, infos: dict.fromkeys(seen, 0)  # noqa: E731
    acts = {str(k): act for k in range(options.pop("behaviours", 1))}
    with pytest.raises(ValueError, match=message):
        collect(Counting({"a_0": Discrete(2)}, seen=seen), acts, **{"episodes": 1} | options)


@pytest.mark.parametrize("action", [0, 3, 1.5, "left", np.eye(2)[0]], ids=str)
def test_an_action_that_is_not_in_its_space_is_refused_while_it_is_recorded(action):
    """0 would be -1, counted from 0, which is an action that was not recorded."""
    space = Discrete(2, start=1)
    with pytest.raises(
        ValueError, match=r"expected an action of a_0 in Discrete\(2, start=1\), got"
    ):
        collect(Counting({"a_0": space}), lambda seen, infos: {"a_0": action}, episodes=1)


class Pond:
    """Two frogs that observe `seen`, of `space`; `result` replaces parts of what a step returns.

    All is over after two steps; frog_1 is gone after the first.
    """

    possible_agents = ["frog_0", "frog_1"]

    def __init__(self, space, seen, **result):
        self.space, self.seen, self.result = space, seen, result

    def __str__(self):
        return "pond"

    def observation_space(self, agent):
        return self.space

    def action_space(self, agent):
        return Discrete(2)

    def reset(self, seed=None):
        self.agents = list(self.possible_agents)
        return dict.fromkeys(self.agents, self.seen), {}

    def step(self, actions):
        present = self.agents
        self.agents = [] if len(present) == 1 else ["frog_0"]
        ended = {agent: agent not in self.agents for agent in present}
        result = {
            "observations": dict.fromkeys(present, self.seen),
            "rewards": dict.fromkeys(present, 1.0),
            "terminated": ended,
            "truncated": dict.fromkeys(present, False),
            "infos": {},
        }
        return tuple((result | self.result).values())


def hop(observations, infos):
    return dict.fromkeys(observations, 0)


@pytest.mark.parametrize(
    ("space", "seen", "row"),
    [
        (Discrete(3), 2, [0, 0, 1]),
        (Discrete(3, start=5), np.int64(5), [1, 0, 0]),
        (MultiDiscrete([2, 3]), np.array([1, 0]), [0, 1, 1, 0, 0]),
        (MultiBinary(2), np.array([1, 0]), [1, 0]),
        (Tuple([Discrete(2), Box(0, 9, (1,))]), (1, np.array([7.0])), [0, 1, 7]),
        (Dict(b=Box(0, 9, ()), a=Discrete(2)), {"b": 7, "a": 0}, [1, 0, 7]),
        (
            Dict(observation=Dict(x=Discrete(2), z=Box(0, 9, (1,))), action_mask=MultiBinary(2)),
            {"observation": {"x": 1, "z": [3]}, "action_mask": [1, 0]},
            [0, 1, 3],
        ),
        (
            Dict(observation=Box(0, 9, (1,)), goal=Discrete(2), action_mask=MultiBinary(2)),
            {"observation": [3], "goal": 1, "action_mask": [1, 0]},
            [0, 1, 3],
        ),
    ],
)
def test_observations_of_a_pettingzoo_world_are_laid_out_as_those_of_gymnasium(space, seen, row):
    log = collect(Pond(space, seen), hop, episodes=1)
    assert log.agents["observation"].reshape(3, -1).tolist() == [row] * 3
    masked = isinstance(seen, dict) and "action_mask" in seen
    assert ("available" in log.agents) == masked
    assert not masked or log.agents["available"].tolist() == [[True, False]] * 3


TWO = Box(0, 9, (2,))


@pytest.mark.parametrize(
    ("space", "seen", "result", "message"),
    [
        (
            Dict(a=TWO, b=Text(9)),
            None,
            {},
            "env pond, frog_0 .expected observations without texts, .* got b; leave",
        ),
        (
            Dict(a=TWO, b=Sequence(TWO)),
            None,
            {},
            "env pond, frog_0 .observation space, part b: expected a Box, .* got Sequence",
        ),
        (TWO, np.zeros(3), {}, r"env pond, frog_0 .*shape \(2,\), got shape \(3,\)"),
        (TWO, [0, np.nan], {}, "env pond, frog_0 .*expected finite observations"),
        (TWO, {"x": 1, "y": 2}, {}, "env pond, frog_0 .*got a dict of x, y"),
        (Discrete(2), 2, {}, r"env pond, frog_0 .*value of Discrete\(2\), got 2"),
        (
            TWO,
            {"observation": [0, 0], "action_mask": [1, 1, 1]},
            {},
            r"env pond, frog_0 .*action_mask of shape \(2,\), got \(3,\)",
        ),
        (
            TWO,
            [0, 0],
            {"rewards": {"frog_0": 1.0}},
            "env pond: step failed .*expected a reward of frog_1, got those of frog_0",
        ),
        (
            TWO,
            [0, 0],
            {"terminated": {"frog_0": False}},
            "env pond: step failed .*expected a termination of frog_1",
        ),
        (TWO, [0, 0], {"observations": {}}, "step failed .*expected an observation of frog_0"),
        (
            TWO,
            [0, 0],
            {"rewards": dict.fromkeys(Pond.possible_agents, np.zeros(2))},
            "step failed .*frog_0 .*expected a reward of one finite number, got array",
        ),
        (
            TWO,
            [0, 0],
            {"truncated": dict.fromkeys(Pond.possible_agents, "no")},
            "step failed .*frog_0 .*truncation to be true or false, got 'no'",
        ),
        (TWO, [0, 0], {"rewards": 1.0}, "step failed .*expected a reward by agent, got float"),
    ],
)
def test_a_pettingzoo_world_unlike_its_interface_is_not_recorded(space, seen, result, message):
    with pytest.raises(ValueError, match=message):
        collect(Pond(space, seen, **result), hop, episodes=1)


def test_rewards_in_arrays_of_one_are_numbers(tmp_path):
    paid = dict.fromkeys(Pond.possible_agents, np.array([2.0]))
    log = collect(Pond(TWO, [0, 0], rewards=paid), hop, episodes=1)
    assert log.agents["reward"].tolist() == [2, 2, 2] and log.steps["reward"].tolist() == [2, 1]


@pytest.mark.parametrize("seed", [-1, 2_000_000_000, 2**40])
def test_a_seed_that_an_evaluation_may_have_is_refused(seed):
    with pytest.raises(ValueError, match=f"seed: expected 0 .. 1999999999, .* got {seed}"):
        collect(Pond(TWO, [0, 0]), hop, episodes=1, seed=seed)


@pytest.mark.parametrize(
    ("member", "value", "message"),
    [
        ("reset", lambda seed: {"frog_0": 0}, r"reset\(seed=0\) failed .*two values, got a dict"),
        ("reset", lambda: ({}, {}), r"reset\(seed=0\) failed .*unexpected keyword argument 'seed'"),
        ("step", lambda actions: ({}, {}, {}, {}), "step failed .*expected 5, got 4"),
        ("possible_agents", [0, 1], "expected names of agents as text, got 0"),
    ],
)
def test_a_pettingzoo_world_of_an_older_interface_is_refused(member, value, message):
    pond = Pond(TWO, [0, 0])
    setattr(pond, member, value)
    with pytest.raises(ValueError, match=f"env pond: {message}"):
        collect(pond, hop, episodes=1)


def test_an_agent_without_an_action_is_refused_by_its_name():
    with pytest.raises(ValueError, match="act: expected an action of frog_1, got those of frog_0"):
        collect(Pond(TWO, [0, 0]), lambda seen, infos: {"frog_0": 0}, episodes=1)


def test_types_with_other_kinds_of_actions_are_refused_before_play():
    spaces = {"cat_0": Discrete(2), "dog_0": Box(-1, 1, (2,))}
    with pytest.raises(
        ValueError, match="type dog: expected discrete actions of all types, or all"
    ):
        collect(Counting(spaces), lambda seen, infos: {}, episodes=1)


def test_an_aec_world_is_recorded_as_its_parallel_one(monkeypatch):
    from mpe2 import simple_spread_v3

    stay = lambda seen, infos: dict.fromkeys(seen, 0)  # noqa: E731
    options = {"N": 2, "max_cycles": 3}
    one = collect(simple_spread_v3.parallel_env(**options), stay, episodes=2)
    other = collect(simple_spread_v3.env(**options), stay, episodes=2)
    assert one.agents["observation"].tolist() == other.agents["observation"].tolist()
    assert one.agents["reward"].tolist() == other.agents["reward"].tolist()
    turns = simple_spread_v3.env(**options)
    monkeypatch.setitem(turns.unwrapped.metadata, "is_parallelizable", False)
    with pytest.raises(ValueError, match="expected a parallel environment, or an AEC environment"):
        collect(turns, stay, episodes=1)
