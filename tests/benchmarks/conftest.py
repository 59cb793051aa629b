"""Lets the tests of this folder import the programs in benchmarks/, which import each other as neighbours."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
