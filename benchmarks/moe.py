"""The mixture-of-experts layer's cases: forward, and with backward ("training"), against peers, fp64, dense products.

A layer here goes from x and the router's logits to y: the choice of experts, their order, and the experts. The upper
bound is the dense matrix products of the same sizes, each expert with R / E rows: two an expert forward, four backward.

As a program, `python moe.py SHAPE PASS IMPLEMENTATION`, with the shape as JSON, prints the bytes by which one run
raises this process's memory.
"""

from __future__ import annotations

import functools
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
from moe_peers import (
    DEEPSPEED,
    GROUPED,
    LIGER,
    LOOP,
    OURS,
    SCATTERMOE,
    SONICMOE,
    TRANSFORMERS,
    Implementation,
    Layer,
    activated,
    halves_apart,
    implementations,
    routed,
)
from torch import Tensor

from cdrmix import ops

NAMES = ("y", "dx", "dlogits", "dw_up", "dw_down")
DENSE, DENSE_BACKWARD = "dense products of the same sizes", "dense products, backward"
BACKWARD, ROUTING, MOVING = f"{OURS}, backward", f"{OURS}, routing", f"{OURS}, dispatch and combine as ops"
SAMPLED_TOKENS, SAMPLED_HIDDEN = 512, 32  # for errors, because float64 of all of a large layer takes long


@dataclass(frozen=True)
class Shape:
    """Sizes of a measurement. load: "even"; "skewed": one expert is each token's first choice; "empty": half unused."""

    tokens: int
    d_model: int
    hidden: int
    experts: int
    k: int
    activation: str
    load: str = "even"

    @property
    def layer(self) -> Layer:
        return Layer(self.d_model, self.hidden, self.experts, self.k, self.activation)

    @property
    def widening(self) -> int:
        """Columns of w_up for each row of w_down."""
        return 2 if self.activation == "swiglu" else 1

    @property
    def flops(self) -> int:
        """Operations of the forward pass's products; the backward pass has twice as many."""
        return 2 * self.tokens * self.k * self.d_model * self.hidden * (self.widening + 1)


@dataclass(frozen=True, eq=False)
class Problem:
    """Inputs on the device, the weights in our layout, and the gradient of the output."""

    shape: Shape
    x: Tensor
    logits: Tensor
    w_up: Tensor
    w_down: Tensor
    dy: Tensor


