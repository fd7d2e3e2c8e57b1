"""Options as users write them."""

import pytest

from decisionllm.options import listed, one_of, ranges


@pytest.mark.parametrize(
    ("given", "read"),
    [("0-2,5", [0, 1, 2, 5]), (" 4 , 0-2,4", [4, 0, 1, 2]), (3, [3]), ([2, "4-5"], [2, 4, 5]), ("", []), ("7-7", [7])],
)
def test_numbers_and_ranges_are_read_in_their_order_each_once(given, read):
    assert ranges("env.agents", given) == read


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("a", "env.x: expected such as 0-6 or 7,8, got 'a'"),
        ("1--2", "expected such as"),
        ("-1", "expected such as"),
        ("5-2", "expected ranges that go up, got '5-2'"),
    ],
)
def test_what_is_no_range_is_named(given, message):
    with pytest.raises(ValueError, match=message):
        ranges("env.x", given)


def test_none_may_be_refused():
    with pytest.raises(ValueError, match="env.x: expected such as 0-6 or 7,8, got ''"):
        ranges("env.x", "", empty=False)


def test_a_list_may_be_words_with_commas():
    assert listed("a, b,,c") == listed(["a", "b", "c"]) == ["a", "b", "c"] and listed("") == []


def test_a_value_is_one_of_those_that_are_known():
    one_of("dataset.text", "goal", {"goal": 1})
    with pytest.raises(ValueError, match="dataset.text: expected one of none, goal, got 'gaol'"):
        one_of("dataset.text", "gaol", ("none", "goal"))
