"""Normalizer, tokenizer, backbone and head put together: a Batch in, a distribution over actions (B, T) out."""

from functools import partial

import numpy as np
import torch
from torch import nn

from decisionllm.models.heads import Dynamics
from decisionllm.registry import build
from decisionllm.tokenizers.entities import blocks
from decisionllm.tokenizers.team import TeamTokenizer
from decisionllm.tokenizers.trajectory import TrajectoryTokenizer


class Normalizer(nn.Module):
    """Raw units <-> the model's: fitted once from the training episodes, saved with the weights.

    Observations and returns-to-go are standardised; a return beyond what training saw is read as the nearest that it saw.
    Continuous actions run from -1 to 1 between their bounds; discrete ones stay as they are. All entities of a kind share their
    units, which are of those that are there; whether one is there stays 0 or 1, and one that is not stays zeros.
    """

    def __init__(self, spec):
        super().__init__()
        S, A = spec.observation_dim, spec.action_dim
        self.discrete, self.blocks = bool(spec.num_actions), blocks(spec.entity_schema)
        buffer = partial(self.register_buffer, persistent=True)
        buffer("observation_mean", torch.zeros(S))
        buffer("observation_scale", torch.ones(S))
        buffer("return_mean", torch.zeros(()))
        buffer("return_scale", torch.ones(()))
        buffer("return_range", torch.tensor([-torch.inf, torch.inf]))
        buffer("change_mean", torch.zeros(S))  # of the observation, from one step to the next
        buffer("change_scale", torch.ones(S))
        buffer("reward_mean", torch.zeros(()))
        buffer("reward_scale", torch.ones(()))
        buffer("low", torch.tensor(spec.low or [0.0] * A))
        buffer("high", torch.tensor(spec.high or [1.0] * A))

    @torch.no_grad()
    def fit(self, observations, returns_to_go):
        """(n, S) and (n,) numpy, of every training step."""
        scale = observations.std(0, dtype="float64")
        self.observation_mean.copy_(torch.from_numpy(observations.mean(0, dtype="float64")))
        self.observation_scale.copy_(torch.from_numpy(scale.clip(min=1e-6) + (scale < 1e-6)))  # a constant stays in its unit
        for _, first, width, count in self.blocks[1:]:
            numbers = slice(first, first + width * count)
            each = observations[:, numbers].reshape(-1, width)
            each = each[each[:, 0] > 0.5]
            mean, scale = (f(each, 0, dtype="float64") if len(each) else np.zeros(width) for f in (np.mean, np.std))
            mean[0], scale[0] = 0, 1
            self.observation_mean[numbers] = torch.from_numpy(np.tile(mean, count)).float()
            self.observation_scale[numbers] = torch.from_numpy(np.tile(scale.clip(min=1e-6) + (scale < 1e-6), count)).float()
        self.return_mean.fill_(float(returns_to_go.mean(dtype="float64")))
        self.return_scale.fill_(float(returns_to_go.std(dtype="float64")) or 1.0)
        self.return_range.copy_(torch.tensor([float(returns_to_go.min()), float(returns_to_go.max())]))

    @torch.no_grad()
    def fit_dynamics(self, changes, rewards):
        """(n, S) and (n,) numpy: how the observation changes from one step to the next, and what a step is paid."""
        scale = changes.std(0, dtype="float64")
        self.change_mean.copy_(torch.from_numpy(changes.mean(0, dtype="float64")))
        self.change_scale.copy_(torch.from_numpy(scale.clip(min=1e-6) + (scale < 1e-6)))  # as above: a clock runs evenly
        self.reward_mean.fill_(float(rewards.mean(dtype="float64")))
        self.reward_scale.fill_(float(rewards.std(dtype="float64")) or 1.0)

    def observations(self, x):
        units = (x - self.observation_mean) / self.observation_scale
        if not self.blocks:
            return units
        parts = [units[..., : self.blocks[0][2]]]
        for _, first, width, count in self.blocks[1:]:
            each = units[..., first : first + width * count].unflatten(-1, (count, width))
            parts.append((each * (each[..., :1] > 0.5)).flatten(-2))
        return torch.cat(parts, -1)

    def returns_to_go(self, x):
        return (x.clamp(*self.return_range) - self.return_mean) / self.return_scale

    def actions(self, x):
        return x if self.discrete else (x - self.low) / (self.high - self.low) * 2 - 1

    def raw_actions(self, x):
        return x if self.discrete else (x.clamp(-1, 1) + 1) / 2 * (self.high - self.low) + self.low


