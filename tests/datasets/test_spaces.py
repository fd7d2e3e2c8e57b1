"""One layout for observations of Gymnasium spaces, by hand."""

import numpy as np
import pytest
from gymnasium import spaces

from decisionllm.datasets.spaces import (
    action_parts,
    action_spec,
    decode_actions,
    encode_actions,
    flatten,
    observation_parts,
    stack,
    stated_action_parts,
    stated_parts,
)

NESTED = spaces.Dict(
    pos=spaces.Box(-9, 9, (2,), np.float32),
    arm=spaces.Dict(turn=spaces.Discrete(3, start=5), at=spaces.Box(-9, 9, (1, 2), np.float32)),
)


def test_parts_are_sorted_by_name_at_every_level():
    seen = [
        {"pos": np.array([1.0, 2.0]), "arm": {"turn": 6, "at": np.array([[3.0, 4.0]])}},
        {"pos": np.array([5.0, 6.0]), "arm": {"turn": 5, "at": np.array([[7.0, 8.0]])}},
    ]
    assert observation_parts(NESTED) == [("arm.at", 2), ("arm.turn", 3), ("pos", 2)]
    assert flatten(stack(seen), NESTED).tolist() == [[3, 4, 0, 1, 0, 1, 2], [7, 8, 1, 0, 0, 5, 6]]


def test_an_observation_without_names_is_one_part():
    assert observation_parts(spaces.Box(0, 1, (2, 3))) == [("observation", 6)]
    assert observation_parts(spaces.Discrete(4)) == [("observation", 4)]
    with pytest.raises(
        ValueError,
        match="observation space: expected a Box, a Discrete or a Dict of them, got Tuple",
    ):
        observation_parts(spaces.Tuple([NESTED]))


def test_stated_parts_make_up_an_observation():
    assert stated_parts([("goal", 1), ("pos", 2)], 3) == [["goal", 1], ["pos", 2]]
    for wrong in ([("goal", 1)], [("pos", 1), ("pos", 2)]):
        with pytest.raises(
            ValueError,
            match="observation_parts: expected names that differ, and sizes that add up to 3",
        ):
            stated_parts(wrong, 3)
    for wrong in (["goal", "pos"], {"goal": 3}, [("goal", "one")]):
        with pytest.raises(
            ValueError, match=r"observation_parts: expected \(name, numbers\) of each"
        ):
            stated_parts(wrong, 3)


@pytest.mark.parametrize(
    ("space", "parts", "actions", "rows"),
    [
        (spaces.Discrete(4, start=5), [4], [5, 8], [[0], [3]]),
        (spaces.MultiDiscrete([3, 2]), [3, 2], [[0, 1], [2, 0]], [[1], [4]]),
        (spaces.MultiDiscrete([3, 2], start=[1, 5]), [3, 2], [[1, 6], [3, 5]], [[1], [4]]),
        (spaces.MultiDiscrete([[2], [3]]), [2, 3], [[[1], [2]]], [[5]]),
        (spaces.Box(-1, 1, (2, 1), np.float16), [], [[[0.5], [-1]]], [[0.5, -1]]),
    ],
)
def test_actions_are_rows_and_come_back(space, parts, actions, rows):
    assert action_parts(space) == parts
    assert encode_actions(actions, space).tolist() == rows
    back = decode_actions(np.array(rows, np.float32), space)
    assert back.tolist() == np.array(actions, float).tolist() and all(
        action in space for action in back
    )


def test_an_action_of_whole_numbers_is_the_nearest():
    space = spaces.Box(-10, 10, (1,), np.int32)
    rows = np.array([[2.999], [-0.999], [9.6], [0.4]], np.float32)
    assert decode_actions(rows, space).tolist() == [[3], [-1], [10], [0]]


@pytest.mark.parametrize("action", [[0, 6], [4, 6], [1, 4], [1, 7]])
def test_an_action_that_a_multi_discrete_does_not_have_is_refused(action):
    space = spaces.MultiDiscrete([3, 2], start=[1, 5])
    with pytest.raises(
        ValueError, match=r"expected a value of MultiDiscrete.*, got \[., .\] in row 1"
    ):
        encode_actions([[1, 6], action], space)


def test_a_multi_discrete_action_is_one_of_the_product():
    assert action_spec(spaces.MultiDiscrete([3, 2])) == {"action_dim": 1, "num_actions": 6}
    assert action_spec(spaces.MultiDiscrete([64, 64]))["num_actions"] == 4096
    with pytest.raises(
        ValueError,
        match=r"MultiDiscrete\(\[64 65\]\): expected at most 4096 combinations, .*, got 4160",
    ):
        action_spec(spaces.MultiDiscrete([64, 65]))


def test_stated_parts_of_an_action_make_up_its_values():
    assert stated_action_parts((3, 2), 6) == [3, 2]
    with pytest.raises(
        ValueError, match=r"action_parts: expected sizes whose product is 5, .*, got \[3, 2\]"
    ):
        stated_action_parts([3, 2], 5)


def test_a_number_of_a_box_with_equal_bounds_has_one_value():
    """A policy takes a number near it, since its own bounds are on both sides."""
    box = spaces.Box(np.array([-1, 2], np.float32), np.array([1, 2], np.float32))
    actions = decode_actions(np.array([[0.5, 1.999]], np.float32), box)
    assert actions.tolist() == [[0.5, 2]]
    assert box.contains(actions[0])
