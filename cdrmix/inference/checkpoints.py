"""Reads checkpoints: the checkpoint folders of a run, their manifests with hashes, and their weights.

training/checkpoint.py writes checkpoints and documents their files. Nothing is pickled, so reading a checkpoint cannot
run code.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from cdrmix.durable import sha256_file
from cdrmix.errors import CheckpointError
from cdrmix.json_text import parse_json

FORMAT = 2  # 2: state.json has the fingerprints of text and tokenizer, and the step of the best checkpoint
MANIFEST = "manifest.json"
POINTER_BYTES = 100  # of a file that has the name of a checkpoint
STORED_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # that weights may have in a file
MODEL, AVERAGE, OPTIMIZER = "model", "ema", "optimizer"  # begin the names of the files: weights, average, moments


def read_weights(checkpoint: Path, *, average: bool = False) -> dict[str, Tensor]:
    """The fp32 weights of a checkpoint on the CPU, by LanguageModel parameter name. Its files are verified first.

    average: read the running average (train.ema_decay) instead of the last weights.
    Raises CheckpointError if a file is missing or differs from its manifest.
    """
    files = read_manifest(checkpoint)["files"]
    weights: dict[str, Tensor] = {}
    for name in _stored(checkpoint, files, average=average):
        _verify_file(checkpoint / name, files[name])
        weights |= read_tensors(checkpoint / name)
    return weights


class StoredWeights(Mapping[str, Tensor]):
    """The weights of a checkpoint, or their running average, each read when it is asked for. A context manager.

    The files are not verified. Raises CheckpointError if the checkpoint has none.
    """

    def __init__(self, checkpoint: Path, *, average: bool = False) -> None:
        names = _stored(checkpoint, read_manifest(checkpoint)["files"], average=average)
        self._files: dict[str, Any] = {}
        with contextlib.ExitStack() as opened:
            for path in (checkpoint / name for name in names):
                if path.stat().st_size:
                    file = opened.enter_context(safe_open(path, "pt"))
                    self._files |= dict.fromkeys(file.keys(), file)
            self._opened = opened.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._opened.close()

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def shapes(self) -> dict[str, list[int]]:
        """The shape of each tensor, without reading it."""
        return {name: list(file.get_slice(name).get_shape()) for name, file in self._files.items()}


def _stored(checkpoint: Path, files: Iterable[str], *, average: bool) -> list[str]:
    what = AVERAGE if average else MODEL
    names = files_of(what, files)
    if not names:
        raise CheckpointError(f"{checkpoint} has no {file_name(what)}")
    return names


def file_name(what: str, part: int = 0, parts: int = 1) -> str:
    """The name of the file with part `part` of MODEL or AVERAGE, as transformers names the files of a model."""
    return f"{what}.safetensors" if parts == 1 else f"{what}-{part + 1:05d}-of-{parts:05d}.safetensors"


def files_of(what: str, files: Iterable[str]) -> list[str]:
    """Those of the files that have MODEL, AVERAGE or OPTIMIZER, in order of name."""
    return sorted(name for name in files if re.fullmatch(rf"{what}(-[a-z0-9-]+)?\.safetensors", name))


def weight_files(files: Iterable[str]) -> list[str]:
    """Those of the files that have the weights or their running average."""
    return [name for what in (MODEL, AVERAGE) for name in files_of(what, files)]


def weights_hash(files: Mapping[str, Any]) -> str | None:
    """The SHA-256 of the running average, or without one of the weights; of several files that of their hashes.

    files: those of a manifest. None: it has none.
    """
    names = files_of(AVERAGE, files) or files_of(MODEL, files)
    entries = [files[name] for name in names]
    hashes = [entry["sha256"] for entry in entries if isinstance(entry, dict) and isinstance(entry.get("sha256"), str)]
    if not hashes or len(hashes) < len(names):
        return None
    return str(hashes[0]) if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()


def optimizer_files(checkpoint: Path) -> list[str]:
    """The names of the files that have the optimizer's state. Raises CheckpointError."""
    return files_of(OPTIMIZER, read_manifest(checkpoint)["files"])


def has_average(checkpoint: Path) -> bool:
    """Whether a checkpoint was written with a running average of its weights. Raises CheckpointError."""
    return bool(files_of(AVERAGE, read_manifest(checkpoint)["files"]))


def newest_whole_checkpoint(
    folder: Path, say: Callable[[str], None] | None = None, wanted: Callable[[Path], bool] = lambda checkpoint: True
) -> Path | None:
    """The newest checkpoint of which all files match the manifest; None if there is none.

    say: receives a message for each newer checkpoint that was skipped, with the reason. wanted: of those that match.
    """
    for checkpoint in reversed(list_checkpoints(folder)):
        try:
            verify_checkpoint(checkpoint)
        except CheckpointError as error:
            if say is not None:
                say(f"skipped {checkpoint.name}: {error}")
            continue
        if wanted(checkpoint):
            return checkpoint
    return None


