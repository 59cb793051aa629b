"""Errors that the tests must find, in the evaluation: suites, intervals, leaks."""

from __future__ import annotations

from mutation import Mutation

EVALUATION = (
    Mutation(
        "tasks: questions are examples that a training generates",
        "cdrmix/eval/tasks.py",
        "made = make_example(task, seed, FIRST_HELD_OUT + number, characters)",
        "made = make_example(task, seed, number, characters)",
        ("tests/eval/test_tasks.py::test_questions_are_no_examples_of_a_training",),
    ),
    Mutation(
        "word problems: the worked examples are the problems",
        "cdrmix/eval/reasoning.py",
        'word_problem(seed, number, "worked example")',
        "word_problem(seed, number)",
        ("tests/eval/test_reasoning.py::test_no_problem_is_a_worked_example",),
    ),
    Mutation(
        "pass@k: samples are drawn with replacement",
        "cdrmix/eval/programs.py",
        "missed *= max(0.0, 1 - k / number)",
        "missed *= max(0.0, 1 - k / samples)",
        ("tests/eval/test_programs.py::test_pass_at_k_is_the_share_of_subsets_with_a_pass",),
    ),
    Mutation(
        "intervals: 90 % instead of 95 %",
        "cdrmix/eval/intervals.py",
        "np.percentile(ratios, (2.5, 97.5))",
        "np.percentile(ratios, (5, 95))",
        ("tests/eval/test_intervals.py::test_ratio_of_clusters",),
    ),
    Mutation(
        "intervals: scores that all failed have an interval without width",
        "cdrmix/eval/intervals.py",
        "if (scores and len(scores) - most < LEAST_UNITS) or set(scores) <= {0.0, 1.0}:",
        "if not scores:",
        ("tests/eval/test_intervals.py::test_scores_of_problems",),
    ),
    Mutation(
        "choices: accuracy_norm is not divided by the lengths of the answers",
        "cdrmix/eval/choices.py",
        "int((nats / lengths).argmax())",
        "int((nats / lengths.mean()).argmax())",
        ("tests/cli/test_eval_choices.py::test_items_are_scored_as_by_lm_eval",),
    ),
    Mutation(
        "bits per byte: the last domain of a batch has the nats of all",
        "cdrmix/eval/perplexity.py",
        "return {**parts, last: whole - sum(parts.values())}",
        "return {**parts, last: whole}",
        ("tests/eval/test_perplexity.py::test_ranks_score_their_rows_together",),
    ),
    Mutation(
        "bits per byte: a process reports its own rows as all",
        "cdrmix/eval/perplexity.py",
        "            dist.all_reduce(each)\n            each /= copies",
        "            each /= copies",
        ("tests/eval/test_perplexity.py::test_ranks_score_their_rows_together",),
    ),
    Mutation(
        "contamination: problems that are too short to be found count",
        "cdrmix/eval/overlap.py",
        "counts.append(sum(map(bool, grams)))",
        "counts.append(len(problems))",
        ("tests/eval/test_programs.py::test_overlap",),
    ),
    Mutation(
        "canaries: the secret is not among the secrets",
        "cdrmix/eval/canaries.py",
        "Exposure(canary.line, rank, 1 + len(others), continued)",
        "Exposure(canary.line, rank, len(others), continued)",
        ("tests/eval/test_leak.py::test_rank_and_exposure",),
    ),
    Mutation(
        "leak: a search that ended early is called complete",
        "cdrmix/eval/leak.py",
        "            whole = False\n",
        "            whole = not text\n",
        ("tests/eval/test_leak.py::test_the_search_tells_whether_it_was_complete",),
    ),
    Mutation(
        "leak: personal data that are not in the training text count as its",
        "cdrmix/eval/leak.py",
        "known = sum(any(value in searched.found for _, value in found) for found in personal)",
        "known = sum(map(bool, personal))",
        ("tests/eval/test_leak.py::test_only_personal_data_of_the_training_text_count_as_its",),
    ),
    Mutation(
        "leak: tokens after the first wrong one count as repeated",
        "cdrmix/eval/leak.py",
        "same_BN.cumprod(1).sum(1)",
        "same_BN.sum(1)",
        ("tests/cli/test_eval_model_suites.py::test_verbatim_is_what_greedy_decoding_gives",),
    ),
    Mutation(
        "infilling: equal scores are all right",
        "cdrmix/eval/infilling.py",
        "float(best[number, number] / best[number].sum())",
        "float(best[number, number])",
        ("tests/eval/test_infilling.py::test_a_model_that_ignores_the_text_is_right_at_chance",),
    ),
    Mutation(
        "sandbox: a program that ends itself has passed",
        "cdrmix/eval/sandbox_server.py",
        "(text if error is None else described(error))",
        "(text if error is None else token if isinstance(error, SystemExit) else described(error))",
        ("tests/eval/test_sandbox.py::test_hostile_programs_are_held",),
    ),
    Mutation(
        "routers: the overflow is a share of the mean load",
        "cdrmix/eval/routing.py",
        ".clamp(min=0).sum(-1) / total.squeeze(-1)).tolist(),",
        ".clamp(min=0).sum(-1) / total.squeeze(-1) * experts).tolist(),",
        ("tests/eval/test_routing.py::test_routing_metrics_of_known_loads",),
    ),
)
