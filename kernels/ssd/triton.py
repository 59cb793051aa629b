"""The SSD scan in Triton: a short scan over the chunks' states, and the chunks in parallel, forward and in reverse.

    S_t = exp(log_decay_t) S_{t-1} + v_t k_t^T ;  y_t = S_t q_t, or S_{t-1} q_t        S: [V, K]

q, k [B, T, G, K]; v, y [B, T, H, V]; log_decay [B, T, H]; states float32 [N, H, V, K], one a document. A document is a
row, or a span of the B * T tokens that cu_seqlens [N + 1] gives. A new chunk starts at each document, so a document has
the same bits packed or alone. There are no atomics and no tuning at run time: the same bits every time.

Products take bfloat16 operands for bfloat16 tensors, and float32 operands otherwise. Float16 tensors are multiplied as
TF32, which has the 10 bits of mantissa of float16 and the range that states need. Float32 tensors are multiplied in
float32, or as three TF32 products, with errors of 2e-6.

Kept for the backward pass besides the inputs: the states at the chunks' starts, K V / C elements a token and head. At
K = V = 64 and C = 32 in bfloat16 that is twice as much as v.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from cdrmix.kernels.common.chunks import chunk_table, long_starts, operand_dtype, slot_count
from cdrmix.kernels.common.triton_helpers import INTERPRETED, Build, architecture
from cdrmix.kernels.ssd.triton_chunk import (
    ssd_scan_gradient_keys,
    ssd_scan_gradient_values,
    ssd_scan_read,
    ssd_scan_states,
    ssd_scan_states_back,
    ssd_scan_token,
)

LARGEST = 256  # largest width of keys and of values
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
KERNELS: dict[str, Any] = {
    "states": ssd_scan_states,
    "read": ssd_scan_read,
    "states_back": ssd_scan_states_back,
    "gradient_values": ssd_scan_gradient_values,
    "gradient_keys": ssd_scan_gradient_keys,
    "token": ssd_scan_token,
}
SCANS = ("states", "states_back")  # one program a document, head and tile of the state; the others have one a chunk


@dataclass(frozen=True)
class Launch:
    """A kernel's launch: warps a program, stages of its loads, and columns of K and V that it holds at a time."""

    num_warps: int
    num_stages: int
    block_k: int
    block_v: int


def chunk_sizes(dtype: torch.dtype, arch: str = "sm_90") -> tuple[int, ...]:
    """The chunk lengths that ship for a dtype, the default first. The interpreter has both, for tests.

    The default is 32, by the estimates of benchmarks/aot.py 1.2 times as fast as 64, whose tiles leave too few
    registers for two programs a multiprocessor. 64 halves the bytes kept for the backward pass, and ships where it does
    not spill.
    """
    return (32, 64) if INTERPRETED or (dtype == torch.bfloat16 and arch == "sm_90") else (32,)


# By dtype: warps a program, and the most columns of K and of V at a time. They are the fastest, by the estimates for
# sm_90, of those tried that spill nowhere. In bfloat16 2 warps are 1.6 times as fast where they fit: for values up to
# K = 64 except on sm_100, and for keys up to 32.
Tiles = dict[str, tuple[int, int, int]]
_BF16: Tiles = {
    "states": (4, 64, 32),
    "read": (4, 64, 64),
    "states_back": (4, 64, 32),
    "gradient_values": (4, 32, 64),
    "gradient_keys": (4, 64, 32),
}
_FP16: Tiles = {
    "states": (4, 64, 32),
    "read": (4, 32, 32),
    "states_back": (4, 64, 32),
    "gradient_values": (4, 32, 32),
    "gradient_keys": (4, 32, 32),
}
_FP32: Tiles = {
    "states": (4, 32, 32),
    "read": (8, 32, 32),
    "states_back": (4, 32, 32),
    "gradient_values": (4, 32, 32),
    "gradient_keys": (8, 32, 32),
}
BLOCKS = {torch.bfloat16: _BF16, torch.float16: _FP16, torch.float32: _FP32}


def covering(width: int) -> int:
    """The least power of two that is at least `width` and 16, the least side of a product."""
    return max(16, triton.next_power_of_2(width))


