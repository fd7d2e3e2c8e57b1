"""Instruction probes: measure if the actions of a policy change with its task text, and only as they
should.

Letters: M episodes, P probed steps of each, A action size.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from decisionllm.eval import intervals
from decisionllm.eval.text_variants import (
    AS_OTHER,
    CHANGE,
    KEEP,
    OTHER_TASK,
    SHOULD,
    Pair,
    TaskTexts,
    build_variants,
)
from decisionllm.policy.policy import Policy
from decisionllm.schema import Episode, History, Json, Spec

HISTORIES = 256  # in one forward pass of a probe
PROBED_STEPS = 4  # of an episode: its first step, and those at its quarters
# The actions of an episode have changed if their distance is larger, see `ActionScale`: a discrete
# action at one step, or a fifth of a standard deviation, which is commonly called a small effect
# (J. Cohen, Statistical Power Analysis for the Behavioral Sciences, 1988).
LEAST_CHANGE = 0.2
LEAST_SPREAD = 1e-3  # of the range of an action: rounding is no change
# of a user's file: the variant, what the actions should do, whether the texts mean the same
OWN_PAIRS = (("own pairs, same", KEEP, True), ("own pairs, different", CHANGE, False))


def probe_texts(
    policy: Policy,
    episodes: Sequence[Episode],
    tasks: TaskTexts,
    *,
    pairs: Sequence[Pair] = (),
    clusters: np.ndarray | None = None,
    seed: int = 0,
) -> list[Json]:
    """Measure how the actions at recorded steps change if only the task text is replaced.

    Args:
        policy: acts by the mode of its distribution, without planning, each agent by itself.
        episodes: M episodes of a rollout, with task texts.
        tasks: other tasks are drawn from these.
        pairs: of a user's file.
        clusters: (M,) episodes with the same number repeat one case or share a world.
        seed: of the texts that are drawn.

    Returns:
        A row for each variant of the texts:
        variant, should: its name, and what the actions should do.
        measure, share, low, high: `changed`, or of a contrast `as_other`, with its 95 % interval.
        n: episodes; of a user's file, the episodes of each pair.
        changed: the share of episodes whose actions change, see `LEAST_CHANGE`.
        as_other: the share of episodes whose actions are nearer to those under the text of the
            other task than to those under the own text; None without another task.
        distance: between the actions of an episode, the mean, see `ActionScale`.
    """
    asking = replace(policy, planning_horizon=0, decode="mode", execution="per_agent")
    cluster = np.arange(len(episodes)) if clusters is None else clusters
    own_texts = [episode.task for episode in episodes]
    variants = build_variants(own_texts, tasks, np.random.default_rng(seed))

    # The actions (M, P, A) under each variant. An episode without this variant keeps its own text
    # here, and is left out of the row.
    own = ask(asking, episodes, own_texts)
    actions = {}
    for name, texts in variants.items():
        pairs_of_texts = zip(texts, own_texts, strict=True)
        filled = [own_text if text is None else text for text, own_text in pairs_of_texts]
        actions[name] = ask(asking, episodes, filled)
    other = actions.get(OTHER_TASK, own)
    scale = ActionScale.of(np.concatenate([own, other]), policy.spec)

    between = scale.distances(other, own)  # (M,)
    rows = []
    for name, texts in variants.items():
        members = np.flatnonzero(np.array([text is not None for text in texts]))
        distances = scale.distances(actions[name], own)
        to_other = scale.distances(actions[name], other)
        as_other = (to_other < distances) & (between > LEAST_CHANGE)
        has_other = OTHER_TASK in variants
        row = variant_row(
            name,
            SHOULD[name],
            distances[members],
            as_other=as_other[members] if has_other else None,
            clusters=cluster[members],
        )
        rows.append(row)

    for name, should, is_same in OWN_PAIRS:
        selected = [pair for pair in pairs if pair.same == is_same]
        if selected:
            each = [ask_pair(asking, episodes, pair, scale) for pair in selected]
            distances = np.concatenate([probed for probed, _ in each])
            numbers = np.concatenate([cluster[members] for _, members in each])
            row = variant_row(name, should, distances, as_other=None, clusters=numbers)
            row["pairs"] = []
            for pair, (probed, _) in zip(selected, each, strict=True):
                share = float((probed > LEAST_CHANGE).mean())
                row["pairs"].append({**asdict(pair), "share": share, "n": len(probed)})
            rows.append(row)
    return rows


def ask_pair(
    policy: Policy, episodes: Sequence[Episode], pair: Pair, scale: "ActionScale"
) -> tuple[np.ndarray, np.ndarray]:
    """Return the distances (m,) between the actions under the two texts of a pair, and the numbers
    (m,) of the episodes: those with its text, or all if none has it.
    """
    members = [i for i, episode in enumerate(episodes) if episode.task == pair.text]
    members = members or list(range(len(episodes)))
    probed = [episodes[i] for i in members]
    before = ask(policy, probed, [pair.text] * len(probed))
    after = ask(policy, probed, [pair.other] * len(probed))
    return scale.distances(after, before), np.array(members)


def variant_row(
    name: str,
    should: str,
    distances: np.ndarray,
    *,
    as_other: np.ndarray | None,
    clusters: np.ndarray,
) -> Json:
    """Return the row of a variant, see `probe_texts`.

    Args:
        name, should: of the variant.
        distances: (m,) between the actions under the variant and under the own text.
        as_other: (m,) bool, see `probe_texts`; None without another task.
        clusters: (m,) episodes that are resampled together.
    """
    changed = distances > LEAST_CHANGE
    measure = "changed"
    values = changed
    if should == AS_OTHER and as_other is not None:
        measure = "as_other"
        values = as_other
    low, high = intervals.over_episodes(values, clusters)
    return {
        "variant": name,
        "should": should,
        "measure": measure,
        "share": float(values.mean()),
        "low": low,
        "high": high,
        "n": len(distances),
        "changed": float(changed.mean()),
        "as_other": None if as_other is None else float(as_other.mean()),
        "distance": round(float(distances.mean()), 4),
    }


@dataclass(frozen=True)
class ActionScale:
    """The unit of distances between the actions of one policy.

    The distance of an episode is the root mean square over its probed steps. Two discrete actions
    have distance 0 if they are equal, or else 1. The distance of continuous actions is the root mean
    square of the differences of their numbers, each divided by the standard deviation of this number
    over all probed steps, under the own texts and those of other tasks.

    Attributes:
        spread: (A,) standard deviations; None: of discrete actions.
    """

    spread: np.ndarray | None

    @classmethod
    def of(cls, actions: np.ndarray, spec: Spec) -> "ActionScale":
        """Return the scale of these actions (M, P, A). spec: of the data."""
        if spec.num_actions:
            return cls(None)
        least = LEAST_SPREAD * (np.array(spec.high) - np.array(spec.low))
        return cls(np.maximum(actions.std((0, 1)), least))

    def distances(self, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        """Return the distances (M,) of episodes with actions (M, P, A)."""
        if self.spread is None:
            squares = np.any(first != second, axis=-1).astype(float)  # (M, P)
        else:
            squares = np.square((first - second) / self.spread).mean(-1)
        return np.asarray(np.sqrt(squares.mean(1)))


def ask(policy: Policy, episodes: Sequence[Episode], texts: Sequence[str]) -> np.ndarray:
    """Return the actions (M, P, A) at the probed steps of M episodes, under these texts (M,)."""
    histories = []
    for episode, text in zip(episodes, texts, strict=True):
        steps = np.arange(PROBED_STEPS) * len(episode.rewards) // PROBED_STEPS
        histories += [history_at(episode, int(step), text) for step in steps]
    actions = act_in_batches(policy, histories, HISTORIES)
    return actions.reshape(len(episodes), PROBED_STEPS, -1)


def history_at(episode: Episode, step: int, text: str) -> History:
    """Return what a policy has seen of an episode before this step, with this text."""
    masks = episode.action_masks
    return History(
        episode.observations[: step + 1],
        episode.actions[:step],
        episode.rewards[:step],
        task=text,
        action_masks=None if masks is None else masks[: step + 1],
    )


def act_in_batches(policy: Policy, histories: Sequence[History], size: int) -> np.ndarray:
    """Return the actions (n, A) of n histories, `size` of them in a forward pass."""
    parts = [policy.act(histories[k : k + size]) for k in range(0, len(histories), size)]
    return np.concatenate(parts)
