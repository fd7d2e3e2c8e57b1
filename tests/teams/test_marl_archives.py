"""Public logs of many agents: Vaults that flashbax wrote, OMAR's folders, PyMARL's files; each
against its source arrays.
"""

import json
import subprocess
import sys
import tarfile
import tracemalloc
from functools import reduce
from pathlib import Path

import h5py
import numpy as np
import pytest

from decisionllm.datasets.store_writer import write_store
from decisionllm.teams import dataset as team
from decisionllm.teams.formats import marl_archives
from decisionllm.teams.formats.log_meta import merge_meta
from decisionllm.teams.formats.team_log import Log
from tests.conftest import near

FIXTURE = Path(__file__).parents[1] / "fixtures/vaults/vaults.tar.gz"


@pytest.fixture(autouse=True, params=[1 << 22, 100], ids=["whole", "parts"])
def block(request, monkeypatch):
    """Every file is read as a whole, and in parts of a few steps."""
    for name in ("vault", "omar", "pymarl"):
        monkeypatch.setattr(f"decisionllm.teams.formats.{name}.BLOCK", request.param)
    return request.param


def joined(folder, kind="vault"):
    """The parts of a log as one."""
    parts = list(marl_archives.read_archive(folder, kind))
    meta = reduce(merge_meta, (part.meta for part in parts))
    tables = [[part.tables[table] for part in parts] for table in ("steps", "agents")]
    return Log(
        meta,
        *({name: np.concatenate([t[name] for t in each]) for name in each[0]} for each in tables),
    )


@pytest.fixture
def vaults(tmp_path):
    with tarfile.open(FIXTURE) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


def worlds(arrays):
    """The whole worlds of each row of B, worked out step by step: a list of {column: (n, ...)}."""
    over = (arrays["terminals"] != 0) | (arrays["truncations"] != 0)
    actual = []
    for b in range(len(over)):
        first = 0
        for t in range(over.shape[1]):
            if over[b, t].all():
                actual.append({name: column[b, first : t + 1] for name, column in arrays.items()})
                first = t + 1
    return actual


def test_a_public_vault_loads_with_equal_arrays_worlds_and_returns(vaults, tmp_path):
    expected = worlds(np.load(vaults / "units.npz"))
    log = joined(vaults / "toy.vlt/units")
    with pytest.raises(
        ValueError,
        match="returns=mean: expected a reward of each agent, got one for the whole team",
    ):
        team.load(path=str(vaults / "toy.vlt/units"), returns="mean")
    store = write_store(tmp_path / "store", team.source(log))
    assert len(expected) > 5 and np.unique(store.group).tolist() == list(range(len(expected)))
    for g, world in enumerate(expected):
        rows = log.agents["group"] == g
        keys = {
            (t, i) for t, i in zip(log.agents["step"][rows], log.agents["agent"][rows], strict=True)
        }
        selected = world["legals"].copy()
        selected[..., 0] = False
        last = [max(t for t in range(len(selected)) if selected[t, i].any()) for i in range(3)]
        # the dead have no row
        assert keys == {(t, i) for i in range(3) for t in range(last[i] + 1)}
        for row in np.flatnonzero(rows):
            t, i = log.agents["step"][row], log.agents["agent"][row]
            np.testing.assert_array_equal(
                log.agents["observation"][row], world["observations"][t, i]
            )
            np.testing.assert_array_equal(log.agents["available"][row], world["legals"][t, i])
            assert log.agents["action"][row] == world["actions"][t, i]
            # the busy have a row that is not to be imitated
            assert log.agents["loss_mask"][row] == selected[t, i].any()
        clock = log.steps["group"] == g
        np.testing.assert_array_equal(log.steps["reward"][clock], world["rewards"][:, 0])
        np.testing.assert_array_equal(log.steps["state"][clock], world["state"])
        assert log.steps["terminated"][clock][-1] == world["terminals"][-1].all()
        np.testing.assert_allclose(
            store.returns[store.group == g], world["rewards"][:, 0].sum(dtype=np.float64), atol=2e-6
        )


