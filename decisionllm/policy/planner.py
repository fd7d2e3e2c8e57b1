"""Planning with a learned dynamics model: imagine what candidate actions bring, and take the best."""

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from decisionllm.policy.buffer import Rows
    from decisionllm.policy.session import Session


def plan(session: "Session", hidden: Tensor, rows: "Rows") -> np.ndarray:
    """Choose the first action of the imagined trajectory with the highest predicted reward.

    The first trajectory continues with the policy's own actions; each other one holds a candidate action. A plan replaces the
    policy's action only if its predicted reward is higher by `planning_margin` standard deviations of a reward per step.

    Args:
        session: that has observed the current step; it stays as it is.
        hidden: (N, D) at the current observations.
        rows: the N episodes.

    Returns:
        (N, A) actions, raw units.
    """
    policy, model, each = session.policy, session.policy.model, np.arange(len(session.now))[rows]
    if model.imagined is not None:
        return plan_to_value(session, hidden, each)
    N, C, steps = len(hidden), 1 + len(policy.candidate_actions), policy.planning_horizon
    if model.tokenizer.timesteps is not None:
        steps = min(steps, model.spec.horizon - 1 - int(session.now[each].max()))
    own = policy.choose(hidden, None, session.observations[each, session.now[each]])
    imagined = session.branch(np.repeat(each, C), policy.planning_horizon)
    hidden = hidden.repeat_interleave(C, 0)
    actions = np.tile(np.concatenate([own[:1], policy.candidate_actions]), (N, 1))
    actions[::C] = own
    observations = torch.from_numpy(imagined.observations[np.arange(N * C), imagined.now]).to(policy.device)
    total = rewards = torch.zeros(N * C, device=policy.device)
    for step in range(steps):
        if step:  # the observation after the last step is not read
            imagined.record_action(actions)
            imagined.observe(observations.cpu().numpy(), rewards.cpu().numpy())
            hidden = imagined.read()[0]
            actions[::C] = policy.choose(hidden[::C], None, observations[::C].cpu().numpy())
        observations, rewards = model.imagine(hidden, observations, torch.from_numpy(actions).to(policy.device))
        total = total + rewards
    total = total.view(N, C)
    better = total.amax(1) > total[:, 0] + policy.planning_margin * steps * model.normalizer.reward_scale
    best = actions.reshape(N, C, -1)[np.arange(N), total.argmax(1).cpu().numpy()]
    return np.where(better.cpu().numpy()[:, None], best, own)


def plan_to_value(session: "Session", hidden: Tensor, each: np.ndarray) -> np.ndarray:
    """Choose the candidate action whose imagined rewards and value after them are highest; the policy's own where none is known.

    Args:
        session: that has observed the current step; it stays as it is.
        hidden: (N, D) at the current observations.
        each: (N,) the episodes.

    Returns:
        (N, A) actions, raw units.
    """
    policy, model = session.policy, session.policy.model
    observations, masks = session.observations[each, session.now[each]], session.allowed(each)
    assert model.imagined is not None
    standard = model.normalizer.observations(torch.from_numpy(observations).to(policy.device))
    values = model.imagined.plan(standard, policy.planning_horizon)
    if masks is not None:
        values = torch.where(masks, values, -1.0)
    own = policy.choose(hidden, masks, observations)
    best, choice = (x.cpu().numpy() for x in values.max(1))
    return np.where(best[:, None] < 0, own, policy.candidate_actions[choice])
