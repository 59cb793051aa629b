"""Rules for the hyperparameters of training: learning rate, batch, warm-up, final ratio and betas from size and tokens.

A rule sets what the file does not write, as the autosizers do. Its input has not been validated yet: where a value is
missing or malformed nothing is set, and the schema reports it. So nothing here raises, and nothing needs PyTorch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cdrmix.config.batch_sizes import BatchSizes
from cdrmix.config.mixer_layers import layer_mixers

Values = Mapping[str, Any]  # dotted key to value, with the defaults of the schema
RULE_READS = ("train.tokens_per_parameter", "data.row_length")  # besides the model
SET_BY_A_RULE = ("train.steps", "train.batch_rows", "train.learning_rate")  # those without a default

# StepLaw (arXiv 2503.04715), equation 1: learning rate and batch (tokens) at the optimum of N parameters, D tokens.
RATE, RATE_OF_N, RATE_OF_D = 1.79, -0.713, 0.307
BATCH, BATCH_OF_D = 0.58, 0.571
MAX_RATE = 0.01  # below the parameters that the law was fitted on (60 M) it exceeds every rate that was tried
FINAL_RATE = 1e-5  # of the runs that the law was fitted on
# OLMo-core's ladder: a warm-up of one token a parameter; with batches of at least 524,288 tokens a shorter memory.
LARGE_BATCH = 2**19
BETAS, BETAS_OF_SMALL_BATCHES = [0.9, 0.95], [0.9, 0.99]
MAX_WARMUP_SHARE = 0.1  # of the steps: for runs of less than ten tokens a parameter
MIXERS, FEED_FORWARDS = ("attention", "rwkv7", "mamba2", "routing_mamba"), ("moe", "dense", "channel_mix")
MIXED = ("dense_layers", "shared_hidden", "dense_hidden")  # keys of a mixture with dense parts
COUNTED = ("vocab_size", "d_model", "layers", "attention.heads", "attention.kv_heads")
MAX_VALUE, MAX_LAYERS = 2**53, 10_000  # larger ones are malformed here, so that nothing overflows or takes long


@dataclass(frozen=True)
class TableRow:
    """One row of the specification's table. rows: of a micro-batch. accumulation: micro-batches of a step."""

    parameters: float
    learning_rate: float
    rows: int
    accumulation: int


SVEND = (
    TableRow(50e6, 3e-4, 16, 2),
    TableRow(125e6, 2e-4, 8, 4),
    TableRow(500e6, 1e-4, 4, 8),
    TableRow(1e9, 1e-4, 2, 16),
    TableRow(3e9, 5e-5, 1, 32),
    TableRow(7e9, 3e-5, 1, 32),
    TableRow(13e9, 2e-5, 1, 64),
)
SVEND_WARMUP_SHARE, SVEND_FINAL_RATIO = 0.03, 0.1


@dataclass(frozen=True)
class ModelSize:
    """Numbers of parameters. embeddings: of the embedding, and of the head where it is not tied. experts: of all
    experts, of which active_experts are used by one token. others: all others, but for those of model.prediction."""

    embeddings: int
    experts: int
    active_experts: int
    others: int

    @property
    def active(self) -> int:
        """The parameters that one token uses."""
        return self.embeddings + self.active_experts + self.others

    @property
    def without_embeddings(self) -> int:
        """The stored parameters without embeddings: N of StepLaw. For mixtures of experts N = stored fits best."""
        return self.experts + self.others


