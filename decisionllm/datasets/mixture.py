"""Several datasets as one: `mixture` if their spaces agree, `embodiments` if they differ.

Parts are a list, or {label: part}; the label names the part on the command line. A part is the name
of a registered dataset, or its options as a dict: `{dataset: maze2d-umaze, noise: 0.2}`. The dict
may have further keys:

- `env`: options of the environment that `evaluate` takes for the part: the dataset's own, or the
  one that it names, `{env: pettingzoo, ...}`. By default it has the `text` of the dataset.
- `weight`: how often the part is drawn, by default 1.
- `augment`, `step_discount`: in place of those of the run.
- `head`, `tokenizer`, `window`: of an embodiment, in place of those of the run.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import count
from pathlib import Path
from typing import Any, Required, TypedDict, Unpack

import numpy as np

from decisionllm.config import TrainConfig, plain
from decisionllm.datasets.draws import Draw, of_step
from decisionllm.datasets.store import (
    NO_TRANSFORM,
    DatasetReader,
    Store,
    data_node,
    prepare,
    retold,
    with_texts,
)
from decisionllm.datasets.store import files as files_of
from decisionllm.protocols import Source
from decisionllm.registry import Node, build, choice, discover, no_choice, register
from decisionllm.schema import Episode, Json, Spec
from decisionllm.trust import check_nodes

LAYOUT = ("observation_parts", "categorical", "action_parts")  # keys of a dataset's info
# options that all parts of a mixture have in common, and why
OF_ONE_SPACE = {"head": "a model", "tokenizer": "a model", "window": "a batch"}

Given = str | Json  # a part as it is given: the name of a dataset, or its options
Parts = Sequence[Given] | Mapping[str, Given]


class MixtureOptions(TypedDict, total=False):
    """The options of `mixture` and of `embodiments`."""

    parts: Required[Parts]
    options: Json | None
    text: str
    text_wordings: int


@dataclass(frozen=True, kw_only=True)
class Part:
    """A dataset among several; None: it has no option of its own, but the run's."""

    dataset: Node
    env: Node | None = None
    head: Node | None = None
    tokenizer: Node | None = None
    augment: Node | None = None
    step_discount: float | None = None
    window: int | None = None
    weight: float | None = None

    def card(self, info: Json) -> Json:
        """The part as the info of a mixture holds it. info: of its dataset."""
        own = {name: value for name, value in vars(self).items() if value is not None}
        return own | {"dataset": info}


@register("dataset", "mixture", text="${text}", text_wordings="${text_wordings}")
def load(
    opened: Callable[[Node], Source | Store] = build,
    *,
    parts: Parts,
    options: Json | None = None,
    text: str = "none",
    text_wordings: int = 0,
) -> Source:
    """Several datasets of one observation and action space, distinguished by their texts.

    Each is drawn as often as its `weight` says, whatever its size.

    Args:
        opened: a part by its config node.
        parts: names, or dicts, see above.
        options: of all parts, unless a part has its own.
        text: of all parts, as `none` or `goal`.
        text_wordings: of all parts, see TrainConfig.

    Raises:
        ValueError: no part, an option that a part lacks, or spaces that differ.
    """
    mixed_parts = mixed(parts=parts, options=options, text=text, text_wordings=text_wordings)
    sources = {label: opened(part.dataset) for label, part in mixed_parts.items()}
    return joined(mixed_parts, sources, text)


def joined(
    parts: Mapping[str, Part],
    sources: Mapping[str, Source | Store],
    text: str,
) -> Source:
    """The parts of a mixture as one.

    Args:
        parts: see `mixed`.
        sources: of the parts.
        text: of all parts.

    Raises:
        ValueError: spaces or layouts that differ.
    """
    spec = one_space({label: source.spec for label, source in sources.items()})
    layout = one_layout({label: source.info for label, source in sources.items()})

    def episodes() -> Iterator[Episode]:
        for i, source in enumerate(sources.values()):
            for episode in episodes_of(source):
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
    info = {"name": f"mixture({names})", "env": "mixture", "text": text, "parts": infos} | layout
    if wordings:
        info["wordings"] = wordings
    return Source(spec, episodes(), info, facts)


def episodes_of(source: Source | Store) -> Iterable[Episode]:
    if isinstance(source, Source):
        return source.episodes
    return map(source.episode, range(len(source.lengths)))


