"""The RWKV-7 recurrence's cases: forward, and forward with backward ("training"), against peers, fp64 and the roofline.

As a program, `python wkv7.py SHAPE PASS IMPLEMENTATION`, the shape as JSON: prints the bytes by which one run raises
this process's memory.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

import machine
import torch
from cases import Case, Options, Result, quantiles
from measure import admit, interleaved, kept_for_backward, peak_of_process, peak_on_gpu, relative_error
from torch import Tensor
from wkv7_peers import CHUNKED, DECAY_BOUND, FLA, FLA_LAYER, NAIVE, OURS, Implementation, implementations

from cdrmix import ops
from cdrmix.kernels import reference

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


def make_problem(shape: Shape, part: str, device: torch.device, dtype: torch.dtype) -> Problem:
    """A unit removal key, its rate and decay from logistic functions of normal values, everything else normal."""
    generator = torch.Generator(device).manual_seed(7)
    size = (shape.batch, shape.length, shape.heads, shape.width)

    def normal() -> Tensor:
        return torch.randn(size, generator=generator, device=device)

    removal = torch.nn.functional.normalize(normal(), dim=-1)
    tensors = [normal(), DECAY_BOUND * normal().sigmoid(), normal(), normal(), -removal, removal * normal().sigmoid()]
    cu_seqlens = document_lengths(shape.length).to(device) if shape.packed else None
    inputs = [x.to(dtype).requires_grad_(part == "training") for x in tensors]
    return Problem(inputs, normal().to(dtype), cu_seqlens)


def document_lengths(tokens: int) -> Tensor:
    """int64 [N + 1]: starts of documents of log-normal length, median 400 tokens and sigma 1, the last one cut."""
    lengths = torch.empty(tokens).log_normal_(5.99, 1.0, generator=torch.Generator().manual_seed(7)).ceil().long()
    ends = lengths.cumsum(0)
    return torch.cat([torch.zeros(1, dtype=torch.int64), ends[ends < tokens], torch.tensor([tokens])])


class Runner:
    """One implementation on one problem: `run()` is what gets timed."""

    def __init__(self, implementation: Implementation, problem: Problem, part: str) -> None:
        self.implementation, self.problem, self.part = implementation, problem, part
        self.inputs = list(problem.inputs)
        if implementation.decay_argument is not None:
            log_w = problem.inputs[1].detach()
            argument = implementation.decay_argument(log_w.float()).to(log_w.dtype)
            self.inputs[1] = argument.requires_grad_(part == "training")

    def forward(self) -> Tensor:
        os.environ.update(self.implementation.environment)
        return self.implementation.call(self.inputs, self.problem.cu_seqlens)

    def run(self) -> list[Tensor]:
        """y, and in training the gradients of the six inputs."""
        if self.part == "forward":
            with torch.no_grad():
                return [self.forward()]
        y = self.forward()
        return [y, *torch.autograd.grad(y, self.inputs, self.problem.dy)]

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
    """One case: every implementation prepared, checked and weighed, then all that are right timed in turns."""
    device = torch.device(options.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    problem = make_problem(shape, part, device, dtype)
    candidates, absent = implementations(device.type, shape.length, shape.width, shape.packed)

    def prepare(who: str, implementation: Implementation) -> tuple[Runner, dict[str, Any]]:
        runner = Runner(implementation, problem, part)
        return runner, weigh(runner, shape, who)

    runners, found, left_out = admit(candidates, OURS, prepare, options)
    absent |= left_out
    samples = interleaved({who: runner.run for who, runner in runners.items()}, options.blocks, device)
    for who, values in samples.items():
        found[who]["milliseconds"] = quantiles(values)
    medians = {who: quantiles(values)["p50"] for who, values in samples.items()}
    rivals = {who: value for who, value in medians.items() if not who.startswith(OURS)}
    best = min(rivals, key=rivals.__getitem__, default=None)
    bound = machine.roofline(*least_work(shape, part, dtype.itemsize), device, medians[OURS])
    return Result(
        unit="ms",
        peer_name=best,
        ours=samples[OURS],
        peer=samples[best] if best else [],
        figures=figures(samples, medians, found, bound, problem.inputs[0].nbytes),
        settings={
            "batch": shape.batch,
            "tokens": shape.length,
            "heads": shape.heads,
            "width": shape.width,
            "documents": shape.batch if problem.cu_seqlens is None else len(problem.cu_seqlens) - 1,
            "pass": part,
            "dtype": str(dtype).removeprefix("torch."),
            "device": device.type,
            "backend": backend_of(problem.inputs[0]),
            "threads": torch.get_num_threads(),
            "peak_counted_by": "PyTorch's allocator" if device.type == "cuda" else "resident memory of a fresh process",
        },
        peers=found,
        absent=absent,
        roofline=bound,
    )


def backend_of(x: Tensor) -> str:
    """What serves our op, and whether it is Triton's interpreter, whose times say nothing."""
    found = ops.backend(x)
    return "triton, interpreted" if found == "triton" and os.environ.get("TRITON_INTERPRET") == "1" else found


