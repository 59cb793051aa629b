"""RWKV-7's recurrence in Triton: each chunk's affine map in parallel, a short scan over chunks, the same in reverse.

    S_t = S_{t-1} diag(exp(log_w_t)) + (S_{t-1} a_t) b_t^T + v_t k_t^T ;  y_t = S_t r_t        S: [V, K]

r, log_w, k, a, b [B, T, H, K]; v, y [B, T, H, V]; states float32 [N, H, V, K], one a document. A document is a row, or
what cu_seqlens [N + 1] cuts out of the B * T tokens. Chunks start anew at each document, so that a document has the
same bits packed or alone. No atomics, and no tuning at run time: the same bits every time.

Products take bfloat16 operands for bfloat16 tensors, and float32 ones otherwise: for float16, whose range the decays
leave, as TF32, which has its 10 bits of mantissa; for float32 as three TF32 products, good to 2e-6 (gfx942 has
float32 products). Operands hold |log_w| C / 2 < 80 (wkv7_chunk.py).

Kept for the backward pass beside the inputs, an input being B T H K elements, at K = V:
    save="min"   h: K / C inputs. The maps are made again: one more pass over r, log_w, a, b.
    save="fast"  h, R, P, T and edges: (2 K + 2 / e) / C + C / K + 1 inputs, e = 2 bytes an element (4 in float32).
at K = V = C = 64 in bfloat16 1 and 4.03 inputs. Both give the same bits. save="none" keeps nothing.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cdrmix.kernels._chunks import chunk_table, long_starts, operand_dtype, slot_count
from cdrmix.kernels._common import INTERPRETED, Build, architecture
from cdrmix.kernels.wkv7_chunk import wkv7_chunk_map
from cdrmix.kernels.wkv7_chunk_backward import wkv7_chunk_gradient_keys, wkv7_chunk_gradient_values
from cdrmix.kernels.wkv7_scan import wkv7_state_backward, wkv7_state_forward, wkv7_token

WIDTHS = (32, 64, 128)  # of keys and of values
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
KERNELS: dict[str, Any] = {
    "map": wkv7_chunk_map,  # all of it
    "map_keys": wkv7_chunk_map,  # R, P, T and edges
    "map_values": wkv7_chunk_map,  # Q and Y
    "forward": wkv7_state_forward,
    "backward": wkv7_state_backward,
    "gradient_values": wkv7_chunk_gradient_values,
    "gradient_keys": wkv7_chunk_gradient_keys,
    "token": wkv7_token,
}
SCANS = ("forward", "backward")  # a program a document, head and block of V; the others have one a chunk and head


@dataclass(frozen=True)
class Launch:
    """How a kernel is launched: warps a program, stages of its loads, and the columns of K and V it has at a time."""

    num_warps: int
    num_stages: int
    block_k: int
    block_v: int


def chunk_sizes(dtype: torch.dtype, K: int, V: int, arch: str = "sm_90") -> tuple[int, ...]:
    """The chunk lengths that there are for a dtype and widths, the default first.

    32, whose products are the smaller half of the time by the estimates of benchmarks/aot.py. 64 keeps fewer bytes for
    the backward pass; in float32 operands, and on architectures other than sm_90, it spills registers. There are none
    for float32 keys of 128: both scans and the map spill, 16 to 400 bytes a thread in all tiles tried, and plain
    PyTorch serves. The interpreter has them all, as a test.
    """
    if K == 128 and dtype == torch.float32 and not INTERPRETED:
        return ()
    longer = INTERPRETED or (dtype == torch.bfloat16 and arch == "sm_90")
    return (32, 64) if longer and max(K, V) <= 64 else (32,)


# By operand dtype and chunk: warps a program, and at most so many columns of K and of V at a time; by K, or by K and V,
# where one does not serve all. The widest tiles of those tried that spill no register; BY_ARCHITECTURE has what spills
# elsewhere. On sm_90 a spill of some bytes is taken where the kernel is estimated faster with it than in any launch
# without, and two warps where four would multiply by wgmma with a first operand that is transposed in registers
# (benchmarks/aot.py judges both). On sm_100 some float16 and float32 kernels spill 4 to 72 bytes in every tile tried,
# and ship so.
Blocks = tuple[int, int, int]
Tiles = dict[str, Blocks | dict[int | tuple[int, int], Blocks]]
_BF16_32: Tiles = {
    "map": {32: (4, 32, 32), 64: (4, 64, 64), (64, 32): (4, 32, 32), 128: (4, 32, 64)},
    "map_keys": {32: (4, 32, 32), 64: (4, 64, 64), 128: (4, 32, 64)},
    "map_values": {32: (4, 32, 32), 64: (4, 64, 64), 128: (4, 32, 64)},
    "gradient_values": {
        32: (4, 32, 64),
        64: (4, 64, 64),
        128: (4, 32, 64),
        (128, 32): (4, 16, 32),
        (128, 64): (4, 16, 64),
    },
    "gradient_keys": {
        32: (2, 16, 64),
        64: (4, 64, 32),
        128: (4, 64, 64),
        (32, 128): (4, 16, 64),
        (128, 64): (4, 64, 32),
    },
}
_BF16_64: Tiles = {
    "map_keys": (4, 32, 64),
    "map_values": (4, 64, 64),
    "gradient_values": (4, 64, 32),
    "gradient_keys": {32: (4, 16, 64), (32, 64): (8, 16, 64), 64: (4, 16, 64)},
}
_FP16: Tiles = {
    "map_keys": (8, 16, 16),
    "map_values": {32: (4, 16, 32), 64: (4, 16, 32), 128: (4, 16, 32), (128, 32): (4, 16, 16)},
    "gradient_values": (4, 16, 32),
    "gradient_keys": dict.fromkeys(WIDTHS, (4, 16, 32)) | {(K, 32): (8, 16, 16) for K in WIDTHS},
}
_FP32: Tiles = {
    "map_keys": {32: (8, 32, 32), 64: (8, 32, 32), 128: (8, 16, 32)},
    "map_values": (8, 16, 32),
    "gradient_values": (8, 16, 32),
    "gradient_keys": {32: (8, 32, 32), (32, 32): (8, 16, 32), 64: (8, 32, 32), (64, 32): (8, 16, 32), 128: (8, 32, 32)},
}
BLOCKS = {
    (torch.bfloat16, 32): _BF16_32,
    (torch.bfloat16, 64): _BF16_64,
    (torch.float16, 32): _FP16,
    (torch.float16, 64): _FP16,
    (torch.float32, 32): _FP32,
    (torch.float32, 64): _FP32,
}
BY_ARCHITECTURE: dict[str, dict[tuple[torch.dtype, int], Tiles]] = {
    "sm_90": {
        (torch.bfloat16, 32): {
            "map": {32: (4, 32, 32), 64: (2, 64, 64), 128: (4, 32, 64)},
            "map_keys": {32: (4, 32, 32), 64: (2, 64, 64), 128: (4, 32, 64)},
            "gradient_keys": {32: (2, 32, 64), 64: (4, 64, 64), 128: (4, 64, 64)},
        },
        (torch.bfloat16, 64): {"map_values": (4, 32, 64), "gradient_keys": (8, 32, 32)},
    },
    "sm_80": {
        (torch.bfloat16, 32): {
            "map": {32: (4, 32, 32), 64: (4, 32, 32), 128: (4, 32, 64)},
            "map_keys": {32: (4, 32, 32), 64: (4, 32, 64), 128: (4, 32, 64)},
            "gradient_values": (4, 32, 64),
            "gradient_keys": {32: (4, 16, 64), 64: (4, 64, 32), 128: (4, 64, 32)},
        },
        (torch.float16, 32): {"map_values": (4, 16, 16), "gradient_keys": (8, 16, 16)},
        (torch.float32, 32): {"map_values": {32: (8, 16, 16), 64: (8, 16, 32), 128: (8, 16, 32)}},
    },
    "sm_100": {
        (torch.bfloat16, 32): {
            "map": {32: (4, 32, 32), 64: (4, 64, 64), (64, 32): (4, 32, 32), 128: (4, 16, 64)},
            "gradient_values": {32: (4, 32, 64), 64: (4, 64, 64), (64, 32): (4, 32, 32), 128: (4, 16, 64)},
            "gradient_keys": {
                32: (2, 16, 64),
                64: (4, 16, 32),
                128: (4, 16, 32),
                (32, 128): (4, 16, 64),
                (128, 128): (4, 16, 64),
            },
        },
        (torch.float32, 32): {
            "map_values": {32: (8, 16, 16), 64: (8, 16, 32), 128: (8, 16, 32)},
            "gradient_keys": {32: (8, 32, 32), (32, 32): (8, 16, 16), 64: (8, 32, 32), 128: (8, 32, 32)},
        },
    },
    "gfx942": {
        (torch.bfloat16, 32): {"gradient_keys": {32: (2, 16, 64), 64: (4, 32, 32), 128: (4, 32, 32)}},
        (torch.float32, 32): {"gradient_keys": (8, 16, 32)},
    },
}


def launch_of(kernel: str, arch: str, dtype: torch.dtype, K: int, V: int, C: int) -> Launch:
    """The launch that ships."""
    if kernel == "token":
        return Launch(4, 1, K, 32)
    if kernel in SCANS:
        if dtype == torch.float32:  # one stage, and from K = 128 on the state in two tiles
            return Launch(4, 1, min(K, 64), 16)
        if dtype == torch.float16 and (arch == "sm_80" or K == 128):
            return Launch(4, 1, min(K, 64), 16)
        # gfx942 has 64 KiB for a program: R and P of one chunk at a time, in halves.
        return Launch(4, 1, min(K, 64), 32) if arch == "gfx942" else Launch(4, 2, K, 32)
    special = BY_ARCHITECTURE.get(arch, {}).get((dtype, C), {})
    blocks = special[kernel] if kernel in special else BLOCKS[dtype, C][kernel]
    if isinstance(blocks, dict):
        blocks = blocks[K, V] if (K, V) in blocks else blocks[K]
    warps, block_k, block_v = blocks
    return Launch(warps, 1, min(block_k, K), min(block_v, V))


def precision_of(kernel: str, arch: str, dtype: torch.dtype) -> str:
    """How float32 operands are multiplied.

    gfx942 has float32 products. Float32 on NVIDIA: by FMA within a chunk, where three TF32 products spill registers;
    in the scans, whose tiles are the widest, it is FMA that spills.
    """
    if arch == "gfx942":
        return "ieee"
    if dtype == torch.float32:
        return "tf32x3" if kernel in SCANS else "ieee"
    return "tf32"


def constants(kernel: str, arch: str, dtype: torch.dtype, K: int, V: int, C: int, launch: Launch) -> dict[str, Any]:
    """The compile-time arguments of a kernel."""
    found: dict[str, Any] = {"K": K, "V": V, "BLOCK_V": launch.block_v}
    if kernel == "token":
        return found
    found |= {"C": C, "BLOCK_K": launch.block_k, "PRECISION": precision_of(kernel, arch, dtype)}
    if kernel not in SCANS:
        found["SUMS"] = "ieee"
    if kernel.startswith("map"):
        found |= {"KEYS": kernel != "map_values", "VALUES": kernel != "map_keys"}
    return found


class Problem:
    """The sizes of a call, where its chunks lie, and how its kernels are launched."""

    def __init__(self, r: Tensor, v: Tensor, cu_seqlens: Tensor | None, chunk: int | None) -> None:
        self.B, self.T, self.H, self.K = r.shape
        self.V = v.shape[-1]
        self.dtype, self.device = r.dtype, r.device
        self.C = pick_chunk(chunk, r.dtype, self.K, self.V, architecture(r.device))
        self.operand = operand_dtype(r.dtype)
        self.packed = cu_seqlens is not None
        self.N = self.B if cu_seqlens is None else cu_seqlens.shape[0] - 1
        self.slots = slot_count(self.B, self.T, self.N, self.C, packed=self.packed)
        self.per_row = 0 if self.packed else -(-self.T // self.C)
        self.given = cu_seqlens
        self.cu_seqlens = self.empty(0, dtype=torch.int64) if cu_seqlens is None else long_starts(cu_seqlens)

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self.operand, device=self.device)

    def empty_edges(self) -> Tensor:
        return self.empty(self.slots, self.H, 2, self.K, dtype=torch.float32)

    def table(self) -> Tensor:
        """See `chunk_table`; without packed documents, which need none, anything."""
        return self.cu_seqlens if self.given is None else chunk_table(self.given, self.slots, self.C)

    def launch(self, kernel: str, tensors: tuple[Tensor, ...], *flags: bool) -> None:
        arch = architecture(self.device)
        launch = launch_of(kernel, arch, self.dtype, self.K, self.V, self.C)
        items = self.N if kernel in SCANS else self.slots
        programs = items * self.H * blocks_of(kernel, self.K, self.V, launch)
        # A launch goes to the current device.
        with torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext():
            KERNELS[kernel][(programs,)](
                *tensors,
                self.T,
                self.per_row,
                self.H,
                *map(int, flags),
                **constants(kernel, arch, self.dtype, self.K, self.V, self.C, launch),
                num_warps=launch.num_warps,
                num_stages=launch.num_stages,
            )


def fused_map(dtype: torch.dtype, C: int) -> bool:
    """Whether one kernel makes the whole map: else R, P and T, and Q and Y, each alone, fit the registers."""
    return dtype == torch.bfloat16 and C == 32


def blocks_of(kernel: str, K: int, V: int, launch: Launch) -> int:
    """Programs of one kernel for a head of a document or chunk."""
    if kernel in (*SCANS, "gradient_values", "token"):
        return V // launch.block_v
    return K // launch.block_k if kernel == "gradient_keys" else 1


def pick_chunk(chunk: int | None, dtype: torch.dtype, K: int, V: int, arch: str = "sm_90") -> int:
    """The chunk length asked for, or the default; ValueError where it does not ship."""
    sizes = chunk_sizes(dtype, K, V, arch)
    assert sizes, "the door has sent to the reference what does not ship"
    if chunk is not None and chunk not in sizes:
        raise ValueError(f"wkv7: chunk={chunk} does not ship for {dtype}, K={K}, V={V}; choose one of {sizes}, or None")
    return chunk or sizes[0]


def wkv7_saved_shapes(
    B: int, T: int, H: int, K: int, V: int, N: int, packed: bool, dtype: torch.dtype, *, chunk: int | None, save: str
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and dtypes of what wkv7_forward saves."""
    if save == "none":
        return []
    C, operand = pick_chunk(chunk, dtype, K, V), operand_dtype(dtype)
    slots = slot_count(B, T, N, C, packed=packed)
    shapes: list[tuple[tuple[int, ...], torch.dtype]] = [((slots, H, K, V), operand)]
    if save == "fast":
        shapes += [((slots, H, *size), operand) for size in ((K, K), (C, K), (C, C))]
        shapes.append(((slots, H, 2, K), torch.float32))
    return shapes


