"""Histories -> actions, for N episodes at once: what evaluation and the server call.

`Policy.act` reads every window afresh and is the reference; `Policy.begin` returns a session that
keeps keys and values between decisions and returns the same actions. Both use the windows that
`window_start` defines. Of a model of teams, `act` takes each history as that of the first agent of a
team of one, and a session draws which agent each episode is.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from decisionllm.checks import check_one_of, check_share
from decisionllm.config import DECODES
from decisionllm.models.heads import check_decode
from decisionllm.policy.buffer import EpisodeBuffer, check_allowed
from decisionllm.policy.deciders import Direct, ValuePlan
from decisionllm.policy.session import Session
from decisionllm.policy.traced_step import Decide, step_columns, trace_step
from decisionllm.policy.window_reader import WindowReader
from decisionllm.registry import Node
from decisionllm.schema import History, Json, Targets, to_number


@dataclass
class Policy(WindowReader):
    """A trained model and how it acts; the model is put in evaluation mode.

    Attributes, beside those of `WindowReader`:
        decode: `mode`, `mean` or `sample` of the action distribution; `unclipped` with a Gaussian
            head, whose deviation is then that of noise which was added to the log's actions before
            they were clipped to their limits: the actions before.
        planning_horizon: steps to imagine before each action, see `ValuePlan`; 0: no planning.
        planning_value: the least of a plan that is followed, see `ValuePlan`.
        execution: `joint`, the agents of a group decide in turn, in random order, each conditioned
            on the actions of those before it; `per_agent`.
        config: of the run that the policy was loaded from.
        info: of the run (run.json): dataset, fingerprint, versions.

    Raises:
        ValueError: an option is unknown, or needs a model that was trained for it.
    """

    decode: str = "mode"
    planning_horizon: int = 0
    execution: str = "per_agent"
    planning_value: float = 0.0
    config: Node = field(default_factory=dict, repr=False)
    info: Json = field(default_factory=dict, repr=False)
    # see `warm_up`
    traced: dict[bool, Decide] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        model = self.model
        self._check_numbers()
        check_one_of("decode", self.decode, DECODES)
        check_one_of("team.execution", self.execution, ("per_agent", "joint"))
        check_decode(self.decode, model.head)
        if not 1 <= self.stride <= self.window:
            raise ValueError(f"stride: expected 1 .. {self.window} (the window), got {self.stride}")
        if self.execution == "joint" and model.team is None:
            raise ValueError(
                "team.execution=joint: needs a model trained with team.execution=joint or both"
            )
        if self.planning_horizon < 0:
            got = self.planning_horizon
            raise ValueError(f"act.planning_horizon: expected 0 or more steps, got {got}")
        if self.planning_horizon and model.team is not None:
            raise ValueError(
                "act.planning_horizon: expected 0 with a model of teams, got "
                f"{self.planning_horizon}"
            )
        if self.planning_horizon and model.planner is None:
            raise ValueError("act.planning_horizon: needs a model trained with planner=value")
        if self.planning_value and model.planner is None:
            raise ValueError("act.planning_value: needs a model trained with planner=value")
        if self.target_return is None and self.return_conditioned and not model.predicts_return:
            raise ValueError(
                "target_return: expected a number, the model was trained without "
                "objective=max_return"
            )
        model.eval()
        model.backbone.pack()
        self.direct = Direct(model, self.decode, self.device)
        self.decider = self.direct
        if self.planning_horizon:
            self.decider = ValuePlan(self.direct, self.planning_horizon, self.planning_value)

    def _check_numbers(self) -> None:
        """Raise a ValueError unless the options that are numbers are such: those of a command line,
        whose default is null, may be anything.
        """
        self.stride = int(to_number("stride", self.stride, np.int64))
        steps = to_number("act.planning_horizon", self.planning_horizon, np.int64)
        self.planning_horizon = int(steps)
        value = to_number("act.planning_value", self.planning_value, np.float64)
        check_share("act.planning_value", float(value))
        if self.target_return is not None:
            to_number("target_return", self.target_return, np.float32)

    def reseed(self, seed: int) -> None:
        """Draw samples and orders of deciding from this seed, from here on."""
        self.generator = torch.Generator(self.device).manual_seed(seed)

    def act(self, histories: Sequence[History]) -> np.ndarray:
        """Choose the next action of N episodes.

        Args:
            histories: N episodes up to now; each window is read afresh.

        Returns:
            (N, A) actions, raw units; a discrete action is one index.

        Raises:
            ValueError: a history does not fit the data that the policy was trained on, or agents
                decide in turn, of which histories name no team.
        """
        return self.act_with_returns(histories)[0]

    @torch.inference_mode()
    def act_with_returns(self, histories: Sequence[History]) -> tuple[np.ndarray, np.ndarray]:
        """Actions (N, A), and the return-to-go that each is conditioned on (N,), raw units; see
        `act`.
        """
        if self.execution == "joint":
            raise ValueError(
                "team.execution=joint: histories name no team; begin a session with groups, or take "
                "team.execution=per_agent"
            )
        # what is traced ends in the model's own choice: another decider reads the hidden states
        decides_itself = self.decider is self.direct
        if self.traced and decides_itself and len(histories) == 1 and not histories[0].task:
            batch, _, predicted = self.windows(histories)
            decide = self.traced.get(not predicted.any())
            if decide is not None:
                action, togo = decide(*step_columns(batch))
                return action.numpy(), togo.numpy()
        hidden, returns = self.read(histories)
        masks = self.stack_action_masks(histories)
        observations = np.stack([h.observations[-1] for h in histories])
        tasks = [h.task for h in histories]
        return self.decider.act(hidden, masks, observations, tasks, self.generator), returns

    def stack_action_masks(self, histories: Sequence[History]) -> Tensor | None:
        """Return the allowed actions at the last observations of N histories, (N, C) or None."""
        masks = [h.action_masks for h in histories]
        if all(mask is None for mask in masks):
            return None
        allowed = np.ones((len(masks), self.spec.num_actions), bool)
        for row, mask in zip(allowed, masks, strict=True):
            if mask is not None:
                row[:] = mask[-1]
        check_allowed(allowed)
        return self.on_device(allowed)

    def warm_up(self) -> None:
        """Make one decision, and let a policy of window 1 decide single steps without a text by a
        recorded list of operations from now on: the same bits in less time. The model must not be
        trained any more. The decision has no plan, which may need a text.
        """
        observations = np.zeros((1, self.spec.observation_dim), np.float32)
        no_actions = np.zeros((0, self.spec.action_dim))
        first = History(observations, no_actions, np.zeros(0))
        with torch.inference_mode():
            hidden, _ = self.read([first])
            self.direct.act(hidden, None, observations, [""], self.generator)
        if self.window == 1 and self.decider is self.direct:
            self.traced = trace_step(self.model, self.windows([first])[0], self.decode)

    def begin(
        self,
        tasks: Sequence[str],
        horizon: int,
        target_returns: Targets = None,
        groups: np.ndarray | None = None,
    ) -> EpisodeBuffer:
        """Begin N episodes in which `act` of the session takes one step at a time.

        Args:
            tasks: N task texts; empty: none.
            horizon: most steps of an episode.
            target_returns: one for all or (N,), raw reward units; None: the policy's own.
            groups: (N,) which episodes are agents of one group, for joint execution.

        Returns:
            A player, see `protocols.Player`.

        Raises:
            ValueError: the model cannot read that many steps, or joint execution has no groups.
        """
        if isinstance(tasks, str):
            raise ValueError(f"tasks: expected a list of texts, got one text; write [{tasks!r}]")
        if self.execution != "joint":
            groups = None
        elif groups is None:
            raise ValueError(
                "team.execution=joint: the env names no groups of agents; take "
                "team.execution=per_agent"
            )
        if self.model.begin_session is not None:
            session: EpisodeBuffer = self.model.begin_session(
                self, tasks, horizon, target_returns, groups
            )
            return session
        return Session(self, tasks, horizon, target_returns)