def launch_of(kernel: str, arch: str, dtype: torch.dtype, K: int, V: int, C: int) -> Launch:
    """The shipped launch."""
    if kernel == "token":
        return Launch(4, 1, covering(K), min(16, covering(V)))
    warps, block_k, block_v = BLOCKS[dtype][kernel]
    if (dtype, C) == (torch.bfloat16, 32):
        if kernel == "gradient_values" and K <= 64 and arch != "sm_100":
            warps, block_k, block_v = 2, 64, 64
        if kernel == "gradient_keys" and K <= 32:
            warps, block_k, block_v = 2, 32, 32
    if (kernel, dtype) == ("gradient_values", torch.float32) and K <= 32:
        warps = 8  # 4 warps would spill; wider keys spill with 8 too
    return Launch(warps, 2 if kernel in SCANS else 1, min(block_k, covering(K)), min(block_v, covering(V)))


def precision_of(kernel: str, arch: str, dtype: torch.dtype) -> str:
    """How float32 operands are multiplied.

    On gfx942 by float32 products. On NVIDIA GPUs as three TF32 products in the scans, whose state does not fit into the
    registers together with FMA operands, and by FMA within a chunk, where gradient_values spilled 212 bytes with three.
    """
    if arch == "gfx942":
        return "ieee"
    if dtype == torch.float32:
        return "tf32x3" if kernel in SCANS else "ieee"
    return "tf32"


def constants(
    kernel: str, arch: str, dtype: torch.dtype, K: int, V: int, C: int, exclusive: bool, launch: Launch
) -> dict[str, Any]:
    """The compile-time arguments of a kernel."""
    found: dict[str, Any] = {"K": K, "V": V, "BLOCK_K": launch.block_k, "BLOCK_V": launch.block_v}
    if kernel != "token":
        found |= {"C": C, "PRECISION": precision_of(kernel, arch, dtype)}
    if kernel != "states":
        found["EXCLUSIVE"] = exclusive
    if kernel == "gradient_values":
        found["SUMS"] = "ieee"
    return found


