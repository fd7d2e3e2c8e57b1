"""simple_spread as arrays: equal to mpe2 to the last bit, teachers that need their own observation
alone, the published scale of OMAR.
"""

import numpy as np
import pytest
from scipy.optimize import linear_sum_assignment

from decisionllm.teams.spread import world as spread
from decisionllm.teams.spread.world import (
    HORIZON,
    PUSHES,
    TEACHERS,
    Spread,
    Teacher,
    assign_landmarks,
    to_pushes,
)


def play(world, kind, *, seed=1, **options):
    """Returns (E, N) of a teacher."""
    teacher = Teacher(world, TEACHERS.index(kind), np.random.default_rng(seed), **options)
    return sum(world.step(to_pushes(teacher.act(world))) for _ in range(HORIZON))


def in_mpe2(action):
    """Our action as mpe2 takes it: an index, or five numbers of which the first does nothing."""
    if len(action) == 1:
        return int(action[0])
    x, y = action
    return np.array([0, max(-x, 0), max(x, 0), max(-y, 0), max(y, 0)], np.float32)


@pytest.mark.parametrize("agents", [2, 3, 6])
@pytest.mark.parametrize("discrete", [True, False])
def test_steps_observations_and_rewards_equal_mpe2_to_the_last_bit(agents, discrete):
    from mpe2 import simple_spread_v3

    seeds, rng = np.arange(40, 45), np.random.default_rng(0)
    world = Spread(seeds, agents)
    peers = [
        simple_spread_v3.parallel_env(N=agents, continuous_actions=not discrete) for _ in seeds
    ]
    seen = [peer.reset(seed=int(seed))[0] for peer, seed in zip(peers, seeds, strict=True)]
    touched = 0
    for step in range(HORIZON):
        assert (world.observe() == np.concatenate([list(s.values()) for s in seen])).all()
        size = (len(seeds), agents)
        drawn = (
            rng.integers(len(PUSHES), size=(*size, 1)).astype(float)
            if discrete
            else rng.uniform(-1, 1, (*size, 2))
        )
        actions = drawn if step < 10 else towards_first(world, discrete)
        actions = actions.astype(np.float32)
        gains = world.step(to_pushes(actions))
        touched += (world.distance[world.both] < spread.TOUCH).sum()
        for e, peer in enumerate(peers):
            seen[e], paid, _, over, _ = peer.step(
                {a: in_mpe2(actions[e, i]) for i, a in enumerate(peer.possible_agents)}
            )
            assert list(paid.values()) == gains[e].tolist()
            assert set(over.values()) == {step == HORIZON - 1}
    assert touched, "contacts were part of it"


def towards_first(world, discrete):
    return spread.steer(
        world.positions[:, :1] - world.positions, world.velocities, discrete=discrete
    )


def test_a_world_is_the_same_beside_worlds_with_more_agents():
    alone, beside = Spread([7], 3), Spread([6, 7, 8], [6, 3, 2])
    rng = np.random.default_rng(0)
    for _ in range(HORIZON):
        actions = rng.uniform(-1, 1, (3, 6, 2))
        one, many = alone.step(actions[1:2, :3]), beside.step(actions)
        assert (many[1, :3] == one).all() and (many[1, 3:] == 0).all()
        assert (beside.observe([1]) == alone.observe()).all()


def test_a_crashed_agent_does_not_push_and_can_be_pushed():
    world = Spread([3], 2)
    world.crashed[0, 1] = True
    place = world.positions[0, 1].copy()
    world.step(np.ones((1, 2, 2)))
    world.step(np.ones((1, 2, 2)))
    assert (world.positions[0, 1] == place).all() and (world.positions[0, 0] != place).all()
    world.positions[0, 0] = place + [0.1, 0.0]
    world._measure()
    world.step(np.zeros((1, 2, 2)))
    world.step(np.zeros((1, 2, 2)))
    assert world.positions[0, 1, 0] < place[0]


