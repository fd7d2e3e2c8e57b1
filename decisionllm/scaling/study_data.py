"""The data of a study: opened once for each cell, and checked."""

import hashlib
import json
from functools import cache
from pathlib import Path

import numpy as np

from decisionllm.config import train_config
from decisionllm.datasets import sampling
from decisionllm.datasets.mixture_parts import ONLY
from decisionllm.datasets.store import Store
from decisionllm.datasets.store_cache import prepare_store
from decisionllm.eval.env_checks import check_environments
from decisionllm.registry import Node

Cell = tuple[str, str]  # size and quality


def check_data(store: Store, data: Node, fraction: float) -> None:
    """Raise a ValueError if the data is too little for the study.

    No group is held out, the smallest fraction is less than one group, or a quality drops no
    episode.
    """
    groups = len(np.unique(store.group))
    held_out = data["held_out"]
    train = groups - round(held_out * groups)
    if train == groups:
        raise ValueError(
            f"data.held_out={held_out} of {groups} groups holds none out: give study.train a "
            "larger data.held_out"
        )
    if fraction * train < 1:
        raise ValueError(
            f"study.axes.fraction: {fraction:g} of {train} groups is less than one; the least "
            f"is {1 / train:.3g}, or take more data"
        )
    quantile = data["min_return_quantile"]
    if quantile and not drops_episodes(store, quantile):
        raise ValueError(
            f"study.axes.quality: {quantile:g} drops no episode, so many have the return "
            f"{store.returns.min():g}; take another quality, or mixtures"
        )


def check_held_out(cell: Cell, store: Store, reference: Store, data: Node, fraction: float) -> None:
    """Raise a ValueError if a cell trains on episodes that its loss is measured on.

    Args:
        cell: its size and quality.
        store: the data of the cell.
        reference: the data whose held-out episodes are measured.
        data: options of the cell.
        fraction: the largest of the study.
    """
    if store.path == reference.path:
        return
    groups = {"held_out": data["held_out"], "seed": data["seed"]}
    training, held_out = sampling.select(reference, **groups)
    # an episode that a log has twice may be on both sides whatever is chosen
    measured_digests = episode_digests(reference, held_out) - episode_digests(reference, training)
    least = data["min_return_quantile"]
    selected, _ = sampling.select(store, fraction=fraction, min_return_quantile=least, **groups)
    leaked = len(measured_digests & episode_digests(store, selected))
    if leaked:
        size, quality = cell
        raise ValueError(
            f"study.axes: size {size} with quality {quality} trains on {leaked} of the "
            f"{len(measured_digests)} episodes that its loss is measured on; give data that share "
            "no episode, or all of them from one log by a quantile"
        )


def episode_digests(store: Store, episodes: np.ndarray) -> set[bytes]:
    """Digests of the observations and actions of these episodes."""
    digests = set()
    for e in episodes:
        rows = slice(store.offsets[e], store.offsets[e + 1])
        digest = hashlib.blake2b(store.observations[rows].tobytes(), digest_size=16)
        digest.update(store.actions[rows].tobytes())
        digests.add(digest.digest())
    return digests


def drops_episodes(store: Store, quantile: float) -> bool:
    """Return whether a least quantile of the returns leaves out any episode."""
    selected, _ = sampling.select(store, min_return_quantile=quantile)
    return len(selected) < len(store.lengths)


def open_stores(
    configs: dict[Cell, Node], cache_dir: str | Path, fraction: float
) -> dict[Cell, Store]:
    """Open and check the data of each cell. fraction: the smallest of the study."""
    open_store = cache(lambda node: prepare_store(*json.loads(node)))
    stores = {}
    for cell, config in configs.items():
        store = open_store(json.dumps([config["dataset"], str(cache_dir), config["transform"]]))
        check_data(store, config["data"], fraction)
        check_environments(train_config(config), {ONLY: store})
        stores[cell] = store
    return stores
