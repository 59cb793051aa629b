"""What the columns of the matrix share: a cell, the tiny random model of an architecture, and its batch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from hf_architectures import tiny
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

VOCAB, LENGTH = 320, 48
DOCUMENTS = ((5, 33, 10), (9, 1, 31, 7))  # lengths in the two rows; two are longer than the windows of 8 tokens


class Cell(NamedTuple):
    """What the table shows, and whether that is what cdrmix promises."""

    verdict: str
    good: bool


def shown(difference: float) -> str:
    """As 2e-06; 0 for the same bits."""
    return f"{difference:.0e}" if difference else "0"


def build(architecture: str) -> PreTrainedModel:
    """A tiny random model in training mode. Its biases and scales, which begin as 0 and 1, are random too."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny(architecture, VOCAB), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.1 * torch.randn_like(parameter)
    return model.train()


def batch(seed: int = 1) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """ids and targets int64 [2, T], weights [2, T], starts of the documents with the end."""
    generator = torch.Generator().manual_seed(seed)
    ids, targets = torch.randint(0, VOCAB, (2, 2, LENGTH), generator=generator)
    weights = (torch.rand(2, LENGTH, generator=generator) > 0.2).float()
    lengths = [0, *(length for row in DOCUMENTS for length in row)]
    return ids, targets, weights, torch.tensor(lengths).cumsum(0).int()
