"""Episodes of single agents from a log of many agents: checks the rows and sorts them."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from decisionllm.checks import check_one_of
from decisionllm.datasets import action_range
from decisionllm.datasets.windows import sum_past_rewards
from decisionllm.schema import Episode, Json, row_changes
from decisionllm.teams.entity_layout import (
    Schema,
    build_entity_schema,
    fill_in_blocks,
    rows_to_entity_layout,
)
from decisionllm.teams.formats.team_log import MISSING, Log, TableRows

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
class AgentEpisodes:
    """The episodes of a team's agents in a Log, end to end.

    An agent that leaves and comes back has an episode for each stay.

    Attributes:
        meta: of the log.
        schema: Spec.entity_schema.
        tasks: of each episode (m).
        begins: (m + 1,) the row at which each episode begins.
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
    def has_forbidden_actions(self) -> bool:
        """Return whether an action is ever forbidden."""
        return self.masks is not None and not self.masks.all()

    def episodes(self, texts: Iterator[str], *, masked: bool) -> Iterator[Episode]:
        """Yield the episodes in order.

        Args:
            texts: yields the text of each episode.
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


def build_agent_episodes(log: Log, *, capacity: int, returns: str, team: int) -> AgentEpisodes:
    """Split a log into the episodes of a team's agents; see `team.source` for the options.

    Raises:
        ValueError: a row that cannot be, with its table, number and key.
    """
    clock = _read_clock(log, team)
    members = _read_members(log, team, clock)
    rows = members.rows
    group, agent, step = rows["group"], rows["agent"], rows["step"]

    team_size = members.team_size[members.world]
    rows.refuse(
        team_size > capacity,
        f"expected at most {capacity} agents in a team, got {{}}; raise dataset.capacity",
        team_size,
    )
    horizon = log.meta["horizon"]
    last = clock.steps.take(clock.offsets[1:] - 1)
    last.refuse(
        clock.lengths > horizon,
        f"expected at most {horizon} steps (the horizon), got {{}}",
        clock.lengths,
    )

    begins = row_changes(members.world, agent) | np.append(True, np.diff(step) != 1)
    has_died = np.zeros(len(rows), bool)
    if "terminated" in rows:
        has_died = rows["terminated"]
    goes_on = ~np.append(begins[1:], True)
    rows.refuse(
        has_died & goes_on, "terminated: expected no row of this agent in the next step, got one"
    )

    observations, schema = _read_observations(rows, capacity)
    first = np.flatnonzero(begins)
    names = np.array([*log.meta["types"]])[rows["agent_type"][first]]
    actions, masks, loss_mask = _read_actions(rows)
    returns, rewards, later = _read_rewards(returns, clock, members)
    return AgentEpisodes(
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
        ended=has_died | clock.steps["terminated"][members.moment],
    )


def _read_clock(log: Log, team: int) -> Clock:
    """Return the steps of a team's worlds, after checks of the steps of all teams."""
    rows = log.sort_rows("steps", "group", "team", "step")
    group, step = rows["group"], rows["step"]
    same_world = ~row_changes(group, rows["team"])  # as the row before

    advance = np.append(0, np.diff(step))
    rows.refuse(
        same_world & (advance == 0),
        "expected one row for each group, step and team, got a second one",
    )
    has_gap = np.where(same_world, advance != 1, step != 0)
    rows.refuse(has_gap, "expected the steps of a world to count from 0 without a gap")

    has_ended = rows["terminated"] | rows["truncated"]
    is_last = np.append(~same_world[1:], True)
    rows.refuse(
        has_ended & ~is_last, "expected the world's last step, since it ended here, got another one"
    )
    rows.refuse(
        is_last & ~has_ended,
        "expected terminated or truncated on a world's last step; if the log was cut, drop "
        "this world",
    )

    ends_apart = ~row_changes(group[is_last]) & row_changes(step[is_last])
    rows.take(is_last).refuse(
        ends_apart, "expected the world to end for all of its teams in one step"
    )

    steps = rows.take(rows["team"] == team)
    if not len(steps):
        raise ValueError(
            f"dataset.team: expected one of {np.unique(rows['team']).tolist()}, the teams of "
            f"{log.path}, got {team}"
        )
    begins = np.flatnonzero(steps["step"] == 0)
    return Clock(steps, np.append(begins, len(steps)))


