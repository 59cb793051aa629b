"""The model card: the file README.md of an exported model."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cdrmix.config.schema import Config
from cdrmix.config.schema_huggingface import HuggingFaceModel
from cdrmix.eval.changes import changes, table

STAGE_A_ONLY = "Only stage A (the backbone) is trained: all phases of stage B (`reasoning.phases`) have 0 steps."

_HEADS = """
transformers reads the language model. It does not read the heads of stage B (controller, operations, summary).
"""
NAMES = {"rwkv7": "RWKV-7", "attention": "attention", "mamba2": "Mamba-2", "routing_mamba": "Routing-Mamba"}


def model_card(config: Config, step: int, stored: int, summary: Mapping[str, Any], *, heads: bool = False) -> str:
    """Markdown with front matter: what the model is, its results on held-out text, and how to use it.

    step: 0 for a model that was imported. stored: number of parameters in the files. summary: metrics.json of the run.
    Results that are missing, or that belong to another step, are omitted. heads: whether the files have heads of stage
    B.
    """
    model = config.cdrmix_model
    feed_forward = model.feed_forward
    experts = (
        f"{feed_forward.experts} experts of {feed_forward.hidden}, top-{feed_forward.top_k} ({feed_forward.activation})"
        if feed_forward.kind == "moe"
        else f"dense feed-forward of {feed_forward.hidden} ({feed_forward.activation})"
        if feed_forward.kind == "dense"
        else f"dense {feed_forward.kind.replace('_', '-')} of {feed_forward.hidden}"
    )
    if feed_forward.dense_layers:
        experts += f"; {len(feed_forward.dense_layers)} layers are dense, of {feed_forward.dense_width}"
    if feed_forward.shared_hidden is not None:
        experts += f"; a shared expert of {feed_forward.shared_hidden}"
    if model.depth is not None:
        names = {"feed_forward": "feed-forwards", "mixer": "mixers", "both": "mixers and feed-forwards"}
        experts += f"; {names[model.depth.part]} compute {model.depth.capacity:.0%} of the tokens"
    mixers_used = [*filter(model.mixers.__contains__, NAMES), *sorted({*model.mixers} - NAMES.keys())]
    counts = {NAMES.get(mixer, mixer): model.mixers.count(mixer) for mixer in mixers_used}
    mixers = ", ".join(f"{count} {name}" for name, count in counts.items())
    tags = [mixer.replace("_", "-") for mixer in mixers_used]
    tags += ["mixture-of-experts"] if model.routers else []
    kind = f"{'hybrid ' if len(counts) > 1 else ''}{'/'.join(counts)}"
    parameters = f"{stored:,} stored"
    if active := summary.get("parameters", {}).get("active"):
        parameters += f", {active:,} active per token"
    held_out = _held_out_of(summary, step)
    front = _front_matter(config, ["cdrmix", "custom_code", *tags], config.export.base_model, held_out)
    steps = f"{step:,} steps of {config.train.batch_sizes.text} of {config.data.row_length} tokens"
    origin = f"trained by cdrmix for {steps}" if step else "imported by cdrmix, which has not trained it"
    text = f"| text | source `{config.data.source_kinds()}`, seed {config.run.seed} |\n" if step else ""
    return f"""{front}
# {config.run.name}

A {kind} language model, {origin}.{_stages(config)}

| | |
|---|---|
| parameters | {parameters} |
| layers | {model.layers} of width {model.d_model}: {mixers} |
| feed-forward | {experts} |
| vocabulary | {model.vocab_size:,} (tokenizer in `tokenizer.json`) |
| weights | float32 safetensors |
{text}{_figures(held_out)}{_domains(summary, held_out)}
## Use

    cdrmix generate --model PATH_OF_THIS_FOLDER --prompt "def "
    cdrmix eval --model PATH_OF_THIS_FOLDER

In transformers 4.57 or 5, with cdrmix installed:

```python
import cdrmix.hf.auto
from transformers import AutoModelForCausalLM, AutoTokenizer

cdrmix.hf.auto.register()  # or pass trust_remote_code=True below
tokenizer = AutoTokenizer.from_pretrained("PATH_OF_THIS_FOLDER")
model = AutoModelForCausalLM.from_pretrained("PATH_OF_THIS_FOLDER")
prompt = tokenizer("def ", return_tensors="pt")
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=64)[0]))
```
{_HEADS if heads else ""}
`sha256sum -c SHA256SUMS` verifies the files. cdrmix verifies them each time it loads them. The configuration
`config_snapshot.yaml` is complete{": it reproduces the training" if step else ""}.
"""


def foreign_card(config: Config, architecture: str, step: int, stored: int, summary: Mapping[str, Any]) -> str:
    """The model card of a model of transformers. Arguments as of `model_card`."""
    section = config.model
    assert isinstance(section, HuggingFaceModel)
    base = config.export.base_model or _name_of(section)
    origin = "from random weights" if section.path is None else f"continued from `{_name_of(section)}`"
    if (lora := section.lora) is not None:
        origin += f", by adapters (LoRA) of rank {lora.rank} and alpha {lora.alpha:g} that were merged into it,"
    held_out = _held_out_of(summary, step)
    return f"""{_front_matter(config, [architecture.replace("_", "-")], base, held_out)}
# {config.run.name}

A {architecture} language model, trained by cdrmix {origin} for {step:,} steps of {config.train.batch_sizes.text} of \
{config.data.row_length} tokens.

| | |
|---|---|
| parameters | {stored:,} |
| weights | {"float32" if config.export.weights == "fp32" else "bfloat16"} safetensors |
| text | source `{config.data.source_kinds()}`, seed {config.run.seed} |
{_figures(held_out)}{_domains(summary, held_out)}
## Use

    from transformers import AutoModelForCausalLM, AutoTokenizer
    model = AutoModelForCausalLM.from_pretrained("PATH_OF_THIS_FOLDER")
    tokenizer = AutoTokenizer.from_pretrained("PATH_OF_THIS_FOLDER")

`cdrmix generate --model PATH_OF_THIS_FOLDER --prompt "def "` and `cdrmix eval --model PATH_OF_THIS_FOLDER` work too.
`sha256sum -c SHA256SUMS` verifies the files. The configuration `config_snapshot.yaml` is complete.
"""


def adapter_card(
    config: Config, architecture: str, step: int, stored: int, unquantized: Sequence[str], summary: Mapping[str, Any]
) -> str:
    """The model card of adapters. stored: their parameters. unquantized: names of the linear layers that
    were not quantized. Other arguments as of `model_card`."""
    section = config.model
    assert isinstance(section, HuggingFaceModel)
    assert section.lora is not None
    base, lora = _name_of(section), section.lora
    held_out = _held_out_of(summary, step)
    options = settings = ""
    if lora.quantize is not None:
        options = ", quantization_config=settings"
        settings = f"""    # The adapters were trained with the base quantized so. With another base the logits differ.
    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="{lora.quantize}",
        bnb_4bit_use_double_quant=True,
        llm_int8_skip_modules={[*unquantized]},
    )
"""
    tags = [architecture.replace("_", "-"), "lora"]
    return f"""{_front_matter(config, tags, config.export.base_model or base, held_out, library="peft")}
# {config.run.name}

Adapters (LoRA) for the {architecture} language model `{base}`, trained by cdrmix for {step:,} steps of \
{config.train.batch_sizes.text} of {config.data.row_length} tokens.

| | |
|---|---|
| parameters | {stored:,}; rank {lora.rank}, alpha {lora.alpha:g} |
| weights | float32 safetensors |
| text | source `{config.data.source_kinds()}`, seed {config.run.seed} |
{_figures(held_out)}{_domains(summary, held_out)}
## Use

    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer{", BitsAndBytesConfig" if options else ""}
{settings}    model = AutoModelForCausalLM.from_pretrained("PATH_OF_THE_BASE"{options})
    model = PeftModel.from_pretrained(model, "PATH_OF_THIS_FOLDER")
    tokenizer = AutoTokenizer.from_pretrained("PATH_OF_THIS_FOLDER")

