"""The options of a command in their types."""

from dataclasses import dataclass

import pytest

from decisionllm.commands.options import (
    more_than,
    number_from,
    numbers,
    read_options,
    seed_number,
    word,
)


@dataclass(frozen=True, kw_only=True)
class Loop:
    steps: int = more_than(0)


@dataclass(frozen=True, kw_only=True)
class Options:
    loop: Loop
    episodes: int = number_from(1)
    seed: int = seed_number()
    returns: list[float] = numbers()
    text: str = word("goal", "none")
    probe: str | None = word("words", optional=True)


GOOD = {
    "loop": {"steps": 2},
    "episodes": 1,
    "seed": 0,
    "returns": [1, "2.5"],
    "text": "goal",
    "probe": None,
}


def test_options_are_read_in_their_types():
    expected = Options(
        loop=Loop(steps=2), episodes=1, seed=0, returns=[1.0, 2.5], text="goal", probe=None
    )
    assert read_options(Options, GOOD | {"trust": []}) == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loop": {"steps": 0}}, "loop.steps: expected more than 0, got 0"),
        ({"loop": {"steps": 1, "stesp": 2}}, "no key 'loop.stesp' in the config; did you mean"),
        ({"episodes": 0}, "episodes: expected 1 or more, got 0"),
        ({"seed": 2**63}, "seed: expected less than 2.*63"),
        ({"returns": ["high"]}, "returns: expected numbers .could not convert"),
        ({"text": None}, "text: expected one of goal, none, got None"),
        ({"probe": "texts"}, "probe: expected one of words, got 'texts'"),
    ],
)
def test_a_value_that_cannot_be_is_named_with_its_group(changes, message):
    with pytest.raises(ValueError, match=message):
        read_options(Options, GOOD | changes)
