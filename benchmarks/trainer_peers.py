"""The trainer's peers: transformers' Llama of the same active size, and a bare PyTorch loop."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from cdrmix.config.schema_training import Train
from cdrmix.data.batch import Batch
from cdrmix.model.loss import LossModel
from cdrmix.training.optim import make_optimizer, parameter_groups
from cdrmix.training.precision import AUTOCAST
from cdrmix.training.schedule import learning_rate

Rows = Callable[[int], list[Batch]]  # optimizer step -> its micro-batches


@dataclass(frozen=True)
class Trained:
    """The result of a peer's training."""

    steps: int
    tokens: int
    seconds: float


def precision(train: Train, device: torch.device) -> AbstractContextManager[object]:
    """The autocast of the configured precision, as the engine enters it."""
    dtype = AUTOCAST[train.precision]
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)


def clock(device: torch.device) -> float:
    """Seconds on the performance counter, after the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class BareLoop:
    """A loss model trained in plain PyTorch: only the computations of the loop, in one process."""

    def __init__(self, model: LossModel, train: Train, device: torch.device) -> None:
        self.model, self.train, self.device = model.to(device), train, device
        groups = parameter_groups(model, train)
        self.multipliers = [group["multiplier"] for group in groups]
        self.optimizer = make_optimizer(groups, train)

    def step(self, number: int, batches: list[Batch]) -> None:
        """One optimizer step."""
        for batch in batches:
            here = batch.to(self.device)
            with precision(self.train, self.device):
                losses = self.model(
                    here.ids_BT,
                    here.targets_BT,
                    here.weights_BT,
                    here.documents,
                    here.token_count,
                    1 / len(batches),
                )
            losses.total.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.train.gradient_clip)
        for group, multiplier in zip(self.optimizer.param_groups, self.multipliers, strict=True):
            group["lr"] = learning_rate(self.train, number) * multiplier
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def llama(
    vocab_size: int,
    row_length: int,
    active_parameters: int,
    *,
    d_model: int,
    layers: int,
    heads: int,
    tied: bool = True,
) -> LlamaForCausalLM:
    """A Llama of this shape whose feed-forward width brings it closest to `active_parameters`.

    active_parameters: that a token multiplies, with those of the norms. Of an embedding that is not the head, as of a
    table of bigrams, a token only reads a row.
    """
    fixed = vocab_size * d_model + d_model + layers * (4 * d_model**2 + 2 * d_model)
    hidden = round((active_parameters - fixed) / (3 * d_model * layers))
    if hidden < 1:
        raise ValueError(f"{active_parameters} parameters leave none for the feed-forwards of this Llama")
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=d_model,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=row_length,
        tie_word_embeddings=tied,
        use_cache=False,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


def active_parameters(model: LlamaForCausalLM) -> int:
    """The parameters of a Llama without an embedding that is not the head."""
    table = model.get_input_embeddings().weight.numel()
    return int(model.num_parameters()) - (0 if model.config.tie_word_embeddings else table)


def llama_nats(model: nn.Module, batch: Batch) -> Tensor:
    """Summed nats of a batch's targets: a float64 scalar. Rows are read whole, as such models are commonly trained."""
    nats_BT = torch.nn.functional.cross_entropy(
        model(input_ids=batch.ids_BT).logits.flatten(0, 1).float(), batch.targets_BT.flatten(), reduction="none"
    ).view_as(batch.targets_BT)
    return (nats_BT.double() * batch.weights_BT.double()).sum()


class LlamaLoop:
    """A Llama trained with the optimizer and groups of `train` on the rows of a loss model, each read as one document,
    in one process. Each of a Llama's matrices is one linear map, so Muon may update it."""

    def __init__(self, model: LlamaForCausalLM, train: Train, device: torch.device) -> None:
        self.model, self.train, self.device = model.to(device), train, device
        groups = parameter_groups(model, train)
        self.multipliers = [group["multiplier"] for group in groups]
        self.optimizer = make_optimizer(groups, train)
        model.train()

    def step(self, number: int, batches: list[Batch]) -> None:
        """One optimizer step at the rate of the schedule."""
        self.update(learning_rate(self.train, number), batches)

    def update(self, rate: float, batches: list[Batch]) -> None:
        """One optimizer step at this rate."""
        for group, multiplier in zip(self.optimizer.param_groups, self.multipliers, strict=True):
            group["lr"] = rate * multiplier
        for batch in batches:
            here = batch.to(self.device)
            with precision(self.train, self.device):
                logits = self.model(input_ids=here.ids_BT).logits
                nats = nn.functional.cross_entropy(logits.flatten(0, 1), here.targets_BT.flatten(), reduction="none")
                total = (nats * here.weights_BT.flatten()).sum() / here.token_count
            total.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.train.gradient_clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def train_llama(model: LlamaForCausalLM, train: Train, rows: Rows, seconds: float, device: torch.device) -> Trained:
    """Trains for `seconds`. The schedule follows the clock: it ends with the time, after however many steps."""
    loop = LlamaLoop(model, train, device)
    start, step, tokens = clock(device), 0, 0
    while (elapsed := clock(device) - start) < seconds:
        batches = rows(step)
        loop.update(learning_rate(train, int(elapsed / seconds * train.steps)), batches)
        tokens += sum(int(batch.weights_BT.sum()) for batch in batches)
        step += 1
    return Trained(step, tokens, clock(device) - start)
