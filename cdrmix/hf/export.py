"""Export of a trained model to one checksummed, read-only folder, and reading models back.

The folder holds safetensors, tokenizer.json, config.json, config_snapshot.yaml, README.md (the model
card) and SHA256SUMS, which `sha256sum -c` understands. It appears under its name only after it was
read back and gave the very logits of the model it was made from. Its files are read-only; the folder
itself stays writable for its owner, because without that `rm -rf` of a run would fail.
"""

from __future__ import annotations

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
from cdrmix.durable import disk_guard, sha256_file, sync_file, sync_folder
from cdrmix.errors import CheckpointError, ConfigError, ExportMismatchError, VocabularyError
from cdrmix.hf.card import model_card
from cdrmix.model.language_model import LanguageModel
from cdrmix.train.checkpoint import list_checkpoints, misfit, read_weights
from cdrmix.train.run_folder import RunFolder, environment

SHARD_BYTES = 5_000_000_000
SUMS = "SHA256SUMS"
PROMPT = "def "
HEADS = ("controller", "operations", "summary")  # what stage B has beside a language model, by its first word


class Loaded(NamedTuple):
    """A model ready to run (evaluation mode, float32), with what belongs to it. heads: stage B's, by name."""

    model: LanguageModel
    tokenizer: TextTokenizer
    config: Config
    step: int
    heads: Mapping[str, Tensor] = {}

    @property
    def weights(self) -> dict[str, Tensor]:
        """Everything that is kept of it, by name."""
        return {**self.model.state_dict(), **self.heads}


def load_model(path: str | Path, device: torch.device | None = None) -> Loaded:
    """The model in a run folder (of its newest checkpoint with whole weights), a checkpoint or an export folder.

    Of a run that keeps a running average of its weights (train.ema_decay), the average. device: where the model is
    to be, the CPU by default.
    Raises CheckpointError when there is none, or when a file is not what its hash says; VocabularyError when the
    tokenizer beside it has more tokens than the model.
    """
    path = Path(path)
    if (path / SUMS).is_file():
        loaded = load_exported(path)
    else:
        run = run_of(path)
        config = load_config(run.config_snapshot)
        checkpoint, weights = final_weights(path, average=config.train.ema_decay is not None)
        if not run.tokenizer.is_file():
            raise CheckpointError(f"{run.path}: tokenizer.json is missing, so its model cannot read or write text")
        model, heads = build(config, weights, origin=checkpoint)
        loaded = Loaded(model, _tokenizer(run.tokenizer, config), config, step_of(checkpoint), heads)
    return loaded if device is None else loaded._replace(model=loaded.model.to(device))


def _tokenizer(path: Path, config: Config) -> TextTokenizer:
    tokenizer = TextTokenizer.load(path, config.data.tokenizer.end_of_text)
    if tokenizer.vocab_size > config.model.vocab_size:
        raise VocabularyError(
            f"{path} knows {tokenizer.vocab_size} tokens, but the model's vocabulary has {config.model.vocab_size}"
        )
    return tokenizer


def run_of(path: Path) -> RunFolder:
    """The run folder that `path` is, or that the checkpoint at `path` lies in, for reading.

    Raises CheckpointError when it is neither.
    """
    if (path / "manifest.json").is_file():
        path = path.resolve().parent.parent
    elif not (path / "config_snapshot.yaml").is_file():
        what = "is neither a run folder, a checkpoint nor an exported model" if path.exists() else "does not exist"
        raise CheckpointError(f"{path} {what}")
    return RunFolder.open(path, writes=False)


def final_weights(path: Path, *, average: bool = False) -> tuple[Path, dict[str, Tensor]]:
    """The checkpoint that `path` means, and its weights or their running average, on the CPU.

    path: a checkpoint, or a run folder, of which the newest checkpoint whose weights are whole. Only what is read is
    verified: not the optimizer's state, which is twice as large.
    Raises CheckpointError when there is none, with the reason for the newest.
    """
    if (path / "manifest.json").is_file():
        return path, read_weights(path, average=average)
    folder = run_of(path).checkpoints
    problems: list[str] = []
    for checkpoint in reversed(list_checkpoints(folder)):
        try:
            return checkpoint, read_weights(checkpoint, average=average)
        except CheckpointError as error:
            problems.append(str(error))
    raise CheckpointError(f"{path}: no whole checkpoint in {folder}" + (f": {problems[0]}" if problems else ""))


def step_of(checkpoint: Path) -> int:
    """The step in a checkpoint's name, step-00000500."""
    number = checkpoint.name.rpartition("-")[2]
    if not number.isdigit():
        raise CheckpointError(f"{checkpoint}: expected a folder named step-NNNNNNNN")
    return int(number)


