"""The part of the schema that concerns text: sources, cleaning, near-duplicates, tokens, mixture."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from cdrmix.config.section import (
    Between0And1,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    Paths,
    PositiveFloat,
    PositiveInt,
    Section,
    Text,
)


class StdlibSource(Section):
    """The Python standard library installed on this machine: real text without a network."""

    kind: Literal["stdlib"]


class JsonlSource(Section):
    """JSON lines, plain or compressed (.jsonl, .jsonl.gz, .jsonl.zst); other fields than the text are metadata."""

    kind: Literal["jsonl"]
    paths: Paths
    text_field: Text = "text"


class ParquetSource(Section):
    """Parquet files with a text column; other scalar columns are metadata."""

    kind: Literal["parquet"]
    paths: Paths
    text_field: Text = "text"


class CsvSource(Section):
    """CSV files with a header line and a text column; other columns are metadata."""

    kind: Literal["csv"]
    paths: Paths
    text_field: Text = "text"


class TextSource(Section):
    """Plain UTF-8 files, each one document."""

    kind: Literal["text"]
    paths: Paths


class HtmlSource(Section):
    """HTML files, each one document; only the visible main text is kept."""

    kind: Literal["html"]
    paths: Paths


class HuggingFaceSource(Section):
    """A Hugging Face dataset by name, streamed in its own order."""

    kind: Literal["huggingface"]
    name: Text
    config_name: Text | None = None
    revision: Text | None = None  # branch, tag or commit; null: what the hub serves at the time
    split: Text = "train"
    text_field: Text = "text"


class TasksSource(Section):
    """Generated exercises whose answers follow from their text: recall, variable tracking, arithmetic and others."""

    kind: Literal["tasks"]
    tasks: Annotated[list[Text], Field(min_length=1)]  # names of cdrmix/data/tasks
    documents: PositiveInt  # of all tasks together
    characters: PositiveInt = 4000  # about the length of a document
    difficulty: dict[Text, bool | int | float | Text] = {}  # a field of a task's difficulty there -> its value
    seed: NonNegativeInt = 1


Source = Annotated[
    StdlibSource | JsonlSource | ParquetSource | CsvSource | TextSource | HtmlSource | HuggingFaceSource | TasksSource,
    Field(discriminator="kind"),
]


class Filters(Section):
    """What a document must pass to be kept. Scores of all rules are recorded, of dropped documents too."""

    rules: list[Text] = []  # names of rules or groups of data/cleaning/filters.py
    bounds: dict[Text, float] = {}  # a rule's name -> its bound, where it shall not be the published one
    languages: list[Text] = ["en"]  # for the rule `language`: ISO 639 codes
    language_score: Fraction = 0.65  # the least probability of that language


class Pii(Section):
    """Which personal data and secrets become placeholders such as <EMAIL>."""

    kinds: list[Literal["email", "phone", "ip", "credit_card", "iban", "secret"]] = []


class Domain(Section):
    """A part of the corpus with weights of its own in the mixture."""

    source: Source
    priority: int = 0  # of near-duplicates of equal quality, the document of the highest priority survives
    html: bool = False  # the text is HTML: only the visible main text is kept
    # Metadata field with the document's address; absent ones do no harm. "metadata.url": the field url of metadata.
    url_field: Text | None = "url"
    cap_hosts: bool = True  # whether data.dedup.documents_per_host counts its documents; false for one site's own set
    quality_field: Text | None = None  # metadata field with a number; of duplicates the highest survives
    filters: Filters | None = None  # null: data.filters
    pii: Pii | None = None  # null: data.pii
    max_epochs: PositiveFloat | None = None  # how often training may go through this domain; null: any number


class Dedup(Section):
    """Which documents are the same. MinHash: bands x rows of num_perm are compared, then the exact similarity."""

    exact: bool = True  # equal but for white space
    url: bool = False  # one document a canonical address
    documents_per_host: PositiveInt | None = None  # at most, of a registrable domain; null: any number
    near: bool = True
    ngram: PositiveInt = 5  # words a shingle
    num_perm: PositiveInt = 128  # values of a signature
    bands: PositiveInt = 16
    rows: PositiveInt = 8  # values a band; two documents of similarity s meet with 1 - (1 - s^rows)^bands
    threshold: Between0And1 = 0.8  # exact Jaccard similarity of the shingles from which two documents are one
    seed: NonNegativeInt = 1


class Tokenizer(Section):
    """Byte-level BPE: trained on the corpus at `model.vocab_size`, or loaded from a tokenizer.json."""

    path: Text | None = None
    end_of_text: Text = "<|endoftext|>"
    train_bytes: PositiveInt = 100_000_000  # at most this much of the corpus is read to train it


class Fim(Section):
    """Fill in the middle (Bavarian et al. 2022): documents rearranged as prefix, suffix, middle."""

    rate: Fraction = 0.5  # of documents
    spm_fraction: Fraction = 0.5  # of those, as suffix, prefix, middle
    domains: list[Text] | None = None  # null: all
    seed: NonNegativeInt = 1
    prefix: Text = "<|fim_prefix|>"
    middle: Text = "<|fim_middle|>"
    suffix: Text = "<|fim_suffix|>"


class Span(Section):
    """Text between two marks, the marks included, with a loss weight of its own: a chain of thought, a prompt."""

    begin: Text
    end: Text
    weight: NonNegativeFloat


class Objectives(Section):
    """What training makes of a document besides predicting its next token."""

    fim: Fim | None = None
    spans: list[Span] = []


class CurriculumStage(Section):
    """A part of the training with proportions of its own: what a row at this position is drawn from."""

    until: Annotated[float, Field(gt=0, le=1)]  # where the stage ends, as a share of all rows of the training
    domains: dict[Text, NonNegativeFloat] | None = None  # weights; null: in proportion to the rows of each
    lengths: list[NonNegativeFloat] | None = None  # weights of the classes of data.length_classes; null: as above


class Data(Section):
    """Text to rows of `row_length` tokens."""

    source: Source | None = None  # null, without domains: the Python standard library
    domains: dict[Text, Domain] | None = None  # instead of `source`: several, by name
    filters: Filters = Field(default_factory=Filters)
    pii: Pii = Field(default_factory=Pii)
    dedup: Dedup = Field(default_factory=Dedup)
    tokenizer: Tokenizer = Field(default_factory=Tokenizer)
    objectives: Objectives = Field(default_factory=Objectives)
    row_length: PositiveInt = 2048
    length_classes: list[PositiveInt] = []  # tokens: rows are made of documents between two neighbours of these
    curriculum: list[CurriculumStage] = []  # empty: the mixture; without one all rows alike
    mixtures: dict[Text, list[CurriculumStage]] = {}  # curricula by name, of which one is chosen
    mixture: Text | None = None  # the name of the one chosen; null: `curriculum`
    valid_fraction: Between0And1 = 0.05  # of documents, chosen by hash
    cache: Text = "data_cache"  # prepared shards, one folder per content key
    shard_tokens: PositiveInt = 100_000_000  # tokens of one shard file
    max_documents: PositiveInt | None = None  # of each domain, only the first records are read
    max_bad_records: NonNegativeInt = 100  # malformed records skipped before the preparation gives up
    max_expansion: PositiveInt = 1000  # times its size that a compressed file may unfold to
    engine: Literal["local", "ray"] = "local"
    workers: NonNegativeInt = 0  # processes of the preparation; 0: one a core
    memory_mb: PositiveInt = 256  # of text that one process works on at a time

    def all_domains(self) -> dict[str, Domain]:
        """`domains`, or `source` as the one domain `text`."""
        if self.domains is not None:
            return self.domains
        return {"text": Domain(source=self.source or StdlibSource(kind="stdlib"))}

    def stages(self) -> tuple[str, list[CurriculumStage]]:
        """The curriculum that training follows and its key: `curriculum`, or the chosen one of `mixtures`."""
        if self.mixture is None:
            return "data.curriculum", self.curriculum
        return f"data.mixtures.{self.mixture}", self.mixtures[self.mixture]

    def source_kinds(self) -> str:
        """The kinds of all sources, for messages."""
        return ", ".join(sorted({domain.source.kind for domain in self.all_domains().values()}))
