"""The recurrent state of a cdrmix model as a cache of transformers."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.cache_utils import Cache as TransformersCache
from transformers.cache_utils import CacheLayerMixin

from cdrmix.model.cache import select
from cdrmix.model.language_model import Cache


class StateLayer(CacheLayerMixin):
    """The state of all blocks, and how many tokens it has read.

    It is one layer for transformers. Padding counts as tokens in `length`, as in other caches.
    """

    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.state: Cache | None = None
        self.length = 0

    @property
    def batch_size(self) -> int:
        """Number of rows; -1 before the first tokens."""
        return -1 if self.state is None else self._rows

    def advance(self, state: Cache, rows: int, length: int) -> None:
        """Takes the state of `rows` rows after `length` more tokens."""
        self.state, self._rows, self.is_initialized = state, rows, True
        self.length += length

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        """Raises ValueError: the model itself sets the state."""
        raise ValueError("the cache of a cdrmix model cannot be created from keys; the model returns one")

    def update(self, key_states: Tensor, value_states: Tensor, cache_kwargs: object = None) -> tuple[Tensor, Tensor]:
        """Raises ValueError: the model itself sets the state."""
        raise ValueError("the cache of a cdrmix model takes no keys and values; pass it to the model")

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """Number of keys that a mask covers (read and new tokens), and the offset of the first."""
        new = query_length if isinstance(query_length, int) else len(query_length)
        return self.length + new, 0

    def get_seq_length(self) -> int:
        """Number of tokens read, with padding."""
        return self.length

    def get_max_length(self) -> int:
        """-1: there is no limit."""
        return -1

    def get_max_cache_shape(self) -> int:
        """-1: there is no limit. (The name in transformers 4.57.)"""
        return -1

    def reset(self) -> None:
        """Forgets all tokens."""
        self.state, self.length, self.is_initialized = None, 0, False

    def crop(self, tokens: int) -> None:
        """Raises ValueError: a recurrent state cannot go back."""
        raise ValueError(
            "the cache of a cdrmix model cannot drop its last tokens, because a recurrent state cannot go back; "
            "use copy.deepcopy(cache) before the tokens that you may drop, and no assisted generation"
        )

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Takes these rows, in this order."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Takes these rows, by their numbers or a mask."""
        if self.state is not None:
            numbers = torch.arange(self._rows, device=indices.device)[indices]
            self.state, self._rows = select(self.state, numbers), len(numbers)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each row."""
        if self.state is not None:
            self.batch_select_indices(torch.arange(self._rows).repeat_interleave(repeats))


class CdrmixCache(TransformersCache):
    """The `past_key_values` of a cdrmix model: its recurrent state, and the keys and values of its attention layers."""

    def __init__(self) -> None:
        self.layer = StateLayer()
        super().__init__(layers=[self.layer])
