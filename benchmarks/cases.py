"""The suites by name, and the arguments and the result of a case."""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Suite -> its module, which holds CASES. Modules are imported when their suite is asked for: the trainer's needs every
# dependency of the package, the kernels' only PyTorch and Triton.
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
    "prediction": "prediction",
}


@dataclass(frozen=True)
class Options:
    """The options of the command line."""

    config: Path
    seconds: float  # of training, for each model, in a case of quality; else the time to prepare peers
    blocks: int  # timings, where a case measures speed
    device: str = "cpu"  # run.device of ours, and the peers' device; both train in the configured precision
    without: tuple[str, ...] = ()  # peers to leave out: those whose name contains one of these
    results: Path | None = None  # folder for results of a case besides its row; None: they are not written
    model: Path | None = None  # folder of a trained model, for cases that need one


@dataclass(frozen=True)
class Result:
    """Samples of ours and of the peer, paired by position, in `unit`; the ratio is ours / peer.

    peer_name: None, without samples, if no peer was measured.
    figures: further results. settings: two rows are comparable if these are equal.
    peers: results by implementation, ours included. absent: which were not measured, and why.
    roofline: the least bytes and operations, the machine's rates, and the share of them that was reached.
    profile: time by part.
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
    """Raised by a case for which this machine is too small; the message gives the reason."""


@dataclass(frozen=True)
class Case:
    """One measurement, and the devices for which it is meant.

    told_of: whether it is listed as not measured, with its targets, when another device is measured.
    """

    measure: Callable[[Options], Result]
    about: str
    devices: tuple[str, ...] = ("cpu", "cuda")
    told_of: bool = False


def cases(suite: str) -> dict[str, Case]:
    """A suite's cases. Raises ImportError if its dependencies are not installed."""
    return importlib.import_module(SUITES[suite]).CASES


def quantiles(samples: list[float]) -> dict[str, float]:
    """p20, p50 and p80 of the samples; one sample is all three."""
    if len(samples) == 1:
        return dict.fromkeys(("p20", "p50", "p80"), samples[0])
    cuts = statistics.quantiles(samples, n=10, method="inclusive")
    return {"p20": cuts[1], "p50": cuts[4], "p80": cuts[7]}
