"""A log of many agents in one world: its two tables, on disk as Parquet, and how to fill them from a PettingZoo environment.

`steps` has a row for each (group, step, team): the world's clock, the team's reward, the end. `agents` has a row for each
(group, step, agent) that is present: no row, not present. There are two tables because a team has rewards after an agent has left.

meta: name; world {id, version, arguments}; task, reward_rule (sentences); horizon (steps); returns, see `team.source`;
shared_reward, whether the reward of each agent is its team's; plane, whether an observation is pairs of numbers throughout, each a
vector in a plane (for `data.symmetries`); teams {type: team}; further facts that a result must report; types: {name: {role,
num_actions or low and high, observations: {length: [[kind, width, count], ...]}}}. The blocks of an observation follow each other:
`own` is the agent itself, "" is left out, any other kind is `count` entities of `width` numbers, and an entity of zeros is absent. A
type without blocks has one `own` block.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from decisionllm.files import absent, atomic, explained

FORMAT = 1
ROWS = 200_000  # of a row group
TABLES = {  # the columns of each table, with the dtype of their numbers
    "steps": {
        "group": "int64", "step": "int32", "team": "int8", "reward": "float32", "terminated": "bool", "truncated": "bool",
        "won": "bool", "state": "float32",
    },
    "agents": {
        "group": "int64", "step": "int32", "agent": "int16", "agent_type": "int8", "team": "int8", "loss_mask": "bool",
        "observation": "float32", "action": "int32", "action_values": "float32", "available": "bool", "reward": "float32",
        "terminated": "bool", "behaviour": "int8",
    },
}  # fmt: skip
REQUIRED = {"steps": ("group", "step", "terminated", "truncated"), "agents": ("group", "step", "agent", "observation")}
LISTS = ("state", "observation", "action_values", "available")  # a list of numbers in each row
NAMES = {"agent_type": "types", "behaviour": "behaviours"}  # columns of names in a file, in a Log of indices into this meta
MISSING = {"action": -1, "reward": np.nan, "won": False}  # what stands for null


@dataclass(frozen=True)
class Log:
    """Columns of the two tables, rows in any order, raw units; only the REQUIRED ones must be there.

    Attributes:
        meta: see above.
        steps: (s,) each; state (s, O).
        agents: (n,) each; observation (n, O), or the rows end to end and `observation_offsets` (n+1,). agent_type, behaviour: indices
            into meta["types"] and meta["behaviours"]; without the column 0, as team. action: -1 where it was not recorded.
            action_values: (n, A), nan there. available: (n, C) bool. loss_mask: False where the action is no training target;
            without the column True where one was recorded.
        path: where it was read from.
    """

    meta: dict[str, Any]
    steps: dict[str, np.ndarray]
    agents: dict[str, np.ndarray]
    path: str = "log"

    def __post_init__(self) -> None:
        if not self.meta.get("types") or "horizon" not in self.meta:
            raise ValueError(f"{self.path}: expected meta to have types and horizon, got {', '.join(self.meta) or 'nothing'}")
        for table, columns in self.tables.items():
            known = TABLES[table]
            lacking = [name for name in REQUIRED[table] if name not in columns]
            unknown = sorted(name for name in columns if name.removesuffix("_offsets") not in known)
            if lacking or unknown:
                wrong = f"lacking {', '.join(lacking) or 'none'}, unknown {', '.join(unknown) or 'none'}"
                raise ValueError(f"{self.path}, {table}: expected columns {', '.join(known)}; {wrong}")
            n = len(columns["group"])
            for name, column in columns.items():
                if f"{name}_offsets" not in columns and len(column) != n + name.endswith("_offsets"):
                    raise ValueError(f"{self.path}, {table}, {name}: expected {n} rows, got {len(column)}")
                if known.get(name) == "bool" and column.dtype != bool:
                    raise ValueError(f"{self.path}, {table}, {name}: expected true and false, got {column.dtype}")

    @property
    def tables(self) -> dict[str, dict[str, np.ndarray]]:
        return {"steps": self.steps, "agents": self.agents}

    def refuse(self, table: str, rows: np.ndarray, wrong: np.ndarray, message: str, *values: Any) -> None:
        """Raise a ValueError if one of these rows of a table is wrong: it names the first, by its number, from 1, and its key."""
        if wrong.any():
            at, columns = np.argmax(wrong), self.tables[table]
            names = ("group", "step", "agent" if table == "agents" else "team")
            key = ", ".join(f"{name} {columns[name][rows[at]]}" for name in names if name in columns)
            found = message.format(*(np.asarray(x)[at].tolist() for x in values))
            raise ValueError(f"{self.path}, {table}, row {rows[at] + 1} ({key}): {found}")


LIMITS = {"num_actions": np.max, "low": np.min, "high": np.max}  # of a type, and which of several is the widest


def common_meta(known: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """The meta of some parts of a log, {} of none, and of a further one: the longest horizon, the widest limits of each type."""
    if not known:
        return more
    types = {name: dict(each) for name, each in known["types"].items()}
    for name, each in types.items():
        for key in LIMITS.keys() & each:
            each[key] = LIMITS[key]([each[key], more["types"][name][key]], 0).tolist()
    shared = known.get("shared_reward", False) and more.get("shared_reward", False)
    return more | {"types": types, "horizon": max(known["horizon"], more["horizon"]), "shared_reward": shared}


def write(folder: str | Path, logs: Log | Iterable[Log]) -> None:
    """Write a log as meta.json, steps.parquet and agents.parquet, all or nothing.

    Args:
        folder: must not exist.
        logs: a Log, or its parts one after the other, with the same columns, each group in one part. Each part is sorted by
            group, step and agent and written as it comes, in zstd; see `common_meta`.

    Raises:
        FileExistsError: the folder exists.
    """
    import pyarrow as pa  # pip install decisionllm[marl]
    from pyarrow import parquet

    with atomic(absent(folder)) as partial, ExitStack() as stack:
        partial.mkdir()
        writers, meta = dict[str, Any](), dict[str, Any]()
        for log in [logs] if isinstance(logs, Log) else logs:
            meta = common_meta(meta, log.meta)
            for table, columns in log.tables.items():
                order = np.lexsort([columns[name] for name in ("agent", "team", "step", "group") if name in columns])
                names = [name for name in columns if not name.endswith("_offsets")]
                made = pa.table({name: _to_arrow(log, table, name, order) for name in names})
                if table not in writers:
                    file = partial / f"{table}.parquet"
                    writers[table] = stack.enter_context(parquet.ParquetWriter(file, made.schema, compression="zstd"))
                writers[table].write_table(made, row_group_size=ROWS)
        if not meta:
            raise ValueError(f"{folder}: expected a log to write, got none")
        (partial / "meta.json").write_text(json.dumps({"format": FORMAT} | meta, indent=1, ensure_ascii=False))


def _to_arrow(log: Log, table: str, name: str, order: np.ndarray) -> Any:
    """A column of a Log in this order as Arrow's, with nulls where an action or a reward was not recorded."""
    import pyarrow as pa

    columns, kind = log.tables[table], TABLES[table][name]
    column = columns[name]
    if f"{name}_offsets" in columns:
        return pa.LargeListArray.from_arrays(columns[f"{name}_offsets"], column.astype(kind)).take(pa.array(order))
    column = column[order].astype(kind)
    if column.ndim == 2:
        n, width = column.shape
        return pa.LargeListArray.from_arrays(np.arange(n + 1) * width, column.reshape(-1))
    if name in NAMES:
        return pa.DictionaryArray.from_arrays(column, list(log.meta[NAMES[name]]))
    return pa.array(column, mask=column < 0 if name == "action" else np.isnan(column) if name == "reward" else None)


