"""The phase that imitates an expert's operations on memories, its searches and its answers.

Three things are learned: the operation in each window; keys and queries, so that among all chunks of an episode the
chunk with the missing fact has the nearest key; and the answer from the last window. Shapes as in rollout.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from cdrmix.config.schema import Config
from cdrmix.reason.episodes import Episodes, EpisodeSource
from cdrmix.reason.heads import RETRIEVE
from cdrmix.reason.model import Loss, StageBModel
from cdrmix.reason.operations.policy import is_trained
from cdrmix.reason.operations.rollout import Reader, Rollouts
from cdrmix.reason.operations.separate_passes import SeparatePasses, most_tokens, parts
from cdrmix.reason.operations.windows import Read
from cdrmix.reason.phase import PHASES, Sources, generator_of, reasoning_of
from cdrmix.training.objective import Outcome

CHOICES = 4  # sums of `_choices`: decisions, agreed, searches, found


class _Demonstrated(NamedTuple):
    """Demonstrations of a micro-batch, and what `_search_targets` gives of them."""

    episodes: Episodes
    shown: Rollouts
    reading_BN: Tensor
    wanted_S: Tensor
    in_window_SN: Tensor


class OperationsImitationPhase:
    """Imitates an expert's operations, keys and answers. `train: all` also trains the language model; without that the
    keys of different variables do not become different. `train: own` trains the heads and the summariser alone."""

    name = "operations_imitation"
    passes_vary = True
    measures: tuple[str, ...] = (*("loss", "decisions", "agreed", "searches", "found", "answers", "right", "episodes"),)

    def __init__(self, config: Config, source: EpisodeSource) -> None:
        assert config.reasoning is not None
        self.settings, self.chunks = config.reasoning.phases.operations_imitation, config.reasoning.operations.chunks
        self.source, self.seed = source, config.run.seed
        self.most_tokens = most_tokens(config.reasoning, self.settings)
        self.rolls_out = self.settings.window_passes == "separate"  # the model reads the windows before the update
        self.reader = Reader(config.reasoning, source)

    def trains(self, parameter: str) -> bool:
        """The operations' heads and the summariser; with `train: all` also the language model without its adapters."""
        return is_trained(parameter, self.settings.train)

    def losses(self, model: StageBModel, step: int, rank: int, processes: int) -> list[Loss]:
        """Makes this process's demonstrations; with separate passes the model reads them."""
        episodes, micro = self.settings.episodes, self.settings.micro_batch
        numbers = range(step * episodes, (step + 1) * episodes)[rank::processes]
        generator = generator_of(self.seed, self.name, step, rank)
        made = []
        for first in range(0, len(numbers), micro):
            batch = self.source.batch(numbers[first : first + micro], self.chunks)
            shown = self.reader.demonstrate(batch, self.settings.waste, generator)
            made.append(_Demonstrated(batch, shown, *_search_targets(batch, shown)))
        if not self.rolls_out:
            return [self._together(each) for each in made]
        with model.lockstep(model.language_model):
            read = [each.shown.windows.read(model) for each in made]
        return [loss for pair in zip(made, read, strict=True) for loss in self._separate(*pair)]

    def _together(self, made: _Demonstrated) -> Loss:
        """The loss of all passes."""

        def loss(model: StageBModel) -> Outcome:
            read = made.shown.windows.read(model)
            choices, chosen = self._choices(model, read, made)
            answers, right = self._answers(model, read, made, range(len(made.shown.final_R)))
            return self._outcome(made, choices + answers, chosen + right)

        return loss

    def _separate(self, made: _Demonstrated, read: Read) -> list[Loss]:
        """A loss for each pass: of the answers, the first one also of what was read before; then of the windows."""
        windows = made.shown.windows
        passes = SeparatePasses(windows, read, len(self.measures), self.most_tokens)
        nothing = [torch.zeros(())] * CHOICES

        def of_answers(rows: Sequence[int], first: bool) -> Loss:
            def loss(model: StageBModel) -> Outcome:
                total, right = self._answers(model, passes.read, made, rows)
                chosen = nothing
                if first:
                    choices, chosen = self._choices(model, passes.read, made)
                    total = choices + total
                return passes.of_read(self._outcome(made, total, chosen + right), first=first)

            return loss

        final, further = made.shown.final_R.tolist(), made.episodes.answer_BA.shape[1] - 1
        groups = [
            part
            for rows in windows.shapes(final, read)
            for part in parts(rows, windows.length(final[rows[0]], read) + further, self.most_tokens)
        ]
        return [of_answers(rows, number == 0) for number, rows in enumerate(groups)] + passes.losses()

    def _outcome(self, made: _Demonstrated, total: Tensor, sums: list[Tensor]) -> Outcome:
        total = len(made.shown.rows) / self.settings.episodes * total
        sums = [total.detach() * self.settings.episodes, *sums]
        return Outcome(total, torch.stack([value.to(total.device).float() for value in sums]))

    def _choices(self, model: StageBModel, read: Read, made: _Demonstrated) -> tuple[Tensor, list[Tensor]]:
        """The loss of the operations and of the keys, and CHOICES sums."""
        assert model.operations is not None
        decisions, device = made.shown.decisions, read.last_WD.device
        log_probs = model.operations.log_probs(decisions.features(read), decisions.allowed_KO.to(device))
        taken = decisions.taken_K.to(device)
        policy = functional.nll_loss(log_probs, taken)
        searches = decisions.taken_K == RETRIEVE
        cosines = torch.einsum(
            "sd,snd->sn",
            read.queries_WS[decisions.window_K[searches].to(device)],
            read.keys_WS[made.reading_BN[decisions.row_K[searches]].to(device)],
        )
        # a chunk that is in the window already is no target
        cosines, wanted = cosines.masked_fill(made.in_window_SN.to(device), -1.0), made.wanted_S.to(device)
        keys = functional.cross_entropy(cosines / self.settings.key_temperature, wanted) if len(wanted) else policy * 0
        agreed, found = (log_probs.argmax(1) == taken).sum(), (cosines.argmax(1) == wanted).sum()
        return policy + keys, [torch.tensor(len(taken)), agreed, torch.tensor(len(wanted)), found]

    def _answers(
        self, model: StageBModel, read: Read, made: _Demonstrated, rows: Sequence[int]
    ) -> tuple[Tensor, list[Tensor]]:
        """The part of these rows in the mean loss of the answers' tokens, and three sums."""
        answers_BA, device = made.episodes.answer_BA, read.last_WD.device
        chosen, answers_RA = made.shown.final_R[list(rows)].tolist(), answers_BA[list(rows)]
        hidden = made.shown.windows.hidden_after(model, chosen, answers_RA[:, :-1], read)
        logits = model.language_model.logits(hidden[:, -answers_RA.shape[1] :])
        targets = answers_RA.to(device)
        counts = targets != self.source.pad
        targets = targets.masked_fill(~counts, -100)
        total = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        right = ((logits.argmax(-1) == targets) & counts).sum()
        return total / (answers_BA != self.source.pad).sum(), [counts.sum(), right, torch.tensor(len(rows))]

    def record(self, sums: dict[str, float]) -> dict[str, float]:
        """Mean loss; the shares of the expert's decisions, its searches and the answers' tokens that the model gets
        right."""
        return {
            "loss": sums["loss"] / max(sums["episodes"], 1),
            "agreed": sums["agreed"] / max(sums["decisions"], 1),
            "found": sums["found"] / max(sums["searches"], 1),
            "accuracy": sums["right"] / max(sums["answers"], 1),
        }


