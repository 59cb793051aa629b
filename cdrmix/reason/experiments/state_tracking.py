"""The experiment of state tracking: trains a small model on short words of a group, and measures it on long words.

A word is a sequence of elements. At every position the target is the product of the elements so far
(data/tasks/groups.py). Without `allow_neg_eigval` the transitions of RWKV-7 have eigenvalues from 0 to 1, and one layer
cannot count modulo two. With it (c = 2) they reach -1 (arXiv 2411.12537).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from cdrmix.config.schema import Config
from cdrmix.data.tasks import TASKS
from cdrmix.data.tasks.episodes import HashedRng
from cdrmix.data.tasks.groups import elements_of, product
from cdrmix.model.language_model import LanguageModel
from cdrmix.reason.episodes import FIRST_HELD_OUT
from cdrmix.reason.experiments.base import EXPERIMENTS, small_model
from cdrmix.reason.experiments.trial import Trial
from cdrmix.reason.model import Loss, StageBModel
from cdrmix.reason.phase import generator_of, phase_config
from cdrmix.training.objective import Outcome

ROWS = 64  # words in one forward pass


class Words:
    """Words of a group, batches at a time: word n is a function of (seed, n, length)."""

    def __init__(self, task: str, seed: int) -> None:
        elements = elements_of(TASKS[task].standard.size)
        number_of = {element: number for number, element in enumerate(elements)}
        self._products = np.array([[number_of[product(left, right)] for right in elements] for left in elements])
        self._task, self._seed = task, seed

    def batch(self, numbers: range, length: int) -> tuple[Tensor, Tensor]:
        """A start token and the elements of each word, int64 [B, 1 + T]; the product up to each element [B, T].

        The start token carries no element; without it the state would stay zero.
        """
        elements = HashedRng(self._seed, self._task, numbers).randrange(f"word {length}", len(self._products), length)
        values = np.empty_like(elements)
        value = np.zeros(len(elements), dtype=np.int64)  # the identity
        for position in range(length):
            value = self._products[value, elements[:, position]]
            values[:, position] = value
        tokens = np.concatenate([np.full((len(elements), 1), len(self._products)), elements], axis=1)
        return torch.from_numpy(tokens), torch.from_numpy(values)


class TrackingPhase:
    """Cross-entropy of the product of every prefix, on words of lengths from 2 to `tokens`, all equally probable."""

    name = "tracking"
    rolls_out = False
    passes_vary = False
    measures = ("loss", "correct", "positions")

    def __init__(self, words: Words, tokens: int, rows: int, seed: int) -> None:
        self._words, self._tokens, self._rows, self._seed = words, tokens, rows, seed

    def trains(self, parameter: str) -> bool:
        """The language model."""
        return parameter.startswith("language_model.")

    def losses(self, model: StageBModel, step: int, rank: int, processes: int) -> list[Loss]:
        """One micro-batch."""
        generator = generator_of(self._seed, self.name, step)
        length = 2 + int(torch.randint(self._tokens - 1, (), generator=generator))
        elements, values = self._words.batch(range(step * self._rows, (step + 1) * self._rows), length)

        def loss(model: StageBModel) -> Outcome:
            language_model = model.language_model
            device = language_model.embedding.weight.device
            logits = language_model.logits(language_model(elements.to(device)).hidden_BTD[:, 1:]).flatten(0, 1)
            wanted = values.flatten().to(device)
            mean = functional.cross_entropy(logits, wanted)
            right, count = (logits.argmax(-1) == wanted).sum().float(), float(len(wanted))
            return Outcome(mean, torch.stack([mean.detach() * count, right, right.new_tensor(count)]))

        return [loss]

    def record(self, sums: dict[str, float]) -> dict[str, float]:
        """Mean loss and accuracy per position."""
        return {"loss": sums["loss"] / sums["positions"], "accuracy": sums["correct"] / sums["positions"]}


@torch.no_grad()
def last_accuracy(model: LanguageModel, words: Words, length: int, count: int, last: int) -> float:
    """The share of right products at the last positions of `count` held-out words."""
    right = 0
    for first in range(FIRST_HELD_OUT, FIRST_HELD_OUT + count, ROWS):
        numbers = range(first, min(first + ROWS, FIRST_HELD_OUT + count))
        elements, values = words.batch(numbers, length)
        hidden_BTD = model(elements.to(model.embedding.weight.device)).hidden_BTD
        right += int((model.logits(hidden_BTD[:, -last:]).argmax(-1).cpu() == values[:, -last:]).sum())
    return right / (count * min(last, length))


@EXPERIMENTS("tracking")
def tracking(config: Config, seed: int, trial: Trial) -> dict[str, float]:
    """Trains by the configuration's `train` (steps, batch_rows, learning_rate) and measures every length."""
    assert config.ablation is not None
    task, train = config.ablation.tracking, config.train
    words = Words(task.task, seed)
    model = small_model(config, seed)
    phase = TrackingPhase(words, task.tokens, train.batch_rows, seed)
    trial.train(phase_config(config), model, phase)
    return {
        f"last{task.last}@{length}": last_accuracy(
            model.language_model.eval(), words, length, config.ablation.episodes, task.last
        )
        for length in task.lengths
    }
