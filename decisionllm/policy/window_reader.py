"""The input of a policy: the windows of N histories, the returns they are conditioned on, and the
hidden states of the model.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from decisionllm.datasets.windows import (
    collate,
    concatenate_histories,
    cut_windows,
    deduplicate_texts,
    window_start,
)
from decisionllm.models.sequence import SequenceModel
from decisionllm.policy.buffer import check_sizes, fill_targets
from decisionllm.protocols import Decider
from decisionllm.schema import Batch, History, Spec, Window


@dataclass
class WindowReader:
    """A trained model, which steps of an episode it reads, and who decides on what it read.

    `Policy` is one, and its sessions hold it.

    Attributes:
        model: the trained model.
        window: T, the most steps it reads.
        stride: old steps that leave a full window at once, 1 .. window.
        target_return: unless a history has its own, raw reward units; None: the predicted maximum
            return.
        return_horizon: the target is the return of this many next steps and stays constant; 0: it
            is the return of the whole episode, and received rewards are subtracted.
        device: of the model.
        generator: of samples and orders.
        decider: turns hidden states into actions.
    """

    model: SequenceModel
    window: int
    stride: int
    target_return: float | None
    return_horizon: int = 0
    device: str = "cpu"
    generator: torch.Generator | None = None
    decider: Decider = field(init=False, repr=False)

    @property
    def spec(self) -> Spec:
        """The spec of the data that the model was trained on."""
        return self.model.spec

    @property
    def return_conditioned(self) -> bool:
        """Return whether the model reads a return-to-go."""
        return self.model.tokenizer.returns is not None

    def read(self, histories: Sequence[History]) -> tuple[Tensor, np.ndarray]:
        """Hidden states at the last observations (N, D), and the return-to-go that each is
        conditioned on (N,).
        """
        batch, last = self.batch(histories)
        each = torch.arange(len(histories))
        returns = batch.returns_to_go[each, last]
        return self.model.read(batch)[each, last], returns.cpu().numpy()

    def batch(self, histories: Sequence[History]) -> tuple[Batch, Tensor]:
        """The windows of N histories as a batch, and the place of the last observation in each
        (N,).
        """
        batch, last, predicted = self.windows(histories)
        if not predicted.any():
            return batch, last
        return self.with_predicted(batch, predicted), last

    def with_predicted(self, batch: Batch, rows: Tensor | None = None) -> Batch:
        """A batch with the predicted maximum return in place of the return-to-go, at each step of
        these rows, (B,) bool; None: of all.
        """
        nothing = torch.zeros(len(batch.mask), dtype=torch.bool, device=batch.mask.device)
        returns = self.model.predict_return(self.model.read(batch, nothing))
        if rows is not None:
            returns = torch.where(rows[:, None], returns, batch.returns_to_go)
        return replace(batch, returns_to_go=returns)

    def windows(self, histories: Sequence[History]) -> tuple[Batch, Tensor, Tensor]:
        """The windows of N histories, the place of the last observation in each (N,), and (N,)
        bool: whether the return-to-go is to be predicted, and 0 in the windows.
        """
        check_sizes(self.spec, histories)
        self.check_horizon(max(len(h.observations) for h in histories))
        targets = self.resolve_targets([h.target_return for h in histories])
        predicted = np.isnan(targets)
        known_targets = np.where(predicted, 0, targets)
        steps = concatenate_histories(histories, known_targets, return_horizon=self.return_horizon)
        now = steps.end - steps.first - 1
        start = window_start(now, self.window, self.stride)
        longest = int((now - start).max()) + 1
        window = cut_windows(steps, np.arange(len(histories)), start, longest)
        batch = self.to_batch(window, [h.task for h in histories])
        last = torch.from_numpy(now - start)
        return batch, last, torch.from_numpy(predicted).to(self.device)

    def to_batch(self, window: Window, texts: Sequence[str]) -> Batch:
        """A window of B rows with these texts (B,), on the model's device."""
        read, index = deduplicate_texts(texts)
        return collate(window, self.model.backbone.encode(read), index).to(self.device)

    def on_device(self, masks: np.ndarray | None) -> Tensor | None:
        """Action masks (M, C) as a tensor on the model's device; None without masks."""
        if masks is None:
            return None
        return torch.from_numpy(masks).to(self.device)

    def resolve_targets(self, targets: Sequence[float | None]) -> np.ndarray:
        """Fill in the policy's own target, see `buffer.fill_targets`; a model that reads no return
        needs no target.
        """
        own = self.target_return
        if not self.return_conditioned and own is None:
            own = 0.0
        return fill_targets(targets, own)

    def check_horizon(self, horizon: int) -> None:
        """Raise a ValueError if the model cannot read episodes of this many steps."""
        longest = self.model.spec.horizon
        if self.model.tokenizer.timesteps is not None and horizon > longest:
            raise ValueError(
                f"horizon: expected at most {longest} steps, the longest in training, got {horizon}; "
                "train with tokenizer.timesteps=none to go beyond"
            )
