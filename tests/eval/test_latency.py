"""The bounds of quantiles by order statistics, against exact sums of the binomial distribution."""

from __future__ import annotations

from fractions import Fraction
from math import comb

import numpy as np
import pytest

from cdrmix.confidence import items_for_quantile, upper_rank
from cdrmix.eval.latency import median_interval, quantile, upper_bound


def exact_rank(count: int, share: Fraction, confidence: Fraction) -> int | None:
    below = Fraction(0)
    for rank in range(1, count + 1):
        below += comb(count, rank - 1) * share ** (rank - 1) * (1 - share) ** (count - rank + 1)
        if below >= confidence:
            return rank
    return None


@pytest.mark.parametrize("count", [1, 5, 6, 58, 59, 298, 299, 472, 473, 700])
def test_ranks_equal_those_of_exact_sums(count: int) -> None:
    for share, confidence in ((Fraction(99, 100), Fraction(19, 20)), (Fraction(1, 2), Fraction(39, 40))):
        assert upper_rank(count, float(share), float(confidence)) == exact_rank(count, share, confidence)


def test_what_a_bound_of_the_99_percent_quantile_needs() -> None:
    """299 requests with none above it, 473 with one."""
    assert [items_for_quantile(above, 0.99) for above in (0, 1)] == [299, 473]
    assert (upper_rank(298, 0.99), upper_rank(299, 0.99)) == (None, 299)
    assert (upper_rank(472, 0.99), upper_rank(473, 0.99)) == (472, 472)
    values = [float(value) for value in np.random.default_rng(1).permutation(473)]
    assert upper_bound(values, 0.99) == 471.0
    assert upper_bound(values[:298], 0.99) is None


def test_quantiles_and_the_interval_of_the_median() -> None:
    values = [float(value) for value in np.random.default_rng(1).permutation(100)]
    assert (quantile(values, 0.5), quantile(values, 0.99), quantile([3.0], 0.99)) == (49.0, 98.0, 3.0)
    assert median_interval(values[:5]) == (None, None)
    assert median_interval([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]) == (1.0, 6.0)  # 1 - 2 / 2^6 = 0.97
    # Of 2,000 samples of 40, at least 95 % have the median 0 inside; four standard deviations are 0.02.
    draws = np.random.default_rng(2).standard_normal((2000, 40))
    inside = [low < 0 < high for low, high in (median_interval(list(row)) for row in draws) if low and high]
    assert np.mean(inside) > 0.95 - 0.02
