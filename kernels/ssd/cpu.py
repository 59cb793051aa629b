"""The SSD scan on a CPU: float32, by chunks of tokens as small matrix products in vector registers.

    S_t = exp(log_decay_t) S_{t-1} + v_t k_t^T ;  y_t = S_t q_t, or S_{t-1} q_t        S: [V, K]

Within a chunk of C tokens y = e^g (q S^T) + (q k^T * weights) v and S' = e^G S + (v e^h)^T k. These take about
2 K V + C (K + V) / 2 multiply-additions a token and head forward, and 4 K V + C (2 K + V) backward. The forward pass
keeps the states between chunks, 4 V K / C bytes a token and head: 512 at K = V = 64 and C = 32, where q, k, v take 768.

One thread computes a document and head in one order. In the backward pass one thread computes up to HEADS heads of a
group, whose gradients of q and k are summed in order. So no bit depends on the number of threads or on the rest of the
batch; bits do depend on `chunk`. The loops are in cpu_simd.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cdrmix.kernels.common.cpu import Scratch, address, check, documents, run_parts
from cdrmix.kernels.ssd import cpu_simd

CHUNK = 32
HEADS = 8  # most heads of a group in one part of the backward pass; each part has its own dq, dk
SERIAL_WORK = 1 << 20  # K V tokens heads, up to which one thread is used: 0.1 ms, twice the time to wake another thread
CONSTANTS = torch.tensor([-torch.inf, 0.0, 1.0])
MASKS = torch.ones(8, 8).tril(-1)


def _padded(width: int) -> int:
    return -(-width // 8) * 8


def _parts(items: int, work: int) -> int:
    """The number of threads; no bit depends on it, because one thread computes an item."""
    return min(torch.get_num_threads(), max(items, 1)) if work > SERIAL_WORK else 1


def _heads_at_once(per_group: int) -> int:
    """The largest divisor of a group's heads that is at most HEADS."""
    return max(n for n in range(1, HEADS + 1) if per_group % n == 0)


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
    """What the forward pass keeps: the states before chunks, without documents' first. q, v: their shapes."""
    if not save:
        return []
    return [((v[0] * v[1] // (chunk or CHUNK), v[2], _padded(q[3]), _padded(v[3])), torch.float32)]


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
    """y [B, T, H, V], last [N, H, V, K] (empty unless return_state), and what the backward pass needs."""
    check(q, k, v, log_decay, state)
    (B, T, H, value_width), (groups, key_width) = v.shape, q.shape[2:]
    K, V, C = _padded(key_width), _padded(value_width), chunk or CHUNK
    starts = documents(cu_seqlens, B, T)
    N = len(starts) - 1
    y = torch.empty_like(v)
    last = v.new_empty((N, H, value_width, key_width) if return_state else 0)
    shapes = ssd_scan_saved_shapes(q.shape, v.shape, N, cu_seqlens is not None, q.dtype, chunk=chunk, save=save)
    saved = [torch.empty(shape, dtype=dtype) for shape, dtype in shapes]
    count = _parts(N * H, B * T * H * K * V)
    scratch = Scratch(count, [K * V, K * V, C * K, C * K, C * K, C * V, C * V, C * C, C * C, C, C, 8])
    arguments = (
        *(H, groups, key_width, value_width, C, exclusive),
        starts.data_ptr(),
        *(x.data_ptr() for x in (q, k, v, log_decay)),
        address(state),
        y.data_ptr(),
        last.data_ptr() if return_state else 0,
        saved[0].data_ptr() if saved else 0,
    )

    def part(number: int) -> None:
        cpu_simd.scan(number, count, N * H, *arguments, *scratch.of(number), CONSTANTS.data_ptr())

    run_parts(part, count)
    return y, last, saved


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
    """dq, dk, dv, dlog_decay like their inputs, and dstate [N, H, V, K] (empty where state is None)."""
    check(dy, dlast, q, k, v, log_decay, state, *saved)
    (B, T, H, value_width), (groups, key_width) = v.shape, q.shape[2:]
    K, V, C = _padded(key_width), _padded(value_width), chunk or CHUNK
    starts = documents(cu_seqlens, B, T)
    N, parts = len(starts) - 1, H // groups // _heads_at_once(H // groups)
    dq, dk = torch.empty(parts, *q.shape), torch.empty(parts, *q.shape)
    dv, dlog_decay = torch.empty_like(v), torch.empty_like(log_decay)
    dstate = v.new_empty(0) if state is None else torch.empty_like(state)
    items = N * groups * parts
    count = _parts(items, B * T * H * K * V)
    sizes = [K * V] * 3 + [C * K] * 3 + [C * V] * 3 + [C * K] * 2 + [C * V] * 3 + [C * C] * 3 + [C, C, 8, C, C]
    scratch = Scratch(count, [*sizes, max(C, V), max(C, V) * 8])
    arguments = (
        *(H, groups, parts, key_width, value_width, C, exclusive, B * T),
        starts.data_ptr(),
        *(x.data_ptr() for x in (q, k, v, log_decay)),
        address(state),
        saved[0].data_ptr(),
        dy.data_ptr(),
        address(dlast),
        *(x.data_ptr() for x in (dq, dk, dv, dlog_decay)),
        0 if state is None else dstate.data_ptr(),
    )

    def part(number: int) -> None:
        addresses = scratch.of(number)
        cpu_simd.scan_back(number, count, items, *arguments, *addresses, MASKS.data_ptr(), CONSTANTS.data_ptr())

    run_parts(part, count)
    return *(x[0] if parts == 1 else x.sum(0) for x in (dq, dk)), dv, dlog_decay, dstate


def ssd_scan_step(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor, exclusive: bool
) -> tuple[Tensor, Tensor]:
    """One token: q, k [B, G, K], v [B, H, V], log_decay [B, H], state [B, H, V, K] -> y [B, H, V], the new state."""
    q, k, v, log_decay = (x.unsqueeze(1) for x in (q, k, v, log_decay))
    y, last, _ = ssd_scan_forward(
        q, k, v, log_decay, state, None, chunk=8, exclusive=exclusive, save=False, return_state=True
    )
    return y.squeeze(1), last
