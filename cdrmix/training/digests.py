"""Digests of the weights and the optimizer's state after each step, by which `cdrmix compare` finds where runs part.

The digest of a tensor is a sum modulo 2^64 over the words of 64 bits of the flattened tensor: the word plus its upper
half, as integers, times a number that its place has. (A product alone would lose the upper bits of the word, among them
the sign of a number, where the number of the place is even.) Each process sums up its own elements and all sums are
added, so every layout of the processes has the same digest, and no tensor is gathered.
"""

from __future__ import annotations

import base64
import functools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from cdrmix.config.schema import Config
from cdrmix.durable import disk_guard
from cdrmix.run_folder import RunFolder
from cdrmix.training.optimizer_state import Held

WIDTH = 4096  # words in a row of the table that a flattened tensor is cut into
HALF = (1 << 32) - 1
MOST = 1 << 24  # elements at a time: each of three copies takes 64 MiB of float32
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
ROW = -7046029254386353131  # odd: 0x9e3779b97f4a7c15, 2^64 over the golden ratio


def digest(part: Tensor, first: int = 0) -> Tensor:
    """The digest of elements of a flattened tensor, an int64 on their device. first: the place of the first of them.

    The number of a word is that of its column plus that of its row, so that two reductions are enough.
    """
    elements, size = part.detach().reshape(-1), 8 // part.element_size()  # in a word
    before = min(-first % size, len(elements))
    after = before + (len(elements) - before) // size * size
    total = torch.zeros((), dtype=torch.int64, device=part.device)
    for begin, end in ((0, before), (after, len(elements))):  # in words of which others have the rest
        if begin < end:
            places = torch.arange(first + begin, first + end, device=part.device)
            total += scattered_digest(elements[begin:end], places)
    for begin in range(before, after, MOST):
        some = elements[begin : min(begin + MOST, after)]
        words = (some.clone() if some.storage_offset() % size else some).view(torch.int64)
        total += _words(words + ((words >> 32) & HALF), (first + begin) // size)
    return total


def _words(words: Tensor, first: int) -> Tensor:
    columns, total = _columns(words.device), torch.zeros((), dtype=torch.int64, device=words.device)
    while len(words) > 0:
        row, column = divmod(first, WIDTH)
        if column > 0 or len(words) < WIDTH:  # a part of one row
            rows, count = 1, min(WIDTH - column, len(words))
        else:
            rows = len(words) // WIDTH
            count = rows * WIDTH
        table = words[:count].view(rows, -1)
        total += (table.sum(0) * columns[column : column + table.shape[1]]).sum()
        total += (table.sum(1) * torch.arange(row, row + rows, device=words.device)).sum() * ROW
        words, first = words[count:], first + count
    return total


def scattered_digest(elements: Tensor, places: Tensor) -> Tensor:
    """`digest` of elements anywhere in a flattened tensor. places: int64 of the shape of the elements."""
    width = 8 * elements.element_size()
    bits = elements.view(INTEGERS[elements.element_size()]).to(torch.int64)
    bits = bits if width == 64 else bits & ((1 << width) - 1)
    words = places * width // 64
    numbers = _columns(bits.device)[words % WIDTH] + words // WIDTH * ROW
    shifts = places * width % 64
    upper = torch.where(shifts >= 32, bits << (shifts - 32).clamp_min(0), 0)
    return (((bits << shifts) + upper) * numbers).sum()


@functools.cache
def _columns(device: torch.device) -> Tensor:
    """A random number of 64 bits for each column; products and sums are modulo 2^64."""
    bound = torch.iinfo(torch.int64)
    generator = torch.Generator().manual_seed(0)
    return torch.randint(bound.min, bound.max, (WIDTH,), generator=generator).to(device)


class Digests(NamedTuple):
    """Of a step: one number for each trained parameter, int64 [parameters].

    state: of all tensors that the optimizer keeps for the parameter. The average of its gradients is one of them, so
    another gradient gives another digest.
    """

    state: Tensor
    weights: Tensor


def digests(
    optimizer: torch.optim.Optimizer, held: Iterable[Held], names: Iterable[str], device: torch.device
) -> Tensor:
    """What this process adds to the digests of the named parameters: int64 [2, parameters], state and weights."""
    numbers = {name: number for number, name in enumerate(names)}
    sums = torch.zeros(2, len(numbers), dtype=torch.int64, device=device)
    for each in held:
        places = each.places(each.tensor.device)
        tensors = [(key, value) for key, value in optimizer.state.get(each.tensor, {}).items() if value.dim() > 0]
        for factor, (_, value) in enumerate(sorted(tensors, key=lambda one: one[0]), 1):
            sums[0, numbers[each.name]] += factor * _of(each, value, places).to(device)
        sums[1, numbers[each.name]] += _of(each, each.tensor, places).to(device)
    return sums


def _of(held: Held, tensor: Tensor, places: Tensor | None) -> Tensor:
    """The digest of the elements in one of their tensors, the parameter or a part of its state."""
    part = tensor.detach().reshape(-1)[held.start : held.start + held.end - held.first]
    return digest(part, held.first) if places is None else scattered_digest(part, places)


def make_digest_file(config: Config, run: RunFolder, parameters: list[str]) -> DigestFile | None:
    """The file for the digests of these parameters; None without train.digests."""
    return DigestFile(run.digests, parameters, writes=run.writes) if config.train.digests else None


class DigestFile:
    """Writes digests.jsonl of a run: the names of the parameters, then a line for each step, until other names follow.
    compare.py reads it.

    writes: whether this process is the one that writes.
    """

    def __init__(self, path: Path, names: list[str], *, writes: bool = True) -> None:
        self._path, self._writes = path, writes
        self._head: dict[str, object] | None = {"parameters": names}

    def add(self, step: int, loss: float, found: Digests) -> None:
        """Appends a step."""
        if not self._writes:
            return
        row = {"step": step, "loss": loss, "state": _text(found.state), "weights": _text(found.weights)}
        with (
            disk_guard(f"{self._path}", "Free some space, then continue with --resume auto."),
            self._path.open("a", encoding="utf-8") as file,
        ):
            file.writelines(f"{json.dumps(each)}\n" for each in (self._head, row) if each is not None)
        self._head = None


def _text(values: Tensor) -> str:
    """The upper 32 bits of each number, on which all lower ones have an effect, in base64."""
    return base64.b64encode((values >> 32).to(torch.int32).numpy().astype("<i4").tobytes()).decode()
