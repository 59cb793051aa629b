"""The element-wise work around RWKV-7's recurrence in Triton: each tensor read once and written once, float32 inside.

The formulas are in `reference.py`. The backward kernels compute every sigmoid, norm and mean again from the inputs. A
program handles BLOCK tokens of one head (streams: of BLOCK_D channels). In the backward pass it loops over STEPS such
blocks and writes one row of sums over its tokens for each parameter; torch.sum adds the rows in a fixed order. There
are no atomics: parameters' gradients have the same bits every time, and no token's result depends on its position.

Bytes a token and channel in bfloat16 (plain PyTorch's passes read and write whole tensors, about 3 times as much):
    streams  2 read, 12 written; backward 14 read, 2 written. Kept for the backward pass: x.
    keys     12 read, 12 written; backward 24 read, 12 written. Kept: k, decay, rate, v, v_first, v_gate.
    output   10 read, 2 written; backward 12 read, 10 written. Kept: y, r, k, v, gate (the recurrence keeps r, k, v).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from cdrmix.kernels.common.triton_helpers import ARCHITECTURES, Build, architecture
from cdrmix.kernels.moe.triton_rows import on
from cdrmix.kernels.time_mix.triton_kernels import (
    time_mix_keys_backward_kernel,
    time_mix_keys_forward_kernel,
    time_mix_output_backward_kernel,
    time_mix_output_forward_kernel,
    time_mix_streams_backward_kernel,
    time_mix_streams_forward_kernel,
    time_mix_values_backward_kernel,
)

HEAD_SIZES = (32, 64, 128)
STREAM_WIDTHS = {"streams_forward": 128, "streams_backward": 1024}  # the most channels of a program
UNIT = 32  # D is a multiple of it, so that rows start at multiples of 64 bytes


@dataclass(frozen=True)
class Launch:
    """elements: of a block, BLOCK tokens times its channels; steps: blocks that a program loops over."""

    elements: int
    num_warps: int
    steps: int = 0


# The fastest by estimates for an H200 (compiled code) among those that spill no register on Triton 3.6 to 3.9. The
# streams' backward pass, 32 tokens of 1024 channels, was measured on one.
_USUAL = {
    "streams_forward": Launch(1024, 4),
    "streams_backward": Launch(32 * 1024, 8),
    "keys_forward": Launch(1024, 4),
    "keys_backward": Launch(1024, 4, 3),
    "values_backward": Launch(1024, 4, 4),
    "output_forward": Launch(1024, 4),
    "output_backward": Launch(1024, 4, 2),
}
LAUNCHES = {
    **dict.fromkeys(ARCHITECTURES, _USUAL),
    "sm_80": {**_USUAL, "values_backward": Launch(1024, 4, 2), "output_forward": Launch(512, 4)},
}


def _plan(kernel: str, arch: str, channels: int) -> tuple[dict[str, int], dict[str, int]]:
    """Constants and options of a kernel whose blocks are `channels` wide."""
    launch = LAUNCHES[arch][kernel]
    constants = {"BLOCK": launch.elements // channels}
    if launch.steps:
        constants["STEPS"] = launch.steps
    return constants, {"num_warps": launch.num_warps, "num_stages": 1}


def _count(tokens: int, constants: dict[str, int]) -> int:
    """Programs along the tokens."""
    assert tokens < 2**31
    return triton.cdiv(tokens, constants["BLOCK"] * constants.get("STEPS", 1))


def _streams_plan(
    kernel: str, arch: str, width: int, *, has_last: bool, has_starts: bool
) -> tuple[dict[str, int], dict[str, int]]:
    channels = STREAM_WIDTHS[kernel]
    constants, options = _plan(kernel, arch, channels)
    flags = {"HAS_LAST": has_last, "HAS_STARTS": has_starts}
    return {"UNIT": UNIT, "BLOCK_D": min(channels, triton.next_power_of_2(width)), **constants, **flags}, options


def time_mix_streams_forward(
    x_BTD: Tensor, mixes_6D: Tensor, last_BD: Tensor | None, starts_BT: Tensor | None, dtype: torch.dtype
) -> list[Tensor]:
    """The six streams [B, T, D] in dtype."""
    batch, length, width = x_BTD.shape
    flags = {"has_last": last_BD is not None, "has_starts": starts_BT is not None}
    constants, options = _streams_plan("streams_forward", architecture(x_BTD.device), width, **flags)
    streams = [torch.empty_like(x_BTD, dtype=dtype) for _ in range(6)]
    last = x_BTD if last_BD is None else last_BD
    starts = x_BTD if starts_BT is None else starts_BT.view(torch.int8)
    grid = (_count(batch * length, constants) * triton.cdiv(width, constants["BLOCK_D"]),)
    with on(x_BTD.device):
        time_mix_streams_forward_kernel[grid](
            x_BTD, mixes_6D, last, starts, *streams, batch * length, length, width // UNIT, **constants, **options
        )
    return streams


def time_mix_streams_backward(
    dstreams: list[Tensor], x_BTD: Tensor, mixes_6D: Tensor, last_BD: Tensor | None, starts_BT: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """dx [B, T, D], dmixes [6, D], dlast [B, D] (empty where last_BD is None)."""
    batch, length, width = x_BTD.shape
    flags = {"has_last": last_BD is not None, "has_starts": starts_BT is not None}
    constants, options = _streams_plan("streams_backward", architecture(x_BTD.device), width, **flags)
    dx = torch.empty_like(x_BTD)
    dlast = x_BTD.new_empty(0) if last_BD is None else torch.empty_like(last_BD)
    last = x_BTD if last_BD is None else last_BD
    starts = x_BTD if starts_BT is None else starts_BT.view(torch.int8)
    programs = _count(batch * length, constants)
    partial = x_BTD.new_empty(programs, 6, width, dtype=torch.float32)
    with on(x_BTD.device):
        time_mix_streams_backward_kernel[(programs * triton.cdiv(width, constants["BLOCK_D"]),)](
            *dstreams, x_BTD, mixes_6D, last, starts, dx, dlast, partial, batch * length, length, width // UNIT,
            **constants, **options,
        )  # fmt: skip
    return dx, partial.sum(0), dlast


def time_mix_keys_forward(
    k: Tensor,
    decay: Tensor,
    rate: Tensor,
    v: Tensor,
    v_first: Tensor | None,
    v_gate: Tensor | None,
    w0: Tensor,
    a0: Tensor,
    v0: Tensor | None,
    k_k: Tensor,
    k_a: Tensor,
    head_size: int,
) -> list[Tensor]:
    """log_w (bfloat16 for bfloat16, else float32), k', a, b and, where v_first is given, v': each [B, T, D].

    bfloat16 is enough for a decay: rounding it changes the recurrence's y by 5e-4 and its gradients by at most 9e-4, as
    RMS ratios to float64. Rounding these results themselves changes them by 1.7e-3 and more.
    """
    has_v = v_first is not None
    constants, options = _plan("keys_forward", architecture(k.device), head_size)
    decay_dtype = k.dtype if k.dtype == torch.bfloat16 else torch.float32
    results = [torch.empty_like(k, dtype=decay_dtype), *(torch.empty_like(k) for _ in range(3))]
    new_v = [torch.empty_like(v)] if has_v else []
    heads = k.shape[-1] // head_size
    tokens = k.numel() // k.shape[-1]
    inputs = (k, decay, rate, v, v_first, v_gate, w0, a0, v0, k_k, k_a)
    with on(k.device):
        time_mix_keys_forward_kernel[(_count(tokens, constants) * heads,)](
            *(k if x is None else x for x in inputs), *results, *(new_v or [k]), tokens, heads,
            K=head_size, HAS_V=has_v, **constants, **options,
        )  # fmt: skip
    return results + new_v


def time_mix_keys_backward(
    gradients: list[Tensor],
    k: Tensor,
    decay: Tensor,
    rate: Tensor,
    v: Tensor,
    v_first: Tensor | None,
    v_gate: Tensor | None,
    w0: Tensor,
    a0: Tensor,
    v0: Tensor | None,
    k_k: Tensor,
    k_a: Tensor,
    head_size: int,
) -> list[Tensor]:
    """dk, ddecay, drate, [4, D] of w0, a0, k_k, k_a and, where v_first is given, dv, dv_first, dv_gate, dv0 [1, D].

    gradients: of log_w, k', a, b and, where v_first is given, v'.
    """
    heads = k.shape[-1] // head_size
    tokens = k.numel() // k.shape[-1]
    constants, options = _plan("keys_backward", architecture(k.device), head_size)
    programs = _count(tokens, constants)
    partial = k.new_empty(programs, 4, k.shape[-1], dtype=torch.float32)
    results = [torch.empty_like(x) for x in (k, decay, rate)]
    with on(k.device):
        time_mix_keys_backward_kernel[(programs * heads,)](
            *gradients[:4], k, decay, rate, w0, a0, k_k, k_a, *results, partial, tokens, heads,
            K=head_size, **constants, **options,
        )  # fmt: skip
    results.append(partial.sum(0))
    if v_first is None or v_gate is None or v0 is None:
        return results
    constants, options = _plan("values_backward", architecture(k.device), head_size)
    programs = _count(tokens, constants)
    partial = k.new_empty(programs, 1, k.shape[-1], dtype=torch.float32)
    changes = [torch.empty_like(x) for x in (v, v_first, v_gate)]
    with on(k.device):
        time_mix_values_backward_kernel[(programs * heads,)](
            gradients[4], v, v_first, v_gate, v0, *changes, partial, tokens, heads, K=head_size, **constants, **options
        )
    return [*results, *changes, partial.sum(0)]


def time_mix_output_forward(
    y: Tensor, r: Tensor, k: Tensor, v: Tensor, gate: Tensor, r_k: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> Tensor:
    """[B, T, D] in gate's dtype from y, r, k, v [B, T, H, K]."""
    batch, length, heads, head_size = y.shape
    constants, options = _plan("output_forward", architecture(y.device), head_size)
    out = torch.empty_like(gate)
    with on(y.device):
        time_mix_output_forward_kernel[(_count(batch * length, constants) * heads,)](
            y, r, k, v, gate, r_k, weight, bias, out, batch * length, heads, eps, K=head_size, **constants, **options
        )
    return out


