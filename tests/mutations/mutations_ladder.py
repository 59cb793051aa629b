"""Errors that the tests must find, in the ladder: gates, forecasts, the ledger."""

from __future__ import annotations

from mutation import Mutation

LADDER = (
    Mutation(
        "gates: a figure passes without its bound",
        "cdrmix/ladder/gates.py",
        "    if found.high <= limit:\n",
        "    if found.value <= limit:\n",
        ("tests/ladder/test_gates.py::test_losses_that_are_undecided_hold",),
    ),
    Mutation(
        "gates: a share passes without its bound",
        "cdrmix/ladder/gates_results.py",
        "good, bad = (low >= limit, high < limit)",
        "good, bad = (value >= limit, high < limit)",
        ("tests/ladder/test_judgement.py::test_the_items_that_decide",),
    ),
    Mutation(
        "gates: a required figure that was not measured passes",
        "cdrmix/ladder/judgement.py",
        "(Outcome.FAIL, Outcome.HOLD, Outcome.NOT_MEASURED) if outcome in outcomes",
        "(Outcome.FAIL, Outcome.HOLD) if outcome in outcomes",
        ("tests/ladder/test_gates.py::test_what_is_missing_never_passes",),
    ),
    Mutation(
        "gates: Holm's correction is left out",
        "cdrmix/ladder/bounds.py",
        "if p_value > error / (len(p_values) - rank):",
        "if p_value > error:",
        ("tests/ladder/test_judgement.py::test_holm",),
    ),
    Mutation(
        "gates: repeated measurements narrow the interval",
        "cdrmix/ladder/gates_results.py",
        'n = max(measure["count"] for measure in known)',
        "n = total",
        ("tests/ladder/test_judgement.py::test_repeats_do_not_narrow_the_interval",),
    ),
    Mutation(
        "gates: a step of stage B that is not finite is not found",
        "cdrmix/ladder/gates.py",
        "for row in (*facts.rows, *facts.phases):",
        "for row in facts.rows:",
        ("tests/ladder/test_gates.py::test_steps_of_stage_b_are_finite_too",),
    ),
    Mutation(
        "gates: the first router stands for the worst",
        "cdrmix/ladder/gates.py",
        "index = max(range(len(by_router)), key=lambda router: sign * statistics.median(by_router[router]))",
        "index = 0",
        ("tests/ladder/test_gates.py::test_a_doctored_run_fails",),
    ),
    Mutation(
        "gates: a set of questions that was not measured is left out of the mean",
        "cdrmix/ladder/gates_results.py",
        'return _missing(facts, measures, f"choices: {name}", command)',
        "continue",
        ("tests/cli/test_gate_input.py::test_tasks_need_all_sets",),
    ),
    Mutation(
        "gates: results of another model count",
        "cdrmix/ladder/results.py",
        'return None if set(files.values()) & set(weights) else "is of another model"',
        "return None",
        ("tests/cli/test_gates.py::test_results_count_for_their_model_only",),
    ),
    Mutation(
        "gates: steps that another configuration trained again count",
        "cdrmix/ladder/collect.py",
        "all(stored.get(name) == value for name, value in identity.items())",
        "all(name in stored for name in identity)",
        ("tests/ladder/test_judgement.py::test_steps_trained_again_count_for_their_configuration_and_machine",),
    ),
    Mutation(
        "evidence: an exported file may differ from the judged one",
        "cdrmix/ladder/evidence.py",
        "elif files[name] != judged[name]:",
        "elif not files[name]:",
        ("tests/cli/test_gates.py::test_other_files_than_those_judged_are_refused",),
    ),
    Mutation(
        "forecast: all smaller rungs are in the fit",
        "cdrmix/ladder/forecast.py",
        "used = below[-LAST_RUNGS:]",
        "used = below",
        ("tests/ladder/test_forecast.py::test_the_fit_is_least_squares_over_the_last_three",),
    ),
    Mutation(
        "forecast: the spread of seeds does not widen the band",
        "cdrmix/ladder/forecast.py",
        "margin = law.slack + deviation",
        "margin = law.slack",
        ("tests/ladder/test_forecast.py::test_the_seeds_of_the_smallest_rung_widen_the_band",),
    ),
    Mutation(
        "comparison: every step has the batch of the last one",
        "cdrmix/ladder/comparison.py",
        "tokens = train.batch_sizes.before(train.steps) * config.data.row_length",
        "tokens = train.steps * batch_tokens",
        ("tests/ladder/test_comparison.py::test_tokens_and_hours_are_those_that_a_batch_warm_up_leaves",),
    ),
    Mutation(
        "ladder: runs of another configuration count for a rung",
        "cdrmix/ladder/state.py",
        '        if entry.facts["identity"] != state.plan["identity"]:\n',
        '        if not entry.facts["identity"]:\n',
        ("tests/ladder/test_judgement.py::test_a_rung_has_the_entries_of_its_configuration",),
    ),
    Mutation(
        "ladder: the last line of the ledger may be changed",
        "cdrmix/ladder/ledger.py",
        "        if digest != last:\n",
        "        if not digest:\n",
        ("tests/ladder/test_runner.py::test_a_change_is_named_and_refused",),
    ),
    Mutation(
        "ladder: recorded files may be changed",
        "cdrmix/ladder/ledger.py",
        "        if found != expected:\n",
        "        if not found:\n",
        ("tests/ladder/test_runner.py::test_a_change_is_named_and_refused",),
    ),
)
