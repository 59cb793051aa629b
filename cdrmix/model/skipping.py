"""Mixers that skip tokens: the kept tokens of all documents are packed into one row, and the output is spread again.

A skipped token is no token for the mixer: it decays and writes no state, is shifted to by no later token, has no key,
and has no position. So the n-th kept token of a document has the position n, whatever was skipped before it.

Shapes: B rows of T tokens, N = B T tokens, K of them kept, D model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

from cdrmix.config.schema_model import Model
from cdrmix.model.context import Context, Tokens, make_context
from cdrmix.model.depth import Gate
from cdrmix.model.feed_forward.router import Routed
from cdrmix.model.mixers.attention import AttentionCache, RaggedAttentionCache, by_row
from cdrmix.model.mixers.base import Mixed, Mixer


def mix_kept(mixer: Mixer, config: Model, x: Tensor, context: Context, cache: Any, gate: Gate) -> Mixed:
    """The mixer over the kept tokens of x [B, T, D] (normed): its output times the gate's factors, 0 for other tokens.

    The cache has a row for each row of x, or for each document, also for those of which nothing was kept so far. Of
    attention it is always a RaggedAttentionCache. The host reads how many tokens are kept, and waits for a GPU.
    """
    return (
        _begun(mixer, config, x, context, gate) if cache is None else _continued(mixer, config, x, context, cache, gate)
    )


def _begun(mixer: Mixer, config: Model, x: Tensor, context: Context, gate: Gate) -> Mixed:
    """Documents from their start, packed or one a row."""
    batch, length, _ = x.shape
    bounds = context.cu_seqlens
    if bounds is None:
        bounds = torch.arange(0, batch * length + 1, length, device=x.device, dtype=torch.int32)
    place_K, inner, has_document, tokens = _packed(gate.keep_T, bounds)
    context = context._replace(tokens=tokens)
    mixed = _run(mixer, config, x, context, gate, place_K.unsqueeze(0), inner, 0, None)
    cache = None
    if context.keep_cache:
        documents = has_document.nonzero().squeeze(1)
        cache = _placed(_empty(mixed.cache, len(bounds) - 1), documents, mixed.cache)
    return mixed._replace(y=_spread(mixed.y, place_K, x), cache=cache)


def _packed(keep_N: Tensor, bounds: Tensor) -> tuple[Tensor, Tensor, Tensor, Tokens | None]:
    """The places of the tokens to run [K], their documents' bounds, which documents keep a token, and which of those
    that are run are tokens (None: all).

    Where no token is kept, the first is run as filling, with the factor 0: ZeRO-3 needs every module's call in every
    process. A plan has no values: it assumes that all are kept, as in the first steps.
    """
    if isinstance(keep_N, FakeTensor):
        every = torch.arange(len(keep_N), device=keep_N.device)
        return every, bounds, torch.ones_like(bounds[1:], dtype=torch.bool), None
    place_K = keep_N.nonzero().squeeze(1)
    ends = functional.pad(keep_N.cumsum(0), (1, 0))[bounds.long()]
    has_document = ends.diff() > 0
    if not len(place_K):
        return place_K.new_zeros(1), bounds.new_tensor([0, 1]), has_document, Tokens.of(place_K, 1)
    return place_K, functional.pad(ends[1:][has_document], (1, 0)).to(bounds.dtype), has_document, None


def _continued(mixer: Mixer, config: Model, x: Tensor, context: Context, cache: Any, gate: Gate) -> Mixed:
    """Rows that go on from a cache. Rows that keep equally many tokens are run together."""
    batch, length, _ = x.shape
    keep_BT = gate.keep_T.view(batch, length)
    after = RaggedAttentionCache(by_row(cache)) if isinstance(cache, AttentionCache) else cache
    y, reports = torch.zeros_like(x).flatten(0, 1), []
    counts_B = keep_BT.sum(1)
    for count in sorted(set(counts_B.tolist()) - {0}):
        rows = (counts_B == count).nonzero().squeeze(1)
        place_RK = keep_BT[rows].nonzero()[:, 1].view(len(rows), count) + rows.unsqueeze(1) * length
        chosen = _rows(after, rows)
        mixed = _run(mixer, config, x, context, gate, place_RK, None, _past(chosen, x.device), chosen)
        y = y.to(mixed.y.dtype).index_copy(0, place_RK.flatten(), mixed.y.flatten(0, 1))
        reports += [] if mixed.routed is None else [mixed.routed]
        if context.keep_cache:
            after = _placed(after, rows, mixed.cache)
    return Mixed(y.view(x.shape), after if context.keep_cache else None, _summed(reports, mixer, x))


def _run(
    mixer: Mixer,
    config: Model,
    x: Tensor,
    context: Context,
    gate: Gate,
    place_RK: Tensor,
    cu_seqlens: Tensor | None,
    past: int | Tensor,
    cache: Any,
) -> Mixed:
    """The mixer over the tokens at these places of the flattened x, with a context of their own; y [R, K, D].

    context: of x, but with the tokens of those that are run.
    """
    rows, length = place_RK.shape
    inside = make_context(
        config,
        rows,
        length,
        cu_seqlens,
        past,
        x.device,
        attends=mixer.attends,
        keep_cache=context.keep_cache,
        dtype=torch.promote_types(x.dtype, torch.float32),
    )
    inside = inside._replace(tokens=context.tokens)
    place_N = place_RK.flatten()
    if context.v_first is not None:
        v_first = context.v_first.flatten(0, 1).index_select(0, place_N).unflatten(0, place_RK.shape)
        inside = inside._replace(v_first=v_first)
    mixed = mixer(x.flatten(0, 1).index_select(0, place_N).unflatten(0, place_RK.shape), inside, cache)
    weight_RK = gate.weight_T.where(gate.keep_T, 0).index_select(0, place_N).view(place_RK.shape)
    return mixed._replace(y=(mixed.y * weight_RK.unsqueeze(-1)).to(mixed.y.dtype), values=None)


def _spread(y_1KD: Tensor, place_K: Tensor, like: Tensor) -> Tensor:
    """y at the places of its tokens in a tensor of zeros of the shape of `like`, [B, T, D]."""
    flat = y_1KD.new_zeros(like.shape).flatten(0, 1)
    return flat.index_copy(0, place_K, y_1KD.squeeze(0)).view(like.shape)


def _past(cache: Any, device: torch.device) -> int | Tensor:
    """How many keys each row of a cache has; 0 for a mixer without keys."""
    if not isinstance(cache, RaggedAttentionCache):
        return 0
    return torch.tensor([row.keys.shape[2] for row in cache.rows], device=device)


def _rows(cache: Any, rows: Tensor) -> Any:
    """The rows of a cache with these numbers."""
    if isinstance(cache, RaggedAttentionCache):
        return RaggedAttentionCache(tuple(cache.rows[row] for row in rows.tolist()))
    return type(cache)(*(field.index_select(0, rows) for field in cache))


def _placed(cache: Any, rows: Tensor, others: Any) -> Any:
    """The cache with the first rows of `others` in place of its rows with these numbers."""
    if isinstance(cache, RaggedAttentionCache):
        every = list(cache.rows)
        for row, other in zip(rows.tolist(), others.rows, strict=False):
            every[row] = other
        return RaggedAttentionCache(tuple(every))
    pairs = zip(cache, others, strict=True)
    return type(cache)(*(field.index_copy(0, rows, other[: len(rows)].to(field.dtype)) for field, other in pairs))


def _empty(cache: Any, documents: int) -> Any:
    """A cache like `cache`, of documents without tokens: zeros, and no keys."""
    if isinstance(cache, RaggedAttentionCache):
        keys, values, _ = cache.rows[0]
        return RaggedAttentionCache((AttentionCache(keys[:, :, :0], values[:, :, :0]),) * documents)
    return type(cache)(*(field.new_zeros(documents, *field.shape[1:]) for field in cache))


def _summed(reports: list[Routed], mixer: Mixer, x: Tensor) -> Routed | None:
    """One report of a mixer's router for all groups of rows: sums of counts, means of losses; None without a router."""
    if reports:
        counts, tokens, balance, z_loss = (torch.stack(column) for column in zip(*reports, strict=True))
        return Routed(counts.sum(0), tokens.sum(0), balance.mean(), z_loss.mean())
    router = getattr(mixer, "router", None)
    if router is None:
        return None
    counts_E, nothing = torch.zeros(router.experts, dtype=torch.int64, device=x.device), x.new_zeros(())
    return Routed(counts_E, counts_E, nothing, nothing)
