"""Loads trained models of every kind: of this package and of transformers, from a run, checkpoint or export folder."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from cdrmix.config.schema import Config
from cdrmix.config.schema_huggingface import HuggingFaceModel
from cdrmix.config.schema_model import Model
from cdrmix.data.tokenizer import TextTokenizer
from cdrmix.errors import CdrmixWarning, CheckpointError, ConfigError, VocabularyError
from cdrmix.hf import adapters
from cdrmix.hf.foreign import (
    ForeignLossModel,
    ForeignModel,
    base_model,
    model_of,
    quiet,
    section_of,
    trained_tensors,
    transformers_config,
)
from cdrmix.inference.checkpoints import MANIFEST, base_of, step_of
from cdrmix.inference.choice import BEST, of_run
from cdrmix.inference.load import (
    ABOUT,
    SUMS,
    Loaded,
    description,
    final_weights,
    load_model,
    pointed_checkpoint,
    read_safetensors,
    read_tokenizer,
    run_of,
    run_tokenizer,
    verify,
)
from cdrmix.inference.text_model import TextModel
from cdrmix.runtime import only_device, restored_settings, work_alone, working_alone

SNAPSHOT = "config_snapshot.yaml"
ROW_LENGTH = 2048  # of a model whose config.json has no longest row, as in lm-eval


class LoadedForeign(NamedTuple):
    """A model of transformers in evaluation mode (float32) with its tokenizer and configuration.

    folder: has the config.json of the model before training, and the other files of its tokenizer. adapters: with
    model.lora their weights, which are merged into the model; base: the SHA-256 of the model they were trained with.
    """

    model: ForeignModel
    tokenizer: TextTokenizer
    config: Config
    step: int
    folder: Path
    adapters: Mapping[str, Tensor] = {}
    base: str | None = None

    @property
    def weights(self) -> dict[str, Tensor]:
        """All weights by name; adapters are merged."""
        return trained_tensors(self.model.transformers_model)

    def loss_model(self) -> ForeignLossModel:
        """The model with its loss."""
        return self.model.loss_model()


def load_trained(path: str | Path, device: torch.device | None = None) -> Loaded | LoadedForeign:
    """Loads the model of a checkpoint, an export folder, a run folder (its newest checkpoint with valid weights), or a
    folder of transformers.

    If the run has a running average of the weights (train.ema_decay), the average is loaded. Adapters (model.lora) are
    merged into their base. device: the CPU by default.
    Raises CheckpointError if there is no model or a file does not match its hash; BaseModelError if the base of
    adapters is missing or another one; VocabularyError if the tokenizer has more tokens than the model.
    """
    path = pointed_checkpoint(Path(path))
    if is_plain(path):
        loaded = _load_plain(path)
    else:
        config = _config_of(path)
        if isinstance(config.model, Model):
            return load_model(path, device)
        if not (path / SUMS).is_file():
            loaded = _load_checkpoint(path, config)
        elif (path / adapters.WEIGHTS).is_file():
            loaded = _load_adapters(path, config)
        else:
            loaded = _load_exported(path, config)
    return loaded if device is None else loaded._replace(model=loaded.model.to(device))


def _config_of(path: Path) -> Config:
    """The configuration of an export folder, a run or a checkpoint. Raises CheckpointError."""
    if not (path / SUMS).is_file():
        return Config.from_yaml(run_of(path).config_snapshot)
    if not (path / SNAPSHOT).is_file():
        raise CheckpointError(f"{path} has no {SNAPSHOT}: it is not an export of cdrmix")
    return Config.from_yaml(path / SNAPSHOT)


def untrained(config: Config, tokenizer: TextTokenizer) -> LoadedForeign:
    """The model of transformers that a run starts from, as step 0; without adapters and not quantized."""
    section = section_of(config).model_copy(update={"lora": None})
    model = base_model(config.model_copy(update={"model": section})).eval().requires_grad_(False)
    return LoadedForeign(ForeignModel(model, section), tokenizer, config, 0, section.folder or Path())


def is_plain(path: Path) -> bool:
    """Whether a folder has a model of transformers that cdrmix neither trained nor exported."""
    return (path / "config.json").is_file() and not any((path / name).is_file() for name in (SUMS, SNAPSHOT, MANIFEST))


def _load_plain(path: Path) -> LoadedForeign:
    """A model of transformers as it is, with a configuration of which only `model` and `data` mean something.

    data.row_length: the tokens that the model reads at most, 2,048 if its config.json does not say. Documents are not
    packed.
    """
    model: dict[str, object] = {"kind": "huggingface", "path": str(path), "packing": "rows"}
    section = HuggingFaceModel.model_validate(model)
    described = transformers_config(section).get_text_config()
    tokenizer = TextTokenizer.load(path, lossless=False)
    if tokenizer.vocab_size > section.vocab_size:
        raise VocabularyError(
            f"the tokenizer of {path} has {tokenizer.vocab_size} tokens, but the vocabulary of the model has "
            f"{section.vocab_size}"
        )
    row_length = getattr(described, "max_position_embeddings", None) or ROW_LENGTH
    if not isinstance(row_length, int) or row_length < 1:
        raise ConfigError(
            f"{path / 'config.json'}: max_position_embeddings: found {row_length}; allowed: the number of tokens that "
            "the model reads, at least 1, or null"
        )
    data = {
        "row_length": row_length,
        "tokenizer": {
            "path": str(path),
            "end_of_text": tokenizer.end_of_text,
            "begin_of_text": tokenizer.begin_of_text,
            "lossless": tokenizer.lossless,
        },
    }
    train = {"steps": 1, "batch_rows": 1, "micro_batch_rows": 1, "learning_rate": 1.0, "precision": "fp32"}
    config = Config.model_validate({"run": {"name": path.resolve().name}, "model": model, "data": data, "train": train})
    made = base_model(config).eval().requires_grad_(False)
    return LoadedForeign(ForeignModel(made, section), tokenizer, config, 0, path)


def _load_checkpoint(path: Path, config: Config) -> LoadedForeign:
    run = run_of(path)
    checkpoint, weights = final_weights(path, average=True)
    step = step_of(checkpoint)
    if section_of(config).lora is not None:
        base = base_of(checkpoint)
        _check_base(config, base, checkpoint)  # first: the tokenizer may be that of the base
        return _merged(config, weights, checkpoint, run_tokenizer(run, config), step, base, run.base_model)
    # The run has the config.json of the model before training, so the folder model.path is not needed any more.
    section = section_of(config).model_copy(update={"path": str(run.base_model), "random": None})
    own = config.model_copy(update={"model": section})
    tokenizer = run_tokenizer(run, own)
    model = ForeignModel(model_of(own, run.base_model, weights, origin=checkpoint), section)
    return LoadedForeign(model, tokenizer, config, step, run.base_model)


def _load_adapters(path: Path, config: Config) -> LoadedForeign:
    """A folder with adapters alone; its base is at model.path."""
    verify(path, adapters.WEIGHTS, adapters.DESCRIPTION, ABOUT, "tokenizer.json")
    about, weights = description(path / ABOUT), adapters.read_adapters(path)
    if (base := about.get("base_sha256")) is None:
        raise CheckpointError(f"{path / ABOUT} does not name the base model of the adapters (base_sha256)")
    _check_base(config, str(base), path)  # first: the vocabulary is that of the base
    tokenizer = read_tokenizer(path / "tokenizer.json", config)
    return _merged(config, weights, path, tokenizer, int(about["step"]), str(base), path)


def _check_base(config: Config, base: str, origin: Path) -> None:
    """Raises BaseModelError unless model.path has the weights that the adapters of `origin` were trained with."""
    section = section_of(config)
    assert section.named_folder is not None, "adapters of random weights are refused"
    adapters.check_base(section.named_folder, base, origin)


def _merged(
    config: Config,
    weights: dict[str, Tensor],
    origin: Path,
    tokenizer: TextTokenizer,
    step: int,
    base: str,
    folder: Path,
) -> LoadedForeign:
    """The base at model.path with adapters merged into it. origin: of the adapters. Others as of LoadedForeign."""
    section = section_of(config)
    assert section.lora is not None
    with quiet():
        model = adapters.merge_adapters(base_model(config), section.lora, weights, origin=origin)
    model.eval().requires_grad_(False)
    plain = section.model_copy(update={"lora": None})  # nothing is trained
    return LoadedForeign(ForeignModel(model, plain), tokenizer, config, step, folder, weights, base)


def _load_exported(path: Path, config: Config) -> LoadedForeign:
    sums = verify(path, "config.json", ABOUT, "tokenizer.json")
    # The export has no rows of padding, and its description has the tokens that were added.
    section = section_of(config).model_copy(update={"path": str(path), "random": None, "lora": None})
    section = section.model_copy(update={"vocab": type(section.vocab)()})
    plain = config.model_copy(update={"model": section})
    weights = read_safetensors(path, sums)
    model = model_of(plain, path, weights, origin=path)
    tokenizer = read_tokenizer(path / "tokenizer.json", plain)
    return LoadedForeign(ForeignModel(model, section), tokenizer, config, int(description(path / ABOUT)["step"]), path)


def load_cdrmix(path: str | Path, device: str | None = None) -> Loaded:
    """`load_alone` of a model of this package. Raises ConfigError for a model of transformers."""
    loaded = load_alone(path, device)
    if not isinstance(loaded, Loaded):
        raise ConfigError(f"{path}: this works only with models of cdrmix, and this one is of transformers")
    return loaded


def load_alone(path: str | Path, device: str | None = None) -> Loaded | LoadedForeign:
    """Loads a model for use in this process alone, on its device and with the threads of its configuration.

    device: auto, cpu or cuda; it replaces run.device of the configuration.
    """
    loaded = load_trained(path)
    place = work_alone(loaded.config, device)
    return loaded._replace(model=loaded.model.to(place))  # type: ignore[arg-type]


def load(path: str | Path, *, checkpoint: str | None = None, device: str | None = None) -> TextModel:
    """Loads the model of a run folder (its newest complete checkpoint), a checkpoint, an export folder, or a folder of
    transformers (config.json, safetensors and tokenizer.json).

    The files of cdrmix are verified first. While the model computes, this process has the CPU threads and the
    determinism that the configuration of the run gives; between the calls it has its own.

    Args:
        path: the folder.
        checkpoint: which of a run folder: best, last, or its name. Default: last. If there is no best, or its weights
            are damaged, the last is taken, with a warning.
        device: auto, cpu or cuda. Default: run.device of the configuration.

    Raises:
        CheckpointError: there is no complete model at the path.
        ConfigError: the device does not exist; `checkpoint` is unknown, or `path` is not a run folder.
        VocabularyError: the tokenizer does not match the model.
        ValueError: `path` is neither a string nor a Path.
    """
    if not isinstance(path, str | Path):
        raise ValueError(f"path must be a string or a Path; found {path!r}")
    found = of_run(Path(path), checkpoint)
    if checkpoint == BEST and found.path == Path(path):
        warnings.warn(f"{path}: {found.reason}", CdrmixWarning, stacklevel=2)
    with restored_settings():  # the initial values that the weights replace are drawn
        loaded = load_trained(found.path)
        model = loaded.model.to(only_device(loaded.config, device))
    return TextModel(loaded._replace(model=model), partial(working_alone, loaded.config))  # type: ignore[arg-type]
