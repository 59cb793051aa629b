"""Models of transformers: read from a folder or built from a description or weights; their loss and generation.

Only safetensors are read, and no code of a model is run. Names of parameters are those of transformers.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from cdrmix.config.schema import Config
from cdrmix.config.schema_huggingface import HuggingFaceModel, adapters_alone
from cdrmix.errors import CdrmixWarning, CheckpointError, ConfigError
from cdrmix.hf import adapters, mamba
from cdrmix.hf.head import Head, head_layer, head_logits, head_loss, probe_head
from cdrmix.hf.packing import Packing, called_outside_engine, choose_packing, decode, decoder_of
from cdrmix.hf.positions import Positions
from cdrmix.inference.checkpoints import not_finite, state_dict_mismatch, type_mismatch
from cdrmix.json_text import parse_json
from cdrmix.model.language_model import Output, RouterStats
from cdrmix.model.loss import LossModule

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DESCRIPTION = "config.json"
FLOATS = ("F64", "F32", "F16", "BF16")  # types of safetensors that weights may have, unless they are quantized
DEEP = 1000  # layers; of a model with more, the files are asked whether they have them
SMALL = 1 << 24  # numbers that a model may have beyond twice those of its files, before what is missing is named


class Size(NamedTuple):
    """Rows of the embedding: those that have a token, and all, which include padding."""

    tokens: int
    rows: int


def section_of(config: Config) -> HuggingFaceModel:
    """The section `model` of a model of transformers. Raises ConfigError for a model of this package."""
    if isinstance(config.model, HuggingFaceModel):
        return config.model
    raise ConfigError("this works only with model.kind: huggingface")


def transformers_config(section: HuggingFaceModel, *, with_weights: bool = True) -> Any:
    """The configuration of the architecture, as transformers reads it. with_weights: the folder must have them too.

    Raises ConfigError if there is none, if transformers does not know the architecture, or if it needs code of its own.
    """
    auto = _transformers().AutoConfig
    refused = _configuration_errors()
    if section.random is not None:
        values = dict(section.random)
        kind = values.pop("model_type", None)
        if not isinstance(kind, str):
            raise ConfigError("model.random: name the architecture as model_type, for example model_type: llama")
        try:
            return auto.for_model(kind, **values)
        except refused as error:
            raise ConfigError(
                f"model.random: transformers cannot make {kind} of these keys: {_first(error)}"
            ) from error
    folder = section.folder
    if folder is None:
        raise ConfigError(f"model.path: there is no folder {section.path}; {section.remedy}")
    check_folder(folder, with_weights=with_weights)
    try:
        described = auto.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except refused as error:
        raise ConfigError(f"model.path: transformers cannot read {section.path}: {_first(error)}") from error
    if _depth(described) > DEEP and (files := sorted(folder.glob("*.safetensors"))):
        _check_depth(described, sum(len(_header(path)) for path in files), folder)
    return described


def check_folder(folder: Path, *, with_weights: bool = True) -> None:
    """Raises ConfigError if the folder has no description, code of its own, no safetensors, or missing shards.

    The index must name the tensors that the files have.
    """
    if (problem := adapters_alone(folder)) is not None:
        raise ConfigError(problem)
    try:
        description = parse_json((folder / DESCRIPTION).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"model.path: {folder / DESCRIPTION} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"model.path: {folder / DESCRIPTION} is not JSON: {error}") from error
    if not isinstance(description, dict):
        raise ConfigError(f"model.path: {folder / DESCRIPTION} is not a JSON object: it does not describe a model")
    kind = description.get("model_type")
    if kind == "cdrmix":
        raise ConfigError(f"model.path: {folder} is a model of cdrmix, not of transformers; leave model.kind out")
    if kind not in _transformers().models.auto.configuration_auto.CONFIG_MAPPING:
        own = " It has code of its own (auto_map), which is never run." if "auto_map" in description else ""
        raise ConfigError(
            f"model.path: {folder}: transformers {_transformers().__version__} has no architecture {kind!r}.{own} "
            "Use a model whose architecture transformers has"
        )
    if with_weights:
        check_weights(folder)


def check_weights(folder: Path) -> None:
    """Raises ConfigError unless the folder has whole safetensors, one file or several with a correct index."""
    if (folder / SINGLE).is_file():
        _header(folder / SINGLE)
        return
    if not (folder / INDEX).is_file():
        pickled = sorted(path.name for path in folder.glob("*.bin")) + sorted(path.name for path in folder.glob("*.pt"))
        what = f"only pickled weights ({pickled[0]}), which can run code" if pickled else "no weights"
        raise ConfigError(
            f"model.path: {folder} has {what}; safetensors are needed: {SINGLE}, or several files with {INDEX}. "
            "`save_pretrained` of transformers writes them"
        )
    try:
        whole = parse_json((folder / INDEX).read_text(encoding="utf-8"))
        index: dict[str, str] = whole["weight_map"]
        files = sorted(set(index.values()))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"model.path: {folder / INDEX} is not an index of safetensors: {error}") from error
    missing = [name for name in files if not (folder / name).is_file()]
    if missing:
        raise ConfigError(
            f"model.path: {folder} lacks {len(missing)} of {len(files)} files of its index, the first is {missing[0]}; "
            "copy them too"
        )
    for name in files:
        expected = {tensor for tensor, file in index.items() if file == name}
        if lacking := sorted(expected - _header(folder / name).keys()):
            raise ConfigError(
                f"model.path: {folder / INDEX} says that {name} has {lacking[0]}, but it has not: the index is wrong"
            )
    if not isinstance(whole.get("metadata"), dict):
        raise ConfigError(f'model.path: {folder / INDEX} lacks what transformers reads: add the key "metadata": {{}}')


def base_model(config: Config, dtype: torch.dtype = torch.float32) -> Any:
    """The model that a training begins with, without adapters, in this dtype; quantized with model.lora.quantize."""
    section = section_of(config)
    described = transformers_config(section)
    from transformers.integrations import is_deepspeed_zero3_enabled

    if not is_deepspeed_zero3_enabled():  # then `make_model` has called it
        check_sizes(section, described)
    options: dict[str, Any] = {"dtype": dtype, **_attention(section, config)}
    if section.lora is not None and section.lora.quantize is not None:
        with quiet(), torch.device("meta"):
            empty = _transformers().AutoModelForCausalLM.from_config(described)
        options |= adapters.quantization(empty, section.lora, config.train.precision)
    with quiet():
        model = (
            _random_model(described, options)
            if section.random is not None
            else _read_model(section, described, options)
        )
        adapters.keep_layout(model)
        size = vocabulary(section)
        if model.get_input_embeddings().num_embeddings != size.rows:
            model.resize_token_embeddings(size.rows)
    return model


def _random_model(described: Any, options: dict[str, Any]) -> Any:
    try:
        return _transformers().AutoModelForCausalLM.from_config(described, **options)
    except ValueError as error:
        raise ConfigError(
            f"model.random: {described.model_type} is not a causal language model: {_first(error)}"
        ) from error


def _read_model(section: HuggingFaceModel, described: Any, options: dict[str, Any]) -> Any:
    """The model with the weights of its files.

    Raises ConfigError if tensors are missing, have other shapes or values that are not finite, and if there is a head
    that the description ties to the embedding.
    """
    try:
        model, report = _transformers().AutoModelForCausalLM.from_pretrained(
            section.folder,
            config=described,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are in the report, which is read below
            local_files_only=True,
            trust_remote_code=False,
            **options,
        )
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(f"model.path: {section.path} cannot be loaded: {_first(error)}") from error
    if missing := sorted(report["missing_keys"]):
        raise ConfigError(
            f"model.path: {section.path} lacks {len(missing)} tensors of its architecture, the first is {missing[0]}"
        )
    if wrong := sorted(report["mismatched_keys"]):
        raise _wrong_shape(section.path, *wrong[0])
    _check_head(model, section, described)
    if (problem := not_finite(dict(model.named_parameters()))) is not None:
        raise ConfigError(f"model.path: {section.path} {problem}")
    if unused := sorted(report["unexpected_keys"]):
        warnings.warn(
            f"model.path: {len(unused)} tensors of {section.path} are not used, the first is {unused[0]}; the "
            f"architecture of its config.json has no such tensor",
            CdrmixWarning,
            stacklevel=2,
        )
    return model


def _check_head(model: Any, section: HuggingFaceModel, described: Any) -> None:
    """Raises ConfigError if the files have a head of their own, and the description says that it is the embedding.

    transformers loads both then; an export would have the tensors of the description alone.
    """
    if model.get_output_embeddings() is None or _ties_head(model):
        return
    assert section.folder is not None
    if _ties_head(_without_memory(described, section.folder)):
        raise ConfigError(
            f"model.path: {section.path}: the head of the weights is not the embedding, and {DESCRIPTION} says that it "
            "is (tie_word_embeddings: true). Set tie_word_embeddings: false there, or remove the tensor of the head "
            "from the weights, whichever is right"
        )


def _ties_head(model: Any) -> bool:
    return model.get_output_embeddings().weight is model.get_input_embeddings().weight


def model_of(config: Config, folder: Path, weights: Mapping[str, Tensor], *, origin: Path) -> Any:
    """The model with given weights, by name. folder: has the config.json of the model before training.

    Raises CheckpointError, naming `origin`, if names, shapes or types do not match. Sizes are compared before memory is
    allocated.
    """
    section = section_of(config).model_copy(update={"path": str(folder), "random": None})
    try:
        described = transformers_config(section, with_weights=False)
        described.get_text_config().vocab_size = vocabulary(section).rows
        _check_depth(described, len(weights), folder)
        empty = _without_memory(described, folder)
    except ConfigError as error:
        raise CheckpointError(str(error)) from error
    wanted = trained_tensors(empty)
    shapes = {name: tensor.shape for name, tensor in wanted.items()}
    problem = state_dict_mismatch(weights, shapes) or type_mismatch(weights, wanted)
    if problem is not None:
        raise CheckpointError(f"{origin} does not match {folder / DESCRIPTION}: it {problem}")
    if (problem := not_finite(weights)) is not None:
        raise CheckpointError(f"{origin} {problem}")
    with quiet():
        model = type(empty).from_pretrained(
            None, config=described, state_dict=dict(weights), dtype=torch.float32, **_attention(section, config)
        )
    return model.eval().requires_grad_(False)


def _depth(described: Any) -> int:
    layers = getattr(described.get_text_config(), "num_hidden_layers", 0)
    return layers if isinstance(layers, int) else 0


def _check_depth(described: Any, tensors: int, folder: Path) -> None:
    """Raises ConfigError for more layers than the files have tensors: making them would take as long as config.json
    says."""
    if (layers := _depth(described)) > tensors:
        raise ConfigError(
            f"{folder / DESCRIPTION} describes {layers:,} layers, and the weights are {tensors:,} tensors"
        )


def _without_memory(described: Any, folder: Path) -> Any:
    """The model of a configuration, without memory. Raises ConfigError if none can be made."""
    try:
        with quiet(), torch.device("meta"):
            return _transformers().AutoModelForCausalLM.from_config(described)
    # What the architectures raise for sizes that do not go together, or that no memory has.
    except (ValueError, TypeError, RuntimeError, ArithmeticError, LookupError, AttributeError) as error:
        raise ConfigError(f"{folder / DESCRIPTION} describes no model that can be made: {_first(error)}") from error


def check_sizes(section: HuggingFaceModel, described: Any) -> None:
    """Compares the sizes and types of a model with the headers of its files, before memory is allocated.

    Names are not compared: transformers reads some under others, and joins tensors. Nothing is compared of random
    weights, and of quantized files, which have other tensors than the model. Raises ConfigError.
    """
    folder = section.folder
    if section.random is not None or folder is None or getattr(described, "quantization_config", None) is not None:
        return
    headers: dict[str, tuple[list[int], str]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        headers |= _header(path)
    _check_depth(described, len(headers), folder)
    wanted = trained_tensors(_without_memory(described, folder))
    for name, tensor in wanted.items():
        if name not in headers:
            continue
        shape, kind = headers[name]
        if tensor.is_floating_point() and kind not in FLOATS:
            raise ConfigError(
                f"model.path: {folder} has {name} with the type {kind}, and config.json has no quantization_config; "
                f"allowed: {', '.join(FLOATS)}"
            )
        if shape != list(tensor.shape):
            raise _wrong_shape(folder, name, shape, tensor.shape)
    needed = sum(tensor.numel() for tensor in wanted.values())
    held = sum(math.prod(shape) for shape, _ in headers.values())
    if needed > 2 * held + SMALL:
        raise ConfigError(
            f"model.path: {folder / DESCRIPTION} describes {needed:,} numbers, and the files have {held:,}: they are "
            "not of the same model"
        )


def _wrong_shape(folder: object, name: str, found: Sequence[int], expected: Sequence[int]) -> ConfigError:
    return ConfigError(
        f"model.path: {folder} has {name} with the shape {list(found)}, and config.json describes one with "
        f"{list(expected)}"
    )


def trained_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and the buffers that a checkpoint keeps, by name; tied parameters once."""
    kept = set(model.state_dict())
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in kept}
    return {**dict(model.named_parameters()), **buffers}


