"""Packed documents in models of transformers: how the decoder is called, and a test that documents are isolated.

Models of transformers keep packed documents apart in different ways, and some not at all. No list of architectures says
which: a test with two random documents tries the ways one after another (`choose_packing`).
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from cdrmix.errors import ConfigError
from cdrmix.hf import mamba
from cdrmix.model.causal import evaluation_mode

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Way = Literal["positions", "masks", "flat", "rows"]
Arguments = dict[str, Any]  # keyword arguments of a decoder
PROBE_LENGTHS = (9, 7)  # tokens of the two documents of the test
PROBE_STD = 0.02  # of their embeddings: that of the initial embeddings of most models
# What decoders raise that take no masks of more than two dimensions, or no masks by type of layer.
UNSUPPORTED = (TypeError, ValueError, AttributeError, LookupError, RuntimeError)
# Largest root mean square of the difference between a document packed and alone, in standard deviations. Rounding and
# changed routes of a mixture of experts stay below it; positions that do not restart exceed it.
TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-2}
HALF_TOLERANCE = 0.2


@dataclass(frozen=True)
class Packing:
    """How rows of several documents are passed to a decoder.

    way: positions: position ids restart at each document, and transformers derives the masks from them. masks: the
    masks of attention, made from the positions for each type of layer, are passed too.
    flat: one row of all tokens, with the starts of the documents, for flash attention. rows: each document is a row of
    its own, padded at the end.
    operators: the Mamba-2 layers use the operators of cdrmix (`mamba.install`), which need the starts of the documents.
    """

    way: Way
    operators: bool = False


class Decoded(NamedTuple):
    """Hidden states of packed rows, and the logits of each router, [B * T, E], if they were asked for."""

    hidden_BTD: Tensor
    router_logits: tuple[Tensor, ...] = ()


def packed_arguments(
    model: PreTrainedModel,
    packing: Packing,
    batch: int,
    length: int,
    cu_seqlens: Tensor | None,
    device: torch.device | None = None,
) -> Arguments:
    """The keyword arguments of the decoder besides input_ids or inputs_embeds, for rows [batch, length] on a device.

    cu_seqlens: starts of the documents over the flattened batch * length tokens, with the end; None: each row is a
    document, as it must be for `rows`. For `flat` the caller gives the tokens as one row.
    Neither a 2-D mask nor a cache is passed: with one, transformers does not see the restarts of the positions.
    """
    if cu_seqlens is None:
        cu_seqlens = torch.arange(batch + 1, dtype=torch.int32, device=device) * length
    starts = cu_seqlens.to(device=device, dtype=torch.int32)
    flat = torch.arange(batch * length, device=device)
    owner = torch.searchsorted(starts[1:].long(), flat, right=True)
    shape = (1, batch * length) if packing.way == "flat" else (batch, length)
    positions = (flat - starts.long()[owner]).view(shape)
    arguments: Arguments = {"position_ids": positions, "use_cache": False}
    if packing.way == "masks":
        arguments["attention_mask"] = _masks(model, positions)
    if packing.way == "flat":
        longest = int(starts.diff().max())
        arguments |= {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts}
        arguments |= {"max_length_q": longest, "max_length_k": longest}
    if packing.operators:
        arguments["cu_seqlens"] = starts
    return accepted(decoder_of(model), arguments)


def decode(
    model: PreTrainedModel,
    packing: Packing,
    tokens: Tensor,
    cu_seqlens: Tensor | None,
    *,
    options: Mapping[str, Any] | None = None,
    call: Callable[[Arguments], Any] | None = None,
) -> Decoded:
    """Runs the decoder of `model`, a causal language model of transformers, on packed rows.

    tokens: int64 ids [B, T], or embeddings [B, T, D]. options: more keyword arguments, as output_router_logits. call:
    calls the decoder instead, see `choose_packing`. Documents of a row do not see each other, if `packing` is from
    `choose_packing`.
    """
    if packing.way == "rows" and cu_seqlens is not None:
        return _decode_rows(model, packing, tokens, cu_seqlens, options, call)
    batch, length = tokens.shape[:2]
    arguments = packed_arguments(model, packing, batch, length, cu_seqlens, tokens.device) | dict(options or {})
    given = tokens.flatten(0, 1).unsqueeze(0) if packing.way == "flat" else tokens
    arguments["inputs_embeds" if given.is_floating_point() else "input_ids"] = given
    output = decoder_of(model)(**arguments) if call is None else call(arguments)
    hidden = output.last_hidden_state
    routers = getattr(output, "router_logits", None) or ()
    return Decoded(
        hidden.reshape(batch, length, hidden.shape[-1]),
        tuple(logits.reshape(batch * length, -1) for logits in routers),
    )


def _decode_rows(
    model: PreTrainedModel,
    packing: Packing,
    tokens: Tensor,
    cu_seqlens: Tensor,
    options: Mapping[str, Any] | None,
    call: Callable[[Arguments], Any] | None,
) -> Decoded:
    """Each document as a row of its own, padded at the end, which later tokens of a causal model alone would read.

    Documents of similar lengths, between two powers of two, are passed together, so that less than half of the tokens
    are padding. With weights that DeepSpeed shards, all documents are passed together, because the processes must call
    the model equally often.
    """
    sharded = any(hasattr(parameter, "ds_id") for parameter in model.parameters())
    groups: dict[int, list[tuple[int, int]]] = {}
    for start, end in itertools.pairwise(cu_seqlens.tolist()):
        if start < end:
            groups.setdefault(0 if sharded else (end - start - 1).bit_length(), []).append((start, end))
    flat = tokens.flatten(0, 1)
    indices, parts = [], []
    for _, documents in sorted(groups.items()):
        starts, ends = torch.tensor(documents, device=tokens.device).unsqueeze(-1).unbind(1)
        index_NL = starts + torch.arange(max(end - start for start, end in documents), device=tokens.device)
        inside_NL = index_NL < ends
        part = decode(model, packing, flat[torch.where(inside_NL, index_NL, 0)], None, options=options, call=call)
        chosen = inside_NL.flatten()
        parts.append([states[chosen] for states in (part.hidden_BTD.flatten(0, 1), *part.router_logits)])
        indices.append(index_NL[inside_NL])
    index = torch.cat(indices)
    hidden, *routers = (
        states[0].new_zeros(len(flat), states[0].shape[-1]).index_copy(0, index, torch.cat(states))
        for states in zip(*parts, strict=True)
    )
    return Decoded(hidden.view(*tokens.shape[:2], -1), tuple(routers))


def choose_packing(
    model: PreTrainedModel,
    wanted: Literal["isolated", "rows"] = "isolated",
    *,
    call: Callable[[Arguments], Any] | None = None,
) -> Packing:
    """The first way in which the test finds documents isolated, for the model in its dtype, on its device.

    The test passes two documents of random embeddings in one row and differentiates the second with respect to the
    first. The gradient must be exactly 0. The second must also have the hidden states that it has alone. No random
    state changes, and no parameter gets a gradient. Call `mamba.install` before, so that Mamba-2 layers are isolated.
    wanted: `model.packing` of the configuration. call: runs the decoder on keyword arguments; needed where weights are
    sharded. It calls the module of the engine, whose hooks gather them, and not the engine itself, whose forward pass
    expects its own backward pass. All processes must then call this function.
    Raises ConfigError, which names the architecture, if no way isolates documents.
    """
    ways: tuple[Way, ...] = ("positions", "masks")
    if wanted == "rows":
        ways = ("rows",)
    elif str(_config(model)._attn_implementation).startswith("flash_attention"):
        ways = ("flat",)
        os.environ.setdefault("FLASH_ATTENTION_DETERMINISTIC", "1")
    refusal: Exception | None = None
    for way in ways:
        packing = Packing(way, operators=mamba.is_installed(model))
        try:
            if leak(model, packing, call=call) == 0.0:
                return packing
        except torch.OutOfMemoryError:
            raise
        except UNSUPPORTED as error:
            if way != "masks":
                raise
            refusal = error
    remedy = (
        "train another one" if wanted == "rows" else "set model.packing: rows, which gives each document its own row"
    )
    raise ConfigError(
        f"model.packing: {wanted}: packed documents see each other in {_config(model).model_type} "
        f"(tried: {', '.join(ways)}{'' if refusal is None else ', which it refuses'}); {remedy}"
    ) from refusal


@contextlib.contextmanager
def called_outside_engine(model: nn.Module) -> Iterator[None]:
    """Lets a model whose weights ZeRO-3 shards be called by itself, also for gradients of its inputs.

    A weight that another module than its own reads is gathered for it, as in the forward pass of the engine. The
    backward hooks of mixtures of experts, which reduce the gradients of a training step, are not called.
    """
    hooks = {module: module._backward_hooks for module in model.modules()}
    sharded: list[Any] = [module for module in hooks if hasattr(module._parameters, "_in_forward")]
    try:
        for module in hooks:
            module._backward_hooks = OrderedDict()
        for module in sharded:
            module._parameters._in_forward = True
        yield
    finally:
        for module, own in hooks.items():
            module._backward_hooks = own
        for module in sharded:
            module._parameters._in_forward = False


def leak(model: PreTrainedModel, packing: Packing, *, call: Callable[[Arguments], Any] | None = None) -> float:
    """How much of a document reaches the next one in its row: 0.0 if they are isolated.

    The largest gradient of the second document of the test with respect to the first. If that is 0 but the second
    document differs from itself alone by more than rounding, the root mean square of the difference in standard
    deviations.
    """
    device, dtype = next(model.parameters()).device, _dtype(model)
    first, second = PROBE_LENGTHS
    generator = torch.Generator().manual_seed(0)
    width = model.get_input_embeddings().embedding_dim
    embeddings = (PROBE_STD * torch.randn(1, first + second, width, generator=generator)).to(device, dtype)
    embeddings.requires_grad_()
    cu_seqlens = torch.tensor([0, first, first + second], dtype=torch.int32, device=device)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        with torch.enable_grad():
            hidden = decode(model, packing, embeddings, cu_seqlens, call=call).hidden_BTD[:, first:]
            weights = torch.randn(hidden.shape, generator=generator).to(device)
            (gradient,) = torch.autograd.grad((hidden.float() * weights).sum(), embeddings)
        found = float(gradient[:, :first].abs().max())
        if found != 0.0:  # NaN too
            return found
        with evaluation_mode(model), torch.no_grad():  # without dropout, with which the two passes would differ
            packed = decode(model, packing, embeddings, cu_seqlens, call=call).hidden_BTD[:, first:]
            alone = decode(model, packing, embeddings[:, first:], None, call=call).hidden_BTD
    difference = float((packed.double() - alone.double()).square().mean().sqrt() / alone.double().std())
    return 0.0 if difference <= TOLERANCE.get(dtype, HALF_TOLERANCE) else difference


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """The part of a causal language model of transformers that gives the hidden states."""
    base = model.base_model
    assert isinstance(base, nn.Module)
    return base


def accepted(module: nn.Module, arguments: Arguments) -> Arguments:
    """The arguments that the module's forward has parameters for."""
    parameters = inspect.signature(module.forward).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return arguments
    return {name: value for name, value in arguments.items() if name in parameters}


def _masks(model: PreTrainedModel, positions_BT: Tensor) -> Any:
    """The masks that transformers makes from restarting positions: a dict by type of layer, or one mask for all."""
    from transformers.masking_utils import create_masks_for_generate

    # Only shape, dtype and device of the embeddings are used.
    embeddings = torch.empty(*positions_BT.shape, 0, dtype=_dtype(model), device=positions_BT.device)
    return create_masks_for_generate(_config(model), embeddings, None, None, positions_BT)


def _config(model: PreTrainedModel) -> Any:
    return model.config.get_text_config()


def _dtype(model: PreTrainedModel) -> torch.dtype:
    """The dtype of the embeddings."""
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    return weight.dtype
