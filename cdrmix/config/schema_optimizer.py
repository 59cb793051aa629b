"""The schema of the optimizer, the learning-rate schedule, and the groups of parameters with rates of their own."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from cdrmix.config.section import Below1, Fraction, NonNegativeFloat, PositiveFloat, PositiveInt, Section, Text

GroupName = Literal[
    "matrix",
    "projection",
    "expert",
    "embedding",
    "head",
    "vector",
    "low_rank",
    "router",
    "convolution",
    "decay_bias",
]


def named(section: object) -> object:
    """The section of a kind that is written alone, as in `optimizer: muon`."""
    return {"kind": section} if isinstance(section, str) else section


class Optimizer(Section):
    """The optimizer. The other keys are those of muon: orthogonalised momentum for matrices, AdamW for the rest.

    Muon (https://kellerjordan.github.io/posts/muon) replaces the Nesterov momentum of a matrix by the nearest matrix
    with orthonormal rows or columns. The update is scaled as in arXiv 2502.16982, so that AdamW's learning rate and
    weight decay fit.
    """

    kind: Text = "adamw"
    """adamw, muon, or the name of a plugin's optimizer."""
    experts: bool = True
    """Muon updates the matrices of experts too. false: AdamW does; then Muon costs little also with small batches."""
    momentum: Below1 = 0.95
    """Decay rate of the momentum."""
    scale: PositiveFloat = 0.2
    """Root mean square of an update's elements, for a learning rate of 1. AdamW's is about 0.2."""
    coefficients: Literal["polar_express", "jordan"] = "polar_express"
    """Polynomials of the iteration. polar_express: arXiv 2505.16932, which is more exact. jordan: the constant one of
    the first publication."""
    iterations: PositiveInt = 5
    """Number of iterations."""
    cautious: bool = True
    """Weight decay only of elements that the update makes smaller (arXiv 2411.16085)."""
    iteration_dtype: Literal["fp32", "bf16"] = "fp32"
    """Data type of the iteration's products. bf16 is faster on a GPU, and its updates of nearly equal gradients differ
    by up to 30 %."""


AnOptimizer = Annotated[Optimizer, BeforeValidator(named)]


class Schedule(Section):
    """The learning rate after the warmup, as a share of the peak, by the step."""

    kind: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """cosine, linear: decay from the end of the warmup to the last step. wsd: constant until the decay. constant: no
    decay."""
    decay: Annotated[float, Field(gt=0, le=1)] = 0.2
    """wsd: length of the decay, as a share of the steps."""
    shape: Literal["linear", "sqrt"] = "sqrt"
    """wsd: shape of the decay. sqrt: 1 - sqrt of the decay's finished share (arXiv 2405.18392)."""
    final_ratio: Fraction | None = None
    """Share at the end of the decay. null: train.final_learning_rate_ratio."""


ASchedule = Annotated[Schedule, BeforeValidator(named)]


class ParameterGroup(Section):
    """Settings of the parameters of a kind."""

    rate: PositiveFloat = 1.0
    """Multiplier of the learning rate."""
    weight_decay: NonNegativeFloat | None = None
    """Weight decay. null: train.weight_decay for projections and experts, and 0 for all others."""
    schedule: ASchedule | None = None
    """A schedule of their own. null: train.schedule."""
