"""95 % intervals: of a share by Wilson's formula, of means and of ratios of sums by bootstrap."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from cdrmix.confidence import wilson_bounds

RESAMPLES = 2000
# Percentile intervals of the mean of n normal values contain it in 46 % (n = 2), 82 % (5), 90 % (10), 93 % (20) of
# 1,000 samples. So there is none for fewer units.
LEAST_UNITS = 10
Z = 1.959963984540054  # the 97.5 % quantile of the normal distribution


def wilson(right: float, count: int) -> tuple[float, float]:
    """The interval of a share, `right` of `count` independent items (Wilson 1927; it holds for small counts too).

    Raises ValueError unless 0 <= right <= count and count >= 1.
    """
    if count < 1 or not 0 <= right <= count:
        raise ValueError(f"{right} right items of {count} are no share")
    return wilson_bounds(right / count, count, Z)


def score_interval(scores: Sequence[float], seed: int = 0) -> tuple[float | None, float | None]:
    """The interval of the mean of scores from 0 to 1 of independent items.

    By bootstrap, items that have all failed would have an interval without width, and items that have nearly all failed
    one that is too narrow. So it is Wilson's unless at least LEAST_UNITS scores differ from the most frequent one. It
    is then rather too wide: the variance of scores from 0 to 1 with mean p is at most p (1 - p), that of shares.
    """
    most = max(Counter(scores).values(), default=0)
    if (scores and len(scores) - most < LEAST_UNITS) or set(scores) <= {0.0, 1.0}:
        return wilson(sum(scores), len(scores)) if scores else (None, None)
    return mean_interval(scores, seed)


def mean_interval(values: Sequence[float], seed: int = 0) -> tuple[float | None, float | None]:
    """The percentile interval of the mean by bootstrap over independent values; None for few (LEAST_UNITS)."""
    return ratio_interval(values, [1.0] * len(values), seed)


def ratio_interval(above: Sequence[float], below: Sequence[float], seed: int = 0) -> tuple[float | None, float | None]:
    """The percentile interval of sum(above) / sum(below) by bootstrap over pairs, the independent units.

    Units are documents, for example, whose tokens depend on each other. None for fewer than LEAST_UNITS.
    """
    count = len(above)
    if count < LEAST_UNITS:
        return None, None
    pairs = np.stack([np.asarray(above, np.float64), np.asarray(below, np.float64)])
    draw = np.random.default_rng(seed)
    ratios = []
    for _ in range(RESAMPLES):  # one resample at a time, because all of them do not fit for many documents
        sums = pairs[:, draw.integers(0, count, count)].sum(1)
        if sums[1] > 0:
            ratios.append(sums[0] / sums[1])
    if not ratios:
        return None, None
    low, high = np.percentile(ratios, (2.5, 97.5))
    return float(low), float(high)
