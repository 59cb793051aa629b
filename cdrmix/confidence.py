"""Confidence bounds that evaluations and gates share: Wilson's of a share, and order statistics of quantiles.

Of n independent values at most k - 1 lie below the quantile q with the probability P(Binomial(n, q) <= k - 1), whatever
their distribution (David and Nagaraja, Order Statistics, section 7.1). So the k-th smallest is an upper bound of the
quantile at a confidence of 95 % if this probability is at least 0.95.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from functools import cache

CONFIDENCE = 0.95
MOST_ITEMS = 10**9


def wilson_bounds(share: float, n: int, z: float) -> tuple[float, float]:
    """The score interval of a proportion (Wilson 1927), which holds for small counts too.

    share: in [0, 1]. n: independent items, at least 1. z: the quantile of the normal distribution of each side.
    """
    centre = (share + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * math.sqrt(share * (1 - share) / n + z**2 / (4 * n**2))
    return max(0.0, centre - half), min(1.0, centre + half)


def binomial_cdf(k: int, n: int, p: float) -> float:
    """The probability of at most k successes of n, each with probability p."""
    if k < 0:
        return 0.0
    if k >= n or p == 0:
        return 1.0
    return min(1.0, math.fsum(math.exp(_log_binomial(i, n, p)) for i in range(k + 1)))


@cache
def upper_rank(count: int, share: float, confidence: float = CONFIDENCE) -> int | None:
    """The smallest k for which the k-th smallest of `count` values bounds the quantile `share`; None if none does.

    That is the smallest k <= count with P(Binomial(count, share) <= k - 1) >= confidence. share: above 0 and below 1.
    """
    below = 0.0
    for rank in range(1, count + 1):
        below += math.exp(_log_binomial(rank - 1, count, share))
        if below >= confidence:
            return rank
    return None


def items_for_quantile(above: int, share: float, confidence: float = CONFIDENCE) -> int:
    """The fewest values that show the quantile `share` to be below a limit when `above` of them are above the limit.

    Of the quantile 0.99: 299 with none above, 473 with one.
    """
    counts = range(above + 1, MOST_ITEMS)
    return counts[bisect_left(counts, confidence, key=lambda n: 1 - binomial_cdf(above, n, 1 - share))]


def _log_binomial(k: int, n: int, p: float) -> float:
    """The logarithm of the probability of k successes of n."""
    ways = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
    return ways + k * math.log(p) + (n - k) * math.log1p(-p)
