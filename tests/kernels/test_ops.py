"""Every operator of cdrmix.ops, by a table: repeatable, near float64, registered and differentiated as PyTorch asks."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable, Collection
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from cdrmix import ops

Arguments = dict[str, Tensor]
ROOT = Path(__file__).parents[2]


def attention(x: Arguments) -> tuple[Tensor, ...]:
    cu_seqlens = torch.tensor([0, 11, 50, 100], dtype=torch.int32, device=x["q"].device)
    return (ops.attention(x["q"], x["k"], x["v"], cu_seqlens=cu_seqlens),)


def wkv7(x: Arguments) -> tuple[Tensor, ...]:
    cu_seqlens = torch.tensor([0, 11, 50, 100], dtype=torch.int32, device=x["r"].device)
    k = functional.normalize(x["a"], dim=-1)
    log_w, rate = -0.6 * x["w"].sigmoid(), x["b"].sigmoid()
    whole = x["r"], log_w, x["k"], x["v"], -k, k * rate
    y, state = ops.wkv7(*whole, cu_seqlens=cu_seqlens, return_state=True)
    assert state is not None
    one, _ = ops.wkv7(*(each[:1, :3] for each in whole), state=state[:1], recompute=True)
    return y, state, one


def wkv7_step(x: Arguments) -> tuple[Tensor, ...]:
    token = {name: tensor.detach() for name, tensor in x.items()}
    k = functional.normalize(token["a"], dim=-1)
    log_w, rate = -0.6 * token["w"].sigmoid(), token["b"].sigmoid()
    return ops.wkv7_step(token["r"], log_w, token["k"], token["v"], -k, k * rate, token["state"])


def ssd_scan(x: Arguments) -> tuple[Tensor, ...]:
    cu_seqlens = torch.tensor([0, 11, 50, 100], dtype=torch.int32, device=x["q"].device)
    whole = x["q"], x["k"], x["v"], -x["w"].exp()
    y, state = ops.ssd_scan(*whole, cu_seqlens=cu_seqlens, return_state=True)
    assert state is not None
    one, _ = ops.ssd_scan(*(each[:1, :3] for each in whole), state=state[:1])
    return y, state, one


def ssd_scan_step(x: Arguments) -> tuple[Tensor, ...]:
    token = {name: tensor.detach() for name, tensor in x.items()}
    return ops.ssd_scan_step(token["q"], token["k"], token["v"], -token["w"].exp(), token["state"])


def moe(x: Arguments) -> tuple[Tensor, ...]:
    routing = ops.route_topk(x["x"] @ x["gate"], 2)
    y = ops.moe_experts(x["x"], x["w_up"], x["w_down"], routing)
    logits = x["x"] @ x["gate"]
    keep = torch.arange(len(logits), device=logits.device) % 3 > 0
    masked = ops.route_topk(logits, 2, bias=torch.zeros_like(logits[0].detach()), capacity=9, keep=keep)
    again = ops.moe_experts(x["x"], x["w_up"], x["w_down"], masked, recompute=True)
    return y, again, routing.load_balance, routing.z_loss, masked.load_balance, masked.z_loss


def logits(x: Arguments) -> tuple[Tensor, ...]:
    return (ops.router_logits(x["x"], x["w"]),)


def rotary(x: Arguments) -> tuple[Tensor, ...]:
    angle = torch.arange(15, device=x["x"].device).view(1, 15, 1, 1) * torch.linspace(1, 0.1, 8, device=x["x"].device)
    return (ops.apply_rotary(x["x"], angle.cos(), angle.sin()),)


def dispatch(x: Arguments) -> tuple[Tensor, ...]:
    routing = ops.route_topk(x["logits"].detach(), 2, capacity=12)
    return (ops.moe_dispatch(x["x"], routing),)


def combine(x: Arguments) -> tuple[Tensor, ...]:
    routing = ops.route_topk(x["logits"].detach(), 2, capacity=12)
    return (ops.moe_combine(x["y"], routing),)


def expert_product(x: Arguments) -> tuple[Tensor, ...]:
    routing = ops.route_topk(x["logits"].detach(), 2, capacity=12)
    return (ops.moe_product(x["rows"], x["w"], routing),)


def cross_entropy(x: Arguments) -> tuple[Tensor, ...]:
    hidden = x["hidden"]
    targets = torch.arange(hidden.shape[0], device=hidden.device) % x["weight"].shape[0]
    weights = 1 + torch.arange(hidden.shape[0], device=hidden.device) % 3
    options = {"weights": weights.to(hidden.dtype), "z_loss": 1e-3, "label_smoothing": 0.1, "ignore_index": 7}
    loss = ops.linear_cross_entropy(hidden, x["weight"], targets, **options) / len(targets)
    sets, each = targets[:18].view(2, 9), weights[:18].view(2, 9).to(hidden.dtype)
    return loss, ops.linear_cross_entropy(hidden[:9], x["weight"], sets, weights=each)


def plastic(x: Arguments) -> tuple[Tensor, ...]:
    starts = torch.arange(40, device=x["x"].device) == 25
    k, beta = functional.normalize(x["k"], dim=-1), x["beta"].sigmoid()
    narrow = [x["x"], x["w"], x["b_up"], x["q"], k, x["v"], beta, x["a_state"]]
    wide = [*narrow[:3], x["wide_q"], functional.normalize(x["wide_k"], dim=-1), x["v"], beta[0], x["wide_a"]]
    y, a_next = ops.plastic_lora(*narrow, alpha=0.5, decay=0.9, starts=starts)
    return y, a_next, *ops.plastic_lora(*wide, alpha=0.5, decay=0.9)


def chunks(x: Arguments) -> tuple[Tensor, ...]:
    starts = torch.arange(40, device=x["x"].device).expand(3, 40) == 25
    k, beta = functional.normalize(x["k"], dim=-1), x["beta"].sigmoid()
    inputs = [x["x"], x["w"], x["b_up"], x["q"], k, x["v"], beta, x["a"], 0.9 * x["a"]]
    made = ops.plastic_chunks(*inputs, chunk=8, position=5, alpha=0.5, decay=0.9, limit=2.0, starts=starts)
    return made.y, made.reads_A, made.a, made.pending


def step(x: Arguments) -> tuple[Tensor, ...]:
    token = {name: tensor.detach().clone() for name, tensor in x.items()}
    with torch.no_grad():
        return ops.plastic_step(**token, chunk=6, position=5, alpha=0.5, decay=0.9, limit=2.0, floor=1e-6)


def linear(x: Arguments) -> tuple[Tensor, ...]:
    return ops.linear(x["x"], x["w"]), ops.linear(x["x"], x["w"].mT, inputs_first=True)


def commit(x: Arguments) -> tuple[Tensor, ...]:
    return (ops.plastic_commit(x["a"]),)


def shift(x: Arguments) -> tuple[Tensor, ...]:
    starts = (torch.arange(30, device=x["x"].device) % 7 == 3).view(2, 15, 1)
    return (ops.token_shift(x["x"], None, starts),)


def streams(x: Arguments) -> tuple[Tensor, ...]:
    starts = (torch.arange(30, device=x["x"].device) % 7 == 3).view(2, 15)
    return ops.time_mix_streams(x["x"], x["mixes"], x["last"], starts)


def keys(x: Arguments) -> tuple[Tensor, ...]:
    return ops.time_mix_keys(**x, head_size=32)


def output(x: Arguments) -> tuple[Tensor, ...]:
    return (ops.time_mix_output(**x),)


def norm(x: Arguments) -> tuple[Tensor, ...]:
    total, normed = ops.add_norm(x["x"], x["y"], x["weight"], x["bias"], kind="layernorm")
    return (
        total,
        *ops.add_norm(total, normed, x["weight"], kind="rmsnorm"),
        *ops.add_norm(normed, None, x["weight"], kind="rmsnorm"),
    )


TOKENS, HEADS, CHANNELS = (2, 15, 64), (2, 15, 2, 32), (64,)
WKV = dict.fromkeys("rwkvab", (2, 50, 2, 32))
CASES: dict[str, tuple[Callable[[Arguments], tuple[Tensor, ...]], dict[str, tuple[int, ...]]]] = {
    "wkv7": (wkv7, WKV),
    "wkv7_step": (wkv7_step, dict.fromkeys("rwkvab", (3, 2, 32)) | {"state": (3, 2, 32, 32)}),
    "ssd_scan": (
        ssd_scan,
        dict.fromkeys("qk", (2, 50, 1, 24)) | {"v": (2, 50, 3, 40), "w": (2, 50, 3)},
    ),
    "ssd_scan_step": (
        ssd_scan_step,
        dict.fromkeys("qk", (3, 1, 24)) | {"v": (3, 2, 40), "w": (3, 2), "state": (3, 2, 40, 24)},
    ),
    "time_mix_streams": (streams, {"x": TOKENS, "mixes": (6, 64), "last": (2, 64)}),
    "time_mix_keys": (
        keys,
        dict.fromkeys(("k", "decay", "rate", "v", "v_first", "v_gate"), TOKENS)
        | dict.fromkeys(("w0", "a0", "v0", "k_k", "k_a"), CHANNELS),
    ),
    "time_mix_output": (
        output,
        dict.fromkeys("yrkv", HEADS) | {"gate": TOKENS, "r_k": (2, 32), "weight": CHANNELS, "bias": CHANNELS},
    ),
    "apply_rotary": (rotary, {"x": (2, 15, 3, 16)}),
    "router_logits": (logits, {"x": (40, 48), "w": (5, 48)}),
    "route_topk": (moe, {"x": (40, 16), "gate": (16, 4), "w_up": (4, 16, 24), "w_down": (4, 24, 16)}),
    "moe_experts": (moe, {"x": (7, 16), "gate": (16, 8), "w_up": (8, 16, 24), "w_down": (8, 24, 16)}),
    "moe_dispatch": (dispatch, {"x": (20, 16), "logits": (20, 4)}),
    "moe_combine": (combine, {"y": (40, 16), "logits": (20, 4)}),
    "moe_product": (expert_product, {"rows": (40, 16), "w": (4, 16, 24), "logits": (20, 4)}),
    "linear": (linear, {"x": (2, 15, 16), "w": (24, 16)}),
    "linear_cross_entropy": (cross_entropy, {"hidden": (700, 16), "weight": (50, 16)}),
    "plastic_lora": (
        plastic,
        {"x": (2, 40, 32), "w": (24, 32), "b_up": (24, 12), "q": (2, 40, 12), "k": (2, 40, 12), "v": (2, 40, 12)}
        | {"beta": (3, 2, 40), "a_state": (12, 12)}
        | {"wide_q": (2, 40, 144), "wide_k": (2, 40, 144), "wide_a": (12, 144)},
    ),
    "plastic_chunks": (
        chunks,
        {
            "x": (3, 40, 24),
            "w": (16, 24),
            "b_up": (16, 4),
            "q": (3, 40, 4),
            "k": (3, 40, 4),
            "v": (3, 40, 4),
            "beta": (3, 40),
            "a": (3, 4, 4),
        },
    ),
    "plastic_step": (
        step,
        {"y": (3, 16), "own": (3, 14), "last": (3, 5), "b_up": (16, 4), "rate": (1,)}
        | {"a": (3, 4, 4), "pending": (3, 4, 4)},
    ),
    "attention": (attention, {"q": (2, 50, 4, 16), "k": (2, 50, 2, 16), "v": (2, 50, 2, 16)}),
    "plastic_commit": (commit, {"a": (3, 12, 4)}),
    "add_norm": (norm, {"x": TOKENS, "y": TOKENS, "weight": CHANNELS, "bias": CHANNELS}),
    "token_shift": (shift, {"x": (2, 15, 8)}),
}
REGISTRATION = {
    "cpu": ("test_schema", "test_autograd_registration", "test_faketensor"),
    "triton": ("test_schema", "test_faketensor"),
}
COMPILED = ("wkv7", "ssd_scan", "moe_experts", "plastic_lora")  # also without the CPU's kernels
BY_TRITON = ("apply_rotary", "plastic_chunks", "router_logits")  # which need no custom operator on a CPU
SLOW = {"linear_cross_entropy"}  # in the interpreter, 3 s for its 700 rows
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def inputs_of(name: str, device: str, dtype: torch.dtype, wanted: Collection[str] | None = None) -> Arguments:
    """Inputs that depend on the name of the op alone. wanted: those that need a gradient; None: all."""
    generator = torch.Generator().manual_seed(len(name))
    inputs = {}
    for key, shape in CASES[name][1].items():
        value = torch.randn(*shape, generator=generator) / (shape[-2] ** 0.5 if key.startswith("w_") else 1)
        inputs[key] = value.to(device, dtype).requires_grad_(wanted is None or key in wanted)
    return inputs


def run(name: str, device: str, dtype: torch.dtype, wanted: Collection[str] | None = None) -> list[Tensor]:
    """Outputs and the wanted gradients (where it has any) of an op."""
    inputs = inputs_of(name, device, dtype, wanted)
    outputs = CASES[name][0](inputs)
    generator = torch.Generator()
    generator.manual_seed(0)
    weights = [torch.randn(output.shape, generator=generator).to(device, dtype) for output in outputs]
    total = sum((output * weight).sum() for output, weight in zip(outputs, weights, strict=True))
    assert isinstance(total, Tensor)
    leaves = [value for value in inputs.values() if value.requires_grad]
    gradients = torch.autograd.grad(total, leaves, materialize_grads=True) if total.requires_grad else ()
    return [tensor.detach().cpu() for tensor in (*outputs, *gradients)]


class Calls(TorchDispatchMode):
    """The calls of our custom operators, with copies of their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any]] = []

    def __torch_dispatch__(self, operator, types, arguments=(), keywords=None):  # type: ignore[no-untyped-def]
        keywords = keywords or {}
        if operator.namespace == "cdrmix":
            self.calls.append((operator, *tree_map_only(Tensor, copied, (arguments, keywords))))
        return operator(*arguments, **keywords)


