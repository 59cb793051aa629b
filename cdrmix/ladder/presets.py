"""Presets of gates: quick, standard, full and production, each with its gates and their thresholds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cdrmix.errors import ConfigError
from cdrmix.ladder import gates, gates_results
from cdrmix.ladder.facts import Facts
from cdrmix.ladder.gates import Gate
from cdrmix.registry import nearest

EVAL = "cdrmix eval --model RUN"
CHOICES = f"{EVAL} --suite choices --json > FILE.json"
CODE = f"{EVAL} --suite code --samples 20 --temperature 0.8 --json > FILE.json"
REASONING = f"{EVAL} --suite reasoning --json > FILE.json"
TOOLS = f"{EVAL} --suite tools --json > FILE.json"
LEAK = f"{EVAL} --suite leak --json > FILE.json"
TOOL_SETS = ("simple accuracy", "multiple accuracy", "irrelevance accuracy")
LATENCY = f"{EVAL} --suite latency --json > FILE.json"


def _always(facts: Facts) -> bool:
    return True


def _of_tokens(facts: Facts) -> bool:
    """The loss of pairs is not one of tokens."""
    return not facts.settings["preferences"]


def _routed(facts: Facts) -> bool:
    return bool(facts.settings["routed"])


def _forecast(facts: Facts) -> bool:
    """Rungs below which too few are measured have no band, and cannot be asked for one."""
    return facts.forecast is not None and facts.forecast["band"]


@dataclass(frozen=True)
class Check:
    """A gate of a preset.

    group: the line of the table that it belongs to. reads: the parts of the facts that its verdict depends on. meaning:
    the threshold in words. applies: whether the gate has a meaning for such a run; otherwise it is left out. required:
    whether the run must pass it.
    """

    name: str
    group: str
    gate: Gate
    reads: tuple[str, ...]
    meaning: str
    applies: Callable[[Facts], bool] = _always
    required: Callable[[Facts], bool] = _always


def _finite() -> Check:
    meaning = "every recorded loss and gradient norm, and every weight of the newest checkpoint"
    return Check("finite", "finite", gates.finite, ("rows", "phases", "weights"), meaning)


def _loss(limit: float) -> Check:
    meaning = f"median of the last tenth of the recorded steps at most {limit:g} nats per token"
    return Check("loss", "convergence", gates.loss_at_most(limit), ("rows",), meaning)


def _band(applies: Callable[[Facts], bool] = _forecast) -> Check:
    """Required where there is a band. applies: by default a run without a band is not asked for one."""
    meaning = "held-out loss inside of the band of the forecast; below the band: HOLD"
    reads = ("forecast", "held_out")
    return Check("band", "convergence", gates_results.in_band, reads, meaning, applies, required=_forecast)


def _convergence(limit: float) -> list[Check]:
    """What a run must show of its convergence from STANDARD on."""
    perplexity = gates.perplexity_at_most(1000)
    return [
        _loss(limit),
        Check(
            "below-uniform",
            "convergence",
            gates.below_uniform,
            ("rows", "settings"),
            "median loss after the warm-up below ln(vocabulary)",
            _of_tokens,
        ),
        Check(
            "falling",
            "convergence",
            gates.falling,
            ("rows", "settings"),
            f"loss of the last tenth not above that of the tenth before by more than {gates.RISE:.0%}",
        ),
        Check(
            "perplexity",
            "convergence",
            perplexity,
            ("held_out",),
            "at most 1,000 per token on all held-out text",
            _of_tokens,
        ),
    ]


def _stability() -> list[Check]:
    norm = gates.gradient_norm_at_most(100)
    reads = ("rows", "settings")
    meaning = f"at most 1 of 1,000 recorded steps above mean + {gates.SIGMAS:g} sd of the {gates.WINDOW} before"
    return [
        Check("spikes", "stability", gates.spikes, reads, meaning),
        Check("gradient-norm", "stability", norm, reads, "at most 100 after the warm-up"),
        Check("norm-growth", "stability", gates.norm_growth, reads, "last quarter at most twice the second quarter"),
    ]


def _routers() -> list[Check]:
    last = f"in the last {gates.ROUTER_ROWS} recorded steps"
    entropy, overflow = gates.router_entropy_at_least(0.833), gates.router_overflow_below(0.05)
    return [
        Check("router-entropy", "routers", entropy, ("rows",), f"normalised, at least 0.833 {last}", _routed),
        Check("router-overflow", "routers", overflow, ("rows",), f"below 5 % of the routes {last}", _routed),
        Check("idle-experts", "routers", gates.idle_experts, ("rows",), f"none {last}", _routed),
    ]


def _memory() -> Check:
    meaning = "peak of the training below 90 % of the machine's"
    return Check("memory", "memory", gates.memory_share_below(0.90), ("rows", "machine"), meaning)


def _again() -> list[Check]:
    determinism = gates_results.same_again("determinism", "the first steps of the run")
    resume = gates_results.same_again("resume", "steps from a checkpoint")
    throughput = gates.throughput_at_least(0.90)
    return [
        Check(
            "throughput",
            "throughput",
            throughput,
            ("rows", "plan"),
            "at least 0.9 of the plan; HOLD where the speed varies by more than 10 %",
        ),
        Check("determinism", "determinism", determinism, ("determinism",), "20 steps again: the same bits"),
        Check("resume", "resume", resume, ("resume",), "20 steps from a checkpoint: the same bits"),
        Check(
            "export",
            "export",
            gates_results.export_agrees,
            ("export",),
            "the logits of the checkpoint, and the checksums of SHA256SUMS",
        ),
    ]


def _tasks() -> Check:
    tasks = gates_results.above_chance(0.10, CHOICES)
    meaning = "mean accuracy of all sets of suite choices at least 0.10 above chance, without BoolQ"
    return Check("tasks", "tasks", tasks, ("results", "foreign_results"), meaning)


def _share(name: str, group: str, suite: str, measure: str, limit: float, command: str) -> Check:
    gate = gates_results.suite_share(suite, measure, limit, command, at_least=True)
    return Check(name, group, gate, ("results", "foreign_results"), f"{suite}: {measure} at least {limit:g}")


def _production() -> list[Check]:
    results = ("results", "foreign_results")
    tools = gates_results.mean_at_least("tools", TOOL_SETS, 0.85, TOOLS)
    leak = gates_results.suite_share("leak", "verbatim_train", 0.01, LEAK, at_least=False)
    latency = gates_results.latency_at_most(5.0, LATENCY)
    memory = gates_results.memory_at_most(8.0, LATENCY)
    return [
        _share("gsm8k", "tasks", "reasoning", "gsm8k exact_match", 0.50, REASONING),
        Check("tools", "tasks", tools, results, f"tools: mean of {', '.join(TOOL_SETS)} at least 0.85"),
        _share("compile-rate", "tasks", "code", "compile_rate", 0.70, CODE),
        _share("pass@1", "tasks", "code", "humaneval pass@1", 0.40, CODE),
        _share("pass@5", "tasks", "code", "humaneval pass@5", 0.60, CODE),
        _share("pass@10", "tasks", "code", "humaneval pass@10", 0.70, CODE),
        Check("leak", "leak", leak, results, "leak: verbatim_train at most 0.01"),
        Check("latency-p99", "p99", latency, results, "latency: 99 % quantile of a request at most 5 s"),
        Check("generation-memory", "memory", memory, results, "latency: peak_memory_mib at most 8 GB"),
    ]


def _quick() -> list[Check]:
    return [_finite(), _loss(100), _band()]


def _standard() -> list[Check]:
    return [_finite(), *_convergence(10), _band(), *_stability(), *_routers(), _memory()]


def _full() -> list[Check]:
    return [_finite(), *_convergence(5), _band(_always), *_stability(), *_routers(), _memory(), *_again(), _tasks()]


def _for_production() -> list[Check]:
    return [
        _finite(),
        *_convergence(3),
        _band(),
        *_stability(),
        *_routers(),
        _memory(),
        *_again(),
        *_production(),
    ]


PRESETS = {"quick": _quick, "standard": _standard, "full": _full, "production": _for_production}
TRAINS_AGAIN = ("full", "production")  # presets with the gates determinism and resume


def preset(name: str) -> list[Check]:
    """The gates of a preset. Raises ConfigError for an unknown name, with the nearest and all."""
    if name not in PRESETS:
        close = nearest(name, PRESETS)
        hint = f"; did you mean {close!r}?" if close else "."
        raise ConfigError(f"there is no preset {name!r}{hint} The presets are {', '.join(PRESETS)}.")
    return PRESETS[name]()
