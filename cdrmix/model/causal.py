"""What evaluation and generation need of a causal language model: the interface that all kinds of models have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, Protocol

from torch import Tensor, nn

from cdrmix.model.language_model import RouterStats


class CausalOutput(Protocol):
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
    ) -> CausalOutput:
        """ids int64 [B, T]; cu_seqlens: the documents of the flattened tokens; cache: continues an earlier call."""

    def logits(self, hidden_BTD: Tensor) -> Tensor:
        """Hidden states [..., D] -> logits [..., V] in float32 at least."""

    def parameters(self) -> Any:
        """The weights."""

    def to(self, device: Any) -> Any:
        """Moves the weights to a device."""


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Puts a model into evaluation mode; each module then gets its own mode back.

    Each separately, because a wrapper can be in training mode while its model is not.
    """
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
