"""A log as it may come: actions left out, observations, actions or rewards corrupted, by the options `data.actions_kept` and `data.corrupt*`.

Random: an observation or an action moves by up to `corrupt_scale` standard deviations of the log in each number, a discrete action is any
that is allowed, a reward is any within 30 deviations. Adversarial: each number of an observation or an action moves by `corrupt_scale`
deviations to where a linear model of the return-to-go predicts less, a discrete action is the allowed one of the least prediction, a reward
changes its sign and is multiplied by `corrupt_scale`. A corrupted observation is also what follows the step before: of a log of whole
episodes, a corruption of observations is one of dynamics too. Source: the protocol of RIQL (Yang et al., ICLR 2024, arXiv 2310.12955),
whose adversary is a trained critic.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from decisionllm.config import Node, one_of
from decisionllm.datasets import moments
from decisionllm.datasets import store as stores
from decisionllm.datasets.store import Store
from decisionllm.datasets.windows import BLOCK, of_store
from decisionllm.protocols import Source
from decisionllm.schema import Episode
from decisionllm.tokenizers.entities import blocks

CHANGED = "seed_of_changes"  # key of the info of a changed store
VERSION = 3  # of what `_changed` writes
LABELS = 1 << 40  # random numbers that choose labelled episodes; they are not those of held-out groups or of an episode
REWARD_RANGE = 30  # deviations of random rewards, for corrupt_scale=1


def prepare(dataset: Node, cache_dir: str | Path, data: Mapping[str, Any]) -> Store:
    """The store of a dataset as these options change it, kept beside the store of the dataset itself.

    Args:
        dataset: a config node.
        cache_dir: see `store.prepare`.
        data: `actions_kept`, `seed` and `corrupt*` of `config.DataOptions`; one left out changes nothing.

    Raises:
        ValueError: an option cannot be.
    """
    clean = stores.kept(dataset, cache_dir)
    kept, corrupt = data.get("actions_kept", 1.0), data.get("corrupt", "none")
    one_of("data.corrupt", corrupt, ("none", "observations", "actions", "rewards"))
    if not 0 <= kept <= 1:
        raise ValueError(f"data.actions_kept: expected a share within 0 .. 1, got {kept}")
    if kept == 1 and corrupt == "none":
        return stores.worded(clean, dataset)
    share, kind, scale = (data[f"corrupt_{name}"] for name in ("share", "kind", "scale"))
    one_of("data.corrupt_kind", kind, ("random", "adversarial"))
    if not (0 <= share <= 1 and scale > 0):
        raise ValueError(f"data.corrupt_share, data.corrupt_scale: expected within 0 .. 1 and above 0, got {share} and {scale}")
    if not round(kept * len(clean.lengths)):
        given = f"data.actions_kept={kept} of {len(clean.lengths)} episodes"
        raise ValueError(f"{given} keeps the actions of none; give a larger share")
    info = clean.info | {"actions_kept": kept, CHANGED: data["seed"]}
    if corrupt != "none":
        info["corrupt"] = f"{corrupt} of {100 * share:g} % of the steps, {kind}, scale {scale:g}"
    key = hashlib.blake2b(json.dumps([VERSION, clean.fingerprint, info], sort_keys=True).encode(), digest_size=6).hexdigest()
    changed = _changed(clean, kept, corrupt, share, kind, scale, data["seed"])
    source = Source(clean.spec, changed, info, dict(clean.facts))
    return stores.worded(stores.keep(Path(cache_dir).expanduser() / "stores" / f"altered-{key}", source), dataset)


def _changed(clean: Store, kept: float, corrupt: str, share: float, kind: str, scale: float, seed: int) -> Iterator[Episode]:
    """The episodes as the options change them."""
    order = np.random.default_rng((seed, LABELS)).permutation(len(clean.lengths))
    labelled = np.isin(np.arange(len(order)), order[: round(kept * len(order))])
    change = Corruption(clean, corrupt, kind, scale) if corrupt != "none" else None
    for e in range(len(order)):
        episode, rng = clean.episode(e), np.random.default_rng((seed, e))
        if change:
            hit = rng.random(len(episode.rewards)) < share
            column: dict[str, Any] = {corrupt: change(episode, rng, hit)}
            episode = replace(episode, **column)
        yield episode if labelled[e] else replace(episode, action_weight=np.zeros(len(episode.rewards), np.float32))


class Corruption:
    """Corrupts a column of some steps of an episode, by the scales of a log, see above."""

    def __init__(self, clean: Store, corrupt: str, kind: str, scale: float) -> None:
        self.spec, self.corrupt, self.adversarial, self.scale = clean.spec, corrupt, kind == "adversarial", scale
        self.deviation, self.slope = self._fit(clean)
        for _, first, width, count in blocks(self.spec.entity_schema)[1:]:  # whether an entity is there stays
            self.deviation[first : first + width * count : width] = 0
        self.reward_deviation = float(np.std(clean.rewards, dtype=np.float64))

    def _numbers(self, observations: np.ndarray, actions: np.ndarray) -> np.ndarray:
        """(n, S + A): an observation and an action, a discrete one as a one-hot vector."""
        C = self.spec.num_actions
        taken = np.eye(C)[actions[:, 0].astype(int)] if C else actions
        return np.concatenate([observations, taken], 1, dtype=np.float64)

    def _fit(self, clean: Store) -> tuple[np.ndarray, np.ndarray]:
        """Deviations of these numbers, and the slopes of the return-to-go for a deviation of each, by least squares: twice (S + A,)."""
        togo, size = of_store(clean).returns_to_go, max(BLOCK // (clean.spec.observation_dim + clean.spec.action_dim), 1)
        parts = (slice(start, start + size) for start in range(0, len(togo), size))
        numbers = ((self._numbers(clean.observations[rows], clean.actions[rows]), togo[rows, None]) for rows in parts)
        mean, covariance = moments.covariance(np.concatenate(each, 1) for each in numbers)
        deviation = np.sqrt(np.diag(covariance).clip(min=0))
        unit = np.where(deviation > 1e-6 * (1 + np.abs(mean)), deviation, np.inf)  # a constant number has no slope
        correlation = covariance / np.outer(unit, unit)
        return deviation[:-1], np.linalg.lstsq(correlation[:-1, :-1], correlation[:-1, -1], rcond=1e-6)[0]

    def __call__(self, episode: Episode, rng: np.random.Generator, hit: np.ndarray) -> np.ndarray:
        """The column of an episode with the steps `hit` (n,) bool corrupted."""
        S, n, spec = self.spec.observation_dim, len(hit), self.spec
        column: np.ndarray = vars(episode)[self.corrupt]
        if self.corrupt == "rewards":
            span = REWARD_RANGE * self.scale * self.reward_deviation
            new = -self.scale * column if self.adversarial else rng.uniform(-span, span, n)
        elif self.corrupt == "actions" and spec.num_actions:
            preference = np.tile(-self.slope[S:] / self.deviation[S:].clip(min=1e-9), (n, 1))
            preference = preference if self.adversarial else rng.random(preference.shape)
            allowed = True if episode.action_masks is None else episode.action_masks
            new = np.where(allowed, preference, -np.inf).argmax(1)[:, None]
        else:
            part = slice(S) if self.corrupt == "observations" else slice(S, None)
            by = -np.sign(self.slope[part]) if self.adversarial else rng.uniform(-1, 1, column.shape)
            new = column + self.scale * by * self.deviation[part]
            new = new if self.corrupt == "observations" else np.clip(new, spec.low, spec.high)
        return np.where(hit.reshape(-1, *[1] * (column.ndim - 1)), new, column).astype(np.float32)
