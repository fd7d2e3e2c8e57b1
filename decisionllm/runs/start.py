"""A run before its first step: a model whose units and planner are fitted to its data, the weights
that it starts from, its directory.
"""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import numpy as np

from decisionllm.backbones.build import fingerprint
from decisionllm.config import TrainConfig
from decisionllm.datasets import mixture
from decisionllm.datasets.batches import Data, sample_texts
from decisionllm.datasets.store import Store, has_texts
from decisionllm.models.generalist import Model, members
from decisionllm.models.heads import check_decode
from decisionllm.models.sequence import SequenceModel
from decisionllm.registry import is_none
from decisionllm.runs import checkpoint, directory
from decisionllm.runs.model import make_model
from decisionllm.runs.planner import fit_planner
from decisionllm.runs.units import fit_units, widen_returns
from decisionllm.schema import Json


def new_model(config: TrainConfig, data: Mapping[str, Data]) -> Model:
    """Build the model of a new run, whose units, planner and text reader are fitted to the training
    data; with init_from it begins with the weights of that run.
    """
    model = unfitted_model(config, data)
    for name, member in members(model).items():
        check_decode(config.act.decode, member.head)
        check_positions(member, data[name])
    started: set[str] = set()  # embodiments that begin with weights of another run
    if config.init_from:
        started = checkpoint.copy_weights(config.init_from, model, config)
    for name, member in members(model).items():
        if name in started:
            widen_returns(member.normalizer, data[name])
            continue
        fit_units(member.normalizer, data[name])
        if member.planner is not None:
            fit_planner(member.planner, member.normalizer, data[name], config)
    if model.backbone.features is not None:
        texts: list[str] = []
        for each in data.values():
            texts += sample_texts(each)
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
        raise ValueError(
            f"{readers[0]}: expected episodes with a task text for it to read, got none; give "
            f"text=..., see docs/text.md, or leave {readers[0]} out"
        )


def unfitted_model(config: TrainConfig, data: Mapping[str, Data]) -> Model:
    """Build the model of a run, before anything is fitted or read from a checkpoint."""
    specs = {name: each.store.spec for name, each in data.items()}
    model = make_model(config, specs)
    model.backbone.checkpoint_gradients(config.optim.gradient_checkpointing)
    return model


def create_folder(
    config: TrainConfig, stores: dict[str, Store], data: Mapping[str, Data], model: Model
) -> None:
    """Write the directory of a new run, but for its weights."""
    targets = {}
    for name, each in data.items():
        targets[name] = return_quantiles(config, each, each.episodes)
    parts = mixture.evaluation_parts(config.dataset, stores)
    for label, part in parts.items():
        each = data[part["embodiment"]]
        episodes = each.store.parts.get(label, each.episodes)
        part["targets"] = return_quantiles(config, each, episodes)
        part["mean_return"] = float(each.store.returns[episodes].mean())
    keys: Json = {"parts": parts, "frozen": fingerprint(model.backbone)}
    directory.create(Path(config.run), asdict(config), stores, targets, **keys)


def return_quantiles(config: TrainConfig, data: Data, episodes: np.ndarray) -> dict[str, float]:
    """Return quantiles of the returns that were trained on, raw reward units: {"0.9": ...}.

    With model.return_horizon they are those of all steps.

    Args:
        config: the options.
        data: of an embodiment.
        episodes: (e,) those of them that are trained on count.
    """
    steps = data.steps
    episodes = np.intersect1d(episodes, data.episodes)
    returns = data.store.returns[episodes]
    if config.model.return_horizon:
        returns = np.concatenate([steps.returns_to_go[rows] for rows in steps.blocks(episodes)])
    quantiles = sorted({0.5, 0.9, 0.99, 1.0, float(config.act.target_quantile)})
    return {str(q): float(np.quantile(returns, q)) for q in quantiles}