def time_mix_output_backward(
    dout: Tensor,
    y: Tensor,
    r: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    r_k: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
) -> list[Tensor]:
    """dy, dr, dk, dv, dgate, and [3, D] of r_k, weight, bias."""
    batch, length, heads, head_size = y.shape
    constants, options = _plan("output_backward", architecture(y.device), head_size)
    results = [torch.empty_like(x) for x in (y, r, k, v, gate)]
    programs = _count(batch * length, constants)
    partial = y.new_empty(programs, 3, heads * head_size, dtype=torch.float32)
    with on(y.device):
        time_mix_output_backward_kernel[(programs * heads,)](
            dout, y, r, k, v, gate, r_k, weight, bias, *results, partial, batch * length, heads, eps,
            K=head_size, **constants, **options,
        )  # fmt: skip
    return [*results, partial.sum(0)]


# Arguments other than [tokens, D] in the products' dtype. x is the norm's output, float32 under autocast.
_PARAMETERS = ("mixes", "w0", "a0", "v0", "k_k", "k_a", "r_k", "weight", "bias", "last", "dlast", "partial")
_KINDS = {
    **dict.fromkeys(_PARAMETERS, "*fp32"),
    **dict.fromkeys(("x", "dx"), "*fp32"),
    **dict.fromkeys(("tokens", "length", "units", "heads"), "i32"),
    "starts": "*i8",
    "eps": "fp32",
}
WIDTH = 2048  # of what is compiled ahead of time
_VALUES = ("v", "v_first", "v_gate", "new_v", "dnew_v", "dv", "dv_first", "dv_gate")
_FLOPS = {  # a token and channel
    time_mix_streams_forward_kernel: 13,
    time_mix_streams_backward_kernel: 50,
    time_mix_keys_forward_kernel: 40,
    time_mix_keys_backward_kernel: 60,
    time_mix_values_backward_kernel: 18,
    time_mix_output_forward_kernel: 17,
    time_mix_output_backward_kernel: 40,
}


