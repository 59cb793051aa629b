"""What holds for any configuration and any input: round trips, and no error but ConfigError."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdrmix.config.schema import Config
from cdrmix.errors import ConfigError

TINY = (Path(__file__).parents[2] / "configs" / "base" / "tiny.yaml").read_text()
text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=12)
# strings that YAML could take for something else
tricky = st.sampled_from(["3e-4", "1_0", "yes", "null", "~", "010", "0x1", ".5", "true", "<<", "- a", "a: b", "#", " "])
positive = st.floats(min_value=1e-300, max_value=1e300)


@st.composite
def configs(draw: st.DrawFn) -> Config:
    """Configurations that differ where values are free."""
    string = text | tricky
    source: dict[str, Any] = draw(
        st.sampled_from([{"kind": "stdlib"}, {"kind": "jsonl"}, {"kind": "huggingface"}]).map(dict)
    )
    if source["kind"] == "jsonl":
        source |= {"paths": draw(st.lists(string, min_size=1, max_size=3)), "text_field": draw(string)}
    if source["kind"] == "huggingface":
        source |= {"name": draw(string), "config_name": draw(st.none() | string)}
    rwkv = dict.fromkeys(["decay_rank", "iclr_rank", "value_rank", "gate_rank"], 4)
    model = {
        "d_model": 64,
        "layers": draw(st.integers(1, 1024)),
        "attention_fraction": draw(st.floats(0, 1)),
        "attention": {"heads": 4, "kv_heads": 2, "qk_norm": draw(st.booleans())},
        "rwkv": rwkv,
        "feed_forward": {"hidden": 8},
    }
    train = {
        "steps": 5,
        "batch_rows": 1,
        "micro_batch_rows": 1,
        "learning_rate": draw(positive),
        "betas": (draw(st.floats(0, 1, exclude_max=True)), 0.5),
        "ema_decay": draw(st.none() | st.floats(0, 1, exclude_min=True, exclude_max=True)),
    }
    run = {"name": draw(string), "seed": draw(st.integers(0, (1 << 63) - 1))}
    data: dict[str, Any] = {"source": source}
    if draw(st.booleans()):
        names = draw(st.lists(string, min_size=1, max_size=3, unique=True))
        bounds = draw(st.dictionaries(string, st.floats(allow_nan=False, allow_infinity=False), max_size=2))
        domains = {name: {"source": source, "filters": {"bounds": bounds}} for name in names}
        weights = {name: draw(st.floats(0.1, 1e6)) for name in names}
        stages = [{"until": 0.5}, {"until": 1.0, "domains": weights, "lengths": [1.0, 2.0]}]
        data = {"source": None, "domains": domains, "curriculum": stages, "length_classes": [8]}
    return Config.model_validate({"run": run, "model": model, "train": train, "data": data})


def load_text(content: bytes, *overrides: str) -> Config:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "run.yaml"
        path.write_bytes(content)
        return Config.from_yaml(path, overrides)


@given(configs())
def test_dump_and_load_give_the_same(config: Config) -> None:
    again = load_text(config.to_yaml().encode())
    assert again == config
    assert again.hash() == config.hash()
    assert again.to_yaml() == config.to_yaml()


@pytest.mark.parametrize("name", ["\x85", "a \x85 b", "\u2028 a", "a\u2029"])
def test_a_line_break_of_unicode_stays_what_it_was(name: str) -> None:
    config = load_text(TINY.encode())
    renamed = config.model_copy(update={"run": config.run.model_copy(update={"name": name})})
    assert load_text(renamed.to_yaml().encode()).run.name == name


@given(st.integers(1, 10**6), positive)
def test_an_override_is_as_if_written(steps: int, rate: float) -> None:
    config = load_text(TINY.encode(), f"train.steps={steps + 1000}", f"train.learning_rate={rate!r}")
    assert (config.train.steps, config.train.learning_rate) == (steps + 1000, rate)


def says_only_config_error(content: bytes, *overrides: str) -> None:
    message = ""
    try:
        load_text(content, *overrides)
    except ConfigError as error:
        message = str(error)
    for line in message.splitlines()[1:]:  # splits at every kind of line end, not only ours
        assert line.startswith(("    ", "/", "command line (")), message
        assert line.isprintable(), message


@given(st.binary(max_size=60))
def test_any_bytes(content: bytes) -> None:
    says_only_config_error(content)


@given(text=st.text("{}[]:,-&*!|>'\"%@#?<~ \t\nabc01.", max_size=40))
def test_any_text_of_yaml_characters(text: str) -> None:
    says_only_config_error(text.encode())


@given(st.integers(0, len(TINY) - 1), st.integers(0, 12), st.text("{}[]:,-&*!#~ \n\tab01.", max_size=6))
def test_any_damage(start: int, length: int, inserted: str) -> None:
    says_only_config_error((TINY[:start] + inserted + TINY[start + length :]).encode())


@given(st.text(max_size=20), st.text(max_size=20))
def test_any_override(key: str, value: str) -> None:
    says_only_config_error(TINY.encode(), f"{key}={value}", key)


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
SECTIONS = [
    "run",
    "model",
    "model.attention",
    "model.rwkv",
    "model.mamba",
    "model.mixer_layers",
    "model.mixer_layers.mamba2",
    "model.size",
    "model.d_model",
    "data",
    "data.source",
    "data.source.kind",
    "data.domains",
    "data.domains.web",
    "data.domains.web.source",
    "data.domains.web.filters.bounds",
    "data.filters.bounds",
    "data.curriculum",
    "data.length_classes",
    "data.objectives.fim",
    "data.objectives",
    "data.objectives.cot",
    "data.objectives.cot.columns",
    "data.objectives.weights",
    "data.objectives.spans",
    "train",
    "train.steps",
    "train.betas",
    "logging",
    "reasoning",
    "reasoning.rl",
]


@given(st.sampled_from(SECTIONS), plain)
def test_any_value_of_any_section(key: str, value: object) -> None:
    says_only_config_error(TINY.encode(), f"{key}={json.dumps(value)}")
