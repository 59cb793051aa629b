"""Exports adapters (LoRA) to a folder that peft opens by itself, with checksums and a model card."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cdrmix.hf.adapters import not_quantized, write_adapters
from cdrmix.hf.card import adapter_card
from cdrmix.hf.export import publish, write_sums
from cdrmix.hf.export_foreign import check_same_logits, write_companions
from cdrmix.hf.foreign import base_model, quiet, section_of
from cdrmix.hf.load import LoadedForeign

TOLERANCE = 1e-4  # largest root mean square of the difference of logits, in standard deviations: rounding alone


def export_adapters(
    loaded: LoadedForeign,
    target: Path,
    *,
    summary: Mapping[str, Any] | None = None,
    held_out_row: Sequence[int] | None = None,
    replace: bool = False,
) -> Path:
    """Writes the adapters of a model to `target` and returns `target`. It appears only if peft reads them back alike.

    The base is loaded once more for that. Arguments as of `export_foreign`.
    Raises ConfigError if `target` exists and replace is False, ExportMismatchError if the base with the adapters that
    peft reads back gives other logits than the merged model, DiskFullError.
    """

    def write(folder: Path) -> None:
        _write(loaded, folder, summary or {})
        _compare(loaded, folder, held_out_row)

    return publish(target, write, replace=replace)


def _write(loaded: LoadedForeign, folder: Path, summary: Mapping[str, Any]) -> None:
    model: Any = loaded.model.transformers_model
    section = section_of(loaded.config)
    assert section.lora is not None
    write_adapters(model, section.lora, loaded.adapters, section.path, folder)
    write_companions(loaded, folder, {"base_sha256": loaded.base})
    stored = sum(tensor.numel() for tensor in loaded.adapters.values())
    unquantized = sorted({name.rpartition(".")[2] for name in not_quantized(model)})
    card = adapter_card(loaded.config, model.config.model_type, loaded.step, stored, unquantized, summary)
    (folder / "README.md").write_text(card, encoding="utf-8")
    write_sums(folder)


def _compare(ours: LoadedForeign, folder: Path, held_out_row: Sequence[int] | None) -> None:
    """Raises ExportMismatchError if the base with the adapters that peft reads gives other logits."""
    import peft

    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers by an old name
        theirs = peft.PeftModel.from_pretrained(base_model(ours.config), str(folder))
    what = "the base with the exported adapters"
    check_same_logits(ours, theirs, held_out_row, tolerance=TOLERANCE, what=what)
