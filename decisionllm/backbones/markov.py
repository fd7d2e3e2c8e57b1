"""Weights to compare language pretraining with: pretrained on a random Markov chain, or shuffled."""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from safetensors.torch import load_file, save_file
from torch import Tensor

from decisionllm.backbones.forward import Backbone
from decisionllm.files import MAKE_AGAIN, cache_dir, check_all, sealed

STATES, ROWS, LENGTH, LR = 100, 8, 64, 1e-3


def shuffle(model: Any, seed: int) -> None:
    """Permute the numbers within each weight tensor but adapters, in place: same distribution of numbers, nothing learned."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in (w for name, w in sorted(model.named_parameters()) if "lora_" not in name):
            weight.copy_(weight.flatten()[torch.randperm(weight.numel(), generator=generator)].view_as(weight))


class MarkovChain:
    """A Markov chain over a part of a vocabulary, whose transition probabilities are the softmax of normal numbers.

    Args:
        vocabulary: size; of it, at most 100 tokens are states.
        seed: of states, transitions and sequences.
    """

    def __init__(self, vocabulary: int, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.states = torch.randperm(vocabulary, generator=self.generator)[:STATES]
        self.transitions = torch.randn(len(self.states), len(self.states), generator=self.generator).softmax(-1)

    def sample(self, rows: int, length: int) -> Tensor:
        """(rows, length) token ids, from the next part of the random stream."""
        state = torch.randint(len(self.states), (rows,), generator=self.generator)
        path = [state]
        for _ in range(length - 1):
            path.append(torch.multinomial(self.transitions[path[-1]], 1, generator=self.generator)[:, 0])
        return self.states[torch.stack(path, 1)]


def pretrain(model: Any, *, seed: int, steps: int) -> None:
    """Train a model with random weights, in place, on sequences of a Markov chain by next-token prediction; kept in the cache.

    The weights are trained in float32, under autocast where the model's dtype is lower, and end in the model's dtype.

    Args:
        model: of transformers, its weights drawn from the seed.
        seed: of the model and the chain.
        steps: of 8 sequences of 64 tokens.

    Raises:
        ValueError: the model has no tied word embeddings, or steps is below 1.

    Source: Wang et al., Pre-training with Synthetic Data Helps Offline Reinforcement Learning (arXiv 2310.00771).
    """
    if steps < 1:
        raise ValueError(f"backbone.markov_steps: expected 1 or more, got {steps}")
    dtype, config = model.dtype, {k: v for k, v in model.config.to_dict().items() if k != "transformers_version"}
    made_of = json.dumps([config, str(dtype), seed, steps, STATES, ROWS, LENGTH, LR], sort_keys=True, default=str)
    folder = cache_dir() / "backbones" / f"markov-{hashlib.sha256(made_of.encode()).hexdigest()[:16]}"
    if not folder.is_dir() and not _earlier(folder).is_file():
        device = "cuda" if torch.cuda.is_available() else "cpu"
        backbone, chain = Backbone(model.float().to(device), None, "full"), MarkovChain(model.config.vocab_size, seed)
        optimizer = torch.optim.AdamW(model.parameters(), LR, betas=(0.9, 0.95), weight_decay=0.01, fused=True)
        rate, real = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, total_steps=steps + 1), torch.ones(ROWS, LENGTH).bool()
        with torch.random.fork_rng():
            torch.manual_seed(seed)  # of dropout
            model.train()
            for _ in track(range(steps), "pretraining on a Markov chain, once"):
                with torch.autocast(device, torch.bfloat16, enabled=dtype != torch.float32):
                    loss = backbone.next_token_loss(chain.sample(ROWS, LENGTH).to(device), real.to(device))
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                rate.step()
                optimizer.zero_grad()
        with sealed(folder) as partial:
            weights = {name: weight.detach().to("cpu", dtype) for name, weight in model.named_parameters()}
            save_file(weights, partial / "model.safetensors")
    model.to("cpu", dtype).load_state_dict(_kept(folder), strict=False)  # strict: buffers are not saved


def _kept(folder: Path) -> dict[str, Tensor]:
    """The weights in the cache by name; a ValueError if they are damaged."""
    if _earlier(folder).is_file():
        return load_file(_earlier(folder))
    check_all(folder, remedy=MAKE_AGAIN)
    return load_file(folder / "model.safetensors")


def _earlier(folder: Path) -> Path:
    """The file, without a digest, that earlier versions kept: a run needs the bits that it was trained on."""
    return folder.with_suffix(".safetensors")
