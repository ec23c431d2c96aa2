"""The page of the evidence says what the records say, and leaves nothing out that failed."""

import dataclasses
import itertools
import json
import statistics
from pathlib import Path

import pytest
from test_docs import MACHINE

from benchmarks.learning import (
    advice,
    figures,
    networks,
    page,
    record,
    runs,
    statements,
    study,
    tables,
    tasks,
    ways,
    words,
)
from benchmarks.learning.findings import Run, sort

RECORDS = Path(__file__).parent / "learning_records"
OWN = "copy--leaky--d_rtrl"

VALUES = {
    "cosine_to_rtrl": [[[0.9, 0.8], [0.7, 0.6]]],
    "cosine_to_bptt": [[[0.9, 0.8], [0.5, None]]],
}
STUDY = study.Study(
    {
        "settings": {
            "task": "copy with lag",
            "cell": "leaky",
            "units": 16,
            "steps": 64,
            "every": [1],
            "rates": [0.0, 0.01],
            "seeds": [0, 1],
            "rules": ["rtrl", "d_rtrl"],
        },
        "gradients": {"rtrl": VALUES, "d_rtrl": VALUES},
        "loss": [[[0.5, 0.7], [0.4, 0.6]]],
    }
)


def renamed(found, way, *, gain=1.0, seconds=1.0, **changed):
    """The record of another way that gains as many times as much over chance."""
    chance = found.settings.chance
    return dataclasses.replace(
        found,
        settings=dataclasses.replace(found.settings, way=way),
        test=tuple(chance + gain * (score - chance) for score in found.test),
        price=dataclasses.replace(
            found.price, seconds_per_step=seconds * found.price.seconds_per_step
        ),
        **changed,
    )


def with_other_optimizer(found):
    settings = dataclasses.replace(found.settings, optimizer="rmsprop")
    return dataclasses.replace(found, settings=settings)


@pytest.fixture(scope="module")
def records():
    """Those of a way, of one that is refused, of backpropagation and of one that lost a seed."""
    own = record.read(RECORDS / f"{OWN}.json")
    failed = tuple((rate, 1) for rate in own.settings.rates)
    lost = dataclasses.replace(renamed(own, "uoro", gain=0.5), failed=failed)
    return [
        own,
        record.read(RECORDS / "copy--leaky--rflo.json"),
        renamed(own, "bptt", gain=1.25, seconds=4.0),
        renamed(own, "immediate", gain=0.75),
        with_other_optimizer(renamed(own, "immediate-rmsprop", gain=0.5)),
        dataclasses.replace(lost, test=(lost.test[0], None, lost.test[2])),
    ]


def findings_of(records):
    return sort(records, ((), tuple(words.CELLS), tuple(words.WAYS)))


def row(text, section, name):
    """The cells of a row of the first table of a section."""
    part = text.partition(f"\n## {section}\n")[2]
    line = next(line for line in part.splitlines() if line.startswith(f"| {name} |"))
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_every_number_of_the_page_is_one_of_the_records(records):
    text = page.render(findings_of(records))
    found = json.loads((RECORDS / f"{OWN}.json").read_text())
    scores = found["test"]
    own = f"{statistics.fmean(scores):.2f} ± {statistics.stdev(scores):.2f} ✗{len(found['failed'])}"
    assert row(text, "Scores", "`D_RTRL`") == [own]
    reached = [count for count in found["updates_to_threshold"] if count is not None]
    updates = f"{statistics.fmean(reached):.0f} ({len(reached)} of {len(scores)})"
    assert row(text, "Updates until the threshold", "`D_RTRL`") == [updates]
    recurrent = found["cosine"]["recurrent"]
    cosine = f"{recurrent[0]:.2f} → {recurrent[-1]:.2f}"
    assert row(text, "The gradient while learning", "`D_RTRL`") == [cosine]
    seconds = found["price"]["seconds_per_step"]
    assert row(text, "Price", "`D_RTRL`") == [f"{1e6 * seconds:.3g} µs (0.25)"]
    kept, worst, matched, reached, time, *_ = row(text, "In short", "`D_RTRL`")
    assert (kept, worst) == ("0.80", "0.80 (copy, leaky tanh)")
    assert (matched, reached, time) == ("0 of 1", "0 of 1", "0.25")
    assert row(text, "In short", "`Immediate`")[0] == "0.60", "by Adam"
    assert row(text, "By RMSprop", "`Immediate`, RMSprop")[0].startswith("0.52 ±")
    assert page.render(findings_of(reversed(records))) == text, "whatever their order"


def test_the_summary_is_of_pairs_that_every_way_was_tried_on(records):
    settings = dataclasses.replace(records[0].settings, task="another")
    found = [*records, dataclasses.replace(records[0], settings=settings)]
    text = page.render(findings_of(found))
    assert row(text, "In short", "`D_RTRL`") == row(
        page.render(findings_of(records)), "In short", "`D_RTRL`"
    )
    assert "Over 1 pairs of task and cell (1 that not every way" in text
    assert len(row(text, "Scores", "`D_RTRL`")) == 2


def test_advice_follows_from_the_records(records):
    cheap, dear, traces = advice.lines(
        findings_of([*records, renamed(records[0], "rtrl", seconds=9.0)])
    )
    assert "at most 2 times" in cheap and "by `D_RTRL` (0.89; 0.25 times the time" in cheap
    assert "by `RTRL` (0.89; 2.25 times the time" in dear
    assert "worth most on copy, leaky tanh (0.89 against 0.67)" in traces


