"""The command `data`: make or import a dataset, print its card and one training window, or write it
in another format.
"""

from collections.abc import Iterator

import numpy as np
from rich.console import Console

from decisionllm.datasets import sampling, windows
from decisionllm.datasets.batches import wordings
from decisionllm.datasets.faults import reported, survey
from decisionllm.datasets.store import NO_TRANSFORM, Store, prepare
from decisionllm.datasets.team_card import coverage
from decisionllm.eval.single import exported
from decisionllm.files import explained
from decisionllm.registry import Node, function, function_names
from decisionllm.scaling.executors import of_files
from decisionllm.schema import Json
from decisionllm.tokenizers import text
from decisionllm.tokenizers.text import own_tokenizer

NO_ENV = {"_target_": "none"}


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
    export_raw = function("raw_export", kind)
    if export_raw is not None:
        export_raw(target, config["dataset"], console.print)
        return None
    transform = config.get("transform", NO_TRANSFORM)
    with of_files({"executor": "inline", "address": ""} | config):
        store = prepare(config["dataset"], config["cache_dir"], transform)
    return_horizon = config["model"]["return_horizon"]
    console.print("\n".join(card(store, return_horizon=return_horizon)))
    shown = window(store, config["window"], return_horizon=return_horizon, seed=config["seed"])
    console.print("\n".join(shown))
    export = function("export", kind)
    if export is not None:
        if store.action_weight is not None or transform != NO_TRANSFORM:
            wanted = "a log with every action and transform=none"
            raise ValueError(f"export={kind}: expected {wanted}, got {store.info['name']}")
        options: Node = {}
        if kind == "minari":
            options, note = scored(config.get("env", NO_ENV), store)
            if note:
                console.print(note)
        export(target, store, **options)
        size = f"{len(store.lengths):,} episodes, {store.lengths.sum():,} steps"
        console.print(f"written: {config['export']}, {size}")
    return store


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


def scored(env: Node, store: Store) -> tuple[Json, str]:
    """What `minari.save` writes beside the episodes, so that a policy trained on them can be
    scored, and a line for the user or "".
    """
    remedy = "env=none exports without one"
    with explained(
        "export=minari: the environment could not be made", ValueError, OSError, remedy=remedy
    ):
        known, note = exported(env, store)
    final_observations = function("final_observations", store.info.get("env", ""))
    if final_observations is not None:
        known["final"] = final_observations(store)
    return known, note


