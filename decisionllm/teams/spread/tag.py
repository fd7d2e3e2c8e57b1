"""Scripted players of mpe2's simple_tag_v3, and the meta of a log of them.

The game has three adversaries, one agent and two obstacles.

A player is a function (observations, infos) -> actions, dicts by agent, of the discrete actions
stay, left, right, down, up: an `act` of `team.collect`, or a partner of env=pettingzoo. An
observation is the own velocity and position, then offsets of both obstacles and of the other
agents, adversaries first; an adversary also observes the velocity of the agent.
"""

from collections.abc import Callable, Mapping
from itertools import product

import numpy as np

from decisionllm.schema import Json
from decisionllm.teams.spread.world import PUSHES

SPEED = {"adversary": 1.0, "agent": 1.3}  # at most
EDGE = 0.9  # beyond it the agent has a penalty
PLANS = np.array([*product(range(5), repeat=2)])  # (25, 2) discrete actions
Observations = Mapping[str, np.ndarray]
Act = Callable[[Observations, Json], dict[str, int]]
# The same numbers for both roles, so that the text alone says which one it is
OWN = ["own", 14, 1]
RULE = "each touch is worth 10 to the chasers and costs the prey 10, as does leaving the field"
META = {
    "name": "simple_tag",
    "teams": {"adversary": 0, "agent": 1},
    "task": "Three chasers hunt one prey, which is faster, between two obstacles",
    "reward_rule": RULE,
    "types": {
        "adversary": {
            "num_actions": 5,
            "role": "You chase: touch the prey",
            "observations": {"16": [OWN, ["", 2, 1]]},
        },
        "agent": {
            "num_actions": 5,
            "role": "You flee: keep away from every chaser and inside the field",
            "observations": {"14": [OWN]},
        },
    },
}


def chase(observations: Observations, infos: Json) -> dict[str, int]:
    """Each adversary runs to where it meets an agent that keeps its velocity inside the field."""
    return {
        agent: _push_towards(x[:2], _interception_offset(x)) for agent, x in observations.items()
    }


def _interception_offset(x: np.ndarray) -> np.ndarray:
    """Return the offset of that point (2,), of an adversary's observation (16,)."""
    offset, velocity = x[12:14], x[14:16]  # of the agent
    time = min(np.linalg.norm(offset) / SPEED["adversary"], 1.0)
    point = x[2:4] + offset + time * velocity
    return np.asarray(np.clip(point, -EDGE, EDGE) - x[2:4])


def _push_towards(velocity: np.ndarray, direction: np.ndarray) -> int:
    """Return the action that turns the velocity most into a direction."""
    target = direction / max(np.linalg.norm(direction), 1e-6)
    return int(np.argmax(PUSHES @ (target - velocity)))


def flee(observations: Observations, infos: Json) -> dict[str, int]:
    """The agent begins the best of 25 plans against adversaries that run straight at it.

    A plan is two actions for four steps each.
    """
    return {agent: int(PLANS[np.argmin(_plan_danger(x))][0]) for agent, x in observations.items()}


def _plan_danger(x: np.ndarray) -> np.ndarray:
    """Rate each plan (25,) by how near adversaries and edge come, from an agent's observation
    (14,).
    """
    count = len(PLANS)
    velocity = np.tile(x[:2], (count, 1))
    moved = np.zeros((count, 2))
    chasers = np.tile(x[8:14].reshape(3, 1, 2), (1, count, 1))  # (3, 25, 2)
    danger = np.zeros(count)
    for step in range(8):  # of 0.1 s, in which a quarter of the velocity is lost
        velocity = 0.75 * velocity + 0.4 * PUSHES[PLANS[:, step // 4]]
        speed = np.maximum(np.linalg.norm(velocity, axis=1, keepdims=True), 1e-6)
        velocity *= np.minimum(SPEED["agent"] / speed, 1)
        moved += 0.1 * velocity
        gaps = np.maximum(np.linalg.norm(moved - chasers, axis=-1, keepdims=True), 1e-6)
        chasers += 0.1 * SPEED["adversary"] * (moved - chasers) / gaps
        outside = np.maximum(np.abs(x[2:4] + moved) - EDGE, 0)
        danger += np.exp(-gaps[..., 0] / 0.2).sum(0) + 2 * outside.sum(-1)
    return danger


def teachers(rng: np.random.Generator) -> dict[str, Act]:
    """Players of both roles by name.

    Each role takes a tenth or six tenths of its actions at random, independently of the other.
    """

    def player(random_shares: Mapping[str, float]) -> Act:
        def act(observations: Observations, infos: Json) -> dict[str, int]:
            chasers = {a: x for a, x in observations.items() if a.startswith("adversary")}
            prey = {a: x for a, x in observations.items() if a.startswith("agent")}
            actions = chase(chasers, infos) | flee(prey, infos)
            for agent in actions:
                if rng.random() < random_shares[agent.split("_")[0]]:
                    actions[agent] = int(rng.integers(5))
            return actions

        return act

    players = {}
    for a, b in product((0.1, 0.6), repeat=2):
        players[f"chase {a}, flee {b}"] = player({"adversary": a, "agent": b})
    return players
