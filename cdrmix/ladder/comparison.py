"""The comparison of rungs: parameters, operations, tokens, memory, learning rate, batch and hours on a GPU, as a table.

All figures are computed by cdrmix.plan from the configurations, so that they are those of `cdrmix params` and `cdrmix
plan`.
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cdrmix.config.schema import Config
from cdrmix.errors import ConfigError
from cdrmix.gpus import Gpu
from cdrmix.plan.flops import training_flops_per_token
from cdrmix.plan.parameters import count_parameters, nominal
from cdrmix.units import amount

FOLDER = Path("configs/ladder")
RUNG_FAMILIES = ("dense", "hybrid", "micro")
BYTES_PER_PARAMETER = 16  # float32 weights, gradients and the two moments of AdamW


@dataclass(frozen=True)
class RungFigures:
    """What a rung is and costs.

    nominal: the number in its name, if model.size names it. flops_per_token: of forward and backward pass, without
    recomputation. compute: flops_per_token * tokens. state_bytes: 16 for each stored parameter, without activations.
    row_length, batch_tokens: of a row, and of a step. hours: of one GPU, by the operations without recomputation, as
    MFU counts them.
    """

    name: str
    nominal: int | None
    parameters: int
    active_parameters: int
    row_length: int
    flops_per_token: int
    tokens: int
    compute: float
    state_bytes: int
    learning_rate: float
    batch_tokens: int
    steps: int
    hours: float


def figures_of(config: Config, gpu: Gpu, share: float) -> RungFigures:
    """The figures of a configuration. share: MFU, the share of the GPU's bf16 peak."""
    model = config.cdrmix_model
    count, train = count_parameters(model), config.train
    batch_tokens = train.batch_rows * config.data.row_length
    tokens = train.batch_sizes.before(train.steps) * config.data.row_length
    flops = training_flops_per_token(config)
    return RungFigures(
        name=config.run.name,
        nominal=None if model.size is None else nominal(model.size),
        parameters=count.total_stored,
        active_parameters=count.total_active,
        row_length=config.data.row_length,
        flops_per_token=flops.total,
        tokens=tokens,
        compute=float(flops.total) * tokens,
        state_bytes=BYTES_PER_PARAMETER * count.total_stored,
        learning_rate=train.learning_rate,
        batch_tokens=batch_tokens,
        steps=train.steps,
        hours=flops.total * tokens / (share * gpu.flops_per_second) / 3600,
    )


def rung_files(families: Iterable[str]) -> list[Path]:
    """The rungs of families in configs/ladder, below the working directory.

    Raises ConfigError if there are none: an installed package has no configurations.
    """
    found = []
    for family in families:
        files = sorted(FOLDER.glob(f"{family}-*.yaml"))
        if not files:
            raise ConfigError(
                f"no files {FOLDER}/{family}-*.yaml here: run the command in a checkout of cdrmix, or name "
                "configurations with --config"
            )
        found += files
    return found


def compare(files: Sequence[Path], overrides: Sequence[str], gpu: Gpu, share: float) -> list[RungFigures]:
    """The figures of each file, by family and then by parameters. overrides: `key=value`, of every file."""
    rungs = [figures_of(Config.from_yaml(path, overrides), gpu, share) for path in files]
    families = list(dict.fromkeys(_family(rung) for rung in rungs))
    return sorted(rungs, key=lambda rung: (families.index(_family(rung)), rung.parameters))


def _family(rung: RungFigures) -> str:
    return rung.name.partition("-")[0]


def comparison_table(rungs: Sequence[RungFigures], gpu: Gpu, share: float) -> str:
    """The figures as a table, with the meaning of the columns below it."""
    heads = (
        "rung",
        "parameters",
        "active",
        "row",
        "GFLOP/token",
        "tokens",
        "FLOP",
        "GB",
        "rate",
        "batch",
        "steps",
        "hours",
    )
    lines = [heads, *(_cells(rung) for rung in rungs)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(heads))]
    rows = []
    for name, *figures in lines:
        cells = [figure.rjust(width) for figure, width in zip(figures, widths[1:], strict=True)]
        rows.append("  ".join([name.ljust(widths[0]), *cells]))
    note = (
        f"FLOP: of forward and backward pass. GB: {BYTES_PER_PARAMETER} bytes a parameter, without activations "
        "(`cdrmix plan` has these). rate: peak learning rate. batch: tokens of a step. hours: of one "
        f"{gpu.names[0]} with an MFU of {share:g}, which is assumed."
    )
    return "\n".join([*rows, "", *textwrap.wrap(note, 100)])


def _cells(rung: RungFigures) -> tuple[str, ...]:
    return (
        rung.name,
        amount(rung.parameters),
        amount(rung.active_parameters),
        f"{rung.row_length}",
        f"{rung.flops_per_token / 1e9:.3g}",
        amount(rung.tokens),
        f"{rung.compute:.1e}".replace("e+", "e"),
        f"{rung.state_bytes / 1e9:.3g}",
        f"{rung.learning_rate:.2e}".replace("e-0", "e-"),
        amount(rung.batch_tokens),
        f"{rung.steps}",
        f"{rung.hours:,.1f}" if rung.hours < 100 else f"{rung.hours:,.0f}",
    )


def comparison_json(rungs: Sequence[RungFigures], gpu: Gpu, share: float) -> dict[str, Any]:
    """The figures as plain data."""
    return {"gpu": gpu.key, "share_of_peak": share, "rungs": [dataclasses.asdict(rung) for rung in rungs]}