def _read_members(log: Log, team: int, clock: Clock) -> Members:
    """Return the rows of a team's agents, after checks of the rows of all agents."""
    all_rows = log.sort_rows("agents", "group", "agent", "step")
    same_agent = ~row_changes(all_rows["group"], all_rows["agent"])
    all_rows.refuse(
        same_agent & ~row_changes(all_rows["step"]),
        "expected one row for each group, step and agent, got a second one",
    )
    for name in ("team", "agent_type"):
        all_rows.refuse(
            same_agent & row_changes(all_rows[name]),
            f"{name}: expected the same for an agent throughout its group, got another",
        )

    rows = all_rows
    if "team" in all_rows:
        rows = all_rows.take(all_rows["team"] == team)
    if not len(rows):
        raise ValueError(f"{log.path}, agents: expected rows of team {team}, got none")
    group, step = rows["group"], rows["step"]
    groups = clock.steps["group"][clock.offsets[:-1]]
    world = np.minimum(np.searchsorted(groups, group), len(groups) - 1)
    has_no_step = (groups[world] != group) | (step < 0) | (step >= clock.lengths[world])
    rows.refuse(
        has_no_step, "expected a row of this group, step and team in the table of steps, got none"
    )

    arrives = row_changes(world, rows["agent"])
    team_size = np.bincount(world[arrives], minlength=len(groups))
    return Members(rows, clock.offsets[world] + step, world, team_size)


def _read_rewards(
    returns: str, clock: Clock, members: Members
) -> tuple[str, np.ndarray, np.ndarray]:
    """Return the rewards of a kind: by default meta's, or the team's if the log has them.

    Returns:
        The kind, and `rewards` and `later` of `AgentEpisodes`.
    """
    log = members.rows.log
    kind = returns or log.meta.get("returns") or ("team" if "reward" in log.steps else "own")
    check_one_of("dataset.returns", kind, ("team", "own", "mean"))
    rows = clock.steps if kind == "team" else members.rows
    if "reward" not in rows:
        raise ValueError(
            f"{log.path}, {rows.table}: expected a column reward, which dataset.returns={kind} "
            "needs, got none"
        )
    reward = rows["reward"].astype(np.float64)
    rows.refuse(~np.isfinite(reward), "reward: expected a finite number, got {}", reward)

    if kind == "own":
        return kind, reward.astype(np.float32), np.zeros(len(rows))
    if kind == "mean":
        team_size = np.repeat(members.team_size, clock.lengths)
        reward = np.bincount(members.moment, reward, len(clock.steps)) / team_size
    later = sum_later_rewards(reward, clock)
    return kind, reward[members.moment].astype(np.float32), later[members.moment]


def sum_later_rewards(rewards: np.ndarray, clock: Clock) -> np.ndarray:
    """Sum the rewards (s,) that a world has after each of its steps, (s,) float64.

    Each world is summed by itself, from its end, as in `windows.returns_to_go`: a large reward in
    one would take the last digits from the others.
    """
    later = np.zeros(len(rewards))
    for length in np.unique(clock.lengths):
        first = clock.offsets[:-1][clock.lengths == length]
        rows = first[:, None] + np.arange(length)[::-1]  # (worlds, length)
        later[rows] = sum_past_rewards(rewards[rows])
    return later


def _read_actions(rows: TableRows) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
    """Return `actions`, `masks` and `loss_mask` of `AgentEpisodes`.

    The types of meta have discrete actions, or continuous ones within common bounds.
    """
    types = list(rows.log.meta["types"].values())
    if all("num_actions" in agent_type for agent_type in types):
        return _read_discrete_actions(
            rows, np.array([agent_type["num_actions"] for agent_type in types])
        )
    bounds = [(agent_type.get("low"), agent_type.get("high")) for agent_type in types]
    if not all(bounds[0]) or bounds.count(bounds[0]) < len(bounds):
        raise ValueError(
            f"{rows.log.path}: expected every type in meta to have num_actions, or all the "
            "same low and high"
        )
    actions = _get_action_column(rows, "action_values")
    low, high = np.array(bounds[0], float)
    width = actions.shape[1]
    if width != len(low):
        raise ValueError(
            f"{rows.log.path}, agents, action_values: expected {len(low)} numbers, as low and "
            f"high in meta have, got {width}"
        )
    recorded = ~np.isnan(actions).all(1)
    rows.refuse(
        recorded & ~np.isfinite(actions).all(1),
        "action_values: expected finite numbers, or NaN in every one where no action was "
        "recorded, got {}; a list that is too short is read with NaN at its end",
        actions,
    )
    slack = action_range.bound_tolerance(low, high)
    out_of_bounds = (actions < low - slack) | (actions > high + slack)
    rows.refuse(
        out_of_bounds.any(1),
        f"action_values: expected an action within {low.tolist()} .. {high.tolist()}, got "
        "{}; clip it, or widen low and high in meta",
        actions,
    )
    loss_mask = _read_loss_mask(rows, "action_values", recorded)
    middle = np.mean(bounds[0], 0)  # shown where an action was not recorded
    return np.where(recorded[:, None], actions, middle).astype(np.float32), None, loss_mask


