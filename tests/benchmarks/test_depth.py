"""`benchmarks/depth.py` measures every layer and step that it names, at every capacity."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pydantic", reason="needs pydantic, which is not installed")


@pytest.mark.long
def test_every_row_has_a_figure_for_every_capacity() -> None:
    script = Path(__file__).parents[2] / "benchmarks" / "depth.py"
    done = subprocess.run(
        [sys.executable, str(script), "--rounds", "1"], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    head, *rows = done.stdout.splitlines()
    assert head.split() == ["ms", "none", "1.0", "0.75", "0.5", "0.25"]
    assert len(rows) == 6
    for row in rows:
        milliseconds, without, *others = map(float, re.findall(r" (\d+\.\d+)", row))
        assert milliseconds > 0
        assert without == 1
        assert len(others) == 4