def test_the_teachers_action_follows_from_the_own_observation():
    world = Spread(range(20), 4)
    teacher = Teacher(world, TEACHERS.index("expert"), np.random.default_rng(0))
    for _ in range(5):
        actions = teacher.act(world)
        for row, seen in enumerate(world.observe().astype(np.float64)):
            velocity = seen[:2]
            landmarks = seen[4:12].reshape(4, 2)
            others = seen[12:18].reshape(3, 2)
            # it is the first, at the origin of its own observation
            agents = np.concatenate([np.zeros((1, 2)), others])
            mine = linear_sum_assignment(np.linalg.norm(agents[:, None] - landmarks, axis=-1))[1][0]
            alone = spread.steer(landmarks[mine], velocity, discrete=True)
            assert alone == actions.reshape(-1, 1)[row]
        world.step(to_pushes(actions))


def test_the_assignment_equals_scipys():
    rng = np.random.default_rng(0)
    for N in (5, 7):
        distance, alive = rng.random((50, N, N)), np.ones((50, N), bool)
        expected = [linear_sum_assignment(d)[1] for d in distance]
        assert (assign_landmarks(distance, alive) == expected).all()
        fewer = alive.copy()
        fewer[:, N - 1] = False
        expected = [linear_sum_assignment(d[:-1, :-1])[1] for d in distance]
        assert (assign_landmarks(distance, fewer)[:, :-1] == expected).all()


def test_teachers_are_of_three_qualities_and_a_convention_is_between():
    means = {kind: play(Spread(range(900_000, 900_400), 3), kind).mean() for kind in TEACHERS}
    assert (
        -8.1 < means["expert"] < -7.1
        and -17.2 < means["medium"] < -15.2
        and -27.3 < means["random"] < -25.0
    )
    assert means["medium"] < means["convention"] < means["expert"]


def test_a_convention_lasts_and_differs_between_worlds():
    world = Spread(range(200), 3)
    teacher = Teacher(world, TEACHERS.index("convention"), np.random.default_rng(0))
    first = teacher.choose_landmarks(world)
    world.step(to_pushes(teacher.act(world)))
    assert (teacher.choose_landmarks(world) == first).all()
    assert (np.sort(first, 1) == range(3)).all() and len(np.unique(first, axis=0)) == 6


def test_noise_is_a_share_of_actions():
    world = Spread(range(2000), 3)
    clean = Teacher(world, 0, np.random.default_rng(0)).act(world)
    noisy = Teacher(world, 0, np.random.default_rng(0), noise=0.5).act(world)
    assert (noisy != clean).mean() == pytest.approx(0.5 * (1 - 1 / len(PUSHES)), abs=0.03)


def test_random_play_has_the_return_that_omar_printed():
    """159.8: OMAR's S_random, of the return of an agent; our standard error is 1.3."""
    world = Spread(range(900_000, 902_000), 3, "omar")
    assert play(world, "random", discrete=False).mean() == pytest.approx(159.8, abs=4)


def test_omars_rules_by_hand():
    world = Spread([3], 2, "omar")
    world.positions[0] = [[0, 0], [0.2, 0]]
    world.landmarks[0] = [[0, 0.05], [0, 1]]
    world._measure()
    assert world.rewards()[0] == pytest.approx([10 + 1 - 5] * 2), (
        "the first agent is the nearest to both landmarks, at 0.05 and 1"
    )
    world.positions[0, 1] = [5, 0]
    world._measure()
    world.step(np.array([[[1.0, 0], [0, 0]]]))
    assert world.velocities[0, 0, 0] == pytest.approx(0.5) and world.positions[
        0, 0, 0
    ] == pytest.approx(0.05), "it moves in the same step"


def test_worlds_of_different_sizes_are_not_observed_together():
    with pytest.raises(ValueError, match="equal numbers of agents"):
        Spread([0, 1], [2, 3]).observe()
    assert [w.tolist() for w in Spread([0, 1, 2], [2, 3, 2]).worlds_by_size()] == [[0, 2], [1]]


def test_unknown_rules_are_refused():
    with pytest.raises(ValueError, match="rules: expected"):
        Spread([0], 3, "mpe3")
