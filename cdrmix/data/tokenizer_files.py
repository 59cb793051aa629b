"""The files of a tokenizer: where they are, which token ends a document and which token begins one.

A folder of a model has tokenizer.json and usually tokenizer_config.json, whose keys `eos_token`, `bos_token` and
`add_bos_token` name these tokens. The vocabulary of RWKV World models is read as the tokenizer.json that it means.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from cdrmix.data import rwkv_vocabulary
from cdrmix.errors import ConfigError, VocabularyError
from cdrmix.json_text import parse_json

JSON, SETTINGS = "tokenizer.json", "tokenizer_config.json"
STORED = "tokenizer_settings.json"  # of shards, a run or an export: the tokens that this package has resolved
OTHER_FORMATS = ("*.model", "vocab.json", "merges.txt", "vocab.txt", "*.tiktoken", "tekken.json")


class TokenizerFiles(NamedTuple):
    """tokenizer.json, its path for messages, and the contents of tokenizer_config.json ({} without that file)."""

    json_bytes: bytes
    name: str
    settings: dict[str, Any]


def read_files(path: Path) -> TokenizerFiles:
    """The files at `path`: a tokenizer.json, a folder that has one, or a vocabulary of RWKV World models.

    Raises ConfigError if there is no such file, VocabularyError if tokenizer_config.json or the vocabulary is damaged.
    """
    settings: dict[str, Any] = {}
    file = path
    if path.is_dir():
        file = path / JSON
        if not file.exists():
            raise ConfigError(_without_json(path))
        if (path / SETTINGS).exists():
            settings = _settings(path / SETTINGS)
    try:
        content = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"data.tokenizer.path: cannot read {file}: {error.strerror}") from error
    if rwkv_vocabulary.is_vocabulary(content):
        content = rwkv_vocabulary.tokenizer_json(content, str(file))
    return TokenizerFiles(content, str(file), settings)


def stored(path: Path) -> tuple[str, str | None]:
    """The tokens that end and begin a document, from the file STORED. Raises VocabularyError if it is damaged."""
    settings = _settings(path)
    end, begin = settings.get("end_of_text"), settings.get("begin_of_text")
    if not isinstance(end, str) or not isinstance(begin, str | None):
        raise VocabularyError(f"{path} does not name the tokens that begin and end a document")
    return end, begin


def end_of_text(files: TokenizerFiles) -> str:
    """The eos_token of tokenizer_config.json, otherwise the only special token of tokenizer.json.

    Raises VocabularyError if neither exists.
    """
    named = _named(files.settings, "eos_token")
    if named is not None:
        return named
    try:
        added: list[dict[str, Any]] = parse_json(files.json_bytes)["added_tokens"]
        special = [str(token["content"]) for token in added if token["special"]]
    except (ValueError, LookupError, TypeError) as error:
        raise VocabularyError(f"{files.name} is not a tokenizer.json: {error}") from error
    if not special:
        raise VocabularyError(
            f"{files.name} has no special token, so no token can end a document; add one to its added_tokens, and "
            "train the model with it"
        )
    if len(special) > 1:
        raise VocabularyError(
            f"{files.name} has {len(special)} special tokens; set data.tokenizer.end_of_text to one of them: "
            f"{some(special)}"
        )
    return special[0]


def begin_of_text(files: TokenizerFiles) -> str | None:
    """The token that the tokenizer adds before a text, or None. An explicit add_bos_token decides, as in pretraining.

    Otherwise the post-processor of tokenizer.json decides. If it adds several tokens, the last one counts.
    """
    try:
        content = parse_json(files.json_bytes)
    except ValueError as error:
        raise VocabularyError(f"{files.name} is not a tokenizer.json that can be read: {error}") from error
    added = None
    for processor in _flat(content.get("post_processor"), "processors") if isinstance(content, dict) else ():
        if processor["type"] == "TemplateProcessing":
            for piece in processor["single"]:
                if "SpecialToken" not in piece:
                    break
                added = str(piece["SpecialToken"]["id"])
        elif processor["type"] in ("BertProcessing", "RobertaProcessing"):
            added = str(processor["cls"][0])
    adds = files.settings.get("add_bos_token")
    if adds is None:
        return added
    return _named(files.settings, "bos_token") or added if adds else None


def continuing(json_bytes: bytes) -> bytes | None:
    """tokenizer.json for a text that continues another one: without a space before the text. None: there is none."""
    content = parse_json(json_bytes)
    changed = {key: _without_prefix(content.get(key)) for key in ("normalizer", "pre_tokenizer")}
    if all(content.get(key) == part for key, part in changed.items()):
        return None
    return json.dumps({**content, **changed}, ensure_ascii=False).encode("utf-8")


def decoder_types(content: dict[str, Any]) -> list[str]:
    """The types of the steps of the decoder. content: of tokenizer.json."""
    return [step["type"] for step in _flat(content.get("decoder"), "decoders")]


def some(names: list[str]) -> str:
    """Up to ten names for a message."""
    shown = ", ".join(map(repr, names[:10]))
    return f"{shown} and {len(names) - 10} more" if len(names) > 10 else shown


def _named(settings: dict[str, Any], key: str) -> str | None:
    """A token of tokenizer_config.json, which is a string or a mapping with `content`."""
    token = settings.get(key)
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) and token else None


def _settings(file: Path) -> dict[str, Any]:
    try:
        settings = parse_json(file.read_bytes())
    except OSError as error:
        raise ConfigError(f"data.tokenizer.path: cannot read {file}: {error.strerror}") from error
    except ValueError as error:
        raise VocabularyError(f"{file} is not JSON: {error}") from error
    if not isinstance(settings, dict):
        raise VocabularyError(f"{file} must be a JSON object; found {type(settings).__name__}")
    return settings


def _without_json(folder: Path) -> str:
    """Why a folder has no tokenizer that can be read, and the remedy."""
    others = sorted(path.name for pattern in OTHER_FORMATS for path in folder.glob(pattern))
    if not others:
        return f"data.tokenizer.path: {folder} has no {JSON}; name a folder of a model, or a {JSON}"
    return (
        f"data.tokenizer.path: {folder} has no {JSON}, only {', '.join(others)}, which must be converted: "
        f"`python -c \"from transformers import AutoTokenizer; AutoTokenizer.from_pretrained('{folder}')"
        f".save_pretrained('{folder}')\"` (SentencePiece files need `pip install sentencepiece protobuf`)"
    )


def _flat(step: dict[str, Any] | None, inner: str) -> Iterator[dict[str, Any]]:
    """A step, or the steps of a Sequence, whose list has the key `inner`."""
    if step is None:
        return
    if step.get("type") == "Sequence":
        for each in step[inner]:
            yield from _flat(each, inner)
    else:
        yield step


def _without_prefix(step: Any) -> Any:
    """A normalizer or pre-tokenizer without what adds a space before the text."""
    if isinstance(step, list):
        return [_without_prefix(each) for each in step if each.get("type") != "Prepend"]
    if not isinstance(step, dict):
        return step
    if step.get("type") == "Prepend":
        return None
    changed = {key: _without_prefix(value) if isinstance(value, list) else value for key, value in step.items()}
    if changed.get("add_prefix_space"):
        changed["add_prefix_space"] = False
    if changed.get("type") == "Metaspace":
        changed["prepend_scheme"] = "never"
    return changed
