"""A team's policy trained by play in a learned world: TD3 with an actor that all agents share and
critics that read all observations and actions.

Source: TD3, Fujimoto et al., ICML 2018 (arXiv 1802.09477); its form for several agents, MATD3,
Ackermann et al. 2019 (arXiv 1910.01465).
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from decisionllm.progress import track
from decisionllm.randomness import temporary_seed
from decisionllm.teams.learned_world import TeamWorld, own_first
from decisionllm.tokenizers.mlp import mlp

DELAY, RATE, BATCH = 0.01, 1e-3, 512
INNER = 128  # width of the networks
NOISE = 0.1  # of exploration, in half ranges of an action
PLAYED_AT_ONCE = 32  # worlds
RANDOM_ROUNDS = 20  # of uniform play before the first update


def relu_mlp(inputs: int, outputs: int) -> nn.Sequential:
    """A network with two hidden layers."""
    return mlp(inputs, INNER, INNER, outputs, activation=nn.ReLU)


def make_twin_critics(inputs: int) -> nn.ModuleList:
    """Two networks of a value."""
    return nn.ModuleList(relu_mlp(inputs, 1) for _ in range(2))


class TeamTD3:
    """TD3 of N agents that share an actor, with twin critics of all observations and actions.

    Args:
        agents: N.
        size: O, numbers of an observation.
        actions: A, within -1 .. 1.
        discount: of a step.
    """

    def __init__(self, agents: int, size: int, actions: int, *, discount: float = 0.95) -> None:
        self.discount = discount
        joint = agents * (size + actions)
        # The slow copies are drawn too: the weights of published policies depend on it.
        self.actor = relu_mlp(size, actions)
        self.slow_actor = relu_mlp(size, actions)
        self.critics = make_twin_critics(joint)
        self.slow_critics = make_twin_critics(joint)
        self.slow_actor.load_state_dict(self.actor.state_dict())
        self.slow_critics.load_state_dict(self.critics.state_dict())
        self.actor_optimizer = torch.optim.Adam(self.actor.parameters(), RATE)
        self.critic_optimizer = torch.optim.Adam(self.critics.parameters(), RATE)

    def act(self, observations: Tensor) -> Tensor:
        """(..., O) -> (..., A) within -1 .. 1."""
        actions: Tensor = self.actor(observations).tanh()
        return actions

    def values(self, critics: nn.ModuleList, observations: Tensor, actions: Tensor) -> Tensor:
        """(B, N, O), (B, N, A) -> (2, B, N)."""
        joint = torch.cat([own_first(observations), own_first(actions)], -1)
        return torch.stack([critic(joint)[..., 0] for critic in critics])

    def update(
        self,
        observations: Tensor,
        actions: Tensor,
        rewards: Tensor,
        following: Tensor,
        *,
        actor: bool,
    ) -> None:
        """One step of the critics and, if `actor`, of the actor.

        An episode ends by its time limit alone: the value goes on.

        Args:
            observations, following: (B, N, O).
            actions: (B, N, A).
            rewards: (B, N).
            actor: whether the actor is trained too.
        """
        with torch.no_grad():
            noise = (0.2 * torch.randn_like(actions)).clamp(-0.5, 0.5)
            next_actions = (self.slow_actor(following).tanh() + noise).clamp(-1, 1)
            least = self.values(self.slow_critics, following, next_actions).amin(0)
            target = rewards + self.discount * least
        values = self.values(self.critics, observations, actions)
        loss = F.mse_loss(values, target.expand(2, -1, -1))
        self.critic_optimizer.zero_grad()
        loss.backward()
        self.critic_optimizer.step()
        if actor:
            self._improve(observations)

    def _improve(self, observations: Tensor) -> None:
        """One step of the actor, and of the slow copies."""
        raw = self.actor(observations)
        value = self.values(self.critics, observations, raw.tanh())[0]
        # small outputs keep tanh from saturating
        loss = -value.mean() + 1e-3 * raw.square().mean()
        self.actor_optimizer.zero_grad()
        loss.backward()
        self.actor_optimizer.step()
        with torch.no_grad():
            pairs = ((self.actor, self.slow_actor), (self.critics, self.slow_critics))
            for net, slow in pairs:
                for weight, slow_weight in zip(net.parameters(), slow.parameters(), strict=True):
                    slow_weight.lerp_(weight, DELAY)


def train_team_td3(world: TeamWorld, *, rounds: int, seed: int) -> TeamTD3:
    """Train a policy by play in a learned world from the first observations of its log.

    Args:
        world: that was fitted. Its standardised observations are what the policy reads.
        rounds: of play, PLAYED_AT_ONCE worlds each, with as many updates as a world has steps.
        seed: of weights, play and batches.
    """
    _, T, N, size = world.steps.observations.shape
    A = world.steps.actions.shape[-1]
    count = rounds * PLAYED_AT_ONCE
    widths = {"seen": size, "taken": A, "paid": 1, "then": size}
    memory = {name: torch.zeros(T, count, N, width) for name, width in widths.items()}
    with temporary_seed(seed):
        learner = TeamTD3(N, size, A)
        for turn in track(range(rounds), "teacher"):
            start = turn * PLAYED_AT_ONCE
            explores = turn < RANDOM_ROUNDS
            play_round(world, None if explores else learner, memory, start)
            if not explores:
                train_round(learner, memory, start + PLAYED_AT_ONCE)
    return learner


def play_round(
    world: TeamWorld, learner: TeamTD3 | None, memory: dict[str, Tensor], start: int
) -> None:
    """Play PLAYED_AT_ONCE worlds into the places of the memory from `start` on.

    Args:
        world: that was fitted.
        learner: acts, with noise; None: uniform actions.
        memory: (T, places, N, width) of each column, in the units of the learner.
        start: the first place.
    """
    W, T, N, _ = world.steps.observations.shape
    A = world.steps.actions.shape[-1]
    first = torch.from_numpy(world.steps.observations[:, 0])
    (observations,) = world.transform_plane(first[torch.randint(W, (PLAYED_AT_ONCE,))])
    places = slice(start, start + PLAYED_AT_ONCE)
    for t in range(T):
        # Drawn in any case: the weights of published policies depend on it.
        actions = 2 * torch.rand(PLAYED_AT_ONCE, N, A) - 1
        if learner is not None:
            with torch.no_grad():
                planned = learner.act(world.standardise(observations))
            actions = (planned + NOISE * torch.randn_like(planned)).clamp(-1, 1)
        following, rewards = world.advance(observations, actions)
        memory["seen"][t, places] = world.standardise(observations)
        memory["taken"][t, places] = actions
        memory["paid"][t, places] = rewards[..., None] / world.reward_scale
        memory["then"][t, places] = world.standardise(following)
        observations = following


def train_round(learner: TeamTD3, memory: dict[str, Tensor], filled: int) -> None:
    """Update the learner as often as a world has steps, from the filled places of the memory."""
    T = len(memory["seen"])
    for k in range(T):
        step = torch.randint(T, (BATCH,))
        place = torch.randint(filled, (BATCH,))
        observed, acted, rewards, following = (column[step, place] for column in memory.values())
        learner.update(observed, acted, rewards[..., 0], following, actor=k % 2 == 1)
