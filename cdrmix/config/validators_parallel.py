"""Rules about the keys that divide the work among processes: experts, the tokens of a row, layers, and blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cdrmix.config.rule import Rule, plugin_layers
from cdrmix.config.schema_layers import Bigrams

WIDTHS = (
    "model.vocab_size",
    "model.feed_forward.hidden",
    "model.feed_forward.dense_hidden",
    "model.feed_forward.shared_hidden",
)


def _expert_parallel(processes: int, experts: int, kind: str) -> str | None:
    if kind != "moe":
        return None if processes == 1 else f"1 for model.feed_forward.kind={kind}, which has no experts"
    return f"must divide model.feed_forward.experts={experts}" if experts % processes else None


def _rollouts(weights: str, processes: int) -> str | None:
    if weights == "copied" and processes > 1:
        return f"sharded with train.expert_parallel={processes}, whose processes need one another in every pass"
    return None


def _reference(
    kl_weight: float | None, objective: str, steps: int, weights: str, zero_stage: int | str, offload: str, experts: int
) -> str | None:
    divided = zero_stage == 3 or (zero_stage == "auto" and offload == "all")
    if not steps or kl_weight == 0 or (kl_weight is None and objective != "grpo"):
        return None
    if experts > 1:
        return f"0 with train.expert_parallel={experts}: the model that the divergence is from would be a copy"
    if divided and weights == "sharded":
        return (
            "0 under ZeRO-3 with reasoning.rollout_weights=sharded: the model that the divergence is from would be a "
            "copy; set that to copied"
        )
    return None


def _slices(processes: int, row_length: int) -> str | None:
    return f"must divide data.row_length={row_length}" if row_length % processes else None


def _slices_of_convolution(processes: int, row_length: int, width: int, mixers: Mapping[str, list[int]]) -> str | None:
    least = width - 1  # a slice has the tokens that the next one reads
    refused = (mixers.get("mamba2") or mixers.get("routing_mamba")) and row_length // processes < least
    return (
        f"at most {max(1, row_length // least)}: slices of {least} tokens, for model.mamba.conv_width"
        if refused
        else None
    )


def _slices_of_heads(
    processes: int, divided: int, heads: int, kv_heads: int, fraction: float, mixers: Mapping[str, list[int]]
) -> str | None:
    if not fraction and not mixers.get("attention"):
        return None
    if heads % divided or kv_heads % divided:
        return None  # _shares_of_heads refuses it
    by = "" if divided == 1 else f" / train.tensor_parallel={divided}"
    if heads // divided % processes:
        return f"must divide model.attention.heads={heads}{by}"
    refused = kv_heads // divided % processes and processes % (kv_heads // divided)
    return f"a divisor or a multiple of model.attention.kv_heads={kv_heads}{by}" if refused else None


def _of_plugins(processes: int, mixers: Mapping[str, list[int]], feed_forward: str) -> str | None:
    others = plugin_layers(mixers, feed_forward)
    if processes == 1 or not others:
        return None
    return f"1 with {others[0]} of a plugin, which would take its part of a row or a layer for the whole"


def _whole_rows(
    processes: int, prediction: object, depth: Mapping[str, Any] | None, drop: bool, reasoning: object, dpo: object
) -> str | None:
    reasons = {
        "model.prediction: its depths read the embeddings of later tokens": prediction is not None,
        "model.depth.part mixer or both: processes would keep different numbers of tokens": (
            depth is not None and depth.get("part", "feed_forward") != "feed_forward"
        ),
        "model.feed_forward.drop: an expert's capacity is of whole rows": drop,
        "reasoning: adapters and memories read whole rows": reasoning is not None,
        "train.dpo: an answer's probability is of whole rows": dpo is not None,
    }
    return _one_with(processes, reasons)


def _shares_of_heads(
    processes: int, heads: int, kv_heads: int, fraction: float, mixers: Mapping[str, list[int]]
) -> str | None:
    if not fraction and not mixers.get("attention"):
        return None
    for key, count in (("heads", heads), ("kv_heads", kv_heads)):
        if count % processes:
            return f"must divide model.attention.{key}={count}"
    return None


def _shares_of_recurrences(
    processes: int, width: int, head_size: int, groups: int, fraction: float, mixers: Mapping[str, list[int]]
) -> str | None:
    heads = width // head_size
    if (fraction < 1 or mixers.get("rwkv7")) and heads % processes:
        return f"must divide the {heads} heads of RWKV-7: model.d_model / model.rwkv.head_size"
    if (mixers.get("mamba2") or mixers.get("routing_mamba")) and groups % processes:
        return f"must divide model.mamba.groups={groups}"
    return None


def _shares_of_widths(processes: int, *widths: int | None) -> str | None:
    for key, width in zip(WIDTHS, widths, strict=True):
        if width is not None and width % processes:
            return f"must divide {key}={width}"
    return None


def _shares_of_bigrams(processes: int, bigrams: Mapping[str, Any] | None) -> str | None:
    rows = 0 if bigrams is None else bigrams.get("rows", Bigrams().rows)
    return f"must divide model.bigrams.rows={rows}" if isinstance(rows, int) and rows % processes else None


def _parts_of_a_model(
    processes: int, optimizer: str, compiled: bool, offload: str, prediction: object, reasoning: object, dpo: object
) -> str | None:
    return _one_with(
        processes,
        {
            "train.optimizer.kind muon, which needs whole matrices": optimizer == "muon",
            "train.compile": compiled,
            "train.offload": offload != "none",
            "model.prediction, whose depths are not divided": prediction is not None,
            "reasoning, whose adapters and rollouts are not divided": reasoning is not None,
            "train.dpo": dpo is not None,
        },
    )


def _shares_of_experts(processes: int, expert_parallel: int) -> str | None:
    return _one_with(processes, {"train.expert_parallel": expert_parallel > 1})


def _stages(processes: int, layers: int, zero_stage: int | str) -> str | None:
    if processes > layers:
        return f"at most model.layers={layers}: each stage needs a block"
    if processes > 1 and zero_stage in (2, 3):
        return f"1 with train.zero_stage={zero_stage}, which sums or gathers in every micro-batch: set that to 0 or 1"
    return None


def _depth_in_stages(processes: int, depth: object) -> str | None:
    return _one_with(processes, {"model.depth, whose thresholds are of all blocks": depth is not None})


def _one_with(processes: int, reasons: Mapping[str, bool]) -> str | None:
    """What is allowed for more than one process, if one of the reasons holds: 1."""
    return next((f"1 with {reason}" for reason, refused in reasons.items() if refused and processes > 1), None)


RULES = (
    Rule(("train.expert_parallel", "model.feed_forward.experts", "model.feed_forward.kind"), _expert_parallel),
    Rule(("reasoning.rollout_weights", "train.expert_parallel"), _rollouts),
    Rule(
        (
            *("reasoning.rl.kl_weight", "reasoning.rl.objective", "reasoning.phases.policy.steps"),
            *("reasoning.rollout_weights", "train.zero_stage", "train.offload", "train.expert_parallel"),
        ),
        _reference,
    ),
    Rule(("train.sequence_parallel", "data.row_length"), _slices),
    Rule(("train.sequence_parallel", "model.mixer_layers", "model.feed_forward.kind"), _of_plugins),
    Rule(
        ("train.sequence_parallel", "data.row_length", "model.mamba.conv_width", "model.mixer_layers"),
        _slices_of_convolution,
    ),
    Rule(
        (
            *("train.sequence_parallel", "train.tensor_parallel", "model.attention.heads", "model.attention.kv_heads"),
            *("model.attention_fraction", "model.mixer_layers"),
        ),
        _slices_of_heads,
    ),
    Rule(
        (
            *("train.sequence_parallel", "model.prediction", "model.depth", "model.feed_forward.drop", "reasoning"),
            "train.dpo",
        ),
        _whole_rows,
    ),
    Rule(("train.tensor_parallel", "model.mixer_layers", "model.feed_forward.kind"), _of_plugins),
    Rule(
        (
            *("train.tensor_parallel", "model.attention.heads", "model.attention.kv_heads"),
            *("model.attention_fraction", "model.mixer_layers"),
        ),
        _shares_of_heads,
    ),
    Rule(
        (
            *("train.tensor_parallel", "model.d_model", "model.rwkv.head_size", "model.mamba.groups"),
            *("model.attention_fraction", "model.mixer_layers"),
        ),
        _shares_of_recurrences,
    ),
    Rule(("train.tensor_parallel", *WIDTHS), _shares_of_widths),
    Rule(("train.tensor_parallel", "model.bigrams"), _shares_of_bigrams),
    Rule(("train.tensor_parallel", "train.expert_parallel"), _shares_of_experts),
    Rule(("train.pipeline_parallel", "model.layers", "train.zero_stage"), _stages),
    Rule(("train.pipeline_parallel", "model.mixer_layers", "model.feed_forward.kind"), _of_plugins),
    Rule(("train.pipeline_parallel", "model.depth"), _depth_in_stages),
    *(
        Rule(
            (
                *(f"train.{key}", "train.optimizer.kind", "train.compile", "train.offload", "model.prediction"),
                *("reasoning", "train.dpo"),
            ),
            _parts_of_a_model,
        )
        for key in ("tensor_parallel", "pipeline_parallel")
    ),
)
