"""TRL's GRPOTrainer with a Llama of a given number of parameters, the peer of our rollouts."""

from __future__ import annotations

import tempfile
from collections.abc import Callable

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer


def llama(
    vocab_size: int, parameters: int, *, d_model: int, layers: int, heads: int, positions: int
) -> LlamaForCausalLM:
    """A Llama with tied embeddings, whose feed-forward width gives it that number of parameters."""
    others = vocab_size * d_model + layers * (4 * d_model**2 + 2 * d_model) + d_model
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=d_model,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        intermediate_size=max(8, round((parameters - others) / (3 * layers * d_model))),
        max_position_embeddings=positions,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=vocab_size - 1,
        pad_token_id=0,
    )
    torch.manual_seed(1)
    return LlamaForCausalLM(config)


def trl_rollouts(
    model: LlamaForCausalLM, prompts_BL: Tensor, group: int, new_tokens: int, folder: str
) -> Callable[[], int]:
    """The rollouts of one step of GRPOTrainer: returns the generated tokens.

    Each prompt is repeated for every rollout, as its sampler does. A row ends when it draws the last id.
    """
    words = {f"t{number}": number for number in range(model.config.vocab_size)}
    last = f"t{model.config.vocab_size - 1}"
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="t0")), eos_token=last, pad_token="t0"
    )
    arguments = GRPOConfig(
        output_dir=tempfile.mkdtemp(dir=folder),
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=group,
        num_generations=group,
        max_completion_length=new_tokens,
        temperature=1.0,
        beta=0.0,
        report_to=[],
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=_nothing,
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": ["t1"] * group}),
        processing_class=tokenizer,
    )
    prompts = prompts_BL.repeat_interleave(group, 0).tolist()

    def roll_out() -> int:
        completions, _ = trainer._generate_single_turn(prompts, None, {}, group)
        return sum(len(completion) for completion in completions)

    return roll_out


def _nothing(completions: list[str], **_: object) -> list[float]:
    return [0.0] * len(completions)
