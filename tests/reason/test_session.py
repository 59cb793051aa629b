"""Sessions without a trained model: what they belong to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor

pytest.importorskip("pydantic", reason="needs pydantic, which is not installed")

from cdrmix.inference.load import Loaded
from cdrmix.reason.session import identity_of


def test_a_session_belongs_to_weights_and_tokenizer() -> None:
    """Not to the order of the weights, and not to the heads of further tokens, which an export leaves out."""

    def identity(fingerprint: str, weights: dict[str, Tensor]) -> str:
        loaded = SimpleNamespace(tokenizer=SimpleNamespace(fingerprint=fingerprint), weights=weights)
        return identity_of(cast(Loaded, loaded))

    one, two = torch.arange(6.0).view(2, 3), torch.ones(2)
    whole = identity("a", {"one": one, "two": two})
    same = [{"two": two.clone(), "one": one.clone()}, {"one": one, "two": two, "prediction.heads": one}]
    assert {identity("a", weights) for weights in same} == {whole}
    other = [{"one": one + 1e-6, "two": two}, {"one": one.T, "two": two}, {"three": one, "two": two}, {"one": one}]
    others = {identity("a", weights) for weights in other} | {identity("b", {"one": one, "two": two})}
    assert len(others | {whole}) == len(other) + 2
