"""Histories -> actions, for N at once: what evaluation and the server both call.

`Policy.act` reads every window afresh and is the truth; `Policy.begin` gives a session that keeps keys and values between
decisions and answers the same. Both see the same windows: `window_start` says where each begins.
"""

from copy import copy
from dataclasses import dataclass, replace

import numpy as np
import torch

from decisionllm.datasets.windows import Steps, collate, cut, of_histories, rollout_returns_to_go, window_start
from decisionllm.models.heads import candidate_actions
from decisionllm.policy.team_session import TeamSession
from decisionllm.schema import History
from decisionllm.tokenizers import text

NO_TEXT = torch.zeros(1, 0, dtype=torch.long), torch.zeros(1, 0, dtype=torch.bool)  # ids and mask, where only steps are read
MARGIN = 0.6  # deviations of a reward that an imagined step must be paid more for a course to be preferred to the policy's own


@dataclass
class Policy:
    """A trained model and how it acts.

    window: T, the most steps it sees; stride: how many old steps leave the window at once. target_return: what it is asked
    for unless a history says otherwise, in raw reward units; None: for what the model believes can be reached. ahead: the return is that of so many next steps, and stays
    what it is; 0: it is the whole episode's, and what was received is taken off. decode: see `DecisionLLM.choose`. plan: imagine so many steps before each action, see `Session.plan`; 0: none.
    execution: `joint`, agents of a group are asked one after the other, in this order: `random`, `given` or `reverse`; `per_agent`: each alone.
    """

    model: torch.nn.Module
    window: int
    stride: int
    target_return: float | None
    return_horizon: int = 0
    decode: str = "mode"
    planning_horizon: int = 0
    execution: str = "per_agent"
    order: str = "random"
    device: str = "cpu"
    generator: torch.Generator | None = None

    def __post_init__(self):
        if self.decode not in ("mode", "mean", "sample"):
            raise ValueError(f"decode: expected mode, mean or sample, got {self.decode!r}")
        if not 1 <= self.stride <= self.window:
            raise ValueError(f"stride: expected 1 .. {self.window} (the window), got {self.stride}")
        if self.execution not in ("per_agent", "joint") or self.order not in ("random", "given", "reverse"):
            raise ValueError(
                f"execution, order: expected per_agent or joint, and random, given or reverse, got {self.execution!r} and {self.order!r}"
            )
        if self.execution == "joint" and self.model.team is None:
            raise ValueError("team.execution=joint: needs a model trained with team.execution=joint or both")
        if self.planning_horizon and self.model.dynamics is None:
            raise ValueError(f"act.planning_horizon={self.planning_horizon}: needs a model trained with model.dynamics=true")
        if self.planning_horizon:
            self.candidate_actions = (
                self.model.normalizer.raw_actions(candidate_actions(self.model.spec).to(self.device)).cpu().numpy()
            )
        if self.target_return is None and self.return_conditioned and self.model.max_return is None:
            raise ValueError("target_return: expected a number, since this model was not trained with an expectile")
        self.model.eval()

    @property
    def return_conditioned(self):
        """Whether the model is asked for a return."""
        return self.model.tokenizer.returns is not None

    @torch.inference_mode()
    def act(self, histories):
        """N histories -> actions (N, A), raw units. Each window is read afresh."""
        return self.act_with_returns(histories)[0]

    @torch.inference_mode()
    def act_with_returns(self, histories):
        """The same, and the return that each was asked for now: (N, A), (N,), raw units."""
        hidden, masks, asked_for = self.read(histories)
        seen = np.stack([h.observations[-1] for h in histories])
        if not self.planning_horizon:
            return self.choose(hidden, masks, seen), asked_for
        longest = max(len(h.observations) for h in histories)
        session = self.begin([h.task for h in histories], longest, self._targets(histories)).restore(histories)
        session.observe(seen)
        return session.plan(hidden), asked_for

    def read(self, histories):
        """What was read at the last observation of each history (N, D), what actions are allowed there, (N, C) or None, and the
        return that was asked for there (N,)."""
        self._check(histories)
        targets = self._targets(histories)
        steps = of_histories(histories, np.nan_to_num(targets), return_horizon=self.return_horizon)
        now = steps.end - steps.first - 1
        start = window_start(now, self.window, self.stride)
        tasks = sorted({h.task for h in histories})
        texts = text.encode(self.model.backbone.tokenizer, tasks)
        window = cut(steps, np.arange(len(histories)), start, int((now - start).max()) + 1)
        batch = collate(window, texts, np.array([tasks.index(h.task) for h in histories])).to(self.device)
        each, last = torch.arange(len(histories)), torch.from_numpy(now - start)
        masks = None if batch.action_masks is None else batch.action_masks[each, last]
        open_, told = (torch.from_numpy(x).to(self.device) for x in (np.isnan(targets), np.zeros(len(targets), bool)))
        if open_.any():
            reached = self.model.predict_max_return(self.model.read(batch, told))
            batch = replace(batch, returns_to_go=torch.where(open_[:, None], reached, batch.returns_to_go))
        return self.model.read(batch)[each, last], masks, batch.returns_to_go[each, last].cpu().numpy()

    def begin(self, tasks, horizon, target_returns=None, groups=None):
        """A session for N episodes of at most `horizon` steps. groups: (N,) which of them share a world, for joint execution."""
        if self.execution == "joint" and groups is None:
            raise ValueError(
                "team.execution=joint: expected the groups of the agents, the env names none; take team.execution=per_agent"
            )
        if self.model.team is not None:
            return TeamSession(self, tasks, horizon, target_returns, groups if self.execution == "joint" else None)
        return Session(self, tasks, horizon, target_returns)

    def choose(self, hidden, masks, observations):
        observations = torch.from_numpy(np.asarray(observations, np.float32)).to(self.device)
        return self.model.choose(hidden, masks, observations, decode=self.decode, generator=self.generator).cpu().numpy()

    def _targets(self, histories):
        """The return that each is asked for: (N,), NaN where it is what can be reached."""
        return self.resolve_targets([h.target_return for h in histories])

    def resolve_targets(self, targets):
        """Targets, None where the policy's own is meant -> (N,) float64, NaN for what can be reached."""
        own = (0.0 if not self.return_conditioned else np.nan) if self.target_return is None else self.target_return
        return np.array([own if target is None else target for target in targets], np.float64)

    def _check(self, histories):
        spec, timed = self.model.spec, self.model.tokenizer.timesteps is not None
        for i, h in enumerate(histories):
            got = h.observations.shape[1], h.actions.shape[1]
            if got != (spec.observation_dim, spec.action_dim):
                raise ValueError(
                    f"history {i}: expected observations of {spec.observation_dim} and actions of {spec.action_dim} numbers, "
                    f"as this policy was trained on; got {got[0]} and {got[1]}"
                )
            if timed and len(h.observations) > spec.horizon:
                raise ValueError(f"history {i}: expected at most {spec.horizon} steps (the horizon), got {len(h.observations)}")


