"""Every registered dataset meets the conditions of a store."""

import json
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from decisionllm.datasets.store import Store
from decisionllm.datasets.store_writer import write_store
from decisionllm.protocols import Source
from decisionllm.registry import discover
from decisionllm.schema import Episode, Spec
from tests.contracts.worlds import DATASETS, ELSEWHERE, made, missing

every_dataset = pytest.mark.parametrize("name", DATASETS)


def test_every_dataset_is_tested():
    assert not missing("dataset"), f"give it small options in worlds.py: {missing('dataset')}"
    for names in ELSEWHERE.values():
        assert all((Path(__file__).parents[1] / file).is_file() for file in names.values())


def read(name, folder, **options):
    """The source of a dataset, with its episodes in a list."""
    source = made("dataset", name, folder, **options)
    if isinstance(source, Store):
        episodes = [source.episode(row) for row in range(len(source.lengths))]
        return Source(source.spec, episodes, source.info, source.facts)
    return Source(source.spec, list(source.episodes), source.info, source.facts)


@pytest.fixture(scope="module")
def source_of(tmp_path_factory):
    """The source of a dataset, read once for all tests that only look at it."""
    sources = {}

    def source_of(name):
        if name not in sources:
            sources[name] = read(name, tmp_path_factory.mktemp(name))
        return sources[name]

    return source_of


def columns(episode):
    """Return the columns of an episode by the name of the field."""
    columns = {field.name: getattr(episode, field.name) for field in fields(Episode)}
    columns.pop("outcome")
    return {key: value for key, value in columns.items() if value is not None}


def same(one, other):
    """Whether two episodes have the same bits."""
    one, other = columns(one), columns(other)
    return one.keys() == other.keys() and all(
        np.array_equal(value, other[key]) for key, value in one.items()
    )


@every_dataset
def test_a_source_has_a_spec_episodes_and_a_description(name, source_of):
    source = source_of(name)
    assert isinstance(source, Source) and isinstance(source.spec, Spec)
    assert source.info["name"] and json.loads(json.dumps(source.info)) is not None
    assert json.loads(json.dumps(source.facts)) == source.facts
    assert source.episodes and all(isinstance(episode, Episode) for episode in source.episodes)


@every_dataset
def test_every_episode_fits_the_spec(name, source_of):
    spec = source_of(name).spec
    for episode in source_of(name).episodes:
        n = len(episode.rewards)
        assert 1 <= n <= spec.horizon
        assert episode.observations.shape == (n, spec.observation_dim)
        assert episode.actions.shape == (n, spec.action_dim)
        assert np.isfinite(episode.observations).all() and np.isfinite(episode.rewards).all()
        assert not (episode.terminated and episode.truncated)
        if not spec.num_actions:
            assert (episode.actions >= np.float32(spec.low)).all()
            assert (episode.actions <= np.float32(spec.high)).all()
            continue
        actions = episode.actions[:, 0].astype(int)
        assert np.array_equal(actions, episode.actions[:, 0])
        assert ((actions >= 0) & (actions < spec.num_actions)).all()
        if episode.action_masks is not None:
            assert episode.action_masks.shape == (n, spec.num_actions)
            meant = np.ones(n, bool) if episode.loss_mask is None else episode.loss_mask
            assert episode.action_masks[np.arange(n), actions][meant].all()


@every_dataset
def test_episodes_come_back_from_a_store(name, source_of, tmp_path):
    source = source_of(name)
    store = write_store(tmp_path / "store", source)
    assert store.spec == source.spec and len(store.lengths) == len(source.episodes)
    for row, episode in enumerate(source.episodes):
        back = store.episode(row)
        assert np.array_equal(back.observations, np.float32(episode.observations))
        assert np.array_equal(back.actions, np.float32(episode.actions))
        assert np.array_equal(back.rewards, np.float32(episode.rewards))
        assert (back.task, back.terminated) == (episode.task, episode.terminated)


@pytest.mark.parametrize("name", [name for name in DATASETS if not callable(DATASETS[name])])
def test_the_same_options_are_the_same_episodes_and_another_seed_is_not(name, source_of, tmp_path):
    first = source_of(name).episodes
    second = read(name, tmp_path).episodes
    assert len(first) == len(second) and all(map(same, first, second))
    if "seed" in discover()["dataset"][name]:
        other = read(name, tmp_path, seed=1).episodes
        assert len(first) != len(other) or not all(map(same, first, other))


@pytest.mark.parametrize(
    "name", [name for name in DATASETS if "text" in discover()["dataset"][name]]
)
def test_text_none_is_no_text_and_an_unknown_one_is_refused(name, tmp_path):
    folder = tmp_path / "other"
    folder.mkdir()
    assert {episode.task for episode in read(name, folder, text="none").episodes} == {""}
    with pytest.raises(ValueError, match="text: expected one of .*none, .*, got 'paper'"):
        read(name, tmp_path, text="paper")
