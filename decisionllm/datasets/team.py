"""Logs of many agents in one world: each stay of each agent is an episode, and the episodes of one
world share their group.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from pathlib import Path
from typing import Any

import numpy as np

from decisionllm.checks import one_of
from decisionllm.datasets.formats import marl_archives
from decisionllm.datasets.formats.team_log import Log, collect, common_meta, read, read_meta, write
from decisionllm.datasets.store import Store
from decisionllm.files import explained
from decisionllm.protocols import Source
from decisionllm.registry import register
from decisionllm.schema import Episode, Json, Spec, differs
from decisionllm.tokenizers.entities import blocks as placed
from decisionllm.tokenizers.entities import vectors

__all__ = ["Log", "collect", "load", "read", "source", "write"]
# what a store repeats of meta
KEPT = ("env", "world", "references", "generator", "seed", "source", "licence", "repairs")
TEXTS = ("none", "constant", "informative", "paraphrased", "shuffled")
Meta = dict[str, Any]
Schema = tuple[tuple[str, int, int], ...]


def canonical(
    observations: np.ndarray,
    blocks: Sequence[Any],
    entity_schema: Schema,
    *,
    agent_type: int | np.ndarray = 0,
    types: int = 1,
) -> np.ndarray:
    """Raw observations in the layout of a model, which is the same for any number of entities.

    Args:
        observations: (..., R).
        blocks: of the raw observation, see `team_log`.
        entity_schema: Spec.entity_schema; entities that the observation does not have are zeros.
        agent_type: index of the agents' type, one or (...,).
        types: number of types; the own block ends with a one-hot of the type where there are
            several.

    Returns:
        (..., S) float32.
    """
    lead = observations.shape[:-1]
    made = np.zeros((*lead, sum(width * count for _, width, count in entity_schema)), np.float32)
    room = {
        kind: made[..., at : at + w * count].reshape(*lead, count, w)
        for kind, at, w, count in placed(entity_schema)
    }
    used = dict.fromkeys(room, 0)  # the rooms are views
    for kind, at, width, count in placed(blocks):
        part = observations[..., at : at + width * count]
        if kind == "own":
            room[kind][..., 0, used[kind] : used[kind] + width * count] = part
            used[kind] += width * count
        elif kind:
            entities, slots = (
                part.reshape(*lead, count, width),
                slice(used[kind], used[kind] + count),
            )
            room[kind][..., slots, 0], room[kind][..., slots, 1:] = entities.any(-1), entities
            used[kind] += count
    if types > 1:
        room["own"][..., 0, -types:] = np.eye(types, dtype=np.float32)[agent_type]
    return made


def canonical_rows(
    kinds: np.ndarray,
    flat: np.ndarray,
    starts: np.ndarray,
    lengths: np.ndarray,
    types: Mapping[str, Meta],
    shape: Schema,
) -> np.ndarray:
    """`canonical` of n rows of several types and lengths.

    Args:
        kinds: (n,) type, as an index.
        flat: raw observations, end to end.
        starts, lengths: (n,) where each row's is in `flat`, and its numbers.
        types: meta["types"], each with blocks, see `with_blocks`.
        shape: Spec.entity_schema.

    Returns:
        (n, S) float32.
    """
    made = np.zeros((len(kinds), sum(width * count for _, width, count in shape)), np.float32)
    for k, each in enumerate(types.values()):
        for length, blocks in each["observations"].items():
            if len(rows := np.flatnonzero((kinds == k) & (lengths == int(length)))):
                raw = np.lib.stride_tricks.sliding_window_view(flat, int(length))[starts[rows]]
                made[rows] = canonical(raw, blocks, shape, agent_type=k, types=len(types))
    return made


def with_blocks(types: Mapping[str, Meta], lengths: Mapping[str, int]) -> dict[str, Meta]:
    """meta["types"], where a type without blocks has one `own` block of `lengths[name]` numbers."""
    whole = {name: {str(n): [["own", n, 1]]} for name, n in lengths.items()}
    return {
        name: each | {"observations": each.get("observations") or whole.get(name, {})}
        for name, each in types.items()
    }


def entity_schema(meta: Meta, capacity: int = 6) -> tuple[tuple[str, int, int], ...]:
    """Spec.entity_schema of a log whose types all have blocks: the own block, then `capacity`
    entities of each kind, or as many as an observation has, if these are more."""
    own, widths, most = 1, dict[str, int](), dict[str, int]()
    for name, each in meta["types"].items():
        for length, blocks in each["observations"].items():
            counts = dict.fromkeys((kind for kind, _, _ in blocks), 0)
            for kind, width, count in blocks:
                counts[kind] += width * count if kind == "own" else count
                if kind not in ("", "own") and widths.setdefault(kind, width) != width:
                    known = f"{kind} entities of {widths[kind]} numbers as elsewhere"
                    raise ValueError(f"type {name}: expected {known}, got {width}")
            if sum(width * count for _, width, count in blocks) != int(length):
                raise ValueError(
                    f"type {name}: expected blocks of {length} numbers in all, as observed, got "
                    f"{blocks}"
                )
            own = max(own, counts.get("own", 0))
            most |= {
                kind: max(most.get(kind, capacity), counts[kind]) for kind in widths.keys() & counts
            }
    types = len(meta["types"])
    return (
        ("own", own + (types if types > 1 else 0), 1),
        *((kind, width + 1, most[kind]) for kind, width in widths.items()),
    )


def task_text(meta: Meta, n: int = 1, agent_type: str = "", text: str = "informative") -> str:
    """The task text of an agent of a team of n. agent_type: a name in meta["types"].

    `constant` says neither size nor role.
    """
    full = text != "constant"
    role = meta["types"].get(agent_type, {}).get("role") or (
        agent_type if len(meta["types"]) > 1 else ""
    )
    parts = (
        meta.get("name", ""),
        (f"A team of {n}" if n > 1 else "Alone") if full else "",
        meta.get("task", ""),
        f"At most {meta['horizon']} steps",
        f"Reward: {meta['reward_rule']}" if meta.get("reward_rule") else "",
        f"Role: {role}" if full and role else "",
    )
    return (
        "" if text == "none" else " ".join(part.strip().rstrip(".") + "." for part in parts if part)
    )


def team_facts(meta: Meta, n: int, agent_type: str) -> Json:
    """The facts of a task for `wordings`, as in `task_text`; the role is the name of the type,
    `agent` where there is one type.
    """
    said = {
        "name": meta.get("name", ""),
        "goal": meta.get("task", ""),
        "reward": meta.get("reward_rule", ""),
    }
    known = {name: words.strip().rstrip(".") for name, words in said.items() if words}
    role = agent_type if len(meta["types"]) > 1 else "agent"
    return {"library": "teams", "size": n, "role": role, "steps": meta["horizon"], **known}


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
    """A log of many agents: a folder that `write` wrote, a Vault, a folder of OMAR's, or a PyMARL
    .h5, found by its files.

    Args:
        path: the folder or file.
        text, capacity, returns, team: see `source`.
        meta: a JSON file that is laid over the log's meta, see `team_log`, such as its name, task,
            reward_rule, or the roles and blocks of its types; the only type of a public log is
            `agent`.
        cut: steps of a world in an OMAR log.
    """
    given = {"path": path, "format": marl_archives.kind_of(path), "meta": meta, "cut": cut}
    return source(
        logs_of(path, meta, cut), text=text, capacity=capacity, returns=returns, team=team, **given
    )


def logs_of(path: str, meta: str = "", cut: int = 25) -> Callable[[], Iterable[Log]]:
    """() -> the Logs of a path, see `load`, each of some whole worlds, with the file `meta` laid
    over their meta.
    """
    file, kind = Path(path).expanduser(), marl_archives.kind_of(path)
    logs: Callable[[], Iterator[Log]]
    logs = (
        partial(iter, [read(file)])
        if kind == "ours"
        else partial(marl_archives.logs, file, kind, cut=cut)
    )
    return lambda: (replace(log, meta=_overlaid(log.meta, path, meta)) for log in logs())


def meta_of(path: str, meta: str = "") -> Meta:
    """The meta of `logs_of`; the tables of a log in our own format are not read."""
    if marl_archives.kind_of(path) == "ours":
        return _overlaid(read_meta(Path(path).expanduser()), path, meta)
    return reduce(common_meta, (log.meta for log in logs_of(path, meta)()))


def _overlaid(found: Meta, path: str, meta: str) -> Meta:
    """The meta of a log with the JSON file `meta` laid over it, and a name."""
    file = Path(path).expanduser()
    with explained(
        f"dataset.meta: expected a JSON file that describes a log, got {meta}",
        OSError,
        ValueError,
        AttributeError,
    ):
        more = json.loads(Path(meta).expanduser().read_text()) if meta else {}
        types = {
            name: each | more.get("types", {}).get(name, {})
            for name, each in found["types"].items()
        }
    vault = marl_archives.kind_of(path) == "vault"
    return (
        {"name": f"team@{file.parent.name}-{file.stem}" if vault else f"team@{file.stem}"}
        | found
        | more
        | {"types": types}
    )


def files(*, path: str, meta: str = "", **options: Any) -> list[Path]:
    """The files that `load` reads with these options."""
    given = Path(path).expanduser()
    inside = (
        [given]
        if marl_archives.kind_of(path) == "pymarl"
        else sorted(file for file in given.rglob("*") if file.is_file())
    )
    return [*inside, *([Path(meta).expanduser()] if meta else [])]


def source(
    logs: Log | Callable[[], Iterable[Log]],
    *,
    text: str = "none",
    capacity: int = 6,
    returns: str = "",
    team: int = 0,
    **info: Any,
) -> Source:
    """A log as episodes, one for each stay of each agent of `team`; other teams are part of the
    world.

    An agent that is absent for some steps has an episode for each stay. One whose rows end before
    the world's without `terminated` has left, and is truncated. A world must end, with `terminated`
    or `truncated` on its last step.

    Args:
        logs: the log; or () -> its parts, Logs of some whole worlds each, which are read twice
            where there are several.
        text: `none`; `constant` names the task; `informative` also the team's size and the agent's
            role; `shuffled` is `informative` with the texts permuted between episodes;
            `paraphrased` is `informative` in the wordings of `team_frames.yaml`, another one in
            each window.
        capacity: the most agents of a team, and the entities of a kind that an observation has room
            for.
        returns: `team`, the team's reward; `own`, the agent's; `mean`, the mean reward of all
            agents that the team ever has;
            empty: meta's, or `team` if the log has a team reward.
        team: whose agents are read.
        info: further facts that a result must report.

    Raises:
        ValueError: a row that cannot be, with its table, number and key.
    """
    one_of("dataset.text", text, TEXTS)
    parts = partial(list, [logs]) if isinstance(logs, Log) else logs
    stays = partial(_stays, capacity=capacity, returns=returns, team=team)

    # -- what the parts have in common --
    number: dict[tuple[int, str], int] = {}  # of each (team size, type of agent)
    named = []  # the number of each stay, by part
    masked = False
    meta: Meta = {}
    for part in map(stays, parts()):
        facts, _ = part
        meta = common_meta(meta, facts["meta"])
        named.append(np.array([number.setdefault(each, len(number)) for each in facts["named"]]))
        masked |= facts["masked"]
    if meta.get("shared_reward") and facts["returns"] != "team":
        raise ValueError(
            f"dataset.returns={facts['returns']}: expected a reward of each agent, got one for the "
            "whole team"
        )

    # -- texts --
    words = [task_text(meta, n, name, text) for n, name in number]
    which = np.concatenate(named)
    if text == "paraphrased":
        facts_of = {task: team_facts(meta, *each) for task, each in zip(words, number, strict=True)}
        info["wordings"] = facts_of
    if text == "shuffled":
        which = which[np.random.default_rng(0).permutation(len(which))]
    tasks = map(words.__getitem__, which)

    # -- spec and info --
    types = list(meta["types"].values())
    bounds: Meta = {name: tuple(types[0][name]) for name in ("low", "high") if name in types[0]}
    if not bounds:
        bounds = {"num_actions": max(each["num_actions"] for each in types)}
    observation_dim, action_dim = facts["sizes"]
    horizon = int(meta["horizon"])
    spec = Spec(observation_dim, action_dim, horizon, entity_schema=facts["schema"], **bounds)
    found = {"name": meta.get("name", "team"), "env": "none"}
    found |= {key: meta[key] for key in KEPT if key in meta}
    if meta.get("plane"):
        found["vectors"] = vectors(facts["schema"], len(types))
    chosen = {"text": text, "capacity": capacity, "returns": facts["returns"], "team": team}

    # -- episodes: several parts are read again, as parts of one log --
    again: Iterable[Any] = [part]
    if len(named) > 1:
        again = map(stays, (replace(log, meta=meta) for log in parts()))
    episodes = (episode for _, made in again for episode in made(tasks, masked))
    return Source(spec, episodes, found | chosen | info)


Made = Callable[[Iterator[str], bool], Iterator[Episode]]


def _stays(log: Log, *, capacity: int, returns: str, team: int) -> tuple[Json, Made]:
    """Facts of the stays of a team's agents in a Log, see `source`; and (their texts, whether they
    have action masks) -> episodes.
    """
    meta = log.meta
    clock, offsets = _worlds(log, team)
    order, moment = _agent_rows(log, team, clock, offsets)
    refuse = partial(log.refuse, "agents", order)
    column = {
        name: np.zeros(len(log.agents["group"]), np.int8) for name in ("agent_type", "terminated")
    } | log.agents
    group, step, agent, kind, died = (
        column[name][order] for name in ("group", "step", "agent", "agent_type", "terminated")
    )
    world = np.searchsorted(offsets, moment, side="right") - 1
    arrives = differs(world, agent)
    size = np.bincount(world[arrives], minlength=len(offsets) - 1)  # of the team, in each world
    many = size[world]
    refuse(
        many > capacity,
        f"expected at most {capacity} agents in a team, got {{}}; raise dataset.capacity",
        many,
    )
    begins = arrives | np.append(True, np.diff(step) != 1)
    start = np.flatnonzero(begins)
    end = np.append(start[1:], len(order))
    early = (died > 0) & ~np.append(begins[1:], True)
    refuse(early, "terminated: expected no row of this agent in the next step, got one")
    long, finals = np.diff(offsets), clock[offsets[1:] - 1]
    too_long = f"expected at most {meta['horizon']} steps (the horizon), got {{}}"
    log.refuse("steps", finals, long > meta["horizon"], too_long, long)

    observations, shape = _observations(log, order, kind, capacity)
    actions, masks, loss_mask = _decisions(log, order, kind)
    rewards, later, rewarded = _rewards(log, returns, clock, offsets, order, moment, world, size)
    ended = (died > 0) | log.steps["terminated"][clock][moment]
    named = [
        *zip(
            size[world[start]].tolist(),
            np.array([*meta["types"]])[kind[start]].tolist(),
            strict=True,
        )
    ]

    def made(tasks: Iterator[str], masked: bool) -> Iterator[Episode]:
        for a, b in zip(start.tolist(), end.tolist(), strict=True):
            yield Episode(
                observations[a:b],
                actions[a:b],
                rewards[a:b],
                terminated=bool(ended[b - 1]),
                truncated=not ended[b - 1],
                task=next(tasks),
                group=int(group[a]),
                action_masks=masks[a:b] if masked and masks is not None else None,
                loss_mask=loss_mask[a:b],
                agent=int(agent[a]),
                start=int(step[a]),
                return_after_exit=float(later[b - 1]),
            )

    sizes, masked = (observations.shape[1], actions.shape[1]), masks is not None and not masks.all()
    return {
        "meta": meta,
        "named": named,
        "schema": shape,
        "sizes": sizes,
        "returns": rewarded,
        "masked": masked,
    }, made


def _worlds(log: Log, team: int) -> tuple[np.ndarray, np.ndarray]:
    """The step rows of a team in order, and where each world begins among them: (s,), (G+1,) int"""
    group, step = log.steps["group"], log.steps["step"]
    teams = log.steps.get("team", np.zeros(len(group), np.int8))
    every = np.lexsort((step, teams, group))
    refuse = partial(log.refuse, "steps", every)
    same = ~differs(group[every], teams[every])
    apart = np.append(0, np.diff(step[every]))
    refuse(same & (apart == 0), "expected one row for each group, step and team, got a second one")
    gap = np.where(same, apart != 1, step[every] != 0)
    refuse(gap, "expected the steps of a world to count from 0 without a gap")
    over, last = (
        (log.steps["terminated"] | log.steps["truncated"])[every],
        np.append(~same[1:], True),
    )
    refuse(over & ~last, "expected the world's last step, since it ended here, got another one")
    refuse(
        last & ~over,
        "expected terminated or truncated on a world's last step; if the log was cut, drop this "
        "world",
    )
    ends = np.flatnonzero(last)
    other = ~differs(group[every][ends]) & differs(step[every][ends])
    log.refuse(
        "steps", every[ends], other, "expected the world to end for all of its teams in one step"
    )
    clock = every[teams[every] == team]
    if not len(clock):
        raise ValueError(
            f"dataset.team: expected one of {np.unique(teams).tolist()}, the teams of {log.path}, "
            f"got {team}"
        )
    return clock, np.append(np.flatnonzero(step[clock] == 0), len(clock))


def _agent_rows(
    log: Log, team: int, clock: np.ndarray, offsets: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The agent rows of a team by group, agent and step, and which entry of the clock each belongs
    to: (n,), (n,) int
    """
    order = np.lexsort([log.agents[name] for name in ("step", "agent", "group")])
    refuse = partial(log.refuse, "agents", order)
    group, step, agent = (log.agents[name][order] for name in ("group", "step", "agent"))
    same = ~differs(group, agent)
    refuse(
        same & ~differs(step), "expected one row for each group, step and agent, got a second one"
    )
    for name in {"team", "agent_type"} & log.agents.keys():
        changed = same & differs(log.agents[name][order])
        refuse(changed, f"{name}: expected the same for an agent throughout its group, got another")
    mine = (
        np.full(len(order), True) if "team" not in log.agents else log.agents["team"][order] == team
    )
    order, group, step = order[mine], group[mine], step[mine]
    if not len(order):
        raise ValueError(f"{log.path}, agents: expected rows of team {team}, got none")
    groups = log.steps["group"][clock[offsets[:-1]]]
    world = np.minimum(np.searchsorted(groups, group), len(groups) - 1)
    lost = (groups[world] != group) | (step < 0) | (step >= np.diff(offsets)[world])
    refuse(lost, "expected a row of this group, step and team in the table of steps, got none")
    return order, offsets[world] + step