def backbone_weights(path: Path, config: Config, tokenizer: Path) -> dict[str, Tensor]:
    """The weights of a trained model that stage B is to begin with (reasoning.backbone): a run, checkpoint or export.

    tokenizer: the run's, which must be the backbone's. Raises CheckpointError and VocabularyError.
    """
    loaded = load_model(path)
    ours = TextTokenizer.load(tokenizer, config.data.tokenizer.end_of_text)
    if ours.fingerprint != loaded.tokenizer.fingerprint:
        raise VocabularyError(
            f"reasoning.backbone: {path} was trained with another tokenizer ({loaded.tokenizer.fingerprint[:12]}) than "
            f"this run's text is cut by ({ours.fingerprint[:12]}): set data.tokenizer.path to the tokenizer.json there"
        )
    return loaded.weights


def build(config: Config, weights: Mapping[str, Tensor], *, origin: Path) -> tuple[LanguageModel, dict[str, Tensor]]:
    """A LanguageModel with the given weights, in evaluation mode; and the weights of stage B's heads among them.

    It has plastic adapters if the weights have: a reasoning run's model of stage A has none yet.
    Raises CheckpointError, naming `origin`, when names or shapes do not fit the configuration.
    """
    heads = {name: tensor for name, tensor in weights.items() if name.split(".")[0] in HEADS}
    weights = {name: tensor for name, tensor in weights.items() if name not in heads}
    plastic = any(".plastic." in name for name in weights)
    model = LanguageModel(config.model, reasoning=config.reasoning if plastic else None)
    problem = misfit(weights, {name: tensor.shape for name, tensor in model.state_dict().items()})
    if problem is not None:
        raise CheckpointError(f"{origin}: the weights do not fit the configuration: it {problem}")
    model.load_state_dict(weights)
    return model.eval().requires_grad_(False), heads


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
    """Writes the model to `target` and returns it; nothing is left there unless the reading back agreed bit for bit.

    summary: a run's metrics.json, for the figures of the model card, if they are of this step.
    held_out_row: token ids that are compared too, besides a fixed prompt.
    replace: puts the model in the place of an older export, once it is whole. attachments: files that go with it.
    Raises ConfigError when `target` exists and is not to be replaced, ExportMismatchError when the model read back
    differs, DiskFullError.
    """
    if target.exists() and not replace:
        raise ConfigError(f"{target} exists; an export is never overwritten: name another place, or remove it first")
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    with disk_guard(f"the export {target}", "Nothing of it is left. Free some space, or name a place on another disk."):
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_remains(target)
        temporary.mkdir()
        try:
            for path in attachments:
                shutil.copyfile(path, temporary / path.name)
            _write(loaded, temporary, summary or {}, shard_bytes)
            _compare(loaded, load_exported(temporary), held_out_row)
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
    """The step of the model in an export folder, as its config.json has it; None when that is missing or damaged."""
    try:
        step = json.loads((path / "config.json").read_text(encoding="utf-8"))["step"]
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
        raise ExportMismatchError("the exported tokenizer, read back, cuts the prompt differently")
    device = ours.model.embedding.weight.device
    theirs.model.to(device)
    vocabulary, length = ours.config.model.vocab_size, ours.config.data.row_length
    rows["a row of scattered tokens"] = [7919 * place % vocabulary for place in range(length)]
    if held_out_row:
        rows["a held-out row"] = list(held_out_row)
    for name, ids in rows.items():
        ids_BT = torch.tensor([ids], device=device)
        with torch.no_grad():
            expected, found = (each.model.logits(each.model(ids_BT).hidden_BTD) for each in (ours, theirs))
        if not torch.equal(expected, found):
            worst = (expected - found).abs().max().item()
            raise ExportMismatchError(f"the exported model, read back, gives other logits on {name}: off by {worst:g}")


def _remove_remains(target: Path) -> None:
    """Removes what exports to the same target left when they were killed; a live process's folder stays."""
    for remains in target.parent.glob(f".{target.name}.*.tmp"):
        process = remains.name.split(".")[-2]
        if process == str(os.getpid()) or not Path(f"/proc/{process}").exists():
            shutil.rmtree(remains, ignore_errors=True)


def load_exported(path: str | Path) -> Loaded:
    """The model in an export folder; every file is checked against SHA256SUMS first, and none is read that it lacks.

    Raises CheckpointError naming the file that is missing or altered, or that a model needs and SHA256SUMS lacks.
    """
    path = Path(path)
    sums = verify(path)
    for name in ("config.json", "config_snapshot.yaml", "tokenizer.json"):
        if name not in sums:
            raise CheckpointError(f"{path / SUMS} does not list {name}: this is not a whole exported model")
    config = load_config(path / "config_snapshot.yaml")
    weights: dict[str, Tensor] = {}
    for name in sorted(name for name in sums if name.startswith("model") and name.endswith(".safetensors")):
        try:
            weights |= load_file(path / name)
        except SafetensorError as error:
            raise CheckpointError(f"{path / name}: not a safetensors file: {error}") from error
    step = json.loads((path / "config.json").read_text(encoding="utf-8"))["step"]
    model, heads = build(config, weights, origin=path)
    return Loaded(model, _tokenizer(path / "tokenizer.json", config), config, step, heads)


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
        found = sha256_file(path / name)
        if found != expected:
            raise CheckpointError(f"{path / name} was altered: its SHA-256 is {found}, {SUMS} says {expected}")
    return sums
