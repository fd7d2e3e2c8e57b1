"""The rows of a log of many agents, checked and in order: each stay of an agent is an episode."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from decisionllm.checks import one_of
from decisionllm.datasets.formats.team_log import Log
from decisionllm.datasets.team_layout import Schema, canonical_rows, entity_schema, with_blocks
from decisionllm.schema import Episode, Json, differs

Task = tuple[int, str]  # size of a team, and the name of an agent's type in meta["types"]


@dataclass(frozen=True)
class Clock:
    """The steps of a team's worlds, in order.

    Attributes:
        rows: (s,) of the table of steps.
        offsets: (G + 1,) where each world begins among them.
    """

    rows: np.ndarray
    offsets: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        """Steps of each world (G,)."""
        return np.diff(self.offsets)


@dataclass(frozen=True)
class Rows:
    """The rows of a team's agents, by world, agent and step.

    Attributes:
        order: (n,) rows of the table of agents.
        moment: (n,) which entry of the clock is a row's.
        world: (n,) number of its world.
        kind: (n,) its type, an index into meta["types"].
        team_size: (G,) agents that each world's team ever has.
    """

    order: np.ndarray
    moment: np.ndarray
    world: np.ndarray
    kind: np.ndarray
    team_size: np.ndarray


@dataclass(frozen=True)
class Decisions:
    """What the agents did, row by row.

    Attributes:
        actions: (n, A) float32.
        masks: (n, C) bool, the actions that are allowed; None of continuous ones.
        loss_mask: (n,) bool.
    """

    actions: np.ndarray
    masks: np.ndarray | None
    loss_mask: np.ndarray


@dataclass(frozen=True)
class Rewards:
    """What the agents received, row by row.

    Attributes:
        kind: `team`, `own` or `mean`, see `team.source`.
        values: (n,) float32.
        later: (n,) the team's rewards in the steps after a row; 0 for own rewards.
    """

    kind: str
    values: np.ndarray
    later: np.ndarray


@dataclass(frozen=True)
class Stays:
    """The stays of a team's agents in a Log.

    Attributes:
        meta: of the log.
        schema: Spec.entity_schema.
        tasks: of each stay (m).
        begins: (m + 1,) the row at which each stay begins.
        group, agent, step: (n,) of each row.
        observations: (n, S) float32.
        ended: (n,) bool, whether the task ended with this row.
    """

    meta: Json
    schema: Schema
    tasks: list[Task]
    begins: np.ndarray
    group: np.ndarray
    agent: np.ndarray
    step: np.ndarray
    observations: np.ndarray
    decisions: Decisions
    rewards: Rewards
    ended: np.ndarray

    @property
    def masked(self) -> bool:
        """Whether an action is ever forbidden."""
        masks = self.decisions.masks
        return masks is not None and not masks.all()

    def episodes(self, texts: Iterator[str], *, masked: bool) -> Iterator[Episode]:
        """The stays in order.

        Args:
            texts: the next ones are those of these stays.
            masked: whether the episodes have action masks.
        """
        masks = self.decisions.masks if masked else None
        begins = self.begins.tolist()
        for a, b in zip(begins[:-1], begins[1:], strict=True):
            ended = bool(self.ended[b - 1])
            yield Episode(
                self.observations[a:b],
                self.decisions.actions[a:b],
                self.rewards.values[a:b],
                terminated=ended,
                truncated=not ended,
                task=next(texts),
                group=int(self.group[a]),
                action_masks=None if masks is None else masks[a:b],
                loss_mask=self.decisions.loss_mask[a:b],
                agent=int(self.agent[a]),
                start=int(self.step[a]),
                return_after_exit=float(self.rewards.later[b - 1]),
            )


def stays_of(log: Log, *, capacity: int, returns: str, team: int) -> Stays:
    """The stays of a team's agents in a log; see `team.source` for the options.

    Raises:
        ValueError: a row that cannot be, with its table, number and key.
    """
    clock = _clock(log, team)
    rows = _rows(log, team, clock)
    group = log.agents["group"][rows.order]
    agent = log.agents["agent"][rows.order]
    step = log.agents["step"][rows.order]

    team_size = rows.team_size[rows.world]
    too_many = f"expected at most {capacity} agents in a team, got {{}}; raise dataset.capacity"
    log.refuse("agents", rows.order, team_size > capacity, too_many, team_size)
    horizon = log.meta["horizon"]
    last = clock.rows[clock.offsets[1:] - 1]
    too_long = f"expected at most {horizon} steps (the horizon), got {{}}"
    log.refuse("steps", last, clock.lengths > horizon, too_long, clock.lengths)

    begins = differs(rows.world, agent) | np.append(True, np.diff(step) != 1)
    died = np.zeros(len(rows.order), bool)
    if "terminated" in log.agents:
        died = log.agents["terminated"][rows.order] > 0
    goes_on = ~np.append(begins[1:], True)
    again = "terminated: expected no row of this agent in the next step, got one"
    log.refuse("agents", rows.order, died & goes_on, again)

    observations, schema = _observations(log, rows, capacity)
    first = np.flatnonzero(begins)
    names = np.array([*log.meta["types"]])[rows.kind[first]]
    return Stays(
        meta=log.meta,
        schema=schema,
        tasks=[*zip(team_size[first].tolist(), names.tolist(), strict=True)],
        begins=np.append(first, len(rows.order)),
        group=group,
        agent=agent,
        step=step,
        observations=observations,
        decisions=_decisions(log, rows),
        rewards=_rewards(log, returns, clock, rows),
        ended=died | log.steps["terminated"][clock.rows][rows.moment],
    )


def _clock(log: Log, team: int) -> Clock:
    """The steps of a team's worlds, after a check of those of all teams."""
    steps = log.steps
    teams = steps.get("team", np.zeros(len(steps["group"]), np.int8))
    every = np.lexsort((steps["step"], teams, steps["group"]))
    group = steps["group"][every]
    step = steps["step"][every]
    same = ~differs(group, teams[every])  # whether the row before is of the same world and team

    advance = np.append(0, np.diff(step))
    twice = "expected one row for each group, step and team, got a second one"
    log.refuse("steps", every, same & (advance == 0), twice)
    gap = np.where(same, advance != 1, step != 0)
    log.refuse("steps", every, gap, "expected the steps of a world to count from 0 without a gap")

    over = (steps["terminated"] | steps["truncated"])[every]
    last = np.append(~same[1:], True)
    early = "expected the world's last step, since it ended here, got another one"
    log.refuse("steps", every, over & ~last, early)
    open_end = (
        "expected terminated or truncated on a world's last step; if the log was cut, drop this "
        "world"
    )
    log.refuse("steps", every, last & ~over, open_end)

    ends = np.flatnonzero(last)
    other = ~differs(group[ends]) & differs(step[ends])
    apart = "expected the world to end for all of its teams in one step"
    log.refuse("steps", every[ends], other, apart)

    rows = every[teams[every] == team]
    if not len(rows):
        wanted = f"one of {np.unique(teams).tolist()}, the teams of {log.path}"
        raise ValueError(f"dataset.team: expected {wanted}, got {team}")
    begins = np.flatnonzero(steps["step"][rows] == 0)
    return Clock(rows, np.append(begins, len(rows)))


