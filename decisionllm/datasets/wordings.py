"""Task texts in many wordings: sentence frames with named fields, filled with the facts of a task.

A library is a file: `NAME/frames.yaml` in the folder NAME of a neighbour; `NAME/frames/FILE.yaml`
are those of a world with several sorts of tasks (`NAME-FILE`):

- `fields`: the facts that a frame may name. A field `other_x` is the fact x of another task, for
  contrasts: "not row {other_row}, but row {row}".
- `identify`: sets of fields that tell one task from all others. Every frame names at least one set.
- `trained`: the frames of training. `held_out`: frames of evaluation alone, by kind; the file names
  the kinds.
- `world`, optional: a sentence that says where the task is to be done. It stands before each frame
  that does not name the fields of the world itself. Tasks of different worlds are never contrasted.
- `distinct_contrasts`, optional: a contrast is used only for tasks that differ from another one in
  the facts that it names. Without it, a contrast of tasks that are alike repeats the task's own.
"""

import string
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from decisionllm.checks import one_of
from decisionllm.datasets.draws import Draw, of_step
from decisionllm.registry import PACKAGE
from decisionllm.schema import Window

FILES = {file.parent.name: file for file in PACKAGE.glob("**/frames.yaml")}
FILES |= {
    f"{file.parent.parent.name}-{file.stem.replace('_', '-')}": file
    for file in PACKAGE.glob("**/frames/*.yaml")
}
TRAINED = "trained"
OTHER = "other_"
ONES = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
]
SIZES = [(10**9, "billion"), (10**6, "million"), (1000, "thousand"), (100, "hundred")]
TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
ORDINALS = [
    "zeroth",
    "first",
    "second",
    "third",
    "fourth",
    "fifth",
    "sixth",
    "seventh",
    "eighth",
    "ninth",
    "tenth",
    "eleventh",
    "twelfth",
]
Worded = list[tuple[str, str]]  # texts: the kind of the frame, the text
Facts = Mapping[str, Any]  # of a task: `library`, the name of a file, and the values of its fields


@dataclass(frozen=True)
class Library:
    """The sentence frames of a library."""

    frames: dict[str, list[str]]  # by kind: `trained` and each kind of held-out frames
    world: str  # the sentence that names the world of a task; empty: there is one world
    distinct_contrasts: bool  # no contrast of tasks that are alike

    @property
    def held_out_kinds(self) -> list[str]:
        """The kinds of held-out frames, in the order of the file."""
        return [kind for kind in self.frames if kind != TRAINED]


@cache
def library(name: str) -> Library:
    """The sentence frames of a library, see `read`."""
    one_of("wordings", name, sorted(FILES))
    return read(FILES[name])


def read(path: Path) -> Library:
    """Read a library file. Our own are checked by tests/datasets/test_wordings.py, not here."""
    import yaml

    given = yaml.safe_load(path.read_text(encoding="utf-8"))
    world = given.get("world", "")
    frames = {}
    for kind, own in {TRAINED: given["trained"], **given["held_out"]}.items():
        frames[kind] = [_in_world(frame, world) for frame in own]
    return Library(frames, world, given.get("distinct_contrasts", False))


def held_out_kinds(facts: Iterable[Facts]) -> list[str]:
    """The kinds of held-out frames of the libraries of these tasks, each once."""
    libraries = dict.fromkeys(task["library"] for task in facts if task)
    kinds: dict[str, None] = {}
    for name in libraries:
        kinds |= dict.fromkeys(library(name).held_out_kinds)
    return list(kinds)


def _in_world(frame: str, world: str) -> str:
    """A frame after the sentence that names its world, unless it names the world itself."""
    return frame if fields_of(world) <= fields_of(frame) else world + frame


@cache
def fields_of(frame: str) -> set[str]:
    """The fields that a frame names."""
    return {name for _, name, _, _ in string.Formatter().parse(frame) if name is not None}


@cache
def contrasted(frame: str) -> list[str]:
    """The facts of another task that a frame names; none unless it is a contrast."""
    return [name.removeprefix(OTHER) for name in fields_of(frame) if name.startswith(OTHER)]


