"""Every division of a parameter has the values of the whole one, and tiles are drawn apart."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest

pytest.importorskip("pydantic", reason="needs pydantic, which is not installed")
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from cdrmix.config.schema_layers import Bigrams
from cdrmix.config.schema_model import Model
from cdrmix.config.schema_prediction import Prediction
from cdrmix.model import initial_values
from cdrmix.model.initial_values import (
    InitialValues,
    drawn,
    fill,
    narrowed,
    normal,
    orthogonal,
    uniform,
    without_values,
)
from cdrmix.model.language_model import LanguageModel
from cdrmix.model.mixers import MIXERS
from cdrmix.model.pipeline import Stage, is_elsewhere
from cdrmix.model.tensor_parallel import Cut

MakeModel = Callable[..., LanguageModel]


class One(nn.Module):
    """A module with one parameter, which is drawn later."""

    def __init__(self, draw: initial_values.Draw, shape: tuple[int, ...], whole: bool = False) -> None:
        super().__init__()
        with without_values():
            self.weight = drawn(draw, *shape, whole=whole)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(initial_values, "TILE", (4, 3))


@given(data=st.data())
def test_a_share_has_the_values_of_the_whole(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 4))
    shape = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=3))
    dim = data.draw(st.integers(0, len(shape) - 1))
    segments = data.draw(st.lists(st.integers(1, 3).map(lambda n: n * size), min_size=1, max_size=3))
    shape[dim] = sum(segments)
    cut, rank = Cut(dim, tuple(segments)), data.draw(st.integers(0, size - 1))
    draw, whole = data.draw(st.sampled_from([(normal(0.5), False), (uniform(-1, 2), False), (normal(1), True)]))
    made, mine = One(draw, tuple(shape), whole), One(draw, tuple(shape), whole)
    mine.weight = narrowed(mine.weight, dim, cut.indices(shape[dim], rank, size))
    assert mine.weight.is_meta
    fill(made, "part", 3)
    fill(mine, "part", 3)
    assert made.weight.shape == torch.Size(shape)
    assert torch.equal(mine.weight, cut.share(made.weight, rank, size))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_are_those_of_philox_by_name_and_tile(dtype: torch.dtype) -> None:
    """The published algorithm, by numpy, with the key and the counter of the module's first sentences."""
    values = InitialValues(torch.Size([2, 3, 5]), uniform(0, 1), False).values(77, dtype).view(6, 5).numpy()
    for down, across in itertools.product(range(2), range(2)):
        stream = np.random.Generator(np.random.Philox(key=77, counter=[0, 0, down, across]))
        tile = values[4 * down : 4 * down + 4, 3 * across : 3 * across + 3]
        np.testing.assert_array_equal(tile, stream.random(tile.shape, dtype=values.dtype))


def test_names_and_seeds_give_other_values() -> None:
    def weight(name: str, seed: int) -> torch.Tensor:
        part = One(normal(1.0), (40, 6))
        fill(part, name, seed)
        return part.weight.detach()

    first = weight("a", 1)
    assert torch.equal(first, weight("a", 1))
    assert not torch.isclose(first, weight("b", 1)).any()
    assert not torch.isclose(first, weight("a", 2)).any()
    tiles = [tile for rows in first.split(4) for tile in rows.split(3, 1)]
    assert not any(torch.isclose(tiles[0], tile).any() for tile in tiles[1:])


def test_orthogonal_values() -> None:
    part = One(orthogonal(0.5), (6, 10), whole=True)
    fill(part, "part", 0)
    torch.testing.assert_close(part.weight @ part.weight.T, 0.25 * torch.eye(6), atol=1e-6, rtol=0)


def test_alone_a_parameter_follows_the_global_generator() -> None:
    torch.manual_seed(5)
    first, second = drawn(normal(1.0), 3, 4), drawn(normal(1.0), 3, 4)
    torch.manual_seed(5)
    assert torch.equal(first, drawn(normal(1.0), 3, 4))
    assert not torch.equal(first, second)


def test_on_the_device_meta_there_are_no_values() -> None:
    with torch.device("meta"):
        part = One(normal(1.0), (3, 4))
        fill(part, "part", 0)
        assert part.weight.is_meta
        assert drawn(normal(1.0), 3, 4).is_meta


def test_fake_tensors_have_no_values(make_model: MakeModel) -> None:
    config = make_model().config
    with FakeTensorMode():
        assert isinstance(drawn(normal(1.0), 3, 4), FakeTensor)
        model = LanguageModel(config)
        assert {(type(parameter), parameter.device) for parameter in model.parameters()} == {
            (FakeTensor, torch.device("cpu"))
        }


def test_stages_of_a_pipeline_draw_their_parts_alone(make_model: MakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_model(bigrams=Bigrams(rows=50), tie_embeddings=False).config
    elements: list[int] = []
    values = InitialValues.values

    def counted(self: InitialValues, key: int, dtype: torch.dtype) -> torch.Tensor:
        made = values(self, key, dtype)
        elements.append(made.numel())
        return made

    monkeypatch.setattr(InitialValues, "values", counted)

    def make(stage: Stage | None = None) -> LanguageModel:
        torch.manual_seed(7)
        elements.clear()
        return LanguageModel(config, stage=stage)

    whole = dict(make().named_parameters())
    everything, drawn_by_stages = sum(elements), 0
    for rank in range(2):
        for name, parameter in make(Stage(rank, 2)).named_parameters():
            assert is_elsewhere(parameter) or torch.equal(parameter, whole[name]), name
        drawn_by_stages += sum(elements)
    assert drawn_by_stages == everything


def test_other_parts_do_not_change_the_rest(make_model: MakeModel) -> None:
    plain = make_model().config
    more = make_model(bigrams=Bigrams(rows=50), prediction=Prediction(tokens=2, kind="chain")).config
    torch.manual_seed(2)
    first = LanguageModel(plain).state_dict()
    torch.manual_seed(2)
    second = LanguageModel(more).state_dict()
    assert second.keys() > first.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_parameter_without_values_can_be_rebuilt_from_its_attributes(make_model: MakeModel) -> None:
    """As accelerate does when it makes a model without memory, and transformers 4.57 with it."""
    accelerate = pytest.importorskip("accelerate")
    config = make_model().config
    with accelerate.init_empty_weights():
        model = LanguageModel(config)
    assert all(parameter.is_meta for parameter in model.parameters())


def test_layers_of_plugins_have_their_values_at_once(make_model: MakeModel) -> None:
    """Their constructors may change what they have made."""

    @MIXERS("zeroed")
    class Zeroed(MIXERS["rwkv7"]):  # type: ignore[misc]
        def __init__(self, config: Model, layer: int) -> None:
            super().__init__(config, layer)
            nn.init.zeros_(self.key.weight)
            self.value.weight.requires_grad_(False)

    try:
        config = make_model().config
        model = LanguageModel(config.model_copy(update={"mixer_layers": {"zeroed": [0]}}))
        assert config.mixers[0] != "zeroed"
        mixer = model.blocks[0].mixer
        assert isinstance(mixer, Zeroed)
        assert not mixer.key.weight.any()
        assert not mixer.value.weight.requires_grad
        assert not any(parameter.is_meta for parameter in model.parameters())
    finally:
        MIXERS._entries.pop("zeroed")