def list_checkpoints(folder: Path) -> list[Path]:
    """All committed checkpoint folders, damaged ones too, in order of step."""
    return sorted(path for path in folder.glob("step-*") if path.is_dir() and path.name[5:].isdigit())


def named_checkpoint(pointer: Path) -> Path:
    """The checkpoint that a pointer file (latest, best) names. It may be missing. Raises CheckpointError if the file
    cannot be read or names none: it may come from elsewhere, and must not lead out of its folder."""
    try:
        with pointer.open("rb") as file:
            name = file.read(POINTER_BYTES).decode("utf-8", "replace").strip()
    except OSError as error:
        raise CheckpointError(f"{pointer} cannot be read: {error.strerror}") from error
    if not re.fullmatch(r"step-[0-9]+", name):
        raise CheckpointError(
            f"{pointer} names no checkpoint; allowed: the name of a folder beside it, such as step-00000500"
        )
    return pointer.with_name(name)


def pointed(folder: Path, name: str) -> Path | None:
    """The checkpoint that the pointer file `folder`/`name` (latest, best) names. None: there is no such file, or it
    names no checkpoint."""
    try:
        return named_checkpoint(folder / name)
    except CheckpointError:
        return None


def verify_checkpoint(checkpoint: Path) -> None:
    """Raises CheckpointError if a file is missing, or its size or hash differs from the manifest."""
    for name, entry in read_manifest(checkpoint)["files"].items():
        _verify_file(checkpoint / name, entry)


def verify_weights(checkpoint: Path) -> None:
    """Raises CheckpointError if the weights, or their running average, are missing or differ from the manifest."""
    files = read_manifest(checkpoint)["files"]
    for name in weight_files(files):
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
        base = parse_json((checkpoint / "state.json").read_text(encoding="utf-8"))["base"]
    except (OSError, ValueError, LookupError) as error:
        raise CheckpointError(f"{checkpoint / 'state.json'} does not name the base model of the adapters") from error
    return str(base)


def state_dict_mismatch(weights: Mapping[str, Tensor], wanted: Mapping[str, Sequence[int]]) -> str | None:
    """Describes the first mismatch between weights and the names and shapes of a model; None if they match."""
    return shapes_mismatch({name: list(tensor.shape) for name, tensor in weights.items()}, wanted)


def type_mismatch(weights: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> str | None:
    """Describes the first of the weights whose type cannot stand for that of the model's tensor of the same name; None
    if all can. Of integers without their scales, PyTorch would make numbers silently."""
    for name, tensor in wanted.items():
        if (found := weights.get(name)) is None or found.dtype == tensor.dtype:
            continue
        allowed = STORED_TYPES if tensor.is_floating_point() else (tensor.dtype,)
        if found.dtype not in allowed:
            names = ", ".join(map(type_name, allowed))
            return f"has {name} with the type {type_name(found.dtype)}; the model can read {names}"
    return None


def type_name(dtype: torch.dtype) -> str:
    """float32, int8, ..."""
    return str(dtype).removeprefix("torch.")


def shapes_mismatch(found: Mapping[str, Sequence[int]], wanted: Mapping[str, Sequence[int]]) -> str | None:
    """Describes the first mismatch between two sets of names and shapes; None if they match."""
    lacking, more = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    for what, names in (("lacks", lacking), ("has, in addition to those of the model,", more)):
        if names:
            without = " (it was written by a model without fast weights)" if _all_plastic(lacking) else ""
            return f"{what} {len(names)} tensors, the first is {names[0]}{without}"
    for name, shape in wanted.items():
        if list(found[name]) != list(shape):
            return f"has {name} with shape {list(found[name])}; the configuration needs {list(shape)}"
    return None


def not_finite(weights: Mapping[str, Tensor]) -> str | None:
    """Describes the tensors with NaN or infinity; None if there are none. Tensors without values are passed over."""
    names = [
        name
        for name, tensor in weights.items()
        if tensor.is_floating_point() and not tensor.is_meta and not bool(tensor.isfinite().all())
    ]
    if not names:
        return None
    return (
        f"has {len(names)} of {len(weights)} tensors with values that are NaN or infinite, the first is {names[0]}; "
        "use an earlier checkpoint, or another copy of the model"
    )


def _all_plastic(names: Sequence[str]) -> bool:
    return bool(names) and all(".plastic." in name for name in names)


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    path = checkpoint / MANIFEST
    try:
        manifest = parse_json(path.read_text(encoding="utf-8"))
        known = manifest["format"] == FORMAT and all(_is_entry(*each) for each in manifest["files"].items())
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: the checkpoint is incomplete") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
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
    try:
        digest = sha256_file(path)
    except OSError as error:  # of a bad disk: an older checkpoint may be readable
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if digest != entry["sha256"]:
        raise CheckpointError(f"{path} is corrupt: its SHA-256 is {digest}, the manifest says {entry['sha256']}")


def read_tensors(path: Path) -> dict[str, Tensor]:
    return load_file(path) if path.stat().st_size else {}
