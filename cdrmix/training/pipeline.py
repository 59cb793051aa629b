"""Pipeline parallelism in training: the groups of processes, and the order of the passes of a step.

With train.pipeline_parallel = S and W ranks, the first W / S ranks have the first blocks, the next ones the next ones,
and so on. Rank r passes its activations on to rank r + W / S.

The passes are in the order 1F1B (arXiv 2104.04473, section 2.2): a stage keeps the activations of at most as many
micro-batches as there are stages from it on. `torch.distributed.pipelining` has this schedule too. It is not used here:
it keeps a receive buffer for each micro-batch of a step, and fixes their number and shapes when it is made, while batch
warm-up changes the number and the last batch of a validation may be smaller.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cdrmix.config.schema import Config
from cdrmix.data.batch import Batch
from cdrmix.model.loss import Losses, LossModel
from cdrmix.model.pipeline import Border, Stage, carries_values, is_elsewhere
from cdrmix.training.distributed import TIMEOUT
from cdrmix.training.groups import Copies, copies_of, neighbours, new_group, world_of


@dataclass(frozen=True)
class PipelineGroups(Stage, Copies):
    """A stage and its groups of ranks. The model of a pipeline has an instance as its `stage`.

    line: those with the other stages for the same rows, in order. ends: the first and the last of them; None in the
    others. together: all of this stage. copies: those of this stage with the same share of its weights. DeepSpeed takes
    an instance as `mpu`, and calls the methods get_*, whose names are Megatron's: to it a stage is a whole model.
    """

    line: dist.ProcessGroup
    ends: dist.ProcessGroup | None
    together: dist.ProcessGroup
    copies: dist.ProcessGroup

    @classmethod
    def make(cls, config: Config) -> PipelineGroups | None:
        """New groups of train.pipeline_parallel; None where it is 1. Every process calls."""
        size, apart = config.train.pipeline_parallel, config.train.tensor_parallel
        if size == 1:
            return None
        world = world_of("pipeline_parallel", size, size * apart)
        width = world // size
        lines = [range(first, world, width) for first in range(width)]
        ends = None
        for each in lines:
            group = dist.new_group([each[0], each[-1]], timeout=TIMEOUT)
            ends = group if dist.get_rank() in (each[0], each[-1]) else ends
        line, together = new_group(lines), new_group(neighbours(world, width))
        return cls(dist.get_rank(line), size, line, ends, together, new_group(copies_of(world, apart, size)))

    @classmethod
    def of(cls, loss_model: nn.Module) -> PipelineGroups | None:
        """The groups of a model of which this process has a stage; None: it has the whole model."""
        stage = getattr(getattr(loss_model, "language_model", None), "stage", None)
        return stage if isinstance(stage, cls) else None

    def get_model_parallel_group(self) -> None:
        return None

    def get_model_parallel_rank(self) -> int:
        return 0

    def get_model_parallel_world_size(self) -> int:
        return 1


class HasTotal(Protocol):
    """What the forward pass of a micro-batch gives: `total`, a stage's part of the loss."""

    @property
    def total(self) -> Tensor:
        """A scalar."""


Item = TypeVar("Item", bound=HasTotal)


class _Pass(NamedTuple):
    """A micro-batch between its passes. received: leaves, whose gradients the stage before gets."""

    received: list[Tensor]
    sent: list[Tensor]
    total: Tensor


