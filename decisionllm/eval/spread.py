"""simple_spread's evaluation: E worlds under each of several conditions, all of their agents in one batch.

A row is an agent; `groups` says which rows are a team. Every agent is paid the mean of its team, and a result counts worlds, not
agents. The score is normalised by random play and by the expert teacher with the same number of agents and kind of actions, undisturbed.
"""

from functools import partial

import numpy as np

from decisionllm.config import listed, one_of, ranges
from decisionllm.datasets.spread import alike, blocks, describe
from decisionllm.datasets.team import canonical, entity_schema, task_text
from decisionllm.envs.spread import HORIZON, TEACHERS, TOUCH, Spread, Teacher, pushes
from decisionllm.eval.report import draw_conditions, figure
from decisionllm.registry import register

STARTS = 1000  # evaluation `seed` starts its worlds as mpe2 does with seeds from this times `seed` on
# Mean returns of random play and of the expert teacher by number of agents: `references()`, 1,000 worlds each
REFERENCE_STARTS = 900_000  # and the next ones are mpe2's seeds of these worlds; logs begin at a million
REFERENCE = {
    "discrete": {2: (-21.2067, -5.8211), 3: (-26.2337, -7.2657), 4: (-30.7352, -8.9167), 5: (-34.8587, -10.6418), 6: (-39.1584, -12.5556)},
    "continuous": {2: (-21.155, -4.5151), 3: (-25.7473, -5.6297), 4: (-29.883, -6.9833), 5: (-34.5545, -8.4735), 6: (-38.6039, -10.0586)},
}  # fmt: skip


