"""A log of many agents in one world: its two tables, on disk as Parquet, and how to fill them from a PettingZoo world.

`steps` has a row for each (group, step, team): the world's clock, the team's reward, the ending. `agents` has a row for each
(group, step, agent) that was there: no row, not there. They are kept apart because a team is paid after an agent is gone.

meta: name; world {id, version, arguments}; task, reward_rule (sentences); horizon (steps); returns, see multiagent.source;
whatever else a result must say; types: {name: {role, num_actions or low and high, observations: {length: [[kind, width,
count], ...]}}}. The blocks of an observation follow each other: `own` is the agent itself, "" is left out, any other kind is
`count` entities of `width` numbers, and one that is all zeros is not there. A type without blocks has only numbers of its own.
"""

import json
import os
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

FORMAT = 1
ROWS = 200_000  # of a row group
# The columns and their numbers; {} is a list of them, a word behind | is one of meta's, ? may be left out.
TABLES = {
    "steps": {
        "group": "int64", "step": "int32", "team": "int8?", "reward": "float32?", "terminated": "bool", "truncated": "bool",
        "won": "bool?", "state": "{float32}?",
    },
    "agents": {
        "group": "int64", "step": "int32", "agent": "int16", "agent_type": "int8|types?", "team": "int8?", "loss_mask": "bool?",
        "observation": "{float32}", "action": "int32?", "action_values": "{float32}?", "available": "{bool}?",
        "reward": "float32?", "terminated": "bool?", "duration": "int16?", "behaviour": "int8|behaviours?",
    },
}  # fmt: skip


@dataclass(frozen=True)
class Log:
    """Columns of the two tables, rows in any order, raw units; TABLES says which may be left out.

    observation, state: (n, O), or the rows end to end and `observation_offsets` (n+1,). agent_type, behaviour: indices into
    meta["types"] and meta["behaviours"]; left out: 0, as is team. action: (n,), -1 where it was not recorded; action_values: (n, A),
    nan there. available: (n, C) bool. loss_mask: False where the action is not to be imitated; left out: wherever one was recorded.
    """

    meta: dict
    steps: dict[str, np.ndarray]
    agents: dict[str, np.ndarray]
    path: str = "log"  # where it was read

    def __post_init__(self):
        if not self.meta.get("types") or "horizon" not in self.meta:
            raise ValueError(f"{self.path}: expected meta to have types and horizon, got {', '.join(self.meta) or 'nothing'}")
        for table, known in TABLES.items():
            columns = getattr(self, table)
            lacking = [name for name, kind in known.items() if name not in columns and not kind.endswith("?")]
            unknown = sorted(name for name in columns if name.removesuffix("_offsets") not in known)
            if lacking or unknown:
                told = f"lacking {', '.join(lacking) or 'none'}, unknown {', '.join(unknown) or 'none'}"
                raise ValueError(f"{self.path}, {table}: expected columns {', '.join(known)}; {told}")
            n = len(columns["group"])
            for name, column in columns.items():
                if f"{name}_offsets" not in columns and len(column) != n + name.endswith("_offsets"):
                    raise ValueError(f"{self.path}, {table}, {name}: expected {n} rows, got {len(column)}")
                if "bool" in known.get(name, "") and column.dtype != bool:
                    raise ValueError(f"{self.path}, {table}, {name}: expected true and false, got {column.dtype}")

    def refuse(self, table, rows, wrong, message, *values):
        """Name the first of these rows of a table that is wrong, if any is: by its number, from 1, and by its key."""
        if wrong.any():
            at, columns = np.argmax(wrong), getattr(self, table)
            names = ("group", "step", "agent" if table == "agents" else "team")
            key = ", ".join(f"{name} {columns[name][rows[at]]}" for name in names if name in columns)
            said = message.format(*(np.asarray(x)[at].tolist() for x in values))
            raise ValueError(f"{self.path}, {table}, row {rows[at] + 1} ({key}): {said}")


