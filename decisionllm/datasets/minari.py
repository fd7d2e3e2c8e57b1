"""Minari datasets in and out, through the real library: any Box, Discrete or Dict-of-Box observations, Box or Discrete actions.

`D4RL/pointmaze/*` has two defects, both repaired on reading. The first observation of an episode still carries the previous
goal (Minari issue 265): the goal of the second is taken. An episode ends with its first reward, so that every return is 1 and
says nothing: with goal=fixed the rewards are paid for the fixed goal of the evaluation environment, as D4RL's Maze2D does, and
the goal is left out of the observation; with goal=own the goal stays in the observation and the rewards stay 1.
"""

import json
import os
from pathlib import Path

import numpy as np

from decisionllm.datasets.store import Source
from decisionllm.registry import register
from decisionllm.schema import Episode, Spec


@register("dataset", "minari", text="${text}")
def load(*, minari_id: str, text: str = "none", goal: str = "fixed", horizon: int = 0) -> Source:
    """A local Minari dataset, by its id or the path of its folder; nothing is downloaded.

    text: none, or `constant`: the dataset's id and description. horizon: refuse longer episodes; 0 is the longest one.
    """
    if text not in ("none", "constant"):
        raise ValueError(f"dataset.text: expected none or constant for a Minari dataset, got {text!r}")
    dataset = find(minari_id)
    pointmaze = "pointmaze" in dataset.id
    eval_goal, radius = (fixed_goal(dataset), 0.45) if pointmaze and goal == "fixed" else (None, None)
    metadata = dataset.storage.metadata
    words = f"{dataset.id}. {metadata.get('description') or ''}".strip() if text == "constant" else ""
    episodes = []
    for e, raw in enumerate(dataset.iterate_episodes()):
        observations, rewards = raw.observations, np.asarray(raw.rewards, np.float32)
        if pointmaze:
            observations = {key: np.array(value) for key, value in observations.items()}
            observations["desired_goal"][0] = observations["desired_goal"][1]
        if eval_goal is not None:
            observations = observations["observation"]
            rewards = (np.linalg.norm(observations[1:, :2] - eval_goal, axis=1) <= radius).astype(np.float32)
        rows = flatten(observations, dataset.observation_space if eval_goal is None else None, f"{minari_id}, episode {e}")
        actions = np.asarray(raw.actions, np.float32).reshape(len(rewards), -1) - getattr(dataset.action_space, "start", 0)
        episodes.append(Episode(
            rows[:-1], actions, rewards, bool(raw.terminations[-1]), bool(raw.truncations[-1]) or not raw.terminations[-1], words, e,
            final_observation=rows[-1],
        ))  # fmt: skip
    longest = max((len(e.rewards) for e in episodes), default=1)
    spec = Spec(episodes[0].observations.shape[1], **action_spec(dataset.action_space, episodes), horizon=horizon or longest)
    references = {key: metadata[key] for key in ("ref_min_score", "ref_max_score") if key in metadata}
    info = {"name": dataset.id, "env": "minari", "text": text, "goal": goal if pointmaze else "", **references}
    return Source(spec, episodes, info)


def find(minari_id):
    """An open Minari dataset, by its id or the path of its folder."""
    import minari

    folder = Path(minari_id).expanduser() / "data"
    try:
        return minari.MinariDataset(str(folder)) if folder.is_dir() else minari.load_dataset(minari_id)
    except FileNotFoundError as error:
        root = os.environ.get("MINARI_DATASETS_PATH", "~/.minari/datasets")
        raise FileNotFoundError(f"{minari_id}: no such Minari dataset in {root}; `minari download {minari_id}` fetches it") from error
    except (OSError, KeyError, ValueError) as error:
        raise ValueError(f"{minari_id}: not a readable Minari dataset ({error})") from error


