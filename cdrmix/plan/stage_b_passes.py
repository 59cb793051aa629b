"""The forward and backward passes of the phases of stage B, on fake tensors: what a phase keeps and needs at a time.

Shapes: R rows, T tokens, S sequences to learn from, L tokens of a prompt, N tokens after it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from cdrmix.config.schema import Config
from cdrmix.model.cache import branch, plastic_only, select
from cdrmix.model.fast_weights import FastWeightOptions
from cdrmix.model.language_model import LanguageModel, Output
from cdrmix.model.loss import LossModel
from cdrmix.ops.backend import Platform
from cdrmix.plan.trace import (
    DOCUMENT_TOKENS,
    Gradients,
    MicroBatch,
    Traced,
    of_layers,
    trace_module,
    traced_stage,
    with_experts_of_a_rank,
    with_layers,
)
from cdrmix.reason.build import with_heads
from cdrmix.reason.model import StageBModel
from cdrmix.reason.rl.grpo import Objective, Totals, entropy, policy_loss
from cdrmix.reason.rl.rollout import taken
from cdrmix.training.build import narrow_residual
from cdrmix.training.precision import AUTOCAST

# Bytes of a sampled token for each row and word: logits, the same by the temperature, their logarithms, in float32;
# probabilities and their sums in float64 (`rl/rollout.py`).
SAMPLING = 3 * 4 + 2 * 8


class Sequences(NamedTuple):
    """S rows of L + N tokens, of which the N last have logits. objective: of rollouts; None: of demonstrations."""

    rows: int
    prompt: int
    tokens: int
    objective: Objective | None

    @property
    def all_tokens(self) -> int:
        """Tokens of all rows."""
        return self.rows * self.longest

    @property
    def longest(self) -> int:
        """Tokens of a row."""
        return self.prompt + self.tokens

    def __call__(self, model: StageBModel) -> Tensor:
        """The loss."""
        prompts, tokens = _ids(self.rows, self.prompt), _ids(self.rows, self.tokens)
        logits, balance = taken(model.language_model, prompts, tokens)
        if self.objective is None:
            costs = functional.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="none")
            return costs.sum() + balance
        logits = logits / 1.0
        log_probs = logits.log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        weights, counts = torch.zeros(self.rows), torch.ones(self.rows, self.tokens, dtype=torch.bool)
        reference = torch.zeros_like(log_probs) if self.objective.kl_weight else None
        totals = Totals(1.0, 1.0, self.tokens)
        loss = policy_loss(log_probs, log_probs.detach(), weights, counts, self.objective, totals, reference).loss
        weight = self.objective.entropy_weight
        return loss + balance - weight * entropy(logits if weight else logits.detach()).sum()


class Chunks(NamedTuple):
    """Episodes of N chunks and a probe as rows, which the fast weights read. asked: the tokens that have logits."""

    rows: int
    chunks: int
    chunk: int
    probe: int
    asked: int
    anew: bool  # whether the mixers begin anew at every chunk

    @property
    def all_tokens(self) -> int:
        """Tokens of all rows."""
        return self.rows * self.longest

    @property
    def longest(self) -> int:
        """Tokens of a row."""
        return self.chunks * self.chunk + self.probe

    def __call__(self, model: StageBModel) -> Tensor:
        """The loss."""
        ids_BT = _ids(self.rows, self.chunks * self.chunk + self.probe)
        cu_seqlens = episodes = None
        if self.anew:
            cu_seqlens = torch.zeros(self.rows * (self.chunks + 1) + 1, dtype=torch.int32)
            episodes = torch.zeros(self.rows + 1, dtype=torch.int32)
        output = model.language_model(ids_BT, cu_seqlens=cu_seqlens, fast_weights=FastWeightOptions(episodes))
        hidden = output.hidden_BTD[:, -self.asked :].flatten(0, 1)
        costs = functional.cross_entropy(model.language_model.logits(hidden), _ids(len(hidden)), reduction="none")
        total = costs.sum() + _balance(output)
        return total if output.correlation is None else total + output.correlation


class Text(NamedTuple):
    """Rows of stage A's text."""

    rows: int
    longest: int

    @property
    def all_tokens(self) -> int:
        """Tokens of all rows."""
        return self.rows * self.longest

    def __call__(self, model: StageBModel) -> Tensor:
        """The loss."""
        ids, weights = _ids(self.rows, self.longest), torch.ones(self.rows, self.longest)
        documents = torch.zeros(self.rows * max(1, self.longest // DOCUMENT_TOKENS) + 1, dtype=torch.int32)
        return LossModel(model.language_model)(ids, ids, weights, documents, float(ids.numel()), 1.0).total


class Windows(NamedTuple):
    """Windows of the operations, as (rows, tokens) of each pass. summaries: vectors in front of each window. answer:
    the last tokens of the last pass, which have logits."""

    passes: tuple[tuple[int, int], ...]
    summaries: int
    answer: int

    @property
    def all_tokens(self) -> int:
        """Tokens of all rows."""
        return sum(rows * (length + self.summaries) for rows, length in self.passes)

    @property
    def longest(self) -> int:
        """Tokens of a row."""
        return max(length for _, length in self.passes) + self.summaries

    def __call__(self, model: StageBModel) -> Tensor:
        """The loss of heads that read all of them."""
        assert model.summary is not None
        total, prefix_BPD = torch.zeros(()), None
        for rows, length in self.passes:
            if self.summaries:
                prefix_BPD = model.summary.prefix(torch.zeros(rows, self.summaries, model.summary.up.in_features))
            output = model.language_model(_ids(rows, length), prefix_BPD=prefix_BPD)
            summaries = model.summary(output.hidden_BTD)
            read = model.summary.keys(summaries).sum() + model.summary.queries(summaries).sum()
            total = total + read + output.hidden_BTD[:, -1].float().sum() + _balance(output)
        if self.answer:
            hidden = output.hidden_BTD[:, -self.answer :].flatten(0, 1)
            total = total + functional.cross_entropy(model.language_model.logits(hidden), _ids(len(hidden)))
        return total


class Decoding(NamedTuple):
    """Rollouts of the memory agent: R rows read a question, then a window of T tokens, then one token after another."""

    rows: int
    question: int
    window: int

    @property
    def all_tokens(self) -> int:
        """Tokens of all rows."""
        return self.rows * self.longest

    @property
    def longest(self) -> int:
        """Tokens of a row."""
        return self.question + self.window

    def __call__(self, model: StageBModel) -> None:
        """The passes of a turn. What `read_episodes` and `decode` hold at a time: the states after the question, after
        the window and after a token; those of the rows that go on; and those after the next token."""
        language_model = model.language_model
        question = language_model(_ids(self.rows, self.question), return_cache=True).cache
        output = language_model(_ids(self.rows, self.window), cache=question, return_cache=True)
        window = output.cache
        logits = language_model.logits(output.hidden_BTD[:, -1])
        del output
        token = language_model(_ids(self.rows, 1), cache=window, return_cache=True).cache
        going = select(token, _ids(self.rows))
        output = language_model(_ids(self.rows, 1), cache=going, return_cache=True)
        del output, going, token
        torch.empty(logits.numel() * (SAMPLING // 4 - 1))


class Reading(NamedTuple):
    """Rollouts of the controller: R rows read N chunks, each with S branches, and a probe. asked: as of Chunks."""

    rows: int
    chunks: int
    chunk: int
    probe: int
    asked: int
    scales: tuple[float, ...]
    carry_all: bool

    @property
    def all_tokens(self) -> int:
        """Tokens of all rows."""
        return self.rows * self.longest

    @property
    def longest(self) -> int:
        """Tokens of a row."""
        return self.chunk * (self.chunks if self.carry_all else 1) + self.probe

    def __call__(self, model: StageBModel) -> None:
        """The passes of an episode. Without growing caches all after the second one need the same memory."""
        scale_S = torch.tensor(self.scales) if len(self.scales) > 1 else None
        cache = None
        for _ in range(self.chunks if self.carry_all else min(2, self.chunks)):
            options = FastWeightOptions(scale_S=scale_S)
            output = model.language_model(
                _ids(self.rows, self.chunk), cache=cache, return_cache=True, fast_weights=options
            )
            assert output.cache is not None
            # The new state of a row is one branch: as many bytes as without branches.
            cache = output.cache if scale_S is None else branch(output.cache, _ids(self.rows))
            cache = cache if self.carry_all else plastic_only(cache)
        hidden = model.language_model(_ids(self.rows, self.probe), cache=cache).hidden_BTD
        model.language_model.logits(hidden[:, -self.asked :].flatten(0, 1))


Passes = Sequences | Chunks | Text | Windows | Decoding | Reading


def trace_passes(
    config: Config,
    passes: Passes,
    trains: Callable[[str], bool] | None,
    platform: Platform,
    *,
    stage: int,
    several: bool,
) -> MicroBatch:
    """The memory of passes. trains: the parameters, by name, that get gradients; None: there is no backward pass.
    several: micro-batches in a step. Raises ConfigError for a model without kernels on the platform."""
    model = config.cdrmix_model
    stage = traced_stage(stage)
    if stage == 3:
        model = with_experts_of_a_rank(model, config.train)
        config = config.model_copy(update={"model": model})
    return of_layers(model, platform, lambda layers: _traced(config, layers, passes, trains, platform, stage, several))


_results: dict[str, Traced] = {}


def _traced(
    config: Config,
    layers: int,
    passes: Passes,
    trains: Callable[[str], bool] | None,
    platform: Platform,
    stage: int,
    several: bool,
) -> Traced:
    train, reasoning = config.train, config.reasoning
    assert reasoning is not None
    model_config = with_layers(config.cdrmix_model, layers)
    with torch.device("meta"):
        model = with_heads(
            LanguageModel(
                model_config,
                activation_checkpointing=train.activation_checkpointing,
                reasoning=reasoning,
                narrow_residual=narrow_residual(config),
            ),
            model_config,
            reasoning,
        )
    names = [name for name, _ in model.named_parameters() if trains is not None and trains(name)]
    if not isinstance(passes, Windows):  # which alone use the heads
        names = [name for name in names if name.startswith("language_model.")]
    settings = (train.precision, train.activation_checkpointing, narrow_residual(config))
    key = f"{model_config} {reasoning.plastic_lora} {reasoning.chunk} {reasoning.memory.dim} {passes} {names} "
    key += f"{settings} {platform} {stage} {several}"
    if key in _results:
        return _results[key]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in set(names))
    gradients: Gradients = "none"
    if trains is not None:
        gradients = "dropped" if stage >= 2 else "added" if several else "made"
    dtype = AUTOCAST[train.precision]
    _results[key] = trace_module(model, lambda: (passes,), platform, dtype, stage=stage, gradients=gradients)
    return _results[key]


def _ids(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.long)


def _balance(output: Output) -> Tensor:
    if output.router is None:
        return torch.zeros(())
    return output.router.load_balance_L.mean() + output.router.z_loss_L.mean()
