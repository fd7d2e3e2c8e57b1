"""A LoRA training step of a small Qwen2 with a task text: the text read once for all rows, against
transformers + peft.

64 text and 60 trajectory tokens (20 steps), 16 rows, rank 16 on every linear map. The peer is fed
as its users feed it: the text's embeddings repeated in front of every row. Embedding, head, loss
and optimiser are the same.
"""

import copy
from functools import partial

import numpy as np
import torch

from benchmarks import measure
from benchmarks.dt_step import log, make, our_loss, repeated, trainer
from decisionllm.datasets.sampling import Sampler
from decisionllm.datasets.windows import collate
from decisionllm.hardware import resolve_precision
from decisionllm.tokenizers import text

TASK = "0123456789" * 6 + "0123"  # 64 tokens: digits stand apart


def adapted(backbone="tiny", **options):
    """A model in training.

    An adapter begins as zero, whose gradients would hide mistakes: these begin elsewhere.
    """
    model = make(backbone, **options)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(0, 0.02)
    return model.train()


def pair(backbone="tiny", **options):
    """The same model twice."""
    model = adapted(backbone, **options)
    return model, copy.deepcopy(model)


def repeated_text(model, batch):
    """The hidden states of all trajectory tokens, by the library's own forward: (B, k T, D)"""
    embedded = model.backbone.embed(batch.text_ids)[batch.text_index]
    tokens = torch.cat([embedded, model.tokens(batch).to(embedded.dtype)], 1)
    read = model.backbone.model(inputs_embeds=tokens, use_cache=False)
    return read.last_hidden_state[:, batch.text_ids.shape[1] :]


def peer_loss(model, batch, dtype=torch.float32):
    device = batch.observations.device.type
    with torch.autocast(device, dtype, enabled=dtype != torch.float32):
        hidden = repeated_text(model, batch)[:, model.tokenizer.output_positions].float()
        nll = -model.head(hidden).log_prob(model.normalizer.actions(batch.actions))
        return torch.where(batch.mask, nll, 0).sum() / batch.mask.sum()


def batches(model, *, T, B):
    """step -> a Batch whose rows share one text."""
    steps = log(20_000)
    texts = text.encode(model.backbone.tokenizer, [TASK])
    assert texts[0].shape == (1, 64)
    sampler = Sampler(steps, np.arange(len(steps.first)), T=T, batch_size=B, seed=0)
    return lambda step: collate(sampler(step), texts, np.zeros(B, int))


def gates(*, T=20, B=16, **size):
    """The same loss and the same gradients of everything trained; in bfloat16 the loss within a
    percent.
    """
    ours, peer = pair(tune="lora", **size)
    batch = batches(ours, T=T, B=B)(0)
    losses = [our_loss(ours, batch), peer_loss(peer, batch)]
    for loss in losses:
        loss.backward()
    gradients = [[p.grad for p in model.parameters() if p.requires_grad] for model in (ours, peer)]
    with torch.no_grad():
        half = our_loss(ours, batch, torch.bfloat16)
    differences = measure.gate("gradients", measure.largest_difference(*gradients), 1e-5)
    return differences | measure.gate("loss in bfloat16", abs(half / losses[1].detach() - 1), 1e-2)


def cases(*, T=20, B=16, **size):
    models = [pair(tune="lora", **size) for _ in range(2)]
    batch_of = batches(models[0][0], T=T, B=B)
    ours = trainer(models[0][0], our_loss, batch_of)
    peer = trainer(models[0][1], peer_loss, batch_of)
    yield measure.Case("float32", *repeated(ours, peer, 2), target=1.6)
    if resolve_precision("cpu", "auto") == "bf16":
        half = trainer(models[1][0], partial(our_loss, dtype=torch.bfloat16), batch_of)
        peer_half = trainer(models[1][1], partial(peer_loss, dtype=torch.bfloat16), batch_of)
        yield measure.Case("bfloat16, peer in float32", *repeated(half, peer, 2), target=3)
        yield measure.Case("bfloat16, peer too", *repeated(half, peer_half, 2))


if __name__ == "__main__":
    measure.main("benchmarks.llm_step_tiny")
