"""The output head of a model of transformers: which formula it has, its logits and its loss.

A test at the start finds the formula (`probe_head`). Heads without bias and softcap use the fused loss, which stores no
logits; the others compute their logits by chunks of tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from cdrmix import ops
from cdrmix.errors import ConfigError
from cdrmix.model.causal import evaluation_mode

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PROBE_TOKENS = 16
LARGE = 2.0**12  # factor on hidden states that saturates a softcap
CHUNK_BYTES = 1 << 26  # of the float32 logits that are stored at once
TOLERANCE, HALF_TOLERANCE = 1e-5, 2e-2  # largest difference between a formula and the logits, relative to the largest


@dataclass(frozen=True)
class Head:
    """The formula of a head: with y = hidden @ W.T + bias, the logits are scale * y.

    With a softcap they are softcap * tanh(scale * y / softcap).

    scale: as granite, cohere and falcon_h1 have it. bias: whether the layer has one (phi, gptj). softcap: None without
    one (gemma2, recurrent_gemma have one).
    """

    scale: float = 1.0
    bias: bool = False
    softcap: float | None = None

    @property
    def fused(self) -> bool:
        """Whether the loss is computed without storing logits."""
        return not self.bias and self.softcap is None

    @property
    def kind(self) -> str:
        """linear, scaled, bias or softcap: the first of softcap, bias, scaled that it has."""
        if self.softcap is not None:
            return "softcap"
        return "bias" if self.bias else "linear" if self.scale == 1.0 else "scaled"


def probe_head(model: PreTrainedModel, call: Callable[[Tensor], Tensor] | None = None) -> Head:
    """Finds the formula of the head of a causal language model of transformers.

    Passes random hidden states of 16 tokens to the head, also very large ones, and compares logits and formula.
    The weights themselves are not read, so they may be sharded. No random state changes.
    call: runs the model on ids [1, 16] and returns the logits; needed where weights are sharded (`choose_packing`).
    Raises ConfigError, which names the architecture, if the logits have another formula or are not finite.
    """
    layer = head_layer(model)
    device = next(model.parameters()).device
    ids = torch.arange(1, PROBE_TOKENS + 1, device=device).unsqueeze(0) % model.config.vocab_size
    with evaluation_mode(model), torch.no_grad():
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state if call is None else None
        given, _, _ = _run(model, layer, ids, None, call)
        generator = torch.Generator().manual_seed(0)
        random = torch.randn(given.shape, generator=generator).to(given)
        _, products, logits = _run(model, layer, ids, random, call)
        _, large_products, large_logits = _run(model, layer, ids, LARGE * random, call)
    if not bool(logits.isfinite().all()):
        raise ConfigError(
            f"model: the logits of {model.config.model_type} are NaN or infinite: its weights are damaged, or its "
            "numbers are too large for the precision"
        )
    same_hidden = hidden is None or torch.allclose(hidden.float(), given.float(), rtol=1e-2, atol=1e-3)
    tolerance = TOLERANCE if given.dtype.itemsize >= 4 else HALF_TOLERANCE
    head = _fit(products, logits, large_products, large_logits, tolerance, layer.bias is not None)
    if head is None or not same_hidden:
        raise ConfigError(
            f"model: the output head of {model.config.model_type} has a formula that cdrmix does not know; "
            "known are scale, bias and tanh softcap on a linear layer of the decoder's hidden states"
        )
    return head


def head_layer(model: PreTrainedModel) -> nn.Linear:
    """The linear layer of the head. Raises ConfigError if the head is none."""
    layer = model.get_output_embeddings()
    if not isinstance(layer, nn.Linear):
        raise ConfigError(
            f"model: the output head of {model.config.model_type} is {type(layer).__name__}, not a linear layer: "
            "this architecture cannot be trained"
        )
    return layer


def head_logits(head: Head, layer: nn.Linear, hidden: Tensor, vocab_size: int | None = None) -> Tensor:
    """The logits of hidden states [..., D], float32 [..., V]; of the first `vocab_size` tokens if it is given."""
    logits = layer(hidden)[..., :vocab_size].float()
    if head.scale != 1.0:
        logits = logits * head.scale
    return logits if head.softcap is None else head.softcap * torch.tanh(logits / head.softcap)


def head_loss(
    head: Head,
    layer: nn.Linear,
    hidden_RD: Tensor,
    targets_R: Tensor,
    weights_R: Tensor,
    vocab_size: int | None = None,
) -> Tensor:
    """Sum of weight * cross-entropy of the targets, nats, float32 scalar; [S] for S sets of weights [S, R].

    vocab_size: rows of W after these are padding without tokens, and get neither probability nor gradient. Targets must
    be below it.
    """
    if head.fused:
        weight = layer.weight if vocab_size in (None, layer.out_features) else layer.weight[:vocab_size]
        scaled = hidden_RD if head.scale == 1.0 else hidden_RD * head.scale
        return ops.linear_cross_entropy(scaled, weight, targets_R.expand(weights_R.shape), weights=weights_R)

    def part(hidden: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        logits = head_logits(head, layer, hidden, vocab_size)
        return (functional.cross_entropy(logits, targets, reduction="none") * weights).sum(-1)

    size = max(1, CHUNK_BYTES // (4 * layer.out_features))
    pieces = zip(hidden_RD.split(size), targets_R.split(size), weights_R.split(size, -1), strict=True)
    losses = [checkpoint(part, *piece, use_reentrant=False) for piece in pieces]
    return torch.stack(losses).sum(0)


def _run(
    model: PreTrainedModel,
    layer: nn.Linear,
    ids: Tensor,
    hidden: Tensor | None,
    call: Callable[[Tensor], Tensor] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Input and output of the head's layer, and the logits; `hidden`, if given, replaces the input."""
    seen: list[tuple[Tensor, Tensor]] = []

    def replace(_: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        return None if hidden is None else (hidden.expand_as(arguments[0]).to(arguments[0]), *arguments[1:])

    def record(_: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> None:
        seen.append((arguments[0], output))

    hooks = [layer.register_forward_pre_hook(replace), layer.register_forward_hook(record)]
    try:
        logits = model(input_ids=ids, use_cache=False).logits if call is None else call(ids)
    finally:
        for hook in hooks:
            hook.remove()
    given, products = seen[-1]
    return given, products, logits


def _fit(
    products: Tensor, logits: Tensor, large_products: Tensor, large_logits: Tensor, tolerance: float, bias: bool
) -> Head | None:
    """The formula of the logits as a function of the layer's output, from small and large values; None: unknown."""
    if products.shape != logits.shape:
        return None
    y, found, large_y, large_found = (x.double() for x in (products, logits, large_products, large_logits))

    def agrees(scale: float, cap: float | None) -> bool:
        for x, wanted in ((y, found), (large_y, large_found)):
            made = scale * x if cap is None else cap * torch.tanh(scale * x / cap)
            if not float((made - wanted).abs().max()) <= tolerance * float(wanted.abs().max()):  # NaN too
                return False
        return True

    if torch.equal(y, found) and torch.equal(large_y, large_found):
        return Head(bias=bias)
    scale = float((y * found).sum() / (y * y).sum())
    if agrees(scale, None):
        return Head(scale, bias=bias)
    cap = float(large_found.abs().max())
    return Head(bias=bias, softcap=cap) if agrees(1.0, cap) else None
