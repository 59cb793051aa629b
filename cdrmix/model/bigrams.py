"""The embedding of pairs of successive tokens, hashed to the rows of a table."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cdrmix.config.schema_layers import Bigrams
from cdrmix.model.block import BlockCache
from cdrmix.model.layers import TokenEmbedding

# The odd factors and shifts of splitmix64's finaliser (Steele, Lea and Flood, OOPSLA 2014), as signed 64-bit integers.
FACTORS = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)
SHIFTS = (30, 27, 31)


class BigramEmbedding(nn.Module):
    """A vector for each token and the one before it in its document, from a table of `rows` rows.

    It is added to the token's embedding: the 2-grams of over-encoding (arXiv 2501.16975). Pairs that are hashed to one
    row share its vector.
    """

    def __init__(self, config: Bigrams, d_model: int, std: float) -> None:
        super().__init__()
        self.rows = config.rows
        self.table = TokenEmbedding(config.rows, d_model, std)

    def forward(self, ids_BT: Tensor, before_BT: Tensor) -> Tensor:
        """ids, and the tokens before them by `tokens_before`, both integers [B, T] -> vectors [B, T, D]."""
        vectors_BTD: Tensor = self.table(hashed(ids_BT, before_BT, self.rows))
        return vectors_BTD


def tokens_before(ids_BT: Tensor, last_B: Tensor | None, starts_BT: Tensor | None) -> Tensor:
    """The id plus 1 of the token before each token in its document; 0 at the first token: int64 [B, T].

    last_B: int64 [B], the same of the token before each row. None: the rows start documents.
    starts_BT: bool, where documents start inside rows.
    """
    numbered_BT = ids_BT.long() + 1
    first_B1 = torch.zeros_like(numbered_BT[:, :1]) if last_B is None else last_B.unsqueeze(1)
    before_BT = torch.cat([first_B1, numbered_BT[:, :-1]], 1)
    return before_BT if starts_BT is None else before_BT.masked_fill(starts_BT, 0)


def with_last_token(
    cache: BlockCache | tuple[BlockCache, ...], ids_BT: Tensor, cu_seqlens: Tensor | None
) -> BlockCache | tuple[BlockCache, ...]:
    """The first block's cache with the last token of each row, of packed rows of each document.

    cache: a tuple of the caches after each token of one row has each of the tokens.
    """
    if not isinstance(cache, BlockCache):
        return tuple(each._replace(last_token_B=id_1.long() + 1) for each, id_1 in zip(cache, ids_BT.mT, strict=True))
    last_B = ids_BT[:, -1] if cu_seqlens is None else ids_BT.flatten()[cu_seqlens[1:].long() - 1]
    return cache._replace(last_token_B=last_B.long() + 1)


def hashed(ids_BT: Tensor, before_BT: Tensor, rows: int) -> Tensor:
    """The row of each pair, int64 in [0, rows): splitmix64's finaliser of both numbers, modulo the number of rows."""
    mixed = ids_BT.long() + (before_BT << 32)
    for shift, factor in zip(SHIFTS, (*FACTORS, None), strict=True):
        mixed = mixed ^ ((mixed >> shift) & (2 ** (64 - shift) - 1))  # the mask makes the shift an unsigned one
        mixed = mixed if factor is None else mixed * factor  # modulo 2^64
    return (mixed & (2**63 - 1)) % rows