@register(
    "env", "spread", text="${text}", agents="${dataset.agents}", actions="${dataset.actions}", capacity="${dataset.capacity}"
)
class SpreadTeams:
    """num_episodes worlds under each condition: every number of agents, undisturbed, then with each crash and each partner.

    text, actions, capacity: as in the dataset. agents: such as `3`, `2-6` or `3,5`. crash: one agent's motor is dead from such a step
    on: `0,2,4,8`; nobody is told. partner: one agent is played by a teacher: `expert`, `medium`, `random`, `convention`.
    order: in which an agent sees the others and the landmarks: as mpe2 has it, `reversed`, or `random`, another for each agent.
    sees: only so many landmarks and agents, nearest first; 0: all.
    """

    horizon, execution = HORIZON, "per agent"

    def __init__(
        self, num_episodes, *, agents: str = "3", actions: str = "discrete", crash: str = "", partner: str = "",
        order: str = "mpe2", sees: int = 0, text: str = "none", capacity: int = 6,
    ):  # fmt: skip
        if not listed(agents) or sees < 0:
            raise ValueError(f"env: expected agents such as 3 or 2-6, and sees from 0, got {agents!r} and {sees}")
        numbers, partners = ranges("env.agents", agents, within=range(2, capacity + 1)), listed(partner)
        crashes = ranges("env.crash", crash, nothing="none", within=range(HORIZON))
        for name in partners:
            one_of("env.partner", name, TEACHERS)
        one_of("env.order", order, ("mpe2", "reversed", "random"))
        one_of("env.actions", actions, ("discrete", "continuous"))
        self.text, self.discrete, self.order, self.sees = text, actions == "discrete", order, sees
        disturbed = [("", 0), *(("crash", c) for c in crashes), *(("partner", p) for p in partners)]
        self.settings = [(n, *how) for n in numbers for how in disturbed]
        self.condition = np.repeat(np.arange(len(self.settings)), num_episodes)  # of each world
        self.agents = np.array([n for n, *_ in self.settings])[self.condition]
        self.groups = np.repeat(np.arange(len(self.agents)), self.agents)  # the world of each row
        self.meta = describe(6 * np.unique(self.agents), actions)
        self.entity_schema = entity_schema(self.meta, capacity)
        self.tasks = [task_text(self.meta, int(n), "agent", text) for n in self.agents[self.groups]]
        self.reference = np.array([REFERENCE[actions][n] for n in self.agents])  # (E, 2)

    @property
    def protocol(self):
        """What every row of the results has in common: who decides, and what is seen."""
        seen = [f"{self.order} order"] * (self.order != "mpe2") + [f"{self.sees} nearest"] * (self.sees > 0)
        return ", ".join([self.execution, *seen])

    def conditions(self):
        """What makes a row of the results: {protocol: the first agent of each of its worlds, (M,) int}"""
        first, named = np.searchsorted(self.groups, np.arange(len(self.agents))), {}
        for c, condition in enumerate(self.settings):
            named[", ".join([self.protocol, *self.words(condition)])] = first[self.condition == c]
        return named

    def words(self, condition):
        n, how, what = condition
        several = len({n for n, *_ in self.settings}) > 1
        return [f"{n} agents"] * (several or n != 3) + {"crash": [f"crash at {what}"], "partner": [f"partner {what}"]}.get(
            how, []
        )

    def reset(self, seed):
        if not 0 <= seed < REFERENCE_STARTS // STARTS:
            raise ValueError(f"seed: expected 0 .. {REFERENCE_STARTS // STARTS - 1}, so that no start is in a log, got {seed}")
        E = int((self.condition == 0).sum())
        self.world, self.time = Spread(STARTS * seed + np.tile(np.arange(E), len(self.settings)), self.agents), 0
        rng = np.random.default_rng(seed)
        drawn = np.tile(rng.random((E, self.world.there.shape[1])), (len(self.settings), 1))
        self.struck = np.where(self.world.there, drawn, -1).argmax(1)  # whom a crash or a partner replaces
        how, what = ([c[k] for c in self.settings] for k in (1, 2))
        self.crash = np.array([w if h == "crash" else HORIZON for h, w in zip(how, what, strict=True)])[self.condition]
        self.replaced = np.array([h == "partner" for h in how])[self.condition]
        kinds = np.array([TEACHERS.index(w) if h == "partner" else 0 for h, w in zip(how, what, strict=True)])[self.condition]
        self.partner = Teacher(self.world, kinds, rng, discrete=self.discrete)
        self.returns, self.touches = np.zeros((2, len(self.agents)))
        self.places = [self.world.positions]
        self.shuffles = np.random.default_rng(seed)
        return self.observe()

    def observe(self):
        """(rows, S) float32"""
        made = np.zeros((len(self.groups), sum(width * count for _, width, count in self.entity_schema)), np.float32)
        for worlds in alike(self.world):
            n = int(self.agents[worlds[0]])
            rows = np.isin(self.groups, worlds)
            made[rows] = canonical(self.world.observe(worlds, sees=self.sees), blocks(n, n, sees=self.sees), self.entity_schema)
        return made if self.order == "mpe2" else self.reordered(made)

    def reordered(self, seen):
        """The same with the entities of each kind in another order."""
        at = 0
        for _, width, count in self.entity_schema:
            part = seen[:, at : at + width * count].reshape(len(seen), count, width)
            if count > 1:
                keys = -np.arange(count) if self.order == "reversed" else self.shuffles.random((len(seen), count))
                order = np.argsort(np.where(part[..., 0] > 0, keys, np.inf), 1, kind="stable")
                seen[:, at : at + width * count] = np.take_along_axis(part, order[..., None], 1).reshape(len(seen), -1)
            at += width * count
        return seen

    def step(self, actions):
        """(rows, A) -> observations (rows, S), rewards (rows,), ended (rows,), truncated (rows,)"""
        world, each = self.world, np.arange(len(self.agents))
        asked = np.zeros((*world.there.shape, actions.shape[1]))
        asked[world.there] = actions
        if self.replaced.any():
            asked[each[self.replaced], self.struck[self.replaced]] = self.partner.act(world)[
                each[self.replaced], self.struck[self.replaced]
            ]
        world.crashed[each, self.struck] = self.time >= self.crash
        gains = world.step(pushes(asked)).sum(1) / self.agents
        self.time += 1
        self.returns += gains
        self.touches += (world.both & (world.distance < TOUCH)).sum((1, 2)) / 2
        self.places.append(world.positions)
        over = np.full(len(self.groups), self.time >= HORIZON)
        return self.observe(), gains[self.groups], np.zeros_like(over), over

    def score(self, episodes):
        """The normalised score of the world of each episode: 100 (return - random) / (expert - random)."""
        worlds = [e.group for e in episodes]
        low, high = self.reference[worlds].T
        return 100 * (self.returns[worlds] - low) / (high - low)

    def metrics(self, episodes):
        """What lies behind the scores: how many agents, landmarks covered at the end, touches of two agents in an episode."""
        worlds = [e.group for e in episodes]
        mean = lambda x: round(float(x[worlds].mean()), 4)  # noqa: E731
        return {
            "execution": self.execution.replace(" ", "_"), "agents": int(self.agents[worlds[0]]), "covered": mean(self.world.covered()),
            "touches": mean(self.touches), "reference": self.reference[worlds[0]].tolist(),
        }  # fmt: skip

    def draw(self, episodes, title, steps=(0, 4, 8, 12, 16, 25)):
        """A world as a strip of frames, agents with the way behind them; where there are several conditions, their scores."""
        from matplotlib.patches import Circle

        world, places = episodes[0].group, np.stack(self.places)[:, episodes[0].group]
        n, several = int(self.agents[world]), len(self.settings) > 1
        made = figure(2 * len(steps) + 3 * several, 2.6)
        axes = made.subplots(1, len(steps) + several, width_ratios=[2] * len(steps) + [3] * several)
        for axis, step in zip(axes, steps, strict=False):
            axis.plot(*self.world.landmarks[world, :n].T, "k+", markersize=9)
            for i, place in enumerate(places[step, :n]):
                axis.add_patch(Circle(place, TOUCH / 2, color=f"C{i}", alpha=0.6))
                axis.plot(*places[: step + 1, i].T, color=f"C{i}", linewidth=0.8)
            axis.set(xlim=(-1.6, 1.6), ylim=(-1.6, 1.6), xticks=[], yticks=[], aspect="equal")
            axis.set_title(f"step {step}", fontsize=8)
        if several:
            low, high = self.reference.T
            scores = 100 * (self.returns - low) / (high - low)
            words = [", ".join(self.words(c)) or "undisturbed" for c in self.settings]
            means = {name: scores[self.condition == c].mean() for c, name in enumerate(words)}
            draw_conditions(axes[-1], means, "normalised score")
        made.suptitle(title, fontsize=9)
        return made

    def baselines(self, seed):
        """The teachers, each alone in all of its team: name -> begin(tasks)."""
        return {name: partial(Player, self, name, seed) for name in ("expert", "medium", "random")}


class Player:
    """A teacher as the player of all agents."""

    def __init__(self, env, name, seed, tasks):
        rng = np.random.default_rng((seed, TEACHERS.index(name)))
        env.execution = "per agent"  # whoever played before
        self.env, self.teacher = env, Teacher(env.world, TEACHERS.index(name), rng, discrete=env.discrete)

    def act(self, observations, rewards=None):
        return self.teacher.act(self.env.world)[self.env.world.there]


def references(worlds=1000):
    """REFERENCE, measured again: {actions: {agents: (random, expert)}}"""
    found = {}
    for actions in ("discrete", "continuous"):
        for n in range(2, 7):
            means = []
            for kind in ("random", "expert"):
                world = Spread(REFERENCE_STARTS + np.arange(worlds), n)
                player = Teacher(world, TEACHERS.index(kind), np.random.default_rng(0), discrete=actions == "discrete")
                means.append(round(float(sum(world.step(pushes(player.act(world))) for _ in range(HORIZON)).mean()), 4))
            found.setdefault(actions, {})[n] = tuple(means)
    return found
