"""A ladder that is killed twenty times at random moments has the same ledger as one that is not, up to times."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

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

def count():
    ledger = root + "/killed/ledger.jsonl"
    return len(open(ledger).readlines()) if os.path.exists(ledger) else 0

began = time.monotonic()
alone = os.waitpid(start(root + "/alone"), 0)[1]
whole = time.monotonic() - began
chance = random.Random(1)
lines = []
for number in range(kills):
    before, child, ended = count(), start(root + "/killed"), (0, 0)
    # Every second process lives until it has added a line, so that the kills go through the whole ladder.
    while number % 2 and count() == before and ended == (0, 0):
        time.sleep(0.002)
        ended = os.waitpid(child, os.WNOHANG)
    time.sleep(chance.uniform(0.0, 0.02 if number % 2 else 0.06) * whole)
    if ended == (0, 0):
        os.kill(child, signal.SIGKILL)
        ended = os.waitpid(child, 0)
    lines.append((ended[1], count()))
end = os.waitpid(start(root + "/killed"), 0)[1]
print(json.dumps({"alone": alone, "kills": lines, "end": end}))
"""


@pytest.mark.long
def test_twenty_kills(climbed: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", NURSERY, str(climbed), str(tmp_path), str(KILLS)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["alone"] == told["end"] == 0, done.stderr
    assert [ended for ended, _ in told["kills"]].count(9) >= KILLS // 2, told  # the others had nothing left to do
    assert len({lines for _, lines in told["kills"]}) >= 4, told  # they hit the ladder at different points

    def content(folder: str) -> list[object]:
        return [(entry.number, entry.kind, entry.rung, entry.facts) for entry in Ledger(tmp_path / folder).entries]

    assert content("killed") == content("alone")
    assert content("alone") == [
        (entry.number, entry.kind, entry.rung, entry.facts) for entry in Ledger(climbed.parent / "ladder").entries
    ]
