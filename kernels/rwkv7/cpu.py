"""The RWKV-7 recurrence on a CPU: float32, token by token in vector registers, over documents and heads.

    S_t = S_{t-1} diag(exp(log_w_t)) + (S_{t-1} a_t) b_t^T + v_t k_t^T ;  y_t = S_t r_t        S: [V, K]

About 5 K V multiply-additions a token and head forward, 13 K V backward. The forward pass keeps S_{t-1} a_t (4 V bytes)
of every token, and S (4 V K bytes) every 16 tokens or, with recompute=True, every 32. The backward pass recomputes the
states between, without divisions, so there is no limit to the decay. At K = V = 64 a token and head keeps 1,280 or 768
bytes; its six inputs take 1,536. With 32 the backward pass is 5 % slower, because the states no longer stay in the
nearest caches.

One thread computes a document and head in one order, and the spacing of kept states changes no rounding. So no bit
depends on the number of threads, on `chunk`, or on the rest of the batch. The loops are in cpu_simd.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cdrmix.kernels.common.cpu import Scratch, address, check, documents, run_parts
from cdrmix.kernels.rwkv7 import cpu_simd

SPACING, SPACING_RECOMPUTE = 16, 32  # tokens between two kept states, unless `chunk` is given
SERIAL_WORK = 1 << 20  # K V tokens heads, up to which one thread is used: 0.1 ms, twice the time to wake another thread


def _parts(items: int, work: int) -> int:
    """The number of threads; no bit depends on it, because one thread computes an item."""
    return min(torch.get_num_threads(), max(items, 1)) if work > SERIAL_WORK else 1


def _spacing(chunk: int | None, recompute: bool) -> int:
    return chunk or (SPACING_RECOMPUTE if recompute else SPACING)


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
    """What the forward pass keeps: S_{t-1} a_t of every token, and the state before every block of tokens."""
    if not save:
        return []
    return [((B * T, H, V), torch.float32), ((B * T // _spacing(chunk, recompute), H, V, K), torch.float32)]


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
    """y [B, T, H, V], last [N, H, V, K] (empty unless return_state), and what the backward pass needs."""
    check(r, log_w, k, v, a, b, state)
    B, T, H, K = r.shape
    assert (K % cpu_simd.TILE, v.shape[-1] % cpu_simd.ROWS) == (0, 0), "the loops have no remainders"
    V, spacing = v.shape[-1], _spacing(chunk, recompute)
    starts = documents(cu_seqlens, B, T)
    N = len(starts) - 1
    y = torch.empty_like(v)
    last = r.new_empty((N, H, V, K) if return_state else 0)
    shapes = wkv7_saved_shapes(
        B, T, H, K, V, N, cu_seqlens is not None, r.dtype, chunk=chunk, save=save, recompute=recompute
    )
    saved = [torch.empty(shape, dtype=dtype) for shape, dtype in shapes]
    removed, checkpoints = saved or (None, None)
    count = _parts(N * H, r.numel() * V)
    scratch = Scratch(count, [V * K, spacing * K])
    constants = torch.zeros(1)
    arguments = (
        starts.data_ptr(),
        *(x.data_ptr() for x in (r, log_w, k, v, a, b)),
        address(state),
        y.data_ptr(),
        address(removed),
        last.data_ptr() if return_state else 0,
        address(checkpoints),
    )

    def part(number: int) -> None:
        cpu_simd.scan(number, count, N * H, H, K, V, spacing, *arguments, *scratch.of(number), constants.data_ptr())

    run_parts(part, count)
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
    recompute: bool,
) -> tuple[Tensor, ...]:
    """dr, dlog_w, dk, dv, da, db like their inputs, and dstate [N, H, V, K] (empty where state is None)."""
    check(dy, dlast, r, log_w, k, v, a, b, state, *saved)
    B, T, H, K = r.shape
    V, spacing = v.shape[-1], _spacing(chunk, recompute)
    starts = documents(cu_seqlens, B, T)
    N = len(starts) - 1
    removed, checkpoints = saved
    gradients = [torch.empty_like(x) for x in (r, log_w, k, v, a, b)]
    dstate = r.new_empty(0) if state is None else torch.empty_like(state)
    count = _parts(N * H, r.numel() * V)
    rows = cpu_simd.ROWS
    sizes = [
        V * K,
        V * K,
        spacing * (rows * K + cpu_simd.SPARE),
        (spacing + 1) * K,
        V,
        2 * rows * cpu_simd.SIMD_WIDTH,
        max(K, V),
    ]
    scratch = Scratch(count, sizes)
    zeros, ones = torch.zeros(max(2 * rows * cpu_simd.SIMD_WIDTH, K, V)), torch.ones(K)
    arguments = (
        starts.data_ptr(),
        *(x.data_ptr() for x in (r, log_w, k, v, a, b)),
        address(state),
        removed.data_ptr(),
        checkpoints.data_ptr(),
        dy.data_ptr(),
        address(dlast),
        *(x.data_ptr() for x in gradients),
        0 if state is None else dstate.data_ptr(),
    )

    def part(number: int) -> None:
        *addresses, unused = scratch.of(number)
        cpu_simd.scan_back(
            number, count, N * H, H, K, V, spacing, *arguments, *addresses, zeros.data_ptr(), ones.data_ptr(), unused
        )

    run_parts(part, count)
    return *gradients, dstate


def wkv7_step(
    r: Tensor, log_w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One token: r, log_w, k, a, b [B, H, K], v [B, H, V], state [B, H, V, K] -> y [B, H, V], the new state."""
    r, log_w, k, v, a, b = (x.unsqueeze(1) for x in (r, log_w, k, v, a, b))
    y, last, _ = wkv7_forward(
        r, log_w, k, v, a, b, state, None, chunk=1, save=False, recompute=False, return_state=True
    )
    return y.squeeze(1), last
