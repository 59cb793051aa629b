"""Combinations of keys that cannot work, though each key by itself is allowed.

A rule reads the keys that it names and is skipped where one of them is unknown (missing, or
already refused by itself), so that the rules can be asked about a configuration that is broken
elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain, pairwise
from typing import Any, NamedTuple

from cdrmix.config.tree import Path, dotted, get
from cdrmix.registry import nearest


class Inside(NamedTuple):
    """What is allowed for a value inside the first key of a rule: its `path` from there, and the name most like it."""

    path: Path
    allowed: str
    nearest: str | None = None


class Rule(NamedTuple):
    """`check`, given the values of `keys`, says what is allowed for the first key, or None when all is well."""

    keys: tuple[str, ...]
    check: Callable[..., str | Inside | None]


class Conflict(NamedTuple):
    """The rule that failed, by its keys; the path and the value that it refuses; what is allowed for it."""

    keys: tuple[str, ...]
    path: Path
    value: Any
    allowed: str
    nearest: str | None


def conflicts(values: Mapping[str, Any]) -> list[Conflict]:
    """Every combination that cannot work among `values` (dotted key to value, defaults included)."""
    failed = []
    for keys, check in RULES:
        if all(key in values for key in keys):
            inputs = [values[key] for key in keys]
            refusal = check(*inputs)
            if refusal:
                inside = refusal if isinstance(refusal, Inside) else Inside((), refusal)
                path = (*keys[0].split("."), *inside.path)
                failed.append(Conflict(keys, path, get(inputs[0], inside.path), inside.allowed, inside.nearest))
    return failed


def _heads(heads: int, width: int, fraction: float, attention: list[int]) -> str | None:
    return f"must divide model.d_model={width}" if (fraction > 0 or attention) and width % heads else None


def _rope(rope: bool, width: int, heads: int, fraction: float, attention: list[int]) -> str | None:
    odd = (fraction > 0 or attention) and width % heads == 0 and width // heads % 2 == 1
    return (
        f"false, or an even head width; model.d_model/model.attention.heads is {width // heads}"
        if rope and odd
        else None
    )


def _kv_heads(kv_heads: int, heads: int, fraction: float, attention: list[int]) -> str | None:
    return f"must divide model.attention.heads={heads}" if (fraction > 0 or attention) and heads % kv_heads else None


def _head_size(head_size: int, width: int, fraction: float, rwkv7: list[int]) -> str | None:
    return f"must divide model.d_model={width}" if (fraction < 1 or rwkv7) and width % head_size else None


def _mixer_layers(listed: list[int], layers: int, *earlier: list[int]) -> Inside | None:
    given = set(chain(*earlier))
    for place, layer in enumerate(listed):
        if layer >= layers:
            return Inside((place,), f"at most {layers - 1}: layers count from 0, and model.layers={layers}")
        if layer in given:
            return Inside((place,), "each layer once in all of model.mixer_layers")
        given.add(layer)
    return None


def _mamba_head_dim(head_dim: int, expand: int, width: int, *listed: list[int]) -> str | None:
    inner = expand * width
    return f"must divide model.mamba.expand * model.d_model={inner}" if any(listed) and inner % head_dim else None


def _mamba_groups(groups: int, head_dim: int, expand: int, width: int, *listed: list[int]) -> str | None:
    heads, rest = divmod(expand * width, head_dim)
    wrong = any(listed) and not rest and heads % groups
    return f"must divide model.mamba.expand * model.d_model / model.mamba.head_dim={heads}" if wrong else None


def _top_k(top_k: int, experts: int, kind: str, routing_mamba: list[int]) -> str | None:
    routes = kind == "moe" or routing_mamba
    return f"at most model.feed_forward.experts={experts}" if routes and top_k > experts else None


def _activation(activation: str, kind: str) -> str | None:
    return "relu2, for model.feed_forward.kind=channel_mix" if kind == "channel_mix" and activation != "relu2" else None


def _batch_rows(rows: int, micro: int) -> str | None:
    return f"a multiple of train.micro_batch_rows={micro}" if rows % micro else None


def _expert_parallel(processes: int, experts: int, kind: str) -> str | None:
    if kind != "moe":
        return None if processes == 1 else f"1 for model.feed_forward.kind={kind}, which has no experts to share out"
    return f"must divide model.feed_forward.experts={experts}" if experts % processes else None


def _rollouts(processes: int, *steps: int) -> str | None:
    if processes > 1 and any(steps):
        return "1 where a phase of reasoning.phases makes rollouts: processes end theirs at different tokens"
    return None


def _within_budget(chunks: int | None, step_budget: int, *steps: int) -> str | None:
    if chunks is not None and chunks > step_budget and any(steps):
        return f"at most reasoning.controller.step_budget={step_budget}"
    return None


def _acceptance_of_plasticity(chunks: int, step_budget: int, steps: int, own: object) -> str | None:
    return None if own is not None else _within_budget(chunks, step_budget, steps)


def _write_strengths(strengths: list[float], branches: int) -> str | None:
    return f"at least reasoning.controller.max_branches={branches} of them" if len(strengths) < branches else None


def _beside(name: str, beside: list[str]) -> Inside | None:
    return Inside((beside.index(name),), "another phase than the one it stands beside") if name in beside else None


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


def _domains(domains: Mapping[str, Any] | None, source: Mapping[str, Any] | None) -> str | None:
    if domains is not None and source is not None:
        return "null beside data.source (the source can be one of the domains, with data.source: null)"
    return "at least one domain, or null" if domains is not None and not domains else None


def _domain_names(domains: Mapping[str, Any] | None) -> list[str]:
    return ["text"] if domains is None else [*domains]


def _bands(bands: int, rows: int, num_perm: int) -> str | None:
    if bands * rows > num_perm:
        return f"at most {num_perm // rows}: data.dedup.num_perm={num_perm} over data.dedup.rows={rows}"
    return None


def _fim_domains(chosen: list[str] | None, domains: Mapping[str, Any] | None) -> Inside | None:
    known = _domain_names(domains)
    for place, name in enumerate(chosen or []):
        if name not in known:
            return Inside((place,), f"one of data.domains: {', '.join(known)}", nearest(name, known))
    return None


def _marks(prefix: str, middle: str, suffix: str, end_of_text: str) -> str | None:
    marks = [prefix, middle, suffix, end_of_text]
    if len(set(marks)) < len(marks):
        return f"four different tokens, with data.tokenizer.end_of_text; they are {', '.join(marks)}"
    return None


def _length_classes(bounds: list[int]) -> Inside | None:
    for place, (low, high) in enumerate(pairwise(bounds)):
        if high <= low:
            return Inside((place + 1,), f"above the one before it, {low}")
    return None


def _stage_ends(stages: list[Mapping[str, Any]]) -> Inside | None:
    end = 0.0
    for place, stage in enumerate(stages):
        last = place == len(stages) - 1
        if stage["until"] <= end:
            return Inside((place, "until"), f"above {end:g}, where the stage before it ends")
        end = stage["until"]
        if last and end != 1:
            return Inside((place, "until"), "1: the last stage ends with the training")
    return None


def _stage_domains(stages: list[Mapping[str, Any]], domains: Mapping[str, Any] | None) -> Inside | None:
    known = _domain_names(domains)
    for place, stage in enumerate(stages):
        weights = stage.get("domains")
        if weights is None:
            continue
        for name in weights:
            if name not in known:
                close = nearest(name, known)
                near = dotted(("data", "curriculum", place, "domains", close)) if close else None
                return Inside((place, "domains", name), f"weights of data.domains: {', '.join(known)}", near)
        if not any(weights.values()):
            return Inside((place, "domains"), "at least one weight above 0, or null")
    return None


def _stage_lengths(stages: list[Mapping[str, Any]], bounds: list[int]) -> Inside | None:
    for place, stage in enumerate(stages):
        weights = stage.get("lengths")
        if weights is not None and len(weights) != len(bounds) + 1:
            wanted = f"a list of {len(bounds) + 1}, one more than data.length_classes has bounds, or null"
            return Inside((place, "lengths"), wanted)
        if weights is not None and not any(weights):
            return Inside((place, "lengths"), "at least one weight above 0, or null")
    return None


def _mixture(mixture: str | None, mixtures: Mapping[str, Any], curriculum: list[Any]) -> Inside | str | None:
    if mixture is None:
        return None
    if curriculum:
        return "null beside data.curriculum (the curriculum can be one of data.mixtures, with data.curriculum: [])"
    if mixture not in mixtures:
        known = ", ".join(mixtures) or "(none)"
        return Inside((), f"one of data.mixtures: {known}, or null", nearest(mixture, mixtures))
    return None


def _of_mixtures(check: Callable[..., Inside | None], mixtures: Mapping[str, Any], *others: Any) -> Inside | None:
    """A rule about the stages of data.curriculum, asked of every mixture."""
    for name, stages in mixtures.items():
        found = check(stages, *others)
        if found is not None:
            near = found.nearest and found.nearest.replace("data.curriculum", dotted(("data", "mixtures", name)), 1)
            return found._replace(path=(name, *found.path), nearest=near)
    return None


def _no_stages(stages: list[Mapping[str, Any]]) -> Inside | None:
    return _stage_ends(stages) if stages else Inside((), "at least one stage")


def _compile(compiled: bool, zero_stage: int, expert_parallel: int) -> str | None:
    # Both gather or exchange in hooks of modules, which compiled code does not call.
    refused = compiled and (zero_stage == 3 or expert_parallel > 1)
    return "false, or train.zero_stage below 3 and train.expert_parallel 1" if refused else None


def _precision(precision: str, device: str) -> str | None:
    return "bf16 or fp32 with run.device=cpu; fp16 needs a GPU" if precision == "fp16" and device == "cpu" else None


def _residual_dtype(residual_dtype: str | None, precision: str) -> str | None:
    refused = residual_dtype == "bf16" and precision != "bf16"
    return "fp32 or null, or train.precision: bf16" if refused else None


MIXER_LAYERS = tuple(f"model.mixer_layers.{kind}" for kind in ("attention", "rwkv7", "mamba2", "routing_mamba"))
ATTENTION = ("model.attention_fraction", MIXER_LAYERS[0])  # whether there is any
MAMBA = MIXER_LAYERS[2:]
STEP_BUDGET = "reasoning.controller.step_budget"

RULES = (
    *(
        Rule((listed, "model.layers", *MIXER_LAYERS[:place]), _mixer_layers)
        for place, listed in enumerate(MIXER_LAYERS)
    ),
    Rule(("model.attention.heads", "model.d_model", *ATTENTION), _heads),
    Rule(("model.attention.rope", "model.d_model", "model.attention.heads", *ATTENTION), _rope),
    Rule(("model.attention.kv_heads", "model.attention.heads", *ATTENTION), _kv_heads),
    Rule(("model.rwkv.head_size", "model.d_model", "model.attention_fraction", MIXER_LAYERS[1]), _head_size),
    Rule(("model.mamba.head_dim", "model.mamba.expand", "model.d_model", *MAMBA), _mamba_head_dim),
    Rule(("model.mamba.groups", "model.mamba.head_dim", "model.mamba.expand", "model.d_model", *MAMBA), _mamba_groups),
    Rule(
        ("model.feed_forward.top_k", "model.feed_forward.experts", "model.feed_forward.kind", MAMBA[1]),
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
        Rule((f"reasoning.phases.{name}.beside",), partial(_beside, name))
        for name in ("plasticity", "imitation", "operations_imitation")
    ),
    Rule(("train.warmup_steps", "train.steps"), _warmup_steps),
    Rule(("model.vocab_size", "data.tokenizer.path", "data.objectives.fim"), _vocab_size),
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
    Rule(("data.mixtures", "data.domains"), partial(_of_mixtures, _stage_domains)),
    Rule(("data.mixtures", "data.length_classes"), partial(_of_mixtures, _stage_lengths)),
    Rule(("train.precision", "run.device"), _precision),
    Rule(("train.residual_dtype", "train.precision"), _residual_dtype),
    Rule(("train.compile", "train.zero_stage", "train.expert_parallel"), _compile),
)
