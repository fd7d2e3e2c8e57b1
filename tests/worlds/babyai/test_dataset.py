"""Demonstrations in BabyAI: they play again, noise is masked, mirrors and texts are what they say."""

import sys
from dataclasses import fields
from inspect import signature

import minari
import numpy as np
import pytest
from gymnasium import spaces

from decisionllm.datasets.store_cache import prepare_store
from decisionllm.worlds.babyai.dataset import (
    demonstrate,
    load,
)
from decisionllm.worlds.babyai.env import BabyAI
from decisionllm.worlds.babyai.levels import (
    Bot,
    evaluation_seeds,
    level_ids,
    make_level,
    reset_level,
    training_seeds,
)
from decisionllm.worlds.babyai.observation import encode, stack_observations
from decisionllm.worlds.babyai.symmetries import mirror_demonstration
from tests.conftest import command, node
from tests.datasets.test_minari import put


def episodes_of(**options):
    return list(load(**options).episodes)


def test_a_demonstration_is_the_mission_of_its_seed_and_succeeds_at_its_end():
    source = load(level=["GoToLocal", "PutNextLocal"], episodes=3, text="mission", seed=2)
    env = {0: make_level("GoToLocal"), 1: make_level("PutNextLocal")}
    groups = []
    for episode in source.episodes:
        number, seed = divmod(episode.group, 1_000_000_000)
        groups.append((number, seed))
        observations = [reset_level(env[number], seed)]
        assert observations[0]["mission"] == episode.task
        for action in episode.actions[:, 0].astype(int).tolist():
            seen, reward, terminated, _, _ = env[number].step(action)
            observations.append(seen)
        assert terminated and reward > 0 and episode.terminated
        rows = np.concatenate([episode.observations, episode.final_observation[None]])
        assert np.array_equal(rows, encode(*stack_observations(observations), "objects"))
        assert episode.rewards.tolist() == [0.0] * (len(episode.rewards) - 1) + [1.0]
        assert episode.loss_mask is None
    assert groups == [(number, 2_000_000 + k) for k in range(3) for number in range(2)]
    assert source.info["level"] == ["GoToLocal", "PutNextLocal"]
    assert source.spec.horizon == 128  # 64 cells, twice


def test_training_and_evaluation_have_other_missions():
    for seed in (0, 999, 1000, 2**40):
        assert training_seeds(seed, 5000).max() < 1_000_000_000
        assert evaluation_seeds(seed, 5000).min() >= 1_000_000_000


def test_noise_is_no_target_and_the_bot_plans_again():
    env = make_level("PickupLoc")
    masks = []
    for episode in episodes_of(level="PickupLoc", episodes=10, noise=0.3):
        reset_level(env, episode.group)
        bot = Bot(env)
        masks += episode.loss_mask.tolist()
        taken = None
        for action, is_target in zip(
            episode.actions[:, 0].astype(int).tolist(), episode.loss_mask, strict=True
        ):
            choice = bot.act(taken)
            assert choice == action or not is_target
            env.step(action)
            taken = action
    assert 0.1 < 1 - np.mean(masks) < 0.5


def test_a_mission_that_the_bot_fails_is_left_out_and_counted():
    """With four random actions of five it opens the box of one mission."""
    source = load(level="GoToLocal", episodes=6, noise=0.8)
    groups = [episode.group for episode in source.episodes]
    skipped = source.info["repairs"]["missions of GoToLocal that the bot failed, left out"]
    assert len(set(groups)) == 6 and groups[-1] == 5 + skipped


def test_a_level_that_the_bot_cannot_do_is_refused():
    with pytest.raises(ValueError, match="got KeyInBox with 0 successes in 21 missions"):
        episodes_of(level=["GoToObjS4", "KeyInBox"], episodes=2)


def same(one, other):
    return all(
        np.array_equal(getattr(one, field.name), getattr(other, field.name))
        for field in fields(one)
    )


def test_mirroring_twice_is_the_same_demonstration():
    for demonstration in demonstrate(["PickupLoc"], 3, 0.2, 0, {}):
        mirrored = mirror_demonstration(demonstration)
        assert not same(mirrored, demonstration)
        assert same(mirror_demonstration(mirrored), demonstration)


def test_mirrored_episodes_follow_their_own_in_one_group():
    plain = episodes_of(level="PickupLoc", episodes=20, text="mission")
    both = episodes_of(level="PickupLoc", episodes=20, text="mission", mirror=True)
    assert [episode.group for episode in both] == [e.group for e in plain for _ in range(2)]
    swapped = np.array([1, 0, 2, 3, 4, 5, 6])
    sides = {"left": "right", "right": "left"}
    assert any("left" in episode.task for episode in plain)
    for own, mirrored, episode in zip(both[::2], both[1::2], plain, strict=True):
        assert np.array_equal(own.observations, episode.observations)
        assert np.array_equal(mirrored.actions, swapped[own.actions.astype(int)])
        words = [sides.get(word, word) for word in own.task.split()]
        assert mirrored.task == " ".join(words)
        # free cells to the left and to the right
        assert np.array_equal(mirrored.observations[:, 27], own.observations[:, 28])


