"""The compiled decoding step: the ordinary pass is its oracle, in float64; rows are independent; nothing is shared."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("numba", reason="needs numba, which is not installed")

from cdrmix.config.schema_layers import Bigrams, Depth, FeedForward
from cdrmix.config.schema_model import Attention, Model, Rwkv
from cdrmix.config.schema_prediction import Prediction
from cdrmix.config.schema_reasoning import Controller as Settings
from cdrmix.config.schema_reasoning import Memory, PlasticLora, Reasoning, Rl
from cdrmix.errors import NonFiniteLogitsError
from cdrmix.model import compiled
from cdrmix.model.block import BlockCache
from cdrmix.model.cache import flattened, plastic_only, select
from cdrmix.model.decoding import Prefix, Rows, advance, prefill, prefill_rows, repeat
from cdrmix.model.language_model import LanguageModel
from cdrmix.model.layers import AddNorm
from cdrmix.reason.controller.controller import Controller, always
from cdrmix.reason.rl.rollout import decode, generate

CHUNK = 5
EVERY = {
    "attention": ["query", "key", "value", "output"],
    "rwkv7": ["receptance", "key", "value", "output"],
}


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def make(
    *,
    width: int = 32,
    layers: int = 4,
    attention_fraction: float = 0.5,
    lora: dict[str, object] | None = None,
    branches: int = 1,
    **options: object,
) -> LanguageModel:
    """A float32 model whose every parameter is moved off its initial value, so that all of them matter."""
    config = {
        "vocab_size": 27,
        "d_model": width,
        "layers": layers,
        "attention_fraction": attention_fraction,
        "attention": Attention(heads=2, kv_heads=1, rope_theta=20.0),
        "rwkv": Rwkv(head_size=16, decay_rank=3, iclr_rank=5, value_rank=2, gate_rank=7),
        "feed_forward": FeedForward(hidden=13, experts=4),
    }
    reasoning = None
    if lora is not None:
        reasoning = Reasoning(
            chunk=CHUNK,
            plastic_lora=PlasticLora.model_validate(
                {"rank": 3, "key_width": 8, "alpha": 0.5, "decay": 0.9, "clamp": 1.0, **EVERY, **lora}
            ),
            controller=Settings(step_budget=8, max_branches=branches),
            memory=Memory(dim=8, top_k=2, max_tokens=100),
            rl=Rl(horizon=32, latency_weight=0.01, stability_weight=0.1),
        )
    torch.manual_seed(1)
    model = LanguageModel(Model.model_validate(config | options), reasoning=reasoning).eval()
    for tensor in (*model.parameters(), *model.buffers()):
        tensor += 0.1 * torch.randn_like(tensor)
    return model


def random_ids(rows: int, length: int, seed: int = 2) -> Tensor:
    return torch.randint(27, (rows, length), generator=torch.Generator().manual_seed(seed))


def states_of(prefix: Prefix) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in flattened(prefix.cache).items()} | {
        "logits": prefix.logits_BV.clone()
    }


def assert_same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def walked(model: LanguageModel, ids_BT: Tensor, first: int) -> list[dict[str, Tensor]]:
    """Logits and states after a prefill of the first tokens, and after each of the others."""
    prefix = prefill(model, ids_BT[:, :first])
    found = [states_of(prefix)]
    for t in range(first, ids_BT.shape[1]):
        prefix = advance(model, ids_BT[:, t], prefix.cache)
        found.append(states_of(prefix))
    return found


def assert_close(model: LanguageModel, ids_BT: Tensor, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled step errs as float32 does: at most 8 times as much as the ordinary pass, against float64.

    Both sum a few dozen terms a product, the one in the order of the terms, the other in blocks; the ratio of the
    largest errors of two such orders varies by a small factor. The floor is 32 roundings of the largest number.
    """
    assert compiled.serves(model)
    mine = walked(model, ids_BT, first)
    monkeypatch.setenv("CDRMIX_BACKEND", "reference")
    assert not compiled.serves(model)
    ordinary = walked(model, ids_BT, first)
    monkeypatch.delenv("CDRMIX_BACKEND")
    truth = walked(model.double(), ids_BT, first)
    for found, usual, wanted in zip(mine, ordinary, truth, strict=True):
        assert found.keys() == wanted.keys()
        for name, tensor in wanted.items():
            error, other = ((x[name].double() - tensor.double()).abs().max().item() for x in (found, usual))
            floor = 32 * torch.finfo(torch.float32).eps * max(1.0, tensor.abs().max().item())
            assert error <= 8 * other + floor, (name, error, other)


