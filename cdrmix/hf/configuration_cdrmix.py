"""The configuration of cdrmix models for transformers, versions 4.57 and 5."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from cdrmix.config.schema_model import Model
from cdrmix.config.schema_reasoning import Reasoning
from cdrmix.errors import ConfigError
from cdrmix.hf.transformers_files import AUTO_MAP, MODEL_TYPE, code_files
from cdrmix.plugins import load_plugins


class CdrmixConfig(PretrainedConfig):
    """The config.json of an exported model.

    model: the section `model` of the configuration of the run. reasoning: its section `reasoning`, for a model with
    plastic adapters. max_position_embeddings: tokens of a training row; the model itself has no longest row.
    transformers sets other keys of the file as attributes, such as `step`. save_pretrained writes all of them again.
    """

    model_type = MODEL_TYPE
    keys_to_ignore_at_inference = ["past_key_values"]

    model: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    max_position_embeddings: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    tie_word_embeddings: bool = True
    use_cache: bool = True

    @property
    def model_section(self) -> Model:
        """The section `model`. Raises ConfigError if it is missing, or a key of it is wrong."""
        if self.model is None:
            raise ConfigError("config.json has no `model`: load the config.json of a model that cdrmix exported")
        load_plugins()  # a layer may be one of a plugin
        try:
            return Model.model_validate(self.model)
        except ValueError as error:
            raise ConfigError(f"`model` in config.json is not the model section of a configuration: {error}") from error

    @property
    def reasoning_section(self) -> Reasoning | None:
        """The section `reasoning` of a model with plastic adapters. Raises ConfigError if a key of it is wrong."""
        try:
            return None if self.reasoning is None else Reasoning.model_validate(self.reasoning)
        except ValueError as error:
            raise ConfigError(f"`reasoning` in config.json is not a reasoning section: {error}") from error

    @property
    def vocab_size(self) -> int:
        """Number of token ids of the model."""
        return self.model_section.vocab_size

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return self.model_section.d_model

    @property
    def num_hidden_layers(self) -> int:
        """Number of blocks."""
        return self.model_section.layers

    @property
    def num_attention_heads(self) -> int:
        """Number of query heads of the attention layers."""
        return self.model_section.attention.heads

    def to_dict(self) -> dict[str, Any]:
        """The keys of config.json. `auto_map` always names the modules that `to_json_file` writes."""
        return {**super().to_dict(), "auto_map": dict(AUTO_MAP)}

    def to_json_file(self, json_file_path: str | os.PathLike[str], use_diff: bool = True) -> None:
        """Writes config.json, and the modules that its `auto_map` names to the same folder."""
        super().to_json_file(json_file_path, use_diff=use_diff)
        for name, text in code_files().items():
            Path(json_file_path).with_name(name).write_text(text, encoding="utf-8")

    @classmethod
    def register_for_auto_class(cls, auto_class: object = "AutoConfig") -> None:
        """Does not mark the class as code to copy: `to_json_file` writes modules that import the installed package."""