class Session:
    """N episodes under way: their histories, and the keys and values of what was read of them.

    They need not be asked together: what takes `rows`, (M,) int, is about these alone and leaves the others as they were. A row can
    be given to another episode, see `resume`, whose text may have up to text_room tokens where that is more than any has now.
    """

    def __init__(self, policy, tasks, horizon, target_returns=None, *, text_room=0):
        self.policy, model, spec = policy, policy.model, policy.model.spec
        if model.tokenizer.timesteps is not None and horizon > spec.horizon:
            raise ValueError(
                f"horizon: expected at most {spec.horizon} steps, the longest training episode, since this model learned one "
                f"vector a step; got {horizon}. Train with model.timesteps=none to go beyond"
            )
        N, H = len(tasks), horizon + policy.planning_horizon
        self.tasks, self.horizon = list(tasks), horizon
        self.targets = policy.resolve_targets(
            [None] * N if target_returns is None else np.broadcast_to(target_returns, N).tolist()
        )
        self.open = np.isnan(self.targets)  # asked for what can be reached
        self.observations = np.zeros((N, H, spec.observation_dim), np.float32)
        self.actions = np.zeros((N, H, spec.action_dim), np.float32)
        self.rewards = np.zeros((N, H))
        self.reached = np.zeros((N, H), np.float32)  # what could be reached from each remembered step, where that is asked for
        self.masks = np.ones((N, H, spec.num_actions), bool) if spec.num_actions else None
        self.now = np.zeros(N, int)  # the step that is to be decided next
        self.conditioned_on = np.zeros(N, np.float32)  # the return that each was asked for when it last decided
        self.text_room = max(text_room, text.encode(model.backbone.tokenizer, sorted(set(self.tasks)))[0].shape[1])  # tokens
        self.start = np.full(N, -1)  # where the remembered window begins; -1: nothing is remembered, not even the text
        self.memory = {}  # of what is read with the returns told, and without

    def restore(self, histories, rows=None):
        """Take up episodes that have already begun: their pasts are taken over, and `see` is next. Returns the session.

        With rows, these are given to other episodes, of other texts and other returns to ask for.
        """
        for i, h in zip(range(len(self.now)) if rows is None else rows, histories, strict=True):
            if rows is not None:
                self.tasks[i], self.start[i], self.targets[i] = h.task, -1, self.policy.resolve_targets([h.target_return])[0]
                self.open[i] = np.isnan(self.targets[i])
                self.observations[i], self.actions[i], self.rewards[i] = 0, 0, 0
                if self.masks is not None:
                    self.masks[i] = True
            self.now[i] = t = len(h.actions)
            self.observations[i, :t], self.actions[i, :t], self.rewards[i, :t] = h.observations[:t], h.actions, h.rewards
            if h.action_masks is not None:
                self.masks[i, :t] = h.action_masks[:t]
        return self

    def histories(self, rows=slice(None)):
        """What the session knows, as records; the observation of now must have been seen."""
        return [
            History(
                self.observations[i, : t + 1], self.actions[i, :t], self.rewards[i, :t], 
                None if self.open[i] else float(self.targets[i]), self.tasks[i],
                action_masks=None if self.masks is None else self.masks[i, : t + 1],
            )
            for i, t in zip(np.arange(len(self.now))[rows], self.now[rows], strict=True)
        ]  # fmt: skip

    def act(self, observations, rewards=None, action_masks=None):
        """What is seen now, and what the last actions brought: (N, S), (N,) -> actions (N, A), raw units."""
        self.observe(observations, rewards, action_masks)
        actions = self.decide()
        self.record_action(actions)
        return actions

    def observe(self, observations, rewards=None, action_masks=None, rows=slice(None)):
        now, each = self.now[rows], np.arange(len(self.now))[rows]
        if (now >= self.horizon).any():
            raise ValueError(f"session: expected at most {self.horizon} steps (the horizon), got one more")
        if not np.isfinite(observations).all():
            raise ValueError(
                f"observations: expected finite numbers, got {np.asarray(observations)[~np.isfinite(observations)][0]}"
            )
        self.observations[each, now] = observations
        if rewards is not None:
            self.rewards[each, np.maximum(now - 1, 0)] = np.where(now > 0, rewards, 0)
        if action_masks is not None:
            self.masks[each, now] = action_masks

    def record_action(self, actions, rows=slice(None)):
        self.actions[np.arange(len(self.now))[rows], self.now[rows]] = actions
        self.now[rows] += 1

    @torch.inference_mode()
    def decide(self, rows=slice(None)):
        """The actions for what was seen last. (N, A), raw units."""
        hidden, masks = self.read(rows)
        seen = self.observations[np.arange(len(self.now))[rows], self.now[rows]]
        return self.plan(hidden, rows) if self.policy.planning_horizon else self.policy.choose(hidden, masks, seen)

    def plan(self, hidden, rows=slice(None)):
        """The actions that begin the best of several imagined courses. (N, D) -> (N, A), raw units

        The first course goes on as the policy would; in each other one action is held. It leaves the first only for one that is
        paid more by MARGIN, so that what nothing tells apart is left to the policy.
        """
        policy, model = self.policy, self.policy.model
        N, C, steps = len(hidden), 1 + len(policy.candidate_actions), policy.planning_horizon
        if model.tokenizer.timesteps is not None:
            steps = min(steps, model.spec.horizon - 1 - int(self.now[rows].max()))
        own = policy.choose(hidden, None, self.observations[np.arange(len(self.now))[rows], self.now[rows]])
        imagined = copy(self)
        imagined.select(np.repeat(np.arange(len(self.now))[rows], C))
        imagined.horizon += policy.planning_horizon
        hidden, each = hidden.repeat_interleave(C, 0), np.arange(N * C)
        actions = np.tile(np.concatenate([own[:1], policy.candidate_actions]), (N, 1))
        actions[::C] = own
        place = torch.from_numpy(imagined.observations[each, imagined.now]).to(policy.device)
        gains = rewards = torch.zeros(N * C, device=policy.device)
        for step in range(steps):
            if step:  # what the last step brings is paid, and read by nobody
                imagined.record_action(actions)
                imagined.observe(place.cpu().numpy(), rewards.cpu().numpy())
                hidden = imagined.read()[0]
                actions[::C] = policy.choose(hidden[::C], None, place[::C].cpu().numpy())
            place, rewards = model.imagine(hidden, place, torch.from_numpy(actions).to(policy.device))
            gains = gains + rewards
        gains = gains.view(N, C)
        best = gains.argmax(1)
        better = gains.amax(1) > gains[:, 0] + MARGIN * steps * model.normalizer.reward_scale
        return np.where(better.cpu().numpy()[:, None], actions.reshape(N, C, -1)[np.arange(N), best.cpu().numpy()], own)

    @torch.inference_mode()
    def read(self, rows=slice(None)):
        """What was read at the observation seen last (N, D), and what actions are allowed there, (N, C) or None."""
        policy, now, each = self.policy, self.now[rows], np.arange(len(self.now))[rows]
        if policy.model.backbone.layout is None:  # an architecture whose cache is not understood
            hidden, masks, self.conditioned_on[rows] = policy.read(self.histories(rows))
            return hidden, masks
        start = window_start(now, policy.window, policy.stride)
        N, H = len(now), self.rewards.shape[1]
        first = np.arange(N) * H
        togo = rollout_returns_to_go(
            self.rewards[rows].ravel(),
            np.nan_to_num(self.targets[rows]),
            np.arange(N + 1) * H,
            return_horizon=policy.return_horizon,
        )
        flat = [None if x is None else x[rows].reshape(N * H, -1) for x in (self.observations, self.actions, self.masks)]
        steps = Steps(flat[0], flat[1], togo.astype(np.float32), first, first + now + 1, action_masks=flat[2])
        hidden = torch.empty(N, policy.model.backbone.width, device=policy.device)
        whole = (start != self.start[rows]) | (start == now)  # a window of one step has none to go on from
        for part, again in ((np.flatnonzero(whole), True), (np.flatnonzero(~whole), False)):
            reach = part[self.open[each[part]]]
            if len(reach):
                self._reach(steps, reach, each[reach], start[reach], again)
            if len(part):
                hidden[torch.from_numpy(part)] = self._extend(steps, part, each[part], start[part], again)
        self.start[rows], self.conditioned_on[rows] = start, steps.returns_to_go[first + now]
        masks = None if self.masks is None else torch.from_numpy(self.masks[each, now]).to(policy.device)
        return hidden, masks

    def _reach(self, steps, part, rows, start, again):
        """Ask for what can be reached, at each step that is about to be read."""
        reached = self.policy.model.predict_max_return(self._extend(steps, part, rows, start, again, told=False)).cpu().numpy()
        now = self.now[rows, None]
        at = start[:, None] + np.arange(reached.shape[1]) if again else now
        row, real = np.nonzero(at <= now)[0], at <= now  # what is later is padding
        self.reached[rows[row], at[real]] = reached[real]
        steps.returns_to_go.reshape(-1, self.rewards.shape[1])[part] = self.reached[rows]  # of a view

    def _extend(self, steps, part, rows, start, again, told=True):
        """Read these rows, which are this part of the steps, into the memory of windows that begin at `start`: the whole window again,
        or only what is new, which is the last action, this step's return and this step's observation. -> hidden (rows, D) of now, or,
        where the returns are not told, of every step read (rows, n, D)"""
        model, device, k = self.policy.model, self.policy.device, self.policy.model.tokenizer.tokens
        self._read_texts(rows[self.start[rows] < 0], told)
        begin = start if again else self.now[rows] - 1
        counts = self.now[rows] - begin + 1
        batch = collate(cut(steps, part, begin, int(counts.max())), NO_TEXT, np.zeros(len(rows), int)).to(device)
        blank = None if told else torch.zeros(len(rows), dtype=torch.bool, device=device)
        tokens = model.tokens(batch, blank)[:, 0 if again else k - 1 : -1]  # the last action is not yet chosen
        # tokens remembered: they end with an observation
        known = np.zeros(len(rows), int) if again else (begin - start) * k + k - 1
        one = not again or (told and (counts == counts[0]).all())  # only the last observation is asked about
        hidden = model.backbone.append(
            tokens, self.memory[told], torch.from_numpy(known).to(device), torch.from_numpy(rows).to(device),
            output_positions=slice(-1, None) if one else model.tokenizer.output_positions,
        ).float()  # fmt: skip
        if not told:
            return hidden
        return hidden[:, -1] if one else hidden[torch.arange(len(rows)), torch.from_numpy(counts - 1)]

    def _read_texts(self, rows, told):
        """Read the texts of these rows, each different one once, into the memory."""
        backbone, device, N = self.policy.model.backbone, self.policy.device, len(self.now)
        if told not in self.memory:
            blank = torch.zeros(1, self.text_room, dtype=torch.long, device=device)
            shape = backbone.read_text(blank, torch.ones_like(blank, dtype=torch.bool))
            room = self.policy.model.tokenizer.tokens * self.policy.window
            self.memory[told] = shape.rows(torch.zeros(N, dtype=torch.long, device=device)).with_room(room)
        if len(rows):
            different = sorted({self.tasks[i] for i in rows})
            texts = backbone.read_text(*(x.to(device) for x in text.encode(backbone.tokenizer, different)))
            index = torch.tensor([different.index(self.tasks[i]) for i in rows], device=device)
            self.memory[told].set_prefix(torch.from_numpy(rows).to(device), texts.rows(index))

    @torch.inference_mode()
    def allocate(self):
        """Make room at once for all that will be remembered, which otherwise is made when it is first needed. Returns the session."""
        if self.policy.model.backbone.layout is not None:
            for told in (True,) if self.policy.model.max_return is None else (True, False):
                self._read_texts(np.zeros(0, int), told)
        return self

    @property
    def nbytes(self):
        """Bytes taken by what is known and remembered."""
        known = [part for part in vars(self).values() if isinstance(part, np.ndarray)]
        return sum(x.nbytes for x in [*known, *(x for memory in self.memory.values() for x in (*memory.keys, *memory.values))])

    def select(self, rows):
        """Go on with these episodes alone. (M,) int or (N,) bool"""
        rows = np.arange(len(self.now))[rows]
        for name in ("observations", "actions", "rewards", "targets", "open", "reached", "now", "conditioned_on", "start"):
            setattr(self, name, getattr(self, name)[rows])
        self.masks = None if self.masks is None else self.masks[rows]
        self.tasks = [self.tasks[i] for i in rows]
        index = torch.from_numpy(rows).to(self.policy.device)
        self.memory = {told: memory.rows(index) for told, memory in self.memory.items()}
