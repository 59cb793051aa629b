"""Reads weights of RWKV-7 in the public format: a .pth file (RWKV-x070-World-*.pth) or safetensors, as our weights.

A .pth file is a pickle. `torch.load(weights_only=True)` reads it, which runs no code of the file. It is mapped into
memory, so shapes are read without the weights. A file has no tokenizer: that of the configuration must be the right
one.
"""

from __future__ import annotations

import pickle
import re
import struct
import zipfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, get_args

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from cdrmix.config.schema import Config
from cdrmix.config.schema_model import Model, Rwkv
from cdrmix.errors import CheckpointError
from cdrmix.inference.checkpoints import STORED_TYPES, type_name
from cdrmix.inference.rwkv_names import (
    ALWAYS,
    VALUE_RESIDUAL,
    conflicts_of,
    layers_in,
    official_tensors,
    value_of,
    without_ones,
)

SUFFIXES = (".pth", ".safetensors")
SHOWN = 40  # names in an error: those of one block
# What torch.load raises for a file that is damaged, is no pickle of tensors, or asks for code.
_UNREADABLE = (
    RuntimeError, pickle.UnpicklingError, zipfile.BadZipFile, struct.error,
    EOFError, ValueError, TypeError, LookupError, AttributeError, AssertionError, OverflowError,
)  # fmt: skip
_GLOBAL = re.compile(r"\bGLOBAL ([\w.]+)")  # in PyTorch's message, which goes on with advice to run the code
HEAD_SIZES: tuple[int, ...] = get_args(Rwkv.model_fields["head_size"].annotation)
# Tensors by which the other formats are known, in the order in which they are looked for.
_OTHER_FORMATS = (
    (
        "blocks.0.ffn.s_emb.weight",
        "it is an RWKV-7 with DeepEmbed (ffn.s_emb), and that part is not supported",
    ),
    ("blocks.0.att.time_maa_x", "it is RWKV-6 (x060)"),
    ("blocks.0.att.time_faaaa", "it is RWKV-5 (x051 or x052)"),
    ("blocks.0.att.time_first", "it is RWKV-4, or an early RWKV-5 (x050)"),
    ("model.layers.0.attn.r_proj.weight", "it has the names of flash-linear-attention; use the .pth file of the model"),
    ("embedding.weight", "it has the names of cdrmix; name its run or export folder"),
)


class _Sizes(NamedTuple):
    """The size that each letter of the table stands for, as most tensors have it. layers: the number of blocks."""

    layers: int
    of_letter: Mapping[str, int]


def is_weights_file(path: Path) -> bool:
    """Whether a path is a file of weights, and not a folder of a model."""
    return path.suffix in SUFFIXES and path.is_file()


def model_in(path: Path) -> Model:
    """The section `model` that describes the model in a file. Reads names and shapes, and no weights.

    Raises CheckpointError, with all problems, if the file has no whole RWKV-7 model.
    """
    tensors = _tensors(path)
    sizes = _sizes(path, tensors)
    if problems := _problems(tensors, sizes):
        # one error for everything, although this reads the weights
        _refuse(path, problems, [name for name, tensor in tensors.items() if not tensor.isfinite().all()])
    return _section(path, sizes)


def read_rwkv7(path: Path, *, tied: bool = False) -> dict[str, Tensor]:
    """The weights of a file by our names, float32 on the CPU.

    tied: leave the head out; `check_model` has found that it is the embedding. Raises CheckpointError, with all
    problems, if the file has no whole RWKV-7 model or has values that are not finite.
    """
    tensors = _tensors(path)
    sizes = _sizes(path, tensors)
    problems = _problems(tensors, sizes)
    weights = {}
    broken = []
    for official, ours in official_tensors(sizes.layers).items():
        if (found := tensors.get(official)) is None:
            continue
        tensor = found.to(torch.float32, copy=True)  # a mapped tensor would change with the file
        if not tensor.isfinite().all():
            broken.append(official)
        weights[ours.name] = tensor.reshape(without_ones(tensor.shape, ours.shape)).contiguous()
    if problems or broken:
        _refuse(path, problems, broken)
    if tied:
        del weights["head.weight"]
    return weights


