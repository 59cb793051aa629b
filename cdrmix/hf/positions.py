"""The longest text that a model of transformers with a table of position vectors can read."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor, nn

from cdrmix.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Positions(NamedTuple):
    """The table of position vectors of a model (gpt2, opt). limit: its rows; None: the model has no such table."""

    architecture: str
    limit: int | None

    @classmethod
    def of(cls, model: PreTrainedModel) -> Positions:
        """Found by its size, which is max_position_embeddings and up to two rows more."""
        config = model.config.get_text_config()
        limit = getattr(config, "max_position_embeddings", None)
        tables = [
            module
            for module in model.modules()
            if isinstance(module, nn.Embedding) and module is not model.get_input_embeddings()
        ]
        found = isinstance(limit, int) and any(0 <= table.num_embeddings - limit <= 2 for table in tables)
        return cls(config.model_type, limit if found else None)

    def check(self, length: int, cu_seqlens: Tensor | None = None) -> None:
        """Raises ConfigError if rows of this length, or the documents in them, are longer than the table."""
        if self.limit is None or length <= self.limit:
            return
        longest = length if cu_seqlens is None else int(cu_seqlens.diff().max())
        if longest > self.limit:
            raise ConfigError(
                f"{self.architecture} reads at most {self.limit:,} tokens, and a text has {longest:,}; set "
                f"data.row_length (for lm-eval --max-length) to at most {self.limit:,}, or generate fewer tokens"
            )
