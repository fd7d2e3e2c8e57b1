"""Losses of a policy on windows of held-out groups, the same windows for every run of a study."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from decisionllm.config import train_config
from decisionllm.datasets import sampling, windows
from decisionllm.datasets.batches import read_windows, to_batch
from decisionllm.datasets.store import Store
from decisionllm.models.sequence import SequenceModel
from decisionllm.policy.policy import Policy
from decisionllm.registry import Node
from decisionllm.schema import Batch, Json, Window

BATCH = 128  # windows in one forward pass of the held-out loss


@torch.no_grad()
def measure_losses(policy: Policy, config: Node, store: Store, count: int) -> dict[str, float]:
    """Losses on windows of the held-out groups, the same windows for every run of a study.

    Args:
        policy: a trained policy.
        config: of its run.
        store: the reference data of the study.
        count: windows, at least.

    Returns:
        held_out: negative log-likelihood, nats an action. floor: the least that the head can have.
        action_error: root mean square difference to the mode of the policy, in the model's units
        (-1 .. 1 a dimension); of discrete actions the share that differs.
    """
    model = policy.model.eval()
    draw, tasks = read_held_out_windows(config, store)
    reading: Json = {"store": store, "tasks": tasks, "encode": model.backbone.encode}
    sums = np.zeros(3)  # loss, error, actions
    for i in range(math.ceil(count / BATCH)):
        sums += sum_errors(model, to_batch(draw(i), slice(None), device=policy.device, **reading))
    if not sums[2]:
        raise ValueError(f"windows={count}: expected held-out actions to measure, found none")
    mean_loss, mean_error = (sums[:2] / sums[2]).tolist()
    if not store.spec.num_actions:
        mean_error = mean_error**0.5
    return {"held_out": mean_loss, "floor": model.head.loss_floor, "action_error": mean_error}


def read_held_out_windows(
    config: Node, store: Store
) -> tuple[Callable[[int], Window], Sequence[str]]:
    """Return a function (number) -> windows of the held-out groups, as a run reads them, and the
    texts of their rows.

    The windows are the same for every training seed.
    """
    run_options = train_config(config)
    options = replace(run_options, seed=0, optim=replace(run_options.optim, batch_size=BATCH))
    data = options.data
    _, episodes = sampling.select(store, held_out=data.held_out, seed=data.seed)
    steps = windows.load_steps(store, return_horizon=options.model.return_horizon)
    episodes = episodes[steps.end[episodes] > steps.first[episodes]]
    return read_windows(options, store, steps, episodes)


def sum_errors(model: SequenceModel, batch: Batch) -> list[float]:
    """Sum over the actions of a batch: the loss; the squared difference to the mode, or of
    discrete actions whether they differ; the number of actions.
    """
    hidden = model.read(batch)
    distribution = model.distribution(hidden, batch.action_masks, batch.observations)
    actions = model.normalizer.actions(batch.actions)
    mode = distribution.mode
    error = mode != actions if model.spec.num_actions else (mode - actions).square()
    is_target = batch.loss_mask
    loss = -distribution.log_prob(actions)[is_target].sum()
    return [float(loss), float(error.float().mean(-1)[is_target].sum()), int(is_target.sum())]
