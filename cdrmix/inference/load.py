"""Trained models read back: from a run, a checkpoint or an export folder, verified, without the trainer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from cdrmix.config.load import load_config
from cdrmix.config.schema import Config
from cdrmix.data.tokenizer import TextTokenizer
from cdrmix.durable import sha256_file
from cdrmix.errors import CheckpointError, VocabularyError
from cdrmix.inference.checkpoints import has_average, list_checkpoints, read_weights, state_dict_mismatch, step_of
from cdrmix.model.language_model import LanguageModel
from cdrmix.run_folder import RunFolder

SUMS = "SHA256SUMS"
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

    Of a checkpoint that holds a running average of the weights (train.ema_decay; stage B's hold none), the average.
    device: where the model is to be, the CPU by default.
    Raises CheckpointError when there is none, or when a file is not what its hash says; VocabularyError when the
    tokenizer beside it has more tokens than the model.
    """
    path = Path(path)
    if path.name in ("latest", "best") and path.is_file():  # in checkpoints/: they name one
        path = path.with_name(path.read_text(encoding="utf-8").strip())
    if (path / SUMS).is_file():
        loaded = load_exported(path)
    else:
        run = run_of(path)
        config = load_config(run.config_snapshot)
        checkpoint, weights = final_weights(path, average=True)
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
    """The checkpoint that `path` means, and its weights or (`average`) their running average if it has one, on the CPU.

    path: a checkpoint, or a run folder, of which the newest checkpoint whose weights are whole. Only what is read is
    verified: not the optimizer's state, which is twice as large.
    Raises CheckpointError when there is none, with the reason for the newest.
    """
    if (path / "manifest.json").is_file():
        return path, read_weights(path, average=average and has_average(path))
    folder = run_of(path).checkpoints
    problems: list[str] = []
    for checkpoint in reversed(list_checkpoints(folder)):
        try:
            return checkpoint, read_weights(checkpoint, average=average and has_average(checkpoint))
        except CheckpointError as error:
            problems.append(str(error))
    raise CheckpointError(f"{path}: no whole checkpoint in {folder}" + (f": {problems[0]}" if problems else ""))


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
    problem = state_dict_mismatch(weights, {name: tensor.shape for name, tensor in model.state_dict().items()})
    if problem is not None:
        raise CheckpointError(f"{origin}: the weights do not fit the configuration: it {problem}")
    model.load_state_dict(weights)
    return model.eval().requires_grad_(False), heads


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