def copied(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_(x.requires_grad)


def test_the_table_is_complete() -> None:
    assert set(CASES) == set(ops.OPS)
    for name, op in ops.OPS.items():
        assert getattr(ops, name) is op
        assert op.__doc__


@pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="needs numba: on a CPU it serves the operators")
def test_the_table_comes_to_every_operator_that_is_registered_with_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    with Calls() as seen:
        for name in CASES:
            monkeypatch.setenv("CDRMIX_BACKEND", "triton" if name in BY_TRITON else "cpu")
            run(name, "cpu", torch.float32)
    registered = [name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names()]
    assert {operator.name() for operator, _, _ in seen.calls} == {x for x in registered if x.startswith("cdrmix::")}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CASES)
def test_the_same_bits_every_time(name: str, device: str) -> None:
    first, second = run(name, device, torch.float32), run(name, device, torch.float32)
    assert all(torch.equal(left, right) for left, right in zip(first, second, strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CASES)
def test_float32_is_near_float64(name: str, device: str) -> None:
    """Bar: 256 eps of the largest value. Sums of up to 700 rounded terms, through at most four products in a row."""
    exact = run(name, "cpu", torch.float64)
    for found, wanted in zip(run(name, device, torch.float32), exact, strict=True):
        bar = 256 * torch.finfo(torch.float32).eps * max(wanted.abs().max().item(), 1e-3)
        assert (found.double() - wanted).abs().max().item() < bar


@pytest.mark.parametrize(
    ("name", "backend"), [*product(CASES, ["cpu"]), *product(sorted(CASES.keys() - SLOW), ["triton"])]
)
def test_pytorch_accepts_how_operators_are_registered(name: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Schema, fake tensors and autograd registration of every operator that a call comes to, also backwards; where
    all inputs have gradients, the last one alone, and none. By Triton, what can differ: shapes of the results, and what
    is written or shared."""
    monkeypatch.setenv("CDRMIX_BACKEND", backend)
    names = [*CASES[name][1]]
    with Calls() as seen:
        for wanted in (names, names[-1:], [])[: 3 if backend == "cpu" else 1]:
            run(name, "cpu", torch.float32, wanted)
    for operator, arguments, keywords in seen.calls:
        torch.library.opcheck(operator, arguments, keywords, test_utils=REGISTRATION[backend])


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # PyTorch's compiler does so
@pytest.mark.parametrize(("name", "backend"), [*product(CASES, ["cpu"]), *product(COMPILED, ["reference"])])
def test_torch_compile_passes_through_without_a_break(name: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CDRMIX_BACKEND", backend)
    function, shapes = CASES[name]
    wanted = run(name, "cpu", torch.float32)
    monkeypatch.setitem(CASES, name, (torch.compile(function, fullgraph=True, backend="aot_eager"), shapes))
    found = run(name, "cpu", torch.float32)
    torch._dynamo.reset()
    assert all(map(torch.equal, found, wanted))


def second_derivatives(name: str, dtype: torch.dtype) -> dict[str, list[Tensor] | None]:
    """Of each input's gradient the gradients with respect to all inputs; None where they are refused. Without those
    that are a part of the graph by other operators alone."""
    inputs = inputs_of(name, "cpu", dtype)
    leaves = [*inputs.values()]
    outputs = [output.square().sum() for output in CASES[name][0](inputs) if output.requires_grad]
    gradients = torch.autograd.grad(sum(outputs), leaves, create_graph=True, allow_unused=True) if outputs else ()
    found: dict[str, list[Tensor] | None] = {}
    for key, gradient in zip(inputs, gradients, strict=False):
        if gradient is not None and gradient.requires_grad:
            total = gradient.square().sum()
            try:
                found[key] = [*torch.autograd.grad(total, leaves, retain_graph=True, materialize_grads=True)]
            except RuntimeError as error:
                if not re.search("no autograd formula|once_differentiable", str(error)):
                    raise
                found[key] = None
    return found


@pytest.mark.parametrize("name", CASES)
def test_second_derivatives_are_refused_or_right(name: str) -> None:
    """Right: near those of the float64 reference, which PyTorch derives; the bar is that of first derivatives."""
    exact = second_derivatives(name, torch.float64)
    for key, found in second_derivatives(name, torch.float32).items():
        for one, other in zip(found or (), exact[key] or (), strict=found is not None):
            bar = 256 * torch.finfo(torch.float32).eps * max(other.abs().max().item(), 1e-3)
            assert (one.double() - other).abs().max().item() < bar, key


def test_bfloat16_loss_gradients_keep_the_scale_of_the_loss() -> None:
    """1 / 3000 has no short form in bfloat16: rounding it first would scale every gradient by up to 0.4 %."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(64, 16).bfloat16().requires_grad_(), torch.randn(50, 16).bfloat16()
    targets = torch.randint(0, 50, (64,))

    def gradient(scale: float) -> Tensor:
        loss = ops.linear_cross_entropy(hidden, weight, targets) * scale
        return torch.autograd.grad(loss, hidden)[0].double()

    ratio = (gradient(1 / 3000) * 3000).norm() / gradient(1.0).norm()
    assert abs(ratio - 1) < 2**-10  # rounding of single elements averages out over 1,024 of them


FRESH = """
import importlib.util
import sys
import torch

find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "numba" else find(name, *rest)
before = set(sys.modules)
import cdrmix.ops

x = torch.randn(1, 9, 1, 32)
assert cdrmix.ops.backend(x) == "reference"
assert cdrmix.ops.wkv7(x, -x.abs(), x, x, x, x)[0].shape == x.shape
new = {name.split(".")[0] for name in set(sys.modules) - before}
assert new <= set(sys.stdlib_module_names) | {"torch", "triton", "cdrmix"}, new
importlib.util.find_spec = find
if find("numba") is None:  # a bare GPU machine
    sys.exit()

import numba, llvmlite.binding

numba.njit(lambda: 0)  # numba itself asks LLVM about the processor, once

def refuse(*arguments):
    raise AssertionError("LLVM was called")

llvmlite.binding.parse_assembly = llvmlite.binding.parse_bitcode = refuse
from cdrmix.kernels.rwkv7 import cpu, cpu_simd

assert not cpu_simd.scan.signatures and not cpu_simd.scan_back.signatures
"""


@pytest.mark.slow  # a new interpreter
def test_a_fresh_process_needs_torch_alone_and_compiles_nothing_before_a_call() -> None:
    """The operators import nothing but PyTorch and Triton; the reference serves a CPU without numba; importing the
    kernels for CPUs compiles none of them and warns of nothing."""
    command = [sys.executable, "-W", "error", "-c", FRESH]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT.parent)
    assert done.returncode == 0, done.stderr
