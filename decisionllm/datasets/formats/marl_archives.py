"""Public logs of many agents, as Logs of some whole worlds each: Vaults (OG-MARL), OMAR's folders of .npy, PyMARL's padded .h5.

All three hold arrays of (steps, agents) for a fixed team and do not say which agents are alive. An agent is gone, and has no row,
after it terminated by itself, or when it has only action 0 from a step on, which is what a dead unit of SMAC has. One that has only
action 0 and later a choice again is busy: its row is no training target. The reward of a team is the mean of its agents' rewards,
which most files repeat for each agent. Sources: flashbax `vault.py`, OMAR (arXiv 2111.11188), PyMARL `episode_buffer.py`.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from decisionllm.datasets.formats.team_log import Log
from decisionllm.files import AGAIN, explained

VAULT, MORE_OF_VAULT = ("observations", "actions", "rewards", "terminals", "truncations"), ("infos.legals", "infos.state")
PYMARL, MORE_OF_PYMARL = ("obs", "actions", "reward", "terminated", "filled"), ("avail_actions", "state")
BLOCK = 1 << 22  # numbers of the observations that are read at a time
Worlds = Iterator[dict[str, Any]]  # arguments of `joint`


def logs(path: Path, kind: str, *, cut: int = 25) -> Iterator[Log]:
    """The parts of a public log, as they are read: Logs of some whole worlds each, whose meta has the limits of their own worlds and the
    repairs of all that were read, see `team_log.common_meta`.

    Args:
        path: the folder or file.
        kind: see `kind_of`.
        cut: steps of a world in an OMAR log.
    """
    readers: dict[str, Callable[[Path, Counter[str]], Worlds]]
    readers = {"vault": read_vault, "omar": partial(read_omar, cut=cut), "pymarl": read_pymarl}
    repairs, log = Counter[str](), None
    for worlds in readers[kind](path, repairs):
        yield (log := joint(path, repairs, **worlds))
    if log is None:
        raise ValueError(f"{path}: expected a world that ended, got none")


def read_vault(folder: Path, repairs: Counter[str]) -> Worlds:
    """One Vault: a folder with `manifest.ocdbt`. Its rows of B are separate worlds; a world ends when all of its agents have ended.

    Only steps before `vault_index` count; the last world of each row of B is left out if it did not end.
    """
    import tensorstore as ts  # pip install decisionllm[marl]

    def opened(name: str) -> Any:
        store = {"driver": "ocdbt", "base": f"file://{folder.resolve()}/", "path": f"{name}/"}
        return ts.open({"driver": "zarr", "kvstore": store}, read=True, open=True).result()

    readable = partial(
        explained, f"{folder}: not a readable Vault, perhaps cut", OSError, ValueError, KeyError, RuntimeError, remedy=AGAIN
    )
    with readable():
        card = json.loads((folder / "metadata.json").read_text())
        if float(card["version"]) // 1 != 1:
            raise ValueError(f"expected version 1 of the format, got {card['version']}")
        known = card["structure_shape"].keys() | {f"infos.{name}" for name in card["structure_shape"].get("infos", ())}
        length = int(opened("vault_index").read().result()[0])
        files = {name: opened(f"{name}.") for name in (*VAULT, *MORE_OF_VAULT) if name in known}
    if lacking := [name for name in VAULT if name not in known]:
        raise ValueError(f"{folder}: expected a Vault's columns, {', '.join(lacking)} not among {', '.join(sorted(known))}")
    lanes, _, *shape = files["observations"].shape
    size, group = max(BLOCK // int(np.prod(shape)), 1), 0
    for lane in range(lanes):
        left: dict[str, np.ndarray] = {}  # of a world whose end has not come yet
        for start in range(0, max(length, 1), size):
            with readable():
                block = {name: file[lane, start : min(start + size, length)].read().result() for name, file in files.items()}
            numbers = [block[name].reshape(len(block[name]), -1) for name in ("observations", "infos.legals") if name in block]
            if (blank := ~np.concatenate(numbers, 1).any(1)).any() or not length:
                at = start + int(np.argmax(blank)) if length else 0
                why = f"got nothing from here; it was cut while it was written: {AGAIN}"
                raise ValueError(f"{folder}, row {lane} of B, step {at}: expected {length} steps (vault_index), {why}")
            columns = {name: np.concatenate([left[name], x]) if left else x for name, x in block.items()}
            whole = ((columns["terminals"] != 0) | (columns["truncations"] != 0)).all(1)
            n = len(whole) - int(np.argmax(whole[::-1])) if whole.any() else 0
            left = {name: x[n:] for name, x in columns.items()}
            if n:
                flat = {name: x[:n] for name, x in columns.items()}
                yield {"group": group + np.cumsum(whole[:n]) - whole[:n], "terminals": flat["terminals"] != 0,
                       "observations": flat["observations"], "actions": flat["actions"], "rewards": flat["rewards"],
                       "available": flat.get("infos.legals"), "state": flat.get("infos.state")}  # fmt: skip
                group += int(whole.sum())
        if len(left["rewards"]):
            repairs["worlds cut at the end"] += 1


def read_omar(folder: Path, repairs: Counter[str], *, cut: int) -> Worlds:
    """One seed of OMAR: obs_0.npy, acs_0.npy, rews_0.npy and so on for each agent, in worlds of `cut` steps."""
    what = f"{folder}: expected arrays obs_i, acs_i, rews_i of one shape for each agent i"
    with explained(what, OSError, ValueError, EOFError):
        agents = range(len(list(folder.glob("obs_*.npy"))))
        files = [[np.load(folder / f"{name}_{i}.npy", mmap_mode="r") for i in agents] for name in ("obs", "acs", "rews")]
    sizes = [len(part[0]) for part in files]
    n = sizes[0] - sizes[0] % cut
    if not n or len(set(sizes)) > 1:
        got = f"{sizes[0]}, {sizes[1]} and {sizes[2]}"
        raise ValueError(f"{folder}: expected as many steps in each array and at least {cut}, got {got}")
    if sizes[0] > n:
        repairs["steps cut at the end"] = sizes[0] - n
    size = cut * max(BLOCK // (cut * sum(x[0].size for x in files[0])), 1)
    for start in range(0, n, size):
        with explained(what, ValueError):
            observations, actions, rewards = (np.stack([x[start : min(start + size, n)] for x in part], 1) for part in files)
        yield {"group": np.arange(start, start + len(rewards)) // cut, "terminals": np.zeros(rewards.shape, bool),
               "observations": observations, "actions": actions, "rewards": rewards}  # fmt: skip


def read_pymarl(file: Path, repairs: Counter[str]) -> Worlds:
    """A PyMARL file: arrays of (worlds, time, agents, numbers), where `filled` says which steps are real.

    As in PyMARL's learner, a world is over after its first `terminated`, and the last column, which has no action, is no step
    unless a world terminated there.
    """
    import h5py

    readable = partial(explained, f"{file}: not a readable HDF5 file, perhaps cut", OSError, remedy=AGAIN)
    with readable():
        source = h5py.File(file)
    with source:
        with readable():
            columns = {key: source[key] for key in (*PYMARL, *MORE_OF_PYMARL) if key in source}
        sizes = {key: column.shape[:2] for key, column in columns.items()}
        if lacking := [key for key in PYMARL if key not in columns]:
            raise ValueError(f"{file}: expected PyMARL's keys, {', '.join(lacking)} not among {', '.join(columns)}")
        if len(set(sizes.values())) > 1:
            raise ValueError(f"{file}: expected as many worlds and steps under each key, got {sizes}")
        worlds, _, N, _ = columns["obs"].shape
        size = max(BLOCK // int(np.prod(columns["obs"].shape[1:])), 1)
        with readable():
            ended_late = columns["terminated"][:, -1].any()
        for start in range(0, worlds, size):
            with readable():
                block = {key: column[start : start + size] for key, column in columns.items()}
            over, real = (block[key].reshape(len(block[key]), -1) != 0 for key in ("terminated", "filled"))
            real &= over.cumsum(1) - over == 0
            real[:, -1] &= ended_late
            if (gap := real[:, 1:] & ~real[:, :-1]).any() or not real[:, 0].all():
                world = start + int(np.argwhere(gap)[0, 0] if gap.any() else np.argmin(real[:, 0]))
                raise ValueError(f"{file}, world {world}: expected filled steps from the first on without a gap")
            flat = {key: column[real] for key, column in block.items()}
            rewards, terminals = (np.repeat(x.reshape(*real.shape, 1)[real], N, 1) for x in (block["reward"], over))
            yield {"group": start + np.nonzero(real)[0], "observations": flat["obs"], "actions": flat["actions"], "rewards": rewards,
                   "terminals": terminals, "available": flat.get("avail_actions"), "state": flat.get("state")}  # fmt: skip


def joint(
    path: Path, repairs: dict[str, int], group: np.ndarray, observations: np.ndarray, actions: np.ndarray, rewards: np.ndarray,
    terminals: np.ndarray, *, available: np.ndarray | None = None, state: np.ndarray | None = None,
) -> Log:  # fmt: skip
    """A Log of s steps, worlds end to end.

    Args:
        path: where they were read from.
        repairs: of its meta.
        group: (s,) world, ascending without a gap.
        observations: (s, N, O).
        actions: (s, N) or (s, N, A).
        rewards, terminals: (s, N).
        available: (s, N, C).
        state: (s, ...).
    """
    s, N = observations.shape[:2]
    last = np.append(np.diff(group) != 0, True)
    first = np.flatnonzero(np.append(True, last[:-1]))
    world, row = np.cumsum(np.append(False, last[:-1])), np.arange(s)[:, None]
    step = row[:, 0] - first[world]
    discrete = actions.dtype.kind in "iu"
    available = available != 0 if discrete and available is not None else None
    choice = np.ones((s, N), bool) if available is None else ~available[..., 0] | (available.sum(2) > 1)
    chose, died = np.where(choice, row, -1), np.where(terminals, row, s)
    until = np.minimum(np.maximum.reduceat(chose, first), np.minimum.reduceat(died, first))[world]  # (s, N), last row of each
    alive = row <= until
    at, agent = np.nonzero(alive)
    shared, ended = (rewards == rewards[:, :1]).all(1), terminals.all(1)
    steps = {"group": group, "step": step, "reward": np.where(shared, rewards[:, 0], rewards.mean(1)), "terminated": last & ended,
             "truncated": last & ~ended}  # fmt: skip
    agents = {"group": group[at], "step": step[at], "agent": agent, "observation": observations[alive].reshape(len(at), -1),
              "loss_mask": choice[alive], "terminated": (row == until)[alive] & ~last[at], "reward": rewards[alive]}  # fmt: skip
    if discrete:
        agents["action"] = actions.reshape(s, N)[alive]
        limits: dict[str, Any] = {"num_actions": int(agents["action"].max()) + 1 if available is None else available.shape[2]}
    else:
        agents["action_values"] = actions.reshape(s, N, -1)[alive]
        bound = np.maximum(1, np.abs(agents["action_values"]).max(0)).tolist()
        limits = {"low": [-x for x in bound], "high": bound}
    agents |= {} if available is None else {"available": available[alive]}
    steps |= {} if state is None else {"state": np.asarray(state, np.float32).reshape(s, -1)}
    meta = {"types": {"agent": limits}, "horizon": int(step.max()) + 1, "repairs": repairs, "shared_reward": bool(shared.all())}
    return Log(meta, steps, agents, str(path))


def kind_of(path: str | Path) -> str:
    """The format of a path: ours, vault, omar or pymarl."""
    signs = {"ours": "meta.json", "vault": "manifest.ocdbt", "omar": "obs_0.npy"}
    given = Path(path).expanduser()
    if given.is_file() and given.suffix in (".h5", ".hdf5"):
        return "pymarl"
    kinds = [kind for kind, sign in signs.items() if (given / sign).is_file()]
    if not kinds:
        inner = sorted({str(file.parent.relative_to(given)) for sign in signs.values() for file in given.glob(f"*/**/{sign}")})
        found = f"a folder of logs: choose {', '.join(inner)}" if inner else "no such thing"
        raise FileNotFoundError(f"{path}: expected an .h5 file or a folder with {', '.join(signs.values())}, got {found}")
    return kinds[0]
