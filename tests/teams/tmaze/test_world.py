"""The T-maze for teams by hand, and what independent and forgetful teams win."""

import numpy as np
import pytest

from decisionllm.teams.tmaze.world import TEACHERS, Teacher, TMaze


def cued(agents=2, length=2):
    """Worlds with the cues left, right."""
    world = TMaze([0, 0], agents, length)
    world.cue = np.array([0, 1])
    return world


def test_a_team_is_right_if_each_room_of_the_cued_side_has_one_agent():
    for taken, won in (
        ([[2, 1], [3, 4]], [1, 1]),
        ([[1, 1], [4, 4]], [0, 0]),
        ([[3, 4], [1, 2]], [0, 0]),
        ([[1, 4], [4, 3]], [0, 1]),
    ):
        world = cued()
        assert [world.step(np.zeros((2, 2), int)).tolist() for _ in range(2)] == [
            [0, 0]
        ] * 2 and not world.over.any()
        assert (
            world.step(np.array(taken)).tolist() == won
            and world.over.all()
            and not world.alive.any()
        )
        assert world.won.tolist() == [bool(x) for x in won]


def test_the_cue_is_in_the_first_observation_alone():
    world, seen = cued(), []
    for _ in range(3):
        seen.append(world.observations[:, 1].tolist())
        assert world.masks[0, 0].tolist() == [world.time < 2, *[world.time == 2] * 4]
        world.step(np.full((2, 2), 0 if world.time < 2 else 1))
    assert seen == [[[0, 1, 0], [0, 0, 1]], [[0.5, 0, 0]] * 2, [[1, 0, 0]] * 2]


@pytest.mark.parametrize(("teacher", "wins"), [("expert", 1.0), ("random", 2 * 1 / 4**2)])
def test_teachers_win_what_chance_says(teacher, wins):
    """Two agents and rooms: 2 of the 16 choices of four rooms are right."""
    world = TMaze(np.arange(2000), 2, 1)
    player = Teacher(world, TEACHERS.index(teacher), np.random.default_rng(0))
    orders = set()
    while not world.over.any():
        assert np.take_along_axis(world.masks, (taken := player.act(world))[..., None], 2).all()
        orders |= {tuple(row) for row in taken.tolist()}
        world.step(taken)
    assert world.won.mean() == pytest.approx(wins, abs=0.02) and abs(world.cue.mean() - 0.5) < 0.05
    assert teacher == "random" or orders == {(0, 0), (1, 2), (2, 1), (3, 4), (4, 3)}
