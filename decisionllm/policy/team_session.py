"""Teams under way: the members of a group are asked one after the other, each knowing what those before it have decided."""

import numpy as np
import torch

from decisionllm.datasets.windows import collate, rollout_returns_to_go, window_start
from decisionllm.schema import Window
from decisionllm.tokenizers import text
from decisionllm.tokenizers.team import POOL


class TeamSession:
    """N agents of several teams, in lock-step, and the keys and values of what was read of each team.

    groups: (N,) who is in one team; None: each is a team of one, which is execution per agent. An agent that has ended is
    asked no more, and what it did stays in the windows that saw it. A team is told what its members would be, see `text.of_team`. cached=False
    reads every window afresh for every agent and is the truth.
    """

    def __init__(self, policy, tasks, horizon, target_returns=None, groups=None, *, cached=True):
        self.policy, model, spec = policy, policy.model, policy.model.spec
        if model.tokenizer.timesteps is not None and horizon > spec.horizon:
            raise ValueError(
                f"horizon: expected at most {spec.horizon} steps, the longest training episode, since this model learned one "
                f"vector a step; got {horizon}. Train with model.timesteps=none to go beyond"
            )
        N = len(tasks)
        _, team, sizes = np.unique(np.arange(N) if groups is None else groups, return_inverse=True, return_counts=True)
        if sizes.max() > POOL:
            raise ValueError(
                f"groups: expected at most {POOL} agents in a team (the identities there are), got {sizes.max()}; take team.execution=per_agent"
            )
        given = np.empty(N, int)  # the number of each in its team
        given[np.argsort(team, kind="stable")] = np.arange(N) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        generator = policy.generator or torch.Generator(policy.device).manual_seed(0)
        draw = lambda *shape: torch.rand(*shape, generator=generator, device=policy.device).cpu().numpy()  # noqa: E731
        key = {"random": draw(N), "given": given, "reverse": -given}[policy.order]
        rows = np.lexsort((key, team))  # from here on, agents stand team by team in the order in which they are asked
        self.alive = np.argsort(rows)  # where those stand that go on, in the caller's order
        self.team = team[rows]
        self.identity = draw(len(sizes), POOL).argsort(1)[team, given][rows] if policy.order == "random" else given[rows]
        self.horizon, self.now, self.cached = horizon, 0, cached and model.backbone.layout is not None
        self.targets = policy.resolve_targets(
            [None] * N if target_returns is None else np.broadcast_to(target_returns, N).tolist()
        )[rows]
        self.observations = np.zeros((N, horizon, spec.observation_dim), np.float32)
        self.actions = np.zeros((N, horizon, spec.action_dim), np.float32)
        self.rewards = np.zeros((N, horizon))
        self.masks = np.ones((N, horizon, spec.num_actions), bool) if spec.num_actions else None
        self.here = np.zeros((N, horizon), bool)
        members = [[] for _ in sizes]
        for at, task in zip(team, tasks, strict=True):
            members[at].append(task)
        told = [text.of_team(each) for each in members]
        different = sorted(set(told))
        self.texts = text.encode(model.backbone.tokenizer, different)
        self.text_index = np.array([different.index(each) for each in told])[self.team]
        self.start, self.memory = -1, None

    def act(self, observations, rewards=None, action_masks=None):
        """What those that go on see now, and what their last actions brought: (M, S), (M,) -> actions (M, A), raw units."""
        if self.now >= self.horizon:
            raise ValueError(f"session: expected at most {self.horizon} steps (the horizon), got one more")
        if not np.isfinite(observations).all():
            raise ValueError(
                f"observations: expected finite numbers, got {np.asarray(observations)[~np.isfinite(observations)][0]}"
            )
        self.observations[self.alive, self.now], self.here[self.alive, self.now] = observations, True
        if rewards is not None and self.now:
            self.rewards[self.alive, self.now - 1] = rewards
        if action_masks is not None:
            self.masks[self.alive, self.now] = action_masks
        actions = self.decide()
        self.now += 1
        return actions

    @torch.inference_mode()
    def decide(self):
        """The actions for what was seen last. (M, A), raw units."""
        policy, now = self.policy, self.now
        start = int(window_start(now, policy.window, policy.stride))
        afresh, self.start = start != self.start or start == now, start
        left = np.sort(self.alive)
        turn = np.arange(len(left)) - np.searchsorted(self.team[left], self.team[left])
        for t in range(turn.max() + 1):
            rows = left[turn == t]  # one of each team that is not through
            hidden = self._extend(rows, t, afresh and t == 0) if self.cached else self._read(rows)
            masks = None if self.masks is None else torch.from_numpy(self.masks[rows, now]).to(policy.device)
            self.actions[rows, now] = policy.choose(hidden, masks, self.observations[rows, now])
        return self.actions[self.alive, now]

    def select(self, rows):
        """Go on with these agents alone, counted among those that went on. (M,) int or (N,) bool"""
        self.alive = self.alive[rows]

    def _batch(self, rows, begin):
        """All that the teams of these rows saw from step `begin` on: a Batch, and the rows it is of."""
        span = slice(begin, self.now + 1)
        seen = np.flatnonzero(np.isin(self.team, self.team[rows]) & self.here[:, span].any(1))
        here, ends = self.here[seen, span], np.arange(len(self.rewards) + 1) * self.horizon
        togo = rollout_returns_to_go(
            self.rewards.ravel(), self.targets, ends, return_horizon=self.policy.return_horizon
        ).reshape(self.rewards.shape)
        window = Window(
            self.observations[seen, span], self.actions[seen, span], togo[seen, span].astype(np.float32),
            np.arange(begin, self.now + 1) * here, here, seen, team=self.team[seen], identity=self.identity[seen],
        )  # fmt: skip
        return collate(window, self.texts, self.text_index[seen]).to(self.policy.device), seen

    def _read(self, rows):
        """What is read where these rows are asked, the whole window again: (n, D)."""
        batch, seen = self._batch(rows, self.start)
        return self.policy.model.read(batch)[np.searchsorted(seen, rows), -1]

    def _extend(self, rows, t, afresh):
        """The same, with only what is new read into the memory: at the first turn the step, or the window, then a token a turn."""
        model, device, now = self.policy.model, self.policy.device, self.now
        begin = self.start if afresh else max(now - 1, self.start)  # one step more: what was done there is seen
        batch, seen = self._batch(rows, begin)
        tokens, places, team = model.team_tokens(batch)
        teams, first = self.team[rows], np.searchsorted(self.team, np.arange(self.team[-1] + 1))
        members = np.add.reduceat(self.here, first, dtype=int)[teams]  # at each step
        size = 2 * members + (members > 0) * self.policy.return_conditioned  # tokens
        known = np.zeros_like(teams) if afresh else size[:, begin:now].sum(1) + (t > 0) * (size[:, now] - members[:, now] + t)
        filled = size[:, self.start : begin].sum(1) + known
        if self.memory is None:
            texts = model.backbone.read_text(*(part.to(device) for part in self.texts))
            room = self.policy.window * (2 * int(np.bincount(self.team).max()) + self.policy.return_conditioned)
            self.memory = texts.rows(torch.from_numpy(self.text_index[first]).to(device)).with_room(room)
        at = np.searchsorted(seen, rows)
        last = places[at, -1] - torch.from_numpy(known).to(device)
        new = torch.from_numpy(known).to(device)[:, None] + torch.arange(int(last.max()) + 1, device=device)
        tokens = tokens[team[at, None], new.clamp(max=tokens.shape[1] - 1)]
        filled, lists = torch.from_numpy(filled).to(device), torch.from_numpy(teams).to(device)
        return model.backbone.append(tokens, self.memory, filled, lists).float()[torch.arange(len(rows)), last]
