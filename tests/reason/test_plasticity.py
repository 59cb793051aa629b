"""Phase B1: rows and chunks give equal results, losses add up, only the stated parameters are trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cdrmix.config.schema import Config
from cdrmix.data.tasks import IGNORED
from cdrmix.model.cache import fast_weights, select, with_fast_weights
from cdrmix.model.fast_weights import FastWeightOptions
from cdrmix.reason.episodes import TokenSource
from cdrmix.reason.experiments import state_tracking
from cdrmix.reason.experiments.base import small_model, tokenizer_of
from cdrmix.reason.model import StageBModel
from cdrmix.reason.plasticity import phase as plasticity
from cdrmix.reason.plasticity.phase import PlasticityPhase, answers, read, rows_of
from cdrmix.reason.sources import source_of

ABLATIONS = Path(__file__).parents[2] / "configs" / "ablations"


def cell(*overrides: str) -> Config:
    return Config.from_yaml(ABLATIONS / "delta-recall.yaml", ["model.d_model=32", *overrides])


def source_for(config: Config) -> TokenSource:
    assert config.reasoning is not None
    source = source_of(config.reasoning.plasticity, config.reasoning.chunk)
    assert isinstance(source, TokenSource)
    return source


def texts(*overrides: str) -> Config:
    return Config.from_yaml(
        ABLATIONS / "babilong-carried.yaml", ["model.d_model=32", "model.vocab_size=600", *overrides]
    )


def stirred(config: Config) -> StageBModel:
    """A float64 model whose adapters have an effect (they have none at the start of training)."""
    model = small_model(config, 1).double()
    with torch.no_grad():
        generator = torch.Generator().manual_seed(2)
        for name, parameter in model.named_parameters():
            if name.endswith((".up", ".gate", ".output.weight")):
                parameter.normal_(0, 0.3, generator=generator)
    return model


@pytest.mark.parametrize("carry", ["fast", "all"])
@pytest.mark.parametrize("fraction", [0.0, 0.5])
def test_reading_by_chunks_is_training_on_rows(carry: str, fraction: float) -> None:
    """float64; two orders of sums over a few hundred terms of size about 1: 1e-9 is a thousand roundings and more."""
    config = cell(f"model.attention_fraction={fraction}", "reasoning.plastic_lora.attention=[output]")
    source, model = source_for(config), stirred(config)
    made = source.batch(range(3), 5)
    row = rows_of(source, made, carry, torch.device("cpu"))
    probe = source.probe(made)
    assert torch.equal(row.ids_BT[:, -16:], probe.ids_BT)
    assert torch.equal(row.targets_BT[:, -16:], probe.targets_BT)
    assert (row.targets_BT[:, :-16] == IGNORED).all()
    with torch.no_grad():
        whole = model.language_model(
            row.ids_BT, cu_seqlens=row.cu_seqlens, fast_weights=FastWeightOptions(row.episodes)
        ).hidden_BTD[:, -16:]
        ((_, state),) = read(model.language_model, made.chunks_BNC, carry, source.pad)
        parts = model.language_model(probe.ids_BT, cache=state).hidden_BTD
        emptied = with_fast_weights(state, plasticity.zeroed)
        without = model.language_model(probe.ids_BT, cache=emptied).hidden_BTD
    assert (whole - parts).abs().max() < 1e-9
    assert (whole - without).abs().max() > 1e-3, "the fast weights have no effect: nothing was tested"


@pytest.mark.parametrize("carry", ["fast", "all"])
def test_documents_of_different_lengths_are_read_as_alone(carry: str) -> None:
    config = cell("model.attention_fraction=0.5", "reasoning.plastic_lora.attention=[output]")
    source, model = source_for(config), stirred(config).language_model
    chunks = source.batch(range(4), 5).chunks_BNC
    lengths = [5, 2, 5, 3]
    for row, length in enumerate(lengths):
        chunks[row, length:] = source.pad
    probe = source.probe(source.batch(range(4), 5)).ids_BT
    together = list(read(model, chunks, carry, source.pad))
    assert [rows for rows, _ in together] == [[1], [3], [0, 2]]
    for rows, state in together:
        with torch.no_grad():
            found = model(probe[rows], cache=state).hidden_BTD
        for row, hidden in zip(rows, found, strict=True):
            ((_, alone),) = read(model, chunks[[row], : lengths[row]], carry, source.pad)
            with torch.no_grad():
                wanted = model(probe[[row]], cache=alone).hidden_BTD[0]
            assert (hidden - wanted).abs().max() < 1e-9  # float64, as above


def test_nothing_but_fast_weights_goes_on() -> None:
    config = cell()
    source, model = source_for(config), stirred(config)
    made = source.batch(range(2), 4)
    other = made.chunks_BNC.clone()
    other[:, :3] = source.batch(range(5, 7), 4).chunks_BNC[:, :3]
    probe = source.probe(made).ids_BT

    def asked(chunks: torch.Tensor) -> torch.Tensor:
        ((_, state),) = read(model.language_model, chunks, "fast", source.pad)
        with torch.no_grad():
            return model.language_model(probe, cache=with_fast_weights(state, plasticity.zeroed)).hidden_BTD

    # the last token of the last chunk leaves a key for the next; what came before leaves nothing
    assert torch.equal(asked(made.chunks_BNC), asked(other))


def test_memory_does_not_grow_with_the_chunks() -> None:
    config = cell()
    source, model = source_for(config), small_model(config, 1)

    def floats(part: object) -> int:
        if isinstance(part, torch.Tensor):
            return part.numel()
        return sum(map(floats, part)) if isinstance(part, tuple) else 0

    few, many = (
        floats(state)
        for number in (2, 40)
        for _, state in read(model.language_model, source.batch([0], number).chunks_BNC, "all", source.pad)
    )
    assert few == many > 0


def gradients(
    model: StageBModel, phase: PlasticityPhase, processes: int
) -> tuple[dict[str, torch.Tensor], list[float]]:
    model.zero_grad()
    sums = torch.zeros(len(phase.measures))
    for rank in range(processes):
        for loss in phase.losses(model, 3, rank, processes):
            outcome = model(loss)
            outcome.total.backward()
            sums += outcome.sums
    found = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    return found, sums.tolist()


def test_micro_batches_and_processes_sum_up() -> None:
    """float64; sums of 12 rows in another order."""
    config = cell("reasoning.phases.plasticity.episodes=12", "reasoning.phases.plasticity.micro_batch=12")
    split = cell("reasoning.phases.plasticity.episodes=12", "reasoning.phases.plasticity.micro_batch=3")
    source, model = source_for(config), stirred(config)
    whole, sums = gradients(model, PlasticityPhase(config, source), 1)
    parts, their_sums = gradients(model, PlasticityPhase(split, source), 2)
    assert whole.keys() == parts.keys()
    for name, gradient in whole.items():
        assert (gradient - parts[name]).abs().max() < 1e-10 * (1 + gradient.abs().max())
    assert sums == pytest.approx(their_sums, rel=1e-5)  # kept in float32
    assert sums[2] == 12 * 8


def test_own_trains_the_adapters_and_all_the_language_model() -> None:
    source = source_for(cell())
    own = PlasticityPhase(cell("reasoning.phases.plasticity.train=own"), source)
    every = PlasticityPhase(cell(), source)
    for name, _ in small_model(cell(), 1).named_parameters():
        assert every.trains(name)
        assert own.trains(name) == (".plastic." in name)
    assert not every.trains("controller.accept.weight")


def test_training_rows_have_two_chunks_to_the_configured_number() -> None:
    phase = PlasticityPhase(cell(), source_for(cell()))
    assert {phase.chunks(step) for step in range(100)} == {2, 3, 4}
    many = cell("reasoning.plasticity.difficulty={pairs: 20}")
    phase = PlasticityPhase(many, source_for(many))
    assert {phase.chunks(step) for step in range(50)} == {3, 4}
    growing = cell("reasoning.phases.plasticity.growth_steps=60")
    phase = PlasticityPhase(growing, source_for(growing))
    for steps, chunks in ((range(30), {2}), (range(30, 60), {2, 3}), (range(60, 160), {2, 3, 4})):
        assert {phase.chunks(step) for step in steps} == chunks


def test_an_answer_of_text_counts_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first token of the first answer of each batch is made wrong; all others are right."""
    config = texts()
    assert config.reasoning is not None
    source = source_of(config.reasoning.plasticity, 64, tokenizer_of(config, config.reasoning.plasticity))
    model = small_model(config, 1).language_model
    batches = []

    def almost_right(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        asked_BP = answers(*arguments)[1]
        right_BP = asked_BP.clone()
        right_BP[0, int(asked_BP[0].nonzero()[0])] = False
        batches.append(int(asked_BP.sum()))
        return right_BP, asked_BP

    monkeypatch.setattr(plasticity, "answers", almost_right)
    found = plasticity.accuracy(model, source, "all", 4, range(5))
    assert found["exact"] == 1 - len(batches) / 5
    assert found["accuracy"] == 1 - len(batches) / sum(batches)
    assert sum(batches) > 5, "an answer has its end beside its words"


def test_every_question_is_asked_of_its_own_document(monkeypatch: pytest.MonkeyPatch) -> None:
    config = texts()
    assert config.reasoning is not None
    source = source_of(config.reasoning.plasticity, 64, tokenizer_of(config, config.reasoning.plasticity))
    model = stirred(config).language_model
    asked: list[int] = []

    def checked(model: Any, source: Any, episodes: Any, cache: Any) -> tuple[torch.Tensor, torch.Tensor]:
        ids_BT = source.probe(episodes).ids_BT
        for row in range(len(ids_BT)):
            ((_, alone),) = read(model, episodes.rows([row]).chunks_BNC, "all", source.pad)
            own, other = (
                model(ids_BT[[row]], cache=state).hidden_BTD for state in (alone, select(cache, torch.tensor([row])))
            )
            assert (own - other).abs().max() < 1e-9  # float64, as above
        asked.append(len(ids_BT))
        return answers(model, source, episodes, cache)

    monkeypatch.setattr(plasticity, "answers", checked)
    plasticity.accuracy(model, source, "all", 16, range(6))
    assert sum(asked) == 6
    assert len(asked) > 1, "all documents have the same length: nothing was tested"


def test_a_document_that_ends_alone_is_not_swapped_with_itself() -> None:
    config = texts("reasoning.plastic_lora={enabled: true, rwkv7: [output]}")
    assert config.reasoning is not None
    source = source_of(config.reasoning.plasticity, 64, tokenizer_of(config, config.reasoning.plasticity))
    model = stirred(config).language_model
    # The lengths depend on the text, which is of the installed Python.
    lengths = [rows for rows, _ in read(model, source.batch(range(6), 16).chunks_BNC, "fast", source.pad)]
    one_length, another, *_ = sorted(lengths, key=len, reverse=True)
    read_rows: list[int] = []

    def unchanged(a: torch.Tensor) -> torch.Tensor:
        read_rows.append(len(a))
        return a

    changes = {"swapped": plasticity.swapped, "unchanged": unchanged}
    measured = plasticity.accuracy(model, source, "fast", 16, [*one_length, another[0]], changes)
    assert {*read_rows} == {len(one_length), 1}
    assert measured["unchanged"] == measured["accuracy"]
    assert "swapped" in measured
    assert plasticity.accuracy(model, source, "fast", 16, another[:1], changes).keys() == {
        "accuracy",
        "unchanged",
        "exact",
    }


def test_swapping_takes_another_episodes_weights() -> None:
    config = cell()
    source, model = source_for(config), stirred(config)
    made = source.batch(range(4), 3)
    ((_, state),) = read(model.language_model, made.chunks_BNC, "fast", source.pad)
    for before, after in zip(
        fast_weights(state), fast_weights(with_fast_weights(state, plasticity.swapped)), strict=True
    ):
        assert torch.equal(after, before[[3, 0, 1, 2]])
    right, asked = answers(model.language_model, source, made, state)
    assert asked.sum() == 4 * 8
    assert not (right & ~asked).any()


def test_words_are_products() -> None:
    """Parity by counting; S3 by composing the permutations themselves."""
    ids, values = state_tracking.Words("parity", 1).batch(range(4), 20)
    assert torch.equal(ids[:, 1:].cumsum(1) % 2, values)
    assert (ids[:, 0] == 2).all()
    elements = state_tracking.elements_of(3)
    ids, values = state_tracking.Words("s3", 1).batch(range(4), 20)
    for word, told in zip(ids[:, 1:].tolist(), values.tolist(), strict=True):
        standing = [0, 1, 2]
        for element, value in zip(word, told, strict=True):
            standing = [standing[position] for position in elements[element]]
            assert tuple(standing) == elements[value]
