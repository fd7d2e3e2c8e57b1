"""Variants of a task text that an instruction probe asks a policy with, and pairs of a user's file."""

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

import numpy as np
import yaml

from decisionllm.datasets.paraphrases import (
    Facts,
    group_contrastable,
    held_out_kinds,
    render_contrasts,
    render_frames,
)
from decisionllm.files import explain_errors

# what the actions should do under a variant
KEEP = "keep"
CHANGE = "change"
AS_OTHER = "act as other task"
EITHER = "-"
SHOULD = {
    "full stop": KEEP,
    "capitals": KEEP,
    "typing error": KEEP,
    "politeness": KEEP,
    "paraphrase, trained": KEEP,
    "paraphrase, new frames": KEEP,
    "paraphrase, unseen words": KEEP,
    "paraphrase, new action words": KEEP,
    "paraphrase, new object words": KEEP,
    "paraphrase, both new": KEEP,
    "other task": CHANGE,
    "contrast": AS_OTHER,
    "contrast, reversed": AS_OTHER,
    "no text": EITHER,
}
OTHER_TASK = "other task"
# {variant: kind of held-out frames}
PARAPHRASES = {
    "paraphrase, new frames": "new_frames",
    "paraphrase, unseen words": "unseen_words",
    "paraphrase, new action words": "action_words",
    "paraphrase, new object words": "object_words",
    "paraphrase, both new": "both",
}

PAIR_KEYS = ("text", "other", "same")
BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


class TaskTexts:
    """Task texts, each of which means one of several tasks.

    Args:
        tasks: one text of each task.
        facts: {task text: facts} of tasks that have wordings, see `wordings`. Such a task is
            contrasted with these tasks alone: others are of another world.
        frames: how many trained frames were trained on, 0: all; None: wordings were not trained on.
    """

    def __init__(
        self, tasks: Sequence[str], facts: Mapping[str, Facts], *, frames: int | None = None
    ) -> None:
        self.tasks = [task for task in dict.fromkeys(tasks) if task]
        self.facts = facts
        self.is_paraphrased = frames is not None
        self.wordings: dict[str, dict[str, list[str]]] = {task: {} for task in facts}
        self.task_by_text = {task: task for task in facts}
        if not facts:
            return
        kinds = held_out_kinds(facts.values())
        if "contrast" in kinds and any(
            len(members) < 2 for members in group_contrastable(list(facts.values()))
        ):
            kinds.remove("contrast")  # a task has no other one of its world
        for held_out in (False, True):
            wordings = render_frames(facts, held_out=held_out, frames=frames or 0, kinds=kinds)
            for task, texts in wordings.items():
                for kind, text in texts:
                    self.wordings[task].setdefault(kind, []).append(text)
                    self.task_by_text.setdefault(text, task)

    def task_of(self, text: str) -> str:
        """Return the task of a text."""
        return self.task_by_text.get(text, text)

    def all_texts(self) -> list[str]:
        """Return every text whose task is known."""
        return list(dict.fromkeys([*self.tasks, *self.task_by_text]))

    def draw_other_text(self, text: str, rng: np.random.Generator) -> str:
        """Draw a text of another task; "" if there is no other task."""
        own = self.task_of(text)
        candidates = [*self.facts] if own in self.facts else self.tasks
        others = [task for task in candidates if self.task_of(task) != own]
        if not others:
            return ""
        other = others[rng.integers(len(others))]
        if self.is_paraphrased:
            return self.paraphrase(other, "trained", rng) or other
        return other

    def paraphrase(self, text: str, kind: str, rng: np.random.Generator) -> str:
        """Draw another wording of a text; "" if there is none. kind: of the frame."""
        wordings = self.wordings.get(self.task_of(text), {}).get(kind, [])
        others = [wording for wording in wordings if wording != text]
        return others[rng.integers(len(others))] if others else ""

    def contrast(self, text: str, other: str, rng: np.random.Generator) -> dict[str, str]:
        """Return sentences that say "not this text, but the other one", by the name of the variant."""
        own_facts = self.facts.get(self.task_of(text))
        other_facts = self.facts.get(self.task_of(other))
        if self.is_paraphrased and own_facts and other_facts:
            sentences = render_contrasts(other_facts, own_facts)
            return {"contrast": sentences[rng.integers(len(sentences))]} if sentences else {}
        return {
            "contrast": f"Not this: {text} But this: {other}",
            "contrast, reversed": f"Do this: {other} Not this: {text}",
        }


def build_variants(
    texts: Sequence[str], tasks: TaskTexts, rng: np.random.Generator
) -> dict[str, list[str | None]]:
    """Build the variants of the task texts of M episodes.

    Args:
        texts: (M,) of the episodes.
        tasks: other tasks are drawn from these.
        rng: draws other tasks, letters to swap and wordings.

    Returns:
        {variant: (M,) texts, None where this variant of a text does not exist}, in the order of
        `SHOULD`.
    """
    each = [text_variants(text, tasks, rng) for text in texts]
    variants = {}
    for name in SHOULD:
        column = [variant.get(name) for variant in each]
        if any(text is not None for text in column):
            variants[name] = column
    return variants


