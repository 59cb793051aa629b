"""What can be done with a model's recurrent state: take rows, forget mixers, keep or drop what was written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from cdrmix.model.backbone import ModelState
from cdrmix.model.blocks import BlockState


def select(state: ModelState, rows: Tensor) -> ModelState:
    """The rows of a batch, by their numbers (a row may come more than once) or by a mask."""
    return tuple(BlockState(*(_mapped(part, lambda tensor: tensor[rows]) for part in block)) for block in state)


def detached(state: ModelState) -> ModelState:
    """The same values, through which no gradient goes."""
    return tuple(BlockState(*(_mapped(part, Tensor.detach) for part in block)) for block in state)


def plastic_only(state: ModelState) -> ModelState:
    """The fast weights, and the key that the last token left for the next: mixers and feed-forwards begin anew.

    The same as where `cu_seqlens` has a start within one of `episodes`.
    """
    return tuple(BlockState(None, None, block.plastic) for block in state)


def roll_back(after: ModelState, before: ModelState | None) -> ModelState:
    """The mixers of `after` with the fast weights of `before`: what was read stays read, what was written is not."""
    if before is None:
        return tuple(block._replace(plastic=None) for block in after)
    return tuple(mixed._replace(plastic=written.plastic) for mixed, written in zip(after, before, strict=True))


def choose(mask_B: Tensor, state: ModelState, other: ModelState) -> ModelState:
    """Row by row one of two states of the same tokens' count: where the mask is True `state`, else `other`."""

    def chosen(one: Any, two: Any) -> Any:
        if isinstance(one, Tensor):
            return torch.where(mask_B.view(-1, *[1] * (one.ndim - 1)), one, two)
        if isinstance(one, tuple):
            parts = [chosen(a, b) for a, b in zip(one, two, strict=True)]
            return type(one)(*parts) if hasattr(one, "_fields") else tuple(parts)
        assert one == two, "states of two moments"
        return one

    return tuple(chosen(one, two) for one, two in zip(state, other, strict=True))


def branch(state: ModelState, choice_B: Tensor) -> ModelState:
    """Of a state with branches of writes (fast weights [S, B, r, d]) each row's branch: numbers [B] below S."""
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
        for block in state
    )


def fast_weights(state: ModelState) -> list[Tensor]:
    """The committed fast weights A of every adapter, in the model's order: [B, r, d] each."""
    return [each.a for block in state for each in block.plastic or ()]


def with_fast_weights(state: ModelState, change: Callable[[Tensor], Tensor]) -> ModelState:
    """Every A (and what the open chunk has made of it) changed by a function: zeroed, exchanged between rows."""
    return tuple(
        block
        if block.plastic is None
        else block._replace(
            plastic=tuple(each._replace(a=change(each.a), pending=change(each.pending)) for each in block.plastic)
        )
        for block in state
    )


def flattened(state: ModelState) -> dict[str, Tensor]:
    """Every tensor of a state by its place in it, "block.part.field"; whole numbers as tensors of no dimensions."""
    found: dict[str, Tensor] = {}

    def walk(part: Any, name: str) -> None:
        if isinstance(part, tuple):
            fields = getattr(part, "_fields", range(len(part)))
            for field, each in zip(fields, part, strict=True):
                walk(each, f"{name}.{field}" if name else str(field))
        elif isinstance(part, Tensor):
            found[name] = part
        elif part is not None:
            found[name] = torch.tensor(part)

    walk(state, "")
    return found


def filled(template: ModelState, tensors: Mapping[str, Tensor]) -> ModelState:
    """The state of which `flattened` gave the tensors; what is absent is None. template: any state of the model."""

    def walk(part: Any, name: str) -> Any:
        if isinstance(part, tuple):
            fields = getattr(part, "_fields", range(len(part)))
            parts = [
                walk(each, f"{name}.{field}" if name else str(field)) for field, each in zip(fields, part, strict=True)
            ]
            if all(each is None for each in parts):
                return None
            return type(part)(*parts) if hasattr(part, "_fields") else tuple(parts)
        found = tensors.get(name)
        if found is None or isinstance(part, Tensor):
            return found
        return type(part)(found.item())

    return tuple(walk(block, str(number)) for number, block in enumerate(template))


def _mapped(part: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A nested tuple with every tensor changed."""
    if isinstance(part, Tensor):
        return change(part)
    if isinstance(part, tuple):
        parts = [_mapped(each, change) for each in part]
        return type(part)(*parts) if hasattr(part, "_fields") else tuple(parts)
    return part