def check_model(config: Config, path: Path) -> None:
    """Raises ConfigError with the key, file and line of each value of `model` that is not that of the file's model.

    CheckpointError as `model_in`.
    """
    found, ours = model_in(path), config.cdrmix_model
    wrong = [(key, value, f"{allowed}, as in all public RWKV-7 models") for key, value, allowed in conflicts_of(ours)]
    sizes = [(key, value_of(ours, key), value_of(found, key)) for key in _read_from_file(ours)]
    wrong += [(key, value, f"{needed}, as in {path}") for key, value, needed in sizes if value != needed]
    if ours.tie_embeddings:
        tensors = _tensors(path)
        if not torch.equal(tensors["emb.weight"], tensors["head.weight"]):
            wrong.append(("model.tie_embeddings", True, f"false: {path} has a head.weight that is not emb.weight"))
    config.refuse(wrong)


def _read_from_file(model: Model) -> list[str]:
    """The keys of the section model that a file decides. Without a second block, no value is mixed in."""
    ranks = ("decay_rank", "iclr_rank", *(("value_rank",) if model.layers > 1 else ()), "gate_rank")
    sizes = ("vocab_size", "d_model", "layers", "feed_forward.hidden", "rwkv.head_size")
    return [f"model.{key}" for key in (*sizes, *(f"rwkv.{rank}" for rank in ranks))]


