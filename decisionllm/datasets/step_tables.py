"""Episodes of tables with one row for each step, and columns that are named."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from decisionllm.checks import unknown_name_message
from decisionllm.datasets.arrays import (
    TEXTS,
    check_bounds,
    clip_actions,
    infer_spec,
    make_episode,
)
from decisionllm.datasets.minari import describe_early_ends
from decisionllm.datasets.row_blocks import Columns, regroup_blocks, to_flags
from decisionllm.datasets.space_parts import VECTOR
from decisionllm.datasets.table_files import ROW, is_number, is_text, read_blocks, read_types
from decisionllm.datasets.templates import describe_unread_task, fixed_task_text, label_text
from decisionllm.files import AGAIN
from decisionllm.protocols import Source
from decisionllm.schema import Episode, Json, raise_for_first

PREFIX = "observation."  # of the columns of LeRobot
NO_REWARD = "the log has no reward, every return is 0: train with model.condition_on=none"


@dataclass(frozen=True, kw_only=True)
class StepTable:
    """Files with one row for each step, and the columns that an episode is made of; empty: none.

    Attributes:
        files: in the order of their rows.
        observations: columns whose numbers are the observation, in this order.
        actions: column of the action.
        episode: column whose value changes from one episode to the next; `table_files.ROW`: each
            row is an episode, with lists of steps.
        rewards: column of the reward; without it the last step is rewarded by 1 if a row has
            `success`.
        success: column of flags, whether the task is done.
        terminals: column of flags, whether the task ended the episode; without it `success`.
        step: column that goes up within an episode.
        task: column of the task text, or of its index in `texts`; the same throughout an episode.
        texts: {index: text}; None: `task` holds the texts.
        lengths: {value of `episode`: steps} of all episodes; None: unknown.
    """

    files: Sequence[Path]
    observations: Sequence[str]
    actions: str
    episode: str
    rewards: str = ""
    success: str = ""
    terminals: str = ""
    step: str = ""
    task: str = ""
    texts: Mapping[int, str] | None = None
    lengths: Mapping[int, int] | None = None

    @property
    def columns(self) -> list[str]:
        """The columns that are read."""
        optional = (self.rewards, self.success, self.terminals, self.step, self.task)
        named = [*self.observations, self.actions, self.episode, *optional]
        return [name for name in dict.fromkeys(named) if name]


def build_source(
    table: StepTable,
    info: Json,
    *,
    text: str,
    task: str,
    horizon: int,
    num_actions: int,
    low: Sequence[float],
    high: Sequence[float],
    clip: bool,
) -> Source:
    """Build the source of a table; options: see `huggingface.load`.

    info: the name and whatever else is known; the parts of an observation and the faults are added.
    """
    fixed_text = fixed_task_text("dataset", text, task, TEXTS)
    check_bounds(low, high)
    if clip and not (len(low) or len(high)):
        raise ValueError("dataset.clip: expected dataset.low or dataset.high to clip to, got none")
    if text == "episode" and not table.task:
        raise ValueError(
            "dataset.task_from: expected a column of task texts with text=episode, got none"
        )
    check_types(table)
    early_ends: list[int] = []
    spec = infer_spec(read_episodes(table, fixed_text, early_ends), horizon, num_actions, low, high)
    info = info | {"text": label_text(text, has_own=bool(table.task))}
    info["observation_parts"] = list_observation_parts(table)
    faults = [*describe_unread_task(info["text"], task), *describe_early_ends(early_ends)]
    if not (table.rewards or table.success):
        faults.append(NO_REWARD)
    if faults:
        info["faults"] = faults
    episodes = read_episodes(table, fixed_text, [])
    if clip:
        episodes = clip_actions(episodes, spec)
        info["clip"] = True
    return Source(spec, episodes, info)


def check_types(table: StepTable) -> None:
    """Raise a ValueError unless the columns are in the first file, as numbers or texts."""
    file = table.files[0]
    types = read_types(file)
    for name in table.columns:
        if name == ROW:
            continue
        if name not in types:
            raise ValueError(f"{file}: {unknown_name_message('column', name, types)}")
        if name == table.task and table.texts is None:
            expected, fits = "texts", is_text(types[name])
        else:
            expected, fits = "numbers", name == table.episode or is_number(types[name])
        if not fits:
            raise ValueError(f"{file}: expected {name} as {expected}, got {types[name]}")


def list_observation_parts(table: StepTable) -> list[list[str | int]]:
    """Return (name, numbers) of the parts of an observation, without the prefix of LeRobot; one
    column is the whole observation.
    """
    block = next(read_blocks(table.files, table.columns))
    parts: list[list[str | int]] = []
    for column in table.observations:
        rows = block[column]
        name = column.removeprefix(PREFIX) if len(table.observations) > 1 else VECTOR
        parts.append([name, rows.reshape(len(rows), -1).shape[1]])
    return parts


def read_episodes(table: StepTable, fixed_text: str, early_ends: list[int]) -> Iterator[Episode]:
    """Yield the episodes of a table in the order of its rows.

    Args:
        table: the files and their columns.
        fixed_text: of every episode, if the table has no column of texts.
        early_ends: takes the numbers of the episodes that go on after a terminal row.
    """
    seen: dict[int, int] = {}  # {value of the column `episode`: steps}
    blocks = read_blocks(table.files, table.columns)
    for block in regroup_blocks(blocks, lambda block: is_last_row(block[table.episode])):
        ids = block[table.episode]
        for a, b in pairwise([0, *np.flatnonzero(is_last_row(ids)) + 1, len(ids)]):
            if a == b:
                continue
            rows = {name: column[a:b] for name, column in block.items()}
            number = ids[a].item() if isinstance(ids[a], np.generic) else ids[a]
            place = f"{table.files[0].parent}, {table.episode} {number}"
            if number in seen:
                raise ValueError(
                    f"{place}: expected the rows of an episode one after the other, got more of them "
                    "behind another episode; sort the rows"
                )
            try:
                episode = build_episode(table, rows, len(seen), fixed_text)
            except ValueError as error:
                raise ValueError(f"{place}: {error}") from error
            if table.terminals and terminal_flags(table, rows)[:-1].any():
                early_ends.append(len(seen))
            yield episode
            seen[number] = b - a
    check_lengths(table, seen)


def is_last_row(ids: np.ndarray) -> np.ndarray:
    """Return which rows are followed by a row of another episode, (n,) bool; the last one is not."""
    return np.append(ids[1:] != ids[:-1], False)


def build_episode(table: StepTable, rows: Columns, group: int, fixed_text: str) -> Episode:
    """Build an episode of its rows of a table."""
    n = len(rows[table.episode])
    if table.step:
        steps = rows[table.step]
        is_wrong = steps[1:] <= steps[:-1]
        message = f"expected {table.step} to go up, got {{}} after {{}}; sort the rows"
        raise_for_first("", is_wrong, message, steps[1:], steps[:-1])
    columns = {
        "observations": np.concatenate(
            [rows[name].reshape(n, -1) for name in table.observations], axis=1
        ),
        "actions": rows[table.actions],
        "rewards": step_rewards(table, rows),
        "terminals": terminal_flags(table, rows),
    }
    return make_episode(columns, group, episode_text(table, rows) if table.task else fixed_text)


def step_rewards(table: StepTable, rows: Columns) -> np.ndarray:
    """Return the reward of each row of an episode, (n,)."""
    n = len(rows[table.episode])
    if table.rewards:
        return rows[table.rewards].reshape(n)
    rewards = np.zeros(n, np.float32)
    if table.success:
        rewards[-1] = to_flags(table.success, rows[table.success].reshape(n)).any()
    return rewards


def terminal_flags(table: StepTable, rows: Columns) -> np.ndarray:
    """Return which rows of an episode the task ended it at, (n,) bool."""
    n = len(rows[table.episode])
    name = table.terminals or table.success
    if not name:
        return np.zeros(n, bool)
    return to_flags(name, rows[name].reshape(n))


def episode_text(table: StepTable, rows: Columns) -> str:
    """Return the task text of an episode.

    Raises:
        ValueError: it changes within the episode, or its index is not in the table of texts.
    """
    values = rows[table.task].reshape(-1).tolist()
    texts = []
    for value in dict.fromkeys(values):
        if table.texts is None:
            texts.append(value or "")
        elif value in table.texts:
            texts.append(table.texts[value])
        else:
            indices = ", ".join(map(str, table.texts))
            raise ValueError(f"expected {table.task} among {indices}, got {value}")
    if len(texts) > 1:
        raise ValueError(
            f"expected one task text throughout the episode, got {texts[0]!r} and then {texts[1]!r}; "
            "end the episode there, or take text=none"
        )
    return str(texts[0])


def check_lengths(table: StepTable, lengths: Mapping[int, int]) -> None:
    """Raise a ValueError unless the episodes have the stated lengths."""
    if table.lengths is None or table.lengths == lengths:
        return
    for number in table.lengths.keys() | lengths.keys():
        expected, got = table.lengths.get(number, 0), lengths.get(number, 0)
        if expected != got:
            raise ValueError(
                f"{table.files[0].parent}: expected {expected} steps of episode {number}, got {got}; "
                f"the data are incomplete, {AGAIN}"
            )
