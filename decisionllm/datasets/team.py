"""Logs of many agents in one world: each stay of each agent is an episode, and the episodes of one world share their group."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from decisionllm.config import one_of
from decisionllm.datasets.formats import marl_archives as vault
from decisionllm.datasets.formats.team_log import Log as Log
from decisionllm.datasets.formats.team_log import collect as collect
from decisionllm.datasets.formats.team_log import read as read
from decisionllm.datasets.formats.team_log import write as write
from decisionllm.protocols import Source
from decisionllm.registry import register
from decisionllm.schema import Episode, Spec

SAID = ("env", "world", "references", "generator", "seed", "source", "licence", "repairs")  # what a store repeats of meta
TEXTS = ("none", "constant", "informative", "shuffled")


def canonical(observations, blocks, entity_schema, *, agent_type=0, types=1):
    """Raw observations -> those of a model, the same for any number of entities: (..., R) -> (..., S) float32

    blocks: of the raw observation, see above. entity_schema: Spec.entity_schema; what it has room for and the observation has not is zeros.
    agent_type: its index of so many types, one or (...,); the own block ends with a one-hot of it where there are several.
    """
    lead = observations.shape[:-1]
    made = np.zeros((*lead, sum(width * count for _, width, count in entity_schema)), np.float32)
    room, used, at, column = {}, {}, 0, 0
    for kind, width, count in entity_schema:
        room[kind], used[kind] = made[..., at : at + width * count].reshape(*lead, count, width), 0  # a view
        at += width * count
    for kind, width, count in blocks:
        part = observations[..., column : column + width * count]
        column += width * count
        if kind == "own":
            room[kind][..., 0, used[kind] : used[kind] + width * count] = part
            used[kind] += width * count
        elif kind:
            entities, slots = part.reshape(*lead, count, width), slice(used[kind], used[kind] + count)
            room[kind][..., slots, 0], room[kind][..., slots, 1:] = entities.any(-1), entities
            used[kind] += count
    if types > 1:
        room["own"][..., 0, -types:] = np.eye(types, dtype=np.float32)[agent_type]
    return made


def entity_schema(meta, capacity=6):
    """Spec.entity_schema of a log whose types all have blocks: the own one, then room for `capacity` entities of each kind, or for as
    many as an observation has, if these are more."""
    own, widths, most = 1, {}, {}
    for name, told in meta["types"].items():
        for length, blocks in told["observations"].items():
            counts = dict.fromkeys((kind for kind, _, _ in blocks), 0)
            for kind, width, count in blocks:
                counts[kind] += width * count if kind == "own" else count
                if kind not in ("", "own") and widths.setdefault(kind, width) != width:
                    raise ValueError(
                        f"type {name}: expected {kind} entities of {widths[kind]} numbers as elsewhere, got {width}"
                    )
            if sum(width * count for _, width, count in blocks) != int(length):
                raise ValueError(
                    f"type {name}: expected blocks of {length} numbers in all, as in the observation, got {blocks}"
                )
            own = max(own, counts.get("own", 0))
            most |= {kind: max(most.get(kind, capacity), counts[kind]) for kind in widths.keys() & counts}
    types = len(meta["types"])
    return (("own", own + (types if types > 1 else 0), 1), *((kind, width + 1, most[kind]) for kind, width in widths.items()))


def task_text(meta, n=1, agent_type="", text="informative"):
    """The task in words. n: agents of the team; agent_type: a name in meta["types"]. `constant` says neither."""
    told = text != "constant"
    role = meta["types"].get(agent_type, {}).get("role") or (agent_type if len(meta["types"]) > 1 else "")
    said = (
        meta.get("name", ""), (f"A team of {n}" if n > 1 else "Alone") if told else "", meta.get("task", ""),
        f"At most {meta['horizon']} steps", f"Reward: {meta['reward_rule']}" if meta.get("reward_rule") else "",
        f"Role: {role}" if told and role else "",
    )  # fmt: skip
    return "" if text == "none" else " ".join(part.strip().rstrip(".") + "." for part in said if part)


@register("dataset", "team", text="${text}")
def load(
    *,
    path: str,
    text: str = "none",
    capacity: int = 6,
    returns: str = "",
    team: int = 0,
    meta: str = "",
    cut: int = 25,
) -> Source:
    """A log of many agents: a folder that `write` wrote, a Vault, a folder of OMAR's, or a PyMARL .h5; what is there says which.

    text, capacity, returns, team: see `source`. meta: a JSON file that says more of the log, such as its name, task, reward_rule, or
    the roles and blocks of its types, see teamlog; a public log's only type is `agent`. cut: steps of a world in an OMAR log.
    """
    kind = vault.kind_of(path)
    told = {"path": path, "format": kind, "meta": meta, "cut": cut}
    return source(log_of(path, meta, cut), text=text, capacity=capacity, returns=returns, team=team, **told)


def log_of(path, meta="", cut=25):
    """The Log of a path, see `load`, with what the file `meta` says laid over its own."""
    file, kind = Path(path).expanduser(), vault.kind_of(path)
    readers = {"ours": read, "vault": vault.read_vault, "omar": partial(vault.read_omar, cut=cut), "pymarl": vault.read_pymarl}
    log = readers[kind](file)
    try:
        more = json.loads(Path(meta).expanduser().read_text()) if meta else {}
        types = {name: told | more.get("types", {}).get(name, {}) for name, told in log.meta["types"].items()}
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"dataset.meta: expected a JSON file that describes a log, got {meta} ({error})") from error
    name = {"name": f"team@{file.parent.name}-{file.stem}" if kind == "vault" else f"team@{file.stem}"}
    return replace(log, meta=name | log.meta | more | {"types": types})


def files(*, path, meta="", **options):
    """What `load` would read with these options."""
    given = Path(path).expanduser()
    inside = [given] if vault.kind_of(path) == "pymarl" else sorted(file for file in given.rglob("*") if file.is_file())
    return [*inside, *([Path(meta).expanduser()] if meta else [])]


def source(log, *, text="none", capacity=6, returns="", team=0, **info):
    """A log as episodes, one for each stay of each agent of `team`; other teams are part of the world.

    text: `none`; `constant` names the task; `informative` also the team's size and the agent's role; `shuffled` is
    `informative` with the texts dealt to other episodes. capacity: the most agents of a team, and the room in an observation.
    returns: `team`, the team's reward; `own`, the agent's; `mean`, the mean of the agents' own ones over the whole team, the gone
    included; nothing: what meta says, or `team` if the log has one. info: what else a result must say.

    An agent that is away for some steps has an episode for each stay. One whose rows end before the world's without
    `terminated` has left, and is truncated. A world must end, with `terminated` or `truncated` on its last step.
    """
    meta, types = log.meta, list(log.meta["types"].values())
    one_of("dataset.text", text, TEXTS)
    clock, offsets = _worlds(log, team)
    order, moment = _present(log, team, clock, offsets)
    refuse = partial(log.refuse, "agents", order)
    column = lambda name: log.agents[name][order] if name in log.agents else np.zeros(len(order), np.int8)  # noqa: E731
    group, step, agent, kind, died = (column(name) for name in ("group", "step", "agent", "agent_type", "terminated"))
    world = np.searchsorted(offsets, moment, side="right") - 1
    arrives = np.append(True, (np.diff(world) != 0) | (np.diff(agent) != 0))
    size = np.bincount(world[arrives], minlength=len(offsets) - 1)  # of the team, in each world
    many = size[world]
    refuse(many > capacity, f"expected at most {capacity} agents in a team, got {{}}; raise dataset.capacity", many)
    begins = arrives | np.append(True, np.diff(step) != 1)
    start = np.flatnonzero(begins)
    end = np.append(start[1:], len(order))
    early = (died > 0) & ~np.append(begins[1:], True)
    refuse(early, "terminated: expected no row of this agent in the next step, got one")
    long, finals = np.diff(offsets), clock[offsets[1:] - 1]
    log.refuse(
        "steps", finals, long > meta["horizon"], f"expected at most {meta['horizon']} steps (the horizon), got {{}}", long
    )

    seen, shape = _observations(log, order, kind, capacity)
    actions, masks, loss_mask = _decisions(log, order, kind)
    paid, later, paying = _payments(log, returns, clock, offsets, order, moment, world, size)
    ended = (died > 0) | log.steps["terminated"][clock][moment]
    names = list(meta["types"])
    tasks = [task_text(meta, n, names[k], text) for n, k in zip(size[world[start]].tolist(), kind[start].tolist(), strict=True)]
    if text == "shuffled":
        tasks = [tasks[k] for k in np.random.default_rng(0).permutation(len(tasks))]

    def episode(e):
        a, b = start[e], end[e]
        return Episode(
            seen[a:b], actions[a:b], paid[a:b], terminated=bool(ended[b - 1]), truncated=not ended[b - 1], task=tasks[e],
            group=int(group[a]), action_masks=None if masks is None else masks[a:b], loss_mask=loss_mask[a:b], agent=int(agent[a]), start=int(step[a]), return_after_exit=float(later[b - 1]),
        )  # fmt: skip

    bounds = {} if "num_actions" in types[0] else {name: tuple(types[0][name]) for name in ("low", "high")}
    bounds = bounds or {"num_actions": max(told["num_actions"] for told in types)}
    spec = Spec(seen.shape[1], actions.shape[1], int(meta["horizon"]), entity_schema=shape, **bounds)
    said = {"name": meta.get("name", "team"), "env": "none"} | {key: meta[key] for key in SAID if key in meta}
    chosen = {"text": text, "capacity": capacity, "returns": paying, "team": team}
    return Source(spec, map(episode, range(len(start))), said | chosen | info)


def _worlds(log, team):
    """The step rows of a team in order, and where each world begins among them: (s,), (G+1,) int"""
    group, step = log.steps["group"], log.steps["step"]
    teams = log.steps.get("team", np.zeros(len(group), np.int8))
    every = np.lexsort((step, teams, group))
    refuse = partial(log.refuse, "steps", every)
    same = np.append(False, (np.diff(group[every]) == 0) & (np.diff(teams[every]) == 0))  # as the row before
    apart = np.append(0, np.diff(step[every]))
    refuse(same & (apart == 0), "expected one row for each group, step and team, got a second one")
    gap = np.where(same, apart != 1, step[every] != 0)
    refuse(gap, "expected the steps of a world to count from 0 without a gap")
    over, last = (log.steps["terminated"] | log.steps["truncated"])[every], np.append(~same[1:], True)
    refuse(over & ~last, "expected the world's last step, since it ended here, got another one")
    refuse(last & ~over, "expected terminated or truncated on a world's last step; if the log was cut, drop this world")
    ends = np.flatnonzero(last)
    other = np.append(False, (np.diff(group[every][ends]) == 0) & (np.diff(step[every][ends]) != 0))
    log.refuse("steps", every[ends], other, "expected the world to end for all of its teams in one step")
    clock = every[teams[every] == team]
    if not len(clock):
        raise ValueError(f"dataset.team: expected one of {np.unique(teams).tolist()}, the teams of {log.path}, got {team}")
    return clock, np.append(np.flatnonzero(step[clock] == 0), len(clock))


def _present(log, team, clock, offsets):
    """The agent rows of a team by group, agent and step, and which entry of the clock each belongs to: (n,), (n,) int"""
    order = np.lexsort([log.agents[name] for name in ("step", "agent", "group")])
    refuse = partial(log.refuse, "agents", order)
    group, step, agent = (log.agents[name][order] for name in ("group", "step", "agent"))
    same = np.append(False, (np.diff(group) == 0) & (np.diff(agent) == 0))  # as the row before
    twice = same & np.append(False, np.diff(step) == 0)
    refuse(twice, "expected one row for each group, step and agent, got a second one")
    for name in {"team", "agent_type"} & log.agents.keys():
        changed = same & np.append(False, np.diff(log.agents[name][order]) != 0)
        refuse(changed, f"{name}: expected the same for an agent throughout its group, got another")
    mine = np.full(len(order), True) if "team" not in log.agents else log.agents["team"][order] == team
    order, group, step = order[mine], group[mine], step[mine]
    if not len(order):
        raise ValueError(f"{log.path}, agents: expected rows of team {team}, got none")
    groups = log.steps["group"][clock[offsets[:-1]]]
    world = np.minimum(np.searchsorted(groups, group), len(groups) - 1)
    lost = (groups[world] != group) | (step < 0) | (step >= np.diff(offsets)[world])
    refuse(lost, "expected a row of this group, step and team in the table of steps, got none")
    return order, offsets[world] + step


def _payments(log, returns, clock, offsets, order, moment, world, size):
    """What each row brings, what its team is paid in the steps after it, 0 if each is paid for itself, and which was meant."""
    paying = returns or log.meta.get("returns") or ("team" if "reward" in log.steps else "own")
    one_of("dataset.reward", paying, ("team", "own", "mean"))
    table, rows = ("steps", clock) if paying == "team" else ("agents", order)
    if "reward" not in getattr(log, table):
        raise ValueError(f"{log.path}, {table}: expected a column reward, which model.condition_on={paying} needs, got none")
    pay = getattr(log, table)["reward"][rows].astype(np.float64)
    log.refuse(table, rows, ~np.isfinite(pay), "reward: expected a finite number, got {}", pay)
    if paying == "own":
        return pay.astype(np.float32), np.zeros(len(order)), paying
    if paying == "mean":
        pay = np.bincount(moment, pay, len(clock)) / np.repeat(size, np.diff(offsets))
    before = np.concatenate([[0.0], np.cumsum(pay)])
    return pay[moment].astype(np.float32), before[offsets[world + 1]] - before[moment + 1], paying


def _decisions(log, order, kind):
    """Actions (n, A), masks (n, C), None if all are allowed, and where there is one to imitate (n,) bool."""
    types, rows, refuse = list(log.meta["types"].values()), log.agents, partial(log.refuse, "agents", order)
    discrete = all("num_actions" in told for told in types)
    bounds = [(told.get("low"), told.get("high")) for told in types]
    if not discrete and not (all(bounds[0]) and bounds.count(bounds[0]) == len(bounds)):
        raise ValueError(f"{log.path}: expected every type in meta to have num_actions, or all the same low and high")
    name = "action" if discrete else "action_values"
    if name not in rows:
        raise ValueError(f"{log.path}, agents: expected a column {name}, got {', '.join(rows)}")
    taken = rows[name][order]
    known = taken >= 0 if discrete else np.isfinite(taken).all(1)
    loss_mask = rows["loss_mask"][order] if "loss_mask" in rows else known
    refuse(loss_mask & ~known, f"{name}: expected an action, since loss_mask is true, got {{}}", taken)
    if not discrete:
        return np.where(known[:, None], taken, np.mean(bounds[0], 0)).astype(np.float32), None, loss_mask
    counts = np.array([told["num_actions"] for told in types])
    refuse(taken >= counts[kind], "action: expected an index below {}, got {}", counts[kind], taken)
    masks = np.arange(counts.max()) < counts[kind][:, None]
    if "available" in rows:
        if (width := rows["available"].shape[1]) != counts.max():
            raise ValueError(f"{log.path}, agents, available: expected {counts.max()} actions, got {width}")
        masks &= rows["available"][order]
    refuse(loss_mask & ~masks.any(1), "available: expected an action that is allowed, got a mask that forbids every one")
    allowed = known & np.take_along_axis(masks, np.maximum(taken, 0)[:, None].astype(int), 1)[:, 0]
    forbidden = loss_mask & ~allowed
    refuse(forbidden, "available: forbids the recorded action {}; say loss_mask=false where it was not its own choice", taken)
    masks |= ~masks.any(1, keepdims=True)  # nobody chooses there
    taken = np.where(allowed, taken, masks.argmax(1))  # what was not recorded is shown as the first that is allowed
    return taken[:, None].astype(np.float32), None if masks.all() else masks, loss_mask


def _observations(log, order, kind, capacity):
    """What the model sees of each row, and its entity_schema: (n, S) float32"""
    flat, ends, meta = log.agents["observation"], log.agents.get("observation_offsets"), log.meta
    lengths = (np.full(len(flat), flat.shape[1]) if ends is None else np.diff(ends))[order]
    types = {}
    for k, (name, told) in enumerate(meta["types"].items()):
        own = lengths[kind == k][:1]
        types[name] = told if told.get("observations") else told | {"observations": {int(n): [["own", int(n), 1]] for n in own}}
        strange = (kind == k) & ~np.isin(lengths, [int(length) for length in types[name]["observations"]])
        wanted = ", ".join(str(length) for length in types[name]["observations"])
        log.refuse("agents", order, strange, f"observation: expected {wanted} numbers, got {{}}; say the blocks of each length of type {name} in meta, "
                   "or give these agents a type of their own", lengths)  # fmt: skip
    shape = entity_schema(meta | {"types": types}, capacity)
    made = np.zeros((len(order), sum(width * count for _, width, count in shape)), np.float32)
    for k, told in enumerate(types.values()):
        for length, blocks in told["observations"].items():
            rows = np.flatnonzero((kind == k) & (lengths == int(length)))
            raw = flat[order[rows]] if ends is None else flat[ends[order[rows]][:, None] + np.arange(int(length))]
            log.refuse("agents", order[rows], ~np.isfinite(raw).all(1), "observation: expected finite numbers, got {}", raw)
            made[rows] = canonical(raw, blocks, shape, agent_type=k, types=len(types))
    return made, shape


def coverage(store):
    """What a reader must know of a log of many agents before training on it, as lines of text for its card.

    Joint actions and observations are those of all agents of a group at one step; equal ones are equal to the last bit.
    """
    step = np.arange(len(store.rewards)) + np.repeat(store.start - store.offsets[:-1], store.lengths)
    group, agent = (np.repeat(column, store.lengths) for column in (store.group, store.agent))
    order = np.lexsort((agent, step, group))
    first = np.flatnonzero(np.append(True, (np.diff(group[order]) != 0) | (np.diff(step[order]) != 0)))
    weights = np.random.default_rng(0).integers(2**64, size=agent.max() + 1, dtype=np.uint64)

    def told(columns):
        rows = np.ascontiguousarray(columns[order])
        _, like = np.unique(rows.view(f"V{rows.itemsize * rows.shape[1]}")[:, 0], return_inverse=True)
        joint = np.add.reduceat((like.astype(np.uint64) + np.uint64(1)) * weights[agent[order]], first)  # a number for each
        counts = np.unique(joint, return_counts=True)[1]
        return f"{len(counts):,} different, {100 * counts[counts > 1].sum() / len(first):.1f} % of steps repeat one"

    sizes = np.bincount(np.diff(np.append(first, len(order))))
    shares = ", ".join(f"{n} in {100 * count / len(first):.1f} %" for n, count in enumerate(sizes) if count)
    yield f"  agents       {shares} of the {len(first):,} joint steps"
    late, after = (store.start > 0).mean(), (store.return_after_exit != 0).mean()
    yield f"  stays        {100 * late:.1f} % begin late, {100 * after:.1f} % are paid for after their end"
    yield f"  joint action {told(store.actions)}"
    yield f"  joint both   {told(np.concatenate([store.observations, store.actions], 1))} (observations and actions)"
    forbidden = 0 if store.action_masks is None else 1 - store.action_masks.mean()
    yield f"  choice       {100 * forbidden:.1f} % of actions are masked, {100 * (1 - store.loss_mask.mean()):.1f} % of steps are not to be imitated"


def save(folder, store):
    """Write the log that a store was made of as `write` does. The log is read again: a store has one observation for all types."""
    if store.info.get("format") is None or store.agent is None:
        raise ValueError(f"export=team: expected a dataset of many agents (dataset=team), got {store.info['name']}")
    write(folder, log_of(*(store.info[name] for name in ("path", "meta", "cut"))))
