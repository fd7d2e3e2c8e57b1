"""A run before its first step: its model, the units and the value fitted to its data, the weights
that it starts from.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from decisionllm import hardware
from decisionllm.backbones.build import fingerprint
from decisionllm.config import TrainConfig
from decisionllm.datasets import mixture
from decisionllm.datasets.action_range import recorded_range
from decisionllm.datasets.batches import Data, some_texts
from decisionllm.datasets.store import Store, columns_of, has_texts, next_rows
from decisionllm.models.dynamics import Transitions
from decisionllm.models.generalist import Model, members
from decisionllm.models.heads import check_decode
from decisionllm.models.normalizer import Normalizer
from decisionllm.models.sequence import SequenceModel
from decisionllm.protocols import Planner
from decisionllm.registry import is_none
from decisionllm.runs import checkpoint, directory
from decisionllm.runs.model import make_model
from decisionllm.schema import Json

NUMBERS = 1 << 24  # of observations that the normaliser reads at a time


def new_model(config: TrainConfig, data: Mapping[str, Data]) -> Model:
    """The model of a new run, whose units, value and text reader are fitted to the training data;
    with init_from it begins with the weights of that run.
    """
    model = unfitted_model(config, data)
    for name, member in members(model).items():
        check_decode(config.act.decode, member.head)
        check_positions(member, data[name])
    started: set[str] = set()  # embodiments that begin with weights of another run
    if config.init_from:
        started = checkpoint.start_from(config.init_from, model, config)
    for name, member in members(model).items():
        if name in started:
            widen(member.normalizer, data[name])
            continue
        fit_units(member.normalizer, data[name])
        if member.planner is not None:
            member.normalizer.fit_changes(changes(data[name]))
            fit_value(member.planner, member.normalizer, data[name], config)
    if model.backbone.features is not None:
        texts: list[str] = []
        for each in data.values():
            texts += some_texts(each)
        model.backbone.features.fit(*model.backbone.encode(texts))
    return model


def check_positions(model: SequenceModel, data: Data) -> None:
    """Raise a ValueError if the backbone can't read a window after the longest text, which may be
    drawn late.
    """
    if model.team is not None:  # how much a team reads depends on who is there
        return
    tokens = data.window * model.tokenizer.tokens - 1
    room = model.backbone.positions - tokens
    # a text has at most a token for each byte, and one before it
    long = [task for task in data.store.tasks if len(task.encode()) + 1 > room]
    ids, _ = model.backbone.encode(long)
    model.backbone.check_positions(model.backbone.text_places(ids.shape[1]), tokens)


def check_text_readers(config: TrainConfig, stores: Mapping[str, Store]) -> None:
    """Raise a ValueError if a part of the model would be trained on texts, and there is none."""
    readers = []
    if not is_none(config.text_encoder):
        readers.append("text_encoder")
    if config.backbone.get("text_summary"):
        readers.append("backbone.text_summary")
    if readers and not has_texts(stores.values()):
        wanted = "episodes with a task text for it to read"
        remedy = f"give text=..., see docs/text.md, or leave {readers[0]} out"
        raise ValueError(f"{readers[0]}: expected {wanted}, got none; {remedy}")


def unfitted_model(config: TrainConfig, data: Mapping[str, Data]) -> Model:
    """The model of a run as it is before anything is fitted or read from a checkpoint."""
    specs = {name: each.store.spec for name, each in data.items()}
    model = make_model(config, specs.get("", specs))
    model.backbone.checkpoint_gradients(config.optim.gradient_checkpointing)
    return model


def create_folder(
    config: TrainConfig, stores: dict[str, Store], data: Mapping[str, Data], model: Model
) -> None:
    """Write the folder of a new run, but for its weights."""
    known = targets(config, data) | {"frozen": fingerprint(model.backbone)}
    directory.create(Path(config.run), asdict(config), stores, **known)


def fit_units(normalizer: Normalizer, data: Data) -> None:
    """Fit units to the observations and returns of the training steps, and to the actions of all
    steps.
    """
    observations = data.store.observations
    togo = data.steps.returns_to_go
    normalizer.fit((observations[rows], togo[rows]) for rows in training_rows(data))
    normalizer.fit_actions(data.store.spec, recorded_range(columns_of(data.store)))


def widen(normalizer: Normalizer, data: Data) -> None:
    """Widen the range of returns to that of the training steps; the units stay those of the
    weights.
    """
    for rows in training_rows(data):
        normalizer.widen(data.steps.returns_to_go[rows])


def changes(data: Data) -> Iterator[np.ndarray]:
    """The changes of the observation from one training step to the next, blocks (m, S)."""
    observations = data.store.observations
    for rows in training_rows(data):
        after, is_last = next_rows(rows, data.steps.end)
        change = observations[after] - observations[rows]
        yield change[~is_last]


def training_rows(data: Data) -> Iterator[np.ndarray]:
    """The rows of the training steps, in blocks (m,)."""
    return data.steps.blocks(data.episodes, NUMBERS // data.store.spec.observation_dim)


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
    found: Json = {}
    if "" in data:
        found["targets"] = return_quantiles(config, data[""], "")
    stores = {name: each.store for name, each in data.items()}
    parts = mixture.evaluation_parts(config.dataset, stores)
    for label, part in parts.items():
        part["targets"] = return_quantiles(config, data[part["embodiment"]], label)
    if parts:
        found["parts"] = parts
    return found


def return_quantiles(config: TrainConfig, data: Data, label: str) -> dict[str, float]:
    """Quantiles of the returns that were trained on of a part of the data, raw reward units:
    {"0.9": ...}. With model.return_horizon they are those of all its steps.

    label: of the part; "": all.
    """
    steps = data.steps
    episodes = np.intersect1d(data.store.parts.get(label, data.episodes), data.episodes)
    returns = data.store.returns[episodes]
    if config.model.return_horizon:
        returns = np.concatenate([steps.returns_to_go[rows] for rows in steps.blocks(episodes)])
    quantiles = sorted({0.5, 0.9, 0.99, 1.0, float(config.act.target_quantile)})
    return {str(q): float(np.quantile(returns, q)) for q in quantiles}