def _rows(log: Log, team: int, clock: Clock) -> Rows:
    """The rows of a team's agents, after a check of those of all agents."""
    agents = log.agents
    order = np.lexsort((agents["step"], agents["agent"], agents["group"]))
    same = ~differs(agents["group"][order], agents["agent"][order])
    twice = "expected one row for each group, step and agent, got a second one"
    log.refuse("agents", order, same & ~differs(agents["step"][order]), twice)
    for name in ("team", "agent_type"):
        if name in agents:
            changed = same & differs(agents[name][order])
            constant = f"{name}: expected the same for an agent throughout its group, got another"
            log.refuse("agents", order, changed, constant)

    if "team" in agents:
        order = order[agents["team"][order] == team]
    if not len(order):
        raise ValueError(f"{log.path}, agents: expected rows of team {team}, got none")
    group = agents["group"][order]
    step = agents["step"][order]
    groups = log.steps["group"][clock.rows[clock.offsets[:-1]]]
    world = np.minimum(np.searchsorted(groups, group), len(groups) - 1)
    lost = (groups[world] != group) | (step < 0) | (step >= clock.lengths[world])
    no_step = "expected a row of this group, step and team in the table of steps, got none"
    log.refuse("agents", order, lost, no_step)

    kind = np.zeros(len(order), np.int8)
    if "agent_type" in agents:
        kind = agents["agent_type"][order]
    arrives = differs(world, agents["agent"][order])
    team_size = np.bincount(world[arrives], minlength=len(groups))
    return Rows(order, clock.offsets[world] + step, world, kind, team_size)


def _rewards(log: Log, returns: str, clock: Clock, rows: Rows) -> Rewards:
    """The rewards of a kind, by default meta's; the team's where the log has them."""
    kind = returns or log.meta.get("returns") or ("team" if "reward" in log.steps else "own")
    one_of("dataset.returns", kind, ("team", "own", "mean"))
    table, order = "agents", rows.order
    if kind == "team":
        table, order = "steps", clock.rows
    if "reward" not in log.tables[table]:
        wanted = f"a column reward, which dataset.returns={kind} needs"
        raise ValueError(f"{log.path}, {table}: expected {wanted}, got none")
    reward = log.tables[table]["reward"][order].astype(np.float64)
    unknown = ~np.isfinite(reward)
    log.refuse(table, order, unknown, "reward: expected a finite number, got {}", reward)

    if kind == "own":
        return Rewards(kind, reward.astype(np.float32), np.zeros(len(order)))
    if kind == "mean":
        team_size = np.repeat(rows.team_size, clock.lengths)
        reward = np.bincount(rows.moment, reward, len(clock.rows)) / team_size
    before = np.concatenate([[0.0], np.cumsum(reward)])  # the sum before each entry of the clock
    end = clock.offsets[rows.world + 1]
    later = before[end] - before[rows.moment + 1]
    return Rewards(kind, reward[rows.moment].astype(np.float32), later)


