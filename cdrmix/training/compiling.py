"""torch.compile of a model's blocks, so that a run keeps its bits: one code for every training batch."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from cdrmix.config.schema import Config
from cdrmix.data.batch import Batch
from cdrmix.model.language_model import LanguageModel

# Code that blocks of one model may need: every mixer, before and after the first values, with and without gradients.
VARIANTS = 32


def compile_blocks(model: LanguageModel) -> None:
    """Has every block compiled when it is first called; layers of one kind share the code. In place.

    Our operators are left as they are; what is element-wise between them is fused.
    """
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, VARIANTS)
    for block in model.blocks:
        block.compile()


def mark_documents(batch: Batch) -> Batch:
    """The batch with the number of documents marked as what differs between batches.

    Left to itself, torch.compile takes the first batch's number for a constant and finds out at the second batch: a
    resumed run would use other code at its second step than the run that was not stopped.
    """
    torch._dynamo.mark_dynamic(batch.cu_seqlens_N, 0)
    return batch


def uncompiled(config: Config) -> AbstractContextManager[object]:
    """While validating: its last batch has another size, for which the code would be made anew."""
    return torch.compiler.set_stance("force_eager") if config.train.compile else nullcontext()
