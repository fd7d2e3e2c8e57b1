"""Normalizer, tokenizer, backbone and head put together: a Batch in, a distribution over actions (B, T) out."""

from typing import Any

import torch
from torch import Tensor, nn

from decisionllm.backbones.forward import Backbone
from decisionllm.config import ModelOptions, TeamOptions, one_of
from decisionllm.models.advantage import AdvantageWeights, expectile_loss
from decisionllm.models.heads import Gaussian
from decisionllm.models.imagined import ImaginedValue
from decisionllm.models.normalizer import Normalizer
from decisionllm.protocols import Distribution, Head
from decisionllm.registry import build
from decisionllm.schema import Batch, Spec
from decisionllm.tokenizers.team import TeamTokenizer
from decisionllm.tokenizers.trajectory import TrajectoryTokenizer


class DecisionLLM(nn.Module):
    """A language model that reads a task text and a trajectory, and predicts the action at each observation.

    Args:
        spec: of the data.
        backbone: the language model.
        head: config node of a head, see `protocols.Head`.
        options: `config.ModelOptions`. max_return_expectile above 0 also learns the maximum return, as this expectile of the
            return-to-go; every other row of a batch then has the null return token. Source: Reinformer (arXiv 2405.08740). With
            advantage_weighting it is the expectile of the value, see `AdvantageWeights`.
        team: `config.TeamOptions`. execution=per_agent reads each row alone; with joint or both, the rows of a team are one token list.

    Raises:
        ValueError: an option is unknown, or two do not fit together.
    """

    def __init__(
        self, spec: Spec, backbone: Backbone, head: dict[str, Any], options: ModelOptions | None = None,
        team: TeamOptions | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        o, team = options or ModelOptions(), team or TeamOptions()
        returns = o.condition_on == "return_to_go"
        expectile = 0.0 if o.advantage_weighting else o.max_return_expectile
        one_of("model.condition_on", o.condition_on, ("return_to_go", "none"))
        one_of("team.execution", team.execution, ("per_agent", "joint", "both"))
        if expectile and not (0 < expectile < 1 and returns):
            raise ValueError(f"model.max_return_expectile={expectile}: expected 0 .. 1, with model.condition_on=return_to_go")
        if o.advantage_weighting and returns:
            raise ValueError("model.advantage_weighting: expected model.condition_on=none, got return_to_go; where the return is an input, "
                             "all actions of an input have one advantage")  # fmt: skip
        if team.execution != "per_agent" and expectile:
            raise ValueError(f"team.execution={team.execution}: model.max_return_expectile needs per_agent")
        width = backbone.width
        self.spec, self.backbone = spec, backbone
        backbone.checkpoint_gradients(o.gradient_checkpointing)
        self.normalizer = Normalizer(spec, o.hide_observations)
        self.tokenizer = TrajectoryTokenizer(
            spec, width, embedding=o.embedding, timesteps=o.timesteps, return_conditioned=returns, null_return=bool(expectile),
            entity_layers=o.entity_layers, hide_actions=o.hide_actions, scale=o.token_scale,
        )  # fmt: skip
        self.head: Head = build(head, width, spec)
        if not isinstance(self.head, Head):
            raise ValueError(f"{head['_target_']}: expected a head with loss_floor and entities, see protocols.Head")
        self.imagined = ImaginedValue(spec, o.value_discount, texts=o.value_reads_text) if o.value_discount else None
        self.max_return, self.max_return_expectile = nn.Linear(width, 1) if expectile else None, expectile
        self.advantage = None if not o.advantage_weighting else AdvantageWeights(
            width, spec.horizon, temperature=o.advantage_weighting, expectile=o.max_return_expectile or 0.5
        )  # fmt: skip
        grouped = team.execution != "per_agent"
        self.team = TeamTokenizer(spec, width, hide_actions=o.hide_actions) if grouped else None

    def _inputs(self, batch: Batch) -> tuple[Tensor, ...]:
        """Returns-to-go, observations and actions in the model's units, and timesteps."""
        units = self.normalizer
        columns = units.returns_to_go(batch.returns_to_go), units.observations(batch.observations), units.actions(batch.actions)
        return *columns, batch.timesteps

    def tokens(self, batch: Batch, return_given: Tensor | None = None) -> Tensor:
        """Tokens of the trajectories of a batch (B, k T, D). return_given: see `read`."""
        tokens: Tensor = self.tokenizer(*self._inputs(batch), return_given)
        return tokens

    def read(self, batch: Batch, return_given: Tensor | None = None) -> Tensor:
        """Hidden states at each observation, from which the action there is predicted.

        Args:
            batch: raw units.
            return_given: (B,) bool; False: the null return token in place of the row's returns. None: all True.

        Returns:
            (B, T, D).
        """
        if self.team is not None:
            return self._read_teams(batch)
        tokens = self.tokens(batch, return_given)[:, :-1]  # no position attends to the last action
        hidden: Tensor = self.backbone(
            tokens, batch.text_ids, batch.text_mask, batch.text_index, output_positions=self.tokenizer.output_positions
        )
        return hidden.float()

    def team_tokens(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens of W teams (W, L, D), where each row's action is predicted in its team's list (B, T), and the team of each row
        (B,). A batch without teams has teams of one."""
        assert self.team is not None
        rows = torch.arange(len(batch.mask), device=batch.mask.device)
        team, identity = (rows, 0 * rows) if batch.team is None else (batch.team, batch.identity)
        tokens, places = self.team(self.tokenizer, *self._inputs(batch), batch.mask, batch.loss_mask, team, identity)
        return tokens, places, team

    def _read_teams(self, batch: Batch) -> Tensor:
        tokens, places, team = self.team_tokens(batch)
        first, single = torch.searchsorted(team, torch.arange(len(tokens), device=team.device)), torch.bincount(team) == 1
        hidden, order = [], []
        for part in (single, ~single):  # the short lists of teams of one are not padded to the others' length
            rows, nth = part[team].nonzero()[:, 0], part.cumsum(0) - 1
            if len(rows):
                lists = tokens[part, : int(places[rows].max()) + 1]
                states = self.backbone(lists, batch.text_ids, batch.text_mask, batch.text_index[first[part]]).float()
                hidden.append(states[nth[team[rows], None], places[rows]])
                order.append(rows)
        return torch.cat(hidden)[torch.cat(order).argsort()]

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """The terms of the loss.

        Args:
            batch: raw units.

        Returns:
            Means over steps, scalars. `nll`: negative log-likelihood in nats of the actions with loss_mask, times their action_weight
            and, with advantage_weighting, their advantage's weight; that adds `value`: asymmetric squared error of the return-to-go at
            these steps. `max_return`, with an expectile: the same of the maximum return, on rows with the null return token.
        """
        return_given = None if self.max_return is None else torch.arange(len(batch.mask), device=batch.mask.device) % 2 == 0
        hidden, actions = self.read(batch, return_given), self.normalizer.actions(batch.actions)
        distribution = self.distribution(hidden, batch.action_masks, batch.observations)
        losses, units, terms = -distribution.log_prob(actions), self.normalizer, dict[str, Tensor]()
        if batch.action_weight is not None:
            losses = batch.action_weight * losses
        if self.advantage is not None and batch.loss_mask is not None:
            advantages = units.returns_to_go(batch.returns_to_go) - self.advantage.value(hidden, batch.timesteps)
            losses = losses * self.advantage(advantages, batch.loss_mask)
            terms["value"] = masked_mean(expectile_loss(advantages, self.advantage.expectile), batch.loss_mask)
        terms = {"nll": masked_mean(losses, batch.loss_mask)} | terms
        if self.max_return is not None and return_given is not None:
            errors = units.returns_to_go(batch.returns_to_go) - self.max_return(hidden)[..., 0]
            null_return = batch.mask & ~return_given[:, None]
            terms["max_return"] = masked_mean(expectile_loss(errors, self.max_return_expectile), null_return)
        return terms

    def predict_max_return(self, hidden: Tensor) -> Tensor:
        """Hidden states of rows with the null return token (..., D) -> maximum return-to-go (...), raw units."""
        assert self.max_return is not None
        return self.normalizer.raw_returns_to_go(self.max_return(hidden)[..., 0])

    def distribution(self, hidden: Tensor, action_masks: Tensor | None, observations: Tensor | None) -> Distribution:
        """Distribution over the next action.

        Args:
            hidden: (B, T, D).
            action_masks: (B, T, C) bool or None.
            observations: (B, T, S), raw units; may be None for a head that points at no entities.
        """
        if self.head.entities is None:
            return self.head(hidden, action_masks)
        assert observations is not None
        each, _ = self.tokenizer.observations.entities(self.normalizer.observations(observations))
        return self.head(hidden, action_masks, each[..., self.head.entities, :])

    def choose(
        self, hidden: Tensor, action_masks: Tensor | None, observations: Tensor | None = None, *,
        decode: str, generator: torch.Generator | None = None,
    ) -> Tensor:  # fmt: skip
        """Choose the next actions of N episodes.

        Args:
            hidden: (N, D) at the current observation.
            action_masks: (N, C) bool or None.
            observations: (N, S), see `distribution`.
            decode: `mode`, `mean` or `sample` of the distribution; `unclipped`, see `heads.Gaussian`.
            generator: of samples.

        Returns:
            (N, A), raw units.
        """
        masks, current = (None if x is None else x[:, None] for x in (action_masks, observations))
        distribution = self.distribution(hidden[:, None], masks, current)
        if decode == "sample":
            chosen = distribution.sample(generator)
        elif decode == "unclipped":
            assert isinstance(distribution, Gaussian)
            chosen = distribution.unclipped()
        else:
            chosen = distribution.mean if decode == "mean" else distribution.mode
        return self.normalizer.raw_actions(chosen[:, 0])


def masked_mean(values: Tensor, mask: Tensor | None) -> Tensor:
    """Mean of values (B, T) where mask (B, T) is True; padding has no weight, whatever it holds, even NaN."""
    assert mask is not None
    return torch.where(mask, values, 0).sum() / mask.sum().clamp(min=1)
