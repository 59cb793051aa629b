"""The small parts of every block: norms, embedding, initialisers, and the kinds of parameters."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from cdrmix import ops
from cdrmix.config.schema_model import Model
from cdrmix.model.initial_values import Draw, by_inputs, drawn, normal
from cdrmix.model.tensor_parallel import Cut, Divisible

ParameterKind = Literal[
    "projection", "expert", "embedding", "head", "low_rank", "router", "convolution", "decay_bias", "vector"
]
FOUR_VECTORS = 64  # float32 elements in four vectors of AVX-512; a multiple of those of narrower vectors
LOW_RANK_MAP = re.compile(r"[wavg][12]")  # of RWKV-7


class Fused(NamedTuple):
    """How a matrix holds several linear maps of one input, which one product computes.

    dim: the dimension of the outputs, -1 or -2. outputs: those of each map. A module names its fused matrices in its
    attribute `fused`, a mapping from the name of the parameter in the module.
    """

    dim: int
    outputs: tuple[slice, ...]

    def split(self, matrix: Tensor) -> list[Tensor]:
        """The maps as views; matrix: [..., O, I], or with dim -1 [..., I, O]."""
        return [matrix[..., each] if self.dim == -1 else matrix[..., each, :] for each in self.outputs]


def consecutive(dim: int, *widths: int) -> Fused:
    """Maps whose outputs follow one another, with these numbers of outputs."""
    ends = [sum(widths[: number + 1]) for number in range(len(widths))]
    return Fused(dim, tuple(slice(end - width, end) for end, width in zip(ends, widths, strict=True)))


INTERLEAVED = Fused(-1, (slice(0, None, 2), slice(1, None, 2)))
"""Two maps whose outputs alternate: gates and ups of SwiGLU experts (`ops.moe_experts`)."""


class AddNorm(nn.Module):
    """The residual sum and the configured norm over D of the sum, with parameters in float32.

    It is one module, so that ZeRO-3 gathers the weight for the module that reads it.
    wide: the norm has its weight's dtype, float32 in training, also under autocast: for inputs of other than products.
    """

    def __init__(self, config: Model, *, wide: bool = False) -> None:
        super().__init__()
        self.wide = wide
        self.kind, self.eps = config.norm, config.norm_eps
        self.weight = nn.Parameter(torch.ones(config.d_model))
        self.bias = nn.Parameter(torch.zeros(config.d_model)) if config.norm == "layernorm" else None

    def forward(self, x: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The residual stream x and a branch's output y, both [B, T, D] (y None: nothing to add) -> their sum, and its
        norm, which the next branch reads."""
        dtype = self.weight.dtype if self.wide else None
        return ops.add_norm(x, y, self.weight, self.bias, eps=self.eps, kind=self.kind, dtype=dtype)


class TokenEmbedding(Divisible):
    """The table of token vectors; its `weight`, [V, D], is also used as output head, tied or separate."""

    def __init__(self, vocab_size: int, d_model: int, std: float) -> None:
        super().__init__()
        self.weight = drawn(normal(std), vocab_size, d_model)

    def cuts(self) -> Mapping[str, Cut]:
        """Ids."""
        return {"weight": Cut(0)}

    def forward(self, ids_BT: Tensor) -> Tensor:
        if self.tensor is None:
            return functional.embedding(ids_BT, self.weight)
        rows = len(self.weight)
        ids_BT = ids_BT - self.tensor.rank * rows
        mine_BT = (ids_BT >= 0) & (ids_BT < rows)
        found_BTD = functional.embedding(ids_BT.clamp(0, rows - 1), self.weight)
        return self.summed(torch.where(mine_BT.unsqueeze(-1), found_BTD, 0.0))


class Projection(nn.Linear):
    """A linear map without bias, by `ops.linear`; a module, because ZeRO-3 gathers weights for calls of modules."""

    def __init__(self, inputs: int, outputs: int, draw: Draw) -> None:
        super().__init__(inputs, outputs, bias=False, device="meta")
        self.weight = drawn(draw, outputs, inputs)

    def forward(self, input: Tensor) -> Tensor:  # nn.Linear's name
        return ops.linear(input, self.weight)


def linear(inputs: int, outputs: int, scale: float) -> Projection:
    """A projection without bias, uniform in +-scale / sqrt(inputs); scale 0 gives zeros."""
    return Projection(inputs, outputs, by_inputs(inputs, scale))


def elementwise(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """function(x) for an element-wise function, so that the bits of an element do not depend on its place in x.

    On a CPU, PyTorch computes the elements beyond a multiple of four vectors one by one, with another rounding. So x is
    filled up to such a multiple, unless a gradient is wanted: in training no row is compared with itself in another
    batch.
    """
    rest = -x.numel() % FOUR_VECTORS
    if x.device.type != "cpu" or x.requires_grad or rest == 0 or torch.compiler.is_compiling():
        return function(x)
    return function(functional.pad(x.flatten(), (0, rest)))[: x.numel()].view(x.shape)


def parameter_kinds(model: nn.Module) -> dict[str, ParameterKind]:
    """The kind of every parameter, for the optimizer, by the module that owns it, its shape and its name.

    projection: matrices of linear maps. expert: the stacked matrices of experts. embedding: token tables, also those
    that are the head too. head: a head of its own. low_rank: RWKV-7's low-rank maps. decay_bias: RWKV-7's w0, with
    twice the learning rate (RWKV-LM's training code). router, convolution. vector: all others, such as norms and mixes.
    Only projections and experts have weight decay.
    model: of this package or of transformers. Its parameters may be partitioned by ZeRO-3 already: then they have the
        shape (0,), and `ds_shape` is the real one.
    """
    owners: dict[Tensor, list[nn.Module]] = {}
    heads = set()
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, []).append(module)
        head = getattr(module, "get_output_embeddings", None)  # of transformers
        heads.add(getattr(head(), "weight", None) if callable(head) else None)
    return {
        name: _kind(name, parameter, owners[parameter], is_head=parameter in heads)
        for name, parameter in model.named_parameters()
    }


def fused_matrices(model: nn.Module) -> dict[str, Fused]:
    """The matrices of the model that hold several maps, by the name of the parameter."""
    return {
        f"{prefix}.{name}" if prefix else name: fused
        for prefix, module in model.named_modules()
        for name, fused in getattr(module, "fused", {}).items()
    }


def _kind(name: str, parameter: Tensor, owners: list[nn.Module], *, is_head: bool) -> ParameterKind:
    """owners: several modules for a tied weight. is_head: whether transformers names it as the head."""
    leaf = name.rsplit(".", 1)[-1]
    shape: tuple[int, ...] = tuple(getattr(parameter, "ds_shape", parameter.shape))
    if leaf == "w0":
        return "decay_bias"
    if name.endswith("head.weight"):
        return "head"
    if any(isinstance(owner, (TokenEmbedding, nn.Embedding)) for owner in owners):
        return "embedding"
    if is_head:
        return "head"
    if "router" in name or any("router" in type(owner).__name__.lower() for owner in owners):
        return "router"
    if leaf == "weight" and len(shape) == 2:
        return "projection"
    if leaf.startswith("conv_") or any(isinstance(owner, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) for owner in owners):
        return "convolution"
    # Experts: of this package w_up and w_down, of transformers gate_up_proj and others.
    if len(shape) == 3 and min(shape[1:]) > 1 and "bias" not in leaf:
        return "expert"
    return "low_rank" if len(shape) == 2 and LOW_RANK_MAP.fullmatch(leaf) else "vector"
