"""Several datasets as one: `mixture` if their spaces agree, `embodiments` if they differ.

The option `parts` is described in `mixture_parts`.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Required, TypedDict, Unpack

import numpy as np

from decisionllm.config import TrainConfig
from decisionllm.datasets.dataset_reader import (
    DatasetReader,
    data_node,
    list_files,
    set_task_texts,
)
from decisionllm.datasets.mixture_parts import ONLY, Part, PartsOption, parse_parts
from decisionllm.datasets.rng import Stream, make_step_rng
from decisionllm.datasets.store import Store, replace_task_texts
from decisionllm.datasets.store_cache import NO_TRANSFORM, prepare_store
from decisionllm.datasets.templates import label_text
from decisionllm.protocols import Source
from decisionllm.registry import Node, build
from decisionllm.schema import Episode, Json, Spec
from decisionllm.trust import check_nodes

LAYOUT = ("observation_parts", "categorical", "action_parts")  # keys of a dataset's info
# options that all parts of a mixture have in common, and why
OF_ONE_SPACE = {"head": "a model", "tokenizer": "a model", "window": "a batch"}


class MixtureOptions(TypedDict, total=False):
    """The options of `mixture` and of `embodiments`."""

    parts: Required[PartsOption]
    options: Json | None
    text: str
    text_wordings: int


def load(
    opened: Callable[[Node], Source | Store] = build,
    *,
    parts: PartsOption,
    options: Json | None = None,
    text: str = "auto",
    text_wordings: int = 0,
) -> Source:
    """Join datasets of one observation and action space, which differ in their texts.

    Each is drawn as often as its `weight` says, whatever its size.

    Args:
        opened: a part by its config node.
        parts: names, or dicts, see `mixture_parts`.
        options: of all parts, unless a part has its own.
        text: task text of all parts, such as `goal`; `auto`: the texts that a part has of its own;
            `none`: no texts.
        text_wordings: of all parts: with text=paraphrased, train on so many sentence frames; 0: all.

    Raises:
        ValueError: no part, an option that a part lacks, or spaces that differ.
    """
    parsed = parse_mixture(parts=parts, options=options, text=text, text_wordings=text_wordings)
    sources = {label: opened(part.dataset) for label, part in parsed.items()}
    return join_sources(parsed, sources, text)


def join_sources(
    parts: Mapping[str, Part],
    sources: Mapping[str, Source | Store],
    text: str,
) -> Source:
    """Join the parts of a mixture.

    Args:
        parts: see `parse_mixture`.
        sources: of the parts.
        text: of all parts.

    Raises:
        ValueError: spaces or layouts that differ.
    """
    spec = common_spec({label: source.spec for label, source in sources.items()})
    layout = common_layout({label: source.info for label, source in sources.items()})

    def episodes() -> Iterator[Episode]:
        for i, source in enumerate(sources.values()):
            for episode in iterate_episodes(source):
                yield replace(episode, part=i, group=number[i, episode.group])

    # Groups of different parts never share a number: each new pair of part and group takes the next
    number: dict[tuple[int, int], int] = defaultdict(count().__next__)
    infos = {}
    wordings: Json = {}
    facts: Json = {}
    for label, source in sources.items():
        infos[label] = parts[label].card(source.info)
        wordings |= source.info.get("wordings", {})
        facts |= source.facts
    names = ", ".join(source.info["name"] for source in sources.values())
    label = label_text(text, has_own=False)
    info = {"name": f"mixture({names})", "env": "mixture", "text": label, "parts": infos} | layout
    if wordings:
        info["wordings"] = wordings
    return Source(spec, episodes(), info, facts)


def iterate_episodes(source: Source | Store) -> Iterable[Episode]:
    if isinstance(source, Source):
        return source.episodes
    return map(source.episode, range(len(source.lengths)))


def common_spec(specs: Mapping[str, Spec]) -> Spec:
    """Return the spec of a mixture: that of all parts, with the longest horizon.

    Args:
        specs: of the parts, by label.

    Raises:
        ValueError: observations or actions of two parts have other sizes or bounds.
    """
    first, common = next(iter(specs.items()))
    for label, spec in specs.items():
        if not is_same_space(common, spec):
            raise ValueError(
                "dataset.parts: expected parts of one space, got "
                f"{describe_spaces({first: common, label: spec})}; a mixture of several spaces is "
                "dataset=embodiments, with a head for each"
            )
    return replace(common, horizon=max(spec.horizon for spec in specs.values()))


def common_layout(infos: Mapping[str, Json]) -> Json:
    """Return the names of the parts of observations and actions that all datasets have in common.

    Args:
        infos: of the datasets, by label.

    Returns:
        `observation_parts`, `categorical` and `action_parts`, as far as a dataset states them.

    Raises:
        ValueError: two datasets state different ones, so that equal columns would mean different
            things.
    """
    layout: Json = {}
    for key in LAYOUT:
        stated = {label: info[key] for label, info in infos.items() if info.get(key)}
        for label, parts in stated.items():
            first, expected = next(iter(stated.items()))
            if parts != expected:
                raise ValueError(
                    f"dataset.parts: expected one layout, got {key} {expected} of {first} and "
                    f"{parts} of {label}; lay the columns of both out alike, or take "
                    "dataset=embodiments"
                )
            layout[key] = expected
    return layout


def data_options(**options: Unpack[MixtureOptions]) -> Node:
    """Return the options that the data depend on, see `DatasetReader`: the nodes of the data of the
    parts, without options of texts, draws and environments.
    """
    nodes: Node = {}
    for label, part in parse_parts(**options).items():
        nodes[label] = data_node(part.dataset) | {"env": {}}
    return {"parts": nodes}


def set_texts(store: Store, **options: Unpack[MixtureOptions]) -> Store:
    """Return a mixture in which each part has the texts of its options, see `DatasetReader`."""
    texts = np.empty(len(store.lengths), object)
    infos: dict[str, Node] = {}
    wordings: Json = {}
    for label, part in parse_mixture(**options).items():
        episodes = store.parts[label]
        info = store.part_infos[label]
        task = store.task[episodes]
        group = store.group[episodes]
        part_store = replace(store, info=info, task=task, group=group)
        part_store = set_task_texts(part_store, part.dataset)
        texts[episodes] = [part_store.tasks[i] for i in part_store.task]
        infos[label] = part.card(part_store.info)
        wordings |= part_store.info.get("wordings", {})
    text = label_text(options.get("text", "auto"), has_own=False)
    mixture = replace_task_texts(store, text, texts.tolist(), wordings)
    # in the order in which the store was written, whatever the order of the option `parts`
    ordered = {label: infos[label] for label in store.part_infos}
    return replace(mixture, info=mixture.info | {"parts": ordered})


def parse_mixture(**options: Unpack[MixtureOptions]) -> dict[str, Part]:
    """Return the parts of one mixture, see `parse_parts`.

    Raises:
        ValueError: a part is a mixture itself, or has an option that only an embodiment can have.
    """
    parts = parse_parts(**options)
    for label, part in parts.items():
        if part.dataset["_target_"] == f"{__name__}.load":
            raise ValueError(
                "dataset.parts: expected datasets that are no mixtures themselves, got "
                f"{label}; name its parts here"
            )
        for key, shared in OF_ONE_SPACE.items():
            if vars(part)[key] is not None:
                raise ValueError(
                    f"dataset.parts: {label} has a {key} of its own; those of one space share "
                    f"{shared}; give it to the part of dataset=embodiments, or {key}=... to the run"
                )
    return parts


def files(**options: Unpack[MixtureOptions]) -> list[Path]:
    """Return the files that the readers of the parts read."""
    paths = []
    for part in parse_parts(**options).values():
        paths += list_files(part.dataset)
    return paths


def input_datasets(**options: Unpack[MixtureOptions]) -> list[Node]:
    """Return the config nodes of the datasets of the parts."""
    return [part.dataset for part in parse_parts(**options).values()]


def is_same_space(a: Spec, b: Spec) -> bool:
    """Return whether observations and actions have the same sizes and bounds; horizons may differ."""
    return replace(a, horizon=b.horizon) == b


def describe_spaces(specs: Mapping[str, Spec]) -> str:
    """Return the sizes and bounds of specs, for a message."""
    descriptions = []
    for label, spec in specs.items():
        actions = f"{spec.action_dim} actions within {spec.low} .. {spec.high}"
        if spec.num_actions:
            actions = f"{spec.num_actions} discrete actions"
        descriptions.append(f"{label}: {spec.observation_dim} numbers seen, {actions}")
    return " and ".join(descriptions)


def embodiments(
    *,
    parts: PartsOption,
    options: Json | None = None,
    text: str = "auto",
    text_wordings: int = 0,
) -> Source:
    """Name datasets of several spaces, each read by an embodiment of one language model.

    Only `train` takes them, see `open_stores`.

    Args:
        parts, options, text, text_wordings: as in `mixture`; a part may be a mixture itself.
    """
    raise ValueError(
        "dataset=embodiments: expected a dataset of one space here; name one of its parts"
    )


def open_stores(
    dataset: Node, cache_dir: str | Path, transform: Node = NO_TRANSFORM
) -> dict[str, Store]:
    """Open the store of each embodiment.

    Args:
        dataset: config node.
        cache_dir: of the stores.
        transform: config node, see `store_cache.prepare_store`.

    Returns:
        {embodiment: store}; of a dataset of one space {ONLY: store}.
    """
    parts = embodiment_parts(dataset)
    return {name: prepare_store(part.dataset, cache_dir, transform) for name, part in parts.items()}


def embodiment_parts(dataset: Node) -> dict[str, Part]:
    """Return the parts of dataset=embodiments, see `parse_parts`; any other dataset is one part."""
    if dataset["_target_"] != f"{__name__}.embodiments":
        return {ONLY: Part(dataset=dataset)}
    return parse_parts(**{key: value for key, value in dataset.items() if key != "_target_"})


def embodiment_config(config: TrainConfig, name: str) -> TrainConfig:
    """Return the config of a run for one of its embodiments, with its own window and draws.

    Raises:
        ValueError: its window is below act.stride.
    """
    part = embodiment_parts(config.dataset)[name]
    window = part.window or config.window
    if window < config.act.stride:
        raise ValueError(
            f"window: expected act.stride={config.act.stride} steps or more, got {window} for {name}"
        )
    data = replace(config.data, step_discount=part.step_discount or config.data.step_discount)
    return replace(config, window=window, augment=part.augment or config.augment, data=data)


def evaluation_parts(dataset: Node, opened: Mapping[str, Store]) -> dict[str, Json]:
    """Return the datasets that a run can be evaluated on one by one.

    Args:
        dataset: config node.
        opened: its stores.

    Returns:
        {label: {"embodiment": name, "dataset": info, "env": node}}, with "window" where the
        embodiment has its own.

    Raises:
        ValueError: two have one label, or an environment is none that may be imported.
    """
    cards: dict[str, Json] = {}
    for name, part in embodiment_parts(dataset).items():
        info = opened[name].info
        cards_of_embodiment = {}
        if opened[name].is_mixture:
            cards_of_embodiment = info["parts"]
        elif name != ONLY:
            cards_of_embodiment = {name: {"dataset": info, "env": part.env}}
        for label, card in cards_of_embodiment.items():
            if label in cards:
                raise ValueError(
                    f"dataset.parts: expected a label of its own for each part, got {label!r} twice"
                )
            cards[label] = {"embodiment": name, **card}
            if part.window is not None:
                cards[label]["window"] = part.window
    # the card of a store that was made elsewhere may name any environment
    check_nodes(cards, "the parts of the dataset")
    return cards


def part_shares(dataset: Node, stores: Mapping[str, Store]) -> dict[str, list[float]]:
    """Return the weights with which parts are drawn.

    Args:
        dataset: config node.
        stores: of its embodiments.

    Returns:
        {embodiment: the weights of its parts}, each times the weight of the embodiment.

    Raises:
        ValueError: all weights are 0.
    """
    shares = {}
    for name, part in embodiment_parts(dataset).items():
        weight = 1.0 if part.weight is None else part.weight
        weights = [1.0]
        if stores[name].is_mixture:
            weights = [card.get("weight", 1.0) for card in stores[name].info["parts"].values()]
        shares[name] = [float(weight * weight_of_part) for weight_of_part in weights]
    if not any(map(sum, shares.values())):
        raise ValueError("dataset.parts: expected a weight above 0 of some part, got none")
    return shares


def draw_embodiment(shares: Mapping[str, Sequence[float]], seed: int, step: int) -> str:
    """Draw the embodiment whose windows are trained on at this step, by the shares of its parts."""
    if len(shares) == 1:
        return next(iter(shares))
    cumulative = np.cumsum([sum(weights) for weights in shares.values()])
    uniform = make_step_rng(seed, step, Stream.EMBODIMENT).random() * cumulative[-1]
    return list(shares)[int(np.searchsorted(cumulative, uniform, side="right"))]


READER = DatasetReader(
    version=2,
    files=files,
    input_datasets=input_datasets,
    data_options=data_options,
    set_texts=set_texts,
)