class Renderer(string.Formatter):
    """str.format with more conversions of numbers and words.

    {row!w} is three, {row!o} third, {budget!c} in hundredths, {budget!k} in thousands; {object!u}
    begins with a capital letter.
    """

    def convert_field(self, value: Any, conversion: str | None) -> Any:
        match conversion:
            case "w":
                return number_words(value)
            case "o":
                return ORDINALS[value]
            case "c":
                return f"{100 * value:.0f}"
            case "k":
                return digits(value / 1000)
            case "u":
                return f"{value[:1].upper()}{value[1:]}"
        return super().convert_field(value, conversion)

    def format_field(self, value: Any, format_spec: str) -> str:
        """{budget:g} has no exponent, which nobody writes in a sentence."""
        if format_spec == "g":
            return digits(value)
        return str(super().format_field(value, format_spec))


def number_words(number: float) -> str:
    """2914.5 -> "two thousand nine hundred fourteen point five"; to six digits, below 10^12."""
    if number < 0:
        return f"minus {number_words(-number)}"
    whole, _, part = digits(number).partition(".")
    words = _whole_words(int(whole))
    if not part:
        return words
    return " ".join([words, "point", *(ONES[int(digit)] for digit in part)])


def _whole_words(number: int) -> str:
    """A number without a fraction in words."""
    if number < 20:
        return ONES[number]
    if number < 100:
        tens, ones = divmod(number, 10)
        return f"{TENS[tens - 2]}-{ONES[ones]}" if ones else TENS[tens - 2]
    size, name = next(one for one in SIZES if one[0] <= number)
    count, rest = divmod(number, size)
    words = f"{_whole_words(count)} {name}"
    return f"{words} {_whole_words(rest)}" if rest else words


def digits(number: float) -> str:
    """A number with at most six digits that are not zeros at its ends, and without an exponent:
    1234567 -> "1234570".
    """
    return format(Decimal(f"{number:g}"), "f")


def _world(facts: Facts) -> tuple[str, str]:
    """The library of a task, and the sentence of its world; empty where there is none."""
    if not facts:
        return "", ""
    return facts["library"], render(library(facts["library"]).world, facts)


def render(frame: str, facts: Facts, other: Facts | None = None) -> str:
    """The text of a frame. other: facts of another task, where the frame contrasts with one."""
    contrast = {OTHER + name: value for name, value in (other or {}).items()}
    return Renderer().vformat(frame, (), {**facts, **contrast})


def is_held_out(wordings: str, text: str) -> bool:
    """Whether an env's option `wordings` is `held_out`. A ValueError if it does not fit `text`."""
    one_of("env.wordings", wordings, ("trained", "held_out"))
    if wordings == "held_out" and text != "paraphrased":
        raise ValueError(f"env.wordings=held_out: needs text=paraphrased, got text={text}")
    return wordings == "held_out"


def spread(
    facts: Mapping[str, Facts],
    *,
    held_out: bool,
    frames: int = 0,
    kinds: Sequence[str] | None = None,
) -> dict[str, Worded]:
    """Every trained frame, or held-out one, once for each task: {task text: [(kind, text), ...]}.

    Args:
        facts: {task text: facts}; the other task of a contrast is drawn from these, always the same
            one.
        held_out: the held-out frames of each kind instead of the trained ones; a task whose library
            does not have a kind has none of it.
        frames: how many trained frames; 0: all.
        kinds: of held-out frames; None: all of their libraries.
    """
    tasks = list(facts)
    rng = np.random.default_rng(0)
    found: dict[str, Worded] = {task: [] for task in tasks}
    frame_kinds: Sequence[str] = (TRAINED,)
    if held_out:
        frame_kinds = held_out_kinds(facts.values()) if kinds is None else kinds
    for kind in frame_kinds:
        members = [task for task in tasks if _has_kind(facts[task], kind)]
        words = Wordings(members, facts, kind=kind, frames=0 if held_out else frames)
        for k, task in enumerate(members):
            found[task] += [(kind, text) for text in words.of_task(k, rng)]
    return found


