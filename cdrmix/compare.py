"""Compares the final weights of two runs bit for bit. If they differ, it reports the first difference."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cdrmix.errors import CheckpointError
from cdrmix.hf.export import exported_step
from cdrmix.inference.checkpoints import has_average, read_weights, step_of
from cdrmix.inference.load import SUMS, final_weights, read_safetensors, verify
from cdrmix.records import DigestNames, DigestRow, complete_lines, damaged, read_line, read_records


@dataclass(frozen=True)
class Comparison:
    """The result, and the lines of text that explain it."""

    identical: bool
    lines: tuple[str, ...]


def compare(path_a: Path, path_b: Path) -> Comparison:
    """Compares the final weights of two runs, checkpoints or exports.

    If runs have a running average of the weights (train.ema_decay), the weights and the average are compared. An
    export has only the average; then only that is compared.
    Raises CheckpointError if one of them cannot be read.
    """
    a, b = _read(path_a), _read(path_b)
    lines: list[str] = []
    if a.step != b.step:
        lines.append(f"steps differ: {a.step} in {path_a}, {b.step} in {path_b}")
    if a.exported or b.exported:  # an export has the running average if there is one
        pairs = [("", a.average or a.weights, b.average or b.weights)]
    else:
        pairs = [("", a.weights, b.weights), ("of the running averages, ", a.average, b.average)]
    for what, weights_a, weights_b in pairs:
        lines += [what + line for line in _differences(weights_a, weights_b)]
    if not lines:
        tensors = [tensor for _, weights, _ in pairs for tensor in weights.values()]
        values = sum(tensor.numel() for tensor in tensors)
        return Comparison(True, (f"identical: {len(tensors)} tensors, {values:,} values, step {a.step}",))
    if parted := _first_digest_difference(path_a, path_b):
        lines += parted
    elif step := first_metric_difference(path_a, path_b):
        lines.append(step)
    return Comparison(False, ("different: the final weights are not identical", *lines))


@dataclass(frozen=True)
class _Model:
    """The values to compare: weights, their running average ({} if there is none), step."""

    weights: dict[str, Tensor]
    average: dict[str, Tensor]
    step: int
    exported: bool


def _read(path: Path) -> _Model:
    if (path / SUMS).is_file():
        sums, step = verify(path), exported_step(path)
        if step is None:
            raise CheckpointError(f"{path} does not say which step it has: the exported model is incomplete")
        return _Model(read_safetensors(path, sums), {}, step, exported=True)
    checkpoint, weights = final_weights(path)
    average = read_weights(checkpoint, average=True) if has_average(checkpoint) else {}
    return _Model(weights, average, step_of(checkpoint), exported=False)


def _differences(weights_a: dict[str, Tensor], weights_b: dict[str, Tensor]) -> list[str]:
    """The differences of two sets of weights; [] if names, shapes, types and bits are the same."""
    only_a, only_b = sorted(weights_a.keys() - weights_b.keys()), sorted(weights_b.keys() - weights_a.keys())
    if only_a or only_b:
        return [f"tensors only in the first: {only_a[:5]}; only in the second: {only_b[:5]}"]
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
        f"first difference at index {index}: {a.flatten()[flat].item()!r} and {b.flatten()[flat].item()!r}",
        f"{int(unequal.sum()):,} of its {a.numel():,} values differ; the largest difference is {worst:g}",
    ]


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bits(a), _bits(b))


def _bits(tensor: Tensor) -> Tensor:
    """The bits of the tensor as integers of the same shape. So -0.0 differs from 0.0, and a NaN equals itself."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(integers[tensor.element_size()])


class _Step(NamedTuple):
    """A step in digests.jsonl. state, weights: parameter -> digest."""

    loss: float
    state: dict[str, int]
    weights: dict[str, int]


def _steps(path: Path) -> dict[int, _Step]:
    found: dict[int, _Step] = {}
    names: list[str] = []
    for line in complete_lines(path):
        if "parameters" in line.data():
            names = read_line(line, DigestNames).parameters
            continue
        row = read_line(line, DigestRow)
        if {len(row.state), len(row.weights)} != {4 * len(names)}:
            raise damaged(line, f"state, weights: allowed: the digests of {len(names)} parameters, 4 bytes of each")
        digests = [np.frombuffer(each, "<i4").tolist() for each in (row.state, row.weights)]
        found[row.step] = _Step(row.loss, *(dict(zip(names, each, strict=True)) for each in digests))
    return found


def _first_digest_difference(path_a: Path, path_b: Path) -> list[str]:
    """Describes the first step at which the digests of two run folders differ; [] if none does or a run has none."""
    steps_a, steps_b = (_steps(path / "digests.jsonl") for path in (path_a, path_b))
    for step in sorted(steps_a.keys() & steps_b.keys()):
        a, b = steps_a[step], steps_b[step]
        lines = [f"loss: {a.loss!r} and {b.loss!r}"] if str(a.loss) != str(b.loss) else []  # NaN equals itself
        for what, of_a, of_b in (("optimizer state", a.state, b.state), ("weights", a.weights, b.weights)):
            differing = [name for name in of_a if of_a[name] != of_b.get(name)]
            if differing or len(of_a) != len(of_b):
                first = f", the first is {differing[0]}" if differing else ""
                lines.append(f"{what}: {len(differing)} of {len(of_a)} tensors differ{first}")
        if lines:
            return [f"the first step that differs is {step} of those that both runs have digests of", *lines]
    return []


def first_metric_difference(path_a: Path, path_b: Path) -> str | None:
    """Describes the first step whose loss or gradient norm differs in the two metrics.jsonl; None if there is none."""
    of_a, of_b = (read_records(path / "metrics.jsonl") for path in (path_a, path_b))
    records_b = {record.step: record for record in of_b.all}
    for a in of_a.all:
        b = records_b.get(a.step, a)
        for name, one, other in (("loss", a.loss, b.loss), ("gradient_norm", a.gradient_norm, b.gradient_norm)):
            if str(one) != str(other):  # NaN equals itself
                return f"{name} first differs at step {a.step}: {one!r} and {other!r}"
    return None
