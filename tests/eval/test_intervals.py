"""95 % intervals against the roots of their definitions and against simulation."""

from __future__ import annotations

import numpy as np
import pytest

from cdrmix.eval.intervals import Z, mean_interval, ratio_interval, score_interval, wilson


@pytest.mark.parametrize(("right", "count"), [(0, 1), (1, 1), (3, 10), (50, 100), (1000, 1000), (0, 300)])
def test_wilson_solves_its_equation(right: int, count: int) -> None:
    """The bounds are the shares p with |right / count - p| = z sqrt(p (1 - p) / count)."""
    share = right / count
    roots = np.roots([1 + Z * Z / count, -(2 * share + Z * Z / count), share * share])
    assert wilson(right, count) == pytest.approx(tuple(sorted(roots.real)), abs=1e-9)


@pytest.mark.parametrize(("right", "count"), [(0, 0), (-1, 3), (4, 3)])
def test_no_share(right: int, count: int) -> None:
    with pytest.raises(ValueError, match="are no share"):
        wilson(right, count)


def test_ratio_of_clusters() -> None:
    """The interval is as wide as the normal one of a ratio of means; one unit has none."""
    draw = np.random.default_rng(1)
    sizes = draw.integers(50, 500, 400).astype(float)
    values = sizes * (2 + 0.3 * draw.standard_normal(400))
    ratio = values.sum() / sizes.sum()
    error = np.sqrt(((values - ratio * sizes) ** 2).sum()) / sizes.sum()
    low, high = ratio_interval(values.tolist(), sizes.tolist())
    assert low is not None
    assert high is not None
    # 2,000 resamples: the quantiles have a standard error of about 0.06 standard errors of the ratio; 4 of them.
    assert low == pytest.approx(ratio - Z * error, abs=0.25 * error)
    assert high == pytest.approx(ratio + Z * error, abs=0.25 * error)
    assert ratio_interval([1.0], [2.0]) == (None, None)
    assert mean_interval([3.0] * 10) == (3.0, 3.0)


def test_few_units_have_no_interval() -> None:
    """Percentile intervals of two units are from the lower to the higher one, which contains the mean in half of all
    samples."""
    assert mean_interval([3.6, 3.8]) == (None, None)
    assert ratio_interval([1.0] * 9, [2.0] * 9) == (None, None)


def test_scores_of_problems() -> None:
    """0.5 is from several samples. Without it the interval is Wilson's, also where all are equal; with it, as wide as
    the normal one: 2,000 resamples give that to about 5 %."""
    assert score_interval([0.0] * 100) == wilson(0, 100)
    assert score_interval([1.0] * 66 + [0.0] * 98) == wilson(66, 164)
    assert score_interval([0.0] * 163 + [0.05]) == wilson(0.05, 164)  # one of 20 samples of one problem
    scores = [1.0] * 40 + [0.5] * 52 + [0.0] * 72
    low, high = score_interval(scores)
    assert low is not None
    assert high is not None
    assert (high - low) / 2 == pytest.approx(Z * np.std(scores) / 164**0.5, rel=0.1)
