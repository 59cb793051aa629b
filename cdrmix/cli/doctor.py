"""`cdrmix doctor`: checks this machine."""

from __future__ import annotations

import argparse
from pathlib import Path

from cdrmix.cli.arguments import positive_integer
from cdrmix.cli.commands import Commands


def add(commands: Commands) -> None:
    text = "check this machine: packages, kernels, engine, repeatability, disk; exit code 1 if a check fails"
    doctor = commands.add("doctor", run, text)
    text = "check the modes of N processes too: 2, 4 or 8"
    doctor.add_argument("--nproc", type=positive_integer, default=1, metavar="N", help=text)
    doctor.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="device (default: auto)")
    text = "folder of the disk to measure (default: experiments)"
    doctor.add_argument("--folder", type=Path, default=Path("experiments"), metavar="FOLDER", help=text)
    doctor.add_argument("--json", action="store_true", help="print JSON instead of a table")
    doctor.add_argument("--worker", type=Path, help=argparse.SUPPRESS)


def run(options: argparse.Namespace) -> int:
    from cdrmix.doctor.report import examine
    from cdrmix.runtime import device_type

    device = device_type(options.device, "--device")
    if options.worker is not None:
        from cdrmix.doctor.parallel import work

        work(options.worker, device)
        return 0
    return 0 if examine(options.folder, device, options.nproc, as_json=options.json) else 1
