"""Exports a pure RWKV-7 model under the official parameter names, for the `rwkv` package and RWKV-LM."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

from cdrmix.config.schema_model import Model
from cdrmix.durable import disk_guard, remove_remains, sync_file, sync_folder
from cdrmix.errors import ConfigError
from cdrmix.inference.rwkv_names import conflicts_of, to_official, unknown_names


def official_rwkv7_weights(config: Model, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with official names and shapes. weights: the state_dict of a LanguageModel.

    Raises ConfigError for a model that the official code cannot run. The message names every key that prevents it.
    """
    problems = [f"{key}: must be {allowed}" for key, _, allowed in conflicts_of(config)]
    if not problems and (unknown := unknown_names(weights, config.layers)):
        problems = [f"{len(unknown)} tensors have no official name, the first is {unknown[0]}"]
        if ".plastic." in unknown[0]:
            problems = ["reasoning.plastic_lora: the model has fast weights, which the official code has not"]
    if problems:
        raise ConfigError("this model cannot be written as an official RWKV-7 model:\n  " + "\n  ".join(problems))
    official = to_official(weights, config.layers)
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
        remove_remains(target)
        try:
            with temporary.open("wb") as file:
                torch.save(official, file)
            sync_file(temporary)
            temporary.rename(target)
            sync_folder(target.parent)
        finally:
            temporary.unlink(missing_ok=True)
    return target