def card(store: Store, *, return_horizon: int = 0) -> Iterator[str]:
    """The card of a store, as lines of text: where it is, sizes, returns, rewards, observations,
    actions, texts.
    """
    spec, lengths = store.spec, store.lengths
    yield f"{store.info['name']}"
    yield f"  path         {store.path}"
    yield f"  fingerprint  {store.fingerprint}"
    options = [
        f"{k}={v}"
        for k, v in store.info.items()
        if k not in ("name", "repairs", "campaigns", "wordings", "parts", "faults")
    ]
    yield f"  options      {', '.join(options)}"
    if "repairs" in store.info:
        yield (
            "  repairs      "
            f"{', '.join(f'{what}: {n:,}' for what, n in store.info['repairs'].items()) or 'none'}"
        )
    yield (
        f"  episodes     {len(lengths):,} in {len(np.unique(store.group)):,} groups, "
        f"{lengths.sum():,} steps"
    )
    for label, part in store.parts.items() if "parts" in store.info else ():
        yield (
            f"  part         {label}: {len(part):,} episodes, {lengths[part].sum():,} steps, "
            f"return {store.returns[part].mean():.2f} on average"
        )
    yield (
        f"  length       mean {lengths.mean():.1f}, {lengths.min()} .. {lengths.max()}, horizon "
        f"{spec.horizon}"
    )
    yield (
        f"  ended        {100 * store.terminated.mean():.1f} % terminated, "
        f"{100 * store.truncated.mean():.1f} % truncated"
    )
    yield f"  return       {quantiles(store.returns)}"
    if store.agent is not None:
        yield from coverage(store)
    if return_horizon:
        steps = windows.of_store(store, return_horizon=return_horizon)
        togo = np.concatenate(
            [steps.returns_to_go[a:b] for a, b in zip(steps.first, steps.end, strict=True)]
        )
        if not len(togo):
            wanted = f"episodes of at least {return_horizon} steps"
            raise ValueError(
                f"model.return_horizon: expected {wanted}, the longest has {lengths.max()}"
            )
        yield f"  next {return_horizon:<7d} {quantiles(togo)}"
    yield (
        f"  reward       mean {store.rewards.mean():.4f}, "
        f"{100 * (store.rewards != 0).mean():.1f} % of steps not 0"
    )
    found = survey(store)
    taken = found.actions
    mean, deviation = (x.round(2).tolist() for x in (found.mean, found.deviation))
    yield f"  observation  {spec.observation_dim} numbers, mean {mean}, deviation {deviation}"
    if spec.num_actions:
        yield f"  action       one of {spec.num_actions}, taken {found.counts.tolist()}"
    else:
        bounds = (
            f"{list(spec.low)} .. {list(spec.high)}, seen {taken.low.tolist()} .. "
            f"{taken.high.tolist()}"
        )
        yield (
            f"  action       {spec.action_dim} numbers within {bounds}, "
            f"{100 * found.at_bound / (taken.count * spec.action_dim):.1f} % at a bound"
        )
    if store.action_weight is not None:
        yield (
            f"  recorded     {taken.count:,} of {len(store.rewards):,} actions, the others are "
            "missing"
        )
    yield from (f"  fault        {fault}" for fault in reported(store.info) + found.faults)
    sizes = [len(own_tokenizer()(task)["input_ids"]) for task in store.tasks[:100]]
    yield (
        f"  text         {len(store.tasks)} different, {min(sizes)} .. {max(sizes)} tokens; of "
        f"episode 0: {store.tasks[store.task[0]]!r}"
    )


def quantiles(values: np.ndarray, shares: tuple[float, ...] = (0, 0.1, 0.5, 0.9, 0.99, 1)) -> str:
    """Quantiles of values, as text."""
    return ", ".join(
        f"{100 * q:g} %: {v:.2f}" for q, v in zip(shares, np.quantile(values, shares), strict=True)
    )


def window(store: Store, T: int, *, return_horizon: int = 0, seed: int = 0) -> Iterator[str]:
    """One training window, as lines of text: the text's tokens, then return-to-go R, observation o
    and action a of each step.
    """
    steps = windows.of_store(store, return_horizon=return_horizon)
    sampler = sampling.Sampler(
        steps, np.flatnonzero(steps.end > steps.first), T=T, batch_size=1, seed=seed
    )
    w = sampler(0)
    task = store.tasks[store.task[w.episodes[0]]]
    if words := wordings(store):
        task = words[int(words.draw(store.task[w.episodes], np.random.default_rng(seed))[0])]
    ids, _ = text.encode(own_tokenizer(), [task])
    yield (
        f"one window of {T} steps: {ids.shape[1]} text tokens, then {int(w.mask.sum())} steps of "
        "the trajectory"
    )
    yield (
        f"  text {'|'.join(own_tokenizer().decode([i]) for i in ids[0].tolist())}"
        if task
        else "  no text"
    )
    for t in range(T):
        if not w.mask[0, t]:
            yield f"  {T - t} steps of padding, masked"
            return
        numbers = (
            [f"{x:7.3f}" for x in w.observations[0, t]],
            [f"{x:6.3f}" for x in w.actions[0, t]],
        )
        yield (
            f"  t={w.timesteps[0, t]:<4d} R {w.returns_to_go[0, t]:8.2f}   o "
            f"{' '.join(numbers[0])}   a {' '.join(numbers[1])}"
        )