def read_meta(folder: Path) -> dict[str, Any]:
    """meta.json of a log that `write` wrote."""
    with explained(f"{folder}/meta.json: expected JSON that describes a log", OSError, ValueError):
        meta: dict[str, Any] = json.loads((folder / "meta.json").read_text())
    if meta.get("format") != FORMAT:
        raise ValueError(f"{folder}/meta.json: expected format {FORMAT}, got {meta.get('format')}")
    return meta


def read(folder: str | Path) -> Log:
    """Read a log that `write` wrote, or another program in the same format: rows in any order, further columns are ignored."""
    folder = Path(folder).expanduser()
    meta = read_meta(folder)
    steps, agents = (_read(folder / f"{table}.parquet", table, meta) for table in TABLES)
    return Log(meta, steps, agents, str(folder))


def _read(file: Path, table: str, meta: dict[str, Any]) -> dict[str, np.ndarray]:
    """The columns of a table."""
    import pyarrow as pa
    import pyarrow.compute as pc
    from pyarrow import parquet

    remedy = "write or fetch it again"
    with explained(f"{file}: not a readable Parquet file, perhaps cut", pa.ArrowInvalid, OSError, remedy=remedy):
        names = [name for name in parquet.read_schema(file).names if name in TABLES[table]]
        columns = parquet.read_table(file, columns=names)
    found: dict[str, np.ndarray] = {}
    for name in names:
        kind, column = pa.from_numpy_dtype(np.dtype(TABLES[table][name])), columns[name].combine_chunks()
        words = list(meta.get(NAMES.get(name, ""), ()))
        wanted = f"lists of {kind}" if name in LISTS else "names" if name in NAMES else kind
        what = f"{file}, {name}: expected {wanted}, got {column.type}"
        with explained(what, pa.ArrowInvalid, pa.ArrowNotImplementedError):
            if name in LISTS:
                found |= _lists(name, column.cast(pa.large_list(kind)))
                continue
            if name in NAMES:
                column = pc.index_in(column.cast(pa.string()), pa.array(words, pa.string()))
            column = column.cast(kind)
        column = pc.fill_null(column, pa.scalar(MISSING[name], kind)) if name in MISSING else column
        if column.null_count:
            row = int(np.argmax(column.is_null().to_numpy(zero_copy_only=False))) + 1
            wanted = f"one of {', '.join(words)}, as meta.json says" if name in NAMES else f"a number of {kind}, got none"
            raise ValueError(f"{file}, row {row}, {name}: expected {wanted}")
        found[name] = column.to_numpy(zero_copy_only=False)
    return found


