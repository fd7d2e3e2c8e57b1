"""OGBench's logs of point mazes: the published file where a user has it, or the same protocol run
again on our own physics.

A log has no rewards and no goals. Its goals are made in hindsight: the log is cut into pieces, and
the goal of a piece is the position at its end. A piece ends where its goal is reached, which brings
the reward 1. Regenerated logs are equal in their statistics, not in their bytes, and are named so:
`pointmaze-large-stitch-v0@regen-seed0`.
"""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from decisionllm.checks import check_at_least, check_one_of
from decisionllm.datasets.dataset_reader import DatasetReader
from decisionllm.datasets.row_blocks import to_flags
from decisionllm.files import AGAIN, explain_errors
from decisionllm.protocols import Source
from decisionllm.schema import Episode, Json, Spec, is_numeric, raise_for_first
from decisionllm.worlds.ogbench.simulator import (
    HORIZON,
    Maze,
    is_reached,
    sample_positions,
)
from decisionllm.worlds.regenerated_logs import check_noise, file_digest, regenerated_name

FOLDER = "~/.ogbench/data"  # where OGBench's own package keeps its files
STITCH = 4  # moves from the start of a stitch episode to its goal
TEXTS = ("none", "goal")
# (log, maze): episodes of the published log and rows of each
SIZES = {
    ("navigate", "medium"): (1000, 1001),
    ("navigate", "large"): (1000, 1001),
    ("navigate", "giant"): (500, 2001),
    ("stitch", "medium"): (5000, 201),
    ("stitch", "large"): (5000, 201),
    ("stitch", "giant"): (5000, 201),
}
NAMES = [f"pointmaze-{maze}-{log}-v0" for log, maze in SIZES]


@dataclass(frozen=True)
class Log:
    """n rows, episode after episode; the last row of an episode has no next position."""

    positions: np.ndarray  # (n, 2)
    actions: np.ndarray  # (n, 2) within -1 .. 1
    ends: np.ndarray  # (n,) bool, True in the last row of an episode

    @property
    def bounds(self) -> Iterator[tuple[int, int]]:
        """Return the first and last row of each episode."""
        last = np.flatnonzero(self.ends)
        return zip([0, *(last[:-1] + 1).tolist()], last.tolist(), strict=True)


def load(
    *,
    name: str,
    text: str = "none",
    path: str = "",
    source: str = "auto",
    episodes: int = 0,
    noise: float = 0.5,
    piece: int = 100,
    seed: int = 0,
) -> Source:
    """Read one log of a point maze as episodes, each with a goal made in hindsight.

    Args:
        name: such as `pointmaze-large-stitch-v0`: medium, large or giant; navigate or stitch. `-v0`
            may be left out.
        text: `none`: an observation is the position and the goal; `goal`: the text names the goal,
            to half a unit, and an observation is the position alone.
        path: of OGBench's file; empty: ~/.ogbench/data.
        source: `file` reads OGBench's file; `regenerate` runs the protocol; `auto` reads the file
            where there is one.
        episodes: how many episodes of the log to regenerate; 0: the published number.
        noise: standard deviation of the noise on the actions of a regenerated log.
        piece: most steps of an episode; they are uniform from 1 on.
        seed: of the regeneration and of the pieces.

    Raises:
        FileNotFoundError: source=file or a path, and there is no such file.
        ValueError: an option is unknown, or the file is damaged or of another world.

    Source: seohongpark/ogbench, `data_gen_scripts/generate_locomaze.py`; goals in hindsight:
        Andrychowicz et al., Hindsight Experience Replay (2017).
    """
    published, maze_name, kind = parse(name)
    check_one_of("dataset.text", text, TEXTS)
    check_one_of("dataset.source", source, ("auto", "file", "regenerate"))
    check_at_least("dataset.piece", piece, 1)
    check_at_least("dataset.episodes", episodes, 0)
    check_noise(noise)
    maze = Maze.from_name(maze_name)
    file = find_file(published, path=path, source=source)
    info: Json = {
        "env": "ogbench",
        "maze": maze_name,
        "text": text,
        "file": str(file or ""),
    }
    if file:
        log = read(file, published, maze)
        info |= describe_file(file, log, published)
    else:
        count, steps = SIZES[kind, maze_name]
        log = generate(maze, kind, episodes or count, steps, noise=noise, seed=seed)
        info["name"] = regenerated_name(published, count=episodes, noise=noise, seed=seed)
    if text == "none":
        info["observation_parts"] = [["position", 2], ["goal", 2]]
    episodes_of_log = hindsight_episodes(log, maze_name, text=text, piece=piece, seed=seed)
    spec = Spec(
        observation_dim=4 if text == "none" else 2,
        action_dim=2,
        horizon=max(piece, HORIZON),
        low=(-1.0, -1.0),
        high=(1.0, 1.0),
    )
    return Source(spec, episodes_of_log, info)


