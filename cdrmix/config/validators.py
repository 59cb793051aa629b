"""Rules about combinations of keys, each of which is valid by itself.

A rule reads the keys that it names. It is skipped if one of them is missing or invalid. So a configuration with other
errors can be checked too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

from cdrmix.config.hyperparameters import COUNTING_KEYS, countable
from cdrmix.config.nodes import Path, dotted, found, get
from cdrmix.registry import nearest, registered

Layers = Mapping[str, list[int]]  # model.mixer_layers
BUILT_IN = {  # kind of registry -> the names that cdrmix itself registers
    "mixer": ("attention", "rwkv7", "mamba2", "routing_mamba"),
    "feed-forward": ("moe", "dense", "channel_mix"),
    "optimizer": ("adamw",),
}


class Violation(NamedTuple):
    """What a rule allows for a value.

    path: of the value, relative to the first key of the rule. allowed: text. nearest: the most similar valid name.
    found: text; None: the value itself.
    """

    path: Path
    allowed: str
    nearest: str | None = None
    found: str | None = None


class Rule(NamedTuple):
    """`check` takes the values of `keys`. It returns what is allowed for the first key, or None without a conflict."""

    keys: tuple[str, ...]
    check: Callable[..., str | Violation | None]


class Conflict(NamedTuple):
    """A violated rule: its keys, the path of the value, what was found (text), what is allowed, the nearest name."""

    keys: tuple[str, ...]
    path: Path
    found: str
    allowed: str
    nearest: str | None


def conflicts(values: Mapping[str, Any]) -> list[Conflict]:
    """All violated rules. values: dotted key to value, defaults included."""
    violated = []
    for keys, check in RULES:
        if all(key in values for key in keys):
            inputs = [values[key] for key in keys]
            result = check(*inputs)
            if result:
                violation = result if isinstance(result, Violation) else Violation((), result)
                what = violation.found or found(get(inputs[0], violation.path))
                path = (*keys[0].split("."), *violation.path)
                violated.append(Conflict(keys, path, what, violation.allowed, violation.nearest))
    return violated


def _known(kind: str) -> list[str]:
    """The built-in names of a kind, then those of plugins."""
    built_in = BUILT_IN.get(kind, ())
    return [*built_in, *(name for name in registered(kind) if name not in built_in)]


def _registered_name(kind: str, name: str) -> Violation | None:
    known = _known(kind)
    return None if name in known else Violation((), f"one of {', '.join(known)}", nearest(name, known))


def _has_attention(fraction: float, layers: Layers) -> bool:
    return fraction > 0 or bool(layers.get("attention"))


def _has_mamba(layers: Layers) -> bool:
    return bool(layers.get("mamba2") or layers.get("routing_mamba"))


def _heads(heads: int, width: int, fraction: float, layers: Layers) -> str | None:
    return f"must divide model.d_model={width}" if _has_attention(fraction, layers) and width % heads else None


def _rope(rope: bool, width: int, heads: int, fraction: float, layers: Layers) -> str | None:
    odd = _has_attention(fraction, layers) and width % heads == 0 and width // heads % 2 == 1
    return (
        f"false, or an even head width; model.d_model/model.attention.heads is {width // heads}"
        if rope and odd
        else None
    )


def _kv_heads(kv_heads: int, heads: int, fraction: float, layers: Layers) -> str | None:
    divides = heads % kv_heads == 0
    return None if divides or not _has_attention(fraction, layers) else f"must divide model.attention.heads={heads}"


def _head_size(head_size: int, width: int, fraction: float, layers: Layers) -> str | None:
    has_rwkv = fraction < 1 or layers.get("rwkv7")
    return f"must divide model.d_model={width}" if has_rwkv and width % head_size else None


def _mixer_layers(mixers: Layers, layers: int) -> Violation | None:
    known = _known("mixer")
    assigned: set[int] = set()
    for mixer, chosen in mixers.items():
        if mixer not in known:
            close = nearest(mixer, known)
            suggestion = f"model.mixer_layers.{close}" if close else None
            return Violation((mixer,), f"one of the mixers {', '.join(known)}", suggestion, "unknown mixer")
        for index, layer in enumerate(chosen):
            if layer >= layers:
                return Violation(
                    (mixer, index), f"at most {layers - 1}: layers count from 0, and model.layers={layers}"
                )
            if layer in assigned:
                return Violation((mixer, index), "each layer once in all of model.mixer_layers")
            assigned.add(layer)
    return None


def _mamba_head_dim(head_dim: int, expand: int, width: int, layers: Layers) -> str | None:
    inner = expand * width
    return (
        f"must divide model.mamba.expand * model.d_model={inner}" if _has_mamba(layers) and inner % head_dim else None
    )


def _mamba_groups(groups: int, head_dim: int, expand: int, width: int, layers: Layers) -> str | None:
    heads, rest = divmod(expand * width, head_dim)
    wrong = _has_mamba(layers) and not rest and heads % groups
    return f"must divide model.mamba.expand * model.d_model / model.mamba.head_dim={heads}" if wrong else None


def _top_k(top_k: int, experts: int, kind: str, layers: Layers) -> str | None:
    routes = kind == "moe" or layers.get("routing_mamba")
    return f"at most model.feed_forward.experts={experts}" if routes and top_k > experts else None


def _activation(activation: str, kind: str) -> str | None:
    return "relu2, for model.feed_forward.kind=channel_mix" if kind == "channel_mix" and activation != "relu2" else None


def _path_or_random(path: str | None, random: object) -> str | None:
    return None if (path is None) != (random is None) else "a folder, or null and model.random: one of the two"


def _made_by(made_by: str | None, path: str | None) -> str | None:
    return "null, since model.path is null" if made_by is not None and path is None else None


def _quantize(quantize: str | None, stage: int | str) -> str | None:
    return "null, or train.zero_stage below 3" if quantize is not None and stage == 3 else None


def _trained_base(lora: object, random: object, add_tokens: Sequence[str]) -> str | None:
    if lora is None:
        return None
    if random is not None:
        return "null with model.random: adapters need a trained model, named by model.path"
    # The vectors of new tokens would stay random: adapters do not train the embedding.
    return "null with model.vocab.add_tokens, whose vectors adapters do not train" if add_tokens else None


def _expert_dropout(dropout: float, experts: bool) -> str | None:
    return "0 with model.lora.experts, whose inputs peft cannot drop" if experts and dropout > 0 else None


def _only_of_ours(neutral: object, value: object, kind: str) -> str | None:
    shown = "null" if neutral is None else str(neutral).lower()
    return f"{shown}, for model.kind={kind}" if kind != "cdrmix" and value not in (None, neutral) else None


def _batch_rows(rows: int, micro: int) -> str | None:
    return f"a multiple of train.micro_batch_rows={micro}" if rows % micro else None


def _expert_parallel(processes: int, experts: int, kind: str) -> str | None:
    if kind != "moe":
        return None if processes == 1 else f"1 for model.feed_forward.kind={kind}, which has no experts"
    return f"must divide model.feed_forward.experts={experts}" if experts % processes else None


def _rollouts(processes: int, *steps: int) -> str | None:
    if processes > 1 and any(steps):
        return "1 where a phase of reasoning.phases makes rollouts: processes end theirs at different tokens"
    return None


def _replay(name: str, replay: list[str]) -> Violation | None:
    return Violation((replay.index(name),), "another phase than its own") if name in replay else None


def _within_budget(chunks: int | None, step_budget: int, *steps: int) -> str | None:
    if chunks is not None and chunks > step_budget and any(steps):
        return f"at most reasoning.controller.step_budget={step_budget}"
    return None


def _acceptance_of_plasticity(chunks: int, step_budget: int, steps: int, own: object) -> str | None:
    return None if own is not None else _within_budget(chunks, step_budget, steps)


def _write_strengths(strengths: list[float], branches: int) -> str | None:
    return f"at least reasoning.controller.max_branches={branches} of them" if len(strengths) < branches else None


def _warmup_steps(warmup: int, steps: int) -> str | None:
    return f"below train.steps={steps}" if warmup >= steps else None


def _vocab_size(vocabulary: int, tokenizer: str | None, fim: Mapping[str, Any] | None) -> str | None:
    marks = 0 if fim is None else 3
    if tokenizer is None and vocabulary < 257 + marks:
        also = ", and the three marks of data.objectives.fim" if marks else ""
        return (
            f"at least {257 + marks} for a tokenizer trained on the corpus: 256 bytes and the end-of-text token{also}"
        )
    return None


def _end_of_text(end_of_text: str | None, path: str | None) -> str | None:
    return "a token, for a tokenizer that is trained on the text" if end_of_text is None and path is None else None


def _begin_of_text(begin_of_text: str | None, path: str | None) -> str | None:
    if path is None and begin_of_text not in ("auto", None):
        return "auto or null, for a tokenizer that is trained on the text (data.tokenizer.path is not set)"
    return None


def _domains(domains: Mapping[str, Any] | None, source: Mapping[str, Any] | None) -> str | None:
    if domains is not None and source is not None:
        return "null if data.source is set (the source can be one of the domains, with data.source: null)"
    return "at least one domain, or null" if domains is not None and not domains else None


def _domain_names(domains: Mapping[str, Any] | None) -> list[str]:
    return ["text"] if domains is None else [*domains]


def _bands(bands: int, rows: int, num_perm: int) -> str | None:
    if bands * rows > num_perm:
        return f"at most {num_perm // rows}: data.dedup.num_perm={num_perm} over data.dedup.rows={rows}"
    return None


def _fim_domains(chosen: list[str] | None, domains: Mapping[str, Any] | None) -> Violation | None:
    known = _domain_names(domains)
    for index, name in enumerate(chosen or []):
        if name not in known:
            return Violation((index,), f"one of data.domains: {', '.join(known)}", nearest(name, known))
    return None


def _marks(prefix: str, middle: str, suffix: str, end_of_text: str | None) -> str | None:
    marks = [prefix, middle, suffix, end_of_text or "the token that ends a document"]
    if len(set(marks)) < len(marks):
        return f"four different tokens, with data.tokenizer.end_of_text; they are {', '.join(marks)}"
    return None


def _length_classes(bounds: list[int]) -> Violation | None:
    for index, (low, high) in enumerate(pairwise(bounds)):
        if high <= low:
            return Violation((index + 1,), f"above the one before it, {low}")
    return None


def _stage_ends(stages: list[Mapping[str, Any]]) -> Violation | None:
    end = 0.0
    for index, stage in enumerate(stages):
        last = index == len(stages) - 1
        if stage["until"] <= end:
            return Violation((index, "until"), f"above {end:g}, where the stage before it ends")
        end = stage["until"]
        if last and end != 1:
            return Violation((index, "until"), "1: the last stage ends with the training")
    return None


def _stage_domains(stages: list[Mapping[str, Any]], domains: Mapping[str, Any] | None) -> Violation | None:
    known = _domain_names(domains)
    for index, stage in enumerate(stages):
        weights = stage.get("domains")
        if weights is None:
            continue
        for name in weights:
            if name not in known:
                close = nearest(name, known)
                near = dotted(("data", "curriculum", index, "domains", close)) if close else None
                return Violation((index, "domains", name), f"weights of data.domains: {', '.join(known)}", near)
        if not any(weights.values()):
            return Violation((index, "domains"), "at least one weight above 0, or null")
    return None


def _stage_lengths(stages: list[Mapping[str, Any]], bounds: list[int]) -> Violation | None:
    for index, stage in enumerate(stages):
        weights = stage.get("lengths")
        if weights is not None and len(weights) != len(bounds) + 1:
            wanted = f"a list of {len(bounds) + 1}, one more than data.length_classes has bounds, or null"
            return Violation((index, "lengths"), wanted)
        if weights is not None and not any(weights):
            return Violation((index, "lengths"), "at least one weight above 0, or null")
    return None


def _mixture(mixture: str | None, mixtures: Mapping[str, Any], curriculum: list[Any]) -> Violation | str | None:
    if mixture is None:
        return None
    if curriculum:
        return (
            "null, since data.curriculum is set (the curriculum can be one of data.mixtures, with data.curriculum: [])"
        )
    if mixture not in mixtures:
        known = ", ".join(mixtures) or "(none)"
        return Violation((), f"one of data.mixtures: {known}, or null", nearest(mixture, mixtures))
    return None


def _of_mixtures(check: Callable[..., Violation | None], mixtures: Mapping[str, Any], *others: Any) -> Violation | None:
    """A rule about the stages of data.curriculum, for every mixture."""
    for name, stages in mixtures.items():
        problem = check(stages, *others)
        if problem is not None:
            near = problem.nearest and problem.nearest.replace("data.curriculum", dotted(("data", "mixtures", name)), 1)
            return problem._replace(path=(name, *problem.path), nearest=near)
    return None


def _of_mixture(
    check: Callable[..., Violation | None], mixtures: Mapping[str, Any], chosen: str | None, *others: Any
) -> Violation | None:
    """A rule about the stages of data.curriculum, for the chosen mixture only: the others may name other domains."""
    return _of_mixtures(check, {name: mixtures[name] for name in mixtures if name == chosen}, *others)


def _no_stages(stages: list[Mapping[str, Any]]) -> Violation | None:
    return _stage_ends(stages) if stages else Violation((), "at least one stage")


def _compile(compiled: bool, zero_stage: int | str, offload: str, expert_parallel: int) -> str | None:
    # All gather or exchange in hooks of modules, which compiled code does not call.
    refused = compiled and (zero_stage == 3 or offload == "all" or expert_parallel > 1)
    others = " and train.offload none or optimizer" if offload == "all" else ""
    return f"false, or train.zero_stage below 3{others} and train.expert_parallel 1" if refused else None


def _weights(weights: str, precision: str, zero_stage: int | str) -> str | None:
    refused = weights == "bf16" and (precision != "bf16" or zero_stage == 0)
    return "fp32, or train.precision: bf16 and train.zero_stage: auto, 1, 2 or 3" if refused else None


def _weights_of_cdrmix(weights: str, _: int) -> str | None:
    refused = weights == "bf16"  # the keys of the rule are of a model of this package
    return "fp32, for a model of cdrmix: its norms and routers need float32 weights" if refused else None


def _offload(offload: str, zero_stage: int | str, expert_parallel: int) -> str | None:
    stages = ("auto", 3) if offload == "all" else ("auto", 2, 3)
    if offload == "none" or (zero_stage in stages and expert_parallel == 1):
        return None
    which = "auto or 3" if offload == "all" else "auto, 2 or 3"
    return f"none, or train.zero_stage: {which} and train.expert_parallel: 1"


def _offload_folder(folder: str | None, offload: str, optimizer: str) -> str | None:
    refused = folder is not None and (offload == "none" or optimizer != "adamw")
    return "null, or train.offload: optimizer or all and train.optimizer: adamw" if refused else None


def _dpo(dpo: object, source: Mapping[str, Any] | None, domains: Mapping[str, Any] | None) -> str | None:
    owners = [domain for domain in domains.values() if isinstance(domain, Mapping)] if domains else [{"source": source}]
    sources = [owner.get("source") for owner in owners]
    kinds = [each.get("kind") if isinstance(each, Mapping) else None for each in sources]
    pairs = [kind in ("preferences", "task_preferences") for kind in kinds]
    if dpo is not None and not all(pairs):
        return "null, or sources of the kinds preferences and task_preferences alone"
    return "a section, because the sources are preferences" if dpo is None and any(pairs) else None


def _start_from(start: str | None, kind: str) -> str | None:
    refused = kind == "huggingface" and start is not None
    return "null for model.kind=huggingface; use model.path" if refused else None


def _start_made_by(made_by: str | None, start: str | None) -> str | None:
    return "null, since train.start_from is null" if made_by is not None and start is None else None


def _precision(precision: str, device: str) -> str | None:
    return "bf16 or fp32 with run.device=cpu; fp16 needs a GPU" if precision == "fp16" and device == "cpu" else None


def _residual_dtype(residual_dtype: str | None, precision: str) -> str | None:
    refused = residual_dtype == "bf16" and precision != "bf16"
    return "fp32 or null, or train.precision: bf16" if refused else None


STEP_BUDGET = "reasoning.controller.step_budget"
ATTENTION = ("model.attention_fraction", "model.mixer_layers")  # they decide which layers use attention
WIDTH = ("model.mamba.expand", "model.d_model")

RULES = (
    Rule(("model.path", "model.random"), _path_or_random),
    Rule(("model.made_by", "model.path"), _made_by),
    Rule(("model.lora.quantize", "train.zero_stage"), _quantize),
    Rule(("model.lora", "model.random", "model.vocab.add_tokens"), _trained_base),
    Rule(("model.lora.dropout", "model.lora.experts"), _expert_dropout),
    Rule(("train.expert_parallel", "model.kind"), partial(_only_of_ours, 1)),
    *(Rule((key, "model.kind"), partial(_only_of_ours, neutral)) for key, neutral in COUNTING_KEYS.items()),
    *(Rule((key, "model.mixer_layers", "model.feed_forward.kind"), countable) for key in COUNTING_KEYS),
    Rule(("train.compile", "model.kind"), partial(_only_of_ours, False)),
    Rule(("train.residual_dtype", "model.kind"), partial(_only_of_ours, None)),
    Rule(("train.start_from", "model.kind"), _start_from),
    Rule(("reasoning", "model.kind"), partial(_only_of_ours, None)),
    Rule(("model.mixer_layers", "model.layers"), _mixer_layers),
    Rule(("model.feed_forward.kind",), partial(_registered_name, "feed-forward")),
    Rule(("train.optimizer",), partial(_registered_name, "optimizer")),
    Rule(("model.attention.heads", "model.d_model", *ATTENTION), _heads),
    Rule(("model.attention.rope", "model.d_model", "model.attention.heads", *ATTENTION), _rope),
    Rule(("model.attention.kv_heads", "model.attention.heads", *ATTENTION), _kv_heads),
    Rule(("model.rwkv.head_size", "model.d_model", *ATTENTION), _head_size),
    Rule(("model.mamba.head_dim", *WIDTH, "model.mixer_layers"), _mamba_head_dim),
    Rule(("model.mamba.groups", "model.mamba.head_dim", *WIDTH, "model.mixer_layers"), _mamba_groups),
    Rule(
        ("model.feed_forward.top_k", "model.feed_forward.experts", "model.feed_forward.kind", "model.mixer_layers"),
        _top_k,
    ),
    Rule(("model.feed_forward.activation", "model.feed_forward.kind"), _activation),
    Rule(("train.batch_rows", "train.micro_batch_rows"), _batch_rows),
    Rule(("train.expert_parallel", "model.feed_forward.experts", "model.feed_forward.kind"), _expert_parallel),
    Rule(
        (
            "train.expert_parallel",
            *(f"reasoning.phases.{name}.steps" for name in ("acceptance", "policy", "operations")),
        ),
        _rollouts,
    ),
    Rule(("reasoning.controller.write_strengths", "reasoning.controller.max_branches"), _write_strengths),
    Rule(("reasoning.acceptance.chunks", STEP_BUDGET, "reasoning.phases.acceptance.steps"), _within_budget),
    Rule(
        ("reasoning.plasticity.chunks", STEP_BUDGET, "reasoning.phases.acceptance.steps", "reasoning.acceptance"),
        _acceptance_of_plasticity,
    ),
    Rule(
        (
            "reasoning.agent.chunks",
            STEP_BUDGET,
            *(f"reasoning.phases.{name}.steps" for name in ("imitation", "policy")),
        ),
        _within_budget,
    ),
    Rule(("reasoning.phases.policy.chunks", STEP_BUDGET, "reasoning.phases.policy.steps"), _within_budget),
    *(
        Rule((f"reasoning.phases.{name}.replay",), partial(_replay, name))
        for name in ("plasticity", "imitation", "operations_imitation")
    ),
    Rule(("train.warmup_steps", "train.steps"), _warmup_steps),
    Rule(("model.vocab_size", "data.tokenizer.path", "data.objectives.fim"), _vocab_size),
    Rule(("data.tokenizer.end_of_text", "data.tokenizer.path"), _end_of_text),
    Rule(("data.tokenizer.begin_of_text", "data.tokenizer.path"), _begin_of_text),
    Rule(("data.domains", "data.source"), _domains),
    Rule(("data.dedup.bands", "data.dedup.rows", "data.dedup.num_perm"), _bands),
    Rule(("data.objectives.fim.domains", "data.domains"), _fim_domains),
    Rule(
        (*(f"data.objectives.fim.{mark}" for mark in ("prefix", "middle", "suffix")), "data.tokenizer.end_of_text"),
        _marks,
    ),
    Rule(("data.length_classes",), _length_classes),
    Rule(("data.curriculum",), _stage_ends),
    Rule(("data.curriculum", "data.domains"), _stage_domains),
    Rule(("data.curriculum", "data.length_classes"), _stage_lengths),
    Rule(("data.mixture", "data.mixtures", "data.curriculum"), _mixture),
    Rule(("data.mixtures",), partial(_of_mixtures, _no_stages)),
    Rule(("data.mixtures", "data.mixture", "data.domains"), partial(_of_mixture, _stage_domains)),
    Rule(("data.mixtures", "data.mixture", "data.length_classes"), partial(_of_mixture, _stage_lengths)),
    Rule(("train.precision", "run.device"), _precision),
    Rule(("train.residual_dtype", "train.precision"), _residual_dtype),
    Rule(("train.compile", "train.zero_stage", "train.offload", "train.expert_parallel"), _compile),
    Rule(("train.weights", "train.precision", "train.zero_stage"), _weights),
    Rule(("train.weights", "model.d_model"), _weights_of_cdrmix),
    Rule(("train.offload", "train.zero_stage", "train.expert_parallel"), _offload),
    Rule(("train.offload_folder", "train.offload", "train.optimizer"), _offload_folder),
    Rule(("train.start_made_by", "train.start_from"), _start_made_by),
    Rule(("train.dpo", "data.source", "data.domains"), _dpo),
)
