"""The reading accuracy of a layout of a language model: the share of unseen paraphrases of
which it names the right goal.

It tells in minutes where a model should be cut, since nothing acts: a learned token stands behind a
text, and a linear map of what the backbone makes of it names the goal. It is trained on the sixty
wordings of each goal of a maze, and judged by the twenty that are held out, with every other goal
that a contrast can name. What such a layout understands as a policy is close to this, see LOG.md.

`python -m lab.reading --text-layers 0.4 0.5 --summary 0 4 --seeds 0 1` appends a row for each
combination to reading.jsonl. A fifth of the model's blocks is built above those that read texts.
`--models qwen.gguf` is another model than SmolLM2; the learning rate is that of --lr times 576 over
the width of the model.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import numpy as np
import torch
from rich.progress import track
from torch import Tensor, nn
from torch.nn import functional as F

from decisionllm.backbones.forward import Backbone
from decisionllm.datasets.paraphrases import Paraphrases, held_out_kinds
from decisionllm.hardware import resolve_precision
from decisionllm.registry import build, choice
from decisionllm.runs import directory
from decisionllm.schema import Json
from decisionllm.worlds.maze2d.dataset import goal_facts

ROWS = Path(__file__).parent / "rows" / "reading.jsonl"
ABOVE = 0.2  # of a model's blocks: those that read both text and trajectory
WIDTH = 576  # of the model for which the learning rate was chosen
TEXTS = 64  # of a step, as in experiment=umaze-llm
WARMUP = 50  # steps
CONTRASTS = 6  # most other goals that a contrast is tried with

# texts, the number of the goal of each, and how many frames they are of
Labelled = tuple[list[str], Tensor, int]


class Namer(nn.Module):
    """Names the goal of a text: a learned token reads it, and a linear map reads the token."""

    def __init__(self, backbone: Backbone, goals: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.token = nn.Parameter(2 * torch.randn(1, 1, backbone.width))
        self.head = nn.Linear(backbone.width, goals)
        self.narrow = resolve_precision("cpu", "auto") == "bf16"

    def forward(self, texts: Sequence[str]) -> Tensor:
        """The scores of each goal for each text: (U, goals)."""
        ids, mask = self.backbone.encode(texts)
        tokens = self.token.expand(len(texts), 1, -1)
        # as `decisionllm train` does: in float32, weights of 16 bits would be widened in each step
        with torch.autocast("cpu", torch.bfloat16, enabled=self.narrow):
            hidden = self.backbone(tokens, ids, mask, torch.arange(len(texts)))
        scores: Tensor = self.head(hidden[:, 0].float())
        return scores


def held_out(maze: str) -> dict[str, Labelled]:
    """Every held-out wording of every goal, by its kind; contrasts with each other goal."""
    facts = goal_facts(maze)
    found = {}
    for kind in held_out_kinds(facts.values()):
        words = Paraphrases(list(facts), facts, kind=kind)
        texts: list[str] = []
        goals: list[int] = []
        for goal, frames in enumerate(words.frames):
            for frame, turn in product(range(len(frames)), np.linspace(0, 0.999, CONTRASTS)):
                number = words.index_texts(np.array([goal]), np.array([frame]), np.array([turn]))
                text = words[number[0]]
                if text not in texts[-CONTRASTS:]:
                    texts.append(text)
                    goals.append(goal)
        found[kind] = texts, torch.tensor(goals), len(words.frames[0])
    return found


def teach(namer: Namer, maze: str, *, steps: int, lr: float, seed: int) -> None:
    """Train on wordings drawn anew in each step; the rate falls to 0 by half a cosine."""
    facts = goal_facts(maze)
    words = Paraphrases(list(facts), facts)
    rng = np.random.default_rng(seed)
    trained = [weight for weight in namer.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr, weight_decay=0.0)
    rate = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(1, (step + 1) / WARMUP) * 0.5 * (1 + np.cos(np.pi * step / steps)),
    )
    namer.train()
    for _ in track(range(steps), "reading", transient=True):
        goals = rng.integers(len(facts), size=TEXTS)
        scores = namer([words[i] for i in words.draw(goals, rng)])
        loss = F.cross_entropy(scores, torch.from_numpy(goals))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        rate.step()


@torch.no_grad()
def understood(namer: Namer, maze: str) -> dict[str, float]:
    """The share of held-out wordings whose goal is named, by kind, and over all frames."""
    namer.eval()
    shares = {}
    frames = {}
    for kind, (texts, goals, count) in held_out(maze).items():
        scores = [namer(texts[i : i + TEXTS]) for i in range(0, len(texts), TEXTS)]
        right = torch.cat(scores).argmax(1) == goals
        shares[kind] = right.double().mean().item()
        frames[kind] = count
    every = sum(shares[kind] * frames[kind] for kind in shares) / sum(frames.values())
    return {"held_out": every} | shares


def measured(model: str, options: Json, maze: str, *, steps: int, lr: float, seed: int) -> Json:
    """The row of one layout.

    Args:
        model: `smollm2`, or a folder or GGUF file.
        options: of the backbone.
        maze, steps, seed: see `teach`.
        lr: for a model of width 576.
    """
    torch.manual_seed(seed)
    began = time.process_time()
    source = {"folder": model, "dtype": "bfloat16"}
    node = (
        choice("backbone", "smollm2")
        if model == "smollm2"
        else choice("backbone", "pretrained") | source
    )
    backbone = build(node | options, seed)
    lr *= WIDTH / backbone.width
    namer = Namer(backbone, len(goal_facts(maze)))
    teach(namer, maze, steps=steps, lr=lr, seed=seed)
    shares = {kind: round(share, 4) for kind, share in understood(namer, maze).items()}
    return {
        "maze": maze,
        "model": Path(model).name,
        "parameters": sum(weight.numel() for weight in backbone.core.parameters()),
        "options": options,
        "steps": steps,
        "lr": lr,
        "precision": resolve_precision("cpu", "auto"),
        "seed": seed,
        "understood": shares,
        "cpu_seconds": round(time.process_time() - began),
        "commit": directory.versions()["commit"],
    }


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--maze", default="umaze")
    parser.add_argument("--models", nargs="+", default=["smollm2"])
    parser.add_argument("--text-layers", type=float, nargs="+", default=[0.5])
    parser.add_argument("--summary", type=int, nargs="+", default=[0, 4])
    parser.add_argument("--weights", nargs="+", default=["pretrained"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--rows", type=Path, default=ROWS)
    given = parser.parse_args(arguments)
    layouts = product(given.models, given.text_layers, given.summary, given.weights, given.seeds)
    for model, text_layers, summary, weights, seed in layouts:
        options = {
            "text_layers": text_layers,
            "layers": round(text_layers + ABOVE, 2),
            "text_summary": summary,
            "weights": weights,
            "lora_rank": 32,
            "lora_alpha": 64,
        }
        row = measured(model, options, given.maze, steps=given.steps, lr=given.lr, seed=seed)
        with given.rows.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        shares = "  ".join(f"{kind} {share:.2f}" for kind, share in row["understood"].items())
        print(
            f"{model} text_layers={text_layers} summary={summary} {weights} seed {seed}: {shares}"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
