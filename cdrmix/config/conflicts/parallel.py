"""Conflicts between the keys that divide the work among processes: experts, the tokens of a row, layers, and blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from cdrmix.config.conflicts.conflict import Conflict
from cdrmix.config.conflicts.model import has_attention, has_mamba, has_rwkv7
from cdrmix.config.names import plugin_layers
from cdrmix.config.schema_model import Model
from cdrmix.config.schema_run import Sections

EXPERTS, SLICES, SHARES, STAGES = (f"train.{way}_parallel" for way in ("expert", "sequence", "tensor", "pipeline"))


def conflicts(config: Sections) -> Iterator[Conflict]:
    if config.model.kind == "cdrmix":
        yield from _experts(config, config.model)
        yield from _slices(config, config.model)
        yield from _shares(config, config.model)
        yield from _stages(config, config.model)
        yield from _either(config, config.model)
    else:
        train = config.train
        counts = (train.expert_parallel, train.sequence_parallel, train.tensor_parallel, train.pipeline_parallel)
        for key, processes in zip((EXPERTS, SLICES, SHARES, STAGES), counts, strict=True):
            if processes > 1:
                yield Conflict(key, f"1, for model.kind={config.model.kind}")


def _one_with(key: str, processes: int, reasons: Mapping[str, bool]) -> Iterator[Conflict]:
    """Of more than one process, with the first reason that holds."""
    reason = next((reason for reason, refused in reasons.items() if refused and processes > 1), None)
    if reason is not None:
        yield Conflict(key, f"1 with {reason}")


def _experts(config: Sections, model: Model) -> Iterator[Conflict]:
    processes, section = config.train.expert_parallel, model.feed_forward
    if section.kind != "moe" and processes > 1:
        yield Conflict(EXPERTS, f"1 for model.feed_forward.kind={section.kind}, which has no experts")
    elif section.experts % processes:
        yield Conflict(EXPERTS, f"must divide model.feed_forward.experts={section.experts}")


def _slices(config: Sections, model: Model) -> Iterator[Conflict]:
    processes, length = config.train.sequence_parallel, config.data.row_length
    if length % processes:
        yield Conflict(SLICES, f"must divide data.row_length={length}")
    least = model.mamba.conv_width - 1  # a slice has the tokens that the next one reads
    if has_mamba(model) and length // processes < least:
        allowed = f"at most {max(1, length // least)}: slices of {least} tokens, for model.mamba.conv_width"
        yield Conflict(SLICES, allowed)
    if has_attention(model):
        yield from _slices_of_heads(config, model)
    prediction, reasoning, dpo = model.prediction, config.reasoning, config.train.dpo
    yield from _one_with(
        SLICES,
        processes,
        {
            "model.prediction: its depths read the embeddings of later tokens": prediction is not None,
            "model.depth.part mixer or both: processes would keep different numbers of tokens": (
                model.depth is not None and model.depth.part != "feed_forward"
            ),
            "model.feed_forward.drop: an expert's capacity is of whole rows": model.feed_forward.drop,
            "reasoning: adapters and memories read whole rows": reasoning is not None,
            "train.dpo: an answer's probability is of whole rows": dpo is not None,
        },
    )


def _slices_of_heads(config: Sections, model: Model) -> Iterator[Conflict]:
    processes, divided = config.train.sequence_parallel, config.train.tensor_parallel
    heads, kv_heads = model.attention.heads, model.attention.kv_heads
    if heads % divided or kv_heads % divided:
        return  # _shares refuses it
    by = "" if divided == 1 else f" / train.tensor_parallel={divided}"
    own = kv_heads // divided
    if heads // divided % processes:
        yield Conflict(SLICES, f"must divide model.attention.heads={heads}{by}")
    elif own % processes and processes % own:
        yield Conflict(SLICES, f"a divisor or a multiple of model.attention.kv_heads={kv_heads}{by}")


def _shares(config: Sections, model: Model) -> Iterator[Conflict]:
    processes, section = config.train.tensor_parallel, model.feed_forward
    divided: dict[str, int | None] = {
        "model.vocab_size": model.vocab_size,
        "model.feed_forward.hidden": section.hidden,
        "model.feed_forward.dense_hidden": section.dense_hidden,
        "model.feed_forward.shared_hidden": section.shared_hidden,
    }
    if has_attention(model):
        divided["model.attention.heads"] = model.attention.heads
        divided["model.attention.kv_heads"] = model.attention.kv_heads
    if has_mamba(model):
        divided["model.mamba.groups"] = model.mamba.groups
    if model.bigrams is not None:
        divided["model.bigrams.rows"] = model.bigrams.rows
    for key, count in divided.items():
        if count is not None and count % processes:
            yield Conflict(SHARES, f"must divide {key}={count}")
    heads = model.d_model // model.rwkv.head_size
    if has_rwkv7(model) and heads % processes:
        yield Conflict(SHARES, f"must divide the {heads} heads of RWKV-7: model.d_model / model.rwkv.head_size")
    yield from _one_with(SHARES, processes, {"train.expert_parallel": config.train.expert_parallel > 1})


def _stages(config: Sections, model: Model) -> Iterator[Conflict]:
    processes, stage = config.train.pipeline_parallel, config.train.zero_stage
    if processes > model.layers:
        yield Conflict(STAGES, f"at most model.layers={model.layers}: each stage needs a block")
    elif processes > 1 and stage in (2, 3):
        allowed = f"1 with train.zero_stage={stage}, which sums or gathers in every micro-batch: set that to 0 or 1"
        yield Conflict(STAGES, allowed)
    reason = "model.depth, whose thresholds are of all blocks"
    yield from _one_with(STAGES, processes, {reason: model.depth is not None})


def _either(config: Sections, model: Model) -> Iterator[Conflict]:
    """What several of the ways refuse."""
    train = config.train
    for key, processes in ((SHARES, train.tensor_parallel), (STAGES, train.pipeline_parallel)):
        reasons = {
            "train.optimizer.kind muon, which needs whole matrices": train.optimizer.kind == "muon",
            "train.compile": train.compile,
            "train.offload": train.offload != "none",
            "model.prediction, whose depths are not divided": model.prediction is not None,
            "reasoning, whose adapters and rollouts are not divided": config.reasoning is not None,
            "train.dpo": train.dpo is not None,
        }
        yield from _one_with(key, processes, reasons)
    others = plugin_layers(model.mixer_layers, model.feed_forward.kind)
    counts = (train.sequence_parallel, train.tensor_parallel, train.pipeline_parallel)
    for key, processes in zip((SLICES, SHARES, STAGES), counts, strict=True):
        why = f"{''.join(others[:1])} of a plugin, which would take its part of a row or a layer for the whole"
        yield from _one_with(key, processes, {why: bool(others)})