def test_the_texts_are_missions_or_none_or_shuffled_of_one_store(tmp_path):
    options = {"level": "GoToLocal", "episodes": 8}
    stores = {
        text: prepare_store(node("dataset", "babyai", text=text, **options), tmp_path)
        for text in ("mission", "none", "shuffled")
    }
    tasks = {text: [s.tasks[i] for i in s.task] for text, s in stores.items()}
    assert len({store.path for store in stores.values()}) == 1
    assert tasks["mission"] == [e.task for e in episodes_of(**options, text="mission")]
    assert tasks["none"] == [""] * 8
    assert tasks["shuffled"] == [e.task for e in episodes_of(**options, text="shuffled")]
    assert tasks["shuffled"] != tasks["mission"]
    assert sorted(tasks["shuffled"]) == sorted(tasks["mission"])
    assert [stores[text].info["text"] for text in tasks] == ["mission", "none", "shuffled"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"level": "GoToLocl"}, "dataset.level: .* such as GoToLocal, .*, got 'GoToLocl'"),
        ({"level": []}, "dataset.level: expected one level or more"),
        ({"level": ["GoToObj", "BabyAI-GoToObj-v0"]}, "dataset.level: .* each once"),
        ({"episodes": 0}, "dataset.episodes: expected 1 or more, got 0"),
        ({"noise": 1.5}, "dataset.noise: expected a share"),
        ({"view": "pixels"}, "dataset.view: expected one of objects, grid, got 'pixels'"),
        ({"minari_id": "mine/x-v0", "noise": 0.1}, "dataset.noise: expected 0 with"),
    ],
)
def test_options_that_cannot_be_are_refused_before_any_work(options, message):
    with pytest.raises(ValueError, match=message):
        load(**{"level": "GoToLocal", **options})


def test_paraphrased_missions_have_the_facts_of_each():
    source = load(level="GoToLocal", episodes=3, renamed=1, text="paraphrased")
    missions = {episode.task for episode in source.episodes}
    assert set(source.info["wordings"]) == missions and len(missions) >= 3
    assert {facts["library"] for facts in source.info["wordings"].values()} == {"babyai-go-to"}
    with pytest.raises(ValueError, match="no sentence frame fits the mission '.*'; take text=miss"):
        list(load(level="GoToSeq", episodes=1, text="paraphrased").episodes)


def test_a_level_without_sentence_frames_is_refused_before_it_is_played(tmp_path, capsys):
    data = ("dataset=babyai", "dataset.level=[GoToObj,GoToSeqS5R2]", "dataset.episodes=100000")
    folders = (f"cache_dir={tmp_path / 'cache'}", f"run={tmp_path / 'run'}")
    assert command("train", *data, "text=paraphrased", *folders) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "dataset.level=GoToSeqS5R2, text=paraphrased: no sentence frame fits the mission" in line
    assert not (tmp_path / "cache").exists()
    with pytest.raises(ValueError, match="env.level=OpenTwoDoors, text=paraphrased: .*; take text"):
        BabyAI(1, level=["OpenDoor", "OpenTwoDoors"], text="paraphrased")


def test_a_level_may_be_named_by_its_id():
    (by_id,) = episodes_of(level="BabyAI-GoToObjS6-v1", episodes=1)
    (by_name,) = episodes_of(level="GoToObjS6", episodes=1)
    assert np.array_equal(by_id.observations, by_name.observations)


def test_without_minigrid_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "minigrid", None)
    with pytest.raises(ImportError, match=r"BabyAI needs MiniGrid: pip install -e '\.\[babyai"):
        level_ids.__wrapped__()


def record(minari_id, level, count, *, eval_env=None, change=None):
    """A Minari dataset of MiniGrid's observations, as its bot plays the first seeds of a level."""
    env = make_level(level)
    episodes = []
    for seed in range(count):
        observations = [reset_level(env, seed)]
        bot = Bot(env)
        actions, rewards = [], []
        terminated = False
        while not terminated:
            actions.append(bot.act())
            seen, reward, terminated, _, _ = env.step(actions[-1])
            observations.append(seen)
            rewards.append(reward)
        columns = {key: [seen[key] for seen in observations] for key in observations[0]}
        columns["image"] = np.array(columns["image"])
        if change:
            change(columns["image"])
        episodes.append((columns, np.array(actions), rewards))
    letters = "abcdefghijklmnopqrstuvwxyz ,"
    space = spaces.Dict(
        env.observation_space.spaces | {"mission": spaces.Text(99, charset=letters)}
    )
    options = {"action_space": env.action_space, "eval_env": eval_env}
    if "jpeg_encoding" in signature(minari.create_dataset_from_buffers).parameters:
        options["jpeg_encoding"] = False
    put(minari_id, episodes, observation_space=space, **options)


def test_a_minari_dataset_of_minigrid_has_the_same_episodes():
    record("mine/local-v0", "GoToLocal", 3, eval_env="BabyAI-GoToLocal-v0")
    options = {"level": "GoToLocal", "text": "mission", "mirror": True}
    read = episodes_of(**options, minari_id="mine/local-v0")
    made = episodes_of(**options, episodes=3)
    assert len(read) == len(made) == 6
    for one, other in zip(read, made, strict=True):
        assert one.task == other.task and one.terminated and one.group == other.group
        for name in ("observations", "actions", "rewards", "final_observation"):
            assert np.array_equal(getattr(one, name), getattr(other, name))
    with pytest.raises(
        ValueError, match="expected GoToLocal, the level of mine/local-v0, got GoTo"
    ):
        load(level="GoToObj", minari_id="mine/local-v0")


def test_images_that_were_compressed_with_loss_are_refused():
    def blur(images):
        images[0, 0, 0] += 1

    record("mine/blurred-v0", "GoToObj", 1, change=blur)
    with pytest.raises(ValueError, match="episode 0: expected type, colour .* jpeg_encoding=False"):
        episodes_of(level="GoToObj", minari_id="mine/blurred-v0")
