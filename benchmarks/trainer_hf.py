"""The trainer's cases with models of transformers: stage A's loop against bare PyTorch and transformers' Trainer."""

from __future__ import annotations

import functools
import statistics
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

import torch
import trainer_peers as peers
import turns
from cases import Options, Result
from torch import Tensor
from torch.utils.data import IterableDataset
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

from cdrmix.config.schema import Config
from cdrmix.data.batch import Batch
from cdrmix.data.loader import TrainLoader, train_loader
from cdrmix.data.prepare import prepare
from cdrmix.hf.build import build_foreign
from cdrmix.training.distributed import join

BLOCK = 5  # steps of one timing
BARE, TRAINER = "bare PyTorch loop", "transformers Trainer"
SIZES = {"vocab_size": 4096, "hidden_size": 128, "max_position_embeddings": 256, "tie_word_embeddings": True}
TOKENS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {
        "model_type": "llama",
        "intermediate_size": 352,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    },
    "nemotron_h": {
        "model_type": "nemotron_h",
        "intermediate_size": 512,
        "hybrid_override_pattern": "M-M-M*M-",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "mamba_num_heads": 8,
        "mamba_head_dim": 32,
        "ssm_state_size": 32,
        "n_groups": 2,
        "conv_kernel": 4,
    },
}


def speed(options: Options, *, model: str) -> Result:
    """Steps per second of stage A's loop with a model of transformers, and of its peers on the same rows, in turns."""
    described = {**SIZES, **TOKENS, **MODELS[model]}
    steps = turns.steps_of(options.blocks, BLOCK)
    config = Config.model_validate(
        {
            "run": {"name": f"benchmark-{model}", "device": options.device, "threads": torch.get_num_threads()},
            "model": {"kind": "huggingface", "random": described},
            "data": {"source": {"kind": "stdlib"}, "row_length": 256},
            "train": {
                "steps": steps,
                "batch_rows": 8,
                "micro_batch_rows": 8,
                "learning_rate": 1e-3,
                "precision": "fp32",
                "evaluate_every": steps + 1,
                "checkpoint_every": steps + 1,
            },
        }
    )
    world = join(config)
    shards = prepare(config)
    with tempfile.TemporaryDirectory(prefix="cdrmix-benchmark-") as folder:
        trainer = TrainerInTurns(_plain(described), config, train_loader(config, shards.train, 0, 1), folder)
        others: dict[str, turns.Step] = {TRAINER: trainer.step}
        if model == "llama":
            bare = peers.LlamaLoop(_plain(described), config.train, world.device)
            others[BARE] = bare.step
        build = functools.partial(build_foreign, world=world)
        samples = turns.in_turns(config, shards, others, BLOCK, build=build)
    results = {name: {"steps_per_second": _median(values)} for name, values in samples.items()}
    return Result(
        unit="steps/s",
        peer_name=TRAINER,
        ours=samples[turns.OURS],
        peer=samples[TRAINER],
        figures={"ratio_to_bare": _ratio(samples[turns.OURS], samples[BARE]) if BARE in samples else None},
        peers=results,
        settings={"model": described, "blocks": options.blocks, "steps_per_block": BLOCK, "device": options.device},
    )


class TrainerInTurns:
    """transformers' Trainer, which makes one step each time `step` is called. It reads each row as one document."""

    def __init__(self, model: Any, config: Config, loader: TrainLoader, folder: str) -> None:
        train = config.train
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=train.steps,
            per_device_train_batch_size=train.batch_rows,
            learning_rate=train.learning_rate,
            weight_decay=train.weight_decay,
            adam_beta1=train.betas[0],
            adam_beta2=train.betas[1],
            max_grad_norm=train.gradient_clip,
            optim="adamw_torch_fused",
            lr_scheduler_type="cosine",
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=config.run.device == "cpu",
            dataloader_pin_memory=False,
        )
        self._may_go, self._has_gone = threading.Semaphore(0), threading.Semaphore(0)
        trainer = Trainer(
            model, arguments, train_dataset=_Rows(loader, train.steps), callbacks=[_Pause(self._may_go, self._has_gone)]
        )
        self._threads = torch.get_num_threads()
        self._worker = threading.Thread(target=self._run, args=(trainer,), daemon=True)
        self._worker.start()

    def _run(self, trainer: Trainer) -> None:
        torch.set_num_threads(self._threads)  # OpenMP's number belongs to a thread
        trainer.train()

    def step(self, number: int, batches: list[Batch]) -> None:
        """One optimizer step. The trainer reads the same rows from a loader of its own."""
        self._may_go.release()
        while not self._has_gone.acquire(timeout=1.0):
            if not self._worker.is_alive():
                raise RuntimeError("transformers' Trainer has ended before its last step")


class _Pause(TrainerCallback):
    """Waits before each step until it may be made, and tells when it is."""

    def __init__(self, may_go: threading.Semaphore, has_gone: threading.Semaphore) -> None:
        self._may_go, self._has_gone = may_go, has_gone

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._may_go.acquire()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._has_gone.release()


class _Rows(IterableDataset[dict[str, Tensor]]):
    """The rows of a loader in the order of training; the model shifts the labels itself."""

    def __init__(self, loader: TrainLoader, steps: int) -> None:
        self._loader, self._steps = loader, steps

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for step in range(self._steps):
            for batch in self._loader.micro_batches(step):
                for row in batch.ids_BT:
                    yield {"input_ids": row, "labels": row}


def _plain(described: dict[str, Any]) -> Any:
    """The model as transformers makes it."""
    torch.manual_seed(1)
    values = {key: value for key, value in described.items() if key != "model_type"}
    config = AutoConfig.for_model(described["model_type"], **values)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def _median(values: list[float]) -> float:
    return statistics.median_high(values)


def _ratio(ours: list[float], peer: list[float]) -> float:
    return _median([a / b for a, b in zip(ours, peer, strict=True)])
