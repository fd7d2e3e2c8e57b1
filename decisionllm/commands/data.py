"""The command `data`: make or import a dataset, print its card and one training window, or write it
in another format.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from inspect import signature
from pathlib import Path

import numpy as np
from rich.console import Console

from decisionllm.command_line import fill_defaults
from decisionllm.commands.options import read_options
from decisionllm.config import train_config
from decisionllm.datasets import sampling, windows
from decisionllm.datasets.batches import make_paraphrases
from decisionllm.datasets.data_quality import Survey, list_faults, survey_log
from decisionllm.datasets.store import Store, check_texts
from decisionllm.datasets.store_cache import NO_TRANSFORM, prepare_store
from decisionllm.executors import use_file_executor
from decisionllm.files import check_writable
from decisionllm.registry import Node, find_function, function_names, get_function, no_choice
from decisionllm.tokenizers import text
from decisionllm.tokenizers.text import own_tokenizer
from decisionllm.trust import trust_user_modules

MOST_VALUES = 24  # of an observation or an action that are printed
# keys of a store's info that are no options of its dataset
NO_OPTIONS = ("name", "repairs", "campaigns", "wordings", "parts", "faults", "unread")


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The option of models that the card shows."""

    return_horizon: int


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The options of `data`; configs/data.yaml explains them and has their defaults."""

    dataset: Node
    env: Node
    transform: Node
    cache_dir: str
    text: str
    text_wordings: int
    executor: str
    address: str
    model: ModelOptions
    window: int
    seed: int
    export: str


@trust_user_modules
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
    options = read_config(config)
    console = Console(soft_wrap=True, highlight=False, markup=False)

    # -- an export of the raw data --
    kind, target = parse_export(options.export)
    if kind:
        check_writable(written_path(kind, target).parent, option=f"export={kind}:...")
    export_raw = find_function("raw_export", kind)
    if export_raw is not None:
        export_raw(target, options.dataset, console.print)
        return None

    # -- the store and its card --
    check_train_options(options)
    with use_file_executor(asdict(options)):
        store = prepare_store(options.dataset, options.cache_dir, options.transform)
    check_texts(options.text, [store], options.dataset)
    return_horizon = options.model.return_horizon
    console.print("\n".join(card(store, return_horizon=return_horizon)))
    lines = window_lines(
        store,
        options.window,
        return_horizon=return_horizon,
        seed=options.seed,
        text_wordings=options.text_wordings,
    )
    console.print("\n".join(lines))

    # -- an export of the store --
    export = find_function("export", kind)
    if export is not None:
        if store.action_weight is not None or options.transform != NO_TRANSFORM:
            raise ValueError(
                f"export={kind}: expected a log with every action and transform=none, got "
                f"{store.info['name']}"
            )
        # an export gets the arguments that its parameters name
        arguments = {"env": options.env, "say": console.print}
        parameters = signature(export).parameters
        export(target, store, **{name: arguments[name] for name in arguments if name in parameters})
        size = f"{len(store.lengths):,} episodes, {store.lengths.sum():,} steps"
        console.print(f"written: {options.export}, {size}")
    return store


def read_config(config: Node) -> DataConfig:
    """Read the options of the command; one that is left out has its default."""
    groups = {"env": no_choice(), "transform": NO_TRANSFORM}
    others = {}
    for key, value in config.items():
        if key in ("dataset", "env", "transform"):
            groups[key] = value
        else:
            others[key] = value
    return read_options(DataConfig, fill_defaults("data", others) | groups)


def check_train_options(options: DataConfig) -> None:
    """Raise a ValueError if an option that `train` has too breaks one of its rules."""
    choices: Node = {"dataset": {}, "backbone": {}, "head": {}}
    shared = {"window": options.window, "model": asdict(options.model), "seed": options.seed}
    train_config(choices | shared)


def parse_export(export: str) -> tuple[str, str]:
    """Return kind and target of the option `export`, "kind:target"; two empty words where it is
    empty.
    """
    if not export:
        return "", ""
    kind, _, target = export.partition(":")
    names = function_names("export") + function_names("raw_export")
    if kind not in names or not target:
        forms = ", ".join(f"{name}:TARGET" for name in sorted(names))
        raise ValueError(f"export: expected one of {forms}, got {export!r}")
    return kind, target


def written_path(kind: str, target: str) -> Path:
    """Return the file or folder that an export writes."""
    if kind != "minari":
        return Path(target).expanduser()
    from minari.storage import get_dataset_path

    return Path(get_dataset_path(target))


def card(store: Store, *, return_horizon: int = 0) -> Iterator[str]:
    """Yield the lines of the card of a store: path, sizes, returns, rewards, observations, actions,
    texts.
    """
    yield f"{store.info['name']}"
    yield from _path_and_options(store)
    yield from _episodes(store)
    for name in function_names("summary"):
        yield from get_function("summary", name, "summary")(store)
    if return_horizon:
        yield f"  next {return_horizon:<7d} {format_quantiles(returns_of_next_steps(store, return_horizon))}"
    columns = survey_log(store)
    yield from _numbers(store, columns)
    for fault in [*list_faults(store.info), *columns.faults]:
        yield f"  fault        {fault}"
    unread = list_faults(store.info, "unread")
    if unread:
        yield f"  not read     {', '.join(unread)}"
    yield _texts(store)


def _path_and_options(store: Store) -> Iterator[str]:
    """Yield the path of the data and the options that they were made with."""
    yield f"  path         {store.path}"
    yield f"  fingerprint  {store.fingerprint}"
    options = [f"{name}={value}" for name, value in store.info.items() if name not in NO_OPTIONS]
    yield f"  options      {', '.join(options)}"
    if "repairs" in store.info:
        repairs = [f"{what}: {count:,}" for what, count in store.info["repairs"].items()]
        yield f"  repairs      {', '.join(repairs) or 'none'}"


def _episodes(store: Store) -> Iterator[str]:
    """Yield number, lengths, ends and returns of the episodes."""
    lengths = store.lengths
    groups = len(np.unique(store.group))
    yield f"  episodes     {len(lengths):,} in {groups:,} groups, {lengths.sum():,} steps"
    if "parts" in store.info:
        for label, part in store.parts.items():
            size = f"{len(part):,} episodes, {lengths[part].sum():,} steps"
            mean = store.returns[part].mean()
            yield f"  part         {label}: {size}, return {mean:.2f} on average"
    shortest, longest = lengths.min(), lengths.max()
    horizon = store.spec.horizon
    yield f"  length       mean {lengths.mean():.1f}, {shortest} .. {longest}, horizon {horizon}"
    terminated = 100 * store.terminated.mean()
    truncated = 100 * store.truncated.mean()
    yield f"  ended        {terminated:.1f} % terminated, {truncated:.1f} % truncated"
    yield f"  return       {format_quantiles(store.returns)}"


def returns_of_next_steps(store: Store, return_horizon: int) -> np.ndarray:
    """Return the return of the next steps, of each step that has so many.

    Raises:
        ValueError: no episode has so many.
    """
    steps = windows.load_steps(store, return_horizon=return_horizon)
    parts = []
    for first, end in zip(steps.first, steps.end, strict=True):
        parts.append(steps.returns_to_go[first:end])
    returns = np.concatenate(parts)
    if not len(returns):
        raise ValueError(
            f"model.return_horizon: expected episodes of at least {return_horizon} steps, the "
            f"longest has {store.lengths.max()}"
        )
    return returns


def _numbers(store: Store, columns: Survey) -> Iterator[str]:
    """Yield rewards, observations and actions."""
    spec = store.spec
    percent = 100 * (store.rewards != 0).mean()
    yield f"  reward       mean {store.rewards.mean():.4f}, {percent:.1f} % of steps not 0"
    mean = ", ".join(format_values(columns.mean.round(2)))
    deviation = ", ".join(format_values(columns.deviation.round(2)))
    yield f"  observation  {spec.observation_dim} numbers, mean [{mean}], deviation [{deviation}]"
    actions = columns.actions
    if spec.num_actions:
        yield f"  action       one of {spec.num_actions}, taken {columns.counts.tolist()}"
    else:
        bounds = f"{list(spec.low)} .. {list(spec.high)}"
        logged = f"{actions.low.tolist()} .. {actions.high.tolist()}"
        percent = 100 * columns.at_bound / (actions.count * spec.action_dim)
        within = f"{spec.action_dim} numbers within {bounds}, seen {logged}"
        yield f"  action       {within}, {percent:.1f} % at a bound"
    if store.action_weight is not None:
        count = f"{actions.count:,} of {len(store.rewards):,}"
        yield f"  recorded     {count} actions, the others are missing"


def _texts(store: Store) -> str:
    """Return number and lengths of the texts, and one of them."""
    if not any(store.tasks):
        return "  text         none"
    sizes = [len(own_tokenizer()(task)["input_ids"]) for task in store.tasks[:100]]
    numbers = f"{len(store.tasks)} different, {min(sizes)} .. {max(sizes)} tokens"
    return f"  text         {numbers}; of episode 0: {store.tasks[store.task[0]]!r}"


def format_values(values: np.ndarray, pattern: str = "") -> list[str]:
    """Return the first MOST_VALUES of values (n,), as text, and how many are left out."""
    texts = [format(value, pattern) for value in values[:MOST_VALUES].tolist()]
    if len(values) > MOST_VALUES:
        texts.append(f"... {len(values) - MOST_VALUES} more")
    return texts


def format_quantiles(values: np.ndarray) -> str:
    """Return quantiles of values, as text."""
    shares = (0, 0.1, 0.5, 0.9, 0.99, 1)
    pairs = zip(shares, np.quantile(values, shares), strict=True)
    return ", ".join(f"{100 * share:g} %: {value:.2f}" for share, value in pairs)


def window_lines(
    store: Store, T: int, *, return_horizon: int = 0, seed: int = 0, text_wordings: int = 0
) -> Iterator[str]:
    """Yield the lines of one training window: the text's tokens, then return-to-go R, observation o
    and action a of each step.
    """
    steps = windows.load_steps(store, return_horizon=return_horizon)
    rows = np.flatnonzero(steps.end > steps.first)
    drawn = sampling.Sampler(steps, rows, T=T, batch_size=1, seed=seed)(0)
    task = store.tasks[store.task[drawn.episodes[0]]]
    other_words = make_paraphrases(store, text_wordings)
    if other_words:
        numbers = other_words.draw(store.task[drawn.episodes], np.random.default_rng(seed))
        task = other_words[int(numbers[0])]
    ids, _ = text.encode(own_tokenizer(), [task])
    length = int(drawn.mask.sum())
    yield (
        f"one window of {T} steps: {ids.shape[1]} text tokens, then {length} steps of "
        "the trajectory (R return-to-go, o observation, a action; raw units)"
    )
    if task:
        tokens = [str(own_tokenizer().decode([token])) for token in ids[0].tolist()]
        yield f"  text {'|'.join(tokens)}"
    else:
        yield "  no text"
    for t in range(length):
        observation = " ".join(format_values(drawn.observations[0, t], "7.3f"))
        action = " ".join(format_values(drawn.actions[0, t], "6.3f"))
        return_to_go = f"R {drawn.returns_to_go[0, t]:8.2f}"
        yield f"  t={drawn.timesteps[0, t]:<4d} {return_to_go}   o {observation}   a {action}"
    if length < T:
        yield f"  {T - length} steps of padding, masked"
