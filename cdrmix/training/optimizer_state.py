"""The optimizer's state in checkpoints: in pieces by parameter, so that any other layout of the processes can load it.

A layout is the number of processes, the ZeRO stage, the expert and the tensor parallelism. The pieces of a process are
in a file of its own. A piece is named PARAMETER/KEY, such as `blocks.0.mixer.output.weight/exp_avg`, and is a scalar or
the whole tensor; or PARAMETER/KEY/FIRST-END, the elements from FIRST to before END of the flattened tensor. The
parameter is always that with all experts. With PARAMETER/KEY/FIRST-END/R-S it is share R, counted from 0, of the S
shares of the parameter, that is flattened. To load, a process reads the elements of the files that its own optimizer
keeps.
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from cdrmix.errors import CheckpointError
from cdrmix.model.tensor_parallel import Cut
from cdrmix.training.copies import Keep


class Share(NamedTuple):
    """A process's share of a parameter under tensor parallelism."""

    cut: Cut
    rank: int
    size: int

    def of(self, whole: Tensor) -> Tensor:
        """The process's part of a whole tensor of the parameter's shape."""
        return self.cut.share(whole, self.rank, self.size)


class Held(NamedTuple):
    """Elements of a parameter that this process's optimizer updates.

    tensor: of which they are a part, the parameter itself or a flat partition of ZeRO. start: the first of them in the
    flattened tensor. first, end: in the flattened parameter with all experts, which has `shape`; with a `share` in that
    share, flattened.
    """

    name: str
    tensor: Tensor
    start: int
    first: int
    end: int
    shape: torch.Size
    share: Share | None = None

    def places(self, device: torch.device) -> Tensor | None:
        """The places of the elements in the flattened parameter, int64; None: those from `first` to before `end`."""
        if self.share is None:
            return None
        whole = torch.arange(self.shape.numel(), device=device).view(self.shape)
        return self.share.of(whole).flatten()[self.first : self.end]


def pieces(optimizer: torch.optim.Optimizer, held: Iterable[Held], keep: Keep) -> dict[str, Tensor]:
    """The state of these elements by the name of the piece. keep: brings a tensor to the CPU."""
    found = {}
    for each in held:
        for key, value in optimizer.state.get(each.tensor, {}).items():
            if value.dim() == 0:
                found[f"{each.name}/{key}"] = value.detach().cpu().clone()  # one tensor has several parameters
                continue
            part, name = value.detach().reshape(-1)[each.start : each.start + each.end - each.first], each.name
            whole = len(part) == each.shape.numel()
            piece = f"{name}/{key}" if whole else f"{name}/{key}/{each.first}-{each.end}"
            if each.share is not None:
                piece += f"/{each.share.rank}-{each.share.size}"
            found[piece] = keep(piece, part.view(each.shape) if whole else part)
    return found


def load_pieces(optimizer: torch.optim.Optimizer, held: Iterable[Held], files: SavedPieces) -> None:
    """Gives these elements the state that the files have. A parameter without state in the files was never updated.

    Raises CheckpointError if the files have a part of a parameter's state, or different numbers of updates for
    parameters that are in one tensor here.
    """
    counted: dict[tuple[Tensor, str], float] = {}
    for each in held:
        for key, count in files.scalars(each.name).items():
            known = counted.setdefault((each.tensor, key), count.item())
            if known != count.item():
                raise CheckpointError(
                    f"{files.checkpoint}: {each.name} was updated {count.item():g} times and others {known:g} times, "
                    "but at this ZeRO stage they have one count; resume at the stage and with the number of processes "
                    "that wrote the checkpoint (state.json)"
                )
            state = optimizer.state[each.tensor]
            if key in state:  # it may be in a file
                state[key].copy_(count)
            else:
                state[key] = count.to(each.tensor.device, copy=True)
        for key in files.tensors(each.name):
            state = optimizer.state[each.tensor]
            if key not in state:
                state[key] = torch.zeros_like(each.tensor)
            target = state[key].view(-1)[each.start : each.start + each.end - each.first]
            files.read(each, key, target)


class _Piece(NamedTuple):
    path: Path
    name: str
    first: int
    end: int
    whole: bool  # the tensor in its own shape
    share: tuple[int, int] | None  # rank and size; None: of the whole parameter


