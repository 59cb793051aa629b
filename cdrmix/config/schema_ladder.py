"""The schema of a ladder file: the rungs to train in turn, their seeds, the gates between them, and the forecast."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field

from cdrmix.config.loader import load_yaml
from cdrmix.config.section import Below1, Between0And1, PositiveInt, Section, Text


class ForecastSettings(Section):
    """The band of the forecast: L = E + A C^-a with C operations, over a range of exponents a."""

    exponents: tuple[Between0And1, Between0And1] = (0.12, 0.18)
    """Smallest and largest exponent. The middle of the forecast has the exponent 0.154, or the nearest bound."""
    slack: Below1 = 0.01
    """Share of the loss by which the band is widened on both sides."""


class Ladder(Section):
    """A sequence of models of growing size. Each is trained, evaluated and judged before the next one begins."""

    name: Text = "ladder"
    """Name of the ladder in its report."""
    root: Text = "experiments/ladder"
    """Folder of the ladder: its ledger, its runs, its verdicts and its report."""
    rungs: Annotated[list[Text], Field(min_length=1)]
    """Rungs in the order of their operations. A name is a file NAME.yaml beside the ladder file or in configs/ladder. A
    text that ends in .yaml is the path of a configuration."""
    seeds: dict[Text, PositiveInt] = {}
    """Number of seeds of a rung, by its name; the first is run.seed of its configuration. Other rungs have one."""
    set: list[Text] = []
    """Overrides of every rung, each key.path=value."""
    suites: list[Text] = []
    """Suites of `cdrmix eval --suite` that measure each rung, for the gates of tasks."""
    gates: Literal["quick", "standard", "full", "production"] = "full"
    """Preset of gates that a rung must pass before the next one begins."""
    strict: bool = True
    """true: a gate that fails, or that is undecided, stops the ladder. false: it is recorded with `reason`, and the
    ladder goes on."""
    reason: Text | None = None
    """Why gates may fail. Required with `strict: false`."""
    custom_gates: list[Text] = []
    """Gates of plugins (entry points of the group cdrmix.gates) in addition to those of the preset."""
    forecast: ForecastSettings = Field(default_factory=ForecastSettings)


class LadderFile(Section):
    """A ladder file has one section, `ladder`."""

    ladder: Ladder

    @classmethod
    def from_yaml(cls, path: str | Path, overrides: Sequence[str] = ()) -> Self:
        """Reads a ladder file with the files that it inherits from, applies overrides (ladder.key=value), and checks.

        Raises ConfigError with every problem, its file and line, what is allowed and the nearest name.
        """
        return load_yaml(path, overrides, cls)[0]
