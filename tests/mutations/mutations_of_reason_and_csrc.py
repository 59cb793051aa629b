"""Errors of stage B and of the C++ code that the tests must find."""

from __future__ import annotations

from mutation import Mutation

STAGE_B = (
    Mutation(
        "rewards: the first of several right answers alone counts",
        "cdrmix/reason/rl/rewards.py",
        "normalised(each).split()) for each in right)",
        "normalised(each).split()) for each in right[:1])",
        ("tests/reason/test_rewards.py::test_texts_are_compared_as_in_squad",),
    ),
    Mutation(
        "plasticity: the states of the mixers go on into the next chunk",
        "cdrmix/reason/plasticity/phase.py",
        "torch.cat([starts, end]), torch.cat([rows, end])",
        "torch.cat([rows, end]), torch.cat([rows, end])",
        ("tests/reason/test_plasticity.py::test_reading_by_chunks_is_training_on_rows",),
    ),
    Mutation(
        "plasticity: every process makes all episodes of a step",
        "cdrmix/reason/plasticity/phase.py",
        "numbers = range(step * episodes, (step + 1) * episodes)[rank::processes]",
        "numbers = range(step * episodes, (step + 1) * episodes)",
        ("tests/reason/test_plasticity.py::test_micro_batches_and_processes_sum_up",),
    ),
    Mutation(
        "plasticity: an answer with one right token is right as a whole",
        "cdrmix/reason/plasticity/phase.py",
        "exact += int((right_BP | ~asked_BP).all(1).sum())",
        "exact += int((right_BP | ~asked_BP).any(1).sum())",
        ("tests/reason/test_plasticity.py::test_an_answer_of_text_counts_as_a_whole",),
    ),
    Mutation(
        "acceptance: the committed share of good chunks is that of the bad ones",
        "cdrmix/reason/controller/acceptance.py",
        '(("accept_good", good_BN), ("accept_bad", ~good_BN))',
        '(("accept_good", ~good_BN), ("accept_bad", good_BN))',
        ("tests/reason/test_acceptance.py::test_the_committed_shares_are_of_good_and_of_bad_chunks",),
    ),
    Mutation(
        "acceptance: every process rolls out the episodes of the first",
        "cdrmix/reason/controller/acceptance.py",
        "numbers = range(step * count + rank, (step + 1) * count, processes)",
        "numbers = range(step * count, (step + 1) * count, processes)",
        ("tests/reason/test_acceptance.py::test_processes_roll_out_other_episodes",),
    ),
    Mutation(
        "memory agent: retention is of the facts that were asked for",
        "cdrmix/reason/agent/agent.py",
        "held / captured if captured else math.nan",
        "held / of_facts if of_facts else math.nan",
        ("tests/reason/test_agent.py::test_the_figures_of_an_evaluation_by_hand",),
    ),
    Mutation(
        "evaluation of stage B: the memory agent that is off reads the whole document",
        "cdrmix/reason/evaluation.py",
        "step_budget=budget, last_only=True)",
        "step_budget=budget)",
        ("tests/reason/test_evaluation.py::test_on_and_off_are_what_they_say",),
    ),
    Mutation(
        "evaluation of stage B: the operations that are off have the episodic memory",
        "cdrmix/reason/evaluation.py",
        'update={"episodic": False}',
        'update={"episodic": True}',
        ("tests/reason/test_evaluation.py::test_on_and_off_are_what_they_say",),
    ),
    Mutation(
        "episodic memory: an episode that is read is not kept for longer",
        "cdrmix/reason/memory/kept_episodes.py",
        "            self.episodes.move_to_end(id)\n",
        "            pass\n",
        ("tests/reason/test_episodic_index.py::test_what_was_read_is_kept_for_longer_in_later_steps",),
    ),
    Mutation(
        "episodic memory: the search by NumPy takes hidden episodes for visible ones",
        "cdrmix/reason/memory/vectors.py",
        "            products[~visible] = -np.inf\n",
        "",
        ("tests/reason/test_episodic_index.py::test_without_faiss_the_same_is_found",),
    ),
    Mutation(
        "episode log: the checksum of a commit is not compared",
        "cdrmix/reason/memory/episode_log.py",
        "        if zlib.crc32(payload) != checksum:\n",
        "        if not zlib.crc32(payload):\n",
        ("tests/reason/test_episodic_index.py::test_a_flipped_bit_is_found",),
    ),
    Mutation(
        "session: the token memory changes beyond the step budget",
        "cdrmix/reason/session.py",
        "if self._remembers and self.changes < self.budget:",
        "if self._remembers:",
        ("tests/cli/test_reason_memory.py::test_the_step_budget_limits_a_session",),
    ),
    Mutation(
        "session: it goes on with other weights of the same sizes",
        "cdrmix/reason/session.py",
        "        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)\n",
        "",
        ("tests/reason/test_session.py::test_a_session_belongs_to_weights_and_tokenizer",),
    ),
    Mutation(
        "ablations: the interval of a mean is that of one seed",
        "cdrmix/reason/experiments/table.py",
        "student_quantile(count - 1) * deviation / math.sqrt(count)",
        "student_quantile(count - 1) * deviation",
        ("tests/reason/test_ablation.py::test_an_interval_of_three_seeds",),
    ),
)

