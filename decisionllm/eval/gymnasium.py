"""N copies of any Gymnasium environment: by its id, or the one that a Minari dataset names for its
evaluation.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from difflib import get_close_matches
from typing import Any

import numpy as np

from decisionllm.datasets import minari
from decisionllm.datasets.action_spaces import (
    action_parts,
    action_spec,
    decode_actions,
    encode_actions,
)
from decisionllm.datasets.categorical import Declaration, categorical_sizes
from decisionllm.datasets.env_texts import (
    Values,
    choose_task_from,
    find_texts,
    get_task_text,
    to_text,
    values_by_path,
)
from decisionllm.datasets.space_parts import (
    observation_bounds,
    observation_parts,
    text_parts,
    text_values,
)
from decisionllm.datasets.spaces import flatten, flatten_one, stack
from decisionllm.datasets.templates import TEXTS, fixed_task_text, label_text, make_text_writer
from decisionllm.eval.env_results import (
    ERRORS,
    describe_result,
    explain_call,
    read_flag,
    read_reward,
)
from decisionllm.eval.rollout import ScriptedPlayer
from decisionllm.files import explain_errors
from decisionllm.protocols import Begin, Env
from decisionllm.randomness import derive_seeds

RESET = "reset(seed=None, options=None) to return (observation, info)"
STEP = "step(action) to return (observation, reward, terminated, truncated, info)"


def two_returns(reference: Sequence[float]) -> tuple[float, float]:
    """Read the option `reference`, which normalises scores; a ValueError unless it is two returns."""
    with explain_errors("env.reference: expected two numbers", TypeError, ValueError):
        low, high = (float(number) for number in reference)
    if not np.isfinite([low, high]).all() or low == high:
        raise ValueError(
            "env.reference: expected two returns, of a random policy and of an expert, got "
            f"{list(reference)}"
        )
    return low, high


class GymnasiumEnv(Env):
    """N Gymnasium environments, stepped one by one.

    An ended one waits for the others, which no autoreset mode of a vector environment allows:
    `Disabled` refuses to step an ended one, the others begin another episode.

    Args:
        envs: N equal environments with a time limit in their spec. Observations: Box, Discrete,
            MultiDiscrete, MultiBinary, or Dict or Tuple of these, laid out as
            `datasets.spaces.flatten` says; actions: Box, Discrete or MultiDiscrete (an index, as
            `datasets.action_spaces.encode_actions` says).
        task: the text of every episode, or its template, see `datasets.templates.make_text_writer`.
        text: the text option it was made with; `template`: the texts are those of the last reset.
        reference: returns of a random policy and of an expert, for normalised scores; empty: the
            score is the return.
        part: the key of a Dict observation that is read alone; empty: all of it.
        task_from: where an environment says the text of an episode, such as `info.task`: the key
            `task` of the info of `reset`, or `observation.mission`, a part of the observation that is
            a text; empty: nowhere, or with text=episode in the one part that is a text.
        categorical: parts of an observation that are integers and name categories, see
            `datasets.categorical.as_categorical`.

    Raises:
        ValueError: the spaces do not fit, or there is no time limit.
    """

    def __init__(
        self,
        envs: Sequence[Any],
        *,
        task: str = "",
        text: str = "auto",
        reference: Sequence[float] = (),
        part: str = "",
        task_from: str = "",
        categorical: Declaration = None,
    ) -> None:
        spec = envs[0].spec
        if spec is None or not spec.max_episode_steps or spec.max_episode_steps < 1:
            name = spec and spec.id
            raise ValueError(f"{name}: expected an environment with a time limit; set env.horizon")
        self.name = spec.id
        self.unit = "return"
        if reference:
            self.reference = two_returns(reference)
            self.unit = ""
        self.envs = envs
        self.space = envs[0].action_space
        self.horizon = spec.max_episode_steps
        self.tasks = [task] * len(envs)
        self.unread_texts: dict[str, str] = {}  # of the last reset, by path
        action = action_spec(self.space)
        self.num_actions = action.get("num_actions", 0)
        self.action_dim = action["action_dim"]
        if not self.num_actions:
            self.action_range = action["low"], action["high"]
        self.action_parts = action_parts(self.space)
        self.part = part
        with explain_errors(f"env {self.name}", *ERRORS):
            self.observation_space = minari.policy_space(
                envs[0].observation_space, part, categorical, "env.categorical"
            )
            self.observation_parts = observation_parts(self.observation_space)
            self.observation_range = observation_bounds(self.observation_space)
        self.categorical = categorical_sizes(self.observation_space)
        texts = text_parts(self.observation_space)
        self.task_from = choose_task_from("env", task_from, text, texts)
        self.text = label_text(text, has_own=bool(self.task_from))
        self.is_silent = text == "none"  # no text is read, and none is named as unread
        self.write = None
        if text == "template":
            self.write = make_text_writer("env.task", task, self.observation_parts, texts=texts)

    def reset(self, seed: int) -> np.ndarray:
        """Start episode i as `env.reset(seed=derive_seeds(seed, N)[i])` does."""
        self.observations = []
        infos = []
        for env, start in zip(self.envs, derive_seeds(seed, len(self.envs)).tolist(), strict=True):
            observation, info = self._reset_episode(env, start)
            self.observations.append(observation)
            infos.append(info)
        self.ended = np.zeros(len(self.envs), bool)
        self.steps = 0
        rows = self._rows()
        self._read_task_texts(rows, infos)
        return rows

    def _reset_episode(self, env: Any, seed: int) -> tuple[Any, Mapping[str, Any]]:
        """Return the first observation of an environment and its info; a ValueError if they are
        none.
        """
        with explain_call(self.name, f"reset(seed={seed})", RESET):
            result = env.reset(seed=seed)
            if not isinstance(result, tuple) or len(result) != 2:
                raise ValueError(f"expected two values, got {describe_result(result)}")
            observation, info = result
            if not isinstance(info, Mapping):
                raise ValueError(f"expected a dict as info, got {describe_result(info)}")
        return observation, info

    def _read_task_texts(self, rows: np.ndarray, infos: Sequence[Mapping[str, Any]]) -> None:
        """Set the task text of each episode, or what texts of the environment are not read.

        rows, infos: of the reset.
        """
        if self.task_from:
            values = [self._values(i, info) for i, info in enumerate(infos)]
            self.tasks = [get_task_text(each, self.task_from) for each in values]
        elif self.write is not None:
            self.tasks = [self.write(row, self._texts(i)) for i, row in enumerate(rows)]
        elif not self.is_silent:
            self.unread_texts = find_texts(self._values(0, infos[0]))

    def _texts(self, episode: int) -> dict[str, str]:
        """Return the parts of the last observation of an episode that are texts, by name."""
        seen = minari.select_part(self.observations[episode], self.part)
        return text_values(seen, self.observation_space)

    def _values(self, episode: int, info: Mapping[str, Any]) -> Values:
        """Return the values after a reset or a step with this info that may be the text of an episode."""
        return values_by_path(info, self._texts(episode))

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        N, width = len(self.envs), actions.shape[1]
        if width != self.action_dim:
            raise ValueError(
                f"actions: expected {self.action_dim} numbers, as {self.space} takes, got {width}"
            )
        rewards = np.zeros(N)
        terminated = np.zeros(N, bool)
        truncated = np.zeros(N, bool)
        running = np.flatnonzero(~self.ended).tolist()
        env_actions = [self.decode(actions[i]) for i in running]
        infos: dict[int, Any] = {}
        with explain_call(self.name, "step", STEP):
            for i, action in zip(running, env_actions, strict=True):
                result = self.envs[i].step(action)
                if not isinstance(result, tuple) or len(result) != 5:
                    raise ValueError(f"expected five values, got {describe_result(result)}")
                self.observations[i], reward, ended, cut, infos[i] = result
                rewards[i] = read_reward(reward)
                terminated[i] = read_flag("terminated", ended)
                truncated[i] = read_flag("truncated", cut)
        if self.task_from:
            for i in running:
                self._check_task(self._values(i, infos[i]), i)
        self.ended |= terminated | truncated
        self.steps += 1
        return self._rows(), rewards, terminated, truncated

    def _rows(self) -> np.ndarray:
        """Return the last observations as a policy reads them, (N, S)."""
        fix = "return observations of env.observation_space, or correct the space"
        with explain_errors(f"env {self.name}: observation", *ERRORS, fix=fix):
            observations = [minari.select_part(seen, self.part) for seen in self.observations]
            space = self.observation_space
            try:
                return flatten(stack(observations), space)
            except ERRORS:
                # one by one, so that the error is about the one that is unlike the space
                return np.stack([flatten_one(seen, space) for seen in observations])

    def decode(self, action: np.ndarray) -> int | np.ndarray:
        """Convert an action of a policy (A,) to one of the environment."""
        count = self.num_actions
        if count and not 0 <= action[0] < count:
            raise ValueError(
                f"actions: expected an index below {count}, as {self.space} takes, got {action[0]:g}"
            )
        env_action = decode_actions(action[None], self.space)[0]
        is_index = len(self.action_parts) == 1 and not env_action.ndim
        return int(env_action) if is_index else env_action

    def notes(self) -> list[str]:
        return [
            f"the text {path} of the environment is not read ({text!r}); env.task_from={path} reads it "
            "as the task of an episode"
            for path, text in self.unread_texts.items()
        ]

    def _check_task(self, values: Values, episode: int) -> None:
        """Raise a ValueError if a step has another text than the reset; an info may lack it."""
        text = to_text(values.get(self.task_from))
        if text is not None and text != self.tasks[episode]:
            raise ValueError(
                f"env.task_from={self.task_from}: expected one text in an episode, got "
                f"{self.tasks[episode]!r} and, after step {self.steps + 1} of episode {episode}, {text!r}; "
                "end the episode where its text changes"
            )

    def baselines(self, seed: int) -> dict[str, Begin]:
        def sample(tasks: Sequence[str]) -> ScriptedPlayer:
            space = deepcopy(self.space)
            space.seed(seed)

            def draw(seen: np.ndarray, rows: np.ndarray) -> np.ndarray:
                return encode_actions(np.stack([space.sample() for _ in seen]), space)

            return ScriptedPlayer(draw, tasks)

        return {"random": sample}


def make(
    num_episodes: int,
    *,
    id: str,
    arguments: Mapping[str, Any] = {},
    horizon: int = 0,
    reference: Sequence[float] = [],
    task: str = "",
    task_from: str = "",
    text: str = "auto",
    categorical: Declaration = None,
) -> GymnasiumEnv:
    """Make N copies of `gymnasium.make(id, **arguments)`.

    Args:
        num_episodes: N.
        id: such as CartPole-v1, or mine:Pump-v0, which imports the package `mine` that registers
            it.
        arguments: of the environment.
        horizon: most steps of an episode; 0: the time limit of the environment.
        reference: returns of a random policy and of an expert, for normalised scores.
        task: the task in words, read with text=constant and text=template.
        task_from: `info.KEY`: the text of an episode is what the info of `reset` has under KEY;
            `observation.NAME`: the part NAME of its observations, which is a text; empty: neither is
            read, but with text=episode the one part that is a text.
        text: `auto`: the text that `task_from` names, if any; `none`: no text; `constant`: the task;
            `template`: `{NAME}` in the task stands for that part of the first observation;
            `episode`: the text that `task_from` names.
        categorical: {NAME: sizes} or [NAME] of the parts of an observation that are integers and
            name categories, which are read one-hot; see `datasets.categorical.as_categorical`.

    Raises:
        ValueError: there is no such environment, it could not be made, or it has no such part.
    """
    import gymnasium

    words = fixed_task_text("env", text, task, TEXTS)
    try:
        envs = []
        for _ in range(num_episodes):
            envs.append(gymnasium.make(id, max_episode_steps=horizon or None, **arguments))
    except gymnasium.error.UnregisteredEnv as error:
        near = get_close_matches(id, gymnasium.registry, 3, 0.5)
        fix = "give package:id to import the package that registers it"
        if near:
            fix = f"near are {', '.join(near)}"
        raise ValueError(f"env.id: {error} {fix}") from error
    except (ImportError, *ERRORS) as error:
        fix = ""
        if isinstance(error, ImportError):
            fix = (
                "; install the package that it needs, or put the folder of your own module on "
                "PYTHONPATH (PYTHONPATH=. for this one)"
            )
        raise ValueError(
            f"env.id={id}, env.arguments={dict(arguments)}: could not be made ({error}){fix}"
        ) from error
    return GymnasiumEnv(
        envs,
        task=words,
        text=text,
        reference=reference,
        task_from=task_from,
        categorical=categorical,
    )


def recover(
    num_episodes: int,
    *,
    minari_id: str,
    goal: str = "fixed",
    text: str = "auto",
    task: str = "",
    task_from: str = "",
    categorical: Declaration = None,
    horizon: int = 0,
) -> GymnasiumEnv:
    """Make N copies of the evaluation environment of a Minari dataset, scored by the dataset's own
    reference returns.

    Args:
        num_episodes: N.
        minari_id: of the dataset, or the path of its folder.
        goal: of PointMaze, as in the dataset.
        text, task, task_from, categorical: as in the dataset.
        horizon: most steps of an episode; 0: the time limit of the environment.

    Raises:
        ValueError: the dataset names no environment, or one that could not be made.
    """
    from gymnasium.error import Error

    dataset = minari.open_dataset(minari_id)
    errors = (ValueError, ImportError, AttributeError, Error)
    message = f"{minari_id}: its environment could not be made"
    options = {"eval_env": True, "max_episode_steps": horizon or None}
    with explain_errors(message, *errors, fix="env=none trains without one"):
        envs = [dataset.recover_environment(**options) for _ in range(num_episodes)]
    metadata = dataset.storage.metadata
    reference = [metadata.get("ref_min_score"), metadata.get("ref_max_score")]
    if None in reference:
        reference = []
    return GymnasiumEnv(
        envs,
        task=minari.resolve_task_text("env", dataset, text, task),
        text=text,
        reference=reference,
        part=minari.policy_part(dataset, goal),
        task_from=task_from,
        categorical=categorical,
    )
