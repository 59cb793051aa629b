"""The largest memory of a process is its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cdrmix import peak_memory

PARENT = """
import subprocess, sys
held = b"1" * 300_000_000
print(subprocess.run([sys.executable, "-c", sys.argv[1]], check=True, capture_output=True, text=True).stdout)
"""
CHILD = "from cdrmix.peak_memory import peak_resident; print(peak_resident())"


def test_a_program_does_not_inherit_the_memory_of_the_one_that_started_it() -> None:
    """Finds getrusage's ru_maxrss in its place, which showed the 2.2 GB of a test process for a run of 0.8 GB."""
    done = subprocess.run([sys.executable, "-c", PARENT, CHILD], check=True, capture_output=True, text=True)
    assert 5e6 < int(done.stdout) < 1e8  # an interpreter has some 15 MB


@pytest.mark.parametrize("content", [None, "Name:\tpython\nVmRSS:\t1 kB\n"])
def test_a_system_that_does_not_tell_it(content: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as macOS, and the sandbox gVisor."""
    monkeypatch.setattr(peak_memory, "STATUS", tmp_path / "status")
    if content is not None:
        peak_memory.STATUS.write_text(content)
    assert peak_memory.peak_resident() > 5e6
