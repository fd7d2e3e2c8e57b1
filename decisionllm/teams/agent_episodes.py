"""The rows of a log of many agents, checked and in order: each stay of an agent is an episode."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from decisionllm.checks import one_of
from decisionllm.datasets import action_range
from decisionllm.datasets.windows import received_before
from decisionllm.schema import Episode, Json, differs
from decisionllm.teams.formats.team_log import MISSING, Log, TableRows
from decisionllm.teams.layout import Schema, canonical_rows, entity_schema, with_blocks

Task = tuple[int, str]  # size of a team, and the name of an agent's type in meta["types"]


@dataclass(frozen=True)
class Clock:
    """The steps of a team's worlds.

    Attributes:
        steps: (s) rows, by world and step.
        offsets: (G + 1,) where each world begins among them.
    """

    steps: TableRows
    offsets: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        """Steps of each world (G,)."""
        return np.diff(self.offsets)


@dataclass(frozen=True)
class Members:
    """The rows of a team's agents.

    Attributes:
        rows: (n) by world, agent and step.
        moment: (n,) which entry of the clock is a row's.
        world: (n,) number of its world.
        team_size: (G,) agents that each world's team ever has.
    """

    rows: TableRows
    moment: np.ndarray
    world: np.ndarray
    team_size: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Stays:
    """The stays of a team's agents in a Log.

    Attributes:
        meta: of the log.
        schema: Spec.entity_schema.
        tasks: of each stay (m).
        begins: (m + 1,) the row at which each stay begins.
        group, agent, step: (n,) of each row.
        observations: (n, S) float32.
        actions: (n, A) float32.
        masks: (n, C) bool, the actions that are allowed; None of continuous ones.
        loss_mask: (n,) bool.
        returns: `team`, `own` or `mean`, see `team.source`.
        rewards: (n,) float32.
        later: (n,) the team's rewards in the steps after a row; 0 for own rewards.
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
    actions: np.ndarray
    masks: np.ndarray | None
    loss_mask: np.ndarray
    returns: str
    rewards: np.ndarray
    later: np.ndarray
    ended: np.ndarray

    @property
    def masked(self) -> bool:
        """Whether an action is ever forbidden."""
        return self.masks is not None and not self.masks.all()

    def episodes(self, texts: Iterator[str], *, masked: bool) -> Iterator[Episode]:
        """The stays in order.

        Args:
            texts: the next ones are those of these stays.
            masked: whether the episodes have action masks.
        """
        for a, b in pairwise(self.begins.tolist()):
            ended = bool(self.ended[b - 1])
            masks = None
            if masked and self.masks is not None:
                masks = self.masks[a:b]
            yield Episode(
                self.observations[a:b],
                self.actions[a:b],
                self.rewards[a:b],
                terminated=ended,
                truncated=not ended,
                task=next(texts),
                group=int(self.group[a]),
                action_masks=masks,
                loss_mask=self.loss_mask[a:b],
                agent=int(self.agent[a]),
                start=int(self.step[a]),
                return_after_exit=float(self.later[b - 1]),
            )


def stays_of(log: Log, *, capacity: int, returns: str, team: int) -> Stays:
    """The stays of a team's agents in a log; see `team.source` for the options.

    Raises:
        ValueError: a row that cannot be, with its table, number and key.
    """
    clock = _clock(log, team)
    members = _members(log, team, clock)
    rows = members.rows
    group, agent, step = rows["group"], rows["agent"], rows["step"]

    team_size = members.team_size[members.world]
    too_many = f"expected at most {capacity} agents in a team, got {{}}; raise dataset.capacity"
    rows.refuse(team_size > capacity, too_many, team_size)
    horizon = log.meta["horizon"]
    last = clock.steps.chosen(clock.offsets[1:] - 1)
    too_long = f"expected at most {horizon} steps (the horizon), got {{}}"
    last.refuse(clock.lengths > horizon, too_long, clock.lengths)

    begins = differs(members.world, agent) | np.append(True, np.diff(step) != 1)
    died = np.zeros(len(rows), bool)
    if "terminated" in rows:
        died = rows["terminated"]
    goes_on = ~np.append(begins[1:], True)
    again = "terminated: expected no row of this agent in the next step, got one"
    rows.refuse(died & goes_on, again)

    observations, schema = _observations(rows, capacity)
    first = np.flatnonzero(begins)
    names = np.array([*log.meta["types"]])[rows["agent_type"][first]]
    actions, masks, loss_mask = _decisions(rows)
    returns, rewards, later = _rewards(returns, clock, members)
    return Stays(
        meta=log.meta,
        schema=schema,
        tasks=[*zip(team_size[first].tolist(), names.tolist(), strict=True)],
        begins=np.append(first, len(rows)),
        group=group,
        agent=agent,
        step=step,
        observations=observations,
        actions=actions,
        masks=masks,
        loss_mask=loss_mask,
        returns=returns,
        rewards=rewards,
        later=later,
        ended=died | clock.steps["terminated"][members.moment],
    )


