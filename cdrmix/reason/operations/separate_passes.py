"""The gradients of a loss over windows of several passes, by one backward pass for each forward pass.

A loss that reads windows in several passes keeps the activations of all of them, and PyTorch adds up the gradients of a
weight over the passes before ZeRO-3 can divide them among the processes. So the windows are read first without
gradients. A loss of what was read gives the gradients with respect to that. Then every pass is made again, the last one
first, and hands these gradients on: gradient caching, Gao et al. 2021 (arXiv 2101.06983), here also through the
summaries that one window has of another. A pass that is made again has to give the same values. It need not have as
many windows as before: `most_tokens` limits it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cdrmix.config.schema_reasoning import Reasoning, WindowPhase
from cdrmix.reason.model import Loss, StageBModel
from cdrmix.reason.operations.windows import Read, Windows
from cdrmix.training.objective import Outcome


def most_tokens(reasoning: Reasoning, settings: WindowPhase) -> int:
    """The most tokens of a pass over several windows: those of all chunks of `micro_batch` episodes."""
    return settings.micro_batch * reasoning.operations.chunks * (reasoning.chunk + 1)


def parts(rows: Sequence[int], length: int, most: int) -> list[Sequence[int]]:
    """The rows, of so many tokens each, in parts of at most `most` tokens or one row."""
    count = max(1, most // length)
    return [rows[begin : begin + count] for begin in range(0, len(rows), count)]


class SeparatePasses:
    """The windows of a micro-batch, read without gradients, and the losses that give them gradients.

    read: what was read, as leaves, of which the losses of the answers and of the decisions are made. measures: the
    number of an outcome's sums. tokens: the most of a pass over several windows.
    """

    def __init__(self, windows: Windows, read: Read, measures: int, tokens: int) -> None:
        self._windows, self._measures, self._tokens = windows, measures, tokens
        tensors = (read.last_WD, read.keys_WS, read.queries_WS, read.summaries_NS)
        last_WD, keys_WS, queries_WS, summaries_NS = (each.detach().requires_grad_() for each in tensors)
        self.read = Read(last_WD, keys_WS, queries_WS, summaries_NS, read.ranges)
        self._factor = torch.zeros((), requires_grad=True)

    def of_read(self, outcome: Outcome, *, first: bool) -> Outcome:
        """The outcome of a loss of `read`, with the same value, and with a gradient also if it trains nothing.

        The backward pass of the first one shows by which factor, such as that of the loss scale, all gradients of a
        step are multiplied.
        """
        factor = self._factor.to(outcome.total.device)
        return outcome._replace(total=outcome.total + (factor if first else 0.0 * factor))

    def losses(self) -> list[Loss]:
        """A loss of value 0 for each pass over windows, to be evaluated in this order after the losses of `read` and
        their backward passes."""
        passes = [
            part
            for group in self._windows.groups()
            for part in parts(group, self._windows.length(group[0], self.read), self._tokens)
        ]
        return [self._loss(part) for part in reversed(passes)]

    def _loss(self, group: Sequence[int]) -> Loss:
        def loss(model: StageBModel) -> Outcome:
            leaves = self.read
            found = self._windows.read_group(model, group, leaves.summaries_NS, leaves.ranges)
            numbers = torch.tensor(group, device=found.last_BD.device)
            summaries_BPS = leaves._replace(summaries_NS=_gradient(leaves.summaries_NS)).summaries_of(group)
            pairs = [
                (found.last_BD, _gradient(leaves.last_WD)[numbers]),
                (found.keys_BS, _gradient(leaves.keys_WS)[numbers]),
                (found.queries_BS, _gradient(leaves.queries_WS)[numbers]),
                (found.summaries_BPS, summaries_BPS),
            ]
            factor = self._factor.grad
            assert factor is not None, "the first loss has had its backward pass"
            total = torch.stack([_HandOn.apply(value, gradient, factor) for value, gradient in pairs]).sum()
            return Outcome(total, total.new_zeros(self._measures))

        return loss


class _HandOn(torch.autograd.Function):
    """0, whose gradient with respect to a value is the given one, divided by the factor that it includes.

    The value of a sum of products would be NaN where a gradient has overflowed; so only the norm of the gradients shows
    an overflow, as without separate passes.
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradient: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(gradient, factor)
        return torch.zeros((), dtype=torch.float32, device=value.device)

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor, None, None]:
        gradient, factor = ctx.saved_tensors
        scale = outputs[0] / factor.to(outputs[0].device)
        return (gradient * scale).to(gradient.dtype), None, None


def _gradient(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
