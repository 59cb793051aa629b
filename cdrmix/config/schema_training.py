"""The schema of small sections of `train`: batch warm-up, the profiler, loss scaling and steps that are skipped."""

from __future__ import annotations

from cdrmix.config.section import NonNegativeInt, PositiveFloat, PositiveInt, Section


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


class Skip(Section):
    """Steps whose update is not applied. Their rows are not trained on, and faults.jsonl names the steps."""

    nonfinite: NonNegativeInt = 0
    """Most steps in a row that are skipped because the loss or the gradient norm is NaN or infinite. One more ends the
    training with exit code 9. A stopped run can be resumed with another number. The gradients of fp16 may overflow in
    up to 19 steps in a row in any case."""
    spike: PositiveFloat | None = None
    """Skips a step whose loss is above the median of the last 128 losses by more than this many robust standard
    deviations (1.4826 times the median absolute deviation). After 8 in a row the loss has a new level, and the next 64
    losses are not judged. null: no step is skipped for its loss."""
    rollbacks: NonNegativeInt = 0
    """How often a run goes back to its newest checkpoint from before them, after more than `nonfinite` such steps or 8
    spikes in a row. It then trains on the rows after those of the last of these steps. Stage A only."""
