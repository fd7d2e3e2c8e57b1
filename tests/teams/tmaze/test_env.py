"""Teams in the T-maze: observations of the log, scores, and passes of the model a step."""

from unittest.mock import patch

import numpy as np

from decisionllm.backbones.forward import Backbone
from decisionllm.eval.rollout import rollout
from decisionllm.policy.policy import Policy
from decisionllm.teams.tmaze import dataset as tmaze
from decisionllm.teams.tmaze.env import TMazeTeams
from tests.conftest import make_model


def teams():
    """An evaluation of six teams and a log."""
    options = {"agents": 3, "length": 2, "text": "informative"}
    return TMazeTeams(6, **options), tmaze.load(groups=4, **options)


def test_the_expert_wins_all_and_a_log_has_the_same_layout():
    env, log = teams()
    episodes = rollout(env.baselines(0)["expert"], env, seed=0)
    assert env.score(episodes).tolist() == [100.0] * len(episodes) and env.unit == "worlds won, %"
    assert (
        env.groups.tolist()
        == [e.group for e in episodes]
        == np.repeat(np.arange(6), len(episodes) // 6).tolist()
    )
    logged = list(log.episodes)
    assert log.spec.entity_schema == env.entity_schema and log.spec.horizon == env.horizon
    assert {e.task for e in logged} == set(
        env.tasks
    ) and log.spec.num_actions == env.action_masks.shape[1]
    assert logged[0].observations.shape[1] == env.observe().shape[1]
    assert {float(e.rewards.sum()) for e in logged} == {float(e.rewards.sum()) for e in episodes}


def test_a_step_takes_as_many_passes_as_the_team_has_members_and_per_agent_one():
    env, log = teams()
    model = make_model(log.spec, head="discrete", execution="both", condition_on="none")
    calls = {}
    for execution in ("joint", "per_agent"):
        policy = Policy(model, env.horizon, 1, None, execution=execution)
        with (
            patch.object(env, "step", side_effect=env.step) as steps,
            patch.object(Backbone, "append", autospec=True, side_effect=Backbone.append) as passes,
            patch.object(
                Backbone, "read_text", autospec=True, side_effect=Backbone.read_text
            ) as texts,
        ):
            rollout(
                lambda tasks, p=policy: p.begin(tasks, env.horizon, groups=env.groups), env, seed=0
            )
        calls[execution] = (passes.call_count, steps.call_count, texts.call_count)
    assert calls == {"joint": (3 * 3, 3, 1), "per_agent": (3, 3, 1)}
