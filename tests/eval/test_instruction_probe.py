"""Instruction probes: shares of policies whose reading of texts is known."""

import re
from dataclasses import dataclass, replace

import numpy as np
import pytest

from decisionllm.eval.instruction_probe import ActionScale, probe_texts
from decisionllm.eval.text_variants import Pair, TaskTexts
from decisionllm.schema import Episode, Spec

GOALS = ("north", "south", "east", "west")
TEXTS = [f"Walk to the goal in the {goal}." for goal in GOALS]
MOVES = {"north": (0, 1), "south": (0, -1), "east": (1, 0), "west": (-1, 0)}


@dataclass
class Walker:
    """Walks to the last goal that its text names in small letters; without any it stands still.

    A continuous action is also longer by `letter` for each letter of the text.
    """

    reads: bool = True
    discrete: bool = True
    letter: float = 0.0
    planning_horizon: int = 3
    decode: str = "sample"
    execution: str = "joint"

    @property
    def spec(self):
        if self.discrete:
            return Spec(2, 1, horizon=20, num_actions=5)
        return Spec(2, 2, horizon=20, low=(-1, -1), high=(1, 1))

    def act(self, histories):
        assert (self.planning_horizon, self.decode, self.execution) == (0, "mode", "per_agent")
        actions = []
        for history in histories:
            task = history.task if self.reads else ""
            goals = re.findall("|".join(GOALS), task)
            goal = goals[-1] if goals else ""
            if self.discrete:
                allowed = history.action_masks is None or history.action_masks[-1].all()
                actions.append([1 + GOALS.index(goal) if goal and allowed else 0])
                continue
            x, y = MOVES.get(goal, (0, 0))
            actions.append([x + self.letter * len(task), y])
        return np.array(actions, np.float32)


def walks(count, steps=8, **fields):
    """Episodes to the goals in turn."""
    episodes = []
    for i in range(count):
        zeros = np.zeros((steps, 2), np.float32)
        task = TEXTS[i % len(TEXTS)]
        episodes.append(Episode(zeros, zeros[:, :1], zeros[:, 0], task=task, **fields))
    return episodes


def shares_of(policy, episodes, **options):
    rows = probe_texts(policy, episodes, TaskTexts(TEXTS, {}), **options)
    return {row["variant"]: row["share"] for row in rows}


def test_actions_of_a_policy_that_reads_its_text_change_with_the_task():
    shares = shares_of(Walker(), walks(8))
    assert (
        shares
        == {
            "full stop": 0,
            "capitals": 1,  # it knows small letters alone
            "typing error": 0.5,  # in the longest word: the goal, but east and west are no longer than Walk
            "politeness": 0,
            "other task": 1,
            "contrast": 1,
            "contrast, reversed": 0,  # the last goal that is named is the own one
            "no text": 1,
        }
    )


@pytest.mark.parametrize("discrete", [True, False])
def test_actions_of_a_policy_that_ignores_its_text_never_change(discrete):
    shares = shares_of(Walker(reads=False, discrete=discrete), walks(8))
    assert set(shares.values()) == {0}


def test_with_one_task_no_other_task_is_asked_for():
    rows = probe_texts(Walker(), walks(1), TaskTexts(TEXTS[:1], {}))
    assert {row["variant"]: row["as_other"] for row in rows} == dict.fromkeys(
        ["full stop", "capitals", "typing error", "politeness", "no text"]
    )


def test_a_continuous_action_changes_if_it_differs_by_a_fifth_of_its_spread():
    # The spread of (1, 0), (-1, 0), (0, 1) and (0, -1) is about 0.7. One letter less changes one of
    # two numbers by 0.01, and "Please, " by 8 of them.
    near_by = shares_of(Walker(discrete=False, letter=0.01), walks(40))
    assert near_by["full stop"] == near_by["politeness"] == 0
    far = shares_of(Walker(discrete=False, letter=0.1), walks(40))
    assert far["full stop"] == 0 and far["politeness"] == 1


def test_the_distance_of_actions_is_in_their_spread():
    spec = Spec(1, 2, horizon=5, low=(-1, -1), high=(1, 1))
    actions = np.array([[[0.0, 0.3], [0.4, 0.3]]])  # one episode of two steps
    scale = ActionScale.of(actions, spec)
    # 0.2, and a thousandth of the range of an action that never changes
    assert scale.spread.tolist() == pytest.approx([0.2, 0.002])
    changed = actions + np.array([[[0.2, 0.0], [0.0, 0.004]]])
    # squares of the differences in units of the spread: 1 and 0, 0 and 4
    assert scale.distances(changed, actions).tolist() == pytest.approx([(5 / 4) ** 0.5])


def test_a_discrete_action_that_is_another_one_has_distance_1():
    scale = ActionScale.of(np.zeros((1, 4, 1)), Spec(1, 1, horizon=5, num_actions=9))
    first, second = np.zeros((2, 1, 4, 1))
    second[0, 0] = 8
    assert scale.distances(first, second).tolist() == [(1 / 4) ** 0.5]


def test_own_pairs_are_asked_for_at_the_steps_of_their_task():
    pairs = [
        Pair(TEXTS[0], "Head north", same=True),
        Pair(TEXTS[0], "Go up", same=True),
        Pair(TEXTS[1], "Head east", same=False),
        Pair("Sit", "Head west", same=False),  # no episode has it
    ]
    rows = {
        row["variant"]: row
        for row in probe_texts(Walker(), walks(8), TaskTexts(TEXTS, {}), pairs=pairs)
    }
    same, different = rows["own pairs, same"], rows["own pairs, different"]
    assert (same["share"], same["n"], same["should"]) == (1 / 2, 4, "keep")
    assert (different["share"], different["n"], different["should"]) == (1, 2 + 8, "change")
    assert [pair["share"] for pair in same["pairs"]] == [0, 1]


def test_repetitions_of_an_episode_are_one_case_in_the_interval():
    texts = [TEXTS[0], TEXTS[1]] * 4
    pairs = [Pair(TEXTS[0], "Stand", same=False), Pair(TEXTS[1], "Go south", same=False)]
    episodes = [replace(walk, task=text) for walk, text in zip(walks(8), texts, strict=True)]
    tasks = TaskTexts(TEXTS, {})
    for clusters, low in ((None, 0.125), (np.arange(8) % 2, 0)):
        row = probe_texts(Walker(), episodes, tasks, pairs=pairs, clusters=clusters)[-1]
        assert row["share"] == 0.5 and row["low"] == low


def test_the_policy_reads_the_action_masks_of_the_rollout():
    blocked = np.ones((8, 5), bool)
    blocked[:, 4] = False
    assert set(shares_of(Walker(), walks(4, action_masks=blocked)).values()) == {0}
