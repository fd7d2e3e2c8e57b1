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
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from decisionllm.checks import check_one_of
from decisionllm.datasets.number_words import ORDINALS, format_number, number_to_words
from decisionllm.datasets.rng import Stream, make_step_rng
from decisionllm.registry import PACKAGE
from decisionllm.schema import Window

FILES = {file.parent.name: file for file in PACKAGE.glob("**/frames.yaml")}
for file in PACKAGE.glob("**/frames/*.yaml"):
    FILES[f"{file.parent.parent.name}-{file.stem.replace('_', '-')}"] = file
TRAINED = "trained"
OTHER = "other_"
LabelledTexts = list[tuple[str, str]]  # (kind of the frame, text)
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
def load_library(name: str) -> Library:
    """Return the sentence frames of a library by its name."""
    check_one_of("wordings", name, sorted(FILES))
    return read_library(FILES[name])


def read_library(path: Path) -> Library:
    """Read a library file. Our own are checked by tests/datasets/test_paraphrases.py, not here."""
    import yaml

    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    world = content.get("world", "")
    frames = {}
    for kind, frames_of_kind in {TRAINED: content["trained"], **content["held_out"]}.items():
        frames[kind] = [_prepend_world(frame, world) for frame in frames_of_kind]
    return Library(frames, world, content.get("distinct_contrasts", False))


def held_out_kinds(facts: Iterable[Facts]) -> list[str]:
    """Return the kinds of held-out frames of the libraries of these tasks, each once."""
    libraries = dict.fromkeys(task["library"] for task in facts if task)
    kinds: dict[str, None] = {}
    for name in libraries:
        kinds |= dict.fromkeys(load_library(name).held_out_kinds)
    return list(kinds)


def _prepend_world(frame: str, world: str) -> str:
    """Return a frame behind the sentence that names its world, unless it names the world itself."""
    return frame if frame_fields(world) <= frame_fields(frame) else world + frame


@cache
def frame_fields(frame: str) -> set[str]:
    """Return the fields that a frame names."""
    return {name for _, name, _, _ in string.Formatter().parse(frame) if name is not None}


@cache
def contrasted_facts(frame: str) -> list[str]:
    """Return the facts of another task that a frame names; none unless it is a contrast."""
    return [name.removeprefix(OTHER) for name in frame_fields(frame) if name.startswith(OTHER)]


class Renderer(string.Formatter):
    """str.format with more conversions of numbers and words.

    {row!w} is three, {row!o} third, {budget!c} in hundredths, {budget!k} in thousands; {object!u}
    begins with a capital letter.
    """

    def convert_field(self, value: Any, conversion: str | None) -> Any:
        match conversion:
            case "w":
                return number_to_words(value)
            case "o":
                return ORDINALS[value]
            case "c":
                return f"{100 * value:.0f}"
            case "k":
                return format_number(value / 1000)
            case "u":
                return f"{value[:1].upper()}{value[1:]}"
        return super().convert_field(value, conversion)

    def format_field(self, value: Any, format_spec: str) -> str:
        """{budget:g} has no exponent, which nobody writes in a sentence."""
        if format_spec == "g":
            return format_number(value)
        return str(super().format_field(value, format_spec))


def _library_and_world(facts: Facts) -> tuple[str, str]:
    """Return the library of a task and the sentence of its world; empty without facts."""
    if not facts:
        return "", ""
    return facts["library"], render_frame(load_library(facts["library"]).world, facts)


def render_frame(frame: str, facts: Facts, other: Facts | None = None) -> str:
    """Return the text of a frame. other: facts of another task, where the frame contrasts with one."""
    contrast = {OTHER + name: value for name, value in (other or {}).items()}
    return Renderer().vformat(frame, (), {**facts, **contrast})


def uses_held_out_frames(wordings: str, text: str) -> bool:
    """Return whether an env's option `wordings` is `held_out`; a ValueError if it does not fit `text`."""
    check_one_of("env.wordings", wordings, ("trained", "held_out"))
    if wordings == "held_out" and text != "paraphrased":
        raise ValueError(f"env.wordings=held_out: needs text=paraphrased, got text={text}")
    return wordings == "held_out"


