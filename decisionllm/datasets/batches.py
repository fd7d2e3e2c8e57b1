"""The training data of a run: samplers of windows, the texts of their rows, batches."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from decisionllm.config import TrainConfig, one_agent_reads
from decisionllm.datasets import sampling
from decisionllm.datasets.paraphrases import Paraphrases
from decisionllm.datasets.sampling import Sampler, SamplerOptions, TextSampler
from decisionllm.datasets.store import Store
from decisionllm.datasets.windows import Steps, collate, load_steps
from decisionllm.registry import build, get_function, is_none
from decisionllm.schema import Batch, Json, Window

if TYPE_CHECKING:
    import torch
    from torch import Tensor


Windows = Callable[[int], Window]  # step -> its windows


@dataclass(frozen=True)
class Data:
    """The windows of training and validation."""

    store: Store
    shares: Sequence[float]  # how often each part of the log is drawn
    steps: Steps
    episodes: np.ndarray  # (E,) episodes that are trained on
    held_out: np.ndarray
    sampler: Windows  # of training
    validators: dict[str, Windows]  # held-out windows of each part; {} without held-out episodes
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
    logged = load_steps(store, return_horizon=config.model.return_horizon)
    episodes, held_out = select_episodes(config, store, logged)
    steps = logged
    if store.action_weight is not None and fills_actions(config):
        steps = build(config.fill_actions, store, logged, episodes, config.seed)
    else:
        check_missing_actions(config, store, episodes)
    # the loss on held-out windows is that of recorded actions alone
    held_out_steps = replace(steps, loss_mask=logged.loss_mask, action_weight=logged.action_weight)
    check_targets(config, store, steps, episodes)
    paraphrases = make_paraphrases(store, config.text_wordings)
    sampler = make_sampler(
        config,
        store,
        steps,
        episodes,
        seed=config.seed,
        weights=sampling.part_weights(store, steps, episodes, shares),
        discount=step_discount(config, store),
    )
    augmented = augment_windows(config, store, sampler)
    validators = make_validators(config, store, held_out_steps, held_out, paraphrases)
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
        sampler=draw_texts(augmented, store, paraphrases, texts=sampler.texts, seed=config.seed),
        validators=validators,
        tasks=window_texts(sampler, store, paraphrases),
        window=config.window,
    )


def make_validators(
    config: TrainConfig,
    store: Store,
    steps: Steps,
    held_out: np.ndarray,
    paraphrases: Paraphrases | None,
) -> dict[str, Windows]:
    """Return samplers of the held-out windows of each part that has some, the same for every seed
    of training.

    paraphrases: see `draw_texts`.
    """
    validators = {}
    for label, part in store.parts.items():
        episodes = np.intersect1d(part, held_out)
        if len(episodes):
            sampler = make_sampler(config, store, steps, episodes, seed=0)
            validators[label] = draw_texts(sampler, store, paraphrases, texts=sampler.texts, seed=0)
    return validators


def read_windows(
    config: TrainConfig, store: Store, steps: Steps, episodes: np.ndarray
) -> tuple[Windows, Sequence[str]]:
    """Return the windows of these episodes, as a run with this config reads them but not augmented,
    and their texts by index.
    """
    paraphrases = make_paraphrases(store, config.text_wordings)
    sampler = make_sampler(config, store, steps, episodes, seed=config.seed)
    windows = draw_texts(sampler, store, paraphrases, texts=sampler.texts, seed=config.seed)
    return windows, window_texts(sampler, store, paraphrases)


def select_episodes(
    config: TrainConfig, store: Store, steps: Steps
) -> tuple[np.ndarray, np.ndarray]:
    """Return the training and the held-out episodes, each (E,).

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
    is_measured = has_steps & has_recorded_actions(store)
    is_trained = has_steps if fills_actions(config) else is_measured
    return episodes[is_trained[episodes]], held_out[is_measured[held_out]]


def fills_actions(config: TrainConfig) -> bool:
    """Return whether missing actions of the log are filled in."""
    return not is_none(config.fill_actions)


def step_discount(config: TrainConfig, store: Store) -> float | np.ndarray:
    """Return the discount of early steps: one number, which is drawn with faster, or (E,) where parts
    of a mixture differ.
    """
    discounts = options_by_part(store, "step_discount", config.data.step_discount)
    if len(set(discounts.values())) == 1:
        return float(next(iter(discounts.values())))
    episode_discounts = np.empty(len(store.lengths))
    for label, part in store.parts.items():
        episode_discounts[part] = discounts[label]
    return episode_discounts


def has_recorded_actions(store: Store) -> np.ndarray:
    """Return which episodes have some recorded actions, (E,) bool."""
    if store.action_weight is None:
        return np.ones(len(store.lengths), bool)
    return np.logical_or.reduceat(store.action_weight > 0, store.offsets[:-1])


def check_missing_actions(config: TrainConfig, store: Store, episodes: np.ndarray) -> None:
    """Raise a ValueError if the model reads past actions that are missing in the log."""
    reads_actions = (
        config.window > 1
        and config.tokenizer.get("hide_actions", 0) < 1
        and one_agent_reads(config)
    )
    if store.action_weight is None or not reads_actions:
        return
    is_complete = np.logical_and.reduceat(store.action_weight > 0, store.offsets[:-1])[episodes]
    if not is_complete.all():
        raise ValueError(
            f"window={config.window} reads past actions, which {(~is_complete).sum()} of "
            f"{len(episodes)} episodes lack at some steps; take fill_actions=inverse_dynamics, "
            "window=1 or tokenizer.hide_actions=1"
        )


