"""Missing actions are filled in by a model of the action between two observations, with less weight
where it is less certain.
"""

import numpy as np
import pytest

from decisionllm.config import train_config
from decisionllm.datasets import windows
from decisionllm.datasets.batches import open_data
from decisionllm.datasets.mixture_parts import ONLY
from decisionllm.datasets.store import open_store
from decisionllm.datasets.store_writer import write_store
from decisionllm.models.inverse_dynamics import fill
from decisionllm.protocols import Source
from decisionllm.runs import directory
from decisionllm.schema import Episode, Spec
from tests.conftest import LOOP, NANO, command, node

pytestmark = pytest.mark.slow


def log(path, *, discrete, labelled=4, episodes=40, n=12, final=True, seed=0, unlabelled_reward=1):
    """Walks of a point by its actions.

    At x > 0 the action does not move it, so that no observation tells it.
    """
    rng, made = np.random.default_rng(seed), []
    for e in range(episodes):
        actions = (
            rng.integers(0, 3, (n, 1)).astype(float) if discrete else rng.uniform(-2, 2, (n, 1))
        )
        x, seen = rng.uniform(-9, -5) if e % 2 else 5.0, []
        for a in actions[:, 0]:
            seen.append([x])
            x += 0 if x > 0 else 0.1 * (a - discrete)
        observations = np.array([*seen, [x]], np.float32)
        taken = actions if e < labelled else np.full_like(actions, np.nan)
        made.append(
            (
                Episode(
                    observations[:-1],
                    taken,
                    np.full(n, 1.0 if e < labelled else unlabelled_reward),
                    group=e,
                    final_observation=observations[-1] if final else None,
                ),
                actions,
            )
        )
    spec = Spec(1, 1, n, num_actions=3) if discrete else Spec(1, 1, n, (-2.0,), (2.0,))
    return write_store(path, Source(spec, [e for e, _ in made], {"name": "walk"})), np.concatenate(
        [a for _, a in made]
    )


@pytest.mark.parametrize("discrete", [False, True])
def test_filled_actions_are_right_where_their_weight_is_large(tmp_path, discrete):
    store, true = log(tmp_path / "s", discrete=discrete, labelled=20)
    steps = windows.load_steps(store)
    filled = fill(store, steps, np.arange(40), 0, updates=300)
    recorded = store.action_weight > 0
    moving = store.observations[:, 0] < 0
    assert (
        np.array_equal(filled.actions[recorded], true[recorded].astype(np.float32))
        and (filled.action_weight[recorded] == 1).all()
    )
    new = ~recorded & moving
    assert (
        np.abs(filled.actions - true)[new].mean() < 0.2 and filled.action_weight[new].mean() > 0.5
    )
    assert filled.action_weight[~recorded & ~moving].mean() < 0.35 and filled.loss_mask.all()


def test_actions_are_filled_in_alike_by_one_seed(tmp_path):
    store, _ = log(tmp_path / "s", discrete=False)
    steps = windows.load_steps(store)
    one, same, other = (fill(store, steps, np.arange(40), seed, updates=5) for seed in (0, 0, 1))
    assert np.array_equal(one.actions, same.actions)
    assert np.array_equal(one.action_weight, same.action_weight)
    assert not np.array_equal(one.actions, other.actions)


def test_a_column_that_is_constant_where_actions_are_recorded_keeps_its_unit(tmp_path):
    store, true = log(tmp_path / "s", discrete=False, labelled=20, unlabelled_reward=2)
    filled = fill(store, windows.load_steps(store), np.arange(40), 0, updates=300)
    new = (store.action_weight == 0) & (store.observations[:, 0] < 0)
    assert np.abs(filled.actions - true)[new].mean() < 0.4


def test_a_step_without_a_next_observation_stays_missing(tmp_path):
    store, _ = log(tmp_path / "s", discrete=True, final=False)
    filled = fill(store, windows.load_steps(store), np.arange(40), 0, updates=2)
    missing = filled.action_weight == 0
    assert (
        np.flatnonzero(missing).tolist() == (store.offsets[5:] - 1).tolist()
        and (filled.loss_mask == ~missing).all()
    )


def test_nothing_to_learn_from_is_an_error(tmp_path):
    store, _ = log(tmp_path / "s", discrete=True)
    with pytest.raises(
        ValueError, match="fill_actions: expected recorded actions with a next observation"
    ):
        fill(store, windows.load_steps(store), np.arange(10, 40), 0)


