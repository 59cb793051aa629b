"""The trainer's case of forgetting: what 5 % of the old text keeps of a model that is trained on new text, by seeds."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from cases import Options, Result

from cdrmix.config.schema import Config
from cdrmix.reason.experiments.table import estimate
from cdrmix.workflow import run_all

CONFIGS = Path(__file__).parents[1] / "configs"
BASE, CONTINUED = CONFIGS / "cpt-tiny-base.yaml", CONFIGS / "cpt-tiny.yaml"
OLD, NEW = "python", "cpp"
SEEDS = (4, 5, 6, 7, 8)  # the configurations were tuned with seed 1
NO_REPLAY = f"data.curriculum=[{{until: 1, domains: {{{OLD}: 0, {NEW}: 1}}}}]"


def measure(options: Options) -> Result:
    """How much the bits per byte of the old text rise with replay (ours) and without it (peer), one sample a seed.

    For each seed a model is trained on the old text and continued twice, with equal steps and settings. Its last
    checkpoints are measured. excess_over_half: the rise with replay less half of the rise without it. cost_on_new_text:
    bits per byte of the new text with replay less those without it. Both are means over seeds; `upper` is the upper end
    of the 95 % interval.
    """
    with tempfile.TemporaryDirectory(prefix="cdrmix-benchmark-") as folder:
        common = [f"run.root={folder}", f"run.device={options.device}", f"run.threads={torch.get_num_threads()}"]
        kept, lost, costs = zip(*(rises(seed, common) for seed in SEEDS), strict=True)
    excess = estimate([with_replay - without / 2 for with_replay, without in zip(kept, lost, strict=True)])
    cost = estimate(costs)
    return Result(
        unit="bits/byte",
        peer_name="no replay",
        ours=list(kept),
        peer=list(lost),
        figures={
            "excess_over_half": excess.mean,
            "excess_over_half_upper": excess.high,
            "cost_on_new_text": cost.mean,
            "cost_on_new_text_upper": cost.high,
        },
        settings={"config": CONTINUED.name, "base": BASE.name, "seeds": list(SEEDS), "device": options.device},
        profile={"cost_on_new_text_by_seed": costs, "rise_with_replay": kept, "rise_without": lost},
    )


def rises(seed: int, common: Sequence[str], base_overrides: Sequence[str] = ()) -> tuple[float, float, float]:
    """In bits per byte: the rise on the old text with replay, the rise without it, and the cost on the new text.

    common: overrides of both configurations. base_overrides: further ones of the base.
    """
    common = [*common, f"run.seed={seed}", "export.checkpoint=last"]
    base = run_all(Config.from_yaml(BASE, [*common, *base_overrides])) / "export"
    common += [f"model.path={base}", "model.made_by=null"]
    replay = _changes(Config.from_yaml(CONTINUED, common))
    without = _changes(Config.from_yaml(CONTINUED, [*common, NO_REPLAY]))
    return replay[OLD], without[OLD], replay[NEW] - without[NEW]


def _changes(config: Config) -> dict[str, float]:
    """Held-out bits per byte after the training less those before, by domain."""
    summary = json.loads((run_all(config) / "metrics.json").read_text())
    before, after = summary["held_out_before"]["domains"], summary["held_out"]["domains"]
    return {name: after[name]["bits_per_byte"] - before[name]["bits_per_byte"] for name in after}