CPP = (
    Mutation(
        "near-duplicates: texts without words are equal",
        "csrc/minhash.hpp",
        "(a[i] == b[i]) & (a[i] != EMPTY)",
        "(a[i] == b[i])",
        ("tests/data/test_minhash.py::test_what_has_no_words_resembles_nothing",),
    ),
    Mutation(
        "near-duplicates: common shingles count twice in the union",
        "csrc/minhash.hpp",
        "const std::size_t all = a.size() + b.size() - common;",
        "const std::size_t all = a.size() + b.size();",
        ("tests/data/test_minhash.py::test_what_has_no_words_resembles_nothing",),
    ),
    Mutation(
        "near-duplicates: a shingle of the text before reaches into the next text",
        "csrc/words.hpp",
        "        std::fill_n(hashes_.begin(), ngram_, 0);\n",
        "",
        ("tests/data/test_words.py::test_the_same_scratch_serves_texts_of_any_length",),
    ),
    Mutation(
        "near-duplicates: the texts of a crowded bucket are compared with their neighbours alone",
        "csrc/lsh.hpp",
        "std::min(j, begin + limit);",
        "std::min(j, begin);",
        ("tests/data/test_minhash.py::test_a_crowded_bucket_has_the_pairs_of_the_definition",),
    ),
    Mutation(
        "near-duplicates: an id that is twice in a bucket is a duplicate of itself",
        "csrc/lsh.hpp",
        "    entries.erase(std::unique(entries.begin(), entries.end(),\n"
        "                              [](const BucketEntry& x, const BucketEntry& y) { "
        "return x.hash == y.hash && x.id == y.id; }),\n"
        "                  entries.end());\n",
        "",
        ("tests/data/test_minhash.py::test_bucket_pairs_are_those_of_the_definition",),
    ),
    Mutation(
        "SimHash: fingerprints that differ in every block but one are not found",
        "csrc/simhash.hpp",
        "const int blocks = radius + 1;",
        "const int blocks = radius > 0 ? radius : 1;",
        ("tests/data/test_dedup.py::test_the_join_is_brute_force",),
    ),
    Mutation(
        "SimHash: half of the votes are a majority",
        "csrc/simhash.hpp",
        "2 * counts_[bit] > total",
        "2 * counts_[bit] >= total",
        ("tests/data/test_dedup.py::test_nothing_gives_nothing",),
    ),
    Mutation(
        "statistics: a word in two repeated runs counts twice",
        "csrc/repetition.hpp",
        "std::size_t word = std::max<std::size_t>(i, counted);",
        "std::size_t word = i;",
        ("tests/data/test_statistics.py::test_long_texts_of_few_words_repeat_as_defined",),
    ),
    Mutation(
        "statistics: lines of the text before count as duplicates",
        "csrc/statistics.hpp",
        "word_hashes_.clear(), word_lengths_.clear(), lines_.clear();",
        "word_hashes_.clear(), word_lengths_.clear();",
        ("tests/data/test_statistics.py::test_a_text_is_counted_alone",),
    ),
    Mutation(
        "statistics: bytes beyond ASCII count as characters",
        "csrc/statistics.hpp",
        "continuations_ += static_cast<std::uint64_t>(p - start) - 1;",
        "",
        ("tests/data/test_statistics.py::test_every_character_is_classified_as_python_does",),
    ),
    Mutation(
        "personal data: cards of 15 digits stay",
        "csrc/personal.hpp",
        "(groups[2].size() != 5 && groups[2].size() != 4)",
        "groups[2].size() != 4",
        ("tests/data/test_pii.py::test_what_is_replaced",),
    ),
    Mutation(
        "personal data: the first numbers of a longer version are an address",
        "csrc/personal.hpp",
        "        if (at(end) == '.' && is(at(end + 1), WORD)) return;\n        add(IP,",
        "        add(IP,",
        ("tests/data/test_pii.py::test_what_stays",),
    ),
    Mutation(
        "exact duplicates: white space in front makes another text",
        "csrc/squeeze.hpp",
        "bool after_space = true;",
        "bool after_space = false;",
        ("tests/data/test_pipeline.py::test_white_space_is_squeezed_as_python_does",),
    ),
    Mutation(
        "normalisation: the control character DEL stays",
        "csrc/normal.hpp",
        "byte < 0x7F;",
        "byte <= 0x7F;",
        ("tests/data/test_normalize.py::test_what_is_surely_normal_is_normal_in_any_order",),
    ),
    Mutation(
        "languages: the beginning of a long text decides",
        "csrc/language.hpp",
        "(text.size() - most) / 2",
        "0",
        ("tests/data/test_language.py::test_the_middle_of_a_long_text_decides",),
    ),
)
