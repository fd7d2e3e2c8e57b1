"""Windows of whole teams: the episodes of a group over the same steps of their world, one row an
agent.
"""

from dataclasses import replace
from functools import cache
from typing import Unpack

import numpy as np

from decisionllm.datasets.rng import Stream, make_step_rng
from decisionllm.datasets.sampling import Sampler, SamplerOptions
from decisionllm.datasets.store import Store
from decisionllm.datasets.windows import Steps, cut_windows
from decisionllm.schema import Window, row_changes
from decisionllm.teams.tokenizer import POOL
from decisionllm.tokenizers.text import merge_team_texts


def sample_teams(
    steps: Steps, store: Store, episodes: np.ndarray, options: SamplerOptions
) -> "TeamSampler":
    """Return a sampler of windows of whole teams."""
    return TeamSampler(steps, store, episodes, **options)


def sample_teams_and_agents(
    steps: Steps, store: Store, episodes: np.ndarray, options: SamplerOptions
) -> "TeamSampler":
    """Return a sampler of windows of whole teams, half of which are split into teams of one."""
    return TeamSampler(steps, store, episodes, alone=0.5, **options)


class TeamSampler(Sampler):
    """Training windows of T world steps, drawn as a pure function of (seed, step): they begin at
    any step of any selected agent.

    Rows come team by team, the members in an order and with identities that are drawn for each
    window. Members that are not among the selected episodes are observed and no training targets.

    Args:
        steps: of the store, see `windows.load_steps`.
        store: of the episodes.
        episodes: indices of the selected episodes.
        alone: this share of the windows is split into teams of one.
        options: of a `Sampler`.

    Attributes:
        tasks: the texts of single agents and of whole teams, which `Window.text_index` counts.
    """

    def __init__(
        self,
        steps: Steps,
        store: Store,
        episodes: np.ndarray,
        *,
        alone: float = 0.0,
        **options: Unpack[SamplerOptions],
    ) -> None:
        super().__init__(steps, episodes, **options)
        self.alone = alone
        self.length = steps.end - steps.first
        E = len(self.length)
        self.start = np.zeros(E, np.int64) if store.start is None else store.start.astype(np.int64)
        self.agent = np.arange(E) if store.agent is None else store.agent
        self.is_selected = np.isin(np.arange(E), episodes)
        _, self.group, self.count = np.unique(store.group, return_inverse=True, return_counts=True)
        # the episodes of each group; an agent that came back has several
        self.members = np.lexsort((self.agent, self.group))
        self.first = np.cumsum(self.count) - self.count
        nth = np.cumsum(row_changes(self.group[self.members], self.agent[self.members]))
        self.number = np.empty(E, np.int64)  # of its agent in its group
        self.number[self.members] = nth - np.repeat(nth[self.first], self.count)
        self._check(store)
        self._write_texts(store)

    def _check(self, store: Store) -> None:
        """Raise a ValueError if a team has too many agents or a world too many steps."""
        if self.number.max() >= POOL:
            e = int(self.number.argmax())
            raise ValueError(
                f"group {store.group[e]}: expected at most {POOL} agents (the identities "
                f"there are), got {self.number[e] + 1}; train with team.execution=per_agent"
            )
        last = self.start + self.length
        if last.max() > store.spec.horizon:
            e = int(last.argmax())
            raise ValueError(
                f"episode {e}: expected an end within the horizon of {store.spec.horizon} "
                f"steps of its world, it begins at step {self.start[e]} and has "
                f"{self.length[e]}"
            )

    def _write_texts(self, store: Store) -> None:
        """Set the texts of agents and teams, and which one each episode and each group has."""
        text_of = cache(lambda kinds: merge_team_texts(store.tasks[i] for i in kinds))
        teams = np.split(store.task[self.members], self.first[1:])
        texts = [text_of(frozenset(kinds.tolist())) for kinds in teams]
        self.tasks = [*store.tasks, *sorted(set(texts) - set(store.tasks))]
        index = {task: i for i, task in enumerate(self.tasks)}
        self.task = store.task
        self.team_text = np.array([index[text] for text in texts])

    def __call__(self, step: int) -> Window:
        """Return the batch of a step: windows of up to T steps, one row a member."""
        rng = make_step_rng(self.seed, step, Stream.ROWS)
        B = self.batch_size
        episodes, within = self.locate(self.draw(rng))
        begin = self.start[episodes] + within
        group = self.group[episodes]

        # -- one row for each episode of the groups, and which of them overlap the window --
        group_sizes = self.count[group]
        window = np.repeat(np.arange(B), group_sizes)
        nth = np.arange(len(window)) - np.repeat(np.cumsum(group_sizes) - group_sizes, group_sizes)
        member = self.members[self.first[group][window] + nth]
        offset = begin[window] - self.start[member]
        is_there = (offset < self.length[member]) & (offset > -self.T)

        # -- window by window, the members of each in an order that is drawn --
        # Not used. Without it a seed would draw other orders than in earlier versions; it goes when
        # something else changes the draws of teams.
        rng.random(len(member))
        (rows_there,) = np.nonzero(is_there)
        rows = rows_there[np.lexsort((rng.random(len(rows_there)), window[rows_there]))]
        window = window[rows]
        member = member[rows]
        offset = offset[rows]

        # -- teams, identities and texts --
        new = np.diff(window, prepend=-1) > 0
        pool = rng.random((B, POOL)).argsort(1)
        split = window < round(self.alone * B)
        batch = cut_windows(self.steps, member, offset, self.T)
        return replace(
            batch,
            timesteps=(batch.timesteps + self.start[member, None]) * batch.mask,
            loss_mask=batch.loss_mask & self.is_selected[member, None],
            team=np.cumsum(new | split) - 1,
            identity=pool[window, self.number[member]],
            text_index=np.where(split, self.task[member], self.team_text[self.group[member]]),
        )
