"""The steps of a team -> one list of tokens: the team's return-to-go, an observation token and an
action query of each member.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from decisionllm.schema import Spec
from decisionllm.tokenizers.trajectory import TrajectoryTokenizer, numbers

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
        each: TrajectoryTokenizer,
        returns_to_go: Tensor,
        observations: Tensor,
        actions: Tensor,
        timesteps: Tensor,
        mask: Tensor,
        loss_mask: Tensor,
        team: Tensor,
        identity: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Embed the steps of W teams with B members in all; rows stand team by team.

        Args:
            each: the tokenizer of a single trajectory, whose maps are shared.
            returns_to_go: (B, T), standardised; a team's token holds the mean over its members.
            observations: (B, T, S), standardised.
            actions: (B, T, A) within -1 .. 1, or indices of discrete actions.
            timesteps: (B, T) steps since the start of the group.
            mask: (B, T) bool, True where the member is present.
            loss_mask: (B, T) bool, True where its action is known.
            team: (B,) long, 0 .. W - 1, ascending.
            identity: (B,) long, below POOL.

        Returns:
            Tokens (W, L, D), padded on the right, and the place of each q in its team's list (B,
            T).
        """
        T = mask.shape[1]
        with_returns = each.returns is not None
        present, base, size, first = arrange(mask, team, with_returns)
        members = team_sum(mask.long(), team)  # (W, T), present at each step
        places = base[team] + with_returns + present  # of o
        queries = places + members[team]  # of q
        o, q = self._embedded(each, observations, actions, mask, loss_mask, team, first, identity)
        lists = team[:, None].expand(-1, T)
        # (embedding, list, place in it, timestep, whether it is there) of each kind of token
        kinds = [(o, lists, places, timesteps, mask), (q, lists, queries, timesteps, mask)]
        if each.returns is not None:
            divisor = members.clamp(min=1)
            mean = team_sum(torch.where(mask, returns_to_go, 0), team) / divisor
            times = team_sum(torch.where(mask, timesteps, 0), team) // divisor
            of_teams = torch.arange(len(first), device=team.device)[:, None].expand(-1, T)
            kinds.append((each.returns(mean[..., None]), of_teams, base, times, members > 0))
        tokens, index, place, time, real = (torch.cat(parts) for parts in zip(*kinds, strict=True))
        if each.timesteps is not None:
            tokens = tokens + each.timesteps(time)
        tokens = each.norm(tokens[real])
        out = tokens.new_zeros(len(first), int(size.sum(1).max()), tokens.shape[-1])
        out = out.index_put((index[real], place[real]), tokens)
        return out, torch.where(mask, queries, 0)

    def _embedded(
        self,
        each: TrajectoryTokenizer,
        observations: Tensor,
        actions: Tensor,
        mask: Tensor,
        loss_mask: Tensor,
        team: Tensor,
        first: Tensor,
        identity: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Embeddings of o and q of every row (B, T, D); see `forward`. first: (W,) first row of each
        team.
        """
        moves = numbers(actions, each.num_actions)
        x = each.observations(observations) + self.identities(identity)[:, None]

        # o: the member's own last action
        own = F.pad(each.actions(moves), (0, 0, 1, -1))
        visible = F.pad(loss_mask, (1, -1))
        if self.hide_actions and (self.training or self.hide_actions == 1):
            drawn = torch.rand(visible.shape, device=visible.device)
            visible = visible & (drawn >= self.hide_actions)
        o = x + torch.where(visible[..., None], own, self.unknown[0])

        # q: the action of the member before it at the same step
        row = torch.arange(len(team), device=team.device)[:, None]
        last = torch.where(mask, row, -1).cummax(0).values.roll(1, 0)  # its row
        alone = (last < first[team, None]) | (row == 0)
        last = last.clamp(min=0)
        known = loss_mask.gather(0, last) & ~alone
        before = self.before(moves.gather(0, last[..., None].expand(-1, -1, moves.shape[-1])))
        q = x + torch.where(known[..., None], before, self.unknown[1])
        return o, q


def team_sum(x: Tensor, team: Tensor) -> Tensor:
    """Sum the rows of each team: (B, T), (B,) -> (W, T)."""
    return x.new_zeros(int(team[-1]) + 1, *x.shape[1:]).index_add(0, team, x)


def arrange(
    mask: Tensor, team: Tensor, with_returns: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Places of tokens: members of its team before each row (B, T), first place and number of
    tokens of each step of a team's list (W, T) twice, and the first row of each team (W,).
    """
    n = team_sum(mask.long(), team)
    size = 2 * n + (n > 0) * with_returns
    first = torch.searchsorted(team, torch.arange(len(n), device=team.device))
    before = mask.long().cumsum(0) - mask.long()
    return before - before[first][team], size.cumsum(1) - size, size, first
