"""A planner along shortest paths in the log, to a goal that the observation ends with or that the
text names.

Landmarks are spread over the positions of the log. Two are neighbours if the log went from one to
the other within a few steps, at the cost of the distance between them; the way to any goal is the
shortest path between them, also over parts of several episodes. A plan is worth what is left of the
way at its end, as the learned dynamics imagine it. Nothing but the log says where walls are.

Source: search over replayed states, SoRB (Eysenbach et al., 2019); here with distances and
neighbours taken from the log itself in place of a learned value.
"""

import re
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components, dijkstra
from torch import Tensor, nn
from torch.nn import functional as F

from decisionllm.checks import check_at_least, check_one_of, check_share
from decisionllm.models.dynamics import Dynamics, candidate_actions
from decisionllm.models.normalizer import Normalizer
from decisionllm.protocols import Planner, Transitions
from decisionllm.randomness import temporary_seed
from decisionllm.schema import Spec

SAMPLE = 50_000  # rows of the data that landmarks are chosen from
# Landmarks through which a way may begin, and end. One that is next on the way must be among them
# before the one behind it is left, else the way seems shortest at a landmark, where a plan stays.
BEGIN, END = 8, 3
NEIGHBOUR = 3.0  # distances between landmarks within which a place belongs to one
SLACK = 1.5  # by which an end may be farther from a landmark than the positions of the log
LEAST_GAIN = 0.3  # how much nearer to the goal a plan must end, in distances between landmarks
FAR = 1e6  # place of a landmark that is not used, in the model's units
ROWS = 1 << 14  # rows whose distances to all landmarks are held at once
NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?")


@lru_cache(1 << 14)
def numbers_in(text: str, count: int) -> tuple[float, ...]:
    """Return the numbers that a text names, in their order.

    Raises:
        ValueError: they are not as many as expected.
    """
    numbers = NUMBER.findall(text)
    if len(numbers) != count:
        raise ValueError(
            f"planner.goal_in=text: expected a task text with {count} numbers, the goal, got "
            f"{text!r}; give the goal in the text, or planner.goal_in=observation"
        )
    return tuple(map(float, numbers))