def test_a_world_of_a_vault_ends_when_all_of_its_agents_have(vaults):
    arrays = np.load(vaults / "points.npz")
    log = joined(vaults / "toy.vlt/points")
    expected = worlds(arrays)
    # a rule for one agent cuts more
    assert log.steps["group"].max() + 1 == len(expected) < (arrays["terminals"][0, :, 0]).sum()
    assert log.meta["repairs"] == {"worlds cut at the end": 1}
    for g, world in enumerate(expected):
        # the step in which each terminated
        own = [int(np.argmax(world["terminals"][:, i])) for i in range(3)]
        for i in range(3):
            rows = (log.agents["group"] == g) & (log.agents["agent"] == i)
            assert log.agents["step"][rows].tolist() == list(range(own[i] + 1))
            assert log.agents["terminated"][rows].tolist() == [
                t == own[i] < max(own) for t in range(own[i] + 1)
            ]
            np.testing.assert_array_equal(
                log.agents["action_values"][rows], world["actions"][: own[i] + 1, i]
            )
            np.testing.assert_array_equal(
                log.agents["reward"][rows], world["rewards"][: own[i] + 1, i]
            )
        near(log.steps["reward"][log.steps["group"] == g], world["rewards"].mean(1), 1e-6)
    assert "available" not in log.agents  # a mask says nothing of continuous actions


def test_rows_of_b_are_never_joined(vaults):
    """Each row of B of this Vault ends with a world that is cut; what follows it in memory is
    another seed.
    """
    arrays = np.load(vaults / "units.npz")
    over = (arrays["terminals"] | arrays["truncations"]).all(2)
    assert not over[:, -1].any()
    log = joined(vaults / "toy.vlt/units")
    assert len(log.steps["group"]) == sum(np.flatnonzero(row)[-1] + 1 for row in over)
    assert log.meta["repairs"] == {"worlds cut at the end": 2}


