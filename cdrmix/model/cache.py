"""Operations on a model's cache: selecting and joining rows, resetting it, choosing among fast weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cdrmix.model.block import BlockCache
from cdrmix.model.language_model import Cache
from cdrmix.model.mixers.attention import (
    AttentionCache,
    FixedAttentionCache,
    KeyValueBuffer,
    RaggedAttentionCache,
    by_row,
)


def select(cache: Cache, rows: Tensor) -> Cache:
    """The rows of a batch, by a mask or by their numbers (a row may be repeated)."""
    selected: Cache = _merged(lambda tensor: tensor[rows], cache)
    return selected


def concatenated(*caches: Cache) -> Cache:
    """All rows of caches that differ only in their rows."""
    whole: Cache = _merged(lambda *tensors: torch.cat(tensors), *caches)
    return whole


def unread(cache: Cache, rows: int) -> Cache:
    """A cache like `cache`, for `rows` rows without tokens: zeros, positions 0, and empty keys and values."""

    def begun(part: Any) -> Any:
        if isinstance(part, Tensor):
            return part.new_zeros(rows, *part.shape[1:])
        if isinstance(part, AttentionCache):
            _, heads, _, width = part.keys.shape
            nothing = (rows, heads, 0, width)
            return AttentionCache(part.keys.new_zeros(nothing), part.values.new_zeros(nothing))
        return part if part is None else type(part)()

    return mapped(begun, cache)


def mapped(change: Callable[[Any], Any], cache: Cache) -> Cache:
    """A cache with every tensor, number, None and whole cache of attention changed by a function."""

    def walk(part: Any) -> Any:
        whole = isinstance(part, AttentionCache | RaggedAttentionCache | FixedAttentionCache)
        return _tuple_like(part, map(walk, part)) if isinstance(part, tuple) and not whole else change(part)

    return tuple(map(walk, cache))


def tensors(part: Any, *, by_row: bool = False) -> Iterator[Tensor]:
    """All tensors of a state, in their order. by_row: without the places of the next tokens, which rows share."""
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, tuple):
        for each in part[:-1] if by_row and isinstance(part, FixedAttentionCache) else part:
            yield from tensors(each, by_row=by_row)


def plastic_only(cache: Cache) -> Cache:
    """The fast weights, and the key that the last token left for the next token; mixers and feed-forwards are reset.

    The same as where `cu_seqlens` has a start within one of `episodes`.
    """
    return tuple(BlockCache(None, None, block.plastic) for block in cache)


def branch(cache: Cache, choice_B: Tensor) -> Cache:
    """The chosen branch of each row of a cache with branches (fast weights [S, B, r, d]): choice [B], below S."""
    rows = torch.arange(len(choice_B), device=choice_B.device)
    return tuple(
        block
        if block.plastic is None
        else block._replace(
            plastic=tuple(
                each._replace(a=each.a[choice_B, rows], pending=each.pending[choice_B, rows])
                if each.a.ndim == 4
                else each._replace(pending=each.pending[choice_B, rows])
                if each.pending.ndim == 4
                else each
                for each in block.plastic
            )
        )
        for block in cache
    )


def fast_weights(cache: Cache) -> list[Tensor]:
    """The committed fast weights A of every adapter, in the model's order: [B, r, d] each."""
    return [each.a for block in cache for each in block.plastic or ()]


def with_fast_weights(cache: Cache, change: Callable[[Tensor], Tensor]) -> Cache:
    """Every A (and the pending update of the unfinished chunk) changed by a function: zeroed, or permuted by row."""
    return tuple(
        block
        if block.plastic is None
        else block._replace(
            plastic=tuple(each._replace(a=change(each.a), pending=change(each.pending)) for each in block.plastic)
        )
        for block in cache
    )


def flattened(cache: Cache) -> dict[str, Tensor]:
    """Every tensor of a cache by its path, "block.part.field"; integers become tensors without dimensions."""
    tensors: dict[str, Tensor] = {}

    def walk(part: Any, name: str) -> None:
        if isinstance(part, tuple):
            fields = getattr(part, "_fields", range(len(part)))
            for field, each in zip(fields, part, strict=True):
                walk(each, f"{name}.{field}" if name else str(field))
        elif isinstance(part, Tensor):
            tensors[name] = part
        elif part is not None and not isinstance(part, KeyValueBuffer):  # the buffer's content is in its cache
            tensors[name] = torch.tensor(part)

    walk(cache, "")
    return tensors


def filled(template: Cache, tensors: Mapping[str, Tensor]) -> Cache:
    """The cache from the tensors of `flattened`; absent ones are None. template: any cache of the model."""

    def walk(part: Any, name: str) -> Any:
        if isinstance(part, tuple):
            fields = getattr(part, "_fields", range(len(part)))
            parts = [
                walk(each, f"{name}.{field}" if name else str(field)) for field, each in zip(fields, part, strict=True)
            ]
            return None if all(each is None for each in parts) else _tuple_like(part, parts)
        tensor = tensors.get(name)
        if tensor is None or isinstance(part, Tensor):
            return tensor
        return type(part)(tensor.item())

    nothing = BlockCache(None, None, None)  # for a block that carries nothing, such as attention between chunks
    return tuple(walk(block, str(number)) or nothing for number, block in enumerate(template))


def _merged(merge: Callable[..., Tensor], *parts: Any) -> Any:
    """Merges nested tuples of the same form: `merge` is applied to the tensors at the same path."""
    first = parts[0]
    if isinstance(first, Tensor):
        return merge(*parts)
    if isinstance(first, AttentionCache | RaggedAttentionCache) and _is_ragged(parts):
        split = [by_row(part) for part in parts]
        rows = [row for each in split for row in each]
        numbers = torch.arange(len(rows), device=rows[0].keys.device)
        order = merge(*numbers.split([len(each) for each in split]))
        return RaggedAttentionCache(tuple(rows[index] for index in order.tolist()))
    if isinstance(first, tuple):
        return _tuple_like(first, (_merged(merge, *each) for each in zip(*parts, strict=True)))
    if any(isinstance(part, KeyValueBuffer) for part in parts):
        return None  # buffers are not merged: the keys and values are copied
    assert all(part == first for part in parts), "the caches end at different positions"
    return first


def _is_ragged(parts: Sequence[AttentionCache | RaggedAttentionCache]) -> bool:
    """Whether the rows of attention caches have different numbers of tokens."""
    lengths = {part.keys.shape[2] for part in parts if isinstance(part, AttentionCache)}
    return len(lengths) > 1 or any(isinstance(part, RaggedAttentionCache) for part in parts)


def _tuple_like(kind: Any, parts: Iterable[Any]) -> Any:
    """A tuple of the same kind, a NamedTuple or a plain one, with other contents."""
    return type(kind)(*parts) if hasattr(kind, "_fields") else tuple(parts)


def rewind(cache: Cache) -> None:
    """Lets the next tokens after `cache` be written where those of dropped later states are, without a copy.

    The later states that share its buffers must not be used again.
    """
    for block in cache:
        if isinstance(block.mixer, AttentionCache) and block.mixer.buffer is not None:
            block.mixer.buffer.used = block.mixer.keys.shape[2]
