"""Checks every family of kernels once, forward and backward, in one shape and dtype: finite, and close to float64.

python smoke.py [--device cuda|cpu] [--family NAME ...]

The widths are those of the training rows, so that the kernels compiled here are in Triton's cache when those run; the
tokens are few. All families run at once, each in a process of its own, because compilation takes almost all of the time
and one processor. Exit code 1 if a family fails, gives a value that is not finite, or is far from the reference.
On a CPU (Triton's interpreter, TRITON_INTERPRET=1) the widths are small and the dtype is float32.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from measure import relative_error
from torch import Tensor
from torch.nn import functional

from cdrmix import ops
from cdrmix.ops import weights

# Relative error in the 2-norm. The rows' own targets are 7e-3 for outputs and 1e-2 for gradients in bfloat16, which
# rounds operands by 2^-9; float32 rounds them by 2^-24. A wrong tile, chunk or gradient gives an error near 1.
BARS = {torch.bfloat16: 3e-2, torch.float32: 1e-4}


@dataclass(frozen=True)
class Sizes:
    """Sizes of all families; documents in a row end inside of chunks and tiles."""

    tokens: int
    d_model: int
    hidden: int
    experts: int
    head: int
    heads: int
    vocabulary: int


GPU = Sizes(tokens=336, d_model=2048, hidden=4608, experts=8, head=64, heads=32, vocabulary=50_272)
TOY = Sizes(tokens=40, d_model=32, hidden=24, experts=4, head=32, heads=1, vocabulary=72)

Leaves = dict[str, Tensor]
Outputs = Callable[[Leaves], list[Tensor]]  # computed from leaves of any dtype
Normal = Callable[..., Tensor]  # normal values of a shape


def documents(sizes: Sizes, device: torch.device) -> Tensor:
    """int64 [4]: starts of three documents in a row, the second one empty, and its end."""
    return torch.tensor([0, sizes.tokens // 3, sizes.tokens // 3, sizes.tokens], device=device)


def unit(x: Tensor) -> Tensor:
    return functional.normalize(x.float(), dim=-1).to(x.dtype)


def as_in_training(*trained: Tensor) -> AbstractContextManager[object]:
    """Autocast around products of float32 weights with attached copies and gradient sums, as in the engine.

    It does nothing on a CPU and for float64.
    """
    if trained[0].device.type != "cuda" or trained[0].dtype != torch.float32:
        return nullcontext()
    weights.attach(trained, torch.bfloat16, add_gradients=True)
    return torch.autocast("cuda", torch.bfloat16)


def recurrence(sizes: Sizes, normal: Normal) -> tuple[Leaves, Outputs]:
    """wkv7 over packed documents, with a state in and out."""
    shape = (1, sizes.tokens, sizes.heads, sizes.head)
    removal = unit(normal(*shape))
    leaves = {name: normal(*shape) for name in "rkv"} | {"a": -removal, "b": removal * normal(*shape).sigmoid()}
    leaves["log_w"] = -0.6065 * normal(*shape).sigmoid()
    leaves["state"] = normal(3, sizes.heads, sizes.head, sizes.head).float()
    cu_seqlens = documents(sizes, leaves["r"].device)

    def outputs(x: Leaves) -> list[Tensor]:
        streams = (x[name] for name in ("r", "log_w", "k", "v", "a", "b"))
        y, last = ops.wkv7(*streams, state=x["state"], cu_seqlens=cu_seqlens, return_state=True)
        assert last is not None
        return [y, last]

    return leaves, outputs


def time_mix(sizes: Sizes, normal: Normal) -> tuple[Leaves, Outputs]:
    """The operators around the recurrence, with the value residual."""
    width, shape = sizes.heads * sizes.head, (1, sizes.tokens, sizes.heads * sizes.head)
    leaves = {name: normal(*shape) for name in ("x", "v_first", "v_gate", "y")} | {"last": normal(1, width)}
    leaves["mixes"] = normal(6, width).float().sigmoid()
    for name in ("w0", "a0", "v0", "k_k", "k_a", "weight", "bias"):
        leaves[name] = normal(width).float()
    leaves["r_k"] = normal(sizes.heads, sizes.head).float()
    starts = torch.arange(sizes.tokens, device=leaves["x"].device)[None] % 90 == 31

    def outputs(x: Leaves) -> list[Tensor]:
        k, decay, rate, v, r, gate = ops.time_mix_streams(x["x"], x["mixes"], x["last"], starts)
        extra = (x[name] for name in ("v_first", "v_gate", "w0", "a0", "v0", "k_k", "k_a"))
        keys = ops.time_mix_keys(k, decay, rate, v, *extra, sizes.head)
        by_head = (1, sizes.tokens, sizes.heads, sizes.head)
        y = ops.time_mix_output(
            x["y"].view(by_head), r.view(by_head), keys[1], keys[4], gate, x["r_k"], x["weight"], x["bias"]
        )
        return [y, keys[0], keys[2], keys[3]]

    return leaves, outputs


def attention(sizes: Sizes, normal: Normal) -> tuple[Leaves, Outputs]:
    """Packed documents, two query heads for each key head."""
    width = (sizes.tokens, 2 * sizes.heads, sizes.head)
    leaves = {"q": normal(1, *width), "k": normal(1, sizes.tokens, sizes.heads, sizes.head)}
    leaves["v"] = normal(1, sizes.tokens, sizes.heads, sizes.head)
    cu_seqlens = documents(sizes, leaves["q"].device)
    return leaves, lambda x: [ops.attention(x["q"], x["k"], x["v"], cu_seqlens=cu_seqlens)]


def norm(sizes: Sizes, normal: Normal) -> tuple[Leaves, Outputs]:
    """The residual sum and both norms of it."""
    leaves = {name: normal(sizes.tokens, sizes.d_model) for name in "xy"}
    leaves |= {name: normal(sizes.d_model).float() for name in ("weight", "bias")}

    def outputs(x: Leaves) -> list[Tensor]:
        total, normed = ops.add_norm(x["x"], x["y"], x["weight"], x["bias"], kind="layernorm")
        return [total, normed, ops.add_norm(total, None, x["weight"], kind="rmsnorm")[1]]

    return leaves, outputs


def projection(sizes: Sizes, normal: Normal) -> tuple[Leaves, Outputs]:
    """A product with a trained weight, whose gradient is summed in float32."""
    leaves = {"x": normal(sizes.tokens, sizes.d_model)}
    leaves["weight"] = normal(sizes.d_model, sizes.d_model).float() * sizes.d_model**-0.5

    def outputs(x: Leaves) -> list[Tensor]:
        with as_in_training(x["weight"]):
            return [ops.linear(x["x"], x["weight"])]

    return leaves, outputs


def router(sizes: Sizes, normal: Normal) -> tuple[Leaves, Outputs]:
    """The router's float32 product."""
    leaves = {"x": normal(sizes.tokens, sizes.d_model)}
    leaves["weight"] = normal(sizes.experts, sizes.d_model).float() * sizes.d_model**-0.5
    return leaves, lambda x: [ops.router_logits(x["x"], x["weight"])]


