"""Checks of a run's environments against its data, before the first training step."""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from decisionllm.config import TrainConfig, one_agent_reads
from decisionllm.datasets import mixture
from decisionllm.datasets.mixture_parts import ONLY
from decisionllm.datasets.space_parts import VECTOR
from decisionllm.datasets.store import Store
from decisionllm.eval.env_layout import check_env
from decisionllm.eval.rollout import checked_reset, checked_step
from decisionllm.files import explain_errors
from decisionllm.protocols import Env
from decisionllm.registry import Node, build, is_none, no_choice
from decisionllm.schema import Json, Spec

# text options whose texts are new in each episode, so that those of the data need not come back
SAMPLED_TEXTS = ("paraphrased", "template")
MOST_EPISODES = 2000  # whose observations are compared
MOST_ROWS = 200_000  # of them: an episode may be a log of days
MOST_DIFFERENCES = 3  # numbers of an observation that a note names
ROUNDING = 1e-4  # of a bound, relative: a log may be float32, or of another version
FAR = 5  # times the range of a number in the data
WITHOUT = "env=none trains without an environment"


@dataclass(frozen=True)
class TrainingData:
    """The data that a policy is trained on, as far as an environment must agree with them."""

    env_name: str  # to begin a message with, such as "env" or "env of maze", a part of a mixture
    env: Node
    spec: Spec
    info: Json  # of the dataset
    tasks: Collection[str]  # its distinct texts
    longest: int = 0  # steps of its longest episode
    # (S,) least and greatest of its observations, of many rows if not of all; None: not compared
    observation_range: tuple[np.ndarray, np.ndarray] | None = None


def check_environments(config: TrainConfig, stores: Mapping[str, Store]) -> list[str]:
    """Compare each environment that a run will be evaluated in with the data of the run.

    Args:
        config: of the run.
        stores: by embodiment, see `mixture.open_stores`.

    Returns:
        Notes for the user, one line each: differences that may be intended.

    Raises:
        ValueError: an environment can't be built, or its observations, actions, horizon, texts or
            world are not those of the data; or log.rollout_every needs one, or its teams, and
            there is none.
    """
    notes: list[str] = []
    for data in training_data(config, stores):
        if is_none(data.env):
            check_rollouts_are_off(config, data.env_name)
            continue
        with explain_errors(
            "env: could not be built", ValueError, ImportError, OSError, fix=WITHOUT
        ):
            env = build_one_episode(json.dumps(data.env, sort_keys=True))
        notes += compare(env, data, longest=longest_episode(config, data.spec))
        check_has_teams(config, env, data.env_name)
    return notes


def check_rollouts_are_off(config: TrainConfig, name: str) -> None:
    """Raise a ValueError if a run without an environment asks for rollouts during training."""
    if config.log.rollout_every:
        raise ValueError(
            f"{name}: expected an environment, which log.rollout_every={config.log.rollout_every} "
            "rolls out in, got none; give one, or log.rollout_every=0"
        )


def check_has_teams(config: TrainConfig, env: Env, name: str) -> None:
    """Raise a ValueError if rollouts of a team during training need groups of agents, and the
    environment, which was reset, has none.
    """
    if config.log.rollout_every and not one_agent_reads(config) and env.groups is None:
        raise ValueError(
            f"{name}: expected groups of agents, since team.execution={config.team.execution} and "
            f"log.rollout_every={config.log.rollout_every}, got none; take "
            "team.execution=per_agent or log.rollout_every=0"
        )


# Some are slow to build, and the parts of a mixture or the runs of a study share them.
@lru_cache(maxsize=8)
def build_one_episode(node: str) -> Env:
    """Build the environment of a config node, as JSON, with one episode."""
    env: Env = build(json.loads(node), 1)
    return env


