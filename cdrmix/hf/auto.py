"""Makes transformers know cdrmix models, so that its Auto classes open them without remote code."""

from __future__ import annotations

from cdrmix.errors import ConfigError


def register() -> None:
    """Registers the configuration, the model and the tokenizer class with the Auto classes of transformers.

    Call it once in a process before `AutoModelForCausalLM.from_pretrained(folder)`. A second call changes nothing.
    Raises ConfigError if transformers is not installed.
    """
    try:
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
    except ImportError as error:
        raise ConfigError(f"transformers cannot be imported ({error}); run pip install 'cdrmix[hf]'") from error

    from cdrmix.hf.configuration_cdrmix import CdrmixConfig
    from cdrmix.hf.modeling_cdrmix import CdrmixForCausalLM

    AutoConfig.register(CdrmixConfig.model_type, CdrmixConfig, exist_ok=True)
    AutoModelForCausalLM.register(CdrmixConfig, CdrmixForCausalLM, exist_ok=True)
    AutoTokenizer.register(CdrmixConfig, fast_tokenizer_class=PreTrainedTokenizerFast, exist_ok=True)