def programs_of(kernel: str, K: int, V: int, launch: Launch) -> int:
    """Programs of one kernel for a head (gradient_keys: a group) of a document or chunk."""
    blocks_k, blocks_v = -(-K // launch.block_k), -(-V // launch.block_v)
    if kernel in SCANS:
        return blocks_k * blocks_v
    return {"read": blocks_v, "token": blocks_v, "gradient_keys": blocks_k, "gradient_values": 1}[kernel]


def pick_chunk(chunk: int | None, dtype: torch.dtype, arch: str = "sm_90") -> int:
    """The given chunk length, or the default; ValueError where the length does not ship."""
    sizes = chunk_sizes(dtype, arch)
    if chunk is not None and chunk not in sizes:
        raise ValueError(f"ssd_scan: chunk={chunk} does not ship for {dtype}; choose one of {sizes}, or None")
    return chunk or sizes[0]


class Problem:
    """The sizes of a call, the layout of its chunks, and the launches of its kernels."""

    def __init__(self, q: Tensor, v: Tensor, cu_seqlens: Tensor | None, chunk: int | None, exclusive: bool) -> None:
        self.B, self.T, self.H, self.V = v.shape
        self.G, self.K = q.shape[2:]
        self.dtype, self.device, self.exclusive = q.dtype, q.device, exclusive
        self.C = pick_chunk(chunk, q.dtype, architecture(q.device))
        self.packed = cu_seqlens is not None
        self.N = self.B if cu_seqlens is None else cu_seqlens.shape[0] - 1
        self.slots = slot_count(self.B, self.T, self.N, self.C, packed=self.packed)
        self.per_row = 0 if self.packed else -(-self.T // self.C)
        self.given = cu_seqlens
        self.cu_seqlens = self.empty(0, dtype=torch.int64) if cu_seqlens is None else long_starts(cu_seqlens)

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def empty_states(self) -> Tensor:
        return self.empty(self.slots, self.H, self.K, self.V, dtype=operand_dtype(self.dtype))

    def table(self) -> Tensor:
        """See `chunk_table`; any tensor where documents are rows, which need no table."""
        return self.cu_seqlens if self.given is None else chunk_table(self.given, self.slots, self.C)

    def launch(self, kernel: str, tensors: tuple[Tensor, ...], *flags: bool) -> None:
        arch = architecture(self.device)
        launch = launch_of(kernel, arch, self.dtype, self.K, self.V, self.C)
        items = (self.N if kernel in SCANS else self.slots) * (self.G if kernel == "gradient_keys" else self.H)
        programs = items * programs_of(kernel, self.K, self.V, launch)
        # Triton launches on the current device.
        with torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext():
            KERNELS[kernel][(programs,)](
                *tensors,
                self.T,
                self.per_row,
                self.H,
                self.G,
                *map(int, flags),
                **constants(kernel, arch, self.dtype, self.K, self.V, self.C, self.exclusive, launch),
                num_warps=launch.num_warps,
                num_stages=launch.num_stages,
            )


def ssd_scan_saved_shapes(
    q: tuple[int, ...],
    v: tuple[int, ...],
    documents: int,
    packed: bool,
    dtype: torch.dtype,
    *,
    chunk: int | None,
    save: bool,
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and dtypes of what ssd_scan_forward keeps. q, v: the inputs' shapes."""
    if not save:
        return []
    (B, T, H, V), K = v, q[3]
    slots = slot_count(B, T, documents, pick_chunk(chunk, dtype), packed=packed)
    shapes: list[tuple[tuple[int, ...], torch.dtype]] = [((slots, H, K, V), operand_dtype(dtype))]
    return shapes


def ssd_scan_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    *,
    chunk: int | None,
    exclusive: bool,
    save: bool,
    return_state: bool,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """y, the last states (empty unless wanted), and what the backward pass needs: h."""
    x = Problem(q, v, cu_seqlens, chunk, exclusive)
    table, y, h = x.table(), torch.empty_like(v), x.empty_states()
    last = x.empty(*((x.N, x.H, x.V, x.K) if return_state else (0,)))
    start = last if state is None else state
    x.launch("states", (k, v, log_decay, start, x.cu_seqlens, h, last), state is not None, return_state)
    x.launch("read", (q, k, v, log_decay, table, h, y))
    return y, last, [h] if save else []


def ssd_scan_backward(
    dy: Tensor,
    dlast: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    saved: list[Tensor],
    *,
    chunk: int | None,
    exclusive: bool,
) -> tuple[Tensor, ...]:
    """The gradients of q, k, v, log_decay in their dtypes, and of the state (empty if there was none)."""
    x = Problem(q, v, cu_seqlens, chunk, exclusive)
    h, table = saved[0], x.table()
    dh, nothing = torch.empty_like(h), x.empty(0)
    dstate = nothing if state is None else torch.empty_like(state)
    end = nothing if dlast is None else dlast
    flags = dlast is not None, state is not None
    x.launch("states_back", (q, dy, log_decay, end, x.cu_seqlens, dh, dstate), *flags)
    dq, dk, dv, dlog_decay = gradients = tuple(torch.empty_like(z) for z in (q, k, v, log_decay))
    inputs = dy, q, k, v, log_decay, table, h, dh
    x.launch("gradient_values", (*inputs, dv, dlog_decay))
    x.launch("gradient_keys", (*inputs, dq, dk))
    return *gradients, dstate


def ssd_scan_step(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor, exclusive: bool
) -> tuple[Tensor, Tensor]:
    """One token: q, k [B, G, K], v [B, H, V], log_decay [B, H], state [B, H, V, K] -> y [B, H, V], the new state."""
    (B, H, V), (G, K) = v.shape, q.shape[1:]
    y, new = torch.empty_like(v), torch.empty_like(state)
    arch = architecture(q.device)
    launch = launch_of("token", arch, q.dtype, K, V, 0)
    with torch.cuda.device(q.device) if q.device.type == "cuda" else contextlib.nullcontext():
        ssd_scan_token[(B * H * programs_of("token", K, V, launch),)](
            *(q, k, v, log_decay, state, y, new, H, G),
            **constants("token", arch, q.dtype, K, V, 0, exclusive, launch),
            num_warps=launch.num_warps,
            num_stages=launch.num_stages,
        )
    return y, new


def build(kernel: str, arch: str, dtype: torch.dtype, K: int, V: int, C: int, exclusive: bool, launch: Launch) -> Build:
    """A kernel as it ships, with its cost at B 8, T 4096, H K = 2048, G = H (log_decay in float32, no packing)."""
    own, operand = NAMES[dtype], NAMES[operand_dtype(dtype)]
    known = dict.fromkeys(("q", "k", "v", "y", "dy", "dq", "dk", "dv"), f"*{own}")
    known |= {"h": f"*{operand}", "dh": f"*{operand}", "table": "*i64", "cu_seqlens": "*i64"}
    known |= dict.fromkeys(("log_decay", "dlog_decay", "state", "new", "last", "dlast", "dstate"), "*fp32")
    numbers = ("length", "per_row", "heads", "groups", "has_state", "want_last", "has_dlast")
    known |= dict.fromkeys(numbers, "i32")
    B, T, H = 8, 4096, max(1, 2048 // K)
    size, wide = dtype.itemsize, operand_dtype(dtype).itemsize
    blocks_k, blocks_v = -(-K // launch.block_k), -(-V // launch.block_v)
    heads = B * H
    loops: tuple[int, ...] = ()
    if kernel == "token":
        flops, moved = 5 * K * V, 8 * K * V + 2 * (K + V) * size + 4
    else:
        heads *= T // C
        # Multiply-additions of a chunk in units of C C K, C C V, C K V, C C C.
        counts = {
            "states": (0, 0, 1, 0),
            "read": (blocks_v, 1, 1, 0),
            "states_back": (0, 0, 1, 0),
            "gradient_values": (1, 2, 2, 1),
            "gradient_keys": (2, blocks_k, 2, 0),
        }[kernel]
        flops = 2 * sum(n * unit for n, unit in zip(counts, (C * C * K, C * C * V, C * K * V, C**3), strict=True))
        states = K * V * wide
        moved = (
            4 * C
            + {
                "states": C * (K + V) * size + states,
                "read": C * 2 * (K + V) * size + states,
                "states_back": C * (K + V) * size + states,
                "gradient_values": C * (2 * K + 3 * V) * size + 2 * states + 4 * C,
                "gradient_keys": C * (4 * K + 2 * V) * size + 2 * states,
            }[kernel]
        )
        loops = {
            "states": (T // C,),
            "read": (blocks_k,),
            "states_back": (T // C,),
            "gradient_values": (blocks_k, blocks_v, blocks_k),
            "gradient_keys": (blocks_v,),
        }[kernel]
    return Build(
        name=f"ssd_scan_{kernel}",
        kernel=KERNELS[kernel],
        signature={name: known[name] for name in KERNELS[kernel].arg_names if name in known},
        constants=constants(kernel, arch, dtype, K, V, C, exclusive, launch),
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        programs=(B * H if kernel in SCANS else heads) * programs_of(kernel, K, V, launch),
        flops=flops * heads,
        bytes=moved * heads,
        trips=tuple(rounds for rounds in loops if rounds > 1),
    )


# Each pair of widths stands for others with the same blocks; the last pair is a multiple of no block.
PROVED = ((16, 16), (64, 64), (128, 64), (24, 40))


def builds(arch: str) -> list[Build]:
    """Every kernel for every dtype, chunk length and kind of block, as it is launched on an architecture."""
    return list(_builds(arch))


def _builds(arch: str) -> Iterator[Build]:
    for dtype, (K, V) in itertools.product(NAMES, PROVED):
        for C, kernel in itertools.product(chunk_sizes(dtype, arch), KERNELS):
            if kernel == "token" and C != 32:
                continue  # it does not depend on C
            launch = launch_of(kernel, arch, dtype, K, V, C)
            for exclusive in (False, True) if (K, V) == (64, 64) and kernel != "states" else (False,):
                yield build(kernel, arch, dtype, K, V, C, exclusive, launch)
