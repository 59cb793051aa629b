"""Runs benchmark suites: prints a table against peers and targets, appends JSON lines to benchmarks/results/.

python benchmarks/run.py [--suite NAME ...] [--case NAME] [--device cpu|cuda] [--list]
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import yaml
from cases import SUITES, Options, Result, quantiles
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from cdrmix.errors import CdrmixError
from cdrmix.train.run import PACKAGES, environment

HERE = Path(__file__).parent
ROOT = HERE.parent


def main() -> int:
    """Runs what the arguments name; the exit code is 0 when every target was met, 1 when one was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", action="append", choices=sorted(SUITES), help="default: all")
    parser.add_argument("--case", help="one case of the suites")
    parser.add_argument("--list", action="store_true", help="name suites, cases and targets, and stop")
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "cdrmix-core-tiny.yaml")
    parser.add_argument("--seconds", type=float, default=180.0, help="training time of quality cases (default 180)")
    parser.add_argument("--blocks", type=int, default=20, help="timings of speed cases (default 20)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of ours and the peers (default cpu)")
    parser.add_argument("--dry", action="store_true", help="append nothing to results/")
    arguments = parser.parse_args()
    targets = yaml.safe_load((HERE / "targets.yaml").read_text())
    chosen = [
        (suite, case)
        for suite in arguments.suite or sorted(SUITES)
        for case in SUITES[suite]
        if arguments.case in (None, case)
    ]
    if not chosen:
        parser.error(f"no case {arguments.case!r} in these suites; --list names them")
    if arguments.list:
        for suite, case in chosen:
            first_line = (SUITES[suite][case].__doc__ or "").splitlines()[0]
            print(f"{suite}/{case}: {first_line} targets: {targets[suite][case]}")
        return 0

    options = Options(arguments.config, arguments.seconds, arguments.blocks, arguments.device)
    where = machine()
    rows = []
    for suite, case in chosen:
        try:
            result = SUITES[suite][case](options)
        except CdrmixError as error:
            print(f"{suite}/{case}: {error}", file=sys.stderr)
            return error.exit_code
        row = to_row(suite, case, result, targets[suite][case], where)
        rows.append(row)
        if not arguments.dry:
            (HERE / "results").mkdir(exist_ok=True)
            with (HERE / "results" / f"{suite}.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
    show(rows)
    return 0 if all(check["met"] for row in rows for check in row["targets"].values()) else 1


def to_row(suite: str, case: str, result: Result, targets: dict[str, dict[str, float]], where: Any) -> dict[str, Any]:
    """One JSON line."""
    ratio = quantiles([ours / peer for ours, peer in zip(result.ours, result.peer, strict=True)])
    figures = {"ratio": ratio["p50"], **result.figures}
    checks = {}
    for name, bound in targets.items():
        met = figures[name] >= bound.get("least", -float("inf")) and figures[name] <= bound.get("most", float("inf"))
        checks[name] = {**bound, "found": figures[name], "met": met}
    return {
        "suite": suite,
        "case": case,
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **where,
        "settings": result.settings,
        "unit": result.unit,
        "ours": quantiles(result.ours),
        "peer": {"name": result.peer_name, **quantiles(result.peer)},
        "ratio": ratio,
        "samples": len(result.ours),
        "figures": result.figures,
        "targets": checks,
    }


def machine() -> dict[str, Any]:
    """Commit, machine and versions, as every row states them."""
    commit = git("rev-parse", "--short=12", "HEAD")
    found = environment((*PACKAGES, "transformers"))
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "commit": commit + ("+changes" if git("status", "--porcelain", "--untracked-files=no") else ""),
        "machine": {"cpu": cpu_model(), "cores": found["cpus"], "gpu": gpu, "platform": found["platform"]},
        "versions": {"python": found["python"], **found["versions"]},
    }


def git(*arguments: str) -> str:
    """What git prints in this repository; 'unknown' outside of one."""
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], check=False, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def cpu_model() -> str:
    """The processor's name, or its architecture where the system does not say more."""
    description = Path("/proc/cpuinfo")
    if description.exists():
        for line in description.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def show(rows: list[dict[str, Any]]) -> None:
    """The table of a run: ours, the peer's, their ratio and every further figure, each beside its target."""
    where = rows[0]["machine"]
    table = Table(title=f"{where['cpu']}, {where['cores']} cores, commit {rows[0]['commit']}", box=SIMPLE_HEAD)
    for name in ("case", "what", "p20", "p50", "p80", "target"):
        table.add_column(name, justify="right" if name.startswith("p") else "left", no_wrap=True)
    for row in rows:
        lines = {
            f"cdrmix, {row['unit']}": row["ours"],
            row["peer"]["name"]: row["peer"],
            "ratio": row["ratio"],
            **{name: {"p50": value} for name, value in row["figures"].items()},
        }
        for name, values in lines.items():
            cells = [number(values[key]) if key in values else "" for key in ("p20", "p50", "p80")]
            table.add_row(
                row["case"] if name.startswith("cdrmix,") else "",
                name.replace("_", " "),
                *cells,
                verdict(row["targets"].get(name)),
            )
        table.add_section()
    Console(width=None if sys.stdout.isatty() else 110).print(table)


def number(value: float) -> str:
    """Four digits, or all before the point."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def verdict(check: dict[str, Any] | None) -> str:
    """A target and whether it was met."""
    if check is None:
        return ""
    bound = f"at least {check['least']}" if "least" in check else f"at most {check['most']}"
    return f"[green]{bound}: met[/]" if check["met"] else f"[red]{bound}: missed[/]"


if __name__ == "__main__":
    sys.exit(main())
