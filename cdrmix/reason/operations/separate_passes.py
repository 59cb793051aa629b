"""The gradients of a loss over windows of several passes, by one backward pass for each forward pass.

A loss that reads windows in several passes keeps the activations of all of them, and PyTorch adds up the gradients of a
weight over the passes before ZeRO-3 can divide them among the processes. So the windows are read first without
gradients. A loss of what was read gives the gradients with respect to that. Then every pass is made again, the last one
first, and multiplies its results with these gradients: gradient caching, Gao et al. 2021 (arXiv 2101.06983), here also
through the summaries that one window has of another.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cdrmix.reason.model import Loss, StageBModel
from cdrmix.reason.operations.windows import Read, Windows
from cdrmix.training.objective import Outcome


class SeparatePasses:
    """Losses that hand the gradients of what was read of `windows` on to the model. read: the leaves that the losses
    before have to read, from `read` without gradients. measures: the number of an outcome's sums."""

    def __init__(self, windows: Windows, read: Read, measures: int) -> None:
        self._windows, self._measures = windows, measures
        tensors = (read.last_WD, read.keys_WS, read.queries_WS, read.summaries_NS)
        last_WD, keys_WS, queries_WS, summaries_NS = (each.detach().requires_grad_() for each in tensors)
        self.read = Read(last_WD, keys_WS, queries_WS, summaries_NS, read.ranges)
        self._factor = torch.zeros((), requires_grad=True)

    def first(self, outcome: Outcome) -> Outcome:
        """The outcome of the first loss of `read`, unchanged in value. Its backward pass shows by which factor, such as
        that of the loss scale, all gradients of a step are multiplied."""
        return outcome._replace(total=outcome.total + self._factor.to(outcome.total.device))

    def losses(self) -> list[Loss]:
        """One for each pass, to be evaluated in this order after the losses of `read` and their backward passes."""
        return [self._loss(group) for group in reversed(self._windows.groups())]

    def _loss(self, group: Sequence[int]) -> Loss:
        def loss(model: StageBModel) -> Outcome:
            found = self._windows.read_group(model, group, self.read.summaries_NS, self.read.ranges)
            numbers = torch.tensor(group, device=found.last_BD.device)
            leaves = self.read
            pairs = [
                (found.last_BD, _gradient(leaves.last_WD)[numbers]),
                (found.keys_BS, _gradient(leaves.keys_WS)[numbers]),
                (found.queries_BS, _gradient(leaves.queries_WS)[numbers]),
                (found.summaries_BPS, leaves._replace(summaries_NS=_gradient(leaves.summaries_NS)).summaries_of(group)),
            ]
            assert self._factor.grad is not None, "the first loss has had its backward pass"
            products = torch.stack([(value.float() * gradient.float()).sum() for value, gradient in pairs])
            total = products.sum() / self._factor.grad.to(products.device)
            # The losses before have the value of the loss.
            return Outcome(total - total.detach(), total.new_zeros(self._measures))

        return loss


def _gradient(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
