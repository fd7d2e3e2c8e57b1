"""BabyAI's evaluation: N missions, each judged by MiniGrid within the step limit of its own. The
score is the share that succeeds, in percent.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from decisionllm.checks import check_at_least, check_one_of
from decisionllm.datasets.paraphrases import render_frames, uses_held_out_frames
from decisionllm.eval.pictures import figure, wrap_name
from decisionllm.eval.rollout import ScriptedPlayer
from decisionllm.protocols import Begin, Env
from decisionllm.schema import Episode, Json
from decisionllm.worlds.babyai.dataset import TEXTS, check_frames
from decisionllm.worlds.babyai.levels import (
    NUM_ACTIONS,
    Bot,
    evaluation_seeds,
    instruction_kind,
    make_level,
    parse_levels,
    reset_level,
    step_limit,
)
from decisionllm.worlds.babyai.missions import facts_by_mission
from decisionllm.worlds.babyai.observation import VIEWS, encode, stack_observations

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TILE = 32  # pixels of a cell in pictures


class BabyAI(Env):
    """N missions of BabyAI levels, which the data do not have: their seeds are 10^9 and more.

    Args:
        num_episodes: N, spread over the levels in turn.
        level: as in the dataset.
        view: as in the dataset.
        text: as in the dataset; with `shuffled` the text is the mission.
        wordings: with text=paraphrased, `trained` or `held_out`: which frames the texts have, each
            mission another one in turn; held-out ones have new words for the action, for the
            objects, or for both.
        frames: how many frames were trained on, see `text_wordings`; 0: all.
        horizon: most steps of a mission; 0: the limit of MiniGrid, which depends on the mission.

    Raises:
        ValueError: there is no such level, view or text, or a level whose missions have no sentence
            frame with text=paraphrased.
        ImportError: MiniGrid is not installed.
    """

    unit = "% of missions"
    num_actions = NUM_ACTIONS
    action_dim = 1

    def __init__(
        self,
        num_episodes: int,
        *,
        level: str | Sequence[str],
        view: str = "objects",
        text: str = "none",
        wordings: str = "trained",
        frames: int = 0,
        horizon: int = 0,
    ) -> None:
        check_one_of("env.view", view, VIEWS)
        check_one_of("env.text", text, TEXTS)
        check_at_least("env.horizon", horizon, 0)
        levels = parse_levels("env.level", level)
        if text == "paraphrased":
            check_frames("env", levels)
        self.name = f"babyai-{'+'.join(levels)}"
        self.view = view
        self.text = text
        if text != "none":
            self.protocol = "mission-text"
        self.held_out = uses_held_out_frames(wordings, text)
        if self.held_out:
            self.protocol += "-held-out"
        self.frames = frames
        self.horizon = horizon or max(step_limit(name) for name in levels)
        self.levels = [levels[i % len(levels)] for i in range(num_episodes)]
        self.envs = [make_level(name) for name in self.levels]
        self.tasks = [""] * num_episodes

    def reset(self, seed: int) -> np.ndarray:
        N = len(self.envs)
        self.seeds = evaluation_seeds(seed, N)
        observations = [
            reset_level(env, start)
            for env, start in zip(self.envs, self.seeds.tolist(), strict=True)
        ]
        if self.text != "none":
            self.tasks = [observation["mission"] for observation in observations]
        self.frame_kinds = [""] * N
        if self.text == "paraphrased":
            self._paraphrase_tasks()
        self.kinds = [instruction_kind(env) for env in self.envs]
        self.ended = np.zeros(N, bool)
        self.time = 0
        self.rows = encode(*stack_observations(observations), self.view)  # (N, S)
        return self.rows.copy()

    def _paraphrase_tasks(self) -> None:
        """Say each mission in a sentence frame, those of one level in the next frame each time."""
        self.facts = facts_by_mission(self.tasks)
        texts = render_frames(self.facts, held_out=self.held_out, frames=self.frames)
        num_levels = len(set(self.levels))
        for i, mission in enumerate(self.tasks):
            choices = texts[mission]
            self.frame_kinds[i], self.tasks[i] = choices[i // num_levels % len(choices)]

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Advance every mission by one step; the reward is 1 at success."""
        N = len(self.envs)
        rewards = np.zeros(N)
        terminated = np.zeros(N, bool)
        truncated = np.zeros(N, bool)
        running = np.flatnonzero(~self.ended)
        observations = []
        for i in running.tolist():
            result = self.envs[i].step(int(actions[i, 0]))
            observation, reward, terminated[i], truncated[i], _ = result
            rewards[i] = reward > 0
            observations.append(observation)
        if observations:
            self.rows[running] = encode(*stack_observations(observations), self.view)
        self.time += 1
        truncated |= self.time >= self.horizon
        self.ended |= terminated | truncated
        return self.rows.copy(), rewards, terminated, truncated

    def outcomes(self) -> dict[str, np.ndarray]:
        """Return the level, the kind of instruction, the kind of sentence frame and the seed of each
        mission.
        """
        return {
            "level": np.array(self.levels),
            "kind": np.array(self.kinds),
            "frame": np.array(self.frame_kinds),
            "seed": self.seeds,
        }

    def score(self, episodes: Sequence[Episode]) -> np.ndarray:
        return np.array([100.0 * has_succeeded(episode) for episode in episodes])

    def metrics(self, episodes: Sequence[Episode]) -> Json:
        """Measure success in percent by kind of instruction, and by level and kind of sentence frame where
        there are several; the mean number of steps of a success.
        """
        successes = np.array([has_succeeded(episode) for episode in episodes])
        lengths = np.array([len(episode.rewards) for episode in episodes])
        kinds = np.array([episode.outcome["kind"] for episode in episodes])
        levels = np.array([episode.outcome["level"] for episode in episodes])
        metrics: Json = {"by_kind": success_by(kinds, successes)}
        if len(set(self.levels)) > 1:
            metrics["by_level"] = success_by(levels, successes)
        frames = np.array([episode.outcome["frame"] for episode in episodes])
        if len(set(frames)) > 1:
            metrics["by_frame"] = success_by(frames, successes)
        if successes.any():
            metrics["steps_of_success"] = float(lengths[successes].mean())
        return metrics

    def draw(self, episodes: Sequence[Episode], title: str, count: int = 4) -> "Figure":
        """Draw the first and the last frame of the first missions, the last one with the path.

        The missions are played again by the recorded actions.
        """
        drawn = episodes[:count]
        picture = figure(3.2 * len(drawn), 7, title)
        panels = picture.subplots(2, len(drawn), squeeze=False)
        for column, episode in enumerate(drawn):
            mission, frames, path = replay_mission(episode)
            for panel, frame in zip(panels[:, column], frames, strict=True):
                draw_frame(panel, frame)
            panels[0, column].set_title(wrap_name(episode.task or mission, 32), fontsize=8)
            draw_path(panels[1, column], path)
            panels[1, column].set_title(describe_end(episode), fontsize=8)
        return picture

    def baselines(self, seed: int) -> dict[str, Begin]:
        """Return a player of uniform actions, and MiniGrid's bot, which reads the state of the
        environment.
        """

        def random(tasks: Sequence[str]) -> ScriptedPlayer:
            rng = np.random.default_rng(seed)

            def draw(seen: np.ndarray, rows: np.ndarray) -> np.ndarray:
                return rng.integers(NUM_ACTIONS, size=(len(rows), 1))

            return ScriptedPlayer(draw, tasks)

        def bot(tasks: Sequence[str]) -> ScriptedPlayer:
            bots = [Bot(env) for env in self.envs]

            def plan(seen: np.ndarray, rows: np.ndarray) -> np.ndarray:
                return np.array([[bots[i].act()] for i in rows.tolist()])

            return ScriptedPlayer(plan, tasks)

        return {"random": random, "bot": bot}


