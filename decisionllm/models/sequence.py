"""Normalizer, tokenizer, backbone and head put together: a Batch in, a distribution over actions
(B, T) out.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from decisionllm.backbones.forward import Backbone
from decisionllm.config import ModelOptions
from decisionllm.datasets.mixture_parts import ONLY
from decisionllm.models.heads import Gaussian
from decisionllm.models.normalizer import Normalizer
from decisionllm.protocols import Distribution, Head, Objective, Planner
from decisionllm.registry import Node, build, choice, is_none
from decisionllm.schema import Batch, Spec
from decisionllm.tokenizers.entity_tokens import EntityTokens
from decisionllm.tokenizers.trajectory import ModelUnits, TrajectoryTokenizer


class SequenceModel(nn.Module):
    """A language model that reads a task text and a trajectory, and predicts the action at each
    observation.

    Args:
        spec: of the data.
        backbone: the language model.
        head: config node of a head, see `protocols.Head`.
        tokenizer: config node of a `TrajectoryTokenizer`. Default: that with its defaults.
        options: `config.ModelOptions`.
        objective: config node of what is minimised, see `protocols.Objective`. Default: the
            likelihood of the actions.
        planner: config node of what values plans, see `protocols.Planner`. Default: none.

    Raises:
        ValueError: an option is unknown, or two do not fit together.
    """

    # of a model that reads teams: what lays their members out as one list
    team: nn.Module | None
    # (policy, tasks, horizon, target_returns, groups) -> `EpisodeBuffer`; None: a `Session`
    begin_session: Callable[..., Any] | None = None

    def __init__(
        self,
        spec: Spec,
        backbone: Backbone,
        head: Node,
        tokenizer: Node | None = None,
        options: ModelOptions | None = None,
        objective: Node | None = None,
        planner: Node | None = None,
    ) -> None:
        super().__init__()
        options = options or ModelOptions()
        self.spec = spec
        self.backbone = backbone
        loss: Objective = build(
            objective or choice("objective", "likelihood"), backbone.width, spec
        )
        if loss.condition_on not in (None, options.condition_on):
            raise ValueError(
                f"{type(loss).__name__}: expected model.condition_on={loss.condition_on}, got "
                f"{options.condition_on}"
            )
        self.tokenizer: TrajectoryTokenizer = build(
            tokenizer or choice("tokenizer", "trajectory"),
            spec,
            backbone.width,
            options.condition_on == "return_to_go",
            loss.predicts_return,
        )
        # hidden numbers of an observation are 0 in the model's units, also for a planner
        self.normalizer = Normalizer(spec, self.tokenizer.hidden_observations)
        self.head: Head = build(head, backbone.width, spec)
        if not isinstance(self.head, Head):
            raise ValueError(
                f"{head['_target_']}: expected a head with loss_floor and entities, see "
                "protocols.Head"
            )
        self._check_entities()
        self.planner: Planner | None = None
        if planner is not None and not is_none(planner):
            self.planner = build(planner, spec)
        self.objective = loss
        self.team = self._team_tokenizer()

    def _check_entities(self) -> None:
        """Raise a ValueError if the backbone or the head cannot have a token for each entity."""
        entities = self.tokenizer.entities
        if entities == "pooled":
            return
        name = f"tokenizer.entities={entities}"
        fix = "take tokenizer.entities=pooled"
        if self.backbone.layout is None:
            raise ValueError(
                f"{name}: expected a backbone like Llama, Qwen or GPT-2, got "
                f"{type(self.backbone.core).__name__}; {fix}"
            )
        if self.head.entities is not None:
            raise ValueError(
                f"{name}: expected a head that points at no entities, got "
                f"{type(self.head).__name__}; {fix}"
            )

    def _team_tokenizer(self) -> nn.Module | None:
        """Return what lays the members of a team out as one list; None: each row is read alone."""
        return None

    def forward(self, batch: Batch, embodiment: str = ONLY) -> dict[str, Tensor]:
        """Return the terms of the loss, scalars, see the objective.

        batch: raw units. embodiment: read by a `Generalist` alone.
        """
        hidden = self.read(batch, self.objective.return_given(batch))
        return self.objective.loss(self, batch, hidden)

    def read(self, batch: Batch, return_given: Tensor | None = None) -> Tensor:
        """Return hidden states at each observation, from which the action there is predicted.

        Args:
            batch: raw units.
            return_given: (B,) bool; False: the null return token in place of the row's returns.
                None: all True.

        Returns:
            (B, T, D).
        """
        tokens = self.tokens(batch, return_given)[:, :-1]  # no position attends to the last action
        hidden: Tensor = self.backbone(
            tokens,
            batch.text_ids,
            batch.text_mask,
            batch.text_index,
            output_positions=self.tokenizer.output_positions,
            entities=self.entity_tokens(batch.observations),
        )
        return hidden.float()

    def tokens(self, batch: Batch, return_given: Tensor | None = None) -> Tensor:
        """Return the tokens of the trajectories of a batch (B, k T, D). return_given: see `read`."""
        tokens: Tensor = self.tokenizer(*self._in_units(batch), return_given)
        return tokens

    def entity_tokens(self, observations: Tensor) -> EntityTokens | None:
        """Return the tokens of the entities in observations (B, T, S), raw units; None if they are
        pooled.
        """
        if self.tokenizer.entities == "pooled":
            return None
        return self.tokenizer.entity_tokens(self.normalizer.observations(observations))

    def _in_units(self, batch: Batch) -> ModelUnits:
        """Return the steps of a batch in the model's units."""
        units = self.normalizer
        return ModelUnits(
            returns_to_go=units.returns_to_go(batch.returns_to_go),
            observations=units.observations(batch.observations),
            actions=units.actions(batch.actions),
            timesteps=batch.timesteps,
        )

    def distribution(
        self, hidden: Tensor, action_masks: Tensor | None, observations: Tensor | None
    ) -> Distribution:
        """Return the distribution over the next action.

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
        self,
        hidden: Tensor,
        action_masks: Tensor | None,
        observations: Tensor | None = None,
        *,
        decode: str,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Choose the next actions of N episodes.

        Args:
            hidden: (N, D) at the current observation.
            action_masks: (N, C) bool or None.
            observations: (N, S), see `distribution`.
            decode: `mode`, `mean` or `sample` of the distribution; `unclipped`, see
                `heads.Gaussian`.
            generator: of samples.

        Returns:
            (N, A), raw units.
        """
        masks = None if action_masks is None else action_masks[:, None]
        current = None if observations is None else observations[:, None]
        distribution = self.distribution(hidden[:, None], masks, current)
        if decode == "sample":
            actions = distribution.sample(generator)
        elif decode == "unclipped":
            assert isinstance(distribution, Gaussian)
            actions = distribution.unclipped_mean()
        elif decode == "mean":
            actions = distribution.mean
        else:
            actions = distribution.mode
        return self.normalizer.raw_actions(actions[:, 0])

    @property
    def predicts_return(self) -> bool:
        """True if the model has `predict_return` and can condition on its own prediction."""
        return self.objective.predicts_return

    @property
    def return_inputs(self) -> tuple[bool, ...]:
        """The ways in which the model reads a trajectory: with returns, or with the null token."""
        return (True, False) if self.predicts_return else (True,)

    def predict_return(self, hidden: Tensor) -> Tensor:
        """Return the predicted return-to-go (...), raw units, of hidden states of rows with the
        null return token (..., D).
        """
        return self.normalizer.raw_returns_to_go(self.objective.predict_return(hidden))
