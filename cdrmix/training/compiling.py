"""torch.compile of a model's blocks, with the same compiled code for every training batch, so that bits repeat."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from cdrmix.code_caches import keep_code_of_torch_compile
from cdrmix.config.schema import Config
from cdrmix.data.batch import Batch
from cdrmix.model.language_model import LanguageModel

# Most variants that the blocks of a model need: each mixer, with and without first values, with and without gradients,
# with and without filling.
VARIANTS = 64


def compile_blocks(model: LanguageModel) -> None:
    """Compiles every block at its first call, in place. Blocks of one kind share the code.

    Our operators are not compiled; the element-wise operations between them are fused. The compiler is told here
    whether determinism is demanded: torch.set_deterministic_debug_mode, which demands it, does not tell it. Its code is
    kept in a folder of the user alone (code_caches.py).
    """
    keep_code_of_torch_compile()
    torch.use_deterministic_algorithms(
        torch.are_deterministic_algorithms_enabled(), warn_only=torch.is_deterministic_algorithms_warn_only_enabled()
    )
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, VARIANTS)
    for block in model.blocks:
        block.compile()


def mark_documents(batch: Batch) -> Batch:
    """Marks the numbers of documents and of tokens as dynamic, and returns the batch.

    Otherwise torch.compile takes the number of the first batch as a constant and recompiles at the second batch. A
    resumed run would then run other code at its second step than an uninterrupted run.
    """
    torch._dynamo.mark_dynamic(batch.cu_seqlens_N, 0)
    if batch.tokens_N is not None:  # a slice of the rows may have none, for which there is code of its own
        torch._dynamo.maybe_mark_dynamic(batch.tokens_N, 0)
    return batch


def uncompiled(config: Config) -> AbstractContextManager[object]:
    """Runs without compiled code: the last batch of a validation has another size and would be compiled again."""
    return torch.compiler.set_stance("force_eager") if config.train.compile else nullcontext()