def _rewards(
    log: Log,
    returns: str,
    clock: np.ndarray,
    offsets: np.ndarray,
    order: np.ndarray,
    moment: np.ndarray,
    world: np.ndarray,
    size: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, str]:
    """The reward of each row, its team's rewards in the steps after it (0 for own rewards), and the
    kind of returns.
    """
    chosen = returns or log.meta.get("returns") or ("team" if "reward" in log.steps else "own")
    one_of("dataset.returns", chosen, ("team", "own", "mean"))
    table, rows = ("steps", clock) if chosen == "team" else ("agents", order)
    if "reward" not in log.tables[table]:
        raise ValueError(
            f"{log.path}, {table}: expected a column reward, which dataset.returns={chosen} needs, "
            "got none"
        )
    reward = log.tables[table]["reward"][rows].astype(np.float64)
    log.refuse(
        table, rows, ~np.isfinite(reward), "reward: expected a finite number, got {}", reward
    )
    if chosen == "own":
        return reward.astype(np.float32), np.zeros(len(order)), chosen
    if chosen == "mean":
        reward = np.bincount(moment, reward, len(clock)) / np.repeat(size, np.diff(offsets))
    before = np.concatenate([[0.0], np.cumsum(reward)])
    return (
        reward[moment].astype(np.float32),
        before[offsets[world + 1]] - before[moment + 1],
        chosen,
    )