class SavedPieces:
    """The files of a checkpoint that have pieces. Only the elements that are asked for are read.

    One file is open at a time: safetensors maps a whole file into memory that counts as the process's (RLIMIT_DATA).
    known: names of the model's parameters. cuts: how tensor parallelism divides them. Raises CheckpointError if the
    files have state of another parameter.
    """

    def __init__(self, checkpoint: Path, files: Iterable[str], known: Collection[str], cuts: Mapping[str, Cut]) -> None:
        self.checkpoint, self._cuts = checkpoint, cuts
        self._scalars: dict[str, dict[str, Tensor]] = defaultdict(dict)
        self._tensors: dict[str, dict[str, list[_Piece]]] = defaultdict(lambda: defaultdict(list))
        self._open: tuple[Path, contextlib.ExitStack, Any] | None = None
        for path in sorted(checkpoint / file for file in files):
            with safe_open(path, "pt") as file:
                self._add(path, file, known)

    def _add(self, path: Path, file: Any, known: Collection[str]) -> None:
        for piece in file.keys():  # noqa: SIM118  # it is no mapping
            name, key, *parts = piece.split("/")
            if name not in known:
                raise CheckpointError(
                    f"{path} has optimizer state of {name}, which is no parameter of this model: an earlier version "
                    "of cdrmix wrote it under ZeRO. Start a new run, with its weights by train.start_from"
                )
            shape = file.get_slice(piece).get_shape()
            if not parts and not shape:
                self._scalars[name][key] = file.get_tensor(piece)  # of all processes that have a part, the same
                continue
            first, end = map(int, parts[0].split("-")) if parts else (0, math.prod(shape))
            rank, size = map(int, parts[1].split("-")) if len(parts) > 1 else (0, 0)
            share = (rank, size) if size else None
            self._tensors[name][key].append(_Piece(path, piece, first, end, whole=not parts, share=share))

    def __enter__(self) -> SavedPieces:
        return self

    def __exit__(self, *error: object) -> None:
        self._close()

    def _close(self) -> None:
        if self._open is not None:
            self._open[1].close()
        self._open = None

    def _file(self, path: Path) -> Any:
        """An opened file."""
        if self._open is None or self._open[0] != path:
            self._close()
            stack = contextlib.ExitStack()
            self._open = path, stack, stack.enter_context(safe_open(path, "pt"))
        return self._open[2]

    def scalars(self, name: str) -> dict[str, Tensor]:
        """The scalars of a parameter's state, by key."""
        return self._scalars.get(name, {})

    def tensors(self, name: str) -> list[str]:
        """The keys of the tensors of a parameter's state."""
        return list(self._tensors.get(name, {}))

    def read(self, held: Held, key: str, target: Tensor) -> None:
        """Fills the flat `target` with elements of a parameter's tensor.

        Raises CheckpointError if the files have not all of them.
        """
        name, share = held.name, held.share
        mine = None if share is None else (share.rank, share.size)
        found = {piece.share for piece in self._tensors[name][key]}
        if mine in found:
            self._fill(name, key, mine, held.first, target)
            return
        # Other shares, or none: the whole tensor is made first.
        sizes = {0 if each is None else each[1] for each in found}
        assert len(sizes) == 1, f"{self.checkpoint}: {name} has pieces of different layouts"
        (size,) = sizes
        if size:
            cut, parts = self._cuts[name], []
            shape = list(held.shape)
            shape[cut.dim] //= size
            for rank in range(size):
                part = target.new_empty(math.prod(shape))
                self._fill(name, key, (rank, size), 0, part)
                parts.append(part.view(shape))
            whole = cut.whole(parts)
        else:
            whole = target.new_empty(held.shape)
            self._fill(name, key, None, 0, whole.view(-1))
        if share is not None:
            whole = share.of(whole)
        target.copy_(whole.flatten()[held.first : held.end])

    def _fill(self, name: str, key: str, share: tuple[int, int] | None, first: int, target: Tensor) -> None:
        """Fills the flat `target` with elements of a flattened tensor, or of a share of it, from `first` on."""
        reached, end = first, first + len(target)
        pieces = [piece for piece in self._tensors[name][key] if piece.share == share]
        for piece in sorted(pieces, key=lambda each: each.first):
            stop = min(end, piece.end)
            if piece.first > reached or stop <= reached:
                continue
            if piece.whole:
                part = self._file(piece.path).get_tensor(piece.name).reshape(-1)[reached:stop]
            else:
                part = self._file(piece.path).get_slice(piece.name)[reached - piece.first : stop - piece.first]
            target[reached - first : stop - first].copy_(part)
            reached = stop
        if reached < end:
            raise CheckpointError(
                f"{self.checkpoint} has no {key} of {name} from element {reached} on: it is incomplete. Remove this "
                "checkpoint to resume from the one before"
            )
