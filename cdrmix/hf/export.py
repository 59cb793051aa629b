"""Exports a trained model to a read-only folder with checksums.

The folder has safetensors, the tokenizer, config.json, config_snapshot.yaml, README.md (the model card), the other
files that transformers reads (transformers_files.py), and SHA256SUMS, which `sha256sum -c` reads. The export gets its
final name only after it was read back and gave exactly the logits of the original. The files are read-only. The folder
is writable by its owner; otherwise `rm -rf` of a run fails.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from cdrmix.data.tokenizer_files import STORED
from cdrmix.durable import disk_guard, is_disk_full, remove_remains, sha256_file, sync_file, sync_folder
from cdrmix.errors import ConfigError, ExportMismatchError
from cdrmix.hf.card import model_card
from cdrmix.hf.transformers_files import config_keys, text_files
from cdrmix.inference.load import ABOUT, RUN_TOKENIZER, SUMS, Loaded, load_exported
from cdrmix.json_text import parse_json
from cdrmix.run_folder import environment

SHARD_BYTES = 5_000_000_000
PROMPT = "def "


def export_model(
    loaded: Loaded,
    target: Path,
    *,
    summary: Mapping[str, Any] | None = None,
    held_out_row: Sequence[int] | None = None,
    shard_bytes: int = SHARD_BYTES,
    replace: bool = False,
    attachments: Sequence[Path] = (),
) -> Path:
    """Writes the model to `target` and returns `target`. It appears only if the model that is read back agrees.

    summary: metrics.json of the run, for the results in the model card. Results of another step are omitted.
    held_out_row: token ids to compare, in addition to a fixed prompt.
    replace: replace an older export when the new one is complete. attachments: files to add to the folder.
    The further depths of model.prediction are left out, unless export.prediction_heads of the configuration keeps them.
    Raises ConfigError if `target` exists and replace is False, ExportMismatchError if the model that is read back
    differs, DiskFullError.
    """
    if loaded.config.export.prediction_heads == "drop":
        loaded = _without_prediction(loaded)

    def write(folder: Path) -> None:
        _write(loaded, folder, summary or {}, shard_bytes)
        _compare(loaded, load_exported(folder), held_out_row)

    return publish(target, write, replace=replace, attachments=attachments)


def _without_prediction(loaded: Loaded) -> Loaded:
    """The model that predicts the next token alone; it shares the weights."""
    section = loaded.config.cdrmix_model
    if section.prediction is None:
        return loaded
    section = section.model_copy(update={"prediction": None})
    model = copy.copy(loaded.model)
    model._modules = {**model._modules}
    model.config, model.prediction = section, None
    return loaded._replace(model=model, config=loaded.config.model_copy(update={"model": section}))


def publish(
    target: Path, write: Callable[[Path], None], *, replace: bool = False, attachments: Sequence[Path] = ()
) -> Path:
    """Makes the folder `target` by `write`, which gets a temporary folder; it appears when that has returned.

    replace: replace an older folder then. attachments: files to add before. Raises ConfigError if `target` exists and
    replace is False and for a path that cannot be written, DiskFullError, and what `write` raises.
    """
    if target.exists() and not replace:
        raise ConfigError(f"{target} exists; an export is never overwritten: choose another path, or remove it first")
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    with disk_guard(
        f"the export {target}", "The incomplete export was removed. Free some space, or choose a path on another disk."
    ):
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            remove_remains(target)
            temporary.mkdir()
        except OSError as error:
            if is_disk_full(error):
                raise
            raise ConfigError(f"cannot write the export {target}: {error.strerror}; choose another path") from error
        try:
            for path in attachments:
                shutil.copyfile(path, temporary / path.name)
            write(temporary)
            for path in temporary.iterdir():
                path.chmod(0o444)
            if target.exists():
                shutil.rmtree(target)
            os.rename(temporary, target)
            sync_folder(target.parent)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    return target


def exported_step(path: Path) -> int | None:
    """The step of an exported model; None if the file that has it is missing or damaged."""
    name = ABOUT if (path / ABOUT).is_file() else "config.json"
    try:
        step = parse_json((path / name).read_text(encoding="utf-8"))["step"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return step if isinstance(step, int) else None


def _write(loaded: Loaded, folder: Path, summary: Mapping[str, Any], shard_bytes: int) -> None:
    weights = {name: tensor.contiguous() for name, tensor in loaded.weights.items()}
    groups = _shards(weights, shard_bytes)
    names = ["model.safetensors"]
    if len(groups) > 1:
        names = [f"model-{number:05d}-of-{len(groups):05d}.safetensors" for number in range(1, len(groups) + 1)]
        index = {
            "metadata": {"total_size": sum(tensor.nbytes for tensor in weights.values())},
            "weight_map": {name: file for file, group in zip(names, groups, strict=True) for name in group},
        }
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    for file, group in zip(names, groups, strict=True):
        save_file({name: weights[name] for name in group}, folder / file, metadata={"format": "pt"})
    (folder / RUN_TOKENIZER).write_bytes(loaded.tokenizer.json_bytes)
    if settings := loaded.tokenizer.settings(loaded.config.data.tokenizer.end_of_text):
        (folder / STORED).write_bytes(settings)
    (folder / "config_snapshot.yaml").write_text(loaded.config.to_yaml(), encoding="utf-8")
    description = {
        "format": "cdrmix",
        "format_version": 1,
        "step": loaded.step,
        "tokenizer_fingerprint": loaded.tokenizer.fingerprint,
        **config_keys(loaded),
        "model": loaded.config.cdrmix_model.model_dump(mode="json"),
        "environment": environment(),
    }
    (folder / "config.json").write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
    for name, text in text_files(loaded).items():
        (folder / name).write_text(text, encoding="utf-8")
    stored = sum(tensor.numel() for tensor in weights.values())
    card = model_card(loaded.config, loaded.step, stored, summary, heads=bool(loaded.heads))
    (folder / "README.md").write_text(card, encoding="utf-8")
    write_sums(folder)


def write_sums(folder: Path) -> None:
    """Writes SHA256SUMS of all files of a folder, and waits until the disk has them."""
    lines = [f"{sha256_file(path)}  {path.name}\n" for path in sorted(folder.iterdir())]
    (folder / SUMS).write_text("".join(lines), encoding="utf-8")
    for path in folder.iterdir():
        sync_file(path)
    sync_folder(folder)


def _shards(weights: Mapping[str, Tensor], limit: int) -> list[list[str]]:
    groups: list[list[str]] = [[]]
    size = 0
    for name, tensor in weights.items():
        if groups[-1] and size + tensor.nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += tensor.nbytes
    return groups


def _compare(ours: Loaded, theirs: Loaded, held_out_row: Sequence[int] | None) -> None:
    rows = {"the prompt": ours.tokenizer.encode(PROMPT)}
    if theirs.tokenizer.encode(PROMPT) != rows["the prompt"]:
        raise ExportMismatchError("the exported tokenizer gives other tokens for the prompt than the original")
    device = ours.model.embedding.weight.device
    theirs.model.to(device)
    vocabulary, length = ours.config.model.vocab_size, ours.config.data.row_length
    rows["a row of scattered tokens"] = [7919 * position % vocabulary for position in range(length)]
    if held_out_row:
        rows["a held-out row"] = list(held_out_row)
    for name, ids in rows.items():
        ids_BT = torch.tensor([ids], device=device)
        with torch.no_grad():
            expected, actual = (each.model.logits(each.model(ids_BT).hidden_BTD) for each in (ours, theirs))
        if not torch.equal(expected, actual):
            worst = (expected - actual).abs().max().item()
            raise ExportMismatchError(
                f"the exported model gives other logits on {name} than the original; largest difference: {worst:g}"
            )