def training_data(config: TrainConfig, stores: Mapping[str, Store]) -> Iterator[TrainingData]:
    """Yield the dataset of a run with its environment; of a mixture, each part with its own."""
    parts = mixture.evaluation_parts(config.dataset, stores)
    for label, part in parts.items():
        store = stores[part["embodiment"]]
        episodes = store.parts.get(label, np.arange(len(store.lengths)))
        tasks = [store.tasks[i] for i in np.unique(store.task[episodes])]
        env = part["env"] or no_choice()
        yield TrainingData(
            env_name=f"env of {label}",
            env=env,
            spec=store.spec,
            info=part["dataset"],
            tasks=tasks,
            longest=int(store.lengths[episodes].max(initial=0)),
            # without an environment there is nothing to compare them with
            observation_range=None if is_none(env) else measure_observations(store, episodes),
        )
    if not parts:
        store = stores[ONLY]
        episodes = np.arange(len(store.lengths))
        has_env = not is_none(config.env)
        yield TrainingData(
            env_name="env",
            env=config.env,
            spec=store.spec,
            info=store.info,
            tasks=store.tasks,
            longest=int(store.lengths.max(initial=0)),
            observation_range=measure_observations(store, episodes) if has_env else None,
        )


def measure_observations(
    store: Store, episodes: np.ndarray
) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the least and the greatest of each number of an observation, (S,) each, in at most
    `MOST_ROWS` rows of `MOST_EPISODES` of these episodes; None without episodes.
    """
    if not len(episodes):
        return None
    stride = -(-len(episodes) // MOST_EPISODES)
    rows = store.list_rows(episodes[::stride])
    observations = store.observations[rows[:: -(-len(rows) // MOST_ROWS)]]
    return observations.min(0), observations.max(0)


def longest_episode(config: TrainConfig, spec: Spec) -> int | None:
    """Return the most steps of an episode that the model of a run can act in; None: any number."""
    return spec.horizon if config.tokenizer.get("timesteps") == "learned" else None


def compare(env: Env, data: TrainingData, *, longest: int | None) -> list[str]:
    """Compare one copy of an environment with the data of a run.

    Args:
        env: of one episode.
        data: of the run.
        longest: see `longest_episode`.

    Returns:
        Notes for the user, one line each.

    Raises:
        ValueError: see `check_environments`.
    """
    name = data.env_name
    check_world(env, data, name)
    layout_note = check_env(data.spec, data.info, env, name)
    first_observations = checked_reset(env, 0)
    check_size(env, first_observations, data.spec, name)
    try_step(env, data.spec)
    check_horizon(env, longest, name)
    notes = [
        layout_note,
        compare_observations(env, first_observations, data),
        compare_lengths(env, data),
        compare_texts(env, data, name),
    ]
    notes += [f"{name}: {line}" for line in env.notes()]
    return [note for note in notes if note]


def check_world(env: Env, data: TrainingData, name: str) -> None:
    """Raise a ValueError if an option that makes the world has another value in the data.

    The environment named as the dataset does not follow its options: `env=maze2d-medium` is the
    medium maze beside any data.
    """
    for option in env.world_options:
        if option not in data.info or option not in data.env:
            continue
        expected, got = data.info[option], data.env[option]
        if expected != got:
            raise ValueError(
                f"{name}: expected {option}={expected}, as in the data, got {got}; give "
                f"env.{option}={expected}; {WITHOUT}, and evaluate env=... names another"
            )


def check_size(env: Env, observations: np.ndarray, spec: Spec, name: str) -> None:
    """Raise a ValueError if observations of the environment and the data differ in size.

    observations: (N, S) the first ones of the environment; its `observation_parts` may say another
        size.
    """
    declared = sum(numbers for _, numbers in env.observation_parts)
    for size in (declared, observations.shape[1]):
        if size not in (0, spec.observation_dim):
            raise ValueError(
                f"{name}: expected observations of {spec.observation_dim} numbers, as in the data, "
                f"got {size}; give the environment of the data, or {WITHOUT}"
            )


def try_step(env: Env, spec: Spec) -> None:
    """Take one step in an environment that was reset; a ValueError if its results are not as
    `Env.step` says.
    """
    actions = np.zeros((len(env.tasks), spec.action_dim), np.float32)
    masks = env.action_masks
    if masks is not None:
        actions[:, 0] = masks.argmax(1)  # the first that is allowed
    elif not spec.num_actions:
        actions[:] = np.add(spec.low, spec.high) / 2
    checked_step(env, actions, spec.observation_dim, np.arange(len(actions)))


def check_horizon(env: Env, longest: int | None, name: str) -> None:
    """Raise a ValueError if an episode of the environment may be longer than the model can read."""
    if longest is not None and env.horizon > longest:
        raise ValueError(
            f"{name}: expected episodes of at most {longest:,} steps, the longest in the data, "
            f"since tokenizer.timesteps=learned, got {env.horizon:,}; give env.horizon={longest}, "
            f"dataset.horizon={env.horizon} or tokenizer.timesteps=none"
        )


def compare_observations(env: Env, first_observations: np.ndarray, data: TrainingData) -> str:
    """Compare the observations of the data with those of an environment, number by number.

    Args:
        env: the environment; without an `observation_range`, its first observations alone are
            compared.
        first_observations: (N, S) after a reset.
        data: of the run.

    Returns:
        A note where the data go beyond the bounds of the environment, or where the environment
        begins far from all data; else "". Another order of the columns or another unit, such as an
        image that is divided by 255 on one side alone, has one of the two.
    """
    if data.observation_range is None:
        return ""
    low, high = (bound.astype(float) for bound in data.observation_range)
    names = name_columns(env.observation_parts, len(low))
    differences = []
    if env.observation_range is not None:
        least, most = np.asarray(env.observation_range, float)
        rounding = ROUNDING * (1 + np.maximum(np.abs(low), np.abs(high)))
        for i in np.flatnonzero((low < least - rounding) | (high > most + rounding)):
            differences.append(
                f"{names[i]} is {low[i]:.4g} .. {high[i]:.4g} in the data, the environment has "
                f"{least[i]:.4g} .. {most[i]:.4g}"
            )
    reach = FAR * (high - low)  # 0 of a constant number, which may vary in other episodes
    starts = first_observations.astype(float)
    is_far = ((starts < low - reach) | (starts > high + reach)) & (reach > 0)
    if not differences:
        for i in np.flatnonzero(is_far.any(0)):
            start = starts[is_far[:, i], i][0]
            differences.append(
                f"{names[i]} is {low[i]:.4g} .. {high[i]:.4g} in the data, the environment begins "
                f"with {start:.4g}"
            )
    if not differences:
        return ""
    others = len(differences) - MOST_DIFFERENCES
    more = f", and {others} more numbers" if others > 0 else ""
    return (
        f"{data.env_name}: the observations of the data are unlike those of the environment: "
        f"{'; '.join(differences[:MOST_DIFFERENCES])}{more}; a policy would read other numbers than "
        "it was trained on: record the log with the order and the units of the environment"
    )


def name_columns(parts: Sequence[tuple[str, int]], size: int) -> list[str]:
    """Return a name for each of `size` columns of observations, such as `goal [1]`."""
    if sum(numbers for _, numbers in parts) != size:
        parts = [(VECTOR, size)]
    names = []
    for part, numbers in parts:
        names += [f"{part} [{i}]" for i in range(numbers)]
    return names


def compare_lengths(env: Env, data: TrainingData) -> str:
    """Return a note where the data have longer episodes than the environment; else ""."""
    if data.longest <= env.horizon:
        return ""
    return (
        f"{data.env_name}: the longest episode of the data has {data.longest:,} steps, the "
        f"environment ends one after {env.horizon:,}; check that the log marks where episodes were "
        f"truncated (timeouts), or give env.horizon={data.longest}"
    )


def compare_texts(env: Env, data: TrainingData, name: str) -> str:
    """Compare the task texts of an environment with those of the data.

    Returns:
        A note where both have texts and none of them is the same; else "".

    Raises:
        ValueError: one of the two has texts, the other one has none.
    """
    of_data, of_env = set(data.tasks), set(env.tasks)
    if any(of_data) != any(of_env):
        expected = "no texts, as in the data"
        got = f"the environment has such as {max(of_env)!r}"
        if any(of_data):
            expected = f"texts such as {max(of_data)!r}, as in the data"
            got = "the environment has none"
        fix = "; ".join(env.notes()) or "give both the same, by text= or env.text="
        if not any(of_data):
            fix = (
                "add the text of each episode to the data (a column `tasks` of an .npz or HDF5 file, "
                "Episode.task), or read none, by text=none, which an environment of your own gets as "
                "its option `text`"
            )
        raise ValueError(f"{name}: expected {expected}, {got}; {fix}")
    if of_data & of_env or env.text in SAMPLED_TEXTS or "wordings" in data.info:
        return ""
    return (
        f"{name}: no text of the environment, such as {max(of_env)!r}, is in the data, which have "
        f"such as {max(of_data)!r}"
    )
