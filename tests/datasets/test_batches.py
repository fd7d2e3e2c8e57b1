"""Turned and mirrored windows: by hand, a team as one, and that the world agrees."""

import re
from dataclasses import replace

import numpy as np
import pytest

from decisionllm.config import train_config
from decisionllm.datasets.augment import TURNS
from decisionllm.datasets.batches import check_targets, open_data
from decisionllm.datasets.store_cache import prepare_store
from decisionllm.datasets.store_writer import write_store
from decisionllm.datasets.windows import load_steps
from decisionllm.protocols import Source
from decisionllm.schema import Spec
from decisionllm.teams.spread import dataset as spread
from decisionllm.teams.spread.world import HORIZON, Spread
from tests.conftest import episode, make_store, node

# columns of velocity and place, and of the places of six landmarks and six agents after their
# presence
VECTORS = [
    0,
    2,
    *range(5, 40, 3),
]


def opened(store, symmetries=True, **options):
    augment = node("augment", "symmetries") if symmetries else {"_target_": "none"}
    c = train_config(
        {
            "dataset": {},
            "backbone": {},
            "head": {},
            "optim": {"batch_size": 400},
            "data": {"held_out": 0.0},
            "augment": augment,
            **options,
        }
    )
    return open_data(c, store, [1.0]).sampler


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return write_store(
        tmp_path_factory.mktemp("spread") / "store", spread.load(groups=20, actions="continuous")
    )


def parts(window):
    """The vectors of each row and step, those of the actions last (B, T, K, 2), and the other
    numbers of its observation.
    """
    pairs = window.observations[..., np.array(VECTORS)[:, None] + np.arange(2)]
    others = np.delete(window.observations, [v + i for v in VECTORS for i in range(2)], -1)
    return np.concatenate([pairs, window.actions[..., None, :]], -2), others


def of_rows(plain, turned):
    """Which symmetry each row was turned by (B,)."""
    made = plain[None] @ TURNS[:, None, None]
    equal = np.isclose(made, turned, atol=1e-6).all((2, 3, 4))
    assert (equal.sum(0) == 1).all(), "each row by exactly one"
    return equal.argmax(0)


def test_the_eight_symmetries_of_a_square_by_hand():
    turned = (np.array([3, 1], np.float32) @ TURNS).tolist()
    assert sorted(turned) == [
        [-3, -1],
        [-3, 1],
        [-1, -3],
        [-1, 3],
        [1, -3],
        [1, 3],
        [3, -1],
        [3, 1],
    ]


def test_each_window_is_turned_as_a_whole(store):
    plain, turned, again = (opened(store, on, window=3)(5) for on in (False, True, True))
    (before, kept), (after, same) = parts(plain), parts(turned)
    assert np.bincount(of_rows(before, after), minlength=8).min() > 20
    assert np.array_equal(kept, same) and np.array_equal(plain.returns_to_go, turned.returns_to_go)
    assert np.array_equal(again.observations, turned.observations)


def test_a_team_is_turned_as_one(store):
    plain, turned = (
        opened(store, on, window=2, team={"execution": "joint"})(1) for on in (False, True)
    )
    by = of_rows(parts(plain)[0], parts(turned)[0])
    assert (
        len(by) == 1200
        and len(set(by)) == 8
        and all(len(set(by[turned.team == t])) == 1 for t in range(400))
    )


def test_a_turned_world_turns_what_happens():
    """Places, velocities and rewards of a world whose start and pushes are turned: what `plane` in
    the log's meta says of it.
    """
    pushes = np.random.default_rng(0).uniform(-1, 1, (HORIZON, 8, 4, 2))
    world, turned = (Spread(np.full(8, 7), 4) for _ in range(2))
    turned.positions = turned.positions @ TURNS
    turned.landmarks = turned.landmarks @ TURNS
    for push in pushes:
        push[:] = push[0]
        rewards = world.step(push), turned.step(push @ TURNS)
        np.testing.assert_allclose(turned.positions, world.positions @ TURNS, atol=1e-5)
        np.testing.assert_allclose(turned.velocities, world.velocities @ TURNS, atol=1e-5)
        np.testing.assert_allclose(*rewards, atol=1e-4)


def test_a_log_without_vectors_and_discrete_actions_are_refused(tmp_path):
    with pytest.raises(
        ValueError,
        match="augment=symmetries: expected a log that says which numbers .* got none",
    ):
        opened(make_store(tmp_path / "a", [episode([1, 2])]))
    discrete = write_store(tmp_path / "b", spread.load(groups=5))
    with pytest.raises(
        ValueError,
        match="augment=symmetries: expected actions that are vectors .* got 5 discrete ones",
    ):
        opened(discrete)