def _lists(name: str, column: Any) -> dict[str, np.ndarray]:
    """Arrow's lists as (n, width) where all are of one length, otherwise padded, or end to end with their offsets."""
    import pyarrow.compute as pc

    widths = pc.fill_null(pc.list_value_length(column), 0).to_numpy()
    flat = column.flatten().to_numpy(zero_copy_only=False)
    if len(widths) and (widths == widths[0]).all():
        return {name: flat.reshape(len(widths), -1)}
    if name in ("available", "action_values"):  # types with fewer actions, and actions that were not recorded
        made = np.full((len(widths), widths.max()), False if flat.dtype == bool else np.nan, flat.dtype)
        made[np.arange(widths.max()) < widths[:, None]] = flat
        return {name: made}
    return {name: flat, f"{name}_offsets": np.concatenate([[0], np.cumsum(widths)])}


# -- PettingZoo: what `collect` and env=pettingzoo share --


def agent_types(env: Any) -> dict[str, str]:
    """The type of each possible agent of a PettingZoo environment: its name without its number, `wolf` for `wolf_0`."""
    return {agent: agent.rstrip("0123456789").rstrip("_-") or agent for agent in env.possible_agents}


def action_limits(env: Any) -> dict[str, dict[str, Any]]:
    """The actions of each type, as in meta["types"]: {type: {num_actions}} or {type: {low, high}}."""
    from gymnasium.spaces import Box, Discrete

    found: dict[str, dict[str, Any]] = {}
    for agent, kind in agent_types(env).items():
        space = env.action_space(agent)
        if isinstance(space, Discrete):
            found[kind] = {"num_actions": int(space.n)}
        elif isinstance(space, Box):
            found[kind] = {"low": flat(space.low).tolist(), "high": flat(space.high).tolist()}
        else:
            raise ValueError(f"{env}, {agent}: expected a Discrete or a Box action space, got {space}")
    return found


def flat(numbers: Any) -> np.ndarray:
    """(n,) float32"""
    return np.asarray(numbers, np.float32).reshape(-1)