def test_what_failed_stays_on_the_page(records):
    text = page.render(findings_of(records))
    lanes = len(records[0].settings.rates)
    (score,) = row(text, "Scores", "`UORO`")
    assert score.endswith(f"(**1 of 3 diverged**) ✗{lanes}")
    where = row(text, "What failed", "`UORO`")[2]
    assert where.count("1 of 3 at") == lanes
    assert row(text, "What failed", "`D_RTRL`")[2] == "1 of 3 at 0.03"
    assert row(text, "Scores", words.way("rflo")) == ["refused"]
    (why,) = [found.refused for found in records if found.settings.way == "rflo"]
    assert f"| {why} |" in text
    assert row(text, "In short", "`UORO`")[0] == "0.00", "who loses a seed keeps nothing"
    nothing = dataclasses.replace(records[0], test=(None, None, None))
    assert words.score(Run(nothing)).startswith("**diverged**")


def test_the_study_of_online_updates_says_what_its_records_say(records):
    text = page.render(findings_of(records), [STUDY])
    at_best = row(text, "Updates while the sequence runs", "copy with lag, leaky tanh")
    assert at_best == ["1", "0.01", "undefined", "undefined (0.65)"]
    assert "| copy with lag, leaky tanh | `RTRL` | 0.85 | undefined |" in text
    assert "| copy with lag, leaky tanh | `D_RTRL` | 0.85 (0.85) | undefined (0.65) |" in text
    assert "costs less than" not in text
    aged = {
        "cosine_to_rtrl": [[[0.9, 0.8], [0.7, 0.6]]],
        "cosine_to_bptt": [[[0.9, 0.8], [0.6, 0.7]]],
    }
    known = {**STUDY.found, "gradients": {"rtrl": aged, "d_rtrl": aged}}
    text = page.render(findings_of(records), [study.Study(known)])
    assert "is 0.65 to 0.65" in text and "approximation of `D_RTRL` in 0 of 1 cases" in text
    nothing_learned = {**known, "loss": [[[0.5, 0.7], [0.9, 0.6]]]}
    text = page.render(findings_of(records), [study.Study(nothing_learned)])
    assert "costs less than" not in text, "where the best rate is 0, nothing is old"


def test_statements_are_judged_by_the_records(records):
    (statement,) = [one for one in statements.ALL if one.claim.startswith("The same with Adam")]
    for gain, said in ((1.15, "holds (1 of 1 cases)"), (1.1, "does not hold (0 of 1 cases)")):
        found = [one for one in records if one.settings.way != "immediate"]
        found += [
            renamed(records[0], "immediate", gain=gain),
            renamed(records[0], "rtrl", gain=1.25),
        ]
        cases = list(statement.cases(findings_of(found)))
        assert statements.verdict(cases) == said
        assert said in "\n".join(tables.statements([(statement, cases)]))
    unlearned = [renamed(records[0], way, gain=0.1) for way in ("immediate", "rtrl")]
    assert statements.verdict(list(statement.cases(findings_of(unlearned)))) == "not tested"


def of_cell(found, cell):
    settings = dataclasses.replace(found.settings, task="copy with lag", cell=cell)
    return dataclasses.replace(found, settings=settings)


@pytest.mark.parametrize(
    ("start", "cell", "holds"),
    [
        ("Trace units", "rtu", (True, False, False, None)),
        ("Networks whose units", "lru", (True, False, True, None)),
    ],
)
def test_long_memory_is_judged_by_what_backpropagation_gains(records, start, cell, holds):
    (statement,) = [one for one in statements.ALL if one.claim.startswith(start)]
    gains = (1.0, 0.5, 1.0), (0.8, 0.5, 1.0), (1.0, 0.95, 1.0), (1.0, 0.05, 0.1)
    for (own, gated, exact), expected in zip(gains, holds, strict=True):
        found = [
            of_cell(renamed(records[0], "d_rtrl", gain=own), cell),
            of_cell(renamed(records[0], "bptt", gain=min(own, exact)), cell),
            of_cell(renamed(records[0], "d_rtrl", gain=gated), "gru"),
            of_cell(renamed(records[0], "bptt", gain=exact), "gru"),
        ]
        (case,) = statement.cases(findings_of(found))
        assert case.holds is expected, case.numbers


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


def test_the_pages_that_are_there_are_those_of_the_records_that_are_there():
    findings = page.load()
    if not findings.runs:
        pytest.skip("A distribution of the sources has no records.")
    studies = study.load(record.FOLDER)
    assert page.render(findings, studies) == (page.DOCS / "evidence.md").read_text()
    assert not MACHINE.search("".join(path.read_text() for path in record.FOLDER.glob("*.json")))
    choice = (page.DOCS / "algorithms.md").read_text()
    assert page.with_block(choice, page.block(findings)) == choice


@pytest.mark.nightly
def test_plots_are_small_and_the_same_for_the_same_records(records, tmp_path):
    findings = findings_of(records)
    studies = [STUDY]
    first, second = (page.draw(findings, studies, tmp_path / name) for name in ("one", "two"))
    for path, again in zip(first, second, strict=True):
        assert path.read_bytes() == again.read_bytes()
        assert f"{page.PICTURES}/{path.name}" in page.render(findings, studies)
    for found in records:
        record.write(tmp_path / "records", found)
    (tmp_path / "records" / "online-updates-copy.json").write_text(json.dumps(STUDY.found))
    written = page.write(tmp_path / "records", tmp_path)
    assert written == [
        tmp_path / "evidence.md",
        *(tmp_path / page.PICTURES / one.name for one in first),
    ]
    assert written[0].read_text() == page.render(findings, studies)
    with pytest.raises(ValueError, match="no records"):
        page.write(tmp_path)
    with pytest.raises(ValueError, match="no markers"):
        page.with_block("A page.", "")
