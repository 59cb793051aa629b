"""Trains settings of one configuration side by side, over seeds, and compares their held-out bits per byte.

python benchmarks/recipes.py benchmarks/recipes/core-tiny.yaml --seeds 1 2 3 --equal seconds --out FOLDER

The file names a configuration, by its path in the repository, and settings of it: `config: PATH` and
`settings: {NAME: [OVERRIDE, ...], ...}`. The first of the settings is the reference: `train.steps` is the length of its
runs. With `--equal steps` the others have the lengths of their own `train.steps`. Otherwise they train until they have
cost as much as the reference: as many floating-point operations by the count of `cdrmix plan` (`operations`), or as
much processor time by short runs of all settings before (`seconds`). Every run has one thread and a process of its own,
`--jobs` at once. FOLDER gets runs.jsonl, one line a run. Runs of the same configuration and `--equal` that are in it
are not repeated. It gets bits.png too: held-out bits per byte against tokens and against seconds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib
import yaml
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

from cdrmix.cli.arguments import positive_integer
from cdrmix.config.schema import Config
from cdrmix.data.prepare import prepare
from cdrmix.errors import CdrmixError, ConfigError
from cdrmix.plan.flops import training_flops_per_token
from cdrmix.reason.experiments.table import estimate, table
from cdrmix.records import StepRecord
from cdrmix.run_folder import RunFolder
from cdrmix.training import stage_a
from cdrmix.training.callbacks import Callback

ROOT = Path(__file__).parents[1]
PROBE_STEPS, PROBES = 24, 3
UNCOUNTED = 4  # first steps of a run whose time is not counted: memory is being allocated
COSTS = ("tokens", "operations", "seconds")
ALL_ROWS = 10**9  # more than there are: settings with other vocabularies must be compared on the same text


@dataclass(frozen=True)
class Settings:
    """A configuration by its path, with overrides."""

    name: str
    path: Path
    overrides: tuple[str, ...]

    @property
    def config(self) -> Config:
        """The configuration with the overrides."""
        return Config.from_yaml(self.path, list(self.overrides))


@dataclass(frozen=True)
class Trial:
    """One run to make: settings, the seed and the number of steps, equal to the reference's in `equal`."""

    settings: Settings
    equal: str
    seed: int
    steps: int
    validations: int  # of all held-out rows, evenly spaced; 0: none, not even at the end

    def configuration(self, root: str) -> Config:
        """The configuration of the run, its warm-up in proportion to its length."""
        full = self.settings.config
        warmup = min(self.steps - 1, round(full.train.warmup_steps * self.steps / full.train.steps))
        every = max(1, self.steps // self.validations) if self.validations else self.steps + 1
        return Config.from_yaml(
            self.settings.path,
            [
                *self.settings.overrides,
                f"run.root={root}",
                f"run.seed={self.seed}",
                "run.threads=1",
                f"train.steps={self.steps}",
                f"train.warmup_steps={warmup}",
                f"train.evaluate_every={every}",
                f"train.evaluate_rows={ALL_ROWS}",
                f"train.checkpoint_every={self.steps + 1}",
            ],
        )


@dataclass
class Measured:
    """The result of a run: bits per byte by number of tokens, and what a step costs."""

    equal: str
    name: str
    hash: str  # of the configuration, before the keys of the trial
    seed: int
    steps: int
    tokens: int
    operations: float  # of the whole run, by count
    seconds_per_step: float  # of processor time: the median over the steps
    bits_per_byte: float
    curve: list[tuple[int, float]]

    def per_token(self, cost: str) -> float:
        """What a token costs: 1, its operations, or its seconds of processor time without validations."""
        whole = {
            "tokens": self.tokens,
            "operations": self.operations,
            "seconds": self.seconds_per_step * self.steps,
        }
        return whole[cost] / self.tokens


class Watch(Callback):
    """Takes the processor time of every step, and the validations."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.curve: list[tuple[int, float]] = []
        self._last = time.process_time()

    def on_step(self, step: int) -> None:
        """The time of the step. That with a validation or a checkpoint is longer, which a median leaves out."""
        now = time.process_time()
        self.times.append(now - self._last)
        self._last = now

    def on_record(self, record: Any) -> None:
        """Keeps the bits per byte of a validation."""
        if isinstance(record, StepRecord) and record.valid_bits_per_byte is not None:
            self.curve.append((record.tokens, record.valid_bits_per_byte))


def run(trial: Trial) -> Measured:
    """Trains one run to its end, in this process."""
    with tempfile.TemporaryDirectory() as root:
        config = trial.configuration(root)
        shards = prepare(config, say=lambda _: None)
        watch = Watch()
        result = stage_a.train(config, RunFolder.create(config), shards, console=False, callbacks=[watch])
    if trial.validations:
        assert result.valid_bits_per_byte is not None, "the last step validates"
    tokens = config.train.batch_sizes.before(trial.steps) * config.data.row_length
    return Measured(
        trial.equal,
        trial.settings.name,
        trial.settings.config.hash(),
        trial.seed,
        trial.steps,
        tokens,
        training_flops_per_token(config).executed * tokens,
        statistics.median(watch.times[UNCOUNTED:]),
        result.valid_bits_per_byte or math.nan,
        watch.curve,
    )


def read(path: Path) -> dict[str, Settings]:
    """The settings of a file, by name. Raises ConfigError."""
    try:
        file = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: {error}") from error
    known = isinstance(file, dict) and set(file) == {"config", "settings"} and isinstance(file["config"], str)
    settings = file["settings"] if known else None
    lists = settings.values() if isinstance(settings, dict) else []
    if not settings or not all(isinstance(each, list) and all(isinstance(o, str) for o in each) for each in lists):
        raise ConfigError(
            f"{path}: allowed: two keys, `config: PATH` and `settings: {{NAME: [OVERRIDE, ...], ...}}`, with overrides "
            "as on the command line of cdrmix, in quotes if they have braces"
        )
    found = {str(name): Settings(str(name), ROOT / file["config"], tuple(each)) for name, each in settings.items()}
    for name, each in found.items():
        try:
            _ = each.config
        except ConfigError as error:
            raise ConfigError(f"{path}: settings {name!r}: {error}") from error
    return found


def finished(record: Path, settings: dict[str, Settings], equal: str) -> dict[str, dict[int, Measured]]:
    """The runs of these settings that a file has, by name and seed. A last line that a kill cut off is removed.

    Raises ConfigError.
    """
    hashes = {name: each.config.hash() for name, each in settings.items()}
    results: dict[str, dict[int, Measured]] = defaultdict(dict)
    text = record.read_text() if record.exists() else ""
    if not text.endswith("\n") and text:
        text = text[: text.rfind("\n") + 1]
        record.write_text(text)
    for number, line in enumerate(text.splitlines(), 1):
        try:
            measured = Measured(**json.loads(line))
        except (json.JSONDecodeError, TypeError) as error:
            raise ConfigError(f"{record}:{number}: no run of this program ({error}); give another --out") from error
        if measured.equal == equal and hashes.get(measured.name) == measured.hash:
            results[measured.name][measured.seed] = measured
    return results


def equal_steps(
    settings: dict[str, Settings],
    equal: str,
    pool: ProcessPoolExecutor,
    names: Sequence[str],
    results: dict[str, dict[int, Measured]],
) -> dict[str, int]:
    """The number of steps of each of `names`, so that all cost what the reference's `train.steps` cost.

    Settings that have results keep their number. Raises ConfigError.
    """
    known = {name: next(iter(by_seed.values())).steps for name, by_seed in results.items() if by_seed}
    missing = [name for name in names if name not in known]
    reference, lengths = next(iter(settings)), {name: settings[name].config.train.steps for name in settings}
    if equal == "steps" or not missing:
        return lengths | known
    for name in (reference, *missing):
        if settings[name].config.train.batch_warmup is not None:
            raise ConfigError(f"settings {name!r}: train.batch_warmup is allowed with --equal steps only")
    if equal == "operations":
        costs: dict[str, float] = {}
        for name in (reference, *missing):
            each = settings[name].config
            tokens = each.train.batch_rows * each.data.row_length
            costs[name] = training_flops_per_token(each).executed * tokens
    else:
        trials = [
            Trial(settings[name], equal, 0, PROBE_STEPS, validations=0)
            for _ in range(PROBES)
            for name in dict.fromkeys((reference, *missing))
        ]
        times: dict[str, list[float]] = defaultdict(list)
        for measured in pool.map(run, trials):
            times[measured.name].append(measured.seconds_per_step)
        costs = {name: min(each) for name, each in times.items()}
        print("processor seconds a step:", {name: round(cost, 3) for name, cost in costs.items()})
    whole = lengths[reference] * costs[reference]
    return {name: max(UNCOUNTED + 1, round(whole / cost)) for name, cost in costs.items()} | known


def reaches(curve: Sequence[tuple[float, float]], bits: float) -> float:
    """Where a falling curve first reaches so few bits, interpolated; infinity if it does not.

    The first point stands for all before it, which are not known.
    """
    if curve and curve[0][1] <= bits:
        return curve[0][0]
    for (before, high), (after, low) in itertools.pairwise(curve):
        if low <= bits:
            return before + (after - before) * (high - bits) / (high - low)
    return math.inf


def comparison(results: dict[str, dict[int, Measured]], reference: str) -> list[str]:
    """Lines of a table, a row for each of the settings: bits per byte, the difference to the reference paired by seed,
    and the shares of the reference's tokens, operations and seconds until they have its last bits per byte."""
    base = results[reference]
    head = ["settings", "steps", "bits per byte by seed", "mean", "minus the reference's", *COSTS]
    rows = [head]
    for name, by_seed in results.items():
        bits = [measured.bits_per_byte for measured in by_seed.values()]
        row = [name, str(next(iter(by_seed.values())).steps), ", ".join(f"{each:.3f}" for each in bits)]
        row.append(f"{statistics.mean(bits):.3f}")
        pairs = [(measured, base[seed]) for seed, measured in by_seed.items() if seed in base]
        if name != reference and pairs:
            row.append(str(estimate([ours.bits_per_byte - other.bits_per_byte for ours, other in pairs])))
            shares = [reaches(ours.curve, other.bits_per_byte) / other.tokens for ours, other in pairs]
            for cost in COSTS:
                ours, other = (
                    statistics.median(each.per_token(cost) for each in side.values()) for side in (by_seed, base)
                )
                values = [share * ours / other for share in shares]
                row.append(str(estimate(values)) if max(values) < math.inf else "not reached")
        rows.append(row + [""] * (len(head) - len(row)))
    return table(rows)


def picture(results: dict[str, dict[int, Measured]], path: Path) -> None:
    """Held-out bits per byte against tokens and against processor seconds; a line a run, a colour for the settings."""
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    colours = matplotlib.colormaps["tab10"]
    lowest = min(measured.bits_per_byte for by_seed in results.values() for measured in by_seed.values())
    for number, (name, by_seed) in enumerate(results.items()):
        cost = statistics.median(each.per_token("seconds") for each in by_seed.values())
        for order, measured in enumerate(by_seed.values()):
            tokens, bits = zip(*measured.curve, strict=True)
            for axis, scale in zip(axes, (1e-6, cost), strict=True):
                label = name if order == 0 else None
                axis.plot([scale * each for each in tokens], bits, color=colours(number), linewidth=1.2, label=label)
    for axis, label in zip(axes, ("million tokens", "seconds of processor time, one thread"), strict=True):
        axis.set_yscale("log")
        axis.set_ylim(0.98 * lowest, 1.9 * lowest)
        axis.yaxis.set_major_formatter(StrMethodFormatter("{x:.1f}"))
        axis.yaxis.set_minor_formatter(StrMethodFormatter("{x:.1f}"))
        axis.set_xlabel(label)
        axis.grid(alpha=0.3, which="both")
    axes[0].set_ylabel("held-out bits per byte")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    figure.savefig(path, dpi=110)


def compare(arguments: argparse.Namespace) -> None:
    """Makes the runs that are missing, and prints the table. Raises ConfigError."""
    settings = read(arguments.file)
    reference, names = next(iter(settings)), arguments.only or list(settings)
    if unknown := {*names, *(arguments.plot or [])} - set(settings):
        raise ConfigError(
            f"{arguments.file} has no settings named {', '.join(sorted(unknown))}: it has {', '.join(settings)}"
        )
    arguments.out.mkdir(parents=True, exist_ok=True)
    record = arguments.out / "runs.jsonl"
    results = finished(record, settings, arguments.equal)
    for name in names:  # here, one after another: two runs at once would prepare the same shards
        prepare(settings[name].config)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.jobs, mp_context=context, max_tasks_per_child=1) as pool:
        missing = [(name, seed) for seed in arguments.seeds for name in names if seed not in results[name]]
        steps = equal_steps(settings, arguments.equal, pool, sorted({name for name, _ in missing}), results)
        runs = [
            pool.submit(run, Trial(settings[name], arguments.equal, seed, steps[name], arguments.validations))
            for name, seed in missing
        ]
        for each in as_completed(runs):
            if each.exception() is not None:  # raised below, when the other runs are in the file
                continue
            measured = each.result()
            results[measured.name][measured.seed] = measured
            with record.open("a") as lines:
                lines.write(json.dumps(asdict(measured)) + "\n")
            print(f"{measured.name}, seed {measured.seed}: {measured.bits_per_byte:.4f} bits per byte", flush=True)
        for each in runs:
            each.result()
    shown = {name: dict(sorted(results[name].items())) for name in settings if results[name]}
    print("\n".join(comparison(shown, reference) if reference in shown else []))
    plotted = {name: by_seed for name, by_seed in shown.items() if name in (arguments.plot or shown)}
    if plotted:
        picture(plotted, arguments.out / "bits.png")


def main() -> None:
    """Reads the arguments. An error that the user can correct is one message, with exit code 2."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--equal", choices=["steps", "operations", "seconds"], default="steps")
    text = "of each run on all held-out text, evenly spaced"
    parser.add_argument("--validations", type=positive_integer, default=8, help=text)
    parser.add_argument("--jobs", type=positive_integer, default=2, help="runs at once, one thread each")
    parser.add_argument("--only", action="append", help="train only the settings of this name; may be repeated")
    parser.add_argument("--plot", action="append", help="settings that the picture shows; may be repeated")
    parser.add_argument("--out", type=Path, required=True)
    try:
        compare(parser.parse_args())
    except CdrmixError as error:
        parser.exit(error.exit_code, f"recipes.py: error: {error}\n")


if __name__ == "__main__":
    main()
