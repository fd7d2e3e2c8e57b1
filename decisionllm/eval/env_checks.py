"""Checks of a run's environments against its data, before the first training step."""

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from decisionllm.config import TrainConfig, one_agent_reads
from decisionllm.datasets import mixture
from decisionllm.datasets.mixture_parts import ONLY
from decisionllm.datasets.store import Store
from decisionllm.eval.env_layout import check_env
from decisionllm.eval.rollout import checked_reset, checked_step
from decisionllm.files import explain_errors
from decisionllm.protocols import Env
from decisionllm.registry import Node, build, is_none, no_choice
from decisionllm.schema import Json, Spec

# text options whose texts are new in each episode, so that those of the data need not come back
SAMPLED_TEXTS = ("paraphrased", "template")
WITHOUT = "env=none trains without an environment"


@dataclass(frozen=True)
class TrainingData:
    """The data that a policy is trained on, as far as an environment must agree with them."""

    env_name: str  # to begin a message with, such as "env" or "env of maze", a part of a mixture
    env: Node
    spec: Spec
    info: Json  # of the dataset
    tasks: Collection[str]  # its distinct texts


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
        yield TrainingData(f"env of {label}", env, store.spec, part["dataset"], tasks)
    if not parts:
        store = stores[ONLY]
        yield TrainingData("env", config.env, store.spec, store.info, store.tasks)


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
    notes = [layout_note, compare_texts(env, data, name)]
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
        raise ValueError(f"{name}: expected {expected}, {got}; {fix}")
    if of_data & of_env or env.text in SAMPLED_TEXTS or "wordings" in data.info:
        return ""
    return (
        f"{name}: no text of the environment, such as {max(of_env)!r}, is in the data, which have "
        f"such as {max(of_data)!r}"
    )
