"""Runs the checks and prints what they found: a line each as it ends, or JSON."""

from __future__ import annotations

import json
import textwrap
import time
from pathlib import Path

from cdrmix.doctor.checks import checks
from cdrmix.doctor.findings import Finding
from cdrmix.doctor.parallel import PROCESSES, check_processes
from cdrmix.errors import ConfigError

WIDTH = 120


def examine(folder: Path, device: str, processes: int, *, as_json: bool) -> bool:
    """Runs all checks. Returns whether all passed.

    folder: on the disk that is measured. processes: above 1, so many processes check the modes of training too.
    Raises ConfigError.
    """
    if processes not in PROCESSES:
        raise ConfigError(f"--nproc: found {processes}; allowed: {', '.join(map(str, PROCESSES))}")
    started, findings = time.perf_counter(), []

    def note(finding: Finding) -> None:
        findings.append(finding)
        if not as_json:
            print(_line(finding), flush=True)

    for check in checks(folder, device):
        note(check())
    if processes > 1:
        for finding in check_processes(device, processes):
            note(finding)
    seconds, failed = time.perf_counter() - started, sum(not finding.passed for finding in findings)
    if as_json:
        rows = [finding._asdict() for finding in findings]
        print(
            json.dumps(
                {"device": device, "processes": processes, "seconds": round(seconds, 1), "checks": rows}, indent=2
            )
        )
    else:
        print(f"{len(findings) - failed} of {len(findings)} checks passed in {seconds:.0f} s on {device}")
    return failed == 0


def _line(finding: Finding) -> str:
    text = f"{'pass' if finding.passed else 'FAIL'}  {finding.check:<24}  "
    lines = textwrap.wrap(finding.found, WIDTH - len(text)) or [""]
    lines += textwrap.wrap(f"-> {finding.remedy}", WIDTH - len(text)) if finding.remedy else []
    return "\n".join((text if number == 0 else " " * len(text)) + line for number, line in enumerate(lines))
