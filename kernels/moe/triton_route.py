"""Routing of the mixture of experts in Triton: softmax, top-k, loss terms, and the stable counting sort by expert.

logits [T, E] float32, K of E experts a token, R = T K routes; route i is choice i % K of token i // K.
    p = softmax(l);  chosen: the K largest of l + bias, ties to the lowest index;  w = softmax of l over the chosen
    load_balance = E sum_e f_e P_e,  P_e = mean_t p_te  (arXiv 2101.03961, eq. 4, over all choices)
        with f_e = tokens_per_expert_e / R the share of the routes that go to expert e before capacity
With a mask of the tokens kept, means and counts are over these, and the routes of the others are last.
    z_loss = mean_t logsumexp(l_t)^2                                        (arXiv 2202.08906, eq. 5)
The sort is a counting sort. A token chooses an expert at most once, so a route's position within its expert is the
number of earlier tokens that chose the same expert. moe_topk counts within blocks of tokens. A prefix sum over the
blocks, of integers, gives the counts before each block. moe_sort writes the order. Float sums are taken within blocks
and then over blocks, in a fixed order. The host reads nothing back.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cdrmix.kernels.common.triton_helpers import Build
from cdrmix.kernels.moe.triton_rows import REFERENCE_SHAPE, on

MOST_EXPERTS = 256
ELEMENTS = 2048  # of a program's tile [BLOCK_T, PADDED_E]
FINISH_BLOCK = 64  # blocks that moe_finish adds at a time


@triton.jit
def softmax_of(logits, tokens, experts, length, E: tl.constexpr):
    """Logits, softmax and logsumexp of a block; logits are -inf outside the matrix, and 0 for tokens past the end."""
    inside = (tokens < length)[:, None] & (experts < E)[None, :]
    block = tl.load(logits + tokens[:, None] * E + experts[None, :], mask=inside, other=float("-inf"))
    top = tl.max(block, 1)
    top = tl.where(tokens < length, top, 0.0)
    p = tl.exp(block - top[:, None])
    total = tl.where(tokens < length, tl.sum(p, 1), 1.0)
    return block, p / total[:, None], top + tl.log(total)


@triton.jit
def kept_of(keep, tokens, length, has_keep):
    """Which tokens of a block are inside the batch and kept."""
    kept = tokens < length
    if has_keep != 0:
        kept = kept & (tl.load(keep + tokens, mask=kept, other=0) != 0)
    return kept


@triton.jit(do_not_specialize=["length", "has_bias", "has_keep"])
def moe_topk(
    logits, bias, keep, weights, chosen, block_counts, block_p, block_z, length, has_bias, has_keep,
    E: tl.constexpr, PADDED_E: tl.constexpr, K: tl.constexpr, PADDED_K: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """A block's weights and experts [T, K], and its sums: routes and p by expert [blocks, E], and logsumexp^2."""
    block = tl.program_id(0)
    tokens = block.to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    experts, choices = tl.arange(0, PADDED_E), tl.arange(0, PADDED_K)
    values, p, log_total = softmax_of(logits, tokens, experts, length, E)
    score = values
    if has_bias != 0:
        score += tl.load(bias + experts, mask=experts < E, other=0.0)[None, :]
    score = tl.where(score != score, float("inf"), score)  # NaN is first, as in torch.sort; its weights are NaN

    # An expert is taken at most once, even where every remaining score is -inf.
    taken = tl.zeros([BLOCK_T, PADDED_E], tl.int32) + (experts >= E).to(tl.int32)[None, :]
    picked = tl.zeros([BLOCK_T, PADDED_K], tl.int32)
    picked_l = tl.full([BLOCK_T, PADDED_K], float("-inf"), tl.float32)
    for choice in range(K):
        best = tl.max(tl.where(taken != 0, float("-inf"), score), 1)
        tied = (taken == 0) & (score == best[:, None])
        index = tl.min(tl.where(tied, experts[None, :], PADDED_E), 1)
        here = experts[None, :] == index[:, None]
        taken = tl.where(here, 1, taken)
        at = choices[None, :] == choice
        picked = tl.where(at, index[:, None], picked)
        picked_l = tl.where(at, tl.sum(tl.where(here, values, 0.0), 1)[:, None], picked_l)
    w = tl.exp(picked_l - tl.where(tokens < length, tl.max(picked_l, 1), 0.0)[:, None])
    w /= tl.where(tokens < length, tl.sum(w, 1), 1.0)[:, None]
    routes = tokens[:, None] * K + choices[None, :]
    inside = (tokens < length)[:, None] & (choices < K)[None, :]
    tl.store(weights + routes, w, mask=inside)
    tl.store(chosen + routes, picked.to(tl.int64), mask=inside)

    kept = kept_of(keep, tokens, length, has_keep)
    count = tl.sum(tl.where(kept[:, None], taken, 0), 0)
    offsets = block.to(tl.int64) * E + experts
    tl.store(block_counts + offsets, count, mask=experts < E)
    tl.store(block_p + offsets, tl.sum(tl.where(kept[:, None], p, 0.0), 0), mask=experts < E)
    tl.store(block_z + block, tl.sum(tl.where(kept, log_total * log_total, 0.0), 0))