def vocabulary(section: HuggingFaceModel) -> Size:
    """The size of the embedding with `model.vocab`."""
    tokens = section.vocab_size
    return Size(tokens, -(-tokens // section.vocab.pad_to) * section.vocab.pad_to)


class ForeignLossModel(LossModule):
    """A model of transformers whose output is its loss. `language_model` is the model of transformers itself.

    `prepare` must be called before the first forward pass.
    """

    def __init__(self, language_model: nn.Module, section: HuggingFaceModel) -> None:
        super().__init__()
        mamba.install(language_model)
        self.language_model = language_model
        self._section, self._tokens = section, vocabulary(section).tokens
        self._positions = Positions.of(language_model)
        self._packing: Packing | None = None
        self._head = Head()
        described: Any = language_model.config
        self._experts = _Experts.of(described)
        if section.lora is not None:
            assert section.named_folder is not None, "adapters of random weights are refused"
            self.base = adapters.base_sha256(section.named_folder)

    def assume(self, packing: Packing, head: Head) -> None:
        """Uses these instead of what `prepare` finds: for tensors without values, on which nothing can be tested."""
        self._packing, self._head = packing, head
        self._positions = self._positions._replace(limit=None)

    def prepare(self) -> list[str]:
        """Tests how packed documents are isolated, and finds the formula of the head. Raises ConfigError."""
        with called_outside_engine(self.language_model):
            self._head = probe_head(self.language_model)
            self._packing = choose_packing(self.language_model, self._section.packing)
            adapted = adapters.describe(self.language_model) if self.base is not None else []
        architecture = self.language_model.config.model_type  # type: ignore[union-attr]
        how = (
            "one document a row" if self._packing.way == "rows" else f"packed documents isolated by {self._packing.way}"
        )
        loss = "fused loss" if self._head.fused else "loss by chunks of logits"
        lines = [f"{architecture}: {how} (tested); {self._head.kind} head, {loss}"]
        return [*lines, *adapted]

    def _hidden(
        self, ids_BT: Tensor, cu_seqlens: Tensor | None, tokens_N: Tensor | None
    ) -> tuple[Tensor, RouterStats | None, None]:
        assert self._packing is not None, "prepare() comes first"
        self._positions.check(ids_BT.shape[1], cu_seqlens)
        options = {} if self._experts is None else {"output_router_logits": True}
        decoded = decode(self.language_model, self._packing, ids_BT, cu_seqlens, options=options)
        router = None if self._experts is None else self._experts.statistics(decoded.router_logits, tokens_N)
        return decoded.hidden_BTD, router, None

    def _next_token_sum(self, hidden_RD: Tensor, targets_R: Tensor, weights_R: Tensor) -> Tensor:
        return head_loss(
            self._head, head_layer(self.language_model), hidden_RD, targets_R, weights_R, vocab_size=self._tokens
        )

    def _router_loss(self, router: RouterStats, share: float) -> Tensor:
        assert self._experts is not None
        return share * self._experts.weight * router.load_balance_L.mean()


class _Experts(NamedTuple):
    """A mixture of experts whose routers take the softmax of their logits. weight: of the balancing loss."""

    top_k: int
    weight: float

    @classmethod
    def of(cls, described: Any) -> _Experts | None:
        """None without a mixture of experts that transformers balances by a loss."""
        weight = getattr(described, "router_aux_loss_coef", None)
        top_k = getattr(described, "num_experts_per_tok", None)
        return None if weight is None or not top_k else cls(int(top_k), float(weight))

    def statistics(self, logits: Sequence[Tensor], tokens_N: Tensor | None = None) -> RouterStats | None:
        """Loads and losses by router. tokens_N: the places of the tokens; None: every position is one.

        The balancing loss is that of Switch Transformer (arXiv 2101.03961), as in transformers, but for each router by
        itself: experts * sum of (share of the routes * mean probability). Without tokens there are no reports.
        """
        if not logits or (tokens_N is not None and not len(tokens_N)):
            return None
        counts, balances, z_losses = [], [], []
        for layer in logits:
            scores = layer.reshape(-1, layer.shape[-1]).float()
            if tokens_N is not None:
                scores = scores.index_select(0, tokens_N)
            probabilities = scores.softmax(-1)
            chosen = torch.zeros_like(probabilities).scatter(-1, probabilities.topk(self.top_k, -1).indices, 1.0)
            counts.append(chosen.sum(0).long())
            share = chosen.sum(0) / len(scores)
            balances.append(scores.shape[-1] * (share * probabilities.mean(0)).sum())
            z_losses.append(scores.logsumexp(-1).square().mean())
        counts_LE = torch.stack(counts)
        return RouterStats(counts_LE, counts_LE, torch.stack(balances), torch.stack(z_losses))


class ForeignModel(nn.Module):
    """A model of transformers for generation and logits, in evaluation mode: the interface CausalModel.

    Rows are generated one at a time: their caches are of transformers, which cannot select rows in all architectures.
    section: the section `model` of a configuration, with files that exist on this machine.
    """

    batching: Literal["row"] = "row"

    def __init__(self, model: nn.Module, section: HuggingFaceModel) -> None:
        super().__init__()
        mamba.install(model)
        self.transformers_model = model
        self.vocab_size = vocabulary(section).tokens
        self.section = section
        self._positions = Positions.of(model)
        self._head = probe_head(model)
        self._packing: Packing | None = None

    def forward(
        self, ids_BT: Tensor, *, cu_seqlens: Tensor | None = None, cache: Any = None, return_cache: bool = False
    ) -> Output:
        """As CausalModel. cu_seqlens and a cache exclude each other."""
        if not return_cache:
            assert cache is None, "a cache is continued only with return_cache"
            self._positions.check(ids_BT.shape[1], cu_seqlens)
            if self._packing is None and cu_seqlens is not None:
                self._packing = choose_packing(self.transformers_model, self.section.packing)
            packing = self._packing or Packing("positions")
            return Output(decode(self.transformers_model, packing, ids_BT, cu_seqlens).hidden_BTD, None, None, None)
        assert cu_seqlens is None, "rows are read one at a time"
        decoder = decoder_of(self.transformers_model)
        parameters = inspect.signature(decoder.forward).parameters
        # Architectures without attention have another name for the cache, and no positions.
        name = "cache_params" if "cache_params" in parameters else "past_key_values"
        arguments = {"input_ids": ids_BT, "use_cache": True, name: cache}
        if "position_ids" in parameters:  # bamba would count a continued row from 0
            past = 0 if cache is None else cache.get_seq_length()
            self._positions.check(past + ids_BT.shape[1])
            arguments["position_ids"] = past + torch.arange(ids_BT.shape[1], device=ids_BT.device).expand_as(ids_BT)
        output = decoder(**arguments)
        if name not in output:
            described: Any = self.transformers_model.config
            raise ConfigError(f"{described.model_type} has no cache that can be continued: it cannot generate text")
        return Output(output.last_hidden_state, None, output[name], None)

    def logits(self, hidden_BTD: Tensor) -> Tensor:
        """Hidden states [..., D] -> logits [..., V] in float32."""
        return head_logits(self._head, head_layer(self.transformers_model), hidden_BTD, self.vocab_size)

    def loss_model(self) -> ForeignLossModel:
        """The module that gives the Losses of a batch."""
        loss_model = ForeignLossModel(self.transformers_model, self.section)
        loss_model.prepare()
        return loss_model


def _attention(section: HuggingFaceModel, config: Config) -> dict[str, str]:
    """The implementation of attention as an argument of transformers; without one it takes sdpa, or eager."""
    if section.attention != "auto":
        return {"attn_implementation": section.attention}
    on_gpu = config.run.device != "cpu" and torch.cuda.is_available() and config.train.precision != "fp32"
    if on_gpu and _transformers().utils.is_flash_attn_2_available():
        return {"attn_implementation": "flash_attention_2"}
    return {}


def _header(path: Path) -> dict[str, tuple[list[int], str]]:
    """The shape and the type of each tensor of a file, as safetensors names it. Raises ConfigError."""
    try:
        with safe_open(path, "pt") as file:
            parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {name: (list(part.get_shape()), str(part.get_dtype())) for name, part in parts.items()}
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"model.path: {path} is not a whole safetensors file: {error}") from error


def _configuration_errors() -> tuple[type[Exception], ...]:
    """What transformers raises for keys and values of a configuration that it does not take."""
    from huggingface_hub.errors import StrictDataclassError

    strict: type[Exception] = StrictDataclassError
    return OSError, ValueError, TypeError, KeyError, ArithmeticError, AttributeError, strict


def _first(error: BaseException) -> str:
    """The first lines of a message as one line."""
    return " ".join(str(error).split())[:200] or type(error).__name__


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(f"model.kind: huggingface needs the package transformers; {adapters.MISSING}") from error
    return transformers


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hides the progress bars and advice of transformers. Errors are raised."""
    from transformers.utils import logging

    bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
