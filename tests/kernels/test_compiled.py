"""Numba's loops on disk: used again while nothing that is compiled into them has changed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from cdrmix.kernels.common import cpu


def hits(path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many compilations a new dispatcher of the file's function took from the disk."""
    spec = importlib.util.spec_from_file_location("loops", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # numba imports the module of a function that it takes from the disk, unless the first dispatcher still lives.
    monkeypatch.setitem(sys.modules, "loops", module)
    spec.loader.exec_module(module)
    dispatcher = cpu.compile_cached(module.double, {"nogil": True})
    assert dispatcher(21) == 42
    return sum(dispatcher.stats.cache_hits.values())


def test_a_change_of_shared_sources_compiles_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "loops.py"
    path.write_text("def double(x):\n    return x + x\n")
    assert [hits(path, monkeypatch), hits(path, monkeypatch)] == [0, 1]
    monkeypatch.setattr(cpu, "shared_sources", lambda: "others")
    assert [hits(path, monkeypatch), hits(path, monkeypatch)] == [0, 1]


def test_every_source_that_is_compiled_into_others_is_watched() -> None:
    """The files from which compiled functions of other files import and call functions."""
    folder = Path(cpu.__file__).parent
    imported = {
        f"{line.split('import')[0].split('.')[-1].strip()}.py"
        for path in folder.parent.rglob("*.py")
        if "numba" in path.read_text()
        for line in path.read_text().splitlines()
        if line.startswith("from cdrmix.kernels.common.")
    }
    nothing_compiled = {"libtorch.py", "products.py"}
    assert imported - nothing_compiled <= set(cpu.SHARED)