def parse(name: str) -> tuple[str, str, str]:
    """Return the published name of a dataset, its maze, and its kind of log."""
    published = name if name.endswith("-v0") else f"{name}-v0"
    check_one_of("dataset.name", published, NAMES)
    _, maze, kind, _ = published.split("-")
    return published, maze, kind


def hindsight_episodes(
    log: Log, maze: str, *, text: str, piece: int, seed: int
) -> Iterator[Episode]:
    """Cut the log into pieces, each with the position at its end as its goal; see `load`."""
    rng = np.random.default_rng((seed, 1))
    for group, (first, last) in enumerate(log.bounds):
        for start, stop in random_pieces(first, last, piece, rng):
            goal = log.positions[stop]
            episode = episode_to_goal(log, start, stop, goal, maze, text=text, group=group)
            if episode is not None:
                yield episode


def random_pieces(
    first: int, last: int, piece: int, rng: np.random.Generator
) -> Iterator[tuple[int, int]]:
    """Cut the steps first .. last - 1 into pieces of 1 to `piece` steps: first row, row after it."""
    start = first
    while start < last:
        stop = min(start + int(rng.integers(1, piece + 1)), last)
        yield start, stop
        start = stop


def episode_to_goal(
    log: Log, start: int, stop: int, goal: np.ndarray, maze: str, *, text: str, group: int
) -> Episode | None:
    """Return the steps of a piece of the log until it reaches a goal (2,); None: it begins there."""
    positions = log.positions[start : stop + 1]
    arrived = is_reached(positions, goal)
    if arrived[0]:
        return None
    terminated = bool(arrived.any())
    n = int(arrived.argmax()) if terminated else len(positions) - 1
    rewards = np.zeros(n, np.float32)
    rewards[-1] = terminated
    seen = np.asarray(positions[: n + 1], np.float32)
    if text == "none":
        seen = np.concatenate([seen, np.tile(np.float32(goal), (n + 1, 1))], 1)
    return Episode(
        seen[:-1],
        np.asarray(log.actions[start : start + n], np.float32),
        rewards,
        task=task_text(maze, goal) if text == "goal" else "",
        group=group,
        terminated=terminated,
        truncated=not terminated,
        final_observation=seen[-1],
    )


def task_text(maze: str, goal: np.ndarray) -> str:
    """Return the task in words, with the goal (2,) to half a unit."""
    x, y = np.round(2 * np.asarray(goal, np.float64)) / 2 + 0.0  # no -0.0
    return f"Point maze {maze}. Go to x = {x:.1f}, y = {y:.1f}."


def generate(maze: Maze, kind: str, episodes: int, steps: int, *, noise: float, seed: int) -> Log:
    """Run OGBench's protocol: episodes of so many rows, side by side.

    The point walks to the middle of the next cell on a shortest path, at full speed, with noise
    N(0, noise^2) on the action. navigate: from any cell to a random cell that is no straight
    corridor, then to the next one. stitch: to a cell four moves away, where it stays; from a cell
    that has none to itself.
    """
    rng = np.random.default_rng(seed)
    starts = maze.free_cells[rng.integers(len(maze.free_cells), size=episodes)]
    if kind == "navigate":
        goal_cells = random_vertices(maze, episodes, rng)
    else:
        goal_cells = np.array([stitch_goal(maze, start, rng) for start in starts])
    positions = sample_positions(starts, rng)
    goals = sample_positions(goal_cells, rng)
    seen = np.empty((episodes, steps, 2), np.float32)
    taken = np.empty((episodes, steps, 2), np.float32)
    for t in range(steps):
        actions = np.clip(
            heading(maze, positions, goals) + rng.normal(0, noise, (episodes, 2)), -1, 1
        )
        seen[:, t] = positions
        taken[:, t] = actions
        positions = maze.step(positions, actions)
        if kind == "navigate":
            there = np.flatnonzero(is_reached(positions, goals))
            goals[there] = sample_positions(random_vertices(maze, len(there), rng), rng)
    ends = np.zeros((episodes, steps), bool)
    ends[:, -1] = True
    return Log(seen.reshape(-1, 2), taken.reshape(-1, 2), ends.ravel())