def _tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, mapped into memory. Raises CheckpointError."""
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        zipped = zipfile.is_zipfile(path)
        if zipped:
            _check_parts(path)
        # A file in the format before PyTorch 1.6 cannot be mapped.
        content: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except pickle.UnpicklingError as error:
        asked = _GLOBAL.search(str(error))
        what = f"it asks for {asked[1]}, and no code of a file is ever run" if asked else "its pickle is damaged"
        raise CheckpointError(
            f"{path} is damaged, or is not a file of tensors of torch.save: {what}; get the weights from their "
            "publisher again, as safetensors if there are such"
        ) from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except SafetensorError as error:
        raise CheckpointError(f"{path} is not a safetensors file: {error}") from error
    except _UNREADABLE as error:
        first = str(error).strip().split("\n")[0]
        what = "" if "weights_only" in first else f": {first}"  # not PyTorch's advice to run the code of the file
        raise CheckpointError(f"{path} is damaged, or is not a file of tensors of torch.save{what}") from error
    if not isinstance(content, dict) or not content or not all(isinstance(name, str) for name in content):
        raise CheckpointError(f"{path} has {type(content).__name__}, not a dictionary of tensors by name")
    if others := sorted(name for name, value in content.items() if not _is_dense(value)):
        raise CheckpointError(f"{path} must have dense tensors alone; it has something else as {_some(others)}")
    # A pickle may give one number as a tensor of any shape. The embedding may be there twice, as the head.
    elements, held = sum(tensor.nbytes for tensor in content.values()), path.stat().st_size
    if elements > 2 * held:
        raise CheckpointError(
            f"{path} has tensors of {elements:,} bytes in {held:,} bytes: it is not a file of a model"
        )
    return content


def _check_parts(path: Path) -> None:
    """Raises BadZipFile if a part of the file has not its checksum, which a mapped file is not compared with, or is
    compressed, which torch.save does not do and of which a small file may have any length."""
    with zipfile.ZipFile(path) as archive:
        if packed := [part.filename for part in archive.infolist() if part.compress_type != zipfile.ZIP_STORED]:
            raise zipfile.BadZipFile(f"{packed[0]} is compressed")
        if broken := archive.testzip():
            raise zipfile.BadZipFile(f"{broken} does not have its checksum")


def _is_dense(value: object) -> bool:
    if not isinstance(value, Tensor) or value.is_nested or value.is_meta or value.is_quantized:
        return False
    return value.layout is torch.strided


def _sizes(path: Path, tensors: Mapping[str, Tensor]) -> _Sizes:
    """The sizes of the model. Raises CheckpointError for a file of another format."""
    layers = layers_in(iter(tensors))
    if "blocks.0.att.r_k" not in tensors or layers == 0:
        for name, what in _OTHER_FORMATS:
            if name in tensors:
                raise CheckpointError(f"{path} is not an RWKV-7 model (x070): {what}")
    elif _OTHER_FORMATS[0][0] in tensors:
        raise CheckpointError(f"{path} cannot be used: {_OTHER_FORMATS[0][1]}")
    wanted = official_tensors(min(layers, len(tensors)))
    if not wanted.keys() & tensors.keys():
        some = ", ".join(sorted(tensors)[:3])
        raise CheckpointError(f"{path} is not an RWKV-7 model (x070): its tensors have other names, such as {some}")
    votes: dict[str, Counter[int]] = {}
    for name, (_, letters) in wanted.items():
        if name in tensors:
            shape = without_ones(tensors[name].shape, letters)
            letters = letters.replace("1", "")
            if len(shape) == len(letters):
                for letter, size in zip(letters, shape, strict=True):
                    votes.setdefault(letter, Counter())[size] += 1
    return _Sizes(min(layers, len(tensors)), {letter: counts.most_common(1)[0][0] for letter, counts in votes.items()})


def _some(names: list[str]) -> str:
    """The first names of a list, and how many follow."""
    left = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {left:,} more" if left > 0 else "")


def _problems(tensors: Mapping[str, Tensor], sizes: _Sizes) -> list[str]:
    """What is wrong with the names, shapes and types of the tensors."""
    wanted = official_tensors(sizes.layers)
    unused = {f"blocks.0.{name}" for name in VALUE_RESIDUAL}
    problems = []
    if missing := [name for name in wanted if name not in tensors]:
        problems.append(f"missing tensors: {_some(missing)}")
    if surplus := sorted(tensors.keys() - wanted.keys() - unused):
        problems.append(f"tensors that RWKV-7 (x070) has not: {_some(surplus)}")
    for name, (_, letters) in wanted.items():
        if (tensor := tensors.get(name)) is None:
            continue
        shape = without_ones(tensor.shape, letters)
        needed = [sizes.of_letter.get(letter, 0) for letter in letters.replace("1", "")]
        if shape != needed:
            problems.append(f"{name} has the shape {list(tensor.shape)}; the others need {needed}")
        if tensor.dtype not in STORED_TYPES:
            allowed = ", ".join(map(type_name, STORED_TYPES))
            problems.append(f"{name} has the type {type_name(tensor.dtype)}; allowed: {allowed}")
    heads, size, width = (sizes.of_letter.get(letter) for letter in "HND")
    if heads and size and width and heads * size != width:
        problems.append(f"att.r_k has {heads} heads of {size} channels, which are not the width {width} of the model")
    if size and size not in HEAD_SIZES:
        problems.append(f"att.r_k has heads of {size} channels; allowed: {', '.join(map(str, HEAD_SIZES))}")
    return problems


def _refuse(path: Path, problems: list[str], broken: list[str]) -> NoReturn:
    """Raises CheckpointError. broken: the tensors whose values are not all finite."""
    if broken:
        problems = [*problems, f"values that are NaN or infinite in {', '.join(broken)}"]
    raise CheckpointError("\n  ".join([f"{path} has no RWKV-7 model (x070) that can be used:", *problems]))


def _section(path: Path, sizes: _Sizes) -> Model:
    """The section `model` of a model of these sizes."""
    of = sizes.of_letter
    ranks = {"decay_rank": of["W"], "iclr_rank": of["A"], "value_rank": of.get("M", of["A"]), "gate_rank": of["G"]}
    if not all(of.values()):
        raise CheckpointError(f"{path} has tensors without elements")
    section: dict[str, Any] = {
        "vocab_size": of["V"],
        "d_model": of["D"],
        "layers": sizes.layers,
        "attention_fraction": 0.0,
        "tie_embeddings": False,
        "attention": {"heads": of["H"], "kv_heads": of["H"]},  # no layer uses it
        "rwkv": {"head_size": of["N"], **ranks},
        "feed_forward": {"hidden": of["F"]},
    }
    for key, (value, _) in ALWAYS.items():
        _, *parents, name = key.split(".")
        inner = section
        for parent in parents:
            inner = inner[parent]
        inner[name] = value
    return Model.model_validate(section)
