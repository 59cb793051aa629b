"""Reads checkpoints: the checkpoint folders of a run, their manifests with hashes, and their weights.

training/checkpoint.py writes checkpoints and documents their files. Nothing is pickled, so reading a checkpoint cannot
run code.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from cdrmix.durable import sha256_file
from cdrmix.errors import CheckpointError

FORMAT = 2  # 2: state.json has the fingerprints of text and tokenizer, and the step of the best checkpoint
MANIFEST = "manifest.json"
MODEL = "model.safetensors"
AVERAGE = "ema.safetensors"
OPTIMIZER = "optimizer"  # begins the names of the files with the optimizer's state


def read_weights(checkpoint: Path, *, average: bool = False) -> dict[str, Tensor]:
    """The fp32 weights of a checkpoint on the CPU, by LanguageModel parameter name. The file is verified first.

    average: read the running average (train.ema_decay) instead of the last weights.
    Raises CheckpointError if the file is missing or differs from its manifest.
    """
    name = AVERAGE if average else MODEL
    files = read_manifest(checkpoint)["files"]
    if name not in files:
        raise CheckpointError(f"{checkpoint} has no {name}")
    _verify_file(checkpoint / name, files[name])
    return read_tensors(checkpoint / name)


def optimizer_files(checkpoint: Path) -> list[str]:
    """The names of the files that have the optimizer's state. Raises CheckpointError."""
    return [name for name in read_manifest(checkpoint)["files"] if name.startswith(OPTIMIZER)]


def has_average(checkpoint: Path) -> bool:
    """Whether a checkpoint was written with a running average of its weights. Raises CheckpointError."""
    return AVERAGE in read_manifest(checkpoint)["files"]


def newest_whole_checkpoint(folder: Path, say: Callable[[str], None] | None = None) -> Path | None:
    """The newest checkpoint of which all files match the manifest; None if there is none.

    say: receives a message for each newer checkpoint that was skipped, with the reason.
    """
    for checkpoint in reversed(list_checkpoints(folder)):
        try:
            verify_checkpoint(checkpoint)
        except CheckpointError as error:
            if say is not None:
                say(f"skipped {checkpoint.name}: {error}")
            continue
        return checkpoint
    return None


def list_checkpoints(folder: Path) -> list[Path]:
    """All committed checkpoint folders, damaged ones too, in order of step."""
    return sorted(path for path in folder.glob("step-*") if path.is_dir() and path.name[5:].isdigit())


def verify_checkpoint(checkpoint: Path) -> None:
    """Raises CheckpointError if a file is missing, or its size or hash differs from the manifest."""
    for name, entry in read_manifest(checkpoint)["files"].items():
        _verify_file(checkpoint / name, entry)


def verify_weights(checkpoint: Path) -> None:
    """Raises CheckpointError if the weights, or their running average, are missing or differ from the manifest."""
    files = read_manifest(checkpoint)["files"]
    for name in (MODEL, AVERAGE):
        if name in files:
            _verify_file(checkpoint / name, files[name])


def damages(checkpoint: Path) -> list[str]:
    """A text for every file of a checkpoint that is missing, cannot be read or differs from the manifest."""
    try:
        files = read_manifest(checkpoint)["files"]
    except CheckpointError as error:
        return [str(error)]
    found = []
    for name, entry in files.items():
        try:
            _verify_file(checkpoint / name, entry)
        except CheckpointError as error:
            found.append(str(error))
        except OSError as error:
            found.append(f"{checkpoint / name} cannot be read: {error.strerror}")
    return found


def step_of(checkpoint: Path) -> int:
    """The step in the name of a checkpoint, such as step-00000500."""
    number = checkpoint.name.rpartition("-")[2]
    if not number.isdigit():
        raise CheckpointError(f"{checkpoint}: expected a folder named step-NNNNNNNN")
    return int(number)


def base_of(checkpoint: Path) -> str:
    """The SHA-256 of the base model of a checkpoint that has adapters alone. Raises CheckpointError."""
    try:
        base = json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))["base"]
    except (OSError, ValueError, LookupError) as error:
        raise CheckpointError(f"{checkpoint / 'state.json'} does not name the base model of the adapters") from error
    return str(base)


def state_dict_mismatch(weights: Mapping[str, Tensor], wanted: Mapping[str, Sequence[int]]) -> str | None:
    """Describes the first mismatch between weights and the names and shapes of a model; None if they match."""
    lacking, more = sorted(wanted.keys() - weights.keys()), sorted(weights.keys() - wanted.keys())
    for what, names in (("lacks", lacking), ("has, in addition to those of the model,", more)):
        if names:
            without = " (it was written by a model without fast weights)" if _all_plastic(lacking) else ""
            return f"{what} {len(names)} tensors, the first is {names[0]}{without}"
    for name, shape in wanted.items():
        if list(weights[name].shape) != list(shape):
            return f"has {name} with shape {list(weights[name].shape)}; the configuration needs {list(shape)}"
    return None


def _all_plastic(names: Sequence[str]) -> bool:
    return bool(names) and all(".plastic." in name for name in names)


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    path = checkpoint / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        known = manifest["format"] == FORMAT and all(_is_entry(*each) for each in manifest["files"].items())
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: the checkpoint is incomplete") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{path} is corrupt: it is not the manifest of a checkpoint") from None
    if not known:
        raise CheckpointError(f"{path} has format {manifest['format']!r}; this version of cdrmix reads format {FORMAT}")
    return manifest


def _is_entry(name: str, entry: dict[str, Any]) -> bool:
    # A manifest of a mirror is copied: its names must not lead out of the folder.
    if Path(name).name != name or not isinstance(entry["bytes"], int) or not isinstance(entry["sha256"], str):
        raise ValueError(name)
    return True


def _verify_file(path: Path, entry: dict[str, Any]) -> None:
    if not path.is_file():
        raise CheckpointError(f"{path} is missing")
    size = path.stat().st_size
    if size != entry["bytes"]:
        raise CheckpointError(f"{path} is corrupt: it has {size} bytes, the manifest says {entry['bytes']}")
    digest = sha256_file(path)
    if digest != entry["sha256"]:
        raise CheckpointError(f"{path} is corrupt: its SHA-256 is {digest}, the manifest says {entry['sha256']}")


def read_tensors(path: Path) -> dict[str, Tensor]:
    return load_file(path) if path.stat().st_size else {}