def _get_action_column(rows: TableRows, name: str) -> np.ndarray:
    """Return the column of the actions of this name."""
    if name not in rows:
        raise ValueError(
            f"{rows.log.path}, agents: expected a column {name}, got {', '.join(rows.log.agents)}"
        )
    return rows[name]


def _read_loss_mask(rows: TableRows, name: str, recorded: np.ndarray) -> np.ndarray:
    """Return the rows whose action is a training target, (n,) bool: those of the log's loss_mask,
    or all whose action in the column `name` was recorded.
    """
    if "loss_mask" not in rows:
        return recorded
    loss_mask = rows["loss_mask"]
    rows.refuse(
        loss_mask & ~recorded,
        f"{name}: expected an action, since loss_mask is true, got {{}}",
        rows[name],
    )
    return loss_mask


def _read_discrete_actions(
    rows: TableRows, counts: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return discrete actions, see `_read_actions`. counts: actions of each type."""
    actions = _get_action_column(rows, "action")
    count = counts[rows["agent_type"]]
    rows.refuse(
        (actions < MISSING["action"]) | (actions >= count),
        "action: expected an index below {}, or -1 where no action was recorded, got {}",
        count,
        actions,
    )
    recorded = actions != MISSING["action"]
    loss_mask = _read_loss_mask(rows, "action", recorded)

    masks = np.arange(counts.max()) < count[:, None]
    if "available" in rows:
        available = rows["available"]
        width = available.shape[1]
        if width != counts.max():
            where = f"{rows.log.path}, agents, available"
            raise ValueError(f"{where}: expected {counts.max()} actions, got {width}")
        masks &= available
    all_forbidden = ~masks.any(1)
    rows.refuse(
        loss_mask & all_forbidden,
        "available: expected an action that is allowed, got a mask that forbids every one",
    )

    index = np.maximum(actions, 0)[:, None].astype(int)
    allowed = recorded & np.take_along_axis(masks, index, 1)[:, 0]
    rows.refuse(
        loss_mask & ~allowed,
        "available: forbids the recorded action {}; say loss_mask=false where the agent did "
        "not choose it",
        actions,
    )
    masks[all_forbidden] = True  # no choice there
    # an action that was not recorded is shown as the first that is allowed
    indices = np.where(allowed, actions, masks.argmax(1))
    return indices[:, None].astype(np.float32), masks, loss_mask


def _read_observations(rows: TableRows, capacity: int) -> tuple[np.ndarray, Schema]:
    """Return the model's observation of each row (n, S) float32, and its entity schema."""
    log = rows.log
    raw = log.agents["observation"]
    ends = log.agents.get("observation_offsets")  # where each row's begins, and the last one ends
    if ends is None:
        ends = np.arange(len(raw) + 1) * raw[:1].size
    starts = ends[rows.numbers]
    lengths = np.diff(ends)[rows.numbers]
    rows.refuse(lengths == 0, "observation: expected at least one number, got none")

    agent_types = rows["agent_type"]
    first_length = {}  # numbers of the first observation of each type
    for number, name in enumerate(log.meta["types"]):
        lengths_of_type = lengths[agent_types == number]
        if len(lengths_of_type):
            first_length[name] = int(lengths_of_type[0])
    types = fill_in_blocks(log.meta["types"], first_length)
    for number, (name, agent_type) in enumerate(types.items()):
        allowed_lengths = [int(length) for length in agent_type["observations"]]
        wrong_length = (agent_types == number) & ~np.isin(lengths, allowed_lengths)
        rows.refuse(
            wrong_length,
            f"observation: expected {', '.join(agent_type['observations'])} numbers, got {{}}; "
            f"say the blocks of each length of type {name} in meta, or give these agents a "
            "type of their own",
            lengths,
        )

    schema = build_entity_schema(log.meta | {"types": types}, capacity)
    observations = rows_to_entity_layout(agent_types, raw.ravel(), starts, lengths, types, schema)
    not_finite = ~np.isfinite(observations).all(1)
    rows.refuse(not_finite, "observation: expected finite numbers, got {}", observations)
    return observations, schema
