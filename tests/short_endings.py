"""Runs of toy models without what takes most of their time: pictures of their reports, and a sample of long text."""

from __future__ import annotations

import contextlib
import dataclasses
import io
from collections.abc import Iterator

import pytest
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from cdrmix import workflow


def save_blank(figure: Figure, file: io.BytesIO, **options: object) -> None:
    file.write(b"\x89PNG\r\n\x1a\n")


@contextlib.contextmanager
def short_endings() -> Iterator[None]:
    """Within it, this process writes reports whose pictures are blank, and samples of eight tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", save_blank)
        patch.setattr(ConstrainedLayoutEngine, "execute", lambda engine, figure: None)
        patch.setattr(workflow, "SAMPLE", dataclasses.replace(workflow.SAMPLE, max_new_tokens=8))
        yield
