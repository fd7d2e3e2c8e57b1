"""(return-to-go, observation, action) of a step -> three embeddings, in the order R o a R o a
..."""

from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from decisionllm.checks import (
    check_at_least,
    check_one_of,
    check_positive,
    check_share,
    parse_ranges,
)
from decisionllm.schema import Spec
from decisionllm.tokenizers.entities import EntityEmbedding, EntityEncoder, entity_blocks
from decisionllm.tokenizers.entity_tokens import EntityTokens
from decisionllm.tokenizers.fourier_features import FourierFeatures
from decisionllm.tokenizers.mlp import mlp

MOST_TIMESTEPS = 1_000_000  # 512 MB at a width of 128, and three times that for the optimiser


class ModelUnits(NamedTuple):
    """Steps of B windows in the model's units."""

    returns_to_go: Tensor  # (B, T), standardised
    observations: Tensor  # (B, T, S), standardised
    actions: Tensor  # (B, T, A) within -1 .. 1, or indices of discrete actions
    timesteps: Tensor  # (B, T) since the start of the episode, or of the group of a team


class TrajectoryTokenizer(nn.Module):
    """Returns-to-go, observations and actions in the model's units -> tokens (B, k T, D).

    Args:
        spec: of the data.
        width: D, width of the backbone.
        return_conditioned: k = 3 tokens a step; False leaves the return token out (k = 2):
            behaviour cloning.
        null_return: adds a learned token in place of a return that is not given.
        embedding: `linear`, one map a stream as in Decision Transformer; `mlp`, two layers; or
            `waves`, as `mlp`, with sines and cosines of the observation where it has no entity
            schema.
        timesteps: `learned`, one vector a step of the horizon, shared by the tokens of the step, or
            `none`: episodes may be longer than in training.
        scale: root mean square of a token at the beginning of training.
        entities: how observations with an entity schema are read. `pooled`: the observation token
            is an `EntityEncoder` of all of them. `current`: each entity is a token, which the
            observation token of its step attends to. `all`: so do the tokens of later steps.
        entity_layers: layers of the `EntityEncoder`.
        hide_observations: numbers of an observation that the model never reads, such as "0-2,5".
        hide_actions: an action is replaced by a learned token with this probability in training; 1:
            always, also when it acts.
        hide_entities: an entity of a step is absent with this probability in training; 1: always,
            also when it acts.

    Raises:
        ValueError: an unknown embedding or kind of timesteps, hide_actions or hide_entities is not
            within 0 .. 1, an observation lacks a number or entities to hide, or more than
            MOST_TIMESTEPS learned timesteps.
    """

    def __init__(
        self,
        spec: Spec,
        width: int,
        return_conditioned: bool = True,
        null_return: bool = False,
        *,
        embedding: str = "linear",
        timesteps: str = "learned",
        scale: float = 1.0,
        entities: str = "pooled",
        entity_layers: int = 0,
        hide_observations: str = "",
        hide_actions: float = 0.0,
        hide_entities: float = 0.0,
    ) -> None:
        super().__init__()
        check_one_of("tokenizer.embedding", embedding, ("linear", "mlp", "waves"))
        check_one_of("tokenizer.timesteps", timesteps, ("learned", "none"))
        check_positive("tokenizer.scale", scale)
        check_one_of("tokenizer.entities", entities, ("pooled", "current", "all"))
        check_at_least("tokenizer.entity_layers", entity_layers, 0)
        check_share("tokenizer.hide_actions", hide_actions)
        check_share("tokenizer.hide_entities", hide_entities)
        for option, value, without in (
            ("entities", entities, "pooled"),
            ("hide_entities", hide_entities, 0),
        ):
            if value != without and not entity_blocks(spec.entity_schema):
                raise ValueError(
                    f"tokenizer.{option}={value}: expected observations with an entity schema, got "
                    f"no entities; take tokenizer.{option}={without}, or data whose Spec has "
                    "entity_schema"
                )
        if timesteps == "learned" and spec.horizon > MOST_TIMESTEPS:
            raise ValueError(
                f"tokenizer.timesteps=learned: expected a horizon of at most {MOST_TIMESTEPS:,} steps, "
                f"got {spec.horizon:,}; take tokenizer.timesteps=none or a smaller horizon"
            )

        def stream(size: int) -> nn.Module:
            if embedding == "linear":
                return nn.Linear(size, width)
            return mlp(size, width, width)

        self.num_actions = spec.num_actions
        self.horizon = spec.horizon
        self.tokens = 3 if return_conditioned else 2  # per step
        self.returns = stream(1) if return_conditioned else None
        self.null_return = nn.Parameter(torch.zeros(width)) if null_return else None
        self.entities = entities
        if entities != "pooled":
            self.observations: Any = EntityEmbedding(
                spec.entity_schema, width, embedding=embedding, hide=hide_entities
            )
        elif spec.entity_schema:
            self.observations = EntityEncoder(
                spec.entity_schema,
                width,
                embedding=embedding,
                layers=entity_layers,
                hide=hide_entities,
            )
        elif embedding == "waves":
            self.observations = FourierFeatures(spec.observation_dim, width)
        else:
            self.observations = stream(spec.observation_dim)
        self.actions = stream(spec.num_actions or spec.action_dim)
        self.hidden_observations = parse_ranges(
            "tokenizer.hide_observations",
            hide_observations,
            nothing="none",
            within=range(spec.observation_dim),
        )
        self.hide_actions = hide_actions
        self.hidden_action = nn.Parameter(torch.zeros(width)) if hide_actions else None
        self.timesteps = nn.Embedding(spec.horizon, width) if timesteps == "learned" else None
        self.norm = nn.LayerNorm(width)
        nn.init.constant_(self.norm.weight, scale)

    def forward(
        self,
        returns_to_go: Tensor,
        observations: Tensor,
        actions: Tensor,
        timesteps: Tensor,
        return_given: Tensor | None = None,
    ) -> Tensor:
        """Embed the steps of B windows.

        Args:
            returns_to_go: (B, T), standardised.
            observations: (B, T, S), standardised.
            actions: (B, T, A) within -1 .. 1, or indices of discrete actions.
            timesteps: (B, T) steps since the start of the episode.
            return_given: (B,) bool; False: the null return token in place of the row's returns.
                None: all True.

        Returns:
            (B, k T, D) tokens.
        """
        seen = self.observations(observations)
        acted = self.actions(action_inputs(actions, self.num_actions))
        if self.hidden_action is not None and (self.training or self.hide_actions == 1):
            hidden = torch.rand(actions.shape[:2], device=actions.device) < self.hide_actions
            acted = torch.where(hidden[..., None], self.hidden_action.to(acted.dtype), acted)
        streams = [seen, acted]
        if self.returns is not None:
            returns = self.returns(returns_to_go[..., None])
            if return_given is not None and self.null_return is not None:
                null = self.null_return.to(returns.dtype)
                returns = torch.where(return_given[:, None, None], returns, null)
            streams.insert(0, returns)
        tokens = torch.stack(streams, 2)  # (B, T, k, D)
        if self.timesteps is not None:
            tokens = tokens + self.timesteps(timesteps)[:, :, None]
        normed: Tensor = self.norm(rearrange(tokens, "B T k D -> B (T k) D"))
        return normed

    def entity_tokens(self, observations: Tensor) -> EntityTokens:
        """Embed the entities of observations (B, T, S), standardised, as tokens beside those of
        `forward`; of a tokenizer that does not pool them.
        """
        embedded, step, present = self.observations.entities(observations)
        return EntityTokens(
            embedded=self.norm(embedded),
            present=present,
            place=self.tokens * step + self.tokens - 2,
            remembered=self.entities == "all",
        )

    @property
    def most_entities(self) -> int:
        """The most entity tokens of a step."""
        if self.entities == "pooled":
            return 0
        return sum(block.num_entities for block in self.observations.entity_blocks)

    @property
    def output_positions(self) -> slice:
        """The observation tokens, where actions are predicted.

        Each attends to the return of its step and everything before.
        """
        return slice(self.tokens - 2, None, self.tokens)


def action_inputs(actions: Tensor, num_actions: int) -> Tensor:
    """Actions (..., A) as the input of a linear map: a discrete one as a one-hot vector (...,
    C)."""
    if not num_actions:
        return actions
    return F.one_hot(actions[..., 0].long(), num_actions).to(actions.dtype)
