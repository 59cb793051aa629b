"""Errors that the tests must find, in models of transformers: exports, packing, adapters, lm-eval."""

from __future__ import annotations

from mutation import Mutation

TRANSFORMERS = (
    Mutation(
        "transformers: the first token of a padded row has a loss",
        "cdrmix/hf/modeling_cdrmix.py",
        "targets.masked_fill(~tokens_BT[:, :-1], IGNORED)",
        "targets.masked_fill(~tokens_BT[:, 1:], IGNORED)",
        ("tests/hf/test_transformers.py::test_the_training_loss_is_that_of_cdrmix",),
    ),
    Mutation(
        "transformers: each micro-batch has the routers' losses of a whole batch",
        "cdrmix/hf/modeling_cdrmix.py",
        "loss = loss + aux_loss * (labelled / count)",
        "loss = loss + aux_loss",
        ("tests/hf/test_transformers.py::test_the_training_loss_is_that_of_cdrmix",),
    ),
    Mutation(
        "transformers: routers are rounded to bfloat16",
        "cdrmix/hf/modeling_cdrmix.py",
        '["router"] if section.routers or section.skipping else []',
        '["router"] if section.skipping else []',
        ("tests/hf/test_transformers.py::test_bfloat16_stays_near_float32[hybrid]",),
    ),
    Mutation(
        "transformers: beams keep the states of the rows that they replace",
        "cdrmix/hf/cache.py",
        "self.state, self._rows = select(self.state, numbers), len(numbers)",
        "self._rows = len(numbers)",
        ("tests/hf/test_transformers.py::test_beams_take_the_states_of_their_rows",),
    ),
    Mutation(
        "packing: documents that see each other a little are taken for isolated",
        "cdrmix/hf/packing.py",
        "if leak(model, packing, call=call) == 0.0:",
        "if leak(model, packing, call=call) < 1e9:",
        ("tests/hf/test_packing.py::test_masks_that_are_refused_are_named_and_full_memory_is_not_taken_for_it",),
    ),
    Mutation(
        "packing: positions that do not restart are not found",
        "cdrmix/hf/packing.py",
        "return 0.0 if difference <= TOLERANCE.get(dtype, HALF_TOLERANCE) else difference",
        "return 0.0 if difference < 1e9 else difference",
        ("tests/hf/test_packing.py::test_positions_that_do_not_restart_are_found",),
    ),
    Mutation(
        "adapters: they are put on another base model",
        "cdrmix/hf/adapters.py",
        "    if found != expected:\n",
        "    if not found:\n",
        (
            "tests/hf/test_adapters.py"
            "::test_a_stopped_run_continues_bit_for_bit_with_its_base_alone_and_exports_the_adapters",
        ),
    ),
    Mutation(
        "adapters: peft does not find the names of their weights",
        "cdrmix/hf/adapters.py",
        'return PREFIX + name.replace(f".{ADAPTER}.", ".")',
        "return PREFIX + name",
        ("tests/hf/test_adapters.py::test_export_is_a_stock_folder_and_the_adapters_open_in_plain_peft",),
    ),
    Mutation(
        "export: other logits than those of the model are accepted",
        "cdrmix/hf/export.py",
        "if not torch.equal(expected, actual):",
        "if expected.shape != actual.shape:",
        ("tests/hf/test_export.py::test_an_export_that_reads_back_differently_leaves_nothing",),
    ),
    Mutation(
        "export: the index of several files names the wrong one",
        "cdrmix/hf/export.py",
        "for file, group in zip(names, groups, strict=True) for name in group}",
        "for file, group in zip(names[::-1], groups, strict=True) for name in group}",
        ("tests/hf/test_export.py::test_a_large_export_is_cut_into_shards_with_an_index",),
    ),
    Mutation(
        "heads: padding of the vocabulary takes probability",
        "cdrmix/hf/head.py",
        "weight = layer.weight if vocab_size in (None, layer.out_features) else layer.weight[:vocab_size]",
        "weight = layer.weight",
        ("tests/hf/test_head.py::test_padding_of_the_vocabulary_takes_no_probability[llama]",),
    ),
    Mutation(
        "mixture of experts of transformers: its balancing loss takes shares of the routes, not of the tokens",
        "cdrmix/hf/foreign.py",
        "share = chosen.sum(0) / len(scores)",
        "share = chosen.sum(0) / chosen.sum()",
        ("tests/hf/test_foreign.py::test_the_balancing_loss_of_a_router_is_that_of_transformers",),
    ),
    Mutation(
        "generation: positions of a continued row begin at 0 again",
        "cdrmix/hf/foreign.py",
        'arguments["position_ids"] = past + torch.arange(',
        'arguments["position_ids"] = torch.arange(',
        ("tests/hf/test_foreign_cache.py::test_a_continued_row_is_that_of_one_pass",),
    ),
    Mutation(
        "lm-eval: spaces at the end of a question belong to it and not to the answer",
        "cdrmix/hf/harness_model.py",
        "kept = context.rstrip()",
        "kept = context",
        ("tests/hf/test_harness.py::test_answers_are_those_of_the_class_of_lm_eval",),
    ),
    Mutation(
        "lm-eval: questions of recall are examples that a training generates",
        "cdrmix/hf/harness_tasks.py",
        'make_example("recall", SEED, FIRST_HELD_OUT + number, CHARACTERS)',
        'make_example("recall", SEED, number, CHARACTERS)',
        ("tests/hf/test_harness.py::test_recall_asks_neither_its_examples_nor_those_of_a_training",),
    ),
    Mutation(
        "lm-eval: the examples of recall are questions",
        "cdrmix/hf/harness_tasks.py",
        "_recall_rows(range(QUESTIONS, QUESTIONS + EXAMPLES))",
        "_recall_rows(range(EXAMPLES))",
        ("tests/hf/test_harness.py::test_recall_asks_neither_its_examples_nor_those_of_a_training",),
    ),
    Mutation(
        "downloads: a folder of another revision is taken",
        "cdrmix/hf/hub.py",
        'if revision not in (record["revision"], record["commit"]):',
        "if not record:",
        ("tests/hf/test_hub.py::test_a_folder_that_is_there_needs_no_network",),
    ),
)
