"""SMAX's evaluation: E battles under each of several conditions, all of their units in one batch, each until it dies.

A row is a unit; `groups` says which rows are a team. Every unit is paid what its team is, and the score is the battles won, in percent.
"""

from functools import partial

import numpy as np

from decisionllm.config import ranges
from decisionllm.datasets.smax import blocks, describe
from decisionllm.datasets.team import canonical, entity_schema, task_text
from decisionllm.envs.smax import HORIZON, SIZE, STOP, TEACHERS, Smax, Teacher, allowed
from decisionllm.eval.report import draw_conditions, figure
from decisionllm.registry import register

STARTS = 1000  # evaluation `seed` fights its battles with seeds from this times `seed` on; logs begin at a million


@register("env", "smax", text="${text}", map="${dataset.map}")
class SmaxTeams:
    """num_episodes battles under each condition: undisturbed, then with each crash.

    map, text: as in the dataset. crash: one unit stands still from such a step on: `20,10,0`; nobody is told.
    """

    horizon, execution, unit = HORIZON, "per agent", "battles won, %"

    def __init__(self, num_episodes, *, map: str = "2s3z", crash: str = "", text: str = "none"):
        crashes = ranges("env.crash", crash, nothing="none", within=range(HORIZON))
        self.map, self.text, self.settings = map, text, [HORIZON, *crashes]  # the step of the crash: none at first
        self.condition = np.repeat(np.arange(len(self.settings)), num_episodes)  # of each battle
        self.crash = np.array(self.settings)[self.condition]
        self.seeds = np.tile(np.arange(num_episodes), len(self.settings))
        self.reset(0)
        self.groups = np.repeat(np.arange(len(self.condition)), self.world.facts.allies)  # the battle of each row

    def conditions(self):
        """What makes a row of the results: {protocol: the first unit of each of its battles, (E,) int}"""
        first = np.arange(len(self.condition)) * self.world.facts.allies
        named = [self.execution, *(f"{self.execution}, {words}" for words in self.words()[1:])]
        return {name: first[self.condition == c] for c, name in enumerate(named)}

    def words(self):
        return ["undisturbed", *(f"crash at {c}" for c in self.settings[1:])]

    @property
    def protocol(self):
        return self.execution

    def reset(self, seed):
        self.world = world = Smax(STARTS * seed + self.seeds, self.map)
        self.meta = describe(self.map, world.facts)
        self.entity_schema, self.kinds = (
            entity_schema(self.meta, world.facts.allies),
            np.searchsorted(world.facts.kinds, world.kinds).ravel(),
        )
        E, N = world.alive.shape
        names = list(self.meta["types"])
        self.tasks = [task_text(self.meta, N, names[k], self.text) for k in self.kinds]
        drawn = np.random.default_rng(seed).integers(N, size=int((self.condition == 0).sum()))
        self.struck = np.tile(drawn, len(self.settings))  # who stands still in a crash
        self.returns, self.decisions, self.illegal, self.deaths, self.length = np.zeros((5, E))
        self.frames = [(world.places, world.health)]
        return self.observe()

    def observe(self):
        """(rows, S) float32"""
        world = self.world
        seen = world.seen.reshape(len(self.kinds), -1)
        return canonical(seen, blocks(world.facts), self.entity_schema, agent_type=self.kinds, types=len(world.facts.kinds))

    @property
    def action_masks(self):
        return self.world.masks.reshape(len(self.kinds), -1)

    def step(self, actions):
        """(rows, 1) -> observations (rows, S), rewards (rows,), ended (rows,), truncated (rows,)"""
        world, there, each = self.world, self.world.there, np.arange(len(self.condition))
        asked = actions.astype(int).reshape(there.shape)
        self.decisions += there.sum(1)
        self.illegal += (there & ~allowed(world.masks, asked)).sum(1)
        self.length += ~world.over
        still = world.time >= self.crash
        asked[each[still], self.struck[still]] = STOP
        gains = world.step(asked)
        self.returns += gains
        self.deaths += (there & ~world.alive).sum(1)
        self.frames.append((world.places, world.health))
        ended, truncated = (~world.alive | world.terminated[:, None]).ravel(), (world.over & ~world.terminated)[self.groups]
        return self.observe(), gains[self.groups], ended, truncated

    def score(self, episodes):
        """100 for the battle of each episode that was won, 0 for others."""
        return 100.0 * self.world.won[[e.group for e in episodes]]

    def metrics(self, episodes):
        """What lies behind the scores: the team's return, units lost and time run out in a battle; decisions and forbidden ones in all."""
        worlds = [e.group for e in episodes]
        mean = lambda x: round(float(x[worlds].mean()), 4)  # noqa: E731
        return {
            "execution": self.execution.replace(" ", "_"), "return": mean(self.returns), "deaths": mean(self.deaths), "out_of_time": mean(self.world.over & ~self.world.terminated),
            "decisions": int(self.decisions[worlds].sum()), "illegal": int(self.illegal[worlds].sum()),
        }  # fmt: skip

    def draw(self, episodes, title, frames=5):
        """A battle as a strip of frames, allies blue, enemies red, the paler the weaker; where there are several conditions, their scores."""
        battle, several = episodes[0].group, len(self.settings) > 1
        made = figure(2.2 * frames + 3 * several, 2.6)
        axes = made.subplots(1, frames + several, width_ratios=[2] * frames + [3] * several)
        colours = np.array(["C0"] * self.world.facts.allies + ["C3"] * self.world.facts.enemies)
        for axis, step in zip(axes, np.linspace(0, self.length[battle], frames).round().astype(int), strict=False):
            places, health = (x[battle] for x in self.frames[step])
            axis.scatter(*places.T, c=colours, alpha=np.clip(health, 0, 1), s=20)
            axis.set(xlim=(0, SIZE), ylim=(0, SIZE), xticks=[], yticks=[], aspect="equal")
            axis.set_title(f"step {step}", fontsize=8)
        if several:
            scores = {words: 100 * self.world.won[self.condition == c].mean() for c, words in enumerate(self.words())}
            draw_conditions(axes[-1], scores, self.unit)
        made.suptitle(title, fontsize=9)
        return made

    def baselines(self, seed):
        """The teachers, each alone in all of its team: name -> begin(tasks)."""
        return {name: partial(Player, self, name, seed) for name in TEACHERS}


class Player:
    """A teacher as the player of all units."""

    def __init__(self, env, name, seed, tasks):
        kind = TEACHERS.index(name)
        env.execution = "per agent"  # whoever played before
        self.env, self.teacher = env, Teacher(env.world, kind, np.random.default_rng((seed, kind)))

    def act(self, observations, rewards=None, action_masks=None):
        return self.teacher.act(self.env.world)[self.env.world.there][:, None]

    def select(self, rows):
        pass
