"""The lines that a training prints before its first step: data, model and limits."""

from collections.abc import Iterator, Mapping

import numpy as np

from decisionllm.config import TrainConfig
from decisionllm.datasets.batches import Data
from decisionllm.datasets.data_quality import list_faults
from decisionllm.models.generalist import Model


def training_summary(
    config: TrainConfig, data: Mapping[str, Data], model: Model, *, devices: str, step: int
) -> Iterator[str]:
    """Yield the lines about a training.

    Args:
        config: the options.
        data: by embodiment.
        model: the model.
        devices: with their precision, such as "bf16, 2 x cuda".
        step: that the training begins with.
    """
    for of_embodiment in data.values():
        yield from data_summary(of_embodiment, held_out_share=config.data.held_out)
    size = sum(weight.numel() for weight in model.parameters())
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    yield f"model: {size:,} parameters, {trained:,} of them trained; {devices}"
    limit = f"{config.steps:,} steps"
    if config.minutes:
        limit += f" or {config.minutes} minutes"
    windows = f"{config.optim.batch_size} windows x {config.window} steps"
    yield f"training: {limit} of {windows}, from step {step:,}, into {config.run}"


def data_summary(data: Data, *, held_out_share: float) -> Iterator[str]:
    """Yield the lines about a log: its size, returns and faults, and how many of its actions are
    recorded.

    held_out_share: the option data.held_out.
    """
    name = data.store.info["name"]
    lengths = (data.steps.end - data.steps.first)[data.episodes]
    held_out = f"{len(data.held_out):,} episodes held out"
    if held_out_share and not len(data.held_out):
        num_groups = len(np.unique(data.store.group))
        held_out += f" (data.held_out={held_out_share:g} of {num_groups:,} groups leaves none)"
    yield f"data: {name}, {len(data.episodes):,} episodes, {lengths.sum():,} steps; {held_out}"
    returns = data.store.returns  # of all episodes, those held out too
    if returns.any():  # a log without rewards has none
        yield f"returns of the log: {returns.mean():.4g} on average, {returns.max():.4g} at best"

    longest = lengths.max()
    if data.window > longest:  # padding costs as much as steps
        yield (
            f"note: no episode has more than {longest:,} steps, and windows have {data.window:,}, "
            f"the rest of which is padding; window={longest} reads as much"
        )
    for fault in list_faults(data.store.info):
        yield f"fault: {fault}"
    unread = list_faults(data.store.info, "unread")
    if unread:
        yield f"note: not read of the log: {', '.join(unread)}"

    weights = data.steps.action_weight
    if data.store.action_weight is None or weights is None:
        return
    is_recorded = data.store.action_weight > 0
    filled = weights[~is_recorded & (weights > 0)]
    line = f"actions: {is_recorded.sum():,} of {is_recorded.size:,} recorded"
    if filled.size:
        line += f", {filled.size:,} filled in, weight {filled.mean():.2f} on average"
    yield line
