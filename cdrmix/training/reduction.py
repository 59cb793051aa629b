"""Sums gradients over the processes during the last backward pass of an update, for ZeRO stages 0 and 1.

Parameters are grouped into buckets in an order that depends on the model only. The parameters that the forward pass
uses last have final gradients first and make the first bucket. When every gradient of a bucket is final, its
communication starts while the backward pass continues. Buckets are sent in order, so the messages of all processes
match. Without ZeRO every process gets the sums. With ZeRO-1 each sum goes to the process that updates these weights,
which halves the traffic. A message always holds the same elements, so the overlap changes no bit.

DeepSpeed 0.19.8 does neither here. Without ZeRO it reduces after the backward pass. With `overlap_comm` its stage 1
waits for the whole device before every message (`allreduce_and_copy` in zero/stage_1_and_2.py). Its hooks
(`register_post_accumulate_grad_hook`) are not called for weights whose products add to `.grad` themselves
(`cdrmix.ops.weights`). Autograd's accumulation node of a weight runs once in both cases, after all gradients of the
weight have arrived. A hook on that node therefore tells that the gradient is final.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

IN_FLIGHT = 2  # messages at a time: one is sent while the next is copied


@dataclass(frozen=True)
class ReplicatedParameters:
    """Parameters that every process of a group holds, concatenated.

    part: elements of the sums that each rank of the group receives, in rank order; None: all receive all.
    """

    parameters: Sequence[Tensor]
    group: dist.ProcessGroup
    part: int | None = None


@dataclass(frozen=True)
class _Bucket:
    """pieces: parameters with first and end element. owner: the receiving rank of the group; None: all receive."""

    pieces: tuple[tuple[Tensor, int, int], ...]
    group: dist.ProcessGroup
    owner: int | None


class GradientReduction:
    """Sums `.grad` of parameters over processes: call `begin`, then the backward pass, then `end`.

    order: all parameters in the order of the forward pass. dtype: of the messages. most: elements of a message.
    """

    def __init__(
        self,
        order: Iterable[Tensor],
        replicated: Iterable[ReplicatedParameters],
        dtype: torch.dtype,
        *,
        most: int,
        overlap: bool = True,
    ) -> None:
        self._dtype = dtype
        position = {parameter: number for number, parameter in enumerate(order)}
        found = [
            bucket for each in replicated if dist.get_world_size(each.group) > 1 for bucket in _buckets(each, most)
        ]
        # A bucket is complete when the backward pass reaches the parameter that the forward pass used first.
        self._buckets = sorted(found, key=lambda bucket: -min(position[parameter] for parameter, _, _ in bucket.pieces))
        self._of: dict[Tensor, list[int]] = {}  # the numbers of a parameter's buckets
        for number, bucket in enumerate(self._buckets):
            for parameter, _, _ in bucket.pieces:
                self._of.setdefault(parameter, []).append(number)
        self._pending: list[set[Tensor]] = []  # of each bucket, the parameters whose gradients are not final
        self._next = 0
        self._active = False
        self._running: deque[tuple[dist.Work, Tensor, _Bucket]] = deque()
        # PyTorch frees these nodes unless a reference is held.
        self._nodes = [get_gradient_edge(parameter).node for parameter in self._of] if overlap else []
        for node, parameter in zip(self._nodes, self._of, strict=False):
            node.register_hook(self._hook(parameter))

    def begin(self) -> None:
        """Announces the last backward pass of the update. All processes call."""
        self._running.clear()  # left by a backward pass that raised
        self._pending = [{parameter for parameter, _, _ in bucket.pieces} for bucket in self._buckets]
        self._next, self._active = 0, True

    def end(self) -> None:
        """Sends the remaining buckets, such as those of unused parameters, and waits for all sums."""
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
        """Waits for a message; on a GPU the stream waits, not the host."""
        work, message, bucket = self._running.popleft()
        work.wait()
        parts = _slices(bucket)
        if message.data_ptr() != parts[0].data_ptr() and bucket.owner in (None, dist.get_rank(bucket.group)):
            torch._foreach_copy_(parts, list(message.split([part.numel() for part in parts])))


def _buckets(shared: ReplicatedParameters, most: int) -> Iterator[_Bucket]:
    """Splits parameters into messages of at most `most` elements, each with one owner."""
    pieces: list[tuple[Tensor, int, int]] = []
    size = offset = 0  # of the bucket; of its end among all elements
    for parameter in shared.parameters:
        start = 0
        while start < parameter.numel():
            space = most - size
            if shared.part is not None:
                space = min(space, shared.part - offset % shared.part)
            count = min(space, parameter.numel() - start)
            owner = None if shared.part is None else offset // shared.part
            pieces.append((parameter, start, start + count))
            start, size, offset = start + count, size + count, offset + count
            if size == most or (shared.part is not None and offset % shared.part == 0):
                yield _Bucket(tuple(pieces), shared.group, owner)
                pieces, size = [], 0
    if pieces:
        yield _Bucket(tuple(pieces), shared.group, None if shared.part is None else (offset - 1) // shared.part)


def _slices(bucket: _Bucket) -> list[Tensor]:
    """The flat pieces of the gradients; zeros for a parameter without one."""
    pieces = []
    for parameter, start, stop in bucket.pieces:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter, dtype=getattr(parameter, "grad_dtype", parameter.dtype))
        pieces.append(parameter.grad.view(-1)[start:stop])
    return pieces
