"""Errors that the tests must find: one change of one line each, and the tests that are to fail by it."""

from __future__ import annotations

from typing import NamedTuple


class Mutation(NamedTuple):
    """In `file`, `old` (which is there once) becomes `new`; one of `tests` (files or node ids of pytest) must fail."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


MUTATIONS = (
    # kernels
    Mutation(
        "RWKV-7, Triton: half of a chunk's decay is dropped",
        "kernels/rwkv7/triton_scan.py",
        "return (tl.load(edges + keys) * tl.load(edges + keys + K))[:, None]",
        "return tl.load(edges + keys)[:, None]",
        ("tests/kernels/test_wkv7_triton.py::test_float32_equals_the_definition",),
    ),
    Mutation(
        "Triton's table of chunks: a document ends one token late",
        "kernels/common/chunks.py",
        "    end = cu_seqlens[1:][document]\n",
        "    end = cu_seqlens[1:][document] + 1\n",
        ("tests/kernels/test_wkv7_triton.py::test_packed_documents_have_the_bits_of_documents_apart",),
    ),
    Mutation(
        "RWKV-7, CPU: the gradient of the last state is ignored",
        "kernels/rwkv7/cpu_simd.py",
        "        if dlast == 0:\n",
        "        if dlast != -1:\n",
        ("tests/kernels/test_wkv7.py",),
    ),
    Mutation(
        "compiled step: the fast weights do not decay at the end of a chunk",
        "kernels/decode/cpu_adapters.py",
        "            store(pending, i * d + j, times(value, same(decay)))",
        "            store(pending, i * d + j, value)",
        ("tests/model/test_compiled.py::test_a_long_prompt_is_read_in_pieces",),
    ),
    Mutation(
        "compiled step: a token attends to the tokens after it",
        "kernels/decode/cpu_attention.py",
        "                    count = past + t + 1",
        "                    count = past + tokens",
        ("tests/model/test_compiled.py::test_tokens_at_once_have_the_bits_of_tokens_one_by_one",),
    ),
    Mutation(
        "compiled step: the state of another continuation is overwritten",
        "cdrmix/model/compiled.py",
        "        elif self._own and not fresh and before.is_contiguous():",
        "        elif not fresh and before.is_contiguous():",
        ("tests/model/test_compiled.py::test_a_state_that_is_held_elsewhere_does_not_change",),
    ),
    Mutation(
        "compiled step: weights that were replaced are read where they were",
        "cdrmix/model/program.py",
        "        return [tensors[name].data_ptr() for tensors, name in self.weights] == self.addresses",
        "        return True",
        ("tests/model/test_compiled.py::test_weights_that_have_changed_are_read",),
    ),
    Mutation(
        "time mix, CPU: wrong sign in the gradient of the removal key",
        "kernels/time_mix/cpu.py",
        "dremoval_key = db[row, j] * learned - da[row, j]",
        "dremoval_key = db[row, j] * learned + da[row, j]",
        ("tests/kernels/test_time_mix.py",),
    ),
    Mutation(
        "state-space scan, CPU: the gradient of the decay takes an exclusive read for an inclusive one",
        "kernels/ssd/cpu_simd.py",
        "reader = row + 1 if exclusive else row\n        if reader < rows:\n            for j",
        "reader = row\n        if reader < rows:\n            for j",
        ("tests/kernels/test_ssd_scan.py",),
    ),
    Mutation(
        "routing, Triton: ties go to the highest expert",
        "kernels/moe/triton_route.py",
        "index = tl.min(tl.where(tied, experts[None, :], PADDED_E), 1)",
        "index = tl.max(tl.where(tied, experts[None, :], -1), 1)",
        ("tests/kernels/test_moe_route_triton.py", "tests/kernels/test_moe.py"),
    ),
    Mutation(
        "routing, Triton: an expert keeps one row more than its capacity",
        "kernels/moe/triton_route.py",
        "row = tl.where(rank < capacity, kept_start",
        "row = tl.where(rank <= capacity, kept_start",
        ("tests/kernels/test_moe_route_triton.py", "tests/kernels/test_moe.py"),
    ),
    Mutation(
        "routing, Triton: the balancing loss includes skipped tokens",
        "kernels/moe/triton_route.py",
        "tl.sum(tl.where(kept[:, None], p, 0.0), 0)",
        "tl.sum(tl.where((tokens < length)[:, None], p, 0.0), 0)",
        ("tests/kernels/test_moe_route_triton.py",),
    ),
    Mutation(
        "cross-entropy, Triton: wrong sign of label smoothing in the gradient",
        "kernels/cross_entropy/triton.py",
        "dx = factor * tl.exp(x - lse) - spread",
        "dx = factor * tl.exp(x - lse) + spread",
        ("tests/kernels/test_cross_entropy_triton.py",),
    ),
    # training
    Mutation(
        "checkpoints: the SHA-256 of a file is not compared",
        "cdrmix/inference/checkpoints.py",
        'if digest != entry["sha256"]:',
        "if not digest:",
        ("tests/training/test_checkpoint.py",),
    ),
    Mutation(
        "resuming: one step is skipped",
        "cdrmix/training/trainer.py",
        "        self._go_back = go_back\n",
        "        self._go_back = go_back\n"
        "        more = self.progress.step > first_step\n"
        "        self.progress = dataclasses.replace(self.progress, step=self.progress.step + more)\n",
        ("tests/training/test_stage_a.py",),
    ),
    Mutation(
        "resuming: AdamW starts without its state",
        "cdrmix/training/checkpoint.py",
        "    engine.load_optimizer_state(",
        "    len(",
        ("tests/training/test_stage_a.py",),
    ),
    Mutation(
        "engine: gradients are not divided by the number of processes",
        "cdrmix/training/engine.py",
        "self.share = 1.0 / (count * self.world.replicas)",
        "self.share = 1.0 / count",
        ("tests/training/test_engine.py::test_gradients_norm_and_update_equal_plain_pytorch",),
    ),
    Mutation(
        "tensor parallelism: gradients are summed over processes with other shares too",
        "cdrmix/training/engine.py",
        "everyone = dist.group.WORLD if self._copies is None else self._copies",
        "everyone = dist.group.WORLD",
        ("tests/training/test_tensor_parallel.py::test_the_engine_trains_shares_as_whole_layers",),
    ),
    Mutation(
        "tensor parallelism: the norm has the shares of one process",
        "cdrmix/model/tensor_parallel.py",
        "share.tensor_model_parallel, share.cut = True, cut",
        "share.tensor_model_parallel, share.cut = False, cut",
        ("tests/training/test_tensor_parallel.py::test_the_engine_trains_shares_as_whole_layers",),
    ),
    Mutation(
        "tensor parallelism: weights that are whole are loaded by the first process of each share alone",
        "cdrmix/training/model_weights.py",
        "self._world.size > 1 and (self._stage < 3 or self._shares is not None)",
        "self._world.size > 1 and self._stage < 3",
        ("tests/training/test_tensor_parallel.py::test_the_engine_trains_shares_as_whole_layers",),
    ),
    Mutation(
        "tensor parallelism: a router has the gradient of one share of its experts",
        "cdrmix/model/feed_forward/moe.py",
        "weights_TK=self.copied(routing.weights_TK)",
        "weights_TK=routing.weights_TK",
        ("tests/training/test_tensor_parallel.py::test_shares_give_the_gradients_of_whole_layers",),
    ),
    Mutation(
        "pipeline: a tied table has the gradient of one of its two uses",
        "cdrmix/training/engine.py",
        "            dist.all_reduce(table.grad, group=self._stages.ends)",
        "            pass",
        ("tests/training/test_pipeline.py::test_the_engine_trains_stages_as_one_model[two pipelines]",),
    ),
    Mutation(
        "pipeline: ZeRO-1 clips by the norm of a stage",
        "cdrmix/training/pipeline.py",
        "        dist.all_reduce(squares, group=stages.line)",
        "        pass",
        ("tests/training/test_pipeline.py::test_the_engine_trains_stages_as_one_model[two pipelines]",),
    ),
    Mutation(
        "pipeline: the last stage's copy of a tied table stays as it was",
        "cdrmix/training/engine.py",
        "                dist.broadcast(self._weights.tied.detach(), group=self._stages.ends, group_src=0)",
        "                pass",
        ("tests/training/test_pipeline.py::test_the_engine_trains_stages_as_one_model[two pipelines]",),
    ),
    Mutation(
        "pipeline: experts of different layers sum their gradients",
        "cdrmix/training/expert_parallel.py",
        "groups._create_expert_and_data_parallel(size, pp_size=stages)",
        "groups._create_expert_and_data_parallel(size)",
        ("tests/training/test_pipeline.py::test_the_engine_trains_stages_as_one_model[experts in stages]",),
    ),
    Mutation(
        "pipeline: the routers' losses of a stage have no gradient",
        "cdrmix/training/pipeline.py",
        "        if made.total.requires_grad:",
        "        if not made.sent:",
        ("tests/training/test_pipeline.py::test_the_engine_trains_stages_as_one_model[two pipelines]",),
    ),
    Mutation(
        "initial values: tiles beside each other are equal",
        "cdrmix/model/initial_values.py",
        "counter=[0, 0, down, across]",
        "counter=[0, 0, down, 0]",
        ("tests/model/test_initial_values.py::test_values_are_those_of_philox_by_name_and_tile",),
    ),
    Mutation(
        "initial values: parameters of one shape are equal",
        "cdrmix/model/initial_values.py",
        'f"{seed}/{name}".encode()',
        'f"{seed}".encode()',
        ("tests/model/test_initial_values.py::test_names_and_seeds_give_other_values",),
    ),
    Mutation(
        "initial values: a stage draws the parts of the others",
        "cdrmix/model/language_model.py",
        "            if self.stage.has(name, config):",
        "            if seed is not None:",
        ("tests/model/test_initial_values.py::test_stages_of_a_pipeline_draw_their_parts_alone",),
    ),
    Mutation(
        "documents: a fact that lies in two chunks is in the first",
        "cdrmix/reason/documents.py",
        "if (first + shift) // self.chunk == (last + shift) // self.chunk",
        "if first <= last",
        ("tests/reason/test_documents.py::test_chunks_are_the_document_and_hold_its_facts",),
    ),
    Mutation(
        "documents: an empty chunk is demonstrated",
        "cdrmix/reason/agent/imitation.py",
        "mask_SN if counts_S is None else mask_SN & counts_S.unsqueeze(1)",
        "mask_SN",
        ("tests/reason/test_documents.py::test_a_chunk_that_a_short_document_lacks_is_not_demonstrated",),
    ),
    Mutation(
        "rewards: an answer of which the function failed counts as 0",
        "cdrmix/reason/rl/grpo.py",
        "        kept &= usable_N.view(-1, group_size).all(1, keepdim=True)",
        "        pass",
        ("tests/reason/test_grpo.py::test_a_group_with_a_rollout_without_a_reward_is_dropped",),
    ),
    Mutation(
        "fast weights: a token that ends a chunk does not commit",
        "cdrmix/ops/fast_weight_chunks.py",
        "    if position + 1 == chunk:",
        "    if position + 2 == chunk:",
        ("tests/model/test_plastic.py",),
    ),
    Mutation(
        "batch warm-up: rows of smaller batches are left out",
        "cdrmix/data/loader.py",
        "start = self.sizes.before(step)",
        "start = step * self.sizes.rows",
        ("tests/training/test_batch_warmup.py",),
    ),
    Mutation(
        "batch warm-up: the routers' losses are divided by the micro-batches of a full batch",
        "cdrmix/training/row_objective.py",
        "engine.set_micro_batches(len(batches))",
        "engine.set_micro_batches(round(1 / engine.share / engine.world.size))",
        ("tests/training/test_batch_warmup.py",),
    ),
    Mutation(
        "reduction: messages are sent in the order of the forward pass",
        "cdrmix/training/reduction.py",
        "self._buckets = sorted(found, key=lambda bucket: -min(",
        "self._buckets = sorted(found, key=lambda bucket: min(",
        ("tests/training/test_reduction.py",),
    ),
    Mutation(
        "AdamW: partitioned parameters are not decayed",
        "cdrmix/model/layers.py",
        'tuple(getattr(parameter, "ds_shape", parameter.shape))',
        "tuple(parameter.shape)",
        ("tests/training/test_schedule_and_optimizer.py",),
    ),
    Mutation(
        "AdamW: norms and biases are decayed",
        "cdrmix/training/optim.py",
        '= ("projection", "expert")',
        '= ("projection", "expert", "vector")',
        ("tests/training/test_schedule_and_optimizer.py",),
    ),
    Mutation(
        "Muon: gates and ups of SwiGLU experts are orthogonalised as one matrix",
        "cdrmix/model/layers.py",
        "INTERLEAVED = Fused(-1, (slice(0, None, 2), slice(1, None, 2)))",
        "INTERLEAVED = Fused(-1, (slice(0, None),))",
        ("tests/training/test_muon.py",),
    ),
    Mutation(
        "Muon: processes do not exchange the parameters that they update",
        "cdrmix/training/muon.py",
        "            self.ownership.exchange()",
        "            pass",
        ("tests/training/test_muon.py::test_processes_share_whole_matrices",),
    ),
    # data
    Mutation(
        "deduplication: the threshold of similarity is inverted",
        "cdrmix/data/pipeline/near_duplicates.py",
        "pairs[similar >= task.section.threshold]",
        "pairs[similar < task.section.threshold]",
        ("tests/data/test_pipeline.py",),
    ),
    Mutation(
        "tokenisation: the fast encoder takes patterns that were never compared",
        "cdrmix/data/batch_encoder.py",
        'if split["pattern"].get("Regex") not in PATTERNS.values():',
        'if split["pattern"].get("Regex") is None:',
        ("tests/data/test_batch_encoder.py::test_other_tokenizers_are_left_to_the_reference",),
    ),
    Mutation(
        "shards: the SHA-256 of a file is not compared",
        "cdrmix/data/shard_files.py",
        'if found != entry["sha256"]:',
        "if not found:",
        ("tests/data/test_shards.py",),
    ),
    Mutation(
        "loader: ranks take runs of micro-batches instead of every n-th",
        "cdrmix/data/loader.py",
        "rows.reshape(-1, self.world_size, self.micro_batch_rows)[:, self.rank]",
        "rows.reshape(self.world_size, -1, self.micro_batch_rows)[self.rank]",
        ("tests/data/test_loader.py",),
    ),
    # model
    Mutation(
        "RWKV-7: the token shift reads over the border of a document",
        "cdrmix/model/mixers/rwkv7.py",
        "None if starts is None else starts.squeeze(-1),",
        "None,",
        ("tests/model/test_language_model.py",),
    ),
    Mutation(
        "generation: the token shift goes on from the first token of the prompt",
        "cdrmix/model/mixers/rwkv7.py",
        "after = TimeMixCache(context.last(x), last)",
        "after = TimeMixCache(x[:, 0], last)",
        ("tests/model/test_language_model.py",),
    ),
    # stage B
    Mutation(
        "lockstep: a process that has ended its rollouts does not wait for the others",
        "cdrmix/reason/lockstep.py",
        "        while self.world.any(False):\n",
        "        while False:\n",
        ("tests/training/test_lockstep.py::test_whoever_has_fewer_passes_makes_passes_of_one_token",),
    ),
    Mutation(
        "lockstep: passes are not announced as such",
        "cdrmix/reason/lockstep.py",
        "        self.world.any(True)\n",
        "        self.world.any(False)\n",
        ("tests/training/test_lockstep.py::test_whoever_has_fewer_passes_makes_passes_of_one_token",),
    ),
    Mutation(
        "rollouts under ZeRO-3: tables and heads are given up after their first use",
        "cdrmix/training/gathered.py",
        "parameter.ds_active_sub_modules.add(OURS)",
        "parameter.ds_active_sub_modules.discard(OURS)",
        ("tests/training/test_lockstep.py::test_the_sharded_model_rolls_out_as_a_copy_does",),
    ),
    Mutation(
        "controller: a row that rolls back keeps what it read",
        "cdrmix/reason/controller/controller.py",
        "parts.append(_part(Group(rows_R, before), ~commit_R))",
        "parts.append(_part(Group(rows_R, proposed), ~commit_R))",
        ("tests/reason/test_controller.py",),
    ),
    Mutation(
        "policy loss: the clipped gain is taken where it is the larger one",
        "cdrmix/reason/rl/grpo.py",
        "gain_SL = torch.minimum(",
        "gain_SL = torch.maximum(",
        ("tests/reason/test_grpo.py",),
    ),
    Mutation(
        "episodic memory: an expired episode is found",
        "cdrmix/reason/memory/kept_episodes.py",
        "self._expiring.items() if expires <= step]",
        "self._expiring.items() if expires < step]",
        ("tests/reason/test_memory.py", "tests/reason/test_episodic_index.py"),
    ),
)
