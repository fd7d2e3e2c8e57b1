"""The dataset of episodes that a trained run imagines: its planner acts in its own learned model,
so that a plain model can be trained on what it does and act without planning."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from decisionllm.datasets.store import Store, data_node, prepare, with_texts
from decisionllm.policy import loading
from decisionllm.policy.policy import Policy
from decisionllm.protocols import Source
from decisionllm.registry import register
from decisionllm.runs import checkpoint, directory
from decisionllm.schema import Episode, Json

VERSION = 1  # of how episodes are made
# share of the imagined steps outside of the support, beyond which they are a fault of the dataset
OUTSIDE = 0.1


@register("dataset", "imagined", text="${text}")
def load(
    *,
    run: str,
    text: str = "none",
    episodes: int = 1200,
    steps: int = 120,
    noise: float = 0.0,
    seed: int = 0,
) -> Source:
    """Episodes from observations of a run's data on. One ends, truncated, before the first step
    about which the members of the model disagree.

    Args:
        run: directory of a run that was trained with planner=value.
        text: that of the run, whose task texts the episodes have, or `paraphrased`: these in the
            wordings of their facts, where the run's dataset has both. Empty: that of the run.
        episodes: how many.
        steps: of each, unless the task ends it.
        noise: standard deviation of the noise on continuous actions, in half ranges; the stored
            action is the one without noise.
        seed: of the first observations and the noise.

    Raises:
        ValueError: the run has no value, or reads other texts.
    """
    policy, config, info = loading.load(run)
    own = check_text(run, text, config)
    if not isinstance(policy, Policy) or policy.model.planner is None:
        raise ValueError(f"dataset.run={run}: expected a run trained with planner=value")
    imagined = policy.model.planner
    store, rng = (
        prepare(config["dataset"], config["cache_dir"], config["transform"]),
        np.random.default_rng(seed),
    )
    first = rng.integers(len(store.rewards), size=episodes)
    tasks = [store.tasks[i] for i in store.task[np.searchsorted(store.offsets, first, "right") - 1]]
    session, units, observations = (
        policy.begin(tasks, steps),
        policy.model.normalizer,
        store.observations[first],
    )
    columns, rewards = [], None
    for _ in range(steps):
        actions = session.act(observations, rewards)
        shaken = units.actions(torch.from_numpy(actions))
        if not store.spec.num_actions:
            shaken = (
                shaken + noise * torch.from_numpy(rng.normal(size=shaken.shape)).float()
            ).clamp(-1, 1)
        states = imagined.states(units.observations(torch.from_numpy(observations)), tasks)
        after, paid, over, agreed = imagined.advance(states, shaken)
        rewards = paid.numpy()
        columns.append((observations, actions, rewards, over.numpy(), agreed.numpy()))
        observations = (after * units.observation_scale + units.observation_mean).numpy()
    # (E, steps, ...)
    seen, taken, received, ended, supported = (
        np.stack(column, 1) for column in zip(*columns, strict=True)
    )
    seen, taken, received = (x.astype(np.float32) for x in (seen, taken, received))
    # (E,) steps until the task ends an episode
    whole = np.where(ended.any(1), ended.argmax(1) + 1, steps)
    agreed_steps = np.logical_and.accumulate(supported, 1).sum(1)
    lengths = np.minimum(whole, agreed_steps)
    made = [
        Episode(
            seen[i, :n],
            taken[i, :n],
            received[i, :n],
            task=tasks[i],
            group=i,
            terminated=bool(ended[i, n - 1]),
            truncated=not ended[i, n - 1],
        )
        for i, n in enumerate(lengths.tolist())
        if n
    ]
    if not made:
        raise ValueError(
            f"dataset.run={run}: expected a model whose members agree about some first step, got "
            "none; train it for longer"
        )
    outside = round(1 - float(lengths.sum() / whole.sum()), 4)
    name = f"imagined({info['dataset']['name']})"
    given = {
        "name": name,
        "env": "imagined",
        "run": run,
        "text": text or own,
        "noise": noise,
        "outside_support": outside,
        "seed": seed,
        "faults": support_faults(outside),
    }
    facts = {task: store.facts[task] for task in dict.fromkeys(tasks) if task in store.facts}
    if text == "paraphrased":
        given["wordings"] = facts
    return Source(replace(store.spec, horizon=max(steps, store.spec.horizon)), made, given, facts)


def data_options(*, run: str, text: str = "none", **options: object) -> Json:
    """See `datasets.store`.

    The texts of the data are those of the run; a ValueError for a `text` that can't be made of
    them.
    """
    check_text(run, text, directory.read(run)[0])
    return {"run": run, "text": "", **options}


def worded(store: Store, *, text: str = "none", **options: object) -> Store:
    """See `datasets.store`."""
    return with_texts(store, text or store.info["text"], [store.tasks[i] for i in store.task])


def check_text(run: str, text: str, config: Json) -> str:
    """The text that a run reads.

    Args:
        run: directory of the run.
        text: of the dataset; empty: that of the run.
        config: of the run.

    Raises:
        ValueError: `text` is neither what the run reads nor that in other wordings. Its environment
            would have other texts than the episodes.
    """
    read: str = config["dataset"].get("text", config["text"])
    known = [read]
    # Its data are those of text=paraphrased, so that its texts have facts.
    if data_node(config["dataset"] | {"text": "paraphrased"})["text"] == read:
        known.append("paraphrased")
    if text and text not in known:
        wanted = f"{run} reads text={read}, and so must what imitates it"
        raise ValueError(
            f"dataset.text={text}: {wanted}; give {' or '.join(f'text={each}' for each in known)}"
        )
    return read


def support_faults(outside: float) -> list[str]:
    """What the card and the training say of this share of steps outside of the support: a sentence,
    or nothing.
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
