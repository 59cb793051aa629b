"""The SSD scan's cases: forward, and forward with backward ("training"), against peers, fp64 and the roofline.

As a program, `python scan.py SHAPE PASS IMPLEMENTATION`, with the shape as JSON, prints the bytes by which one run
raises this process's memory.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict, dataclass
from typing import Any

import comparison
import machine
import torch
from cases import Options, Result
from comparison import Comparison
from measure import peak_of_process, relative_error
from scan_peers import CHUNKED, FLA, FLA_NAIVE, NAIVE, OURS, RETENTION, Implementation, implementations
from torch import Tensor
from wkv7 import document_lengths

from cdrmix.kernels.ssd import reference as reference_scan

NAMES = ("q", "k", "v", "log_decay")


@dataclass(frozen=True)
class Shape:
    """Sizes of a measurement. packed: documents of log-normal length in one row, instead of whole rows.

    fixed: one decay a head, as in RetNet, instead of Mamba-2's, which depend on the token.
    """

    batch: int
    length: int
    groups: int
    heads: int
    key_width: int
    value_width: int
    packed: bool = False
    fixed: bool = False


@dataclass(frozen=True)
class Problem:
    """Inputs on the device, the gradient of the output, and document starts."""

    inputs: list[Tensor]
    dy: Tensor
    cu_seqlens: Tensor | None


def make_problem(shape: Shape, device: torch.device, dtype: torch.dtype) -> Problem:
    """Normal values, q and k of norm 1 on average; log decays -A dt with A from 1 to 16, dt log-uniform as in Mamba-2.

    dt is from 1e-3 to 0.1: log decays from -1.6 to -0.001, in float32. RetNet's are log(1 - 2^(-5 - head)).
    """
    generator = torch.Generator(device).manual_seed(7)

    def normal(heads: int, width: int) -> Tensor:
        return torch.randn(shape.batch, shape.length, heads, width, generator=generator, device=device)

    tensors = [normal(shape.groups, shape.key_width) / shape.key_width**0.5 for _ in range(2)]
    tensors.append(normal(shape.heads, shape.value_width))
    head = torch.arange(shape.heads, device=device)
    decays = torch.log1p(-(2.0 ** (-5.0 - head))).expand(shape.batch, shape.length, -1).contiguous()
    if not shape.fixed:
        uniform = torch.rand(shape.batch, shape.length, shape.heads, generator=generator, device=device)
        rates = 1 + 15 * torch.rand(shape.heads, generator=generator, device=device)
        decays = -rates * torch.exp(math.log(1e-3) + uniform * math.log(100.0))
    cu_seqlens = document_lengths(shape.length).to(device) if shape.packed else None
    inputs = [*(x.to(dtype) for x in tensors), decays]
    return Problem(inputs, normal(shape.heads, shape.value_width).to(dtype), cu_seqlens)


class Runner(comparison.Runner):
    """One implementation on one problem."""

    def __init__(self, implementation: Implementation, problem: Problem, part: str) -> None:
        super().__init__(problem.inputs, problem.dy, part)
        self.implementation, self.problem = implementation, problem

    def forward(self) -> Tensor:
        return self.implementation(self.inputs, self.problem.cu_seqlens)

    def errors(self) -> dict[str, float]:
        """Relative error of y and of each gradient against the chunked formulas in float64, on the same inputs.

        RetNet's decays have no gradient.
        """
        inputs = [x.detach().double() for x in self.inputs]
        flags = {"chunk": 64, "exclusive": False}
        y, _, _ = reference_scan.ssd_scan_forward(
            *inputs, None, self.problem.cu_seqlens, **flags, save=False, return_state=False
        )
        exact = [y]
        if self.part == "training":
            exact += reference_scan.ssd_scan_backward(
                self.dy.double(), None, *inputs, None, self.problem.cu_seqlens, [], **flags
            )[:4]
        found = dict(zip(("y", *(f"d{name}" for name in NAMES)), zip(self.run(), exact, strict=False), strict=False))
        if self.implementation.__name__ == "retention":
            found.pop("dlog_decay", None)
        return {name: relative_error(x.detach(), wanted) for name, (x, wanted) in found.items()}


def least_work(shape: Shape, part: str, element: int) -> tuple[int, int]:
    """Least bytes and operations, with `element` bytes a number and float32 decays.

    Bytes: forward reads the inputs and writes y; backward reads them and dy, and writes their gradients. Operations of
    the recurrence, a token and head: forward decay KV, rank-one update 2 KV, S q 2 KV; backward dS 3 KV, its products
    with v, k and dy 6 KV, the decay's gradient 2 KV, and 3 KV to recompute the states.
    """
    tokens, product = shape.batch * shape.length, shape.key_width * shape.value_width
    keys = 2 * shape.groups * shape.key_width * element
    values, decays = shape.heads * shape.value_width * element, 4 * shape.heads
    forward = (keys + 2 * values + decays, 5 * shape.heads * product)
    backward = (2 * keys + 3 * values + 2 * decays, 14 * shape.heads * product)
    moved, computed = forward if part == "forward" else (forward[0] + backward[0], forward[1] + backward[1])
    return tokens * moved, tokens * computed


def measure(shape: Shape, part: str, options: Options) -> Result:
    """One case, on a CPU with one thread."""
    device = torch.device(options.device)
    with comparison.one_thread(device):
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        problem = make_problem(shape, device, dtype)
        candidates, missing = implementations(device.type, shape.length, shape.packed, shape.fixed)
        compared = comparison.compare(
            candidates,
            OURS,
            lambda who, implementation: Runner(implementation, problem, part),
            options,
            lambda who: comparison.peak_in_fresh_process(__file__, json.dumps(asdict(shape)), part, who),
        )
        bound = machine.roofline(*least_work(shape, part, dtype.itemsize), device, compared.median(OURS))
        compared.absent.update(missing)
        documents = shape.batch if problem.cu_seqlens is None else len(problem.cu_seqlens) - 1
        return Result(
            **compared.result(),
            figures=figures(compared, bound, problem.inputs[2].nbytes),
            settings=asdict(shape)
            | {"documents": documents, "pass": part}
            | comparison.circumstances(problem.inputs[0]),
            roofline=bound,
        )


def figures(compared: Comparison, bound: dict[str, Any], value_bytes: int) -> dict[str, float]:
    """The figures that have targets; those of peers that were not measured are absent."""
    mine, rivals = compared.found[OURS], compared.rivals
    result = {"milliseconds": compared.median(OURS)} | compared.speeds(
        {
            "speed_over_fla": [FLA],
            "speed_over_retention": [RETENTION],
            "speed_over_chunked": [who for who in rivals if who.startswith(CHUNKED)],
            "speed_over_naive": [NAIVE],
            "speed_over_fla_naive": [FLA_NAIVE],
        }
    )
    result |= comparison.error_figures(mine["errors"])
    if "saved_bytes" in mine:
        result["saved_in_values"] = mine["saved_bytes"] / value_bytes
    if mine["peak_bytes"] is not None:
        result["peak_megabytes"] = mine["peak_bytes"] / 1e6
        naive = compared.found.get(NAIVE, {}).get("peak_bytes")
        if naive:
            result["memory_over_naive"] = mine["peak_bytes"] / naive
    result["roofline_share"] = bound.get("datasheet", bound["measured"])["share"]
    return result


def peak(shape: Shape, part: str, who: str) -> int | None:
    """Peak bytes of one run on the CPU without inputs, after a run of 64 tokens that compiles and loads."""
    device, dtype = torch.device("cpu"), torch.float32
    with comparison.one_thread(device):
        implementation = implementations("cpu", shape.length, shape.packed, shape.fixed)[0][who]
        small = Shape(**{**asdict(shape), "batch": 1, "length": 64})
        Runner(implementation, make_problem(small, device, dtype), part).run()
        return peak_of_process(Runner(implementation, make_problem(shape, device, dtype), part).run)


CPU_SHAPES = {
    "cpu_k16": Shape(2, 512, 8, 8, 16, 16),
    "cpu_k64": Shape(2, 512, 8, 8, 64, 64),
    "cpu_mamba": Shape(2, 512, 1, 8, 128, 64),
}
GPU_SHAPES = {
    "h32_k64": Shape(8, 4096, 32, 32, 64, 64),
    "h32_k16": Shape(8, 4096, 32, 32, 16, 16),
    "mamba": Shape(8, 4096, 1, 32, 128, 64),
    "packed": Shape(1, 8 * 4096, 32, 32, 64, 64, packed=True),
    "retention": Shape(8, 4096, 32, 32, 64, 64, fixed=True),
    "long": Shape(1, 65536, 32, 32, 64, 64),
}


def about(shape: Shape) -> str:
    sizes = f"G {shape.groups}, H {shape.heads}, K {shape.key_width}, V {shape.value_width}"
    return f"B {shape.batch}, T {shape.length}{', packed documents' if shape.packed else ''}, {sizes}"


CASES = comparison.cases_of(CPU_SHAPES, "cpu", measure, about) | comparison.cases_of(GPU_SHAPES, "cuda", measure, about)

if __name__ == "__main__":
    print(json.dumps(peak(Shape(**json.loads(sys.argv[1])), *sys.argv[2:])))
