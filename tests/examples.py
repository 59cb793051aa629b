"""The number of Hypothesis' examples of a test in which one takes long, such as those in Triton's interpreter."""

from __future__ import annotations

from hypothesis import settings

FIXED, RANDOM = 15, 300  # examples of other tests: see conftest.py
MORE = 5  # times as many where they are random: 20 times as many take more than a test's ten minutes


def examples(few: int) -> int:
    """`few` where the examples are fixed, MORE times as many where they are random."""
    return few * (MORE if settings().max_examples > FIXED else 1)
