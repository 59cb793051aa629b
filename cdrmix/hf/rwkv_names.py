"""Exports a pure RWKV-7 model under the official parameter names, for the `rwkv` package and RWKV-LM."""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch
from torch import Tensor

from cdrmix.config.schema import Model
from cdrmix.durable import disk_guard, sync_file, sync_folder
from cdrmix.errors import ConfigError

# cdrmix name -> official name, in a block and outside of blocks. Official vectors have the shape [1, 1, D].
_BLOCK = {
    "mixer_norm.": "ln1.",
    "feed_forward_norm.": "ln2.",
    "mixer.": "att.",
    "feed_forward.": "ffn.",
}
_OUTSIDE = {
    "embedding.weight": "emb.weight",
    "embedding_norm.weight": "blocks.0.ln0.weight",
    "embedding_norm.bias": "blocks.0.ln0.bias",
    "final_norm.weight": "ln_out.weight",
    "final_norm.bias": "ln_out.bias",
    "head.weight": "head.weight",
}
_VECTORS = re.compile(r"\.(x_[rwkvag]|w0|a0|v0|k_k|k_a)$")


def _official_name(name: str) -> str:
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    _, layer, rest = name.split(".", 2)
    for ours, theirs in _BLOCK.items():
        if rest.startswith(ours):
            return f"blocks.{layer}.{theirs}{rest.removeprefix(ours)}"
    raise AssertionError(f"no official name for {name}")


def official_rwkv7_weights(config: Model, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with official names and shapes. weights: the state_dict of a LanguageModel.

    Raises ConfigError for a model that the official code cannot run. The message names every key that prevents it.
    """
    wanted = {
        "model.attention_fraction": (
            "attention" in config.mixers,
            False,
            "0, with no attention layer in model.mixer_layers",
        ),
        "model.mixer_layers": (
            any("mamba" in mixer for mixer in config.mixers),
            False,
            "without mamba2 and routing_mamba layers",
        ),
        "model.feed_forward.kind": (config.feed_forward.kind, "channel_mix", "channel_mix"),
        "model.bigrams": (config.bigrams, None, "null"),
        "model.depth": (config.depth, None, "null"),
        "model.norm": (config.norm, "layernorm", "layernorm"),
        "model.norm_eps": (config.norm_eps, 1e-5, "1e-5"),
        "model.embedding_norm": (config.embedding_norm, True, "true"),
        "model.rwkv.allow_neg_eigval": (config.rwkv.allow_neg_eigval, False, "false"),
    }
    problems = [
        f"{key}: must be {requirement}" for key, (found, allowed, requirement) in wanted.items() if found != allowed
    ]
    if problems:
        raise ConfigError("this model cannot be written as an official RWKV-7 model:\n  " + "\n  ".join(problems))
    official = {}
    for name, tensor in weights.items():
        official[_official_name(name)] = tensor.reshape(1, 1, -1) if _VECTORS.search(name) else tensor
    if config.tie_embeddings:
        official["head.weight"] = weights["embedding.weight"].clone()
    return official


def export_official_rwkv7(config: Model, weights: dict[str, Tensor], target: Path) -> Path:
    """Writes official_rwkv7_weights to a .pth file and returns its path: float32 CPU tensors, saved with torch.save.

    Raises ConfigError if `target` exists, if it does not end in .pth (the package appends that suffix), or if the
    model has no official form; DiskFullError. After an error there is no file at `target`.
    """
    if target.suffix != ".pth":
        raise ConfigError(
            f"{target}: the name must end in .pth, because the rwkv package appends .pth to the name it is given"
        )
    if target.exists():
        raise ConfigError(f"{target} exists; an export is never overwritten: choose another path, or remove it first")
    official = {name: tensor.contiguous().cpu() for name, tensor in official_rwkv7_weights(config, weights).items()}
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    with disk_guard(
        f"the export {target}", "The incomplete export was removed. Free some space, or choose a path on another disk."
    ):
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("wb") as file:
                torch.save(official, file)
            sync_file(temporary)
            temporary.rename(target)
            sync_folder(target.parent)
        finally:
            temporary.unlink(missing_ok=True)
    return target
