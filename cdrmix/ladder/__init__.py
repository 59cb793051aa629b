"""The model ladder: models of growing size, what each costs, and what loss the next one should have.

`cdrmix.ladder.PipelineRunner` and `cdrmix.ladder.Ladder` are imported when they are used first.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cdrmix.config.schema_ladder import Ladder as Ladder
    from cdrmix.ladder.runner import PipelineRunner as PipelineRunner

_WHERE = {"Ladder": "cdrmix.config.schema_ladder", "PipelineRunner": "cdrmix.ladder.runner"}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _WHERE:
            raise AttributeError(f"module 'cdrmix.ladder' has no attribute {name!r}; it has {', '.join(_WHERE)}")
        return getattr(importlib.import_module(_WHERE[name]), name)
