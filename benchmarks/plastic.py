"""The plastic update's cases: a chunk of tokens forward, and forward with backward, compared with LoRA and the loop.

In training both y and the next A have a gradient, as when a later chunk reads this one's updates. As a program,
`python plastic.py SHAPE PASS IMPLEMENTATION`, with the shape as JSON, prints the bytes by which one run raises this
process's memory.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass

import comparison
import machine
import torch
from cases import Options, Result
from comparison import Comparison
from measure import peak_of_process, relative_error
from plastic_peers import LOOP, LORA, OURS, PROJECTION, Implementation, implementations
from torch import Tensor

from cdrmix.kernels.fast_weights import reference as reference_plastic
from cdrmix.ops import fast_weights as plastic

EPILOGUE = "the projection with its low-rank product"
TWO_CALLS = "the same in two products"


@dataclass(frozen=True)
class Shape:
    """Sizes of a measurement: a chunk of tokens for every row of the batch, a projection of d_model to d_model.

    width: of keys; 0: the rank. layered: with the projections of q, k, v, beta. branches: of rates, on one x.
    """

    batch: int
    tokens: int
    d_model: int
    rank: int = 16
    width: int = 0
    rule: str = "delta"
    layered: bool = False
    branches: int = 1


def make_tensors(shape: Shape, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """All possible inputs, and dy and da_next. Rates are from 0 to 1; keys have norm 1, and so have values, because
    Oja's rule needs that as the delta rule needs it of keys."""
    generator = torch.Generator(device).manual_seed(7)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device)

    def unit(*size: int) -> Tensor:
        return torch.nn.functional.normalize(normal(*size), dim=-1)

    B, T, D, r, d = shape.batch, shape.tokens, shape.d_model, shape.rank, shape.width or shape.rank
    branches = (shape.branches,) if shape.branches > 1 else ()
    inner = 2 + r * (1 if shape.width else 2)
    tensors = {
        "x": normal(B, T, D),
        "w": normal(D, D) / D**0.5,
        "b_up": normal(D, r) / r**0.5,
        "a_down": normal(r, D) / D**0.5,
        "w_inner": normal(inner, D) / D**0.5,
        "q": unit(B, T, d),
        "k": unit(B, T, d),
        "v": unit(B, T, r) if shape.rule == "oja" else normal(B, T, r),
        "beta": normal(*branches, B, T).sigmoid(),
        "dy": normal(*branches, B, T, D),
    }
    states = {"a_state": normal(B, r, d), "da_next": normal(*branches, B, r, d)}
    return {name: x.to(dtype) for name, x in tensors.items()} | states


class Runner(comparison.Runner):
    """One implementation on one problem; its outputs besides y have a gradient too."""

    def __init__(self, implementation: Implementation, tensors: dict[str, Tensor], shape: Shape, part: str) -> None:
        dy = tensors["dy"]
        self.implementation, self.rule = implementation, shape.rule
        if "a_state" not in implementation.names and shape.branches > 1:
            dy = dy[0]  # this implementation has no branches
        super().__init__([tensors[name] for name in implementation.names], dy, part)
        self.weights = (self.dy, tensors["da_next"])
        self.outputs: tuple[Tensor, ...] = ()

    def forward(self) -> Tensor:
        tensors = dict(zip(self.implementation.names, self.inputs, strict=True))
        self.outputs = self.implementation.call(tensors, self.implementation.step, self.rule)
        return self.outputs[0]

    def run(self) -> list[Tensor]:
        """y, the next A if there is one, and in training the gradients of the inputs."""
        with torch.set_grad_enabled(self.part == "training"):
            self.forward()
        outputs, self.outputs = self.outputs, ()
        if self.part == "forward":
            return list(outputs)
        return [*outputs, *torch.autograd.grad(outputs, self.inputs, self.weights[: len(outputs)])]

    def errors(self) -> dict[str, float]:
        """Relative error of y, of the next A and of each gradient against the definition in float64."""
        names = self.implementation.names
        doubles = [x.detach().double().requires_grad_(x.requires_grad) for x in self.inputs]
        tensors = dict(zip(names, doubles, strict=True))
        exact = list(self.implementation.call(tensors, reference_plastic.plastic_lora_loop, self.rule))
        labels = ["y", "a_next"][: len(exact)]
        if self.part == "training":
            exact += torch.autograd.grad(exact, doubles, [x.double() for x in self.weights[: len(labels)]])
            labels += [f"d{name}" for name in names]
        found = zip(labels, self.run(), exact, strict=True)
        return {name: relative_error(x.detach(), wanted) for name, x, wanted in found}


