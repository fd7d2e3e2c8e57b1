"""Evaluation in Maze2D: 64 mazes in lock-step, against one maze after the other, 300 steps each.

The peer plays as decision-transformer code usually does: one environment, and at every step the
model in Hugging Face transformers reads the last 20 steps. Ours has the same weights. `exact` reads
the same windows, so that the returns must be equal; `cached` lets half a window go at once and
keeps keys and values in between.
"""

import numpy as np
import torch

from benchmarks import measure
from benchmarks.dt_step import pair
from decisionllm.eval.rollout import rollout
from decisionllm.policy.policy import Policy
from decisionllm.worlds.maze2d.env import Maze2D

TARGET = 100.0


class Play:
    def __init__(self, *, mazes=64, steps=300, window=20, **size):
        model, self.peer_model = pair(**size)
        with torch.no_grad():
            model.head.out.weight.mul_(20)  # random weights that move the ball all the same
            self.peer_model.predict_action[0].weight.mul_(20)
        self.model = model.eval()
        self.peer_model = self.peer_model.eval()
        self.window = window
        self.env = Maze2D(mazes, maze="umaze", dense=True)
        self.env.horizon = self.steps = steps
        self.env.reset(0)
        self.starts = self.env.states

    def ours(self, stride):
        policy = Policy(self.model, self.window, stride, TARGET)
        episodes = rollout(lambda tasks: policy.begin(tasks, self.steps), self.env, seed=0)
        return np.array([e.rewards.sum(dtype=np.float64) for e in episodes])

    @torch.inference_mode()
    def peer(self, mazes):
        """The returns of these mazes, one after the other."""
        returns = []
        for i in mazes:
            env = Maze2D(1, maze="umaze", dense=True)
            env.reset(0)
            env.states = self.starts[[i]]
            states = torch.zeros(1, self.steps, 4)
            actions = torch.zeros(1, self.steps, 2)
            togo = torch.full((1, self.steps), TARGET)
            timesteps = torch.arange(self.steps)[None]
            observed, total = env.states, 0.0
            for t in range(self.steps):
                states[0, t] = torch.from_numpy(observed[0].astype(np.float32))
                togo[0, t] = TARGET - total
                seen = slice(max(0, t + 1 - self.window), t + 1)
                out = self.peer_model(
                    states=states[:, seen],
                    actions=actions[:, seen],
                    returns_to_go=togo[:, seen, None],
                    timesteps=timesteps[:, seen],
                )
                actions[0, t] = out.action_preds[0, -1]
                observed, gain, _, _ = env.step(actions[:, t].numpy())
                total += float(gain[0])
            returns.append(total)
        return np.array(returns)


def gates(*, mazes=8, compared=2, **size):
    """Windows read alike bring the same returns, one maze at a time or all at once."""
    play = Play(mazes=mazes, **size)
    wrong = np.abs(play.ours(stride=1)[:compared] / play.peer(range(compared)) - 1).max()
    return measure.gate("returns", wrong, 1e-4)


def cases(*, mazes=64, steps=300, window=20, **size):
    play = Play(mazes=mazes, steps=steps, window=window, **size)
    for name, stride, target in (("exact", 1, 1.8), ("cached", window // 2, 10)):
        alone = min(mazes, 4)  # enough of them to tell what one costs
        peer = lambda n=alone: play.peer(range(n))  # noqa: E731
        yield measure.Case(
            name,
            lambda s=stride: play.ours(s),
            peer,
            mazes * steps,
            alone * steps,
            "us/env step",
            target=target,
        )


if __name__ == "__main__":
    measure.main("benchmarks.rollout64")
