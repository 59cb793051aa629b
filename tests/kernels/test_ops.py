"""Every operator of cdrmix.ops, by the table: repeatable to the bit, float32 near float64, on every device there is."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

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
    y, state = ops.wkv7(x["r"], log_w, x["k"], x["v"], -k, k * rate, cu_seqlens=cu_seqlens, return_state=True)
    assert state is not None
    return y, state


def wkv7_step(x: Arguments) -> tuple[Tensor, ...]:
    token = {name: tensor.detach() for name, tensor in x.items()}
    k = functional.normalize(token["a"], dim=-1)
    log_w, rate = -0.6 * token["w"].sigmoid(), token["b"].sigmoid()
    return ops.wkv7_step(token["r"], log_w, token["k"], token["v"], -k, k * rate, token["state"])


def ssd_scan(x: Arguments) -> tuple[Tensor, ...]:
    cu_seqlens = torch.tensor([0, 11, 50, 100], dtype=torch.int32, device=x["q"].device)
    y, state = ops.ssd_scan(x["q"], x["k"], x["v"], -x["w"].exp(), cu_seqlens=cu_seqlens, return_state=True)
    assert state is not None
    return y, state


def ssd_scan_step(x: Arguments) -> tuple[Tensor, ...]:
    token = {name: tensor.detach() for name, tensor in x.items()}
    return ops.ssd_scan_step(token["q"], token["k"], token["v"], -token["w"].exp(), token["state"])


def moe(x: Arguments) -> tuple[Tensor, ...]:
    routing = ops.route_topk(x["x"] @ x["gate"], 2)
    y = ops.moe_experts(x["x"], x["w_up"], x["w_down"], routing)
    return y, routing.load_balance, routing.z_loss


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


def product(x: Arguments) -> tuple[Tensor, ...]:
    routing = ops.route_topk(x["logits"].detach(), 2, capacity=12)
    return (ops.moe_product(x["rows"], x["w"], routing),)


def cross_entropy(x: Arguments) -> tuple[Tensor, ...]:
    hidden = x["hidden"]
    targets = torch.arange(hidden.shape[0], device=hidden.device) % x["weight"].shape[0]
    weights = 1 + torch.arange(hidden.shape[0], device=hidden.device) % 3
    options = {"weights": weights.to(hidden.dtype), "z_loss": 1e-3, "label_smoothing": 0.1, "ignore_index": 7}
    return (ops.linear_cross_entropy(hidden, x["weight"], targets, **options) / len(targets),)


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
    made = ops.plastic_chunks(*inputs, chunk=16, position=5, alpha=0.5, decay=0.9, limit=2.0, starts=starts)
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
    "moe_product": (product, {"rows": (40, 16), "w": (4, 16, 24), "logits": (20, 4)}),
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
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def drawn(name: str, device: str, dtype: torch.dtype) -> Arguments:
    """Inputs of an op, which depend on its name alone."""
    generator = torch.Generator().manual_seed(len(name))
    inputs = {}
    for key, shape in CASES[name][1].items():
        value = torch.randn(*shape, generator=generator) / (shape[-2] ** 0.5 if key.startswith("w_") else 1)
        inputs[key] = value.to(device, dtype).requires_grad_()
    return inputs


def run(name: str, device: str, dtype: torch.dtype) -> list[Tensor]:
    """Outputs and all gradients (where it has any) of an op."""
    inputs = drawn(name, device, dtype)
    outputs = CASES[name][0](inputs)
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(output.shape, generator=generator).to(device, dtype) for output in outputs]
    total = sum((output * weight).sum() for output, weight in zip(outputs, weights, strict=True))
    assert isinstance(total, Tensor)
    wanted = list(inputs.values())
    gradients = torch.autograd.grad(total, wanted, materialize_grads=True) if total.requires_grad else ()
    return [tensor.detach().cpu() for tensor in (*outputs, *gradients)]


def test_the_table_is_complete() -> None:
    assert set(CASES) == set(ops.OPS)
    for name, op in ops.OPS.items():
        assert getattr(ops, name) is op
        assert op.__doc__


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


# Linear in each of their inputs, and their gradients are such ops again.
LINEAR = {"apply_rotary", "linear", "moe_combine", "moe_dispatch", "plastic_commit", "router_logits"}


@pytest.mark.parametrize("name", sorted(CASES.keys() - LINEAR))
def test_second_derivatives_are_refused_and_not_wrong(name: str) -> None:
    """Of each output, by each input that it depends on."""
    inputs = drawn(name, "cpu", torch.float32)
    for output in filter(lambda output: output.requires_grad, CASES[name][0](inputs)):
        for x in inputs.values():
            (gradient,) = torch.autograd.grad(output.square().sum(), x, create_graph=True, allow_unused=True)
            if gradient is not None:
                with pytest.raises(RuntimeError, match=r"no autograd formula|once_differentiable"):
                    gradient.sum().backward(retain_graph=True)


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