FILLED = {"fill_actions": node("fill_actions", "inverse_dynamics", updates=2)}


def opened(store, **options):
    c = train_config({"dataset": {}, "backbone": {}, "head": {}, "window": 1, **options})
    return open_data(c, store, [1.0])


def test_without_filling_only_episodes_with_a_recorded_action_are_trained_on(tmp_path):
    store, _ = log(tmp_path / "s", discrete=True, labelled=20)
    data = opened(store, data={"held_out": 0.5})
    assert len(data.episodes) and {*data.episodes, *data.held_out} == {*range(20)}
    everything = opened(store, data={"held_out": 0.5}, **FILLED)
    assert len(everything.episodes) == 20 and len({*everything.held_out} & {*range(20)}) == len(
        everything.held_out
    )


def test_held_out_windows_are_measured_on_recorded_actions(tmp_path):
    store, _ = log(tmp_path / "s", discrete=True, labelled=20)
    data = opened(store, data={"held_out": 0.5}, **FILLED)
    trained, measured = (sampler(0) for sampler in (data.sampler, *data.validators.values()))
    assert ((trained.action_weight > 0) & (trained.action_weight < 1)).any() and (
        measured.action_weight[measured.mask] == 1
    ).all()


def test_past_actions_that_are_missing_are_never_read(tmp_path):
    episodes = [
        Episode(np.zeros((3, 1)), np.array([[0.0], [np.nan], [1.0]]), np.ones(3), group=g)
        for g in range(3)
    ]
    store = write_store(
        tmp_path / "s", Source(Spec(1, 1, 3, (-1.0,), (1.0,)), episodes, {"name": "gaps"})
    )
    with pytest.raises(
        ValueError,
        match=(
            "window=2 reads past actions, which 3 of 3 episodes lack at some steps; take "
            "fill_actions"
        ),
    ):
        opened(store, window=2)
    window = opened(store).sampler(0)
    assert np.array_equal(window.loss_mask, window.action_weight > 0) and not window.loss_mask.all()


@pytest.mark.parametrize(
    "words", [["dataset=synthetic"], ["dataset=synthetic-discrete", "head=discrete"]]
)
def test_a_run_fills_in_what_the_log_lacks(tmp_path, capsys, words):
    few = ("transform=unlabelled", "transform.actions_kept=0.2")
    filled = ("fill_actions=inverse_dynamics", "fill_actions.updates=20", f"run={tmp_path}/run")
    assert command("train", *LOOP, *NANO, *words, *few, *filled) == 0
    output = capsys.readouterr().out
    assert "recorded, " in output and "filled in, weight " in output
    info = directory.read(tmp_path / "run")[1]["embodiments"][ONLY]["dataset"]
    assert info["actions_kept"] == 0.2
    assert command("train", *LOOP, *NANO, *words, *few, f"run={tmp_path}/recorded") == 0
    assert "filled in" not in capsys.readouterr().out


def test_nan_actions_of_a_log_are_missing(tmp_path):
    some = Episode(np.zeros((2, 1)), np.array([[np.nan], [1.0]]), np.ones(2))
    none = Episode(np.zeros((1, 1)), np.zeros((1, 1)), np.ones(1))
    assert (
        some.actions.tolist() == [[0], [1]]
        and some.action_weight.tolist() == [0, 1]
        and none.action_weight is None
    )
    # what stands in place of a missing action need not be within the bounds
    spec = Spec(1, 1, 2, (0.5,), (1.0,))
    full = Episode(np.zeros((1, 1)), np.ones((1, 1)), np.ones(1))
    store = write_store(tmp_path / "s", Source(spec, [full, some, full], {"name": "test"}))
    assert store.action_weight.tolist() == [1, 0, 1, 1] and open_store(tmp_path / "s").episode(
        1
    ).action_weight.tolist() == [
        0,
        1,
    ]
    assert windows.load_steps(store).loss_mask.tolist() == [True, False, True, True]
    empty = Episode(np.zeros((2, 1)), np.full((2, 1), np.nan), np.ones(2))
    with pytest.raises(
        ValueError,
        match="test: expected the recorded action of some steps, all of them are missing",
    ):
        write_store(tmp_path / "none", Source(spec, [empty], {"name": "test"}))
    with pytest.raises(ValueError, match="expected finite numbers, got nan at"):
        Episode(np.zeros((1, 1)), np.array([[1.0, np.nan]]), np.ones(1))
