"""Shortest paths in a log: a corridor like a U whose ways are known by hand."""

import numpy as np
import pytest
import torch
from torch import nn

from decisionllm.models.landmark_planner import FAR, LandmarkPaths
from decisionllm.models.normalizer import Normalizer
from decisionllm.protocols import Transitions
from decisionllm.schema import Spec

pytestmark = pytest.mark.numeric

SPEC = Spec(observation_dim=4, action_dim=2, horizon=50, low=(-1.0, -1.0), high=(1.0, 1.0))
# down the left arm, along the bottom, up the right arm: 11 places, 10 steps from end to end
U = [(0, 3), (0, 2), (0, 1), (0, 0), (1, 0), (2, 0), (3, 0), (4, 0), (4, 1), (4, 2), (4, 3)]


class Shift(nn.Module):
    """A member that moves the position by the action."""

    def forward(self, x):
        return torch.cat([x[..., 4:], torch.zeros_like(x[..., 4:])], -1)


def transitions(*walks):
    """Walks (n, 2) as episodes whose goal is (0, 0)."""
    walks = [torch.tensor(walk, dtype=torch.float32) for walk in walks]
    positions = torch.cat(walks)
    ends = np.cumsum([len(walk) for walk in walks]) - 1
    n = len(positions)
    pairs = torch.from_numpy(np.setdiff1d(np.arange(n), ends))
    zeros = torch.zeros(n)
    observations = torch.cat([positions, torch.zeros(n, 2)], 1)
    actions = torch.zeros(n, 2)
    codes = torch.zeros(1, 0)
    return Transitions(observations, actions, zeros, zeros, pairs, zeros.long(), codes)


def fit_paths(*walks, landmarks=11, **options):
    """Landmarks and ways of a log, with members that are known."""
    torch.manual_seed(0)
    made = LandmarkPaths(SPEC, landmarks=landmarks, link=1, **options)
    data = transitions(*walks)
    made._spread_landmarks(data.observations[:, :2])
    made._connect_landmarks(data)
    made.dynamics.count_bins(data.observations)
    made.dynamics.members = nn.ModuleList([Shift(), Shift()])
    return made


def way(made, start, goal):
    return float(made.path_lengths(torch.tensor([start]).float(), torch.tensor([goal]).float()))


def test_a_way_follows_the_log_and_not_the_straight_line():
    made = fit_paths(U, U[::-1])
    assert way(made, (0, 3), (4, 3)) == pytest.approx(10)
    assert way(made, (4, 3), (0, 2)) == pytest.approx(9)
    # beside a landmark; and so near that both have the same one
    assert way(made, (0, 3.2), (4, 3)) == pytest.approx(10.2)
    assert way(made, (2.1, 0), (2.3, 0)) == pytest.approx(0.2)


def test_ways_lead_over_parts_of_several_episodes():
    left, right = U[:6], U[5:]
    made = fit_paths(left, left[::-1], right, right[::-1])
    assert way(made, (0, 3), (4, 3)) == pytest.approx(10)


def test_a_place_that_the_log_only_leaves_is_no_landmark():
    made = fit_paths([(0, 4), *U], U[::-1], landmarks=12)
    assert (made.landmarks == FAR).all(1).sum() == 1
    assert way(made, (0, 4), (4, 3)) == pytest.approx(11)  # by the landmark at (0, 3)


def test_a_longer_link_joins_places_that_are_steps_apart():
    made = fit_paths(U, U[::-1])
    made.link = 3
    made._connect_landmarks(transitions(U, U[::-1]))
    # the diagonals from (0, 1) to (2, 0) and from (2, 0) to (4, 1), of three steps each
    assert way(made, (0, 3), (4, 3)) == pytest.approx(2 * (2 + 5**0.5))


def test_a_plan_walks_along_the_way_and_none_that_comes_no_nearer_counts():
    made = fit_paths(U, U[::-1])
    states = torch.tensor([[0, 3, 4, 3], [0, 0, 4, 3], [4, 3, 4, 3]]).float()
    values = made.plan(states, 1)  # (N, C)
    best = made.candidates[values.argmax(1)]
    assert best[:2].tolist() == [[0, -1], [1, 0]]
    assert values.amax(1)[:2].log().tolist() == pytest.approx([-9, -6])
    assert (values[2] == -1).all(), "it is at its goal"


