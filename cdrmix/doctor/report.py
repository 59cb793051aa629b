"""Runs the checks and prints what they found: a line each as it ends, or JSON."""

from __future__ import annotations

import json
import os
import textwrap
import time
from pathlib import Path

import torch

from cdrmix.doctor.checks import checks
from cdrmix.doctor.findings import Finding
from cdrmix.doctor.parallel import PROCESSES, check_processes
from cdrmix.errors import ConfigError
from cdrmix.run_folder import environment

WIDTH = 120


def examine(folder: Path, device: str, processes: int, *, as_json: bool) -> bool:
    """Runs all checks. Returns whether all passed.

    folder: on the disk that is measured. processes: above 1, so many processes check the modes of training too.
    Raises ConfigError.
    """
    if processes not in PROCESSES:
        raise ConfigError(f"--nproc: found {processes}; allowed: {', '.join(map(str, PROCESSES))}")
    machine = _machine(device)
    if not as_json:
        print(machine, flush=True)
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
        facts = {"device": device, "machine": machine, "processes": processes, "seconds": round(seconds, 1)}
        print(json.dumps(facts | {"checks": [finding._asdict() for finding in findings]}, indent=2))
    else:
        print(f"{len(findings) - failed} of {len(findings)} checks passed in {seconds:.0f} s on {device}")
    return failed == 0


def _line(finding: Finding) -> str:
    text = f"{'pass' if finding.passed else 'FAIL'}  {finding.check:<24}  "
    lines = textwrap.wrap(finding.found, WIDTH - len(text)) or [""]
    lines += textwrap.wrap(f"-> {finding.remedy}", WIDTH - len(text)) if finding.remedy else []
    return "\n".join((text if number == 0 else " " * len(text)) + line for number, line in enumerate(lines))


def _machine(device: str) -> str:
    """The processor, the memory and the GPUs."""
    facts = environment()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    found = f"Python {facts['python']}, {facts['cpus']} CPU cores, {memory:.0f} GiB"
    if device == "cuda":
        for number in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(number)
            found += f"; GPU {number}: {properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    return found
