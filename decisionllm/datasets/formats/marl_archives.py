"""Public logs of many agents, as a Log: Vaults (OG-MARL), OMAR's folders of .npy, PyMARL's padded .h5.

All three hold arrays of (steps, agents) for a fixed team and do not say which agents are alive. An agent is gone, and has no row,
after it terminated by itself, or when it has only action 0 from a step on, which is what a dead unit of SMAC has. One that has only
action 0 and later a choice again is busy: its row is no training target. The reward of a team is the mean of its agents' rewards,
which most files repeat for each agent. Sources: flashbax `vault.py`, OMAR (arXiv 2111.11188), PyMARL `episode_buffer.py`.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from decisionllm.datasets.formats.team_log import Log
from decisionllm.files import AGAIN, explained

VAULT, MORE_OF_VAULT = ("observations", "actions", "rewards", "terminals", "truncations"), ("infos.legals", "infos.state")
PYMARL, MORE_OF_PYMARL = ("obs", "actions", "reward", "terminated", "filled"), ("avail_actions", "state")


def read_vault(folder: Path) -> Log:
    """One Vault: a folder with `manifest.ocdbt`. Its rows of B are separate worlds; a world ends when all of its agents have ended.

    Only steps before `vault_index` count; the last world of each row of B is left out if it did not end.
    """
    import tensorstore as ts  # pip install decisionllm[marl]

    def opened(name: str) -> Any:
        store = {"driver": "ocdbt", "base": f"file://{folder.resolve()}/", "path": f"{name}/"}
        return ts.open({"driver": "zarr", "kvstore": store}, read=True, open=True).result()

    with explained(f"{folder}: not a readable Vault, perhaps cut", OSError, ValueError, KeyError, RuntimeError, remedy=AGAIN):
        card = json.loads((folder / "metadata.json").read_text())
        if float(card["version"]) // 1 != 1:
            raise ValueError(f"expected version 1 of the format, got {card['version']}")
        known = card["structure_shape"].keys() | {f"infos.{name}" for name in card["structure_shape"].get("infos", ())}
        length = int(opened("vault_index").read().result()[0])
        columns = {name: opened(f"{name}.")[:, :length].read().result() for name in (*VAULT, *MORE_OF_VAULT) if name in known}
    if lacking := [name for name in VAULT if name not in known]:
        raise ValueError(f"{folder}: expected a Vault's columns, {', '.join(lacking)} not among {', '.join(sorted(known))}")
    numbers = [columns[name] for name in ("observations", "infos.legals") if name in columns]
    written = [column.reshape(*column.shape[:2], -1).any(2) for column in numbers]
    if (blank := ~np.any(written, axis=0)).any() or not length:
        lane, at = np.argwhere(blank)[0] if length else (0, 0)
        why = "got nothing from here; it was cut while it was written: fetch it again"
        raise ValueError(f"{folder}, row {lane} of B, step {at}: expected {length} steps (vault_index), {why}")
    over = (columns["terminals"] != 0) | (columns["truncations"] != 0)
    whole = over.all(2)  # (B, T)
    kept = whole[:, ::-1].cumsum(1)[:, ::-1] > 0
    flat = {name: column[kept] for name, column in columns.items()}
    return joint(
        folder, np.cumsum(whole[kept]) - whole[kept], flat["observations"], flat["actions"], flat["rewards"], flat["terminals"] != 0,
        available=flat.get("infos.legals"), state=flat.get("infos.state"), repairs={"worlds cut at the end": int((~whole[:, -1]).sum())},
    )  # fmt: skip


def read_omar(folder: Path, *, cut: int = 25) -> Log:
    """One seed of OMAR: obs_0.npy, acs_0.npy, rews_0.npy and so on for each agent, in worlds of `cut` steps."""
    try:
        agents = range(len(list(folder.glob("obs_*.npy"))))
        parts = ([np.load(folder / f"{name}_{i}.npy") for i in agents] for name in ("obs", "acs", "rews"))
        observations, actions, rewards = (np.stack(part, 1) for part in parts)
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"{folder}: expected arrays obs_i, acs_i, rews_i of one shape for each agent i ({error})") from error
    n = len(observations) - len(observations) % cut
    if not n or not len(observations) == len(actions) == len(rewards):
        sizes = f"{len(observations)}, {len(actions)} and {len(rewards)}"
        raise ValueError(f"{folder}: expected as many steps in each array and at least {cut}, got {sizes}")
    terminals = np.zeros((n, len(agents)), bool)
    repairs = {"steps cut at the end": len(observations) - n}
    return joint(folder, np.arange(n) // cut, observations[:n], actions[:n], rewards[:n], terminals, repairs=repairs)


def read_pymarl(file: Path) -> Log:
    """A PyMARL file: arrays of (worlds, time, agents, numbers), where `filled` says which steps are real.

    As in PyMARL's learner, a world is over after its first `terminated`, and the last column, which has no action, is no step
    unless a world terminated there.
    """
    import h5py

    with explained(f"{file}: not a readable HDF5 file, perhaps cut", OSError, remedy=AGAIN), h5py.File(file) as source:
        columns = {key: source[key][()] for key in (*PYMARL, *MORE_OF_PYMARL) if key in source}
    sizes = {key: column.shape[:2] for key, column in columns.items()}
    if lacking := [key for key in PYMARL if key not in columns]:
        raise ValueError(f"{file}: expected PyMARL's keys, {', '.join(lacking)} not among {', '.join(columns)}")
    if len(set(sizes.values())) > 1:
        raise ValueError(f"{file}: expected as many worlds and steps under each key, got {sizes}")
    over, real = (columns[key].reshape(sizes[key]) != 0 for key in ("terminated", "filled"))
    real &= over.cumsum(1) - over == 0
    real[:, -1] &= over[:, -1].any()
    if (gap := real[:, 1:] & ~real[:, :-1]).any() or not real[:, 0].all():
        world = np.argwhere(gap)[0, 0] if gap.any() else np.argmin(real[:, 0])
        raise ValueError(f"{file}, world {world}: expected filled steps from the first on without a gap")
    N = columns["obs"].shape[2]
    flat = {key: column[real] for key, column in columns.items()}
    rewards, terminals = (np.repeat(column.reshape(*real.shape, 1)[real], N, 1) for column in (columns["reward"], over))
    return joint(
        file, np.nonzero(real)[0], flat["obs"], flat["actions"], rewards, terminals, available=flat.get("avail_actions"), state=flat.get("state"),
    )  # fmt: skip


def joint(
    path: Path, group: np.ndarray, observations: np.ndarray, actions: np.ndarray, rewards: np.ndarray, terminals: np.ndarray, *,
    available: np.ndarray | None = None, state: np.ndarray | None = None, repairs: dict[str, int] | None = None,
) -> Log:  # fmt: skip
    """A Log of s steps, worlds end to end.

    Args:
        path: where they were read from.
        group: (s,) world.
        observations: (s, N, O).
        actions: (s, N) or (s, N, A).
        rewards, terminals: (s, N).
        available: (s, N, C).
        state: (s, ...).
        repairs: counts of what was left out.
    """
    s, N = observations.shape[:2]
    if not s:
        raise ValueError(f"{path}: expected a world that ended, got none")
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
    shared = (rewards == rewards[:, :1]).all()
    steps = {"group": world, "step": step, "reward": rewards[:, 0] if shared else rewards.mean(1), "terminated": last & terminals.all(1),
             "truncated": last & ~terminals.all(1)}  # fmt: skip
    agents = {"group": world[at], "step": step[at], "agent": agent, "observation": observations[alive].reshape(len(at), -1),
              "loss_mask": choice[alive], "terminated": (row == until)[alive] & ~last[at]}  # fmt: skip
    if discrete:
        agents["action"] = actions.reshape(s, N)[alive]
        limits: dict[str, Any] = {"num_actions": int(agents["action"].max()) + 1 if available is None else available.shape[2]}
    else:
        agents["action_values"] = actions.reshape(s, N, -1)[alive]
        bound = np.maximum(1, np.abs(agents["action_values"]).max(0)).tolist()
        limits = {"low": [-x for x in bound], "high": bound}
    agents |= {} if available is None else {"available": available[alive]}
    agents |= {} if shared else {"reward": rewards[alive]}
    steps |= {} if state is None else {"state": np.asarray(state, np.float32).reshape(s, -1)}
    found = {what: count for what, count in (repairs or {}).items() if count}
    return Log({"types": {"agent": limits}, "horizon": int(step.max()) + 1, "repairs": found}, steps, agents, str(path))


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
