"""Evaluation of teams: references measured again, one result a condition, and disturbances."""

import numpy as np
import pytest

from decisionllm.eval.rollout import rollout
from decisionllm.teams.dataset import source
from decisionllm.teams.spread import dataset as logs
from decisionllm.teams.spread import env as spread
from decisionllm.teams.spread.env import SpreadTeams
from decisionllm.teams.spread.world import HORIZON, TEACHERS, Spread, Teacher, to_pushes
from decisionllm.teams.team_env import REFERENCE_STARTS


def play(env, name="expert", seed=0):
    episodes = rollout(env.baselines(seed)[name], env, seed=seed)
    return {
        protocol: [episodes[i] for i in members]
        for protocol, members in env.conditions("per_agent", True).items()
    }, episodes


def scores(env, name="expert"):
    return {protocol: env.score(part).mean() for protocol, part in play(env, name)[0].items()}


@pytest.mark.parametrize(("agents", "actions"), [(2, "discrete"), (3, "continuous")])
def test_the_references_are_what_is_measured_again(agents, actions):
    for kind, actual in zip(("random", "expert"), spread.REFERENCE[actions][agents], strict=True):
        world = Spread(REFERENCE_STARTS + np.arange(1000), agents)
        player = Teacher(
            world, TEACHERS.index(kind), np.random.default_rng(0), discrete=actions == "discrete"
        )
        assert np.mean(
            sum(world.step(to_pushes(player.act(world))) for _ in range(HORIZON))
        ) == pytest.approx(actual, abs=1e-4)


def test_random_play_scores_about_0_and_the_expert_about_100():
    env = SpreadTeams(200, agents="2-6")
    assert list(env.conditions("per_agent", False)) == [
        f"per agent, {n} agents" for n in range(2, 7)
    ]
    for name, expected in (("random", 0), ("expert", 100)):
        assert list(scores(env, name).values()) == pytest.approx([expected] * 5, abs=8)


def test_a_world_plays_the_same_beside_others():
    alone = SpreadTeams(5)
    many = SpreadTeams(5, agents="2,3,5", crash="4")
    one = play(alone)[0]["per agent"]
    beside = play(many)[0]["per agent, 3 agents"]
    assert [e.rewards.tolist() for e in one] == [e.rewards.tolist() for e in beside]
    assert (alone.score(one) == many.score(beside)).all()


def test_observations_equal_those_of_a_log():
    log = source(logs.generate("expert", groups=4, noise=0.0))
    env = SpreadTeams(4)
    env.reset(0)
    env.world = Spread(logs.SEEDS + np.arange(4), 3)
    assert (env.observe() == np.stack([e.observations[0] for e in log.episodes])).all()
    assert env.entity_schema == log.spec.entity_schema


def test_every_reward_is_the_mean_of_the_team():
    env = SpreadTeams(3, agents="2,4")
    _, episodes = play(env, "random")
    assert (
        [e.group for e in episodes]
        == env.groups.tolist()
        == [0, 0, 1, 1, 2, 2, *np.repeat([3, 4, 5], 4)]
    )
    for e in episodes:
        assert (
            e.rewards.sum() == pytest.approx(env.returns[e.group], abs=1e-4)
            and len(e.rewards) == HORIZON
        )


def test_an_early_crash_costs_more_than_a_late_one():
    actual = scores(SpreadTeams(200, crash="0,4,8"))
    assert list(actual) == [
        "per agent",
        "per agent, crash at 0",
        "per agent, crash at 4",
        "per agent, crash at 8",
    ]
    none, *crashes = actual.values()
    assert crashes[0] + 8 < crashes[1] and crashes[1] < crashes[2] < none


def test_a_crashed_agent_stays_where_it_is_and_the_others_move():
    env = SpreadTeams(20, crash="0")
    play(env)
    moved = np.abs(env.history[-1] - env.history[0]).max(-1)[20:]
    struck = env.struck[20:]
    assert np.median(moved[np.arange(20), struck]) < 1e-6  # except for agents that were bumped into
    assert (moved > 0.01).sum() > 30 and len(np.unique(struck)) == 3


def test_a_result_counts_worlds_and_has_further_columns():
    env = SpreadTeams(10, agents=4)
    parts, _ = play(env)
    (protocol, part), *_ = parts.items()
    assert protocol == "per agent, 4 agents" and len(part) == 10
    actual = env.metrics(part)
    assert actual["agents"] == 4 and actual["reference"] == [-30.7352, -8.9167]
    assert actual["return"] == pytest.approx(env.returns.mean(), abs=1e-4)
    assert 0.6 < actual["covered"] <= 1 and actual["touches"] >= 0
    assert list(env.conditions("joint", False)) == ["joint, 4 agents"] and list(
        env.conditions("joint", True)
    ) == [protocol]


def test_a_picture_of_a_world_and_of_the_conditions():
    env = SpreadTeams(3, crash="2")
    parts, _ = play(env)
    made = env.draw(next(iter(parts.values())), "title")
    assert len(made.axes) == 7 and len(made.axes[0].patches) == 3
    low, high = env.bounds[0]
    shown = made.axes[-1].lines[0].get_ydata()
    assert shown[1] == pytest.approx(np.mean(100 * (env.returns[3:] - low) / (high - low)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"agents": "1"}, "env.agents: expected 2 .. 6, got 1"),
        ({"agents": "3,7", "capacity": 8}, "at most 6, whose returns .* got 3,7; give fewer"),
        ({"agents": "three"}, "env.agents: expected such as 0-6 or 7,8, got 'three'"),
        ({"agents": ""}, "env.agents: expected such as 0-6 or 7,8, got ''"),
        ({"crash": "25"}, "env.crash: expected 0 .. 24, got 25"),
        ({"actions": "both"}, "env.actions: expected one of discrete"),
    ],
)
def test_a_wrong_option_is_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        SpreadTeams(2, **options)


def test_a_seed_whose_starts_would_be_in_a_log_is_refused():
    with pytest.raises(ValueError, match="expected 0 .. 899"):
        SpreadTeams(2).reset(900)


def test_omars_world_has_omars_score():
    env = SpreadTeams(200, actions="continuous", rules="omar")
    assert scores(env, "random")["per agent"] == pytest.approx(0, abs=5)
    ours, omars = (
        scores(SpreadTeams(50, actions="continuous", rules=rules), "expert")["per agent"]
        for rules in ("mpe2", "omar")
    )
    assert ours == pytest.approx(100, abs=5) and omars > 110, (
        "the script is above the published expert"
    )
    with pytest.raises(
        ValueError, match="env.rules=omar: expected agents=3 and actions=continuous"
    ):
        SpreadTeams(1, rules="omar")
    with pytest.raises(ValueError, match="env.rules: expected one of mpe2, omar"):
        SpreadTeams(1, rules="farama")
