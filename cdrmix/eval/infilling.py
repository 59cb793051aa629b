"""The suite `infilling`: which of four lines stood between a prefix and a suffix of held-out text.

Each item is a document of the held-out text without one of its lines. Four items of different documents are a group,
and the four lines of a group are the answers to each of its items. A model chooses the line whose log-likelihood gains
most from the text around it:
    log p(line, end | prefix, suffix) - log p(line, end | nothing), in the order of fill in the middle
Without the second term, short and frequent lines would win. A model that ignores the text around the line ranks the
four lines alike for all items of the group, and so is right in exactly one of them: chance is 1/4. Equal scores share
the point.

psm, spm: the share of right choices in each order. psm needs the suffix before the middle, spm before the prefix.
prefix: the same for ordinary text, log p(line | prefix) - log p(line | nothing): what a model does without the suffix.
Intervals: 95 %, bootstrap over groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cdrmix.data.objectives import special_tokens
from cdrmix.data.shards import Split
from cdrmix.data.tokenizer import TextTokenizer
from cdrmix.errors import CdrmixError, ConfigError
from cdrmix.eval.intervals import mean_interval
from cdrmix.eval.suites import SUITES, Measure, Subject, SuiteOptions, SuiteResult
from cdrmix.model.causal import evaluation_mode
from cdrmix.model.loss import LossModule

NAMES = ("psm", "spm", "prefix")
GROUP = 4  # items of a group, and answers to an item
COUNT = 200  # items without --limit
LEAST = 12  # characters of a line without the white space around it
MOST = 200  # characters of a line
Ids = list[int]


class Item(NamedTuple):
    """A text without one of its lines: all tokens, and the line with its line end as `middle`."""

    prefix: Ids
    middle: Ids
    suffix: Ids


class Marks(NamedTuple):
    """The ids around the texts: before a document, the marks of fill in the middle, the end of text."""

    first: int
    prefix: int
    middle: int
    suffix: int
    end: int


@SUITES("infilling")
def infilling(subject: Subject, options: SuiteOptions, say: Callable[[str], None]) -> SuiteResult:
    """See the docstring of the module. options.limit: items, rounded up to whole groups."""
    parts = subject.model_parts("infilling")
    try:
        shards, config = parts.text()
        fim = parts.config.data.objectives.fim
        if fim is None:
            raise ConfigError("the model was not trained to fill in the middle; set data.objectives.fim and train it")
        marks = _marks(parts.tokenizer, special_tokens(parts.config.data.objectives))
        domains = fim.domains if parts.own_text else None
        width = config.data.row_length
        items = read_items(shards.valid, parts.tokenizer, width, options.limit or COUNT, options.seed, domains)
    except CdrmixError as error:
        return SuiteResult("infilling", tuple(Measure(name, problem=str(error)) for name in NAMES))
    say(f"infilling: {len(items)} items")
    model = parts.loss_model()
    of_groups: dict[str, list[float]] = {name: [] for name in NAMES}
    for start in range(0, len(items), GROUP):
        for name in NAMES:
            of_groups[name].append(float(np.mean(points(model, items[start : start + GROUP], marks, name))))
    measures = [
        Measure(name, float(np.mean(shares)), *mean_interval(shares, options.seed), len(items))
        for name, shares in of_groups.items()
    ]
    facts = {
        "chance": 1 / GROUP,
        "items": len(items),
        "row_length": width,
        "seed": options.seed,
        "mean_tokens": {
            name: float(np.mean([len(getattr(item, name)) for item in items]))
            for name in ("prefix", "middle", "suffix")
        },
    }
    note = f"chance is {1 / GROUP:g}: each line is compared with those of {GROUP - 1} other held-out documents"
    return SuiteResult("infilling", tuple(measures), facts, (note,))


def read_items(
    split: Split, tokenizer: TextTokenizer, width: int, count: int, seed: int, domains: Sequence[str] | None = None
) -> list[Item]:
    """At least `count` items in whole groups, if the split has as many documents with a line to ask for.

    width: tokens that a model reads at most. domains: of the documents; None: all. A document gives one item.
    Raises ConfigError if there are too few documents for one group.
    """
    draw = np.random.default_rng(seed)
    texts = [text for number, text in enumerate(split.text()) if domains is None or split.domain_of(number) in domains]
    wanted = -(-count // GROUP) * GROUP
    found: list[Item] = []
    for number in draw.permutation(len(texts)).tolist():
        item = _item(texts[number].decode("utf-8", errors="replace"), tokenizer, width, draw)
        if item is not None and all(item.middle != other.middle for other in found[-(len(found) % GROUP) or GROUP :]):
            found.append(item)
        if len(found) == wanted:
            break
    found = found[: len(found) // GROUP * GROUP]
    if not found:
        raise ConfigError(
            f"the held-out text has fewer than {GROUP} documents with a line of {LEAST} to {MOST} characters between "
            "others; hold out more of it (data.valid_fraction)"
        )
    return found


def points(model: LossModule, items: Sequence[Item], marks: Marks, order: str) -> list[float]:
    """For each item of a group the share of a right choice: 1, 0, or 1 / n if n lines are equally good."""
    nothing = Item([], [], [])
    answers = [item.middle for item in items]
    rows = [_row(context, answer, marks, order) for context in (*items, nothing) for answer in answers]
    scores = _log_likelihoods(model, rows, marks).view(len(items) + 1, len(answers))
    gains = (scores[:-1] - scores[-1]).numpy()
    if not np.isfinite(gains).all():
        raise ConfigError("a log-likelihood of the model is not finite; its weights may hold NaN or infinity")
    best = gains == gains.max(1, keepdims=True)
    return [float(best[number, number] / best[number].sum()) for number in range(len(items))]


def _row(item: Item, answer: Ids, marks: Marks, order: str) -> tuple[Ids, int]:
    """The tokens of an item with an answer, and the number of the first token that is scored."""
    if order == "prefix":
        before, after = [marks.first, *item.prefix], []
    elif order == "psm":
        before = [marks.first, marks.prefix, *item.prefix, marks.suffix, *item.suffix, marks.middle]
        after = [marks.end]
    else:
        before = [marks.first, marks.prefix, marks.suffix, *item.suffix, marks.middle, *item.prefix]
        after = [marks.end]
    return [*before, *answer, *after], len(before)


def _log_likelihoods(model: LossModule, rows: Sequence[tuple[Ids, int]], marks: Marks) -> Tensor:
    """float64 [rows]: the log-probabilities of the tokens that are scored, summed."""
    width = max(len(ids) for ids, _ in rows) - 1
    ids_BT = torch.full((len(rows), width), marks.end)
    targets_BT, weights_SBT = torch.zeros_like(ids_BT), torch.zeros(len(rows), len(rows), width)
    for number, (ids, first) in enumerate(rows):
        ids_BT[number, : len(ids) - 1] = torch.tensor(ids[:-1])
        targets_BT[number, : len(ids) - 1] = torch.tensor(ids[1:])
        weights_SBT[number, number, first - 1 : len(ids) - 1] = 1
    device = next(model.parameters()).device
    arguments = (tensor.to(device) for tensor in (ids_BT, targets_BT, weights_SBT))
    with evaluation_mode(model), torch.no_grad():
        return -model(*arguments, None, 1.0, 1.0).next_token_sum.double().cpu()


def _item(text: str, tokenizer: TextTokenizer, width: int, draw: np.random.Generator) -> Item | None:
    """One line of a text, drawn at random, and what is around it; None if there is no line to ask for."""
    lines = text.splitlines(keepends=True)
    fit = [
        number
        for number, line in enumerate(lines[1:-1], 1)
        if len(line.strip()) >= LEAST and len(line) <= MOST and lines.count(line) == 1
    ]
    if not fit:
        return None
    chosen = fit[int(draw.integers(len(fit)))]
    texts = ["".join(part) for part in (lines[:chosen], lines[chosen : chosen + 1], lines[chosen + 1 :])]
    around = 16 * width  # characters: more than the tokens that are kept
    cut = [texts[0][-around:], texts[1], texts[2][:around]]
    prefix, middle, suffix = (ids.tolist() for ids in tokenizer.encode_batch(cut, [len(texts[0]) > around, True, True]))
    side = (width - len(middle) - 5) // 2  # beside the middle, three marks and both ends
    return Item(prefix[-side:], middle, suffix[:side]) if side > 0 else None


def _marks(tokenizer: TextTokenizer, names: Sequence[str]) -> Marks:
    prefix, middle, suffix = (tokenizer.special_id(name) for name in names)
    return Marks(tokenizer.first_id, prefix, middle, suffix, tokenizer.end_of_text_id)
