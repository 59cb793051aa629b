"""Writes the tables of the ablations in docs/ from benchmarks/results/ablations.jsonl, and adds results to that file.

python benchmarks/ablations.py                                          # writes the tables
python benchmarks/ablations.py --add FOLDER/results.jsonl --commit HASH  # adds results of `cdrmix ablate --out FOLDER`

It writes the whole page docs/stage-b-results.md; in docs/stage-b.md only the tables between `<!-- NAME -->` and
`<!-- end -->`.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from cdrmix.config.schema import Config
from cdrmix.config.schema_ablation import Ablation
from cdrmix.reason.experiments.ablation import fingerprint
from cdrmix.reason.experiments.table import Judgement, arms_table, claim_of, judge, section_lines, table

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "configs" / "ablations"
RESULTS = ROOT / "benchmarks" / "results" / "ablations.jsonl"
PAGE, ALL_RESULTS = ROOT / "docs" / "stage-b.md", ROOT / "docs" / "stage-b-results.md"

# The order of the tables, and the measurements that docs/stage-b.md shows of each file; the other page shows all.
SHOWN: dict[str, Sequence[str]] = {
    "delta-recall": ("accuracy", "harder"),
    "hebb": ("accuracy", "harder"),
    "decay": ("accuracy", "harder"),
    "gate": ("accuracy", "harder"),
    "honest-baseline": ("accuracy", "harder"),
    "accept-head": ("learned", "always", "never", "by_value", "accept_good", "accept_bad"),
    "token-memory-rl": ("accuracy", "capture", "retention"),
    "token-memory-harder": ("accuracy", "capture", "retention"),
    "token-memory-credit": ("accuracy",),
    "operations-index": ("accuracy", "imitated_accuracy", "operations", "imitated_operations"),
    "operations-eviction": ("accuracy", "imitated_accuracy", "retention", "imitated_retention"),
    "operations-summaries": ("accuracy",),
    "babilong-memory": ("exact", "window"),
    "babilong-carried": ("exact",),
    "removal-parity": ("last8",),
    "removal-s3": ("last8",),
}

COPIED = ("torch", "device", "threads", "seed", "seconds", "measured")  # from a result to its row

COUNTED: dict[Judgement, str] = {
    "holds": "hold",
    "not shown": "are not shown",
    "fails": "fail",
    "not run": "were not run",
}

Runs = dict[str, dict[int, dict[str, float]]]


@functools.cache
def ablation_of(name: str) -> Ablation:
    """The section `ablation:` of a file."""
    section = Config.from_yaml(CONFIGS / f"{name}.yaml").ablation
    assert section is not None
    return section


def collect(rows: Iterable[dict[str, Any]]) -> dict[str, Runs]:
    """Results by file, arm and seed, of the seeds that the file names; rows of other seeds are in no table.

    An arm without rows of its own gets the rows of an equal arm in another file.
    Raises ValueError for a row whose arm does not exist, and for two rows of one arm and seed.
    """
    marks = {}
    for name in SHOWN:
        path = CONFIGS / f"{name}.yaml"
        for arm, section in ablation_of(name).arms.items():
            marks[name, arm] = fingerprint(Config.from_yaml(path, section.set), 0)
    own: dict[tuple[str, str], dict[int, dict[str, float]]] = {key: {} for key in marks}
    seen: set[tuple[str, int]] = set()
    for row in rows:
        name, _, arm = row["case"].partition(", ")
        if (name, arm) not in own:
            raise ValueError(f"{RESULTS}: {row['case']!r} is no arm of a file in {CONFIGS}")
        if (row["case"], row["seed"]) in seen:
            raise ValueError(f"{RESULTS}: {row['case']!r}, seed {row['seed']} occurs twice")
        seen.add((row["case"], row["seed"]))
        if row["seed"] in ablation_of(name).seeds:
            own[name, arm][row["seed"]] = row["measured"]
    by_mark: dict[str, dict[int, dict[str, float]]] = {}
    for key, runs in own.items():
        if runs:
            by_mark.setdefault(marks[key], runs)
    measured: dict[str, Runs] = {name: {} for name in SHOWN}
    for (name, arm), mark in marks.items():
        measured[name][arm] = own[name, arm] or by_mark.get(mark, {})
    return measured


def verdicts(measured: dict[str, Runs]) -> tuple[list[str], str]:
    """Lines of the table of all demands, and a sentence that counts them."""
    rows = [["file", "measured", "mean [95 %]", "seeds", "demanded", "verdict"]]
    outcomes = []
    for name, runs in measured.items():
        for demand in ablation_of(name).demands:
            verdict = judge(demand, runs)
            quantity, bounds = claim_of(demand)
            estimated = verdict.estimate
            shown = ("-", "0") if estimated is None else (str(estimated), str(estimated.seeds))
            outcome = verdict.outcome if verdict.outcome == "holds" else f"**{verdict.outcome}**"
            rows.append([name, quantity, *shown, bounds, outcome])
            outcomes.append(verdict.outcome)
    counts = ", ".join(f"{outcomes.count(kind)} {verb}" for kind, verb in COUNTED.items() if kind in outcomes)
    return table(rows), f"Of {len(outcomes)} demands, {counts}."


def sources(rows: Iterable[dict[str, Any]]) -> list[str]:
    """Lines of a table: for each case, commit and device the seeds of its rows and the seconds of a run."""
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["case"], row["commit"], row["device"]), []).append(row)
    lines = [["case", "commit", "device", "seeds", "seconds of a run"]]
    for (case, commit, device), those in groups.items():
        seconds = [row["seconds"] for row in those]
        seeds = ", ".join(str(row["seed"]) for row in those)
        lines.append([case, commit, device, seeds, f"{min(seconds):.0f} to {max(seconds):.0f}"])
    return table(lines)


def page(text: str, measured: dict[str, Runs]) -> str:
    """docs/stage-b.md with new tables. Raises ValueError for a marker that names no table."""
    lines_of_verdicts, count = verdicts(measured)

    def fill(match: re.Match[str]) -> str:
        name = match[1]
        if name == "verdicts":
            lines = lines_of_verdicts
        elif name in SHOWN:
            lines = arms_table(ablation_of(name), measured[name], SHOWN[name])
        else:
            raise ValueError(f"{PAGE}: no table is called {name!r}; there are verdicts, {', '.join(SHOWN)}")
        return "\n".join([f"<!-- {name} -->", "", *lines, "", "<!-- end -->"])

    text = re.sub(r"Of \d+ demands, [^.]*\.", count, text)
    return re.sub(r"<!-- ([a-z0-9-]+) -->\n(?:.*?)<!-- end -->", fill, text, flags=re.DOTALL)


def all_results(rows: Sequence[dict[str, Any]], measured: dict[str, Runs]) -> str:
    """docs/stage-b-results.md: every arm of every file, every measurement, every length."""
    lines = [
        "# Stage B: all measurements of the ablations",
        "",
        "`python benchmarks/ablations.py` writes this page from `benchmarks/results/ablations.jsonl`. A cell is a mean",
        "over seeds with its 95 % interval (Student's), or the value of one seed. `@N` is the number of chunks; for",
        "`removal-*` it is the number of elements. [stage-b.md](stage-b.md) explains the mechanisms and judges the",
        "demands.",
        "",
    ]
    for name, runs in measured.items():
        lines += section_lines(name, ablation_of(name), runs)
    return "\n".join([*lines, "## Where the rows are from", "", *sources(rows), ""])


def added(lines: Iterable[str], rows: Sequence[dict[str, Any]], commit: str) -> list[dict[str, Any]]:
    """Lines of `cdrmix ablate` as rows of the results file, without those that the file already has.

    Raises ValueError for a line without a key, and for a result that the file has from another device.
    """
    existing = {(row["case"], row["seed"]): row["device"] for row in rows}
    results = [json.loads(line) for line in lines]
    for number, result in enumerate(results, 1):
        if missing := sorted({"what", *COPIED} - result.keys()):
            raise ValueError(
                f"line {number} has no {', '.join(missing)}; run it again with this version of `cdrmix ablate`"
            )
        other = existing.get((result["what"], result["seed"]), result["device"])
        if other != result["device"]:
            raise ValueError(
                f"line {number}: {result['what']!r}, seed {result['seed']} is there from {other}, this is of "
                f"{result['device']}; remove one of them"
            )
    return [
        {"suite": "ablations", "case": result["what"], "commit": commit} | {key: result[key] for key in COPIED}
        for result in results
        if (result["what"], result["seed"]) not in existing
    ]


def main() -> None:
    """Adds rows with --add, and writes both pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--add", type=Path, metavar="FILE", help="results.jsonl of `cdrmix ablate --out`")
    parser.add_argument("--commit", help="the commit that the added results were measured at")
    options = parser.parse_args()
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    if options.add is not None:
        if options.commit is None:
            parser.error("--add needs --commit: rows name the commit that they were measured at")
        new = added(options.add.read_text().splitlines(), rows, options.commit)
        with RESULTS.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in new)
        rows += new
        print(f"{len(new)} rows added")
    measured = collect(rows)
    PAGE.write_text(page(PAGE.read_text(), measured))
    ALL_RESULTS.write_text(all_results(rows, measured))


if __name__ == "__main__":
    main()
