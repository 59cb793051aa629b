"""cdrmix trains hybrid RWKV-7 / attention mixture-of-experts language models, from raw text to an exported model.

From Python (docs/api.md), each loaded when it is first used:

    load(path)              the model in a run, checkpoint or export folder: TextModel, with logits, generate, stream
    Sampling                how tokens are drawn
    Config.from_yaml(path)  the configuration of a YAML file
    Callback                a base class for callbacks on steps, records and checkpoints: train(config, callbacks=[...])
    LanguageModel(model)    the torch module of a configuration's model section
    train(config)           a run, from raw text to an exported model, as `cdrmix train` makes it
    prepare(config)         the text of a configuration to tokenised, packed shards
    errors                  what can go wrong, by kind
    ops                     the operators: attention, wkv7, ssd_scan, moe_experts, linear_cross_entropy, ...
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cdrmix import errors as errors
    from cdrmix import ops as ops
    from cdrmix.config.schema import Config as Config
    from cdrmix.data.prepare import prepare as prepare
    from cdrmix.inference.sampling import Sampling as Sampling
    from cdrmix.inference.text_model import TextModel as TextModel
    from cdrmix.inference.text_model import load as load
    from cdrmix.model.language_model import LanguageModel as LanguageModel
    from cdrmix.training.callbacks import Callback as Callback
    from cdrmix.workflow import run_all as train

__version__ = "0.1.0"
__all__ = [
    "Callback",
    "Config",
    "LanguageModel",
    "Sampling",
    "TextModel",
    "errors",
    "load",
    "ops",
    "prepare",
    "train",
]

_WHERE = {  # module and name there; imported when first asked for, so that `import cdrmix` takes no time
    "Callback": ("cdrmix.training.callbacks", "Callback"),
    "Config": ("cdrmix.config.schema", "Config"),
    "LanguageModel": ("cdrmix.model.language_model", "LanguageModel"),
    "Sampling": ("cdrmix.inference.sampling", "Sampling"),
    "TextModel": ("cdrmix.inference.text_model", "TextModel"),
    "load": ("cdrmix.inference.text_model", "load"),
    "prepare": ("cdrmix.data.prepare", "prepare"),
    "train": ("cdrmix.workflow", "run_all"),
}


if not TYPE_CHECKING:  # a type checker takes the names above, and none besides

    def __getattr__(name: str) -> object:
        if name in ("errors", "ops"):
            return importlib.import_module(f"cdrmix.{name}")
        if name not in _WHERE:
            raise AttributeError(f"module 'cdrmix' has no attribute {name!r}; it has {', '.join(__all__)}")
        module, attribute = _WHERE[name]
        return getattr(importlib.import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
