"""The tokenizer that a configuration names: where it is, whether it fits the model, and its part of a content key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cdrmix.config.schema import Config
from cdrmix.config.schema_huggingface import HuggingFaceModel
from cdrmix.data.chat.rendering import template_tokens
from cdrmix.data.objectives import special_tokens
from cdrmix.data.tokenizer import TextTokenizer
from cdrmix.errors import ConfigError, VocabularyError

MULTIPLE = 64  # of a vocabulary size that tiles of matrix products divide
OF_MODEL = "model"  # data.tokenizer.path: the tokenizer of model.path


def tokenizer_path(config: Config) -> Path | None:
    """The file or folder that data.tokenizer.path means; None if the tokenizer is trained on the text.

    Raises ConfigError if the path is `model` and the model has no folder on this machine.
    """
    path = config.data.tokenizer.path
    if path is None:
        return None
    if path != OF_MODEL:
        return Path(path).expanduser()
    section = config.model
    if not isinstance(section, HuggingFaceModel) or section.path is None:
        raise ConfigError(
            "data.tokenizer.path: model means the tokenizer in the folder model.path, which this configuration does "
            "not have; name a tokenizer.json, or leave data.tokenizer.path out to train one on the corpus"
        )
    if section.folder is None:
        raise ConfigError(
            f"data.tokenizer.path: model means the tokenizer in model.path, and there is no folder {section.path}; "
            f"{section.remedy}"
        )
    return section.folder


def load_tokenizer(config: Config) -> TextTokenizer | None:
    """The tokenizer of data.tokenizer.path, or None if one must be trained.

    Raises ConfigError if there is none, VocabularyError if it does not fit the model or lacks a special token.
    """
    section, path = config.data.tokenizer, tokenizer_path(config)
    if path is None:
        return None
    model = config.model
    tokenizer = TextTokenizer.load(
        path,
        section.end_of_text,
        begin_of_text=section.begin_of_text,
        lossless=section.lossless,
        added_tokens=model.vocab.add_tokens if isinstance(model, HuggingFaceModel) else section.add_tokens,
    )
    if tokenizer.vocab_size > model.vocab_size:
        size = f"{tokenizer.vocab_size} ids, more than"
        if isinstance(model, HuggingFaceModel):
            remedy = "use the tokenizer that belongs to the model"
            if section.path != OF_MODEL:
                remedy = "set data.tokenizer.path: model for the tokenizer of the model itself"
            raise VocabularyError(
                f"data.tokenizer.path: {path} has {size} the {model.vocab_size} of the model; {remedy}"
            )
        rounded = -(-tokenizer.vocab_size // MULTIPLE) * MULTIPLE
        raise VocabularyError(
            f"data.tokenizer.path: {section.path} has {size} model.vocab_size={model.vocab_size}; set "
            f"model.vocab_size={tokenizer.vocab_size} or higher, such as {rounded}, a multiple of {MULTIPLE}, for "
            "which matrix products are faster"
        )
    for token in added_tokens(config):
        tokenizer.special_id(token)  # raises now and not after the text has been read
    return tokenizer


def added_tokens(config: Config) -> list[str]:
    """The special tokens that the corpus needs, in addition to the end of text."""
    data = config.data
    return list(dict.fromkeys((*special_tokens(data.objectives), *template_tokens(data), *data.tokenizer.add_tokens)))


def content_of(section: dict[str, Any], tokenizer: TextTokenizer | None) -> dict[str, Any]:
    """What the section data.tokenizer adds to the content key of shards. tokenizer: None if it must be trained.

    The keys that the tokenizer resolves are replaced by what they mean. A token that begins documents is only a part of
    it if it is not the end-of-text token, so that older shards are reused.
    """
    if tokenizer is None:
        return section
    # the fingerprint of the tokenizer has the added tokens
    left = {key: value for key, value in section.items() if key not in ("begin_of_text", "lossless", "add_tokens")}
    begin = {} if tokenizer.begin_of_text is None else {"begin_of_text": tokenizer.begin_of_text}
    return {**left, "end_of_text": tokenizer.end_of_text, **begin}
