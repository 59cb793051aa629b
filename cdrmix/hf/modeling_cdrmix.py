"""cdrmix language models as a causal language model of transformers, versions 4.57 and 5."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

from cdrmix.hf.cache import CdrmixCache
from cdrmix.hf.configuration_cdrmix import CdrmixConfig
from cdrmix.inference.load import HEADS
from cdrmix.model.language_model import LanguageModel, Output

IGNORED = -100  # label of a token without a loss, in transformers


class CdrmixForCausalLM(PreTrainedModel, GenerationMixin):
    """A cdrmix language model, `self.model`, with the interface of transformers.

    The weights are those of `cdrmix.LanguageModel`. The heads of stage B are not loaded.
    Batches are padded on the left. Padding is removed before the model: each row is a packed document, so a row has the
    same result as alone.
    """

    config_class = CdrmixConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = True  # of Trainer: forward takes num_items_in_batch
    _is_stateful = True
    _no_split_modules = ["LanguageModel"]
    _keys_to_ignore_on_load_unexpected = [rf"^(model\.)?({'|'.join(HEADS)})\."]

    def __init__(self, config: CdrmixConfig) -> None:
        super().__init__(config)
        self.gradient_checkpointing = False
        section = config.model_section
        # A rounded router selects other experts. transformers 4.57 refuses names that the model does not have.
        self._keep_in_fp32_modules_strict = ["router"] if section.routers or section.skipping else []
        dtype = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)  # the initial values cannot be computed in bfloat16
        try:
            self.model = LanguageModel(section, reasoning=config.reasoning_section)
        finally:
            torch.set_default_dtype(dtype)
        for name, parameter in self.model.named_parameters():
            if torch.finfo(dtype).bits > 32 or not any(part in name for part in self._keep_in_fp32_modules_strict):
                parameter.data = parameter.data.to(dtype)
        if not self.model.embedding.weight.is_meta:
            for module in self.model.modules():
                module._is_hf_initialized = True  # type: ignore[assignment]  # transformers keeps the initial values
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """The token embedding."""
        return self.model.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replaces the token embedding, and the head if they are tied."""
        self.model.embedding = value  # type: ignore[assignment]

    def get_output_embeddings(self) -> nn.Module | None:
        """The head; None if the model uses the embedding as head."""
        return self.model.head

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Module:
        """Returns the token embedding. Raises ValueError if that would change its size."""
        if pad_to_multiple_of is not None or new_num_tokens not in (None, self.config.vocab_size):
            raise ValueError(
                f"the vocabulary of a cdrmix model cannot be resized: it has {self.config.vocab_size} ids; set "
                "model.vocab_size and data.objectives before the training"
            )
        return self.model.embedding

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: CdrmixCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        cache_position: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: int | Tensor | None = None,
        position_ids: Tensor | None = None,
        output_router_logits: bool | None = None,
        tokenizer: object = None,
    ) -> MoeCausalLMOutputWithPast | tuple[Any, ...]:
        """The logits of the next token, float32 [B, T, V].

        Args:
            input_ids: int64 [B, T]; of a continued cache the new tokens.
            attention_mask: [B, T], or [B, past + T] with a cache: 0 for padding, on the left, and 1 for tokens. Logits
                of padding mean nothing.
            past_key_values: the cache of an earlier call; it is advanced in place.
            inputs_embeds: not supported.
            labels: int64 [B, T], the tokens themselves; -100 has no loss. The first token of a row has none.
            use_cache: return a cache. None: config.use_cache, but not in training mode.
            output_attentions, output_hidden_states: not supported.
            return_dict: False returns a tuple.
            cache_position: not used; transformers 4.57 passes it.
            logits_to_keep: the number of last tokens that need logits, or their indices. 0: all.
            num_items_in_batch: divides the sum of the losses of the tokens. None: the number of these tokens.
            position_ids: int64 [B, T]: the tokens of each row counted from 0, with those in the cache; nothing else.
            output_router_logits: not supported.
            tokenizer: not used; `generate` of transformers 5 passes that of its stop strings.

        Returns:
            loss, if there are labels: cross-entropy in nats; in training mode plus `aux_loss`, which counts by this
            call's share of num_items_in_batch. aux_loss: the weighted losses of the routers as in `cdrmix train`; None
            without routers. logits. past_key_values.

        Raises:
            ValueError: the mask has padding that is not on the left, or an argument is not supported.
        """
        if input_ids is None or inputs_embeds is not None:
            raise ValueError("a cdrmix model reads input_ids; inputs_embeds is not supported")
        if output_attentions or output_hidden_states or output_router_logits:
            raise ValueError(
                "a cdrmix model has logits only: output_attentions, output_hidden_states and output_router_logits must "
                "be False"
            )
        use_cache = (self.config.use_cache and not self.training) if use_cache is None else use_cache
        cache = _cache(past_key_values, use_cache)
        tokens_BT = tokens_of(attention_mask, input_ids, cache)
        if position_ids is not None:
            _check_positions(position_ids, attention_mask, input_ids, cache)
        if tokens_BT is not None and self.model.adapters:
            raise ValueError(
                "a model with plastic adapters counts chunks from the start of a row: padding is not possible; give "
                "rows of one length, or one row at a time"
            )
        output = self._backbone(input_ids, tokens_BT, cache, use_cache)
        if cache is not None and use_cache:
            assert output.cache is not None
            cache.layer.advance(output.cache, *input_ids.shape)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.model.logits(output.hidden_BTD[:, kept])
        router = output.router
        aux_loss = None if router is None else router.loss(self.model.config.feed_forward)
        loss = None
        if labels is not None:
            total, labelled = next_token_loss(logits, labels, tokens_BT)
            count = labelled.clamp(min=1) if num_items_in_batch is None else num_items_in_batch
            loss = total / count
            if self.training and aux_loss is not None:
                loss = loss + aux_loss * (labelled / count)
        result = MoeCausalLMOutputWithPast(
            loss=loss, aux_loss=aux_loss, logits=logits, past_key_values=cache if use_cache else None
        )
        return result.to_tuple() if return_dict is False else result

    def _backbone(self, ids_BT: Tensor, tokens_BT: Tensor | None, cache: CdrmixCache | None, use_cache: bool) -> Output:
        """The hidden states of all ids, 0 for padding, and the cache. tokens_BT: False for padding; None without."""
        if tokens_BT is None:
            state = None if cache is None else cache.layer.state
            return self.model(ids_BT, cache=state, return_cache=use_cache)
        # Each row is a document of one packed row.
        lengths_B = tokens_BT.sum(1, dtype=torch.int32)
        cu_seqlens = functional.pad(lengths_B.cumsum(0, dtype=torch.int32), (1, 0))
        output: Output = self.model(ids_BT[tokens_BT].unsqueeze(0), cu_seqlens=cu_seqlens, return_cache=use_cache)
        hidden = output.hidden_BTD[0]
        filled = hidden.new_zeros(*ids_BT.shape, hidden.shape[-1]).masked_scatter(tokens_BT.unsqueeze(-1), hidden)
        return output._replace(hidden_BTD=filled)

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        """False: `forward` creates the cache of generation."""
        return False

    @classmethod
    def register_for_auto_class(cls, auto_class: object = "AutoModelForCausalLM") -> None:
        """Does not mark the class as code to copy: the configuration writes modules that import the installed one."""

    def _init_weights(self, module: nn.Module) -> None:
        """Raises ValueError: transformers calls it for a module of which the folder lacks weights."""
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        missing = [name for name, tensor in own if not getattr(tensor, "_is_hf_initialized", False)]
        if missing:
            names = {each: name for name, each in self.named_modules()}
            raise ValueError(
                f"the folder has no weights for {', '.join(missing)} of {names[module] or 'the model'}: it is not a "
                "complete cdrmix model of this config.json"
            )

    def _set_gradient_checkpointing(
        self,
        enable: bool = True,
        gradient_checkpointing_func: Callable[..., Any] | None = None,
        every_n_layers: int = 1,
    ) -> None:
        """Recomputes the activations of every block in the backward pass, as train.activation_checkpointing."""
        if enable and every_n_layers != 1:
            raise ValueError("a cdrmix model recomputes the activations of every block: every_n_layers must be 1")
        self.gradient_checkpointing = self.model.activation_checkpointing = enable