def render_frames(
    facts: Mapping[str, Facts],
    *,
    held_out: bool,
    frames: int = 0,
    kinds: Sequence[str] | None = None,
) -> dict[str, LabelledTexts]:
    """Render every trained or held-out frame once for each task: {task text: [(kind, text), ...]}.

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
    texts_by_task: dict[str, LabelledTexts] = {task: [] for task in tasks}
    frame_kinds: Sequence[str] = (TRAINED,)
    if held_out:
        frame_kinds = held_out_kinds(facts.values()) if kinds is None else kinds
    for kind in frame_kinds:
        members = [task for task in tasks if _has_kind(facts[task], kind)]
        wordings = Paraphrases(members, facts, kind=kind, frames=0 if held_out else frames)
        for k, task in enumerate(members):
            texts_by_task[task] += [(kind, text) for text in wordings.render_task(k, rng)]
    return texts_by_task


def _has_kind(facts: Facts, kind: str) -> bool:
    """Return whether the library of a task has frames of this kind; a task without facts has its
    own text.
    """
    return not facts or kind in load_library(facts["library"]).frames


def assign_texts(
    tasks: Sequence[str],
    facts: Mapping[str, Facts],
    *,
    held_out: bool,
    frames: int,
) -> LabelledTexts:
    """Return (kind, text) for each episode of an evaluation; equal tasks take their frames in turn.

    Args:
        tasks: of the episodes.
        facts, held_out, frames: as in `render_frames`.
    """
    choices = render_frames(facts, held_out=held_out, frames=frames)
    return [choices[task][i % len(choices[task])] for i, task in enumerate(tasks)]


def render_contrasts(own: Facts, other: Facts) -> list[str]:
    """Return the held-out contrasts that name another task as what is not to be done; none for tasks
    of different worlds.
    """
    members, _ = group_contrastable([own, other])
    if not own or len(members) < 2:
        return []
    texts = []
    own_library = load_library(own["library"])
    frames = [frame for kind in own_library.held_out_kinds for frame in own_library.frames[kind]]
    for frame in filter(contrasted_facts, frames):
        names = contrasted_facts(frame)
        fits = frame_fields(frame) <= {*own, *(OTHER + name for name in own)}
        if fits and any(own[name] != other[name] for name in names):
            texts.append(render_frame(frame, own, other))
    return texts


def group_contrastable(facts: Sequence[Facts]) -> list[list[int]]:
    """Return for each task the tasks that it can be contrasted with, itself among them: those of its
    world with the same fields.

    facts: of each task.
    """
    kinds = [(_library_and_world(task_facts), *sorted(task_facts)) for task_facts in facts]
    members = defaultdict(list)
    for task, kind in enumerate(kinds):
        members[kind].append(task)
    return [members[kind] for kind in kinds]


class Paraphrases(Sequence[str]):
    """All texts of some tasks, each rendered when it is read.

    The index of a text encodes its task, its frame and the other task of a contrast; -1 - k is the
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
            raise ValueError(
                f"text_wordings: expected a number of frames, or 0 for all, got {frames}"
            )
        self.tasks = list(tasks)
        self.facts = [facts.get(task, {}) for task in tasks]
        self.others = group_contrastable(self.facts)
        self.equality: dict[tuple[int, tuple[str, ...]], bool] = {}  # see `_have_equal_facts`
        self.frames = [self._select_frames(i, kind, frames) for i in range(len(tasks))]
        num_frames = [len(task_frames) for task_frames in self.frames]
        num_others = [max(len(members) - 1, 1) for members in self.others]
        self.max_frames = max(num_frames)
        # (n, 2): frames of each task, and the other tasks of its contrasts
        self.counts = np.column_stack([num_frames, num_others])
        self.is_contrast = np.zeros((len(tasks), self.max_frames), bool)
        for i, task_frames in enumerate(self.frames):
            for k, frame in enumerate(task_frames):
                self.is_contrast[i, k] = bool(contrasted_facts(frame))
        self.render_cached = lru_cache(100_000)(self._render)

    def _select_frames(self, task: int, kind: str, count: int) -> list[str]:
        """Return the first `count` frames that the facts of a task fill; 0: all."""
        facts = self.facts[task]
        if not facts:
            return ["{task}"]
        fields = set(facts)
        if len(self.others[task]) > 1:
            fields |= {OTHER + name for name in facts}
        task_library = load_library(facts["library"])
        frames = [frame for frame in task_library.frames[kind] if frame_fields(frame) <= fields]
        if task_library.distinct_contrasts:
            frames = [frame for frame in frames if self._is_distinct(task, frame)]
        if len(frames) < max(count, 1):
            raise ValueError(
                f"text_wordings={count}: {len(frames)} {kind} frames fit the facts of "
                f"{self.tasks[task]!r}"
            )
        return frames[: count or None]

    def _is_distinct(self, task: int, frame: str) -> bool:
        """Return whether a frame is no contrast, or another task differs in the facts that it names."""
        names = contrasted_facts(frame)
        return not names or not self._have_equal_facts(self.others[task], tuple(names))

    def __len__(self) -> int:
        return len(self.tasks) ** 2 * self.max_frames

    def __getitem__(self, index: Any) -> Any:
        return self.render_cached(int(index)) if index >= 0 else self.tasks[-1 - int(index)]

    def _render(self, index: int) -> str:
        rest, other_index = divmod(index, len(self.tasks))
        task, frame_index = divmod(rest, self.max_frames)
        facts = self.facts[task]
        frame = self.frames[task][frame_index]
        names = contrasted_facts(frame)
        other = self._find_other(task, names, other_index) if names else facts
        return render_frame(frame, {**facts, "task": self.tasks[task]}, other)

    def _find_other(self, task: int, names: Sequence[str], start: int) -> Facts:
        """Return the facts of the first other task, from the `start`-th on, that differs in one of
        these facts; those of the task itself if none does.
        """
        own = self.facts[task]
        members = self.others[task]
        if self._have_equal_facts(members, tuple(names)):
            return own
        first = members.index(task) + 1 + start
        for k in range(len(members) - 1):
            candidate = self.facts[members[(first + k) % len(members)]]
            if any(candidate[name] != own[name] for name in names):
                return candidate
        return own

    def _have_equal_facts(self, members: Sequence[int], names: tuple[str, ...]) -> bool:
        """Return whether these tasks, of one world, are equal in each of these facts."""
        key = members[0], names
        if key not in self.equality:
            values = {tuple(self.facts[task][name] for name in names) for task in members}
            self.equality[key] = len(values) == 1
        return self.equality[key]

    def render_task(self, task: int, rng: np.random.Generator) -> list[str]:
        """Return a text of each frame of a task; the other tasks of its contrasts are drawn."""
        frame = np.arange(len(self.frames[task]))
        indices = self.index_texts(np.full_like(frame, task), frame, rng.random(len(frame)))
        return [self[index] for index in indices]

    def draw(self, task: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Draw a text of each of these tasks: (B,) -> indices (B,)."""
        frame, other = rng.random((2, len(task)))
        return self.index_texts(task, (frame * self.counts[task, 0]).astype(int), other)

    def index_texts(self, task: np.ndarray, frame: np.ndarray, other: np.ndarray) -> np.ndarray:
        """Return the indices (B,) of texts.

        Args:
            task: (B,).
            frame: (B,) of the task.
            other: (B,) within 0 .. 1, the other task of a contrast.
        """
        other_index = (other * self.counts[task, 1]).astype(int) * self.is_contrast[task, frame]
        return np.asarray((task * self.max_frames + frame) * len(self.tasks) + other_index)

    def sampler(
        self,
        sampler: Callable[[int], Window],
        *,
        task: np.ndarray,
        seed: int,
        texts: int,
        among: np.ndarray | None = None,
    ) -> Callable[[int], Window]:
        """Return a sampler with a text drawn for each row: a pure function of (seed, step).

        Args:
            sampler: step -> Window.
            task: (E,) of each episode.
            seed: of the draws.
            texts: of a batch; row i has the text of row i % texts, whose task is the same, see
                `sampling.TextSampler`.
            among: (E,) bool, the episodes whose texts are drawn; the others have the text of their
                task. None: all are.
        """

        def draw_window(step: int) -> Window:
            window = sampler(step)
            row_task = task[window.episodes]
            rng = make_step_rng(seed, step, Stream.WORDINGS)
            text_index = self.draw(row_task[:texts], rng)[np.arange(len(row_task)) % texts]
            if among is not None:
                text_index = np.where(among[window.episodes], text_index, -1 - row_task)
            return replace(window, text_index=text_index)

        return draw_window
