"""Teams under way: the members of a group decide in turn, each conditioned on the actions of those
before it.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor

from decisionllm.backbones.kv_cache import SessionCache
from decisionllm.datasets.windows import collate, deduplicate_texts, window_start
from decisionllm.policy.buffer import EpisodeBuffer, Rows
from decisionllm.policy.window_reader import WindowReader
from decisionllm.schema import Batch, Targets, Window
from decisionllm.teams.tokenizer import POOL
from decisionllm.tokenizers import text

if TYPE_CHECKING:
    from decisionllm.teams.model import TeamSequenceModel


class TeamSession(EpisodeBuffer):
    """N agents of several teams, in lock-step, with one KV cache per team.

    An agent that has ended decides no more; its past stays in the windows that contain it. The
    members of a team share one text, see `text.merge_team_texts`.

    Args:
        policy: that acts, see `Policy.begin`.
        tasks: N task texts.
        horizon: most steps of an episode.
        target_returns: one for all or (N,), raw reward units; None: the policy's own.
        groups: (N,) the team of each agent; None: every agent is a team of one, which is execution
            per agent.
        cached: False reads every window afresh for every agent, as a reference.

    Raises:
        ValueError: a team has more members than there are identities.
    """

    policy: WindowReader

    def __init__(
        self,
        policy: WindowReader,
        tasks: Sequence[str],
        horizon: int,
        target_returns: Targets = None,
        groups: np.ndarray | None = None,
        *,
        cached: bool = True,
    ) -> None:
        N, model = len(tasks), policy.model
        super().__init__(policy, N, horizon, target_returns)
        if groups is None:
            groups = np.arange(N)
        _, team, team_sizes = np.unique(groups, return_inverse=True, return_counts=True)
        if team_sizes.max() > POOL:
            raise ValueError(
                f"groups: expected teams of at most {POOL}, got {team_sizes.max()}; take "
                "team.execution=per_agent"
            )
        number = rank_in_group(team)  # of each agent in its team
        generator = policy.generator or torch.Generator(policy.device).manual_seed(0)

        def draw(*shape: int) -> np.ndarray:
            return torch.rand(*shape, generator=generator, device=policy.device).cpu().numpy()

        # from here on, agents stand team by team in the order in which they decide
        rows = np.lexsort((draw(N), team))
        # rows of those that continue, in the caller's order
        self.active: np.ndarray = np.argsort(rows)
        self.team = team[rows]
        self.targets = self.targets[rows]
        self.identity = draw(len(team_sizes), POOL).argsort(1)[team, number][rows]
        self.cached = cached and model.backbone.layout is not None
        self.present = np.zeros((N, horizon), bool)
        texts, text_of_team = deduplicate_texts(merge_texts_by_team(tasks, team))
        self.texts = model.backbone.encode(texts)
        self.text_index = text_of_team[self.team]
        self.start = -1  # where the cached window begins; -1: nothing is cached
        self.cache: SessionCache | None = None
        # (W,) tokens of the steps of each team that the cache holds
        self.filled = torch.zeros(len(team_sizes), dtype=torch.long, device=policy.device)

    @torch.inference_mode()
    def decide(self, rows: Rows | None = None) -> np.ndarray:
        """Actions (M, A) for the current observations, raw units."""
        policy = self.policy
        now = int(self.now[self.active[0]])
        self.present[self.active, now] = True
        start = int(window_start(now, policy.window, policy.stride))
        afresh = start != self.start or start == now
        self.start = start
        active = np.sort(self.active)
        turn = rank_in_group(self.team[active])
        for t in range(turn.max() + 1):
            rows_of_turn = active[turn == t]  # at most one of each team
            if self.cached:
                hidden = self._extend(rows_of_turn, t, now, afresh and t == 0)
            else:
                hidden = self._read_window(rows_of_turn, now)
            current = self.observations[rows_of_turn, now]
            no_texts = [""] * len(rows_of_turn)  # only plans read them, which teams do not make
            actions = policy.decider.act(
                hidden,
                self.policy.on_device(self.masks_at(rows_of_turn)),
                current,
                no_texts,
                policy.generator,
            )
            self.actions[rows_of_turn, now] = actions
        return np.asarray(self.actions[self.active, now])

    def select(self, rows: Rows) -> None:
        """Continue with these agents alone, counted among those that continued: (M,) int or (N,)
        bool.
        """
        self.active = self.active[rows]

    def _batch(self, rows: np.ndarray, begin: int, now: int) -> tuple[Batch, np.ndarray]:
        """Steps from `begin` on of the teams of these rows: a Batch, and its rows."""
        members = np.flatnonzero(
            np.isin(self.team, self.team[rows]) & self.present[:, begin : now + 1].any(1)
        )
        span = slice(begin, now + 1)
        present = self.present[members, span]
        togo = self.returns_to_go()
        window = Window(
            self.observations[members, span],
            self.actions[members, span],
            togo[members, span],
            np.arange(begin, now + 1) * present,
            present,
            members,
            team=self.team[members],
            identity=self.identity[members],
        )
        return collate(window, self.texts, self.text_index[members]).to(self.policy.device), members

    def _read_window(self, rows: np.ndarray, now: int) -> Tensor:
        """Return hidden states where these rows decide (n, D); reads the whole window."""
        batch, members = self._batch(rows, self.start, now)
        return self.policy.model.read(batch)[np.searchsorted(members, rows), -1]

    def _extend(self, rows: np.ndarray, turn: int, now: int, afresh: bool) -> Tensor:
        """Return the same from the cache: the first turn reads the step, or the window, the others
        one token each.
        """
        model = cast("TeamSequenceModel", self.policy.model)
        if self.cache is None:
            self.cache = self._open_cache(model)
        # one step more, for the actions taken there
        begin = self.start if afresh else max(now - 1, self.start)
        batch, members = self._batch(rows, begin, now)
        tokens, lists, team = model.team_tokens(batch)
        positions = torch.from_numpy(np.searchsorted(members, rows))
        team = team[positions]
        last = lists.queries[positions, -1]
        # the first token that is not in the cache
        if afresh:
            first = torch.zeros_like(last)
            self.filled[:] = 0
        elif turn == 0:
            first = lists.starts[team, -1]
        else:
            first = last
        new = last - first
        place = first[:, None] + torch.arange(int(new.max()) + 1, device=first.device)
        tokens = tokens[team[:, None], place.clamp(max=tokens.shape[1] - 1)]
        team_rows = torch.from_numpy(self.team[rows]).to(self.policy.device)
        hidden = model.backbone.append(tokens, self.cache, self.filled[team_rows], team_rows)
        self.filled[team_rows] += new + 1
        return hidden.float()[torch.arange(len(rows)), new]

    @property
    def _first(self) -> np.ndarray:
        """The first row of each team."""
        return np.searchsorted(self.team, np.arange(self.team[-1] + 1))

    def _open_cache(self, model: "TeamSequenceModel") -> SessionCache:
        """A cache with room for the windows of the largest team."""
        ids, mask = (each.to(self.policy.device) for each in self.texts)
        texts = model.backbone.read_text(ids, mask)
        largest = int(np.bincount(self.team).max())
        room = self.policy.window * (2 * largest + self.policy.return_conditioned)
        text_rows = torch.from_numpy(self.text_index[self._first]).to(self.policy.device)
        return texts.with_room(text_rows, room)


def merge_texts_by_team(tasks: Sequence[str], team: np.ndarray) -> list[str]:
    """Return the text of each team, of the task texts of N agents and their teams (N,)."""
    members: dict[int, list[str]] = {}
    for number, task in zip(team.tolist(), tasks, strict=True):
        members.setdefault(number, []).append(task)
    return [text.merge_team_texts(members[number]) for number in sorted(members)]


def rank_in_group(labels: np.ndarray) -> np.ndarray:
    """Count the equal labels before each label: (N,) -> (N,) int."""
    order = np.argsort(labels, kind="stable")
    ranks_of_rows = np.empty(len(labels), int)
    ordered = labels[order]
    ranks_of_rows[order] = np.arange(len(labels)) - np.searchsorted(ordered, ordered)
    return ranks_of_rows
