"""The linear cross-entropy's cases: forward, and with backward ("training"), against peers, float64 and the roofline.

As a program, `python ce.py SHAPE PASS IMPLEMENTATION`, with the shape as JSON, prints the bytes by which one run raises
this process's memory.
"""

from __future__ import annotations

import functools
import json
import sys
from dataclasses import asdict, dataclass

import comparison
import machine
import torch
from cases import Options, Result
from ce_peers import CHUNKED, LIGER, LIGER_FLOAT32, OURS, PLAIN, Call, implementations
from comparison import Comparison
from measure import peak_of_process, relative_error
from torch import Tensor

SAMPLED = 256  # rows, and tokens of the vocabulary, whose gradients are compared
EXACT_ROWS = 512  # rows whose float64 logits exist at a time
COMPILE_ROWS = 32  # of the run before a measured one, which loads and compiles what that needs


@dataclass(frozen=True)
class Shape:
    """Sizes of a measurement: R, D, V."""

    rows: int
    d_model: int
    vocabulary: int

    @property
    def flops(self) -> int:
        """Operations of the forward pass's product; the backward pass has twice as many."""
        return 2 * self.rows * self.d_model * self.vocabulary


@dataclass(frozen=True, eq=False)
class Problem:
    """Inputs on the device: logits of order 1, uniform targets. The loss is divided by the number of rows."""

    hidden: Tensor
    weight: Tensor
    targets: Tensor


def make_problem(shape: Shape, device: torch.device, dtype: torch.dtype) -> Problem:
    generator = torch.Generator(device).manual_seed(7)
    hidden = torch.randn(shape.rows, shape.d_model, generator=generator, device=device)
    weight = torch.randn(shape.vocabulary, shape.d_model, generator=generator, device=device)
    targets = torch.randint(0, shape.vocabulary, (shape.rows,), generator=generator, device=device)
    return Problem(hidden.to(dtype), weight.mul_(shape.d_model**-0.5).to(dtype), targets)


