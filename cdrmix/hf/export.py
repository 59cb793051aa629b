"""Export of a trained model to one checksummed, read-only folder, and reading models back.

The folder holds safetensors, tokenizer.json, config.json, config_snapshot.yaml, README.md (the model
card) and SHA256SUMS, which `sha256sum -c` understands. It appears under its name only after it was
read back and gave the very logits of the model it was made from. Its files are read-only; the folder
itself stays writable for its owner, because without that `rm -rf` of a run would fail.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from cdrmix.config.load import dump_config, load_config
from cdrmix.config.schema import Config
from cdrmix.data.tokenizer import TextTokenizer
from cdrmix.errors import CheckpointError, ConfigError, ExportMismatchError, VocabularyError
from cdrmix.hf.card import model_card
from cdrmix.model.backbone import LanguageModel
from cdrmix.train.checkpoint import newest_whole_checkpoint, read_weights
from cdrmix.train.run import RunFolder, environment

SHARD_BYTES = 5_000_000_000
SUMS = "SHA256SUMS"
PROMPT = "def "


class Loaded(NamedTuple):
    """A model ready to run (evaluation mode, float32), with what belongs to it."""

    model: LanguageModel
    tokenizer: TextTokenizer
    config: Config
    step: int


def load_model(path: str | Path) -> Loaded:
    """The model in a run folder (its newest whole checkpoint), a checkpoint folder or an export folder.

    Of a run that keeps a running average of its weights (train.ema_decay), the average.
    Raises CheckpointError when there is none, or when a file is not what its hash says; VocabularyError when the
    tokenizer beside it has more tokens than the model.
    """
    path = Path(path)
    if (path / SUMS).is_file():
        return load_exported(path)
    checkpoint = final_checkpoint(path)
    run = RunFolder.open(checkpoint.parent.parent, writes=False)
    if not run.tokenizer.is_file():
        raise CheckpointError(f"{run.path}: tokenizer.json is missing, so its model cannot read or write text")
    config = load_config(run.config_snapshot)
    weights = read_weights(checkpoint, average=config.train.ema_decay is not None)
    model = build(config, weights, origin=checkpoint)
    return Loaded(model, _tokenizer(run.tokenizer, config), config, step_of(checkpoint))


def _tokenizer(path: Path, config: Config) -> TextTokenizer:
    tokenizer = TextTokenizer.load(path, config.data.tokenizer.end_of_text)
    if tokenizer.vocab_size > config.model.vocab_size:
        raise VocabularyError(
            f"{path} knows {tokenizer.vocab_size} tokens, but the model's vocabulary has {config.model.vocab_size}"
        )
    return tokenizer


def final_checkpoint(path: Path) -> Path:
    """The checkpoint that `path` means: itself, or the newest whole one of the run folder it is.

    Raises CheckpointError when it is neither.
    """
    if (path / "manifest.json").is_file():
        return path
    if (path / "config_snapshot.yaml").is_file():
        found = newest_whole_checkpoint(path / "checkpoints")
        if found is None:
            raise CheckpointError(f"{path}: no whole checkpoint in {path / 'checkpoints'}")
        return found
    what = "is neither a run folder, a checkpoint nor an exported model" if path.exists() else "does not exist"
    raise CheckpointError(f"{path} {what}")


def step_of(checkpoint: Path) -> int:
    """The step in a checkpoint's name, step-00000500."""
    number = checkpoint.name.rpartition("-")[2]
    if not number.isdigit():
        raise CheckpointError(f"{checkpoint}: expected a folder named step-NNNNNNNN")
    return int(number)


def build(config: Config, weights: Mapping[str, Tensor], *, origin: Path) -> LanguageModel:
    """A LanguageModel with the given weights, in evaluation mode.

    Raises CheckpointError, naming `origin`, when names or shapes do not fit the configuration.
    """
    model = LanguageModel(config.model)
    own = model.state_dict()
    unfit = sorted(own.keys() ^ weights.keys()) or [
        f"{name} {list(weights[name].shape)}" for name in own if own[name].shape != weights[name].shape
    ]
    if unfit:
        raise CheckpointError(f"{origin}: the weights do not fit the configuration: {', '.join(unfit[:4])}")
    model.load_state_dict(dict(weights))
    return model.eval().requires_grad_(False)


