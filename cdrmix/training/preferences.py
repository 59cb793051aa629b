"""Direct preference optimisation (DPO): the loss of pairs of answers, the reference, and the trainer's objective.

DPO (Rafailov et al. 2023, arXiv 2305.18290, equation 7) trains a model to prefer the chosen answer of a pair by its
log-probability, against a reference: the model that the training starts from. The reference never changes, so its
log-probabilities are computed once and stored in the run folder.

The log-probability of an answer is the sum over its tokens. The fused loss gives it for all answers of a micro-batch,
without the logits of all tokens.
"""

from __future__ import annotations

import dataclasses
import io
import json
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from cdrmix.config.best_metric import PAIR_FIGURES
from cdrmix.config.schema import Config
from cdrmix.config.schema_training import Dpo
from cdrmix.data.batch import Batch
from cdrmix.data.loader import TrainLoader
from cdrmix.data.pairs import PairBatch, all_pairs
from cdrmix.data.shards import Array, ShardSet, Split
from cdrmix.durable import sha256_file, write_atomically, write_checksummed
from cdrmix.json_text import parse_json
from cdrmix.model.causal import evaluation_mode
from cdrmix.model.loss import Documents
from cdrmix.records import StepRecord
from cdrmix.run_folder import RunFolder
from cdrmix.training.best import updated_best
from cdrmix.training.checkpoint import Progress
from cdrmix.training.compiling import uncompiled
from cdrmix.training.distributed import DistributedContext
from cdrmix.training.engine import Engine
from cdrmix.training.objective import Outcome, StepFacts, StepTotals
from cdrmix.training.row_objective import RowObjective

FOLDER = "reference"  # in the run folder
MEASURES = PAIR_FIGURES  # means over pairs, in this order


class PairTerms(NamedTuple):
    """Sums over P pairs. loss: with a gradient. Rewards are beta (log p - log p of the reference), in nats.

    accuracy: pairs whose chosen answer has the higher reward. margin: chosen less rejected reward.
    """

    loss: Tensor
    accuracy: Tensor
    margin: Tensor
    chosen_reward: Tensor
    rejected_reward: Tensor


def preference_loss(log_probs_P2: Tensor, reference_P2: Tensor, section: Dpo) -> PairTerms:
    """DPO's loss of pairs, summed. Columns: the chosen and the rejected answer, each the sum over its tokens.

        -(1 - eps) log sigmoid(margin) - eps log sigmoid(-margin),  eps = label_smoothing

    With eps this is the conservative DPO of Mitchell 2023. log_probs_P2, reference_P2: [P, 2], nats.
    """
    rewards_P2 = section.beta * (log_probs_P2 - reference_P2)
    margins_P = rewards_P2[:, 0] - rewards_P2[:, 1]
    smoothing = section.label_smoothing
    losses_P = -(1 - smoothing) * F.logsigmoid(margins_P) - smoothing * F.logsigmoid(-margins_P)
    chosen, rejected = rewards_P2.detach().sum(0)
    return PairTerms(losses_P.sum(), (margins_P.detach() > 0).sum(), chosen - rejected, chosen, rejected)


class Reference(NamedTuple):
    """Log-probabilities of all answers under the model that the training starts from: float64 [pairs, 2], nats."""

    train: Tensor
    valid: Tensor


def stored_reference(run: RunFolder, shards: ShardSet, world: DistributedContext) -> Reference | None:
    """The reference of an earlier start of the run; None if it is not there, damaged, or of other shards."""
    found: Reference | None = None
    if world.is_main_process:
        folder = run.path / FOLDER
        try:
            index = parse_json((folder / "index.json").read_text(encoding="utf-8"))
            if index["shards"] == shards.fingerprint:
                paths = {name: folder / f"{name}.npy" for name in Reference._fields}
                if all(sha256_file(path) == index["files"][name]["sha256"] for name, path in paths.items()):
                    arrays = {name: np.load(path, allow_pickle=False) for name, path in paths.items()}
                    found = Reference(**{name: torch.from_numpy(array) for name, array in arrays.items()})
        except (OSError, ValueError, LookupError, TypeError):
            found = None  # it is computed again
    stored = world.gather(found, "the stored log-probabilities of the reference model")[0]
    return None if stored is None else Reference(*stored)


def make_reference(engine: Engine, config: Config, run: RunFolder, shards: ShardSet) -> Reference:
    """Computes the reference with the weights of the engine, and stores it in the run folder. Every process calls."""
    rows = config.train.micro_batch_rows
    with uncompiled(config):
        reference = Reference(*(_log_probs_of_all(engine, split, rows) for split in (shards.train, shards.valid)))
    if engine.world.is_main_process:
        folder = run.path / FOLDER
        folder.mkdir(exist_ok=True)
        files = {}
        for name, values in reference._asdict().items():
            buffer = io.BytesIO()
            np.save(buffer, values.numpy(), allow_pickle=False)
            files[name] = write_checksummed(folder / f"{name}.npy", buffer.getvalue())
        write_atomically(folder / "index.json", json.dumps({"shards": shards.fingerprint, "files": files}, indent=1))
    engine.world.barrier()
    return reference