def check_targets(config: TrainConfig, store: Store, steps: Steps, episodes: np.ndarray) -> None:
    """Raise a ValueError if there is nothing to train on, in the log or in a part of it."""
    for label, part in store.parts.items():
        if np.isin(part, episodes).any():
            continue
        of_part = f" of part {label}" if store.is_mixture else ""
        expected = f"recorded actions in some episode{of_part} that is trained on"
        fix = "lower data.held_out, or take another data.seed"
        horizon = config.model.return_horizon
        if horizon:
            longest = store.lengths[part].max()
            expected += f" and has model.return_horizon={horizon} steps (the longest has {longest})"
            fix = "lower model.return_horizon or data.held_out, or take another data.seed"
        raise ValueError(f"{store.path}: expected {expected}, got none; {fix}")
    if steps.loss_mask is None:
        return
    if not any(steps.loss_mask[rows].any() for rows in steps.blocks(episodes)):
        raise ValueError(
            f"{store.path}: expected a training target in some step (loss_mask), got none"
        )


def augment_windows(config: TrainConfig, store: Store, sampler: Windows) -> Windows:
    """Augment the windows of a sampler, by the option `augment` of the run or of a part."""
    nodes = options_by_part(store, "augment", config.augment)
    distinct_nodes = {str(node): node for node in nodes.values() if not is_none(node)}
    for node in distinct_nodes.values():
        among = np.zeros(len(store.lengths), bool)
        for label, part in store.parts.items():
            among[part] = nodes[label] == node
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
    """Return the sampler of windows of these episodes, of single agents or of teams.

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
        make_team_sampler = get_function("sampler", config.team.execution, "team.execution")
        team_sampler: Sampler = make_team_sampler(steps, store, episodes, options)
        return team_sampler
    rows_per_text = config.data.rows_per_text
    if rows_per_text == 1:
        return Sampler(steps, episodes, **options)
    return TextSampler(steps, episodes, task=store.task, rows_per_text=rows_per_text, **options)


def draw_texts(
    sampler: Windows, store: Store, paraphrases: Paraphrases | None, *, texts: int, seed: int
) -> Windows:
    """Draw a text for each row of the windows of a sampler, where tasks have paraphrases.

    Args:
        sampler: step -> its windows.
        store: the log.
        paraphrases: of its tasks; None: each has one text.
        texts: distinct texts in a batch, at most.
        seed: of the draws.
    """
    if paraphrases is None:
        return sampler
    among = is_paraphrased(store)
    return paraphrases.sampler(sampler, task=store.task, among=among, texts=texts, seed=seed)


def window_texts(sampler: Sampler, store: Store, paraphrases: Paraphrases | None) -> Sequence[str]:
    """Return the texts that the windows of a sampler refer to. paraphrases: see `draw_texts`."""
    if paraphrases is not None:
        return paraphrases
    return store.tasks if sampler.tasks is None else sampler.tasks


def options_by_part(store: Store, option: str, value: object) -> Json:
    """Return an option for each part of the data: the part's own, or `value`."""
    cards = store.info.get("parts", {})
    return {label: cards.get(label, {}).get(option, value) for label in store.parts}


def is_paraphrased(store: Store) -> np.ndarray:
    """Return which episodes have texts drawn from paraphrases, (E,) bool."""
    is_drawn = np.ones(len(store.lengths), bool)
    for label, info in store.part_infos.items():
        is_drawn[store.parts[label]] = "wordings" in info
    return is_drawn


def make_paraphrases(store: Store, frames: int = 0) -> Paraphrases | None:
    """Return the paraphrases of a store's tasks; None where each task has one text.

    frames: number of frames of a task, 0: all.
    """
    facts = store.info.get("wordings")
    return Paraphrases(store.tasks, facts, frames=frames) if facts else None


def text_indices(store: Store, window: Window) -> np.ndarray:
    """Return the index of the text of each row of a window, (B,)."""
    return store.task[window.episodes] if window.text_index is None else window.text_index


def sample_texts(data: Data) -> list[str]:
    """Return the distinct texts of the first batches."""
    indices = [text_indices(data.store, data.sampler(step)) for step in range(8)]
    return [data.tasks[i] for i in np.unique(np.concatenate(indices))]


def to_batch(
    window: Window,
    rows: slice | np.ndarray,
    *,
    store: Store,
    tasks: Sequence[str],
    encode: Callable[[Sequence[str]], tuple["Tensor", "Tensor"]],
    device: "torch.device | str",
) -> Batch:
    """Return rows of a window with their texts, on the device.

    Args:
        window: of the log.
        rows: of the window.
        store: of the log.
        tasks: the texts that the window refers to.
        encode: texts -> ids, mask.
        device: of the tensors.
    """
    columns = {name: column for name, column in vars(window).items() if column is not None}
    window = replace(window, **{name: column[rows] for name, column in columns.items()})
    used, index = np.unique(text_indices(store, window), return_inverse=True)
    return collate(window, encode([tasks[i] for i in used]), index).to(device)