def export_model(
    loaded: Loaded,
    target: Path,
    *,
    summary: Mapping[str, Any] | None = None,
    held_out_row: Sequence[int] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Writes the model to `target` and returns it; nothing is left there unless the reading back agreed bit for bit.

    summary: a run's metrics.json, for the figures of the model card.
    held_out_row: token ids that are compared too, besides a fixed prompt.
    Raises ConfigError when `target` exists, ExportMismatchError when the model read back differs.
    """
    if target.exists():
        raise ConfigError(f"{target} exists; an export is never overwritten: name another place, or remove it first")
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        _write(loaded, temporary, summary or {}, shard_bytes)
        _compare(loaded, load_exported(temporary), held_out_row)
        for path in temporary.iterdir():
            path.chmod(0o444)
        os.rename(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return target


def _write(loaded: Loaded, folder: Path, summary: Mapping[str, Any], shard_bytes: int) -> None:
    weights = {name: tensor.contiguous() for name, tensor in loaded.model.state_dict().items()}
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
    (folder / "tokenizer.json").write_bytes(loaded.tokenizer.json_bytes)
    (folder / "config_snapshot.yaml").write_text(dump_config(loaded.config), encoding="utf-8")
    description = {
        "format": "cdrmix",
        "format_version": 1,
        "step": loaded.step,
        "tokenizer_fingerprint": loaded.tokenizer.fingerprint,
        "model": loaded.config.model.model_dump(mode="json"),
        "environment": environment(),
    }
    (folder / "config.json").write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
    stored = sum(tensor.numel() for tensor in weights.values())
    card = model_card(loaded.config, loaded.step, stored, summary)
    (folder / "README.md").write_text(card, encoding="utf-8")
    lines = [f"{sha256(path)}  {path.name}\n" for path in sorted(folder.iterdir())]
    (folder / SUMS).write_text("".join(lines), encoding="utf-8")
    for path in folder.iterdir():
        with path.open("rb") as written:
            os.fsync(written.fileno())


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
        raise ExportMismatchError("the exported tokenizer, read back, cuts the prompt differently")
    vocabulary, length = ours.config.model.vocab_size, ours.config.data.row_length
    rows["a row of scattered tokens"] = [7919 * place % vocabulary for place in range(length)]
    if held_out_row:
        rows["a held-out row"] = list(held_out_row)
    for name, ids in rows.items():
        ids_BT = torch.tensor([ids])
        with torch.no_grad():
            expected, found = (each.model.logits(each.model(ids_BT).hidden_BTD) for each in (ours, theirs))
        if not torch.equal(expected, found):
            worst = (expected - found).abs().max().item()
            raise ExportMismatchError(f"the exported model, read back, gives other logits on {name}: off by {worst:g}")


def load_exported(path: str | Path) -> Loaded:
    """The model in an export folder; every file that is read is checked against SHA256SUMS first.

    Raises CheckpointError naming the file that is missing, unlisted or altered.
    """
    path = Path(path)
    sums = verify(path)
    for name in ("config.json", "config_snapshot.yaml", "tokenizer.json"):
        if name not in sums:
            raise CheckpointError(f"{path / SUMS} does not list {name}: this is not a whole exported model")
    config = load_config(path / "config_snapshot.yaml")
    weights: dict[str, Tensor] = {}
    for name in sorted(name for name in sums if name.endswith(".safetensors")):
        try:
            weights |= load_file(path / name)
        except SafetensorError as error:
            raise CheckpointError(f"{path / name}: not a safetensors file: {error}") from error
    step = json.loads((path / "config.json").read_text(encoding="utf-8"))["step"]
    model = build(config, weights, origin=path)
    return Loaded(model, _tokenizer(path / "tokenizer.json", config), config, step)


def verify(path: Path) -> dict[str, str]:
    """Checks every file of a folder against its SHA256SUMS and returns the hashes by file name.

    Raises CheckpointError naming the first file that is missing or differs, with both hashes.
    """
    try:
        lines = (path / SUMS).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path / SUMS} cannot be read: this is not a whole exported model") from error
    sums: dict[str, str] = {}
    for line in lines:
        expected, _, name = line.partition("  ")
        if len(expected) != 64 or not name or Path(name).name != name:
            raise CheckpointError(f"{path / SUMS}: malformed line {line!r}")
        sums[name] = expected
    for name, expected in sums.items():
        if not (path / name).is_file():
            raise CheckpointError(f"{path / name} is missing, though {SUMS} lists it")
        found = sha256(path / name)
        if found != expected:
            raise CheckpointError(f"{path / name} was altered: its SHA-256 is {found}, {SUMS} says {expected}")
    return sums


def sha256(path: Path) -> str:
    """SHA-256 of a file, as hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
