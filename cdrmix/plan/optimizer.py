"""The state of the optimizer and the operations of its update, from the configuration only."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from cdrmix.config.schema import Config
from cdrmix.config.schema_model import Model
from cdrmix.model.language_model import LanguageModel
from cdrmix.model.layers import fused_matrices, parameter_kinds
from cdrmix.training.optim import is_orthogonalized


@dataclass(frozen=True)
class OptimizerSize:
    """orthogonalised: parameters of Muon's matrices, which have one moment; all others have two. operations: of the
    products of one update of all matrices, computed once."""

    orthogonalised: int
    operations: int


def optimizer_size(config: Config) -> OptimizerSize:
    """What Muon adds to a plan: zeros for other optimizers. Norms and element-wise operations are not counted.

    An iteration on an m x n matrix, m <= n, has two products of 2 m^2 n operations and one of 2 m^3.
    """
    if config.train.optimizer.kind != "muon" or not isinstance(config.model, Model):
        return OptimizerSize(0, 0)
    with torch.device("meta"):
        model: nn.Module = LanguageModel(config.model)
    kinds, fused = parameter_kinds(model), fused_matrices(model)
    orthogonalised = operations = 0
    for name, parameter in model.named_parameters():
        if not is_orthogonalized(kinds[name], config.train.optimizer):
            continue
        orthogonalised += parameter.numel()
        for matrices in fused[name].split(parameter) if name in fused else [parameter]:
            m, n = sorted(matrices.shape[-2:])
            operations += matrices.numel() // (m * n) * (4 * m * m * n + 2 * m**3)
    return OptimizerSize(orthogonalised, config.train.optimizer.iterations * operations)
