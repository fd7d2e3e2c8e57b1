"""The steps of a team -> one list of tokens: what is still to come, what each member sees, then what each is asked in turn."""

import torch
from torch import nn
from torch.nn import functional as F

POOL = 16  # identities; the members of a window have different ones


class TeamTokenizer(nn.Module):
    """R o_1 .. o_n q_1 .. q_n a step, in one order of members throughout a window.

    o_i: what member i sees, and its own last action. q_i, where its action is read: what it sees, and the action of the
    member before it, so that in plain causal order each is asked knowing what all see and what those before it do. Who is
    not there leaves no token, so that a team of one is R o q. An action before the window, of one who did not act, or
    hidden (with the probability `hide_actions` in training; 1: always) is one learned vector.
    """

    def __init__(self, spec, width, *, hide_actions=0.0):
        super().__init__()
        if not 0 <= hide_actions <= 1:
            raise ValueError(f"hide_actions: expected a share within 0 .. 1, got {hide_actions}")
        self.hide_actions = hide_actions
        self.identities = nn.Embedding(POOL, width)
        self.before = nn.Linear(spec.num_actions or spec.action_dim, width)
        self.unknown = nn.Parameter(torch.randn(2, width))  # no last action of its own; no member before it

    def forward(self, each, returns_to_go, observations, actions, timesteps, mask, loss_mask, team, identity):
        """each: a TrajectoryTokenizer, whose maps are shared. (B, T), (B, T, S), (B, T, A), (B, T), (B, T) bool twice, (B,) twice,
        in the model's units, rows team by team in their order -> tokens (W, L, D) padded on the right, and the place of q in
        the list of each row's team (B, T)"""
        T, with_returns = mask.shape[1], each.returns is not None
        here, base, size, first = arrange(mask, team, with_returns)
        seen = base[team] + with_returns + here  # places
        asked = seen + team_sum(mask.long(), team)[team]
        row = torch.arange(len(team), device=team.device)[:, None]
        last = torch.where(mask, row, -1).cummax(0).values.roll(1, 0)  # the row of the member before
        alone = (last < first[team, None]) | (row == 0)
        last = last.clamp(min=0)

        moves = each.numbers(actions)
        shown = F.pad(loss_mask, (1, -1))
        if self.hide_actions and (self.training or self.hide_actions == 1):
            shown = shown & (torch.rand(shown.shape, device=shown.device) >= self.hide_actions)
        x = each.observations(observations) + self.identities(identity)[:, None]
        own = F.pad(each.actions(moves), (0, 0, 1, -1))
        o = x + torch.where(shown[..., None], own, self.unknown[0])
        known_before = loss_mask.gather(0, last) & ~alone
        before = self.before(moves.gather(0, last[..., None].expand(-1, -1, moves.shape[-1])))
        q = x + torch.where(known_before[..., None], before, self.unknown[1])
        parts, places, times, lists = [o, q], [seen, asked], [timesteps] * 2, [team[:, None].expand(-1, T)] * 2
        real = [mask, mask]
        if with_returns:
            n = team_sum(mask.long(), team).clamp(min=1)
            mean = team_sum(torch.where(mask, returns_to_go, 0), team) / n
            parts.append(each.returns(mean[..., None]))
            times.append(team_sum(torch.where(mask, timesteps, 0), team) // n)
            places.append(base)
            lists.append(torch.arange(len(first), device=team.device)[:, None].expand(-1, T))
            real.append(size > 0)
        tokens = torch.cat(parts)
        if each.timesteps is not None:
            tokens = tokens + each.timesteps(torch.cat(times))
        real = torch.cat(real)
        tokens = each.norm(tokens[real])
        out = tokens.new_zeros(len(first), int(size.sum(1).max()), tokens.shape[-1])
        return out.index_put((torch.cat(lists)[real], torch.cat(places)[real]), tokens), torch.where(mask, asked, 0)


def team_sum(x, team):
    """Rows added up by team: (B, T), (B,) -> (W, T)"""
    return x.new_zeros(int(team[-1]) + 1, *x.shape[1:]).index_add(0, team, x)


def arrange(mask, team, with_returns):
    """Where tokens stand: how many of its team are before each row at each step (B, T), where each step begins in the list of its
    team and how many tokens it has (W, T), and the first row of each team (W,)."""
    n = team_sum(mask.long(), team)
    size = 2 * n + (n > 0) * with_returns
    first = torch.searchsorted(team, torch.arange(len(n), device=team.device))
    before = mask.long().cumsum(0) - mask.long()
    return before - before[first][team], size.cumsum(1) - size, size, first