def write(folder, logs):
    """A Log, or its parts one after the other, as meta.json, steps.parquet and agents.parquet; all or nothing.

    Parts share their meta and columns. Each is sorted by group, step and agent and written as it comes, in zstd; a group is in
    one part.
    """
    import pyarrow as pa  # pip install decisionllm[marl]
    from pyarrow import parquet

    folder = Path(folder).expanduser()
    if folder.exists():
        raise FileExistsError(f"{folder}: is there already; move it away, or choose another folder")
    partial = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
    partial.mkdir(parents=True)
    writers = {}
    try:
        for log in [logs] if isinstance(logs, Log) else logs:
            for table in TABLES:
                columns = getattr(log, table)
                order = np.lexsort([columns[name] for name in ("agent", "team", "step", "group") if name in columns])
                kinds = [name for name in columns if not name.endswith("_offsets")]
                made = pa.table({name: _arrow(log, table, name, order) for name in kinds})
                if table not in writers:
                    writers[table] = parquet.ParquetWriter(partial / f"{table}.parquet", made.schema, compression="zstd")
                writers[table].write_table(made, row_group_size=ROWS)
        if not writers:
            raise ValueError(f"{folder}: expected a log to write, got none")
        for writer in writers.values():
            writer.close()
        (partial / "meta.json").write_text(json.dumps({"format": FORMAT} | log.meta, indent=1, ensure_ascii=False))
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _arrow(log, table, name, order):
    """A column of a Log in this order as Arrow's, with nulls where an action or a reward was not recorded."""
    import pyarrow as pa

    columns, (kind, words) = getattr(log, table), _kind(table, name)
    column = columns[name]
    if f"{name}_offsets" in columns:
        return pa.LargeListArray.from_arrays(columns[f"{name}_offsets"], column.astype(kind)).take(pa.array(order))
    column = column[order].astype(kind)
    if column.ndim == 2:
        n, width = column.shape
        return pa.LargeListArray.from_arrays(np.arange(n + 1) * width, column.reshape(-1))
    if words:
        return pa.DictionaryArray.from_arrays(column, list(log.meta[words]))
    missing = {"action": lambda: column < 0, "reward": lambda: np.isnan(column)}.get(name)
    return pa.array(column, mask=missing and missing())


def read(folder):
    """The Log that `write` wrote, or that somebody else wrote likewise: rows in any order, further columns left unread."""
    folder = Path(folder).expanduser()
    try:
        meta = json.loads((folder / "meta.json").read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder}/meta.json: expected JSON that describes a log ({error})") from error
    if meta.get("format") != FORMAT:
        raise ValueError(f"{folder}/meta.json: expected format {FORMAT}, got {meta.get('format')}")
    return Log(meta, *(_read(folder / f"{table}.parquet", table, meta) for table in TABLES), path=str(folder))


def _read(file, table, meta):
    import pyarrow as pa
    from pyarrow import parquet

    try:
        names = [name for name in parquet.read_schema(file).names if name in TABLES[table]]
        columns = parquet.read_table(file, columns=names)
    except (pa.ArrowInvalid, OSError) as error:
        raise ValueError(f"{file}: not a readable Parquet file, perhaps cut ({error}); write or fetch it again") from error
    made = {}
    for name in names:
        kind, words = _kind(table, name)
        try:
            made |= _numbers(name, columns[name].combine_chunks(), kind, list(meta.get(words, ())) if words else None)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            wanted = TABLES[table][name].strip("?")
            raise ValueError(f"{file}, {name}: expected {wanted}, got {columns[name].type} ({error})") from error
        if (lost := made.pop("missing", None)) is not None:
            said = f"one of {', '.join(meta.get(words, ()))}, as meta.json says" if words else f"a number of {kind}, got none"
            raise ValueError(f"{file}, row {lost + 1}, {name}: expected {said}")
    return made


def _numbers(name, column, kind, words):
    """Arrow's column as a Log's; `missing` is the first row where there should have been a number."""
    import pyarrow as pa
    import pyarrow.compute as pc

    type = pa.from_numpy_dtype(np.dtype(kind))
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type) or pa.types.is_fixed_size_list(column.type):
        column = column.cast(pa.large_list(type))
        widths = pc.fill_null(pc.list_value_length(column), 0).to_numpy()
        flat = column.flatten().to_numpy(zero_copy_only=False)
        if len(widths) and (widths == widths[0]).all():
            return {name: flat.reshape(len(widths), -1)}
        if name in ("available", "action_values"):  # types with fewer actions, and actions that were not recorded
            made = np.full((len(widths), widths.max()), False if kind == "bool" else np.nan, kind)
            made[np.arange(widths.max()) < widths[:, None]] = flat
            return {name: made}
        return {name: flat, f"{name}_offsets": np.concatenate([[0], np.cumsum(widths)])}
    if words is not None:
        column = pc.index_in(column.cast(pa.string()), pa.array(words, pa.string()))
    column = column.cast(type)
    filling = {"action": -1, "reward": np.nan, "won": False}
    if name in filling:
        column = pc.fill_null(column, pa.scalar(filling[name], type))
    if column.null_count:
        return {"missing": int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))}
    return {name: column.to_numpy(zero_copy_only=False)}


