"""Logs as they may come: which actions are left out, and which numbers of which steps are
corrupted, by hand.
"""

from dataclasses import replace

import numpy as np
import pytest

from decisionllm.datasets import corruptions, sampling
from decisionllm.datasets.mixture_parts import ONLY
from decisionllm.datasets.store_cache import prepare_store
from decisionllm.datasets.store_writer import write_store
from decisionllm.protocols import Source
from decisionllm.registry import choice
from decisionllm.runs import directory
from decisionllm.schema import Episode, Spec
from tests.conftest import LOOP, NANO, command

SYNTHETIC = choice("dataset", "synthetic", episodes=40, text="none")
DISCRETE = choice("dataset", "synthetic-discrete", episodes=40, text="none")


def changed(tmp_path, name, node=SYNTHETIC, **options):
    """The store of a dataset, and the same behind a transform."""
    return prepare_store(node, tmp_path), prepare_store(
        node, tmp_path, choice("transform", name, **options)
    )


def test_without_a_transform_the_store_is_the_datasets_own(tmp_path):
    clean, same = (
        prepare_store(SYNTHETIC, tmp_path, *transforms)
        for transforms in ((), ({"_target_": "none"},))
    )
    assert clean.path == same.path and clean.action_weight is None


def test_the_actions_of_a_share_of_the_episodes_are_kept(tmp_path):
    clean, store = changed(tmp_path, "unlabelled", actions_kept=0.25)
    weights = np.split(store.action_weight, store.offsets[1:-1])
    assert sum(w.all() for w in weights) == 10 and sum(not w.any() for w in weights) == 30
    assert store.info["actions_kept"] == 0.25 and store.fingerprint != clean.fingerprint
    other = changed(tmp_path, "unlabelled", actions_kept=0.25, seed=1)[1]
    assert (other.action_weight != store.action_weight).any()


def test_episodes_that_keep_their_actions_are_not_those_held_out(tmp_path):
    store = changed(tmp_path, "unlabelled", actions_kept=0.25)[1]
    train, held_out = sampling.select(store, held_out=0.25, seed=0)
    labelled = np.flatnonzero(np.logical_and.reduceat(store.action_weight > 0, store.offsets[:-1]))
    assert len(held_out) == len(labelled) == 10 and len(np.intersect1d(train, labelled)) >= 5


@pytest.mark.parametrize("kind", ["random", "adversarial"])
@pytest.mark.parametrize(
    ("column", "node"),
    [
        ("observations", SYNTHETIC),
        ("rewards", SYNTHETIC),
        ("actions", SYNTHETIC),
        ("actions", DISCRETE),
    ],
)
def test_a_share_of_one_column_changes(tmp_path, column, node, kind):
    options = {"column": column, "kind": kind, "share": 0.5}
    clean, store = changed(tmp_path, "corrupted", node, **options)
    for name in {"observations", "rewards", "actions"} - {column}:
        assert np.array_equal(getattr(clean, name), getattr(store, name))
    new = (getattr(clean, column) != getattr(store, column)).reshape(len(clean.rewards), -1).any(1)
    # half of the steps are drawn; an action at a bound, or the same index, may stay
    assert 0.3 < new.mean() < 0.55
    assert store.info["corrupted"] == f"{column} of 50 % of the steps, {kind}, scale 1"
    again = changed(tmp_path / "again", "corrupted", node, **options)[1]
    assert again.fingerprint == store.fingerprint


def test_a_changed_wording_changes_no_log_again(tmp_path):
    maze = choice("dataset", "maze2d-umaze", steps=1000)
    clean, goal = changed(tmp_path, "unlabelled", maze | {"text": "goal"}, actions_kept=0.5)
    named, worded = changed(
        tmp_path, "unlabelled", maze | {"text": "paraphrased"}, actions_kept=0.5
    )
    assert clean.path == named.path and goal.path == worded.path and goal.path != clean.path
    assert "wordings" not in goal.info and goal.info["text"] == "goal"
    assert worded.info["wordings"].keys() == {*goal.tasks} and worded.info["text"] == "paraphrased"


def test_the_scale_bounds_a_random_change(tmp_path):
    clean, store = changed(tmp_path, "corrupted", column="observations", share=1.0, scale=0.1)
    apart = np.abs(store.observations - clean.observations) / clean.observations.std(0)
    assert 0.09 < apart.max() < 0.1001


def test_an_adversary_by_hand(tmp_path):
    x = np.array([[1.0, 0], [0, 1], [1, 1], [0, 0]], np.float32)
    rewards = np.array([2.0, 1, 3, 0])  # 2 x1 + x2, in episodes of one step
    episodes = [
        Episode(x[i : i + 1], np.zeros((1, 1), np.float32), rewards[i : i + 1], group=i)
        for i in range(4)
    ]
    store = write_store(
        tmp_path / "store", Source(Spec(2, 1, 1, (-1.0,), (1.0,)), episodes, {"name": "test"})
    )
    corruption = corruptions.Corruption(store, "observations", "adversarial", 2.0)
    np.testing.assert_allclose(corruption.slope, [2 / np.sqrt(5), 1 / np.sqrt(5), 0], rtol=1e-6)
    hit, rng = np.array([True]), np.random.default_rng(0)
    assert corruption(store.episode(0), rng, hit).tolist() == [[0, -1]], (
        "two deviations of 0.5 less"
    )
    corruption = corruptions.Corruption(store, "rewards", "adversarial", 2.0)
    assert corruption(store.episode(0), rng, hit).tolist() == [-4] and corruption(
        store.episode(0), rng, ~hit
    ).tolist() == [2]


