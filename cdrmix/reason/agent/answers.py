"""The reward of the memory agent's answers: by their text, by their tokens, or by the likelihood of the right one."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from cdrmix.config.schema_reasoning import Rl
from cdrmix.model.language_model import LanguageModel
from cdrmix.reason.agent.agent import Reading, Window
from cdrmix.reason.episodes import Asked, Episodes, EpisodeSource, TokenSource
from cdrmix.reason.rl.rewards import LIKELIHOOD, Reward, check_reward, reward_of, scored
from cdrmix.reason.rl.rollout import taken

LOGGER = logging.getLogger(__name__)


class AnswerScorer:
    """The reward `rl.reward` of answers. Raises what `check_reward` raises.

    The first failure of a function is logged with its place, and later ones of another kind. error: the last one.
    """

    def __init__(self, settings: Rl, source: EpisodeSource, window: Window) -> None:
        check_reward(settings.reward, in_ids=isinstance(source, TokenSource))
        self._name, self._source, self._window = settings.reward, source, window
        self._reward: Reward | None = None if settings.reward == LIKELIHOOD else reward_of(settings.reward)
        self._logged: set[str] = set()
        self.error: str | None = None

    def __call__(
        self, model: LanguageModel, reading: Reading, episodes: Episodes, asked: list[Asked] | None, group: int
    ) -> tuple[Tensor, Tensor]:
        """(rewards [B] float64, whether there is one [B] bool) of rollouts, `group` of each episode side by side."""
        device = reading.answer_BA.device
        all_B = torch.ones(len(reading.answer_BA), dtype=torch.bool, device=device)
        if self._reward is None:
            return self.likelihood(model, reading.memory.shown(), episodes), all_B
        if asked is None:
            return reading.exact_B.double(), all_B
        repeated = [each for each in asked for _ in range(group)]
        answers = [self._source.text(ids) for ids in reading.answer_BA.tolist()]
        values, errors = scored(self._reward, repeated, answers)
        for error in errors:
            if error.partition(":")[0] not in self._logged:
                self._logged.add(error.partition(":")[0])
                LOGGER.warning("reasoning.rl.reward=%s failed: %s; such groups are dropped", self._name, error)
            self.error = error
        given_B = torch.tensor([value is not None for value in values], device=device)
        return torch.tensor([value or 0.0 for value in values], dtype=torch.float64, device=device), given_B

    @torch.no_grad()
    def likelihood(self, model: LanguageModel, memory_RM: Tensor, episodes: Episodes) -> Tensor:
        """The geometric mean of the probabilities of the right answer's tokens and its end after a memory.

        memory_RM: of R rollouts, the same number of each episode side by side. Gives float64 [R].
        """
        device, group = memory_RM.device, len(memory_RM) // len(episodes.answer_BA)
        answer_RA = episodes.answer_BA.to(device).repeat_interleave(group, 0)
        lengths_R1 = (answer_RA != self._window.pad).sum(1, keepdim=True)
        places_A = torch.arange(answer_RA.shape[1], device=device)
        wanted_RA = torch.where(places_A == lengths_R1, self._window.marks.end, answer_RA)
        begin_RL = self._window.begin(episodes.question_BQ.to(device)).repeat_interleave(group, 0)
        counted = places_A <= lengths_R1
        logits = taken(model, torch.cat([begin_RL, self._window.last(memory_RM)], 1), wanted_RA, counted).logits_SNV
        log_probs = logits.log_softmax(-1).gather(-1, wanted_RA.unsqueeze(-1)).squeeze(-1).double()
        return (torch.where(counted, log_probs, 0.0).sum(1) / counted.sum(1)).exp()

    def likelihoods_before(self, model: LanguageModel, reading: Reading, episodes: Episodes) -> Tensor:
        """The likelihood of the right answer after the memory that each turn found, float64 [T, R]."""
        memories = (self._window.memory_of(turn.prompt_BL) for turn in reading.turns)
        return torch.stack([self.likelihood(model, memory_RM, episodes) for memory_RM in memories])
