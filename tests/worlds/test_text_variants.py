"""Variants of task texts that have wordings."""

import numpy as np

from decisionllm.eval.text_variants import TaskTexts, text_variants
from decisionllm.worlds.babyai.missions import facts_by_mission
from decisionllm.worlds.maze2d.dataset import goal_facts, task_text


def draws():
    return np.random.default_rng(0)


def test_wordings_of_one_task_are_no_other_task():
    facts = goal_facts("umaze")
    tasks = TaskTexts(list(facts), facts, frames=1)
    rng = draws()
    own = tasks.wordings[task_text("umaze", (1, 1))]["contrast"][0]
    for _ in range(20):
        variants = text_variants(own, tasks, rng)
        assert tasks.task_of(variants["other task"]) != tasks.task_of(own)
        for kind in ("new frames", "unseen words"):
            assert tasks.task_of(variants[f"paraphrase, {kind}"]) == tasks.task_of(own)
    assert "contrast, reversed" not in variants, "the held-out frames have contrasts"


def test_wordings_of_a_single_task_have_no_other_task():
    (own, facts), *_ = goal_facts("umaze").items()
    tasks = TaskTexts([], {own: facts}, frames=0)
    variants = text_variants(tasks.wordings[own]["new_frames"][0], tasks, draws())
    assert "paraphrase, trained" in variants
    assert not {"other task", "contrast", "contrast, reversed"} & set(variants)


def test_a_contrast_of_wordings_means_the_other_task():
    facts = goal_facts("umaze")
    tasks = TaskTexts(list(facts), facts, frames=0)
    own, other = task_text("umaze", (1, 1)), task_text("umaze", (3, 3))
    sentences = {
        tasks.contrast(own, other, np.random.default_rng(k))["contrast"] for k in range(50)
    }
    first = "Maze2D umaze. The goal is row 3, column 3; it was never row 1, column 1."
    assert first in sentences and len(sentences) == 7


def test_a_policy_of_one_wording_is_asked_in_held_out_frames():
    facts = goal_facts("umaze")
    variants = text_variants(task_text("umaze", (1, 1)), TaskTexts([], facts), draws())
    assert "paraphrase, trained" not in variants and "paraphrase, new frames" in variants
    assert variants["other task"] in facts and "contrast, reversed" in variants


def test_a_mission_is_asked_with_each_kind_of_new_words():
    facts = facts_by_mission(["go to the red ball", "go to the blue key"])
    variants = text_variants("go to the red ball", TaskTexts([], facts, frames=0), draws())
    paraphrases = {name for name in variants if name.startswith("paraphrase, ")}
    kinds = ("trained", "new action words", "new object words", "both new")
    assert paraphrases == {f"paraphrase, {kind}" for kind in kinds}
    assert variants["paraphrase, both new"] in (
        "Proceed to the crimson sphere.",
        "Pay the scarlet orb a visit.",
    )
