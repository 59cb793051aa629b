"""The number of CPU threads: chosen by time alone, and of no influence on a bit of what is trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import forked
import pytest
import torch
from torch import Tensor

from cdrmix.runtime import threads_for
from cdrmix.training.expert_parallel import total_norm
from cdrmix.training.threads import PERIOD, WARM_UP, ThreadChoice, candidates

QUIET = {1: 605.0, 2: 340.0}  # milliseconds a step of core-tiny on two cores, by the number of threads
BUSY = {1: 1180.0, 2: 4180.0}  # while one other process is busy


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class Run:
    """A run whose steps take what a function of their number and the threads says, in milliseconds."""

    def __init__(self, numbers: list[int], cost: Callable[[int, int], float]) -> None:
        self.lines: list[str] = []
        self.choice, self.cost = ThreadChoice(numbers, self.lines.append), cost
        self.used: list[int] = []
        self.milliseconds = 0.0

    def steps(self, count: int) -> Run:
        for _ in range(count):
            self.choice.begin()
            number = torch.get_num_threads()
            took = self.cost(len(self.used), number)
            self.used.append(number)
            self.milliseconds += took
            self.choice.end(took / 1000)
        return self


def test_candidates_are_all_cores_and_the_powers_of_two_below() -> None:
    assert candidates(1) == [1]
    assert candidates(2) == [2, 1]
    assert candidates(6) == [6, 4, 2, 1]
    assert candidates(64) == [64, 32, 16, 8, 4, 2, 1]


@pytest.mark.parametrize(("times", "best"), [(QUIET, 2), (BUSY, 1)])
def test_the_fastest_is_taken_and_trials_cost_little(times: dict[int, float], best: int) -> None:
    run = Run([2, 1], lambda _, number: times[number]).steps(500)
    assert run.choice.chosen == best
    assert set(run.used[-20:]) == {best}
    assert run.milliseconds < 1.04 * 500 * times[best]
    assert len(run.lines) == 1
    assert f"CPU threads: {best}" in run.lines[0]
    assert f"1: {times[1]:.0f}, 2: {times[2]:.0f}" in run.lines[0]


def test_load_that_comes_and_goes_is_followed() -> None:
    """Every 300 steps another load: within 10 % of the best choice over all of them, trials included."""
    load = [QUIET, BUSY] * 3
    run = Run([2, 1], lambda step, number: load[step // 300][number]).steps(1800)
    assert run.milliseconds < 1.1 * sum(300 * min(times.values()) for times in load)
    for times, end in zip(load, range(300, 1801, 300), strict=True):
        assert run.used[end - 1] == min(times, key=lambda number: times[number])
    assert len(run.lines) == 6


def test_hopeless_numbers_of_many_cores_are_not_tried() -> None:
    run = Run(candidates(64), lambda _, number: 64 / number if number > 16 else 100.0 / number).steps(150)
    assert run.choice.chosen == 64
    assert min(run.used) == 32
    assert run.milliseconds < 1.1 * 150


def test_noise_leads_to_no_change_of_mind() -> None:
    """Steps of 0.9 to 1.3 times the usual, and now and then one of tenfold."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.rand(4 * PERIOD, generator=generator).tolist()

    def cost(step: int, number: int) -> float:
        return QUIET[number] * (10.0 if step % 37 == 5 else 0.9 + 0.4 * noise[step])

    run = Run([2, 1], cost).steps(4 * PERIOD)
    assert len(run.lines) == 1
    assert run.used.count(1) < 0.05 * len(run.used)


def test_one_number_is_set_and_never_tried() -> None:
    run = Run([3], lambda _, number: 1.0).steps(2 * PERIOD)
    assert set(run.used) == {3}
    assert run.lines == []
    assert WARM_UP < PERIOD


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


def test_products_and_first_weights_have_the_same_bits_with_any_number_of_threads() -> None:
    """Most of these shapes have other bits without `multiply_on_one_thread`, and orthogonal weights too.

    In a process of its own, since what it sets stays.
    """
    code = """
import random
import torch
from cdrmix import ops
from cdrmix.kernels.common.products import set_num_threads
from cdrmix.model.initial_values import drawn, orthogonal
from cdrmix.training.distributed import be_deterministic

be_deterministic()
draw = random.Random(0)

def size(most):
    return draw.choice([draw.randint(1, 12), draw.randint(1, 40), draw.randint(1, most), 16 * draw.randint(1, 16)])

def made(threads, rows, inputs, outputs, inputs_first):
    set_num_threads(threads)
    generator = torch.Generator().manual_seed(0)
    shape = (inputs, outputs) if inputs_first else (outputs, inputs)
    x, weight = (torch.randn(s, generator=generator, requires_grad=True) for s in ((2, rows, inputs), shape))
    y = ops.linear(x, weight, inputs_first=inputs_first)
    y.backward(torch.randn(y.shape, generator=generator))
    torch.manual_seed(0)
    return y, x.grad, weight.grad, drawn(orthogonal(0.1), 32, 128, whole=True)

def loss(threads):  # of more rows than PyTorch sums by one thread
    set_num_threads(threads)
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(65536, 8, generator=generator), torch.randn(32, 8, generator=generator)
    return ops.linear_cross_entropy(hidden, weight, torch.randint(32, (65536,), generator=generator))

assert all(torch.equal(loss(1), loss(threads)) for threads in (2, 3))

for _ in range(25):
    case = size(1000), size(300), size(300), draw.random() < 0.5
    alone = made(1, *case)
    for threads in (2, 3, 4, 8):
        assert all(torch.equal(a, b) for a, b in zip(alone, made(threads, *case))), (threads, case)
"""
    status, told = forked.run(["-c", code])
    assert status == 0, told


def test_a_step_of_few_rows_takes_one_thread_and_gives_the_others_back() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        with threads_for(1):
            assert torch.get_num_threads() == 1
        with threads_for(10_000):  # products of so many rows are shared
            assert torch.get_num_threads() == 2
        with pytest.raises(KeyError), threads_for(1):
            raise KeyError
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