def test_goals_have_units_of_their_own():
    rng = np.random.default_rng(0)
    raw = rng.normal([5, 5, 9, 9], [1, 2, 4, 8], (1000, 4)).astype(np.float32)
    units = Normalizer(SPEC)
    units.fit([(raw, np.zeros(1000))])
    units.fit_changes([np.diff(raw, axis=0)])
    made = LandmarkPaths(SPEC, landmarks=20, steps=1)
    seen = units.observations(torch.from_numpy(raw))
    zeros = torch.zeros(1000)
    pairs = torch.arange(999)
    actions = torch.zeros(1000, 2)
    data = Transitions(seen, actions, zeros, zeros, pairs, zeros.long(), torch.zeros(1, 0))
    made.fit(data, units, seed=0)
    same = units.observations(torch.tensor([[3.0, 8.0, 3.0, 8.0]]))
    position, goal = made.split_goals(same)
    np.testing.assert_allclose(position, goal, atol=1e-4)


def test_a_goal_in_the_text_is_the_place_that_the_observation_would_end_with():
    rng = np.random.default_rng(0)
    raw = rng.normal([5, 5], [1, 2], (1000, 2)).astype(np.float32)
    place = Spec(observation_dim=2, action_dim=2, horizon=50, low=(-1.0, -1.0), high=(1.0, 1.0))
    units = Normalizer(place)
    units.fit([(raw, np.zeros(1000))])
    units.fit_changes([np.diff(raw, axis=0)])
    made = LandmarkPaths(place, goal_in="text", landmarks=20, steps=1)
    seen = units.observations(torch.from_numpy(raw))
    zeros = torch.zeros(1000)
    texts = ["Go to x = 3.0, y = 8.5.", "Go to x = -0.5, y = 4."]
    goals = made.text_codes(texts)
    assert goals.tolist() == [[3, 8.5], [-0.5, 4]]
    data = Transitions(
        seen, torch.zeros(1000, 2), zeros, zeros, torch.arange(999), zeros.long(), goals
    )
    made.fit(data, units, seed=0)
    states = made.states(units.observations(torch.tensor([[3.0, 8.5], [3.0, 8.5]])), texts)
    positions, places = made.split_goals(states)
    np.testing.assert_allclose(positions[0], places[0], atol=1e-4)
    assert not np.allclose(positions[1], places[1], atol=1e-1)
    assert made.plan(states, 2).shape == (2, 9)
    # a goal anywhere does not make a state unlike the data
    far = made.states(seen[:1], ["Go to x = 900, y = 900."])
    assert made.dynamics.is_supported(far[:, :2]).all()
    assert made.dynamics.agree(far.expand(2, 1, 4), 1).all()
    with pytest.raises(ValueError, match=r"a task text with 2 numbers, the goal, got 'Maze 3'"):
        made.states(seen[:1], ["Maze 3"])


def test_an_observation_without_a_goal_is_refused():
    line = Spec(observation_dim=1, action_dim=1, horizon=50, low=(-1.0,), high=(1.0,))
    with pytest.raises(ValueError, match=r"a goal of 1 to 0 numbers.*goal_in=text takes"):
        LandmarkPaths(line)
    for wrong in ({"goal_size": 3}, {"goal_size": 5, "goal_in": "text"}):
        with pytest.raises(ValueError, match=r"planner.goal_size: expected"):
            LandmarkPaths(SPEC, **wrong)
    for wrong in ({"landmarks": 1}, {"link": 0}):
        with pytest.raises(ValueError, match=r"planner.landmarks, link: expected"):
            LandmarkPaths(SPEC, **wrong)


def test_a_log_of_few_positions_has_fewer_landmarks():
    made = LandmarkPaths(SPEC, landmarks=11)
    expected = (
        "planner.landmarks: expected fewer than the 11 different positions of the log, got 11"
    )
    with pytest.raises(ValueError, match=expected):
        made.fit(transitions(U, U), Normalizer(SPEC), seed=0)


def test_a_least_value_is_a_share():
    with pytest.raises(ValueError, match="planner.least_value: expected a share"):
        LandmarkPaths(SPEC, least_value=-1.5)
