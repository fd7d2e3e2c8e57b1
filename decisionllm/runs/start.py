"""A run before its first step: its model, the units and the value fitted to its data, the weights
that it starts from.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from decisionllm.backbones.build import fingerprint
from decisionllm.config import TrainConfig
from decisionllm.datasets import mixture
from decisionllm.datasets.batches import Data, some_texts
from decisionllm.datasets.store import Store, next_rows
from decisionllm.models.dynamics import Transitions
from decisionllm.models.generalist import Model, members
from decisionllm.models.normalizer import Normalizer
from decisionllm.models.sequence import SequenceModel
from decisionllm.protocols import Planner
from decisionllm.runs import checkpoint, directory, hardware
from decisionllm.runs.model import make_model
from decisionllm.schema import Json

NUMBERS = 1 << 24  # of observations that the normaliser reads at a time


def new_model(config: TrainConfig, data: Mapping[str, Data], *, begun: bool) -> Model:
    """Build the model of a run. Of a new one, fit its units, value and text reader to the training
    data; one that was begun has them in its checkpoint.

    A new run with init_from begins with the weights of that run.
    """
    specs = {name: each.store.spec for name, each in data.items()}
    model = make_model(config, specs.get("", specs))
    model.backbone.checkpoint_gradients(config.optim.gradient_checkpointing)
    if begun:
        return model
    started: set[str] = set()  # embodiments that begin with weights of another run
    if config.init_from:
        started = checkpoint.start_from(config.init_from, model, config)
    for name, member in members(model).items():
        planner = member.planner
        plans = planner is not None
        fit_normalizer(member, data[name], changes=plans, started=name in started)
        if planner is not None and name not in started:
            fit_value(planner, member.normalizer, data[name], config)
    if model.backbone.features is not None:
        texts: list[str] = []
        for each in data.values():
            texts += some_texts(each)
        model.backbone.features.fit(*model.backbone.encode(texts))
    return model


def restore_or_describe(
    config: TrainConfig,
    stores: dict[str, Store],
    data: Mapping[str, Data],
    model: Model,
    *,
    begun: bool,
    main: bool,
) -> None:
    """Give the model the weights of a run that was begun; describe a new run."""
    run = Path(config.run)
    if begun:
        checkpoint.restore(run, model, directory.same_run(run, config, stores))
        return
    if main:
        directory.describe(
            run, asdict(config), stores, **targets(config, data), frozen=fingerprint(model.backbone)
        )


def fit_normalizer(
    model: SequenceModel, data: Data, *, changes: bool, started: bool = False
) -> None:
    """Fit the model's units to the training steps; a model started from a run keeps the units of
    its weights.

    changes: also those of the change of an observation in a step.
    """
    store = data.store
    steps = data.steps
    normalizer = model.normalizer

    def blocks() -> Iterator[np.ndarray]:
        return steps.blocks(data.episodes, NUMBERS // store.spec.observation_dim)

    def differences() -> Iterator[np.ndarray]:
        for rows in blocks():
            after, is_last = next_rows(rows, steps.end)
            change = store.observations[after] - store.observations[rows]
            yield change[~is_last]

    if started:
        for rows in blocks():
            normalizer.widen(steps.returns_to_go[rows])
        return
    normalizer.fit((store.observations[rows], steps.returns_to_go[rows]) for rows in blocks())
    if changes:
        normalizer.fit_changes(differences())


def fit_value(planner: Planner, units: Normalizer, data: Data, config: TrainConfig) -> None:
    """Fit the value of a model to its training steps, in the model's units."""
    bf16 = hardware.precision("cpu", config.optim.precision) == "bf16"
    shown = transitions(planner, units, data)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False, enabled=bf16):
        planner.fit(shown, units, seed=config.seed)


def transitions(planner: Planner, units: Normalizer, data: Data) -> Transitions:
    """The training steps whose action is known, as a value is fitted to them.

    Raises:
        ValueError: more task texts than the value tells apart.
    """
    store = data.store
    task, text_of_episode = np.unique(store.task[data.episodes], return_inverse=True)
    if "wordings" in store.info:
        remedy = "text=paraphrased is for a clone of what the planner imagines"
        raise ValueError(f"planner: expected one wording of each task, got many; {remedy}")
    codes = planner.text_codes([store.tasks[i] for i in task])

    lengths = store.lengths[data.episodes]
    rows = store.rows_of(data.episodes)
    terminated = np.repeat(store.terminated[data.episodes], lengths)
    text = np.repeat(text_of_episode, lengths)
    if data.steps.action_weight is not None:
        known = data.steps.action_weight[rows] > 0
        rows = rows[known]
        terminated = terminated[known]
        text = text[known]

    _, last = next_rows(rows, store.offsets[1:])
    # a row whose next one is missing or of another episode says nothing of a change
    next_is_there = np.diff(rows, append=0) == 1
    pairs = np.flatnonzero(~last & next_is_there)
    ended = (last & terminated).astype(np.float32)
    return Transitions(
        units.observations(torch.from_numpy(store.observations[rows])),
        units.actions(torch.from_numpy(data.steps.actions[rows])),
        torch.from_numpy(store.rewards[rows]),
        torch.from_numpy(ended),
        torch.from_numpy(pairs),
        torch.from_numpy(text),
        codes,
    )


def targets(config: TrainConfig, data: Mapping[str, Data]) -> Json:
    """Quantiles of the returns that were trained on, raw reward units: {"targets": {"0.9": ...}},
    and the parts with theirs.
    """
    quantiles = sorted({0.5, 0.9, 0.99, 1.0, float(config.act.target_quantile)})

    def of(d: Data, label: str) -> dict[str, float]:
        steps = d.steps
        episodes = np.intersect1d(d.store.parts.get(label, d.episodes), d.episodes)
        returns = d.store.returns[episodes]
        if config.model.return_horizon:
            returns = np.concatenate([steps.returns_to_go[r] for r in steps.blocks(episodes)])
        return {str(q): float(np.quantile(returns, q)) for q in quantiles}

    found: Json = {}
    if "" in data:
        found["targets"] = of(data[""], "")
    stores = {name: each.store for name, each in data.items()}
    parts = mixture.evaluated(config.dataset, stores)
    for label, part in parts.items():
        part["targets"] = of(data[part["embodiment"]], label)
    if parts:
        found["parts"] = parts
    return found
