"""The training data of a run: samplers of windows, the texts of their rows, batches."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from decisionllm.config import TrainConfig
from decisionllm.datasets import sampling, team_windows, windows
from decisionllm.datasets.store import Store
from decisionllm.datasets.windows import collate
from decisionllm.datasets.wordings import Wordings
from decisionllm.registry import build
from decisionllm.schema import Batch, Json, Window

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class Data:
    """The windows that are trained and validated on."""

    store: Store
    steps: windows.Steps
    episodes: np.ndarray  # (E,) episodes that are trained on
    held_out: np.ndarray
    sampler: Callable[[int], Window]  # step -> training windows
    validators: Json  # {part: step -> held-out windows}; {} without held-out episodes
    tasks: Sequence[str]  # the texts of windows, by index
    window: int  # steps of a window


def open_data(config: TrainConfig, store: Store, shares: Sequence[float]) -> Data:
    """Open the samplers of training and held-out windows.

    Args:
        config: the options.
        store: the log.
        shares: how often each part of the log is drawn.

    Raises:
        ValueError: the options do not fit the log.
    """
    episodes, held_out = sampling.select(
        store,
        fraction=config.data.fraction,
        min_return_quantile=config.data.min_return_quantile,
        held_out=config.data.held_out,
        seed=config.data.seed,
    )
    steps = windows.of_store(store, return_horizon=config.model.return_horizon)
    has_steps = steps.end > steps.first
    episodes = episodes[has_steps[episodes]]
    held_out = held_out[has_steps[held_out]]
    measured = steps
    if store.action_weight is not None:
        recorded = some_recorded(store)
        held_out = held_out[recorded[held_out]]
        if config.fill_actions["_target_"] == "none":
            episodes = episodes[recorded[episodes]]
            check_unread(config, store, episodes)
        else:
            steps, measured = filled(config, store, steps, episodes)
    check_targets(config, store, steps, episodes)
    make = sampler_maker(config, store)
    weights = sampling.part_weights(store, steps, episodes, shares)
    discount = step_discount(config, store)
    sampler = make(steps, episodes=episodes, seed=config.seed, weights=weights, discount=discount)
    validators = {}
    for label, part in store.parts.items():
        own = np.intersect1d(part, held_out)
        if len(own):
            validators[label] = make(measured, episodes=own, seed=0)
    if config.log.keep_best == "loss" and not validators:
        raise ValueError(
            f"log.keep_best: expected held-out actions, data.held_out={config.data.held_out} leaves "
            "none; give more"
        )
    tasks = texts_of(store, sampler)
    data = Data(store, steps, episodes, held_out, sampler, validators, tasks, config.window)
    return reworded(config, augmented(config, data), sampler.texts)


def read_windows(
    config: TrainConfig, store: Store, steps: windows.Steps, episodes: np.ndarray
) -> tuple[Callable[[int], Window], Sequence[str]]:
    """number -> windows of these episodes, as a run with this config reads them but not varied, and
    the texts of their rows.
    """
    sampler = sampler_maker(config, store)(steps, episodes=episodes, seed=config.seed)
    tasks = texts_of(store, sampler)
    data = Data(store, steps, episodes, episodes, sampler, {}, tasks, config.window)
    data = reworded(config, data, sampler.texts)
    return data.sampler, data.tasks


def texts_of(store: Store, sampler: sampling.Sampler) -> Sequence[str]:
    """The texts of the rows that a sampler draws, by index."""
    return sampler.tasks if isinstance(sampler, team_windows.TeamSampler) else list(store.tasks)


def filled(
    config: TrainConfig, store: Store, steps: windows.Steps, episodes: np.ndarray
) -> tuple[windows.Steps, windows.Steps]:
    """The steps with the actions that the log lacks filled in: to train on, and to measure on,
    where the loss is that of recorded actions alone.
    """
    trained = build(config.fill_actions, store, steps, episodes, config.seed)
    measured = replace(trained, loss_mask=steps.loss_mask, action_weight=steps.action_weight)
    return trained, measured


def step_discount(config: TrainConfig, store: Store) -> float | np.ndarray:
    """The discount of early steps: one for all, which a draw need not look at episode by episode,
    or (E,) where parts of a mixture differ.
    """
    of_parts = by_part(store, "step_discount", config.data.step_discount)
    if len(set(of_parts.values())) == 1:
        return float(next(iter(of_parts.values())))
    each = np.empty(len(store.lengths))
    for label, part in store.parts.items():
        each[part] = of_parts[label]
    return each


def some_recorded(store: Store) -> np.ndarray:
    """(E,) bool, whether the log has some of the actions of an episode; it has an action_weight."""
    assert store.action_weight is not None
    return np.logical_or.reduceat(store.action_weight > 0, store.offsets[:-1])


def check_unread(config: TrainConfig, store: Store, episodes: np.ndarray) -> None:
    """Raise a ValueError if the model reads past actions which the log lacks; it has an
    action_weight.
    """
    assert store.action_weight is not None
    whole = np.logical_and.reduceat(store.action_weight > 0, store.offsets[:-1])[episodes]
    reads_actions = (
        config.window > 1
        and config.tokenizer.get("hide_actions", 0) < 1
        and config.team.execution == "per_agent"
    )
    if reads_actions and not whole.all():
        lacking = f"{(~whole).sum()} of {len(episodes)} episodes lack at some steps"
        remedy = "take fill_actions=inverse_dynamics, window=1 or tokenizer.hide_actions=1"
        raise ValueError(f"window={config.window} reads past actions, which {lacking}; {remedy}")


def check_targets(
    config: TrainConfig, store: Store, steps: windows.Steps, episodes: np.ndarray
) -> None:
    """Raise a ValueError if there is nothing to train on, in the log or in a part of it."""
    for label, part in store.parts.items():
        if np.isin(part, episodes).any():
            continue
        of_part = f" of part {label}" if label else ""
        wanted = f"recorded actions in some episode{of_part} that is trained on"
        remedy = "lower data.held_out, or take another data.seed"
        horizon = config.model.return_horizon
        if horizon:
            longest = store.lengths[part].max()
            wanted += f" and has model.return_horizon={horizon} steps (the longest has {longest})"
            remedy = "lower model.return_horizon or data.held_out, or take another data.seed"
        raise ValueError(f"{store.path}: expected {wanted}, got none; {remedy}")
    if steps.loss_mask is not None and not any(
        steps.loss_mask[rows].any() for rows in steps.blocks(episodes)
    ):
        raise ValueError(
            f"{store.path}: expected a training target in some step (loss_mask), got none"
        )


def augmented(config: TrainConfig, data: Data) -> Data:
    """The data, whose training windows are varied by `augment`, of the run or of a part."""
    store, sampler = data.store, data.sampler
    chosen = by_part(store, "augment", config.augment)
    distinct = {str(node): node for node in chosen.values() if node["_target_"] != "none"}
    for node in distinct.values():
        among = np.zeros(len(store.lengths), bool)
        for label, part in store.parts.items():
            among[part] = chosen[label] == node
        sampler = build(node, sampler, store, config.seed, among)
    return replace(data, sampler=sampler)


def reworded(config: TrainConfig, data: Data, texts: int) -> Data:
    """The data, whose texts are drawn in many wordings where the store has facts to make them of.

    Args:
        config: the options.
        data: whose rows have the text of their task.
        texts: distinct texts of a batch.
    """
    words = wordings(data.store, config.text_wordings)
    if words is None:
        return data
    draw = partial(words.sampler, task=data.store.task, worded=worded(data.store), texts=texts)
    validators = {label: draw(each, seed=0) for label, each in data.validators.items()}
    return replace(
        data, sampler=draw(data.sampler, seed=config.seed), validators=validators, tasks=words
    )


def sampler_maker(config: TrainConfig, store: Store) -> Callable[..., sampling.Sampler]:
    """Return a function of steps, episodes, seed and weights that makes the samplers of a run."""
    shape: Json = {"T": config.window, "batch_size": config.optim.batch_size}
    if config.team.execution == "per_agent":
        return partial(sampling.sampler(config.data.rows_per_text, store.task), **shape)
    alone = 0.5 if config.team.execution == "both" else 0.0
    return partial(team_windows.TeamSampler, store=store, **shape, alone=alone)


def by_part(store: Store, option: str, value: object) -> Json:
    """An option of draws by part of the data: the part's own, or `value`."""
    known = store.info.get("parts", {})
    return {label: known.get(label, {}).get(option, value) for label in store.parts}


