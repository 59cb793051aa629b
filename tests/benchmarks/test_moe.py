"""The suite of the mixture of experts: its truth, its ceiling, what becomes of peers, and the smallest runs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import cases
import moe
import moe_peers
import pytest
import smallest
import torch
from torch.utils.flop_counter import FlopCounterMode

from cdrmix.kernels.moe import reference as reference_moe

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CPU = torch.device("cpu")


SHARES = (("", "_of_dense"), ("backward_", "_of_dense"), ("routing_", ""), ("dispatch_combine_", ""))
OPTIONS = cases.Options(Path(), 60.0, 2, "cpu", ("transformers", "DeepSpeed"))


@pytest.fixture(params=("relu2", "swiglu"))
def shape(request: pytest.FixtureRequest) -> Any:
    return moe.Shape(40, 24, 16, 4, 2, request.param)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what takes seconds: rates of the machine, and a process for every peer."""
    rates = {"bytes_per_second": 1e10, "flops_per_second": 1e11}
    monkeypatch.setattr(moe.machine, "measured_rates", lambda device: rates)
    monkeypatch.setattr(moe.comparison, "peak_in_fresh_process", lambda *_: 7_000_000)


def test_a_small_case(shape: Any, quick: None) -> None:
    result = moe.measure(shape, "training", OPTIONS)
    assert {"cdrmix", "cdrmix, recompute=True", moe.GROUPED, moe.LOOP, moe.DENSE, moe.MOVING} <= set(result.peers)
    assert result.peer_name in (moe.GROUPED, moe.LOOP)
    for who in ("cdrmix", "cdrmix, recompute=True", moe.GROUPED, moe.LOOP):
        assert set(result.peers[who]["errors"]) == {"y", "dx", "dlogits", "dw_up", "dw_down"}
        assert max(result.peers[who]["errors"].values()) < 1e-5
    assert {"ScatterMoE", "SonicMoE", "Liger-Kernel", "MegaBlocks"} <= set(result.absent)
    assert result.absent[moe.DEEPSPEED] in ("left out by --without", "deepspeed not installed")
    figures = result.figures
    seconds = figures["milliseconds"] / 1000
    assert figures["tflops"] == pytest.approx(3 * shape.flops / seconds / 1e12)
    assert figures["speed_over_best_peer"] in (figures["speed_over_loop"], figures["speed_over_grouped_mm"])
    assert min(figures[f"{what}share{of}"] for what, of in SHARES) > 0
    assert figures["peak_megabytes"] == 7
    assert result.settings["threads"] == 1
    assert result.settings["load"] == "even"


def test_saved_bytes_count_x_the_pre_activation_and_indices(quick: None) -> None:
    """d + k F numbers a token, and of each route an index in 8 bytes, twice, and a weight in 4; counts of 8 experts."""
    shape = moe.Shape(64, 32, 16, 8, 2, "relu2")
    mine = moe.measure(shape, "training", dataclasses.replace(OPTIONS, without=(",",))).peers["cdrmix"]
    least = 64 * (32 + 2 * 16) * 4
    assert least <= mine["saved_bytes"] <= least + 64 * 2 * 20 + 8 * 8 * 3


def test_the_forward_pass_needs_no_gradients(shape: Any, quick: None) -> None:
    result = moe.measure(shape, "forward", OPTIONS)
    assert set(result.peers["cdrmix"]["errors"]) == {"y"}
    assert not {"error_gradients", "saved_gigabytes", "backward_share_of_dense"} & set(result.figures)
    assert result.roofline["flops"] == shape.flops


