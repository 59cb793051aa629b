"""Errors that the tests must find, in the data: sources, cleaning, splits, loaders."""

from __future__ import annotations

from mutation import Mutation

DATA = (
    Mutation(
        "tokenizer: it is trained on held-out documents too",
        "cdrmix/data/pipeline/encoding.py",
        'column(table, "split_hash") >= np.uint64(threshold)',
        'column(table, "split_hash") >= np.uint64(0)',
        ("tests/data/test_prepare.py::test_held_out_text_never_reaches_the_tokenizer",),
    ),
    Mutation(
        "conversations: answers to one prompt are in both splits",
        "cdrmix/data/pipeline/reading.py",
        "    return split_hash(prompt) >> 32 << 32 | own & 0xFFFFFFFF if prompt else own",
        "    return own",
        ("tests/data/test_chat.py::test_answers_to_one_prompt_are_in_one_split",),
    ),
    Mutation(
        "fill in the middle: held-out documents are rearranged",
        "cdrmix/data/pipeline/encoding.py",
        "(held_out, as_it_is)):",
        "(held_out, task.objectives)):",
        ("tests/data/test_pipeline.py::test_held_out_text_has_no_objectives",),
    ),
    Mutation(
        "reading: a stream that broke off is read from its beginning again",
        "cdrmix/data/pipeline/reading.py",
        'number, checkpoint = number + 1, found["checkpoint"]',
        "number, checkpoint = number + 1, None",
        ("tests/data/test_pipeline.py::test_a_stream_goes_on_where_it_stood",),
    ),
    Mutation(
        "reading: records before an interruption do not count for the number of documents",
        "cdrmix/data/pipeline/reading.py",
        'quota.take(found["records"])',
        "quota.take(0)",
        ("tests/data/test_sources.py::test_finished_units_count_for_the_quota",),
    ),
    Mutation(
        "loader: the documents of a row see each other",
        "cdrmix/data/loader.py",
        "boundaries = np.union1d(positions + lengths, np.append(row_ends, 0))",
        "boundaries = np.union1d(row_ends, 0)",
        ("tests/data/test_loader.py::test_batches_hold_the_documents",),
    ),
    Mutation(
        "loader: every epoch has the order of the first",
        "cdrmix/data/loader.py",
        "(self.seed, int(epoch)))",
        "(self.seed, 0))",
        ("tests/data/test_loader.py::test_an_epoch_gives_every_row_once_and_epochs_differ",),
    ),
    Mutation(
        "loader: held-out rows are read by several processes, and others by none",
        "cdrmix/data/loader.py",
        "start = (step * self.world_size + rank) * self.micro_batch_rows",
        "start = (step + rank) * self.micro_batch_rows",
        ("tests/data/test_loader.py::test_evaluation_reads_every_row_once",),
    ),
    Mutation(
        "loss weights: the sum of means divides by all tokens",
        "cdrmix/data/loader.py",
        "(count if self.sum_of_means else total)",
        "total",
        ("tests/data/test_parts.py::test_the_weights_of_a_batch_are_those_of_its_parts",),
    ),
    Mutation(
        "curriculum: a stage begins with the rows that the stage before has read",
        "cdrmix/data/curriculum.py",
        "before = self._taken_before[stages, strata] + periods",
        "before = periods",
        ("tests/data/test_curriculum.py::test_every_row_of_a_stratum_once_an_epoch",),
    ),
    Mutation(
        "chains of thought: their share is of the other tokens alone",
        "cdrmix/data/chains.py",
        "fits = (totals * (1 - cot.max_share) <= cot.max_share * others)",
        "fits = (totals <= cot.max_share * others)",
        ("tests/data/test_parts.py::test_a_choice_is_the_largest_one",),
    ),
    Mutation(
        "preferences: chosen and rejected answers change places",
        "cdrmix/data/pairs.py",
        "        answers[position : position + second] = 2 * pair\n"
        "        answers[position + second : position + length] = 2 * pair + 1\n",
        "        answers[position : position + second] = 2 * pair + 1\n"
        "        answers[position + second : position + length] = 2 * pair\n",
        ("tests/training/test_preferences.py::test_a_row_has_whole_pairs_as_documents",),
    ),
    Mutation(
        "conversations: the last token of a question is trained on",
        "cdrmix/data/chat/encoding.py",
        "bisect_left(stops, _position(text, start) + 1)",
        "bisect_left(stops, _position(text, start))",
        ("tests/data/test_chat.py::test_the_mask_is_the_hand_made_one",),
    ),
    Mutation(
        "conversations: train_on: last is ignored",
        "cdrmix/data/chat/rendering.py",
        'slice(-1, None) if self.train_on == "last" else slice(None)',
        "slice(None)",
        ("tests/data/test_chat.py::test_train_on_all_and_the_last_turn",),
    ),
    Mutation(
        "shards: bytes of questions count for the bits per byte of answers",
        "cdrmix/data/shards.py",
        "of_tokens[self._is_trained(*span)].sum(dtype=np.int64)",
        "of_tokens.sum(dtype=np.int64)",
        ("tests/data/test_preferences.py::test_held_out_figures_are_of_what_is_trained_on",),
    ),
    Mutation(
        "deduplication: of near-duplicates the one of the lowest quality stays",
        "cdrmix/data/pipeline/near_duplicates.py",
        '-column(table, "quality"), labels])',
        'column(table, "quality"), labels])',
        ("tests/data/test_pipeline.py::test_the_best_of_a_family_stays",),
    ),
    Mutation(
        "deduplication: an address or host has one document more than allowed",
        "cdrmix/data/pipeline/url_duplicates.py",
        "[position >= task.most]",
        "[position > task.most]",
        ("tests/data/test_pipeline.py::test_addresses_and_hosts",),
    ),
    Mutation(
        "personal data: the metadata in the report keep theirs",
        "cdrmix/data/pipeline/reading.py",
        "value = scrub(value, pii)[0] if pii and len(value) <= META_CHARACTERS else value",
        "value = str(value)",
        ("tests/data/test_pipeline.py::test_no_personal_data_in_the_report",),
    ),
    Mutation(
        "personal data: the check digit of cards adds the doubled digits, not their digits",
        "cdrmix/data/cleaning/pii.py",
        "(sum(divmod(2 * value, 10)) for value in values[1::2])",
        "(2 * value for value in values[1::2])",
        ("tests/data/test_pii.py::test_a_card_has_its_check_digit",),
    ),
    Mutation(
        "filters: a document counts for the last rule that it fails",
        "cdrmix/data/cleaning/filters.py",
        "first_failed[failed & (first_failed < 0)] = number",
        "first_failed[failed] = number",
        ("tests/data/test_filters.py::test_the_first_failed_rule_is_named_and_all_are_scored",),
    ),
    Mutation(
        "content key: a changed file of the same size finds the former shards",
        "cdrmix/data/sources/base.py",
        "identity.append([os.path.abspath(path), status.st_size, status.st_mtime_ns])",
        "identity.append([os.path.abspath(path), status.st_size])",
        ("tests/data/test_prepare.py::test_whatever_decides_the_content_decides_the_key",),
    ),
)
