"""The embedding of pairs of tokens: its definition, its hash, and the table it is in the counts and the files."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cdrmix.config.schema import Config
from cdrmix.config.schema_layers import Bigrams
from cdrmix.model.bigrams import hashed, tokens_before
from cdrmix.model.language_model import LanguageModel

MakeModel = Callable[..., LanguageModel]
TINY = Path(__file__).parents[2] / "configs" / "base" / "tiny.yaml"
ROWS = 61


def splitmix64(number: int) -> int:
    """The finaliser of splitmix64 in Python's integers, as its authors give it."""
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB % 2**64
    return number ^ (number >> 31)


@given(
    st.lists(st.tuples(st.integers(0, 2**31 - 2), st.integers(0, 2**31 - 1)), min_size=1, max_size=20),
    st.integers(1, 2**40),
)
def test_the_hash_is_splitmix64_of_both_tokens(pairs: list[tuple[int, int]], rows: int) -> None:
    ids, before = (torch.tensor([side]) for side in zip(*pairs, strict=True))
    wanted = [splitmix64(second + (first << 32)) % 2**63 % rows for second, first in pairs]
    assert hashed(ids, before, rows).tolist() == [wanted]


def test_the_pairs_of_a_vocabulary_fill_the_table_evenly() -> None:
    """10^6 pairs in 1,000 rows: chi-squared with 999 degrees of freedom is normal with the deviation sqrt(2 x 999), so
    within 5 deviations of 999 by all but one of 10^6 random functions; and no two rows of pairs are hashed alike."""
    ids, before = torch.arange(1000).repeat(1000, 1), torch.arange(1000).unsqueeze(1).expand(-1, 1000)
    rows = hashed(ids, before, 1000)
    counts = torch.bincount(rows.flatten(), minlength=1000).double()
    chi_squared = ((counts - 1000) ** 2 / 1000).sum().item()
    assert abs(chi_squared - 999) < 5 * (2 * 999) ** 0.5
    assert (rows[:-1] == rows[1:]).double().mean() < 0.002  # 1 in 1,000 by chance


def test_the_token_before_is_of_the_same_document() -> None:
    """Id plus 1; 0 at the start of a document; the last token of the text before a row that goes on."""
    ids = torch.tensor([[5, 6, 7, 8], [1, 2, 3, 4]])
    starts = torch.tensor([[False, False, True, False], [False, True, False, False]])
    assert tokens_before(ids, None, starts).tolist() == [[0, 6, 0, 8], [0, 0, 3, 4]]
    assert tokens_before(ids, torch.tensor([10, 0]), None).tolist() == [[10, 6, 7, 8], [0, 2, 3, 4]]


@pytest.mark.parametrize("tie", [True, False])
def test_a_model_adds_the_row_of_each_pair_to_its_embedding(make_model: MakeModel, tie: bool) -> None:
    """The same hidden states as a model without bigrams that reads the sums as a table of its own."""
    model = make_model(bigrams=Bigrams(rows=ROWS), tie_embeddings=tie)
    assert model.bigrams is not None
    ids = torch.tensor([[3, 3, 5, 3, 3, 22]])
    pairs = [(0, 3), *((first + 1, second) for first, second in pairwise(ids[0].tolist()))]
    rows = torch.tensor([splitmix64(second + (first << 32)) % 2**63 % ROWS for first, second in pairs])
    table = model.bigrams.table.weight[rows] + model.embedding.weight[ids[0]]
    plain = make_model(tie_embeddings=tie)
    plain.load_state_dict({k: v for k, v in model.state_dict().items() if not k.startswith("bigrams")})
    with torch.no_grad():
        plain.embedding.weight[: len(table)] = table
        wanted = plain(torch.arange(len(table)).unsqueeze(0)).hidden_BTD
        assert torch.equal(model(ids).hidden_BTD, wanted)


def test_the_rest_of_the_model_has_the_same_first_parameters() -> None:
    def parameters(*overrides: str) -> dict[str, Tensor]:
        torch.manual_seed(1)
        return LanguageModel(Config.from_yaml(TINY, list(overrides)).cdrmix_model).state_dict()

    plain, more = parameters(), parameters(f"model.bigrams.rows={ROWS}")
    assert more.pop("bigrams.table.weight").shape == (ROWS, 128)
    assert plain.keys() == more.keys()
    assert all(torch.equal(plain[name], more[name]) for name in plain)
