"""GPU tests on a machine that has PyTorch, Triton, NumPy and the test runner, and nothing else of what cdrmix needs."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import tomllib
import venv
from pathlib import Path

import pytest
from packaging.requirements import Requirement

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PACKAGES = ("torch", "triton", "numpy", "pytest", "pytest-timeout", "hypothesis", "pyyaml", "rich")
# Fewer would mean that a file was passed over: the kernels' own tests alone are as many.
LEAST_GPU_TESTS = 160
QUICK = (  # seconds in the interpreter
    "tests/kernels/test_moe_product.py::test_triton_equals_float64[counts3-0-1-3]",
    "tests/kernels/test_moe.py::test_the_routing_of_known_logits[triton]",
    "tests/kernels/test_moe.py::test_no_tokens_give_nothing_and_gradients_of_zero[triton]",
)


def with_requirements(names: tuple[str, ...]) -> set[str]:
    """Distributions of these names and, of what they require, those that are installed."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name in found:
            continue
        try:
            requirements = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        found.add(name)
        needed = [one for one in map(Requirement, requirements) if not one.marker or one.marker.evaluate({"extra": ""})]
        waiting += [requirement.name for requirement in needed]
    return found


def environment(folder: Path, distributions: set[str]) -> Path:
    """The interpreter of an environment in folder that has these distributions alone, as links, and cdrmix so too."""
    venv.create(folder, symlinks=True, with_pip=False)
    (site,) = folder.glob("lib/python*/site-packages")
    for name in distributions:
        distribution = importlib.metadata.distribution(name)
        for entry in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (site / entry).exists():
                (site / entry).symlink_to(Path(str(distribution.locate_file(entry))))
    (site / "cdrmix").symlink_to(ROOT / "cdrmix")  # as gpu.sh links it
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with PACKAGES and what they require."""
    return environment(tmp_path_factory.mktemp("bare"), with_requirements(PACKAGES))


@pytest.fixture(scope="module")
def python_with_wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """PyTorch, Triton, NumPy and Numba with what they require, and otherwise only what gpu_wheels.sh carries."""
    script = (ROOT / "benchmarks" / "gpu_wheels.sh").read_text()
    carried = {"deepspeed"}
    for group in ("TRAINER", "TESTS"):
        (names,) = re.findall(rf"^{group}=\(([^)]*)\)", script, re.MULTILINE)
        carried |= set(names.split())
    assert {"pydantic", "zstandard", "pytest-timeout"} <= carried
    machine = with_requirements(("torch", "triton", "numpy", "numba"))
    return environment(tmp_path_factory.mktemp("carried"), machine | carried)


def run(python: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTEST_ADDOPTS")}
    environment = {key: value for key, value in environment.items() if not key.startswith("PYTEST_XDIST")}
    return subprocess.run([python, *arguments], cwd=ROOT, env=environment, check=False, capture_output=True, text=True)


def test_the_operators_are_imported(python: Path) -> None:
    code = """
import importlib.util, cdrmix.kernels, cdrmix.ops
for name in ("pydantic", "deepspeed", "zstandard", "numba", "tokenizers", "transformers", "pyarrow"):
    assert importlib.util.find_spec(name) is None, name
"""
    done = run(python, "-c", code)
    assert done.returncode == 0, done.stderr


def test_all_gpu_tests_are_collected(python: Path) -> None:
    """Of every folder; what needs more than the machine has is passed over by name."""
    done = run(python, "-m", "pytest", "-m", "gpu", "--collect-only", "-q", "-p", "no:cacheprovider")
    assert done.returncode == 0, done.stdout + done.stderr
    collected = [line for line in done.stdout.splitlines() if "::" in line and not line.startswith("SKIPPED")]
    assert len(collected) >= LEAST_GPU_TESTS
    marked = {
        str(path.relative_to(ROOT)) for path in ROOT.glob("tests/kernels/test_*.py") if "mark.gpu" in path.read_text()
    }
    assert marked <= {line.partition("::")[0] for line in collected}
    assert "needs pydantic, which is not installed" in done.stdout
    assert "needs cdrmix" not in done.stdout


@pytest.mark.long
def test_the_trainer_runs_with_what_is_carried(python_with_wheels: Path) -> None:
    """The test that a GPU runs in bfloat16, on the CPU: the engine under every ZeRO stage."""
    found = run(python_with_wheels, "-m", "pytest", "-m", "gpu", "--collect-only", "-q", "-p", "no:cacheprovider")
    assert found.returncode == 0, found.stdout + found.stderr
    lines = [line for line in found.stdout.splitlines() if line.startswith("tests/") and "::" in line]
    plan = re.findall(r'^plan .*"\$tests ([^"]*)"$', (ROOT / "benchmarks" / "gpu.sh").read_text(), re.MULTILINE)
    assert {"/".join(line.split("/")[:2]) for line in lines} == set(" ".join(plan).split()), "gpu.sh runs these"
    collected = {line for line in lines if line.startswith("tests/training/test_devices.py::")}
    assert len(collected) == 2
    assert all(line.endswith("[cuda]") for line in collected)
    chosen = "tests/training/test_devices.py::test_zero_has_the_gradients_of_one_process[cpu]"
    done = run(python_with_wheels, "-m", "pytest", "-q", "-p", "no:cacheprovider", chosen)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


def test_the_interpreter_runs_kernels(python: Path) -> None:
    done = run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *QUICK)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(QUICK)} passed" in done.stdout


def test_all_dependencies_are_installed_where_the_whole_suite_runs() -> None:
    """Else files would be passed over in silence: tests/conftest.py does so where a dependency is absent."""
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    absent = []
    for name in (Requirement(text).name for text in dependencies):
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            absent.append(name)
    assert absent == []
