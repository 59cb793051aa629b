"""The schema of an ablation: arms that differ in a few keys, measurements, and demands on the results."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from cdrmix.config.section import NonNegativeInt, PositiveInt, Section, Text


class Arm(Section):
    """One variant of the file: the file with these overrides."""

    says: Text = "as the file says"
    """Description of what differs in this arm."""
    set: list[Text] = []
    """Overrides of the arm, each key.path=value."""


class Demand(Section):
    """Bounds for a measurement of an arm, or for a difference of two.

    It holds where the whole 95 % interval over seeds lies within the bounds (see reason/experiments/table.py).
    """

    arm: Text
    """Arm that is measured."""
    of: Text
    """Name of the measurement, such as accuracy@64."""
    minus_arm: Text | None = None
    """Arm to subtract. null together with minus_of: the same arm."""
    minus_of: Text | None = None
    """Measurement to subtract. null together with minus_arm: the same measurement."""
    times: float = 1.0
    """Factor on the subtracted value."""
    at_least: float | None = None
    """Smallest mean that satisfies the demand."""
    at_most: float | None = None
    """Largest mean that satisfies the demand."""

    @property
    def is_difference(self) -> bool:
        return self.minus_arm is not None or self.minus_of is not None


class Tracking(Section):
    """State tracking (experiment: tracking): the product of a sequence of group elements, predicted at each prefix."""

    task: Literal["parity", "s3", "s5"] = "parity"
    """Group whose elements are multiplied."""
    tokens: PositiveInt = 32
    """Longest sequence in training."""
    lengths: Annotated[list[PositiveInt], Field(min_length=1)] = [32, 64, 256]
    """Lengths that are evaluated."""
    last: PositiveInt = 8
    """Positions at the end of a sequence that are counted."""


class Ablation(Section):
    """An ablation: trains each arm with each seed, measures it, prints a table and checks the demands."""

    row: Text
    """Row of the table of ablations: the claim that is tested."""
    shows: Text
    """The claim as a sentence."""
    experiment: Literal["plasticity", "acceptance", "token_memory", "operations", "tracking"]
    """What is trained and measured."""
    arms: Annotated[dict[Text, Arm], Field(min_length=1)]
    """Variants to compare, by name."""
    seeds: Annotated[list[NonNegativeInt], Field(min_length=1)] = [1, 2, 3]
    """Seeds of each arm."""
    chunks: Annotated[list[PositiveInt], Field(min_length=1)] = [4, 64, 256]
    """Numbers of chunks of the episodes that are measured."""
    episodes: PositiveInt = 256
    """Episodes that are measured at each number of chunks."""
    difficulty: dict[Text, bool | int | float | Text] = {}
    """Task parameters that differ in the measured episodes (plasticity: in the harder ones)."""
    harder_chunks: list[PositiveInt] = []
    """Numbers of chunks of the harder episodes of plasticity."""
    tracking: Tracking = Field(default_factory=Tracking)
    demands: list[Demand] = []
    """What the results must show."""