def heading(maze: Maze, positions: np.ndarray, goals: np.ndarray) -> np.ndarray:
    """Return unit vectors to the next waypoint, (N, 2)."""
    way = maze.waypoint(positions, goals) - positions
    return np.asarray(way / (np.linalg.norm(way, axis=1, keepdims=True) + 1e-6))


def random_vertices(maze: Maze, count: int, rng: np.random.Generator) -> np.ndarray:
    """Draw cells that are no straight corridor, (count, 2) int."""
    return maze.vertex_cells[rng.integers(len(maze.vertex_cells), size=count)]


def stitch_goal(maze: Maze, start: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draw a cell four moves from the start, (2,) int; the start if there is none."""
    far = maze.free_cells[maze.distances(start) == STITCH]
    return far[rng.integers(len(far))] if len(far) else start


def files(*, name: str, path: str = "", source: str = "auto", **options: object) -> list[Path]:
    """Return the one file that `load` would read with these options; none where it regenerates."""
    if source == "regenerate":
        return []
    file = Path(path or f"{FOLDER}/{parse(name)[0]}.npz").expanduser()
    return [file] if file.is_file() else []


def find_file(published: str, *, path: str, source: str) -> Path | None:
    """Return the file to read, None if the log is regenerated; an error if a file was asked for."""
    paths = files(name=published, path=path, source=source)
    if paths:
        return paths[0]
    if source == "file" or path:
        place = path or f"{FOLDER}/{published}.npz"
        raise FileNotFoundError(
            f"{place}: expected the file of {published}, got none; give dataset.path, or "
            "dataset.source=regenerate without a path"
        )
    return None


def read(file: Path, published: str, maze: Maze) -> Log:
    """Read the log in a file of OGBench.

    Raises:
        ValueError: the file is damaged, or its keys, shapes or positions are not those of this maze.
    """
    damaged = f"{file}: not a readable .npz file"
    errors = (OSError, BadZipFile, zlib.error, EOFError, ValueError)
    opening = explain_errors(damaged, *errors, fix=AGAIN)
    with opening, file.open("rb") as stream, np.load(stream) as opened:
        columns = {key: opened[key] for key in opened.files}
    fix = f"give the file of {published}, or dataset.source=regenerate"
    missing = [key for key in ("observations", "actions", "terminals") if key not in columns]
    if missing:
        raise ValueError(
            f"{file}: expected the keys observations, actions and terminals, got "
            f"{', '.join(columns) or 'none'}; {fix}"
        )
    positions, actions, ends = (columns[key] for key in ("observations", "actions", "terminals"))
    if not are_columns(positions, actions, ends):
        each = [f"{column.shape} {column.dtype}" for column in (positions, actions, ends)]
        raise ValueError(
            f"{file}: expected numbers: observations (n, 2), actions (n, 2) and terminals (n,) of a "
            f"point maze, got {each[0]}, {each[1]} and {each[2]}; {fix}"
        )
    place = f"{file}: "
    rows = np.arange(len(ends))
    outside = f"row {{}}: expected a position in a free cell of {published}, got {{}}; {fix}"
    raise_for_first(place, ~maze.inside(positions), outside, rows, positions)
    wild = f"row {{}}: expected an action within -1 .. 1, got {{}}; {fix}"
    raise_for_first(place, ~(np.abs(actions) <= 1).all(1), wild, rows, actions)
    ends = to_flags(f"{file}: terminals", ends)
    if not ends[-1]:
        raise ValueError(f"{file}: expected terminals to end with the last row; {AGAIN}")
    return Log(positions, actions, ends)


def are_columns(positions: np.ndarray, actions: np.ndarray, ends: np.ndarray) -> bool:
    """Return whether these arrays are numbers of as many steps, one at least, in a point maze."""
    if not all(is_numeric(column.dtype) for column in (positions, actions, ends)):
        return False
    if ends.ndim != 1 or not len(ends):
        return False
    return positions.shape == actions.shape == (len(ends), 2)


def describe_file(file: Path, log: Log, published: str) -> Json:
    """Return the name of a log that was read, and the digest of its file (blake2b, 16 bytes).

    It has the published name if it has as many episodes and rows as the published one.
    """
    digest = file_digest(file)
    _, maze, kind = parse(published)
    episodes, steps = SIZES[kind, maze]
    last = steps * np.arange(1, episodes + 1) - 1
    alike = np.array_equal(np.flatnonzero(log.ends), last)
    return {"name": published if alike else f"{published}@file-{digest[:8]}", "digest": digest}


READER = DatasetReader(version=1, files=files)
