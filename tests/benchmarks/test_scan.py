"""The suite of the SSD scan: every peer is right, its figures, and the smallest runs."""

from __future__ import annotations

from pathlib import Path

import cases
import pytest
import scan
import scan_peers
import smallest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CPU = torch.device("cpu")


SHAPE = scan.Shape(2, 128, 1, 2, 16, 8)


@pytest.mark.parametrize(
    "who", [scan_peers.OURS, scan_peers.NAIVE, "PyTorch, chunks, dual form", "PyTorch, chunks, our reference"]
)
def test_every_implementation_computes_the_same(who: str) -> None:
    found, _ = scan_peers.implementations("cpu", SHAPE.length, False, False)
    errors = scan.Runner(found[who], scan.make_problem(SHAPE, CPU, torch.float32), "training").errors()
    assert set(errors) == {"y", "dq", "dk", "dv", "dlog_decay"}
    assert max(errors.values()) < 2e-6  # the bar of the suite


def test_who_cannot_take_a_problem_is_absent_with_a_reason() -> None:
    packed, absent = scan_peers.implementations("cpu", 128, True, False)
    assert scan_peers.NAIVE not in packed
    assert absent[scan_peers.NAIVE] == "has no packed documents"
    long, absent = scan_peers.implementations("cpu", 4096, False, False)
    assert scan_peers.NAIVE not in long
    assert "every token" in absent[scan_peers.NAIVE]


def test_a_case_has_its_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {"bytes_per_second": 1e10, "flops_per_second": 1e11}
    monkeypatch.setattr(scan.machine, "measured_rates", lambda device: rates)
    monkeypatch.setattr(scan.comparison, "peak_in_fresh_process", lambda *_: 7_000_000)
    result = scan.measure(SHAPE, "training", cases.Options(Path(), 60.0, 2, "cpu", ("fla",)))
    assert {"speed_over_naive", "speed_over_chunked", "memory_over_naive", "error_gradients"} <= set(result.figures)
    assert result.figures["memory_over_naive"] == 1.0


def test_retention_decays_are_fixed() -> None:
    shape = scan.Shape(1, 4, 2, 2, 8, 8, fixed=True)
    decays = scan.make_problem(shape, CPU, torch.float32).inputs[3]
    torch.testing.assert_close(decays[0, 3].exp(), torch.tensor([1 - 2.0**-5, 1 - 2.0**-6]))


def test_the_smallest_run_is_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CDRMIX_BACKEND", "cpu")
    assert all(finite for _, finite in smallest.scans(CPU, None))
