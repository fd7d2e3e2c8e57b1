"""One layout for observations of Gymnasium spaces, by hand."""

import tracemalloc

import numpy as np
import pytest
from gymnasium import spaces

from decisionllm.datasets.spaces import (
    action_parts,
    action_spec,
    decode_actions,
    encode_actions,
    fits,
    flatten,
    flatten_one,
    observation_parts,
    replace_texts,
    stack,
    stated_action_parts,
    stated_parts,
    text_parts,
    text_values,
    unflatten,
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
        match="observation space, part b: expected a Box, Discrete, .*Tuple of them, got Sequence",
    ):
        observation_parts(spaces.Dict(a=NESTED, b=spaces.Sequence(NESTED)))
    with pytest.raises(ValueError, match="part b: expected a Dict with parts, got none"):
        observation_parts(spaces.Dict(a=NESTED, b=spaces.Dict({})))


@pytest.mark.parametrize(
    ("space", "parts", "observation", "row"),
    [
        (spaces.MultiDiscrete([2, 3]), [("observation", 5)], [1, 0], [0, 1, 1, 0, 0]),
        (spaces.MultiDiscrete([2, 3], start=[5, 7]), [("observation", 5)], [5, 9], [1, 0, 0, 0, 1]),
        (spaces.MultiDiscrete([[2], [2]]), [("observation", 4)], [[1], [0]], [0, 1, 1, 0]),
        (spaces.MultiBinary((2, 2)), [("observation", 4)], [[1, 0], [1, 1]], [1, 0, 1, 1]),
        (
            spaces.Tuple([spaces.Discrete(2), spaces.Box(0, 9, (2,)), NESTED]),
            [("0", 2), ("1", 2), ("2.arm.at", 2), ("2.arm.turn", 3), ("2.pos", 2)],
            (1, [3, 4], {"pos": [1, 2], "arm": {"turn": 6, "at": [[3, 4]]}}),
            [0, 1, 3, 4, 3, 4, 0, 1, 0, 1, 2],
        ),
        (
            spaces.Dict(hand=spaces.Tuple([spaces.Discrete(2), spaces.Discrete(3)])),
            [("hand.0", 2), ("hand.1", 3)],
            {"hand": (0, 2)},
            [1, 0, 0, 0, 1],
        ),
    ],
)
def test_an_observation_is_one_row_and_comes_back(space, parts, observation, row):
    assert observation_parts(space) == parts
    assert flatten_one(observation, space).tolist() == row
    rows = flatten(stack([observation, observation]), space)
    assert rows.tolist() == [row, row] and fits(rows, space)
    back = unflatten(rows, space)
    assert flatten(back, space).tolist() == [row, row]


def test_a_large_discrete_takes_no_memory_beside_its_rows():
    tracemalloc.start()
    rows = flatten(np.array([0, 19_999]), spaces.Discrete(20_000))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert rows[0, 0] == rows[1, 19_999] == 1 and rows.sum() == 2
    assert peak < 10 * rows.nbytes


@pytest.mark.parametrize(
    ("space", "observation", "message"),
    [
        (spaces.Box(0, 1, (2,)), np.zeros(3), r"numbers of Box of shape \(2,\), got shape \(3,\)"),
        (spaces.Box(0, 1, (2, 3)), np.zeros((3, 2)), r"of shape \(2, 3\), got shape \(3, 2\)"),
        (spaces.Box(0, 1, (2,)), {"a": 1}, "expected numbers of Box .*, got a dict of a"),
        (spaces.Box(0, 1, ()), "left", "expected numbers of Box .*, got <U4"),
        (spaces.Box(0, 1, ()), None, "expected numbers of Box .*, got object"),
        (spaces.Discrete(3), 3, r"expected a value of Discrete\(3\), got 3 in row 0"),
        (spaces.MultiDiscrete([2, 2]), [1], r"of shape \(2,\), got shape \(1,\)"),
        (spaces.MultiBinary(2), [0, 2], r"expected 0 or 1 in MultiBinary\(2\), got 2"),
        (NESTED, {"pos": [1, 2]}, "expected a dict of arm, pos, got a dict of pos"),
        (spaces.Tuple([NESTED, NESTED]), 5, "expected a tuple of 2 parts, got int"),
        (spaces.Tuple([NESTED, NESTED]), (5,), "expected a tuple of 2 parts, got tuple of 1"),
    ],
)
def test_an_observation_unlike_its_space_is_refused(space, observation, message):
    with pytest.raises(ValueError, match=message):
        flatten_one(observation, space)


def test_dimensions_of_one_and_other_types_are_no_difference():
    assert flatten_one(3, spaces.Box(0, 9, (1,))).tolist() == [3]
    assert flatten_one(np.ones((1, 2), np.float64), spaces.Box(0, 9, (2,))).tolist() == [1, 1]
    assert flatten_one(np.array([2], np.uint8), spaces.Discrete(3)).tolist() == [0, 0, 1]
    assert flatten_one((4, 5), spaces.Box(0, 9, (2,), np.int64)).tolist() == [4, 5]


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


class Mission(spaces.Space):
    """A space of texts that is no `spaces.Text`, as MiniGrid's MissionSpace."""

    def __init__(self):
        super().__init__(dtype=str)


def spoken(text):
    """A Dict with a text at the top and one in a nested part."""
    place = spaces.Dict(x=spaces.Box(-9, 9, (2,), np.float32), said=spaces.Text(9))
    return spaces.Dict(mission=text, place=place, side=spaces.Discrete(2))


@pytest.mark.parametrize("text", [spaces.Text(20), Mission()], ids=["Text", "another space"])
def test_texts_are_no_numbers_of_an_observation(text):
    space = spoken(text)
    assert observation_parts(space) == [("place.x", 2), ("side", 2)]
    assert text_parts(space) == ["mission", "place.said"]
    seen = [
        {"mission": said, "place": {"x": np.array([i, 2.0]), "said": ""}, "side": i}
        for i, said in enumerate(["Geh nach Köln.", ""])
    ]
    rows = flatten(stack(seen), space)
    assert rows.tolist() == [[0, 2, 1, 0], [1, 2, 0, 1]]
    assert flatten_one(seen[1], space).tolist() == rows[1].tolist()
    assert text_values(seen[0], space) == {"mission": "Geh nach Köln.", "place.said": ""}
    again = unflatten(rows, space, text="Go.")
    assert again["mission"].tolist() == ["Go.", "Go."] and again["side"].tolist() == [0, 1]
    assert fits(rows, space)


@pytest.mark.parametrize("space", [spaces.Text(3), spaces.Dict(a=spaces.Text(3))])
def test_an_observation_of_texts_alone_is_refused(space):
    with pytest.raises(ValueError, match="observation space: expected numbers beside texts, got"):
        observation_parts(space)


def test_texts_are_replaced_by_a_space_of_their_lengths_and_letters():
    space = replace_texts(spoken(Mission()), ["ab", "Köln"])
    assert space["mission"] == spaces.Text(4, min_length=0, charset=frozenset("abKöln"))
    assert space["mission"].contains("Köln") and not space["mission"].contains("xyz")
    assert space["place"]["x"] == spoken(Mission())["place"]["x"]
