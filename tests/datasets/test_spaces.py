"""One layout for observations of Gymnasium spaces, by hand."""

import tracemalloc

import numpy as np
import pytest
from gymnasium import spaces

from decisionllm.datasets.action_spaces import (
    action_parts,
    action_spec,
    check_action_parts,
    decode_actions,
    encode_actions,
)
from decisionllm.datasets.categorical import (
    as_categorical,
    categorical_columns,
    categorical_sizes,
    grid_parts,
    grid_schema,
    original_space,
)
from decisionllm.datasets.space_parts import (
    check_observation_parts,
    observation_bounds,
    observation_parts,
    replace_texts,
    text_parts,
    text_values,
)
from decisionllm.datasets.spaces import (
    contains_observations,
    flatten,
    flatten_one,
    stack,
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


def test_bounds_are_in_the_order_of_the_columns():
    image = spaces.Box(np.array([[0, 1]]), np.array([[255, 9]]), dtype=np.uint8)
    space = spaces.Dict({"pixels": image, "held": spaces.Discrete(2), "say": spaces.Text(9)})
    assert observation_bounds(space) == ([0, 0, 0, 1], [1, 1, 255, 9])


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
    assert rows.tolist() == [row, row] and contains_observations(rows, space)
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
    assert check_observation_parts([("goal", 1), ("pos", 2)], 3) == [["goal", 1], ["pos", 2]]
    for wrong in ([("goal", 1)], [("pos", 1), ("pos", 2)]):
        with pytest.raises(
            ValueError,
            match="observation_parts: expected names that differ, and sizes that add up to 3",
        ):
            check_observation_parts(wrong, 3)
    for wrong in (["goal", "pos"], {"goal": 3}, [("goal", "one")]):
        with pytest.raises(
            ValueError, match=r"observation_parts: expected \(name, numbers\) of each"
        ):
            check_observation_parts(wrong, 3)


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


@pytest.mark.parametrize(
    ("action", "message"),
    [
        ([0, 6], r"a value of at least 1 in action\[0\], got 0 in row 1"),
        ([4, 6], r"a value below 4 in action\[0\], got 4 in row 1"),
        ([1, 4], r"a value of at least 5 in action\[1\], got 4 in row 1"),
        ([1, 7], r"a value below 7 in action\[1\], got 7 in row 1"),
        ([1.5, 6], r"a whole number in action\[0\], got 1.5 in row 1"),
    ],
)
def test_an_action_that_a_multi_discrete_does_not_have_is_refused(action, message):
    space = spaces.MultiDiscrete([3, 2], start=[1, 5])
    with pytest.raises(ValueError, match=f"expected {message}$"):
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
    assert check_action_parts((3, 2), 6) == [3, 2]
    with pytest.raises(
        ValueError, match=r"action_parts: expected sizes whose product is 5, .*, got \[3, 2\]"
    ):
        check_action_parts([3, 2], 5)


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
    assert contains_observations(rows, space)


@pytest.mark.parametrize("space", [spaces.Text(3), spaces.Dict(a=spaces.Text(3))])
def test_an_observation_of_texts_alone_is_refused(space):
    with pytest.raises(ValueError, match="observation space: expected numbers beside texts, got"):
        observation_parts(space)


def test_texts_are_replaced_by_a_space_of_their_lengths_and_letters():
    space = replace_texts(spoken(Mission()), ["ab", "Köln"])
    assert space["mission"] == spaces.Text(4, min_length=0, charset=frozenset("abKöln"))
    assert space["mission"].contains("Köln") and not space["mission"].contains("xyz")
    assert space["place"]["x"] == spoken(Mission())["place"]["x"]


GRID = spaces.Dict(
    direction=spaces.Discrete(4),
    image=spaces.Box(0, 255, (2, 1, 3), np.uint8),
    mission=spaces.Text(9),
    card=spaces.Tuple([spaces.Box(2, 4, (2,), np.int8), spaces.Box(0, 1, (1,), np.float32)]),
)


def test_declared_integers_are_one_hot_and_come_back_in_their_type():
    space = as_categorical(GRID, {"image": [3, 2, 1], "card.0": None})
    assert observation_parts(space) == [
        ("card.0", 6),
        ("card.1", 1),
        ("direction", 4),
        ("image", 12),
    ]
    image = np.array([[[2, 0, 0]], [[0, 1, 0]]], np.uint8)
    seen = {"direction": 0, "image": image, "mission": "", "card": (np.int8([4, 2]), [0.5])}
    row = flatten_one(seen, space)
    card = [0, 0, 1, 1, 0, 0]
    cells = [0, 0, 1, 1, 0, 1, 1, 0, 0, 0, 1, 1]
    assert row.tolist() == [*card, 0.5, 1, 0, 0, 0, *cells]
    cells = ((11, 3), (14, 2), (16, 1), (17, 3), (20, 2), (22, 1))
    assert categorical_columns(space) == ((0, 3), (3, 3), *cells)
    assert grid_schema(space) == (("own", 11, 1), ("grid:image", 6, 2))
    assert categorical_sizes(space) == {"image": [3, 2, 1], "card.0": 3}
    back = unflatten(row[None], space)
    assert back["image"].dtype == np.uint8 and np.array_equal(back["image"], image[None])
    assert back["card"][0].dtype == np.int8 and back["card"][0].tolist() == [[4, 2]]
    assert original_space(space) == GRID


@pytest.mark.parametrize(
    ("box", "sizes", "value", "row", "short"),
    [
        (spaces.Box(0, 2, (), np.int64), None, 2, [0, 0, 1], 3),
        (spaces.Box(-1, 1, (2,), np.int32), None, [-1, 1], [1, 0, 0, 0, 0, 1], 3),
        (
            spaces.Box(np.array([0, 5]), np.array([1, 7]), dtype=np.int16),
            None,
            [1, 6],
            None,
            [2, 3],
        ),
        (spaces.Box(-np.inf, np.inf, (2,), np.int64), 2, [0, 1], [1, 0, 0, 1], 2),
        (spaces.Box(-(2**31), 2**31 - 1, (1,), np.int32), [3], [2], [0, 0, 1], 3),
        (spaces.Box(0, 9, (2, 1), np.uint64), [[1], [2]], [[0], [1]], [1, 0, 1], [[1], [2]]),
    ],
)
def test_sizes_are_one_number_or_along_the_last_axis_or_those_of_the_bounds(
    box, sizes, value, row, short
):
    space = as_categorical(box, {"observation": sizes})
    assert flatten_one(value, space).tolist() == (row or [0, 1, 0, 1, 0])
    assert categorical_sizes(space) == {"observation": short}
    assert as_categorical(box, categorical_sizes(space)) == space
    back = unflatten(flatten_one(value, space)[None], space)
    assert back.dtype == box.dtype and back[0].tolist() == value


def test_the_numbers_around_grids_are_own_blocks():
    grid = spaces.Box(0, 1, (2, 1, 2), np.uint8)
    number = spaces.Box(0, 1, (1,), np.float32)
    space = spaces.Tuple([grid, number, spaces.Discrete(2), grid, spaces.Dict(seen=grid)])
    cells = (4, 2)
    assert grid_schema(as_categorical(space, [0, 3, "4.seen"])) == (
        ("grid:0", *cells),
        ("own", 3, 1),
        ("grid:3", *cells),
        ("grid:4.seen", *cells),
    )
    assert grid_schema(as_categorical(space, [3])) == (
        ("own", 7, 1),
        ("grid:3", *cells),
        ("own", 4, 1),
    )
    assert grid_schema(as_categorical(grid, ["observation"])) == (("grid:observation", *cells),)
    row = spaces.Box(0, 1, (3,), np.uint8)
    unequal = as_categorical(grid, {"observation": [[[2, 2]], [[2, 3]]]})
    for space_without_grid in (space, as_categorical(row, ["observation"]), unequal):
        assert grid_schema(space_without_grid) == ()


def test_names_of_nested_parts_are_nested_or_have_dots():
    space = spaces.Dict(hand=spaces.Dict(card=spaces.Box(0, 3, (1,), np.uint8)))
    for declared in ({"hand": {"card": 4}}, {"hand.card": 4}, ["hand.card"]):
        assert observation_parts(as_categorical(space, declared)) == [("hand.card", 4)]
    numbered = spaces.Tuple([spaces.Box(0, 3, (1,), np.uint8), spaces.Discrete(2)])
    for declared in ({0: 4}, [0], {"0": 4}):
        assert observation_parts(as_categorical(numbered, declared)) == [("0", 4), ("1", 2)]
    for nothing in (None, {}, []):
        assert as_categorical(space, nothing) is space


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"imag": 3}, "categorical: expected a name of a part .*, such as image, got imag$"),
        (
            {"card": 3},
            "categorical: expected a name of a part .*, such as card.1, card.0, got card",
        ),
        ("image", r"expected categorical=\{NAME: SIZES\} or categorical=\[NAME\], got 'image'"),
        (["card.1"], r"categorical.card.1: expected a Box of integers, got Box .* float32; leave"),
        (["mission"], "mission: expected a Box of integers, got Text; leave it out$"),
        ({"direction": 4}, "got Discrete; leave it out, since it is one-hot already"),
        (
            ["image"],
            r"at most 64 values between them, got 0 .. 255; give .*=\{image: 8\}, or a list",
        ),
        ({"image": [3, 2]}, r"a list of 3, one for each along the last axis, got \[3, 2\]$"),
        ({"image": [[3, 2, 1]]}, r"a list of 3, .*, got \[\[3, 2, 1\]\]$"),
        ({"image": [3, 2, 0]}, r"expected a number of values above 0 .*, got \[3, 2, 0\]$"),
        ({"image": [3, [2], 1]}, r"got \[3, \[2\], 1\]$"),
        ({"image": 2.5}, "got 2.5$"),
        ({"image": True}, "got True$"),
        ({"image": "three"}, "got 'three'$"),
    ],
)
def test_a_declaration_that_does_not_fit_is_refused(declared, message):
    with pytest.raises(ValueError, match=message):
        as_categorical(GRID, declared)