@PHASES("operations_imitation")
def make_operations_imitation(config: Config, sources: Sources) -> OperationsImitationPhase:
    """The phase of a configuration."""
    return OperationsImitationPhase(config, sources(reasoning_of(config).operations))


def _search_targets(episodes: Episodes, shown: Rollouts) -> tuple[Tensor, Tensor, Tensor]:
    """The windows [B, N] in which the chunks are read; the chunk [S] that each search should find; and which chunks are
    in its window, bool [S, N]."""
    decisions, chunks = shown.decisions, episodes.chunks_BNC.shape[1]
    searches = decisions.taken_K == RETRIEVE
    reading = torch.zeros(len(shown.rows), chunks, dtype=torch.long)
    seen, turns = [0] * len(shown.rows), [0] * len(shown.rows)
    wanted, in_window = [], []
    for row, window, searched in zip(
        decisions.row_K.tolist(), decisions.window_K.tolist(), searches.tolist(), strict=True
    ):
        if seen[row] < chunks:  # the expert decides once in a chunk
            reading[row, seen[row]] = window
            seen[row] += 1
        elif searched:
            path = [hit.id for hit in reversed(shown.rows[row].spliced)]  # the latest one is in front
            wanted.append(path[turns[row]])
            in_window.append([chunk in path[: turns[row]] for chunk in range(chunks)])
            turns[row] += 1
    in_window_SN = torch.tensor(in_window, dtype=torch.bool).view(len(wanted), chunks)
    return reading, torch.tensor(wanted, dtype=torch.long), in_window_SN
