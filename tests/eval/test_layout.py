"""The layout of the data against that of an environment."""

import pytest

from decisionllm.eval.layout import check_layout
from decisionllm.eval.synthetic import PointEnv


def an_env(*parts):
    env = PointEnv(1)
    env.observation_parts = parts
    return env


GOAL_POS = (("goal", 1), ("pos", 2))


@pytest.mark.parametrize(
    ("data", "env"),
    [
        ([["goal", 1], ["pos", 2]], GOAL_POS),
        ([["goal", 1], ["pos", 2]], ()),  # an environment that does not say
        (None, ()),
        (None, (("observation", 3),)),
        ([["observation", 3]], (("state", 3),)),  # one vector has one order
        ([["state", 3]], (("observation", 3),)),
    ],
)
def test_a_layout_that_fits_passes(data, env):
    assert check_layout(data, an_env(*env), "runs/a") == ""


@pytest.mark.parametrize(
    ("data", "env"),
    [
        ([["pos", 2], ["goal", 1]], GOAL_POS),
        ([["goal", 2], ["pos", 1]], GOAL_POS),
        ([["goal", 1], ["place", 2]], GOAL_POS),
        ([["goal", 1], ["pos", 2]], (("observation", 3),)),
        ([["observation", 4]], GOAL_POS),
        ([["observation", 4]], (("observation", 3),)),
        ([["state", 3]], (("place", 3),)),
    ],
)
def test_another_layout_is_refused_with_both(data, env):
    with pytest.raises(ValueError, match="runs/a: the data's observations are laid out as ") as error:
        check_layout(data, an_env(*env), "runs/a")
    for parts in (data, env):
        assert ", ".join(f"{name} {size}" for name, size in parts) in str(error.value)


@pytest.mark.parametrize("data", [None, [], [["observation", 3]]])
def test_data_without_names_get_a_note(data):
    note = check_layout(data, an_env(*GOAL_POS), "runs/a")
    assert note.startswith("runs/a: ") and "goal 1, pos 2" in note and "from_episodes(..., observation_parts=" in note
    assert "\n" not in note
