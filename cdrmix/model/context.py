"""What a block may know of a batch besides its tokens: documents, positions, rotary angles; computed once a batch."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from cdrmix import ops
from cdrmix.config.schema_model import Model
from cdrmix.model.sequence import SequenceGroup, SequenceSlice, slice_of


class Angles(NamedTuple):
    """Cosine and sine of the rotary angles at every token, [B or 1, T, 1, N/2], N the head width."""

    cosine: Tensor
    sine: Tensor


def rotary_angles(positions_BT: Tensor, head_width: int, theta: float, dtype: torch.dtype) -> Angles:
    """Rotary position embedding (arXiv 2104.09864): rotates the pair (i, i + N/2) by position * theta^(-2i/N).

    positions_BT: int64 [B, T], B 1 where rows have the same. Computed in float64, rounded to `dtype`; [B, T, 1, N/2].
    """
    half = head_width // 2
    frequencies = theta ** (-torch.arange(half, device=positions_BT.device, dtype=torch.float64) / half)
    angles = (positions_BT.double().unsqueeze(-1) * frequencies).unsqueeze(-2)
    return Angles(angles.cos().to(dtype), angles.sin().to(dtype))


class Tokens(NamedTuple):
    """Which positions are tokens. The others are filling: they belong to no document, and no router sees them.

    places_N: int64, those of the tokens among the flattened positions, so that the host knows their number without
    waiting for a GPU. is_token_R: bool, for each flattened position whether it is one.
    """

    places_N: Tensor
    is_token_R: Tensor

    @classmethod
    def of(cls, places_N: Tensor, positions: int) -> Tokens:
        """Those at these places of so many positions."""
        is_token_R = torch.zeros(positions, dtype=torch.bool, device=places_N.device)
        return cls(places_N, is_token_R.index_fill(0, places_N, True))


class FastWeights(Protocol):
    """The interface of a block's fast weights to the projections of its mixer."""

    def project(self, name: str, layer: nn.Linear, x: Tensor) -> Tensor:
        """The projection `name`, [B, T, O], of its input x [B, T, I]."""


class Context(NamedTuple):
    """What a block may know of the batch besides its tokens and its cache.

    cu_seqlens: as given to the model. starts_BT1: bool, where documents start inside rows (not at a row's first
    token). before_BT1: int64, number of tokens before each token in its document and row. angles: rotary angles of the
    positions in the document. Each is None where each row is one document, or where no block needs it.
    prefix: number of vectors before each row's tokens. keep_cache: whether a cache of these tokens is wanted.
    token_by_token: the rows are successive tokens of one row, one each: x is [T, 1, D], and the cache is that before
        the first of them. A mixer or feed-forward with a cache returns a tuple of T caches, one after each token.
    v_first: [B, T, D], the values of the first RWKV-7 block, which later ones mix into their own; None before it.
    fast_weights: those of the current block; None where it has none.
    sequence: x is this process's slice of the rows, and the other fields are of the slice; None: x has whole rows.
    tokens: which positions of x are tokens; None: all.
    """

    cu_seqlens: Tensor | None = None
    starts_BT1: Tensor | None = None
    before_BT1: Tensor | None = None
    angles: Angles | None = None
    prefix: int = 0
    keep_cache: bool = True
    token_by_token: bool = False
    v_first: Tensor | None = None
    fast_weights: FastWeights | None = None
    sequence: SequenceSlice | None = None
    tokens: Tokens | None = None

    @property
    def group(self) -> SequenceGroup | None:
        """The ranks with the other slices of the rows; None: x has whole rows."""
        return None if self.sequence is None else self.sequence.group

    def of_slice(self, group: SequenceGroup, rows: int, length: int, device: torch.device) -> Context:
        """The context of a group's slice of rows of `length` tokens. self: that of whole rows from their start."""
        starts_BT1, before_BT1 = (
            None if field is None else group.slice(field) for field in (self.starts_BT1, self.before_BT1)
        )
        angles = None if self.angles is None else Angles(*(group.slice(field) for field in self.angles))
        sequence, cu_seqlens = slice_of(group, self.cu_seqlens, rows, length, device)
        return self._replace(
            cu_seqlens=cu_seqlens, starts_BT1=starts_BT1, before_BT1=before_BT1, angles=angles, sequence=sequence
        )

    def last_before(self, last_BD: Tensor | None, x: Tensor) -> Tensor | None:
        """The token before each row of x: that of the cache, or of the slice before; with token_by_token then the rows
        themselves."""
        if self.sequence is not None:
            return self.sequence.before(x, 1).squeeze(1)
        if not self.token_by_token:
            return last_BD
        assert last_BD is not None
        return torch.cat([last_BD, x[:-1, 0]])

    def last(self, x: Tensor) -> Tensor:
        """x [B, T, D] at the last token of each row, [B, D]; for packed rows of each document, [documents, D]."""
        if self.cu_seqlens is None:
            return x[:, -1]
        return x.flatten(0, 1)[self.cu_seqlens[1:].long() - 1]


def make_context(
    config: Model,
    batch: int,
    length: int,
    cu_seqlens: Tensor | None,
    past: int | Tensor,
    device: torch.device,
    *,
    attends: bool,
    prefix: int = 0,
    keep_cache: bool = True,
    dtype: torch.dtype = torch.float32,
) -> Context:
    """The context of a batch.

    past: how many tokens came before its rows; int64 [B] where rows differ. attends: whether some block is attention.
    dtype: of the angles.
    """
    time = torch.arange(length, device=device).expand(batch, -1)
    starts, before = None, time
    if cu_seqlens is not None:
        starts = ops.document_starts(cu_seqlens, batch, length)
        before = time - torch.where(starts, time, 0).cummax(1).values
    angles = None
    if attends and config.attention.rope:
        head_width = config.d_model // config.attention.heads
        since = past.unsqueeze(1) if isinstance(past, Tensor) else past
        positions = since + torch.arange(length, device=device).unsqueeze(0)
        angles = rotary_angles(positions, head_width, config.attention.rope_theta, dtype)
        if starts is not None:  # no position exceeds a row's length
            angles = Angles(*(x[0, before] for x in angles))
    if starts is None:
        return Context(angles=angles, prefix=prefix, keep_cache=keep_cache)
    return Context(cu_seqlens, starts.unsqueeze(-1), before.unsqueeze(-1), angles, prefix, keep_cache)
