"""Runs of toy models without what takes most of their time: pictures of their reports, and a sample of long text."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import pytest
from matplotlib.figure import Figure

from cdrmix import workflow


@contextlib.contextmanager
def short_endings() -> Iterator[None]:
    """Within it, this process writes reports whose pictures are empty, and samples of four tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", lambda *_, **__: None)
        patch.setattr(Figure, "get_layout_engine", lambda _: None)
        patch.setattr(workflow, "SAMPLE", dataclasses.replace(workflow.SAMPLE, max_new_tokens=4))
        yield