def weigh(runner: Runner, shape: Shape, who: str) -> dict[str, Any]:
    """Seconds of the first run, errors, bytes kept between the passes, and peak bytes: of everything but timing."""
    begun = time.perf_counter()
    runner.run()
    if runner.inputs[0].is_cuda:
        torch.cuda.synchronize()
    found: dict[str, Any] = {"first_run_seconds": time.perf_counter() - begun, "errors": runner.errors()}
    if runner.inputs[0].is_cuda:
        found["peak_bytes"] = peak_on_gpu(runner.run, runner.inputs[0].device)
    else:
        found["peak_bytes"] = peak_in_fresh_process(shape, runner.part, who)
    if runner.part == "training":
        found["saved_bytes"] = kept_for_backward(runner.forward, runner.inputs)
    return found


def figures(
    samples: dict[str, list[float]],
    medians: dict[str, float],
    found: dict[str, dict[str, Any]],
    bound: dict[str, Any],
    input_bytes: int,
) -> dict[str, float]:
    """What targets are set for. A figure of a peer that was not measured is not there."""

    def faster_than(rivals: list[str]) -> dict[str, float]:
        who = min(rivals, key=medians.__getitem__)
        return quantiles([theirs / ours for theirs, ours in zip(samples[who], samples[OURS], strict=True)])

    mine = found[OURS]
    errors = dict(mine["errors"])
    result = {"milliseconds": medians[OURS]}
    groups = {
        "speed_over_fla_layer": [who for who in medians if who == FLA_LAYER],
        "speed_over_fla_best": [who for who in medians if who.startswith(FLA) and who != "fla, naive"],
        "speed_over_chunked": [who for who in medians if who.startswith(CHUNKED)],
        "speed_over_naive": [who for who in medians if who == NAIVE],
        "speed_over_fla_naive": [who for who in medians if who == "fla, naive"],
    }
    result |= {name: faster_than(rivals)["p50"] for name, rivals in groups.items() if rivals}
    result["error_y"] = errors.pop("y")
    if errors:
        result["error_gradients"] = max(errors.values())
    if "saved_bytes" in mine:
        result["saved_in_inputs"] = mine["saved_bytes"] / input_bytes
    if mine["peak_bytes"] is not None:
        result["peak_megabytes"] = mine["peak_bytes"] / 1e6
        if found.get(NAIVE, {}).get("peak_bytes"):
            result["memory_over_naive"] = mine["peak_bytes"] / found[NAIVE]["peak_bytes"]
    result["roofline_share"] = bound.get("datasheet", bound["measured"])["share"]
    return result


def peak_in_fresh_process(shape: Shape, part: str, who: str) -> int | None:
    """What this file prints as a program; None where the system does not tell."""
    command = [sys.executable, __file__, json.dumps(asdict(shape)), part, who]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def peak(shape: Shape, part: str, who: str) -> int | None:
    """Peak bytes of one run on the CPU, inputs not counted, after a run of 32 tokens that compiles and loads."""
    everyone, _ = implementations("cpu", shape.length, shape.width, shape.packed)
    device, dtype = torch.device("cpu"), torch.float32
    Runner(everyone[who], make_problem(Shape(1, 32, 1, shape.width), part, device, dtype), part).run()
    runner = Runner(everyone[who], make_problem(shape, part, device, dtype), part)
    return peak_of_process(runner.run)


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


def make_cases(shapes: dict[str, Shape], device: str) -> dict[str, Case]:
    """NAME_training of every shape, then NAME_forward."""
    dtype = "bfloat16" if device == "cuda" else "float32"
    return {
        f"{name}_{part}": Case(
            functools.partial(measure, shape, part),
            f"{part} in ms, B {shape.batch}, T {shape.length}{', packed documents' if shape.packed else ''}, "
            f"H {shape.heads}, K = V = {shape.width}, {dtype}",
            (device,),
        )
        for part in ("training", "forward")
        for name, shape in shapes.items()
    }


CASES = make_cases(CPU_SHAPES, "cpu") | make_cases(GPU_SHAPES, "cuda")

if __name__ == "__main__":
    print(json.dumps(peak(Shape(**json.loads(sys.argv[1])), *sys.argv[2:])))