def of_parts(tmp_path, **own):
    """Draws of two parts of vectors in a plane: 40 episodes of 4 steps each. own: further keys of
    the second part.
    """
    rng = np.random.default_rng(0)
    for name in "ab":
        made = [episode([1.0] * 4, A=2, group=g, start=rng.uniform(0.1, 0.9)) for g in range(40)]
        write_store(tmp_path / name, Source(PLANE, made, {"name": name, "vectors": [0]}))
    parts = {name: {"dataset": "store", "path": str(tmp_path / name)} for name in "ab"}
    parts["b"] |= own
    dataset = node("dataset", "mixture", parts=parts, text_wordings=0)
    c = train_config(
        {"dataset": dataset, "backbone": {}, "head": {}, "window": 1, "optim": {"batch_size": 4000}}
    )
    return open_data(c, prepare_store(dataset, tmp_path / "home"), [1.0, 1.0])


PLANE = Spec(observation_dim=2, action_dim=2, horizon=4, low=(-1.0, -1.0), high=(1.0, 1.0))


def test_a_part_has_its_own_discount_of_steps(tmp_path):
    data = of_parts(tmp_path, step_discount=0.5)
    window = data.sampler(0)
    second = data.store.part[window.episodes] == 1
    plain, early = (
        np.bincount(window.timesteps[rows, 0], minlength=4) / rows.sum()
        for rows in (~second, second)
    )
    assert np.abs(plain - 1 / 4).max() < 0.04
    assert np.abs(early - np.array([8, 4, 2, 1]) / 15).max() < 0.04
    assert abs(second.mean() - 0.5) < 0.04, "its share of a batch is the same"


def test_a_part_alone_is_turned(tmp_path):
    plain = of_parts(tmp_path).sampler(0)
    turned = of_parts(tmp_path, augment="symmetries").sampler(0)
    second = plain.episodes >= 40
    same = (plain.observations == turned.observations).all((1, 2))
    assert np.array_equal(plain.episodes, turned.episodes) and same[~second].all()
    assert abs(same[second].mean() - 1 / 4) < 0.04, (
        "two numbers alike look the same by two of the eight"
    )


def test_a_part_of_one_wording_is_not_paraphrased_with_another_one(tmp_path):
    maze = {"dataset": "maze2d-umaze", "steps": 1000, "source": "regenerate"}
    parts = {"goal": maze | {"text": "goal"}, "words": maze | {"text": "paraphrased"}}
    dataset = node("dataset", "mixture", parts=parts, text_wordings=0)
    c = train_config(
        {
            "dataset": dataset,
            "backbone": {},
            "head": {},
            "optim": {"batch_size": 400},
            "data": {"held_out": 0.3},
        }
    )
    data = open_data(c, prepare_store(dataset, tmp_path), [1.0, 1.0])
    window = data.sampler(0)
    second = data.store.part[window.episodes] == 1
    own = own_texts(data, window)
    assert own[~second].all() and own[second].mean() < 0.5
    assert own_texts(data, data.validators["goal"](0)).all()
    assert own_texts(data, data.validators["words"](0)).mean() < 0.5


def own_texts(data, window):
    """Which rows of a window have the text of their task itself (B,)."""
    tasks = np.array(data.store.tasks)[data.store.task[window.episodes]]
    return np.array([data.tasks[i] for i in window.text_index]) == tasks


@pytest.mark.parametrize(
    ("horizon", "part", "message"),
    [
        (0, "", "expected recorded actions in some episode that is trained on, got none; lower "),
        (3, "", "is trained on and has model.return_horizon=3 steps (the longest has 2), got none"),
        (
            0,
            "b",
            "expected recorded actions in some episode of part b that is trained on, got none",
        ),
    ],
)
def test_what_leaves_nothing_to_train_on_is_named(horizon, part, message, tmp_path):
    """Of two episodes the second one, part b, is not left."""
    log = make_store(tmp_path / "log", [episode([1.0, 2.0]), episode([1.0, 2.0], group=1)])
    left = np.arange(0)
    if part:
        log = replace(
            log, info={"parts": {"a": {"dataset": {}}, "b": {"dataset": {}}}}, part=np.array([0, 1])
        )
        left = np.array([0])
    options = {"dataset": {}, "backbone": {}, "head": {}, "model": {"return_horizon": horizon}}
    with pytest.raises(ValueError, match=re.escape(message)):
        check_targets(train_config(options), log, load_steps(log), left)