@pytest.mark.slow
@pytest.mark.parametrize("block", [1 << 22], indirect=True)  # another process has its own
def test_a_vault_needs_neither_jax_nor_flashbax(vaults):
    code = (
        "import sys; from pathlib import Path; from decisionllm.teams.formats import "
        "marl_archives; "
        f"list(marl_archives.read_archive(Path({str(vaults / 'toy.vlt/units')!r}), 'vault')); "
        f"sys.exit(bool({{'jax', 'flashbax'}} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_vault_that_was_cut_is_refused(vaults):
    folder = vaults / "toy.vlt/units"
    data = max((folder / "d").iterdir(), key=lambda file: file.stat().st_size)
    whole = data.read_bytes()
    data.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(
        ValueError, match=r"units: not a readable Vault, perhaps cut .*; fetch it again"
    ):
        joined(folder)
    data.unlink()
    with pytest.raises(
        ValueError, match=r"units: not a readable Vault, perhaps cut .*; fetch it again"
    ):
        joined(folder)


def test_a_vault_whose_index_runs_ahead_of_its_steps_is_refused(vaults):
    import tensorstore as ts

    folder = vaults / "toy.vlt/units"
    store = {"driver": "ocdbt", "base": f"file://{folder}/", "path": "vault_index/"}
    ts.open({"driver": "zarr", "kvstore": store}).result()[0].write(40).result()
    with pytest.raises(
        ValueError,
        match=r"units, row 0 of B, step 32: expected 40 steps \(vault_index\), got nothing from here",
    ):
        joined(folder)


def test_a_vault_in_which_the_end_of_an_agent_goes_away_is_refused(vaults):
    """Its worlds could not be told apart: the flag of the agent is next set in the world after."""
    import tensorstore as ts

    folder = vaults / "toy.vlt/points"
    ended = np.load(vaults / "points.npz")["terminals"][0] != 0
    goes_on = ended & ~ended.all(1)[:, None]
    step, agent = np.argwhere(goes_on)[0].tolist()
    store = {"driver": "ocdbt", "base": f"file://{folder}/", "path": "terminals./"}
    terminals = ts.open({"driver": "zarr", "kvstore": store}).result()
    terminals[0, step + 1, agent].write(False).result()
    with pytest.raises(
        ValueError,
        match=f"points, row 0 of B, step {step}, agent {agent}: expected its end to stay set until",
    ):
        joined(folder)


def test_a_vault_of_another_version_or_without_a_column_is_refused(vaults):
    folder = vaults / "toy.vlt/units"
    card = json.loads((folder / "metadata.json").read_text(encoding="utf-8"))
    (folder / "metadata.json").write_text(json.dumps(card | {"version": 2.0}), encoding="utf-8")
    with pytest.raises(ValueError, match="expected version 1 of the format, got 2.0"):
        joined(folder)
    for table in ("structure_shape", "structure_dtype"):
        del card[table]["rewards"]
    (folder / "metadata.json").write_text(json.dumps(card), encoding="utf-8")
    with pytest.raises(
        ValueError,
        match=(
            "expected a Vault's columns, rewards not among actions, infos, infos.legals, "
            "infos.state"
        ),
    ):
        joined(folder)


def omar(folder, steps=53, N=2):
    rng = np.random.default_rng(0)
    folder.mkdir()
    made = {
        f"{name}_{i}": rng.uniform(-1, 1, (steps, *shape))
        for i in range(N)
        for name, shape in (("obs", (6,)), ("acs", (2,)), ("rews", ()))
    }
    for name, column in made.items():
        np.save(folder / f"{name}.npy", column)
    return made


def test_an_omar_folder_is_cut_every_25_steps(tmp_path):
    made = omar(tmp_path / "seed_0_data")
    store = write_store(tmp_path / "store", team.load(path=str(tmp_path / "seed_0_data")))
    assert store.info["name"] == "team@seed_0_data" and store.info["repairs"] == {
        "steps cut at the end": 3
    }
    assert store.group.tolist() == [0, 0, 1, 1] and store.agent.tolist() == [0, 1, 0, 1]
    assert store.lengths.tolist() == [25] * 4 and store.truncated.all() and store.spec.horizon == 25
    paid = (made["rews_0"] + made["rews_1"]) / 2
    near(store.returns, np.repeat([paid[:25].sum(), paid[25:50].sum()], 2), 1e-6, scale=25)
    for e, (first, i) in enumerate([(0, 0), (0, 1), (25, 0), (25, 1)]):
        near(store.episode(e).observations, made[f"obs_{i}"][first : first + 25], 1e-6)
        near(store.episode(e).actions, made[f"acs_{i}"][first : first + 25], 1e-6)
    own = write_store(
        tmp_path / "own", team.load(path=str(tmp_path / "seed_0_data"), returns="own")
    )
    near(own.returns[1], made["rews_1"][:25].sum(), 1e-6, scale=25)


@pytest.mark.parametrize("name", ["obs", "acs", "rews"])
def test_an_omar_folder_that_lacks_an_array_is_refused(tmp_path, name):
    omar(tmp_path / "a")
    (tmp_path / f"a/{name}_1.npy").unlink()
    expected = "a: expected arrays obs_i, acs_i, rews_i of one shape for each agent i"
    with pytest.raises(ValueError, match=f"{expected} .*{name}_1.npy"):
        team.load(path=str(tmp_path / "a"))


@pytest.mark.parametrize("cut", [0, -5])
def test_worlds_of_omar_have_a_step_or_more(tmp_path, cut):
    omar(tmp_path / "a")
    with pytest.raises(ValueError, match=f"dataset.cut: expected 1 step or more, got {cut}"):
        team.load(path=str(tmp_path / "a"), cut=cut)


def test_an_omar_folder_of_too_few_steps_is_refused(tmp_path):
    omar(tmp_path / "short", steps=20)
    message = (
        "expected as many steps in each array and at least 25, got obs_0 20, obs_1 20, acs_0 20"
    )
    with pytest.raises(ValueError, match=message):
        team.load(path=str(tmp_path / "short"))


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.ones(75), "expected as many steps in each array .* rews_0 53, rews_1 75"),
        (np.ones(()), "expected as many steps in each array .* rews_0 53, rews_1 1"),
        (np.ones((53, 1)), r"rews_1: expected one number for each step, got the shape \(53, 1\)"),
        (np.full(53, "1"), "rews_1: expected numbers, got <U1"),
    ],
)
def test_an_array_of_omar_that_does_not_fit_the_others_is_refused(tmp_path, array, message):
    omar(tmp_path / "a")
    np.save(tmp_path / "a/rews_1.npy", array)
    with pytest.raises(ValueError, match=message):
        team.load(path=str(tmp_path / "a"))


