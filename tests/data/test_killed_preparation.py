"""A preparation that is killed again and again, at any moment, ends with the bytes of an undisturbed one."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from cdrmix.data.prepare import prepare
from cdrmix.data.shards import open_shards

KILLS = int(os.environ.get("CDRMIX_KILLS", "6"))
PROCESS = """
import sys
from cdrmix.config.schema import Config
from cdrmix.data import prepare
if __name__ == "__main__":
    prepare.MEMORY_PER_TEXT_BYTE = 10  # some 100 kB a task
    print("begins", flush=True)
    prepare.prepare(Config.model_validate_json(sys.argv[1]))
"""


def quiet(line: str) -> None:
    pass


@pytest.mark.slow
def test_fingerprint_after_kills(make_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All stages: filters, personal data, addresses, hosts, near-duplicates, in two processes."""
    draw = random.Random(8)
    words = [f"{first}{second}" for first in ("the", "be", "to", "of", "and", "with") for second in "abcdefghijklmno"]
    records = []
    for number in range(400):
        text = ". ".join(" ".join(draw.choices(words, k=12)).capitalize() for _ in range(8))
        page = number % 380
        records.append({"text": f"{text}. me{number}@example.org", "url": f"https://h{page % 90}.org/{page}"})
    records += [{"text": record["text"] + " More."} for record in records[:50]]
    source = {"kind": "jsonl", "paths": [str(tmp_path / "a.jsonl")]}
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    data = {
        "dedup": {"url": True, "documents_per_host": 4},
        "pii": {"kinds": ["email"]},
        "filters": {"rules": ["length", "gopher_repetition"]},
        "memory_mb": 1,
        "workers": 2,
    }
    monkeypatch.setattr("cdrmix.data.prepare.MEMORY_PER_TEXT_BYTE", 10)
    undisturbed = prepare(make_config(source, cache=str(tmp_path / "undisturbed"), **data), say=quiet)
    index = (undisturbed.path / "index.json").read_bytes()
    assert {"duplicate_url", "documents_per_host", "near_duplicate"} <= undisturbed.report["filtered"].keys()

    kills = finished = 0
    stages: set[str] = set()
    longest = 2.0  # seconds of a whole preparation, at least; found out as they finish
    while kills < KILLS or not finished:
        config = make_config(source, cache=str(tmp_path / f"killed{finished}"), **data)
        command = [sys.executable, "-c", PROCESS, config.model_dump_json()]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
            assert process.stdout is not None
            process.stdout.readline()
            begun = time.monotonic()
            try:
                process.wait(draw.uniform(0.0, longest) if kills < KILLS else None)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                kills += 1
                runner = list((tmp_path / f"killed{finished}").glob(".*.work/*.json"))
                stages |= {path.stem for path in runner}
        if process.returncode != -signal.SIGKILL:
            assert process.returncode == 0
            longest = max(longest, time.monotonic() - begun)
            shards = open_shards(tmp_path / f"killed{finished}" / undisturbed.path.name)
            assert (shards.path / "index.json").read_bytes() == index
            assert shards.fingerprint == undisturbed.fingerprint
            finished += 1
    print(f"{kills} kills, {finished} preparations finished; stages found done: {sorted(stages)}")
    assert stages, "no preparation was killed in its middle"
