"""The environments of a run are compared with its data before the first training step."""

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from decisionllm.config import TrainConfig, one_agent_reads
from decisionllm.datasets import mixture
from decisionllm.datasets.store import Store
from decisionllm.eval.layout import check_env
from decisionllm.eval.rollout import checked_reset, checked_step
from decisionllm.files import explained
from decisionllm.protocols import Env
from decisionllm.registry import Node, build, is_none, no_choice
from decisionllm.schema import Json, Spec

# texts that are made anew for each episode, so that those of the data need not come back
DRAWN = ("paraphrased", "template")
WITHOUT = "env=none trains without an environment"
# options that a dataset and its environment share: with another value it is another world
WORLD = ("maze", "dense")


@dataclass(frozen=True)
class Trained:
    """The data that a policy is trained on, as far as an environment must agree with them."""

    label: str  # of a part of a mixture; empty: the whole dataset
    env: Node
    spec: Spec
    info: Json  # of the dataset
    tasks: Collection[str]  # its distinct texts


def check_environments(config: TrainConfig, stores: Mapping[str, Store]) -> list[str]:
    """Compare each environment that a run will be evaluated in with the data of the run.

    Args:
        config: of the run.
        stores: by embodiment, see `mixture.stores`.

    Returns:
        Notes for the user, one line each: what differs and may be meant so.

    Raises:
        ValueError: an environment can't be built, or its observations, actions, horizon, texts or
            world are not those of the data; or log.rollout_every needs one, or its teams, and
            there is none.
    """
    notes: list[str] = []
    for trained in parts(config, stores):
        if is_none(trained.env):
            check_unwatched(config, trained.label)
            continue
        with explained("env: could not be built", ValueError, ImportError, OSError, remedy=WITHOUT):
            env = one_copy(json.dumps(trained.env, sort_keys=True))
        notes += compare(env, trained, longest=longest_episode(config, trained.spec))
        check_watched_team(config, env, trained.label)
    return notes


def check_unwatched(config: TrainConfig, label: str) -> None:
    """Raise a ValueError if the score of a run without an environment is to be watched."""
    if config.log.rollout_every:
        of_part = f" of the part {label}" if label else ""
        raise ValueError(
            f"log.rollout_every={config.log.rollout_every}: expected an environment{of_part} to roll "
            "out in, got env=none; give one, or log.rollout_every=0"
        )


def check_watched_team(config: TrainConfig, env: Env, label: str) -> None:
    """Raise a ValueError if a team is to be watched in an environment, which was reset, without
    teams.
    """
    if config.log.rollout_every and not one_agent_reads(config) and env.groups is None:
        of_part = f" of the part {label}" if label else ""
        raise ValueError(
            f"log.rollout_every={config.log.rollout_every}: expected an environment{of_part} with "
            f"groups of agents, since team.execution={config.team.execution}, got none; take "
            "team.execution=per_agent or log.rollout_every=0"
        )


# Some are slow to build, and the parts of a mixture or the runs of a study share them.
@lru_cache(maxsize=8)
def one_copy(node: str) -> Env:
    """One copy of the environment of a config node, as JSON."""
    env: Env = build(json.loads(node), 1)
    return env


def parts(config: TrainConfig, stores: Mapping[str, Store]) -> Iterator[Trained]:
    """The dataset of a run with its environment; of a mixture, each part with its own."""
    found = mixture.evaluation_parts(config.dataset, stores)
    for label, part in found.items():
        store = stores[part["embodiment"]]
        episodes = store.parts.get(label, np.arange(len(store.lengths)))
        tasks = [store.tasks[i] for i in np.unique(store.task[episodes])]
        env = part["env"] or no_choice()
        yield Trained(label, env, store.spec, part["dataset"], tasks)
    if not found:
        store = stores[""]
        yield Trained("", config.env, store.spec, store.info, store.tasks)


def longest_episode(config: TrainConfig, spec: Spec) -> int | None:
    """The most steps of an episode that the model of a run can act in; None: any number."""
    return spec.horizon if config.tokenizer.get("timesteps") == "learned" else None


def compare(env: Env, trained: Trained, *, longest: int | None) -> list[str]:
    """Compare one copy of an environment with the data of a run.

    Args:
        env: of one episode.
        trained: the data.
        longest: see `longest_episode`.

    Returns:
        Notes for the user, one line each.

    Raises:
        ValueError: see `check_environments`.
    """
    name = f"env of {trained.label}" if trained.label else "env"
    check_world(trained, name)
    note = check_env(trained.spec, trained.info, env, name)
    started = checked_reset(env, 0)
    check_size(env, started, trained.spec, name)
    try_step(env, trained.spec)
    check_horizon(env, longest, name)
    notes = [note, compare_texts(env, trained, name)]
    notes += [f"{name}: {line}" for line in env.notes()]
    return [note for note in notes if note]


def check_world(trained: Trained, name: str) -> None:
    """Raise a ValueError if the environment has another maze than the data, or other rewards.

    The environment named as the dataset does not follow its options: `env=maze2d-medium` is the
    medium maze beside any data.
    """
    for option in WORLD:
        if option not in trained.info or option not in trained.env:
            continue
        own, other = trained.info[option], trained.env[option]
        if own != other:
            wanted = f"{option}={own}, as in the data"
            remedy = f"give env.{option}={own}; {WITHOUT}, and evaluate env=... names another"
            raise ValueError(f"{name}: expected {wanted}, got {other}; {remedy}")


def check_size(env: Env, started: np.ndarray, spec: Spec, name: str) -> None:
    """Raise a ValueError if observations of the environment and the data differ in size.

    started: (N, S) the first observations of the environment; its `observation_parts` may say
        another size.
    """
    declared = sum(numbers for _, numbers in env.observation_parts)
    for size in (declared, started.shape[1]):
        if size not in (0, spec.observation_dim):
            wanted = f"observations of {spec.observation_dim} numbers, as in the data"
            remedy = f"give the environment of the data, or {WITHOUT}"
            raise ValueError(f"{name}: expected {wanted}, got {size}; {remedy}")


def try_step(env: Env, spec: Spec) -> None:
    """Take one step in an environment that was started; a ValueError if its results are not what
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
        wanted = f"episodes of at most {longest:,} steps, the longest in the data"
        remedies = (
            f"env.horizon={longest}, dataset.horizon={env.horizon} or tokenizer.timesteps=none"
        )
        reason = "since tokenizer.timesteps=learned"
        got = f"{env.horizon:,}"
        raise ValueError(f"{name}: expected {wanted}, {reason}, got {got}; give {remedies}")


def compare_texts(env: Env, trained: Trained, name: str) -> str:
    """Compare the task texts of an environment with those of the data.

    Returns:
        A note where both have texts and none of them is the same; else "".

    Raises:
        ValueError: one of the two has texts, the other one has none.
    """
    own, other = set(trained.tasks), set(env.tasks)
    if any(own) != any(other):
        wanted = "no texts, as in the data"
        got = f"the environment has such as {max(other)!r}"
        if any(own):
            wanted = f"texts such as {max(own)!r}, as in the data"
            got = "the environment has none"
        remedy = "; ".join(env.notes()) or "give both the same, by text= or env.text="
        raise ValueError(f"{name}: expected {wanted}, {got}; {remedy}")
    if own & other or env.text in DRAWN or "wordings" in trained.info:
        return ""
    absent = f"no text of the environment, such as {max(other)!r}, is in the data"
    return f"{name}: {absent}, which have such as {max(own)!r}"
