"""AWAC, CQL, IQL, ReBRAC and TD3+BC of d3rlpy: their transitions and scales from a store, and the
trained actor as a policy.

d3rlpy's MDPDataset, fit and save are not used: they know neither final observations of truncated
episodes nor our seeded batches, and a saved algorithm needs the library to act.
"""

import io
from collections.abc import Sequence
from contextlib import redirect_stderr
from typing import Any, NamedTuple

import numpy as np
import torch

from decisionllm.datasets import running_statistics
from decisionllm.datasets.action_range import action_units
from decisionllm.datasets.running_statistics import RunningStatistics
from decisionllm.datasets.store import Store, next_rows
from decisionllm.files import explain_errors
from decisionllm.protocols import Player
from decisionllm.registry import Node
from decisionllm.schema import Json, Spec, Targets

ALGORITHMS = {  # {our name: d3rlpy's}
    "awac": "AWAC",
    "cql": "CQL",
    "iql": "IQL",
    "rebrac": "ReBRAC",
    "td3bc": "TD3PlusBC",
}
READ_NEXT_ACTION = ("rebrac",)


class Transitions(NamedTuple):
    """M steps of a log, each with what follows it, float32."""

    observations: np.ndarray  # (M, S)
    actions: np.ndarray  # (M, A)
    rewards: np.ndarray  # (M, 1)
    next_observations: np.ndarray  # (M, S)
    next_actions: np.ndarray  # (M, A); of a last step its own
    terminal: np.ndarray  # (M, 1) 0 or 1


def import_d3rlpy() -> Any:
    """Import d3rlpy, without the deprecation message of gym, which it imports."""
    message = "a baseline is trained by d3rlpy: pip install -e '.[baselines]'"
    with explain_errors(message, ImportError, raised=ImportError), redirect_stderr(io.StringIO()):
        import d3rlpy
    return d3rlpy


def build_transitions(
    store: Store,
    episodes: np.ndarray,
    *,
    ends: bool = False,
    next_actions: bool = False,
) -> Transitions:
    """Return the transitions of these episodes of a store.

    Steps whose action or next observation is unknown are left out. A terminated episode's last step
    is terminal. A truncated one's leads to the final observation; without one the step is left out.

    Args:
        store: of the log.
        episodes: their numbers.
        ends: treat truncation as terminal, as for days of fixed length.
        next_actions: leave out steps whose next action is unknown too, which are the last ones of
            truncated episodes.

    Raises:
        ValueError: discrete actions, or no transition.
    """
    name = store.info["name"]
    C = store.spec.num_actions
    if C:
        raise ValueError(f"{name}: a baseline needs continuous actions, these are one of {C}")
    rows = store.list_rows(episodes)
    after, is_last = next_rows(rows, store.offsets[1:])
    terminal = is_last & (ends | store.terminated[store.find_episodes(rows)])
    is_complete = ~is_last if next_actions else store.has_next_observation[rows]
    is_complete |= terminal
    if store.action_weight is not None:
        is_complete &= store.action_weight[rows] > 0
        if next_actions:
            is_complete &= store.action_weight[after] > 0
    rows = rows[is_complete]
    if not len(rows):
        raise ValueError(
            f"{name}: expected steps with a next observation, got {len(episodes)} truncated "
            "episodes of one step"
        )
    return Transitions(
        observations=store.observations[rows],
        actions=store.actions[rows],
        rewards=store.rewards[rows, None],
        next_observations=store.next_observations(rows),
        next_actions=store.actions[after[is_complete]],
        terminal=terminal[is_complete, None].astype(np.float32),
    )


def fit_scales(
    spec: Spec,
    observations: np.ndarray,
    actions: np.ndarray,
    *,
    action_clip_quantile: float = 0.0,
) -> dict[str, np.ndarray]:
    """Return `mean` and `deviation` of the observations (S,), `low` and `high` of the actions (A,),
    float32.

    Args:
        spec: has the bounds of the actions.
        observations: (M, S).
        actions: (M, A).
        action_clip_quantile: share of the actions beyond each bound; 0: the bounds of the spec, or
            the range of the actions if they are far wider.
    """
    if not 0 <= action_clip_quantile < 0.5:
        raise ValueError(
            "action_clip_quantile: expected a share from 0 to less than 0.5, got "
            f"{action_clip_quantile}"
        )
    mean = np.mean(observations, 0, dtype=np.float64)
    deviation = running_statistics.standard_scale(mean, np.std(observations, 0, dtype=np.float64))
    action_moments = RunningStatistics()
    action_moments.add(actions)
    low, high = action_units(spec, action_moments)
    if action_clip_quantile:
        shares = [action_clip_quantile, 1 - action_clip_quantile]
        low, high = np.quantile(actions, shares, axis=0)
    if (np.equal(low, high) & np.not_equal(spec.low, spec.high)).any():
        raise ValueError(
            f"expected actions that differ, at action_clip_quantile={action_clip_quantile} all are "
            f"{low}; take less"
        )
    scale = {"mean": mean, "deviation": deviation, "low": low, "high": high}
    return {name: np.array(x, np.float32) for name, x in scale.items()}


def actor_weights(actor: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the weights of the mean of d3rlpy's actor: {"0.weight": ..., "0.bias": ...,
    "1.weight": ...}.
    """
    linear = []
    for name, module in actor.named_modules():
        if isinstance(module, torch.nn.Linear) and not name.endswith("logstd"):
            linear.append(module)
    weights = {}
    for i, module in enumerate(linear):
        for name, x in module.named_parameters():
            weights[f"{i}.{name}"] = x.detach().cpu()
    return weights


@torch.inference_mode()
def actor_mean(weights: dict[str, torch.Tensor], observations: np.ndarray) -> np.ndarray:
    """Return the actor's mean actions (N, A) at observations (N, S), raw units.

    weights: of `actor_weights` and `fit_scales`.
    """
    x = torch.as_tensor(observations, dtype=torch.float32, device=weights["mean"].device)
    hidden = (x - weights["mean"]) / weights["deviation"]
    layers = sum(name.endswith("weight") for name in weights)
    for i in range(layers):
        hidden = torch.nn.functional.linear(hidden, weights[f"{i}.weight"], weights[f"{i}.bias"])
        hidden = hidden.relu() if i < layers - 1 else hidden.tanh()
    low, high = weights["low"], weights["high"]
    return (low + (high - low) * (hidden + 1) / 2).cpu().numpy()


class Baseline(Player):
    """A trained baseline as a policy. It has no memory and conditions on no return; d3rlpy is not
    needed. Its sessions are itself.

    Args:
        weights: of `actor_weights` and `fit_scales`, as the command `baseline` saves them.
        device: that computes.
    """

    return_conditioned = False
    target_return = None
    planning_horizon = 0
    decode = "mode"
    execution = "per_agent"
    config: Node  # of the run, as in `Policy`
    info: Json

    def __init__(self, weights: dict[str, torch.Tensor], device: str) -> None:
        self.weights = {name: x.to(device) for name, x in weights.items()}

    def reseed(self, seed: int) -> None:
        """Do nothing: it does not sample."""

    def begin(
        self,
        tasks: Sequence[str],
        horizon: int,
        target_returns: Targets = None,
        groups: np.ndarray | None = None,
    ) -> "Baseline":
        return self

    def act(
        self,
        observations: np.ndarray,
        rewards: np.ndarray | None = None,
        action_masks: np.ndarray | None = None,
    ) -> np.ndarray:
        return actor_mean(self.weights, observations)