def split_observation(observation: Any, info: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray | None]:
    """An agent's observation (R,) float32, and its action mask (C,) bool or None, which is in a dict observation or in the info."""
    view = {**info, **(observation if isinstance(observation, dict) else {"observation": observation})}
    mask = view.get("action_mask")
    return flat(view["observation"]), None if mask is None else np.asarray(mask) != 0


Act = Callable[[dict[str, Any], dict[str, Any]], Mapping[str, Any]]


def collect(
    env: Any, act: Act | Mapping[str, Act], *, episodes: int, seed: int = 0, teams: Mapping[str, int] | None = None, **meta: Any
) -> Log:
    """Play a PettingZoo parallel environment and record a Log.

        log = collect(simple_spread_v3.parallel_env(), lambda observations, infos: {a: 0 for a in observations}, episodes=100)
        write("spread", log)

    Args:
        env: a parallel environment. A mask of the allowed actions is found as `action_mask` in an observation that is a dict
            beside `observation`, or in infos. Agent `wolf_0` is of type `wolf`.
        act: (observations, infos) -> actions, dicts by agent; or several by name, which play one group each in turn.
        episodes: number of groups, reset with seed, seed + 1, ...
        teams: {type: team}; types without one are in team 0.
        meta: see above; task, name, ...

    Returns:
        A Log in which the reward of a team is the mean of its agents' rewards over all agents that it began with.
    """
    kinds, limits = agent_types(env), action_limits(env)
    types, number = list(limits), {agent: i for i, agent in enumerate(env.possible_agents)}
    team_of = {agent: (teams or {}).get(kind, 0) for agent, kind in kinds.items()}
    discrete = all("num_actions" in limit for limit in limits.values())
    acts = [*act.values()] if isinstance(act, Mapping) else [act]
    steps: list[dict[str, Any]] = []
    agents: list[dict[str, Any]] = []
    for group in range(episodes):
        (observations, infos), step = env.reset(seed=seed + group), 0
        sizes = Counter(team_of[agent] for agent in env.agents)
        while env.agents:
            present, actions = list(env.agents), acts[group % len(acts)](observations, infos)
            views = {agent: split_observation(x, infos.get(agent, {})) for agent, x in observations.items()}
            observations, rewards, terminated, truncated, infos = env.step({agent: actions[agent] for agent in present})
            for agent in present:
                (observation, mask), kind = views[agent], kinds[agent]
                taken = actions[agent] - env.action_space(agent).start if discrete else flat(actions[agent])
                agents.append({
                    "group": group, "step": step, "agent": number[agent], "agent_type": types.index(kind), "team": team_of[agent],
                    "action" if discrete else "action_values": taken, "reward": rewards[agent], "terminated": bool(terminated[agent]),
                    "observation": observation,
                    "available": np.ones(limits[kind].get("num_actions", 0), bool) if mask is None else mask,
                })  # fmt: skip
            over, by_clock = not env.agents, any(truncated.values())
            ends = {"terminated": over and not by_clock, "truncated": over and by_clock}
            for team, size in sizes.items():
                mean = sum(rewards[agent] for agent in present if team_of[agent] == team) / size
                steps.append({"group": group, "step": step, "team": team, "reward": mean, **ends})
            step += 1
    raw, masks = ([row.pop(name) for row in agents] for name in ("observation", "available"))
    clock, columns = ({name: np.array([row[name] for row in rows]) for name in rows[0]} for rows in (steps, agents))
    columns |= {"observation": np.concatenate(raw), "observation_offsets": np.cumsum([0, *map(len, raw)])}
    if discrete and not all(np.all(mask) for mask in masks):
        width = max(map(len, masks))
        columns["available"] = np.array([np.pad(mask, (0, width - len(mask))) for mask in masks])
    found = {"name": str(env), "types": limits, "teams": dict(teams or {}), "horizon": int(clock["step"].max()) + 1, "seed": seed,
             "generator": "collect"}  # fmt: skip
    if isinstance(act, Mapping):
        columns["behaviour"], found["behaviours"] = columns["group"] % len(acts), list(act)
    return Log(found | meta, clock, columns)
