"""The command `data`: make or import a dataset, print its card and one training window, or write it
in another format.
"""

from collections.abc import Iterator
from inspect import signature
from pathlib import Path

import numpy as np
from rich.console import Console

from decisionllm.config import train_config
from decisionllm.datasets import sampling, windows
from decisionllm.datasets.batches import wordings
from decisionllm.datasets.faults import Survey, reported, survey
from decisionllm.datasets.store import NO_TRANSFORM, Store, check_texts, prepare
from decisionllm.executors import of_files
from decisionllm.files import check_writable
from decisionllm.registry import Node, function, function_names, no_choice, required_function
from decisionllm.tokenizers import text
from decisionllm.tokenizers.text import own_tokenizer
from decisionllm.trust import trusting_user

MOST_VALUES = 24  # of an observation or an action that are printed
# keys of a store's info that are no options of its dataset
NO_OPTIONS = ("name", "repairs", "campaigns", "wordings", "parts", "faults", "unread")


@trusting_user
def data(config: Node) -> Store | None:
    """Prepare config["dataset"], print its card and a window of it, and export it where
    config["export"] says so.

    Args:
        config: plain dicts, see configs/data.yaml.

    Returns:
        The store; None with export=replay, which writes days of traffic and makes no episodes.

    Raises:
        ValueError: an option is unknown, or the data do not fit it.
        FileNotFoundError: the data are not there.
    """
    console = Console(soft_wrap=True, highlight=False, markup=False)
    kind, target = destination(config["export"])
    if kind:
        check_writable(written_path(kind, target).parent, option=f"export={kind}:...")
    export_raw = function("raw_export", kind)
    if export_raw is not None:
        export_raw(target, config["dataset"], console.print)
        return None
    check_shared(config)
    transform = config.get("transform", NO_TRANSFORM)
    with of_files({"executor": "inline", "address": ""} | config):
        store = prepare(config["dataset"], config["cache_dir"], transform)
    check_texts(config.get("text", "none"), [store], config["dataset"])
    return_horizon = config["model"]["return_horizon"]
    console.print("\n".join(card(store, return_horizon=return_horizon)))
    shown = window(
        store,
        config["window"],
        return_horizon=return_horizon,
        seed=config["seed"],
        text_wordings=config.get("text_wordings", 0),
    )
    console.print("\n".join(shown))
    export = function("export", kind)
    if export is not None:
        if store.action_weight is not None or transform != NO_TRANSFORM:
            wanted = "a log with every action and transform=none"
            raise ValueError(f"export={kind}: expected {wanted}, got {store.info['name']}")
        # an export is given what its parameters name
        known = {"env": config.get("env", no_choice()), "say": console.print}
        parameters = signature(export).parameters
        options = {name: known[name] for name in known if name in parameters}
        export(target, store, **options)
        size = f"{len(store.lengths):,} episodes, {store.lengths.sum():,} steps"
        console.print(f"written: {config['export']}, {size}")
    return store


def check_shared(config: Node) -> None:
    """Raise a ValueError if an option that `train` has too breaks one of its rules."""
    nothing: Node = {"dataset": {}, "backbone": {}, "head": {}}
    train_config(nothing | {name: config[name] for name in ("window", "model", "seed")})


def destination(export: str) -> tuple[str, str]:
    """Kind and target of the option `export`, "kind:target"; two empty words where it is empty."""
    if not export:
        return "", ""
    kind, _, target = export.partition(":")
    known = function_names("export") + function_names("raw_export")
    if kind not in known or not target:
        forms = ", ".join(f"{name}:TARGET" for name in sorted(known))
        raise ValueError(f"export: expected one of {forms}, got {export!r}")
    return kind, target


def written_path(kind: str, target: str) -> Path:
    """The file or folder that an export writes."""
    if kind != "minari":
        return Path(target).expanduser()
    from minari.storage import get_dataset_path

    return Path(get_dataset_path(target))


def card(store: Store, *, return_horizon: int = 0) -> Iterator[str]:
    """The card of a store, as lines of text: where it is, sizes, returns, rewards, observations,
    actions, texts.
    """
    yield f"{store.info['name']}"
    yield from _origin(store)
    yield from _episodes(store)
    for name in function_names("summary"):
        yield from required_function("summary", name, "summary")(store)
    if return_horizon:
        yield f"  next {return_horizon:<7d} {quantiles(next_returns(store, return_horizon))}"
    seen = survey(store)
    yield from _numbers(store, seen)
    for fault in [*reported(store.info), *seen.faults]:
        yield f"  fault        {fault}"
    unread = reported(store.info, "unread")
    if unread:
        yield f"  not read     {', '.join(unread)}"
    yield _texts(store)


def _origin(store: Store) -> Iterator[str]:
    """The path of the data and the options that they were made with."""
    yield f"  path         {store.path}"
    yield f"  fingerprint  {store.fingerprint}"
    options = [f"{name}={value}" for name, value in store.info.items() if name not in NO_OPTIONS]
    yield f"  options      {', '.join(options)}"
    if "repairs" in store.info:
        repairs = [f"{what}: {count:,}" for what, count in store.info["repairs"].items()]
        yield f"  repairs      {', '.join(repairs) or 'none'}"


