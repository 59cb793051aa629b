"""The weights that a training starts from, when they are those of an earlier run or of a file (train.start_from)."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from cdrmix.config.schema import Config
from cdrmix.data.shards import ShardSet
from cdrmix.errors import CdrmixError, CheckpointError, ConfigError, VocabularyError
from cdrmix.inference.checkpoints import state_dict_mismatch
from cdrmix.inference.load import HEADS, RUN_TOKENIZER, load_start
from cdrmix.inference.rwkv_files import check_model, is_weights_file
from cdrmix.training.engine import Engine


def check_start(config: Config) -> None:
    """Checks train.start_from as far as that needs no tokenizer and no weights: a file must have the model of this
    configuration. Raises ConfigError, CheckpointError."""
    start = config.train.start_from
    if start is not None and is_weights_file(path := Path(start).expanduser()):
        check_model(config, path)


def load_weights(engine: Engine, config: Config, shards: ShardSet) -> None:
    """Gives the engine the weights of train.start_from. Every process calls.

    Raises ConfigError if the folder does not exist, CheckpointError if its model has other sizes, VocabularyError if it
    has another tokenizer.
    """
    assert config.train.start_from is not None
    weights: dict[str, Tensor] = {}
    problem: CdrmixError | None = None
    if engine.world.leads:
        try:
            weights = _weights(Path(config.train.start_from).expanduser(), config, engine, shards)
        except CdrmixError as error:
            problem = error  # every process raises it below, so that none waits for the others
    problem = next(
        (each for each in engine.world.gather(problem, "the weights to start from") if each is not None), None
    )
    if problem is not None:
        raise problem
    engine.load_weights(weights)
    engine.begin_average()


def _weights(path: Path, config: Config, engine: Engine, shards: ShardSet) -> dict[str, Tensor]:
    if not path.exists():
        raise ConfigError(
            f"train.start_from={path} does not exist; name a run, a checkpoint or an export, or set train.start_made_by"
        )
    loaded = load_start(path, config, shards.tokenizer)
    if loaded.tokenizer.fingerprint != shards.tokenizer_fingerprint:
        raise VocabularyError(
            f"train.start_from: {path} has another tokenizer ({loaded.tokenizer.fingerprint[:12]}) than the text of "
            f"this run ({shards.tokenizer_fingerprint[:12]}); set data.tokenizer.path to tokenizer.json of that "
            f"folder, of an export to {RUN_TOKENIZER}"
        )
    weights = {name: tensor for name, tensor in loaded.weights.items() if name.split(".")[0] not in HEADS}
    problem = state_dict_mismatch(weights, engine.shapes())
    if problem is not None:
        raise CheckpointError(f"train.start_from: {path} does not fit the model of this configuration: it {problem}")
    return weights