def _decisions(
    log: Log, order: np.ndarray, kind: np.ndarray
) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
    """Actions (n, A), action masks (n, C) or None of continuous ones, and the loss mask (n,)."""
    types, rows, refuse = (
        list(log.meta["types"].values()),
        log.agents,
        partial(log.refuse, "agents", order),
    )
    discrete = all("num_actions" in each for each in types)
    bounds = [(each.get("low"), each.get("high")) for each in types]
    if not discrete and not (all(bounds[0]) and bounds.count(bounds[0]) == len(bounds)):
        raise ValueError(
            f"{log.path}: expected every type in meta to have num_actions, or all the same low and "
            "high"
        )
    name = "action" if discrete else "action_values"
    if name not in rows:
        raise ValueError(f"{log.path}, agents: expected a column {name}, got {', '.join(rows)}")
    taken = rows[name][order]
    known = taken >= 0 if discrete else np.isfinite(taken).all(1)
    loss_mask = rows["loss_mask"][order] if "loss_mask" in rows else known
    refuse(
        loss_mask & ~known, f"{name}: expected an action, since loss_mask is true, got {{}}", taken
    )
    if not discrete:
        return (
            np.where(known[:, None], taken, np.mean(bounds[0], 0)).astype(np.float32),
            None,
            loss_mask,
        )
    counts = np.array([each["num_actions"] for each in types])
    refuse(taken >= counts[kind], "action: expected an index below {}, got {}", counts[kind], taken)
    masks = np.arange(counts.max()) < counts[kind][:, None]
    if "available" in rows:
        if (width := rows["available"].shape[1]) != counts.max():
            raise ValueError(
                f"{log.path}, agents, available: expected {counts.max()} actions, got {width}"
            )
        masks &= rows["available"][order]
    refuse(
        loss_mask & ~masks.any(1),
        "available: expected an action that is allowed, got a mask that forbids every one",
    )
    allowed = known & np.take_along_axis(masks, np.maximum(taken, 0)[:, None].astype(int), 1)[:, 0]
    forbidden = loss_mask & ~allowed
    refuse(
        forbidden,
        "available: forbids the recorded action {}; say loss_mask=false where the agent did not "
        "choose it",
        taken,
    )
    masks |= ~masks.any(1, keepdims=True)  # no choice there
    # what was not recorded is shown as the first that is allowed
    taken = np.where(allowed, taken, masks.argmax(1))
    return taken[:, None].astype(np.float32), masks, loss_mask


