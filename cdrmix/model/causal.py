"""What evaluation and generation need of a causal language model: the interface that all kinds of models have."""

from __future__ import annotations

from typing import Any, Literal, Protocol

from torch import Tensor

from cdrmix.model.language_model import RouterStats


class Read(Protocol):
    """The result of a forward pass: hidden states [B, T, D], router reports, and the cache if it was asked for."""

    @property
    def hidden_BTD(self) -> Tensor: ...
    @property
    def router(self) -> RouterStats | None: ...
    @property
    def cache(self) -> Any: ...


class CausalModel(Protocol):
    """A causal language model in evaluation mode, of this package or of transformers."""

    @property
    def batching(self) -> Literal["any", "length", "row"]:
        """Which rows are generated together: any, those with prompts of the same length, or each row alone."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""

    def __call__(
        self, ids_BT: Tensor, *, cu_seqlens: Tensor | None = None, cache: Any = None, return_cache: bool = False
    ) -> Read:
        """ids int64 [B, T]; cu_seqlens: the documents of the flattened tokens; cache: continues an earlier call."""

    def logits(self, hidden_BTD: Tensor) -> Tensor:
        """Hidden states [..., D] -> logits [..., V] in float32 at least."""

    def parameters(self) -> Any:
        """The weights."""

    def to(self, device: Any) -> Any:
        """Moves the weights to a device."""
