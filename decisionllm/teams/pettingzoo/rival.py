"""A trained run that plays another team of a PettingZoo environment."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from decisionllm.policy import loading
from decisionllm.registry import build, discover
from decisionllm.runs import directory

if TYPE_CHECKING:
    from decisionllm.teams.pettingzoo.env import Actions, PettingZooTeams, Result


class Rival:
    """A run that plays all of another team in the copies of a PettingZooTeams.

    Its observations are those of the run's own environment, or of the environment of one of its
    parts.

    Args:
        run: its folder.
        agents: that it shall play.
        options: of that environment in place of its own.

    Raises:
        ValueError: the run plays other agents, or was trained for other roles or actions.
    """

    def __init__(self, run: str, agents: Sequence[str], options: Mapping[str, object]) -> None:
        parts = [*directory.read(run)[1]["parts"]]
        target = discover()["env"]["pettingzoo"]["_target_"]
        played = []
        for self.policy in loading.load_parts(run, parts):
            config = self.policy.config
            if config["env"]["_target_"] != target:
                continue
            self.env: PettingZooTeams = build(config["env"] | options | {"partners": {}}, 1)
            if self.env.played == {*agents}:
                return
            played.append(", ".join(sorted(self.env.played)))
        raise ValueError(
            f"env.partners: expected {run} to play {', '.join(agents)}, got a run that plays "
            f"{' or '.join(played) or 'elsewhere'}"
        )

    def begin(self, host: "PettingZooTeams") -> None:
        """Start in the copies of `host`."""
        self.env.envs = host.envs
        self.env.views = host.views
        self.observations = self.env.begin()
        self.rewards: np.ndarray | None = None
        env = self.env
        self.player = self.policy.begin(env.tasks, horizon=env.horizon, groups=env.groups)

    def act(self) -> "Actions":
        """Actions of the agents that are still there."""
        running = np.flatnonzero(self.env.running)
        if not len(running):
            return {}
        masks = self.env.action_masks
        if masks is not None:
            masks = masks[running]
        decided = self.player.act(self.observations[running], self.rewards, masks)
        actions = np.zeros((len(self.env.rows), decided.shape[1]))
        actions[running] = decided
        return self.env.to_env_actions(actions)

    def receive(self, results: Mapping[int, "Result"]) -> None:
        """See `PettingZooTeams.receive`."""
        was_running = self.env.running.copy()
        self.observations, gains, _, _ = self.env.receive(results)
        going = self.env.running[was_running]
        if going.any() and not going.all():
            self.player.select(going)
        self.rewards = gains[self.env.running]