`cdrmix export --model PATH_OF_THIS_FOLDER --merge --out FOLDER` merges them into the base. `cdrmix generate` and
`cdrmix eval` take this folder too, where the base is at `{section.path}`. `sha256sum -c SHA256SUMS` verifies the files.
"""


def _name_of(section: HuggingFaceModel) -> str | None:
    """The name of the model that a training continues, without its folder; None for random weights."""
    return None if section.path is None else Path(section.path).name


def _held_out_of(summary: Mapping[str, Any], step: int) -> Mapping[str, Any] | None:
    """The results on held-out text in metrics.json if they are those of this step."""
    return summary.get("held_out") if summary.get("held_out_step") == step else None


def _front_matter(
    config: Config,
    tags: Sequence[str],
    base: str | None,
    held_out: Mapping[str, Any] | None,
    *,
    library: str = "transformers",
) -> str:
    """The lines of YAML before the text of a card, which the Hugging Face Hub reads."""
    lines = [
        "---",
        f"library_name: {library}",
        "pipeline_tag: text-generation",
        f"license: {json.dumps(config.export.license or 'unknown')}",
        *([] if base is None else [f"base_model: {json.dumps(base)}"]),
        f"tags: [{', '.join(tags)}]",
        *_model_index(config.run.name, held_out),
        "---",
    ]
    return "\n".join(lines) + "\n"


def _model_index(name: str, held_out: Mapping[str, Any] | None) -> list[str]:
    """The results on held-out text as lines of YAML that the Hugging Face Hub reads."""
    if not held_out:
        return []
    metrics = {"bits_per_byte": "bits per byte", "perplexity": "perplexity per token"}
    return [
        "model-index:",
        f"- name: {json.dumps(name)}",
        "  results:",
        "  - task: {type: text-generation}",
        "    dataset: {type: held-out, name: held-out text of the run}",
        "    metrics:",
        *(
            f"    - {{type: {key}, name: {json.dumps(metrics[key])}, value: {json.dumps(float(held_out[key]))}}}"
            for key in metrics
            if math.isfinite(held_out[key])
        ),
    ]


def _stages(config: Config) -> str:
    if config.reasoning is None:
        return ""
    phases = [f"{name} ({section.steps:,} steps)" for name, section in config.reasoning.phases if section.steps]
    if not phases:
        return f"\n\n**{STAGE_A_ONLY}**"
    return f" Of these, stage B: {', '.join(phases)}; `cdrmix reason demo` shows it at work."


def _figures(held_out: Mapping[str, Any] | None) -> str:
    if not held_out:
        return ""
    return f"""
## Held-out text

{held_out["tokens"]:,} tokens, {held_out["text_bytes"]:,} bytes that were not in the training text; lower is better.

| | bits per byte |
|---|---|
| this model | **{held_out["bits_per_byte"]:.4f}** (perplexity per token {held_out["perplexity"]:.3f}) |
| unigram distribution of the same tokens | {held_out["unigram_bits_per_byte"]:.4f} |
| gzip -9 | {held_out["gzip9_bits_per_byte"]:.4f} |
| zstd -19 | {held_out["zstd19_bits_per_byte"]:.4f} |
"""


def _domains(summary: Mapping[str, Any], held_out: Mapping[str, Any] | None) -> str:
    before = summary.get("held_out_before")
    if not held_out or not (before or held_out.get("domains")):
        return ""
    head, *body = table(changes(before, held_out))
    lines = [head, ("---", *("---:" for _ in head[1:])), *body]
    rows = "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |" for cells in lines)
    start = f", before (step {summary.get('held_out_before_step', 0):,}) and after the training" if before else ""
    return f"""
Bits per byte by domain{start}:

{rows}
"""