class Pipeline:
    """The passes of one stage.

    module: around the loss model. device: of its parameters. products: the dtype of autocast; None: without it.
    """

    def __init__(
        self,
        groups: PipelineGroups,
        module: nn.Module,
        loss_model: LossModel,
        device: torch.device,
        products: torch.dtype | None,
    ) -> None:
        self._groups, self._module, self._loss_model, self._device = groups, module, loss_model, device
        # NCCL connects a group at its first message, which all of its ranks must send: neighbours alone would wait.
        dist.all_reduce(torch.zeros(1, device=device), group=groups.line)
        model = loss_model.language_model
        self._layers, self._mixers = model.layers, model.config.mixers
        shares = 1 if model.embedding.tensor is None else model.embedding.tensor.size
        self._widths = model.config.d_model, model.config.d_model // shares
        self._slices = 1 if loss_model.sequence is None else loss_model.sequence.size
        weights = model.embedding.weight.dtype
        products = weights if products is None else products
        self._dtypes = products if model.narrow_residual else weights, products
        self._sending: list[dist.Work] = []  # of an evaluation
        self._messages: list[Tensor] = []  # that are being sent

    def run(self, micro_batches: Sequence[Batch], forward: Callable[[Batch], Item], factor: float) -> Iterator[Item]:
        """The passes of this stage over the micro-batches of a step, in their order. Yields what `forward` gave for
        each of them, after its backward pass. factor: of the loss. Every process of the line calls.
        """
        stage, count = self._groups, len(micro_batches)
        ahead = min(count, stage.size - 1 - stage.rank)  # forward passes before the first backward pass
        running: deque[tuple[_Pass, Item]] = deque()

        def begin(number: int, received: list[Tensor]) -> list[Tensor]:
            for tensor in received:
                tensor.requires_grad_()
            self._loss_model.received = _border(received)
            outcome = forward(micro_batches[number])
            sent = self._sent()
            running.append((_Pass(received, sent, outcome.total), outcome))
            return sent

        def end(gradients: list[Tensor]) -> tuple[list[Tensor], Item]:
            made, outcome = running.popleft()
            return self._backward(made, gradients, factor), outcome

        def before(number: int) -> list[Tensor]:
            return [] if stage.first else self._empty(micro_batches[number].ids_BT, self._layers.start)

        def after(number: int) -> list[Tensor]:
            return [] if stage.last else self._empty(micro_batches[number].ids_BT, self._layers.stop)

        for number in range(ahead):
            received = before(number)
            _wait(self._message(receive_before=received))
            _wait(self._message(send_after=begin(number, received)))
        received = before(ahead) if ahead < count else []
        _wait(self._message(receive_before=received))
        for number in range(ahead, count):
            sent, gradients = begin(number, received), after(number - ahead)
            _wait(self._message(send_after=sent, receive_after=gradients))
            gradients, outcome = end(gradients)
            received = before(number + 1) if number + 1 < count else []
            _wait(self._message(send_before=gradients, receive_before=received))
            yield outcome
        for number in range(count - ahead, count):
            gradients = after(number)
            _wait(self._message(receive_after=gradients))
            gradients, outcome = end(gradients)
            _wait(self._message(send_before=gradients))
            yield outcome

    def evaluate(self, ids_BT: Tensor, *arguments: Any) -> Losses:
        """The forward pass of this stage alone, without gradients, with the arguments of the loss model.

        Every process of the line calls. The sums of the loss are those of the last stage, times the number of stages,
        so that they are right when the processes are summed up and each row is counted that often; 0 in the others.
        """
        _wait(self._sending)
        received = [] if self._groups.first else self._empty(ids_BT, self._layers.start)
        _wait(self._message(receive_before=received))
        self._loss_model.received = _border(received)
        losses: Losses = self._module(ids_BT, *arguments)
        self._messages = [tensor.contiguous() for tensor in self._sent()]
        self._sending = self._message(send_after=self._messages)
        return losses._replace(next_token_sum=losses.next_token_sum.double() * self._groups.size)

    def _sent(self) -> list[Tensor]:
        """What the forward pass gave for the next stage. The loss model forgets it, and what it received."""
        border = self._loss_model.sent
        self._loss_model.received = self._loss_model.sent = None
        return [] if border is None else border.tensors

    def _backward(self, made: _Pass, gradients: list[Tensor], factor: float) -> list[Tensor]:
        """Accumulates the gradients of a micro-batch. Returns those of what was received."""
        tensors, theirs = list(made.sent), list(gradients)
        if made.total.requires_grad:
            tensors.append(made.total)
            theirs.append(torch.full_like(made.total, factor))
        torch.autograd.backward(tensors, theirs)
        return [torch.zeros_like(each) if each.grad is None else each.grad for each in made.received]

    def _empty(self, ids_BT: Tensor, layer: int) -> list[Tensor]:
        """Tensors of the shapes of what goes over the border before a block."""
        rows, length = ids_BT.shape[0], ids_BT.shape[1] // self._slices
        both = zip(self._widths, self._dtypes, strict=True)
        found = [torch.empty(rows, length, width, dtype=dtype, device=self._device) for width, dtype in both]
        return found if carries_values(self._mixers, layer) else found[:1]

    def _message(
        self,
        *,
        send_before: Sequence[Tensor] = (),
        receive_before: Sequence[Tensor] = (),
        send_after: Sequence[Tensor] = (),
        receive_after: Sequence[Tensor] = (),
    ) -> list[dist.Work]:
        """Messages to and from the neighbours, in one call: under NCCL they would otherwise wait for one another."""
        line, rank = self._groups.line, self._groups.rank
        operations = []
        for operation, tensors, peer in (
            (dist.isend, send_before, rank - 1),
            (dist.irecv, receive_before, rank - 1),
            (dist.isend, send_after, rank + 1),
            (dist.irecv, receive_after, rank + 1),
        ):
            for tensor in tensors:
                message = tensor.detach()
                if operation is dist.isend:
                    message = message.contiguous()
                operations.append(dist.P2POp(operation, message, group=line, group_peer=peer))
        return dist.batch_isend_irecv(operations) if operations else []


class EvaluatedPipeline(nn.Module):
    """The stages of a pipeline as one module that only evaluates, with the arguments of the loss model.

    parts: `present` of this stage.
    """

    def __init__(self, pipeline: Pipeline, parts: nn.Module) -> None:
        super().__init__()
        self.parts = parts
        self._pipeline = pipeline

    def forward(self, *arguments: Any) -> Losses:
        """As of Pipeline.evaluate."""
        return self._pipeline.evaluate(*arguments)


def extend_over(stages: PipelineGroups, zero: Any) -> None:
    """Lets ZeRO-1 take the norm of the gradients of all stages, and skip a step in all of them.

    Its own norm is a sum over groups of parameters, of which stages have different numbers.
    """
    norm_of_stage, reduce_in_stage = zero.scaled_global_norm, zero._model_parallel_all_reduce

    def norm(norm_type: float = 2) -> Tensor:
        mine = norm_of_stage(norm_type)
        squares = torch.where(mine < 0, math.inf, mine.double().square())  # -1: it is not finite
        dist.all_reduce(squares, group=stages.line)
        return squares.sqrt().float()

    def reduce(tensor: Tensor, op: Any) -> None:
        reduce_in_stage(tensor=tensor, op=op)
        if op == dist.ReduceOp.MAX:  # of has_overflow
            dist.all_reduce(tensor, op, stages.line)

    zero.scaled_global_norm, zero._model_parallel_all_reduce = norm, reduce


def present(loss_model: nn.Module) -> nn.ModuleList:
    """The parts of the model that this stage has."""
    model = loss_model.get_submodule("language_model")
    parts = [part for child in model.children() for part in (child if isinstance(child, nn.ModuleList) else [child])]
    return nn.ModuleList(part for part in parts if not any(map(is_elsewhere, part.parameters())))


def _wait(running: Sequence[dist.Work]) -> None:
    for work in running:
        work.wait()


def _border(received: list[Tensor]) -> Border | None:
    if not received:
        return None
    return Border(received[0], received[1] if len(received) > 1 else None)