class DecisionLLM(nn.Module):
    """A language model that reads a text and a trajectory, and says at each observation what action comes next.

    condition_on: `return_to_go`, a token before each observation holds the return-to-go; `none`: behaviour cloning.
    max_return_expectile: above 0, also learn the maximum return, as this expectile of the return-to-go; the returns of every other row of a
    batch are then replaced by a learned null token. Source: Reinformer (arXiv 2405.08740).
    dynamics: also learn what actions bring, so that courses can be imagined.
    execution: `per_agent`, each row is read alone; `joint` or `both`, rows of a team are one list, made by a TeamTokenizer,
    in which a past action is hidden with the probability hide_actions.
    entity_layers: in how many layers entities look at each other, where observations have a layout, before the agent looks at them.
    """

    def __init__(
        self,
        spec,
        backbone,
        head,
        *,
        embedding="linear",
        timesteps="learned",
        condition_on="return_to_go",
        max_return_expectile=0.0,
        dynamics=False,
        entity_layers=0,
        execution="per_agent",
        hide_actions=0.0,
    ):
        super().__init__()
        if condition_on not in ("return_to_go", "none"):
            raise ValueError(f"condition_on: expected return_to_go or none, got {condition_on!r}")
        if max_return_expectile and not (0 < max_return_expectile < 1 and condition_on == "return_to_go"):
            raise ValueError(
                f"expectile: expected within 0 .. 1 and model.condition_on=return_to_go, got {max_return_expectile} and {condition_on}"
            )
        if execution not in ("per_agent", "joint", "both"):
            raise ValueError(f"execution: expected per_agent, joint or both, got {execution!r}")
        if execution != "per_agent" and (max_return_expectile or dynamics):
            raise ValueError(f"team.execution={execution}: expected neither an expectile nor dynamics, which are of one agent")
        self.spec, self.backbone = spec, backbone
        self.normalizer = Normalizer(spec)
        options = {
            "embedding": embedding,
            "timesteps": timesteps,
            "returns": condition_on == "return_to_go",
            "nullable_returns": bool(max_return_expectile),
            "entities": entity_layers,
        }
        self.tokenizer = TrajectoryTokenizer(spec, backbone.width, **options)
        self.head = build(head, backbone.width, spec)
        self.dynamics = Dynamics(backbone.width, spec) if dynamics else None
        self.max_return, self.max_return_expectile = (
            nn.Linear(backbone.width, 1) if max_return_expectile else None,
            max_return_expectile,
        )
        self.team = None
        if execution != "per_agent":
            self.team = TeamTokenizer(spec, backbone.width, hide_actions=hide_actions)

    def tokens(self, batch, return_given=None):
        """The trajectory of a batch as the backbone reads it: (B, k T, D)."""
        units = self.normalizer
        return self.tokenizer(
            units.returns_to_go(batch.returns_to_go), units.observations(batch.observations),
            units.actions(batch.actions), batch.timesteps, return_given,
        )  # fmt: skip

    def read(self, batch, return_given=None):
        """Batch -> what was read up to each observation: (B, T, D). return_given: (B,) bool, False: the null return token; None: all True."""
        if self.team is not None:
            return self._read_teams(batch)
        text = batch.text_ids, batch.text_mask, batch.text_index
        tokens = self.tokens(batch, return_given)[:, :-1]  # nobody reads the last action
        return self.backbone(tokens, *text, output_positions=self.tokenizer.output_positions).float()

    def team_tokens(self, batch):
        """The trajectories of teams: (W, L, D), and where the action of each row is read in its team's (B, T). A batch that names
        no teams is of teams of one."""
        units, rows = self.normalizer, torch.arange(len(batch.mask), device=batch.mask.device)
        team, identity = (rows, 0 * rows) if batch.team is None else (batch.team, batch.identity)
        tokens, places = self.team(
            self.tokenizer, units.returns_to_go(batch.returns_to_go), units.observations(batch.observations),
            units.actions(batch.actions), batch.timesteps, batch.mask, batch.loss_mask, team, identity,
        )  # fmt: skip
        return tokens, places, team

    def _read_teams(self, batch):
        tokens, places, team = self.team_tokens(batch)
        first, alone = torch.searchsorted(team, torch.arange(len(tokens), device=team.device)), torch.bincount(team) == 1
        read, order = [], []
        for part in (alone, ~alone):  # the lists of teams of one are short: they are not padded to the others' length
            rows, nth = part[team].nonzero()[:, 0], part.cumsum(0) - 1
            if len(rows):
                lists = tokens[part, : int(places[rows].max()) + 1]
                hidden = self.backbone(lists, batch.text_ids, batch.text_mask, batch.text_index[first[part]]).float()
                read.append(hidden[nth[team[rows], None], places[rows]])
                order.append(rows)
        return torch.cat(read)[torch.cat(order).argsort()]

    def forward(self, batch):
        """Batch -> the terms of the loss, each a mean over steps: nll, the negative log-likelihood in nats of an action that is to
        be imitated; with an expectile, max_return, its asymmetric squared error, on rows with the null return token; with dynamics, whose
        batches have one step more than the window, the unexplained share of the variance of change and reward.
        """
        known = batch if self.dynamics is None else batch.until(-1)
        return_given = None if self.max_return is None else torch.arange(len(known.mask), device=known.mask.device) % 2 == 0
        hidden, actions = self.read(known, return_given), self.normalizer.actions(known.actions)
        distribution = self.distribution(hidden, known.action_masks, known.observations)
        terms = {"nll": masked_mean(-distribution.log_prob(actions), known.loss_mask)}
        if self.max_return is not None:
            short = self.normalizer.returns_to_go(known.returns_to_go) - self.max_return(hidden)[..., 0]
            weight = torch.where(short > 0, self.max_return_expectile, 1 - self.max_return_expectile)
            terms["max_return"] = masked_mean(weight * short.square(), known.mask & ~return_given[:, None])
        if self.dynamics is not None:
            units, after = self.normalizer, batch.mask[:, 1:]
            change, reward = self.dynamics(hidden, units.observations(known.observations), actions)
            wanted = (batch.observations[:, 1:] - known.observations - units.change_mean) / units.change_scale
            terms["change"] = masked_mean((change - wanted).square().mean(-1), after)
            wanted = (known.rewards - units.reward_mean) / units.reward_scale
            terms["reward"] = masked_mean((reward - wanted).square(), known.mask)
        return terms

    def predict_max_return(self, hidden):
        """Hidden states of rows with the null return token (..., D) -> the predicted maximum return-to-go (...), raw units."""
        units = self.normalizer
        return (self.max_return(hidden)[..., 0] * units.return_scale + units.return_mean).clamp(*units.return_range)

    def imagine(self, hidden, observations, actions):
        """What these actions would bring, in raw units: (N, D), (N, S), (N, A) -> the next observations (N, S), rewards (N,)"""
        units = self.normalizer
        change, reward = self.dynamics(hidden, units.observations(observations), units.actions(actions))
        return observations + units.change_mean + change * units.change_scale, reward * units.reward_scale + units.reward_mean

    def distribution(self, hidden, action_masks, observations):
        """What the head makes of what was read where this is seen: (..., D), (..., C) or None, (..., S)"""
        if not hasattr(self.head, "targets"):
            return self.head(hidden, action_masks)
        each, _ = self.tokenizer.observations.entities(self.normalizer.observations(observations))
        return self.head(hidden, action_masks, each[..., self.head.targets, :])

    def choose(self, hidden, action_masks, observations=None, *, decode, generator=None):
        """Hidden states (N, D) of now, and what is seen now (N, S), for a head that points at it -> actions (N, A), raw units.
        decode: `mode`, `mean` or `sample` of the distribution."""
        distribution = self.distribution(*(None if x is None else x[:, None] for x in (hidden, action_masks, observations)))
        chosen = distribution.sample(generator) if decode == "sample" else getattr(distribution, decode)
        return self.normalizer.raw_actions(chosen[:, 0])


def masked_mean(values, mask):
    """The mean over what is real: (B, T), (B, T) bool -> scalar. Padding has no weight, whatever it holds."""
    return torch.where(mask, values, 0).sum() / mask.sum().clamp(min=1)
