"""The interfaces of everything that can be added: environments, players, heads, objectives, dataset
readers.

Read this page before you add one. Members marked abstract are required; the others have a default,
which a subclass inherits.
Letters: N episodes that are played at once, S observation size, A action size, C discrete actions,
B batch, T window length, D model width, K entities.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from decisionllm.schema import Episode, Json, Spec

if TYPE_CHECKING:
    import torch
    from matplotlib.figure import Figure

    from decisionllm.schema import Batch


class Player(Protocol):
    """A policy's session, a baseline or a scripted controller in a rollout."""

    @abstractmethod
    def act(
        self,
        observations: np.ndarray,
        rewards: np.ndarray | None = None,
        action_masks: np.ndarray | None = None,
    ) -> np.ndarray:
        """Choose the next actions of the M episodes that are still running.

        Args:
            observations: (M, S) current observations, raw units.
            rewards: (M,) rewards of the previous step; None at the first step.
            action_masks: (M, C) True where a discrete action is allowed; None without masks.

        Returns:
            (M, A) actions in raw units; a discrete action is one index.
        """
        ...

    def select(self, rows: np.ndarray) -> None:
        """Continue with these episodes alone. rows: (M,) bool or int, counted among the episodes
        that were running.

        Default: there is no memory to select from.
        """
        return None


Begin = Callable[[Sequence[str]], Player]  # task texts of N episodes -> a player of them


