"""cdrmix trains hybrid mixture-of-experts language models, from raw text to an exported model.

The Python API (docs/api.md). Each name is imported when it is used first:

    load(path)            loads a run, checkpoint or export folder; returns a TextModel: logits, generate, stream
    Sampling              how tokens are sampled
    Config                Config.from_yaml(path) reads a YAML file
    Callback              base class of callbacks for steps, records and checkpoints: train(config, callbacks=[...])
    LanguageModel(model)  the torch module of the model section of a configuration
    checkpoints(run)      lists the checkpoints of a run: step, size, held-out figure, why each is kept
    train(config)         does a whole run, the same as `cdrmix train`
    prepare(config)       prepares the text of a configuration: tokenised, packed shards
    errors                the exceptions
    ladder                PipelineRunner: trains a ladder of models, as `cdrmix ladder run` does
    ops                   the operators: attention, wkv7, ssd_scan, moe_experts, linear_cross_entropy, ...
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cdrmix import errors as errors
    from cdrmix import ladder as ladder
    from cdrmix import ops as ops
    from cdrmix.config.schema import Config as Config
    from cdrmix.data.prepare import prepare as prepare
    from cdrmix.hf.load import load as load
    from cdrmix.inference.sampling import Sampling as Sampling
    from cdrmix.inference.text_model import TextModel as TextModel
    from cdrmix.model.language_model import LanguageModel as LanguageModel
    from cdrmix.training.callbacks import Callback as Callback
    from cdrmix.training.management import checkpoints as checkpoints
    from cdrmix.workflow import run_all as train

__version__ = "0.1.0"
__all__ = [
    "Callback",
    "Config",
    "LanguageModel",
    "Sampling",
    "TextModel",
    "checkpoints",
    "errors",
    "ladder",
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
    "checkpoints": ("cdrmix.training.management", "checkpoints"),
    "load": ("cdrmix.hf.load", "load"),
    "prepare": ("cdrmix.data.prepare", "prepare"),
    "train": ("cdrmix.workflow", "run_all"),
}


if not TYPE_CHECKING:  # a type checker takes the names above, and none besides

    def __getattr__(name: str) -> object:
        if name in ("errors", "ladder", "ops"):
            return importlib.import_module(f"cdrmix.{name}")
        if name not in _WHERE:
            raise AttributeError(f"module 'cdrmix' has no attribute {name!r}; it has {', '.join(__all__)}")
        module, attribute = _WHERE[name]
        return getattr(importlib.import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