@given(
    data=st.data(),
    rows=st.integers(1, 9),
    first=st.integers(1, 12),
    more=st.integers(1, 6),
    kind=st.sampled_from(["moe", "dense", "channel_mix"]),
    activation=st.sampled_from(["relu2", "swiglu"]),
    norm=st.sampled_from(["layernorm", "rmsnorm"]),
    fraction=st.sampled_from([0.0, 0.25, 0.5, 1.0]),
)
def test_it_computes_what_the_ordinary_pass_computes(
    data: st.DataObject, rows: int, first: int, more: int, kind: str, activation: str, norm: str, fraction: float
) -> None:
    heads = data.draw(st.sampled_from([1, 2, 4]), "heads")
    kv_heads = data.draw(st.sampled_from([each for each in (1, 2, 4) if heads % each == 0]), "kv_heads")
    lora = None
    if data.draw(st.booleans(), "adapters"):
        lora = {
            "rank": data.draw(st.sampled_from([1, 3, 8]), "rank"),
            "key_width": data.draw(st.sampled_from([8, 16]), "key_width"),
            "rule": data.draw(st.sampled_from(["delta", "hebb", "oja"]), "rule"),
            "gated": data.draw(st.booleans(), "gated"),
            "rwkv7": data.draw(st.sampled_from([["output"], EVERY["rwkv7"]]), "rwkv7"),
        }
    model = make(
        width=data.draw(st.sampled_from([32, 96]), "width"),
        layers=data.draw(st.sampled_from([2, 4]), "layers"),
        attention_fraction=fraction,
        lora=lora,
        norm=norm,
        tie_embeddings=data.draw(st.booleans(), "tied"),
        embedding_norm=data.draw(st.booleans(), "embedding_norm"),
        attention=Attention(
            heads=heads,
            kv_heads=kv_heads,
            rope=data.draw(st.booleans(), "rope"),
            qk_norm=data.draw(st.booleans(), "qk_norm"),
        ),
        rwkv=Rwkv(
            head_size=data.draw(st.sampled_from([16, 32]), "head_size"),
            allow_neg_eigval=data.draw(st.booleans(), "neg"),
            decay_rank=3,
            iclr_rank=5,
            value_rank=2,
            gate_rank=7,
        ),
        feed_forward=FeedForward(
            kind=kind,
            activation=activation,
            hidden=data.draw(st.sampled_from([5, 13]), "hidden"),
            experts=4,
            top_k=data.draw(st.integers(1, 4), "top_k"),
            bias_update_rate=data.draw(st.sampled_from([0.0, 0.1]), "bias"),
            dense_layers=[0] if kind == "moe" else [],
            shared_hidden=data.draw(st.sampled_from([None, 7]), "shared") if kind == "moe" else None,
        ),
    )
    with pytest.MonkeyPatch.context() as monkeypatch:
        assert_close(model, random_ids(rows, first + more), first, monkeypatch)


def test_a_long_prompt_is_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """More tokens than lanes, over many chunks of the fast weights."""
    assert_close(make(lora={}), random_ids(2, 150), 147, monkeypatch)


@pytest.mark.parametrize("kind", ["moe", "channel_mix"])
def test_tokens_at_once_have_the_bits_of_tokens_one_by_one(kind: str) -> None:
    model = make(lora={}, feed_forward=FeedForward(kind=kind, hidden=13, experts=4))
    ids = random_ids(3, 2 * CHUNK + 3)
    at_once, one_by_one = walked(model, ids, ids.shape[1])[-1], walked(model, ids, 1)[-1]
    assert_same_bits(at_once, one_by_one)


