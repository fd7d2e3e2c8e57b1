"""Decisions of 48 agents at once by a small Qwen2 with a task text, for a day of 48 steps: a
session, against reading all again.

The peer encodes the text and the whole past at every step, all agents in one batch, by the
transformers forward. It is timed at every eighth step, since its cost grows evenly with the past;
ours at all 48.
"""

import numpy as np
import torch

from benchmarks import measure
from benchmarks.dt_step import make
from benchmarks.llm_step_tiny import TASK, repeated_text
from decisionllm.datasets.windows import collate
from decisionllm.hardware import resolve_precision
from decisionllm.policy.policy import Policy
from decisionllm.schema import Window
from decisionllm.tokenizers import text


class Day:
    """Random observations and rewards of the agents, and both ways to decide on them."""

    def __init__(self, *, agents=48, steps=48, dtype=torch.float32, backbone="tiny", **size):
        self.model = make(backbone, **size).eval()
        self.model.backbone.model.to(dtype)
        self.policy = Policy(self.model, steps, 1, 10.0)
        self.agents = agents
        self.steps = steps
        rng = np.random.default_rng(0)
        self.observations = rng.normal(size=(agents, steps, 4)).astype(np.float32)
        self.rewards = rng.normal(size=(agents, steps)).astype(np.float32)
        self.texts = text.encode(self.model.backbone.tokenizer, [TASK])
        self.actions = self.ours()

    def ours(self):
        """The actions of the whole day, (agents, steps, A)."""
        session = self.policy.begin([TASK] * self.agents, self.steps)
        loss_mask = [
            session.act(self.observations[:, t], None if t == 0 else self.rewards[:, t - 1])
            for t in range(self.steps)
        ]
        return np.stack(loss_mask, 1).astype(np.float32)

    @torch.inference_mode()
    def peer(self, t):
        """The actions at step t, after those of the session: (agents, A)."""
        n = t + 1
        zero = np.zeros((self.agents, 1, self.actions.shape[-1]), np.float32)
        received = np.concatenate(
            [zero[..., 0], np.cumsum(self.rewards[:, :t], 1, dtype=np.float64)], 1
        )
        window = Window(
            self.observations[:, :n],
            np.concatenate([self.actions[:, :t], zero], 1),
            (10.0 - received).astype(np.float32),
            np.broadcast_to(np.arange(n), (self.agents, n)).copy(),
            np.ones((self.agents, n), bool),
            np.arange(self.agents),
        )
        batch = collate(window, self.texts, np.zeros(self.agents, int))
        model = self.model
        # the last observation, before the action that is not yet chosen
        hidden = repeated_text(model, batch)[:, -2].float()
        return model.choose(hidden, None, decode="mode").numpy()


def gates(**size):
    """The same actions at every fourth step, in float32."""
    day = Day(**size)
    wrong = max(
        float(np.abs(day.peer(t) - day.actions[:, t]).max()) for t in range(3, day.steps, 4)
    )
    return measure.gate("actions", wrong, 1e-5)


def cases(**size):
    half = resolve_precision("cpu", "auto") == "bf16"
    for dtype in (torch.float32, torch.bfloat16)[: 1 + half]:
        day = Day(dtype=dtype, **size)
        again = list(range(3, day.steps, 8))
        name = str(dtype).removeprefix("torch.") + ", both"
        yield measure.Case(
            name,
            day.ours,
            lambda d=day, a=again: [d.peer(t) for t in a],
            day.steps,
            len(again),
            "ms/step",
            target=15,
        )


if __name__ == "__main__":
    measure.main("benchmarks.decide_llm")
