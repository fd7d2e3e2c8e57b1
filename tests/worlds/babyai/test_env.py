"""BabyAI's evaluation: players whose scores are known, step limits, texts, pictures, one run."""

import json

import numpy as np
import pytest

from decisionllm.eval.rollout import ScriptedPlayer, rollout
from decisionllm.worlds.babyai.dataset import load
from decisionllm.worlds.babyai.env import BabyAI
from decisionllm.worlds.babyai.levels import make_level, reset_level, step_limit
from tests.conftest import LOOP, NANO, command


def play(env, action):
    """The episodes of a player with one action."""
    choose = lambda seen, rows: np.full((len(rows), 1), action)  # noqa: E731
    return rollout(lambda tasks: ScriptedPlayer(choose, tasks), env, seed=0)


def test_the_bot_succeeds_by_kind_and_level():
    env = BabyAI(6, level=["GoToLocal", "PickupLoc", "PutNextLocal"])
    episodes = rollout(env.baselines(0)["bot"], env, seed=0)
    assert env.score(episodes).tolist() == [100.0] * 6 and env.unit == "% of missions"
    assert all(e.terminated and e.rewards.sum() == e.rewards[-1] == 1 for e in episodes)
    metrics = env.metrics(episodes)
    both = {"missions": 2, "success": 100.0}
    assert metrics["by_kind"] == {"go to": both, "pick up": both, "put next to": both}
    assert metrics["by_level"] == {"GoToLocal": both, "PickupLoc": both, "PutNextLocal": both}
    lengths = [len(episode.rewards) for episode in episodes]
    assert metrics["steps_of_success"] == np.mean(lengths)


def test_sequences_have_kinds_of_their_own():
    env = BabyAI(24, level="GoToSeqS5R2", text="mission")
    env.reset(0)
    joins = {"and": " and ", "then": ", then ", "after": " after you "}
    assert joins.keys() < set(env.kinds) <= joins.keys() | {"go to"}
    for mission, kind in zip(env.tasks, env.kinds, strict=True):
        assert joins.get(kind, "go to") in mission


def test_a_mission_ends_at_its_own_limit_and_the_others_go_on():
    env = BabyAI(2, level=["GoToObjS4", "PutNextLocal"])
    done = play(env, 6)  # which changes nothing
    assert [len(episode.rewards) for episode in done] == [16, 128]
    assert [episode.truncated for episode in done] == [True, True]
    assert env.horizon == 128 and not env.score(done).any()
    assert [len(e.rewards) for e in play(BabyAI(2, level="GoToObj", horizon=5), 6)] == [5, 5]


@pytest.mark.parametrize("name", ["GoToLocal", "PutNextLocal", "MiniBossLevel", "OpenDoorsOrderN2"])
def test_no_mission_has_a_longer_limit_than_its_level(name):
    env = make_level(name)
    limits = set()
    for seed in range(60):
        reset_level(env, seed)
        limits.add(env.max_steps)
    assert max(limits) <= step_limit(name)
    assert max(limits) == step_limit(name) or len(limits) > 2


def test_the_text_is_the_mission_only_where_it_is_asked_for():
    missions = BabyAI(3, level="GoToLocal", text="mission")
    rows = missions.reset(4)
    assert all(task.startswith("go to ") for task in missions.tasks)
    assert missions.protocol == "mission-text"
    without = BabyAI(3, level="GoToLocal")
    assert np.array_equal(without.reset(4), rows)
    assert without.tasks == ["", "", ""] and without.protocol == "standard"


def test_data_and_environment_have_one_layout():
    for view in ("objects", "grid"):
        source = load(level="GoToLocal", episodes=1, view=view)
        env = BabyAI(1, level="GoToLocal", view=view)
        assert env.reset(0).shape == (1, source.spec.observation_dim)
        assert env.horizon == source.spec.horizon == 64
        assert env.num_actions == source.spec.num_actions


def test_a_level_that_does_not_exist_is_refused_by_near_names():
    with pytest.raises(ValueError, match="^env.level: .* such as GoToLocal, .*, got 'GoToLocl'$"):
        BabyAI(1, level=["GoToObj", "GoToLocl"])


def test_pictures_show_the_missions_with_their_ends():
    env = BabyAI(5, level="GoToLocal")
    figure = env.draw(rollout(env.baselines(0)["bot"], env, seed=0), "bot")
    env.reset(0)
    titles = [axis.get_title().replace("\n", " ") for axis in figure.axes]
    missions = [env.envs[i].mission for i in range(4)]
    assert titles[:4] == missions
    assert all(title.startswith("success after ") for title in titles[4:]) and len(titles) == 8


@pytest.mark.slow
def test_a_run_is_trained_and_evaluated(tmp_path):
    run = f"run={tmp_path / 'run'}"
    data = ("dataset=babyai", "dataset.level=[GoToObj,PickupLoc]", "dataset.episodes=10")
    options = ("text=mission", "head=discrete", "model.condition_on=none", f"cache_dir={tmp_path}")
    assert command("train", *LOOP, *NANO, *data, *options, run) == 0
    assert command("evaluate", run, "episodes=2") == 0
    lines = (tmp_path / "results.jsonl").read_text(encoding="utf-8").splitlines()
    rows = {row["policy"]: row for row in map(json.loads, lines)}
    assert rows["bot"]["score"] == 100 and rows["nano"]["world"] == "babyai-GoToObj+PickupLoc"
    assert rows["nano"]["protocol"] == "mission-text"
    assert set(rows["nano"]["by_level"]) == {"GoToObj", "PickupLoc"}
    assert (tmp_path / "rollout-nano-mission-text-7.png").is_file()


def test_missions_of_each_level_are_said_in_each_frame_in_turn():
    options = {"level": ["GoToRedBallNoDists", "PickupLoc"], "text": "paraphrased"}
    env = BabyAI(40, **options, wordings="held_out")
    env.reset(0)
    assert env.protocol == "mission-text-held-out"
    kinds = {"action_words", "object_words", "both"}
    for level in options["level"]:
        own = [
            kind for kind, name in zip(env.frame_kinds, env.levels, strict=True) if name == level
        ]
        assert set(own) == kinds
    assert len(set(env.tasks[::2])) >= 4  # of "go to the red ball"
    trained = BabyAI(4, **options)
    trained.reset(0)
    assert set(trained.frame_kinds) == {"trained"} and trained.protocol == "mission-text"
    assert set(trained.tasks).isdisjoint(env.tasks)
