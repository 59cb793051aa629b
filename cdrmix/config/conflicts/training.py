"""Conflicts in the section `train`: rows, precision, memory, the best checkpoint."""

from __future__ import annotations

from collections.abc import Iterator

from cdrmix.config.best_metric import OF_DOMAIN, PAIR_FIGURES, TEXT_FIGURES
from cdrmix.config.conflicts.conflict import Conflict
from cdrmix.config.names import plugin_layers
from cdrmix.config.schema_run import Sections
from cdrmix.registry import nearest

PAIRS = ("preferences", "task_preferences")


def conflicts(config: Sections) -> Iterator[Conflict]:
    yield from _rows(config)
    yield from _steps(config)
    yield from _parameters(config)
    yield from _precision(config)
    yield from _compile(config)
    yield from _offload(config)
    yield from _pairs(config)
    yield from _best(config)


def _rows(config: Sections) -> Iterator[Conflict]:
    rows, micro, warmup = config.train.batch_rows, config.train.micro_batch_rows, config.train.batch_warmup
    if rows % micro:
        yield Conflict("train.batch_rows", f"a multiple of train.micro_batch_rows={micro}")
    if warmup is not None and (warmup.rows >= rows or warmup.rows % micro):
        allowed = f"a multiple of train.micro_batch_rows={micro} below train.batch_rows={rows}"
        if micro >= rows:
            allowed = f"null, or train.micro_batch_rows below train.batch_rows={rows}; found {micro}"
        yield Conflict("train.batch_warmup.rows", allowed)


def _steps(config: Sections) -> Iterator[Conflict]:
    train = config.train
    warmups = {"train.warmup_steps": train.warmup_steps}
    if train.batch_warmup is not None:
        warmups["train.batch_warmup.steps"] = train.batch_warmup.steps
    for key, steps in warmups.items():
        if steps >= train.steps:
            yield Conflict(key, f"below train.steps={train.steps}")


def _parameters(config: Sections) -> Iterator[Conflict]:
    """Keys that need the number of parameters, which is unknown for a model with parts of plugins."""
    if config.model.kind != "cdrmix":
        return
    parts = ", ".join(plugin_layers(config.model.mixer_layers, config.model.feed_forward.kind))
    if parts and config.train.hyperparameters != "none":
        yield Conflict("train.hyperparameters", f"none, because the parameters of {parts} are unknown")
    if parts and config.train.tokens_per_parameter is not None:
        yield Conflict("train.tokens_per_parameter", f"null, because the parameters of {parts} are unknown")


def _precision(config: Sections) -> Iterator[Conflict]:
    train = config.train
    if train.precision == "fp16" and config.run.device == "cpu":
        yield Conflict("train.precision", "bf16 or fp32 with run.device=cpu; fp16 needs a GPU")
    if train.residual_dtype == "bf16" and train.precision != "bf16":
        yield Conflict("train.residual_dtype", "fp32 or null, or train.precision: bf16")
    if train.weights == "bf16" and (train.precision != "bf16" or train.zero_stage == 0):
        yield Conflict("train.weights", "fp32, or train.precision: bf16 and train.zero_stage: auto, 1, 2 or 3")


def _compile(config: Sections) -> Iterator[Conflict]:
    train = config.train
    if not train.compile:
        return
    # All gather or exchange in hooks of modules or in layers, which compiled code does not call.
    parallel = max(train.expert_parallel, train.sequence_parallel) > 1
    if train.zero_stage == 3 or train.offload == "all" or parallel:
        others = " and train.offload none or optimizer" if train.offload == "all" else ""
        slices = " and train.sequence_parallel 1" if train.sequence_parallel > 1 else ""
        allowed = f"false, or train.zero_stage below 3{others} and train.expert_parallel 1{slices}"
        yield Conflict("train.compile", allowed)
    depth = config.model.depth if config.model.kind == "cdrmix" else None
    if depth is not None and depth.part != "feed_forward":
        allowed = "false with model.depth.part mixer or both: mixers read as many rows as tokens are kept"
        yield Conflict("train.compile", allowed)


def _offload(config: Sections) -> Iterator[Conflict]:
    train = config.train
    stages = ("auto", 3) if train.offload == "all" else ("auto", 2, 3)
    if train.offload != "none" and (train.zero_stage not in stages or train.expert_parallel > 1):
        which = "auto or 3" if train.offload == "all" else "auto, 2 or 3"
        yield Conflict("train.offload", f"none, or train.zero_stage: {which} and train.expert_parallel: 1")
    if train.offload_folder is not None and (train.offload == "none" or train.optimizer.kind != "adamw"):
        allowed = "null, or train.offload: optimizer or all and train.optimizer: adamw"
        yield Conflict("train.offload_folder", allowed)


def _pairs(config: Sections) -> Iterator[Conflict]:
    data = config.data
    sources = [domain.source for domain in data.domains.values()] if data.domains else [data.source]
    pairs = [source is not None and source.kind in PAIRS for source in sources]
    if config.train.dpo is not None and not all(pairs):
        yield Conflict("train.dpo", "null, or sources of the kinds preferences and task_preferences alone")
    if config.train.dpo is None and any(pairs):
        allowed = "a section, because the sources are preferences"
        yield Conflict("train.dpo", allowed, others=("data.source", "data.domains"))


def _best(config: Sections) -> Iterator[Conflict]:
    metric, pairs, domains = config.train.best_metric, config.train.dpo is not None, config.data.domains or {}
    if metric is None:
        if config.train.best_mode is not None and pairs:
            allowed = "null, or with train.best_metric, which says what min or max is of"
            yield Conflict("train.best_mode", allowed)
        return
    names = [*PAIR_FIGURES] if pairs else [*TEXT_FIGURES]
    if not pairs and len(domains) > 1:
        names += [f"{OF_DOMAIN}{name}" for name in domains]
    if metric not in names:
        held_out = "the held-out pairs (train.dpo) have" if pairs else "the validations measure"
        needs_domains = metric.startswith(OF_DOMAIN) and not pairs and len(domains) < 2
        why = "; the bits per byte of a domain need several domains in data.domains" if needs_domains else ""
        allowed = f"a figure that {held_out}: {', '.join(names)}{why}"
        yield Conflict("train.best_metric", allowed, nearest=nearest(metric, names))
