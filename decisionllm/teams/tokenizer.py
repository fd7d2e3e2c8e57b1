"""The steps of a team -> one list of tokens: the team's return-to-go, an observation token and an
action query of each member.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from decisionllm.schema import Spec
from decisionllm.tokenizers.trajectory import ModelUnits, TrajectoryTokenizer, action_inputs

POOL = 16  # identities; the members of a window have different ones


class TeamTokenizer(nn.Module):
    """Tokens R o_1 .. o_n q_1 .. q_n of a step, with one order of the members throughout a window.

    o_i holds the observation of member i and its own last action. q_i, where its action is
    predicted, holds its observation and the action of the member before it, so that with causal
    attention every member conditions on all observations and on the actions of the members before
    it. An absent member has no tokens; a team of one is R o q.

    Args:
        spec: of the data.
        width: D, width of the backbone.
        hide_actions: a past action is replaced by a learned vector with this probability in
            training; 1: always. An action before the window, or of a member that did not act, is
            always replaced.
    """

    def __init__(self, spec: Spec, width: int, *, hide_actions: float = 0.0) -> None:
        super().__init__()
        self.hide_actions = hide_actions
        self.identities = nn.Embedding(POOL, width)
        self.before = nn.Linear(spec.num_actions or spec.action_dim, width)
        # no last action of its own; no member before it
        self.unknown = nn.Parameter(torch.randn(2, width))

    def forward(
        self,
        tokenizer: TrajectoryTokenizer,
        units: ModelUnits,
        mask: Tensor,
        loss_mask: Tensor,
        team: Tensor,
        identity: Tensor,
    ) -> tuple[Tensor, "TokenLayout"]:
        """Embed the steps of W teams with B members in all; rows stand team by team.

        Args:
            tokenizer: of a single trajectory, whose maps are shared.
            units: the steps of B members; timesteps since the start of the group.
            mask: (B, T) bool, True where the member is present.
            loss_mask: (B, T) bool, True where its action was recorded.
            team: (B,) long, 0 .. W - 1, ascending.
            identity: (B,) long, below POOL.

        Returns:
            Tokens (W, L, D), padded on the right, and how they stand in the lists.
        """
        lists = arrange_tokens(mask, team, tokenizer.returns is not None)
        x = tokenizer.observations(units.observations) + self.identities(identity)[:, None]
        moves = action_inputs(units.actions, tokenizer.num_actions)
        o = x + self._embed_own_action(tokenizer.actions(moves), loss_mask)
        q = x + self._embed_previous_member(moves, mask, loss_mask, lists.first[team])
        team_of_token = team[:, None].expand_as(mask)
        kinds = [
            Tokens(o, team_of_token, lists.observations, units.timesteps, mask),
            Tokens(q, team_of_token, lists.queries, units.timesteps, mask),
        ]
        if tokenizer.returns is not None:
            kinds.append(embed_returns(tokenizer.returns, units, lists, mask, team))
        tokens = Tokens(*(torch.cat(parts) for parts in zip(*kinds, strict=True)))
        embedded = tokens.embedded
        if tokenizer.timesteps is not None:
            embedded = embedded + tokenizer.timesteps(tokens.times)
        embedded = tokenizer.norm(embedded[tokens.real])
        out = embedded.new_zeros(len(lists.first), lists.length, embedded.shape[-1])
        out = out.index_put((tokens.teams[tokens.real], tokens.places[tokens.real]), embedded)
        return out, lists

    def _embed_own_action(self, embedded: Tensor, recorded: Tensor) -> Tensor:
        """Embed the member's own last action, which o holds, (B, T, D).

        Args:
            embedded: (B, T, D) actions.
            recorded: (B, T) bool, whether each was recorded.
        """
        last_action = F.pad(embedded, (0, 0, 1, -1))
        visible = F.pad(recorded, (1, -1))
        if self.hide_actions and (self.training or self.hide_actions == 1):
            uniform = torch.rand(visible.shape, device=visible.device)
            visible = visible & (uniform >= self.hide_actions)
        return torch.where(visible[..., None], last_action, self.unknown[0])

    def _embed_previous_member(
        self, moves: Tensor, mask: Tensor, recorded: Tensor, first: Tensor
    ) -> Tensor:
        """Embed the action of the member before it at the same step, which q holds, (B, T, D).

        Args:
            moves: (B, T, x) actions as inputs.
            mask: (B, T) bool, whether the member is present.
            recorded: (B, T) bool, whether the action was recorded.
            first: (B,) first row of the team of each row.
        """
        row = torch.arange(len(mask), device=mask.device)[:, None]
        previous_row = torch.where(mask, row, -1).cummax(0).values.roll(1, 0)  # its row
        alone = (previous_row < first[:, None]) | (row == 0)
        previous_row = previous_row.clamp(min=0)
        visible = recorded.gather(0, previous_row) & ~alone
        moves = moves.gather(0, previous_row[..., None].expand(-1, -1, moves.shape[-1]))
        return torch.where(visible[..., None], self.before(moves), self.unknown[1])


class Tokens(NamedTuple):
    """Tokens of one kind, of n rows in T steps."""

    embedded: Tensor  # (n, T, D)
    teams: Tensor  # (n, T) whose list each is in
    places: Tensor  # (n, T) in the list
    times: Tensor  # (n, T) timesteps
    real: Tensor  # (n, T) bool, whether it is there


class TokenLayout(NamedTuple):
    """The positions of the tokens of W teams in their lists."""

    first: Tensor  # (W,) the first row of each team
    members: Tensor  # (W, T) how many are present at each step
    starts: Tensor  # (W, T) place of the first token of each step
    observations: Tensor  # (B, T) place of o
    queries: Tensor  # (B, T) place of q, where the action is predicted; 0: the member is absent
    length: int  # of the longest list


def embed_returns(
    embed: nn.Module, units: ModelUnits, lists: TokenLayout, mask: Tensor, team: Tensor
) -> Tokens:
    """Embed the return of each team at each step, the mean over its members; see
    `TeamTokenizer.forward`.
    """
    divisor = lists.members.clamp(min=1)
    mean = sum_by_team(torch.where(mask, units.returns_to_go, 0), team) / divisor
    times = sum_by_team(torch.where(mask, units.timesteps, 0), team) // divisor
    team_of_token = torch.arange(len(mean), device=team.device)[:, None].expand_as(mean)
    return Tokens(embed(mean[..., None]), team_of_token, lists.starts, times, lists.members > 0)


def sum_by_team(x: Tensor, team: Tensor) -> Tensor:
    """Sum the rows of each team: (B, T), (B,) -> (W, T)."""
    return x.new_zeros(int(team[-1]) + 1, *x.shape[1:]).index_add(0, team, x)


def arrange_tokens(mask: Tensor, team: Tensor, with_returns: bool) -> TokenLayout:
    """Arrange the tokens of teams in lists: members present (B, T), the team of each row (B,)."""
    present = mask.long()
    members = sum_by_team(present, team)
    size = 2 * members + (members > 0) * with_returns  # tokens of each step
    starts = size.cumsum(1) - size
    first = torch.searchsorted(team, torch.arange(len(members), device=team.device))
    members_before = present.cumsum(0) - present
    members_before = (
        members_before - members_before[first][team]
    )  # members of its team before each row
    observations = starts[team] + with_returns + members_before
    queries = torch.where(mask, observations + members[team], 0)
    return TokenLayout(
        first=first,
        members=members,
        starts=starts,
        observations=observations,
        queries=queries,
        length=int(size.sum(1).max()),
    )
