"""The files of an exported model that transformers reads in addition to the weights. Does not import transformers.

config.json, generation_config.json, tokenizer_config.json, tokenizer.json, a chat template if there is one, and two
modules of a few lines that import the classes of the installed package: an export has no copy of the code.
"""

from __future__ import annotations

import json
from typing import Any

from cdrmix.data.chat.rendering import end_of_turn
from cdrmix.data.tokenizer import TextTokenizer
from cdrmix.inference.load import CHAT_TEMPLATE, Loaded
from cdrmix.json_text import parse_json

MODEL_TYPE = "cdrmix"
AUTO_MAP = {
    "AutoConfig": "configuration_cdrmix.CdrmixConfig",
    "AutoModelForCausalLM": "modeling_cdrmix.CdrmixForCausalLM",
}

_MODULE = '''"""{what} for transformers. The package cdrmix must be installed."""

from cdrmix.hf.{module} import {name}

__all__ = ["{name}"]
'''


def code_files() -> dict[str, str]:
    """The text of the modules that `auto_map` names, by file name."""
    files = {}
    for what, reference in zip(
        ("The configuration of a cdrmix model", "A cdrmix model"), AUTO_MAP.values(), strict=True
    ):
        module, name = reference.split(".")
        files[f"{module}.py"] = _MODULE.format(what=what, module=module, name=name)
    return files


def config_keys(loaded: Loaded) -> dict[str, Any]:
    """The keys of config.json that transformers needs.

    `reasoning` is there only for a model with plastic adapters: without it transformers builds the backbone.
    """
    config = loaded.config
    keys: dict[str, Any] = {
        "model_type": MODEL_TYPE,
        "architectures": [reference.split(".")[1] for reference in AUTO_MAP.values()][1:],
        "auto_map": AUTO_MAP,
        "dtype": str(loaded.model.embedding.weight.dtype).removeprefix("torch."),
        **_token_ids(loaded.tokenizer),
        "max_position_embeddings": config.data.row_length,
        "tie_word_embeddings": loaded.config.cdrmix_model.tie_embeddings,
    }
    if loaded.model.adapters and config.reasoning is not None:
        keys["reasoning"] = config.reasoning.model_dump(mode="json")
    return keys


def text_files(loaded: Loaded) -> dict[str, str]:
    """The other files that transformers reads, by name.

    A tokenizer may have fewer ids than the model; generation suppresses the others, as `cdrmix generate` does.
    """
    tokenizer = loaded.tokenizer
    generation: dict[str, Any] = {**_token_ids(tokenizer)}
    if loaded.chat_template is not None:
        turn = end_of_turn(loaded.chat_template, tokenizer)
        if turn is not None and turn != tokenizer.end_of_text_id:
            generation["eos_token_id"] = [tokenizer.end_of_text_id, turn]
    if tokenizer.vocab_size < loaded.config.model.vocab_size:
        generation["suppress_tokens"] = list(range(tokenizer.vocab_size, loaded.config.model.vocab_size))
    files = {
        "generation_config.json": _dumped(generation),
        "tokenizer_config.json": _dumped(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "model_input_names": ["input_ids", "attention_mask"],
                "bos_token": _first_token(tokenizer),
                "eos_token": tokenizer.end_of_text,
                "pad_token": tokenizer.end_of_text,
                "padding_side": "left",
                "model_max_length": loaded.config.data.row_length,
                "clean_up_tokenization_spaces": False,
                # A chat template writes its marks as text, so they must become tokens, also in a user's text.
                "split_special_tokens": loaded.chat_template is None,
            }
        ),
        "tokenizer.json": _dumped(_with_first_token(tokenizer)),
        **code_files(),
    }
    if loaded.chat_template is not None:
        files[CHAT_TEMPLATE] = loaded.chat_template
    return files


def _first_token(tokenizer: TextTokenizer) -> str:
    """The token before each text: that of the beginning of a document, or end-of-text."""
    return tokenizer.begin_of_text or tokenizer.end_of_text


def _token_ids(tokenizer: TextTokenizer) -> dict[str, int]:
    end_of_text_id = tokenizer.end_of_text_id
    return {"bos_token_id": tokenizer.first_id, "eos_token_id": end_of_text_id, "pad_token_id": end_of_text_id}


def _with_first_token(tokenizer: TextTokenizer) -> dict[str, Any]:
    """The contents of the tokenizer's file, with a template that puts the first token before each text."""
    name = _first_token(tokenizer)
    begin = {"SpecialToken": {"id": name, "type_id": 0}}
    text, second = ({"Sequence": {"id": part, "type_id": number}} for number, part in enumerate("AB"))
    template = {
        "type": "TemplateProcessing",
        "single": [begin, text],
        "pair": [begin, text, second],
        "special_tokens": {name: {"id": name, "ids": [tokenizer.first_id], "tokens": [name]}},
    }
    contents: dict[str, Any] = parse_json(tokenizer.json_bytes)
    return {**contents, "truncation": None, "padding": None, "post_processor": template}


def _dumped(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
