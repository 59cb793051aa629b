"""Loads trained models from a run, checkpoint or export folder. Verifies the files and does not import the trainer."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Container, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from cdrmix.config.schema import Config
from cdrmix.data.tokenizer import TextTokenizer
from cdrmix.durable import sha256_file
from cdrmix.errors import CdrmixWarning, CheckpointError, VocabularyError
from cdrmix.inference.checkpoints import (
    MANIFEST,
    has_average,
    list_checkpoints,
    named_checkpoint,
    not_finite,
    read_weights,
    state_dict_mismatch,
    step_of,
    type_mismatch,
)
from cdrmix.inference.choice import SUMS as SUMS
from cdrmix.inference.rwkv_files import check_model, is_weights_file, read_rwkv7
from cdrmix.json_text import parse_json
from cdrmix.model.causal import CausalModel
from cdrmix.model.language_model import LanguageModel
from cdrmix.model.loss import LossModel, LossModule
from cdrmix.run_folder import RunFolder

RUN_TOKENIZER = "tokenizer_cdrmix.json"  # of an export: the tokenizer.json of the run, byte for byte
ABOUT = "cdrmix.json"  # of an exported model of transformers, whose config.json is that of transformers: its step
CHAT_TEMPLATE = "chat_template.jinja"  # the name that transformers gives it too
HEADS = ("controller", "operations", "summary")  # first component of the names of the weights that stage B adds


class Trained(Protocol):
    """A model in evaluation mode with its tokenizer and configuration, of this package or of transformers."""

    @property
    def model(self) -> CausalModel: ...
    @property
    def tokenizer(self) -> TextTokenizer: ...
    @property
    def config(self) -> Config: ...
    @property
    def step(self) -> int: ...
    def loss_model(self) -> LossModule:
        """The model with its loss."""


class Loaded(NamedTuple):
    """A model in evaluation mode (float32) with its tokenizer and configuration. heads: weights of stage B.

    chat_template: the Jinja template that writes a conversation as text, in a run or export folder; None without one.
    """

    model: LanguageModel
    tokenizer: TextTokenizer
    config: Config
    step: int
    heads: Mapping[str, Tensor] = {}
    chat_template: str | None = None

    @property
    def weights(self) -> dict[str, Tensor]:
        """All weights by name, including those of stage B."""
        return {**self.model.state_dict(), **self.heads}

    def loss_model(self) -> LossModule:
        """The model with its loss."""
        return LossModel(self.model)


def load_model(path: str | Path, device: torch.device | None = None) -> Loaded:
    """Loads the model of a checkpoint, an export folder, or a run folder (its newest checkpoint with valid weights).

    If the run has a running average of the weights (train.ema_decay), the average is loaded. device: the CPU by
    default.
    Raises CheckpointError if there is no model or a file does not match its hash; VocabularyError if the tokenizer has
    more tokens than the model.
    """
    path = pointed_checkpoint(Path(path))
    if (path / SUMS).is_file():
        loaded = load_exported(path)
    else:
        run = run_of(path)
        config = Config.from_yaml(run.config_snapshot)
        checkpoint, weights = final_weights(path, average=True)
        tokenizer, template = run_tokenizer(run, config), _chat_template(run.path)
        model, heads = build(config, weights, origin=checkpoint)
        loaded = Loaded(model, tokenizer, config, step_of(checkpoint), heads, template)
    return loaded if device is None else loaded._replace(model=loaded.model.to(device))


def pointed_checkpoint(path: Path) -> Path:
    """The checkpoint that a file `latest` or `best` in checkpoints/ names; another path as it is.

    Raises CheckpointError if it names none.
    """
    if path.name in ("latest", "best") and path.is_file():
        return named_checkpoint(path)
    return path


def run_tokenizer(run: RunFolder, config: Config) -> TextTokenizer:
    """The tokenizer of a run. Raises CheckpointError if it is missing, and as `read_tokenizer`."""
    if not run.tokenizer.is_file():
        raise CheckpointError(f"{run.path}: tokenizer.json is missing, and the model cannot be used without it")
    return read_tokenizer(run.tokenizer, config)


def read_tokenizer(path: Path, config: Config) -> TextTokenizer:
    """The tokenizer of a model. Raises ConfigError, and VocabularyError if it has more tokens than the model."""
    section = config.data.tokenizer
    tokenizer = TextTokenizer.load_stored(path, section.end_of_text, section.begin_of_text, lossless=section.lossless)
    if tokenizer.vocab_size > config.model.vocab_size:
        raise VocabularyError(
            f"{path} has {tokenizer.vocab_size} tokens, but the vocabulary of the model has {config.model.vocab_size}"
        )
    return tokenizer


def _chat_template(folder: Path) -> str | None:
    try:
        return (folder / CHAT_TEMPLATE).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None


def tokenizer_file(folder: Path) -> Path:
    """The tokenizer of a run or export folder, with the bytes and so the fingerprint that it has in the run.

    The tokenizer.json of an export is for other packages: in addition it puts a token before each text, as in training.
    """
    exported = (folder / SUMS).is_file() and RUN_TOKENIZER in read_sums(folder)
    return folder / (RUN_TOKENIZER if exported else "tokenizer.json")


def run_of(path: Path) -> RunFolder:
    """The run folder at `path`, or the run folder of the checkpoint at `path`, for reading.

    Raises CheckpointError if `path` is neither.
    """
    if (path / MANIFEST).is_file():
        path = path.resolve().parent.parent
        if path.name == "eval" and not (path / "config_snapshot.yaml").is_file():
            path = path.parent  # eval/queue/ of a run has checkpoints too
    elif not (path / "config_snapshot.yaml").is_file():
        what = "is not a run folder, a checkpoint or an exported model" if path.exists() else "does not exist"
        if inside := sorted(
            found.parent for name in ("config_snapshot.yaml", MANIFEST) for found in path.glob(f"*/{name}")
        ):
            what += f"; name one of those in it, such as {inside[-1]}"
        if is_weights_file(path):
            what += f"; `cdrmix import {path} --tokenizer FILE --out FOLDER` makes a model of these weights"
        raise CheckpointError(f"{path} {what}")
    return RunFolder.open(path, writes=False)


def final_weights(path: Path, *, average: bool = False) -> tuple[Path, dict[str, Tensor]]:
    """The checkpoint of `path`, and its weights or their running average, on the CPU.

    path: a checkpoint, or a run folder, of which the newest checkpoint with valid weights is taken. Only the weights
    are verified, not the optimizer state, which is twice as large. Warns if a newer checkpoint is damaged.
    Raises CheckpointError if there is none; the message gives the problem of the newest checkpoint.
    """
    if (path / MANIFEST).is_file():
        return path, read_weights(path, average=average and has_average(path))
    folder = run_of(path).checkpoints
    problems: list[str] = []
    for checkpoint in reversed(list_checkpoints(folder)):
        try:
            weights = read_weights(checkpoint, average=average and has_average(checkpoint))
        except CheckpointError as error:
            problems.append(str(error))
            continue
        if problems:
            warnings.warn(f"{problems[0]}; {checkpoint.name} is used instead", CdrmixWarning, stacklevel=2)
        return checkpoint, weights
    raise CheckpointError(f"{path}: no complete checkpoint in {folder}" + (f": {problems[0]}" if problems else ""))


def load_start(path: Path, config: Config, tokenizer: TextTokenizer) -> Loaded:
    """The trained model that a run starts from: a run, checkpoint or export, or a file of RWKV-7 weights.

    Such a file has weights alone: the configuration and the tokenizer are those of the run. Raises CheckpointError,
    also for weights that are NaN or infinite, and ConfigError if the model of the configuration is another one than
    that of the file.
    """
    if not is_weights_file(path):
        loaded = load_model(path)
        if (problem := not_finite(loaded.weights)) is not None:
            raise CheckpointError(f"{path} {problem}")
        return loaded
    check_model(config, path)
    weights = read_rwkv7(path, tied=config.cdrmix_model.tie_embeddings)
    model, _ = build(config, weights, origin=path)
    return Loaded(model, tokenizer, config, 0)


def backbone_weights(path: Path, config: Config, tokenizer: Path) -> dict[str, Tensor]:
    """The weights of the trained model that stage B starts from (reasoning.backbone), as of `load_start`.

    tokenizer: the tokenizer of this run; it must be that of the backbone. Raises CheckpointError, ConfigError,
    VocabularyError.
    """
    ours = read_tokenizer(tokenizer, config)
    loaded = load_start(path, config, ours)
    if ours.fingerprint != loaded.tokenizer.fingerprint:
        raise VocabularyError(
            f"reasoning.backbone: {path} has another tokenizer ({loaded.tokenizer.fingerprint[:12]}) than the text of "
            f"this run ({ours.fingerprint[:12]}); set data.tokenizer.path to the tokenizer of the backbone: "
            f"{tokenizer_file(path if (path / SUMS).is_file() else run_of(path).path)}"
        )
    return loaded.weights


def build(config: Config, weights: Mapping[str, Tensor], *, origin: Path) -> tuple[LanguageModel, dict[str, Tensor]]:
    """A LanguageModel with the given weights, in evaluation mode, and the weights of the heads of stage B.

    The model has fast weights if the given weights include them; after stage A they do not.
    Raises CheckpointError, naming `origin`, if names, shapes or types do not match the configuration. It is raised
    before memory of the sizes of the configuration is allocated: both may come from elsewhere.
    """
    heads = {name: tensor for name, tensor in weights.items() if name.split(".")[0] in HEADS}
    weights = {name: tensor for name, tensor in weights.items() if name not in heads}
    plastic = any(".plastic." in name for name in weights)
    make = partial(LanguageModel, config.cdrmix_model, reasoning=config.reasoning if plastic else None)
    blocks = len({name.split(".")[1] for name in weights if name.startswith("blocks.")})
    if blocks < config.cdrmix_model.layers:  # else making the model takes as long as the configuration says
        problem: str | None = f"has {blocks} blocks; model.layers is {config.cdrmix_model.layers}"
    else:
        problem = mismatch(make, weights)
    if problem:
        raise CheckpointError(f"{origin} does not match the configuration: it {problem}")
    model = make()
    model.load_state_dict(weights)
    return model.eval().requires_grad_(False), heads


def mismatch(make: Callable[[], nn.Module], weights: Mapping[str, Tensor], heads: Container[str] = ()) -> str | None:
    """Describes the first mismatch of names, shapes and types between weights and a model; None if they match.

    make: makes the model; it is called on the meta device, so that it takes no memory. heads: compare only tensors
    whose names begin with one of these.
    """
    try:
        with torch.device("meta"):
            state = make().state_dict()
    except (RuntimeError, TypeError, OverflowError) as error:  # what PyTorch raises for a size of more than 64 bits
        return f"cannot have the sizes that are written there: {str(error).splitlines()[0]}"
    wanted = {name: tensor for name, tensor in state.items() if not heads or name.split(".")[0] in heads}
    shapes = {name: tensor.shape for name, tensor in wanted.items()}
    return state_dict_mismatch(weights, shapes) or type_mismatch(weights, wanted)


def load_exported(path: str | Path) -> Loaded:
    """Loads the model of an export folder. All files are verified first; a file that is not in SHA256SUMS is not read.

    Raises CheckpointError with the name of a file that is missing, altered, or not in SHA256SUMS.
    """
    path = Path(path)
    sums = verify(path, "config.json", "config_snapshot.yaml", "tokenizer.json")
    config = Config.from_yaml(path / "config_snapshot.yaml")
    weights = read_safetensors(path, sums)
    step = int(description(path / "config.json")["step"])
    model, heads = build(config, weights, origin=path)
    template = _chat_template(path) if CHAT_TEMPLATE in sums else None
    return Loaded(model, read_tokenizer(tokenizer_file(path), config), config, step, heads, template)


def description(path: Path) -> dict[str, Any]:
    """The JSON file of an export that describes its model, with its `step`. Raises CheckpointError."""
    try:
        described: dict[str, Any] = parse_json(path.read_text(encoding="utf-8"))
        int(described["step"])
    except (OSError, ValueError, TypeError, LookupError, OverflowError) as error:
        raise CheckpointError(f"{path} has no step: it is not a description of a model") from error
    return described


def read_safetensors(path: Path, names: Iterable[str]) -> dict[str, Tensor]:
    """The tensors of the files model*.safetensors among `names` in a folder. Raises CheckpointError."""
    weights: dict[str, Tensor] = {}
    for name in sorted(name for name in names if name.startswith("model") and name.endswith(".safetensors")):
        try:
            weights |= load_file(path / name)
        except SafetensorError as error:
            raise CheckpointError(f"{path / name}: not a safetensors file: {error}") from error
    return weights


def verify(path: Path, *needed: str) -> dict[str, str]:
    """Verifies all files of a folder with its SHA256SUMS. Returns the hashes by file name.

    needed: files that it must have. Raises CheckpointError with the name of the first file that is missing or differs,
    and both hashes.
    """
    sums = read_sums(path)
    if missing := [name for name in needed if name not in sums]:
        raise CheckpointError(f"{path / SUMS} does not list {missing[0]}: the export is incomplete")
    for name, expected in sums.items():
        if not (path / name).is_file():
            raise CheckpointError(f"{path / name} is missing, but {SUMS} lists it")
        found = sha256_file(path / name)
        if found != expected:
            raise CheckpointError(f"{path / name} was altered: its SHA-256 is {found}, {SUMS} says {expected}")
    return sums


def read_sums(path: Path) -> dict[str, str]:
    """The hashes in SHA256SUMS of a folder, by file name. Raises CheckpointError if it is missing or malformed."""
    try:
        lines = (path / SUMS).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path / SUMS} cannot be read: the exported model is incomplete") from error
    sums: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        expected, _, name = line.partition("  ")
        if len(expected) != 64 or not name or Path(name).name != name:
            raise CheckpointError(
                f"{path / SUMS}:{number}: malformed; a line is a SHA-256, two spaces and the name of a file"
            )
        sums[name] = expected
    return sums