class Env(Protocol):
    """N episodes stepped together, in lock-step. Subclass it, set `tasks` and `horizon`, and write
    `reset` and `step`.

    By default the score is the return, normalised where there is a reference, and there are one
    condition, no metrics, no pictures and no baselines.

    Attributes:
        tasks: N task texts.
        horizon: most steps of an episode.
        name: of the world, such as `maze2d-umaze`; results of one world are one table, whatever
            their policies were trained on. Empty: the name of each dataset.
        protocol: label of the evaluation protocol in results, such as `standard` or `goal-text`.
        text: the text option the tasks were made with, such as `goal`; `none`: no option made them,
            they are empty or of the environment itself.
        unit: of the score; empty for a normalised score (0: random policy, 100: reference).
        published: scores of other work for the report, {name: score}.
        reference: returns of a random policy and of an expert, which score 0 and 100; None: scores
            are returns.
        num_actions: C of discrete actions, 0: continuous ones; a policy of other actions is
            refused. None: not checked.
        action_dim: A of continuous actions; a policy of another size is refused. None: not checked.
        action_range: least and greatest of each of A continuous numbers, each (A,); a note says
            where the data go beyond. None: not compared.
        observation_range: least and greatest of each of S numbers of an observation, each (S,),
            infinite where there is none; a note says where the data go beyond. None: not compared.
        observation_parts: (name, numbers) of the parts of an observation, in the order of its
            columns, to compare with those of the data;
            empty: unknown, or one vector.
        categorical: sizes of the parts that are declared categorical, by name, to compare with those
            of the data, see `datasets.categorical.categorical_sizes`; None: not compared.
        action_parts: sizes of the parts whose combination a discrete action is,
            `np.ravel_multi_index`; empty: unknown.
        groups: (N,) which rows share a world; None: every row has its own.
        clusters: (N,) rows with the same number repeat one case with other chance, such as a
            campaign of a day; an interval takes them as one. None: no row repeats another.
        action_masks: (N, C) which discrete actions are allowed now; None: all.
        facts: {task text: facts} of the tasks that it knows wordings of, see `datasets.paraphrases`.
        world_options: names of options that a dataset and its environment share, such as the layout
            of a maze: a run is refused if the data have another value.
    """

    tasks: Sequence[str]
    horizon: int
    name: str = ""
    protocol: str = "standard"
    text: str = "none"
    unit: str = ""
    published: Mapping[str, float] = {}
    reference: tuple[float, float] | None = None
    num_actions: int | None = None
    action_dim: int | None = None
    action_range: tuple[Sequence[float], Sequence[float]] | None = None
    observation_range: tuple[Sequence[float], Sequence[float]] | None = None
    observation_parts: Sequence[tuple[str, int]] = ()
    categorical: Mapping[str, Any] | None = None
    action_parts: Sequence[int] = ()
    groups: np.ndarray | None = None
    clusters: np.ndarray | None = None
    facts: Mapping[str, Mapping[str, Any]] = {}
    world_options: Sequence[str] = ()

    @property
    def action_masks(self) -> np.ndarray | None:
        return None

    @property
    def text_label(self) -> str:
        """The text option for results; `episode` where the tasks are texts of the environment."""
        return "episode" if self.text == "none" and any(self.tasks) else self.text

    @abstractmethod
    def reset(self, seed: int) -> np.ndarray:
        """Start N episodes. The same seed starts the same episodes.

        Returns observations (N, S), raw units.
        """
        ...

    @abstractmethod
    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Advance every episode by one step; ended episodes get zero actions and their results are
        ignored.

        Args:
            actions: (N, A) raw units.

        Returns:
            observations (N, S), rewards (N,), terminated (N,) bool, truncated (N,) bool.
        """
        ...

    def outcomes(self) -> dict[str, np.ndarray]:
        """Return facts of the episodes beside the rewards, (N, ...) arrays by name.

        Read once after the last step and kept in `Episode.outcome`.
        """
        return {}

    def notes(self) -> Sequence[str]:
        """Lines for the user after a reset, such as texts of the environment that are not read."""
        return []

    def score(self, episodes: Sequence[Episode]) -> np.ndarray:
        """(M,) score of each episode, a function of the episodes alone: 100 (return - random) /
        (expert - random), or the return where there is no reference."""
        if self.reference is None:
            return np.array([float(e.rewards.sum()) for e in episodes])
        low, high = self.reference
        return np.array([100 * (e.rewards.sum() - low) / (high - low) for e in episodes])

    def conditions(self, execution: str, scripted: bool) -> dict[str, Sequence[int]]:
        """The rows of the results: {protocol label: indices of its episodes}.

        Args:
            execution: `per_agent` or `joint`.
            scripted: the player is a scripted controller, not a policy.
        """
        label = self.protocol
        if label == Env.protocol and self.text_label == "episode":
            label = "task-text"
        return {"scripted" if scripted else label: range(len(self.tasks))}

    def metrics(self, episodes: Sequence[Episode]) -> Json:
        """Further columns of a result row, JSON values. One whose name ends with `_score` is a
        column of the report too, the mean over seeds."""
        return {}

    def draw(self, episodes: Sequence[Episode], title: str) -> Figure | None:
        """A matplotlib figure of these episodes, or None."""
        return None

    def baselines(self, seed: int) -> dict[str, Begin]:
        """Scripted players to compare with: {name: tasks -> player}."""
        return {}

    def probe(self, policy: Any) -> Json:
        """Further columns of the result rows of a trained `Policy` that need no rollout, JSON
        values. A value with the keys rows, columns and shares is drawn as a heat map."""
        return {}

    def target_returns(self, info: Json, quantile: float) -> np.ndarray | None:
        """(N,) target returns of this quantile of similar training episodes; None: one target for
        all, from the run.

        Args:
            info: the training dataset's info, as in run.json.
            quantile: within 0 .. 1.
        """
        return None


class Distribution(Protocol):
    """A distribution over actions, in the model's units: continuous actions within -1 .. 1,
    discrete ones as an index.
    """

    def log_prob(self, actions: torch.Tensor) -> torch.Tensor:
        """(B, T, A) -> (B, T) log-probability, or log-density, in nats."""
        ...

    @property
    def mode(self) -> torch.Tensor:
        """(B, T, A) most likely actions."""
        ...

    @property
    def mean(self) -> torch.Tensor:
        """(B, T, A) mean actions; of discrete actions the mode."""
        ...

    def sample(self, generator: torch.Generator | None = None) -> torch.Tensor:
        """(B, T, A) actions drawn from the distribution."""
        ...


@runtime_checkable
class Head(Protocol):
    """Maps hidden states at observation tokens to a distribution over the next action. A subclass
    of torch.nn.Module.

    Attributes:
        loss_floor: the least negative log-likelihood that its distributions can have, nats an
            action. Scaling laws are fitted to the loss above it, since the zero of a density has no
            meaning.
        entities: which entities of the observation it points at; None: it reads the hidden state
            alone.
    """

    loss_floor: float
    entities: slice | None

    def __call__(
        self,
        hidden: torch.Tensor,
        action_masks: torch.Tensor | None = None,
        entities: torch.Tensor | None = None,
    ) -> Distribution:
        """Distribution over the next action.

        Args:
            hidden: (B, T, D).
            action_masks: (B, T, C) bool or None.
            entities: (B, T, K, E) encodings of those it points at, where its own `entities` is not
                None.
        """
        ...


class Units(Protocol):
    """The members of a `models.normalizer.Normalizer` that an objective uses."""

    def returns_to_go(self, x: torch.Tensor) -> torch.Tensor:
        """Raw returns-to-go (...) in the model's units."""
        ...

    def actions(self, x: torch.Tensor) -> torch.Tensor:
        """Raw actions (..., A) in the model's units."""
        ...


