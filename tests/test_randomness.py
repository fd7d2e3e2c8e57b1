"""Seeds of environments, by hand."""

import numpy as np
import pytest

from decisionllm.randomness import SEED_LIMIT, derive_seeds


def test_small_seeds_start_a_million_apart():
    assert derive_seeds(0, 3).tolist() == [0, 1, 2]
    assert derive_seeds(7, 2).tolist() == [7_000_000, 7_000_001]
    assert derive_seeds(2147, 2).tolist() == [2_147_000_000, 2_147_000_001]
    assert derive_seeds(1, 2, first=1_000_000).tolist() == [2_000_000, 2_000_001]


def test_seeds_of_any_size_are_distinct_and_within_32_bits():
    numbers = [0, 1, 2147, 2148, 4294, 4295, 12345, 20261128, 2**31, 2**32, 2**40, 2**63 - 1]
    seeds = np.concatenate([derive_seeds(seed, 500) for seed in numbers])
    assert len(np.unique(seeds)) == len(seeds)
    assert seeds.min() >= 0 and seeds.max() < SEED_LIMIT
    assert derive_seeds(2**40, 5).tolist() == derive_seeds(2**40, 5).tolist()
    for seed in seeds[::100].tolist():
        np.random.RandomState(seed)  # takes 32 bits alone


def test_seeds_of_logs_stay_above_those_of_evaluations():
    for seed in (0, 2146, 2147, 12345, 2**40):
        assert derive_seeds(seed, 1000, first=1_000_000).min() >= 1_000_000


def test_seeds_stay_below_a_given_end():
    assert derive_seeds(9, 2, end=10_000_000).tolist() == [9_000_000, 9_000_001]
    for seed in (10, 12345, 2**40):
        assert 0 <= derive_seeds(seed, 1000, end=10_000_000).max() < 10_000_000


def test_a_seed_below_0_is_refused():
    with pytest.raises(ValueError, match="seed: expected 0 or more, got -1"):
        derive_seeds(-1, 2)
