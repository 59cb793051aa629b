"""The schema of `data.objectives`: fill in the middle, chains of thought, weighted spans, weights of the parts."""

from __future__ import annotations

from typing import Literal

from cdrmix.config.section import Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section, Text


class Fim(Section):
    """Fill in the middle (arXiv 2207.14255): some documents are rearranged as prefix, suffix, middle."""

    rate: Fraction = 0.5
    """Share of the documents that are rearranged."""
    spm_fraction: Fraction = 0.5
    """Of these, the share in the order suffix, prefix, middle. The others have the order prefix, suffix, middle."""
    loss: Literal["all", "middle"] = "all"
    """Tokens of a rearranged document that are trained on. all: every one. middle: the middle and the end of text."""
    characters: PositiveInt | None = None
    """Longest text that is rearranged. A longer document is cut into texts of at most this length, after a line end
    where there is one, and each is rearranged with the probability `rate`, as a document of its own. Without it, a
    document that is longer than a row is rearranged as a whole, and no row has its middle with what is around it. null:
    whole documents."""
    domains: list[Text] | None = None
    """Domains whose documents are rearranged. null: all."""
    seed: NonNegativeInt = 1
    """Seed of the choice of documents and of the positions."""
    prefix: Text = "<|fim_prefix|>"
    """Token before the prefix."""
    middle: Text = "<|fim_middle|>"
    """Token before the middle."""
    suffix: Text = "<|fim_suffix|>"
    """Token before the suffix."""


class Columns(Section):
    """Fields of a record that become one text: the question, a chain of thought between its marks, the answer."""

    question: Text = "question"
    """Field that holds the question."""
    thought: Text = "thought"
    """Field that holds the chain of thought. A record in which it is missing, null or empty has none."""
    answer: Text = "answer"
    """Field that holds the answer."""


class Cot(Section):
    """Chains of thought: the text between two marks, with the marks and the white space behind them.

    A document has all of its chains or none: one that is not chosen is trained on without them. Held-out documents keep
    them.
    """

    begin: Text = "<think>"
    """Text that begins a chain of thought."""
    end: Text = "</think>"
    """Text that ends a chain of thought."""
    columns: dict[Text, Columns] = {}
    """Domain to the fields of its records, for records with a field for each of question, thought and answer. A
    data.source is the domain `text`. Other domains have the marks in their text."""
    rate: Fraction = 1.0
    """Share of the documents with chains of thought that keep them."""
    max_share: Fraction = 0.2
    """Largest share of the training tokens that are in chains of thought. Of the documents that `rate` leaves, those
    with the lowest hash keep theirs."""
    seed: NonNegativeInt = 1
    """Seed of the choice of documents."""


class Span(Section):
    """A span of text between two marks, the marks included, with its own loss weight."""

    begin: Text
    """Text that begins the span."""
    end: Text
    """Text that ends the span."""
    weight: NonNegativeFloat
    """Loss weight of the tokens of the span. 0: not trained on."""


class PartWeights(Section):
    """Weight of each part of the training loss. A token is in one part."""

    next_token: PositiveFloat = 1.0
    """Weight of ordinary text."""
    fim: NonNegativeFloat = 0.3
    """Weight of documents that `fim` rearranges. 0: not trained on."""
    cot: NonNegativeFloat = 0.2
    """Weight of chains of thought. 0: not trained on."""


class Objectives(Section):
    """Training objectives in addition to next-token prediction."""

    fim: Fim | None = None
    """Fill in the middle. null: off."""
    cot: Cot | None = None
    """Chains of thought. null: text between such marks is ordinary text."""
    spans: list[Span] = []
    """Spans of text with a loss weight of their own."""
    weights: PartWeights | None = None
    """Weights of the parts next_token, fim and cot, whose losses are then logged and validated apart. null: all tokens
    count alike and no parts are told apart. A change of the weights needs no new preparation."""
    normalise: Literal["mean_of_tokens", "sum_of_means"] = "mean_of_tokens"
    """How the parts become one loss, with weight w and N tokens in the global batch for each. mean_of_tokens:
    sum(w * sum of the losses) / sum(w * N), a weighted mean over tokens. sum_of_means: sum(w * mean loss of the part).
    In place of N, tokens in `spans` count with the weights of their spans."""

    def has_token_weights(self) -> bool:
        """Whether tokens of one document have different loss weights."""
        return bool(self.spans) or (self.fim is not None and self.fim.loss == "middle")
