"""The number of Hypothesis' examples of a test in which one takes long, such as those in Triton's interpreter."""

from __future__ import annotations

from hypothesis import settings

FIXED, RANDOM = 15, 300  # examples of other tests: see conftest.py


def examples(few: int) -> int:
    """`few` where the examples are fixed; where they are random, as many times more as other tests have."""
    return few * settings().max_examples // FIXED
