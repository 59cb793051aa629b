"""Runs benchmark suites: prints a table with peers and targets, and appends JSON lines to benchmarks/results/.

python benchmarks/run.py [--suite NAME ...] [--case NAME ...] [--device cpu|cuda] [--list]

The kernels' suites need only PyTorch, Triton, PyYAML and Rich; the trainer's needs all dependencies of cdrmix.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import signal
import sys
from pathlib import Path
from typing import Any

import machine
import torch
import yaml
from cases import SUITES, Case, NotMeasured, Options, Result, cases, quantiles
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from cdrmix.errors import CdrmixError

HERE = Path(__file__).parent
ROOT = HERE.parent


def main() -> int:
    """Runs what the arguments name; exit code 0: every target was met; 1: one was missed or not measured; 2: usage.

    A case that this machine cannot run is listed and fails only if one of its targets names the machine's GPU.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", action="append", choices=sorted(SUITES), help="default: all")
    parser.add_argument("--case", action="append", help="one case of the suites; default: all for the device")
    parser.add_argument("--list", action="store_true", help="name suites, cases and targets, and stop")
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "cdrmix-core-tiny.yaml")
    parser.add_argument(
        "--seconds", type=float, default=180.0, help="training time of quality; time to prepare a kernel's peers (180)"
    )
    parser.add_argument("--blocks", type=int, default=20, help="timings of speed cases (default 20)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of ours and the peers (default cpu)")
    parser.add_argument("--without", action="append", default=[], metavar="NAME", help="leave out peers of this name")
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="a trained model, for prediction/speculative")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="where rows are appended")
    parser.add_argument("--dry", action="store_true", help="append nothing")
    arguments = parser.parse_args()
    targets = yaml.safe_load((HERE / "targets.yaml").read_text())
    suites = arguments.suite or sorted(SUITES)
    if arguments.list:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # so that `run.py --list | head` is no error
        for suite in suites:
            for name, case in cases(suite).items():
                print(f"{suite}/{name} ({', '.join(case.devices)}): {case.about}; targets: {targets[suite][name]}")
        return 0
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("no GPU found: PyTorch sees no CUDA device. --device cpu measures the cases for CPUs")
    if arguments.device == "cuda" and os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        parser.error("TRITON_INTERPRET is set, so Triton would run on the CPU: unset it")
    chosen: list[tuple[str, str, Case]] = []
    for suite in suites:
        try:
            found = cases(suite)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] == "cdrmix" or error.name in sys.stdlib_module_names:
                raise
            parser.error(f"suite {suite} needs {error.name}, which is not installed; name another with --suite")
        chosen += [
            (suite, name, case)
            for name, case in found.items()
            if (arguments.device in case.devices or case.told_of) and name in (arguments.case or [name])
        ]
    unknown = set(arguments.case or []) - {name for _, name, _ in chosen}
    if unknown or not chosen:
        parser.error(f"no case {', '.join(sorted(unknown))} for {arguments.device} in these suites; --list names them")

    options = Options(
        arguments.config,
        arguments.seconds,
        arguments.blocks,
        arguments.device,
        tuple(arguments.without),
        None if arguments.dry else arguments.results,
        arguments.model,
    )
    where = machine.facts()
    rows = []
    unmeasured = False
    for suite, name, case in chosen:
        load = os.getloadavg()[0]
        try:
            if arguments.device not in case.devices:
                raise NotMeasured(f"it is for {' and '.join(case.devices)}, this is {arguments.device}")
            result = case.measure(options)
        except NotMeasured as reason:
            wanted = arguments.device in case.devices and names_this_gpu(targets[suite][name], where["machine"]["gpu"])
            unmeasured = unmeasured or wanted
            print(f"{suite}/{name}: not measured here: {reason}; targets: {listed(targets[suite][name])}")
            continue
        except CdrmixError as error:
            print(f"{suite}/{name}: {error}", file=sys.stderr)
            return error.exit_code
        row = finite(to_row(suite, name, result, targets[suite][name], where, load))
        rows.append(row)
        if not arguments.dry:
            arguments.results.mkdir(parents=True, exist_ok=True)
            with (arguments.results / f"{suite}.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        show(row)
    return 1 if unmeasured or not all_met(rows) else 0


def all_met(rows: list[dict[str, Any]]) -> bool:
    """Whether no applicable target of the rows was missed or not measured."""
    return all(check["met"] in (True, "elsewhere") for row in rows for check in row["targets"].values())


def to_row(
    suite: str, case: str, result: Result, targets: dict[str, dict[str, Any]], where: dict[str, Any], load: float
) -> dict[str, Any]:
    """One JSON line. load: processes that wanted a processor in the minute before the measurement."""
    ratio = quantiles([ours / peer for ours, peer in zip(result.ours, result.peer, strict=True)]) if result.peer else {}
    figures = ({"ratio": ratio["p50"]} if ratio else {}) | result.figures
    return {
        "suite": suite,
        "case": case,
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **where,
        "load": load,
        "settings": result.settings,
        "unit": result.unit,
        "ours": quantiles(result.ours),
        "peer": {"name": result.peer_name, **(quantiles(result.peer) if result.peer else {})},
        "ratio": ratio,
        "samples": len(result.ours),
        "figures": result.figures,
        "peers": result.peers,
        "absent": result.absent,
        "roofline": result.roofline,
        "profile": result.profile,
        "targets": {name: check(figures.get(name), bound, where["machine"]["gpu"]) for name, bound in targets.items()},
    }


def check(found: float | None, bound: dict[str, Any], gpu: str | None) -> dict[str, Any]:
    """A target and what was found. met: true, false, null where nothing was measured, or "elsewhere".

    A bound with `gpu` applies to GPUs of that name only, and is "elsewhere" on others. `by_gpu` holds bounds by the
    name of a GPU, which replace this one there. A figure below `least` fails; `goals` are higher values that it should
    reach; reached: those that it did.
    """
    bound = bound_for(bound, gpu)
    met: bool | str | None
    if ("gpu" in bound and bound["gpu"] not in (gpu or "")) or not {"least", "most"} & set(bound):
        met = "elsewhere"
    elif found is None:
        met = None
    else:
        met = found >= bound.get("least", -math.inf) and found <= bound.get("most", math.inf)
    answer = {**bound, "found": found, "met": met}
    if "goals" in bound:
        answer["reached"] = [goal for goal in bound["goals"] if found is not None and found >= goal]
    return answer


def bound_for(bound: dict[str, Any], gpu: str | None) -> dict[str, Any]:
    """The bound for a GPU of this name (None: there is no GPU), with that part of the name as its `gpu`."""
    for name, its_own in bound.get("by_gpu", {}).items():
        if name in (gpu or ""):
            return {**its_own, "gpu": name}
    return bound


def names_this_gpu(bounds: dict[str, dict[str, Any]], gpu: str | None) -> bool:
    """Whether one of a case's bounds is for GPUs of this name; gpu: None where there is none."""
    names = [bound_for(bound, gpu).get("gpu") for bound in bounds.values()]
    return any(name in (gpu or "") for name in names if name is not None)


def listed(bounds: dict[str, dict[str, Any]]) -> str:
    """A case's targets as text."""
    return "; ".join(f"{name.replace('_', ' ')} {in_words(bound)}" for name, bound in bounds.items()) or "none"


def in_words(bound: dict[str, Any]) -> str:
    """A target as text: its bound with its goals, and its GPUs."""
    parts = []
    if {"least", "most"} & set(bound):
        parts.append(f"at least {bound['least']}" if "least" in bound else f"at most {bound['most']}")
        parts[0] += f" (goals {', '.join(map(str, bound['goals']))})" if "goals" in bound else ""
        parts[0] += f" on {bound['gpu']}" if "gpu" in bound else ""
    return ", ".join(parts + [in_words({**its_own, "gpu": name}) for name, its_own in bound.get("by_gpu", {}).items()])


def finite(value: Any) -> Any:
    """`value` with every float that is not finite replaced by None: JSON has no NaN."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, list | tuple) else value


def show(row: dict[str, Any]) -> None:
    """The table of a row: ours, every peer, the ratio to the first of them, and each figure with its target."""
    where = row["machine"]
    title = f"{row['suite']}/{row['case']}: {where['gpu'] if row['settings'].get('device') == 'cuda' else where['cpu']}"
    table = Table(
        title=f"{title}, {where['cores']} cores, load {row['load']:.1f}, commit {row['commit']}", box=SIMPLE_HEAD
    )
    for name in ("what", "p20", "p50", "p80", "target"):
        table.add_column(name, justify="right" if name.startswith("p") else "left", no_wrap=name != "what")
    lines = {f"cdrmix, {row['unit']}": row["ours"]}
    if row["peer"]["name"]:
        lines[row["peer"]["name"]] = row["peer"]
        lines["ratio"] = row["ratio"]
    lines |= {name: {"p50": value} for name, value in row["figures"].items()}
    lines |= {name: {"p50": None} for name in row["targets"] if name not in lines}
    for name, peer in row["peers"].items():
        if name not in ("cdrmix", row["peer"]["name"]):
            lines[name if row["unit"] == "ms" else f"{name}, ms"] = peer.get("milliseconds", {})
    for name, values in lines.items():
        cells = [number(values[key]) if key in values else "" for key in ("p20", "p50", "p80")]
        table.add_row(name.replace("_", " "), *cells, verdict(row["targets"].get(name)))
    console = Console(width=None if sys.stdout.isatty() else 110)
    console.print(table)
    for name, reason in row["absent"].items():
        console.print(f"not measured: {name}: {reason}", markup=False)


def number(value: float | None) -> str:
    """Four digits, or all before the point."""
    if value is None:
        return "none"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def verdict(check: dict[str, Any] | None) -> str:
    """A target and whether it was met."""
    if check is None:
        return ""
    bound = in_words(check)
    if check["met"] == "elsewhere":
        return bound
    if check["met"] is None:
        return f"[red]{bound}: not measured[/]"
    missed = [goal for goal in check.get("goals", ()) if goal not in check["reached"]]
    short = f", short of {missed[0]}" if missed and check["met"] else ""
    return f"[green]{bound}: met{short}[/]" if check["met"] else f"[red]{bound}: missed[/]"


if __name__ == "__main__":
    sys.exit(main())
