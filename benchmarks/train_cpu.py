"""Training on a CPU compared with other ways to train on the same batches: tokens a second, in turns."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import trainer
import trainer_peers as peers
import turns
from cases import Options, Result, quantiles

from cdrmix import ops
from cdrmix.config.schema import Config
from cdrmix.data.batch import Batch
from cdrmix.data.prepare import prepare
from cdrmix.plan.flops import training_flops_per_token
from cdrmix.training.build import build_loss_model
from cdrmix.training.distributed import join

BLOCK = 2  # steps of one timing, before which the loop is stopped
EAGER, COMPILED, LLAMA = "PyTorch, eager", "PyTorch, compiled", "transformers Llama"
QUANTILES = {"": "p50", "_p20": "p20", "_p80": "p80"}  # suffixes of a ratio's names


def in_turns_with_peers(path: Path, options: Options) -> Result:
    """Tokens a second of stage A's loop on a CPU, in turns with others on the same batches.

    The others: the same model without the kernels (CDRMIX_BACKEND=reference), in a loop without the rest of the
    trainer, eager and under torch.compile; and transformers' Llama that multiplies as many parameters by a token, which
    reads rows as one document.
    """
    # One thread, because the speed of several depends on other users of the machine.
    steps = turns.steps_of(options.blocks, BLOCK)
    config = trainer.at_most_one_evaluation(path, options.device, steps, "run.threads=1")
    device = join(config).device
    shards = prepare(config)
    others: dict[str, turns.Step] = {}
    absent: dict[str, str] = {}
    active = training_flops_per_token(config).active_parameters
    figures: dict[str, float] = {"active_parameters": active}
    for name in (EAGER, COMPILED, LLAMA):
        if any(part in name for part in options.without):
            absent[name] = "left out by --without"
            continue
        torch.manual_seed(config.run.seed)
        if name == LLAMA:
            others[name], figures["peer_parameters"] = llama(config, active, device)
        else:
            others[name] = same_model(config, device, compiled=name == COMPILED)
    samples = turns.in_turns(config, shards, others, BLOCK)
    tokens = config.train.batch_rows * config.data.row_length
    ours = samples[turns.OURS]
    for figure, name in (("eager", EAGER), ("compiled", COMPILED), ("llama", LLAMA)):
        if name in samples:
            ratios = quantiles([mine / theirs for mine, theirs in zip(ours, samples[name], strict=True)])
            figures |= {f"speed_over_{figure}{cut}": ratios[at] for cut, at in QUANTILES.items()}
    first = next(iter(others), None)
    return Result(
        unit="tokens/s",
        peer_name=first,
        ours=[tokens * steps for steps in ours],
        peer=[tokens * steps for steps in samples[first]] if first else [],
        figures=dict(figures),
        settings={
            "config": path.name,
            "blocks": options.blocks,
            "steps_per_block": BLOCK,
            "device": device.type,
            "backend": ops.backend(torch.empty(0, device=device)),
            "threads": torch.get_num_threads(),
            "precision": config.train.precision,
            "tokens_per_step": tokens,
        },
        peers={name: {"milliseconds": quantiles([1e3 / steps for steps in found])} for name, found in samples.items()},
        absent=absent,
    )


def same_model(config: Config, device: torch.device, *, compiled: bool) -> turns.Step:
    """The same model with its operators in plain PyTorch, in a loop without the rest of the trainer.

    compiled: under torch.compile, which fuses operations between the operators, but not inside of them.
    """
    loop = peers.BareLoop(build_loss_model(config), config.train, device)
    if compiled:
        loop.model.compile(dynamic=True)  # documents differ in number from batch to batch
    return without_kernels(loop.step)


def llama(config: Config, active: int, device: torch.device) -> tuple[turns.Step, int]:
    """transformers' Llama that multiplies so many parameters by a token, as deep and as wide; and their number."""
    model = config.model
    sizes = {"d_model": model.d_model, "layers": model.layers, "heads": model.attention.heads}
    made = peers.llama(model.vocab_size, config.data.row_length, active, **sizes, tied=model.tie_embeddings)
    return peers.LlamaLoop(made, config.train, device).step, peers.active_parameters(made)


def without_kernels(step: turns.Step) -> turns.Step:
    """A step whose operators use plain PyTorch."""

    def run(number: int, batches: list[Batch]) -> object:
        with environment(CDRMIX_BACKEND="reference"):
            return step(number, batches)

    return run


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    """Sets these variables in the process's environment for a time."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
