"""Public logs of many agents, as Logs of some whole worlds each: Vaults (OG-MARL), OMAR's folders
of .npy, PyMARL's padded .h5.

All three hold arrays of (steps, agents) for a fixed team and do not say which agents are alive. An
agent is gone, and has no row, after it terminated by itself, or when it has only action 0 from a
step on, which is what a dead unit of SMAC has. One that has only action 0 and later a choice again
is busy: its row is no training target. The reward of a team is the mean of its agents' rewards,
which most files repeat for each agent. Sources: flashbax `vault.py`, OMAR (arXiv 2111.11188),
PyMARL `episode_buffer.py`.
"""

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np

from decisionllm.datasets.row_blocks import Columns, ending, flags
from decisionllm.files import AGAIN, explained
from decisionllm.schema import Json, are_numbers, refuse
from decisionllm.teams.formats.team_log import Log

# Required and optional columns of each format
VAULT = ("observations", "actions", "rewards", "terminals", "truncations")
MORE_OF_VAULT = ("infos.legals", "infos.state")
PYMARL = ("obs", "actions", "reward", "terminated", "filled")
MORE_OF_PYMARL = ("avail_actions", "state")
BLOCK = 1 << 22  # numbers of the observations that are read at a time


@dataclass(frozen=True)
class Worlds:
    """Some whole worlds, s steps end to end, of a fixed team of N agents.

    Attributes:
        group: (s,) world, ascending without a gap.
        observations: (s, N, O).
        actions: (s, N) or (s, N, A).
        rewards: (s, N).
        terminals: (s, N) bool.
        available: (s, N, C).
        state: (s, ...).
    """

    group: np.ndarray
    observations: np.ndarray
    actions: np.ndarray
    rewards: np.ndarray
    terminals: np.ndarray
    available: np.ndarray | None = None
    state: np.ndarray | None = None


def logs(path: Path, kind: str, *, cut: int = 25) -> Iterator[Log]:
    """The parts of a public log, as they are read: Logs of some whole worlds each.

    The meta of each has the limits of its own worlds and the repairs of all that were read, see
    `team_log.common_meta`.

    Args:
        path: the folder or file.
        kind: see `kind_of`.
        cut: steps of a world in an OMAR log.
    """
    repairs = Counter[str]()
    if kind == "vault":
        parts = read_vault(path, repairs)
    elif kind == "omar":
        parts = read_omar(path, repairs, cut=cut)
    else:
        parts = read_pymarl(path, repairs)
    empty = True
    for worlds in parts:
        empty = False
        yield as_log(path, repairs, worlds)
    if empty:
        raise ValueError(f"{path}: expected a world that ended, got none")


def read_vault(folder: Path, repairs: Counter[str]) -> Iterator[Worlds]:
    """One Vault: a folder with `manifest.ocdbt`.

    Its rows of B are separate worlds; a world ends when all of its agents have ended, whose flags
    stay set until then. Only steps before `vault_index` count; the last world of each row of B is
    left out if it did not end.
    """
    with vault_errors(folder):
        names, length, files = open_vault(folder)
    lacking = ", ".join(name for name in VAULT if name not in names)
    if lacking:
        found = f"{lacking} not among {', '.join(sorted(names))}"
        raise ValueError(f"{folder}: expected a Vault's columns, {found}")
    count = 0  # worlds
    for lane in range(files["observations"].shape[0]):
        start = 0  # step of the lane at which the block begins
        for steps in ending(read_lane(folder, lane, length, files), ends_of_worlds):
            check_ends(folder, lane, start, steps)
            last = ends_of_worlds(steps)
            start += len(last)
            if not last.any():
                repairs["worlds cut at the end"] += 1
                continue
            yield Worlds(
                group=count + np.cumsum(last) - last,
                observations=steps["observations"],
                actions=steps["actions"],
                rewards=steps["rewards"],
                terminals=steps["terminals"],
                available=steps.get("infos.legals"),
                state=steps.get("infos.state"),
            )
            count += int(last.sum())


def vault_errors(folder: Path) -> AbstractContextManager[None]:
    """Explain an error of reading a Vault."""
    errors = (OSError, ValueError, KeyError, RuntimeError)
    return explained(f"{folder}: not a readable Vault, perhaps cut", *errors, remedy=AGAIN)


def ends_of_agents(steps: Columns) -> np.ndarray:
    """The steps of a Vault in which each agent has ended: (n, N) bool."""
    return np.asarray(steps["terminals"] | steps["truncations"])


def ends_of_worlds(steps: Columns) -> np.ndarray:
    """The steps of a Vault that end a world: (n,) bool."""
    return np.asarray(ends_of_agents(steps).all(1))


