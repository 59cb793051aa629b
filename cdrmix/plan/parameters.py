"""The parameters of a configuration by part, stored and active, counted without building the model."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

import torch

from cdrmix.config.schema import Config
from cdrmix.config.schema_model import Model
from cdrmix.config.schema_reasoning import Reasoning
from cdrmix.model.block import Block
from cdrmix.model.feed_forward.moe import EXPERT_PARAMETERS, DenseFeedForward, MoeFeedForward, SkippingFeedForward
from cdrmix.model.language_model import LanguageModel
from cdrmix.model.pipeline import Stage
from cdrmix.model.tensor_parallel import cuts_of
from cdrmix.plan.foreign import foreign_size
from cdrmix.units import amount

PARTS = (
    *("embedding", "attention", "time-mix", "mamba", "router", "experts", "feed-forward", "channel-mix", "norms"),
    *("head", "prediction", "adapters", "stage B heads"),
)
UNITS = {"m": 10**6, "b": 10**9, "t": 10**12}


@dataclass(frozen=True)
class ParameterCount:
    """Numbers of parameters by part, in the order of PARTS, then those of plugins.

    stored: in the files. active: used by one token: all parameters except those of experts, and top_k of the experts. A
    tied embedding counts once, under embedding, and so does the table of bigrams. skipping: of the active ones, those
    in branches that skip tokens.
    prediction: the further depths of multi-token prediction, which one token of `every` uses in training, and
    generation only for drafts.
    """

    stored: dict[str, int]
    active: dict[str, int]
    skipping: int = 0

    @property
    def total_stored(self) -> int:
        return sum(self.stored.values())

    @property
    def total_active(self) -> int:
        return sum(self.active.values())


class StageSize(NamedTuple):
    """Numbers of parameters: stored, those of them that tensor parallelism divides, all shares together, and those of
    experts."""

    stored: int
    divided: int
    experts: int


def largest_stage(config: Model, stages: int) -> StageSize:
    """The parameters of the largest of so many stages of a pipeline; of one: of the model."""
    with torch.device("meta"):
        model = LanguageModel(config)
    cuts, parameters = cuts_of(model), list(model.named_parameters())

    def held(stage: Stage) -> StageSize:
        sizes = {name: each.numel() for name, each in parameters if stage.has(name, config)}
        divided = sum(size for name, size in sizes.items() if name in cuts)
        experts = sum(size for name, size in sizes.items() if _part(model, name) == "experts")
        return StageSize(sum(sizes.values()), divided, experts)

    return max(held(Stage(rank, stages)) for rank in range(stages))


def count_of(config: Config) -> ParameterCount:
    """Counts the parameters of the model of a configuration, also of a model of transformers, with its adapters."""
    if isinstance(config.model, Model):
        return count_parameters(config.model, config.reasoning)
    size = foreign_size(config)
    return ParameterCount(size.stored, size.active)


_counts: dict[str, ParameterCount] = {}


def count_parameters(config: Model, reasoning: Reasoning | None = None) -> ParameterCount:
    """Counts the parameters of the model, which is built on the meta device without allocating memory; once in a
    process, because a plan asks for the same numbers many times.

    reasoning: includes the parameters of stage B, if its phases have steps.
    """
    key = f"{config} {reasoning}"
    if key not in _counts:
        _counts[key] = _count(config, reasoning)
    return _counts[key]


def _count(config: Model, reasoning: Reasoning | None) -> ParameterCount:
    in_stage_b = reasoning is not None and any(section.steps for _, section in reasoning.phases)
    stored = dict.fromkeys(PARTS, 0)
    with torch.device("meta"):
        model = LanguageModel(config, reasoning=reasoning if in_stage_b else None)
        if reasoning is not None and in_stage_b:
            from cdrmix.reason.build import with_heads  # imported here because it needs tokenizers, unlike the core

            heads = with_heads(model, config, reasoning)
            stored["stage B heads"] = sum(p.numel() for p in heads.parameters()) - sum(
                p.numel() for p in model.parameters()
            )
    skipping = dict.fromkeys(PARTS, 0)
    for name, parameter in model.named_parameters():
        part = _part(model, name)
        stored[part] = stored.get(part, 0) + parameter.numel()  # the mixer of a plugin may name a part of its own
        if _skips(config, name) and part != "router":
            skipping[part] = skipping.get(part, 0) + parameter.numel()
    active, feed_forward = dict(stored), config.feed_forward
    for of_part in (active, skipping):
        of_part["experts"] = of_part["experts"] * feed_forward.top_k // feed_forward.experts
    return ParameterCount(stored, active, sum(skipping.values()))


def _skips(config: Model, name: str) -> bool:
    """Whether a parameter is in a branch that skips tokens."""
    parts = name.split(".")
    if parts[0] != "blocks":
        return False
    layer, branch = int(parts[1]), parts[2]
    return (branch == "mixer" and config.skips(layer, "mixer")) or (
        branch == "feed_forward" and config.skips(layer, "feed_forward")
    )


def is_expert(model: LanguageModel, name: str) -> bool:
    """Whether train.expert_parallel divides a parameter."""
    return name.split(".")[2:3] == ["feed_forward"] and _part(model, name) == "experts"


def _part(model: LanguageModel, name: str) -> str:
    parts = name.split(".")
    if parts[0] in ("embedding", "head", "prediction"):
        return parts[0]
    if parts[0] == "bigrams":
        return "embedding"
    if parts[0] in ("embedding_norm", "final_norm"):
        return "norms"
    block, module = model.blocks[int(parts[1])], parts[2]
    assert isinstance(block, Block)
    if module in ("mixer_norm", "feed_forward_norm"):
        return "norms"
    if module == "plastic":
        return "adapters"
    if module == "depth_routers":
        return "router"
    assert module in ("mixer", "feed_forward"), f"{name} belongs to no part"
    if parts[3] == "router":
        return "router"
    feed_forward = block.feed_forward
    if parts[3] in EXPERT_PARAMETERS and (module == "mixer" or isinstance(feed_forward, MoeFeedForward)):
        return "experts"
    if module == "mixer":
        return block.mixer.part
    dense = isinstance(feed_forward, DenseFeedForward | SkippingFeedForward) or parts[3] == "shared"
    return "feed-forward" if dense else "channel-mix"


def parameter_table(config: Config, count: ParameterCount) -> str:
    """The counts as a table, and the ratio of both totals to the nominal size."""
    lines = [f"{'':<14}{'stored':>20}{'active':>20}"]
    ties = config.model.tie_embeddings if isinstance(config.model, Model) else foreign_size(config).tied
    for part in count.stored:
        tied = part == "head" and ties
        if count.stored[part] or tied:
            line = f"{part:<14}{count.stored[part]:>20,}{count.active[part]:>20,}"
            lines.append(line + ("   (tied: the embedding)" if tied else ""))
    lines.append(f"{'total':<14}{count.total_stored:>20,}{count.total_active:>20,}")
    if isinstance(config.model, Model) and (size := config.model.size):
        stored, active = (f"{total / nominal(size):.2f} x" for total in (count.total_stored, count.total_active))
        lines.append(f"{f'of {size}':<14}{stored:>20}{active:>20}   ({size} means {nominal(size):,} active)")
    if not isinstance(config.model, Model) and config.model.lora is not None:
        lines.append(f"{'trained':<14}{foreign_size(config).trained:>20,}")
    lines.append("")
    lines.append(f"{config.run.name}: {amount(count.total_active)} active of {amount(count.total_stored)} stored")
    return "\n".join(lines)


def nominal(size: str) -> int:
    """The number of parameters in the name of a size: 1b and dense-1b are 10**9."""
    match = re.fullmatch(r"(?:[a-z]+-)?(\d+)([mbt])", size)
    assert match, f"a size is a family, digits and a unit, not {size!r}"
    return int(match[1]) * UNITS[match[2]]
