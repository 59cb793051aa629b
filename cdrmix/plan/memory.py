"""The memory of training on each device, by component.

The state is counted as in DeepSpeed 0.19 with float32 parameters. Activations are traced (`trace`). A gigabyte is 10^9
bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

from cdrmix.config.schema import Config
from cdrmix.config.schema_model import Model
from cdrmix.ops.backend import Platform
from cdrmix.plan.components import (
    BYTES_16_BIT,
    FP32,
    Component,
    MemoryPlan,
    checkpoint_bytes,
    lasting_state,
    memory_plan,
    micro_batches,
    passes,
)
from cdrmix.plan.foreign_memory import foreign_memory_of
from cdrmix.plan.optimizer import optimizer_size
from cdrmix.plan.parameters import count_parameters, largest_stage
from cdrmix.plan.trace import trace
from cdrmix.training.deepspeed_config import BUCKET, MOST_LIVE
from cdrmix.training.reduction import IN_FLIGHT
from cdrmix.training.zero import zero_stage


def memory_of(config: Config, platform: Platform, processes: int) -> MemoryPlan:
    """The memory of each of `processes` processes in stage A. It takes seconds and allocates nothing.

    With a pipeline it is that of the first stage, which keeps the most micro-batches, as if it had also the parameters
    of the largest stage and the loss.
    """
    if not isinstance(config.model, Model):
        return foreign_memory_of(config, platform, processes)
    train = config.train
    stage = zero_stage(train, processes)
    stored = count_parameters(config.cdrmix_model)
    everywhere, divided, experts = stored.total_stored, 0, stored.stored["experts"]
    if train.parts > 1:
        everywhere, divided, experts = largest_stage(config.cdrmix_model, train.pipeline_parallel)
    if "routing_mamba" in config.cdrmix_model.mixers:
        experts = 0  # they are not shared out
    divided -= divided // train.tensor_parallel
    here = everywhere - experts + experts // train.expert_parallel - divided
    # The part of a process of the state that ZeRO partitions.
    shared = -(-(everywhere - divided) * train.parts // processes)
    accumulation = micro_batches(train, processes)
    step = trace(config, platform, zero_stage=stage, accumulation=accumulation)

    zero_3 = stage == 3
    part = f", 1/{processes // train.parts} (ZeRO 3)" if zero_3 else ""
    weights = Component("weights", FP32 * (shared if zero_3 else here), f"float32{part}")
    orthogonalised = optimizer_size(config).orthogonalised
    absent = everywhere - here if train.optimizer.experts else 0
    single = -(-orthogonalised // processes) if stage > 0 else max(0, orthogonalised - absent)
    parts, offloaded = lasting_state(
        train, platform, stage, processes, weights=weights, here=here, shared=shared, itemsize=FP32, single=single
    )
    elsewhere = experts - experts // train.expert_parallel  # parameters of the trace that are not in this process
    if step.copies:
        copies = step.copies - BYTES_16_BIT * elsewhere
        parts.append(Component("copies", copies, f"of the weights in {train.precision}"))
    # In a step with one micro-batch, gradients are allocated while activations are freed: the trace includes them.
    elsewhere = FP32 * elsewhere if stage < 2 and accumulation == 1 else 0
    parts += passes(config, step, elsewhere=elsewhere, at_once=min(train.pipeline_parallel, accumulation))
    parts += buffers(stage, config, here, processes)
    gathered = checkpoint_bytes(train, processes, everywhere, orthogonalised, everywhere - divided)
    if train.pipeline_parallel > 1:  # for the evaluation at the end
        gathered = max(gathered, FP32 * stored.total_stored)
    host_bytes = offloaded + max(FP32 * here, gathered)
    return memory_plan(parts, step, platform, processes, host_bytes)


def buffers(stage: int, config: Config, here: int, processes: int) -> Iterator[Component]:
    """Messages, and what ZeRO-3 gathers. here: parameters of a process, before ZeRO partitions them."""
    if processes == config.train.parts and stage == 0:
        return
    if stage < 3:
        held = IN_FLIGHT if stage < 2 else 1
        yield Component("buffers", held * FP32 * min(BUCKET, here), "buckets of gradients to be reduced")
        return
    largest = largest_module(config)
    live = min(here, max(MOST_LIVE, largest))
    why = "gathered weights, and gradients of the largest module"
    yield Component("gathered", FP32 * (live + largest), why)
    yield Component(
        "buffers", 2 * FP32 * min(BUCKET, here), "prefetch buckets of weights and reduction buckets of gradients"
    )


def largest_module(config: Config) -> int:
    """Parameters of the module that has most of them: a layer's experts, or a table."""
    model, ffn = config.cdrmix_model, config.cdrmix_model.feed_forward
    widening = 3 if ffn.activation == "swiglu" else 2
    largest = widening * model.d_model * ffn.hidden
    if ffn.kind == "moe":
        largest *= ffn.experts // config.train.expert_parallel
        if ffn.dense_layers:
            largest = max(largest, widening * model.d_model * ffn.dense_width)
    return max(largest, model.vocab_size * model.d_model) // config.train.tensor_parallel
