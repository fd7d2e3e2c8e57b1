"""Task texts in many wordings: sentence frames with named fields, one YAML file a domain, filled with the facts of a task.

A file in `frames/` has `fields`, the facts that a frame may name; `identify`, sets of fields that each tell one task from all others,
of which every frame names at least one; `trained`, the frames of training; and `held_out`, frames of evaluation alone, by kind. It may
have `world`, a sentence that stands before each frame which does not name its fields itself: where the task is to be done. Tasks of
different worlds are never contrasted. A field `other_x` is the fact x of another task, for contrasts: "not row {other_row}, but row {row}".
"""

import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from decisionllm.config import one_of
from decisionllm.files import explained
from decisionllm.schema import Window

FOLDER = Path(__file__).parent / "frames"
KINDS = ("new_frames", "contrast", "unseen_words")  # of held-out frames: seen words, other order or distractors, new words
OTHER = "other_"
ONES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"]  # fmt: skip
TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
ORDINALS = ["zeroth", "first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth", "eleventh", "twelfth"]  # fmt: skip
Facts = Mapping[str, Any]  # of a task: `library`, the name of a file, and the values of its fields


@cache
def library(name: str) -> dict[str, list[str]]:
    """The sentence frames in frames/NAME.yaml; see `read`."""
    one_of("wordings", name, sorted(path.stem for path in FOLDER.glob("*.yaml")))
    return read(FOLDER / f"{name}.yaml")


def read(path: Path) -> dict[str, list[str]]:
    """The sentence frames of a library file, by kind: `trained`, and the held-out ones of each of KINDS.

    Raises:
        ValueError: a key or a frame is missing or unknown; a frame names an unknown field, identifies no task, or is there twice.
    """
    import yaml

    with explained(f"{path}: not YAML", yaml.YAMLError):
        given = yaml.safe_load(path.read_text())
    keys = ["fields", "identify", "trained", "held_out"]
    if (
        not isinstance(given, dict)
        or sorted({*given} - {"world"}) != sorted(keys)
        or sorted(given["held_out"] or ()) != sorted(KINDS)
    ):
        raise ValueError(f"{path}: expected {', '.join(keys)}, and {', '.join(KINDS)} in held_out, got {given and list(given)}")
    known, seen = given["fields"].split(), set()
    found: dict[str, list[str]] = {"trained": given["trained"]} | given["held_out"]
    for kind, frame in ((kind, frame) for kind, frames in found.items() for frame in frames or [""]):
        where = f"{path}: {kind} frame {frame!r}"
        if not isinstance(frame, str) or not frame:
            raise ValueError(f"{where}: expected a sentence with fields")
        named = fields_of(frame)
        if unknown := sorted(name for name in named if name.removeprefix(OTHER) not in known):
            raise ValueError(f"{where}: no field {unknown[0]}; there are {', '.join(known)}, each also with {OTHER} before it")
        if not any(named.issuperset(group.split()) for group in given["identify"]):
            raise ValueError(f"{where}: lacks a field; expected all of one of: {'; '.join(given['identify'])}")
        if (same := " ".join(frame.casefold().split())) in seen:
            raise ValueError(f"{where}: is there twice; a held-out frame must not be trained")
        seen.add(same)
    world = given.get("world", "")
    if unknown := sorted(fields_of(world) - {*known}):
        raise ValueError(f"{path}: world {world!r}: no field {unknown[0]}; there are {', '.join(known)}")
    placed = {kind: [_in_world(frame, world) for frame in frames] for kind, frames in found.items()}
    return placed | {"world": [world]}


def _in_world(frame: str, world: str) -> str:
    """A frame after the sentence that names its world, unless it names the world itself."""
    return frame if fields_of(world) <= fields_of(frame) else world + frame


@cache
def fields_of(frame: str) -> set[str]:
    """The fields that a frame names."""
    try:
        return {name for _, name, _, _ in string.Formatter().parse(frame) if name is not None}
    except ValueError as error:
        raise ValueError(f"frame {frame!r}: {error}") from error