def _observations(
    log: Log, order: np.ndarray, kind: np.ndarray, capacity: int
) -> tuple[np.ndarray, Schema]:
    """The model's observation of each row (n, S) float32, and its entity_schema."""
    raw, meta = log.agents["observation"], log.meta
    ends = log.agents.get(
        "observation_offsets", np.arange(len(log.agents["group"]) + 1) * raw[:1].size
    )
    starts, lengths = ends[order], np.diff(ends)[order]
    first = {name: lengths[kind == k][:1] for k, name in enumerate(meta["types"])}
    types = with_blocks(meta["types"], {name: int(n[0]) for name, n in first.items() if len(n)})
    for k, (name, each) in enumerate(types.items()):
        strange = (kind == k) & ~np.isin(lengths, [int(length) for length in each["observations"]])
        log.refuse(
            "agents",
            order,
            strange,
            f"observation: expected {', '.join(each['observations'])} numbers, got {{}}; say the "
            f"blocks of "
            f"each length of type {name} in meta, or give these agents a type of their own",
            lengths,
        )
    shape = entity_schema(meta | {"types": types}, capacity)
    made = canonical_rows(kind, raw.ravel(), starts, lengths, types, shape)
    log.refuse(
        "agents",
        order,
        ~np.isfinite(made).all(1),
        "observation: expected finite numbers, got {}",
        made,
    )
    return made, shape