def _clock(log: Log, team: int) -> Clock:
    """The steps of a team's worlds, after a check of those of all teams."""
    every = log.sorted("steps", "group", "team", "step")
    group, step = every["group"], every["step"]
    same = ~differs(group, every["team"])  # whether the row before is of the same world and team

    advance = np.append(0, np.diff(step))
    twice = "expected one row for each group, step and team, got a second one"
    every.refuse(same & (advance == 0), twice)
    gap = np.where(same, advance != 1, step != 0)
    every.refuse(gap, "expected the steps of a world to count from 0 without a gap")

    over = every["terminated"] | every["truncated"]
    last = np.append(~same[1:], True)
    early = "expected the world's last step, since it ended here, got another one"
    every.refuse(over & ~last, early)
    open_end = (
        "expected terminated or truncated on a world's last step; if the log was cut, drop this "
        "world"
    )
    every.refuse(last & ~over, open_end)

    other = ~differs(group[last]) & differs(step[last])
    apart = "expected the world to end for all of its teams in one step"
    every.chosen(last).refuse(other, apart)

    steps = every.chosen(every["team"] == team)
    if not len(steps):
        wanted = f"one of {np.unique(every['team']).tolist()}, the teams of {log.path}"
        raise ValueError(f"dataset.team: expected {wanted}, got {team}")
    begins = np.flatnonzero(steps["step"] == 0)
    return Clock(steps, np.append(begins, len(steps)))


def _members(log: Log, team: int, clock: Clock) -> Members:
    """The rows of a team's agents, after a check of those of all agents."""
    every = log.sorted("agents", "group", "agent", "step")
    same = ~differs(every["group"], every["agent"])
    twice = "expected one row for each group, step and agent, got a second one"
    every.refuse(same & ~differs(every["step"]), twice)
    for name in ("team", "agent_type"):
        constant = f"{name}: expected the same for an agent throughout its group, got another"
        every.refuse(same & differs(every[name]), constant)

    rows = every
    if "team" in every:
        rows = every.chosen(every["team"] == team)
    if not len(rows):
        raise ValueError(f"{log.path}, agents: expected rows of team {team}, got none")
    group, step = rows["group"], rows["step"]
    groups = clock.steps["group"][clock.offsets[:-1]]
    world = np.minimum(np.searchsorted(groups, group), len(groups) - 1)
    lost = (groups[world] != group) | (step < 0) | (step >= clock.lengths[world])
    no_step = "expected a row of this group, step and team in the table of steps, got none"
    rows.refuse(lost, no_step)

    arrives = differs(world, rows["agent"])
    team_size = np.bincount(world[arrives], minlength=len(groups))
    return Members(rows, clock.offsets[world] + step, world, team_size)


def _rewards(returns: str, clock: Clock, members: Members) -> tuple[str, np.ndarray, np.ndarray]:
    """The rewards of a kind, by default meta's; the team's where the log has them.

    Returns:
        The kind, and `rewards` and `later` of `Stays`.
    """
    log = members.rows.log
    kind = returns or log.meta.get("returns") or ("team" if "reward" in log.steps else "own")
    one_of("dataset.returns", kind, ("team", "own", "mean"))
    rows = clock.steps if kind == "team" else members.rows
    if "reward" not in rows:
        wanted = f"a column reward, which dataset.returns={kind} needs"
        raise ValueError(f"{log.path}, {rows.table}: expected {wanted}, got none")
    reward = rows["reward"].astype(np.float64)
    rows.refuse(~np.isfinite(reward), "reward: expected a finite number, got {}", reward)

    if kind == "own":
        return kind, reward.astype(np.float32), np.zeros(len(rows))
    if kind == "mean":
        team_size = np.repeat(members.team_size, clock.lengths)
        reward = np.bincount(members.moment, reward, len(clock.steps)) / team_size
    later = rewards_after(reward, clock)
    return kind, reward[members.moment].astype(np.float32), later[members.moment]


def rewards_after(rewards: np.ndarray, clock: Clock) -> np.ndarray:
    """The rewards (s,) that a world has after each of its steps, (s,) float64.

    Each world is summed by itself, from its end, as in `windows.returns_to_go`: a large reward in
    one would take the last digits from the others.
    """
    later = np.zeros(len(rewards))
    for length in np.unique(clock.lengths):
        first = clock.offsets[:-1][clock.lengths == length]
        rows = first[:, None] + np.arange(length)[::-1]  # (worlds, length)
        later[rows] = received_before(rewards[rows])
    return later