@pytest.mark.parametrize("rows", [2, 7, 9, 40])
@pytest.mark.parametrize("length", [1, 6, 130])
def test_a_row_has_the_same_bits_alone(rows: int, length: int) -> None:
    model, ids = make(lora={}), random_ids(rows, length)
    together = advance(model, ids[:, 0], prefill(model, ids).cache)
    for row in (0, rows // 2, rows - 1):
        alone = advance(model, ids[row : row + 1, 0], prefill(model, ids[row : row + 1]).cache)
        chosen = select(together.cache, torch.tensor([row]))
        assert_same_bits(states_of(alone), states_of(Prefix(together.logits_BV[row : row + 1], chosen)))


def test_unwritten_memory_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = make(lora={}), random_ids(5, 9)
    wanted = walked(model, ids, 6)

    def poisoned(empty: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
        def fill(*arguments: object, **options: object) -> np.ndarray:
            made = empty(*arguments, **options)
            made.fill(np.nan if made.dtype.kind == "f" else 0)
            return made

        return fill

    monkeypatch.setattr(np, "empty", poisoned(np.empty))
    for one, other in zip(wanted, walked(model, ids, 6), strict=True):
        assert_same_bits(one, other)


def test_a_state_that_is_held_elsewhere_does_not_change() -> None:
    """Reading on by every way, over ends of chunks, from one state: it stays as it is, and so do those before it."""
    model, ids = make(lora={}), random_ids(3, 4 * CHUNK)
    first = prefill(model, ids[:, :3])
    second = advance(model, ids[:, 3], first.cache)
    repeated = repeat(second, 2)
    before = [states_of(each) for each in (first, second, repeated)]
    wanted = states_of(prefill(model, ids, second.cache))
    own = advance(model, ids[:, 0], second.cache)
    for t in range(1, 2 * CHUNK):
        own = advance(model, ids[:, t], own.cache, own=True)
    rows = Rows(model, repeated, 2 * CHUNK)
    for t in range(2 * CHUNK):
        rows.read(ids.repeat_interleave(2, 0)[:, t])
    decode(model, second, 2 * CHUNK, temperature=1.0, generator=torch.Generator().manual_seed(1))
    for prefix in (first, repeated):  # rows leave before and after the end of a chunk
        rows = Rows(model, prefix, 1)
        rows.drop([0], len(prefix.logits_BV))
        rows.read(ids.repeat_interleave(2, 0)[1 : len(prefix.logits_BV), 0])
    for old, each in zip(before, (first, second, repeated), strict=True):
        assert_same_bits(old, states_of(each))
    assert_same_bits(wanted, states_of(prefill(model, ids, second.cache)))


def test_own_memory_changes_no_bit() -> None:
    model, ids = make(lora={}), random_ids(4, 3 * CHUNK)
    one = other = prefill(model, ids[:, :2])
    for t in range(2, ids.shape[1]):
        one = advance(model, ids[:, t], one.cache)
        other = advance(model, ids[:, t], other.cache, own=t > 2)
        assert_same_bits(states_of(one), states_of(other))


def test_rows_may_leave() -> None:
    """The logits of a row are those of its own pass, whichever rows leave before."""
    model, ids = make(lora={}), random_ids(7, 12)
    prefix = prefill(model, ids[:, :2])
    rows, going = Rows(model, prefix, 10), list(range(7))
    for t, ended in enumerate([[], [0, 6], [], [1], [0, 1, 2]], start=2):
        if ended:
            going = [going[row] for row in rows.drop(ended, len(going))]
        logits = rows.read(ids[going, t])
        for place, row in enumerate(going):
            alone = prefill(model, ids[row : row + 1, : t + 1])
            assert torch.equal(logits[place], alone.logits_BV[0]), (t, row)
    assert len(going) == 1


def test_prompts_of_different_lengths_go_on_together(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = make(), random_ids(3, 12)
    prompts = [ids[0, :4].tolist(), ids[1, :9].tolist(), ids[2, :1].tolist()]
    prefix = prefill_rows(model, prompts)
    together = [states_of(prefix := advance(model, ids[:, t], prefix.cache)) for t in (9, 10)]
    for row, prompt in enumerate(prompts):
        alone = prefill(model, torch.tensor([prompt]))
        for t, found in zip((9, 10), together, strict=True):
            alone = advance(model, ids[row : row + 1, t], alone.cache)
            assert torch.equal(found["logits"][row], alone.logits_BV[0])


def test_weights_that_have_changed_are_read() -> None:
    model, ids = make(lora={}), random_ids(2, 6)
    prefix = prefill(model, ids)
    before = advance(model, ids[:, 0], prefix.cache).logits_BV.clone()

    def changes(change: Callable[[], None]) -> None:
        nonlocal before
        change()
        after = advance(model, ids[:, 0], prefix.cache).logits_BV.clone()
        assert not torch.equal(before, after)
        copy = LanguageModel(model.config, reasoning=None) if not model.adapters else make(lora={})
        copy.load_state_dict(model.state_dict())
        assert torch.equal(advance(copy.eval(), ids[:, 0], prefix.cache).logits_BV, after)
        before = after

    mixer, feed_forward = model.blocks[0].mixer, model.blocks[0].feed_forward
    changes(lambda: mixer.key.weight.mul_(0.5))
    changes(lambda: mixer.x_k.data.numpy().__imul__(0.5))  # as an optimizer that writes through an address
    changes(lambda: setattr(mixer.key, "weight", torch.nn.Parameter(mixer.key.weight * 0.5)))
    changes(lambda: setattr(mixer.value.weight, "data", mixer.value.weight * 0.5))
    changes(lambda: feed_forward.router.weight.mul_(-1))

    def another_norm() -> None:
        model.final_norm = AddNorm(model.config, wide=True)

    changes(another_norm)


def uncovered() -> dict[str, Callable[[], LanguageModel]]:
    hybrid = {"mixer_layers": {"mamba2": [0]}}

    def hooked() -> LanguageModel:
        model = make()
        model.blocks[0].mixer.key.register_forward_hook(lambda module, inputs, output: 2 * output)
        return model

    def patched() -> LanguageModel:
        model = make()
        forward = model.blocks[0].mixer.key.forward
        model.blocks[0].mixer.key.forward = lambda x: 2 * forward(x)
        return model

    def subclassed() -> LanguageModel:
        model = make()

        class Doubled(type(model.blocks[0].mixer)):  # type: ignore[misc]
            def forward(self, *arguments: object) -> object:
                made = super().forward(*arguments)
                return made._replace(y=2 * made.y)

        model.blocks[0].mixer.__class__ = Doubled
        return model

    return {
        "Mamba-2": lambda: make(**hybrid),
        "Routing-Mamba": lambda: make(mixer_layers={"routing_mamba": [0]}),
        "tokens that are skipped": lambda: make(depth=Depth(capacity=0.5)),
        "bigrams": lambda: make(bigrams=Bigrams(rows=64)),
        "prediction heads": lambda: make(prediction=Prediction(tokens=2)),
        "a key width of 5": lambda: make(lora={"key_width": 5}),
        "heads of width 12": lambda: make(
            width=48, attention_fraction=1.0, attention=Attention(heads=4, kv_heads=4, rope_theta=20.0)
        ),
        "a wide model": lambda: make(width=272, layers=2),
        "bfloat16": lambda: make().bfloat16(),
        "float64": lambda: make().double(),
        "a hook": hooked,
        "a forward of a module's own": patched,
        "a subclass of a module": subclassed,
    }


@pytest.mark.parametrize("name", uncovered())
def test_what_is_not_covered_takes_the_ordinary_pass(name: str) -> None:
    model, ids = uncovered()[name](), random_ids(2, 6)
    assert not compiled.serves(model)
    prefix = prefill(model, ids)
    output = model(ids, return_cache=True)
    assert_same_bits(states_of(prefix), states_of(Prefix(model.logits(output.hidden_BTD[:, -1]), output.cache)))
    rows = Rows(model, prefix, 2)
    assert torch.equal(rows.read(ids[:, 0]), advance(model, ids[:, 0], prefix.cache).logits_BV)
    assert rows.drop([0], 2) == [1]
    assert len(rows.read(ids[1:, 0])) == 1


def test_gradients_autocast_and_training_take_the_ordinary_pass() -> None:
    model = make()
    assert compiled.serves(model)
    with torch.autocast("cpu", torch.bfloat16):
        assert not compiled.serves(model)
    with torch.enable_grad():
        assert not compiled.serves(model)
    assert not compiled.serves(model.train())


def test_a_hook_that_is_added_later_is_called() -> None:
    model, ids = make(), random_ids(2, 3)
    before = prefill(model, ids).logits_BV
    handle = model.blocks[0].mixer.register_forward_hook(lambda module, inputs, output: output._replace(y=0 * output.y))
    assert not torch.equal(before, prefill(model, ids).logits_BV)
    handle.remove()
    assert torch.equal(before, prefill(model, ids).logits_BV)


def test_logits_of_a_router_that_are_not_finite_are_reported() -> None:
    model = make()
    model.blocks[2].feed_forward.router.weight[1] = float("nan")
    with pytest.raises(NonFiniteLogitsError, match="router of layer 2"):
        prefill(model, random_ids(2, 3))


@pytest.mark.parametrize("wrong", [-1, 27])
def test_an_id_outside_the_vocabulary_is_refused(wrong: int) -> None:
    with pytest.raises(IndexError, match="id"):
        prefill(make(), torch.tensor([[3, wrong]]))


def test_only_the_fast_weights_may_be_carried() -> None:
    """A state of `plastic_only`, without those of mixers and feed-forwards."""
    model, ids = make(lora={}, feed_forward=FeedForward(kind="channel_mix", hidden=13)), random_ids(2, 9)
    carried = plastic_only(prefill(model, ids[:, :4]).cache)
    found = states_of(prefill(model, ids[:, 4:], carried))
    output = model.double()(ids[:, 4:], cache=tuple(
        BlockCache(None, None, tuple(
            each._replace(a=each.a.double(), pending=each.pending.double(), last=each.last.double())
            for each in block.plastic or ()
        ))
        for block in carried
    ), return_cache=True)  # fmt: skip
    for name, tensor in flattened(output.cache).items():
        torch.testing.assert_close(found[name].double(), tensor.double(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("branches", [1, 3])
def test_a_controller_step_is_that_of_the_ordinary_pass(branches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several branches take the ordinary pass; one takes the compiled step."""
    model, ids = make(lora={}, branches=branches), random_ids(3, 2 * CHUNK)
    assert compiled.serves(model)

    def read() -> tuple[dict[str, Tensor], Tensor]:
        controller = Controller(model, reasoning_of(model, branches))
        episode = controller.begin(3)
        for chunk in ids.split(CHUNK, 1):
            episode, _, hidden = controller.step(episode, chunk, always)
        (group,) = episode.groups
        assert group.cache is not None
        return flattened(group.cache), hidden

    states, hidden = read()
    monkeypatch.setenv("CDRMIX_BACKEND", "reference")
    wanted, hidden_wanted = read()
    # float32 in another order, through four blocks and two chunks; see the tolerance of test_rollout.py
    torch.testing.assert_close(hidden, hidden_wanted, rtol=1e-4, atol=1e-4)
    assert states.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(states[name], tensor, rtol=1e-4, atol=1e-4)


def reasoning_of(model: LanguageModel, branches: int) -> Reasoning:
    block = next(block for block in model.blocks if block.plastic is not None)
    adapter = next(iter(block.plastic.values()))
    return Reasoning(
        chunk=CHUNK,
        plastic_lora=adapter.config,
        controller=Settings(step_budget=8, max_branches=branches),
        memory=Memory(dim=8, top_k=2, max_tokens=100),
        rl=Rl(horizon=32, latency_weight=0.01, stability_weight=0.1),
    )


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_rollouts_sample_as_the_ordinary_pass_does(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tokens, unless a point lies within rounding of the bounds between two; here none does."""
    model, ids = make(lora={}), random_ids(3, 5)

    def made() -> tuple[Tensor, Tensor, Tensor]:
        return generate(
            model, ids, 12, temperature=temperature, generator=torch.Generator().manual_seed(7), end=3, group=5
        )

    found = made()
    monkeypatch.setenv("CDRMIX_BACKEND", "reference")
    wanted = made()
    assert torch.equal(found[0], wanted[0])
    torch.testing.assert_close(found[1], wanted[1], rtol=1e-4, atol=1e-4)
    assert torch.equal(found[2], wanted[2])
    if temperature:
        assert 0 < int((~found[2]).sum()) < found[2].numel()