def _has_kind(facts: Facts, kind: str) -> bool:
    """Whether the library of a task has frames of this kind; a task without facts has its own
    text.
    """
    return not facts or kind in library(facts["library"]).frames


def turns(
    tasks: Sequence[str],
    facts: Mapping[str, Facts],
    *,
    held_out: bool,
    frames: int,
) -> Worded:
    """(kind, text) of each task of an evaluation, its frames in turn; arguments as in `spread`."""
    choices = spread(facts, held_out=held_out, frames=frames)
    return [choices[task][i % len(choices[task])] for i, task in enumerate(tasks)]


def contrast_texts(own: Facts, other: Facts) -> list[str]:
    """Return the held-out contrasts that name another task as what is not to be done; none for tasks
    of different worlds.
    """
    members, _ = contrastable([own, other])
    if not own or len(members) < 2:
        return []
    texts = []
    own_library = library(own["library"])
    frames = [frame for kind in own_library.held_out_kinds for frame in own_library.frames[kind]]
    for frame in filter(contrasted, frames):
        names = contrasted(frame)
        fits = fields_of(frame) <= {*own, *(OTHER + name for name in own)}
        if fits and any(own[name] != other[name] for name in names):
            texts.append(render(frame, own, other))
    return texts


def contrastable(facts: Sequence[Facts]) -> list[list[int]]:
    """The tasks that each can be contrasted with, itself among them: those of its world with the
    same fields.

    facts: of each task.
    """
    kinds = [(_world(known), *sorted(known)) for known in facts]
    members = defaultdict(list)
    for task, kind in enumerate(kinds):
        members[kind].append(task)
    return [members[kind] for kind in kinds]