def pymarl(file, lengths=(3, 5, 2), T=5, last=True, **changed):
    """Worlds padded as PyMARL does: T steps, and one more column for what was seen at the end.

    The one of 5 ran into the clock.
    """
    rng, E, N = np.random.default_rng(0), len(lengths), 2
    columns = {
        "obs": rng.normal(size=(E, T + 1, N, 4)).astype(np.float32),
        "actions": rng.integers(1, 3, (E, T + 1, N, 1)),
        "avail_actions": np.ones((E, T + 1, N, 3), np.int32),
        "reward": rng.normal(size=(E, T + 1, 1)).astype(np.float32),
        "terminated": np.zeros((E, T + 1, 1), np.uint8),
        "filled": np.zeros((E, T + 1, 1), np.int64),
    }
    for e, n in enumerate(lengths):
        columns["filled"][e, : n + 1] = 1
        columns["terminated"][e, n - 1] = n < T
    if not last:
        columns = {key: column[:, :T] for key, column in columns.items()}
    columns |= changed
    with h5py.File(file, "w") as target:
        for key, column in columns.items():
            if column is not None:
                target[key] = column
    return columns


def test_a_pymarl_file_keeps_the_steps_that_are_filled(tmp_path):
    made = pymarl(tmp_path / "3m.h5")
    store = write_store(tmp_path / "store", team.load(path=str(tmp_path / "3m.h5")))
    assert store.lengths.tolist() == [3, 3, 5, 5, 2, 2] and store.group.tolist() == [
        0,
        0,
        1,
        1,
        2,
        2,
    ]
    assert (
        store.terminated.tolist() == [True, True, False, False, True, True]
        and store.spec.horizon == 5
    ), "the longest world's"
    near(store.returns[::2], [made["reward"][e, :n].sum() for e, n in enumerate((3, 5, 2))], 1e-6)
    for e, (world, i, n) in enumerate(
        [(0, 0, 3), (0, 1, 3), (1, 0, 5), (1, 1, 5), (2, 0, 2), (2, 1, 2)]
    ):
        np.testing.assert_array_equal(store.episode(e).observations, made["obs"][world, :n, i])
        np.testing.assert_array_equal(store.episode(e).actions, made["actions"][world, :n, i])
        np.testing.assert_array_equal(store.episode(e).rewards, made["reward"][world, :n, 0])


def test_a_pymarl_file_without_a_final_column_keeps_its_last_step(tmp_path):
    pymarl(
        tmp_path / "a.h5",
        lengths=(3, 4),
        T=4,
        last=False,
        filled=np.array([[1, 1, 1, 0], [1, 1, 1, 1]])[..., None],
        terminated=np.array([[0, 0, 1, 0], [0, 0, 0, 1]])[..., None],
    )
    store = write_store(tmp_path / "store", team.load(path=str(tmp_path / "a.h5")))
    assert store.lengths.tolist() == [3, 3, 4, 4]


def test_a_pymarl_file_that_does_not_fit_is_refused(tmp_path):
    filled = np.array([[1, 0, 1, 1], [1, 1, 1, 1]])[..., None]
    for name, message, options in (
        (
            "gap",
            "gap.h5, world 0: expected filled steps from the first on without a gap",
            {"filled": filled},
        ),
        (
            "key",
            "expected PyMARL's keys, reward not among obs, actions, terminated, filled, "
            "avail_actions",
            {"reward": None},
        ),
        ("size", "expected as many worlds and steps under each key, got", {"filled": filled[:1]}),
    ):
        pymarl(tmp_path / f"{name}.h5", lengths=(3, 3), T=3, **options)
        with pytest.raises(ValueError, match=message):
            team.load(path=str(tmp_path / f"{name}.h5"))
    whole = (tmp_path / "gap.h5").read_bytes()
    (tmp_path / "cut.h5").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="cut.h5: not a readable HDF5 file, perhaps cut"):
        team.load(path=str(tmp_path / "cut.h5"))


