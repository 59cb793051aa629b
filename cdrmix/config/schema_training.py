"""The schema of small sections of `train`: batch warm-up, the profiler and loss scaling."""

from __future__ import annotations

from cdrmix.config.section import PositiveFloat, PositiveInt, Section


class BatchWarmup(Section):
    """Growth of the global batch over the first steps, from fewer rows to train.batch_rows."""

    rows: PositiveInt
    """Rows of the first step. A multiple of micro_batch_rows times the number of processes, below batch_rows."""
    steps: PositiveInt
    """Step from which on the batch has batch_rows rows, counted from 0. Must be below train.steps. Before it, the rows
    grow in proportion to the step, by multiples of the greatest common divisor of `rows` and batch_rows."""


class Profile(Section):
    """Steps that the profiler traces. It writes to profile/ in the run folder."""

    first: PositiveInt = 10
    """First step to trace, counted from the start of this process."""
    steps: PositiveInt = 3
    """Number of steps to trace."""


class LossScale(Section):
    """Dynamic loss scaling of fp16. The scale halves on overflow."""

    initial: PositiveFloat = 65536.0
    """Scale of the first step."""
    interval: PositiveInt = 1000
    """Steps without overflow after which the scale doubles."""
