"""A model that reads all members of a team as one list of tokens, each conditioned on the actions
of those before it.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from decisionllm.models.sequence import SequenceModel
from decisionllm.policy.window_reader import WindowReader
from decisionllm.schema import Batch, Targets
from decisionllm.teams.session import TeamSession
from decisionllm.teams.tokenizer import TeamTokenizer, TokenLayout


class TeamSequenceModel(SequenceModel):
    """`SequenceModel` whose rows are the members of teams; a row without a team is a team of one.

    Raises:
        ValueError: the objective predicts the return, which is that of a team; or there is a
            planner, which knows no team.
    """

    team: TeamTokenizer

    def begin_session(
        self,
        policy: WindowReader,
        tasks: Sequence[str],
        horizon: int,
        target_returns: Targets,
        groups: np.ndarray | None,
    ) -> TeamSession:
        """Begin the episodes of a policy of this model, see `Policy.begin`."""
        return TeamSession(policy, tasks, horizon, target_returns, groups)

    def _team_tokenizer(self) -> TeamTokenizer:
        of_one_agent = self.objective if self.objective.predicts_return else self.planner
        if of_one_agent is not None:
            raise ValueError(
                f"{type(of_one_agent).__name__}: expected team.execution=per_agent, got joint or "
                "both"
            )
        if self.tokenizer.entities != "pooled":
            raise ValueError(
                f"tokenizer.entities={self.tokenizer.entities}: expected team.execution=per_agent, "
                "got joint or both; take tokenizer.entities=pooled"
            )
        hide_actions = self.tokenizer.hide_actions
        return TeamTokenizer(self.spec, self.backbone.width, hide_actions=hide_actions)

    def read(self, batch: Batch, return_given: Tensor | None = None) -> Tensor:
        """Hidden states where each row's action is predicted in its team's list (B, T, D), see
        `SequenceModel.read`.
        """
        tokens, lists, team = self.team_tokens(batch)
        places = lists.queries
        alone = torch.bincount(team) == 1  # (W,)
        # The short lists of teams of one are not padded to the length of the others. A sharded
        # backbone is read once: its processes must read it equally often, whatever teams they have.
        parts = [torch.ones_like(alone)] if self.backbone.sharded else [alone, ~alone]
        hidden, order = [], []
        for part in parts:
            rows = part[team].nonzero()[:, 0]
            if not len(rows):
                continue
            place_in_part = part.cumsum(0) - 1  # (W,)
            of_part = tokens[part, : int(places[rows].max()) + 1]
            text_index = batch.text_index[lists.first[part]]
            states = self.backbone(of_part, batch.text_ids, batch.text_mask, text_index).float()
            hidden.append(states[place_in_part[team[rows], None], places[rows]])
            order.append(rows)
        return torch.cat(hidden)[torch.cat(order).argsort()]

    def team_tokens(self, batch: Batch) -> tuple[Tensor, TokenLayout, Tensor]:
        """Tokens of the W teams of a batch.

        Returns:
            Tokens (W, L, D), how they stand in the lists of the teams, and the team of each row
            (B,).
        """
        rows = torch.arange(len(batch.mask), device=batch.mask.device)
        if batch.team is None:
            team, identity = rows, torch.zeros_like(rows)
        else:
            assert batch.identity is not None, "the members of a team have identities"
            team, identity = batch.team, batch.identity
        units = self._in_units(batch)
        tokens, lists = self.team(
            self.tokenizer, units, batch.mask, batch.loss_mask, team, identity
        )
        return tokens, lists, team
