"""Lockstep: all processes make the same number of forward passes, though each has another number of tokens to read.

Under ZeRO-3 a pass of the language model gathers each layer from all processes, and with expert parallelism it
exchanges rows with other processes. So the n-th pass of a process has to run together with the n-th pass of every other
one. Rollouts end at different tokens, and documents have different numbers of chunks. Before each pass a process
announces it, and a process that has no more passes makes passes of one token until none announces another. Nothing else
has to be agreed: each process decides which rows it reads in its n-th pass, and when it samples, writes or searches. A
row has the same bits as in a process that is alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from cdrmix.model.language_model import LanguageModel
from cdrmix.training.distributed import DistributedContext


@dataclass(frozen=True)
class Lockstep:
    """Makes the passes of its block equal in number in all processes. world: None where no pass needs the others."""

    world: DistributedContext | None = None

    @contextmanager
    def __call__(self, model: LanguageModel, least: int = 0) -> Iterator[list[Tensor]]:
        """The forward passes of `model` within the block. Every process enters it, and makes any number of them.

        Other collectives within the block would wait for processes that wait for passes. An error ends the wait of the
        others when this process ends. Yields a list, in which the hidden states [1, 1, D] of the further passes are
        when the block has ended; a backward pass has to go through them as well. least: the fewest passes, also
        without a world.
        """
        further: list[Tensor] = []
        if self.world is None and not least:
            yield further  # without a hook, so that rollouts use the compiled step
            return
        made = 0

        def announce(another: bool) -> bool:
            """Tells the others whether this process makes another pass. Returns whether any process does."""
            return another if self.world is None else self.world.any(another)

        def before_pass(*_: object) -> None:
            nonlocal made
            made += 1
            announce(True)

        announced = model.register_forward_pre_hook(before_pass, prepend=True)
        try:
            yield further
        finally:
            announced.remove()
        ids_11 = torch.zeros(1, 1, dtype=torch.int64, device=next(model.parameters()).device)
        while announce(made < least):
            further.append(model(ids_11).hidden_BTD)
            made += 1