def check_ends(folder: Path, lane: int, start: int, steps: Columns) -> None:
    """Raise a ValueError if an agent that has ended is there again in the next step of its world.

    The end of such a world is in no single step, so it would be joined to the worlds after it.
    """
    ended = ends_of_agents(steps)
    last = ends_of_worlds(steps)
    again = ended[:-1] & ~ended[1:] & ~last[:-1, None]
    step, agent = np.indices(again.shape)
    wanted = (
        "expected its end to stay set until all agents have ended, got none in the next step; set "
        "terminals of an agent in every step of its world after its end"
    )
    place = f"{folder}, row {lane} of B, step "
    refuse(place, again, f"{{}}, agent {{}}: {wanted}", start + step, agent)


def read_lane(folder: Path, lane: int, length: int, files: Json) -> Iterator[Columns]:
    """The steps of a row of B of a Vault, in blocks. files: see `open_vault`."""
    _, _, *shape = files["observations"].shape
    size = max(BLOCK // int(np.prod(shape)), 1)
    for start in range(0, max(length, 1), size):
        end = min(start + size, length)
        with vault_errors(folder):
            columns = {name: x[lane, start:end].read().result() for name, x in files.items()}
        check_written(folder, lane, start, length, columns)
        for name in ("terminals", "truncations"):
            columns[name] = flags(f"{folder}, row {lane} of B, {name}", columns[name], start)
        yield columns


def open_vault(folder: Path) -> tuple[set[str], int, Json]:
    """Names of all columns, number of steps, and the columns that are read, (B, T, ...) each."""
    import tensorstore as ts  # pip install decisionllm[marl]

    def open_column(name: str) -> "ts.TensorStore":
        store = {"driver": "ocdbt", "base": f"file://{folder.resolve()}/", "path": f"{name}/"}
        return ts.open({"driver": "zarr", "kvstore": store}, read=True, open=True).result()

    card = json.loads((folder / "metadata.json").read_text(encoding="utf-8-sig"))
    if float(card["version"]) // 1 != 1:
        raise ValueError(f"expected version 1 of the format, got {card['version']}")
    shapes = card["structure_shape"]
    names = {*shapes, *(f"infos.{name}" for name in shapes.get("infos", ()))}
    length = int(open_column("vault_index").read().result()[0])
    read = [name for name in (*VAULT, *MORE_OF_VAULT) if name in names]
    return names, length, {name: open_column(f"{name}.") for name in read}


def check_written(
    folder: Path,
    lane: int,
    start: int,
    length: int,
    columns: Columns,
) -> None:
    """Raise a ValueError if a step of a block, from `start` on, holds zeros alone."""
    numbers = []
    for name in ("observations", "infos.legals"):
        if name in columns:
            numbers.append(columns[name].reshape(len(columns[name]), -1))
    blank = ~np.concatenate(numbers, 1).any(1)
    if length and not blank.any():
        return
    at = start + int(np.argmax(blank)) if length else 0
    why = f"got nothing from here; it was cut while it was written: {AGAIN}"
    where = f"{folder}, row {lane} of B, step {at}"
    raise ValueError(f"{where}: expected {length} steps (vault_index), {why}")


def read_omar(folder: Path, repairs: Counter[str], *, cut: int) -> Iterator[Worlds]:
    """One seed of OMAR: obs_0.npy, acs_0.npy, rews_0.npy and so on, in worlds of `cut` steps."""
    if cut < 1:
        raise ValueError(f"dataset.cut: expected 1 step or more, got {cut}")
    what = f"{folder}: expected arrays obs_i, acs_i, rews_i of one shape for each agent i"
    files: dict[str, list[np.ndarray]] = {"obs": [], "acs": [], "rews": []}  # an array an agent
    # A file that is not there must not make a smaller team.
    agents = range(max(len(list(folder.glob(f"{name}_*.npy"))) for name in files))
    with explained(what, OSError, ValueError, EOFError):
        for name, arrays in files.items():
            arrays += [np.load(folder / f"{name}_{i}.npy", mmap_mode="r") for i in agents]
    steps = equal_length(folder, files, cut)
    n = steps - steps % cut
    if steps > n:
        repairs["steps cut at the end"] = steps - n
    numbers = sum(array[0].size for array in files["obs"])  # in one step
    size = cut * max(BLOCK // (cut * numbers), 1)
    for start in range(0, n, size):
        rows = slice(start, min(start + size, n))
        blocks = []
        with explained(what, ValueError):
            for arrays in files.values():
                blocks.append(np.stack([array[rows] for array in arrays], 1))
        observations, actions, rewards = blocks
        yield Worlds(
            group=np.arange(start, start + len(rewards)) // cut,
            observations=observations,
            actions=actions,
            rewards=rewards,
            terminals=np.zeros(rewards.shape, bool),
        )


def equal_length(folder: Path, files: dict[str, list[np.ndarray]], cut: int) -> int:
    """The steps of each array of OMAR.

    Raises:
        ValueError: they differ or are fewer than `cut`, a step has several rewards, or an array
            holds no numbers.
    """
    sizes = {}
    for name, arrays in files.items():
        for i, array in enumerate(arrays):
            check_numbers(f"{folder}, {name}_{i}", array)
            sizes[f"{name}_{i}"] = len(np.atleast_1d(array))
    steps = sizes["obs_0"]
    if steps < cut or len(set(sizes.values())) > 1:
        got = ", ".join(f"{name} {size}" for name, size in sizes.items())
        wanted = f"as many steps in each array and at least {cut}"
        raise ValueError(f"{folder}: expected {wanted}, got {got}")
    for i, array in enumerate(files["rews"]):
        if array.ndim != 1:
            wanted = "one number for each step"
            got = f"the shape {array.shape}"
            raise ValueError(f"{folder}, rews_{i}: expected {wanted}, got {got}")
    return steps


def check_numbers(place: str, column: np.ndarray | h5py.Dataset) -> None:
    """Raise a ValueError for an array of texts or of Python objects."""
    if not are_numbers(column.dtype):
        raise ValueError(f"{place}: expected numbers, got {column.dtype}")


def read_pymarl(file: Path, repairs: Counter[str]) -> Iterator[Worlds]:
    """A PyMARL file: arrays of (worlds, time, agents, numbers); `filled` says which steps are real.

    As in PyMARL's learner, a world is over after its first `terminated`, and the last column, which
    has no action, is no step unless a world terminated there.
    """
    what = f"{file}: not a readable HDF5 file, perhaps cut"
    with explained(what, OSError, remedy=AGAIN), h5py.File(file) as source:
        names = [name for name in (*PYMARL, *MORE_OF_PYMARL) if name in source]
        columns = {name: source[name] for name in names}
        check_columns(file, columns)
        worlds, _, N, _ = columns["obs"].shape
        size = max(BLOCK // int(np.prod(columns["obs"].shape[1:])), 1)
        ended_late = columns["terminated"][:, -1].any()
        for start in range(0, worlds, size):
            block = {name: column[start : start + size] for name, column in columns.items()}
            for name in ("terminated", "filled"):
                block[name] = flags(f"{file}, {name}", block[name], start)
            real = real_steps(block, ended_late)
            check_filled(file, start, real)
            steps = {name: column[real] for name, column in block.items()}
            terminated = steps["terminated"].reshape(-1, 1)
            actions = steps["actions"]
            if "avail_actions" in steps:
                actions = indices(file, actions)
            yield Worlds(
                group=start + np.nonzero(real)[0],
                observations=steps["obs"],
                actions=actions,
                rewards=np.repeat(steps["reward"].reshape(-1, 1), N, 1),
                terminals=np.repeat(terminated, N, 1),
                available=steps.get("avail_actions"),
                state=steps.get("state"),
            )


def real_steps(block: Columns, ended_late: bool) -> np.ndarray:
    """The steps of a block of a PyMARL file that were played, (worlds, time) bool.

    Args:
        block: the columns of some worlds.
        ended_late: whether the last column of the file may be a step.
    """
    shape = block["obs"].shape[:2]
    over = block["terminated"].reshape(shape)
    real: np.ndarray = block["filled"].reshape(shape).copy()
    real &= over.cumsum(1) - over == 0
    real[:, -1] &= ended_late
    return real


def indices(file: Path, actions: np.ndarray) -> np.ndarray:
    """The actions of a PyMARL file beside `avail_actions`, which are discrete, as whole numbers.

    Some files hold them as floats.
    """
    whole = actions == np.rint(actions)
    wanted = "expected an index, since there are avail_actions"
    refuse(f"{file}, actions: ", ~whole, f"{wanted}, got {{}}", actions)
    return actions.astype(np.int64)


def check_columns(file: Path, columns: Json) -> None:
    """Raise a ValueError if a PyMARL file lacks a column, or if their shapes do not fit."""
    lacking = ", ".join(name for name in PYMARL if name not in columns)
    if lacking:
        found = f"{lacking} not among {', '.join(columns)}"
        raise ValueError(f"{file}: expected PyMARL's keys, {found}")
    sizes = {name: column.shape[:2] for name, column in columns.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"{file}: expected as many worlds and steps under each key, got {sizes}")
    agents = columns["obs"].shape[2:3]
    for name, column in columns.items():
        check_numbers(f"{file}, {name}", column)
        each = column.shape[2:]
        if name in ("obs", "avail_actions"):
            wanted = "(worlds, steps, agents, numbers)"
            fits = len(each) == 2 and each[:1] == agents
        elif name == "actions":
            wanted = "(worlds, steps, agents) or (worlds, steps, agents, numbers)"
            fits = len(each) in (1, 2) and each[:1] == agents
        else:
            wanted = "one number for each world and step"
            fits = name == "state" or np.prod(each) == 1
        if not fits:
            got = f"the shape {column.shape}"
            raise ValueError(f"{file}, {name}: expected {wanted}, got {got}")


def check_filled(file: Path, start: int, real: np.ndarray) -> None:
    """Raise a ValueError unless the real steps of each world are the first ones.

    Args:
        file: its path.
        start: number of the first world.
        real: (worlds, time) bool.
    """
    gap = real[:, 1:] & ~real[:, :-1]
    if real[:, 0].all() and not gap.any():
        return
    world = np.argwhere(gap)[0, 0] if gap.any() else np.argmin(real[:, 0])
    wanted = "expected filled steps from the first on without a gap"
    raise ValueError(f"{file}, world {start + world}: {wanted}")


def as_log(path: Path, repairs: dict[str, int], worlds: Worlds) -> Log:
    """A Log of some worlds that were read from `path`, with `repairs` in its meta."""
    group = worlds.group
    s = len(group)
    last = np.append(np.diff(group) != 0, True)  # (s,) steps that end a world
    first = np.flatnonzero(np.append(True, last[:-1]))  # (worlds,) row of each start
    world = group - group[0]  # (s,)
    step = np.arange(s) - first[world]

    # An agent is present until its last choice, or until it terminates before
    available, choice = choices(worlds)
    row = np.arange(s)[:, None]
    last_choice = np.maximum.reduceat(np.where(choice, row, -1), first)
    end = np.minimum.reduceat(np.where(worlds.terminals, row, s), first)
    until = np.minimum(last_choice, end)[world]  # (s, N)
    alive = row <= until
    at, agent = np.nonzero(alive)

    rewards = worlds.rewards
    shared = (rewards == rewards[:, :1]).all(1)
    ended = worlds.terminals.all(1)
    steps = {
        "group": group,
        "step": step,
        "reward": np.where(shared, rewards[:, 0], rewards.mean(1)),
        "terminated": last & ended,
        "truncated": last & ~ended,
    }
    agents = {
        "group": group[at],
        "step": step[at],
        "agent": agent,
        "observation": worlds.observations[alive].reshape(len(at), -1),
        "loss_mask": choice[alive],
        "terminated": (row == until)[alive] & ~last[at],
        "reward": rewards[alive],
    }
    taken = worlds.actions[alive].reshape(len(at), -1)
    if is_discrete(worlds):
        width = taken.shape[1]
        if width != 1:
            wanted = "expected one index for each agent"
            remedy = "store the index in place of one-hot or several numbers"
            raise ValueError(f"{path}, actions: {wanted}, got {width} numbers; {remedy}")
        agents["action"] = taken[:, 0]
        limits: Json = {"num_actions": int(taken.max()) + 1}
    else:
        agents["action_values"] = taken
        bound = np.maximum(1, np.abs(taken).max(0))
        limits = {"low": (-bound).tolist(), "high": bound.tolist()}
    if available is not None:
        agents["available"] = available[alive]
        limits["num_actions"] = available.shape[2]
    if worlds.state is not None:
        steps["state"] = np.asarray(worlds.state, np.float32).reshape(s, -1)
    meta = {
        "types": {"agent": limits},
        "horizon": int(step.max()) + 1,
        "repairs": repairs,
        "shared_reward": bool(shared.all()),
    }
    return Log(meta, steps, agents, str(path))


def is_discrete(worlds: Worlds) -> bool:
    return worlds.actions.dtype.kind in "iu"


def choices(worlds: Worlds) -> tuple[np.ndarray | None, np.ndarray]:
    """The allowed discrete actions, (s, N, C) bool or None, and whether an agent has more than
    action 0, (s, N) bool.
    """
    if worlds.available is None or not is_discrete(worlds):
        return None, np.ones(worlds.rewards.shape, bool)
    available = worlds.available != 0
    return available, ~available[..., 0] | (available.sum(2) > 1)


def kind_of(path: str | Path) -> str:
    """The format of a path: ours, vault, omar or pymarl."""
    signs = {"ours": "meta.json", "vault": "manifest.ocdbt", "omar": "obs_0.npy"}
    given = Path(path).expanduser()
    if given.is_file() and given.suffix in (".h5", ".hdf5"):
        return "pymarl"
    kinds = [kind for kind, sign in signs.items() if (given / sign).is_file()]
    if not kinds:
        inner: set[str] = set()
        for sign in signs.values():
            inner |= {str(file.parent.relative_to(given)) for file in given.glob(f"*/**/{sign}")}
        found = "no such thing"
        if inner:
            found = f"a folder of logs: choose {', '.join(sorted(inner))}"
        wanted = f"an .h5 file or a folder with {', '.join(signs.values())}"
        raise FileNotFoundError(f"{path}: expected {wanted}, got {found}")
    return kinds[0]