def has_succeeded(episode: Episode) -> bool:
    """Return whether an episode ended with its reward."""
    return bool(episode.rewards.sum() > 0)


def describe_end(episode: Episode) -> str:
    """Return "success after 5 steps", or the same of no success."""
    result = "success" if has_succeeded(episode) else "no success"
    return f"{result} after {len(episode.rewards)} steps"


def replay_mission(episode: Episode) -> tuple[str, list[np.ndarray], np.ndarray]:
    """Play a mission again by the recorded actions of an episode with the outcomes of `BabyAI`.

    Returns:
        MiniGrid's text of the mission; the first and the last frame, see `render`; and the path of
        the agent (T + 1, 2), in cells to the right and downwards.
    """
    env = make_level(str(episode.outcome["level"]))
    mission = reset_level(env, int(episode.outcome["seed"]))["mission"]
    frames = [render(env)]
    places = [tuple(env.agent_pos)]
    for action in episode.actions[:, 0].astype(int).tolist():
        env.step(action)
        places.append(tuple(env.agent_pos))
    frames.append(render(env))
    return str(mission), frames, np.array(places) + 0.5


def draw_frame(axis: "Axes", frame: np.ndarray) -> None:
    """Draw a picture of `render`, in cells."""
    rows, columns = frame.shape[0] // TILE, frame.shape[1] // TILE
    axis.imshow(frame, extent=(0, columns, rows, 0))
    axis.set(xticks=[], yticks=[])
    axis.spines[:].set_visible(False)


def draw_path(axis: "Axes", path: np.ndarray) -> None:
    """Draw the path of an agent (T + 1, 2), which begins with a dot."""
    x, y = path.T
    axis.plot(x, y, color="white", linewidth=1)
    axis.plot(x[0], y[0], "o", color="white", markersize=4)


def success_by(labels: np.ndarray, successes: np.ndarray) -> dict[str, Json]:
    """Return the missions with each label and the share of successes in percent; both are (M,)."""
    shares = {}
    for label in np.unique(labels).tolist():
        own = successes[labels == label]
        shares[label] = {"missions": len(own), "success": 100 * float(own.mean())}
    return shares


def render(env: Any) -> np.ndarray:
    """Return a picture of the whole world of a level, (rows, columns, 3) uint8."""
    return np.asarray(env.get_frame(highlight=False, tile_size=TILE))