def _log_probs_of_all(engine: Engine, split: Split, micro_batch_rows: int) -> Tensor:
    numbers, values = [], []
    for batch, log_probs_P2 in _scored(engine, split, np.arange(split.rows), micro_batch_rows):
        numbers.append(batch.pairs_P)
        values.append(log_probs_P2.cpu())
    found = torch.full((split.documents // 2, 2), math.nan, dtype=torch.float64)
    what = "the log-probabilities of the reference model"
    for of_rank, its_values in engine.world.gather((torch.cat(numbers), torch.cat(values)), what):
        found[of_rank] = its_values
    assert not found.isnan().any(), "every pair is in one row"
    return found


def _scored(engine: Engine, split: Split, rows: Array, micro_batch_rows: int) -> Iterator[tuple[PairBatch, Tensor]]:
    """This process's batches of these rows, with the log-probabilities of their answers. All processes must finish it.

    The model is in evaluation mode meanwhile, and has no gradients.
    """
    world = engine.world
    with evaluation_mode(engine.module):
        for batch in all_pairs(split, rows, micro_batch_rows, world.rank, world.size):
            with torch.no_grad():
                log_probs_P2 = log_probs(engine.module, batch.to(world.device))
            yield batch, log_probs_P2


def log_probs(module: torch.nn.Module, batch: PairBatch) -> Tensor:
    """float64 [P, 2]: the log-probabilities of the answers of a batch, in nats.

    module: a LossModel or an engine's module around one. batch: on its device.
    """
    nats = module(*_arguments(batch), 1.0).next_token_sum
    return -nats.double().view(-1, 2)[: len(batch.pairs_P)]


def _arguments(batch: PairBatch) -> tuple[Tensor, Tensor, Tensor, Documents, float]:
    """The arguments of a loss model but the share. With an infinite count, `total` has the routers' losses alone."""
    return batch.ids_BT, batch.targets_BT, batch.answer_weights(), batch.documents, math.inf


class PreferenceOptimization(RowObjective):
    """DPO as the trainer's objective: pairs instead of next tokens, and the routers' losses."""

    measures = (*MEASURES, "load_balance", "z_loss")

    def __init__(self, config: Config, loader: TrainLoader, world: DistributedContext, reference: Reference) -> None:
        super().__init__(config, loader, world)
        assert config.train.dpo is not None
        self._dpo, self._reference = config.train.dpo, reference.train
        self._pair_count = 1  # of the global batch at hand

    def micro_batches(self, engine: Engine, step: int) -> list[Batch]:
        """This process's micro-batches of global batch `step`, PairBatches."""
        batches = super().micro_batches(engine, step)
        first = batches[0]
        assert isinstance(first, PairBatch)
        self._pair_count = first.pair_count
        return batches

    def forward(self, engine: Engine, micro_batch: Batch, *, last: bool) -> Outcome:
        """The loss of the pairs of a micro-batch, as a part of the mean over the global batch."""
        batch = engine.placed(micro_batch)
        assert isinstance(batch, PairBatch)
        losses = engine.evaluate(*_arguments(batch), engine.share, last=last)
        nats_P2 = losses.next_token_sum.view(-1, 2)
        reference_P2 = self._reference[batch.pairs_P].to(nats_P2)
        terms = preference_loss(-nats_P2, reference_P2, self._dpo)
        sums = torch.stack([term.detach().float() for term in (*terms, losses.load_balance, losses.z_loss)])
        return Outcome(terms.loss / batch.pair_count + losses.total.mean(), sums, losses.router, losses.depth)

    def loss(self, totals: StepTotals) -> float:
        """The loss of a pair."""
        return totals.sums["loss"] / self._pair_count

    def record(self, facts: StepFacts, totals: StepTotals) -> StepRecord:
        """The step with the measures of its pairs."""
        means = {name: totals.sums[name] / self._pair_count for name in MEASURES}
        return dataclasses.replace(super().record(facts, totals), preferences=means)


class PreferenceValidation:
    """The measures of pairs on `train.evaluate_rows` held-out rows."""

    def __init__(
        self,
        config: Config,
        shards: ShardSet,
        world: DistributedContext,
        reference: Reference,
        say: Callable[[str], None],
    ) -> None:
        assert config.train.dpo is not None
        self._config, self._dpo, self._reference, self._say = config, config.train.dpo, reference.valid, say
        self._split, self._world = shards.valid, world
        count = min(config.train.evaluate_rows, shards.valid.rows)
        self._rows = np.arange(count) * shards.valid.rows // count

    def complete(self, engine: Engine, record: StepRecord, progress: Progress) -> tuple[StepRecord, Progress]:
        """A step's record and progress with the measures of the weights that the engine has after it."""
        sums = torch.zeros(len(MEASURES) + 1, dtype=torch.float64, device=self._world.device)
        with uncompiled(self._config):
            rows = self._config.train.micro_batch_rows
            for batch, values_P2 in _scored(engine, self._split, self._rows, rows):
                terms = preference_loss(values_P2, self._reference[batch.pairs_P].to(values_P2), self._dpo)
                sums += torch.stack([*(term.double() for term in terms), sums.new_tensor(len(values_P2))])
        *totals, pairs = self._world.total(sums).tolist()
        means = {name: total / pairs for name, total in zip(MEASURES, totals, strict=True)}
        self._say(
            f"step {record.step}, held-out pairs: loss {means['loss']:.4f}, accuracy {means['accuracy']:.3f}, margin "
            f"{means['margin']:.3f}"
        )
        record = dataclasses.replace(record, valid_loss=means["loss"], valid_preferences=means)
        return record, updated_best(dataclasses.replace(progress, unvalidated=None), self._config.train, record)
