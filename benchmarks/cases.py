"""What is measured: the suites by name, and what a case takes and gives."""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Suite -> its module, which holds CASES. Modules are imported when their suite is asked for: the trainer's needs every
# dependency of the package, the kernels' PyTorch and Triton alone.
SUITES = {
    "train": "train",
    "trainer": "trainer",
    "wkv7": "wkv7",
    "scan": "scan",
    "moe": "moe",
    "ce": "ce",
    "aot": "aot",
    "data": "data",
    "plastic": "plastic",
    "memory": "memory",
    "rl": "rl",
}


@dataclass(frozen=True)
class Options:
    """What the command line sets."""

    config: Path
    seconds: float  # of training, of each model, where a case trains for quality; else of preparing peers
    blocks: int  # timings, where a case measures speed
    device: str = "cpu"  # run.device of ours, and where the peers are placed; both train in the configured precision
    without: tuple[str, ...] = ()  # peers to leave out: those whose name contains one of these
    results: Path | None = None  # folder for what a case has to tell beyond its row; None: nowhere


@dataclass(frozen=True)
class Result:
    """Samples of ours and of the peer, paired by position, in `unit`; the ratio is ours / peer.

    peer_name: None, and no samples of it, where no peer was measured.
    figures: further numbers of the measurement. settings: what would have to be equal to compare another row.
    peers: what was measured of each implementation, ours among them. absent: which were not, and why.
    roofline: the least that has to be moved and computed, the machine's rates, and the share of them reached.
    profile: where the time goes.
    """

    unit: str
    peer_name: str | None
    ours: list[float]
    peer: list[float]
    figures: dict[str, float | None] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    peers: dict[str, dict[str, Any]] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    roofline: dict[str, Any] = field(default_factory=dict)
    profile: dict[str, Any] = field(default_factory=dict)


class NotMeasured(Exception):
    """Raised by a case that this machine is too small for; says why."""


@dataclass(frozen=True)
class Case:
    """One measurement, and the devices that it is meant for.

    told_of: whether it is named as not measured, with its targets, where another device is measured.
    """

    measure: Callable[[Options], Result]
    about: str
    devices: tuple[str, ...] = ("cpu", "cuda")
    told_of: bool = False


def cases(suite: str) -> dict[str, Case]:
    """A suite's cases. Raises ImportError where its dependencies are not installed."""
    return importlib.import_module(SUITES[suite]).CASES


def quantiles(samples: list[float]) -> dict[str, float]:
    """p20, p50 and p80 of the samples; one sample is all three."""
    if len(samples) == 1:
        return dict.fromkeys(("p20", "p50", "p80"), samples[0])
    cuts = statistics.quantiles(samples, n=10, method="inclusive")
    return {"p20": cuts[1], "p50": cuts[4], "p80": cuts[7]}
