"""A ladder that is killed twenty times at random moments has the same ledger as one that is not, up to times."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pydantic", reason="needs pydantic, which is not installed")

from cdrmix.ladder.ledger import Ledger

KILLS = 20
# A clean process that has imported everything, from which each process of the ladder is forked: so a process begins
# with the work, and a kill does not only hit its imports. It prints the moments of the kills and the exit codes.
NURSERY = """
import json, os, random, signal, sys, time
import deepspeed
import cdrmix.ladder.runner
from cdrmix.cli import main

file, root, kills = sys.argv[1], sys.argv[2], int(sys.argv[3])

def start(folder):
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os._exit(main(["ladder", "run", "--config", file, "ladder.root=" + folder]))
    return child

began = time.monotonic()
alone = os.waitpid(start(root + "/alone"), 0)[1]
whole = time.monotonic() - began
chance = random.Random(1)
lines = []
for _ in range(kills):
    child = start(root + "/killed")
    time.sleep(chance.uniform(0.02, 0.35) * whole)
    os.kill(child, signal.SIGKILL)
    ended = os.waitpid(child, 0)[1]
    ledger = root + "/killed/ledger.jsonl"
    lines.append((ended, len(open(ledger).readlines()) if os.path.exists(ledger) else 0))
end = os.waitpid(start(root + "/killed"), 0)[1]
print(json.dumps({"alone": alone, "kills": lines, "end": end}))
"""


@pytest.mark.slow
def test_twenty_kills(climbed: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", NURSERY, str(climbed), str(tmp_path), str(KILLS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["alone"] == told["end"] == 0, done.stderr
    assert sum(ended == 9 for ended, _ in told["kills"]) >= KILLS // 2, told  # the others had nothing left to do
    assert len({lines for _, lines in told["kills"]}) > 2, told  # they hit the ladder at different points

    def content(folder: str) -> list[object]:
        return [(entry.number, entry.kind, entry.rung, entry.facts) for entry in Ledger(tmp_path / folder).entries]

    assert content("killed") == content("alone")
    assert content("alone") == [
        (entry.number, entry.kind, entry.rung, entry.facts) for entry in Ledger(climbed.parent / "ladder").entries
    ]
