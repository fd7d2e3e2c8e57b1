"""Connector: boards, observations and rewards by hand, and plans of the teacher."""

import numpy as np
import pytest

from decisionllm.envs.connector import TEACHERS, Connector, Teacher, plan

pytest.importorskip("jumanji")
STAY, UP, RIGHT, DOWN, LEFT = range(5)


@pytest.fixture
def world():
    """One lane of three rows and four columns or, turned, of three columns; agent a stands left of agent b, before it is turned."""
    return Connector(np.arange(6), "facing", 4, 2)


def facing(world):
    """The direction of the targets from the agents, (E, N, 2): two cells behind the other agent."""
    return world.targets - world.positions


def test_on_a_facing_board_each_target_is_behind_the_other_agent(world):
    assert np.abs(facing(world)).sum(-1).tolist() == [[2, 2]] * 6 and (facing(world).sum(1) == 0).all()
    assert np.abs(world.positions[:, 0] - world.positions[:, 1]).sum(-1).tolist() == [1] * 6
    assert world.masks.sum(-1).tolist() == [[3, 3]] * 6, "to stay, or to either side"


def sideways(world, agent, side):
    """The action of an agent that leaves the line of the agents to one side, (E,): side 1 or -1, the same for both agents."""
    row, column = np.abs(facing(world))[:, 0].T
    return np.where(column > row, UP if side > 0 else DOWN, LEFT if side > 0 else RIGHT)


def test_agents_that_pass_on_two_sides_connect_and_on_one_do_not(world):
    other = Connector(np.arange(6), "facing", 4, 2)
    for board, sides in ((world, (1, -1)), (other, (1, 1))):
        assert board.step(np.stack([sideways(board, i, side) for i, side in enumerate(sides)], 1)).tolist() == pytest.approx(
            [-0.03] * 6
        )
        teacher = Teacher(board, 0, np.random.default_rng(0))
        gains = [board.step(teacher.act(board)) for _ in range(3)]
        if sides == (1, -1):
            assert np.sum(gains, 0) == pytest.approx([1 - 0.09] * 6) and board.won.all() and board.terminated.all()
        else:
            assert not board.won.any() and (board.connected <= 0.5).all()


def test_an_observation_is_cells_target_and_others(world):
    seen, row, column = world.observations[0, 0], *world.positions[0, 0]
    cells = seen[:49].reshape(7, 7)
    inside = cells[3 - row : 7 - row, 3 - column : 7 - column]
    assert (inside == world.taken[0]).all() and inside.sum() == 4 and cells.sum() == 49 - 16 + 4
    np.testing.assert_allclose(seen[49:51] * 4, facing(world)[0, 0])
    np.testing.assert_allclose(seen[51:53] * 4, world.positions[0, 1] - world.positions[0, 0])
    np.testing.assert_allclose(seen[53:55] * 4, world.targets[0, 1] - world.positions[0, 0])
    assert seen[55] == 1 and len(seen) == 56


def test_a_plan_goes_around_the_paths_before_it(world):
    """Each of the two paths has 4 cells; a first path on one side leaves the other side to the second."""
    moves, cost = plan(world, np.random.default_rng(0))
    assert cost.tolist() == [8] * 6
    a, b = (np.where(np.isin(moves[:, i], (UP, LEFT)), 1, -1) for i in (0, 1))
    assert (a + b == 0).all() and (moves > 0).all()
    sides = {int(s) for seed in range(20) for s in np.sign(plan(world, np.random.default_rng(seed))[0][:, 0] - 2.5)}
    assert sides == {-1, 1}


def test_jumanjis_boards_are_solved_by_the_expert_and_not_at_random():
    for name, low, high in (("expert", 0.9, 1.0), ("random", 0.0, 0.5)):
        world = Connector(np.arange(20), "walk", 4, 2)
        teacher = Teacher(world, TEACHERS.index(name), np.random.default_rng(0))
        while not world.over.all():
            world.step(teacher.act(world))
        assert low <= world.won.mean() <= high


@pytest.mark.parametrize("options", [{"agents": 3}, {"agents": 6}, {"boards": "ring"}])
def test_a_board_that_cannot_be_is_refused(options):
    with pytest.raises(
        ValueError, match="expected an even number up to 4 on facing boards of 6|boards: expected one of facing, walk"
    ):
        Connector([0], **options)
