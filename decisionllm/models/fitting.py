"""The loop that fits a small network before a model is trained, or to judge one."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR

from decisionllm.progress import track

# the learning rate of an optimiser over so many steps
Schedule = Callable[[Optimizer, int], LRScheduler]


def one_cycle(optimizer: Optimizer, steps: int) -> LRScheduler:
    """Schedule a short rise to the optimiser's learning rate, then a fall to almost zero."""
    peak = optimizer.param_groups[0]["lr"]
    # a rise of exactly one step would be divided by its last step, which is 0
    rise = 0.1 if steps == 20 else 0.05
    return OneCycleLR(optimizer, peak, steps, pct_start=rise, cycle_momentum=False)


def minimise(
    net: nn.Module,
    loss: Callable[[int], Tensor],
    steps: int,
    title: str,
    *,
    lr: float = 2e-3,
    schedule: Schedule = one_cycle,
) -> None:
    """Minimise a loss by Adam.

    Args:
        net: its weights are trained, and are frozen afterwards.
        loss: the loss of a step by its number, from 0.
        steps: updates.
        title: of the progress that is shown.
        lr: learning rate that the schedule begins with.
        schedule: of the learning rate.
    """
    net.requires_grad_(True)
    optimizer = torch.optim.Adam(net.parameters(), lr)
    scheduler = schedule(optimizer, steps)
    for step in track(range(steps), title):
        optimizer.zero_grad()
        loss(step).backward()
        optimizer.step()
        scheduler.step()
    net.requires_grad_(False)