def _kind(table, name):
    """The type of a column's numbers, and which of meta's words they stand for, if any."""
    kind, _, words = TABLES[table][name].rstrip("?").partition("|")
    return kind.strip("{}"), words


def collect(env, act, *, episodes, seed=0, teams=None, **meta):
    """Play a PettingZoo parallel world: a Log of so many groups, reset with seed, seed + 1, ...

    act: (observations, infos) -> actions, dicts by agent. A mask of the allowed actions is found as `action_mask` in an observation
    that is a dict beside `observation`, or in infos. An agent `wolf_0` is of type `wolf`; teams: {type: team}, otherwise all
    are in team 0. A team's reward is the mean of its agents' over all that it began with. meta: see above; task, name, ...

        log = collect(simple_spread_v3.parallel_env(), lambda observations, infos: {a: 0 for a in observations}, episodes=100)
        write("spread", log)
    """
    kinds = {agent: agent.rstrip("0123456789").rstrip("_-") or agent for agent in env.possible_agents}
    types, number = list(dict.fromkeys(kinds.values())), {agent: i for i, agent in enumerate(env.possible_agents)}
    team_of = {agent: (teams or {}).get(kind, 0) for agent, kind in kinds.items()}
    spaces = {kinds[agent]: env.action_space(agent) for agent in env.possible_agents}
    discrete = all(hasattr(space, "n") for space in spaces.values())
    flat = lambda numbers: np.asarray(numbers, np.float32).reshape(-1)  # noqa: E731
    limits = {kind: {"num_actions": int(space.n)} if discrete else {"low": flat(space.low).tolist(), "high": flat(space.high).tolist()}
              for kind, space in spaces.items()}  # fmt: skip
    steps, keys, did, paid, died, seen, masks = [], [], [], [], [], [], []
    for group in range(episodes):
        observations, infos = env.reset(seed=seed + group)
        sizes = Counter(team_of[agent] for agent in env.agents)
        step = 0
        while env.agents:
            there, actions = list(env.agents), act(observations, infos)
            views = {
                agent: x if isinstance(x, dict) else infos.get(agent, {}) | {"observation": x}
                for agent, x in observations.items()
            }
            observations, rewards, terminated, truncated, infos = env.step({agent: actions[agent] for agent in there})
            for agent in there:
                keys.append((group, step, number[agent], types.index(kinds[agent]), team_of[agent]))
                did.append(actions[agent] if discrete else flat(actions[agent]))
                paid.append(rewards[agent])
                died.append(terminated[agent])
                seen.append(flat(views[agent]["observation"]))
                masks.append(views[agent].get("action_mask", np.ones(limits[kinds[agent]].get("num_actions", 0), np.int8)))
            clock = any(truncated.values())
            for team, size in sizes.items():
                mean = sum(rewards[agent] for agent in there if team_of[agent] == team) / size
                steps.append((group, step, team, mean, not env.agents and not clock, not env.agents and clock))
            step += 1
    columns = lambda names, rows: dict(zip(names, map(np.array, zip(*rows, strict=True)), strict=True))  # noqa: E731
    clock = columns(("group", "step", "team", "reward", "terminated", "truncated"), steps)
    agents = columns(("group", "step", "agent", "agent_type", "team"), keys)
    agents |= {
        "action" if discrete else "action_values": np.array(did),
        "reward": np.array(paid),
        "terminated": np.array(died, bool),
    }
    agents |= {"observation": np.concatenate(seen), "observation_offsets": np.cumsum([0, *map(len, seen)])}
    if discrete and not all(np.all(mask) for mask in masks):
        agents["available"] = np.zeros((len(masks), max(map(len, masks))), bool)
        for row, mask in zip(agents["available"], masks, strict=True):
            row[: len(mask)] = mask
    found = {"name": str(env), "types": limits, "horizon": int(clock["step"].max()) + 1, "seed": seed, "generator": "collect"}
    return Log(found | meta, clock, agents)
