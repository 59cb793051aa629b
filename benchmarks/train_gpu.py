"""A training step end to end on one device: tokens a second, MFU, memory, losses, and where the time goes.

python train_gpu.py [--case NAME | --config YAML] [--device cuda|cpu] [--results FOLDER] [...] [KEY=VALUE ...]

The engine, the loss model, the routing and the optimizer are those of training. The batches are synthetic: documents of
log-normal length packed into rows, with token ids by Zipf's law, the same batches for every update. After warm-up,
--updates updates of --micro-batches micro-batches each are timed. There is no text, no checkpoint and no export.
CDRMIX_BACKEND=reference measures the same model without the kernels. Under torchrun every process takes a GPU; figures
are those of rank 0, for one GPU.

First the memory of a step is planned, as by `cdrmix plan`; a step that does not fit is refused, unless --despite-plan
is given. The row has the planned and the measured peak.

It needs PyTorch, Triton, NumPy, PyYAML, Rich, Pydantic, safetensors and DeepSpeed, but no text pipeline and no compiled
extension. Exit codes: 0 measured, 1 a target of the case missed (targets.yaml), 2 a bad argument or configuration, 8
out of memory, or too little of it by the plan.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import machine
import numpy as np
import run
import torch
import train_profile
import yaml
from cases import Result, quantiles

from cdrmix import ops
from cdrmix.config.schema import Config
from cdrmix.data.batch import Batch
from cdrmix.errors import CdrmixError, NonFiniteLossError, OutOfMemoryError
from cdrmix.model.depth import move_biases
from cdrmix.model.feed_forward.router import balance_routers
from cdrmix.peak_memory import peak_resident
from cdrmix.plan.fit import GB, fit, shortfall
from cdrmix.plan.flops import training_flops_per_token
from cdrmix.plan.machine import machine_for
from cdrmix.plan.memory import MemoryPlan
from cdrmix.runtime import seed_everything
from cdrmix.training.build import build_loss_model
from cdrmix.training.deepspeed_config import accumulation
from cdrmix.training.distributed import DistributedContext, join
from cdrmix.training.engine import Engine, make_engine
from cdrmix.training.rendezvous import place
from cdrmix.training.schedule import learning_rate

CONFIGS = Path(__file__).parents[1] / "configs"
MEDIAN_DOCUMENT, SIGMA = 400, 1.0  # tokens, and of the logarithm: as in the kernels' packed cases
ZIPF_EXPONENT = 1.1  # of token ids: about that of a tokenizer's pieces in English text
TARGETS = Path(__file__).with_name("targets.yaml")
DEFAULT = "core-1b"
PROFILED = 2  # micro-batches, with the update that ends them


class Measured(NamedTuple):
    """A case: its configuration, the overrides, and its purpose."""

    config: str
    overrides: tuple[str, ...]
    about: str


# RWKV-7's channel-mix has two matrices, as a relu^2 expert has. With the hidden width of top_k = 2 experts together,
# its model has the active parameters of the mixture, without the router's and with a token shift.
# What fits one GPU of 141 GB, core-1b beside the average of its weights; the shipped file also fits eight of 80 GB.
ROWS, ROWS_1B = "train.micro_batch_rows=8", "train.micro_batch_rows=4"
CASES = {
    "core-1b": Measured("cdrmix-core-1b.yaml", (ROWS_1B,), "the shipped 1b configuration"),
    "core-1b-12": Measured(
        "cdrmix-core-1b.yaml",
        ("model.layers=12", ROWS),
        "the 1b model with half of its layers, every kernel at its size: fits a GPU of 80 GB",
    ),
    "dense-1b": Measured(
        "cdrmix-core-1b.yaml",
        ("model.feed_forward.kind=channel_mix", "model.feed_forward.hidden=9216", ROWS),
        "the 1b model with dense feed-forwards of as many active parameters",
    ),
    "core-4b": Measured("cdrmix-core-4b.yaml", (), "the shipped 4b configuration"),
    "core-40b": Measured("cdrmix-core-40b.yaml", (), "the shipped 40b configuration"),
    "core-200b": Measured("cdrmix-core-200b.yaml", (), "the shipped 200b configuration"),
    "moe-arch-5b": Measured("moe-arch-5b.yaml", (), "the shipped 5B mixture of experts with Mixture-of-Depths"),
    "core-tiny": Measured("cdrmix-core-tiny.yaml", (), "the tiny model: what launches and the host cost"),
}


def main() -> int:
    """Measures what the arguments name, prints a table, and writes a row where --results says; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--case", choices=CASES, help="default: core-1b")
    what.add_argument("--config", type=Path, help="a configuration of your own")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--micro-batch-rows", type=positive, metavar="N", help="default: the configuration's")
    parser.add_argument("--micro-batches", type=positive, default=8, metavar="N", help="of an update (8)")
    parser.add_argument("--warmup", type=positive, default=2, metavar="N", help="updates before the clock runs (2)")
    parser.add_argument("--updates", type=positive, default=4, metavar="N", help="updates that are timed (4)")
    parser.add_argument(
        "--zero-stage", type=int, choices=(0, 1, 2, 3), help="default: 0 in one process, else as configured"
    )
    parser.add_argument("--checkpointing", action="store_true", help="activation checkpointing")
    parser.add_argument("--despite-plan", action="store_true", help="try also what the memory plan says does not fit")
    parser.add_argument("--no-determinism", action="store_true", help="let PyTorch take operations that do not repeat")
    parser.add_argument("--no-profile", action="store_true", help="leave out where the time goes")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="keep the profile of a GPU for a trace viewer")
    parser.add_argument("--results", type=Path, metavar="FOLDER", help="append the row to FOLDER/train.jsonl")
    parser.add_argument("--json", action="store_true", help="print the measurement as one line of JSON and no table")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="of the configuration, as `cdrmix train` has")
    arguments = parser.parse_intermixed_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("no GPU found: PyTorch sees no CUDA device. --device cpu measures on the processor")
    if arguments.device == "cuda" and os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        parser.error("TRITON_INTERPRET is set, so Triton would run on the CPU: unset it")
    load = os.getloadavg()[0]
    try:
        result = measure(arguments)
    except CdrmixError as error:
        print(f"train_gpu.py: {error}", file=sys.stderr)
        return error.exit_code
    except torch.cuda.OutOfMemoryError as error:
        print(f"train_gpu.py: out of memory: {error}", file=sys.stderr)
        return OutOfMemoryError.exit_code
    if place().rank != 0:
        return 0
    if arguments.json:
        print(json.dumps(run.finite(dataclasses.asdict(result))))
        return 0
    row = run.finite(run.to_row("train", case_name(arguments), result, targets(arguments), machine.facts(), load))
    run.show(row)
    show_profile(result.profile)
    if arguments.results is not None:
        arguments.results.mkdir(parents=True, exist_ok=True)
        with (arguments.results / "train.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
    return 0 if run.all_met([row]) else 1


def case_name(arguments: argparse.Namespace) -> str:
    """The case's name in targets.yaml and the rows; for another configuration, its file."""
    return (arguments.config.stem if arguments.config else arguments.case or DEFAULT).replace("-", "_")


def targets(arguments: argparse.Namespace) -> dict[str, Any]:
    """The targets of a case on a GPU; none if it is changed, or measured without determinism or the kernels."""
    changed = arguments.overrides or arguments.checkpointing or arguments.zero_stage is not None
    other = arguments.config or arguments.no_determinism or os.environ.get("CDRMIX_BACKEND", "triton") != "triton"
    if changed or other or arguments.device != "cuda":
        return {}
    return yaml.safe_load(TARGETS.read_text())["train"][case_name(arguments)]


def positive(text: str) -> int:
    """A positive integer argument. Raises ValueError."""
    if (value := int(text)) < 1:
        raise ValueError(f"{text} is not at least 1")
    return value


def configured(arguments: argparse.Namespace) -> Config:
    """The configuration of a case with the changes of the command line. Raises ConfigError."""
    case = CASES[arguments.case or DEFAULT]
    path = arguments.config or CONFIGS / case.config
    changes = [] if arguments.config else list(case.overrides)
    # Synthetic batches: no domains, no curriculum, and no text is read.
    changes += [
        "data.domains=null",
        "data.curriculum=[]",
        "data.mixture=null",
        "data.objectives.fim=null",
        f"run.device={arguments.device}",
    ]
    if arguments.zero_stage is not None:
        changes.append(f"train.zero_stage={arguments.zero_stage}")
    elif arguments.config is None and place().size == 1:
        changes.append("train.zero_stage=0")  # one process has nothing to shard
    if arguments.checkpointing:
        changes.append("train.activation_checkpointing=true")
    changes += arguments.overrides
    config = Config.from_yaml(path, changes)
    if (rows := arguments.micro_batch_rows) is None:
        return config
    # A run's step: as many rows as configured, rounded down to a multiple of the micro-batch's.
    step = max(config.train.batch_rows // rows, 1) * rows
    return Config.from_yaml(path, [*changes, f"train.micro_batch_rows={rows}", f"train.batch_rows={step}"])


def with_micro_batches(full: Config, micro_batches: int) -> Config:
    """The configuration with so many micro-batches an update, over all processes."""
    rows = full.train.micro_batch_rows * micro_batches * place().size
    return full.model_copy(update={"train": full.train.model_copy(update={"batch_rows": rows})})


def planned(config: Config, world: DistributedContext, despite: bool) -> MemoryPlan | None:
    """The memory plan of a process on this device; None for CDRMIX_BACKEND=reference, which has no plan.

    Raises OutOfMemoryError where it does not fit, unless `despite`.
    """
    if ops.backend(torch.empty(0, device=world.device)) == "reference":
        return None
    machine_here = machine_for(config, None, world.size)
    found = fit(config, machine_here, world.size, remedies=False)
    if world.rank == 0:
        print(f"train_gpu.py: planned peak {found.memory.total / GB:,.2f} GB a process", file=sys.stderr)
    if found.fits is False and not despite:
        short = shortfall(config, found, machine_here, world.size)
        raise OutOfMemoryError(f"{short} --despite-plan tries it nevertheless.")
    return found.memory


def measure(arguments: argparse.Namespace) -> Result:
    """Trains as the arguments say and returns the measurements. Raises CdrmixError, torch.cuda.OutOfMemoryError."""
    full = configured(arguments)
    config = with_micro_batches(full, arguments.micro_batches)
    world = join(config)
    plan = planned(config, world, arguments.despite_plan)
    torch.use_deterministic_algorithms(not arguments.no_determinism)
    seed_everything(config.run.seed)
    begun = time.perf_counter()
    with world.device:  # the weights are drawn there: a GPU fills them sooner than a processor
        loss_model = build_loss_model(config)
    trainer = Trainer(config, make_engine(config, loss_model, world), world)
    del loss_model
    built = time.perf_counter() - begun
    numbers = [number * world.size + world.rank for number in range(accumulation(config, world))]
    batches = [synthetic_batch(config, number) for number in numbers]
    if world.device.type == "cuda":
        batches = [batch.pinned() for batch in batches]  # as in the loop of training
    begun = time.perf_counter()
    for _ in range(arguments.warmup):
        trainer.update(batches)
    trainer.synchronize()
    warmed = time.perf_counter() - begun
    if world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(world.device)
    marks = [trainer.update(batches) for _ in range(arguments.updates)]
    micro = [seconds for update in marks for seconds in update.micro_batches()]
    updates = [update.seconds() for update in marks]
    memory = peak_memory(world)
    # The profile comes last, because it changes memory and times.
    profiled = None
    if not arguments.no_profile:
        few = batches[:PROFILED]
        kernels = train_profile.traced(lambda: trainer.update(few), world.device, arguments.trace)
        counter = train_profile.OperatorBytes()
        if not config.train.compile:  # fused operations are no operators
            with counter:
                trainer.update(few)
        profiled = train_profile.by_family(kernels, counter.found, len(few))
    tokens = sum(batch.ids_BT.numel() for batch in batches)
    return Result(
        unit="tokens/s a process",
        peer_name=None,
        ours=[tokens / seconds for seconds in updates],
        peer=[],
        figures=figures_of(config, world, batches, micro, updates, max(1, accumulation(full, world)))
        | {
            **memory,
            "predicted_peak_bytes": None if plan is None else plan.total,
            "predicted_tensor_bytes": None if plan is None else plan.tensors,
            "first_loss": trainer.losses[0],
            "last_loss": trainer.losses[-1],
            "gradient_norm": trainer.engine.gradient_norm,
            "load_over_even": trainer.load_over_even,
            "build_seconds": built,
            "warmup_seconds": warmed,
        },
        settings={
            "config": Path(arguments.config or CASES[arguments.case or DEFAULT].config).name,
            "overrides": [] if arguments.config else list(CASES[arguments.case or DEFAULT].overrides),
            "arguments": arguments.overrides,
            "device": world.device.type,
            "processes": world.size,
            "backend": ops.backend(torch.empty(0, device=world.device)),
            "precision": config.train.precision,
            "zero_stage": trainer.engine.stage,
            "activation_checkpointing": config.train.activation_checkpointing,
            "deterministic": not arguments.no_determinism,
            "threads": torch.get_num_threads(),
            "row_length": config.data.row_length,
            "micro_batch_rows": config.train.micro_batch_rows,
            "micro_batches": len(batches),
            "warmup": arguments.warmup,
            "updates": arguments.updates,
            "predicted_bytes": {} if plan is None else {part.name: part.bytes for part in plan.components},
        },
        profile=profiled or {},
    )


def figures_of(
    config: Config,
    world: DistributedContext,
    batches: list[Batch],
    micro: list[float],
    updates: list[float],
    accumulated_in_run: int,
) -> dict[str, float | None]:
    """Speed from the seconds of micro-batches and of whole updates: tokens a second, and MFU on active parameters.

    mfu: None where the table of GPUs does not have the device. tokens_per_second: of a process, with the update;
    tokens_per_second_in_run: computed for the configuration's own micro-batches an update, accumulated_in_run.
    """
    counted = training_flops_per_token(config)
    # The formula takes every row for one document; these documents are shorter, with fewer pairs of tokens.
    pairs = sum(causal_pairs(batch) for batch in batches)
    rows = sum(len(batch.ids_BT) for batch in batches)
    length = config.data.row_length
    flops = counted.total - counted.attention * (1 - pairs / (rows * length * (length + 1) / 2))
    tokens = sum(batch.ids_BT.numel() for batch in batches)
    speed = tokens / quantiles(updates)["p50"]
    known = machine.datasheet(world.device)
    mfu = None if known is None else speed * flops / known["flops_per_second"]
    assert mfu is None or 0 < mfu < 1, f"an MFU of {mfu}: operations or seconds are counted wrong"
    micro_seconds = quantiles(micro)["p50"]
    update_seconds = max(0.0, quantiles(updates)["p50"] - micro_seconds * len(batches))
    in_run = accumulated_in_run * tokens / len(batches) / (accumulated_in_run * micro_seconds + update_seconds)
    return {
        "tokens_per_second": speed,
        "mfu": mfu,
        "flops_per_token": flops,
        "active_parameters": counted.active_parameters,
        "micro_batch_milliseconds": micro_seconds * 1e3,
        "update_milliseconds": update_seconds * 1e3,
        "tokens_per_second_in_run": in_run,
        "documents": sum(len(batch.cu_seqlens_N) - 1 for batch in batches),
    }


class Marks:
    """Points in time of one update on its device: before the first micro-batch, after each, and after the update."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[Any] = []
        self.add()

    def add(self) -> None:
        """Marks on the device, not on the host, so that nothing waits."""
        if self._device.type == "cuda":
            self._events.append(torch.cuda.Event(enable_timing=True))
            self._events[-1].record()
        else:
            self._events.append(time.perf_counter())

    def _between(self, first: Any, second: Any) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            return first.elapsed_time(second) / 1e3
        return second - first

    def micro_batches(self) -> list[float]:
        """Seconds of each micro-batch."""
        return [self._between(*pair) for pair in zip(self._events[:-2], self._events[1:-1], strict=True)]

    def seconds(self) -> float:
        """Seconds of the whole update."""
        return self._between(self._events[0], self._events[-1])


class Trainer:
    """The loop of training around an engine, without input and output.

    losses: next-token nats of every update. load_over_even: in the last update, the largest number of routes to an
    expert over the mean of its layer; 1 is balance, None for a model without experts.
    """

    def __init__(self, config: Config, engine: Engine, world: DistributedContext) -> None:
        self.config, self.engine, self.world = config, engine, world
        self.losses: list[float] = []
        self.load_over_even: float | None = None
        self._bias_rate = config.model.feed_forward.bias_update_rate if config.model.routers else 0.0

    def update(self, batches: list[Batch]) -> Marks:
        """The micro-batches of one update, and the update. Raises NonFiniteLossError."""
        engine, world = self.engine, self.world
        marks = Marks(world.device)
        engine.set_learning_rate(learning_rate(self.config.train, len(self.losses)))
        next_token = torch.zeros((), dtype=torch.float64, device=world.device)
        tokens_per_expert_LE = None
        threshold_G = next_token.new_zeros(0)
        for batch in batches:
            losses = engine.forward(batch, last=batch is batches[-1])
            if losses.depth is not None:
                threshold_G = losses.depth.threshold_G.double()
            engine.backward(losses.total)
            next_token += losses.next_token_sum.detach()
            if losses.router is not None:
                added_LE = losses.router.tokens_per_expert_LE.double()
                tokens_per_expert_LE = added_LE if tokens_per_expert_LE is None else tokens_per_expert_LE + added_LE
            marks.add()
        # As in the loop of training: sums over all processes, and one read from the device.
        if tokens_per_expert_LE is None:
            tokens_per_expert_LE = next_token.new_zeros(0, 0)
        norm = engine.clip()
        counted = [next_token.reshape(1), tokens_per_expert_LE.flatten(), threshold_G / world.size]
        parts = [world.total(torch.cat(counted))]
        parts += [] if norm is None else [norm.double().reshape(1)]
        read = torch.cat(parts).cpu()
        loss = read[0].item() / (sum(batch.ids_BT.numel() for batch in batches) * world.size)
        if not math.isfinite(loss):
            raise NonFiniteLossError(f"the loss of update {len(self.losses) + 1} is {loss}")
        self.losses.append(loss)
        applied = engine.step(None if norm is None else read[-1].item())
        engine.zero()
        tokens_per_expert_LE = read[1 : 1 + tokens_per_expert_LE.numel()].view(tokens_per_expert_LE.shape)
        if applied and self._bias_rate > 0:
            balance_routers(engine.module, tokens_per_expert_LE, self._bias_rate)
        if applied and len(threshold_G):  # at once to the share that is kept after the release, by the last micro-batch
            threshold_G = read[1 + tokens_per_expert_LE.numel() :][: len(threshold_G)]
            move_biases(engine.module, threshold_G, threshold_G, 1.0, 1.0)
        marks.add()
        if tokens_per_expert_LE.numel():
            even_L1 = tokens_per_expert_LE.mean(1, keepdim=True)
            self.load_over_even = (tokens_per_expert_LE / even_L1).max().item()
        return marks

    def synchronize(self) -> None:
        """Waits until the device has finished its work."""
        if self.world.device.type == "cuda":
            torch.cuda.synchronize(self.world.device)


def synthetic_batch(config: Config, number: int) -> Batch:
    """Micro-batch `number`: whole rows of packed documents, each row beginning one. A function of the number.

    Lengths are log-normal; a document that reaches a row's end is cut there, and its rest begins the next row.
    """
    rows, length = config.train.micro_batch_rows, config.data.row_length
    draw = np.random.default_rng([config.run.seed, number])
    # Zipf's law over the whole vocabulary: id i with a probability as (i + 1) ** -ZIPF_EXPONENT.
    weights = np.arange(1, config.model.vocab_size + 1, dtype=np.float64) ** -ZIPF_EXPONENT
    cumulated = np.cumsum(weights)
    drawn = np.searchsorted(cumulated, draw.random(rows * length + 1) * cumulated[-1], side="right")
    ids = np.minimum(drawn, config.model.vocab_size - 1).astype(np.int64)
    documents = np.ceil(draw.lognormal(np.log(MEDIAN_DOCUMENT), SIGMA, rows * length)).astype(np.int64)
    ends = np.cumsum(documents)
    row_ends = np.arange(rows + 1) * length
    starts = np.union1d(row_ends, ends[ends < rows * length])
    return Batch(
        ids_BT=torch.from_numpy(ids[:-1].reshape(rows, length)),
        targets_BT=torch.from_numpy(ids[1:].reshape(rows, length)),
        weights_BT=torch.ones(rows, length),
        cu_seqlens_N=torch.from_numpy(starts.astype(np.int32)),
        step=number,
        token_count=float(config.train.batch_rows * length),
    )


def causal_pairs(batch: Batch) -> int:
    """The number of pairs of a token and one of its document up to itself."""
    lengths = batch.cu_seqlens_N.long().diff()
    return int((lengths * (lengths + 1) // 2).sum())


def peak_memory(world: DistributedContext) -> dict[str, float | None]:
    """Peak bytes: for a GPU as PyTorch allocated and reserved them, on a CPU the process's resident memory."""
    if world.device.type == "cuda":
        return {
            "peak_allocated_bytes": torch.cuda.max_memory_allocated(world.device),
            "peak_reserved_bytes": torch.cuda.max_memory_reserved(world.device),
        }
    return {"peak_resident_bytes": peak_resident()}


def show_profile(profile: dict[str, Any]) -> None:
    """Two aligned lists: families, and the longest kernels."""
    if not profile:
        return
    total = profile["milliseconds"]
    moved = profile["operator_bytes_by_family"]
    print(f"a micro-batch with its share of the update: {total:.2f} ms in {profile['launches']:.0f} launches")
    if moved:
        print(f"operators read and write {profile['operator_bytes'] / 1e9:,.2f} GB")
    for name, found in profile["families"].items():
        share, launches = found["milliseconds"] / total, found["launches"]
        line = f"  {name:<14}{found['milliseconds']:>9.3f} ms {share:>6.1%} {launches:>7.0f} launches"
        print(line + (f" {moved[name] / 1e9:>9.3f} GB" if name in moved else ""))
    for name, found in profile["kernels"].items():
        print(f"  {found['milliseconds']:>9.3f} ms {found['launches']:>6.0f} x  {name[:96]}")


if __name__ == "__main__":
    sys.exit(main())
