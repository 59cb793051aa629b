"""Whether two runs ended with the same weights, bit for bit, and if not, where they first differ."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from cdrmix.hf.export import SUMS, final_checkpoint, load_exported, step_of, verify
from cdrmix.train.checkpoint import read_weights
from cdrmix.train.run import read_metrics


@dataclass(frozen=True)
class Comparison:
    """The verdict and the lines that explain it to a person."""

    identical: bool
    lines: tuple[str, ...]


def compare(path_a: Path, path_b: Path) -> Comparison:
    """Compares the final weights of two runs, checkpoints or exports.

    Raises CheckpointError when one of them cannot be read.
    """
    weights_a, step_a = _weights(path_a)
    weights_b, step_b = _weights(path_b)
    lines: list[str] = []
    if step_a != step_b:
        lines.append(f"steps differ: {step_a} in {path_a}, {step_b} in {path_b}")
    lines += _differences(weights_a, weights_b)
    if not lines:
        parameters = sum(tensor.numel() for tensor in weights_a.values())
        return Comparison(True, (f"identical: {len(weights_a)} tensors, {parameters:,} parameters, step {step_a}",))
    if step := first_metric_difference(path_a, path_b):
        lines.append(step)
    return Comparison(False, ("different: the final weights are not the same", *lines))


def _weights(path: Path) -> tuple[dict[str, Tensor], int]:
    if (path / SUMS).is_file():
        step = load_exported(path).step
        names = sorted(name for name in verify(path) if name.endswith(".safetensors"))
        return {key: tensor for name in names for key, tensor in load_file(path / name).items()}, step
    checkpoint = final_checkpoint(path)
    return read_weights(checkpoint), step_of(checkpoint)


def _differences(weights_a: dict[str, Tensor], weights_b: dict[str, Tensor]) -> list[str]:
    """Where two sets of weights differ; [] when they hold the same names, shapes, types and bits."""
    only_a, only_b = sorted(weights_a.keys() - weights_b.keys()), sorted(weights_b.keys() - weights_a.keys())
    if only_a or only_b:
        return [f"tensors only in the first: {only_a[:5]}, only in the second: {only_b[:5]}"]
    differing = [name for name in weights_a if not _same_bits(weights_a[name], weights_b[name])]
    if not differing:
        return []
    name = differing[0]
    a, b = weights_a[name], weights_b[name]
    lines = [f"{len(differing)} of {len(weights_a)} tensors differ, the first is {name}"]
    if a.shape != b.shape or a.dtype != b.dtype:
        return [*lines, f"it is {a.dtype} {list(a.shape)} in the first, {b.dtype} {list(b.shape)} in the second"]
    unequal = (_bits(a) != _bits(b)).flatten()
    flat = int(unequal.nonzero()[0])
    index = [int(number) for number in torch.unravel_index(torch.tensor(flat), a.shape)]
    worst = (a.double() - b.double()).abs().max().item()
    return [
        *lines,
        f"first at {index}: {a.flatten()[flat].item()!r} against {b.flatten()[flat].item()!r}",
        f"{int(unequal.sum()):,} of its {a.numel():,} values differ, by at most {worst:g}",
    ]


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bits(a), _bits(b))


def _bits(tensor: Tensor) -> Tensor:
    """The tensor's bit patterns as integers of its own shape: -0.0 is not 0.0, and a NaN equals itself."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(integers[tensor.element_size()])


def first_metric_difference(path_a: Path, path_b: Path) -> str | None:
    """The first step that both metrics.jsonl hold with another loss or gradient norm, in words; None when none is."""
    rows_b = {row["step"]: row for row in read_metrics(path_b / "metrics.jsonl")}
    for row in read_metrics(path_a / "metrics.jsonl"):
        other = rows_b.get(row["step"])
        for name in ("loss", "gradient_norm"):
            if other is not None and row.get(name) != other.get(name):
                return f"{name} first differs at step {row['step']}: {row.get(name)!r} against {other.get(name)!r}"
    return None
