"""Confidence bounds of the gates: of shares, medians, shifts of a median, quantiles; and Holm's correction.

All bounds are one-sided with a confidence of 95 % for independent values. Recorded steps are not quite independent:
neighbours are alike, so bounds of medians and shifts of steps have a lower confidence.

A gate passes where the bound on the bad side of the figure clears the threshold, so a run that is as bad as the
threshold passes in at most 5 % of the cases. All required gates have to pass, and the largest of their errors bounds
that of the preset (an intersection-union test: Berger 1982, Technometrics 24:295). A gate fails where the other bound
misses the threshold; the more gates, the more often one of them does so by chance, so Holm's correction applies to
failing alone.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import cache
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from cdrmix.confidence import CONFIDENCE, binomial_cdf, upper_rank, wilson_bounds

ERROR = 1 - CONFIDENCE
Z = NormalDist().inv_cdf(CONFIDENCE)
LEAST_FOR_MEDIAN = 5  # 2^-5 is below 5 %: of fewer values not even all of them bound the median
EXACT_VALUES = 40  # of both samples: up to here the distribution of U is counted, beyond it is nearly normal


class Bounds(NamedTuple):
    """A figure with its one-sided bounds. They are infinite where there are too few values."""

    value: float
    low: float
    high: float


def wilson(share: float, n: int) -> Bounds:
    """The one-sided bounds of a share, as of `wilson_bounds`."""
    return Bounds(share, *wilson_bounds(share, n, Z))


def share_p_value(share: float, n: int, threshold: float) -> float:
    """The probability of a share at most as large, if the true one is `threshold` (score test, as `wilson`)."""
    deviation = math.sqrt(threshold * (1 - threshold) / n)
    if deviation == 0:
        return 0.0 if share < threshold else 1.0
    return NormalDist().cdf((share - threshold) / deviation)


def normal_p_value(distance: float, error: float) -> float:
    """The probability of a normal figure at most this far above its true value. error: its standard error."""
    if error == 0:
        return 0.0 if distance < 0 else 1.0
    return NormalDist().cdf(distance / error)


def items_for_share(share: float, threshold: float) -> int | None:
    """Items with which this share clears the threshold or misses it; None where it is on the threshold."""
    if share == threshold:
        return None
    return max(1, math.ceil(Z**2 * threshold * (1 - threshold) / (share - threshold) ** 2))


def median_bounds(values: Sequence[float]) -> Bounds:
    """The median with bounds by order statistics (cdrmix.confidence), which assume no distribution."""
    ordered = sorted(values)
    n = len(ordered)
    rank = upper_rank(n, 0.5)
    middle = float(np.median(ordered))
    return Bounds(middle, -math.inf, math.inf) if rank is None else Bounds(middle, ordered[n - rank], ordered[rank - 1])


def median_p_value(values: Sequence[float], threshold: float) -> float:
    """The probability of as many values above the threshold, if it is the median (sign test, as `median_bounds`)."""
    above = sum(value > threshold for value in values)
    return 1 - binomial_cdf(above - 1, len(values), 0.5)


def items_for_median(values: Sequence[float], threshold: float) -> int | None:
    """Values with which the median is decided, if the share above the threshold stays; None where it is a half."""
    share = sum(value > threshold for value in values) / len(values)
    decided = items_for_share(share, 0.5)
    return None if decided is None else max(LEAST_FOR_MEDIAN, decided)


def shift_bounds(later: Sequence[float], earlier: Sequence[float]) -> Bounds:
    """The shift between two samples with bounds (Hodges and Lehmann 1963), the inversion of the Mann-Whitney test."""
    differences = np.sort(np.subtract.outer(np.asarray(later, float), np.asarray(earlier, float)), axis=None)
    n, m = len(later), len(earlier)
    index = bisect_right(range(n * m), ERROR, key=lambda u: _u_cdf(u, n, m)) - 1
    middle = float(np.median(differences))
    if index < 0:
        return Bounds(middle, -math.inf, math.inf)
    return Bounds(middle, float(differences[index]), float(differences[-1 - index]))


def shift_p_value(later: Sequence[float], earlier: Sequence[float], threshold: float) -> float:
    """The probability of as many pairs whose difference is above the threshold, if that is the shift."""
    above = int(np.sum(np.subtract.outer(np.asarray(later, float), np.asarray(earlier, float)) > threshold))
    return 1 - _u_cdf(above - 1, len(later), len(earlier))


def _u_cdf(u: int, n: int, m: int) -> float:
    """The distribution of the Mann-Whitney statistic of samples of n and m values without ties."""
    if u < 0:
        return 0.0
    if n + m > EXACT_VALUES:
        deviation = math.sqrt(n * m * (n + m + 1) / 12)
        return NormalDist().cdf((u + 0.5 - n * m / 2) / deviation)
    counts = _u_counts(n, m)
    return min(1.0, sum(counts[: u + 1]) / math.comb(n + m, n))


@cache
def _u_counts(n: int, m: int) -> tuple[int, ...]:
    """The number of orders of n and m values with each value of U: the coefficients of a Gaussian binomial."""
    counts = [1] + [0] * (n * m)
    for i in range(1, n + 1):  # times (1 - q^(m + i)) / (1 - q^i)
        for u in range(n * m, m + i - 1, -1):
            counts[u] -= counts[u - m - i]
        for u in range(i, n * m + 1):
            counts[u] += counts[u - i]
    return tuple(counts)


def blocks(values: Sequence[float], most: int = 200) -> list[float]:
    """At most `most` medians of neighbouring values, in order. Fewer values are returned as they are."""
    if len(values) <= most:
        return list(values)
    return [float(np.median(block)) for block in np.array_split(np.asarray(values, float), most)]


def holm(p_values: Mapping[str, float], error: float = ERROR) -> frozenset[str]:
    """The names whose hypothesis is rejected, with a probability of at most `error` that any of them is true.

    Holm 1979, Scandinavian Journal of Statistics 6:65: the i-th smallest of m is compared with error / (m - i + 1).
    """
    rejected: set[str] = set()
    for rank, (name, p_value) in enumerate(sorted(p_values.items(), key=lambda pair: pair[1])):
        if p_value > error / (len(p_values) - rank):
            break
        rejected.add(name)
    return frozenset(rejected)
