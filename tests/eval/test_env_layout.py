"""The layout of the data against that of an environment."""

from dataclasses import replace

import pytest

from decisionllm.eval.env_layout import check_actions, check_env
from decisionllm.eval.synthetic import PointEnv
from decisionllm.schema import Spec


def an_env(*parts):
    env = PointEnv(1)
    env.observation_parts = parts
    env.num_actions = 6
    return env


def note_of(parts, env, action_parts=None):
    spec = Spec(observation_dim=3, action_dim=1, horizon=9, num_actions=6)
    info = {"observation_parts": parts, "action_parts": action_parts}
    return check_env(spec, info, env, "runs/a")


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
    assert note_of(data, an_env(*env)) == ""


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
    with pytest.raises(
        ValueError, match="runs/a: the data's observations are laid out as "
    ) as error:
        note_of(data, an_env(*env))
    for parts in (data, env):
        assert ", ".join(f"{name} {size}" for name, size in parts) in str(error.value)


@pytest.mark.parametrize("data", [None, [], [["observation", 3]]])
def test_data_without_names_get_a_note(data):
    note = note_of(data, an_env(*GOAL_POS))
    assert (
        note.startswith("runs/a: ")
        and "goal 1, pos 2" in note
        and "from_episodes(..., observation_parts=" in note
    )
    assert "\n" not in note


@pytest.mark.parametrize(
    ("data", "of_env", "sizes", "message"),
    [
        (
            [3, 2, 1],
            [2, 3, 1],
            6,
            r"parts are .*, the environment's {image: \[2, 3, 1\]}; give env",
        ),
        ([3, 2, 1], None, 3, r"; give env.categorical={image: \[3, 2, 1\]}, as in the data"),
        (
            None,
            2,
            6,
            "leave env.categorical out, or .* declaration, dataset.categorical={image: 2}",
        ),
    ],
)
def test_another_declaration_is_refused_with_what_to_give(data, of_env, sizes, message):
    env = an_env(("image", sizes))
    env.categorical = {"image": of_env} if of_env else {}
    spec = Spec(observation_dim=6, action_dim=1, horizon=9, num_actions=6)
    info = {"observation_parts": [["image", 6 if data else 3]]}
    if data:
        info["categorical"] = {"image": data}
    with pytest.raises(ValueError, match=f"runs/a: the data's .*{message}"):
        check_env(spec, info, env, "runs/a")


def test_equal_declarations_and_a_part_that_is_discrete_in_itself_pass():
    spec = Spec(observation_dim=6, action_dim=1, horizon=9, num_actions=6)
    info = {"observation_parts": [["image", 6]], "categorical": {"image": [3, 2, 1]}}
    for declared in (None, {}, {"image": [3, 2, 1]}):
        env = an_env(("image", 6))
        env.categorical = declared
        assert check_env(spec, info, env, "runs/a") == ""


CONTINUOUS = Spec(observation_dim=2, action_dim=1, horizon=9, low=(0.0,), high=(1.0,))


def discrete_env(num_actions):
    env = PointEnv(1)
    env.num_actions = num_actions
    env.action_dim = None
    return env


def test_indices_written_as_floats_are_named_with_their_remedy():
    with pytest.raises(
        ValueError,
        match="the environment has 2 discrete ones; .*whole numbers.* dataset.num_actions=2",
    ):
        check_actions(CONTINUOUS, discrete_env(2), "runs/a")


@pytest.mark.parametrize(
    "changed",
    [
        {"high": (2.0,)},  # no index of two actions
        {"low": (-1.0,)},
        {"high": (0.5,)},
        {"action_dim": 2, "low": (0.0, 0.0), "high": (1.0, 1.0)},
    ],
)
def test_other_continuous_actions_are_refused_without_it(changed):
    with pytest.raises(
        ValueError, match="trained on continuous actions, the environment has 2 discrete ones"
    ) as error:
        check_actions(replace(CONTINUOUS, **changed), discrete_env(2), "runs/a")
    assert "num_actions" not in str(error.value)


def test_equal_numbers_of_actions_pass():
    check_actions(CONTINUOUS, discrete_env(0), "runs/a")
    check_actions(CONTINUOUS, discrete_env(None), "runs/a")


@pytest.mark.parametrize(
    ("data", "env"), [([3, 2], (3, 2)), ([3, 2], ()), (None, (6,)), (None, ())]
)
def test_parts_of_an_action_that_fit_pass(data, env):
    world = discrete_env(6)
    world.action_parts = env
    assert note_of(None, world, data) == ""


@pytest.mark.parametrize(("data", "env"), [([3, 2], (2, 3)), ([3, 2], (6,)), ([6], (3, 2))])
def test_other_parts_of_an_action_are_refused(data, env):
    world = discrete_env(6)
    world.action_parts = env
    with pytest.raises(ValueError, match="runs/a: the data's actions have parts of ") as error:
        note_of(None, world, data)
    assert str(data) in str(error.value) and str([*env]) in str(error.value)


def test_data_without_parts_of_an_action_get_a_note():
    world = discrete_env(6)
    world.action_parts = (3, 2)
    note = note_of(None, world)
    assert (
        "np.ravel_multi_index(parts, [3, 2])" in note
        and "from_episodes(..., action_parts=[3, 2])" in note
    )


def test_bounds_beside_the_one_value_of_a_number_get_no_note():
    env = PointEnv(1)
    env.action_dim = 1
    env.action_range = (2.0,), (2.0,)
    for low, high, noted in ((1.998, 2.002, False), (1.0, 3.0, True)):
        spec = Spec(observation_dim=2, action_dim=1, horizon=9, low=(low,), high=(high,))
        assert ("the environment takes" in check_env(spec, {}, env, "env")) == noted


@pytest.mark.parametrize(
    ("low", "high", "noted"), [(-0.1, 0.1, True), (-1, 0.5, True), (-1, 1, False), (-2, 2, False)]
)
def test_actions_beyond_the_range_of_the_environment_get_a_note(low, high, noted):
    spec = Spec(observation_dim=2, action_dim=1, horizon=9, low=(-1.0,), high=(1.0,))
    env = PointEnv(1)
    env.action_dim = 1
    env.action_range = (low,), (high,)
    note = check_env(spec, {}, env, "env")
    assert ("the data's actions reach from [-1.0] .. [1.0], the environment takes" in note) == noted


def test_data_in_another_order_are_told_to_change_it():
    message = "bring the columns of the data into the order of the environment"
    with pytest.raises(ValueError, match=message):
        note_of([["pos", 2], ["goal", 1]], an_env(*GOAL_POS))


def test_a_note_about_parts_is_an_option_of_an_array_file():
    note = note_of(None, an_env(*GOAL_POS))
    assert "'dataset.observation_parts={goal: 1, pos: 2}' of dataset=arrays" in note


@pytest.mark.parametrize(
    ("low", "high", "told"),
    [
        ((0.0, 0.0), (2.0, 1.0), True),
        ((0.0, 0.0), (3.0, 1.0), False),
        ((-1.0, 0.0), (2.0, 1.0), False),
        ((0.0, 0.0), (1.5, 1.0), False),
    ],
)
def test_actions_that_may_be_the_parts_of_one_name_the_option(low, high, told):
    spec = Spec(observation_dim=3, action_dim=2, horizon=9, low=low, high=high)
    env = an_env()
    env.action_parts = [3, 2]
    with pytest.raises(ValueError, match="trained on continuous actions") as error:
        check_actions(spec, env, "env")
    assert ("dataset.action_parts=[3, 2]" in str(error.value)) == told
