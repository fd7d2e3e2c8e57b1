"""The training data of a run: samplers of windows, the texts of their rows, batches."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from decisionllm.config import TrainConfig, one_agent_reads
from decisionllm.datasets import sampling
from decisionllm.datasets.sampling import Sampler, SamplerOptions, TextSampler
from decisionllm.datasets.store import Store
from decisionllm.datasets.windows import Steps, collate, of_store
from decisionllm.datasets.wordings import Wordings
from decisionllm.registry import build, is_none, required_function
from decisionllm.schema import Batch, Json, Window

if TYPE_CHECKING:
    import torch
    from torch import Tensor


Windows = Callable[[int], Window]  # step -> its windows


@dataclass(frozen=True)
class Data:
    """The windows that are trained and validated on."""

    store: Store
    shares: Sequence[float]  # how often each part of the log is drawn
    steps: Steps
    episodes: np.ndarray  # (E,) episodes that are trained on
    held_out: np.ndarray
    sampler: Windows  # that are trained on
    validators: dict[str, Windows]  # held-out ones of each part; {} without held-out episodes
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
    logged = of_store(store, return_horizon=config.model.return_horizon)
    episodes, held_out = chosen_episodes(config, store, logged)
    steps = logged
    if store.action_weight is not None and fills_actions(config):
        steps = build(config.fill_actions, store, logged, episodes, config.seed)
    else:
        check_unread(config, store, episodes)
    # the loss on held-out windows is that of recorded actions alone
    measured = replace(steps, loss_mask=logged.loss_mask, action_weight=logged.action_weight)
    check_targets(config, store, steps, episodes)
    words = wordings(store, config.text_wordings)
    sampler = make_sampler(
        config,
        store,
        steps,
        episodes,
        seed=config.seed,
        weights=sampling.part_weights(store, steps, episodes, shares),
        discount=step_discount(config, store),
    )
    varied = augmented(config, store, sampler)
    validators = held_out_windows(config, store, measured, held_out, words)
    if config.log.keep_best == "loss" and not validators:
        raise ValueError(
            f"log.keep_best: expected held-out actions, data.held_out={config.data.held_out} leaves "
            "none; give more"
        )
    return Data(
        store=store,
        shares=shares,
        steps=steps,
        episodes=episodes,
        held_out=held_out,
        sampler=reworded(varied, store, words, texts=sampler.texts, seed=config.seed),
        validators=validators,
        tasks=texts_of(sampler, store, words),
        window=config.window,
    )


def held_out_windows(
    config: TrainConfig,
    store: Store,
    steps: Steps,
    held_out: np.ndarray,
    words: Wordings | None,
) -> dict[str, Windows]:
    """The held-out windows of each part that has some, the same for every seed of training.

    words: see `reworded`.
    """
    found = {}
    for label, part in store.parts.items():
        episodes = np.intersect1d(part, held_out)
        if len(episodes):
            sampler = make_sampler(config, store, steps, episodes, seed=0)
            found[label] = reworded(sampler, store, words, texts=sampler.texts, seed=0)
    return found


def read_windows(
    config: TrainConfig, store: Store, steps: Steps, episodes: np.ndarray
) -> tuple[Windows, Sequence[str]]:
    """Windows of these episodes, as a run with this config reads them but not varied, and the texts
    of their rows.
    """
    words = wordings(store, config.text_wordings)
    sampler = make_sampler(config, store, steps, episodes, seed=config.seed)
    drawn = reworded(sampler, store, words, texts=sampler.texts, seed=config.seed)
    return drawn, texts_of(sampler, store, words)


def chosen_episodes(
    config: TrainConfig, store: Store, steps: Steps
) -> tuple[np.ndarray, np.ndarray]:
    """The episodes that are trained on and those that are held out, each (E,).

    Each has a step whose return is known. It has a recorded action too, unless the actions of
    training are filled in.
    """
    episodes, held_out = sampling.select(
        store,
        fraction=config.data.fraction,
        min_return_quantile=config.data.min_return_quantile,
        held_out=config.data.held_out,
        seed=config.data.seed,
    )
    has_steps = steps.end > steps.first
    is_measured = has_steps & some_recorded(store)
    is_trained = has_steps if fills_actions(config) else is_measured
    return episodes[is_trained[episodes]], held_out[is_measured[held_out]]


def fills_actions(config: TrainConfig) -> bool:
    """Whether the actions that a log lacks are filled in."""
    return not is_none(config.fill_actions)


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
    """(E,) bool, whether the log has some of the actions of an episode."""
    if store.action_weight is None:
        return np.ones(len(store.lengths), bool)
    return np.logical_or.reduceat(store.action_weight > 0, store.offsets[:-1])


def check_unread(config: TrainConfig, store: Store, episodes: np.ndarray) -> None:
    """Raise a ValueError if the model reads past actions which the log lacks."""
    reads_actions = (
        config.window > 1
        and config.tokenizer.get("hide_actions", 0) < 1
        and one_agent_reads(config)
    )
    if store.action_weight is None or not reads_actions:
        return
    whole = np.logical_and.reduceat(store.action_weight > 0, store.offsets[:-1])[episodes]
    if not whole.all():
        lacking = f"{(~whole).sum()} of {len(episodes)} episodes lack at some steps"
        remedy = "take fill_actions=inverse_dynamics, window=1 or tokenizer.hide_actions=1"
        raise ValueError(f"window={config.window} reads past actions, which {lacking}; {remedy}")


def check_targets(config: TrainConfig, store: Store, steps: Steps, episodes: np.ndarray) -> None:
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


def augmented(config: TrainConfig, store: Store, sampler: Windows) -> Windows:
    """The windows of a sampler, varied by `augment`, of the run or of a part."""
    chosen = by_part(store, "augment", config.augment)
    distinct = {str(node): node for node in chosen.values() if not is_none(node)}
    for node in distinct.values():
        among = np.zeros(len(store.lengths), bool)
        for label, part in store.parts.items():
            among[part] = chosen[label] == node
        sampler = build(node, sampler, store, config.seed, among)
    return sampler


def make_sampler(
    config: TrainConfig,
    store: Store,
    steps: Steps,
    episodes: np.ndarray,
    *,
    seed: int,
    weights: np.ndarray | None = None,
    discount: float | np.ndarray = 1.0,
) -> Sampler:
    """The sampler of windows of these episodes, of single agents or of teams as a run reads them.

    Arguments: see `Sampler`.
    """
    options: SamplerOptions = {
        "T": config.window,
        "batch_size": config.optim.batch_size,
        "seed": seed,
        "weights": weights,
        "discount": discount,
    }
    if not one_agent_reads(config):
        make_sampler = required_function("sampler", config.team.execution, "team.execution")
        of_teams: Sampler = make_sampler(steps, store, episodes, options)
        return of_teams
    rows_per_text = config.data.rows_per_text
    if rows_per_text == 1:
        return Sampler(steps, episodes, **options)
    return TextSampler(steps, episodes, task=store.task, rows_per_text=rows_per_text, **options)


def reworded(
    draw: Windows, store: Store, words: Wordings | None, *, texts: int, seed: int
) -> Windows:
    """The windows of a sampler, a text drawn for each row where tasks have many wordings.

    Args:
        draw: step -> its windows.
        store: the log.
        words: of its tasks; None: each has one text.
        texts: distinct ones in a batch, at most.
        seed: of the draws.
    """
    if words is None:
        return draw
    return words.sampler(draw, task=store.task, among=has_wordings(store), texts=texts, seed=seed)


def texts_of(sampler: Sampler, store: Store, words: Wordings | None) -> Sequence[str]:
    """The texts of the windows of a sampler, by their number. words: see `reworded`."""
    if words is not None:
        return words
    return store.tasks if sampler.tasks is None else sampler.tasks


def by_part(store: Store, option: str, value: object) -> Json:
    """An option of draws by part of the data: the part's own, or `value`."""
    known = store.info.get("parts", {})
    return {label: known.get(label, {}).get(option, value) for label in store.parts}


def has_wordings(store: Store) -> np.ndarray:
    """(E,) bool, whether the texts of an episode are drawn from many wordings: all, or those of the
    parts that have them.
    """
    each = np.ones(len(store.lengths), bool)
    for label, info in store.part_infos.items():
        each[store.parts[label]] = "wordings" in info
    return each


def wordings(store: Store, frames: int = 0) -> Wordings | None:
    """The texts of a store's tasks in so many frames, 0: all; None where each task has one text."""
    facts = store.info.get("wordings")
    return Wordings(store.tasks, facts, frames=frames) if facts else None


def text_numbers(store: Store, window: Window) -> np.ndarray:
    """The text of each row of a window, by its number: (B,)."""
    return store.task[window.episodes] if window.text_index is None else window.text_index


def some_texts(data: Data) -> list[str]:
    """The distinct texts of the first batches."""
    numbers = [text_numbers(data.store, data.sampler(step)) for step in range(8)]
    return [data.tasks[i] for i in np.unique(np.concatenate(numbers))]


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