class ActionModel(Protocol):
    """The members of a `models.sequence.SequenceModel` that an objective uses."""

    @property
    def normalizer(self) -> Units: ...

    def distribution(
        self,
        hidden: torch.Tensor,
        action_masks: torch.Tensor | None,
        observations: torch.Tensor | None,
    ) -> Distribution:
        """Distribution over the next action, of hidden states (B, T, D)."""
        ...


class Objective(Protocol):
    """The loss that a model is trained to minimise: a subclass of torch.nn.Module too, whose weights
    are trained with the model's.

    It is built with the width D of the backbone and the spec of the data. Its name is a row of
    `objective` in `choices.py`.

    Attributes:
        condition_on: the value of `model.condition_on` that it needs; None: any.
        predicts_return: whether it learns to predict the return-to-go from the null return token,
            see `predicted`.
    """

    condition_on: str | None = None
    predicts_return: bool = False

    def return_given(self, batch: Batch) -> torch.Tensor | None:
        """(B,) bool, rows that are read with their returns, the others with the null return token;
        None: all.
        """
        return None

    @abstractmethod
    def loss(
        self, model: ActionModel, batch: Batch, hidden: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """The terms of the loss, whose sum is minimised.

        Args:
            model: gives the distribution over actions, and the normaliser of its units.
            batch: raw units.
            hidden: (B, T, D) at the observations.

        Returns:
            Means over steps, scalars; `nll`, the negative log-likelihood of the actions, is one of
            them.
        """
        ...

    def predict_return(self, hidden: torch.Tensor) -> torch.Tensor:
        """The predicted return-to-go in the model's units (...), of hidden states (..., D) of the
        null return token.
        """
        raise NotImplementedError

    def after_step(self, total: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Called after each step of training. total: sums a tensor over all processes."""
        return None


@dataclass(frozen=True)
class Transitions:
    """n training steps that a planner is fitted to, in the model's units, rewards raw.

    Attributes:
        observations: (n, S).
        actions: (n, A).
        rewards: (n,).
        ended: (n,) 1 where the task ended the episode after this row.
        pairs: (m,) rows that are followed by the next row.
        text: (n,) the row of `codes` that is the text's.
        codes: (U, K) of the texts, see `Planner.text_codes`; (U, 0) where no text is read.
    """

    observations: torch.Tensor
    actions: torch.Tensor
    rewards: torch.Tensor
    ended: torch.Tensor
    pairs: torch.Tensor
    text: torch.Tensor
    codes: torch.Tensor

    def states(self, rows: torch.Tensor) -> torch.Tensor:
        """Observations of these rows, and the codes of their texts, (..., S + K)."""
        import torch

        return torch.cat([self.observations[rows], self.codes[self.text[rows]]], -1)


class Planner(Protocol):
    """Values plans in a model of the world that is fitted to the log before training; each plan
    holds one candidate action for some steps. A subclass of torch.nn.Module too.

    It is built with the spec of the data. Its name is a row of `planner` in `choices.py`. A state
    is an observation with K numbers of its text, (..., S + K), in the model's units.

    Attributes:
        candidates: (C, A) actions, in the model's units.
        horizon: steps of a plan, unless `act.planning_horizon` says others.
        least_value: where the best plan has less value, the policy acts without a plan.
    """

    candidates: torch.Tensor
    horizon: int
    least_value: float

    @abstractmethod
    def text_codes(self, texts: Sequence[str]) -> torch.Tensor:
        """The numbers of each text of the data that a state holds, (U, K); a ValueError if it
        cannot read them.
        """
        ...

    @abstractmethod
    def states(self, observations: torch.Tensor, texts: Sequence[str]) -> torch.Tensor:
        """Observations (N, S) with the numbers of their texts, (N, S + K)."""
        ...

    @abstractmethod
    def plan(self, states: torch.Tensor, steps: int) -> torch.Tensor:
        """Values (N, C) of holding each candidate for so many steps; -1: not to be used."""
        ...

    @abstractmethod
    def fit(self, data: Transitions, units: Any, *, seed: int) -> None:
        """Fit it to the training steps. units: the model's `Normalizer`, fitted with the changes."""
        ...


class Decider(Protocol):
    """Turns hidden states into actions: the attribute `decider` of a policy, which may be set."""

    @abstractmethod
    def act(
        self,
        hidden: torch.Tensor,
        masks: torch.Tensor | None,
        observations: np.ndarray,
        tasks: Sequence[str],
        generator: torch.Generator | None,
    ) -> np.ndarray:
        """Choose the next actions of N episodes.

        Args:
            hidden: (N, D) at the current observations.
            masks: (N, C) allowed actions, or None.
            observations: (N, S) current ones, raw units.
            tasks: N task texts.
            generator: of samples; None: torch's own.

        Returns:
            (N, A) actions, raw units.
        """
        ...


@dataclass(frozen=True)
class Logged:
    """Logged episodes end to end, from which policies are judged without a simulator; raw units.

    n steps, E episodes.

    Attributes:
        spec: of the data.
        observations: (n, S).
        actions: (n, A) the logged ones.
        rewards: (n,).
        offsets: (E+1,) episode e is rows offsets[e]:offsets[e+1].
        terminated: (E,) bool, ended by the task.
        held_out: (E,) bool. Estimators are fitted to the other episodes and judge on these.
        tasks: E task texts.
        recorded: (n,) bool, whether the log knows the action.
        action_masks: (n, C) allowed discrete actions; None: all.
        action_log_prob: (n,) log-probability of the logged actions under what chose them, or their
            log-density in raw units; None: the log has no propensities.
        groups: (E,) int; episodes with the same one may be alike, such as the campaigns of a day.
            None: no two are.
    """

    spec: Spec
    observations: np.ndarray
    actions: np.ndarray
    rewards: np.ndarray
    offsets: np.ndarray
    terminated: np.ndarray
    held_out: np.ndarray
    tasks: Sequence[str]
    recorded: np.ndarray
    action_masks: np.ndarray | None = None
    action_log_prob: np.ndarray | None = None
    groups: np.ndarray | None = None

    @property
    def lengths(self) -> np.ndarray:
        """(E,) steps of each episode."""
        return np.diff(self.offsets)

    @property
    def held_out_groups(self) -> np.ndarray:
        """(h,) int, the group of each held-out episode."""
        groups = np.arange(len(self.held_out)) if self.groups is None else self.groups
        of_held_out: np.ndarray = groups[self.held_out]
        return of_held_out

    @property
    def episode(self) -> np.ndarray:
        """(n,) the episode of each step."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)

    @property
    def timesteps(self) -> np.ndarray:
        """(n,) from 0 within the episode."""
        steps: np.ndarray = np.arange(len(self.rewards)) - self.offsets[self.episode]
        return steps


@dataclass(frozen=True)
class Candidate:
    """A policy that is judged from a log.

    Attributes:
        name: in tables.
        actions: (n, A) its own action at each logged step, given the logged history, raw units.
        begin: starts a player of N episodes, given their task texts.
        log_prob: (n,) log-probability, or log-density in raw units, of the logged actions under the
            policy; None: it does not draw its actions from a distribution.
    """

    name: str
    actions: np.ndarray
    begin: Begin
    log_prob: np.ndarray | None = None


@dataclass(frozen=True)
class Estimate:
    """The estimated mean return of a policy with its 95 % interval over held-out episodes, raw
    reward units. note: what a reader must know beside the number; empty: nothing."""

    value: float
    low: float
    high: float
    note: str = ""


class Estimator(Protocol):
    """Estimates the mean return of a policy from a log.

    Its name is a row of `estimator` in `estimates/choices.py`. It is built with the log (`Logged`), the
    discount of a step and a seed, fits there what all policies share, and raises a ValueError for a
    log that it cannot use.
    """

    @abstractmethod
    def estimate(self, candidate: Candidate) -> Estimate:
        """The estimate of one policy."""
        ...


@dataclass(frozen=True)
class Source:
    """The result of a dataset reader: the spec of the data, its episodes, and its description.

    Attributes:
        spec: sizes and action space.
        episodes: one pass over the episodes; it need not fit in memory twice.
        info: JSON values that a result must report: the `name`, required of a reader, and env,
            options, seed.
        facts: what task texts are made of, {task text: {fact: value}}, see `datasets.store`; JSON
            values, no part of a result.
    """

    spec: Spec
    episodes: Iterable[Episode]
    info: Json = field(default_factory=dict)
    facts: dict[str, Json] = field(default_factory=dict)
