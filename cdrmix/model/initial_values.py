"""Initial values of parameters, the same numbers for every division of a model among processes.

`drawn` makes a parameter. Within `without_values` it has no memory: a process then divides the parameters, and `fill`
draws what it holds of them. Tiles of a parameter are drawn apart, each by a counter-based generator (Philox) whose key
is a hash of the model's seed and the parameter's name, and whose counter has the place of the tile. So a process draws
no tile of which it holds nothing, and has a tile and its copy for each thread in memory beside what it holds.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.weak import WeakIdKeyDictionary

from cdrmix.kernels.common.products import one_thread

Tile = NDArray[np.floating[Any]]  # of a parameter, [rows, columns], float32 or float64
Draw = Callable[[np.random.Generator, Tile], None]  # fills a tile
TILE = (1024, 4096)  # rows and columns; a part of what a seed means
_Run = tuple[int, slice]  # equal numbers that follow one another: the number, and where they are

_postponed: ContextVar[bool] = ContextVar("postponed", default=False)
# Not attributes: other libraries rebuild parameters from their attributes (accelerate's init_empty_weights).
_initial_values: WeakIdKeyDictionary = WeakIdKeyDictionary()


def uniform(low: float, high: float) -> Draw:
    """Uniform in [low, high)."""

    def draw(generator: np.random.Generator, tile: Tile) -> None:
        generator.random(dtype=tile.dtype, out=tile)
        tile *= high - low
        tile += low

    return draw


def by_inputs(inputs: int, scale: float) -> Draw:
    """Uniform in +-scale / sqrt(inputs): RWKV-7's initialisation of its projections. Scale 0 gives zeros."""
    bound = scale / math.sqrt(inputs)
    return uniform(-bound, bound) if scale else zeros


def zeros(generator: np.random.Generator, tile: Tile) -> None:
    """Zeros."""
    tile.fill(0)


def normal(std: float) -> Draw:
    """Normal around 0."""

    def draw(generator: np.random.Generator, tile: Tile) -> None:
        generator.standard_normal(dtype=tile.dtype, out=tile)
        tile *= std

    return draw


def orthogonal(gain: float) -> Draw:
    """Orthogonal rows or columns times `gain`, on one thread: LAPACK's QR has other bits with two. Of a whole parameter
    (`drawn`)."""

    def draw(generator: np.random.Generator, tile: Tile) -> None:
        source = torch.Generator().manual_seed(int(generator.integers(1 << 63)))
        with one_thread():
            nn.init.orthogonal_(torch.from_numpy(tile), gain, source)

    return draw