def test_the_flags_of_entities_are_never_moved_and_a_grid_has_none(tmp_path):
    x = np.random.default_rng(0).normal(size=(9, 7)).astype(np.float32)
    schema = (("grid:a", 1, 2), ("own", 1, 1), ("ball", 2, 2))
    spec = Spec(7, 1, 9, (-1.0,), (1.0,), entity_schema=schema)
    episode = Episode(x, np.zeros((9, 1), np.float32), np.arange(9.0))
    store = write_store(tmp_path / "store", Source(spec, [episode], {"name": "test"}))
    corruption = corruptions.Corruption(store, "observations", "random", 1.0)
    assert np.flatnonzero(corruption.deviation[:7] == 0).tolist() == [3, 5]


def test_a_discrete_adversary_takes_the_allowed_action_of_the_least_return(tmp_path):
    masks = np.array([[True, True, True], [True, False, True]])
    episodes = [
        Episode(
            np.zeros((1, 1), np.float32),
            np.full((1, 1), a, np.float32),
            np.array([[5.0, 1, 3][a]]),
            group=3 * k + a,
            action_masks=masks[:1],
        )
        for k in range(2)
        for a in range(3)
    ]
    store = write_store(
        tmp_path / "store", Source(Spec(1, 1, 1, num_actions=3), episodes, {"name": "test"})
    )
    corruption = corruptions.Corruption(store, "actions", "adversarial", 1.0)
    tried = Episode(np.zeros((2, 1)), np.zeros((2, 1)), np.zeros(2), action_masks=masks)
    assert corruption(tried, np.random.default_rng(0), np.array([True, True])).tolist() == [
        [1],
        [2],
    ]


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["train", "baseline", "data"])
def test_commands_read_the_log_as_a_transform_changes_it(tmp_path, capsys, verb):
    if verb == "baseline":
        pytest.importorskip("d3rlpy")
    words = {
        "train": (*LOOP, *NANO, "data.seed=3"),
        "baseline": (
            "dataset=synthetic",
            "dataset.episodes=40",
            "steps=2",
            "optim.batch_size=8",
            "device=cpu",
        ),
        "data": ("dataset=synthetic", "dataset.episodes=40"),
    }[verb]
    run = (f"run={tmp_path}/run",) if verb != "data" else ()
    corrupt = (
        "transform=corrupted",
        "transform.column=actions",
        "transform.kind=adversarial",
        "transform.share=0.2",
    )
    unlabelled = ("transform=unlabelled", "transform.actions_kept=0.5")
    assert command(verb, *words, *run, *corrupt) == 0
    said = capsys.readouterr().out
    if verb == "data":
        assert "corrupted=actions of 20 % of the steps, adversarial, scale 1" in said
        for transform in (corrupt, unlabelled):
            assert command(verb, *words, *transform, f"export=hdf5:{tmp_path}/x.hdf5") == 1
            printed = capsys.readouterr()
            assert "expected a log with every action and transform=none" in printed.err
        assert "actions, the others are missing" in printed.out
    else:
        info = directory.read(tmp_path / "run")[1]["embodiments"][ONLY]["dataset"]
        seed = 3 if verb == "train" else 0
        assert (
            info["corrupted"] == "actions of 20 % of the steps, adversarial, scale 1"
            and info["seed_of_changes"] == seed
        )
        assert command(verb, *words, *run, *unlabelled, "fresh=true") == 0
        info = directory.read(tmp_path / "run")[1]["embodiments"][ONLY]["dataset"]
        assert info["actions_kept"] == 0.5


def test_what_cannot_be_is_refused(tmp_path):
    for name, options, message in (
        (
            "unlabelled",
            {"actions_kept": 0.001},
            "transform.actions_kept=0.001 of 40 episodes keeps the actions of none",
        ),
        ("unlabelled", {"actions_kept": 2.0}, "expected a share within 0 .. 1, got 2.0"),
        (
            "corrupted",
            {"column": "time"},
            "transform.column: expected one of observations, actions, rewards, got 'time'",
        ),
        ("corrupted", {"kind": "mean"}, "transform.kind: expected one of random, adversarial"),
        ("corrupted", {"share": 1.5}, "expected within 0 .. 1 and above 0, got 1.5 and 1.0"),
    ):
        with pytest.raises(ValueError, match=message):
            changed(tmp_path, name, **options)


@pytest.mark.parametrize(("column", "kept"), [("rewards", False), ("actions", True)])
def test_the_returns_of_campaigns_are_not_those_of_other_rewards(tmp_path, column, kept):
    walk = prepare_store(SYNTHETIC, tmp_path)
    clean = replace(walk, info=walk.info | {"campaigns": [[0, 1, 2, 3.0, 4.0, 5.0]]})
    source = corruptions.corrupt_column(clean, column=column)
    assert ("campaigns" in source.info) == kept
