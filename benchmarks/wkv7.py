"""The RWKV-7 recurrence's cases: forward, and forward with backward ("training"), against peers, fp64 and the roofline.

As a program, `python wkv7.py SHAPE PASS IMPLEMENTATION`, with the shape as JSON, prints the bytes by which one run
raises this process's memory.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from typing import Any

import comparison
import machine
import torch
from cases import Options, Result
from comparison import Comparison
from measure import peak_of_process, relative_error
from torch import Tensor
from wkv7_peers import CHUNKED, DECAY_BOUND, FLA, FLA_LAYER, NAIVE, OURS, Implementation, implementations

from cdrmix.kernels.rwkv7 import reference

NAMES = ("r", "log_w", "k", "v", "a", "b")


@dataclass(frozen=True)
class Shape:
    """Sizes of a measurement, K = V. packed: documents of log-normal length in one row, instead of whole rows."""

    batch: int
    length: int
    heads: int
    width: int
    packed: bool = False


@dataclass(frozen=True)
class Problem:
    """Inputs on the device, as RWKV-7 makes them, and the gradient of the output."""

    inputs: list[Tensor]
    dy: Tensor
    cu_seqlens: Tensor | None


def make_problem(shape: Shape, device: torch.device, dtype: torch.dtype) -> Problem:
    """A unit removal key, its rate and decay from logistic functions of normal values, everything else normal."""
    generator = torch.Generator(device).manual_seed(7)
    size = (shape.batch, shape.length, shape.heads, shape.width)

    def normal() -> Tensor:
        return torch.randn(size, generator=generator, device=device)

    removal = torch.nn.functional.normalize(normal(), dim=-1)
    tensors = [normal(), DECAY_BOUND * normal().sigmoid(), normal(), normal(), -removal, removal * normal().sigmoid()]
    cu_seqlens = document_lengths(shape.length).to(device) if shape.packed else None
    return Problem([x.to(dtype) for x in tensors], normal().to(dtype), cu_seqlens)


def document_lengths(tokens: int) -> Tensor:
    """int64 [N + 1]: starts of documents of log-normal length, median 400 tokens and sigma 1, the last one cut."""
    lengths = torch.empty(tokens).log_normal_(5.99, 1.0, generator=torch.Generator().manual_seed(7)).ceil().long()
    ends = lengths.cumsum(0)
    return torch.cat([torch.zeros(1, dtype=torch.int64), ends[ends < tokens], torch.tensor([tokens])])


class Runner(comparison.Runner):
    """One implementation on one problem, the decay as it takes it."""

    def __init__(self, implementation: Implementation, problem: Problem, part: str) -> None:
        inputs = list(problem.inputs)
        if implementation.decay_argument is not None:
            inputs[1] = implementation.decay_argument(inputs[1].float()).to(inputs[1].dtype)
        super().__init__(inputs, problem.dy, part)
        self.implementation, self.problem = implementation, problem

    def forward(self) -> Tensor:
        os.environ.update(self.implementation.environment)
        return self.implementation.call(self.inputs, self.problem.cu_seqlens)

    def errors(self) -> dict[str, float]:
        """Relative error of y and of each gradient against the chunked mathematics in float64, on the same inputs.

        On the first and the last head alone: heads are independent, and float64 takes much memory.
        """
        heads = sorted({0, self.inputs[0].shape[2] - 1})
        exact_inputs = [x.detach()[:, :, heads].double().requires_grad_(x.requires_grad) for x in self.inputs]
        r, decay, k, v, a, b = exact_inputs
        log_w = decay if self.implementation.decay is None else self.implementation.decay(decay)
        y, _ = reference.wkv7(r, log_w, k, v, a, b, cu_seqlens=self.problem.cu_seqlens, chunk=16)
        exact = [y]
        if self.part == "training":
            exact += torch.autograd.grad(y, exact_inputs, self.problem.dy[:, :, heads].double())
        found = [x.detach()[:, :, heads] for x in self.run()]
        names = ("y", *(f"d{name}" for name in NAMES))
        return {name: relative_error(x, wanted) for name, x, wanted in zip(names, found, exact, strict=False)}


def least_work(shape: Shape, part: str, element: int) -> tuple[int, int]:
    """Bytes that must move and operations that must be done, of `element` bytes a number and K = V.

    Bytes: forward reads six tensors and writes one; backward reads those six and dy, and writes six gradients.
    Operations, by the recurrence, a token and head: forward S a 2 KV, S diag(w) KV, two rank-one updates 4 KV, S r
    2 KV; backward 19 KV (dS r^T, S^T dy, dS k, dS^T v, dS b, dS^T sa, dsa a^T, S^T dsa at 2 KV each, decay of dS and
    its gradient 3 KV) and 7 KV to have the states again, which are too large to be kept.
    """
    tokens_heads = shape.batch * shape.length * shape.heads
    forward = (7 * shape.width * element, 9 * shape.width**2)
    backward = (13 * shape.width * element, 26 * shape.width**2)
    moved, computed = forward if part == "forward" else (forward[0] + backward[0], forward[1] + backward[1])
    return tokens_heads * moved, tokens_heads * computed


def measure(shape: Shape, part: str, options: Options) -> Result:
    """One case."""
    device = torch.device(options.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    problem = make_problem(shape, device, dtype)
    candidates, missing = implementations(device.type, shape.length, shape.width, shape.packed)
    compared = comparison.compare(
        candidates,
        OURS,
        lambda who, implementation: Runner(implementation, problem, part),
        options,
        lambda who: comparison.peak_in_fresh_process(__file__, json.dumps(asdict(shape)), part, who),
    )
    bound = machine.roofline(*least_work(shape, part, dtype.itemsize), device, compared.median(OURS))
    compared.absent.update(missing)
    return Result(
        **compared.result(),
        figures=figures(compared, bound, problem.inputs[0].nbytes),
        settings={
            "batch": shape.batch,
            "tokens": shape.length,
            "heads": shape.heads,
            "width": shape.width,
            "documents": shape.batch if problem.cu_seqlens is None else len(problem.cu_seqlens) - 1,
            "pass": part,
            **comparison.circumstances(problem.inputs[0]),
        },
        roofline=bound,
    )


def figures(compared: Comparison, bound: dict[str, Any], input_bytes: int) -> dict[str, float]:
    """The figures that have targets; those of peers that were not measured are absent."""
    mine, rivals = compared.found[OURS], compared.rivals
    result = {"milliseconds": compared.median(OURS)} | compared.speeds(
        {
            "speed_over_fla_layer": [FLA_LAYER],
            "speed_over_fla_best": [who for who in rivals if who.startswith(FLA) and who != "fla, naive"],
            "speed_over_chunked": [who for who in rivals if who.startswith(CHUNKED)],
            "speed_over_naive": [NAIVE],
            "speed_over_fla_naive": ["fla, naive"],
        }
    )
    result |= comparison.error_figures(mine["errors"])
    if "saved_bytes" in mine:
        result["saved_in_inputs"] = mine["saved_bytes"] / input_bytes
    if mine["peak_bytes"] is not None:
        result["peak_megabytes"] = mine["peak_bytes"] / 1e6
        naive = compared.found.get(NAIVE, {}).get("peak_bytes")
        if naive:
            result["memory_over_naive"] = mine["peak_bytes"] / naive
    result["roofline_share"] = bound.get("datasheet", bound["measured"])["share"]
    return result


def peak(shape: Shape, part: str, who: str) -> int | None:
    """Peak bytes of one run on the CPU without inputs, after a run of 32 tokens that compiles and loads."""
    everyone, _ = implementations("cpu", shape.length, shape.width, shape.packed)
    device, dtype = torch.device("cpu"), torch.float32
    Runner(everyone[who], make_problem(Shape(1, 32, 1, shape.width), device, dtype), part).run()
    return peak_of_process(Runner(everyone[who], make_problem(shape, device, dtype), part).run)


CPU_SHAPES = {
    "cpu_k64": Shape(2, 512, 8, 64),
    "cpu_tiny": Shape(8, 256, 4, 32),  # of configs/cdrmix-core-tiny.yaml
}
GPU_SHAPES = {
    "h32_k64": Shape(8, 4096, 32, 64),
    "packed": Shape(1, 8 * 4096, 32, 64, packed=True),
    "h16_k128": Shape(8, 4096, 16, 128),
    "long": Shape(1, 65536, 32, 64),
    "short": Shape(8, 256, 32, 64),
}


def about(shape: Shape) -> str:
    packed = ", packed documents" if shape.packed else ""
    return f"B {shape.batch}, T {shape.length}{packed}, H {shape.heads}, K = V = {shape.width}"


CASES = comparison.cases_of(CPU_SHAPES, "cpu", measure, about) | comparison.cases_of(GPU_SHAPES, "cuda", measure, about)

if __name__ == "__main__":
    print(json.dumps(peak(Shape(**json.loads(sys.argv[1])), *sys.argv[2:])))
