"""The data types of a training: autocast around the loss model, copies of the weights, and sums of gradients."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from cdrmix.errors import ConfigError
from cdrmix.ops import weights as compute_weights

AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class Autocast(nn.Module):
    """A loss model whose forward pass runs under torch.autocast. DeepSpeed wraps this module. stage: of ZeRO."""

    def __init__(self, loss_model: nn.Module, device_type: str, dtype: torch.dtype | None, *, stage: int = 0) -> None:
        super().__init__()
        self.loss_model = loss_model
        self.device_type = device_type
        self.dtype = dtype
        # Autocast keeps the cast weights until the pass ends. Under ZeRO-3 these would be all weights but those of the
        # experts, in 16 bits in every process: 116 GB of cdrmix-reason-200b.
        self.keeps_casts = stage < 3

    def forward(self, *arguments: Any) -> Any:
        """The loss model's forward pass, in the configured precision."""
        with self.precision():
            return self.loss_model(*arguments)

    def precision(self, *, whole: bool = False) -> AbstractContextManager[None]:
        """The configured precision, for computations outside of the forward pass. whole: of a model whose weights are
        whole in this process, so that the casts of one pass serve the next."""
        if self.dtype is None:
            return nullcontext()
        return torch.autocast(self.device_type, self.dtype, cache_enabled=self.keeps_casts or whole)


def attach_copies(parameters: Iterable[Tensor], dtype: torch.dtype | None, stage: int) -> None:
    """Lets products keep copies of the weights in their dtype and accumulate weight gradients, where the stage allows.

    dtype: of autocast; None: products are float32 and need no copies. Weights that are not float32 get none.
    """
    if dtype is not None and stage < 3:  # under ZeRO-3 a weight is gathered only during its module's call
        # ZeRO-2's hooks read every gradient when it is computed; ZeRO-1 reads `.grad` after the last one.
        wide = [parameter for parameter in parameters if parameter.dtype == torch.float32]
        compute_weights.attach(wide, dtype, add_gradients=stage < 2)


def sum_gradients_in_float32(parameters: Iterable[Any]) -> None:
    """Lets `.grad` of bf16 parameters be float32."""
    for parameter in parameters:
        if parameter.requires_grad:
            if not hasattr(parameter, "grad_dtype"):
                raise ConfigError(
                    f"train.zero_stage: 1 with train.weights: bf16 needs a newer PyTorch than {torch.__version__}; "
                    "set it to 2 or 3"
                )
            parameter.grad_dtype = torch.float32