def one_space(specs: Mapping[str, Spec]) -> Spec:
    """The spec of a mixture: that of all parts, with the longest horizon.

    Args:
        specs: of the parts, by label.

    Raises:
        ValueError: observations or actions of two parts have other sizes or bounds.
    """
    first, common = next(iter(specs.items()))
    for label, spec in specs.items():
        if not same_space(common, spec):
            found = spaces({first: common, label: spec})
            remedy = "a mixture of several spaces is dataset=embodiments, with a head for each"
            raise ValueError(f"dataset.parts: expected parts of one space, got {found}; {remedy}")
    return replace(common, horizon=max(spec.horizon for spec in specs.values()))


def one_layout(infos: Mapping[str, Json]) -> Json:
    """The names of the parts of observations and actions that all datasets of a mixture have.

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
            first, wanted = next(iter(stated.items()))
            if parts != wanted:
                found = f"{key} {wanted} of {first} and {parts} of {label}"
                remedy = "lay the columns of both out alike, or take dataset=embodiments"
                raise ValueError(f"dataset.parts: expected one layout, got {found}; {remedy}")
            layout[key] = wanted
    return layout


def data_options(**options: Unpack[MixtureOptions]) -> Node:
    """See `datasets.store`: parts as the nodes of their data, without what only their texts, draws
    and envs depend on."""
    kept: Node = {}
    for label, part in described(**options).items():
        kept[label] = data_node(part.dataset) | {"env": {}}
    return {"parts": kept}


def worded(store: Store, **options: Unpack[MixtureOptions]) -> Store:
    """See `datasets.store`: each part with its own texts."""
    texts = np.empty(len(store.lengths), object)
    infos: dict[str, Node] = {}
    wordings: Json = {}
    for label, part in mixed(**options).items():
        episodes = store.parts[label]
        info = store.part_infos[label]
        task = store.task[episodes]
        group = store.group[episodes]
        own = retold(replace(store, info=info, task=task, group=group), part.dataset)
        texts[episodes] = [own.tasks[i] for i in own.task]
        infos[label] = part.card(own.info)
        wordings |= own.info.get("wordings", {})
    found = with_texts(store, options.get("text", "none"), texts.tolist(), wordings)
    # numbered as the parts were when the store was made, in whatever order they are named now
    numbered = {label: infos[label] for label in store.part_infos}
    return replace(found, info=found.info | {"parts": numbered})


def mixed(**options: Unpack[MixtureOptions]) -> dict[str, Part]:
    """The parts of one mixture, see `described`; a ValueError if one is a mixture itself or has an
    option of its own that only an embodiment can have.
    """
    parts = described(**options)
    for label, part in parts.items():
        if part.dataset["_target_"] == f"{__name__}.load":
            wanted = "datasets that are no mixtures themselves"
            raise ValueError(f"dataset.parts: expected {wanted}, got {label}; name its parts here")
        for key, shared in OF_ONE_SPACE.items():
            if vars(part)[key] is not None:
                why = f"those of one space share {shared}"
                remedy = f"give it to the part of dataset=embodiments, or {key}=... to the run"
                raise ValueError(f"dataset.parts: {label} has a {key} of its own; {why}; {remedy}")
    return parts


def files(**options: Unpack[MixtureOptions]) -> list[Path]:
    """The files that the readers of the parts read."""
    found = []
    for part in described(**options).values():
        found += files_of(part.dataset)
    return found


def readings(**options: Unpack[MixtureOptions]) -> list[Node]:
    """The config nodes of the datasets of the parts."""
    return [part.dataset for part in described(**options).values()]


def described(
    parts: Parts, options: Json | None = None, text: str = "none", text_wordings: int = 0
) -> dict[str, Part]:
    """The parts by label.

    Raises:
        ValueError: no part, two of one label, or a name or option that does not exist.
    """
    made = {}
    for label, part in labelled(parts):
        made[label] = described_part(label, part, options or {}, text, text_wordings)
    return made


def labelled(parts: Parts) -> list[tuple[str, Given]]:
    """(label, part) of each part; the label is the name of its dataset if it has no other."""
    if not parts or not isinstance(parts, list | tuple | dict):
        wanted = "names of datasets, such as [maze2d-umaze,maze2d-medium]"
        raise ValueError(f"dataset.parts: expected {wanted}, got {parts!r}")
    named = list(parts.items()) if isinstance(parts, dict) else named_by_dataset(parts)
    for _, part in named:
        if not isinstance(part, str | dict):
            wanted = "each part as a name or as {dataset: name, ...}"
            raise ValueError(f"dataset.parts: expected {wanted}, got {part!r}")
    labels = [label for label, _ in named]
    usable = all(isinstance(label, str) and "." not in label for label in labels)
    if not usable or len(set(labels)) < len(labels):
        wanted = "a label of its own for each, without a dot, as {label: {dataset: name}}"
        raise ValueError(f"dataset.parts: expected {wanted}, got {parts!r}")
    return named


def named_by_dataset(parts: Sequence[Given]) -> list[tuple[Any, Given]]:
    """(name of its dataset, part) of each part of a list, as a user wrote it: unchecked, and with
    None where a dict has no `dataset`.
    """
    named = []
    for part in parts:
        label = part.get("dataset") if isinstance(part, dict) else part
        named.append((label, part))
    return named


def described_part(
    label: str,
    given: Given,
    options: Json,
    text: str,
    text_wordings: int,
) -> Part:
    """One part, see `described`; a node of it may refer to its dataset or to the texts."""
    own: Json = {"dataset": given} if isinstance(given, str) else given
    check_part(f"dataset.parts: {label}", own)
    name = own.get("dataset", label)
    of_part = [field.name for field in fields(Part)]
    dataset = {key: value for key, value in own.items() if key not in of_part}
    if "_target_" not in dataset:
        dataset = choice("dataset", name, **{**options, **dataset})
    nodes: Node = {"dataset": dataset, "env": env_node(name, own.get("env", {}))}
    if own.get("head"):
        nodes["head"] = chosen("head", own["head"])
    if own.get("tokenizer"):
        nodes["tokenizer"] = own["tokenizer"]
    resolved = plain(own_texts(dataset, text, text_wordings) | nodes)
    drawn: Json = {key: own.get(key) for key in ("step_discount", "window", "weight")}
    if "augment" in own:
        drawn["augment"] = chosen("augment", own["augment"])
    return Part(**{key: resolved[key] for key in nodes}, **drawn)


def env_node(dataset: str, given: Node) -> Node:
    """The config node of the environment of a part: of what `env` names among the given options, or
    of the dataset's name.
    """
    options = {key: value for key, value in given.items() if key != "env"}
    if "env" in given:
        return choice("env", given["env"]) | options
    return discover()["env"].get(dataset, no_choice()) | options


def chosen(group: str, given: str | Node) -> Node:
    """The config node of a choice that is given by its name, or of a node itself."""
    if not isinstance(given, str):
        return given
    if given == "none":
        return no_choice()
    return choice(group, given)


def check_part(name: str, own: Node) -> None:
    """Raise a ValueError for an option of a part that cannot be, but for those of its dataset.

    Args:
        name: of the part, to begin a message with.
        own: its options.
    """
    for key in ("env", "tokenizer"):
        given = own.get(key, {})
        if not isinstance(given, dict):
            raise ValueError(f"{name}: expected {key} as {{OPTION: VALUE}}, got {given!r}")
    window = own.get("window", 1)
    discount = own.get("step_discount", 1.0)
    weight = own.get("weight", 1.0)
    if not isinstance(window, int) or window < 1:
        raise ValueError(f"{name}: expected a window of 1 or more steps, got {window!r}")
    if not isinstance(discount, int | float) or not 0 < discount <= 1:
        wanted = "step_discount above 0 and at most 1"
        raise ValueError(f"{name}: expected {wanted}, got {discount!r}")
    if not isinstance(weight, int | float) or not 0 <= weight < math.inf:
        raise ValueError(f"{name}: expected a finite weight of 0 or more, got {weight!r}")


def own_texts(node: Node, text: str, text_wordings: int) -> Node:
    """The options `text` and `text_wordings` that the env of a part takes: those of its dataset, a
    node, or else of the run."""
    found: Node = {"text": text, "text_wordings": text_wordings}
    for key in found:
        if node.get(key, f"${{{key}}}") != f"${{{key}}}":
            found[key] = node[key]
    return found


def same_space(a: Spec, b: Spec) -> bool:
    """Whether observations and actions of the two have the same sizes and bounds; a horizon may
    differ."""
    return replace(a, horizon=b.horizon) == b


def spaces(specs: Mapping[str, Spec]) -> str:
    """Sizes and bounds of these specs, in words."""
    found = []
    for label, spec in specs.items():
        actions = f"{spec.action_dim} actions within {spec.low} .. {spec.high}"
        if spec.num_actions:
            actions = f"{spec.num_actions} discrete actions"
        found.append(f"{label}: {spec.observation_dim} numbers seen, {actions}")
    return " and ".join(found)


@register("dataset", "embodiments", text="${text}", text_wordings="${text_wordings}")
def embodiments(
    *,
    parts: Parts,
    options: Json | None = None,
    text: str = "none",
    text_wordings: int = 0,
) -> Source:
    """Datasets of several spaces, each read by an embodiment of one language model.

    Only `train` takes them, see `stores`.

    Args:
        parts, options, text, text_wordings: as in `mixture`; a part may be a mixture itself.
    """
    remedy = "name one of its parts"
    raise ValueError(f"dataset=embodiments: expected a dataset of one space here; {remedy}")


def stores(
    dataset: Node, cache_dir: str | Path, transform: Node = NO_TRANSFORM
) -> dict[str, Store]:
    """Open the store of each embodiment.

    Args:
        dataset: config node.
        cache_dir: of the stores.
        transform: config node, see `store.prepare`.

    Returns:
        {embodiment: store}; {"": store} of a dataset of one space.
    """
    parts = embodiment_parts(dataset)
    return {name: prepare(part.dataset, cache_dir, transform) for name, part in parts.items()}


def embodiment_parts(dataset: Node) -> dict[str, Part]:
    """The parts of dataset=embodiments, see `described`; {"": ...} of a dataset of one space."""
    if dataset["_target_"] != f"{__name__}.embodiments":
        return {"": Part(dataset=dataset)}
    return described(**{key: value for key, value in dataset.items() if key != "_target_"})


def embodiment_config(config: TrainConfig, name: str) -> TrainConfig:
    """The options of a run as those of one of its embodiments: with its own window and draws.

    Raises:
        ValueError: its window is below act.stride.
    """
    own = embodiment_parts(config.dataset)[name]
    window = own.window or config.window
    if window < config.act.stride:
        wanted = f"a window of act.stride={config.act.stride} steps or more"
        place = f"dataset.parts: {name}" if name else "window"
        raise ValueError(f"{place}: expected {wanted}, got {window}")
    data = replace(config.data, step_discount=own.step_discount or config.data.step_discount)
    return replace(config, window=window, augment=own.augment or config.augment, data=data)


def evaluation_parts(dataset: Node, opened: Mapping[str, Store]) -> dict[str, Json]:
    """The datasets that a run can be evaluated on one by one.

    Args:
        dataset: config node.
        opened: its stores.

    Returns:
        {label: {"embodiment": name, "dataset": info, "env": node}}, with "window" where the
        embodiment has its own.

    Raises:
        ValueError: two have one label, or an environment is none that may be imported.
    """
    made: dict[str, Json] = {}
    for name, part in embodiment_parts(dataset).items():
        info = opened[name].info
        alone = {}
        if name:
            alone = {name: {"dataset": info, "env": part.env}}
        for label, each in info.get("parts", alone).items():
            if label in made:
                wanted = "a label of its own for each part"
                raise ValueError(f"dataset.parts: expected {wanted}, got {label!r} twice")
            made[label] = {"embodiment": name, **each}
            if part.window is not None:
                made[label]["window"] = part.window
    # the card of a store that was made elsewhere may name any environment
    check_nodes(made, "the parts of the dataset")
    return made


def part_shares(dataset: Node, stores: Mapping[str, Store]) -> dict[str, list[float]]:
    """The weights with which parts are drawn.

    Args:
        dataset: config node.
        stores: of its embodiments.

    Returns:
        {embodiment: the weights of its parts}, each times the weight of the embodiment.

    Raises:
        ValueError: all weights are 0.
    """
    found = {}
    for name, part in embodiment_parts(dataset).items():
        own = 1.0 if part.weight is None else part.weight
        among = stores[name].info.get("parts", {"": {}})
        found[name] = [float(own * each.get("weight", 1.0)) for each in among.values()]
    if not any(map(sum, found.values())):
        raise ValueError("dataset.parts: expected a weight above 0 of some part, got none")
    return found


def drawn_embodiment(shares: Mapping[str, Sequence[float]], seed: int, step: int) -> str:
    """The embodiment whose windows are trained on at this step, drawn by the shares of its
    parts."""
    if len(shares) == 1:
        return next(iter(shares))
    total = np.cumsum([sum(each) for each in shares.values()])
    drawn = of_step(seed, step, Draw.EMBODIMENT).random() * total[-1]
    return list(shares)[int(np.searchsorted(total, drawn, side="right"))]


READER = DatasetReader(
    version=2, files=files, readings=readings, data_options=data_options, worded=worded
)
