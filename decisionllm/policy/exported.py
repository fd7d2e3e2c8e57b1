"""A policy that `decisionllm export` wrote, by onnxruntime: nothing here imports torch.

A folder holds policy.onnx (one decision), policy.json (spec, window, targets) and, for a policy with texts, text.onnx and
tokenizer.json. The graph of a decision takes and returns the keys and values of the window.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from decisionllm.datasets.windows import rollout_returns_to_go, window_start
from decisionllm.schema import History, Spec

FORMAT = 1  # of the folder
FILES = ("policy.onnx", "policy.json")


class ExportedPolicy:
    """A policy in an exported folder, with `act` and `begin` of `policy.Policy`.

    Args:
        folder: that `decisionllm export` wrote.
        threads: of onnxruntime.

    Attributes:
        info: what policy.json holds.
        spec: of the data that the policy was trained on.

    Raises:
        ImportError: onnxruntime is not installed.
        FileNotFoundError: there is no exported policy.
        ValueError: another version of the format wrote it.
    """

    def __init__(self, folder: str | Path, *, threads: int = 1) -> None:
        folder = Path(folder)
        try:
            import onnxruntime
        except ImportError as error:
            raise ImportError("an exported policy needs onnxruntime: pip install onnxruntime") from error
        if missing := [name for name in FILES if not (folder / name).is_file()]:
            raise FileNotFoundError(f"{folder}: expected a folder of `decisionllm export`, found no {missing[0]}")
        self.info: dict[str, Any] = json.loads((folder / "policy.json").read_text())
        if self.info["format"] != FORMAT:
            raise ValueError(
                f"{folder}: expected an export of format {FORMAT}, got {self.info['format']}; export the run again"
            )
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads

        def graph(name: str) -> Any:
            return onnxruntime.InferenceSession(str(folder / name), options, providers=["CPUExecutionProvider"])

        self.spec, self.graph = Spec.of(self.info["spec"]), graph("policy.onnx")
        self.inputs = {x.name for x in self.graph.get_inputs()}
        self.text_graph = self.tokenizer = None
        if (folder / "text.onnx").is_file():
            from tokenizers import Tokenizer

            self.text_graph, self.tokenizer = graph("text.onnx"), Tokenizer.from_file(str(folder / "tokenizer.json"))

    def act(self, histories: Sequence[History]) -> np.ndarray:
        """The next actions of N episodes, (N, A) raw units; each window is read afresh."""
        sessions = (self.begin([h.task], len(h.observations), h.target_return).restore(h) for h in histories)
        return np.concatenate([session.decide() for session in sessions])

    def begin(self, tasks: Sequence[str], horizon: int, target_returns: Any = None) -> "ExportedSession":
        """Begin N episodes in lock-step.

        Args:
            tasks: N task texts of equally many tokens; empty: none.
            horizon: most steps of an episode.
            target_returns: one for all or (N,), raw reward units; None: the policy's own.

        Raises:
            ValueError: the policy cannot read that many steps or these texts.
        """
        return ExportedSession(self, tasks, horizon, target_returns)

    def read_texts(self, tasks: Sequence[str]) -> np.ndarray:
        """Keys and values of N texts, (R, layers, 2, N, G, L, d) for the R reads of a decision."""
        R, layers, _, _, G, _, d = self.info["cache"]
        if not any(tasks):
            return np.zeros((R, layers, 2, len(tasks), G, 0, d), np.float32)
        if self.text_graph is None or self.tokenizer is None:
            raise ValueError(f"text: expected none, this policy was trained without task texts; got {max(tasks)!r}")
        ids = [self.tokenizer.encode(task, add_special_tokens=False).ids for task in tasks]
        if len(lengths := {*map(len, ids)}) > 1:
            raise ValueError(
                f"text: expected texts of equally many tokens in a session, got {sorted(lengths)}; begin one for each"
            )
        texts = np.array(ids, np.int64).reshape(len(tasks), -1)
        (cache,) = self.text_graph.run(None, {"text_ids": texts})
        return np.repeat(cache[None], R, 0)


class ExportedSession:
    """N episodes in lock-step, a `protocols.Player`, with the methods of `session.Session` that bidders use."""

    def __init__(self, policy: ExportedPolicy, tasks: Sequence[str], horizon: int, target_returns: Any) -> None:
        spec, info, N = policy.spec, policy.info, len(tasks)
        if info["horizon"] and horizon > info["horizon"]:
            raise ValueError(f"horizon: expected at most {info['horizon']} steps, the longest training episode, got {horizon}")
        own = np.nan if info["target_return"] is None else info["target_return"]  # NaN: the predicted maximum return
        self.policy, self.texts, self.now = policy, policy.read_texts(tasks), 0
        self.cache, self.start, self.following = self.texts, -1, 0  # of the window that begins there; the step to read next
        self.targets = np.broadcast_to(np.float64(own if target_returns is None else target_returns), N).copy()
        self.observations = np.zeros((N, horizon, spec.observation_dim), np.float32)
        self.actions = np.zeros((N, horizon, spec.action_dim), np.float32)
        self.rewards = np.zeros((N, horizon))
        self.masks = np.ones((N, horizon, spec.num_actions), bool)
        self.conditioned_on = np.zeros(N, np.float32)  # the return of the last decision

    def act(
        self, observations: np.ndarray, rewards: np.ndarray | None = None, action_masks: np.ndarray | None = None
    ) -> np.ndarray:
        """See `protocols.Player`."""
        self.observe(observations, rewards, action_masks)
        actions = self.decide()
        self.record_action(actions)
        return actions

    def observe(
        self, observations: np.ndarray, rewards: np.ndarray | None = None, action_masks: np.ndarray | None = None
    ) -> None:
        """Take in current observations (N, S), and rewards (N,) of the previous step."""
        if self.now >= self.rewards.shape[1] or not np.isfinite(observations).all():
            raise ValueError(
                f"observations: expected finite numbers and at most {self.rewards.shape[1]} steps, got {observations}"
            )
        self.observations[:, self.now] = observations
        if rewards is not None and self.now:
            self.rewards[:, self.now - 1] = rewards
        if action_masks is not None:
            self.masks[:, self.now] = action_masks

    def restore(self, history: History) -> "ExportedSession":
        """Take over one episode up to its current observation; `decide` is next."""
        self.now = t = len(history.actions)
        self.observations[0, : t + 1], self.actions[0, :t], self.rewards[0, :t] = (
            history.observations,
            history.actions,
            history.rewards,
        )
        if history.action_masks is not None:
            self.masks[0, : t + 1] = history.action_masks
        return self

    def decide(self) -> np.ndarray:
        """Actions (N, A) for the current observations, raw units."""
        info, N, H = self.policy.info, len(self.targets), self.now + 1
        start = int(window_start(self.now, info["window"], info["stride"]))
        totals = rollout_returns_to_go(
            self.rewards[:, :H].ravel(), self.targets, np.arange(N + 1) * H, return_horizon=info["return_horizon"]
        )
        returns = totals.reshape(N, H).astype(np.float32)
        if start != self.start:  # the window is read from its first step on
            self.start, self.following, self.cache = start, start, self.texts
        for step in range(self.following, self.now + 1):
            values = {
                "observations": self.observations[:, step], "returns_to_go": returns[:, step],
                "timesteps": np.full(N, step, np.int64), "action_masks": self.masks[:, step],
                "previous_actions": self.actions[:, max(step - 1, start) : step], "cache": self.cache,
            }  # fmt: skip
            given = {name: value for name, value in values.items() if name in self.policy.inputs}
            actions, self.conditioned_on, self.cache = self.policy.graph.run(None, given)
        self.following = self.now + 1
        return np.asarray(actions)

    def record_action(self, actions: np.ndarray) -> None:
        """Take in the actions (N, A) that were taken at the current step."""
        self.actions[:, self.now] = actions
        self.now += 1

    def select(self, rows: np.ndarray) -> None:
        """Continue with these episodes alone: (M,) int or (N,) bool."""
        self.texts, self.cache = self.texts[:, :, :, rows], self.cache[:, :, :, rows]
        self.observations, self.actions, self.rewards = self.observations[rows], self.actions[rows], self.rewards[rows]
        self.masks, self.targets, self.conditioned_on = self.masks[rows], self.targets[rows], self.conditioned_on[rows]
