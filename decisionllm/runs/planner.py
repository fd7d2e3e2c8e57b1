"""A planner fitted to the training steps of a run, through the interface `protocols.Planner`."""

import numpy as np
import torch

from decisionllm import hardware
from decisionllm.config import TrainConfig
from decisionllm.datasets.batches import Data
from decisionllm.datasets.store import next_rows
from decisionllm.models.normalizer import Normalizer
from decisionllm.protocols import Planner, Transitions
from decisionllm.runs.units import observation_changes


def fit_planner(planner: Planner, units: Normalizer, data: Data, config: TrainConfig) -> None:
    """Fit a planner to the training steps whose action is known, in the model's units."""
    units.fit_changes(observation_changes(data))
    uses_bf16 = hardware.resolve_precision("cpu", config.optim.precision) == "bf16"
    transitions = training_transitions(planner, units, data)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False, enabled=uses_bf16):
        planner.fit(transitions, units, seed=config.seed)


def training_transitions(planner: Planner, units: Normalizer, data: Data) -> Transitions:
    """Return the training steps whose action is known.

    Raises:
        ValueError: a task has several texts, or the planner cannot read them.
    """
    store = data.store
    tasks, text_by_episode = np.unique(store.task[data.episodes], return_inverse=True)
    if "wordings" in store.info:
        raise ValueError(
            "planner: expected one wording of each task, got many; text=paraphrased is for a clone "
            "of what the planner imagines"
        )
    codes = planner.text_codes([store.tasks[i] for i in tasks])

    lengths = store.lengths[data.episodes]
    rows = store.list_rows(data.episodes)
    terminated = np.repeat(store.terminated[data.episodes], lengths)
    text = np.repeat(text_by_episode, lengths)
    if data.steps.action_weight is not None:
        has_action = data.steps.action_weight[rows] > 0
        rows = rows[has_action]
        terminated = terminated[has_action]
        text = text[has_action]

    _, is_last = next_rows(rows, store.offsets[1:])
    # a row whose next one is missing or of another episode says nothing of a change
    has_next = np.diff(rows, append=0) == 1
    pairs = np.flatnonzero(~is_last & has_next)
    ended = (is_last & terminated).astype(np.float32)
    return Transitions(
        observations=units.observations(torch.from_numpy(store.observations[rows])),
        actions=units.actions(torch.from_numpy(data.steps.actions[rows])),
        rewards=torch.from_numpy(store.rewards[rows]),
        ended=torch.from_numpy(ended),
        pairs=torch.from_numpy(pairs),
        text=torch.from_numpy(text),
        codes=codes,
    )