@pytest.mark.parametrize(
    ("name", "column", "message"),
    [
        ("reward", np.ones((3, 6, 2)), "one number for each world and step, got the shape"),
        ("terminated", np.zeros((3, 6, 2)), "one number for each world and step, got the shape"),
        ("terminated", np.full((3, 6, 1), np.nan), "0 or 1, got nan in row 0"),
        ("filled", np.full((3, 6, 1), 0.5), "0 or 1, got 0.5 in row 0"),
        ("reward", np.full((3, 6, 1), b"1"), "numbers, got"),
        ("obs", np.ones((3, 6, 4)), r"\(worlds, steps, agents, numbers\), got the shape"),
        ("obs", np.ones((3, 6, 2, 5, 5)), r"\(worlds, steps, agents, numbers\), got the shape"),
        ("avail_actions", np.ones((3, 6, 1, 3)), r"\(worlds, steps, agents, numbers\), got"),
        ("actions", np.ones((3, 6, 3, 1), int), r"\(worlds, steps, agents\) or .*, got the shape"),
        ("actions", np.eye(3, dtype=int)[np.ones((3, 6, 2), int)], "one index .* got 3 numbers"),
        ("actions", np.full((3, 6, 2, 1), 0.5), "an index, since there are avail_actions, got 0.5"),
    ],
)
def test_a_column_of_pymarl_of_another_meaning_is_refused(tmp_path, name, column, message):
    pymarl(tmp_path / "a.h5", **{name: column})
    with pytest.raises(ValueError, match=f"a.h5, {name}: expected {message}"):
        team.load(path=str(tmp_path / "a.h5"))


def test_indices_that_pymarl_saved_as_floats_are_discrete_actions(tmp_path):
    whole = pymarl(tmp_path / "whole.h5")["actions"]
    pymarl(tmp_path / "float.h5", actions=whole.astype(np.float32))
    stores = [
        write_store(tmp_path / name, team.load(path=str(tmp_path / f"{name}.h5")))
        for name in ("whole", "float")
    ]
    assert stores[0].fingerprint == stores[1].fingerprint and stores[1].spec.num_actions == 3


def test_a_folder_of_several_logs_says_which_there_are(vaults):
    with pytest.raises(
        FileNotFoundError,
        match="expected an .h5 file or a folder with .*, got a folder of logs: choose points, units",
    ):
        team.load(path=str(vaults / "toy.vlt"))
    with pytest.raises(FileNotFoundError, match="got no such thing"):
        team.load(path=str(vaults / "no.vlt"))


def test_a_log_of_several_parts_is_read_twice(tmp_path, monkeypatch, block):
    calls, reader = [], marl_archives.read_omar
    monkeypatch.setattr(
        marl_archives,
        "read_omar",
        lambda *args, **options: calls.append(args) or reader(*args, **options),
    )
    omar(tmp_path / "log")
    assert len(list(team.load(path=str(tmp_path / "log")).episodes)) == 4 and len(calls) == (
        2 if block == 100 else 1
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["omar", "pymarl"])
def test_a_log_is_never_in_memory_as_a_whole(tmp_path, kind, block):
    peaks = []
    for worlds in (3, 6, 300):  # the first fills what the library keeps for the whole process
        path = tmp_path / f"{worlds}.h5"
        if kind == "omar":
            omar(path, steps=25 * worlds)
        else:
            pymarl(path, lengths=(20,) * worlds, T=20)
        tracemalloc.start()
        assert sum(1 for _ in team.load(path=str(path), text="informative").episodes) == 2 * worlds
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    size = sum(file.stat().st_size for file in (path.iterdir() if path.is_dir() else [path]))
    assert (peaks[2] - peaks[1] < size / 4) == (block == 100), "bytes, of fifty times the log"
