"""Dense models: the feed-forward against its formula, a whole model against transformers' Llama, the configuration."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cdrmix.config.schema import Config
from cdrmix.config.schema_layers import FeedForward
from cdrmix.errors import ConfigError
from cdrmix.model.feed_forward.moe import DenseFeedForward
from cdrmix.model.language_model import LanguageModel

transformers = pytest.importorskip("transformers", reason="needs transformers, which is not installed")

MakeModel = Callable[..., LanguageModel]
TINY = Path(__file__).parents[2] / "configs" / "base" / "tiny.yaml"
# Two float64 evaluations of one function in different orders, through 3 blocks of width 16.
BOUND = 1e-12


@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
def test_the_feed_forward_is_its_formula(make_model: MakeModel, activation: str) -> None:
    model = make_model(attention_fraction=1.0, layers=1, kind="dense", activation=activation)
    feed_forward = model.blocks[0].feed_forward
    assert isinstance(feed_forward, DenseFeedForward)
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    weights = dict(feed_forward.named_parameters())
    if activation == "swiglu":
        gate, up = x @ weights["gate_up.weight"][:8].T, x @ weights["gate_up.weight"][8:].T
        hidden = gate / (1 + (-gate).exp()) * up
    else:
        hidden = (x @ weights["up.weight"].T).clamp(min=0) ** 2
    fed = feed_forward(x, None, None)
    assert (fed.y - hidden @ weights["down.weight"].T).abs().max() < BOUND
    assert fed.routed is None
    assert fed.cache_BD is None


def llama_of(model: LanguageModel) -> Callable[[Tensor], Tensor]:
    """transformers' Llama with the weights of a dense attention-only model: ids [B, T] to logits [B, T, V]."""
    config = model.config
    hidden = config.feed_forward.hidden
    llama = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.d_model,
            intermediate_size=hidden,
            num_hidden_layers=config.layers,
            num_attention_heads=config.attention.heads,
            num_key_value_heads=config.attention.kv_heads,
            rms_norm_eps=config.norm_eps,
            rope_theta=config.attention.rope_theta,
            tie_word_embeddings=config.tie_embeddings,
            attn_implementation="eager",
        )
    ).double()
    ours, theirs = model.state_dict(), {}
    theirs["model.embed_tokens.weight"] = ours["embedding.weight"]
    theirs["lm_head.weight"] = model.head_weight
    theirs["model.norm.weight"] = ours["final_norm.weight"]
    for layer in range(config.layers):
        of, to = f"blocks.{layer}.", f"model.layers.{layer}."
        theirs[to + "input_layernorm.weight"] = ours[of + "mixer_norm.weight"]
        theirs[to + "post_attention_layernorm.weight"] = ours[of + "feed_forward_norm.weight"]
        for name, other in (("query", "q"), ("key", "k"), ("value", "v"), ("output", "o")):
            theirs[f"{to}self_attn.{other}_proj.weight"] = ours[f"{of}mixer.{name}.weight"]
        gate, up = ours[of + "feed_forward.gate_up.weight"].split(hidden)
        theirs[to + "mlp.gate_proj.weight"], theirs[to + "mlp.up_proj.weight"] = gate, up
        theirs[to + "mlp.down_proj.weight"] = ours[of + "feed_forward.down.weight"]
    llama.load_state_dict(theirs)
    return lambda ids_BT: llama(ids_BT).logits


def test_a_dense_attention_model_computes_what_llama_computes(make_model: MakeModel) -> None:
    template = make_model(
        attention_fraction=1.0, layers=3, kind="dense", activation="swiglu", norm="rmsnorm", kv_heads=1
    )
    config = template.config.model_copy(update={"embedding_norm": False})
    torch.manual_seed(2)
    model = LanguageModel(config).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    ids = torch.randint(0, config.vocab_size, (2, 19), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        ours, theirs = model.logits(model(ids).hidden_BTD), llama_of(model)(ids)
    # transformers computes norms and rotary angles in float32: 7 norms of relative error 2**-23 in a row, and angles of
    # up to 19 with an error of 19 * 2**-24 in 3 blocks.
    assert (ours - theirs).abs().max() < (7 * 2**-23 + 3 * 19 * 2**-24) * theirs.abs().max()


def test_the_activation_is_swiglu_unless_the_file_says_otherwise() -> None:
    dense = ["model.feed_forward.kind=dense"]
    assert Config.from_yaml(TINY, dense).cdrmix_model.feed_forward.activation == "swiglu"
    assert (
        Config.from_yaml(TINY, [*dense, "model.feed_forward.activation=relu2"]).cdrmix_model.feed_forward.activation
        == "relu2"
    )
    assert Config.from_yaml(TINY).cdrmix_model.feed_forward.activation == "relu2"
    assert FeedForward(kind="dense", hidden=8).activation == "swiglu"
    assert Config.from_yaml(TINY, dense).cdrmix_model.routers == ()


def test_a_dense_model_cannot_share_out_its_experts() -> None:
    with pytest.raises(ConfigError, match=r"1 for model.feed_forward.kind=dense, which has no experts"):
        Config.from_yaml(TINY, ["model.feed_forward.kind=dense", "train.expert_parallel=2"])
