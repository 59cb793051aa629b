"""Damaged inputs end with a documented exit code, leave what they read as it was, and mean the same in each container.

`make fuzz-inputs` runs more of them: CASES of them from SEED on.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import signal
from pathlib import Path
from types import FrameType

import pytest
from in_process import main
from mutated_inputs import Case, Good, make

from cdrmix.data.shards import open_shards
from cdrmix.errors import UNEXPECTED

CASES, SEED = int(os.environ.get("CDRMIX_FUZZ_CASES", "100")), int(os.environ.get("CDRMIX_FUZZ_SEED", "0"))
BLOCK = 50  # cases of a test
CPU_SECONDS = 60.0  # of a command that should take a fraction of one: so long takes only what does not end
DOCUMENTED = {
    int(code)
    for line in (Path(__file__).parents[2] / "docs" / "exit-codes.md").read_text().splitlines()
    if line.startswith("| ")
    for code in re.findall(r"\d+", line.split("|")[1])
} - {UNEXPECTED}


class Endless(BaseException):
    """A command takes as if it had no end."""


@pytest.fixture(scope="module")
def good(toy_run: Path, tiny: Path) -> Good:
    small = [
        "data.pii.kinds=[email]",
        "run.threads=1",
        "data.workers=1",
        "data.valid_fraction=0.25",
        "data.row_length=32",
    ]
    return Good(toy_run, tiny, [*small, "model.vocab_size=300"])


def contents(folder: Path) -> dict[str, str]:
    """A hash of each file."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file() and "log" not in path.suffix
    }


def end(number: int, frame: FrameType | None) -> None:
    raise Endless


def run(case: Case, capfd: pytest.CaptureFixture[str]) -> str:
    """What is wrong; "" if nothing is."""
    before, codes = contents(case.kept), []
    former = signal.signal(signal.SIGPROF, end)
    try:
        for command in case.commands:
            signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
            try:
                codes.append(main(command))
            except SystemExit as error:
                codes.append(error.code)  # type: ignore[arg-type]
            except Endless:
                return f"{command[:2]}: no end"
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
            said = capfd.readouterr()
            if codes[-1] not in DOCUMENTED or "Traceback" in said.err:
                return f"{command[:2]}: exit code {codes[-1]}\n{said.err[-3000:]}"
            if codes[-1] and not said.err.strip() + said.out.strip():
                return f"{command[:2]}: exit code {codes[-1]} without a word"
    finally:
        signal.signal(signal.SIGPROF, former)
    if contents(case.kept) != before:
        return "the input has changed"
    if case.equal:
        found = [next(folder.glob("*/index.json"), None) if folder.exists() else None for folder in case.equal]
        if (codes[0] == 0) != (codes[1] == 0):
            return f"exit codes {codes} of the same rows in two containers"
        if codes[0] == 0:
            one, other = (open_shards(path.parent, verify=False).fingerprint for path in found if path is not None)
            if one != other:
                return "the same rows in two containers gave other shards"
    return ""


@pytest.mark.filterwarnings("default::cdrmix.errors.CdrmixWarning")  # as on the command line
@pytest.mark.parametrize("block", range(SEED // BLOCK, (SEED + CASES) // BLOCK))
def test_a_damaged_input_ends_with_a_message(
    good: Good, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    wrong = []
    monkeypatch.chdir(tmp_path)
    for seed in range(block * BLOCK, (block + 1) * BLOCK):
        folder = tmp_path / str(seed)
        folder.mkdir()
        case = make(seed, folder, good)
        with monkeypatch.context() as patch:
            for name, value in case.environment.items():
                patch.setenv(name, value)
            if problem := run(case, capfd):
                wrong.append(f"case {seed}: {problem}\n{case.what[:3000]}")
        shutil.rmtree(folder)
    assert not wrong, "\n\n".join(wrong)
