"""A test that leaves the process changed fails by name, and the tests after it have the process as it was."""

from __future__ import annotations

import pytest

pytest_plugins = ["pytester"]

LEAKS = (  # a statement, and how the failure names what it changed
    ("torch.set_num_threads(2)", "CPU threads: PyTorch 1 -> 2"),
    ("products.multiply_on_one_thread()", "CPU threads: products on one False -> True"),
    ("[pool.set_num_threads(2) for pool in process_state._pools() if pool.user_api == 'blas']", "CPU threads: blas "),
    ("signal.signal(signal.SIGUSR1, print)", "signal handlers: 10 "),
    ("os.environ['LEAK'] = 'x'", "environment variables: LEAK None -> 'x'"),
    ("del os.environ['HELD']", "environment variables: HELD 'x' -> None"),
    ("torch.set_deterministic_debug_mode('error')", "flags: deterministic algorithms 1 -> 2"),
    ("torch.set_default_dtype(torch.float64)", "flags: default dtype torch.float32 -> torch.float64"),
    ("torch.set_grad_enabled(False)", "flags: gradients True -> False"),
    ("torch.utils.deterministic.fill_uninitialized_memory ^= True", "flags: filled memory True -> False"),
    ("random.random()", "random states: random"),
    ("np.random.rand()", "random states: NumPy"),
    ("os.chdir('/')", "working folder: "),
    ("held.append(open(__file__))", "open files: "),
    ("held.append(subprocess.Popen(['sleep', '60']))", "child processes: "),
    ("held.append(threading.Timer(60, print)); held[-1].start()", "running threads: <Timer"),
)
TESTS = """
import os, random, signal, subprocess, threading
import numpy as np
import process_state, pytest, torch
from cdrmix.kernels.common import products

held = []
before = {name: part.read() for name, part in process_state.PARTS.items()}

@pytest.mark.parametrize("leak", LEAKS, ids=range(len(LEAKS)))
def test_leak(leak):
    exec(leak)

def test_that_uses_what_it_restores():
    torch.manual_seed(3)
    assert torch.rand(1) == torch.rand(1, generator=torch.Generator().manual_seed(3))

def test_after_all():
    file, process, timer = held
    file.close()
    process.wait()
    timer.cancel()
    timer.join()
    assert torch.initial_seed() == 0
    for name in process_state.PARTS.keys() - {"open files", "running threads"}:
        assert process_state.PARTS[name].read() == before[name], name

@pytest.fixture(scope="session")
def shared():
    random.seed(5)

def test_of_a_fixture(shared):
    pass

@pytest.fixture
def whole():
    yield
    os.chdir("/")

def test_of_a_fixture_that_ends_late(whole):
    pass
"""


@pytest.mark.slow  # pytest within pytest
def test_every_kind_of_leak_fails_by_name(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HELD", "x")
    pytester.makepyfile(test_leaks=TESTS.replace("LEAKS", repr([leak for leak, _ in LEAKS])))
    result = pytester.runpytest_inprocess(
        "-p", "process_state", "-p", "no:cacheprovider", "-p", "no:timeout", "-n0"
    )  # one alarm is enough
    result.assert_outcomes(passed=len(LEAKS) + 3, errors=len(LEAKS) + 2)
    leaks = [line.partition("Leak: ")[2] for line in result.outlines if "process_state.Leak: " in line]
    expected = [(f"test_leaks.py::test_leak[{number}]", change) for number, (_, change) in enumerate(LEAKS)]
    expected += [("the fixture shared", "random states: random")]
    expected += [("test_leaks.py::test_of_a_fixture_that_ends_late", "working folder: ")]
    for what, change in expected:
        assert any(line.startswith(f"{what} left the process changed: {change}") for line in leaks), (what, leaks)