def hyperparameters(values: Values) -> dict[str, Any]:
    """Defaults of `train` by train.hyperparameters and train.tokens_per_parameter.

    Args:
        values: dotted key to value; a key without a value and without a default is missing.

    Returns:
        The section `train` with defaults; empty without a rule, and where the number of tokens is unknown. A key that
        the file has takes precedence.
    """
    rule, ratio = values.get("train.hyperparameters"), values.get("train.tokens_per_parameter")
    if (rule not in ("step-law", "svend") and ratio is None) or values.get("model.kind") != "cdrmix":
        return {}
    size, length = model_size(values), values.get("data.row_length")
    if size is None or not isinstance(length, int) or not _positive(length):
        return {}
    steps, rows, micro = (values.get(f"train.{key}") for key in ("steps", "batch_rows", "micro_batch_rows"))
    parts = values.get("train.micro_batch_parts", 1)  # of micro-batches as they were before
    if any(not _positive(it) for it in (steps, rows) if it is not None):
        return {}
    tokens: float | None = _sizes(values, rows).before(steps) * length if steps and rows else None
    if ratio is not None:
        tokens = ratio * size.active if _positive(ratio, float) else None
    if tokens is None or not size.without_embeddings:
        return {}
    if rule == "step-law":
        counts = [it if isinstance(it, int) and _positive(it) else 1 for it in (micro, parts)]
        rows = rows or round_rows(BATCH * tokens**BATCH_OF_D / length, math.prod(counts))
    elif rule == "svend":
        row = min(SVEND, key=lambda row: abs(math.log(row.parameters / size.active)))
        rows = rows or row.rows * row.accumulation
    if rows is None:
        return {}
    sizes = _sizes(values, rows)
    steps = steps or max(1, round((tokens + sizes.missing * length) / (rows * length)))
    defaults: dict[str, Any] = {"batch_rows": rows, "steps": steps}
    if rule == "step-law":
        rate = min(MAX_RATE, RATE * size.without_embeddings**RATE_OF_N * tokens**RATE_OF_D)
        defaults |= {
            "learning_rate": _rounded(rate),
            "final_learning_rate_ratio": _rounded(min(1.0, FINAL_RATE / rate)),
            "warmup_steps": int(min(size.without_embeddings / (rows * length), MAX_WARMUP_SHARE * steps)),
            "betas": [*BETAS] if rows * length >= LARGE_BATCH else [*BETAS_OF_SMALL_BATCHES],
        }
    elif rule == "svend":
        defaults |= {
            "learning_rate": row.learning_rate,
            "final_learning_rate_ratio": SVEND_FINAL_RATIO,
            "warmup_steps": int(SVEND_WARMUP_SHARE * steps),
            "micro_batch_rows": math.gcd(row.rows, rows, sizes.first),
        }
    return {"train": defaults}


def _sizes(values: Values, rows: int) -> BatchSizes:
    """The rows of each step with `rows` rows after the batch warm-up; of all steps, if the section is malformed."""
    first, steps = values.get("train.batch_warmup.rows"), values.get("train.batch_warmup.steps")
    if isinstance(first, int) and isinstance(steps, int) and _positive(first) and _positive(steps) and first < rows:
        return BatchSizes(rows, first, steps)
    return BatchSizes.of(rows, None)


def round_rows(rows: float, micro: int) -> int:
    """Rows of a step near `rows`, at least one micro-batch of `micro` rows, which several processes can share.

    A multiple of 8 from 32 rows on, of 4 from 16, of 2 from 8, and always of `micro`. Twice or half the best batch
    costs 0.4 % of the loss, so a change of an eighth costs nothing that can be measured.
    """
    unit = math.lcm(next((unit for unit in (8, 4, 2) if rows >= 4 * unit), 1), micro)
    return max(unit * round(rows / unit), unit)


