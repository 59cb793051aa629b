"""The suite of the linear cross-entropy: its truth, its figures, what is absent, and the smallest runs."""

from __future__ import annotations

import json
from pathlib import Path

import cases
import ce
import pytest
import smallest
import torch
from torch import Tensor
from torch.nn import functional

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CPU = torch.device("cpu")


OPTIONS = cases.Options(Path(), 60.0, 2, "cpu", ())


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what takes seconds: rates of the machine, and a process for every peer."""
    rates = {"bytes_per_second": 1e10, "flops_per_second": 1e11}
    monkeypatch.setattr(ce.machine, "measured_rates", lambda device: rates)
    monkeypatch.setattr(ce.comparison, "peak_in_fresh_process", lambda *_: 7_000_000)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("part", ["training", "forward"])
def test_a_small_case(part: str) -> None:
    shape = ce.Shape(40, 8, 30)
    result = ce.measure(shape, part, OPTIONS)
    assert set(result.peers) == {ce.OURS, ce.PLAIN, ce.CHUNKED}
    names = {"y", "dhidden", "dweight"} if part == "training" else {"y"}
    for found in result.peers.values():
        assert set(found["errors"]) == names
        assert max(found["errors"].values()) < 1e-5
    assert result.absent == {ce.LIGER: "its kernels are for GPUs"}
    assert result.figures["memory_over_plain"] == 1
    assert result.figures["time_over_plain"] > 0
    assert ("error_gradients" in result.figures) == (part == "training")


def test_the_truth_is_pytorch_in_float64() -> None:
    problem = ce.make_problem(ce.Shape(600, 6, 300), CPU, torch.float32)  # more rows and tokens than are sampled
    leaves = [x.double().requires_grad_() for x in (problem.hidden, problem.weight)]
    loss = functional.cross_entropy(leaves[0] @ leaves[1].mT, problem.targets, reduction="sum")
    dhidden, dweight = torch.autograd.grad(loss / 600, leaves)
    wanted: dict[str, Tensor] = {
        "y": loss.detach(),
        "dhidden": dhidden[ce.sample(600, CPU)],
        "dweight": dweight[ce.sample(300, CPU)],
    }
    found = ce.exact(problem)
    for name, x in wanted.items():
        torch.testing.assert_close(found[name], x, rtol=1e-12, atol=1e-13)


@pytest.mark.slow
def test_peak_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A [512, V] chunk and a [V, D] gradient, of 20.5 and 2.6 MB; the plain logits take twice 41 MB and more."""
    monkeypatch.delenv("PYTHONSAFEPATH")  # programs of a suite import one another
    shape = json.dumps({"rows": 1024, "d_model": 64, "vocabulary": 10_000})
    mine, plain = (
        ce.comparison.peak_in_fresh_process(ce.__file__, shape, "training", who) for who in (ce.OURS, ce.PLAIN)
    )
    if mine is None:
        pytest.skip("this system does not tell the peak of a process")
    assert mine < 35e6 < 80e6 < plain


def test_the_smallest_runs_are_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smallest, "LOSSES", [(5, 8, 70, 2), (1, 8, 1, 1)])
    monkeypatch.setenv("CDRMIX_BACKEND", "triton")
    ran = list(smallest.losses(CPU, None))
    assert len(ran) == 2 * 2 * 2
    assert all(finite for _, finite in ran)
