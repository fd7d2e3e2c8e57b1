"""SmolLM2-135M as it is cut by default, in bfloat16: training steps against transformers + peft.

512 windows of one step, whose rows share 64 texts of 22 tokens. Ours reads each text once, frozen,
by blocks 1 to 12, and trains blocks 13 to 18 on the rows. The peers are fed as their users feed
them, the text's embeddings repeated in front of every row, through the same 18 blocks and through
all 30; they train adapters in all blocks that read. LoRA of rank 32; embedding, head, loss and
optimiser are the same. Needs the packages of backbone=smollm2.
"""

from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks import measure
from benchmarks.dt_step import log, our_loss, trainer
from benchmarks.llm_step_tiny import adapted, peer_loss
from decisionllm.backbones import hf_reference as library
from decisionllm.datasets.sampling import Sampler
from decisionllm.datasets.windows import collate

ROWS, TEXTS = 512, 64
model_of = partial(adapted, "smollm2", lora_rank=32, lora_alpha=64)
TASKS = [
    f"Maze2D medium. Drive the ball into row {i // 8}, column {i % 8}, and keep it in that cell, "
    "please."
    for i in range(TEXTS)
]


def batches(model, rows=ROWS):
    """step -> a Batch whose rows have the texts in turn."""
    steps = log(20_000)
    sampler = Sampler(steps, np.arange(len(steps.first)), T=1, batch_size=rows, seed=0)
    return lambda step: collate(
        sampler(step), model.backbone.encode(TASKS), np.arange(rows) % TEXTS
    )


def plain_loss(model, batch):
    """Our loss by the library's own forward."""
    fast = model.backbone.forward
    model.backbone.forward = plain(model.backbone)
    try:
        return our_loss(model, batch)
    finally:
        model.backbone.forward = fast


def plain(backbone):
    """`Backbone.plain` with the arguments of `Backbone.forward`."""
    return lambda *given, output_positions: library.plain(backbone, *given)[:, output_positions]


def gates():
    """The same gradients as those of the library's own blocks, in float32."""
    model = model_of(dtype="float32")
    batch = batches(model, rows=TEXTS)(0)
    gradients = []
    for loss in (our_loss, plain_loss):
        model.zero_grad()
        loss(model, batch).backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.requires_grad])
    return measure.gate("gradients", measure.largest_difference(*gradients), 1e-4)


def cases():
    half = partial(our_loss, dtype=torch.bfloat16)
    for blocks in (18, 0):
        ours = model_of()
        peer = model_of(text_layers=0, layers=blocks)
        yield measure.Case(
            f"training, 512 windows, 64 texts; the peer reads {blocks or 30} blocks",
            trainer(ours, half, batches(ours)),
            trainer(peer, partial(peer_loss, dtype=torch.bfloat16), batches(peer)),
            target=10 if not blocks else None,
        )


if __name__ == "__main__":
    measure.main("lab.llm_cut", out=Path(__file__).parent / "rows" / "peers.jsonl")
