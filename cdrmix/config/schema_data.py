"""The schema of the data: sources, cleaning, deduplication, tokenizer, curriculum."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from cdrmix.config.schema_objectives import Objectives
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
    """Kind of the source. It decides which other keys the section has."""


class JsonlSource(Section):
    """JSON lines, plain or compressed (.jsonl, .jsonl.gz, .jsonl.zst). The other fields are metadata."""

    kind: Literal["jsonl"]
    """Kind of the source. It decides which other keys the section has."""
    paths: Paths
    """Files, folders or glob patterns, relative to the working directory."""
    text_field: Text = "text"
    """Field that holds the text."""


class ParquetSource(Section):
    """Parquet files with a text column. The other columns of scalars, and of structs of scalars, are metadata."""

    kind: Literal["parquet"]
    """Kind of the source. It decides which other keys the section has."""
    paths: Paths
    """Files, folders or glob patterns, relative to the working directory."""
    text_field: Text = "text"
    """Column that holds the text."""


class CsvSource(Section):
    """CSV files with a header line and a text column. The other columns are metadata."""

    kind: Literal["csv"]
    """Kind of the source. It decides which other keys the section has."""
    paths: Paths
    """Files, folders or glob patterns, relative to the working directory."""
    text_field: Text = "text"
    """Column that holds the text."""


class TextSource(Section):
    """UTF-8 text files. Each file is one document."""

    kind: Literal["text"]
    """Kind of the source. It decides which other keys the section has."""
    paths: Paths
    """Files, folders or glob patterns, relative to the working directory."""


class HtmlSource(Section):
    """HTML files. Each file is one document; only the visible main text is kept. A file that is not UTF-8 is read in
    the encoding that the page declares."""

    kind: Literal["html"]
    """Kind of the source. It decides which other keys the section has."""
    paths: Paths
    """Files, folders or glob patterns, relative to the working directory."""


class HuggingFaceSource(Section):
    """A Hugging Face dataset, streamed in its own order."""

    kind: Literal["huggingface"]
    """Kind of the source. It decides which other keys the section has."""
    name: Text
    """Name of the dataset on the hub, or a local folder."""
    config_name: Text | None = None
    """Configuration of the dataset. null: its default."""
    revision: Text | None = None
    """Branch, tag or commit. null: the current state on the hub."""
    split: Text = "train"
    """Split to read."""
    text_field: Text = "text"
    """Column that holds the text."""


class TasksSource(Section):
    """Generated tasks whose answers follow from their text: recall, variable tracking, arithmetic and others."""

    kind: Literal["tasks"]
    """Kind of the source. It decides which other keys the section has."""
    tasks: Annotated[list[Text], Field(min_length=1)]
    """Names of the tasks."""
    documents: PositiveInt
    """Number of documents of all tasks together."""
    characters: PositiveInt = 4000
    """Approximate length of a document in characters."""
    difficulty: dict[Text, bool | int | float | Text] = {}
    """Difficulty of the tasks: name of a task parameter to its value."""
    seed: NonNegativeInt = 1
    """Seed of the generated documents."""


class Turns(Section):
    """How conversations become text: the keys that `chat` and `preferences` share."""

    template: Text | None = None
    """Chat template: `chatml`, or a .jinja file relative to the working directory. null: chat_template.jinja or
    tokenizer_config.json next to data.tokenizer.path."""
    special_tokens: list[Text] = []
    """Special tokens of the template. A tokenizer that is trained on the text gets them; another one must have them.
    `chatml` names its own."""
    system: Text | None = None
    """System prompt of conversations without one. null: none."""
    roles: dict[Text, Literal["system", "user", "assistant", "tool"]] = {}
    """Names of roles in the data, in addition to the common ones (human, gpt and others)."""
    date: Text = "2024-07-26"
    """Date, as YEAR-MONTH-DAY, that a template gets as the present day: shards must not depend on the clock."""


class ChatSource(Turns):
    """Conversations in JSON lines (plain or compressed) or Parquet. The loss is on the assistant turns."""

    kind: Literal["chat"]
    """Kind of the source. It decides which other keys the section has."""
    paths: Paths
    """Files, folders or glob patterns, relative to the working directory."""
    format: Literal["auto", "messages", "conversations", "alpaca"] = "auto"
    """messages: a list of role and content. conversations: a list of from and value (ShareGPT). alpaca: the fields
    instruction, input and output. auto: by the fields of each record."""
    field: Text | None = None
    """Field that holds the list of turns. null: messages or conversations, as the format says."""
    train_on: Literal["assistant", "last", "all"] = "assistant"
    """assistant: the loss is on all assistant turns and their end tokens. last: on the last assistant turn only. all:
    on every token."""


class ChatTasksSource(Turns, TasksSource):
    """Generated tasks as conversations: the user asks, and the assistant writes the steps and the answer."""

    kind: Literal["chat_tasks"]  # type: ignore[assignment]
    """Kind of the source. It decides which other keys the section has."""


class PreferencesSource(Turns):
    """Pairs of a chosen and a rejected answer to one prompt, in JSON lines (plain or compressed) or Parquet.

    prompt, chosen and rejected are texts or lists of messages. chosen and rejected may begin with the prompt. Without a
    prompt, they are whole conversations, which differ in the last turn: messages, or texts with the marks Human: (or
    User:) and Assistant: after empty lines.
    """

    kind: Literal["preferences"]
    """Kind of the source. It decides which other keys the section has."""
    paths: Paths
    """Files, folders or glob patterns, relative to the working directory."""
    prompt_field: Text = "prompt"
    """Field that holds the prompt, if there is one."""
    chosen_field: Text = "chosen"
    """Field that holds the better answer."""
    rejected_field: Text = "rejected"
    """Field that holds the worse answer."""


class TaskPreferencesSource(ChatTasksSource):
    """Generated tasks as preferences: the right answer against that of the next example of the same task."""

    kind: Literal["task_preferences"]  # type: ignore[assignment]
    """Kind of the source. It decides which other keys the section has."""


class PluginSource(Section):
    """A source that a plugin registers."""

    kind: Literal["plugin"]
    """Kind of the source. It decides which other keys the section has."""
    name: Text
    """Name under which the plugin registers the source."""
    options: dict[Text, bool | int | float | Text] = {}
    """Options of the source. The plugin defines and checks them."""


Source = Annotated[
    StdlibSource
    | JsonlSource
    | ParquetSource
    | CsvSource
    | TextSource
    | HtmlSource
    | HuggingFaceSource
    | TasksSource
    | ChatSource
    | ChatTasksSource
    | PreferencesSource
    | TaskPreferencesSource
    | PluginSource,
    Field(discriminator="kind"),
]


class Filters(Section):
    """Rules that a document must pass. The scores of all rules are recorded, also for dropped documents."""

    rules: list[Text] = []
    """Names of rules or groups of rules. A document that fails a rule is dropped."""
    bounds: dict[Text, float] = {}
    """Name of a rule to the bound that replaces the published one."""
    languages: list[Text] = ["en"]
    """ISO 639 codes of the languages that the rule `language` keeps."""
    language_score: Fraction = 0.65
    """Smallest probability of the detected language that the rule `language` accepts."""


class Pii(Section):
    """Personal data and secrets to replace by placeholders such as `<EMAIL>`."""

    kinds: list[Literal["email", "phone", "ip", "credit_card", "iban", "secret"]] = []
    """Kinds of personal data and secrets to replace."""


class Domain(Section):
    """A named part of the corpus, with its own weight in the mixture."""

    source: Source
    """Where the text comes from."""
    priority: int = 0
    """Of near-duplicates of equal quality, the document of the highest priority is kept."""
    html: bool = False
    """The text is HTML: keep only the visible main text."""
    url_field: Text | None = "url"
    """Metadata field that holds the address of the document. Documents without it are accepted. `metadata.url` is the
    field url of the mapping metadata."""
    cap_hosts: bool = True
    """Count the documents for data.dedup.documents_per_host. false: for a set that is one site."""
    quality_field: Text | None = None
    """Metadata field that holds a number. Of near-duplicates, the document with the highest number is kept."""
    filters: Filters | None = None
    """Filters of this domain. null: data.filters, but none for conversations."""
    pii: Pii | None = None
    """Personal data to replace in this domain. null: data.pii."""
    max_epochs: PositiveFloat | None = None
    """Largest number of passes over this domain in the training. null: no limit."""


class Dedup(Section):
    """Deduplication: exact, by URL, and of near-duplicates."""

    exact: bool = True
    """Drop documents that are equal after white space is normalised."""
    url: bool = False
    """Keep one document for each canonical URL."""
    documents_per_host: PositiveInt | None = None
    """Largest number of documents of a registrable domain. null: no limit."""
    near_duplicates: bool = True
    """Drop near-duplicates (MinHash LSH, verified by exact Jaccard similarity)."""
    ngram: PositiveInt = 5
    """Words of a shingle; in scripts without spaces between words, such as Chinese and Thai, characters."""
    num_perm: PositiveInt = 128
    """Values of a MinHash signature."""
    bands: PositiveInt = 16
    """Number of LSH bands. bands * rows must not exceed num_perm."""
    rows: PositiveInt = 8
    """Signature values of a band. Two documents of similarity s become candidates with probability 1 - (1 -
    s^rows)^bands."""
    threshold: Between0And1 = 0.8
    """Jaccard similarity of the shingle sets from which two documents are near-duplicates."""
    seed: NonNegativeInt = 1
    """Seed of the hash functions."""


class Tokenizer(Section):
    """Byte-level BPE tokenizer, trained on the text, or the tokenizer of a model, loaded from its file."""

    path: Text | None = None
    """A tokenizer.json, a folder that has one, or a vocabulary of RWKV World models (rwkv_vocab_v20230424.txt). model:
    the folder model.path. null: train a tokenizer on the text."""
    end_of_text: Text | None = "<|endoftext|>"
    """Token at the end of a document. null: the eos_token in tokenizer_config.json of the folder `path`, or the only
    special token of tokenizer.json. This is the default if `path` is a folder, a vocabulary of RWKV or `model`."""
    begin_of_text: Text | None = "auto"
    """Token at the beginning of a document. auto: the token that the tokenizer at `path` puts before a text, as in the
    training of its model, for example `<s>`. If there is none, or with null: the end-of-text token of the document
    before."""
    lossless: bool = True
    """Refuse a tokenizer that changes text: one that normalizes characters, adds a space or has an unknown token. Bits
    per byte count the bytes of the original text in any case."""
    train_bytes: PositiveInt = 100_000_000
    """Bytes of text that the tokenizer is trained on, at most."""
    min_frequency: PositiveInt = 1
    """Least number of occurrences of a pair of tokens that becomes a token, of a tokenizer that is trained."""
    max_token_length: PositiveInt | None = None
    """Upper bound of the length of a token in bytes, of a tokenizer that is trained. Of a bound of 3 or more, the
    package tokenizers reaches one byte less. null: no bound."""
    normalization: Literal["none", "nfkc"] = "none"
    """Unicode normal form that a trained tokenizer brings texts into. nfkc replaces characters by compatible ones and
    loses the difference, so it needs `lossless: false`. The preparation brings all text into NFC before."""
    add_tokens: list[Text] = []
    """Special tokens to add, such as the marks of data.objectives.fim for the tokenizer at `path` that lacks them. They
    get the ids after its largest one. A model of transformers has model.vocab.add_tokens instead."""

    @model_validator(mode="before")
    @classmethod
    def _find_end_of_text(cls, data: Any) -> Any:
        """The default of end_of_text is null if `path` is a folder, which may name the token, or `model`."""
        if isinstance(data, dict) and isinstance(path := data.get("path"), str) and not path.endswith(".json"):
            return {"end_of_text": None, **data}
        return data


class CurriculumStage(Section):
    """A stage of the training with its own data mixture."""

    until: Annotated[float, Field(gt=0, le=1)]
    """End of the stage, as a share of all rows of the training. The last stage ends at 1."""
    domains: dict[Text, NonNegativeFloat] | None = None
    """Domain to its sampling weight. null: in proportion to the rows of each domain."""
    lengths: list[NonNegativeFloat] | None = None
    """Sampling weight of each length class. null: in proportion to the rows of each class."""


class Data(Section):
    """From text to rows of `row_length` tokens."""

    source: Source | None = None
    """Source of the text, if there is one. null without domains: the Python standard library."""
    domains: dict[Text, Domain] | None = None
    """Several sources by name, instead of source."""
    filters: Filters = Field(default_factory=Filters)
    pii: Pii = Field(default_factory=Pii)
    dedup: Dedup = Field(default_factory=Dedup)
    tokenizer: Tokenizer = Field(default_factory=Tokenizer)
    objectives: Objectives = Field(default_factory=Objectives)
    row_length: PositiveInt = 2048
    """Tokens of a row."""
    length_classes: list[PositiveInt] = []
    """Document lengths in tokens that separate length classes. A row holds documents of one class."""
    curriculum: list[CurriculumStage] = []
    """Stages of the data mixture. Empty: data.mixture; without that, one mixture in proportion to the rows."""
    mixtures: dict[Text, list[CurriculumStage]] = {}
    """Named curricula, of which data.mixture chooses one."""
    mixture: Text | None = None
    """Name of the curriculum in data.mixtures. null: data.curriculum."""
    order: Literal["shuffled", "sequential"] = "shuffled"
    """Order of the rows without a curriculum. shuffled: each epoch in another random order, by run.seed. sequential:
    each epoch in the order of the shards."""
    valid_fraction: Between0And1 = 0.05
    """Share of the documents that are held out. A hash of the content selects them."""
    cache: Text = "data_cache"
    """Folder of prepared shards. Each preparation has a folder of its own, named by a hash of its content."""
    shard_tokens: PositiveInt = 100_000_000
    """Tokens of a shard file."""
    max_documents: PositiveInt | None = None
    """Number of records to read of each domain, at most. null: all."""
    max_bad_records: NonNegativeInt = 100
    """Malformed records that are skipped before the preparation stops with an error."""
    max_expansion: PositiveInt = 1000
    """Largest ratio of decompressed to stored size of a compressed or Parquet file."""
    engine: Literal["local", "ray"] = "local"
    """local: processes on this machine. ray: tasks on a Ray cluster."""
    workers: NonNegativeInt = 0
    """Processes of the preparation. 0: one per core."""
    memory_mb: PositiveInt = 256
    """Text in MB that one process holds in memory at a time."""

    def all_domains(self) -> dict[str, Domain]:
        """`domains`; without domains, `source` as one domain named `text`."""
        if self.domains is not None:
            return self.domains
        return {"text": Domain(source=self.source or StdlibSource(kind="stdlib"))}

    def filters_of(self, domain: Domain) -> Filters:
        """The filters of a domain. `filters` is for prose and code: conversations have only those of their domain."""
        if domain.filters is not None:
            return domain.filters
        return Filters() if isinstance(domain.source, Turns) else self.filters

    def has_pairs(self) -> bool:
        """Whether the documents are pairs of a chosen and a rejected answer. Then those of all domains are."""
        pairs = (PreferencesSource, TaskPreferencesSource)
        return any(isinstance(domain.source, pairs) for domain in self.all_domains().values())

    def has_conversations(self) -> bool:
        """Whether a domain has conversations."""
        return any(isinstance(domain.source, Turns) for domain in self.all_domains().values())

    def stages(self) -> tuple[str, list[CurriculumStage]]:
        """The curriculum that training follows and its key: `curriculum`, or the chosen one of `mixtures`."""
        if self.mixture is None:
            return "data.curriculum", self.curriculum
        return f"data.mixtures.{self.mixture}", self.mixtures[self.mixture]

    def source_kinds(self) -> str:
        """The kinds of all sources, for messages."""
        return ", ".join(sorted({domain.source.kind for domain in self.all_domains().values()}))