def text_variants(text: str, tasks: TaskTexts, rng: np.random.Generator) -> dict[str, str]:
    """Build the variants of one task text: {variant: text}."""
    variants = {
        "full stop": toggle_full_stop(text),
        "capitals": text.lower() if text.isupper() else text.upper(),
        "typing error": swap_letters(text, rng),
        "politeness": ask_politely(text),
    }
    for name, kind in PARAPHRASES.items():
        variants[name] = tasks.paraphrase(text, kind, rng)
    if tasks.is_paraphrased:
        variants["paraphrase, trained"] = tasks.paraphrase(text, "trained", rng)
    other = tasks.draw_other_text(text, rng)
    if other:
        variants |= {OTHER_TASK: other, **tasks.contrast(text, other, rng)}
    # a variant that is empty or the text itself does not exist
    variants = {name: words for name, words in variants.items() if words not in ("", text)}
    return variants | {"no text": ""}


def toggle_full_stop(text: str) -> str:
    """Remove the mark at the end of a sentence, or add a full stop."""
    return text[:-1] if text.endswith((".", "!", "?")) else f"{text}."


def swap_letters(text: str, rng: np.random.Generator) -> str:
    """Swap two neighbouring letters within the longest word, if it has two that differ."""
    words = [*re.finditer(r"[^\W\d_]+", text)]
    if not words:
        return text
    longest = max(words, key=lambda word: len(word[0]))
    # a reader hardly misses a swap behind the first letter
    places = range(longest.start() + 1, longest.end() - 1)
    swaps = [k for k in places if text[k] != text[k + 1]]
    if not swaps:
        return text
    k = int(rng.choice(swaps))
    return text[:k] + text[k + 1] + text[k] + text[k + 2 :]


def ask_politely(text: str) -> str:
    """Begin a text with "Please, "; the capital of a sentence becomes small."""
    is_word = len(text) > 1 and text[1].islower()
    return "Please, " + (text[0].lower() + text[1:] if is_word else text)


@dataclass(frozen=True)
class Pair:
    """A task text, the text that replaces it, and whether both mean the same."""

    text: str
    other: str
    same: bool


def read_pairs(path: str | Path) -> list[Pair]:
    """Read a file of pairs: YAML or JSON, a list of {text, other, same}, or CSV with these columns.

    Raises:
        ValueError: the file cannot be read, or holds something else.
    """
    path = Path(path).expanduser()
    expected = f"probe_pairs={path}: expected a YAML, JSON or CSV file"
    with explain_errors(expected, OSError, UnicodeDecodeError, yaml.YAMLError, csv.Error):
        content = path.read_text(encoding="utf-8-sig")
        if path.suffix.lower() == ".csv":
            rows: object = [*csv.DictReader(content.splitlines())]
        else:
            rows = yaml.safe_load(content)
    if not isinstance(rows, list) or not rows:
        got = type(rows).__name__ if rows else "an empty file"
        raise ValueError(f"probe_pairs={path}: expected a list of {{text, other, same}}, got {got}")
    return [read_pair(row, f"probe_pairs={path}, pair {i + 1}") for i, row in enumerate(rows)]


def read_pair(row: object, place: str) -> Pair:
    """Read one pair; a ValueError, which begins with `place`, if it is none."""
    if not isinstance(row, dict) or set(row) != set(PAIR_KEYS):
        raise ValueError(f"{place}: expected the keys text, other and same, got {row!r}")
    for key in ("text", "other"):
        if not isinstance(row[key], str) or (key == "text" and not row[key]):
            raise ValueError(f"{place}: expected {key} to be a text, got {row[key]!r}; quote it")
    same = BOOLEANS.get(str(row["same"]).strip().lower())
    if same is None:
        raise ValueError(f"{place}: expected same to be true or false, got {row['same']!r}")
    if row["text"] == row["other"]:
        raise ValueError(f"{place}: expected two different texts, got {row['text']!r} twice")
    return Pair(row["text"], row["other"], same)


def check_pairs(pairs: Sequence[Pair], texts: Sequence[str], place: str) -> None:
    """Raise a ValueError if the text of a pair is none of these task texts. place: begins it."""
    for i, pair in enumerate(pairs):
        if pair.text in texts:
            continue
        near = get_close_matches(pair.text, texts, 3, 0.3) or list(texts)[:3]
        raise ValueError(
            f"{place}, pair {i + 1}: expected text to be a task text of the run or its environment, "
            f"got {pair.text!r}; near are {', '.join(map(repr, near))}"
        )