def test_a_number_beyond_its_categories_is_named_alone():
    space = as_categorical(GRID, {"image": [3, 2, 1], "card.0": [3, 1]})
    seen = {"direction": 0, "image": np.zeros((2, 1, 3)), "mission": "", "card": ([2, 2], [0])}
    seen["image"][1, 0, 1] = 12
    with pytest.raises(
        ValueError,
        match=r"^expected a value below 2 in image\[1, 0, 1\], got 12.0; give it more values in "
        "the option categorical$",
    ):
        flatten_one(seen, space)
    seen["card"] = ([2, 1], [0])
    with pytest.raises(ValueError, match=r"of at least 2 in card.0\[1\], got 1 in row 0; give it"):
        flatten(stack([seen, seen]), space)


def test_a_category_beyond_the_bounds_of_its_box_does_not_fit():
    space = as_categorical(spaces.Box(0, 1, (1,), np.uint8), {"observation": 3})
    assert contains_observations(np.float32([[0, 1, 0]]), space) and not contains_observations(
        np.float32([[0, 0, 1]]), space
    )
    assert not contains_observations(np.float32([[1, 1, 0]]), space)


def test_a_declared_part_of_three_dimensions_is_a_grid_of_equal_cells():
    assert grid_parts(GRID, {"image": [3, 2, 1], "card.0": 5}) == [("image", 15, 2, 6)]
    assert grid_parts(spaces.Box(0, 1, (2, 2, 2), np.uint8), ["observation"]) == [
        ("observation", 0, 4, 4)
    ]
    unequal = [[[3, 2, 1]], [[1, 2, 1]]]
    assert grid_parts(GRID, {"image": unequal}) == grid_parts(GRID, None) == []