def make_problem(shape: Shape, device: torch.device, dtype: torch.dtype) -> Problem:
    """Normal values, with norms of 1 in x and dy, and of a trained layer in the weights; logits in float32."""
    generator = torch.Generator(device).manual_seed(7)

    def normal(*size: int, scale: float = 1.0) -> Tensor:
        return torch.randn(size, generator=generator, device=device).mul_(scale)

    logits = normal(shape.tokens, shape.experts)
    if shape.load == "skewed":
        logits[:, 0] = logits[:, 1:].amax(1) + normal(shape.tokens).abs()
    elif shape.load == "empty":
        logits[:, shape.experts // 2 :] -= 50.0
    wide = shape.widening * shape.hidden
    return Problem(
        shape,
        normal(shape.tokens, shape.d_model).to(dtype),
        logits,
        normal(shape.experts, shape.d_model, wide, scale=shape.d_model**-0.5).to(dtype),
        normal(shape.experts, shape.hidden, shape.d_model, scale=shape.hidden**-0.5).to(dtype),
        normal(shape.tokens, shape.d_model).to(dtype),
    )


def sample(size: int, wanted: int, device: torch.device) -> Tensor:
    """Up to `wanted` indices below `size` in even steps, with the first and the last."""
    return torch.linspace(0, size - 1, min(size, wanted), dtype=torch.float64, device=device).round().long().unique()


@functools.lru_cache(maxsize=1)  # the same for every peer
def exact(problem: Problem, part: str) -> tuple[dict[str, Tensor], Callable[[str, Tensor], Tensor]]:
    """The layer in float64, by autograd over a loop; and the part of each tensor, by name, that is compared with it.

    y, dx and dlogits of some tokens; gradients of the weights of some hidden units, to which every token contributes.
    """
    shape, layer, device = problem.shape, problem.shape.layer, problem.x.device
    some_t = sample(shape.tokens, SAMPLED_TOKENS, device)
    some_f = sample(shape.hidden, SAMPLED_HIDDEN, device)
    columns = some_f if not layer.gated else torch.stack([2 * some_f, 2 * some_f + 1], 1).flatten()
    x, logits = (z[some_t].double().requires_grad_() for z in (problem.x, problem.logits))
    weights_TK, experts_TK = routed(logits, shape.k)
    y = torch.zeros_like(x)
    for expert in range(shape.experts):
        token, choice = torch.where(experts_TK == expert)
        rows = expert_in_float64(layer, x[token], problem.w_up[expert], problem.w_down[expert])
        y = y.index_add(0, token, rows * weights_TK[token, choice, None])
    found = {"y": y.detach()}
    if part == "training":
        found["dx"], found["dlogits"] = torch.autograd.grad(y, (x, logits), problem.dy[some_t].double())
        w_up = problem.w_up[..., columns].double().requires_grad_()
        w_down = problem.w_down[:, some_f].double().requires_grad_()
        weights_TK, experts_TK = routed(problem.logits.double(), shape.k)
        found["dw_up"], found["dw_down"] = torch.zeros_like(w_up), torch.zeros_like(w_down)
        for expert in range(shape.experts):
            token, choice = torch.where(experts_TK == expert)
            rows = expert_in_float64(layer, problem.x[token].double(), w_up[expert], w_down[expert])
            dy = problem.dy[token].double() * weights_TK[token, choice, None]
            found["dw_up"] += torch.autograd.grad(rows, w_up, dy, retain_graph=True)[0]
            found["dw_down"] += torch.autograd.grad(rows, w_down, dy)[0]

    def part_of(name: str, whole: Tensor) -> Tensor:
        if name == "dw_up":
            return whole[..., columns]
        return whole[:, some_f] if name == "dw_down" else whole[some_t]

    return found, part_of


def expert_in_float64(layer: Layer, rows: Tensor, w_up: Tensor, w_down: Tensor) -> Tensor:
    z = rows @ w_up.double()
    return activated(halves_apart(z) if layer.gated else z, layer) @ w_down.double()


class Runner(comparison.Runner):
    """One implementation on one problem, with the weights in its own layout."""

    def __init__(self, implementation: Implementation, problem: Problem, part: str) -> None:
        leaves = [problem.x, problem.logits, *implementation.arrange(problem.w_up, problem.w_down)]
        super().__init__(leaves, problem.dy, part)
        self.implementation, self.problem = implementation, problem

    def forward(self) -> Tensor:
        x, logits, *weights = self.inputs
        return self.implementation.call(x, logits, weights)

    def errors(self) -> dict[str, float]:
        """Relative error of y and of each gradient, in our layout, against `exact`."""
        found = [x.detach() for x in self.run()]
        if self.part == "training":
            found[3:] = self.implementation.restore(found[3:])
        wanted, part_of = exact(self.problem, self.part)
        return {name: relative_error(part_of(name, x), wanted[name]) for name, x in zip(NAMES, found, strict=False)}


def dense(problem: Problem) -> tuple[Callable[[], None], Callable[[], None]]:
    """Forward and backward products, one after the other, with R / E rows an expert, into existing tensors."""
    shape, like = problem.shape, problem.x
    rows = -(-shape.tokens * shape.k // shape.experts)

    def normal(width: int) -> Tensor:
        return torch.randn(shape.experts, rows, width, device=like.device).to(like.dtype)

    model, hidden, wide = (normal(width) for width in (shape.d_model, shape.hidden, problem.w_up.shape[-1]))
    model_out, hidden_out, wide_out = (torch.empty_like(x) for x in (model, hidden, wide))
    dw_up, dw_down = torch.empty_like(problem.w_up), torch.empty_like(problem.w_down)

    def forward() -> None:
        for e in range(shape.experts):
            torch.mm(model[e], problem.w_up[e], out=wide_out[e])
            torch.mm(hidden[e], problem.w_down[e], out=model_out[e])

    def backward() -> None:
        for e in range(shape.experts):
            torch.mm(model[e], problem.w_down[e].mT, out=hidden_out[e])
            torch.mm(hidden[e].mT, model[e], out=dw_down[e])
            torch.mm(wide[e], problem.w_up[e].mT, out=model_out[e])
            torch.mm(model[e].mT, wide[e], out=dw_up[e])

    return forward, backward


def moving(problem: Problem, part: str) -> Callable[[], object]:
    """Dispatch and combination as separate operators, in training with their adjoints; a fused kernel saves them."""
    x = problem.x.detach().requires_grad_(part == "training")
    with torch.no_grad():
        routing = ops.route_topk(problem.logits, problem.shape.k)
        rows = ops.moe_dispatch(problem.x, routing).clone()
    rows.requires_grad_(part == "training")

    def run() -> object:
        with torch.set_grad_enabled(part == "training"):
            moved, y = ops.moe_dispatch(x, routing), ops.moe_combine(rows, routing)
        return torch.autograd.grad((moved, y), (x, rows), (rows.detach(), problem.dy)) if part == "training" else y

    return run


def parts(problem: Problem, part: str, mine: Runner) -> dict[str, Callable[[], object]]:
    """What is timed besides whole layers: the upper bound, and the layer's own parts."""
    forward, backward = dense(problem)

    def routing() -> object:
        with torch.no_grad():
            return ops.route_topk(problem.logits, problem.shape.k)

    calls: dict[str, Callable[[], object]] = {ROUTING: routing, MOVING: moving(problem, part), DENSE: forward}
    if part == "training":
        calls |= {DENSE: lambda: (forward(), backward()), DENSE_BACKWARD: backward, BACKWARD: mine.backward()}
    return calls


def least_work(shape: Shape, part: str, element: int) -> tuple[int, int]:
    """Least bytes and operations, with `element` bytes a number.

    Forward reads x and the weights and writes y. Backward reads x, the weights and dy, and writes their gradients; it
    also reads the pre-activation, which the forward pass wrote.
    """
    rows = shape.tokens * shape.d_model
    weights = shape.experts * shape.d_model * shape.hidden * (shape.widening + 1)
    if part == "forward":
        return (2 * rows + weights) * element, shape.flops
    kept = shape.tokens * shape.k * shape.hidden * shape.widening
    return (5 * rows + 3 * weights + 2 * kept) * element, 3 * shape.flops


def measure(shape: Shape, part: str, options: Options) -> Result:
    """One case, on a CPU with one thread."""
    device = torch.device(options.device)
    with comparison.one_thread(device):
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        problem = make_problem(shape, device, dtype)
        candidates, missing = implementations(device.type, shape.layer)
        compared = comparison.compare(
            candidates,
            OURS,
            lambda who, implementation: Runner(implementation, problem, part),
            options,
            lambda who: comparison.peak_in_fresh_process(__file__, json.dumps(asdict(shape)), part, who),
            lambda mine: parts(problem, part, mine),
        )
        bound = machine.roofline(*least_work(shape, part, dtype.itemsize), device, compared.median(OURS))
        compared.absent.update(missing)
        for found in compared.found.values():
            if "saved_bytes" in found:  # x is an input but has to be kept: published figures of others count it
                found["saved_bytes"] += problem.x.nbytes
        return Result(
            **compared.result(),
            figures=figures(compared, problem, part),
            settings=asdict(shape) | {"pass": part} | comparison.circumstances(problem.x),
            roofline=bound,
        )


def figures(compared: Comparison, problem: Problem, part: str) -> dict[str, float]:
    """The figures that have targets; those of peers that were not measured are absent."""
    shape, mine = problem.shape, compared.found[OURS]
    flops = shape.flops * (3 if part == "training" else 1)
    result = {
        "milliseconds": compared.median(OURS),
        "tflops": flops / compared.median(OURS) / 1e9,
        "share_of_dense": compared.ratio(DENSE, OURS),
        "routing_share": compared.ratio(ROUTING, OURS),
        "dispatch_combine_share": compared.ratio(MOVING, OURS),
    }
    if part == "training":
        result["backward_share_of_dense"] = compared.ratio(DENSE_BACKWARD, BACKWARD)
        least = problem.x.element_size() * shape.tokens * (shape.d_model + shape.k * shape.widening * shape.hidden)
        result |= {"saved_gigabytes": mine["saved_bytes"] / 1e9, "saved_over_least": mine["saved_bytes"] / least}
    named = {
        "loop": LOOP,
        "grouped_mm": GROUPED,
        "transformers": TRANSFORMERS,
        "deepspeed": DEEPSPEED,
        "scattermoe": SCATTERMOE,
        "sonicmoe": SONICMOE,
        "liger": LIGER,
        "best_peer": "",
    }
    result |= compared.speeds(
        {
            f"speed_over_{name}": [who for who in compared.rivals if who.startswith(beginning)]
            for name, beginning in named.items()
        }
    )
    result |= comparison.error_figures(mine["errors"])
    if mine["peak_bytes"] is not None:
        result["peak_megabytes"] = mine["peak_bytes"] / 1e6
    return result


def peak(shape: Shape, part: str, who: str) -> int | None:
    """Peak bytes of one run on the CPU without inputs, after a run on 32 tokens that compiles and loads."""
    device = torch.device("cpu")
    with comparison.one_thread(device):
        everyone, _ = implementations("cpu", shape.layer)
        small = Shape(**{**asdict(shape), "tokens": 32})
        Runner(everyone[who], make_problem(small, device, torch.float32), part).run()
        return peak_of_process(Runner(everyone[who], make_problem(shape, device, torch.float32), part).run)


CPU_SHAPES = {
    "cpu_relu2": Shape(4096, 512, 1024, 8, 2, "relu2"),
    "cpu_swiglu": Shape(4096, 512, 1024, 8, 2, "swiglu"),
    "cpu_tiny": Shape(2048, 128, 256, 8, 2, "relu2"),  # of configs/cdrmix-core-tiny.yaml
}
GPU_SHAPES = {
    "swiglu": Shape(32768, 2048, 4608, 8, 2, "swiglu"),
    "relu2": Shape(32768, 2048, 4608, 8, 2, "relu2"),
    "d4096": Shape(32768, 4096, 14336, 8, 2, "swiglu"),
    "e16": Shape(32768, 2048, 1408, 16, 2, "swiglu"),
    "skewed": Shape(32768, 2048, 4608, 8, 2, "swiglu", "skewed"),
    "empty": Shape(32768, 2048, 4608, 8, 2, "swiglu", "empty"),
}


def about(shape: Shape) -> str:
    sizes = f"T {shape.tokens}, d {shape.d_model}, F {shape.hidden}, E {shape.experts}, k {shape.k}"
    return f"{sizes}, {shape.activation}, {shape.load} load"


CASES = comparison.cases_of(CPU_SHAPES, "cpu", measure, about) | comparison.cases_of(GPU_SHAPES, "cuda", measure, about)

if __name__ == "__main__":
    print(json.dumps(peak(Shape(**json.loads(sys.argv[1])), *sys.argv[2:])))
