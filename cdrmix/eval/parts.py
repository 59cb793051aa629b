"""Held-out losses by part of the loss: ordinary text and chains of thought from the pass that gives bits per byte.

Fill in the middle has rows of its own, the held-out documents in another order, which bits per byte do not contain.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cdrmix.data.batch import Batch
from cdrmix.data.loader import EvalLoader
from cdrmix.data.objectives import FIM, PARTS
from cdrmix.eval.perplexity import loss_model_nats
from cdrmix.model.causal import evaluation_mode


class PartScores:
    """Collects the nats and tokens of each part. An instance is the argument `nats` of `evaluate`.

    A batch that is scored again, for its domains, counts once.
    """

    def __init__(self, device: torch.device) -> None:
        self._sums_P2 = torch.zeros(len(PARTS), 2, dtype=torch.float64, device=device)  # nats, tokens
        self._done: set[int] = set()

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        """Summed nats of a batch, a scalar."""
        if batch.step in self._done:
            return loss_model_nats(model, batch)
        self._done.add(batch.step)
        nats_P = self._add(model, batch, range(len(PARTS)))
        return nats_P.sum()

    def add_rearranged(self, model: nn.Module, batches: EvalLoader) -> None:
        """Scores the rows of the split of rearranged documents. Every process takes as many batches."""
        with evaluation_mode(model), torch.no_grad():
            for batch in batches:
                self._add(model, batch.to(self._sums_P2.device), [FIM])

    def losses(self) -> dict[str, float]:
        """Nats a token of each part with tokens, over all processes, each of which calls. Processes with the same rows
        count several times, which changes no mean."""
        if dist.is_initialized():
            dist.all_reduce(self._sums_P2)
        return {
            name: nats / tokens for name, (nats, tokens) in zip(PARTS, self._sums_P2.tolist(), strict=True) if tokens
        }

    def _add(self, model: nn.Module, batch: Batch, numbers: range | list[int]) -> Tensor:
        weights_PBT = batch.part_weights(numbers)
        arguments = batch.ids_BT, batch.targets_BT, weights_PBT, batch.documents, 1.0, 1.0
        nats_P: Tensor = model(*arguments).next_token_sum
        tokens_P = weights_PBT.sum((1, 2), dtype=torch.float64)
        self._sums_P2[list(numbers)] += torch.stack([nats_P.double(), tokens_P], 1)
        return nats_P
