"""The operators: each checks its arguments and calls the implementation for their device.

CUDA tensors use Triton and CPU tensors numba. float64, and what neither supports, uses plain PyTorch
(`kernels/*/reference.py`). The environment variable CDRMIX_BACKEND (triton, cpu or reference) forces one of them.
CDRMIX_DEBUG=1 turns on the checks that read values, which wait for a GPU. Importing this module needs PyTorch only:
Triton and numba are imported on first use.
"""

from __future__ import annotations

from collections.abc import Callable

from cdrmix.kernels.moe.reference import Routing
from cdrmix.kernels.rwkv7.reference import document_starts, token_shift
from cdrmix.ops.attention import attention
from cdrmix.ops.backend import backend, compute_dtype
from cdrmix.ops.cross_entropy import linear_cross_entropy
from cdrmix.ops.fast_weight_chunks import plastic_chunks, plastic_step
from cdrmix.ops.fast_weights import plastic_commit, plastic_lora
from cdrmix.ops.linear import linear
from cdrmix.ops.moe import moe_combine, moe_dispatch, moe_experts, moe_product
from cdrmix.ops.norm import add_norm
from cdrmix.ops.rotary import apply_rotary
from cdrmix.ops.router_logits import router_logits
from cdrmix.ops.routing import route_topk
from cdrmix.ops.rwkv7 import wkv7, wkv7_step
from cdrmix.ops.ssd import ssd_scan, ssd_scan_step
from cdrmix.ops.time_mix import GROUP_NORM_EPS, time_mix_keys, time_mix_output, time_mix_streams

__all__ = [
    "GROUP_NORM_EPS",
    "OPS",
    "Routing",
    "add_norm",
    "apply_rotary",
    "attention",
    "backend",
    "compute_dtype",
    "document_starts",
    "linear",
    "linear_cross_entropy",
    "moe_combine",
    "moe_dispatch",
    "moe_experts",
    "moe_product",
    "plastic_chunks",
    "plastic_commit",
    "plastic_lora",
    "plastic_step",
    "route_topk",
    "router_logits",
    "ssd_scan",
    "ssd_scan_step",
    "time_mix_keys",
    "time_mix_output",
    "time_mix_streams",
    "token_shift",
    "wkv7",
    "wkv7_step",
]

# Every operator by name: tests and benchmarks run over this table, so that none is left out.
OPS: dict[str, Callable[..., object]] = {
    "attention": attention,
    "apply_rotary": apply_rotary,
    "wkv7": wkv7,
    "wkv7_step": wkv7_step,
    "ssd_scan": ssd_scan,
    "ssd_scan_step": ssd_scan_step,
    "time_mix_streams": time_mix_streams,
    "time_mix_keys": time_mix_keys,
    "time_mix_output": time_mix_output,
    "router_logits": router_logits,
    "route_topk": route_topk,
    "moe_experts": moe_experts,
    "moe_dispatch": moe_dispatch,
    "moe_combine": moe_combine,
    "moe_product": moe_product,
    "plastic_lora": plastic_lora,
    "plastic_commit": plastic_commit,
    "plastic_chunks": plastic_chunks,
    "plastic_step": plastic_step,
    "linear": linear,
    "linear_cross_entropy": linear_cross_entropy,
    "add_norm": add_norm,
    "token_shift": token_shift,
}
