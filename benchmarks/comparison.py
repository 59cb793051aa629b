"""Compares an operator with its peers: all are prepared and checked, then the correct ones are timed in turns.

A suite of kernels gives the problem, the implementations, and the exact results; this module does the rest.
"""

from __future__ import annotations

import abc
import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from cases import Case, Options, Result, quantiles
from measure import admit, interleaved, kept_for_backward, peak_on_gpu
from torch import Tensor

from cdrmix import ops

Implementation = TypeVar("Implementation")
Shape = TypeVar("Shape")  # sizes of a measurement
Call = Callable[[], object]


class Runner(abc.ABC):
    """One implementation on one problem: `run()` is timed; `inputs` are differentiated in training."""

    def __init__(self, inputs: list[Tensor], dy: Tensor, part: str) -> None:
        self.inputs = [x.detach().requires_grad_(part == "training") for x in inputs]
        self.dy, self.part = dy, part

    @abc.abstractmethod
    def forward(self) -> Tensor:
        """y, computed from `inputs`."""

    @abc.abstractmethod
    def errors(self) -> dict[str, float]:
        """Relative error of y and, in training, of every gradient."""

    def run(self) -> list[Tensor]:
        """y, and in training the gradients of the inputs."""
        if self.part == "forward":
            with torch.no_grad():
                return [self.forward()]
        y = self.forward()
        return [y, *torch.autograd.grad(y, self.inputs, self.dy)]

    def backward(self) -> Call:
        """The backward pass alone, repeatable on one forward pass."""
        y = self.forward()
        return lambda: torch.autograd.grad(y, self.inputs, self.dy, retain_graph=True)


AnyRunner = TypeVar("AnyRunner", bound=Runner)


@dataclass(frozen=True)
class Comparison:
    """samples: milliseconds of each implementation and part, in turns. found: results of each of them.

    runners: the timed ones, by name. absent: the others, with the reasons.
    """

    ours: str
    runners: Mapping[str, Runner]
    samples: dict[str, list[float]]
    found: dict[str, dict[str, Any]]
    absent: dict[str, str]

    def median(self, who: str) -> float:
        return quantiles(self.samples[who])["p50"]

    def fastest(self, names: Iterable[str]) -> str | None:
        """Those of these names that were timed."""
        return min((who for who in names if who in self.samples), key=self.median, default=None)

    @property
    def rivals(self) -> list[str]:
        """Timed implementations that are not ours."""
        return [who for who in self.runners if not who.startswith(self.ours)]

    def ratio(self, one: str, other: str) -> float:
        """The median over the rounds of one's time / the other's."""
        return quantiles([a / b for a, b in zip(self.samples[one], self.samples[other], strict=True)])["p50"]

    def speeds(self, groups: Mapping[str, Iterable[str]]) -> dict[str, float]:
        """Our speed over the fastest of each group; a group without timed members is absent."""
        best = {name: self.fastest(group) for name, group in groups.items()}
        return {name: self.ratio(who, self.ours) for name, who in best.items() if who is not None}

    def result(self) -> dict[str, Any]:
        """The arguments of a Result that are the same in every suite."""
        best = self.fastest(self.rivals)
        return {
            "unit": "ms",
            "peer_name": best,
            "ours": self.samples[self.ours],
            "peer": self.samples[best] if best else [],
            "peers": self.found,
            "absent": self.absent,
        }


def compare(
    candidates: dict[str, Implementation],
    ours: str,
    prepare: Callable[[str, Implementation], AnyRunner],
    options: Options,
    peak: Callable[[str], int | None],
    pieces: Callable[[AnyRunner], dict[str, Call]] = lambda mine: {},
) -> Comparison:
    """Measures candidates. peak: bytes of one on a CPU; pieces: further calls to time, made from our runner."""

    def admitted(who: str, implementation: Implementation) -> tuple[AnyRunner, dict[str, Any]]:
        runner = prepare(who, implementation)
        return runner, weigh(runner, lambda: peak(who))

    runners, found, absent = admit(candidates, ours, admitted, options)
    calls: dict[str, Call] = {who: runner.run for who, runner in runners.items()}
    samples = interleaved(calls | pieces(runners[ours]), options.blocks, torch.device(options.device))
    for who, values in samples.items():
        found.setdefault(who, {})["milliseconds"] = quantiles(values)
    return Comparison(ours, runners, samples, found, absent)


def cases_of(
    shapes: Mapping[str, Shape],
    device: str,
    measure: Callable[[Shape, str, Options], Result],
    about: Callable[[Shape], str],
) -> dict[str, Case]:
    """The case NAME_training of every shape, then NAME_forward."""
    dtype = "bfloat16" if device == "cuda" else "float32"
    return {
        f"{name}_{part}": Case(
            functools.partial(measure, shape, part), f"{part} in ms, {about(shape)}, {dtype}", (device,)
        )
        for part in ("training", "forward")
        for name, shape in shapes.items()
    }


def weigh(runner: Runner, peak_on_cpu: Callable[[], int | None]) -> dict[str, Any]:
    """Seconds of the first run, errors, bytes kept between the passes, and peak bytes."""
    x = runner.inputs[0]
    begun = time.perf_counter()
    runner.run()
    if x.is_cuda:
        torch.cuda.synchronize()
    found: dict[str, Any] = {"first_run_seconds": time.perf_counter() - begun, "errors": runner.errors()}
    found["peak_bytes"] = peak_on_gpu(runner.run, x.device) if x.is_cuda else peak_on_cpu()
    if runner.part == "training":
        found["saved_bytes"] = kept_for_backward(runner.forward, runner.inputs)
    return found


def peak_in_fresh_process(program: str, *arguments: str) -> int | None:
    """The number that a suite prints as a program: bytes by which one run raises a process's memory, or null."""
    done = subprocess.run([sys.executable, program, *arguments], check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def backend_of(x: Tensor) -> str:
    """The backend of our operator, and whether it is Triton's interpreter, whose times have no meaning."""
    found = ops.backend(x)
    return "triton, interpreted" if found == "triton" and os.environ.get("TRITON_INTERPRET") == "1" else found


def circumstances(x: Tensor) -> dict[str, Any]:
    """The settings of every row about the machine: dtype, device, backend, threads, and how memory was counted."""
    return {
        "dtype": str(x.dtype).removeprefix("torch."),
        "device": x.device.type,
        "backend": backend_of(x),
        "threads": torch.get_num_threads(),
        "peak_counted_by": "PyTorch's allocator" if x.is_cuda else "resident memory of a fresh process",
    }


@contextmanager
def one_thread(device: torch.device) -> Iterator[None]:
    """PyTorch with one thread on a CPU, because the speed of several depends on other users of the machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if device.type == "cpu" else threads)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def error_figures(errors: Mapping[str, float]) -> dict[str, float]:
    """error_y, and the largest error of the gradients, if there are any."""
    gradients = [value for name, value in errors.items() if name != "y"]
    return {"error_y": errors["y"]} | ({"error_gradients": max(gradients)} if gradients else {})
