"""What has the same bits with any number of CPU threads: the gradient norm, first weights, products of many shapes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from cdrmix.train.expert_parallel import total_norm


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_the_gradient_norm_is_exact_and_the_same_with_any_number_of_threads() -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=generator) for shape in ((4096, 512), (700, 300), (5,))]
    gradients: list[tuple[Tensor, bool]] = [(tensor, False) for tensor in tensors]
    exact = torch.cat([tensor.double().flatten() for tensor in tensors]).square().sum().sqrt()
    norms = []
    for number in (1, 2, 3):
        torch.set_num_threads(number)
        norms.append(total_norm(gradients, None))
    assert all(torch.equal(norms[0], norm) for norm in norms)
    assert norms[0].dtype == torch.float32
    assert abs(norms[0].double() / exact - 1) < 2**-23  # rounded once; rows of 512 squares by as little again


def test_products_of_few_rows_and_first_weights_have_the_same_bits_with_any_number_of_threads() -> None:
    """Experts of 5 to 11 rows differ without MKL's strict mode, and orthogonal weights without a single thread."""
    code = """
import torch
from torch import Tensor
from cdrmix.model.layers import orthogonal_
from cdrmix.train.parallel import be_deterministic
be_deterministic()
def made(threads):
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(20, 128, generator=generator), torch.randn(128, 256, generator=generator)
    torch.manual_seed(0)
    first = torch.empty(32, 128)
    orthogonal_(first, 0.1)
    return [first, *(x[:rows] @ w for rows in range(1, 21))]
assert all(torch.equal(a, b) for threads in (2, 3, 4) for a, b in zip(made(1), made(threads)))
"""
    environment = {name: value for name, value in os.environ.items() if name != "MKL_CBWR"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
