"""Statements of the literature are judged by the records, and as sure as their spread allows."""

import dataclasses
import itertools
import math

import pytest
from evidence_records import findings_of, made_up, of_cell, renamed, scored

from benchmarks.learning import (
    figures,
    networks,
    record,
    runs,
    statements,
    tables,
    tasks,
    ways,
    words,
)


@pytest.fixture(scope="module")
def records():
    return made_up()


def judged(records, start="The same with Adam"):
    """The cases of one statement."""
    (statement,) = [one for one in statements.ALL if one.claim.startswith(start)]
    cases = list(statement.cases(findings_of(records)))
    shown = "\n".join(tables.verdicts([(statement, cases)]))
    assert f"**{statements.verdict(cases)}**" in shown
    return cases


CHANCE, GAIN, SPREAD = 0.125, 0.5, 0.05
ERROR = SPREAD / math.sqrt(3)


@pytest.mark.parametrize(
    ("above", "spread", "of_other", "said"),
    [
        (2.05 * ERROR, SPREAD, 0.0, "holds"),
        (1.95 * ERROR, SPREAD, 0.0, "undecided"),
        (-1.95 * ERROR, SPREAD, 0.0, "undecided"),
        (-2.05 * ERROR, SPREAD, 0.0, "fails"),
        (1.95 * 0.9 * ERROR, 0.0, SPREAD, "undecided"),
        (2.05 * 0.9 * ERROR, 0.0, SPREAD, "holds"),
        (2.05 * ERROR, SPREAD, SPREAD, "undecided"),
        (2.05 * math.hypot(1, 0.9) * ERROR, SPREAD, SPREAD, "holds"),
    ],
)
def test_a_difference_counts_from_two_standard_errors_on(records, above, spread, of_other, said):
    assert records[0].settings.chance == CHANCE
    found = [
        scored(records[0], "rtrl", CHANCE + GAIN, of_other),
        scored(records[0], "immediate", CHANCE + 0.9 * GAIN + above, spread),
    ]
    assert statements.verdict(judged(found)) == said


def test_every_case_that_is_left_out_is_counted_with_its_reason(records):
    unlearned = [renamed(records[0], way, gain=0.1) for way in ("immediate", "rtrl")]
    refused = [dataclasses.replace(found, refused="why", test=()) for found in unlearned]
    settings = dataclasses.replace(records[0].settings, task="another")
    refused = [
        dataclasses.replace(
            refused[0], settings=dataclasses.replace(settings, way=found.settings.way)
        )
        for found in refused
    ]
    cases = judged(unlearned + refused)
    assert statements.verdict(cases) == "not tested"
    reasons = tables.left_out(cases)
    assert "`RTRL` does not learn (1: copy, leaky tanh)" in reasons
    assert "`Immediate` is refused (1: another, leaky tanh)" in reasons
    held = [scored(of_cell(found, "gru"), found.settings.way, 0.9) for found in unlearned]
    cases = judged(unlearned + refused + held)
    assert statements.verdict(cases) == "holds"
    (line,) = [
        line for line in tables.verdicts([(statements.ALL[1], cases)]) if "with Adam" in line
    ]
    assert line.endswith("| 1 | 0 | 0 | 2 |")


def test_verdicts_tell_whether_all_decided_cases_agree():
    def said(*outcomes):
        return statements.verdict([statements.Case("", "", outcome) for outcome in outcomes])

    holds, undecided, fails, left_out = statements.Outcome
    assert said(holds, fails, undecided) == "mixed"
    assert said(fails, fails) == "fails"
    assert said(holds, undecided, left_out) == "holds where decided"
    assert said(fails, undecided) == "fails where decided"
    assert said(undecided, left_out) == "undecided"


def test_prices_are_judged_over_tasks(records):
    def cases(*ratios):
        found = []
        for task, ratio in enumerate(ratios):
            for way, seconds in (("bptt", 1.0), ("snap-1", ratio)):
                one = renamed(records[0], way, seconds=seconds)
                settings = dataclasses.replace(one.settings, task=f"task {task}")
                found.append(dataclasses.replace(one, settings=settings))
        return judged(found, "SnAp(1)")

    outcomes = [
        cases(*ratios)[0].outcome.name for ratios in ((0.9, 1.0), (1.2, 1.25), (0.8, 1.3), (0.5,))
    ]
    assert outcomes == ["HOLDS", "FAILS", "UNDECIDED", "UNDECIDED"]


def test_noise_of_angles_is_judged_along_the_training(records):
    def case(*theirs):
        own, other = (renamed(records[0], way) for way in ("kf_rtrl", "uoro"))
        updates = tuple(range(len(theirs)))
        cosines = [record.Cosine(updates, values, values) for values in ((0.5, 0.4, 0.6), theirs)]
        found = [
            dataclasses.replace(one, cosine=cosine)
            for one, cosine in zip((own, other), cosines, strict=True)
        ]
        return judged(found, "Kronecker")[0].outcome.name

    assert [case(0.1, 0.0, 0.1), case(0.1, 0.9, 0.1), case(0.9, 0.9, 0.9)] == [
        "HOLDS",
        "UNDECIDED",
        "FAILS",
    ]


@pytest.mark.parametrize(
    ("start", "cell", "holds"),
    [
        ("Trace units", "rtu", ("HOLDS", "FAILS", "FAILS", "LEFT_OUT")),
        ("Networks with uncoupled units", "lru", ("HOLDS", "FAILS", "HOLDS", "LEFT_OUT")),
    ],
)
def test_long_memory_is_judged_by_what_backpropagation_gains(records, start, cell, holds):
    gains = (0.6, 0.3, 0.6), (0.4, 0.3, 0.6), (0.6, 0.58, 0.6), (0.6, 0.05, 0.1)
    for (own, gated, exact), expected in zip(gains, holds, strict=True):
        found = [
            of_cell(scored(records[0], way, CHANCE + gain, 0.001), name)
            for way, gain, name in (
                ("d_rtrl", own, cell),
                ("bptt", min(own, exact), cell),
                ("d_rtrl", gated, "gru"),
                ("bptt", exact, "gru"),
            )
        ]
        (case,) = judged(found, start)
        assert case.outcome.name == expected, case.numbers


def catalogue(own):
    """A record of each run that there is to make on the core tasks; none is made."""
    others = [cell for cell in itertools.chain(*runs.WIDE_CELLS) if cell not in runs.CORE_CELLS]
    groups = (
        ("core", runs.CORE_CELLS, (*ways.ALL, *ways.RMSPROP)),
        ("wide", others, runs.WIDE_WAYS),
    )
    for task, (table, cells, chosen) in itertools.product(tasks.CORE, groups):
        for cell, way in itertools.product(cells, chosen):
            changed = {"table": table, "task": task, "cell": cell, "optimizer": way.optimizer}
            found = renamed(own, way.name)
            yield dataclasses.replace(
                found, settings=dataclasses.replace(found.settings, **changed)
            )


def test_every_statement_is_about_runs_that_there_are(records):
    assert list(words.WAYS) == list(figures.LOOKS)
    assert set(words.WAYS) == {way.name for way in ways.ALL}
    assert set(words.CELLS) == set(networks.CELLS)
    assert set(statements.MEMORY) <= set(tasks.ALL)
    findings = findings_of(catalogue(records[0]))
    for statement in statements.ALL:
        assert list(statement.cases(findings)), statement.claim
