"""The trainer's cases: stage A's loop against bare PyTorch, and its model against transformers' Llama."""

from __future__ import annotations

import functools
from pathlib import Path

import torch
import trainer_hf
import trainer_peers as peers
import trainer_replay
import trainer_watch
import turns
from cases import Case, Options, Result

from cdrmix.config.schema import Config
from cdrmix.config.schema_training import Train
from cdrmix.data.loader import EvalLoader, TrainLoader
from cdrmix.data.prepare import prepare
from cdrmix.errors import ConfigError
from cdrmix.eval.perplexity import evaluate, held_out
from cdrmix.inference.checkpoints import read_weights
from cdrmix.model.language_model import LanguageModel
from cdrmix.model.loss import LossModel
from cdrmix.plan.flops import training_flops_per_token
from cdrmix.training import stage_a
from cdrmix.training.build import build_loss_model
from cdrmix.training.distributed import join

BLOCK = 10  # steps of one timing: core-tiny's logging interval


def overhead(options: Options) -> Result:
    """Steps per second of stage A's loop, and of the same model in bare PyTorch, in turns of ten steps."""
    config = at_most_one_evaluation(options.config, options.device, turns.steps_of(options.blocks, BLOCK))
    device = join(config).device
    shards = prepare(config)
    torch.manual_seed(config.run.seed)
    bare = peers.BareLoop(build_loss_model(config), config.train, device)
    samples = turns.in_turns(config, shards, {"bare PyTorch loop": bare.step}, BLOCK)
    return Result(
        unit="steps/s",
        peer_name="bare PyTorch loop",
        ours=samples[turns.OURS],
        peer=samples["bare PyTorch loop"],
        settings={
            "config": options.config.name,
            "blocks": options.blocks,
            "steps_per_block": BLOCK,
            "device": device.type,
            "precision": config.train.precision,
        },
    )


def quality(options: Options) -> Result:
    """Held-out bits per byte after equal seconds of training on the same shards, with as many parameters that a token
    multiplies."""
    probe = at_most_one_evaluation(options.config, options.device, max(4, round(options.seconds / 10)))
    device = join(probe).device
    shards = prepare(probe)
    with turns.run_folder(probe) as run:
        speed = stage_a.train(probe, run, shards, console=False)
    config = at_most_one_evaluation(
        options.config, options.device, max(4, round(options.seconds * speed.step / speed.seconds))
    )
    with turns.run_folder(config) as run:
        trained = stage_a.train(config, run, shards)
        ours = LanguageModel(config.model)
        ours.load_state_dict(read_weights(trained.checkpoint))
    ours.to(device)
    rows = {"row_length": config.data.row_length, "micro_batch_rows": config.train.micro_batch_rows}
    score = held_out(LossModel(ours), shards.valid, **rows)

    # The rows, schedule, optimizer and groups of ours; the rates are the best that were found: LOG.md.
    train = Train.model_validate(
        {
            "steps": 1000,  # the schedule follows the clock, in so many parts
            "warmup_steps": 100,
            "schedule": config.train.schedule,
            "batch_rows": config.train.batch_rows,
            "micro_batch_rows": config.train.micro_batch_rows,
            "learning_rate": 9e-3,
            "optimizer": "muon",
            "groups": {"embedding": {"rate": 6.0}, "head": {"rate": 3.0}},
            "precision": config.train.precision,
        }
    )
    model = config.cdrmix_model
    active = training_flops_per_token(config).active_parameters
    torch.manual_seed(config.run.seed)
    llama = peers.llama(
        model.vocab_size,
        config.data.row_length,
        active,
        d_model=128,
        layers=4,
        heads=4,
        tied=model.tie_embeddings,
    )
    loader = TrainLoader(
        shards.train,
        row_length=config.data.row_length,
        batch_rows=train.batch_rows,
        micro_batch_rows=train.micro_batch_rows,
        seed=config.run.seed,
    )
    peer = peers.train_llama(llama, train, loader.micro_batches, trained.seconds, device)
    same_rows = EvalLoader(shards.valid, **rows)
    peer_score = evaluate(llama, same_rows, same_rows.text_bytes, nats=peers.llama_nats, together=False)
    return Result(
        unit="bits/byte",
        peer_name="transformers Llama",
        ours=[score.bits_per_byte],
        peer=[peer_score.bits_per_byte],
        figures={
            "ratio_to_unigram": score.bits_per_byte / score.unigram_bits_per_byte,
            "ratio_to_gzip9": score.bits_per_byte / score.gzip9_bits_per_byte,
            "unigram_bits_per_byte": score.unigram_bits_per_byte,
            "gzip9_bits_per_byte": score.gzip9_bits_per_byte,
            "zstd19_bits_per_byte": score.zstd19_bits_per_byte,
            "seconds": trained.seconds,
            "peer_seconds": peer.seconds,
            "steps": trained.step,
            "peer_steps": peer.steps,
            "tokens_per_second": trained.tokens_per_second,
            "peer_tokens_per_second": peer.tokens / peer.seconds,
            "active_parameters": active,
            "peer_parameters": peers.active_parameters(llama),
        },
        settings={"config": options.config.name, "seconds": options.seconds, "shards": shards.path.name}
        | {"device": device.type, "precision": config.train.precision},
    )


CASES = {
    "overhead": Case(overhead, "steps per second of stage A's loop, and of the same model in bare PyTorch"),
    "quality": Case(
        quality, "held-out bits per byte after equal seconds of training, and of a Llama of equal active size"
    ),
    **{
        model: Case(
            functools.partial(trainer_hf.speed, model=model),
            f"steps per second of stage A's loop with a small {model} of transformers, and of transformers' Trainer",
        )
        for model in trainer_hf.MODELS
    },
    "replay": Case(
        trainer_replay.measure, "what continued pretraining forgets with 5 % of the old text, and without it, 5 seeds"
    ),
    "watch": Case(
        trainer_watch.speed, "steps per second of stage A's loop beside a busy `cdrmix eval watch`, and a paused one"
    ),
}


def at_most_one_evaluation(path: Path, device: str, steps: int, *overrides: str) -> Config:
    """The configuration cut to `steps`, its warmup in proportion, evaluating and saving only after the last step.

    Raises ConfigError for fp16, whose loss scale the peers do not have.
    """
    full = Config.from_yaml(path)
    if full.train.precision == "fp16":
        raise ConfigError(f"{path}: the peers train without a loss scale; set train.precision: bf16 or fp32")
    warmup = min(steps - 1, round(full.train.warmup_steps * steps / full.train.steps))
    only_last = steps + 1
    return Config.from_yaml(
        path,
        [
            f"run.device={device}",
            f"train.steps={steps}",
            f"train.warmup_steps={warmup}",
            f"train.evaluate_every={only_last}",
            f"train.checkpoint_every={only_last}",
            *overrides,
        ],
    )
