"""A training step of the Decision Transformer: `backbone=dt` against the model in Hugging Face
transformers, same dropout.

Both are given the same windows, the same loss and the same optimiser. The peer trains in float32,
as its users do; ours is timed in float32 and under bfloat16 autocast, each against that.
"""

from functools import partial

import numpy as np
import torch

from benchmarks import measure
from benchmarks.windows import log
from decisionllm.datasets.sampling import Sampler
from decisionllm.datasets.windows import collate
from decisionllm.hardware import resolve_precision
from decisionllm.models.heads import Gaussian
from decisionllm.models.objectives.likelihood import masked_mean
from decisionllm.models.sequence import SequenceModel
from decisionllm.registry import build, discover
from decisionllm.schema import Spec

SPEC = Spec(observation_dim=4, action_dim=2, horizon=1000, low=(-1.0, -1.0), high=(1.0, 1.0))
NO_TEXT = torch.zeros(1, 0, dtype=torch.long), torch.zeros(1, 0, dtype=torch.bool)
PEER = {  # our names -> the peer's
    "tokenizer.returns": "embed_return",
    "tokenizer.observations": "embed_state",
    "tokenizer.actions": "embed_action",
    "tokenizer.timesteps": "embed_timestep",
    "tokenizer.norm": "embed_ln",
    "head.out": "predict_action.0",
    "backbone.model.h": "encoder.h",
    "backbone.model.ln_f": "encoder.ln_f",
}


def make(backbone, **options):
    """A model with random weights, the Gaussian head and a linear embedding."""
    choices = discover()
    torch.manual_seed(0)
    return SequenceModel(
        SPEC, build(choices["backbone"][backbone] | options, 0), choices["head"]["gaussian"]
    )


def pair(*, width=128, layers=3, heads=1, dropout=0.1):
    """Ours and the peer with the same weights.

    The peer has no positions but timesteps, so that ours are zero too.
    """
    from transformers import DecisionTransformerConfig, DecisionTransformerModel

    ours = make("dt", width=width, layers=layers, heads=heads, dropout=dropout)
    config = DecisionTransformerConfig(
        state_dim=SPEC.observation_dim,
        act_dim=SPEC.action_dim,
        hidden_size=width,
        max_ep_len=SPEC.horizon,
        n_layer=layers,
        n_head=heads,
        activation_function="relu",
        resid_pdrop=dropout,
        attn_pdrop=dropout,
        embd_pdrop=dropout,
        bos_token_id=None,
        eos_token_id=None,
    )
    peer = DecisionTransformerModel(config)
    with torch.no_grad():
        ours.backbone.core.wpe.weight.zero_()
        peer.encoder.wpe.weight.zero_()
        weights = dict(peer.named_parameters())
        for name, weight in ours.named_parameters():
            if name in shared(ours):
                weights[shared(ours)[name]].copy_(weight)
    return ours.train(), peer.train()


def shared(model):
    """{our parameter: the peer's} of all that both have and use."""
    names = [name for name, _ in model.named_parameters()]
    return {
        name: theirs + name.removeprefix(ours)
        for name in names
        for ours, theirs in PEER.items()
        if name.startswith(ours + ".")
    }


def our_loss(model, batch, dtype=torch.float32):
    device = batch.observations.device.type
    with torch.autocast(device, dtype, enabled=dtype != torch.float32):
        return model(batch)["nll"]


def peer_loss(model, batch):
    seen = {"states": batch.observations, "actions": batch.actions, "timesteps": batch.timesteps}
    out = model(
        **seen, returns_to_go=batch.returns_to_go[..., None], attention_mask=batch.mask.long()
    )
    return masked_mean(-Gaussian(out.action_preds, 0.5).log_prob(batch.actions), batch.mask)


def batches(*, T, B):
    """step -> a Batch without text."""
    steps = log(20_000)
    sampler = Sampler(steps, np.arange(len(steps.first)), T=T, batch_size=B, seed=0)
    return lambda step: collate(sampler(step), NO_TEXT, np.zeros(B, int))


def trainer(model, loss, batch_of):
    """() -> one optimiser step, and the loss before it."""
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=1e-3, weight_decay=1e-2, fused=True)
    count = iter(range(1_000_000))

    def step():
        value = loss(model, batch_of(next(count)))
        value.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return value.detach()

    return step


def gates(*, T=20, B=64, steps=30, **size):
    """Without dropout: the same gradients, and the same loss after some steps; in bfloat16 within a
    percent.
    """
    batch_of = batches(T=T, B=B)
    ours, peer = pair(dropout=0.0, **size)
    our_loss(ours, batch_of(0)).backward()
    peer_loss(peer, batch_of(0)).backward()
    gradients = [{name: p.grad for name, p in model.named_parameters()} for model in (ours, peer)]
    wrong = measure.largest_difference(
        *zip(*((gradients[0][a], gradients[1][b]) for a, b in shared(ours).items()), strict=True)
    )
    differences = measure.gate("gradients", wrong, 1e-6)
    losses = []
    for side, loss in ((0, our_loss), (1, peer_loss), (0, partial(our_loss, dtype=torch.bfloat16))):
        model = pair(dropout=0.0, **size)[side]
        # it means something else in each
        (model.encoder if side else model.backbone.core).wpe.requires_grad_(False)
        step = trainer(model, loss, batch_of)
        losses.append([step() for _ in range(steps)][-1])
    for name, value, bound in (("loss", losses[0], 1e-4), ("loss in bfloat16", losses[2], 1e-2)):
        differences |= measure.gate(f"{name} at step {steps}", abs(value / losses[1] - 1), bound)
    return differences


def cases(*, T=20, B=64, **size):
    batch_of = batches(T=T, B=B)
    models = [pair(**size) for _ in range(2)]
    ours = trainer(models[0][0], our_loss, batch_of)
    peer = trainer(models[0][1], peer_loss, batch_of)
    yield measure.Case("float32", *repeated(ours, peer), target=1.3)
    if resolve_precision("cpu", "auto") == "bf16":
        ours = trainer(models[1][0], partial(our_loss, dtype=torch.bfloat16), batch_of)
        yield measure.Case("bfloat16, peer in float32", *repeated(ours, peer), target=2.1)


def repeated(ours, peer, count=3):
    """Blocks of a few steps: what one leaves in the caches is not the other's burden. -> four
    arguments of a Case
    """
    return (
        lambda: [ours() for _ in range(count)],
        lambda: [peer() for _ in range(count)],
        count,
        count,
    )


if __name__ == "__main__":
    measure.main("benchmarks.dt_step")
