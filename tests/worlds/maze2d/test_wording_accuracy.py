"""Instruction-following accuracy of policies whose reading of texts is known."""

import re
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest

from decisionllm.schema import Spec
from decisionllm.worlds.maze2d.dataset import goal_facts, task_text
from decisionllm.worlds.maze2d.env import Maze2D
from decisionllm.worlds.maze2d.wording_accuracy import measure_wording_accuracy


@dataclass
class Reader:
    """Pushes towards the last row and column that a text names in digits; without any it does
    nothing.
    """

    planning_horizon: int = 3
    decode: str = "sample"
    model = SimpleNamespace(spec=Spec(4, 2, horizon=300, low=(-1, -1), high=(1, 1)))
    info = {"dataset": {}}

    def act(self, histories):
        assert (self.planning_horizon, self.decode) == (0, "mode")
        digits = [re.findall(r"\d", history.task.replace(".0", "")) for history in histories]
        return np.array(
            [[int(d) / 3 for d in row[-2:]] if len(row) > 1 else [0, 0] for row in digits]
        )


def test_a_text_is_understood_where_its_actions_are_nearest_to_those_of_its_task():
    facts = {
        task: facts
        for task, facts in goal_facts("umaze").items()
        if task in (task_text("umaze", (1, 1)), task_text("umaze", (3, 3)))
    }
    accuracy = measure_wording_accuracy(Reader(), np.zeros((3, 4)), facts, ["1,1", "3,3"], frames=1)
    # Digits of the own goal come last in 3 of 7 new frames, 2 of 7 contrasts and 3 of 6 frames with
    # unseen words, digits of the other goal in 1 contrast. Actions without digits, zeros, are
    # nearest to those of 1,1.
    shares = {
        "chance": 1 / 2,
        "trained": 1,
        "held_out": 27 / 40,
        "new_frames": 10 / 14,
        "contrast": 8 / 14,
        "unseen_words": 9 / 12,
    }
    assert accuracy["understood"] == pytest.approx(shares, abs=1e-4)
    assert accuracy["nearest"] == {
        "rows": ["1,1", "3,3"],
        "columns": ["1,1", "3,3"],
        "shares": [[0.95, 0.05], [0.6, 0.4]],
    }


def test_the_env_probes_a_policy_that_was_trained_on_wordings():
    facts = goal_facts("umaze")
    reader = Reader()
    env = Maze2D(1, maze="umaze", text="paraphrased")
    assert env.probe(reader) == {}, "no wordings in its data"
    reader.info = {"dataset": {"wordings": dict(reversed(facts.items()))}}
    reader.config = {"text_wordings": 1}
    accuracy = env.probe(reader)
    assert accuracy["understood"]["trained"] == 1 and accuracy["nearest"]["rows"] == [
        "1,1",
        "1,2",
        "1,3",
        "2,3",
        "3,1",
        "3,2",
        "3,3",
    ]
