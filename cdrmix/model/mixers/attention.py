"""Causal softmax attention with rotary positions and grouped queries, within documents."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from cdrmix import ops
from cdrmix.config.schema_model import Model
from cdrmix.model.context import Context
from cdrmix.model.layers import linear
from cdrmix.model.mixers.base import MIXERS, Mixed, Mixer
from cdrmix.model.sequence import SequenceSlice
from cdrmix.model.tensor_parallel import Cut


class KeyValueBuffer:
    """Keys and values of a growing sequence, [B, kv_heads, capacity, head width], of which `used` tokens are written.

    Several states may share one buffer. A state's tokens are never overwritten. Only the state that ends at `used` may
    append to the buffer; an older state stays valid and is continued in a new buffer.
    """

    def __init__(self, keys: Tensor, values: Tensor, used: int) -> None:
        self.keys, self.values, self.used = keys, values, used

    @property
    def capacity(self) -> int:
        """Tokens a row for which it has memory."""
        return self.keys.shape[2]


class AttentionCache(NamedTuple):
    """Keys and values of the tokens so far, [B, kv_heads, T, head width], rotated.

    buffer: the memory that holds them and the next ones; None: they are separate tensors, as in a copy of the state.
    """

    keys: Tensor
    values: Tensor
    buffer: KeyValueBuffer | None = None


class RaggedAttentionCache(NamedTuple):
    """The caches of rows that have read different numbers of tokens, one cache for each row."""

    rows: tuple[AttentionCache, ...]


class FixedAttentionCache(NamedTuple):
    """Keys and values in memory of a fixed size, [B, kv_heads, S, head width], rotated: the next token of all rows is
    written at one place, so that the same operations on the same memory read any token.

    first_B: int64 [B], the place of each row's first token, up to which it has none. next_1: int64 [1], that of the
    next token. Other places hold finite values.
    """

    keys: Tensor
    values: Tensor
    first_B: Tensor
    next_1: Tensor

    @classmethod
    def of(cls, state: AttentionCache | RaggedAttentionCache, tokens: int) -> FixedAttentionCache:
        """A copy of a state, with room for so many more tokens of each row."""
        parts = state.rows if isinstance(state, RaggedAttentionCache) else (state,)
        longest = max(part.keys.shape[2] for part in parts)
        one = parts[0].keys
        rows = sum(len(part.keys) for part in parts)
        keys, values = (one.new_zeros(rows, one.shape[1], longest + tokens, one.shape[3]) for _ in range(2))
        firsts: list[int] = []
        for part in parts:
            here, first = slice(len(firsts), len(firsts) + len(part.keys)), longest - part.keys.shape[2]
            keys[here, :, first:longest], values[here, :, first:longest] = part.keys, part.values
            firsts += [first] * len(part.keys)
        place = torch.tensor([longest], device=one.device)
        return cls(keys, values, torch.tensor(firsts, device=one.device), place)

    def extended(self, k: Tensor, v: Tensor) -> FixedAttentionCache:
        """The state after one token of each row, k and v [B, 1, kv_heads, head width], in the same memory but for
        `next_1`."""
        self.keys.index_copy_(2, self.next_1, k.transpose(1, 2).to(self.keys.dtype))
        self.values.index_copy_(2, self.next_1, v.transpose(1, 2).to(self.values.dtype))
        return self._replace(next_1=self.next_1 + 1)

    def visible(self) -> Tensor:
        """The places with tokens of each row, bool [B, S]."""
        places = torch.arange(self.keys.shape[2], device=self.keys.device)
        return (places >= self.first_B.unsqueeze(1)) & (places < self.next_1)


def by_row(state: AttentionCache | RaggedAttentionCache) -> tuple[AttentionCache, ...]:
    """The caches of the single rows, without a copy."""
    if isinstance(state, RaggedAttentionCache):
        return state.rows
    keys, values = state.keys.split(1), state.values.split(1)
    return tuple(AttentionCache(*row) for row in zip(keys, values, strict=True))


def extended(state: AttentionCache | None, k: Tensor, v: Tensor, *, keep: bool) -> AttentionCache:
    """The state extended by the keys and values [B, T, kv_heads, head width] of the next tokens.

    keep: as in `with_room`. With gradients the tensors are concatenated, because memory that a backward pass has saved
    must not be written to.
    """
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    if state is None:
        return AttentionCache(k, v)
    if torch.is_grad_enabled():
        return AttentionCache(torch.cat([state.keys, k], 2), torch.cat([state.values, v], 2))
    past = state.keys.shape[2]
    after = with_room(state, k.shape[2], k.dtype, keep=keep)
    after.keys[:, :, past:], after.values[:, :, past:] = k, v
    return after


def with_room(
    state: AttentionCache, tokens: int, dtype: torch.dtype, *, keep: bool, spare: bool = True
) -> AttentionCache:
    """The state longer by so many tokens, in a buffer, to which the caller writes their keys and values.

    keep: whether the new state is used after the forward pass; otherwise its part of the buffer is free again at once.
    spare: a buffer is created twice as long as needed: then n tokens one by one cost 2 n copies, not n^2 / 2.
    """
    past, length = state.keys.shape[2], state.keys.shape[2] + tokens
    buffer = state.buffer
    if buffer is None or buffer.used != past or buffer.capacity < length or buffer.keys.dtype != dtype:
        batch, heads, _, width = state.keys.shape
        room = 2 * length if spare else length
        keys, values = (x.new_empty(batch, heads, room, width, dtype=dtype) for x in (state.keys, state.values))
        keys[:, :, :past], values[:, :, :past] = state.keys, state.values
        buffer = KeyValueBuffer(keys, values, past)
    if keep:
        buffer.used = length
    return AttentionCache(buffer.keys[:, :, :length], buffer.values[:, :, :length], buffer)


@MIXERS("attention")
class Attention(Mixer):
    """Multi-head attention with `kv_heads` key/value heads for `heads` query heads."""

    part = "attention"
    attends = True

    def __init__(self, config: Model, layer: int) -> None:
        super().__init__()
        attention, width = config.attention, config.d_model
        self.heads, self.kv_heads, self.head_width = attention.heads, attention.kv_heads, width // attention.heads
        scale = config.init_std_scale
        self.query = linear(width, width, 0.5 * scale)
        self.key = linear(width, self.kv_heads * self.head_width, 0.5 * scale)
        self.value = linear(width, self.kv_heads * self.head_width, 0.5 * scale)
        self.output = linear(width, width, 0.0)
        self.query_norm = nn.RMSNorm(self.head_width, eps=config.norm_eps) if attention.qk_norm else None
        self.key_norm = nn.RMSNorm(self.head_width, eps=config.norm_eps) if attention.qk_norm else None

    def cuts(self) -> Mapping[str, Cut]:
        """Heads."""
        return {"query.weight": Cut(0), "key.weight": Cut(0), "value.weight": Cut(0), "output.weight": Cut(1)}

    def narrow(self, size: int) -> None:
        self.heads, self.kv_heads = self.heads // size, self.kv_heads // size

    def forward(
        self, x: Tensor, context: Context, cache: AttentionCache | RaggedAttentionCache | FixedAttentionCache | None
    ) -> Mixed:
        """x [B, T, D] (normed) -> its output, and the cache after it; for packed rows a cache for each document."""
        x = self.copied(x)
        batch, length, _ = x.shape
        q = self.projected("query", x, context).view(batch, length, self.heads, self.head_width)
        k = self.projected("key", x, context).view(batch, length, self.kv_heads, self.head_width)
        v = self.projected("value", x, context).view(batch, length, self.kv_heads, self.head_width)
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self._normed(q, self.query_norm), self._normed(k, self.key_norm)
        if context.angles is not None:
            q, k = ops.apply_rotary(q, *context.angles), ops.apply_rotary(k, *context.angles)
        after: AttentionCache | RaggedAttentionCache | FixedAttentionCache | tuple[AttentionCache, ...] | None
        if context.sequence is not None:
            y, after = self._read_slice(q, k, v, context.sequence), None
        elif context.token_by_token:
            assert isinstance(cache, AttentionCache)
            state, tokens, states = cache, [], []
            for each in zip(q.split(1), k.split(1), v.split(1), strict=True):
                token, state = self._read(state, *each, context)
                tokens.append(token)
                states.append(state)
            y, after = torch.cat(tokens), tuple(states)
        elif isinstance(cache, RaggedAttentionCache):
            parts = zip(cache.rows, q.split(1), k.split(1), v.split(1), strict=True)
            read = [self._read(*part, context) for part in parts]
            y, after = torch.cat([y for y, _ in read]), RaggedAttentionCache(tuple(row for _, row in read))
        elif isinstance(cache, FixedAttentionCache):
            after = cache.extended(k, v)
            keys, values = after.keys.transpose(1, 2), after.values.transpose(1, 2)
            y = ops.attention(q, keys, values, visible_BS=after.visible())
        else:
            y, after = self._read(cache, q, k, v, context)
            if context.cu_seqlens is not None and context.keep_cache:
                after = _documents(after, context.cu_seqlens)
        y = self.projected("output", y.reshape(batch, length, self.heads * self.head_width), context)
        return Mixed(self.summed(y), after if context.keep_cache else None)

    def _normed(self, x: Tensor, norm: nn.RMSNorm) -> Tensor:
        """The heads of x normed; a divided module has some of them, and the weight is that of all."""
        if self.tensor is None:
            return norm(x)
        return functional.rms_norm(x, norm.normalized_shape, self.copied(norm.weight), norm.eps)

    def _read_slice(self, q: Tensor, k: Tensor, v: Tensor, sequence: SequenceSlice) -> Tensor:
        """The attention output [B, L, H, N] of a slice of the rows: each rank computes some heads of whole rows.

        A key/value head is repeated where there are fewer of them than ranks.
        """
        group = sequence.group
        repeats = max(1, group.size // self.kv_heads)
        k, v = (x.repeat_interleave(repeats, 2) if repeats > 1 else x for x in (k, v))
        whole = (group.heads(x) for x in (q, k, v))
        return group.tokens(ops.attention(*whole, cu_seqlens=sequence.cu_seqlens))

    def _read(
        self, cache: AttentionCache | None, q: Tensor, k: Tensor, v: Tensor, context: Context
    ) -> tuple[Tensor, AttentionCache]:
        """The attention output [B, T, H, N] of the queries, and the cache extended by these tokens."""
        after = extended(cache, k, v, keep=context.keep_cache)
        keys, values = after.keys.transpose(1, 2), after.values.transpose(1, 2)
        return ops.attention(q, keys, values, cu_seqlens=context.cu_seqlens), after


def _documents(state: AttentionCache, cu_seqlens: Tensor) -> RaggedAttentionCache:
    """Splits the cache of packed rows into one cache for each document."""
    keys, values = (x.transpose(1, 2).flatten(0, 1) for x in (state.keys, state.values))  # [tokens, kv_heads, N]
    parts = zip(*(x.split(cu_seqlens.diff().tolist()) for x in (keys, values)), strict=True)
    return RaggedAttentionCache(
        tuple(AttentionCache(k.transpose(0, 1).unsqueeze(0), v.transpose(0, 1).unsqueeze(0)) for k, v in parts)
    )
