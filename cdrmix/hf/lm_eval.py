"""The command line of lm-eval with models of cdrmix: `python -m cdrmix.hf.lm_eval --model cdrmix --model_args path=M`.

lm-eval 0.4.13 has no entry points for models of other packages, so this module registers the model `cdrmix` and runs
lm-eval's own command line. All its options work, except for chat templates. `M` is as of `cdrmix.load`, or a folder of
transformers. Other values of model_args: device, batch_size, max_length (default: the tokens of a row in training).
The Hugging Face hub is not used unless HF_HUB_OFFLINE=0 is set.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from cdrmix.errors import CdrmixError, ConfigError
from cdrmix.registry import nearest

NAME = "cdrmix"
ARGUMENTS = ("path", "device", "batch_size", "max_length")
BATCH_SIZE = 8
LM_EVAL_DEVICE = "cuda:0"
_OF_LM_EVAL = ("max_batch_size",)  # lm-eval passes it always; it is for batch sizes that lm-eval finds itself


@cache
def model_class() -> Any:
    """The class that lm-eval makes from --model_args."""
    from cdrmix.hf.harness import language_model_class

    class CdrmixModel(language_model_class()):  # type: ignore[misc]
        """A model of cdrmix by the path of its run, checkpoint or export."""

        @classmethod
        def create_from_arg_obj(cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None) -> Any:
            of_options = dict(additional_config or {})
            if of_options.get("device") == LM_EVAL_DEVICE:  # its default, with which its own models use a GPU if any
                of_options["device"] = "auto"
            given = {**of_options, **arg_dict}
            return cls(_harness_model({name: value for name, value in given.items() if value is not None}))

        @classmethod
        def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> Any:
            from lm_eval.utils import simple_parse_args_string

            return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    return CdrmixModel


def _harness_model(given: dict[str, Any]) -> Any:
    """The model of these arguments. Raises ConfigError for an unknown one and one out of range."""
    from cdrmix.hf.harness_model import HarnessModel, prompts_begin
    from cdrmix.hf.load import load_alone

    for name in given.keys() - {*ARGUMENTS, *_OF_LM_EVAL}:
        close = nearest(name, ARGUMENTS)
        hint = f"; did you mean {close!r}?" if close else ""
        raise ConfigError(f"--model_args: {name!r} is not known{hint} It may have {', '.join(ARGUMENTS)}")
    if "path" not in given:
        raise ConfigError("--model_args path=FOLDER must name a run, a checkpoint or an export")
    loaded = load_alone(Path(str(given["path"])), given.get("device"))
    return HarnessModel(
        loaded.model,
        loaded.tokenizer,
        begins=prompts_begin(loaded),
        max_length=_positive(given, "max_length", loaded.config.data.row_length),
        batch_size=_positive(given, "batch_size", BATCH_SIZE),
        say=lambda text: print(text, file=sys.stderr, flush=True),
    )


def _positive(given: dict[str, Any], name: str, default: int) -> int:
    text = str(given.get(name, default))
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"{name} must be an integer of at least 1; found {text!r}")
    return int(text)


def register() -> None:
    """Makes `cdrmix` a model of lm-eval in this process; a second call changes nothing."""
    from lm_eval.api.registry import model_registry

    import cdrmix.hf.harness

    cdrmix.hf.harness.check_installed()
    model_registry.register(NAME, target=model_class())


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs lm-eval's command line. Returns the exit code: those of lm-eval and of docs/exit-codes.md."""
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        os.environ.setdefault(name, "1")  # before the packages are imported that read it
    try:
        from cdrmix.hf.harness import check_installed

        check_installed()
        from lm_eval.__main__ import cli_evaluate

        register()
        kept = sys.argv
        try:
            sys.argv = ["lm_eval", *(sys.argv[1:] if arguments is None else arguments)]
            cli_evaluate()
        finally:
            sys.argv = kept
    except CdrmixError as error:
        print(f"cdrmix: error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