class LandmarkPaths(nn.Module, Planner):
    """Plans that end nearest to the goal, along shortest paths between landmarks of the log.

    A goal is a value of the first numbers of an observation, the position. The observation
    ends with it, or the task text names its numbers and no other ones. Below, a state is an
    observation with its goal. Distances are of the model's units, in which positions vary by 1. A
    wall is seen if it is several distances between landmarks wide.

    Args:
        spec: of the data.
        goal_in: `observation`, which ends with the goal; `text`, whose numbers are the goal, in the
            units of the log.
        goal_size: numbers of the goal; 0: half of the observation, or all of it if the goal is in
            the text.
        landmarks: number of landmarks.
        link: steps of the log within which two landmarks are neighbours.
        horizon: steps to imagine before each action, for which a candidate action is held.
        least_value: where the best plan has less value, of 0 .. 1, the policy acts without a plan.
        steps: training steps of each member of the dynamics.
    """

    def __init__(
        self,
        spec: Spec,
        *,
        goal_in: str = "observation",
        goal_size: int = 0,
        landmarks: int = 1000,
        link: int = 8,
        horizon: int = 5,
        least_value: float = 0.0,
        steps: int = 600,
    ) -> None:
        super().__init__()
        check_one_of("planner.goal_in", goal_in, ("observation", "text"))
        check_at_least("planner.horizon", horizon, 1)
        check_at_least("planner.steps", steps, 1)
        check_share("planner.least_value", least_value)
        if landmarks < 2 or link < 1:
            raise ValueError(
                "planner.landmarks, link: expected 2 landmarks and 1 step or more, got "
                f"{landmarks} and {link}"
            )
        S = spec.observation_dim
        in_text = goal_in == "text"
        most = S if in_text else S // 2
        size = goal_size or most
        if not 0 < size <= most:
            raise ValueError(
                f"planner.goal_size: expected a goal of 1 to {most} numbers, which the {goal_in} "
                f"ends with, of {S} numbers of an observation, got {size}; planner.goal_in=text "
                "takes a goal that the task text names"
            )
        self.horizon = horizon
        self.least_value = least_value
        self.steps = steps
        self.text_numbers = size if in_text else 0  # of a state, behind the observation
        # an imagined end must be like the data in its state alone: any goal may be far away
        self.dynamics = Dynamics(spec, compared=S + self.text_numbers - size)
        self.candidates = nn.Buffer(candidate_actions(spec))
        self.size = size
        self.link = link
        self.landmarks = nn.Buffer(torch.zeros(landmarks, size))
        # within which each position of the log has a landmark
        self.radius = nn.Buffer(torch.zeros(()))
        self.ways = nn.Buffer(torch.zeros(landmarks, landmarks))
        # goals and positions have units of their own: position = shift + scale * goal
        self.goal_scale = nn.Buffer(torch.ones(size))
        self.goal_shift = nn.Buffer(torch.zeros(size))
        self.requires_grad_(False)

    def text_codes(self, texts: Sequence[str]) -> Tensor:
        """Return the goal in each text of the data, (U, G) in raw units; (U, 0) if no text has one."""
        if not self.text_numbers:
            return torch.zeros(len(texts), 0)
        return torch.tensor([numbers_in(text, self.size) for text in texts])

    def states(self, observations: Tensor, texts: Sequence[str]) -> Tensor:
        """Append their goals to observations (N, S), in the model's units.

        Raises:
            ValueError: a text does not name a goal.
        """
        return torch.cat([observations, self.text_codes(texts).to(observations)], -1)

    def split_goals(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the positions and goals (..., G) of states (..., S), both in the units of
        positions.
        """
        goals = self.goal_shift + self.goal_scale * states[..., -self.size :]
        return states[..., : self.size], goals

    def value(self, states: Tensor) -> Tensor:
        """Return exp(-length of the way to the goal) of states (..., S), within 0 .. 1: (...)."""
        positions, goals = self.split_goals(states)
        return torch.exp(-self.path_lengths(positions, goals))

    def path_lengths(self, positions: Tensor, goals: Tensor) -> Tensor:
        """Return the lengths of the ways from positions to goals, (..., G) each: (...).

        Between two places that share a near landmark it is straight.
        """
        to_first, first = self._nearest(positions, BEGIN)
        to_last, last = self._nearest(goals, END)
        between = self.ways[first[..., :, None], last[..., None, :]]
        whole = to_first[..., :, None] + between + to_last[..., None, :]
        shortest = whole.flatten(-2).amin(-1)
        straight = (positions - goals).norm(dim=-1)
        near = to_first[..., :END, None].isfinite() & to_last[..., None, :].isfinite()
        same = first[..., :END, None] == last[..., None, :]
        together = (near & same).flatten(-2).any(-1)
        return torch.where(together, straight, shortest)

    def _nearest(self, places: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return the distances to the nearest landmarks, nearest first, and their numbers, (...,
        count) each.

        The distance is infinite of one that is no neighbour: it may be behind a wall.
        """
        distances = torch.cdist(places.reshape(-1, self.size), self.landmarks)
        nearest = distances.topk(min(count, len(self.landmarks)), largest=False)
        values = nearest.values
        apart = (values > NEIGHBOUR * self.radius) & (values > values[:, :1])
        shape = (*places.shape[:-1], -1)
        return values.masked_fill(apart, torch.inf).view(shape), nearest.indices.view(shape)

    @torch.no_grad()
    def plan(self, states: Tensor, steps: int) -> Tensor:
        """Return the values (N, C) of holding each candidate action for so many steps.

        -1: not to be used, since the end is unlike the data or no nearer to the goal.
        """
        N, C = len(states), len(self.candidates)
        actions = self.candidates.repeat(N, 1)
        # (M, N C, S)
        every = self.dynamics.hold_actions(states.repeat_interleave(C, 0), actions, steps)
        mean = every.mean(0)
        values = self.value(mean).view(N, C)
        least = torch.exp(LEAST_GAIN * self.radius)  # of a plan in values of staying
        nearer = values > least * self.value(states)[:, None]
        positions, _ = self.split_goals(mean)
        trusted = self.dynamics.agree(every, steps) & self.is_covered(positions)
        return torch.where(trusted.view(N, C) & nearer, values, -1.0)

    def is_covered(self, positions: Tensor) -> Tensor:
        """Return True where positions (..., G) are as near to a landmark as those of the log: (...)
        bool.
        """
        return self._nearest(positions, 1)[0][..., 0] <= SLACK * self.radius

    def fit(self, data: Transitions, units: Normalizer, *, seed: int) -> None:
        """Fit the dynamics, spread the landmarks and find the ways between them.

        Raises:
            ValueError: the log has no more positions than the planner has landmarks.
        """
        positions = data.observations[:, : self.size]
        distinct = len(positions.unique(dim=0))
        if distinct <= len(self.landmarks):  # no end of a plan is exactly at one of them
            raise ValueError(
                f"planner.landmarks: expected fewer than the {distinct:,} different positions of the "
                f"log, got {len(self.landmarks):,}"
            )
        with temporary_seed(seed):
            self.dynamics.set_units(units)
            self._fit_goal_units(units)
            self.dynamics.fit(data, self.steps)
            self._spread_landmarks(positions)
            self._connect_landmarks(data)

    def _fit_goal_units(self, units: Normalizer) -> None:
        """Find how a goal, as the states hold it, becomes a place among the positions."""
        # of a state: the numbers of a text are in raw units
        mean = F.pad(units.observation_mean, (0, self.text_numbers))
        scale = F.pad(units.observation_scale, (0, self.text_numbers), value=1.0)
        G = self.size
        self.goal_scale.copy_(scale[-G:] / scale[:G])
        self.goal_shift.copy_((mean[-G:] - mean[:G]) / scale[:G])

    def _spread_landmarks(self, positions: Tensor) -> None:
        """Choose landmarks among positions (n, G), each the farthest from those before it."""
        sample = positions[torch.randint(len(positions), (SAMPLE,))]
        apart = torch.full((len(sample),), torch.inf)
        farthest = 0
        for k in range(len(self.landmarks)):
            self.landmarks[k] = sample[farthest]
            apart = torch.minimum(apart, (sample - sample[farthest]).norm(dim=-1))
            farthest = int(apart.argmax())
        self.radius.fill_(float(apart.max()))

    def _connect_landmarks(self, data: Transitions) -> None:
        """Find the shortest ways between landmarks.

        A landmark that the log only leaves, or only comes to, is put infinitely far away: only those
        of the largest part of the log are used in which there is a way from each to each.
        """
        start, stop = self._find_links(data).nonzero(as_tuple=True)
        lengths = (self.landmarks[start] - self.landmarks[stop]).norm(dim=-1)
        costs = lengths.double().clamp(min=1e-9).numpy()
        K = len(self.landmarks)
        graph = csr_array((costs, (start.numpy(), stop.numpy())), (K, K))
        _, part = connected_components(graph, connection="strong")
        alone = part != np.bincount(part).argmax()
        self.ways.copy_(torch.from_numpy(dijkstra(graph)))
        self.landmarks[torch.from_numpy(alone)] = FAR

    def _find_links(self, data: Transitions) -> Tensor:
        """Return from which landmark the log goes to which within `link` steps, (K, K) bool."""
        positions = data.observations[:, : self.size]
        parts = [self._nearest(rows, 1)[1][:, 0] for rows in positions.split(ROWS)]
        landmark = torch.cat(parts)  # (n,)
        follows = torch.zeros(len(positions), dtype=torch.bool)
        follows[data.pairs] = True  # whether the next row is the next step
        K = len(self.landmarks)
        linked = torch.zeros(K, K, dtype=torch.bool)
        now = data.pairs
        for step in range(1, self.link + 1):
            linked[landmark[now], landmark[now + step]] = True
            now = now[follows[now + step]]
        return linked