def _decisions(rows: TableRows) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
    """`actions`, `masks` and `loss_mask` of `Stays`.

    The types of meta have discrete actions, or continuous ones within common bounds.
    """
    types = list(rows.log.meta["types"].values())
    if all("num_actions" in each for each in types):
        return _discrete(rows, np.array([each["num_actions"] for each in types]))
    bounds = [(each.get("low"), each.get("high")) for each in types]
    if not all(bounds[0]) or bounds.count(bounds[0]) < len(bounds):
        wanted = "every type in meta to have num_actions, or all the same low and high"
        raise ValueError(f"{rows.log.path}: expected {wanted}")
    taken = _taken(rows, "action_values")
    low, high = np.array(bounds[0], float)
    width = taken.shape[1]
    if width != len(low):
        wanted = f"{len(low)} numbers, as low and high in meta have, got {width}"
        raise ValueError(f"{rows.log.path}, agents, action_values: expected {wanted}")
    recorded = ~np.isnan(taken).all(1)
    in_part = (
        "action_values: expected finite numbers, or NaN in every one where no action was recorded, "
        "got {}; a list that is too short is read with NaN at its end"
    )
    rows.refuse(recorded & ~np.isfinite(taken).all(1), in_part, taken)
    slack = action_range.slack(low, high)
    beyond = (taken < low - slack) | (taken > high + slack)
    within = (
        f"action_values: expected an action within {low.tolist()} .. {high.tolist()}, got {{}}; clip "
        "it, or widen low and high in meta"
    )
    rows.refuse(beyond.any(1), within, taken)
    loss_mask = _targets(rows, "action_values", recorded)
    middle = np.mean(bounds[0], 0)  # shown where an action was not recorded
    return np.where(recorded[:, None], taken, middle).astype(np.float32), None, loss_mask


def _taken(rows: TableRows, name: str) -> np.ndarray:
    """The column of the actions, of this name."""
    if name not in rows:
        known = ", ".join(rows.log.agents)
        raise ValueError(f"{rows.log.path}, agents: expected a column {name}, got {known}")
    return rows[name]


def _targets(rows: TableRows, name: str, recorded: np.ndarray) -> np.ndarray:
    """(n,) bool, the rows whose action is a training target: those of the log's loss_mask, or all
    whose action in the column `name` was recorded.
    """
    if "loss_mask" not in rows:
        return recorded
    loss_mask = rows["loss_mask"]
    unknown = f"{name}: expected an action, since loss_mask is true, got {{}}"
    rows.refuse(loss_mask & ~recorded, unknown, rows[name])
    return loss_mask


def _discrete(rows: TableRows, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """See `_decisions`. counts: actions of each type."""
    taken = _taken(rows, "action")
    count = counts[rows["agent_type"]]
    outside = "action: expected an index below {}, or -1 where no action was recorded, got {}"
    rows.refuse((taken < MISSING["action"]) | (taken >= count), outside, count, taken)
    recorded = taken != MISSING["action"]
    loss_mask = _targets(rows, "action", recorded)

    masks = np.arange(counts.max()) < count[:, None]
    if "available" in rows:
        available = rows["available"]
        width = available.shape[1]
        if width != counts.max():
            where = f"{rows.log.path}, agents, available"
            raise ValueError(f"{where}: expected {counts.max()} actions, got {width}")
        masks &= available
    none_left = ~masks.any(1)
    stuck = "available: expected an action that is allowed, got a mask that forbids every one"
    rows.refuse(loss_mask & none_left, stuck)

    index = np.maximum(taken, 0)[:, None].astype(int)
    allowed = recorded & np.take_along_axis(masks, index, 1)[:, 0]
    forbidden = (
        "available: forbids the recorded action {}; say loss_mask=false where the agent did not "
        "choose it"
    )
    rows.refuse(loss_mask & ~allowed, forbidden, taken)
    masks[none_left] = True  # no choice there
    # an action that was not recorded is shown as the first that is allowed
    shown = np.where(allowed, taken, masks.argmax(1))
    return shown[:, None].astype(np.float32), masks, loss_mask


def _observations(rows: TableRows, capacity: int) -> tuple[np.ndarray, Schema]:
    """The model's observation of each row (n, S) float32, and its entity schema."""
    log = rows.log
    raw = log.agents["observation"]
    ends = log.agents.get("observation_offsets")  # where each row's begins, and the last one ends
    if ends is None:
        ends = np.arange(len(raw) + 1) * raw[:1].size
    starts = ends[rows.numbers]
    lengths = np.diff(ends)[rows.numbers]
    rows.refuse(lengths == 0, "observation: expected at least one number, got none")

    kinds = rows["agent_type"]
    first = {}  # numbers of the first observation of each type
    for number, name in enumerate(log.meta["types"]):
        found = lengths[kinds == number]
        if len(found):
            first[name] = int(found[0])
    types = with_blocks(log.meta["types"], first)
    for number, (name, agent_type) in enumerate(types.items()):
        known = [int(length) for length in agent_type["observations"]]
        strange = (kinds == number) & ~np.isin(lengths, known)
        wanted = (
            f"observation: expected {', '.join(agent_type['observations'])} numbers, got {{}}; say "
            f"the blocks of each length of type {name} in meta, or give these agents a type of "
            "their own"
        )
        rows.refuse(strange, wanted, lengths)

    schema = entity_schema(log.meta | {"types": types}, capacity)
    made = canonical_rows(kinds, raw.ravel(), starts, lengths, types, schema)
    unknown = ~np.isfinite(made).all(1)
    rows.refuse(unknown, "observation: expected finite numbers, got {}", made)
    return made, schema