@triton.jit(do_not_specialize=["blocks", "capacity"])
def moe_finish(
    ends, block_p, block_z, counts, tokens_per_expert, load_balance, z_loss, blocks, capacity,
    E: tl.constexpr, PADDED_E: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Adds the blocks' sums in order: counts_E, tokens_per_expert_E, load_balance, z_loss.

    ends: routes up to the end of each block.
    """
    experts = tl.arange(0, PADDED_E)
    p = tl.zeros([BLOCK, PADDED_E], tl.float32)
    z = tl.zeros([BLOCK], tl.float32)
    for first in range(0, blocks, BLOCK):
        rows = first + tl.arange(0, BLOCK)
        inside = (rows < blocks)[:, None] & (experts < E)[None, :]
        p += tl.load(block_p + rows[:, None] * E + experts[None, :], mask=inside, other=0.0)
        z += tl.load(block_z + rows, mask=rows < blocks, other=0.0)
    wanted = tl.load(ends + (blocks - 1) * E + experts, mask=experts < E, other=0)
    tl.store(tokens_per_expert + experts, wanted.to(tl.int64), mask=experts < E)
    tl.store(counts + experts, tl.minimum(wanted, capacity).to(tl.int64), mask=experts < E)
    tokens = tl.maximum(tl.sum(tl.where(experts < E, wanted, 0), 0) // K, 1).to(tl.float32)  # those that are kept
    balance = tl.sum(tl.sum(p, 0) / tokens * (wanted.to(tl.float32) / (tokens * K)), 0) * E
    tl.store(load_balance, balance)
    tl.store(z_loss, tl.sum(z, 0) / tokens)


@triton.jit(do_not_specialize=["length", "capacity", "has_keep"])
def moe_sort(
    chosen, keep, ends, block_counts, tokens_per_expert, order, length, capacity, has_keep,
    E: tl.constexpr, PADDED_E: tl.constexpr, K: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Writes each route of a block to its position: kept routes by expert and route, dropped ones, those of skipped
    tokens."""
    block = tl.program_id(0).to(tl.int64)
    tokens = block * BLOCK_T + tl.arange(0, BLOCK_T)
    inside = tokens < length
    experts = tl.arange(0, PADDED_E)
    real = experts < E
    # Routes of an expert before this block, and routes of all experts before this one.
    offsets = block * E + experts
    earlier = tl.load(ends + offsets, mask=real, other=0) - tl.load(block_counts + offsets, mask=real, other=0)
    wanted = tl.load(tokens_per_expert + experts, mask=real, other=0).to(tl.int32)
    count = tl.minimum(wanted, capacity)
    over = wanted - count
    kept_start = tl.cumsum(count, 0) - count
    over_start = tl.cumsum(over, 0) - over + tl.sum(count, 0)

    kept = kept_of(keep, tokens, length, has_keep)
    skipped = (inside & (kept == 0)).to(tl.int32)
    skipped_before = block * BLOCK_T - tl.sum(earlier, 0) // K + tl.cumsum(skipped, 0) - skipped
    skipped_row = tl.sum(wanted, 0) + skipped_before * K

    has = tl.zeros([BLOCK_T, PADDED_E], tl.int32)
    for choice in range(K):
        index = tl.load(chosen + tokens * K + choice, mask=kept, other=-1).to(tl.int32)
        has += (experts[None, :] == index[:, None]).to(tl.int32)
    rank = earlier[None, :] + tl.cumsum(has, 0) - has
    row = tl.where(rank < capacity, kept_start[None, :] + rank, over_start[None, :] + rank - capacity)
    for choice in range(K):
        index = tl.load(chosen + tokens * K + choice, mask=inside, other=-1).to(tl.int32)
        at = tl.sum(tl.where(experts[None, :] == index[:, None], row, 0), 1)
        at = tl.where(kept, at, skipped_row + choice)
        tl.store(order + at, tokens * K + choice, mask=inside)


@triton.jit(do_not_specialize=["length", "has_dweights", "has_dload_balance", "has_dz_loss", "has_keep"])
def moe_route_gradient(
    dweights, dload_balance, dz_loss, logits, keep, chosen, tokens_per_expert, dlogits,
    length, has_dweights, has_dload_balance, has_dz_loss, has_keep,
    E: tl.constexpr, PADDED_E: tl.constexpr, K: tl.constexpr, PADDED_K: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """dlogits [T, E] from the gradients of the weights [T, K] and of both loss terms, any of which may be absent."""
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    experts, choices = tl.arange(0, PADDED_E), tl.arange(0, PADDED_K)
    _, p, log_total = softmax_of(logits, tokens, experts, length, E)
    wanted = tl.load(tokens_per_expert + experts, mask=experts < E, other=0)
    count = tl.maximum(tl.sum(wanted, 0) // K, 1).to(tl.float32)
    dl = tl.zeros([BLOCK_T, PADDED_E], tl.float32)
    if has_dload_balance != 0:
        share = wanted.to(tl.float32) / (count * K)
        dp = tl.load(dload_balance).to(tl.float32) * E * share / count
        dl += p * (dp[None, :] - tl.sum(p * dp[None, :], 1)[:, None])
    if has_dz_loss != 0:
        dl += (tl.load(dz_loss).to(tl.float32) * 2 / count) * log_total[:, None] * p
    dl = tl.where(kept_of(keep, tokens, length, has_keep)[:, None], dl, 0.0)
    if has_dweights != 0:
        routes = tokens[:, None] * K + choices[None, :]
        inside = (tokens < length)[:, None] & (choices < K)[None, :]
        index = tl.load(chosen + routes, mask=inside, other=0)
        picked = tl.load(logits + tokens[:, None] * E + index, mask=inside, other=float("-inf"))
        top = tl.where(tokens < length, tl.max(picked, 1), 0.0)
        w = tl.exp(picked - top[:, None])
        w /= tl.where(tokens < length, tl.sum(w, 1), 1.0)[:, None]
        dw = tl.load(dweights + routes, mask=inside, other=0.0)
        dpicked = w * (dw - tl.sum(w * dw, 1)[:, None])
        for choice in range(K):
            at = choices[None, :] == choice
            which = tl.sum(tl.where(at, index, 0), 1).to(tl.int32)
            value = tl.sum(tl.where(at, dpicked, 0.0), 1)
            dl += tl.where(experts[None, :] == which[:, None], value[:, None], 0.0)
    inside = (tokens < length)[:, None] & (experts < E)[None, :]
    tl.store(dlogits + tokens[:, None] * E + experts[None, :], dl, mask=inside)


def block_tokens(experts: int) -> int:
    """Tokens of a program: a tile of ELEMENTS logits, with fewer tokens where there would be few programs."""
    return min(ELEMENTS // triton.next_power_of_2(experts), 128)


def _constants(experts: int, k: int, *names: str) -> dict[str, Any]:
    every = {
        "E": experts,
        "PADDED_E": triton.next_power_of_2(experts),
        "K": k,
        "PADDED_K": triton.next_power_of_2(k),
        "BLOCK_T": block_tokens(experts),
        "BLOCK": FINISH_BLOCK,
    }
    return {name: every[name] for name in names}


_TOPK = ("E", "PADDED_E", "K", "PADDED_K", "BLOCK_T")
_FINISH = ("E", "PADDED_E", "K", "BLOCK")
_SORT = ("E", "PADDED_E", "K", "BLOCK_T")


def route_forward(
    logits_TE: Tensor, k: int, bias: Tensor | None, capacity: int | None, keep_T: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """weights_TK float32, experts_TK, counts_E, tokens_per_expert_E, order_R int64, load_balance and z_loss float32 [].

    logits_TE: float32 [T, E], E <= 256, k <= E; bias: [E], for the selection only; capacity: most rows that an expert
    keeps, its first ones in route order; None: no limit. T = 0 gives zeros. keep_T: bool [T], tokens that are kept;
    None: all.
    """
    T, E = logits_TE.shape
    if not 0 < E <= MOST_EXPERTS:
        raise ValueError(f"the routing kernels support 1 to {MOST_EXPERTS} experts, not {E}; use fewer experts")
    logits_TE = logits_TE.float().contiguous()
    device = logits_TE.device

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    blocks = -(-T // block_tokens(E))
    weights_TK, experts_TK = empty(T, k, dtype=torch.float32), empty(T, k, dtype=torch.int64)
    block_counts, block_p = empty(blocks, E, dtype=torch.int32), empty(blocks, E, dtype=torch.float32)
    block_z = empty(blocks, dtype=torch.float32)
    counts_E, tokens_per_expert_E = empty(E, dtype=torch.int64), empty(E, dtype=torch.int64)
    load_balance, z_loss = empty(dtype=torch.float32), empty(dtype=torch.float32)
    order_R = empty(T * k, dtype=torch.int64)
    if T == 0:
        return (
            weights_TK,
            experts_TK,
            counts_E.zero_(),
            tokens_per_expert_E.zero_(),
            order_R,
            load_balance.zero_(),
            z_loss.zero_(),
        )
    most = T if capacity is None else min(capacity, T)
    keep, has_keep = (logits_TE, 0) if keep_T is None else (keep_T.contiguous().view(torch.int8), 1)
    scores = logits_TE if bias is None else bias.float().contiguous()
    with on(device):
        moe_topk[(blocks,)](
            *(logits_TE, scores, keep, weights_TK, experts_TK, block_counts, block_p, block_z, T),
            *(int(bias is not None), has_keep),
            **_constants(E, k, *_TOPK),
            num_warps=4,
        )
        ends = block_counts.cumsum(0, dtype=torch.int32)
        moe_finish[(1,)](
            *(ends, block_p, block_z, counts_E, tokens_per_expert_E, load_balance, z_loss, blocks, most),
            **_constants(E, k, *_FINISH),
            num_warps=8,
        )
        moe_sort[(blocks,)](
            *(experts_TK, keep, ends, block_counts, tokens_per_expert_E, order_R, T, most, has_keep),
            **_constants(E, k, *_SORT),
            num_warps=4,
        )
    return weights_TK, experts_TK, counts_E, tokens_per_expert_E, order_R, load_balance, z_loss


def route_backward(
    dweights_TK: Tensor | None,
    dload_balance: Tensor | None,
    dz_loss: Tensor | None,
    logits_TE: Tensor,
    experts_TK: Tensor,
    tokens_per_expert_E: Tensor,
    k: int,
    keep_T: Tensor | None = None,
) -> Tensor:
    """dlogits_TE float32, from the gradients of the weights and loss terms; both softmaxes are computed again."""
    T, E = logits_TE.shape
    logits_TE = logits_TE.float().contiguous()
    dlogits_TE = torch.empty((T, E), dtype=torch.float32, device=logits_TE.device)
    given = dweights_TK, dload_balance, dz_loss
    if T == 0:
        return dlogits_TE
    dweights_TK = None if dweights_TK is None else dweights_TK.float().contiguous()
    keep, has_keep = (logits_TE, 0) if keep_T is None else (keep_T.contiguous().view(torch.int8), 1)
    with on(logits_TE.device):
        moe_route_gradient[(-(-T // block_tokens(E)),)](
            *(logits_TE if gradient is None else gradient for gradient in (dweights_TK, dload_balance, dz_loss)),
            *(logits_TE, keep, experts_TK, tokens_per_expert_E, dlogits_TE, T),
            *(int(gradient is not None) for gradient in given),
            has_keep,
            **_constants(E, k, *_TOPK),
            num_warps=4,
        )
    return dlogits_TE


def builds(arch: str) -> list[Build]:
    """The kernels at T 32768 and K 2 for 8 and 256 experts, the same on every architecture."""
    return list(_builds())


def _builds() -> Iterator[Build]:
    T, _, _, _, K = REFERENCE_SHAPE
    floats = dict.fromkeys(
        ("logits", "bias", "weights", "block_p", "block_z", "load_balance", "z_loss", "dweights"), "*fp32"
    )
    floats |= dict.fromkeys(("dload_balance", "dz_loss", "dlogits"), "*fp32")
    longs = dict.fromkeys(("chosen", "counts", "tokens_per_expert", "order"), "*i64")
    numbers = ("length", "has_bias", "blocks", "capacity", "has_dweights", "has_dload_balance", "has_dz_loss")
    known = (
        floats
        | longs
        | {"block_counts": "*i32", "ends": "*i32", "keep": "*i8"}
        | dict.fromkeys((*numbers, "has_keep"), "i32")
    )
    for E in (8, MOST_EXPERTS):
        blocks = -(-T // block_tokens(E))
        sums = blocks * E * 4
        for kernel, names, programs, warps, flops, moved, trips in (
            (moe_topk, _TOPK, blocks, 4, T * E * (6 + 4 * K), T * E * 4 + T * K * 12 + 2 * sums, (K,)),
            (moe_finish, _FINISH, 1, 8, blocks * E, sums, (-(-blocks // FINISH_BLOCK),)),
            (moe_sort, _SORT, blocks, 4, T * E * (2 + 3 * K), T * K * 16 + 2 * sums, (K, K)),
            (moe_route_gradient, _TOPK, blocks, 4, T * E * (12 + K), T * E * 8 + T * K * 12, (K,)),
        ):
            yield Build(
                name=kernel.fn.__name__,
                kernel=kernel,
                signature={name: known[name] for name in kernel.arg_names if name in known},
                constants=_constants(E, K, *names),
                num_warps=warps,
                num_stages=3,
                programs=programs,
                flops=flops,
                bytes=moved,
                trips=trips,
            )