def model_size(values: Values) -> ModelSize | None:
    """The numbers of parameters of a model of this package; None for parts of plugins, and for malformed values.

    values: dotted keys of `model`. tests/config/test_hyperparameters.py compares the result with the model itself.
    """
    known = {key.removeprefix("model."): value for key, value in values.items() if key.startswith("model.")}
    names = [*COUNTED]
    names += [f"rwkv.{name}_rank" for name in ("decay", "iclr", "value", "gate")]
    names += [f"mamba.{name}" for name in ("d_state", "head_dim", "expand", "groups", "conv_width")]
    names += [f"feed_forward.{name}" for name in ("hidden", "experts", "top_k")]
    if not all(_positive(known.get(name)) for name in names):
        return None
    mixers = _mixers(known)
    width, vocabulary = known["d_model"], known["vocab_size"]
    if mixers is None or known["attention.heads"] > width or known["mamba.head_dim"] > known["mamba.expand"] * width:
        return None
    gated, kind = known.get("feed_forward.activation") == "swiglu", known.get("feed_forward.kind")
    hidden = (3 if gated else 2) * width  # parameters for each hidden unit
    matrices = hidden * known["feed_forward.hidden"]
    share, experts = known["feed_forward.top_k"], known["feed_forward.experts"]
    stacked, layers = 0, known["layers"]
    norms = 2 * layers + 1 + bool(known.get("embedding_norm"))
    others = norms * width * (2 if known.get("norm") == "layernorm" else 1)
    others += sum(_mixer(mixer, known) for mixer in mixers)
    later = max(0, mixers.count("rwkv7") - 1)  # all but the first have a value residual
    others += later * (2 * width * known["rwkv.value_rank"] + width)
    stacked = 3 * mixers.count("routing_mamba") * experts * known["mamba.expand"] * width**2
    if kind == "moe":
        dense, shared, dense_hidden = (known.get(f"feed_forward.{name}") for name in MIXED)
        dense_layers = len(dense) if isinstance(dense, list) else 0
        mixtures = layers - dense_layers
        stacked += mixtures * experts * matrices
        others += mixtures * experts * width
        others += mixtures * hidden * shared if _positive(shared) else 0
        others += dense_layers * (hidden * dense_hidden if _positive(dense_hidden) else share * matrices)
    elif kind == "dense":
        others += layers * matrices
    elif kind == "channel_mix":
        others += layers * (2 * width * known["feed_forward.hidden"] + width)
    else:
        return None
    if known.get("depth") is not None or known.get("depth.capacity") is not None:
        part = known.get("depth.part", "feed_forward")
        skipping = layers if part != "mixer" else 0
        skipping += layers - ("rwkv7" in mixers) if part != "feed_forward" else 0
        others += skipping * width
    rows = vocabulary * (1 if known.get("tie_embeddings") else 2)
    if known.get("bigrams") is not None or known.get("bigrams.rows") is not None:
        table = known.get("bigrams.rows", 16_384)  # the schema's default
        rows += table if _positive(table) else 0
    return ModelSize(rows * width, stacked, stacked * share // experts, others)


def _mixers(known: Values) -> tuple[str, ...] | None:
    """The mixer of each layer; None for malformed keys and for mixers of plugins."""
    fraction, chosen, layers = known.get("attention_fraction"), known.get("mixer_layers"), known["layers"]
    if not isinstance(fraction, int | float) or not 0 <= fraction <= 1 or not isinstance(chosen, Mapping):
        return None
    if layers > MAX_LAYERS or not all(isinstance(of_mixer, list) for of_mixer in chosen.values()):
        return None
    placed = [layer for of_mixer in chosen.values() for layer in of_mixer]
    if any(not isinstance(layer, int) or not 0 <= layer < layers for layer in placed):
        return None
    mixers = layer_mixers(layers, fraction, str(known.get("schedule")), chosen)
    return mixers if {*mixers} <= {*MIXERS} else None


def _mixer(mixer: str, known: Values) -> int:
    """The parameters of one mixer, without experts, and without the value residual of RWKV-7."""
    width = known["d_model"]
    if mixer == "attention":
        heads = known["attention.heads"]
        norms = 2 * (width // heads) if known.get("attention.qk_norm") else 0
        return 2 * width**2 + 2 * width * known["attention.kv_heads"] * (width // heads) + norms
    if mixer == "rwkv7":
        ranks = sum(known[f"rwkv.{name}_rank"] for name in ("decay", "iclr", "gate"))
        # 13 vectors: six token-shift mixes, w0, a0, k_k, k_a, r_k, weight and bias of the group norm.
        return 4 * width**2 + 2 * width * ranks + 13 * width
    inner, states = known["mamba.expand"] * width, known["mamba.groups"] * known["mamba.d_state"]
    heads = inner // known["mamba.head_dim"]
    # Taps and biases of the convolution; A_log, D, dt_bias; the norm; the projections to B, C and the step.
    shared = (inner + 2 * states) * (known["mamba.conv_width"] + 1) + 3 * heads + inner + width * (2 * states + heads)
    if mixer == "mamba2":
        return shared + 3 * width * inner
    return shared + known["feed_forward.experts"] * width  # its gate, x and output projections are experts


def _positive(value: object, *kinds: type) -> bool:
    """Whether a value is a positive number of a size that arithmetic can use: an integer, or of `kinds` too."""
    is_number = isinstance(value, (int, *kinds)) and not isinstance(value, bool)
    return is_number and 0 < value < MAX_VALUE  # type: ignore[operator]


def _rounded(value: float) -> float:
    """Three digits: the same number on every machine, because the hash of a configuration contains it."""
    return float(f"{value:.2e}")
