"""The windows that the operations agent reads. Each distinct window is read once, windows of one shape in one pass.

A window is [spliced chunks | chunk | UPDATE] or [spliced chunks | QUESTION | question | ANSWER]. The summaries of the
previous window may stand in front of it. Rollouts of one question share many windows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cdrmix.reason.model import StageBModel


class Window(NamedTuple):
    """tokens: all tokens of the window. The last `marks` tokens are marks; the `end` tokens before them are summarised.
    memory: the number of the window whose summaries stand in front, -1: none."""

    tokens: tuple[int, ...]
    end: int
    marks: int
    memory: int = -1


class Read(NamedTuple):
    """The results of W windows: hidden states of the last token [W, D]; keys and queries [W, S]; the concatenated
    summaries of all windows [N, S]; and for each window the start and the count of its summaries among them."""

    last_WD: Tensor
    keys_WS: Tensor
    queries_WS: Tensor
    summaries_NS: Tensor
    ranges: tuple[tuple[int, int], ...]

    def summaries_of(self, windows: Sequence[int]) -> Tensor:
        """The summaries [W, P, S] of windows that have the same number of them."""
        count = self.ranges[windows[0]][1]
        begins = torch.tensor([self.ranges[window][0] for window in windows], device=self.summaries_NS.device)
        return self.summaries_NS[begins[:, None] + torch.arange(count, device=begins.device)]


class GroupRead(NamedTuple):
    """The results of B windows of one shape: those of `Read`, and the P summaries of each."""

    last_BD: Tensor
    keys_BS: Tensor
    queries_BS: Tensor
    summaries_BPS: Tensor


class Windows:
    """A numbered set of windows."""

    def __init__(self) -> None:
        self.all: list[Window] = []
        self._numbers: dict[Window, int] = {}

    def add(self, window: Window) -> int:
        """The number of a window; an equal window has the same number."""
        assert window.memory < len(self.all)
        number = self._numbers.setdefault(window, len(self.all))
        if number == len(self.all):
            self.all.append(window)
        return number

    def read(self, model: StageBModel, done: Read | None = None) -> Read:
        """Reads the windows that are not in `done`, and returns the results of all, those of `done` first."""
        if done is not None and len(done.last_WD) == len(self.all):
            return done
        begin = 0 if done is None else len(done.last_WD)
        device = next(model.parameters()).device
        order: list[int] = []
        ranges = dict(enumerate(done.ranges)) if done is not None else {}
        columns: list[tuple[Tensor, ...]] = []
        flat = [] if done is None else [done.summaries_NS]
        size = 0 if done is None else len(done.summaries_NS)
        for group in self.groups(begin):
            before_NS = None
            if self.all[group[0]].memory >= 0:
                before_NS = torch.cat(flat)
                flat = [before_NS]
            read = self.read_group(model, group, before_NS, ranges)
            summaries_BPS = read.summaries_BPS
            columns.append((read.last_BD, read.keys_BS, read.queries_BS))
            flat.append(summaries_BPS.flatten(0, 1))
            for number in group:
                ranges[number] = size, summaries_BPS.shape[1]
                size += summaries_BPS.shape[1]
            order += group
        back = torch.tensor(order, device=device).argsort()
        last, keys, queries = (torch.cat(column)[back] for column in zip(*columns, strict=True))
        if done is not None:
            last, keys = torch.cat([done.last_WD, last]), torch.cat([done.keys_WS, keys])
            queries = torch.cat([done.queries_WS, queries])
        return Read(last, keys, queries, torch.cat(flat), tuple(ranges[number] for number in range(len(self.all))))

    def read_group(
        self,
        model: StageBModel,
        group: Sequence[int],
        before_NS: Tensor | None,
        ranges: Mapping[int, tuple[int, int]] | Sequence[tuple[int, int]],
    ) -> GroupRead:
        """The results of one pass over a group of `groups`. before_NS, ranges: the summaries of windows that were read
        before, as in `Read`; None if the group has no summaries in front."""
        summary = model.summary
        assert summary is not None
        first = self.all[group[0]]
        device = next(model.parameters()).device
        ids_BT = torch.tensor([self.all[number].tokens for number in group], device=device)
        prefix_BPD = None
        if first.memory >= 0:
            memories = [self.all[number].memory for number in group]
            begins = torch.tensor([ranges[memory][0] for memory in memories], device=device)
            offsets = torch.arange(ranges[memories[0]][1], device=device)
            assert before_NS is not None
            prefix_BPD = summary.prefix(before_NS[begins[:, None] + offsets])
        hidden_BTD = model.language_model(ids_BT, prefix_BPD=prefix_BPD).hidden_BTD
        until = hidden_BTD.shape[1] - first.marks
        summaries_BPS = summary(hidden_BTD[:, until - first.end : until])
        return GroupRead(hidden_BTD[:, -1], summary.keys(summaries_BPS), summary.queries(summaries_BPS), summaries_BPS)

    def groups(self, begin: int = 0) -> list[list[int]]:
        """Groups the windows from number `begin` on by shape. A window comes after the one whose summaries it reads."""
        depths: dict[int, int] = {}
        groups: dict[tuple[int, int, int, int, int], list[int]] = defaultdict(list)
        for number in range(begin, len(self.all)):
            window = self.all[number]
            depths[number] = 0 if window.memory < begin else depths[window.memory] + 1
            before = self.all[window.memory].end if window.memory >= 0 else 0
            groups[depths[number], len(window.tokens), window.end, window.marks, before].append(number)
        return [groups[shape] for shape in sorted(groups)]

    def hidden_after(self, model: StageBModel, chosen: Sequence[int], tokens_WA: Tensor, read: Read) -> Tensor:
        """Hidden states [W, A + 1, D] of the chosen windows' last token and of the tokens after it."""
        assert model.summary is not None
        device = read.last_WD.device
        if not tokens_WA.shape[1]:
            return read.last_WD[torch.tensor(chosen, device=device)][:, None]
        parts, order = [], []
        for indices in self.shapes(chosen, read):
            windows = [self.all[chosen[index]] for index in indices]
            ids = torch.cat([torch.tensor([window.tokens for window in windows]), tokens_WA[indices]], 1).to(device)
            prefix = None
            if windows[0].memory >= 0:
                prefix = model.summary.prefix(read.summaries_of([window.memory for window in windows]))
            parts.append(model.language_model(ids, prefix_BPD=prefix).hidden_BTD[:, len(windows[0].tokens) - 1 :])
            order += indices
        return torch.cat(parts)[torch.tensor(order, device=device).argsort()]

    def length(self, number: int, read: Read) -> int:
        """Tokens of a window, and the summaries in front of it."""
        window = self.all[number]
        return len(window.tokens) + (read.ranges[window.memory][1] if window.memory >= 0 else 0)

    def shapes(self, chosen: Sequence[int], read: Read) -> list[list[int]]:
        """The positions in `chosen` of windows of one shape: with as many tokens, and as many summaries in front."""
        shapes: dict[tuple[int, int], list[int]] = {}
        for index, number in enumerate(chosen):
            shapes.setdefault((len(self.all[number].tokens), self.length(number, read)), []).append(index)
        return list(shapes.values())
