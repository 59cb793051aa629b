"""Low-rank adapters (LoRA) in models of transformers: how they are inserted, merged, written and read.

Also the quantization of their base, which stays frozen, and the hash that identifies it. An adapter is made and merged
by peft, so its tensors have the names and the meaning of peft.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from cdrmix.config.schema_huggingface import Lora
from cdrmix.durable import sha256_file
from cdrmix.errors import BaseModelError, CheckpointError, ConfigError
from cdrmix.inference.checkpoints import state_dict_mismatch, type_mismatch
from cdrmix.json_text import parse_json
from cdrmix.model.causal import evaluation_mode

ADAPTER = "default"  # peft's name of the only adapter of a model
DESCRIPTION, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # the files of an adapter folder
PREFIX = "base_model.model."  # of the names of weights in a file of peft
MISSING = "install the extra of this package: pip install 'cdrmix[hf]'"
EXPERTS = "experts"  # the name of the module of a mixture of experts in transformers
# A weight or bias that a module reads from its own layer: `self.out_proj.weight`. Questions about it do not count.
READ = re.compile(r"\bself\.(\w+)\.(?:weight|bias)\b(?!\.(?:device|dtype|shape|size|ndim|is_))")


def add_adapters(model: Any, lora: Lora, *, seed: int, base: str | None) -> None:
    """Freezes a model of transformers and puts trainable adapters into its layers. A is random by `seed`, B is 0.

    The adapters are float32. base: the folder of the model, which peft writes into its description of the adapters.
    Raises ConfigError if a layer that `lora` names does not exist or cannot have an adapter.
    """
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        _insert(model, lora, base)


def merge_adapters(model: Any, lora: Lora, weights: Mapping[str, Tensor], *, origin: Path) -> Any:
    """The model with trained adapters added to its weights: W + alpha / rank * B A. Its parameters are float32.

    model: without adapters, with float32 or quantized weights, which are dequantized first: the adapters were trained
    with the values that quantized weights have. weights: of the adapters, as a checkpoint has them.
    Raises CheckpointError, naming `origin`, if names, shapes or types do not match.
    """
    if getattr(model, "is_quantized", False):
        model = model.dequantize(dtype=torch.float32)
    stored = max((size for tensor in weights.values() for size in tensor.shape), default=0)
    if stored < lora.rank:  # before adapters of this rank are allocated
        raise CheckpointError(
            f"{origin} does not match the adapters of model.lora: no tensor in it has the rank, {lora.rank}, as a size"
        )
    tuner = _insert(model, lora, None)
    adapters = trained_parameters(model)
    shapes = {name: parameter.shape for name, parameter in adapters.items()}
    problem = state_dict_mismatch(weights, shapes) or type_mismatch(weights, adapters)
    if problem is not None:
        raise CheckpointError(f"{origin} does not match the adapters of model.lora: it {problem}")
    with torch.no_grad():
        for name, parameter in adapters.items():
            parameter.copy_(weights[name])
    return tuner.merge_and_unload()


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are not frozen, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def quantization(empty: Any, lora: Lora, precision: str) -> dict[str, Any]:
    """The arguments of `from_pretrained` that quantize the layers which may have adapters; {} without `lora.quantize`.

    The output head, embeddings, norms, experts and layers whose weight is read without a call are not quantized.
    The weights are always quantized on the CPU, so that training and merging have the same values on every device.
    empty: the model on the meta device. precision: as train.precision.
    """
    if lora.quantize is None:
        return {}
    try:
        import bitsandbytes  # noqa: F401
        from transformers import BitsAndBytesConfig
    except ImportError as error:
        raise ConfigError(
            "model.lora.quantize: nf4 needs the package bitsandbytes; install it: pip install 'cdrmix[qlora]'"
        ) from error
    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=lora.quantize,
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype={"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision],
        llm_int8_skip_modules=not_quantized(empty),
    )
    return {"quantization_config": settings, "device_map": {"": "cpu"}}


def keep_layout(model: nn.Module) -> None:
    """Keeps quantized weights as they are. On some CPUs bitsandbytes would repack them in the first forward pass
    without gradients, for products in bfloat16."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]


def not_quantized(model: Any) -> list[str]:
    """The names of the linear layers that quantization leaves out: the output head, and others without adapters."""
    usable = set(_usable(model, experts=False))
    return [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear) and name not in usable]


