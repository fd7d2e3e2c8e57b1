"""A continuous action <-> one integer a dimension: K bins with centres from -1 to 1, so that both bounds are exact."""

from torch import Tensor


def encode(actions: Tensor, num_bins: int) -> Tensor:
    """The nearest bin of each number, the last one beyond the bounds: (..., A) within -1 .. 1 -> (..., A) long."""
    return ((actions.clamp(-1, 1) + 1) / 2 * (num_bins - 1)).round().long()


def decode(bins: Tensor, num_bins: int) -> Tensor:
    """The centre of each bin: (..., A) long -> (..., A) float, at most half a bin from the encoded number."""
    return bins / (num_bins - 1) * 2 - 1


def width(num_bins: int) -> float:
    """Distance between the centres of neighbouring bins."""
    return 2 / (num_bins - 1)