def sample(size: int, device: torch.device) -> Tensor:
    """Up to SAMPLED indices in even steps."""
    return torch.arange(0, size, max(1, size // SAMPLED), device=device)


@functools.lru_cache(maxsize=1)  # the same for every peer
def exact(problem: Problem) -> dict[str, Tensor]:
    """In float64: the loss, dhidden of some rows, and dweight of some tokens, divided by R."""
    hidden, targets, count = problem.hidden.double(), problem.targets, len(problem.targets)
    weight = problem.weight.double()
    some_r, some_v = sample(count, targets.device), sample(len(weight), targets.device)
    loss = weight.new_zeros(())
    dweight = weight.new_zeros(len(some_v), weight.shape[1])
    for rows in torch.arange(count, device=targets.device).split(EXACT_ROWS):
        logits = hidden[rows] @ weight.mT
        lse = logits.logsumexp(-1, keepdim=True)
        loss += (lse - logits.gather(-1, targets[rows, None])).sum()
        p = (logits[:, some_v] - lse).exp_()
        dweight += (p - (targets[rows, None] == some_v).double()).mT @ hidden[rows]
    dlogits = (hidden[some_r] @ weight.mT).softmax(-1)
    dlogits[torch.arange(len(some_r), device=targets.device), targets[some_r]] -= 1
    return {"y": loss, "dhidden": dlogits @ weight / count, "dweight": dweight / count}


class Runner(comparison.Runner):
    """One implementation on one problem."""

    def __init__(self, call: Call, problem: Problem, part: str) -> None:
        wide = torch.promote_types(problem.hidden.dtype, torch.float32)
        share = torch.tensor(1 / len(problem.targets), dtype=wide, device=problem.hidden.device)
        super().__init__([problem.hidden, problem.weight], share, part)
        self.call, self.problem = call, problem
        self.first: list[Tensor] | None = None

    def forward(self) -> Tensor:
        return self.call(*self.inputs, self.problem.targets).to(self.dy.dtype)

    def run(self) -> list[Tensor]:
        """y, and in training the gradients. Those of the first run are kept for `errors`, as a run may take minutes."""
        found = super().run()
        if self.first is None:
            self.first = [x.detach() for x in found]
        return found

    def errors(self) -> dict[str, float]:
        """Errors of the first run against `exact`, for y and for the sampled parts of the gradients."""
        assert self.first is not None
        found, wanted, self.first = self.first, exact(self.problem), []
        for index, x in enumerate(found[1:], 1):
            found[index] = x[sample(len(x), x.device)]
        return {name: relative_error(x, wanted[name]) for name, x in zip(wanted, found, strict=False)}


def least_work(shape: Shape, part: str, element: int) -> tuple[int, int]:
    """Least bytes and operations, with `element` bytes a number.

    Forward reads hidden and weight; training also writes both gradients. The logits need not be in memory.
    """
    numbers = (shape.rows + shape.vocabulary) * shape.d_model
    return (numbers * element, shape.flops) if part == "forward" else (2 * numbers * element, 3 * shape.flops)


def measure(shape: Shape, part: str, options: Options) -> Result:
    """One case, on a CPU with one thread."""
    device = torch.device(options.device)
    with comparison.one_thread(device):
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        problem = make_problem(shape, device, dtype)
        candidates, missing = implementations(device.type)
        compared = comparison.compare(
            candidates,
            OURS,
            lambda who, call: Runner(call, problem, part),
            options,
            lambda who: comparison.peak_in_fresh_process(__file__, json.dumps(asdict(shape)), part, who),
        )
        bound = machine.roofline(*least_work(shape, part, dtype.itemsize), device, compared.median(OURS))
        compared.absent.update(missing)
        if device.type == "cpu":  # there only saved tensors of autograd are seen, not gradients that are made early
            for found in compared.found.values():
                found.pop("saved_bytes", None)
        return Result(
            **compared.result(),
            figures=figures(compared, shape, part),
            settings=asdict(shape) | {"pass": part} | comparison.circumstances(problem.hidden),
            roofline=bound,
        )


def figures(compared: Comparison, shape: Shape, part: str) -> dict[str, float]:
    """The figures that have targets; those of peers that were not measured are absent."""
    mine = compared.found[OURS]
    result = {
        "milliseconds": compared.median(OURS),
        "tflops": shape.flops * (3 if part == "training" else 1) / compared.median(OURS) / 1e9,
    }
    named = {"plain": [PLAIN], "pytorch_chunked": [CHUNKED], "liger_float32": [LIGER_FLOAT32], "liger": [LIGER]}
    for name, (who,) in named.items():
        if who in compared.samples:
            result[f"time_over_{name}"] = compared.ratio(OURS, who)
            if mine["peak_bytes"] and compared.found[who]["peak_bytes"]:
                result[f"memory_over_{name}"] = mine["peak_bytes"] / compared.found[who]["peak_bytes"]
    result |= comparison.error_figures(mine["errors"])
    if mine["peak_bytes"] is not None:
        result["peak_megabytes"] = mine["peak_bytes"] / 1e6
    return result


def peak(shape: Shape, part: str, who: str) -> int | None:
    """Peak bytes of one run on the CPU without inputs, after a small run that compiles and loads."""
    device, call = torch.device("cpu"), implementations("cpu")[0][who]
    with comparison.one_thread(device):
        small = Shape(COMPILE_ROWS, shape.d_model, COMPILE_ROWS)
        Runner(call, make_problem(small, device, torch.float32), part).run()
        return peak_of_process(Runner(call, make_problem(shape, device, torch.float32), part).run)


CPU_SHAPES = {
    "cpu_v50k": Shape(8192, 2048, 50_272),
    "cpu_tiny": Shape(2048, 128, 4096),  # of configs/cdrmix-core-tiny.yaml
}
GPU_SHAPES = {
    "v50k": Shape(8192, 2048, 50_272),
    "v128k": Shape(16384, 4096, 128_256),
    "odd": Shape(8192, 2048, 50_257),  # rows of logits that are not aligned
}


def about(shape: Shape) -> str:
    return f"{shape.rows} rows, d {shape.d_model}, V {shape.vocabulary}"


CASES = comparison.cases_of(CPU_SHAPES, "cpu", measure, about) | comparison.cases_of(GPU_SHAPES, "cuda", measure, about)

if __name__ == "__main__":
    print(json.dumps(peak(Shape(**json.loads(sys.argv[1])), *sys.argv[2:])))
