"""The official names and shapes of the tensors of an RWKV-7 model (x070), next to the names that they have here.

The table is read in both directions: rwkv_files.py reads official files, cdrmix/hf/export_rwkv.py writes them. The
official names are those of RWKV-LM and of the package `rwkv`; both have the layout of arXiv 2503.14456.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from cdrmix.config.schema_model import Model

# Official name -> (our name, shape). V vocabulary, D width, F width of the channel mix, H heads, N head size; the ranks
# are W of the decay, A of the in-context learning rate, M of the value residual, G of the gate; 1 is a dimension of 1.
_OUTSIDE = {
    "emb.weight": ("embedding.weight", "VD"),
    "blocks.0.ln0.weight": ("embedding_norm.weight", "D"),
    "blocks.0.ln0.bias": ("embedding_norm.bias", "D"),
    "ln_out.weight": ("final_norm.weight", "D"),
    "ln_out.bias": ("final_norm.bias", "D"),
    "head.weight": ("head.weight", "VD"),
}
# The same of a block: what follows blocks.N in the official name and in ours.
_BLOCK = {
    "ln1.weight": ("mixer_norm.weight", "D"),
    "ln1.bias": ("mixer_norm.bias", "D"),
    "ln2.weight": ("feed_forward_norm.weight", "D"),
    "ln2.bias": ("feed_forward_norm.bias", "D"),
    **{f"att.x_{stream}": (f"mixer.x_{stream}", "11D") for stream in "rwkvag"},
    **{f"att.{name}": (f"mixer.{name}", "11D") for name in ("w0", "a0", "v0", "k_k", "k_a")},
    "att.w1": ("mixer.w1", "DW"),
    "att.w2": ("mixer.w2", "WD"),
    "att.a1": ("mixer.a1", "DA"),
    "att.a2": ("mixer.a2", "AD"),
    "att.v1": ("mixer.v1", "DM"),
    "att.v2": ("mixer.v2", "MD"),
    "att.g1": ("mixer.g1", "DG"),
    "att.g2": ("mixer.g2", "GD"),
    "att.r_k": ("mixer.r_k", "HN"),
    **{f"att.{name}.weight": (f"mixer.{name}.weight", "DD") for name in ("receptance", "key", "value", "output")},
    "att.ln_x.weight": ("mixer.ln_x.weight", "D"),
    "att.ln_x.bias": ("mixer.ln_x.bias", "D"),
    "ffn.x_k": ("feed_forward.x_k", "11D"),
    "ffn.key.weight": ("feed_forward.key.weight", "FD"),
    "ffn.value.weight": ("feed_forward.value.weight", "DF"),
}
VALUE_RESIDUAL = ("att.v0", "att.v1", "att.v2")  # the first block reads none, but public files have them there too
_IN_A_BLOCK = re.compile(r"blocks\.(\d{1,6})\.")

# What the official code always does, as keys of the section model: the value, and the text of an error.
ALWAYS: dict[str, tuple[Any, str]] = {
    "model.feed_forward.kind": ("channel_mix", "channel_mix"),
    "model.bigrams": (None, "null"),
    "model.depth": (None, "null"),
    "model.prediction": (None, "null"),
    "model.norm": ("layernorm", "layernorm"),
    "model.norm_eps": (1e-5, "1e-5"),
    "model.embedding_norm": (True, "true"),
    "model.rwkv.allow_neg_eigval": (False, "false"),
}


class OfficialTensor(NamedTuple):
    """A tensor of an official model. name: ours. shape: a letter for each dimension, those of the table."""

    name: str
    shape: str


def official_tensors(layers: int) -> dict[str, OfficialTensor]:
    """The tensors that a model of so many blocks has, by official name."""
    tensors = {name: OfficialTensor(*entry) for name, entry in _OUTSIDE.items()}
    for layer in range(layers):
        for name, (ours, shape) in _BLOCK.items():
            if layer > 0 or name not in VALUE_RESIDUAL:
                tensors[f"blocks.{layer}.{name}"] = OfficialTensor(f"blocks.{layer}.{ours}", shape)
    return tensors


def layers_in(names: Iterator[str]) -> int:
    """The number of blocks that official names mention: the highest one and those before it."""
    return max((int(found[1]) + 1 for name in names if (found := _IN_A_BLOCK.match(name))), default=0)


def conflicts_of(config: Model) -> Iterator[tuple[str, Any, str]]:
    """(key, value, what is allowed) of every key of a section model that contradicts the official code."""
    if "attention" in config.mixers:
        yield "model.attention_fraction", config.attention_fraction, "0, with no attention layer in model.mixer_layers"
    if any(mixer not in ("attention", "rwkv7") for mixer in config.mixers):
        yield "model.mixer_layers", config.mixer_layers, "without mamba2 and routing_mamba layers, and those of plugins"
    for key, (value, text) in ALWAYS.items():
        if (found := value_of(config, key)) != value:
            yield key, found, text


def value_of(config: Model, key: str) -> Any:
    """The value of a key of the section model, such as model.rwkv.head_size."""
    value: Any = config
    for part in key.split(".")[1:]:
        value = getattr(value, part)
    return value


def to_official(weights: Mapping[str, Tensor], layers: int) -> dict[str, Tensor]:
    """The tensors by official name, with official shapes. Raises KeyError for one that the official model lacks."""
    names = {ours.name: (official, ours.shape) for official, ours in official_tensors(layers).items()}
    official = {}
    for name, tensor in weights.items():
        theirs, shape = names[name]
        official[theirs] = tensor.reshape(1, 1, -1) if shape == "11D" else tensor
    return official


def unknown_names(weights: Mapping[str, Tensor], layers: int) -> list[str]:
    """The names of weights of ours that no official tensor stands for, sorted."""
    return sorted(weights.keys() - {ours.name for ours in official_tensors(layers).values()})


def without_ones(shape: Sequence[int], symbols: str) -> list[int]:
    """A shape, of a vector without the dimensions of 1 before it: some files have [D] for the official [1, 1, D]."""
    shape = list(shape)
    while symbols == "11D" and len(shape) > 1 and shape[0] == 1:
        del shape[0]
    return shape
