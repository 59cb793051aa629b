"""The table of GPUs: names are unique and found whole; it needs nothing but the standard library."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cdrmix.gpus import GPUS, gpu_by_key, gpu_by_name


def test_keys_and_names_are_unique() -> None:
    names = [name for gpu in GPUS for name in gpu.names]
    assert len(set(names)) == len(names)
    assert [gpu_by_key(gpu.key) for gpu in GPUS] == list(GPUS)


@pytest.mark.parametrize("name", ["NVIDIA H200 NVL", "NVIDIA GH200 480GB", "NVIDIA H100 PCIe", "RTX 4090 Laptop", ""])
def test_another_card_is_unknown_however_like_a_known_one_it_is_called(name: str) -> None:
    assert gpu_by_name(name) is None


def test_the_table_is_read_without_any_package() -> None:
    code = "import sys; sys.path.insert(0, sys.argv[1]); import cdrmix.gpus; print(cdrmix.gpus.gpu_by_key('h200').key)"
    root = str(Path(__file__).parents[1])
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code, root], check=False, capture_output=True, text=True)
    assert done.stdout.strip() == "h200", done.stderr
