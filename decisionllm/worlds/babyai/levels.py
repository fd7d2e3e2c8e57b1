"""The BabyAI levels of MiniGrid: their names, step limits and starts, and MiniGrid's bot."""

import re
from collections.abc import Sequence
from contextlib import redirect_stdout
from difflib import get_close_matches
from functools import cache
from io import StringIO
from typing import Any

import numpy as np

from decisionllm.checks import split_list
from decisionllm.files import explain_errors
from decisionllm.randomness import derive_seeds

NUM_ACTIONS = 7  # left, right, forward, pick up, drop, toggle, done
LEFT, RIGHT, DONE = 0, 1, 6
# Missions below this seed are for training, the others for evaluation.
FIRST_EVALUATION_SEED = 1_000_000_000


def training_seeds(seed: int, count: int) -> np.ndarray:
    """Return the seeds of `count` training missions, (count,) int64."""
    return derive_seeds(seed, count, end=FIRST_EVALUATION_SEED)


def evaluation_seeds(seed: int, count: int) -> np.ndarray:
    """Return the seeds of `count` evaluation missions, (count,) int64; none is one of training."""
    return derive_seeds(seed, count, first=FIRST_EVALUATION_SEED)


@cache
def level_ids() -> dict[str, str]:
    """Return the Gymnasium id of each level by its name, such as GoToLocal.

    Raises:
        ImportError: MiniGrid is not installed.
    """
    what = "BabyAI needs MiniGrid: pip install -e '.[babyai]'"
    with explain_errors(what, ImportError, raised=ImportError):
        import minigrid  # noqa: F401  # registers the levels
    import gymnasium

    ids = {}
    for id in gymnasium.registry:
        match = re.fullmatch(r"BabyAI-(.+)-v\d+", id)
        if match:
            ids[match[1]] = id
    return ids


def parse_levels(option: str, level: str | Sequence[str]) -> list[str]:
    """Return the names of the levels that an option asks for, by their names or ids.

    Args:
        option: its name, for messages.
        level: one name, or several.

    Raises:
        ValueError: there is no such level, none is given, or one is given twice.
        ImportError: MiniGrid is not installed.
    """
    ids = level_ids()
    names = []
    for word in split_list(level):
        name = re.sub(r"^BabyAI-|-v\d+$", "", word)
        if name not in ids:
            lower_case = {level_name.lower(): level_name for level_name in ids}
            near = get_close_matches(name.lower(), lower_case, 3, 0.4) or ["gotolocal"]
            examples = ", ".join(lower_case[each] for each in near)
            raise ValueError(
                f"{option}: expected a BabyAI level of MiniGrid, such as {examples}, got {word!r}"
            )
        names.append(name)
    if not names or len(set(names)) < len(names):
        raise ValueError(f"{option}: expected one level or more, each once, got {level}")
    return names


def make_level(name: str) -> Any:
    """Return the MiniGrid environment of a level, without wrappers."""
    import gymnasium

    return gymnasium.make(level_ids()[name], disable_env_checker=True).unwrapped


def reset_level(env: Any, seed: int) -> dict[str, Any]:
    """Start the mission of a seed, silently, and return its first observation."""
    # MiniGrid prints each layout that it rejects.
    with redirect_stdout(StringIO()):
        observation, _ = env.reset(seed=seed)
    return dict(observation)


@cache
def first_missions(name: str) -> tuple[str, ...]:
    """Return the missions of a level's first 20 training seeds, a sample of what it says.

    Every level that joins instructions does so in 12 of them or more.
    """
    env = make_level(name)
    return tuple(reset_level(env, seed)["mission"] for seed in training_seeds(0, 20).tolist())


@cache
def step_limit(name: str) -> int:
    """Return the most steps that any mission of a level can have.

    MiniGrid gives each navigation that a mission needs as many steps as its rooms have cells, so
    that the limit differs between the missions of one level.
    """
    from minigrid.envs.babyai.core.levelgen import LevelGen

    env = make_level(name)
    reset_level(env, 0)
    if not isinstance(env, LevelGen) or env.fixed_max_steps:
        return int(env.max_steps)  # the missions of these levels need equally many
    # "A and B, then C and D" is the longest mission, "put A next to B" the longest of its parts
    parts = 4 if "seq" in env.instr_kinds else 2 if "and" in env.instr_kinds else 1
    navigations = parts * (2 if "putnext" in env.action_kinds else 1)
    return int(navigations * env.room_size**2 * env.num_rows * env.num_cols)


def instruction_kind(env: Any) -> str:
    """Return the kind of the mission that was started: of one instruction its verb, of several the
    word that joins them.
    """
    from minigrid.envs.babyai.core import verifier

    kinds = {
        verifier.GoToInstr: "go to",
        verifier.PickupInstr: "pick up",
        verifier.PutNextInstr: "put next to",
        verifier.OpenInstr: "open",
        verifier.AndInstr: "and",
        verifier.BeforeInstr: "then",
        verifier.AfterInstr: "after",
    }
    return next(kind for instruction, kind in kinds.items() if isinstance(env.instrs, instruction))


class Bot:
    """MiniGrid's bot in one environment that was just started, with its failures as results.

    It reads the state of the environment, but plans by what the agent has seen so far.
    """

    def __init__(self, env: Any) -> None:
        from minigrid.utils.baby_ai_bot import BabyAIBot

        bot: Any = BabyAIBot  # its code has no types
        self.bot = bot(env)
        self.has_failed = False

    def act(self, taken: int | None = None) -> int:
        """Return its next action; `done`, which changes nothing, once it has failed.

        Args:
            taken: the action before; None: the one that it returned, or this is the first.
        """
        if not self.has_failed:
            try:
                return int(self.bot.replan(taken))
            except Exception:  # a box that it opened, or an assertion about a case it cannot plan
                self.has_failed = True
        return DONE
