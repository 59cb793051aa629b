"""The schema of a model that transformers defines: where it comes from, how documents are packed, adapters."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from cdrmix.config.section import Below1, PositiveFloat, PositiveInt, Section, Text
from cdrmix.errors import ConfigError
from cdrmix.json_text import parse_json


class Vocabulary(Section):
    """Changes of the vocabulary of the model before it is trained."""

    add_tokens: list[Text] = []
    """Special tokens to add to the tokenizer and to the embedding. Their vectors begin at the mean of all vectors."""
    pad_to: PositiveInt = 1
    """The rows of the embedding are filled up to a multiple of this. The rows without a token have no probability."""


class Lora(Section):
    """Low-rank adapters (LoRA, arXiv 2106.09685): the model is frozen, and W x + alpha / rank * B A x is trained."""

    rank: PositiveInt = 16
    """Rank of A and B."""
    alpha: PositiveFloat = 32.0
    """Factor on the adapter, as alpha / rank."""
    dropout: Below1 = 0.0
    """Share of the inputs of an adapter that are set to 0 in training."""
    targets: Literal["auto"] | list[Text] = "auto"
    """Names of the linear layers with an adapter. auto: all linear layers except the output head, and except those
    whose weight the model reads without calling the layer."""
    experts: bool = False
    """Adapters on the experts of a mixture of experts too."""
    quantize: Literal["nf4"] | None = None
    """Data type of the frozen weights (QLoRA, arXiv 2305.14314). nf4: 4 bits, for ZeRO stages 0 to 2. null: as
    train.weights."""


class HuggingFaceModel(Section):
    """A causal language model of transformers: continue its training on text, or train its architecture from random
    weights."""

    kind: Literal["huggingface"]
    """huggingface: a model of transformers."""
    path: Text | None = None
    """Folder with config.json and safetensors. null: `random`."""
    revision: Text | None = None
    """Branch, tag or commit to download with `online`. null: main."""
    online: bool = False
    """If the folder `path` does not exist, download it from the Hugging Face hub. The last two parts of `path` are the
    name of the model there (models/nvidia/Nemotron-H-8B-Base-8K: nvidia/Nemotron-H-8B-Base-8K)."""
    random: dict[str, Any] | None = None
    """Train this architecture from random weights: the keys of its config.json, model_type above all. null: `path`."""
    made_by: Text | None = None
    """A configuration file that makes the model. If the folder `path` does not exist, it is run first, and its export
    is copied to `path`."""
    attention: Literal["auto", "flash_attention_2", "sdpa", "eager"] = "auto"
    """Implementation of attention. auto: flash_attention_2 on a GPU with the package flash-attn, otherwise sdpa."""
    packing: Literal["isolated", "rows"] = "isolated"
    """isolated: rows of several documents; a test at the start proves that no document sees another one. rows: one
    document a row, for models that cannot isolate documents."""
    vocab: Vocabulary = Field(default_factory=Vocabulary)
    lora: Lora | None = None
    """Train low-rank adapters instead of all weights. null: all weights."""

    @property
    def vocab_size(self) -> int:
        """Token ids of the model with those of `vocab`, before rows are filled up. Raises ConfigError without it."""
        described = None if self.random is None else json.dumps(self.random)
        return _vocab_size(self.path, described, self.remedy) + len(self.vocab.add_tokens)

    @property
    def named_folder(self) -> Path | None:
        """The folder `path`, which may not exist yet; None for random weights."""
        return None if self.path is None else Path(self.path).expanduser()

    @property
    def folder(self) -> Path | None:
        """The folder of the model; None for random weights, and if it does not exist. Raises ConfigError for a file."""
        folder = self.named_folder
        if folder is not None and folder.exists() and not folder.is_dir():
            raise ConfigError(f"model.path: {self.path} is a file; name a folder")
        return folder if folder is not None and folder.is_dir() else None

    @property
    def name_on_hub(self) -> str | None:
        """The name of the model on the Hugging Face hub, with `online`."""
        return None if self.path is None or not self.online else hub_name(self.path)

    @property
    def remedy(self) -> str:
        """What makes the folder `path`, if it does not exist."""
        if self.online:
            return f"`cdrmix train` downloads {self.name_on_hub} from the Hugging Face hub to it"
        if self.made_by is not None:
            return f"`cdrmix train` makes it by {self.made_by}"
        return (
            "name a folder with config.json and safetensors, or set model.online: true to download it from the Hugging "
            "Face hub, or model.made_by, which makes it"
        )


def hub_name(path: str) -> str | None:
    """The last two parts of a path, which name a model on the Hugging Face hub; None if it has fewer."""
    parts = [part for part in Path(path).parts if part not in ("/", "~", "..")]
    return "/".join(parts[-2:]) if len(parts) > 1 else None


def adapters_alone(folder: Path) -> str | None:
    """What is wrong with a folder that has adapters (LoRA) instead of a model; None if it is not one."""
    if not (folder / "adapter_config.json").is_file() or (folder / "config.json").is_file():
        return None
    return (
        f"model.path: {folder} has adapters, not a model; merge them into their base first, by cdrmix export --model "
        f"{folder} --merge --out FOLDER, or by merge_and_unload of peft"
    )


@cache
def _vocab_size(path: str | None, random: str | None, remedy: str) -> int:
    if random is not None:
        origin, described = "model.random", parse_json(random)
    else:
        assert path is not None
        file = Path(path).expanduser() / "config.json"
        origin = str(file)
        try:
            described = parse_json(file.read_text(encoding="utf-8"))
        except OSError as error:
            if (problem := adapters_alone(file.parent)) is not None:
                raise ConfigError(problem) from error
            raise ConfigError(
                f"model.path: {path} is not a folder of a transformers model: {file} cannot be read "
                f"({error.strerror}); {remedy}"
            ) from error
        except ValueError as error:
            raise ConfigError(f"model.path: {file} is not JSON: {error}") from error
    for section in (described, described.get("text_config")) if isinstance(described, dict) else ():
        if isinstance(section, dict) and isinstance(section.get("vocab_size"), int):
            return int(section["vocab_size"])
    raise ConfigError(f"{origin} has no vocab_size: it does not describe a language model")
