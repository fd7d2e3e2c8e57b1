"""A continuous action <-> one integer a dimension: K bins whose middles run from -1 to 1, so that both bounds are exact."""


def encode(actions, num_bins):
    """The nearest bin of each number; beyond the bounds, the last. (..., A) within -1 .. 1 -> (..., A) long"""
    return ((actions.clamp(-1, 1) + 1) / 2 * (num_bins - 1)).round().long()


def decode(bins, num_bins):
    """The middle of each bin: (..., A) long -> (..., A) float, at most half a bin from what was encoded."""
    return bins / (num_bins - 1) * 2 - 1


def width(num_bins):
    return 2 / (num_bins - 1)