class Renderer(string.Formatter):
    """str.format with conversions of numbers: {row!w} three, {row!o} third, {budget!c} in hundredths, {budget!k} in thousands."""

    def convert_field(self, value: Any, conversion: str | None) -> Any:
        forms: dict[str, Callable[[Any], str]] = {
            "w": number_words, "o": lambda x: ORDINALS[x],
            "c": lambda x: f"{100 * x:.0f}", "k": lambda x: f"{x / 1000:g}",
        }  # fmt: skip
        return forms[conversion](value) if conversion in forms else super().convert_field(value, conversion)


def number_words(number: float) -> str:
    """2914.5 -> "two thousand nine hundred fourteen point five"; 0 .. 999,999, six digits."""
    whole, _, part = f"{number:g}".partition(".")
    if part:
        return " ".join([number_words(int(whole)), "point", *(ONES[int(digit)] for digit in part)])
    number = int(number)
    for size, name in ((1000, "thousand"), (100, "hundred")):
        if number >= size:
            rest = number % size
            return f"{number_words(number // size)} {name}" + f" {number_words(rest)}" * bool(rest)
    return ONES[number] if number < 20 else TENS[number // 10 - 2] + f"-{ONES[number % 10]}" * bool(number % 10)


def _world(facts: Facts) -> tuple[str, str]:
    """The library of a task, and its sentence of the world where the task is to be done; empty where there is none."""
    if not facts:
        return "", ""
    return facts["library"], render(library(facts["library"])["world"][0], facts)


def render(frame: str, facts: Facts, other: Facts | None = None) -> str:
    """The text of a frame. other: facts of another task, where the frame contrasts with one."""
    return Renderer().vformat(frame, (), {**facts, **{OTHER + name: value for name, value in (other or {}).items()}})


def is_held_out(wordings: str, text: str) -> bool:
    """Whether an env's option `wordings` is `held_out`; a ValueError unless it is that or `trained` and fits the option `text`."""
    one_of("env.wordings", wordings, ("trained", "held_out"))
    if wordings == "held_out" and text != "paraphrased":
        raise ValueError(f"env.wordings=held_out: needs text=paraphrased, got text={text}")
    return wordings == "held_out"


def spread(facts: Mapping[str, Facts], *, held_out: bool, frames: int = 0) -> dict[str, list[tuple[str, str]]]:
    """Every trained frame, or held-out one, once for each task: {task text: [(kind, text), ...]}.

    Args:
        facts: {task text: facts}; the other task of a contrast is drawn from these, always the same one.
        held_out: the frames of KINDS instead of the trained ones.
        frames: how many trained frames; 0: all.
    """
    tasks, rng = list(facts), np.random.default_rng(0)
    found: dict[str, list[tuple[str, str]]] = {task: [] for task in tasks}
    for kind in KINDS if held_out else ("trained",):
        words = Wordings(tasks, facts, kind=kind, frames=0 if held_out else frames)
        for k, task in enumerate(tasks):
            frame = np.arange(len(words.frames[k]))
            found[task] += [(kind, words[i]) for i in words.number(np.full_like(frame, k), frame, rng.random(len(frame)))]
    return found


def turns(tasks: Sequence[str], facts: Mapping[str, Facts], *, held_out: bool, frames: int = 0) -> list[tuple[str, str]]:
    """(kind, text) of each task of an evaluation, its frames in turn; arguments as in `spread`."""
    choices = spread(facts, held_out=held_out, frames=frames)
    return [choices[task][i % len(choices[task])] for i, task in enumerate(tasks)]


class Wordings(Sequence[str]):
    """All texts of some tasks, rendered when read. A text's number stands for its task, its frame and the other task of a contrast;
    -1 - k is the text of task k itself.

    A frame that names a fact which a task lacks is not used for it. A task without facts has one text, its own.

    Args:
        tasks: n task texts.
        facts: of these tasks, {task text: facts}; the `wordings` of a dataset's info.
        kind: `trained`, or a kind of held-out frames.
        frames: how many frames of a task, the first ones; 0: all.
    """

    def __init__(self, tasks: Sequence[str], facts: Mapping[str, Facts], *, kind: str = "trained", frames: int = 0) -> None:
        if frames < 0:
            raise ValueError(f"text_wordings: expected a number of frames, or 0 for all, got {frames}")
        self.tasks, self.facts = list(tasks), [facts.get(task, {}) for task in tasks]
        kinds = [(_world(known), *sorted(known)) for known in self.facts]
        same: dict[Any, list[int]] = {}  # the tasks of each world with the same fields
        for i, own in enumerate(kinds):
            same.setdefault(own, []).append(i)
        self.others = [same[own] for own in kinds]
        self.frames = [self._usable(i, kind, frames) for i in range(len(tasks))]
        self.counts = np.array([[len(f), max(len(o) - 1, 1)] for f, o in zip(self.frames, self.others, strict=True)])
        self.most = int(self.counts[:, 0].max())
        self.text = lru_cache(100_000)(self._text)
        self.contrasts = np.array([
            [any(name.startswith(OTHER) for name in fields_of(frame)) for frame in own] + [False] * (self.most - len(own))
            for own in self.frames
        ])  # fmt: skip

    def _usable(self, task: int, kind: str, count: int) -> list[str]:
        known = self.facts[task]
        if not known:
            return ["{task}"]
        names = set(known) | {OTHER + name for name in known if len(self.others[task]) > 1}
        usable = [frame for frame in library(known["library"])[kind] if fields_of(frame) <= names]
        if len(usable) < max(count, 1):
            raise ValueError(f"text_wordings={count}: {len(usable)} {kind} frames fit the facts of {self.tasks[task]!r}")
        return usable[: count or None]

    def __len__(self) -> int:
        return len(self.tasks) ** 2 * self.most

    def __getitem__(self, number: Any) -> Any:
        return self.text(int(number)) if number >= 0 else self.tasks[-1 - int(number)]

    def _text(self, number: int) -> str:
        rest, turn = divmod(number, len(self.tasks))
        task, frame = divmod(rest, self.most)
        members, own, sentence = self.others[task], self.facts[task], self.frames[task][frame]
        first = members.index(task) + 1 + turn
        turned = (self.facts[members[(first + k) % len(members)]] for k in range(len(members) - 1))
        names = [name.removeprefix(OTHER) for name in fields_of(sentence) if name.startswith(OTHER)]
        other = next((other for other in turned if any(other[name] != own[name] for name in names)), own)
        return render(sentence, {**own, "task": self.tasks[task]}, other)

    def draw(self, task: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """A text of each of these tasks: numbers (B,)."""
        frame, turn = rng.random((2, len(task)))
        return self.number(task, (frame * self.counts[task, 0]).astype(int), turn)

    def number(self, task: np.ndarray, frame: np.ndarray, turn: np.ndarray) -> np.ndarray:
        """The numbers (B,) of these frames (B,) of these tasks (B,). turn: (B,) within 0 .. 1, which other task a contrast has."""
        other = (turn * self.counts[task, 1]).astype(int) * self.contrasts[task, frame]
        return np.asarray((task * self.most + frame) * len(self.tasks) + other)

    def sampler(
        self, sampler: Callable[[int], Window], *, task: np.ndarray, seed: int, texts: int, worded: np.ndarray | None = None
    ) -> Callable[[int], Window]:
        """The windows of a sampler, a text drawn for each row: a pure function of (seed, step).

        Args:
            sampler: step -> Window.
            task: (E,) of each episode.
            seed: of the draws.
            texts: of a batch; row i has that of row i % texts, whose task is the same, see `windows.TextSampler`.
            worded: (E,) whether the texts of an episode are drawn; the others have that of their task. None: all are.
        """

        def drawn(step: int) -> Window:
            window = sampler(step)
            own = task[window.episodes]
            number = self.draw(own[:texts], np.random.default_rng((seed, step, 1)))
            number = number[np.arange(len(own)) % texts]
            if worded is not None:
                number = np.where(worded[window.episodes], number, -1 - own)
            return replace(window, text_index=number)

        return drawn