def _decisions(log: Log, rows: Rows) -> Decisions:
    """The actions of the types of meta: discrete ones, or continuous ones within common bounds."""
    types = list(log.meta["types"].values())
    if all("num_actions" in each for each in types):
        return _discrete(log, rows, np.array([each["num_actions"] for each in types]))
    bounds = [(each.get("low"), each.get("high")) for each in types]
    low, high = bounds[0]
    if not low or not high or bounds.count(bounds[0]) < len(bounds):
        wanted = "every type in meta to have num_actions, or all the same low and high"
        raise ValueError(f"{log.path}: expected {wanted}")
    return _continuous(log, rows, np.mean([low, high], 0))


def _taken(log: Log, rows: Rows, name: str) -> np.ndarray:
    """A column of the table of agents that holds their actions."""
    if name not in log.agents:
        known = ", ".join(log.agents)
        raise ValueError(f"{log.path}, agents: expected a column {name}, got {known}")
    taken: np.ndarray = log.agents[name][rows.order]
    return taken


def _loss_mask(log: Log, rows: Rows, name: str, taken: np.ndarray, known: np.ndarray) -> np.ndarray:
    """The log's, or where an action is known; (n,) bool."""
    if "loss_mask" not in log.agents:
        return known
    loss_mask: np.ndarray = log.agents["loss_mask"][rows.order]
    unknown = f"{name}: expected an action, since loss_mask is true, got {{}}"
    log.refuse("agents", rows.order, loss_mask & ~known, unknown, taken)
    return loss_mask


def _continuous(log: Log, rows: Rows, middle: np.ndarray) -> Decisions:
    """middle: of the bounds (A,), shown where an action is unknown."""
    taken = _taken(log, rows, "action_values")
    known = np.isfinite(taken).all(1)
    loss_mask = _loss_mask(log, rows, "action_values", taken, known)
    actions = np.where(known[:, None], taken, middle).astype(np.float32)
    return Decisions(actions, None, loss_mask)


def _discrete(log: Log, rows: Rows, counts: np.ndarray) -> Decisions:
    """counts: actions of each type."""
    taken = _taken(log, rows, "action")
    known = taken >= 0
    loss_mask = _loss_mask(log, rows, "action", taken, known)
    count = counts[rows.kind]
    above = "action: expected an index below {}, got {}"
    log.refuse("agents", rows.order, taken >= count, above, count, taken)

    masks = np.arange(counts.max()) < count[:, None]
    if "available" in log.agents:
        available = log.agents["available"]
        width = available.shape[1]
        if width != counts.max():
            wanted = f"{counts.max()} actions"
            raise ValueError(f"{log.path}, agents, available: expected {wanted}, got {width}")
        masks &= available[rows.order]
    none_left = ~masks.any(1)
    stuck = "available: expected an action that is allowed, got a mask that forbids every one"
    log.refuse("agents", rows.order, loss_mask & none_left, stuck)

    index = np.maximum(taken, 0)[:, None].astype(int)
    allowed = known & np.take_along_axis(masks, index, 1)[:, 0]
    forbidden = (
        "available: forbids the recorded action {}; say loss_mask=false where the agent did not "
        "choose it"
    )
    log.refuse("agents", rows.order, loss_mask & ~allowed, forbidden, taken)
    masks[none_left] = True  # no choice there
    # what was not recorded is shown as the first that is allowed
    shown = np.where(allowed, taken, masks.argmax(1))
    return Decisions(shown[:, None].astype(np.float32), masks, loss_mask)


def _observations(log: Log, rows: Rows, capacity: int) -> tuple[np.ndarray, Schema]:
    """The model's observation of each row (n, S) float32, and its entity schema."""
    raw = log.agents["observation"]
    ends = log.agents.get("observation_offsets")  # where each row's begins, and the last one ends
    if ends is None:
        ends = np.arange(len(raw) + 1) * raw[:1].size
    starts = ends[rows.order]
    lengths = np.diff(ends)[rows.order]

    first = {}  # numbers of the first observation of each type
    for number, name in enumerate(log.meta["types"]):
        found = lengths[rows.kind == number]
        if len(found):
            first[name] = int(found[0])
    types = with_blocks(log.meta["types"], first)
    for number, (name, agent_type) in enumerate(types.items()):
        known = [int(length) for length in agent_type["observations"]]
        strange = (rows.kind == number) & ~np.isin(lengths, known)
        wanted = (
            f"observation: expected {', '.join(agent_type['observations'])} numbers, got {{}}; say "
            f"the blocks of each length of type {name} in meta, or give these agents a type of "
            "their own"
        )
        log.refuse("agents", rows.order, strange, wanted, lengths)

    schema = entity_schema(log.meta | {"types": types}, capacity)
    made = canonical_rows(rows.kind, raw.ravel(), starts, lengths, types, schema)
    unknown = ~np.isfinite(made).all(1)
    log.refuse("agents", rows.order, unknown, "observation: expected finite numbers, got {}", made)
    return made, schema
