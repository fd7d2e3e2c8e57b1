"""A policy that `decisionllm export` wrote, by onnxruntime: nothing here imports torch.

A folder holds policy.onnx (one decision), policy.json (spec, window, targets) and, for a policy
with texts, text.onnx and tokenizer.json. The graph of a decision takes and returns the keys and
values of the window.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from decisionllm.datasets.windows import window_start
from decisionllm.files import check_all, explain_errors
from decisionllm.policy.buffer import (
    ALL,
    EpisodeBuffer,
    Rows,
    check_sizes,
    check_tasks,
    fill_targets,
)
from decisionllm.schema import History, Json, Spec, Targets

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

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
        ValueError: a file is damaged, or another version of the format wrote it.
    """

    def __init__(self, folder: str | Path, *, threads: int = 1) -> None:
        folder = Path(folder)
        with explain_errors(
            "an exported policy needs onnxruntime: pip install onnxruntime",
            ImportError,
            raised=ImportError,
        ):
            import onnxruntime
        for name in FILES:
            if not (folder / name).is_file():
                raise FileNotFoundError(
                    f"{folder}: expected a folder of `decisionllm export`, found no {name}"
                )
        check_all(folder, fix="restore a copy, or export it again")
        self.info: Json = json.loads((folder / "policy.json").read_text(encoding="utf-8"))
        if self.info["format"] != FORMAT:
            got = self.info["format"]
            raise ValueError(
                f"{folder}: expected an export of format {FORMAT}, got {got}; export it again"
            )
        self.return_horizon: int = self.info["return_horizon"]
        self.spec = Spec.of(self.info["spec"])
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads

        def graph(name: str) -> "InferenceSession":
            path = str(folder / name)
            return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

        self.graph = graph("policy.onnx")
        self.inputs = {argument.name for argument in self.graph.get_inputs()}
        self.text_graph = None
        self.tokenizer = None
        if (folder / "text.onnx").is_file():
            from tokenizers import Tokenizer

            self.text_graph = graph("text.onnx")
            self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    @property
    def return_conditioned(self) -> bool:
        """Return whether the policy reads a return-to-go."""
        return "returns_to_go" in self.inputs

    def act(self, histories: Sequence[History]) -> np.ndarray:
        """Return the next actions of N episodes, (N, A) raw units; each window is read afresh."""
        check_sizes(self.spec, histories)
        actions = []
        for h in histories:
            masks = None if h.action_masks is None else h.action_masks[-1:]
            session = self.begin([h.task], len(h.observations), h.target_return)
            session.restore_row(0, h)
            session.observe(h.observations[-1:], None, masks)
            actions.append(session.decide())
        return np.concatenate(actions)

    def begin(
        self,
        tasks: Sequence[str],
        horizon: int,
        target_returns: Targets = None,
    ) -> "ExportedSession":
        """Begin N episodes in lock-step.

        Args:
            tasks: N task texts of equally many tokens; empty: none.
            horizon: most steps of an episode.
            target_returns: one for all or (N,), raw reward units; None: the policy's own.

        Raises:
            ValueError: tasks are one text, or the policy cannot read that many steps or these texts.
        """
        check_tasks(tasks)
        return ExportedSession(self, tasks, horizon, target_returns)

    def check_horizon(self, horizon: int) -> None:
        """Raise a ValueError if the policy cannot read episodes of this many steps."""
        most = self.info["horizon"]
        if most and horizon > most:
            raise ValueError(
                f"horizon: expected at most {most} steps, the longest training episode, got "
                f"{horizon}"
            )

    def resolve_targets(self, targets: Sequence[float | None]) -> np.ndarray:
        """See `buffer.fill_targets`."""
        return fill_targets(targets, self.info["target_return"])

    def read_texts(self, tasks: Sequence[str]) -> np.ndarray:
        """Keys and values of N texts, (R, layers, 2, N, G, L, d) for the R reads of a decision."""
        R, layers, _, _, G, _, d = self.info["cache"]
        if not any(tasks):
            return np.zeros((R, layers, 2, len(tasks), G, 0, d), np.float32)
        if self.text_graph is None or self.tokenizer is None:
            raise ValueError(
                "text: expected none, this policy was trained without task texts; got "
                f"{max(tasks)!r}"
            )
        ids = [self.tokenizer.encode(task, add_special_tokens=False).ids for task in tasks]
        lengths = sorted({len(tokens) for tokens in ids})
        if len(lengths) > 1:
            raise ValueError(
                f"text: expected texts of equally many tokens, got {lengths}; begin a session "
                "for each"
            )
        texts = np.array(ids, np.int64).reshape(len(tasks), -1)
        (cache,) = self.text_graph.run(None, {"text_ids": texts})
        return np.repeat(cache[None], R, 0)


class ExportedSession(EpisodeBuffer):
    """N episodes in lock-step, a `protocols.Player`.

    It has the methods of `session.Session` that bidders use.
    """

    policy: ExportedPolicy

    def __init__(
        self,
        policy: ExportedPolicy,
        tasks: Sequence[str],
        horizon: int,
        target_returns: Targets,
    ) -> None:
        super().__init__(policy, len(tasks), horizon, target_returns)
        self.texts = policy.read_texts(tasks)
        self.cache = self.texts
        self.start = -1  # where the cached window begins
        self.following = 0  # the step to read next
        self.conditioned_on = np.zeros(len(tasks), np.float32)  # the return of the last decision

    def decide(self, rows: Rows = ALL) -> np.ndarray:
        """Actions (N, A) for the current observations, raw units."""
        info, N = self.policy.info, len(self.targets)
        now = int(self.now[0])
        start = int(window_start(now, info["window"], info["stride"]))
        returns = self.returns_to_go()
        if start != self.start:  # the window is read from its first step on
            self.start = start
            self.following = start
            self.cache = self.texts
        for step in range(self.following, now + 1):
            values = {
                "observations": self.observations[:, step],
                "returns_to_go": returns[:, step],
                "timesteps": np.full(N, step, np.int64),
                "previous_actions": self.actions[:, max(step - 1, start) : step],
                "cache": self.cache,
            }
            if self.masks is not None:
                values["action_masks"] = self.masks[:, step]
            inputs = {name: values[name] for name in self.policy.inputs}
            actions, self.conditioned_on, self.cache = self.policy.graph.run(None, inputs)
        self.following = now + 1
        return np.asarray(actions)

    def select(self, rows: Rows) -> None:
        """Continue with these episodes alone: (M,) int or (N,) bool."""
        super().select(rows)
        self.texts = self.texts[:, :, :, rows]
        self.cache = self.cache[:, :, :, rows]
        self.conditioned_on = self.conditioned_on[rows]