def _build(kernel: Any, dtype: str, constants: dict[str, int], options: dict[str, int]) -> Build:
    tokens, width = 8 * 4096, WIDTH
    signature = {name: _KINDS.get(name, f"*{dtype}") for name in kernel.arg_names if name not in constants}
    unused = _VALUES if constants.get("HAS_V") is False else ()
    moved = (kind for name, kind in signature.items() if name not in (*_PARAMETERS, *unused))
    rounds = "BLOCK" if kernel is time_mix_streams_backward_kernel else "STEPS"
    return Build(
        kernel.fn.__name__.removesuffix("_kernel"),
        kernel,
        signature,
        constants,
        num_warps=options["num_warps"],
        num_stages=options["num_stages"],
        programs=_count(tokens, constants) * triton.cdiv(width, constants.get("K") or constants["BLOCK_D"]),
        flops=_FLOPS[kernel] * tokens * width,
        bytes=tokens * width * sum({"*bf16": 2, "*fp32": 4}.get(kind, 0) for kind in moved),
        trips=(constants[rounds],) if rounds in constants else (),
    )


def builds(architecture: str) -> list[Build]:
    """Every shipped configuration in bfloat16 and float32; float16 differs from bfloat16 only in conversions."""
    streams = {"forward": time_mix_streams_forward_kernel, "backward": time_mix_streams_backward_kernel}
    by_head = {
        "keys_backward": time_mix_keys_backward_kernel,
        "values_backward": time_mix_values_backward_kernel,
        "output_forward": time_mix_output_forward_kernel,
        "output_backward": time_mix_output_backward_kernel,
    }
    found = []
    for dtype in ("bf16", "fp32"):
        for pass_name, kernel in streams.items():
            for has_last, has_starts in ((False, False), (False, True), (True, False), (True, True)):
                flags = {"has_last": has_last, "has_starts": has_starts}
                found.append(
                    _build(kernel, dtype, *_streams_plan(f"streams_{pass_name}", architecture, WIDTH, **flags))
                )
        for head_size in HEAD_SIZES:
            for name, kernel in by_head.items():
                constants, options = _plan(name, architecture, head_size)
                found.append(_build(kernel, dtype, {"K": head_size, **constants}, options))
            constants, options = _plan("keys_forward", architecture, head_size)
            for has_v in (False, True):
                everything = {"K": head_size, "HAS_V": has_v, **constants}
                found.append(_build(time_mix_keys_forward_kernel, dtype, everything, options))
    return found
