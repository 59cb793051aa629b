"""Sums of gradients over the processes, begun while the last backward pass of an update still goes on: ZeRO 0 and 1.

Parameters lie in buckets whose order the model alone decides: the last ones of the forward pass, whose gradients are
final first, make the first bucket. As soon as every gradient of a bucket is final its message leaves, and the backward
pass goes on beside it; a bucket never overtakes another, so that the messages of all processes match. Without ZeRO
every process gets the sums; with ZeRO-1 each sum goes to the one process that updates these weights, which is half the
traffic. The same elements travel together whenever they leave, so overlapping changes no bit.

DeepSpeed 0.19.8 does neither here: without ZeRO it reduces after the backward pass; with `overlap_comm` its stage 1
waits for the whole device before every message (`allreduce_and_copy` in zero/stage_1_and_2.py), and its hooks
(`register_post_accumulate_grad_hook`) are not called for weights whose products add to `.grad` by themselves
(`cdrmix.ops.weights`). The node of autograd at which a weight's gradients meet is reached in either case, once, when
all of them are there: hooks on that node tell that a gradient is final.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

IN_FLIGHT = 2  # messages at a time: one travels, one is made


@dataclass(frozen=True)
class Shared:
    """Parameters of which the processes of a group hold the same ones, laid end to end.

    part: elements for which each process of the group, by its rank, wants the sums; None: all want all.
    """

    parameters: Sequence[Tensor]
    group: dist.ProcessGroup
    part: int | None = None


@dataclass(frozen=True)
class _Bucket:
    """pieces: parameters, each with the first of its elements and the one after the last. owner: rank in the group."""

    pieces: tuple[tuple[Tensor, int, int], ...]
    group: dist.ProcessGroup
    owner: int | None


class GradientReduction:
    """Adds `.grad` of parameters up over processes: call `begin`, then the backward pass, then `end`.

    order: all parameters, as the forward pass comes to them. dtype: of the messages. most: elements of a message.
    """

    def __init__(
        self, order: Iterable[Tensor], shared: Iterable[Shared], dtype: torch.dtype, *, most: int, overlap: bool = True
    ) -> None:
        self._dtype = dtype
        place = {parameter: number for number, parameter in enumerate(order)}
        found = [bucket for each in shared if dist.get_world_size(each.group) > 1 for bucket in _buckets(each, most)]
        # A bucket can leave when the backward pass has come to the first of its parameters.
        self._buckets = sorted(found, key=lambda bucket: -min(place[parameter] for parameter, _, _ in bucket.pieces))
        self._of: dict[Tensor, list[int]] = {}  # the numbers of a parameter's buckets
        for number, bucket in enumerate(self._buckets):
            for parameter, _, _ in bucket.pieces:
                self._of.setdefault(parameter, []).append(number)
        self._pending: list[set[Tensor]] = []  # of each bucket, the parameters whose gradients are not final
        self._next = 0
        self._active = False
        self._running: deque[tuple[dist.Work, Tensor, _Bucket]] = deque()
        # PyTorch keeps these nodes only as long as somebody holds them.
        self._nodes = [get_gradient_edge(parameter).node for parameter in self._of] if overlap else []
        for node, parameter in zip(self._nodes, self._of, strict=False):
            node.register_hook(self._hook(parameter))

    def begin(self) -> None:
        """Says that the next backward pass is the last one of the update. All processes call."""
        self._running.clear()  # of a backward pass that raised
        self._pending = [{parameter for parameter, _, _ in bucket.pieces} for bucket in self._buckets]
        self._next, self._active = 0, True

    def end(self) -> None:
        """Sends what has not left, as of parameters that took no part, and waits until every sum is there."""
        self._active = False
        while self._next < len(self._buckets):
            self._start()
        while self._running:
            self._finish()

    def _hook(self, parameter: Tensor) -> Callable[..., None]:
        def final(*_: object) -> None:
            if not self._active:
                return
            for number in self._of[parameter]:
                self._pending[number].discard(parameter)
            while self._next < len(self._buckets) and not self._pending[self._next]:
                self._start()

        return final

    @torch.no_grad()
    def _start(self) -> None:
        if len(self._running) == IN_FLIGHT:
            self._finish()
        bucket = self._buckets[self._next]
        self._next += 1
        parts = _slices(bucket)
        narrow = [part.to(self._dtype) for part in parts]
        message = narrow[0] if len(narrow) == 1 else torch.cat(narrow)
        if bucket.owner is None:
            work = dist.all_reduce(message, group=bucket.group, async_op=True)
        else:
            work = dist.reduce(message, group=bucket.group, group_dst=bucket.owner, async_op=True)
        self._running.append((work, message, bucket))

    @torch.no_grad()
    def _finish(self) -> None:
        """On a GPU it is the stream that waits, not the host."""
        work, message, bucket = self._running.popleft()
        work.wait()
        parts = _slices(bucket)
        if message.data_ptr() != parts[0].data_ptr() and bucket.owner in (None, dist.get_rank(bucket.group)):
            torch._foreach_copy_(parts, list(message.split([part.numel() for part in parts])))


def _buckets(shared: Shared, most: int) -> Iterator[_Bucket]:
    """Cuts parameters into messages, each of at most so many elements and with one owner."""
    pieces: list[tuple[Tensor, int, int]] = []
    size = offset = 0  # of the bucket; of its end among all elements
    for parameter in shared.parameters:
        start = 0
        while start < parameter.numel():
            room = most - size
            if shared.part is not None:
                room = min(room, shared.part - offset % shared.part)
            count = min(room, parameter.numel() - start)
            owner = None if shared.part is None else offset // shared.part
            pieces.append((parameter, start, start + count))
            start, size, offset = start + count, size + count, offset + count
            if size == most or (shared.part is not None and offset % shared.part == 0):
                yield _Bucket(tuple(pieces), shared.group, owner)
                pieces, size = [], 0
    if pieces:
        yield _Bucket(tuple(pieces), shared.group, None if shared.part is None else (offset - 1) // shared.part)


def _slices(bucket: _Bucket) -> list[Tensor]:
    """The pieces of the gradients, flat; zeros of a parameter that took no part in the update."""
    found = []
    for parameter, start, stop in bucket.pieces:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        found.append(parameter.grad.view(-1)[start:stop])
    return found