def coverage(store: Store) -> Iterator[str]:
    """Facts of a log of many agents for its card, as lines of text.

    Joint actions and observations are those of all agents of a group at one step; equal ones are
    equal to the last bit.
    """
    if (
        store.start is None
        or store.agent is None
        or store.return_after_exit is None
        or store.loss_mask is None
    ):
        raise ValueError(f"{store.path}: expected a store of many agents")
    step = np.arange(len(store.rewards)) + np.repeat(
        store.start - store.offsets[:-1], store.lengths
    )
    group, agent = (np.repeat(column, store.lengths) for column in (store.group, store.agent))
    order = np.lexsort((agent, step, group))
    first = np.flatnonzero(differs(group[order], step[order]))
    weights = np.random.default_rng(0).integers(2**64, size=agent.max() + 1, dtype=np.uint64)

    def repeats(columns: np.ndarray) -> str:
        rows = np.ascontiguousarray(columns[order])
        _, equal = np.unique(
            rows.view(f"V{rows.itemsize * rows.shape[1]}")[:, 0], return_inverse=True
        )
        # a number for each
        joint = np.add.reduceat(
            (equal.astype(np.uint64) + np.uint64(1)) * weights[agent[order]], first
        )
        counts = np.unique(joint, return_counts=True)[1]
        return (
            f"{len(counts):,} different, {100 * counts[counts > 1].sum() / len(first):.1f} % of "
            "steps repeat one"
        )

    sizes = np.bincount(np.diff(np.append(first, len(order))))
    shares = ", ".join(
        f"{n} in {100 * count / len(first):.1f} %" for n, count in enumerate(sizes) if count
    )
    yield f"  agents       {shares} of the {len(first):,} joint steps"
    late, after = (store.start > 0).mean(), (store.return_after_exit != 0).mean()
    yield (
        f"  episodes     {100 * late:.1f} % begin late, {100 * after:.1f} % have rewards after "
        "their end"
    )
    yield f"  joint action {repeats(store.actions)}"
    yield (
        f"  joint both   {repeats(np.concatenate([store.observations, store.actions], 1))} "
        "(observations and actions)"
    )
    forbidden = 0 if store.action_masks is None else 1 - store.action_masks.mean()
    yield (
        f"  choice       {100 * forbidden:.1f} % of actions are masked, "
        f"{100 * (1 - store.loss_mask.mean()):.1f} % of steps are no training targets"
    )


@register("export", "team")
def save(folder: str, store: Store) -> None:
    """Write the log that a store was made of, see `write`.

    The log is read again, since a store has one layout for all types.
    """
    if store.info.get("format") is None or store.agent is None:
        raise ValueError(
            "export=team: expected a dataset of many agents (dataset=team), got "
            f"{store.info['name']}"
        )
    write(folder, logs_of(*(store.info[name] for name in ("path", "meta", "cut")))())
