"""The rows of each step of stage A: a batch that is constant, or that grows over the first steps (batch warm-up).

All numbers are functions of the step in integers, so they are the same on every machine and after a resume.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Self

from cdrmix.config.section import PositiveInt, Section


class BatchWarmup(Section):
    """Growth of the global batch over the first steps, from fewer rows to train.batch_rows."""

    rows: PositiveInt
    """Rows of the first step. A multiple of micro_batch_rows times the number of processes, below batch_rows."""
    steps: PositiveInt
    """Step from which on the batch has batch_rows rows, counted from 0. Must be below train.steps. Before it, the rows
    grow in proportion to the step, by multiples of the greatest common divisor of `rows` and batch_rows."""


class BatchSizes(NamedTuple):
    """The rows of the global batch by step, counted from 0.

    At step 0 they are `first`, from step `steps` on `rows`, and between on a line, rounded down to a whole number of
    units more than `first`. A unit is the greatest common divisor of `first` and `rows`. Every number of micro-batches
    that divides both divides a unit too, so the batches do not depend on the number of processes.

    rows, first: positive, first <= rows. steps: at least 0; 0: every step has `rows` rows.
    """

    rows: int
    first: int
    steps: int

    @classmethod
    def of(cls, rows: int, warmup: BatchWarmup | None) -> Self:
        """As train.batch_rows and train.batch_warmup say."""
        return cls(rows, rows, 0) if warmup is None else cls(rows, warmup.rows, warmup.steps)

    @property
    def unit(self) -> int:
        """The greatest number of rows that every batch is a multiple of."""
        return math.gcd(self.rows, self.first)

    def at(self, step: int) -> int:
        """The rows of a step. Raises ValueError for a negative step."""
        _check(step)
        if step >= self.steps:
            return self.rows
        return self.first + self.unit * (self._units * step // self.steps)

    def before(self, step: int) -> int:
        """The rows of all steps before a step, in a time that does not grow with the step. Raises as `at`."""
        _check(step)
        growing = min(step, self.steps)
        grown = self.unit * _sum_of_floors(growing, self._units, self.steps) if growing else 0
        return growing * self.first + grown + (step - growing) * self.rows

    def share(self, step: int) -> float:
        """The rows of a step as a share of `rows`. Raises as `at`."""
        return self.at(step) / self.rows

    @property
    def missing(self) -> int:
        """The rows by which the warm-up has fewer than as many steps of `rows` rows."""
        return self.steps * self.rows - self.before(self.steps)

    @property
    def text(self) -> str:
        """The rows of a step for a message, such as "256 rows" or "32 to 256 rows"."""
        return f"{self.first} to {self.rows} rows" if self.steps else f"{self.rows} rows"

    @property
    def _units(self) -> int:
        """The units by which the batch grows."""
        return (self.rows - self.first) // self.unit


def _check(step: int) -> None:
    if step < 0:
        raise ValueError(f"step={step} is negative")


def _sum_of_floors(count: int, slope: int, divisor: int) -> int:
    """The sum of floor(slope * i / divisor) for i from 0 to count - 1, by the Euclidean algorithm.

    count and divisor: positive. slope: at least 0.
    """
    total = offset = 0
    while True:
        total += count * (count - 1) // 2 * (slope // divisor) + count * (offset // divisor)
        slope, offset = slope % divisor, offset % divisor
        last = slope * count + offset
        if last < divisor:
            return total
        # Counts the points below the line from the other axis.
        count, offset, slope, divisor = last // divisor, last % divisor, divisor, slope
