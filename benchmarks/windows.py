"""Drawing training windows: one gather a field, against a Python function a window.

The peer draws as decision-transformer code usually does (CORL's is the model): pick an episode with
a chance that grows with its length, pick a start in it, slice, pad on the right, and stack the
samples of the batch. Returns-to-go are computed once.
"""

import random

import numpy as np
import torch
from scipy import stats

from benchmarks import measure
from decisionllm.datasets.sampling import Sampler
from decisionllm.datasets.windows import Steps, collate, returns_to_go

T = 20
FIELDS = ("observations", "actions", "returns_to_go", "timesteps", "mask")


def log(total, *, seed=0, lengths=(150, 450), S=4, A=2):
    """About `total` steps of a made-up log, in episodes of these lengths; its actions follow from
    what is observed.
    """
    rng = np.random.default_rng(seed)
    offsets = np.concatenate(
        [
            [0],
            np.cumsum(
                rng.integers(*lengths, size=max(2 * total // sum(lengths), 2), endpoint=True)
            ),
        ]
    )
    n, rewards = offsets[-1], rng.normal(size=offsets[-1])
    togo = returns_to_go(rewards, np.add.reduceat(rewards, offsets[:-1]), offsets) / 10
    observations = rng.normal(size=(n, S)).astype(np.float32)
    actions = np.tanh(observations @ rng.normal(size=(S, A))).astype(np.float32)
    return Steps(observations, actions, togo.astype(np.float32), offsets[:-1], offsets[1:])


class Peer:
    """The same windows, one at a time."""

    def __init__(self, steps, T, seed=0):
        self.T = T
        self.random = random.Random(seed)
        self.rng = np.random.default_rng(seed)
        bounds = list(zip(steps.first, steps.end, strict=True))
        self.episodes = [
            {name: getattr(steps, name)[first:end] for name in FIELDS[:3]} for first, end in bounds
        ]
        lengths = steps.end - steps.first
        self.chance = lengths / lengths.sum()

    def draw(self):
        e = self.rng.choice(len(self.episodes), p=self.chance)
        return e, self.random.randint(0, len(self.episodes[e]["actions"]) - 1)

    def sample(self, e, start):
        episode, end = self.episodes[e], start + self.T
        parts = [episode[name][start:end] for name in FIELDS[:3]]
        real = len(parts[0])
        parts += [np.arange(start, start + real), np.ones(real, bool)]
        if real < self.T:
            parts = [
                np.pad(part, [(0, self.T - real)] + [(0, 0)] * (part.ndim - 1)) for part in parts
            ]
        return parts

    def __call__(self, B):
        samples = [self.sample(*self.draw()) for _ in range(B)]
        return [torch.from_numpy(np.stack(part)) for part in zip(*samples, strict=True)]


def gates(*, total=1_000_000, draws=200_000, bins=100):
    """Starts are uniform over all steps, by a chi-square test; the same start gives the same
    window, padding included.
    """
    steps = log(total)
    sampler = Sampler(steps, np.arange(len(steps.first)), T=T, batch_size=draws, seed=0)
    window = sampler(0)
    starts = steps.first[window.episodes] + window.timesteps[:, 0]
    counts, edges = np.histogram(starts, np.linspace(0, steps.end[-1], bins + 1).astype(int))
    expected = np.diff(edges) / steps.end[-1] * draws
    unlikely = -np.log10(stats.chisquare(counts, expected).pvalue)
    peer, few = Peer(steps, T), slice(0, 2000)
    samples = [
        peer.sample(e, start)
        for e, start in zip(window.episodes[few], window.timesteps[few, 0], strict=True)
    ]
    stacked = [np.stack(part) for part in zip(*samples, strict=True)]
    assert not stacked[4].all(), "no window is padded: draw more"
    wrong = sum(
        (getattr(window, name)[few] != part).sum()
        for name, part in zip(FIELDS, stacked, strict=True)
    )
    return measure.gate("-log10 p of the starts", unlikely, 4) | measure.gate(
        "numbers that differ", wrong, 0
    )


def cases(*, total=1_000_000):
    steps = log(total)
    peer = Peer(steps, T)
    nothing = (torch.zeros(1, 0, dtype=torch.long), torch.zeros(1, 0, dtype=torch.bool))
    for B, batches in ((64, 200), (4096, 8)):
        sampler = Sampler(steps, np.arange(len(steps.first)), T=T, batch_size=B, seed=0)

        def ours(sampler=sampler, B=B, batches=batches):
            for step in range(batches):
                collate(sampler(step), nothing, np.zeros(B, int))

        def theirs(B=B):
            for _ in range(4096 // B):
                peer(B)

        yield measure.Case(
            f"B={B}", ours, theirs, batches * B, 4096, "us/window", target=15, limit=3
        )


if __name__ == "__main__":
    measure.main("benchmarks.windows")