def worded(store: Store) -> np.ndarray:
    """(E,) bool, whether the texts of an episode are drawn from many wordings: all, or those of the
    parts that have them.
    """
    each = np.ones(len(store.lengths), bool)
    for label, part in store.info.get("parts", {}).items():
        each[store.parts[label]] = "wordings" in part["dataset"]
    return each


def wordings(store: Store, frames: int = 0) -> Wordings | None:
    """The texts of a store's tasks in so many frames, 0: all; None where each task has one text."""
    facts = store.info.get("wordings")
    return Wordings(store.tasks, facts, frames=frames) if facts else None


def text_numbers(store: Store, window: Window) -> np.ndarray:
    """The text of each row of a window, by its number: (B,)."""
    return store.task[window.episodes] if window.text_index is None else window.text_index


def some_texts(data: Data, batches: int = 8) -> list[str]:
    """The distinct texts of the first batches."""
    numbers = np.unique(
        np.concatenate([text_numbers(data.store, data.sampler(step)) for step in range(batches)])
    )
    return [data.tasks[i] for i in numbers]


def to_batch(
    window: Window,
    rows: slice | np.ndarray,
    *,
    store: Store,
    tasks: Sequence[str],
    encode: Callable[[Sequence[str]], tuple["Tensor", "Tensor"]],
    device: "torch.device | str",
) -> Batch:
    """These rows of a window, with their texts, on the device. tasks: the texts by number; encode:
    texts -> ids, mask.
    """
    window = replace(
        window, **{name: part[rows] for name, part in vars(window).items() if part is not None}
    )
    used, index = np.unique(text_numbers(store, window), return_inverse=True)
    return collate(window, encode([tasks[i] for i in used]), index).to(device)
