"""Checks of logs and policies of SMAX: returns after a death, no rows of dead units, no forbidden
action, a crash.

`python -m lab.smax runs/smax/nano-*` (needs `pip install -e '.[smax]'`) rolls the runs out, appends
the rows to smax.jsonl and prints one line a check. It takes minutes and needs JAX.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from decisionllm.teams.dataset import Log, source
from decisionllm.teams.simulated_logs import SEEDS, generate
from decisionllm.teams.smax.dataset import game
from decisionllm.teams.smax.env import SmaxTeams
from decisionllm.teams.smax.world import STOP, TEACHERS
from lab.multiagent import Row, Verdicts, rows, score

ROWS = Path(__file__).parent / "rows" / "smax.jsonl"
CRASHES = (20, 10, 0)


class Unmasked(SmaxTeams):
    """The same battles without action masks."""

    @property
    def action_masks(self) -> np.ndarray:
        return np.ones_like(super().action_masks)

    def conditions(self, execution: str, scripted: bool) -> dict[str, Sequence[int]]:
        return {
            f"{name}, unmasked": rows
            for name, rows in super().conditions(execution, scripted).items()
        }


def replay(log: Log, map: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Play a log again in JaxMARL alone: the return of each team (E,), and the steps that each unit
    lived (E, N).
    """
    import jax
    import jax.numpy as jnp
    from jaxmarl.environments.smax import HeuristicEnemySMAX, map_name_to_scenario

    env = HeuristicEnemySMAX(scenario=map_name_to_scenario(map))
    E = log.steps["group"].max() + 1
    T = log.steps["step"].max() + 1
    actions = np.full((E, T, env.num_allies), STOP, np.int32)
    actions[tuple(log.agents[name] for name in ("group", "step", "agent"))] = log.agents["action"]

    def battle(seed: Any, actions: Any) -> Any:
        key = jax.random.PRNGKey(seed)

        def step(carry: Any, now: Any) -> Any:
            state, over = carry
            time, chosen = now
            named = {agent: chosen[i] for i, agent in enumerate(env.agents)}
            alive = state.state.unit_alive[: env.num_allies] & ~over
            _, state, rewards, dones, _ = env.step_env(jax.random.fold_in(key, time), state, named)
            return (state, over | dones["__all__"]), (jnp.where(over, 0, rewards["ally_0"]), alive)

        _, state = env.reset(jax.random.fold_in(key, 0))
        state = jax.tree.map(lambda x: jax.lax.convert_element_type(x, x.dtype), state)
        _, (rewards, alive) = jax.lax.scan(
            step, (state, jnp.array(False)), (1 + jnp.arange(T), actions)
        )
        return rewards, alive

    seeds = np.asarray(SEEDS * (seed + 1) + np.arange(E), np.uint32)
    rewards, alive = (np.asarray(x) for x in jax.jit(jax.vmap(battle))(seeds, actions))
    return rewards.sum(1, dtype=np.float64), alive.sum(1)


def of_a_log(map: str, groups: int) -> Verdicts:
    """The checks of a log by playing it again."""
    log = generate(game(map), "mixed", groups=groups, noise=0.1)
    returns, lives = replay(log, map, 0)
    episodes = list(source(log, capacity=log.agents["agent"].max() + 1).episodes)
    own = np.array([e.rewards.sum(dtype=np.float64) for e in episodes])
    whole = own + [e.return_after_exit for e in episodes]
    true = returns[[e.group for e in episodes]]
    error = np.abs(whole - true).max()
    lost = 1 - own.sum() / whole.sum()
    right = np.mean([len(e.rewards) == lives[e.group, e.agent] for e in episodes])
    return {
        "MA-2": (
            error < 1e-5,
            f"{map}, {groups} battles: returns within {error:.0e} of the world's; the living alone "
            f"lack {100 * lost:.1f} %",
        ),
        "MA-4": (
            right == 1,
            f"{100 * right:.1f} % of {len(episodes):,} units are in the log for as long as they "
            "live",
        ),
    }


def verdicts(plain: list[Row], unmasked: list[Row], crashed: list[Row]) -> Verdicts:
    """The checks of a policy by its rows."""

    def mine(part: list[Row]) -> list[Row]:
        return [r for r in part if r["policy"] not in TEACHERS]

    def best(part: list[Row]) -> list[Row]:
        return [r for r in part if r["policy"] == "expert"]

    ours, teacher = (score(part, "per agent") for part in (mine(plain), best(plain)))
    found = {
        "wins": (
            ours >= 0.9 * teacher,
            f"{ours:.1f} % of the battles, the best teacher {teacher:.1f} %",
        )
    }
    forbidden, decisions = (sum(r[key] for r in mine(plain)) for key in ("illegal", "decisions"))
    share = sum(r["illegal"] for r in unmasked) / sum(r["decisions"] for r in unmasked)
    without = score(unmasked, "per agent, unmasked")
    found["MA-5"] = (
        forbidden == 0 and without < 5,
        f"{forbidden} of {decisions:,} actions forbidden; without masks: {100 * share:.0f} %, and "
        f"{without:.1f} % won",
    )
    at = {
        c: [score(part, f"per agent, crash at {c}") for part in (mine(crashed), best(crashed))]
        for c in CRASHES
    }
    found["MA-11"] = (
        all(o >= 0.85 * t - 3 for o, t in at.values()),
        "crash " + ", ".join(f"at {c}: {o:.1f} of {t:.1f}" for c, (o, t) in at.items()),
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m lab.smax", description=sys.modules[__name__].__doc__
    )
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--map", default="2s3z", help="of the log that is looked at")
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument(
        "--crashed", type=int, default=400, help="battles under each crash, of the first run"
    )
    parser.add_argument("--out", type=Path, default=ROWS)
    arguments = parser.parse_args()
    checks = of_a_log(arguments.map, 200)
    plain = rows(arguments.runs, arguments.out, episodes=arguments.episodes, baselines=True)
    first = arguments.runs[:1]
    unmasked = rows(first, arguments.out, episodes=200, env={"_target_": "lab.smax.Unmasked"})
    crashed = rows(
        first,
        arguments.out,
        episodes=arguments.crashed,
        env={"crash": ",".join(map(str, CRASHES))},
        baselines=True,
    )
    for check, (met, words) in (checks | verdicts(plain, unmasked, crashed)).items():
        print(f"{check:5s}  {'yes' if met else 'NO '}  {words}")


if __name__ == "__main__":
    main()