@dataclass(frozen=True)
class InitialValues:
    """The values that a parameter without memory is to have. They are those of numpy's `Generator`, and another version
    of numpy may have others (NEP 19).

    shape: of the whole parameter. whole: it is one tile. kept: the indices that the process holds along a dimension;
    along the others it holds all.
    """

    shape: torch.Size
    draw: Draw
    whole: bool
    kept: Mapping[int, NDArray[np.int64]] = field(default_factory=dict)

    def keeping(self, dim: int, indices: Tensor) -> InitialValues:
        """Those at some indices along a dimension that was whole. indices: int64, ascending, on the CPU."""
        assert dim not in self.kept, "a parameter is divided once along a dimension"
        assert dim >= 0, "a dimension is counted from the first"
        assert (indices.diff() > 0).all(), "indices ascend"
        return replace(self, kept={**self.kept, dim: indices.numpy()})

    def values(self, key: int, dtype: torch.dtype) -> Tensor:
        """The values that are kept, on the CPU. key: of 128 bits. dtype: those of 16 bits are drawn in float32 and
        rounded."""
        *leading, width = self.shape
        height = math.prod(leading)
        rows, columns = np.arange(height).reshape(leading), np.arange(width)
        for dim, indices in self.kept.items():
            if dim < len(leading):
                rows = rows.take(indices, dim)
            else:
                columns = indices
        shape = (*rows.shape, len(columns))
        rows = rows.reshape(-1)
        values = np.empty((len(rows), len(columns)), np.float64 if dtype == torch.float64 else np.float32)
        tall, wide = (height, width) if self.whole else TILE

        def draw(tile: tuple[_Run, _Run]) -> None:
            (down, of_rows), (across, of_columns) = tile
            numbers = np.empty((min(tall, height - down * tall), min(wide, width - across * wide)), values.dtype)
            self.draw(np.random.Generator(np.random.Philox(key=key, counter=[0, 0, down, across])), numbers)
            kept = np.ix_(rows[of_rows] - down * tall, columns[of_columns] - across * wide)
            values[of_rows, of_columns] = numbers[kept]

        tiles = list(itertools.product(_runs(rows // tall), _runs(columns // wide)))
        if len(tiles) < 2:  # in this thread: `orthogonal` sets its number of threads
            list(map(draw, tiles))
        else:
            with ThreadPoolExecutor(torch.get_num_threads()) as pool:
                list(pool.map(draw, tiles))
        return torch.from_numpy(values).reshape(shape).to(dtype)


@contextmanager
def without_values() -> Iterator[None]:
    """Parameters that are made by `drawn` have no memory, until `fill`."""
    before = _postponed.get()
    _postponed.set(True)
    try:
        yield
    finally:
        _postponed.set(before)


def drawn(draw: Draw, *shape: int, whole: bool = False) -> nn.Parameter:
    """A parameter of the default dtype with drawn values. Outside of `without_values` they come from torch's global
    generator; under `torch.device("meta")` and in a `FakeTensorMode` there are none.

    shape: of at least one dimension. whole: the values depend on one another, so a process draws all, also where it
    holds only some.
    """
    empty = nn.Parameter(torch.empty(shape, device="meta" if _postponed.get() else None))
    initial = InitialValues(empty.shape, draw, whole)
    if _postponed.get():
        _initial_values[empty] = initial
    elif _has_values(empty):
        empty.data.copy_(initial.values(_key(seed_of_values(), ""), empty.dtype))
    return empty


def seed_of_values() -> int:
    """A seed for `fill`, from torch's global generator; 0 where tensors have no values, which need no seed."""
    return int(torch.randint(1 << 62, (), device="cpu")) if _has_values(torch.empty(0)) else 0


def narrowed(parameter: nn.Parameter, dim: int, indices: Tensor) -> nn.Parameter:
    """A new parameter with the elements at some indices along a dimension, without other attributes of the given one.

    indices: int64, ascending, on the CPU.
    """
    initial: InitialValues | None = _initial_values.get(parameter)
    if not parameter.is_meta:
        return nn.Parameter(parameter.detach().index_select(dim, indices.to(parameter.device)))
    shape = [*parameter.shape[:dim], len(indices), *parameter.shape[dim + 1 :]]
    part = nn.Parameter(torch.empty(shape, device="meta", dtype=parameter.dtype))
    if initial is not None:
        _initial_values[part] = initial.keeping(dim, indices)
    return part


def fill(part: nn.Module, name: str, seed: int, each: Callable[[nn.Module], None] | None = None) -> None:
    """Replaces the parameters of a part of a model that have no memory by new ones, with their values, on the default
    device; none if that is "meta". In a `FakeTensorMode` the new ones are fake.

    name: of the part in the model. each: called with a module that has a single parameter, for each that was filled.
    """
    like = torch.empty(0)
    if like.is_meta:
        return
    for path, parameter in list(part.named_parameters()):
        initial: InitialValues | None = _initial_values.pop(parameter, None)
        if initial is None:
            continue
        if _has_values(like):
            values = initial.values(_key(seed, f"{name}.{path}"), parameter.dtype).to(like.device)
        else:
            values = torch.empty_like(parameter, device=like.device)
        filled = nn.Parameter(values, parameter.requires_grad)
        del values  # else it is in memory while the next is drawn
        for attribute, value in parameter.__dict__.items():
            filled.__dict__.setdefault(attribute, value)  # a fake tensor has its own device there
        owner, _, leaf = path.rpartition(".")
        part.get_submodule(owner).register_parameter(leaf, filled)
        if each is not None:
            each(nn.ParameterList([filled]))


def _has_values(tensor: Tensor) -> bool:
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


def _key(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=16).digest(), "little")


def _runs(numbers: NDArray[np.int64]) -> list[_Run]:
    """The runs of ascending numbers."""
    found, firsts = np.unique(numbers, return_index=True)
    ends = [*firsts[1:].tolist(), len(numbers)]
    return [(n, slice(first, end)) for n, first, end in zip(found.tolist(), firsts.tolist(), ends, strict=True)]
