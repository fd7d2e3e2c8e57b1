"""The unit of continuous actions: their bounds, or the range of the log where bounds are far wider.

A model reads an action as -1 .. 1 of its unit. If the bounds are far too wide, such as -1000 .. 1000
around actions of -1 .. 1, or if one action of the log is 1000, all others are one number to it.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import ArrayLike

from decisionllm.datasets import running_statistics
from decisionllm.datasets.row_blocks import Columns
from decisionllm.datasets.running_statistics import RunningStatistics
from decisionllm.schema import Spec, raise_for_first

FAR = 20  # a range is far wider than another one beyond this multiple of its width
CONSTANT = 1e-3  # distance of its bounds from a number that has one value, as a share of it
TAIL = 0.02  # share of the actions at either end that may be outliers
SAMPLE = 100_000  # actions that their usual range is taken from
BLOCK = 1 << 20  # rows that are read at a time


def action_widths(low: ArrayLike, high: ArrayLike) -> np.ndarray:
    """Return what actions are divided by: the width of their bounds, 1 where it is 0."""
    width = np.subtract(high, low)
    return np.where(width > 0, width, 1)


def separate_bounds(
    low: Sequence[float], high: Sequence[float]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return bounds of actions. The bounds of a number with one value are moved a thousandth away
    from it, so that a policy takes nearly this value.
    """
    lows, highs = list(low), list(high)
    for i, (least, most) in enumerate(zip(low, high, strict=False)):
        if least == most:
            lows[i] = least - CONSTANT * max(abs(least), 1)
            highs[i] = most + CONSTANT * max(abs(most), 1)
    return tuple(lows), tuple(highs)


def bound_tolerance(low: ArrayLike, high: ArrayLike) -> np.ndarray:
    """Return the distance by which an action may exceed its bounds, as by rounding."""
    rounding = 1e-6 * np.maximum(np.abs(low), np.abs(high))
    width = np.subtract(high, low)
    return np.where(width > 0, 1e-4 * width, rounding)


def recorded_actions(columns: Columns) -> Iterator[np.ndarray]:
    """Yield the recorded actions of a store's columns, blocks (m, A)."""
    actions = columns["actions"]
    weight = columns.get("action_weight")
    for start in range(0, len(actions), BLOCK):
        rows = slice(start, start + BLOCK)
        yield actions[rows] if weight is None else actions[rows][weight[rows] > 0]


def measure_recorded_actions(columns: Columns) -> RunningStatistics:
    """Return the moments of the recorded actions of a store's columns."""
    actions = RunningStatistics()
    for block in recorded_actions(columns):
        actions.add(block)
    return actions


def is_far_wider(spec: Spec, actions: RunningStatistics) -> np.ndarray:
    """Return which numbers of an action have bounds that are far wider than their range, (A,) bool.

    A number that never changes has the range of its size, at least that of -1 .. 1.
    """
    varies = running_statistics.is_varying(actions.mean, actions.deviation)
    constant = 2 * np.maximum(np.abs(actions.mean), 1)
    width_in_log = np.where(varies, np.subtract(actions.high, actions.low, dtype=float), constant)
    return np.asarray(np.subtract(spec.high, spec.low, dtype=float) > FAR * width_in_log)


def action_units(spec: Spec, actions: RunningStatistics) -> tuple[np.ndarray, np.ndarray]:
    """Return the least and the greatest action of a model's unit, (A,) each, within the bounds.

    These are the bounds, and the range of the log where the bounds are far wider.
    """
    is_wide = is_far_wider(spec, actions)
    low = np.where(is_wide, actions.low, spec.low)
    return low, np.where(is_wide, actions.high, spec.high)


def describe_faults(spec: Spec, columns: Columns) -> list[str]:
    """Return the faults of the continuous actions of a store; see `data_quality.list_faults`.

    Raises:
        ValueError: float32 cannot hold the width of a range.
    """
    if spec.num_actions:
        return []
    actions = measure_recorded_actions(columns)
    low, high = action_units(spec, actions)
    too_wide = high - low > np.finfo(np.float32).max
    message = "actions: expected a range whose width float32 can hold, got {} .. {}; divide them"
    raise_for_first("", too_wide, message, low, high)
    faults = []
    for i in np.flatnonzero(is_far_wider(spec, actions)):
        log_range = f"{actions.low[i]:.3g} .. {actions.high[i]:.3g}"
        faults.append(
            f"action [{i}]: bounds {spec.low[i]:.3g} .. {spec.high[i]:.3g} are far wider than the "
            f"actions of the log, {log_range}, which a policy is scaled to and stays within; give the "
            "bounds that are used (dataset.low and dataset.high, or Spec)"
        )
    varies = running_statistics.is_varying(actions.mean, actions.deviation)
    narrow = 3 * CONSTANT * np.maximum(np.abs(actions.mean), 1)
    constant = np.flatnonzero(~varies & (np.subtract(spec.high, spec.low) < narrow))
    if len(constant):
        faults.append(
            f"action {constant.tolist()}: the same number at every step; a policy takes nearly the "
            "same, unless you give wider bounds (dataset.low and dataset.high, or Spec)"
        )
    return faults + _describe_outliers(columns, actions)


def _describe_outliers(columns: Columns, actions: RunningStatistics) -> list[str]:
    """Return the fault of single actions that are far from all others."""
    step = max(actions.count // SAMPLE, 1)
    blocks = [block[::step] for block in recorded_actions(columns)]
    sample = np.sort(np.concatenate(blocks), axis=0).astype(float)
    tail = max(int(TAIL * len(sample)), 1)
    if len(sample) <= 2 * tail:
        return []
    low, high = sample[tail], sample[-1 - tail]
    width = high - low
    is_wide = np.subtract(actions.high, actions.low, dtype=float) > FAR * width
    varies = width > 1e-6 * (1 + np.maximum(np.abs(low), np.abs(high)))
    faults = []
    for i in np.flatnonzero(is_wide & varies):
        count = 0
        for block in recorded_actions(columns):
            above = block[:, i] > high[i] + width[i]
            count += int((above | (block[:, i] < low[i] - width[i])).sum())
        log_range = f"{actions.low[i]:.3g} .. {actions.high[i]:.3g}"
        faults.append(
            f"action [{i}]: {count:,} of {actions.count:,} are far from all others, which are "
            f"within {low[i]:.3g} .. {high[i]:.3g}, a small part of {log_range} to a policy; clip them "
            "(dataset.clip=true with dataset.low and dataset.high, or np.clip), or leave them out"
        )
    return faults
