"""The optimiser of a run: its groups of weights, its learning rate, its moments in a checkpoint."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from decisionllm import distributed
from decisionllm.config import OptimOptions
from decisionllm.schema import Json

SCHEDULE_FLOOR = 0.05  # of the peak learning rate, at the end
NO_DECAY = ", no decay"  # ending of the name of a group of parameters


def make_optimizer(model: nn.Module, optim: OptimOptions) -> torch.optim.AdamW:
    """Build the optimiser of the trained weights of a model."""
    return torch.optim.AdamW(parameter_groups(model, optim), betas=(0.9, 0.95), fused=True)


def parameter_groups(model: nn.Module, optim: OptimOptions) -> list[Json]:
    """Return the named groups of the optimiser, each trained parameter in exactly one: new or of
    the backbone, with weight decay or not.
    """
    groups: dict[str, Json] = {}
    for part, scale in (("new", 1.0), ("backbone", optim.lr_backbone / optim.lr)):
        for ending, decay in (("", optim.weight_decay), (NO_DECAY, 0.0)):
            name = part + ending
            groups[name] = {"name": name, "params": [], "scale": scale, "weight_decay": decay}
    for path, weight in model.named_parameters():
        if weight.requires_grad:
            part = "backbone" if path.startswith("backbone.model.") else "new"
            ending = "" if weight.ndim > 1 else NO_DECAY
            groups[part + ending]["params"].append(weight)
    return [group for group in groups.values() if group["params"]]


def scheduled_learning_rate(optim: OptimOptions, step: int, progress: float) -> float:
    """Return the learning rate of a step: a linear warm-up, then a cosine down to SCHEDULE_FLOOR of
    the peak.

    progress: share of the run that is done, of steps or of time.
    """
    cosine = (1 + math.cos(math.pi * progress)) / 2
    return (
        optim.lr
        * min((step + 1) / max(optim.warmup, 1), 1)
        * (SCHEDULE_FLOOR + (1 - SCHEDULE_FLOOR) * cosine)
    )


def moments_by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the optimiser's state as named tensors: {parameter/moment: tensor}."""
    names: dict[Tensor, str] = {weight: name for name, weight in model.named_parameters()}
    tensors = {}
    for weight, state in optimizer.state.items():
        for moment, value in state.items():
            tensors[f"{names[weight]}/{moment}"] = distributed.gather_tensor(value)
    return tensors


def load_moments(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]
) -> None:
    """Give an optimiser the state that `moments_by_name` returned."""
    weights = dict(model.named_parameters())
    for name, value in tensors.items():
        path, _, moment = name.rpartition("/")
        weight = weights[path]
        optimizer.state[weight][moment] = distributed.place_like(value, weight)
