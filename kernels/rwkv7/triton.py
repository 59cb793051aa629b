"""RWKV-7's recurrence in Triton: the affine maps of all chunks in parallel, a scan over chunks, and both in reverse.

    S_t = S_{t-1} diag(exp(log_w_t)) + (S_{t-1} a_t) b_t^T + v_t k_t^T ;  y_t = S_t r_t        S: [V, K]

r, log_w, k, a, b [B, T, H, K]; v, y [B, T, H, V]; states float32 [N, H, V, K], one a document. A document is a row, or
a span of the B * T tokens that cu_seqlens [N + 1] gives. A new chunk starts at each document, so a document has the
same bits packed or alone. There are no atomics and no tuning at run time: the same bits every time.

A document is scanned in groups of GROUP chunks (triton_groups.py) if it has more than LONGEST chunks (8,192 tokens) and
its heads have programs for at most PROCESSORS multiprocessors. This depends only on the document's own length and on
the shapes of a head, so that the document has the same bits packed or alone. A batch of many long documents is slower
by it, by an estimated eighth. Keys of 128 with float16, and gfx942, have no groups.

Products take bfloat16 operands for bfloat16 tensors, and float32 operands otherwise. Float16 tensors are multiplied as
TF32, which has the 10 bits of mantissa of float16 and the range that the decays need. Float32 tensors are multiplied as
three TF32 products, with errors of 2e-6 (gfx942 has float32 products). Operands hold |log_w| C / 2 < 80
(triton_chunk.py).

Kept for the backward pass besides the inputs, in units of an input, B T H K elements, at K = V:
    recompute=True   h: K / C inputs. The maps are computed again: one more pass over r, log_w, a, b.
    recompute=False  h, R, P, T and edges: (2 K + 2 / e) / C + C / K + 1 inputs, e = 2 bytes an element (4 in float32).
At K = V = C = 64 in bfloat16 that is 1 and 4.03 inputs. Both give the same bits. save=False keeps nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from cdrmix.kernels.common.chunks import chunk_table, long_starts, operand_dtype, slot_count, slot_documents
from cdrmix.kernels.common.triton_helpers import Build, architecture
from cdrmix.kernels.rwkv7.triton_chunk import wkv7_chunk_map
from cdrmix.kernels.rwkv7.triton_chunk_backward import wkv7_chunk_gradient_keys, wkv7_chunk_gradient_values
from cdrmix.kernels.rwkv7.triton_groups import wkv7_group_backward, wkv7_group_forward, wkv7_group_scan
from cdrmix.kernels.rwkv7.triton_launch import (
    ALL_CHUNKS,
    GROUPS,
    OVER_GROUPS,
    SCANS,
    WIDTHS,
    Launch,
    chunk_sizes,
    has_groups,
    launch_of,
    precision_of,
)
from cdrmix.kernels.rwkv7.triton_scan import wkv7_state_backward, wkv7_state_forward, wkv7_token

NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
KERNELS: dict[str, Any] = {
    "map": wkv7_chunk_map,  # all outputs
    "map_keys": wkv7_chunk_map,  # only R, P, T and edges
    "map_values": wkv7_chunk_map,  # only Q and Y
    "forward": wkv7_state_forward,
    "backward": wkv7_state_backward,
    "gradient_values": wkv7_chunk_gradient_values,
    "gradient_keys": wkv7_chunk_gradient_keys,
    "group_forward": wkv7_group_forward,
    "group_backward": wkv7_group_backward,
    "group_scan": wkv7_group_scan,
    "token": wkv7_token,
}
GROUP = 32  # chunks of a group; for n chunks the scan waits least with about sqrt(n / 2): 11 to 45 for 256 to 4,096
LONGEST = 256  # most chunks of a document without groups; beyond, groups take half the time, by estimate
PROCESSORS = 132  # multiprocessors of an H200; a document with fewer programs leaves some of them idle


def constants(kernel: str, arch: str, dtype: torch.dtype, K: int, V: int, C: int, launch: Launch) -> dict[str, Any]:
    """The compile-time arguments of a kernel."""
    found: dict[str, Any] = {"K": K, "V": V, "BLOCK_V": launch.block_v}
    if kernel == "token":
        return found
    found["C"] = C
    if kernel not in OVER_GROUPS:
        found["BLOCK_K"] = launch.block_k
    found["PRECISION"] = precision_of(kernel, arch, dtype)
    if kernel not in ALL_CHUNKS:
        found["SUMS"] = "ieee"
    if kernel.startswith("map"):
        found |= {"KEYS": kernel != "map_values", "VALUES": kernel != "map_keys"}
    return found


class Problem:
    """The sizes of a call, the layout of its chunks, and the launches of its kernels."""

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
        self.group = self.pick_group()
        if self.group:
            size = self.C * self.group
            self.items = slot_count(self.B, self.T, self.N, size, packed=self.packed)
            self.members = self.cu_seqlens if cu_seqlens is None else slot_documents(cu_seqlens, self.items, size)

    def pick_group(self) -> int:
        """Chunks of a group; 0 where no document can be long enough for groups, or there are programs enough without.

        It depends on shapes alone. On the device each document's own length decides whether it is in groups, never the
        rest of the batch, so that a document has the bits that it has alone.
        """
        arch = architecture(self.device)
        if not has_groups(arch, self.dtype, self.K, self.V):
            return 0
        longest = -(-(self.B * self.T if self.packed else self.T) // self.C)
        alone = self.H * blocks_of("forward", self.K, self.V, self.launch_of("forward"))
        return GROUP if longest > LONGEST and alone <= PROCESSORS else 0

    def launch_of(self, kernel: str) -> Launch:
        return launch_of(kernel, architecture(self.device), self.dtype, self.K, self.V, self.C)

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self.operand, device=self.device)

    def empty_edges(self) -> Tensor:
        return self.empty(self.slots, self.H, 2, self.K, dtype=torch.float32)

    def table(self) -> Tensor:
        """See `chunk_table`; any tensor where documents are rows, which need no table."""
        return self.cu_seqlens if self.given is None else chunk_table(self.given, self.slots, self.C)

    def launch(self, kernel: str, tensors: tuple[Tensor, ...], *numbers: int) -> None:
        launch = self.launch_of(kernel)
        items = self.slots
        if kernel in ALL_CHUNKS:
            items = self.items if self.group and kernel != "group_scan" else self.N
            numbers = (self.group, LONGEST, *numbers)
        programs = items * self.H * blocks_of(kernel, self.K, self.V, launch)
        arch = architecture(self.device)
        # Triton launches on the current device.
        with torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext():
            KERNELS[kernel][(programs,)](
                *tensors,
                self.T,
                self.per_row,
                self.H,
                *map(int, numbers),
                **constants(kernel, arch, self.dtype, self.K, self.V, self.C, launch),
                num_warps=launch.num_warps,
                num_stages=launch.num_stages,
            )

    def scan(
        self, kernel: str, maps: tuple[Tensor, ...], start: Tensor, rest: tuple[Tensor, ...], *flags: bool
    ) -> None:
        """A scan over all chunks from the states or gradients `start`; long documents in groups (triton_groups.py).

        maps: the tensors of the scan before `start`. flags: the first says whether `start` is given.
        """
        members, carried = self.cu_seqlens, start
        if self.group:
            members = self.members
            carried = self.empty(self.items, self.H, self.V, self.K, dtype=torch.float32)
            sums = self.empty(self.items, self.H, self.K, self.K + self.V, dtype=torch.float32)
            own = (maps[0], maps[1], maps[4]) if kernel == "forward" else maps  # R, Q and edges of (R, Q, P, Y, edges)
            self.launch(f"group_{kernel}", (*own, self.cu_seqlens, members, sums))
            self.launch("group_scan", (sums, start, self.cu_seqlens, carried), flags[0], kernel == "backward")
        self.launch(kernel, (*maps, start, self.cu_seqlens, *rest, members, carried), *flags)


def fused_map(dtype: torch.dtype, C: int) -> bool:
    """Whether one kernel computes the whole map; else (R, P, T) and (Q, Y) each in one, to fit the registers."""
    return dtype == torch.bfloat16 and C == 32


def blocks_of(kernel: str, K: int, V: int, launch: Launch) -> int:
    """Programs of one kernel for a head of a document or chunk."""
    if kernel in GROUPS:
        return (K + V) // launch.block_v
    if kernel in (*SCANS, "group_scan", "gradient_values", "token"):
        return V // launch.block_v
    return K // launch.block_k if kernel == "gradient_keys" else 1


def pick_chunk(chunk: int | None, dtype: torch.dtype, K: int, V: int, arch: str = "sm_90") -> int:
    """The given chunk length, or the default; ValueError where the length does not ship."""
    sizes = chunk_sizes(dtype, K, V, arch)
    assert sizes, "cdrmix.ops uses the reference for sizes that do not ship"
    if chunk is not None and chunk not in sizes:
        raise ValueError(f"wkv7: chunk={chunk} does not ship for {dtype}, K={K}, V={V}; choose one of {sizes}, or None")
    return chunk or sizes[0]


def wkv7_saved_shapes(
    B: int,
    T: int,
    H: int,
    K: int,
    V: int,
    N: int,
    packed: bool,
    dtype: torch.dtype,
    *,
    chunk: int | None,
    save: bool,
    recompute: bool,
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and dtypes of what wkv7_forward keeps."""
    if not save:
        return []
    C, operand = pick_chunk(chunk, dtype, K, V), operand_dtype(dtype)
    slots = slot_count(B, T, N, C, packed=packed)
    shapes: list[tuple[tuple[int, ...], torch.dtype]] = [((slots, H, K, V), operand)]
    if not recompute:
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
    save: bool,
    recompute: bool,
    return_state: bool,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """y, the last states (empty unless wanted), and what the backward pass needs: h, R, P, T, edges."""
    x = Problem(r, v, cu_seqlens, chunk)
    table = x.table()
    y = torch.empty_like(v)
    Y = y if y.dtype == x.operand else torch.empty_like(v, dtype=x.operand)
    save_maps = save and not recompute
    R, P, edges = x.empty(x.slots, x.H, x.K, x.K), x.empty(x.slots, x.H, x.C, x.K), x.empty_edges()
    Q = x.empty(x.slots, x.H, x.K, x.V)
    T = x.empty(x.slots, x.H, x.C, x.C) if save_maps or not fused_map(r.dtype, x.C) else R
    maps = r, log_w, k, v, a, b, table, R, Q, P, Y, T, edges
    if fused_map(r.dtype, x.C):
        x.launch("map", maps, save_maps)
    else:
        x.launch("map_keys", maps, True)
        x.launch("map_values", maps, False)
    h = torch.empty_like(Q) if save else Q
    last = x.empty(*((x.N, x.H, x.V, x.K) if return_state else (0,)), dtype=torch.float32)
    start = last if state is None else state
    flags = state is not None, save, return_state
    x.scan("forward", (R, Q, P, Y, edges), start, (h, y, last), *flags)
    saved = [h] if recompute else [h, R, P, T, edges]
    return y, last, saved if save else []


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
    recompute: bool,
) -> tuple[Tensor, ...]:
    """The gradients of r, log_w, k, v, a, b in their dtypes, and of the state (empty if there was none)."""
    x = Problem(r, v, cu_seqlens, chunk)
    h, table = saved[0], x.table()
    if not recompute:
        R, P, T, edges = saved[1:5]
    else:
        R, P, edges = x.empty(x.slots, x.H, x.K, x.K), x.empty(x.slots, x.H, x.C, x.K), x.empty_edges()
        T = x.empty(x.slots, x.H, x.C, x.C)
        x.launch("map_keys", (r, log_w, k, v, a, b, table, R, R, P, P, T, edges), True)
    dh = torch.empty_like(h)
    nothing = x.empty(0, dtype=torch.float32)
    dstate = nothing if state is None else torch.empty_like(state)
    flags = dlast is not None, state is not None
    x.scan("backward", (R, P, edges, dy), nothing if dlast is None else dlast, (dh, dstate), *flags)
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


