"""Logs of many agents in one world: every agent's stay is an episode, and the episodes of one world share their group.

A log is two tables and what is to be said about them. `steps` has a row for each (group, step, team): the world's clock,
the team's reward, the ending. `agents` has a row for each (group, step, agent) that was there: no row, not there. They are
kept apart because a team is paid after an agent of it is gone; `later` of an episode is that part of its return.

meta: name; world {id, version, arguments}; task, reward_rule (sentences); horizon (steps); references; returns (see
`source`); types: {name: {role, num_actions or low and high, observations: {length: [[kind, width, count], ...]}}}. The blocks
of an observation of that length follow each other: `own` is the agent itself, "" is left out, any other kind is `count`
entities of `width` numbers each, where an entity that is all zeros is not there. Without blocks, all numbers are own.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from decisionllm.datasets.store import Source
from decisionllm.schema import Episode, Spec

FORMAT = 1
TEXTS = ("none", "constant", "informative", "shuffled")
STEPS = {"group": "int64", "step": "int32", "team": "int8", "reward": "float32", "terminated": "bool", "truncated": "bool",
         "won": "bool", "state": "float32"}  # fmt: skip
AGENTS = {"group": "int64", "step": "int32", "agent": "int16", "agent_type": "int8", "team": "int8", "acted": "bool",
          "observation": "float32", "action": "int32", "action_values": "float32", "available": "bool", "reward": "float32",
          "terminated": "bool", "duration": "int16", "behaviour": "int8"}  # fmt: skip
NEEDED = {"steps": ("group", "step", "terminated", "truncated"), "agents": ("group", "step", "agent", "observation")}


@dataclass(frozen=True)
class Log:
    """Columns of s step rows and n agent rows, in any order; one that is not there is left out. Raw units.

    observation, state: (n, O), or all rows end to end with `observation_offsets` (n+1,). agent_type, behaviour: indices into
    meta["types"] and meta["behaviours"]; left out: 0. team: left out: 0. action: (n,), -1 where it was not recorded;
    action_values: (n, A), nan there. available: (n, C) bool. acted: left out: wherever an action was recorded.
    """

    meta: dict
    steps: dict[str, np.ndarray]
    agents: dict[str, np.ndarray]
    path: str = ""  # where it was read

    def __post_init__(self):
        if not self.meta.get("types"):
            raise ValueError(f"{self.path or 'Log'}: expected meta['types'] to name a type of agents at least, got none")
        for table, known in (("steps", STEPS), ("agents", AGENTS)):
            columns = getattr(self, table)
            allowed = {*known, "observation_offsets", "state_offsets"}
            if lacking := [name for name in NEEDED[table] if name not in columns]:
                raise ValueError(
                    f"{self.path or 'Log'}, {table}: expected columns {', '.join(lacking)}, got {', '.join(columns)}"
                )
            if unknown := sorted(set(columns) - allowed):
                raise ValueError(
                    f"{self.path or 'Log'}, {table}: no such column {', '.join(unknown)}; known: {', '.join(known)}"
                )
            n = len(columns["group"])
            for name, column in columns.items():
                flat = f"{name}_offsets" in columns
                if not flat and len(column) != n + name.endswith("_offsets"):
                    raise ValueError(f"{self.path or 'Log'}, {table}: expected {n} rows, got {len(column)} of {name}")

    def fail(self, table, row, message):
        """Refuse a row, by its number in the table (from 1) and its key."""
        columns = getattr(self, table)
        names = ("group", "step", "agent" if table == "agents" else "team")
        key = ", ".join(f"{name} {columns[name][row]}" for name in names if name in columns)
        place = f"{self.path}/{table}.parquet" if self.path and Path(self.path).is_dir() else f"{self.path or 'log'}, {table}"
        raise ValueError(f"{place}, row {row + 1} ({key}): {message}")


def canonical(observations, blocks, layout, *, agent_type=0, types=1):
    """Raw observations -> those of a model, which are the same for any number of entities: (..., R) -> (..., S) float32

    blocks: of the raw observation, see above. layout: Spec.layout; what it has room for and the observation has not is zeros.
    agent_type, types: where there are several types, its index, or one an observation; the own block ends with a one-hot of it.
    """
    lead = observations.shape[:-1]
    made = np.zeros((*lead, sum(width * count for _, width, count in layout)), np.float32)
    room, at, column = {}, 0, 0
    for kind, width, count in layout:
        room[kind] = made[..., at : at + width * count].reshape(*lead, count, width)  # a view: one axis is parted in two
        at += width * count
    used = dict.fromkeys(room, 0)
    for kind, width, count in blocks:
        part = observations[..., column : column + width * count]
        column += width * count
        if kind == "own":
            room[kind][..., 0, used[kind] : used[kind] + width * count] = part
            used[kind] += width * count
        elif kind:
            entities, slots = part.reshape(*lead, count, width), slice(used[kind], used[kind] + count)
            room[kind][..., slots, 0] = entities.any(-1)
            room[kind][..., slots, 1:] = entities
            used[kind] += count
    if types > 1:
        room["own"][..., 0, -types:] = np.eye(types, dtype=np.float32)[agent_type]
    return made


def layout(meta, capacity=6):
    """Spec.layout of a log whose types all have blocks: the own one, then room for `capacity` entities of each kind, or for as
    many as an observation has, if these are more."""
    own, sizes = 1, {}
    for name, told in meta["types"].items():
        for length, blocks in told["observations"].items():
            if sum(width * count for _, width, count in blocks) != int(length):
                raise ValueError(
                    f"type {name}: expected blocks of {length} numbers in all, the size of the observation, got {blocks}"
                )
            counts = {}
            for kind, width, count in blocks:
                counts[kind] = counts.get(kind, 0) + (width * count if kind == "own" else count)
                if kind not in ("", "own") and sizes.setdefault(kind, [width, 0])[0] != width:
                    raise ValueError(
                        f"type {name}: expected {kind} entities of {sizes[kind][0]} numbers as elsewhere, got {width}"
                    )
            own = max(own, counts.pop("own", 0))
            for kind in counts.keys() - {""}:
                sizes[kind][1] = max(sizes[kind][1], counts[kind])
    types = len(meta["types"])
    entities = ((kind, width + 1, max(count, capacity)) for kind, (width, count) in sizes.items())
    return (("own", own + (types if types > 1 else 0), 1), *entities)


def task_text(meta, n=None, agent_type=None, text="informative"):
    """The task in words. n: agents of the team; agent_type: a name in meta["types"]. `constant` says neither."""
    if text == "none":
        return ""
    said = [meta.get("name", "") or meta.get("world", {}).get("id", "world")]
    if text != "constant":
        said.append(f"A team of {n}" if n > 1 else "Alone")
    said += [meta.get("task", ""), f"At most {meta['horizon']} steps"]
    said += [f"Reward: {meta['reward_rule']}"] if meta.get("reward_rule") else []
    if text != "constant" and (role := meta["types"][agent_type].get("role") or (len(meta["types"]) > 1 and agent_type)):
        said.append(f"Role: {role}")
    return ". ".join(part.strip().rstrip(".") for part in said if part) + "."


def source(log, *, text="none", capacity=6, returns="", team=0, **info):
    """A log as episodes, one for each stay of each agent of `team`; other teams are part of the world.

    text: `none`; `constant` names the task; `informative` also the team's size and the agent's role; `shuffled` is
    `informative` with the texts dealt to other episodes. capacity: the most agents of a team, and the room in an observation.
    returns: `team`, the team's reward; `own`, the agent's; `mean`, the mean of the agents' own ones over the whole team, the gone
    included; nothing: what meta["returns"] says, or `team` if the log has one. info: what else a result must say.

    An agent that is away for some steps has an episode for each stay. One whose rows end before the world's without
    `terminated` has left, and is truncated. A world must end, with `terminated` or `truncated` on its last step.
    """
    if text not in TEXTS:
        raise ValueError(f"dataset.text: expected one of {', '.join(TEXTS)}, got {text!r}")
    clock, offsets = worlds(log, team)
    order, moment = present(log, team, clock, offsets)
    column = lambda name, missing=0: log.agents[name][order] if name in log.agents else np.full(len(order), missing)  # noqa: E731
    group, step, agent, of_type = (column(name) for name in ("group", "step", "agent", "agent_type"))
    world = np.searchsorted(offsets, moment, side="right") - 1
    new = np.append(True, (np.diff(world) != 0) | (np.diff(agent) != 0))  # the first row of an agent
    size = np.bincount(world[new], minlength=len(offsets) - 1)  # of the team, in each world
    if size.max() > capacity:
        log.fail("agents", order[np.argmax(size[world] > capacity)],
                 f"expected at most {capacity} agents in a team, got {size.max()}; raise dataset.capacity")  # fmt: skip
    stays = new | np.append(True, np.diff(step) != 1)
    start = np.flatnonzero(stays)
    end = np.append(start[1:], len(order))
    died = column("terminated", False)
    if (early := died[:-1] & ~stays[1:]).any():
        log.fail(
            "agents", order[np.argmax(early)], "expected this agent's last row, since it terminated, got one for the next step"
        )

    types, meta = list(log.meta["types"]), with_blocks(log, order, of_type)
    shape = layout(meta, capacity)
    seen = observations(log, meta, shape, order, of_type)
    actions, masks, acted = decisions(log, order, of_type)
    kind = scope(log, returns)
    paid, later = payments(log, kind, clock, offsets, order, moment, world, size)
    ended = (died | log.steps["terminated"][clock][moment])[end - 1]
    tasks = [task_text(meta, int(n), types[k], text) for n, k in zip(size[world[start]], of_type[start], strict=True)]
    if text == "shuffled":
        tasks = [tasks[k] for k in np.random.default_rng(0).permutation(len(tasks))]

    def episode(e):
        a, b = start[e], end[e]
        return Episode(
            seen[a:b], actions[a:b], paid[a:b], bool(ended[e]), not ended[e], tasks[e], int(group[a]), None if masks is None else masks[a:b],
            acted[a:b], agent=int(agent[a]), start=int(step[a]), later=float(later[b - 1]),
        )  # fmt: skip

    spaces = [told for told in log.meta["types"].values()]
    limits = {"action_dim": 1, "num_actions": max(told["num_actions"] for told in spaces)} if discrete(log) else {
        "action_dim": len(spaces[0]["low"]), "low": tuple(spaces[0]["low"]), "high": tuple(spaces[0]["high"])}  # fmt: skip
    spec = Spec(sum(width * count for _, width, count in shape), horizon=int(meta["horizon"]), layout=shape, **limits)
    said = {key: meta[key] for key in ("world", "references", "generator", "seed", "source", "licence") if key in meta}
    chosen = {
        "name": meta.get("name", "team"),
        "env": meta.get("env", "none"),
        "text": text,
        "capacity": capacity,
        "returns": kind,
        "team": team,
    }
    return Source(spec, map(episode, range(len(start))), chosen | said | info)


def worlds(log, team):
    """The step rows of a team in order, and where each world begins among them: (s,), (G+1,) int"""
    group, step = log.steps["group"], log.steps["step"]
    of_team = log.steps.get("team", np.zeros(len(group), np.int8))
    every = np.lexsort((step, of_team, group))
    same = (np.diff(group[every]) == 0) & (np.diff(of_team[every]) == 0)
    apart = np.diff(step[every])
    if (twice := same & (apart == 0)).any():
        log.fail("steps", every[1:][np.argmax(twice)], "expected one row for each group, step and team, got a second one")
    if (gap := np.append(step[every][:1] != 0, np.where(same, apart != 1, step[every][1:] != 0))).any():
        log.fail("steps", every[np.argmax(gap)], "expected the steps of a world to count from 0 without a gap")
    over = (log.steps["terminated"] | log.steps["truncated"])[every]
    last = np.append(~same, True)
    if (wrong := over != last).any():
        at = np.argmax(wrong)
        log.fail("steps", every[at], "expected terminated or truncated on the last step of a world, and nowhere else, got "
                 + ("an end and then another step" if over[at] else "neither; the log may be cut: leave this world out"))  # fmt: skip
    ends = np.flatnonzero(last)
    other = (np.diff(group[every][ends]) == 0) & (np.diff(step[every][ends]) != 0)
    if other.any():
        log.fail("steps", every[ends[1:][np.argmax(other)]], "expected the world to end for all of its teams in one step")
    clock = every[of_team[every] == team]
    if not len(clock):
        raise ValueError(f"{log.path or 'log'}: dataset.team: expected one of {np.unique(of_team).tolist()}, got {team}")
    return clock, np.append(np.flatnonzero(step[clock] == 0), len(clock))


def present(log, team, clock, offsets):
    """The agent rows of a team by group, agent and step, and which entry of the clock each belongs to: (n,), (n,) int"""
    rows = log.agents
    order = np.lexsort((rows["step"], rows["agent"], rows["group"]))
    group, step, agent = (rows[name][order] for name in ("group", "step", "agent"))
    same = (np.diff(group) == 0) & (np.diff(agent) == 0)
    if (twice := same & (np.diff(step) == 0)).any():
        log.fail("agents", order[1:][np.argmax(twice)], "expected one row for each group, step and agent, got a second one")
    for name in ("team", "agent_type"):
        if name in rows and (other := same & (np.diff(rows[name][order]) != 0)).any():
            log.fail(
                "agents", order[1:][np.argmax(other)], f"expected one {name} for an agent throughout its group, got another"
            )
    mine = np.ones(len(order), bool) if "team" not in rows else rows["team"][order] == team
    order, group, step = order[mine], group[mine], step[mine]
    if not len(order):
        raise ValueError(f"{log.path or 'log'}: expected rows of agents of team {team}, got none")
    groups = log.steps["group"][clock[offsets[:-1]]]
    world = np.minimum(np.searchsorted(groups, group), len(groups) - 1)
    if (lost := (groups[world] != group) | (step < 0) | (step >= np.diff(offsets)[world])).any():
        log.fail(
            "agents", order[np.argmax(lost)], "expected a row of this group, step and team in the table of steps, got none"
        )
    return order, offsets[world] + step


def scope(log, returns=""):
    kind = returns or log.meta.get("returns") or ("team" if "reward" in log.steps else "own")
    if kind not in ("team", "own", "mean"):
        raise ValueError(f"dataset.returns: expected one of team, own, mean, got {kind!r}")
    if "reward" not in (log.steps if kind == "team" else log.agents):
        raise ValueError(
            f"{log.path or 'log'}: returns={kind} needs a reward in the table of {'steps' if kind == 'team' else 'agents'}"
        )
    return kind


def payments(log, kind, clock, offsets, order, moment, world, size):
    """What each row brings, and what its team is paid in the steps after it, which is 0 if each is paid for itself: (n,), (n,)"""
    table, rows = ("steps", clock) if kind == "team" else ("agents", order)
    pay = log_pay = getattr(log, table)["reward"][rows].astype(np.float64)
    if not np.isfinite(log_pay).all():
        log.fail(
            table,
            rows[np.argmin(np.isfinite(log_pay))],
            f"reward: expected a finite number, got {log_pay[~np.isfinite(log_pay)][0]}",
        )
    if kind == "own":
        return pay.astype(np.float32), np.zeros(len(order))
    if kind == "mean":
        pay = np.bincount(moment, pay, len(clock)) / np.repeat(size, np.diff(offsets))
    before = np.concatenate([[0.0], np.cumsum(pay)])
    return pay[moment].astype(np.float32), before[offsets[world + 1]] - before[moment + 1]


def discrete(log):
    spaces = log.meta["types"].values()
    if all("num_actions" in told for told in spaces):
        return True
    first = next(iter(spaces))
    if any(
        not {"low", "high"} <= told.keys() or [told["low"], told["high"]] != [first["low"], first["high"]] for told in spaces
    ):
        raise ValueError(
            f"{log.path or 'log'}: expected every type to have num_actions, or all the same low and high, got {log.meta['types']}"
        )
    return False


def decisions(log, order, of_type):
    """Actions (n, A), masks of the discrete ones (n, C) or None, and where there is one to imitate (n,) bool."""
    rows, finite = log.agents, discrete(log)
    name = "action" if finite else "action_values"
    if name not in rows:
        raise ValueError(f"{log.path or 'log'}, agents: expected a column {name}, got {', '.join(rows)}")
    taken = rows[name][order]
    known = taken >= 0 if finite else np.isfinite(taken).all(1)
    acted = rows["acted"][order] if "acted" in rows else known
    if (lacking := acted & ~known).any():
        log.fail(
            "agents",
            order[np.argmax(lacking)],
            f"{name}: expected an action, since acted is true, got {taken[np.argmax(lacking)]}",
        )
    if not finite:
        low, high = next((told["low"], told["high"]) for told in log.meta["types"].values())
        return np.where(known[:, None], taken, np.mean([low, high], 0)).astype(np.float32), None, acted
    counts = np.array([told["num_actions"] for told in log.meta["types"].values()])
    if (wrong := taken >= counts[of_type]).any():
        at = np.argmax(wrong)
        log.fail("agents", order[at], f"action: expected an index below {counts[of_type[at]]}, got {taken[at]}")
    masks = np.arange(counts.max()) < counts[of_type][:, None]
    if "available" not in rows:
        return np.maximum(taken, 0)[:, None].astype(np.float32), masks if (counts < counts.max()).any() else None, acted
    if (width := rows["available"].shape[1]) != counts.max():
        raise ValueError(f"{log.path or 'log'}, agents, available: expected {counts.max()} actions, got {width}")
    masks &= rows["available"][order]
    if (none := acted & ~masks.any(1)).any():
        log.fail(
            "agents", order[np.argmax(none)], "available: expected an action that is allowed, got a mask that forbids every one"
        )
    allowed = np.take_along_axis(masks, np.maximum(taken, 0)[:, None].astype(int), 1)[:, 0]
    if (wrong := acted & ~allowed).any():
        at = np.argmax(wrong)
        log.fail(
            "agents",
            order[at],
            f"available: the mask forbids the recorded action {taken[at]}; set acted to false where it was not its own choice",
        )
    masks[~acted & ~masks.any(1)] = True  # nobody chooses there
    taken = np.where(allowed & known, taken, masks.argmax(1))  # what was not recorded is shown as the first that is allowed
    return taken[:, None].astype(np.float32), masks, acted


def lengths(log):
    """How many numbers each observation has: (n,) int"""
    offsets = log.agents.get("observation_offsets")
    seen = log.agents["observation"]
    return np.full(len(seen), seen.shape[1]) if offsets is None else np.diff(offsets)


def with_blocks(log, order, of_type):
    """meta, where a type without blocks has one for all of its numbers."""
    found, types = lengths(log)[order], {}
    for k, (name, told) in enumerate(log.meta["types"].items()):
        own = found[of_type == k]
        if not told.get("observations") and len(own) and (other := own != own[0]).any():
            log.fail("agents", order[of_type == k][np.argmax(other)],
                     f"observation: expected {own[0]} numbers as before, got {own[other][0]}; say the blocks of each length of "
                     f"type {name} in meta.json, or give these agents a type of their own")  # fmt: skip
        one = {str(own[0]): [["own", int(own[0]), 1]]} if len(own) else {}
        types[name] = told | {"observations": told.get("observations") or one}
    return log.meta | {"types": types}


def observations(log, meta, shape, order, of_type):
    """What the model sees of each row: (n, S) float32"""
    flat, found = log.agents["observation"], lengths(log)[order]
    first = log.agents["observation_offsets"][order] if "observation_offsets" in log.agents else None
    made = np.zeros((len(order), sum(width * count for _, width, count in shape)), np.float32)
    for k, (name, told) in enumerate(meta["types"].items()):
        known = {int(length): blocks for length, blocks in told["observations"].items()}
        if (strange := (of_type == k) & ~np.isin(found, list(known))).any():
            at = np.argmax(strange)
            log.fail(
                "agents",
                order[at],
                f"observation: expected one of {sorted(known)} numbers, as meta.json says of type {name}, got {found[at]}",
            )
        for length, blocks in known.items():
            rows = np.flatnonzero((of_type == k) & (found == length))
            raw = flat[order[rows]] if first is None else flat[first[rows][:, None] + np.arange(length)]
            if not (finite := np.isfinite(raw).all(1)).all():
                at = np.argmin(finite)
                log.fail("agents", order[rows[at]], f"observation: expected finite numbers, got {raw[at].tolist()}")
            made[rows] = canonical(raw, blocks, shape, agent_type=k, types=len(meta["types"]))
    return made