def parts(mine: Runner, tensors: dict[str, Tensor]) -> dict[str, Callable[[], object]]:
    """What is timed besides whole implementations: on a GPU the projection, in one kernel and by cuBLAS alone."""
    x, w, b_up = (tensors[name] for name in ("x", "w", "b_up"))
    if not x.is_cuda:
        return {}
    rows = x.flatten(0, 1)
    reads = torch.randn(mine.dy[..., 0].numel() // len(rows), len(rows), b_up.shape[1], device=x.device).to(x.dtype)
    return {
        EPILOGUE: lambda: plastic._plastic_project(rows, w, b_up, reads),
        TWO_CALLS: lambda: reference_plastic.project_forward(rows, w, b_up, reads),
    }


def least_work(shape: Shape, part: str, element: int) -> tuple[int, int]:
    """Least bytes and operations, with `element` bytes a number.

    Forward reads x, the weights, q, k and v and writes y; backward reads dy too and writes a gradient of each.
    Operations: for every token the projection, a read, an update with its correction, and B's product; backward twice.
    """
    rows, d = shape.batch * shape.tokens, shape.width or shape.rank
    written = rows * shape.branches
    weights = shape.d_model * (shape.d_model + shape.rank)
    inputs = rows * (shape.d_model + (0 if shape.layered else 2 * d + shape.rank))
    forward = inputs + weights + written * shape.d_model
    moved = forward if part == "forward" else forward + 2 * (inputs + weights) + written * shape.d_model
    inner = rows * (shape.d_model * (2 * shape.rank + 2) if shape.layered else 0)
    flops = 2 * rows * shape.d_model**2 + 2 * inner + 2 * written * shape.rank * (shape.d_model + 3 * d)
    return moved * element, flops * (1 if part == "forward" else 3)


def measure(shape: Shape, part: str, options: Options) -> Result:
    """One case, on a CPU with one thread."""
    device = torch.device(options.device)
    with comparison.one_thread(device):
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        tensors = make_tensors(shape, device, dtype)
        compared = comparison.compare(
            implementations(shape.layered),
            OURS,
            lambda who, implementation: Runner(implementation, tensors, shape, part),
            options,
            lambda who: comparison.peak_in_fresh_process(__file__, json.dumps(asdict(shape)), part, who),
            lambda mine: parts(mine, tensors),
        )
        bound = machine.roofline(*least_work(shape, part, dtype.itemsize), device, compared.median(OURS))
        return Result(
            **compared.result(),
            figures=figures(compared),
            settings=asdict(shape) | {"pass": part} | comparison.circumstances(tensors["x"]),
            roofline=bound,
        )


def figures(compared: Comparison) -> dict[str, float]:
    """The figures that have targets: our times over others', the loop's over ours; errors of A' are with gradients'."""
    mine = compared.found[OURS]
    result = {"milliseconds": compared.median(OURS)}
    named = {"time_over_lora": LORA, "time_over_projection": PROJECTION}
    result |= {name: compared.ratio(OURS, who) for name, who in named.items() if who in compared.samples}
    result |= compared.speeds({"speed_over_loop": [LOOP]})
    if EPILOGUE in compared.samples:
        result["epilogue_speed_over_two_calls"] = compared.ratio(TWO_CALLS, EPILOGUE)
    result |= comparison.error_figures(mine["errors"])
    if "saved_bytes" in mine:
        result["saved_megabytes"] = mine["saved_bytes"] / 1e6
    if mine["peak_bytes"] is not None:
        result["peak_megabytes"] = mine["peak_bytes"] / 1e6
    return result


def peak(shape: Shape, part: str, who: str) -> int | None:
    """Peak bytes of one run on the CPU without inputs, after a run of 32 tokens that compiles and loads."""
    device = torch.device("cpu")
    with comparison.one_thread(device):
        implementation = implementations(shape.layered)[who]
        small = Shape(**{**asdict(shape), "batch": 1, "tokens": 32})
        Runner(implementation, make_tensors(small, device, torch.float32), small, part).run()
        return peak_of_process(Runner(implementation, make_tensors(shape, device, torch.float32), shape, part).run)


CPU_SHAPES = {
    "cpu_narrow": Shape(1, 512, 1024),
    "cpu_narrow_layer": Shape(1, 512, 1024, layered=True),
    "cpu_wide": Shape(1, 512, 1024, width=1024),
    "cpu_wide_layer": Shape(1, 512, 1024, width=1024, layered=True),
    "cpu_narrow_hebb": Shape(1, 512, 1024, rule="hebb"),
    "cpu_wide_hebb": Shape(1, 512, 1024, width=1024, rule="hebb"),
    "cpu_wide_oja": Shape(1, 512, 1024, width=1024, rule="oja"),
    "cpu_branches": Shape(1, 512, 1024, branches=3),
}
GPU_SHAPES = {
    "narrow": Shape(8, 512, 2048),
    "wide": Shape(8, 512, 2048, width=2048),
    "narrow_layer": Shape(8, 512, 2048, layered=True),
    "long": Shape(8, 4096, 2048, rank=32),
    "branches": Shape(8, 512, 2048, branches=3),
    "narrow_hebb": Shape(8, 512, 2048, rule="hebb"),
}


def about(shape: Shape) -> str:
    keys = f"A {shape.rank} x {shape.width or shape.rank}, {shape.rule}"
    more = ", with its projections" if shape.layered else f", {shape.branches} branches" if shape.branches > 1 else ""
    return f"B {shape.batch}, T {shape.tokens}, D {shape.d_model}, {keys}{more}"


CASES = comparison.cases_of(CPU_SHAPES, "cpu", measure, about) | comparison.cases_of(GPU_SHAPES, "cuda", measure, about)

if __name__ == "__main__":
    print(json.dumps(peak(Shape(**json.loads(sys.argv[1])), *sys.argv[2:])))