def describe(model: Any) -> list[str]:
    """Lines for the user: the trained weights, and the adapters that cannot learn because their layer is not called."""
    trained = sum(_size(parameter) for parameter in trained_parameters(model).values())
    stored = sum(_size(parameter) for parameter in model.parameters())
    lines = [f"adapters: {trained:,} of {stored:,} parameters are trained"]
    if layers := uncalled(model):
        lines.append(f"{len(layers)} adapters learn nothing, because the model does not call their layers: {layers[0]}")
    return lines


def uncalled(model: Any) -> list[str]:
    """The layers with an adapter that a forward pass does not call: their adapters have no effect and learn nothing.

    Experts may be without tokens, so they are not among them. No weight changes.
    """
    layers = {
        name: layer
        for name, layer in model.named_modules()
        if hasattr(layer, "lora_A") and EXPERTS not in name.split(".")
    }
    called: set[str] = set()
    hooks = [layer.register_forward_hook(lambda *_, name=name: called.add(name)) for name, layer in layers.items()]
    device = next(model.parameters()).device
    try:
        with evaluation_mode(model), torch.no_grad():
            model.base_model(input_ids=torch.zeros(1, 2, dtype=torch.long, device=device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return sorted(layers.keys() - called)


def base_sha256(folder: Path) -> str:
    """The SHA-256 that identifies the weights of a folder: that of the lines `sha256  name` of its safetensors files.

    `sha256sum *.safetensors | sha256sum` in the folder prints the same.
    """
    lines = "".join(f"{sha256_file(path)}  {path.name}\n" for path in sorted(folder.glob("*.safetensors")))
    return hashlib.sha256(lines.encode()).hexdigest()


def check_base(folder: Path, expected: str, origin: Path) -> None:
    """Raises BaseModelError if the adapters of `origin` were trained with other weights than those in `folder`."""
    if not folder.is_dir():
        raise BaseModelError(
            f"{origin} has adapters of the model {folder}, which does not exist; restore that folder, or export the "
            "run with --merge where the folder is"
        )
    found = base_sha256(folder)
    if found != expected:
        raise BaseModelError(
            f"{origin} has adapters of another base: they were trained with weights whose SHA-256 is {expected}, and "
            f"the files in {folder} have {found}; restore the base model"
        )


def write_adapters(model: Any, lora: Lora, weights: Mapping[str, Tensor], base: str | None, folder: Path) -> None:
    """Writes the two files of an adapter folder as peft reads them. model: the base or the merged model."""
    settings = _settings(model, lora, base)
    settings.inference_mode = True
    settings.save_pretrained(folder)
    # peft writes sets, whose order differs between processes.
    text = (folder / DESCRIPTION).read_text(encoding="utf-8")
    described = {name: sorted(value) if isinstance(value, list) else value for name, value in parse_json(text).items()}
    (folder / DESCRIPTION).write_text(json.dumps(described, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    save_file(
        {_name_in_file(name): tensor for name, tensor in weights.items()}, folder / WEIGHTS, metadata={"format": "pt"}
    )


def read_adapters(folder: Path) -> dict[str, Tensor]:
    """The weights of a folder of `write_adapters`, by the names that they have in the model. Raises CheckpointError."""
    try:
        stored = load_file(folder / WEIGHTS)
    except SafetensorError as error:
        raise CheckpointError(f"{folder / WEIGHTS}: not a safetensors file: {error}") from error
    return {_name_in_model(name): tensor for name, tensor in stored.items()}


def _name_in_file(name: str) -> str:
    """The name of an adapter's weight in a file of peft, from its name in the model."""
    return PREFIX + name.replace(f".{ADAPTER}.", ".")


def _name_in_model(name: str) -> str:
    """The name of an adapter's weight in the model, from its name in a file of peft."""
    return re.sub(r"\.(lora_[AB])\.", rf".\1.{ADAPTER}.", name.removeprefix(PREFIX))


def _insert(model: Any, lora: Lora, base: str | None) -> Any:
    return _peft().LoraModel(model, _settings(model, lora, base), ADAPTER)


def _size(parameter: Any) -> int:
    """Elements of a parameter, which may be sharded by ZeRO-3 or quantized."""
    if (state := getattr(parameter, "quant_state", None)) is not None:
        return int(state.shape.numel())
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _settings(model: Any, lora: Lora, base: str | None) -> Any:
    """The LoraConfig of peft. Raises ConfigError."""
    layers, parameters = _targets(model, lora), _expert_parameters(model) if lora.experts else []
    if lora.experts and not parameters and not any(EXPERTS in name.split(".") for name in layers):
        raise ConfigError(f"model.lora.experts: {model.config.model_type} has no experts; set it to false")
    return _peft().LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=_short(model, layers),
        target_parameters=parameters or None,
        fan_in_fan_out=not any(isinstance(model.get_submodule(name), nn.Linear) for name in layers),
        bias="none",
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
    )


def _targets(model: Any, lora: Lora) -> list[str]:
    """The full names of the layers that get adapters."""
    usable = _usable(model, experts=lora.experts)
    if lora.targets == "auto":
        if not usable:
            raise ConfigError(f"model.lora: {model.config.model_type} has no linear layer that can have an adapter")
        return usable
    known = ", ".join(sorted({name.rpartition(".")[2] for name in usable}))
    if not lora.targets:
        raise ConfigError(f"model.lora.targets: found no name; allowed: auto, or a list of {known}")
    chosen: list[str] = []
    for target in lora.targets:
        named = [name for name in usable if name == target or name.endswith(f".{target}")]
        if not named:
            exists = any(name == target or name.endswith(f".{target}") for name, _ in model.named_modules())
            what = "cannot have an adapter" if exists else "does not exist"
            raise ConfigError(
                f"model.lora.targets: the layer {target} {what} in {model.config.model_type}; the linear layers that "
                f"can have one are {known}"
            )
        chosen += named
    return [name for name in usable if name in chosen]


def _usable(model: Any, *, experts: bool) -> list[str]:
    """The names of the linear layers that can have an adapter.

    Not the output head, whose weight the loss reads; not layers whose weight another module reads without a call, as
    kernels of Mamba do; not layers that share a weight, into which several adapters cannot be merged; and not layers
    whose names peft takes for those of fused experts.
    """
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
    from transformers.pytorch_utils import Conv1D  # the linear layer of GPT-2

    owners = dict(model.named_modules())
    reads = {kind: _read_weights(kind) for kind in {type(owner) for owner in owners.values()}}
    read = {f"{name}.{layer}" for name, owner in owners.items() for layer in reads[type(owner)]}
    layers = {name: layer for name, layer in owners.items() if isinstance(layer, nn.Linear | Conv1D)}
    uses = Counter(layer.weight for layer in layers.values())
    names = [
        name
        for name, layer in layers.items()
        if layer is not model.get_output_embeddings()
        and name not in read
        and uses[layer.weight] == 1
        and (experts or EXPERTS not in name.split("."))
    ]
    settings = _peft().LoraConfig(target_modules=names)
    convert_peft_config_for_transformers(settings, model, None)
    return [name for name in names if name in settings.target_modules]


def _read_weights(kind: type[nn.Module]) -> frozenset[str]:
    """The names of the layers of a module whose weight or bias its code reads itself.

    The source is read, because which code runs depends on the machine and on the packages that are installed.
    """
    sources = [inspect.getsource(each) for each in kind.__mro__ if each.__module__.startswith("transformers.models.")]
    return frozenset(name for source in sources for name in READ.findall(source))


def _expert_parameters(model: nn.Module) -> list[str]:
    """The names of the weights [experts, inputs, outputs] of mixtures of experts."""
    return [
        name
        for name, parameter in model.named_parameters()
        if name.split(".")[-2:-1] == [EXPERTS]
        and "bias" not in name.rpartition(".")[2]
        and len(getattr(parameter, "ds_shape", parameter.shape)) == 3
    ]


def _short(model: nn.Module, names: list[str]) -> list[str]:
    """The last parts of the names if they stand for the same layers, otherwise the names."""
    last = sorted({name.rpartition(".")[2] for name in names})
    meant = [name for name, _ in model.named_modules() if name.rpartition(".")[2] in last]
    return last if sorted(meant) == sorted(names) else names


def _peft() -> Any:
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # peft imports it, and it advises to install kernels
    try:
        import peft
    except ImportError as error:
        raise ConfigError(f"model.lora needs the package peft; {MISSING}") from error
    return peft