def _cache(given: object, use_cache: bool) -> CdrmixCache | None:
    """The cache to continue, or a new one; None without one."""
    if given is None:
        return CdrmixCache() if use_cache else None
    if not isinstance(given, CdrmixCache):
        raise ValueError(
            f"past_key_values must be the cache that a cdrmix model returned; found {type(given).__name__}. Leave "
            "past_key_values and cache_implementation out"
        )
    return given


def tokens_of(attention_mask: Tensor | None, ids_BT: Tensor, cache: CdrmixCache | None) -> Tensor | None:
    """Which of the new ids are tokens, bool [B, T]; None if all are.

    Raises ValueError for a mask of another shape, for padding that is not on the left, for a row without tokens, and
    for padding in the continuation of a cache.
    """
    if attention_mask is None:
        return None
    batch, length = ids_BT.shape
    past = 0 if cache is None else cache.get_seq_length()
    if attention_mask.shape not in {(batch, length), (batch, past + length)}:
        raise ValueError(
            f"attention_mask must have the shape {[batch, past + length]}, of input_ids and the tokens in the cache; "
            f"found {list(attention_mask.shape)}"
        )
    tokens_BT = attention_mask[:, -length:].bool()
    if bool(tokens_BT.all()):
        return None
    if bool((tokens_BT[:, :-1] & ~tokens_BT[:, 1:]).any()) or not bool(tokens_BT[:, -1].all()):
        raise ValueError(
            "attention_mask must be zeros, then ones in each row: padding is on the left of the tokens. Set "
            "tokenizer.padding_side to 'left'; a row must have at least one token"
        )
    if past:
        raise ValueError("only the first tokens of a row can be padded: give the new tokens of a cache without padding")
    return tokens_BT