def build(
    kernel: str,
    arch: str,
    dtype: torch.dtype,
    K: int,
    V: int,
    C: int,
    launch: Launch,
    *,
    shape: tuple[int, int] = (8, 4096),
    group: int = 0,
) -> Build:
    """A kernel as it ships, with its cost at B 8, T 4096, H K = 2048, or another B and T; every row is a document.

    log_w has the dtype of `time_mix_keys`: bfloat16 with bfloat16, else float32. group: chunks of a group where a
    scan's documents are in groups; the kernels over groups are given one row of all tokens, in groups of GROUP.
    """
    own, operand = NAMES[dtype], NAMES[operand_dtype(dtype)]
    arguments = KERNELS[kernel].arg_names
    tensors = dict.fromkeys(("r", "k", "v", "a", "b", "y", "dy", "dr", "dk", "dv", "da", "db"), own)
    tensors |= dict.fromkeys(("R", "Q", "P", "Y", "T", "h", "dh", "U", "Z"), operand)
    tensors |= dict.fromkeys(("table", "cu_seqlens", "members"), "i64")
    tensors |= dict.fromkeys(("edges", "state", "new", "last", "dlast", "dstate", "maps", "carried"), "fp32")
    tensors |= dict.fromkeys(("log_w", "dlog_w"), own if dtype == torch.bfloat16 else "fp32")
    numbers = ("length", "per_row", "heads", "group", "limit", "reverse")
    flags = ("has_state", "save_h", "want_last", "has_dlast", "save_T")
    known = {name: f"*{kind}" for name, kind in tensors.items()} | dict.fromkeys((*numbers, *flags), "i32")
    (B, T), H = shape, 2048 // K
    if kernel in OVER_GROUPS:
        B, T, group = 1, B * T, GROUP
    size, wide = dtype.itemsize, operand_dtype(dtype).itemsize
    decay = 2 if dtype == torch.bfloat16 else 4
    blocks_k, blocks_v = K // launch.block_k, V // launch.block_v
    heads = B * H
    loops: tuple[int, ...] = ()
    if kernel == "token":
        flops, moved = 7 * K * V, 8 * K * V + (4 * K + 2 * V) * size + decay * K
    elif kernel in OVER_GROUPS:
        heads *= T // C // group
        flops, moved = 2 * K * K * V, 4 * K * (K + V)  # for one group
        if kernel == "group_scan":
            loops = (T // C // group - 1,)
            moved += 4 * K * V
        else:
            loops = (group,)
            reverse = kernel == "group_backward"
            flops = 2 * group * (K * K * (K + V) + reverse * C * K * V)
            moved += group * ((K * K + (C * K if reverse else K * V)) * wide + 8 * K + reverse * C * V * size)
    else:
        heads *= T // C
        # Multiply-additions of a chunk in units of C C K, C C V, C K V, C K K, K K V, C C C.
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
            "forward": (group or T // C,),
            "backward": (group or T // C,),
            "gradient_values": (blocks_k,),
            "gradient_keys": (blocks_v, blocks_v),
        }[kernel]
    items = heads
    if kernel in (*SCANS, "group_scan"):
        items = B * H * (T // C // group if group and kernel in SCANS else 1)
    return Build(
        name=f"wkv7_{kernel}",
        kernel=KERNELS[kernel],
        signature={name: known[name] for name in arguments if name in known},
        constants=constants(kernel, arch, dtype, K, V, C, launch),
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        programs=items * blocks_of(kernel, K, V, launch),
        flops=flops * heads,
        bytes=moved * heads,
        trips=tuple(rounds for rounds in loops if rounds > 1),
    )


def builds(arch: str) -> list[Build]:
    """Every kernel for every dtype, pair of widths and chunk length, as it is launched on an architecture."""
    return list(_builds(arch))


def alternatives(arch: str) -> list[Build]:
    """The chunk kernels in bfloat16 with other launches than the shipped ones, with which a spill is compared."""
    found = []
    for K, V, C in itertools.product(WIDTHS, WIDTHS, chunk_sizes(torch.bfloat16, 64, 64, arch)):
        if C not in chunk_sizes(torch.bfloat16, K, V, arch):
            continue
        for kernel in chunk_kernels(torch.bfloat16, C):
            tiles = itertools.product((4, 8), {32, min(K, 64)}, {32, min(V, 64)})
            launches = {Launch(warps, 1, block_k, block_v) for warps, block_k, block_v in tiles}
            launches.discard(launch_of(kernel, arch, torch.bfloat16, K, V, C))
            found += [build(kernel, arch, torch.bfloat16, K, V, C, launch) for launch in sorted(launches, key=repr)]
    return found


def long_rows(arch: str) -> list[Build]:
    """A row of 65,536 tokens in bfloat16, K = V = 64: the scans over all its chunks, and in groups."""
    found = []
    for kernel in SCANS:
        launch = launch_of(kernel, arch, torch.bfloat16, 64, 64, 32)
        for group in (0, GROUP):
            one = build(kernel, arch, torch.bfloat16, 64, 64, 32, launch, shape=(1, 65536), group=group)
            found.append(dataclasses.replace(one, variant="grouped" if group else "whole"))
    for kernel in OVER_GROUPS:
        launch = launch_of(kernel, arch, torch.bfloat16, 64, 64, 32)
        found.append(build(kernel, arch, torch.bfloat16, 64, 64, 32, launch, shape=(1, 65536)))
    return found


def chunk_kernels(dtype: torch.dtype, C: int) -> list[str]:
    """The kernels of KERNELS that have a program a chunk and are launched for a dtype and chunk length."""
    absent = "map_values" if fused_map(dtype, C) else "map"
    return [kernel for kernel in KERNELS if kernel not in (*ALL_CHUNKS, absent)]


def _builds(arch: str) -> Iterator[Build]:
    for dtype, K, V, C in itertools.product(NAMES, WIDTHS, WIDTHS, (32, 64)):
        if C not in chunk_sizes(dtype, K, V, arch):
            continue
        once = ("token",) if C == 32 else ()  # it does not depend on C
        # The scan over groups is float32 for all dtypes, so it is built once.
        groups = [name for name in OVER_GROUPS if dtype == torch.bfloat16 or name != "group_scan"]
        groups = groups if has_groups(arch, dtype, K, V) else []
        for kernel in (*chunk_kernels(dtype, C), *SCANS, *groups, *once):
            yield build(kernel, arch, dtype, K, V, C, launch_of(kernel, arch, dtype, K, V, C))
