"""Tiny random configurations of the architectures of transformers for which cdrmix is measured.

Used by tests and by the command that writes the matrix of docs/huggingface.md. Training works with others too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

WIDTH, LAYERS, HEADS = 64, 2, 4
_ATTENTION: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
_HEAD_DIM = {"head_dim": WIDTH // HEADS}
_EXPERTS: dict[str, Any] = {"moe_intermediate_size": WIDTH, "num_experts": 4, "num_experts_per_tok": 2}
_GPT: dict[str, Any] = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 512}
_LAYER_TYPES = ["linear_attention", "full_attention"]

# Only what makes the published configuration small; what is not named here is the architecture's default.
_TINY: dict[str, dict[str, Any]] = {
    "llama": _ATTENTION,
    "qwen2": _ATTENTION,
    "qwen3": _ATTENTION | _HEAD_DIM,
    "qwen3_moe": _ATTENTION | _HEAD_DIM | _EXPERTS,
    "mixtral": _ATTENTION | {"num_local_experts": 4},
    "phi3": _ATTENTION,
    "phi": _ATTENTION,
    "gpt_neox": _ATTENTION,
    "gptj": _GPT | {"rotary_dim": 8},
    "nemotron": _ATTENTION,
    "gpt2": _GPT | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "mistral": _ATTENTION | {"sliding_window": 8},
    "gemma2": _ATTENTION | _HEAD_DIM | {"sliding_window": 8},
    "gemma3_text": _ATTENTION | _HEAD_DIM | {"sliding_window": 8},
    "gpt_oss": _ATTENTION
    | _HEAD_DIM
    | {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "opt": _ATTENTION | {"ffn_dim": 2 * WIDTH, "word_embed_proj_dim": WIDTH, "dropout": 0.0},
    "bloom": {"hidden_size": WIDTH, "n_layer": LAYERS, "n_head": HEADS},
    "granite": _ATTENTION | {"logits_scaling": 8.0},
    "cohere": _ATTENTION,
    "olmo2": _ATTENTION,
    "smollm3": _ATTENTION,
    "deepseek_v3": _ATTENTION
    | {"num_key_value_heads": HEADS, "moe_intermediate_size": WIDTH, "n_routed_experts": 4, "num_experts_per_tok": 2}
    | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "kv_lora_rank": 32, "q_lora_rank": 32}
    | {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16},
    "nemotron_h": _ATTENTION
    | _HEAD_DIM
    | {"layers_block_type": ["mamba", "mlp", "attention", "mlp", "mamba"], "num_hidden_layers": 5}
    | {"mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16},
    "bamba": _ATTENTION
    | {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 2},
    "granitemoehybrid": _ATTENTION
    | {"layer_types": _LAYER_TYPES, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 2}
    | {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": WIDTH},
    "zamba2": _ATTENTION
    | {
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "num_key_value_heads": HEADS,
    }
    | {"mamba_d_state": 16, "n_mamba_heads": 8, "mamba_ngroups": 2, "num_mem_blocks": 1}
    | {"use_shared_attention_adapter": False, "attention_head_dim": 32, "attention_hidden_size": 2 * WIDTH},
    "jamba": _ATTENTION
    | {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1}
    | {"num_experts": 4, "num_experts_per_tok": 2, "mamba_d_state": 8, "mamba_dt_rank": 8, "use_mamba_kernels": False},
    "mamba": {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "state_size": 8},
    "mamba2": {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "state_size": 16, "num_heads": 8, "head_dim": 16}
    | {"n_groups": 2},
    "lfm2": _ATTENTION | {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "qwen3_next": _ATTENTION
    | _HEAD_DIM
    | _EXPERTS
    | {"layer_types": _LAYER_TYPES, "shared_expert_intermediate_size": WIDTH, "linear_key_head_dim": 16}
    | {"linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    "olmo_hybrid": _ATTENTION
    | {"layer_types": _LAYER_TYPES, "linear_num_key_heads": 4, "linear_num_value_heads": 4}
    | {"linear_key_head_dim": 16, "linear_value_head_dim": 16},
    "falcon_h1": _ATTENTION
    | _HEAD_DIM
    | {"mamba_d_ssm": 2 * WIDTH, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 2}
    | {"lm_head_multiplier": 0.25},
    "recurrent_gemma": _ATTENTION
    | {"block_types": ["recurrent", "attention"], "lru_width": WIDTH, "attention_window_size": 8},
}
ARCHITECTURES = tuple(_TINY)


def tiny(architecture: str, vocab_size: int = 320) -> PreTrainedConfig:
    """A configuration of the architecture (its model_type) with two to four layers of width 64.

    Sliding windows have 8 tokens, so that a short test exceeds them. Token 0 begins and ends a text and is padding.
    Raises ValueError for an architecture that is not in ARCHITECTURES.
    """
    from transformers import AutoConfig

    if architecture not in _TINY:
        raise ValueError(f"there is no tiny configuration of {architecture!r}; choose one of {', '.join(_TINY)}")
    tokens = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    return AutoConfig.for_model(architecture, vocab_size=vocab_size, **tokens, **_TINY[architecture])
