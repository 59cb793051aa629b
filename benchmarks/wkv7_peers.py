"""Implementations of RWKV-7's recurrence: cdrmix's operator, PyTorch in two ways, and packages for training.

Each takes r, log decay, k, v, a, b as [B, T, H, K] (v: V) and returns y [B, T, H, V], without a state, because fla's
state is the transpose of ours. Where there are several ways to call a package, each is a peer of its own.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from unittest import mock

import torch
from torch import Tensor

from cdrmix import ops
from cdrmix.kernels.rwkv7 import reference

OURS = "cdrmix"
NAIVE = "PyTorch, token by token"
CHUNKED = "PyTorch, chunks of "
FLA = "fla"
FLA_LAYER = "fla, as its layer calls it"
DECAY_BOUND = -0.6065306597126334  # -exp(-1/2), the decay's: it allows fla's tensor-core path
NAIVE_TOKENS = 1024  # most tokens for which the autograd graph of the token loop fits next to its peers

Call = Callable[[list[Tensor], Tensor | None], Tensor]  # six inputs and cu_seqlens -> y


@dataclass(frozen=True)
class Implementation:
    """A function to be measured.

    decay: from its decay argument to log_w; decay_argument: back. None where it takes log_w itself.
    environment: variables that are set before it runs, and stay set: all ways to call a package set the same ones.
    """

    call: Call
    decay: Callable[[Tensor], Tensor] | None = None
    decay_argument: Callable[[Tensor], Tensor] | None = None
    environment: dict[str, str] = field(default_factory=dict)


def ours(*, recompute: bool = False) -> Implementation:
    def call(inputs: list[Tensor], cu_seqlens: Tensor | None) -> Tensor:
        return ops.wkv7(*inputs, cu_seqlens=cu_seqlens, recompute=recompute)[0]

    return Implementation(call)


def naive() -> Implementation:
    def call(inputs: list[Tensor], cu_seqlens: Tensor | None) -> Tensor:
        assert cu_seqlens is None
        return reference.wkv7_recurrence(*(x.float() for x in inputs))[0].to(inputs[3].dtype)

    return Implementation(call)


def chunked(chunk: int) -> Implementation:
    def call(inputs: list[Tensor], cu_seqlens: Tensor | None) -> Tensor:
        y, _ = reference.wkv7(*(x.float() for x in inputs), cu_seqlens=cu_seqlens, chunk=chunk)
        return y.to(inputs[3].dtype)

    return Implementation(call)


def implementations(
    device: str, tokens_in_row: int, widths: int, packed: bool
) -> tuple[dict[str, Implementation], dict[str, str]]:
    """The implementations that can be measured, ours first, and the reasons for the absent ones."""
    found = {OURS: ours()}
    absent = {"rwkv": "runs whole models forward; it has no op to train with"}
    if device == "cuda":
        found[f"{OURS}, recompute=True"] = ours(recompute=True)
        _add(found, absent, FLA, ("fla", "einops"), fla)
        if not importlib.util.find_spec("tilelang"):
            absent["fla, TileLang"] = "tilelang is not installed"
        if packed or widths != 64 or tokens_in_row % 16:
            absent["rwkv-ops"] = "takes width 64 and whole rows of a multiple of 16 tokens alone"
        else:
            _add(found, absent, "rwkv-ops", ("rwkv_ops", "keras"), rwkv_ops)
        found[f"{CHUNKED}16"] = chunked(16)
    else:
        found |= {f"{CHUNKED}{chunk}": chunked(chunk) for chunk in (16, 32)}
    if packed:
        absent[NAIVE] = "has no packed documents"
    elif tokens_in_row > NAIVE_TOKENS:
        absent[NAIVE] = f"keeps the state of every token: measured at {NAIVE_TOKENS} tokens and fewer"
    else:
        found[NAIVE] = naive()
    if device == "cpu":
        _add(found, absent, "fla, naive", ("fla", "einops"), fla_naive)
        absent[FLA] = "its kernels are for GPUs"
        absent["rwkv-ops"] = "its kernels are for GPUs; its plain version is another token loop"
    return found, absent


def _add(
    found: dict[str, Implementation],
    absent: dict[str, str],
    name: str,
    modules: tuple[str, ...],
    make: Callable[[], Iterator[tuple[str, Implementation]]],
) -> None:
    missing = [module for module in modules if not importlib.util.find_spec(module)]
    if missing:
        absent[name] = f"{' and '.join(missing)} not installed"
    else:
        found |= dict(make())


def fla() -> Iterator[tuple[str, Implementation]]:
    """Every chunk length with and without recomputation, on Triton and TileLang; its layer's call; its bare call.

    Where TileLang is allowed, fla uses it for what it accepts and Triton for the rest, without notice; on Hopper it
    refuses chunks of 64. The layer's and the bare call leave the choice to fla, as if the variable were not set. fla
    makes a table of cu_seqlens, waiting for the GPU, and keeps it for the next call with the same tensor: here, for
    all but the first.
    """

    def make(environment: dict[str, str], **arguments: object) -> Implementation:
        def call(inputs: list[Tensor], cu_seqlens: Tensor | None) -> Tensor:
            from fla.ops.rwkv7 import chunk_rwkv7

            # The scale is 1 by default, unlike in fla's other functions.
            return chunk_rwkv7(*inputs, cu_seqlens=cu_seqlens, **arguments)[0]

        return Implementation(call, environment=environment)

    bounded = {"safe_gate": True, "lower_bound": DECAY_BOUND}
    yield FLA_LAYER, make({"FLA_TILELANG": "1"}, chunk_size=64, **bounded)
    tilelang = importlib.util.find_spec("tilelang") is not None
    for backend in ("Triton", "TileLang") if tilelang else ("Triton",):
        for keep in (True, False):
            for chunk in (64, 32, 16):
                if (backend, keep, chunk) == ("Triton", False, 64) and not tilelang:
                    continue  # it is the layer's call
                how = "TileLang allowed" if backend == "TileLang" else "Triton"
                name = f"fla, chunks of {chunk}, {how}, {'keeps all' if keep else 'recomputes'}"
                environment = {"FLA_TILELANG": "1" if backend == "TileLang" else "0"}
                yield name, make(environment, chunk_size=chunk, disable_recompute=keep, **bounded)
    yield "fla, no option given", make({"FLA_TILELANG": "1"})


def fla_naive() -> Iterator[tuple[str, Implementation]]:
    """fla's own reference: heads before time, and a factor K^-1/2, for which the receptance is scaled."""

    def call(inputs: list[Tensor], cu_seqlens: Tensor | None) -> Tensor:
        from fla.ops.generalized_delta_rule.dplr.naive import dplr_recurrence

        r, log_w, k, v, a, b = (x.transpose(1, 2) for x in inputs)
        y, _ = dplr_recurrence(r * r.shape[-1] ** 0.5, k, v, a, b, log_w, output_final_state=False)
        return y.transpose(1, 2)

    yield "fla, naive", Implementation(call)


def rwkv_ops() -> Iterator[tuple[str, Implementation]]:
    """Its CUDA and its Triton kernels, for PyTorch. They take w with log decay -exp(w)."""

    def make(kind: str) -> Implementation:
        def call(inputs: list[Tensor], cu_seqlens: Tensor | None) -> Tensor:
            # KERNEL_TYPE=native: otherwise importing the package compiles all of its CUDA kernels.
            with mock.patch.dict(os.environ, {"KERAS_BACKEND": "torch", "KERNEL_TYPE": "native"}):
                from rwkv_ops import get_generalized_delta_rule
            if kind not in operators:
                operators[kind] = get_generalized_delta_rule(64, kind, chunk_size=16)[0]
            return operators[kind](*inputs)[0]

        return Implementation(call, lambda w: -torch.exp(w), lambda log_w: torch.log(-log_w))

    operators: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {}
    yield "rwkv-ops, CUDA", make("cuda")
    yield "rwkv-ops, Triton", make("triton")
