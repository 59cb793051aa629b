"""The schema of an ablation: arms that differ in a few keys, what is measured of them, and what they must show."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from cdrmix.config.section import NonNegativeInt, PositiveInt, Section, Text


class Arm(Section):
    """One way to run the file: itself with these overrides, written as on the command line."""

    says: Text = "as the file says"  # what is other here, in words
    set: list[Text] = []  # key.path=value


class Demand(Section):
    """Bounds for a measurement of an arm, or for a difference of two.

    It holds where the whole 95 % interval over seeds lies within the bounds (see reason/experiments/table.py).
    """

    arm: Text
    of: Text  # a measurement, such as accuracy@64
    minus_arm: Text | None = None  # null with minus_of: the same arm
    minus_of: Text | None = None  # null with minus_arm: the same measurement
    times: float = 1.0  # what is taken away is multiplied by it
    at_least: float | None = None
    at_most: float | None = None

    @property
    def is_difference(self) -> bool:
        return self.minus_arm is not None or self.minus_of is not None


class Tracking(Section):
    """State tracking (experiment tracking): one sequence of group elements, read at every prefix."""

    task: Literal["parity", "s3", "s5"] = "parity"
    tokens: PositiveInt = 32  # the longest word in training
    lengths: Annotated[list[PositiveInt], Field(min_length=1)] = [32, 64, 256]
    last: PositiveInt = 8  # positions at the end of a word that are counted


class Ablation(Section):
    """Arms x seeds, each trained and measured by `experiment`; a table; demands that hold or do not."""

    row: Text  # of the table of ablations: which claim is tested
    shows: Text  # the claim, a sentence
    experiment: Literal["plasticity", "acceptance", "token_memory", "operations", "tracking"]
    arms: Annotated[dict[Text, Arm], Field(min_length=1)]
    seeds: Annotated[list[NonNegativeInt], Field(min_length=1)] = [1, 2, 3]
    chunks: Annotated[list[PositiveInt], Field(min_length=1)] = [4, 64, 256]  # of the episodes that are measured
    episodes: PositiveInt = 256  # that are measured, at each number of chunks
    difficulty: dict[Text, bool | int | float | Text] = {}  # what is other in them (plasticity: in harder ones)
    harder_chunks: list[PositiveInt] = []  # of the harder episodes of plasticity
    tracking: Tracking = Field(default_factory=Tracking)
    demands: list[Demand] = []