def rotary(sizes: Sizes, normal: Normal) -> tuple[Leaves, Outputs]:
    """Rotary positions."""
    leaves = {"x": normal(1, sizes.tokens, sizes.heads, sizes.head)}
    angles = normal(1, sizes.tokens, 1, sizes.head // 2)
    return leaves, lambda x: [ops.apply_rotary(x["x"], angles.cos(), angles.sin())]


def mixture(activation: str, *, trained: bool) -> Callable[[Sizes, Normal], tuple[Leaves, Outputs]]:
    """Routing, experts, dispatch and combination, with this activation; trained: with weights as in the engine."""

    def make(sizes: Sizes, normal: Normal) -> tuple[Leaves, Outputs]:
        wide = sizes.hidden * (2 if activation == "swiglu" else 1)
        leaves = {
            "x": normal(sizes.tokens, sizes.d_model),
            "logits": normal(sizes.tokens, sizes.experts).float(),
            "w_up": normal(sizes.experts, sizes.d_model, wide) * sizes.d_model**-0.5,
            "w_down": normal(sizes.experts, sizes.hidden, sizes.d_model) * sizes.hidden**-0.5,
        }
        if trained:
            leaves |= {name: leaves[name].float() for name in ("w_up", "w_down")}

        def outputs(x: Leaves) -> list[Tensor]:
            with as_in_training(x["w_up"], x["w_down"]):
                routing = ops.route_topk(x["logits"], 2)
                y = ops.moe_experts(x["x"], x["w_up"], x["w_down"], routing, activation=activation)
                back = ops.moe_combine(ops.moe_dispatch(x["x"], routing), routing)
            return [y, back, routing.load_balance, routing.z_loss]

        return leaves, outputs

    return make


def loss(sizes: Sizes, normal: Normal) -> tuple[Leaves, Outputs]:
    """Linear cross-entropy with the z-loss."""
    leaves = {
        "hidden": normal(sizes.tokens, sizes.d_model),
        "weight": normal(sizes.vocabulary, sizes.d_model) * sizes.d_model**-0.5,
    }
    targets = torch.arange(sizes.tokens, device=leaves["hidden"].device)[None] * 7919 % sizes.vocabulary
    targets[:, ::5] = -100
    return leaves, lambda x: [ops.linear_cross_entropy(x["hidden"], x["weight"], targets, z_loss=1e-4)]


def scan(sizes: Sizes, normal: Normal) -> tuple[Leaves, Outputs]:
    """The SSD scan over packed documents, with a state in and out."""
    shape = (1, sizes.tokens, sizes.heads, sizes.head)
    leaves = {name: normal(*shape) for name in "qkv"}
    leaves["log_decay"] = -normal(*shape[:3]).float().abs()
    leaves["state"] = normal(3, sizes.heads, sizes.head, sizes.head).float()
    cu_seqlens = documents(sizes, leaves["q"].device)

    def outputs(x: Leaves) -> list[Tensor]:
        streams = (x[name] for name in ("q", "k", "v", "log_decay"))
        y, last = ops.ssd_scan(*streams, state=x["state"], cu_seqlens=cu_seqlens, return_state=True)
        assert last is not None
        return [y, last]

    return leaves, outputs


def plastic(sizes: Sizes, normal: Normal) -> tuple[Leaves, Outputs]:
    """The plastic update by the delta rule, of rank 16."""
    width = sizes.d_model
    leaves = {
        "x": normal(1, sizes.tokens, width),
        "weight": normal(width, width) * width**-0.5,
        "b": normal(width, 16) * 0.25,
        "q": normal(1, sizes.tokens, 16),
        "k": unit(normal(1, sizes.tokens, 16)),
        "v": unit(normal(1, sizes.tokens, 16)),
        "beta": normal(1, sizes.tokens).sigmoid(),
        "a": normal(1, 16, 16).float(),
    }
    return leaves, lambda x: list(ops.plastic_lora(*x.values(), alpha=0.5, decay=0.9, rule="delta"))


def plastic_chunks(sizes: Sizes, normal: Normal) -> tuple[Leaves, Outputs]:
    """A row of four whole chunks and a part of one, rank 8 and keys as wide as a head: as in the reasoning models."""
    leaves = {
        "x": normal(1, sizes.tokens, sizes.d_model),
        "weight": normal(sizes.d_model, sizes.d_model) * sizes.d_model**-0.5,
        "b": normal(sizes.d_model, 8) * 0.25,
        "q": unit(normal(1, sizes.tokens, sizes.head)),
        "k": unit(normal(1, sizes.tokens, sizes.head)),
        "v": normal(1, sizes.tokens, 8),
        "beta": normal(1, sizes.tokens).sigmoid(),
        "a": normal(1, 8, sizes.head).float() * 0.1,
        "pending": normal(1, 8, sizes.head).float() * 0.1,
    }
    chunk = sizes.tokens // 4 - 1
    place = {"chunk": chunk, "position": 0, "alpha": 0.5, "decay": 0.9, "limit": 2.0}
    return leaves, lambda x: list(ops.plastic_chunks(*x.values(), **place))


FAMILIES: dict[str, Callable[[Sizes, Normal], tuple[Leaves, Outputs]]] = {
    "wkv7": recurrence,
    "time_mix": time_mix,
    "router": router,
    "rotary": rotary,
    "moe_relu2": mixture("relu2", trained=True),
    "moe_swiglu": mixture("swiglu", trained=False),
    "attention": attention,
    "norm": norm,
    "projection": projection,
    "ce": loss,
    "scan": scan,
    "plastic": plastic,
    "plastic_chunks": plastic_chunks,
}


def errors(name: str, device: torch.device) -> dict[str, float]:
    """The family's errors against float64, for each output and each gradient; infinite where a value is not finite."""
    on_gpu = device.type == "cuda"
    generator = torch.Generator(device).manual_seed(11)
    dtype = torch.bfloat16 if on_gpu else torch.float32

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    leaves, outputs = FAMILIES[name](GPU if on_gpu else TOY, normal)
    factors: list[Tensor] = []

    def run(backend: str, inputs: Leaves) -> dict[str, Tensor]:
        os.environ["CDRMIX_BACKEND"] = backend
        inputs = {key: x.detach().requires_grad_() for key, x in inputs.items()}
        found = outputs(inputs)
        if not factors:  # of the sum that is differentiated: the same for both
            factors.extend(torch.randn(y.shape, generator=generator, device=device) for y in found)
        total = torch.stack([(y.double() * factor).sum() for y, factor in zip(found, factors, strict=True)]).sum()
        torch.autograd.backward(total)
        values = {f"output {i}": y.detach() for i, y in enumerate(found)}
        gradients = {f"d{key}": x.grad for key, x in inputs.items() if x.grad is not None}
        assert len(gradients) == len(inputs), "an input has no gradient"
        return values | gradients

    found = run("triton", leaves)
    exact = run("reference", {key: x.double() for key, x in leaves.items()})
    finite = {key: bool(x.isfinite().all()) for key, x in found.items()}
    return {key: relative_error(found[key], exact[key]) if finite[key] else float("inf") for key in exact}


def check(name: str, device: torch.device) -> bool:
    """Runs one family and prints a line about it; returns whether it passed."""
    begun = time.perf_counter()
    found = errors(name, device)
    worst = max(found, key=lambda key: found[key])
    bar = BARS[torch.bfloat16 if device.type == "cuda" else torch.float32]
    well = found[worst] < bar
    verdict = "close" if well else "NOT CLOSE" if found[worst] < float("inf") else "NOT FINITE"
    seconds = time.perf_counter() - begun
    print(f"smoke {name}: {verdict} to float64: {found[worst]:.1e} in {worst}, at most {bar:.0e}; {seconds:.1f} s")
    return well


def main() -> int:
    """Exit code 0: all families are close to the reference; 1: one is not, or failed; 2: usage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--family", action="append", choices=FAMILIES, help="default: all")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("no GPU found: PyTorch sees no CUDA device")
    names = arguments.family or list(FAMILIES)
    if len(names) == 1:
        return 0 if check(names[0], torch.device(arguments.device)) else 1
    begun = time.perf_counter()
    command = [sys.executable, __file__, "--device", arguments.device, "--family"]
    running = {name: subprocess.Popen([*command, name]) for name in names}
    failed = [name for name, process in running.items() if process.wait() != 0]
    print(f"smoke: {time.perf_counter() - begun:.1f} s; {'FAILED: ' + ', '.join(failed) if failed else 'all close'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
