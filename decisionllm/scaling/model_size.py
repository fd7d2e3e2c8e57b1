"""The size of a model, and the FLOPs and seconds of its training steps."""

import io
import tempfile
from collections.abc import Iterable
from contextlib import redirect_stdout

import torch

from decisionllm.backbones.text_layers import get_blocks
from decisionllm.commands.train import train
from decisionllm.config import train_config
from decisionllm.datasets.mixture_parts import ONLY
from decisionllm.files import read_lines
from decisionllm.models.generalist import Model, members
from decisionllm.registry import Node
from decisionllm.runs.model import make_model
from decisionllm.schema import Spec

FLOPS = (
    "(4 N + 2 trained + 6 layers x width x window tokens) per token of a window, N parameters "
    "that it passes, without embeddings; without the text"
)


def count_parameters(config: Node, spec: Spec) -> dict[str, int]:
    """Count the parameters of a config's model.

    Returns:
        Parameters in total, trained and non_embedding; passed and passed_trained: those of
        non_embedding and trained that the tokens of a trajectory pass; layers, width; tokens of a
        window, with those of as many entities as its observations can have.
    """
    model = make_model(train_config(config), {ONLY: spec})
    embeddings = [m for m in model.modules() if isinstance(m, torch.nn.Embedding)]
    parameters = list(model.parameters())
    total = sum(p.numel() for p in parameters)
    trained = count_trained(parameters)
    non_embedding = total - sum(m.weight.numel() for m in embeddings)
    skipped: list[torch.nn.Parameter] = []
    for module in list_skipped_modules(model):
        skipped += module.parameters()
    tokenizer = members(model)[ONLY].tokenizer
    return {
        "total": total,
        "trained": trained,
        "non_embedding": non_embedding,
        "passed": non_embedding - sum(p.numel() for p in skipped),
        "passed_trained": trained - count_trained(skipped),
        "layers": model.backbone.depth,
        "width": model.backbone.width,
        "tokens": config["window"] * (tokenizer.tokens + tokenizer.most_entities),
    }


def count_trained(parameters: Iterable[torch.nn.Parameter]) -> int:
    """Count the parameters that are trained."""
    return sum(p.numel() for p in parameters if p.requires_grad)


def list_skipped_modules(model: Model) -> list[torch.nn.Module]:
    """List the modules that no token of a trajectory enters: those that read texts, and planners,
    which are fitted before the training.
    """
    backbone = model.backbone
    modules: list[torch.nn.Module] = []
    if backbone.text_layers:
        modules += get_blocks(backbone.core)[: backbone.text_layers]
        modules += [backbone.summary] if backbone.summary is not None else []
    elif isinstance(backbone.features, torch.nn.Module):
        modules.append(backbone.features)
    for member in members(model).values():
        if isinstance(member.planner, torch.nn.Module):
            modules.append(member.planner)
    return modules


def flops_per_step(config: Node, size: dict[str, int]) -> int:
    """Return the FLOPs of one training step, see FLOPS.

    Forward 2 N; backward 2 N, and 2 for each trained parameter.
    """
    trained = min(size["passed_trained"], size["passed"])
    attention = 6 * size["layers"] * size["tokens"] * size["width"]
    each = 4 * size["passed"] + 2 * trained + attention
    return int(config["optim"]["batch_size"] * size["tokens"] * each)


def seconds_per_step(config: Node, steps: int) -> float:
    """Measure the seconds of a training step over these steps, without output."""
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
        log = {
            "every": steps,
            "save_every": steps,
            "validation_batches": 0,
            "keep_best": "",
            "rollout_every": 0,
            "tracker": "none",
        }
        changes = {"run": folder, "steps": steps, "fresh": True, "log": config["log"] | log}
        run = train(config | changes)
        return float(read_lines(run / "metrics.jsonl")[-1]["seconds"] / steps)
