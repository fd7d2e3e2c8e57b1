"""Joint steps of a log, by hand."""

import numpy as np
import pytest

from decisionllm.teams.formats.team_log import Log
from decisionllm.teams.joint_steps import JointSteps

KIND = {"low": [-1.0], "high": [1.0], "observations": {"2": [["own", 2, 1]]}}
META = {"types": {"agent": KIND}, "horizon": 2}


def log(keep=slice(None), meta=META, **columns):
    """Two worlds of two steps and two agents, rows in disorder; the number of a row is 100 world +
    10 step + agent.
    """
    group, step, agent = (x.ravel() for x in np.indices((2, 2, 2)))
    number = 100.0 * group + 10 * step + agent
    made = {
        "group": group,
        "step": step,
        "agent": agent,
        "observation": np.stack([number, -number], 1).astype(np.float32),
        "action_values": (number / 1000)[:, None].astype(np.float32),
        **columns,
    }
    order = np.array([5, 2, 7, 0, 3, 6, 1, 4])[keep]
    clock = {
        "group": np.array([1, 0, 0, 1]),
        "step": np.array([1, 0, 1, 0]),
        "reward": np.array([4.0, 1.0, 2.0, 3.0], np.float32),
        "terminated": np.zeros(4, bool),
        "truncated": np.array([True, False, True, False]),
    }
    return Log(meta, clock, {name: column[order] for name, column in made.items()})


def test_rows_in_any_order_are_laid_out_by_world_step_and_agent():
    steps = JointSteps.from_log(log())
    assert steps.observations[..., 0].tolist() == [[[0, 1], [10, 11]], [[100, 101], [110, 111]]]
    assert np.allclose(steps.actions[1, 0, :, 0], [0.1, 0.101])
    assert steps.rewards.tolist() == [[[1, 1], [2, 2]], [[3, 3], [4, 4]]], "the team's"


def test_the_rewards_of_agents_come_before_those_of_the_team():
    own = np.arange(8, dtype=np.float32)
    assert JointSteps.from_log(log(reward=own)).rewards.tolist() == own.reshape(2, 2, 2).tolist()
    lacking = np.where(own == 3, np.nan, own)
    assert JointSteps.from_log(log(reward=lacking)).rewards[0].tolist() == [[1, 1], [2, 2]]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"keep": slice(7)}, "expected worlds of as many steps, in which all agents are always"),
        (
            {"meta": META | {"types": {"a": KIND, "b": KIND}}},
            "expected one type of agent, got a, b",
        ),
        (
            {"meta": META | {"types": {"agent": {"num_actions": 3}}}},
            "expected continuous actions, got discrete ones",
        ),
        (
            {"meta": META | {"types": {"agent": {"low": [-1.0], "high": [1.0]}}}},
            "expected blocks of observations of 2 numbers, got none; describe them in dataset.meta",
        ),
        (
            {"action_values": np.full((8, 1), np.nan)},
            "expected every action recorded, got missing ones",
        ),
        ({"observation": np.full((8, 2), np.nan)}, "observation: expected finite numbers, got"),
        ({"reward": np.full(8, np.inf)}, "reward: expected a finite number, got inf"),
        ({"agent": np.zeros(8, int)}, "expected one row for each group, step and agent"),
        (
            {"action_values": np.full((8, 1), 7.0)},
            r"row 4 .*: expected an action within \[-1.0\] .. \[1.0\], got \[7.0\]",
        ),
    ],
)
def test_logs_that_are_no_joint_steps_are_refused(args, message):
    with pytest.raises(ValueError, match=message):
        JointSteps.from_log(log(**args))