def _episodes(store: Store) -> Iterator[str]:
    """Number, lengths, ends and returns of the episodes."""
    lengths = store.lengths
    groups = len(np.unique(store.group))
    yield f"  episodes     {len(lengths):,} in {groups:,} groups, {lengths.sum():,} steps"
    if "parts" in store.info:
        for label, part in store.parts.items():
            size = f"{len(part):,} episodes, {lengths[part].sum():,} steps"
            mean = store.returns[part].mean()
            yield f"  part         {label}: {size}, return {mean:.2f} on average"
    found = f"mean {lengths.mean():.1f}, {lengths.min()} .. {lengths.max()}"
    yield f"  length       {found}, horizon {store.spec.horizon}"
    terminated = 100 * store.terminated.mean()
    truncated = 100 * store.truncated.mean()
    yield f"  ended        {terminated:.1f} % terminated, {truncated:.1f} % truncated"
    yield f"  return       {quantiles(store.returns)}"


def next_returns(store: Store, return_horizon: int) -> np.ndarray:
    """The return of the next steps, of each step that has so many.

    Raises:
        ValueError: no episode has so many.
    """
    steps = windows.of_store(store, return_horizon=return_horizon)
    parts = []
    for first, end in zip(steps.first, steps.end, strict=True):
        parts.append(steps.returns_to_go[first:end])
    found = np.concatenate(parts)
    if not len(found):
        wanted = f"expected episodes of at least {return_horizon} steps"
        longest = store.lengths.max()
        raise ValueError(f"model.return_horizon: {wanted}, the longest has {longest}")
    return found


def _numbers(store: Store, seen: Survey) -> Iterator[str]:
    """Rewards, observations and actions."""
    spec = store.spec
    some = 100 * (store.rewards != 0).mean()
    yield f"  reward       mean {store.rewards.mean():.4f}, {some:.1f} % of steps not 0"
    mean = ", ".join(first_values(seen.mean.round(2)))
    deviation = ", ".join(first_values(seen.deviation.round(2)))
    yield f"  observation  {spec.observation_dim} numbers, mean [{mean}], deviation [{deviation}]"
    taken = seen.actions
    if spec.num_actions:
        yield f"  action       one of {spec.num_actions}, taken {seen.counts.tolist()}"
    else:
        bounds = f"{list(spec.low)} .. {list(spec.high)}"
        found = f"{taken.low.tolist()} .. {taken.high.tolist()}"
        share = 100 * seen.at_bound / (taken.count * spec.action_dim)
        within = f"{spec.action_dim} numbers within {bounds}, seen {found}"
        yield f"  action       {within}, {share:.1f} % at a bound"
    if store.action_weight is not None:
        count = f"{taken.count:,} of {len(store.rewards):,}"
        yield f"  recorded     {count} actions, the others are missing"


def _texts(store: Store) -> str:
    """Number and lengths of the texts, and one of them."""
    sizes = [len(own_tokenizer()(task)["input_ids"]) for task in store.tasks[:100]]
    found = f"{len(store.tasks)} different, {min(sizes)} .. {max(sizes)} tokens"
    return f"  text         {found}; of episode 0: {store.tasks[store.task[0]]!r}"


def first_values(values: np.ndarray, pattern: str = "") -> list[str]:
    """Return the first MOST_VALUES of values (n,), as text, and how many are left out."""
    texts = [format(value, pattern) for value in values[:MOST_VALUES].tolist()]
    if len(values) > MOST_VALUES:
        texts.append(f"... {len(values) - MOST_VALUES} more")
    return texts


def quantiles(values: np.ndarray) -> str:
    """Quantiles of values, as text."""
    shares = (0, 0.1, 0.5, 0.9, 0.99, 1)
    found = np.quantile(values, shares)
    return ", ".join(f"{100 * q:g} %: {v:.2f}" for q, v in zip(shares, found, strict=True))


def window(
    store: Store, T: int, *, return_horizon: int = 0, seed: int = 0, text_wordings: int = 0
) -> Iterator[str]:
    """One training window, as lines of text: the text's tokens, then return-to-go R, observation o
    and action a of each step.
    """
    steps = windows.of_store(store, return_horizon=return_horizon)
    rows = np.flatnonzero(steps.end > steps.first)
    shown = sampling.Sampler(steps, rows, T=T, batch_size=1, seed=seed)(0)
    task = store.tasks[store.task[shown.episodes[0]]]
    other_words = wordings(store, text_wordings)
    if other_words:
        drawn = other_words.draw(store.task[shown.episodes], np.random.default_rng(seed))
        task = other_words[int(drawn[0])]
    ids, _ = text.encode(own_tokenizer(), [task])
    length = int(shown.mask.sum())
    yield (
        f"one window of {T} steps: {ids.shape[1]} text tokens, then {length} steps of "
        "the trajectory"
    )
    if task:
        tokens = [str(own_tokenizer().decode([token])) for token in ids[0].tolist()]
        yield f"  text {'|'.join(tokens)}"
    else:
        yield "  no text"
    for t in range(length):
        observation = " ".join(first_values(shown.observations[0, t], "7.3f"))
        action = " ".join(first_values(shown.actions[0, t], "6.3f"))
        togo = f"R {shown.returns_to_go[0, t]:8.2f}"
        yield f"  t={shown.timesteps[0, t]:<4d} {togo}   o {observation}   a {action}"
    if length < T:
        yield f"  {T - length} steps of padding, masked"
