"""Makes a model of this package of public RWKV-7 weights: an export folder that every command reads."""

from __future__ import annotations

from pathlib import Path

from cdrmix.config.schema import Config
from cdrmix.data.tokenizer import TextTokenizer
from cdrmix.errors import CheckpointError, VocabularyError
from cdrmix.hf.export import export_model
from cdrmix.hf.load import ROW_LENGTH
from cdrmix.inference.load import RUN_TOKENIZER, Loaded, build
from cdrmix.inference.rwkv_files import is_weights_file, model_in, read_rwkv7


def import_rwkv7(weights: Path, tokenizer: Path, target: Path) -> Path:
    """Writes the model of a file of weights to the folder `target`, as `export_model`, and returns `target`.

    weights: .pth or .safetensors with the official names. tokenizer: that of the model: a vocabulary of RWKV World, a
    tokenizer.json or a folder that has one. The folder has its configuration, of which `train` means nothing. Rows have
    ROW_LENGTH tokens, although the model itself has no limit.
    Raises CheckpointError if the file has no whole model, VocabularyError if the tokenizer has more ids than the model,
    ConfigError if `target` exists.
    """
    if not is_weights_file(weights):
        found = "is not a file of weights, .pth or .safetensors" if weights.exists() else "does not exist"
        raise CheckpointError(f"{weights} {found}")
    section = model_in(weights)
    text = TextTokenizer.load(tokenizer, lossless=False)
    if text.vocab_size > section.vocab_size:
        raise VocabularyError(
            f"{tokenizer} has {text.vocab_size} tokens, but the vocabulary of {weights} has {section.vocab_size}; name "
            "the tokenizer that belongs to the model"
        )
    settings = {
        "path": str(target.resolve() / RUN_TOKENIZER),
        "end_of_text": text.end_of_text,
        "begin_of_text": text.begin_of_text,
        "lossless": text.lossless,
    }
    config = Config.model_validate(
        {
            "run": {"name": weights.stem},
            "model": section.model_dump(),
            "data": {"row_length": ROW_LENGTH, "tokenizer": settings},
            "train": {"steps": 1, "batch_rows": 1, "micro_batch_rows": 1, "learning_rate": 1.0, "precision": "fp32"},
        }
    )
    model, _ = build(config, read_rwkv7(weights), origin=weights)
    return export_model(Loaded(model, text, config, 0), target)