def test_a_wrong_peer_is_told_and_one_that_fails_is_named(
    shape: Any, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = moe_peers.loop(shape.layer)

    def off(x: Any, logits: Any, weights: Any) -> Any:
        return 1.2 * right.call(x, logits, weights)

    def broken(x: Any, logits: Any, weights: Any) -> Any:
        raise RuntimeError("no kernel image is available")

    def peers(device: str, layer: Any) -> tuple[dict[str, Any], dict[str, str]]:
        found = {"cdrmix": moe_peers.ours(layer), "right": right}
        found |= {"off": dataclasses.replace(right, call=off), "broken": dataclasses.replace(right, call=broken)}
        return found | {"unwanted": right}, {"elsewhere": "not for CPUs"}

    monkeypatch.setattr(moe, "implementations", peers)
    result = moe.measure(shape, "training", dataclasses.replace(OPTIONS, without=("unwanted",)))
    assert result.peer_name == "right"
    assert set(result.absent) == {"off", "broken", "unwanted", "elsewhere"}
    assert result.absent["off"].startswith("gives wrong values, so its time means nothing")
    assert result.peers["off"]["errors"]["y"] == pytest.approx(0.2)
    assert "milliseconds" not in result.peers["off"]
    assert result.absent["broken"] == "RuntimeError: no kernel image is available"


def test_what_is_wrong_in_a_gradient_of_the_weights_alone_is_seen(shape: Any) -> None:
    """As when gates and ups are taken for each other on the way back."""
    problem = moe.make_problem(shape, CPU, torch.float32)
    peer = moe_peers.loop(shape.layer)
    upside_down = dataclasses.replace(peer, restore=lambda leaves: (leaves[0].flip(-1), leaves[1]))
    errors = moe.Runner(upside_down, problem, "training").errors()
    assert errors.pop("dw_up") > 0.5
    assert max(errors.values()) < 1e-5


def test_the_truth_is_the_reference_in_float64(shape: Any) -> None:
    problem = moe.make_problem(shape, CPU, torch.float32)
    leaves = [x.double().requires_grad_() for x in (problem.x, problem.logits, problem.w_up, problem.w_down)]
    x, logits, w_up, w_down = leaves
    y = moe.ops.moe_experts(x, w_up, w_down, moe.ops.route_topk(logits, shape.k), activation=shape.activation)
    wanted = [y, *torch.autograd.grad(y, leaves, problem.dy.double())]
    found, part_of = moe.exact(problem, "training")
    for name, whole in zip(moe.NAMES, wanted, strict=True):
        torch.testing.assert_close(found[name], part_of(name, whole.detach()), rtol=1e-12, atol=1e-12)
    assert reference_moe.ACTIVATIONS == ("relu2", "swiglu")


def test_of_large_tensors_a_part_is_compared() -> None:
    chosen = moe.sample(100_000, 512, CPU)
    assert len(chosen) == 512
    assert chosen[0] == 0
    assert chosen[-1] == 99_999
    assert moe.sample(5, 512, CPU).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_arrangement_of_the_weights_comes_back(shape: Any, device: str) -> None:
    problem = moe.make_problem(shape, CPU, torch.float32)
    found, _ = moe_peers.implementations(device, shape.layer)
    everyone = found | dict(moe_peers.sonicmoe(shape.layer)) | dict(moe_peers.deepspeed(shape.layer))
    for implementation in everyone.values():
        w_up, w_down = implementation.restore(implementation.arrange(problem.w_up, problem.w_down))
        assert torch.equal(w_up, problem.w_up)
        assert torch.equal(w_down, problem.w_down)


def test_loads_are_what_they_are_called() -> None:
    shape = moe.Shape(40, 24, 16, 8, 2, "relu2")

    def counts(load: str) -> list[int]:
        logits = moe.make_problem(dataclasses.replace(shape, load=load), CPU, torch.float32).logits
        return torch.bincount(moe_peers.routed(logits, 2)[1].flatten(), minlength=8).tolist()

    assert max(counts("even")) < 30
    assert counts("skewed")[0] == 40  # of 80 routes
    assert counts("empty")[4:] == [0, 0, 0, 0]


def test_the_ceiling_does_the_layers_products(shape: Any) -> None:
    forward, backward = moe.dense(moe.make_problem(shape, CPU, torch.float32))
    for products, flops in ((forward, shape.flops), (backward, 2 * shape.flops)):
        with FlopCounterMode(display=False) as counter:
            products()
        assert counter.get_total_flops() == flops


def test_published_sizes_of_the_reference_shape() -> None:
    shape = moe.GPU_SHAPES["swiglu"]
    assert shape.flops == pytest.approx(3.71e12, rel=1e-3)
    moved, computed = moe.least_work(shape, "training", 2)
    assert computed == 3 * shape.flops
    assert moved < 8.02e9 + 3.67e9  # with what a kernel cannot leave out: rows gathered, and written once more


@pytest.mark.slow
def test_peak_memory_comes_from_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)  # the program finds its neighbours
    shape = json.dumps(dataclasses.asdict(moe.Shape(4096, 64, 256, 4, 2, "relu2")))
    found = moe.comparison.peak_in_fresh_process(moe.__file__, shape, "training", moe.LOOP)
    assert found is None or 4 << 20 < found < 100 << 20  # Z and A are 8 MiB each


def test_the_smallest_runs_are_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CDRMIX_BACKEND", "reference")
    ran = list(smallest.mixtures(CPU, None))
    assert len(ran) == 2 * 2 * 2 * len(smallest.EXPERTS)
    assert all(finite for _, finite in ran), ran
