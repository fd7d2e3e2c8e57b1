"""The dataset of episodes that a trained run imagines: its planner acts in its own learned model,
so that a plain model can be trained on what it does and act without planning."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from decisionllm.checks import check_at_least
from decisionllm.datasets.dataset_reader import DatasetReader, data_node
from decisionllm.datasets.store import Store, replace_task_texts
from decisionllm.datasets.store_cache import prepare_store
from decisionllm.models.value_planner import ImaginedValue
from decisionllm.policy import loading
from decisionllm.policy.policy import Policy
from decisionllm.progress import track
from decisionllm.protocols import Source
from decisionllm.registry import Node
from decisionllm.runs import checkpoint, directory
from decisionllm.schema import Episode, Json

# share of the imagined steps outside of the support, beyond which they are a fault of the dataset
OUTSIDE = 0.1


def load(
    *,
    run: str,
    text: str = "auto",
    episodes: int = 2400,
    steps: int = 60,
    noise: float = 0.0,
    seed: int = 0,
) -> Source:
    """Episodes from observations of a run's data on, every second one with the task of another
    observation. One ends, truncated, before the first step about which the members of the model
    disagree.

    Args:
        run: directory of a run that was trained with planner=value.
        text: `auto` or that of the run, whose task texts the episodes have, or `paraphrased`: these
            in the wordings of their facts, where the run's dataset has both.
        episodes: number of episodes.
        steps: steps of each episode, unless the task ends it.
        noise: standard deviation of the noise on continuous actions, in half ranges; the stored
            action is the one without noise.
        seed: of the first observations and the noise.

    Raises:
        ValueError: an option cannot be, the run has no value, or reads other texts.
    """
    check_at_least("dataset.episodes", episodes, 1)
    check_at_least("dataset.steps", steps, 1)
    policy = loading.load_policy(run)
    config: Node = policy.config
    own = check_text(run, text, config, policy.info)
    imagined = policy.model.planner
    if not isinstance(imagined, ImaginedValue):
        raise ValueError(f"dataset.run={run}: expected a run trained with planner=value")
    store = prepare_store(config["dataset"], config["cache_dir"], config["transform"])
    rng = np.random.default_rng(seed)
    first = rng.integers(len(store.rewards), size=episodes)
    # Every second one has the task of another row: what rests at one goal is sent to another one,
    # as at the start of an episode of the world. A log that walks from goal to goal has no such
    # step.
    task_rows = first.copy()
    task_rows[1::2] = rng.permutation(first[1::2])
    tasks = task_texts(store, task_rows)
    observations = store.observations[first]
    rollout = imagine_episodes(
        policy, imagined, observations, tasks, steps=steps, noise=noise, rng=rng
    )
    supported = supported_episodes(rollout, tasks)
    if not supported:
        raise ValueError(
            f"dataset.run={run}: expected a model whose members agree about some first step, got "
            "none; train it for longer"
        )
    num_steps = sum(len(episode.rewards) for episode in supported)
    outside = round(1 - num_steps / int(rollout.lengths.sum()), 4)
    facts = {task: store.facts[task] for task in dict.fromkeys(tasks) if task in store.facts}
    info: Json = {
        "name": f"imagined({policy.info['dataset']['name']})",
        "env": "imagined",
        "run": run,
        "text": own if text == "auto" else text,
        "noise": noise,
        "outside_support": outside,
        "seed": seed,
        "faults": support_faults(outside),
    }
    if text == "paraphrased":
        info["wordings"] = facts
    spec = replace(store.spec, horizon=max(steps, store.spec.horizon))
    return Source(spec, supported, info, facts)


def task_texts(store: Store, rows: np.ndarray) -> list[str]:
    """The task text of the episode that each row (m,) of a store is a step of."""
    return [store.tasks[task] for task in store.task[store.find_episodes(rows)]]


@dataclass(frozen=True)
class ImaginedEpisodes:
    """E imagined episodes of T steps, raw units; what follows the end of a task is none of it."""

    observations: np.ndarray  # (E, T, S) float32
    actions: np.ndarray  # (E, T, A) float32, without noise
    rewards: np.ndarray  # (E, T) float32
    ended: np.ndarray  # (E, T) bool, the task ends the episode after this step
    supported: np.ndarray  # (E, T) bool, the members agree about this step

    @property
    def lengths(self) -> np.ndarray:
        """(E,) steps until the task ends an episode."""
        T = self.ended.shape[1]
        lengths: np.ndarray = np.where(self.ended.any(1), self.ended.argmax(1) + 1, T)
        return lengths


@torch.no_grad()
def imagine_episodes(
    policy: Policy,
    imagined: ImaginedValue,
    observations: np.ndarray,
    tasks: Sequence[str],
    *,
    steps: int,
    noise: float,
    rng: np.random.Generator,
) -> ImaginedEpisodes:
    """Let a policy act in a learned model.

    Args:
        policy: that acts.
        imagined: its planner, whose model says what follows.
        observations: (E, S) the first ones, raw units.
        tasks: E texts.
        steps: T.
        noise: on continuous actions, see `load`.
        rng: of the noise.
    """
    units = policy.model.normalizer
    session = policy.begin(tasks, steps)
    rewards = None
    columns = []
    for _ in track(range(steps), "imagining"):
        actions = session.act(observations, rewards)
        noisy = units.actions(torch.from_numpy(actions))
        if not policy.spec.num_actions:
            normal = torch.from_numpy(rng.normal(size=noisy.shape)).float()
            noisy = (noisy + noise * normal).clamp(-1, 1)
        states = imagined.states(units.observations(torch.from_numpy(observations)), tasks)
        after, received_now, ended, agreed = imagined.advance(states, noisy)
        rewards = received_now.numpy()
        columns.append((observations, actions, rewards, ended.numpy(), agreed.numpy()))
        observations = units.raw_observations(after).numpy()
    seen, taken, received, over, supported = (np.stack(c, 1) for c in zip(*columns, strict=True))
    return ImaginedEpisodes(
        seen.astype(np.float32),
        taken.astype(np.float32),
        received.astype(np.float32),
        over,
        supported,
    )


def supported_episodes(played: ImaginedEpisodes, tasks: Sequence[str]) -> list[Episode]:
    """The episodes up to the first step that the members disagree about; none of an episode that
    begins with such a step.
    """
    agreed = np.logical_and.accumulate(played.supported, 1).sum(1)  # (E,) steps
    lengths = np.minimum(played.lengths, agreed)
    made = []
    for i, n in enumerate(lengths.tolist()):
        if not n:
            continue
        terminated = bool(played.ended[i, n - 1])
        episode = Episode(
            played.observations[i, :n],
            played.actions[i, :n],
            played.rewards[i, :n],
            task=tasks[i],
            group=i,
            terminated=terminated,
            truncated=not terminated,
        )
        made.append(episode)
    return made


def data_options(*, run: str, text: str = "auto", **options: object) -> Json:
    """See `datasets.store`.

    The texts of the data are those of the run; a ValueError for a `text` that can't be made of
    them.
    """
    config, info = directory.read(run)
    check_text(run, text, config, next(iter(info["embodiments"].values())))
    return {"run": run, "text": "auto", **options}


def reword_texts(store: Store, *, text: str = "auto", **options: object) -> Store:
    """See `datasets.store`."""
    own = store.info["text"]
    tasks = [store.tasks[i] for i in store.task]
    return replace_task_texts(store, own if text == "auto" else text, tasks)


def check_text(run: str, text: str, config: Json, info: Json) -> str:
    """The text that a run reads.

    Args:
        run: directory of the run.
        text: of the dataset; `auto`: that of the run.
        config: of the run.
        info: of its embodiment.

    Raises:
        ValueError: `text` is neither what the run reads nor that in other wordings. Its environment
            would have other texts than the episodes.
    """
    read = directory.find_data_text(info)
    offered = [read]
    # Its data are those of text=paraphrased, so that its texts have facts.
    if data_node(config["dataset"] | {"text": "paraphrased"})["text"] == read:
        offered.append("paraphrased")
    if text != "auto" and text not in offered:
        reason = f"{run} reads text={read}, and so must what imitates it"
        raise ValueError(
            f"dataset.text={text}: {reason}; give {' or '.join(f'text={each}' for each in offered)}"
        )
    return read


def support_faults(outside: float) -> list[str]:
    """Return the warning of the card and the training for this share of steps outside of the
    support: one sentence, or nothing.
    """
    if outside <= OUTSIDE:
        return []
    what = (
        f"{100 * outside:.1f} % of the imagined steps are outside of the support of the run's "
        "data and were left out"
    )
    return [f"{what}; imagine fewer steps (dataset.steps)"]


def files(*, run: str, **options: object) -> list[Path]:
    """The weights of the run, and its options, by which it acts."""
    return [checkpoint.checkpoint_folder(run) / "model.safetensors", Path(run) / "config.yaml"]


READER = DatasetReader(version=2, files=files, data_options=data_options, set_texts=reword_texts)
