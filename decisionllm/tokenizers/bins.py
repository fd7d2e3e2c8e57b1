"""A continuous action <-> one integer a dimension: K bins with centres from -1 to 1.

Both bounds are therefore exact.
"""

from torch import Tensor


def encode(actions: Tensor, num_bins: int) -> Tensor:
    """The nearest bin of each number, the last one beyond the bounds.

    Args:
        actions: (..., A), of which -1 .. 1 is encoded.
        num_bins: K.

    Returns:
        (..., A) long.
    """
    share = (actions.clamp(-1, 1) + 1) / 2
    return (share * (num_bins - 1)).round().long()


def decode(bins: Tensor, num_bins: int) -> Tensor:
    """The centres (..., A) of bins (..., A), at most half a bin from the encoded numbers."""
    return bins / (num_bins - 1) * 2 - 1


def bin_width(num_bins: int) -> float:
    """Distance between the centres of neighbouring bins."""
    return 2 / (num_bins - 1)