def flatten(values, space, where):
    """Observations of one episode as rows of numbers: (n, S) float32. A Dict is laid out key by key, a Discrete is one-hot."""
    from gymnasium import spaces

    if space is None or isinstance(space, spaces.Box):
        return np.asarray(values, np.float32).reshape(len(values), -1)
    if isinstance(space, spaces.Discrete):
        return np.eye(space.n, dtype=np.float32)[np.asarray(values) - space.start]
    if isinstance(space, spaces.Dict):
        return np.concatenate([flatten(values[key], part, where) for key, part in space.spaces.items()], 1)
    raise ValueError(f"{where}: expected a Box, a Discrete or a Dict of them as observation space, got {space}")


def action_spec(space, episodes=()):
    """The action fields of a Spec. A Box without finite bounds takes those of the data."""
    from gymnasium import spaces

    if isinstance(space, spaces.Discrete):
        return {"action_dim": 1, "num_actions": int(space.n)}
    if not isinstance(space, spaces.Box):
        raise ValueError(f"action space: expected a Box or a Discrete, got {space}")
    low, high = space.low.reshape(-1).astype(float), space.high.reshape(-1).astype(float)
    if episodes and not np.isfinite([low, high]).all():
        low = np.where(np.isfinite(low), low, np.min([e.actions.min(0) for e in episodes], 0))
        high = np.where(np.isfinite(high), high, np.max([e.actions.max(0) for e in episodes], 0))
    return {"action_dim": len(low), "low": tuple(low.tolist()), "high": tuple(high.tolist())}


def fixed_goal(dataset):
    """The goal of a PointMaze dataset's evaluation environment, the one `g` of its map: (2,) in the environment's frame."""
    spec = dataset.storage.metadata.get("eval_env_spec") or ""
    maze = (json.loads(spec) if spec else {}).get("kwargs", {}).get("maze_map")
    cells = [(i, j) for i, row in enumerate(maze or ()) for j, cell in enumerate(row) if cell == "g"]
    if len(cells) != 1:
        raise ValueError(f"{dataset.id}: expected one goal cell 'g' in the map of its evaluation environment, got {len(cells)}; take dataset.goal=own")
    (i, j), rows, columns = cells[0], len(maze), len(maze[0])
    return np.array([j + 0.5 - columns / 2, rows / 2 - i - 0.5])


def save(minari_id, store, *, env=None, reference=None):
    """Write a store as a local Minari dataset. env: an environment or its spec, for `recover_environment`.

    reference: (random, expert) returns; Minari drops them silently where no environment is given, so they are written after.
    An episode without a final observation shows its last one twice, since Minari wants one more observation than actions.
    """
    import minari
    from gymnasium import spaces
    from minari.data_collector import EpisodeBuffer

    spec, buffers = store.spec, []
    for e in range(len(store.lengths)):
        episode = store.episode(e)
        n = len(episode.rewards)
        final = episode.observations[-1] if episode.final_observation is None else episode.final_observation
        actions = episode.actions[:, 0].astype(np.int64) if spec.num_actions else episode.actions
        ends = np.zeros((2, n), bool)
        ends[:, -1] = episode.terminated, episode.truncated
        buffers.append(EpisodeBuffer(
            id=e, observations=np.concatenate([episode.observations, final[None]]), actions=actions,
            rewards=episode.rewards.tolist(), terminations=ends[0].tolist(), truncations=ends[1].tolist(),
        ))  # fmt: skip
    box = spaces.Box(np.array(spec.low, np.float32), np.array(spec.high, np.float32)) if not spec.num_actions else None
    dataset = minari.create_dataset_from_buffers(
        minari_id, buffers, env=env, action_space=box or spaces.Discrete(spec.num_actions), data_format="hdf5",
        observation_space=spaces.Box(-np.inf, np.inf, (spec.observation_dim,), np.float32),
        description=f"{store.info['name']}, written by decisionllm, fingerprint {store.fingerprint}",
    )  # fmt: skip
    if reference is not None:
        dataset.storage.update_metadata({"ref_min_score": reference[0], "ref_max_score": reference[1]})
    return dataset
