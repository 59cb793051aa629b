"""`make install` on machines of every kind, with stand-ins for Python, the compiler and the drivers' programs."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Notes what it is asked to install; its PyTorch is a ROCm build if HIP says so.
PYTHON = """#!/bin/sh
here=$(dirname "$0")
case "$*" in
    *"-m venv"*) mkdir -p .venv/bin; cp "$0" .venv/bin/python ;;
    *torch.version.hip*) exit ${HIP:-1} ;;
    *"pip --version"*) exit 0 ;;
    *install*) echo "$DS_ACCELERATOR/$DS_BUILD_OPS/$PIP_EXTRA_INDEX_URL: ${*##*constraints.txt }" >>calls
        case "$*" in *+cpu*) exit ${NO_CPU_BUILD:-0} ;; esac ;;
esac
"""


def install(folder: Path, *programs: str, **variables: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Runs make install in a folder of its own; what pip was to install, with the settings it was given."""
    commands = folder / "commands"
    commands.mkdir()
    for name in ("Makefile", "pyproject.toml", "setup.py", "constraints.txt"):
        shutil.copy(ROOT / name, folder)
    for name in ("python3", "g++", *programs):
        (commands / name).write_text(PYTHON)
        (commands / name).chmod(0o755)
    for name in ("make", "sh", "rm", "touch", "mkdir", "cp", "dirname"):
        (commands / name).symlink_to(str(shutil.which(name)))
    environment = {"PATH": str(commands), "HOME": os.environ.get("HOME", "/")}
    command = ["make", "install", f"ROCM={folder / 'rocm'}", *(f"{name}={value}" for name, value in variables.items())]
    done = subprocess.run(command, cwd=folder, env=environment, check=False, capture_output=True, text=True)
    calls = folder / "calls"
    return done, calls.read_text().splitlines() if calls.exists() else []


@pytest.fixture(autouse=True)
def needs_make() -> None:
    if shutil.which("make") is None:
        pytest.skip("needs make")


@pytest.mark.parametrize(("programs", "torch"), [((), "torch==2.13.0+cpu"), (("nvidia-smi",), "torch==2.13.0")])
def test_deepspeed_is_built_without_a_look_for_nvcc(tmp_path: Path, programs: tuple[str, ...], torch: str) -> None:
    """With a driver and no toolkit, its setup raises MissingCUDAException unless it is told the CPU."""
    done, calls = install(tmp_path, *programs)
    assert done.returncode == 0, done.stderr
    assert calls[0] == f"//: {torch}"
    assert calls[-1] == "cpu/0/: --no-build-isolation --editable .[test,dev]"
    assert (tmp_path / ".venv" / ".installed").exists()


def test_without_cpu_builds_the_default_one_is_installed(tmp_path: Path) -> None:
    done, calls = install(tmp_path, NO_CPU_BUILD="1")
    assert done.returncode == 0, done.stderr
    assert [call.rpartition(" ")[2] for call in calls[:2]] == ["torch==2.13.0+cpu", "torch==2.13.0"]


@pytest.mark.parametrize("sign", ["rocm-smi", "amd-smi", "folder"])
def test_an_amd_machine_gets_a_rocm_build_or_a_sentence(tmp_path: Path, sign: str) -> None:
    programs = () if sign == "folder" else (sign,)
    if sign == "folder":
        (tmp_path / "rocm").mkdir()
    refused, calls = install(tmp_path, *programs)
    assert refused.returncode != 0
    assert "no ROCm build of PyTorch 2.13.0 was had" in refused.stderr
    assert "make install TORCH_INDEX=... ; or do without the GPU: make install GPU=cpu" in refused.stderr
    assert calls == [], "nothing is downloaded from an index that has none"
    assert not (tmp_path / ".venv" / ".installed").exists()


@pytest.mark.parametrize(("hip", "code"), [("0", 0), ("1", 2)])
def test_a_build_that_is_not_for_rocm_is_refused(tmp_path: Path, hip: str, code: int) -> None:
    done, calls = install(tmp_path, "rocm-smi", TORCH_INDEX="https://builds.example/rocm", HIP=hip)
    assert done.returncode == code
    assert calls[0] == "//https://builds.example/rocm: --upgrade torch==2.13.0"
    assert ("no ROCm build" in done.stderr) == (code != 0)
    assert (tmp_path / ".venv" / ".installed").exists() == (code == 0)


def test_the_gpu_can_be_done_without_and_is_named_right(tmp_path: Path) -> None:
    done, calls = install(tmp_path, "rocm-smi", GPU="cpu")
    assert done.returncode == 0, done.stderr
    assert calls[0] == "//: torch==2.13.0+cpu"
    (tmp_path / "other").mkdir()
    done, calls = install(tmp_path / "other", GPU="nvidia")
    assert done.returncode != 0
    assert "GPU=nvidia: it is cuda, rocm or cpu" in done.stderr
    assert calls == []