def _check_positions(
    position_ids: Tensor, attention_mask: Tensor | None, ids_BT: Tensor, cache: CdrmixCache | None
) -> None:
    """Raises ValueError for positions that do not count the tokens of a row, such as those of packed documents."""
    length, past = ids_BT.shape[1], 0 if cache is None else cache.get_seq_length()
    if attention_mask is not None and attention_mask.shape[1] == past + length:
        tokens_BT = attention_mask[:, -length:].bool()
        expected_BT = (attention_mask.long().cumsum(1) - 1)[:, -length:]
    else:
        tokens_BT = torch.ones_like(ids_BT, dtype=torch.bool)
        expected_BT = (past + torch.arange(length, device=ids_BT.device)).expand_as(ids_BT)
    shaped = position_ids.shape[-1:] == (length,) and position_ids.dim() <= 2
    if not shaped or bool(((position_ids != expected_BT) & tokens_BT).any()):
        raise ValueError(
            "position_ids must count the tokens of each row from 0, without padding: a cdrmix model has no other "
            "positions, and does not read documents packed in a row. Leave position_ids out"
        )


def next_token_loss(logits_BTV: Tensor, labels_BT: Tensor, tokens_BT: Tensor | None) -> tuple[Tensor, Tensor]:
    """The sum of the cross-entropy of the labels after the first token of each row, in nats, and their number.

    tokens_BT: False for padding; None without padding.
    """
    targets = labels_BT[:, 1:]
    if tokens_BT is not None:
        targets = targets.masked_fill(~tokens_BT[:, :-1], IGNORED)
    total = functional.cross_entropy(
        logits_BTV[:, :-1].flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return total, (targets != IGNORED).sum()