def wkv7_forward(
    r: Tensor,
    log_w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    *,
    chunk: int | None,
    save: str,
    return_state: bool,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """y, the last states ([0] unless wanted), and what the backward pass needs: h, R, P, T, edges."""
    x = Problem(r, v, cu_seqlens, chunk)
    table = x.table()
    y = torch.empty_like(v)
    Y = y if y.dtype == x.operand else torch.empty_like(v, dtype=x.operand)
    R, P, edges = x.empty(x.slots, x.H, x.K, x.K), x.empty(x.slots, x.H, x.C, x.K), x.empty_edges()
    Q = x.empty(x.slots, x.H, x.K, x.V)
    T = x.empty(x.slots, x.H, x.C, x.C) if save == "fast" or not fused_map(r.dtype, x.C) else R
    maps = r, log_w, k, v, a, b, table, R, Q, P, Y, T, edges
    if fused_map(r.dtype, x.C):
        x.launch("map", maps, save == "fast")
    else:
        x.launch("map_keys", maps, True)
        x.launch("map_values", maps, False)
    h = torch.empty_like(Q) if save != "none" else Q
    last = x.empty(*((x.N, x.H, x.V, x.K) if return_state else (0,)), dtype=torch.float32)
    start = last if state is None else state
    flags = state is not None, save != "none", return_state
    x.launch("forward", (R, Q, P, Y, edges, start, x.cu_seqlens, h, y, last), *flags)
    saved = {"none": [], "min": [h], "fast": [h, R, P, T, edges]}[save]
    return y, last, saved


def wkv7_backward(
    dy: Tensor,
    dlast: Tensor | None,
    r: Tensor,
    log_w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    saved: list[Tensor],
    *,
    chunk: int | None,
    save: str,
) -> tuple[Tensor, ...]:
    """The gradients of r, log_w, k, v, a, b in their dtypes, and of the state ([0] if there was none)."""
    x = Problem(r, v, cu_seqlens, chunk)
    h, table = saved[0], x.table()
    if save == "fast":
        R, P, T, edges = saved[1:5]
    else:
        R, P, edges = x.empty(x.slots, x.H, x.K, x.K), x.empty(x.slots, x.H, x.C, x.K), x.empty_edges()
        T = x.empty(x.slots, x.H, x.C, x.C)
        x.launch("map_keys", (r, log_w, k, v, a, b, table, R, R, P, P, T, edges), True)
    dh = torch.empty_like(h)
    nothing = x.empty(0, dtype=torch.float32)
    dstate = nothing if state is None else torch.empty_like(state)
    flags = dlast is not None, state is not None
    x.launch("backward", (R, P, edges, dy, nothing if dlast is None else dlast, x.cu_seqlens, dh, dstate), *flags)
    dr, dlog_w, dk, dv, da, db = gradients = tuple(torch.empty_like(z) for z in (r, log_w, k, v, a, b))
    U, Z = torch.empty_like(v, dtype=x.operand), torch.empty_like(v, dtype=x.operand)
    inputs = dy, r, log_w, k, v, a, b, table, h, dh
    x.launch("gradient_values", (*inputs, T, edges, U, Z, dv))
    x.launch("gradient_keys", (*inputs, edges, U, Z, dr, dlog_w, dk, da, db))
    return *gradients, dstate


def wkv7_step(
    r: Tensor, log_w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One token: r, log_w, k, a, b [B, H, K], v [B, H, V], state float32 [B, H, V, K] -> y [B, H, V], the new state."""
    B, H, K = r.shape
    V = v.shape[-1]
    y, new = torch.empty_like(v), torch.empty_like(state)
    arch = architecture(r.device)
    launch = launch_of("token", arch, r.dtype, K, V, 0)
    with torch.cuda.device(r.device) if r.device.type == "cuda" else contextlib.nullcontext():
        wkv7_token[(B * H * blocks_of("token", K, V, launch),)](
            *(r, log_w, k, v, a, b, state, y, new),
            **constants("token", arch, r.dtype, K, V, 0, launch),
            num_warps=launch.num_warps,
            num_stages=launch.num_stages,
        )
    return y, new


def build(kernel: str, arch: str, dtype: torch.dtype, K: int, V: int, C: int, launch: Launch) -> Build:
    """A kernel as it ships, with what it costs at B 8, T 4096, H K = 2048, every row a document.

    log_w is as the element-wise work before gives it: bfloat16 beside bfloat16, else float32.
    """
    own, operand = NAMES[dtype], NAMES[operand_dtype(dtype)]
    arguments = KERNELS[kernel].arg_names
    tensors = dict.fromkeys(("r", "k", "v", "a", "b", "y", "dy", "dr", "dk", "dv", "da", "db"), own)
    tensors |= dict.fromkeys(("R", "Q", "P", "Y", "T", "h", "dh", "U", "Z"), operand) | {
        "table": "i64",
        "cu_seqlens": "i64",
    }
    tensors |= dict.fromkeys(("edges", "state", "new", "last", "dlast", "dstate"), "fp32")
    tensors |= dict.fromkeys(("log_w", "dlog_w"), own if dtype == torch.bfloat16 else "fp32")
    numbers = ("length", "per_row", "heads", "has_state", "save_h", "want_last", "has_dlast", "save_T")
    known = {name: f"*{kind}" for name, kind in tensors.items()} | dict.fromkeys(numbers, "i32")
    B, T, H = 8, 4096, 2048 // K
    size, wide = dtype.itemsize, operand_dtype(dtype).itemsize
    decay = 2 if dtype == torch.bfloat16 else 4
    blocks_k, blocks_v = K // launch.block_k, V // launch.block_v
    heads = B * H
    loops: tuple[int, ...] = ()
    if kernel == "token":
        flops, moved = 7 * K * V, 8 * K * V + (4 * K + 2 * V) * size + decay * K
    else:
        heads *= T // C
        # Multiply-adds of a chunk in units of C C K, C C V, C K V, C K K, K K V, C C C.
        counts = {
            "map": (6, 4, 2, 1, 0, 2 * (C.bit_length() - 2)),
            "map_keys": (4, 0, 0, 1, 0, 2 * (C.bit_length() - 2)),
            "map_values": (3, 4, 2, 0, 0, 0),
            "forward": (0, 0, 1, 0, 1, 0),
            "backward": (0, 0, 1, 0, 1, 0),
            "gradient_values": (3 * blocks_v, 6, 3, 0, 0, 0),
            "gradient_keys": (8, 8 * blocks_k, 4, 0, 0, 0),
        }[kernel]
        units = (C * C * K, C * C * V, C * K * V, C * K * K, K * K * V, C**3)
        flops = 2 * sum(count * unit for count, unit in zip(counts, units, strict=True))
        maps = (K * K + C * K) * wide + 8 * K
        states = (2 * K * V + 2 * C * V) * wide + 8 * K
        moved = {
            "map": C * (4 * K + V) * size + decay * C * K + maps + (K * V + C * V + C * C) * wide,
            "map_keys": C * 3 * K * size + decay * C * K + maps + C * C * wide,
            "map_values": C * (4 * K + V) * size + decay * C * K + (K * V + C * V + C * C) * wide,
            "forward": maps + (2 * K * V + C * V) * wide + C * V * size,
            "backward": maps + K * V * wide + C * V * size,
            "gradient_values": C * (4 * K + 3 * V) * size + decay * C * K + states + C * C * wide,
            "gradient_keys": C * (8 * K + 2 * V) * size + 2 * decay * C * K + states,
        }[kernel]
        loops = {
            "map": (blocks_k, blocks_k, blocks_v, blocks_k),
            "map_keys": (blocks_k, blocks_k),
            "map_values": (blocks_v, blocks_k),
            "forward": (T // C,),
            "backward": (T // C,),
            "gradient_values": (blocks_k,),
            "gradient_keys": (blocks_v, blocks_v),
        }[kernel]
    documents = B * H if kernel in SCANS else heads
    return Build(
        name=f"wkv7_{kernel}",
        kernel=KERNELS[kernel],
        signature={name: known[name] for name in arguments if name in known},
        constants=constants(kernel, arch, dtype, K, V, C, launch),
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        programs=documents * blocks_of(kernel, K, V, launch),
        flops=flops * heads,
        bytes=moved * heads,
        trips=tuple(rounds for rounds in loops if rounds > 1),
    )


def builds(arch: str) -> list[Build]:
    """Every kernel for every dtype, pair of widths and chunk length, as it is launched on an architecture."""
    return list(_builds(arch))


def alternatives(arch: str) -> list[Build]:
    """The chunks' kernels in bfloat16 in other launches than theirs: what a spill is held against."""
    found = []
    for K, V, C in itertools.product(WIDTHS, WIDTHS, chunk_sizes(torch.bfloat16, 64, 64, arch)):
        if C not in chunk_sizes(torch.bfloat16, K, V, arch):
            continue
        for kernel in chunk_kernels(torch.bfloat16, C):
            tiles = itertools.product((4, 8), {32, min(K, 64)}, {32, min(V, 64)})
            launches = {Launch(warps, 1, block_k, block_v) for warps, block_k, block_v in tiles}
            launches.discard(launch_of(kernel, arch, torch.bfloat16, K, V, C))
            found += [build(kernel, arch, torch.bfloat16, K, V, C, one) for one in sorted(launches, key=repr)]
    return found


def chunk_kernels(dtype: torch.dtype, C: int) -> list[str]:
    """Those of KERNELS with a program a chunk that are launched for a dtype and chunk length."""
    absent = (*SCANS, "token", "map_values" if fused_map(dtype, C) else "map")
    return [kernel for kernel in KERNELS if kernel not in absent]


def _builds(arch: str) -> Iterator[Build]:
    for dtype, K, V, C in itertools.product(NAMES, WIDTHS, WIDTHS, (32, 64)):
        if C not in chunk_sizes(dtype, K, V, arch):
            continue
        once = ("token",) if C == 32 else ()  # it has no chunks
        for kernel in (*chunk_kernels(dtype, C), *SCANS, *once):
            yield build(kernel, arch, dtype, K, V, C, launch_of(kernel, arch, dtype, K, V, C))