class Wordings(Sequence[str]):
    """All texts of some tasks, rendered when read.

    A text's number stands for its task, its frame and the other task of a contrast; -1 - k is the
    text of task k itself.

    A frame that names a fact which a task lacks is not used for it, nor, with `distinct_contrasts`,
    a contrast with tasks that are all alike in the facts that it names. A task without facts has one
    text, its own.

    Args:
        tasks: n task texts.
        facts: of these tasks, {task text: facts}; the `wordings` of a dataset's info.
        kind: `trained`, or a kind of held-out frames.
        frames: how many frames of a task, the first ones; 0: all.
    """

    def __init__(
        self,
        tasks: Sequence[str],
        facts: Mapping[str, Facts],
        *,
        kind: str = TRAINED,
        frames: int = 0,
    ) -> None:
        if frames < 0:
            wanted = "a number of frames, or 0 for all"
            raise ValueError(f"text_wordings: expected {wanted}, got {frames}")
        self.tasks = list(tasks)
        self.facts = [facts.get(task, {}) for task in tasks]
        self.others = contrastable(self.facts)
        self.alike: dict[tuple[int, tuple[str, ...]], bool] = {}  # see `_alike`
        self.frames = [self._usable(i, kind, frames) for i in range(len(tasks))]
        self.most = max(len(own) for own in self.frames)
        frames_of_task = [len(own) for own in self.frames]
        turns_of_task = [max(len(members) - 1, 1) for members in self.others]
        # (n, 2): frames of each task, and the other tasks of its contrasts
        self.counts = np.column_stack([frames_of_task, turns_of_task])
        self.contrasts = np.zeros((len(tasks), self.most), bool)  # whether a frame is a contrast
        for i, own in enumerate(self.frames):
            self.contrasts[i, : len(own)] = [bool(contrasted(frame)) for frame in own]
        self.text = lru_cache(100_000)(self._text)

    def _usable(self, task: int, kind: str, count: int) -> list[str]:
        """The first `count` frames that the facts of a task fill; 0: all."""
        known = self.facts[task]
        if not known:
            return ["{task}"]
        names = set(known)
        if len(self.others[task]) > 1:
            names |= {OTHER + name for name in known}
        own = library(known["library"])
        usable = [frame for frame in own.frames[kind] if fields_of(frame) <= names]
        if own.distinct_contrasts:
            usable = [frame for frame in usable if self._is_distinct(task, frame)]
        if len(usable) < max(count, 1):
            what = f"{len(usable)} {kind} frames fit the facts of {self.tasks[task]!r}"
            raise ValueError(f"text_wordings={count}: {what}")
        return usable[: count or None]

    def _is_distinct(self, task: int, frame: str) -> bool:
        """Whether a frame is no contrast, or another task differs in the facts that it names."""
        names = contrasted(frame)
        return not names or not self._alike(self.others[task], tuple(names))

    def __len__(self) -> int:
        return len(self.tasks) ** 2 * self.most

    def __getitem__(self, number: Any) -> Any:
        return self.text(int(number)) if number >= 0 else self.tasks[-1 - int(number)]

    def _text(self, number: int) -> str:
        rest, turn = divmod(number, len(self.tasks))
        task, frame = divmod(rest, self.most)
        own = self.facts[task]
        sentence = self.frames[task][frame]
        names = contrasted(sentence)
        other = self._other(task, names, turn) if names else own
        return render(sentence, {**own, "task": self.tasks[task]}, other)

    def _other(self, task: int, names: Sequence[str], turn: int) -> Facts:
        """The facts of the first other task, from the `turn`-th on, that differs in one of these;
        its own if none does.
        """
        own = self.facts[task]
        members = self.others[task]
        if self._alike(members, tuple(names)):
            return own
        first = members.index(task) + 1 + turn
        for k in range(len(members) - 1):
            candidate = self.facts[members[(first + k) % len(members)]]
            if any(candidate[name] != own[name] for name in names):
                return candidate
        return own

    def _alike(self, members: Sequence[int], names: tuple[str, ...]) -> bool:
        """Whether these tasks, of one world, are the same in each of these facts."""
        key = members[0], names
        if key not in self.alike:
            values = {tuple(self.facts[task][name] for name in names) for task in members}
            self.alike[key] = len(values) == 1
        return self.alike[key]

    def of_task(self, task: int, rng: np.random.Generator) -> list[str]:
        """A text of each frame of a task; the other tasks of its contrasts are drawn."""
        frame = np.arange(len(self.frames[task]))
        numbers = self.number(np.full_like(frame, task), frame, rng.random(len(frame)))
        return [self[number] for number in numbers]

    def draw(self, task: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """A text of each of these tasks: numbers (B,)."""
        frame, turn = rng.random((2, len(task)))
        return self.number(task, (frame * self.counts[task, 0]).astype(int), turn)

    def number(self, task: np.ndarray, frame: np.ndarray, turn: np.ndarray) -> np.ndarray:
        """The numbers (B,) of these frames (B,) of these tasks (B,).

        turn: (B,) within 0 .. 1, the other task that a contrast has.
        """
        other = (turn * self.counts[task, 1]).astype(int) * self.contrasts[task, frame]
        return np.asarray((task * self.most + frame) * len(self.tasks) + other)

    def sampler(
        self,
        sampler: Callable[[int], Window],
        *,
        task: np.ndarray,
        seed: int,
        texts: int,
        among: np.ndarray | None = None,
    ) -> Callable[[int], Window]:
        """The windows of a sampler, a text drawn for each row: a pure function of (seed, step).

        Args:
            sampler: step -> Window.
            task: (E,) of each episode.
            seed: of the draws.
            texts: of a batch; row i has that of row i % texts, whose task is the same, see
                `sampling.TextSampler`.
            among: (E,) whether the texts of an episode are drawn; the others have that of their
                task. None: all are.
        """

        def drawn(step: int) -> Window:
            window = sampler(step)
            own = task[window.episodes]
            rng = of_step(seed, step, Draw.WORDINGS)
            number = self.draw(own[:texts], rng)[np.arange(len(own)) % texts]
            if among is not None:
                number = np.where(among[window.episodes], number, -1 - own)
            return replace(window, text_index=number)

        return drawn
