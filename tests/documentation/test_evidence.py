"""The pages of the evidence say what the records say, and leave nothing out that failed."""

import dataclasses
import json
import statistics

import pytest
from evidence_records import (
    OWN,
    RECORDS,
    findings_of,
    made_up,
    renamed,
    scored,
    with_other_optimizer,
)
from test_docs import MACHINE

from benchmarks.learning import (
    advice,
    page,
    record,
    runs,
    study,
    words,
)
from benchmarks.learning.findings import Run

VALUES = {
    "cosine_to_rtrl": [[[0.9, 0.8], [0.7, 0.6]]],
    "cosine_to_bptt": [[[0.9, 0.8], [0.5, None]]],
}
AGES = {(0.9, 0.88): "1", (0.5, 0.4): "0", (0.75, 0.6): "0"}
"""Cosines of two seeds under updates, and whether age costs less than an approximation, clearly."""

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


@pytest.fixture(scope="module")
def records():
    return made_up()


FRONT, DETAILS, WIDE, UPDATES = (
    "evidence.md",
    "evidence_details.md",
    "evidence_wide.md",
    "online_updates.md",
)


def row(text, section, name):
    """The cells of a row of the first table of a section."""
    part = text.partition(f"\n## {section}\n")[2]
    line = next(line for line in part.splitlines() if line.startswith(f"| {name} |"))
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_every_number_of_the_page_is_one_of_the_records(records):
    pages = page.render(findings_of(records))
    short, text = pages[FRONT], pages[DETAILS]
    found = json.loads((RECORDS / f"{OWN}.json").read_text())
    scores = found["test"]
    own = f"{statistics.fmean(scores):.2f} ± {statistics.stdev(scores):.2f} ✗{len(found['failed'])}"
    assert row(text, "Scores", "`D_RTRL`") == [own]
    reached = [count for count in found["updates_to_threshold"] if count is not None]
    updates = f"{statistics.fmean(reached):.0f} ({len(reached)} of {len(scores)})"
    assert row(text, "Updates until the threshold", "`D_RTRL`") == [updates]
    recurrent = found["cosine"]["recurrent"]
    cosine = f"{recurrent[0]:.2f} → {recurrent[-1]:.2f}"
    assert row(text, "Gradients during training", "`D_RTRL`") == [cosine]
    seconds = found["price"]["seconds_per_step"]
    assert row(text, "Cost", "`D_RTRL`") == [f"{1e6 * seconds:.3g} µs (0.25)"]
    kept, worst, matched, reached, time, *_ = row(short, "Summary", "`D_RTRL`")
    assert (kept, worst) == ("0.80", "0.80 (copy, leaky tanh)")
    assert (matched, reached, time) == ("0/0/1", "0 of 1", "0.25")
    assert row(short, "Summary", "`Immediate`")[0] == "0.60", "by Adam"
    assert row(text, "RMSprop", "`Immediate`, RMSprop")[0].startswith("0.52 ±")
    assert page.render(findings_of(reversed(records))) == pages, "whatever their order"


def test_the_summary_is_of_pairs_that_every_way_was_tried_on(records):
    settings = dataclasses.replace(records[0].settings, task="another")
    found = [*records, dataclasses.replace(records[0], settings=settings)]
    pages, fewer = (page.render(findings_of(some)) for some in (found, records))
    assert row(pages[FRONT], "Summary", "`D_RTRL`") == row(fewer[FRONT], "Summary", "`D_RTRL`")
    assert "covers 1 pair of task and cell (1 without runs of every method" in pages[FRONT]
    assert len(row(pages[DETAILS], "Scores", "`D_RTRL`")) == 2


SURE = {"bptt": 0.9, "d_rtrl": 0.9, "immediate": 0.5}


def test_advice_follows_from_the_records(records):
    cheap, dear, traces = advice.lines(
        findings_of([*records, renamed(records[0], "rtrl", seconds=9.0)])
    )
    assert (
        "at most 2 times" in cheap
        and "`D_RTRL` has the largest median relative gain (0.89; 0.25 times" in cheap
    )
    assert "`RTRL` has the largest median relative gain (0.89; 2.25 times" in dear
    assert "clearly better than `Immediate`, which has no traces, in 1 of 1 pair." in traces
    assert "largest on copy, leaky tanh (0.89 and 0.67)" in traces
    sure = [scored(records[0], way, score) for way, score in SURE.items()]
    twins = [renamed(sure[1], "eprop"), renamed(sure[1], "tbptt-short", gain=0.99)]
    lines = advice.lines(findings_of([*sure, *twins]))
    assert "in 1 of 1 pair." in lines[1] and "1.00 and" in lines[1]
    assert "in 0 of 1 pair, and clearly worse in 0." in lines[2], "too little to matter"
    assert "EProp" not in "".join(lines), "which is no second witness"


def test_what_failed_stays_on_the_page(records):
    pages = page.render(findings_of(records))
    text = pages[DETAILS]
    lanes = len(records[0].settings.rates)
    (score,) = row(text, "Scores", "`UORO`")
    assert score.endswith(f"(**1 of 3 diverged**) ✗{lanes}")
    where = row(text, "Failures", "`UORO`")[2]
    assert where.count("1 of 3 at") == lanes
    assert row(text, "Failures", "`D_RTRL`")[2] == "1 of 3 at 0.03"
    assert row(text, "Scores", words.way("rflo")) == ["refused"]
    (why,) = [found.refused for found in records if found.settings.way == "rflo"]
    assert f"| {why} |" in text
    assert row(pages[FRONT], "Summary", "`UORO`")[0] == "0.00", "who loses a seed keeps nothing"
    nothing = dataclasses.replace(records[0], test=(None, None, None))
    assert words.score(Run(nothing)).startswith("**diverged**")


def test_the_study_of_online_updates_says_what_its_records_say(records):
    text = page.render(findings_of(records), [STUDY])[UPDATES]
    at_best = row(text, "Best learning rate", "copy with lag, leaky tanh")
    assert at_best == ["1", "0.01", "undefined", "undefined (0.65)"]
    assert "| copy with lag, leaky tanh | `RTRL` | 0.85 | undefined |" in text
    assert "| copy with lag, leaky tanh | `D_RTRL` | 0.85 (0.85) | undefined (0.65) |" in text
    assert "turn the gradient" not in text
    for old, said in AGES.items():
        aged = {
            "cosine_to_rtrl": [[[0.9, 0.8], [0.7, 0.6]]],
            "cosine_to_bptt": [[[0.9, 0.8], list(old)]],
        }
        known = {**STUDY.found, "gradients": {"rtrl": aged, "d_rtrl": aged}}
        pages = page.render(findings_of(records), [study.Study(known)])
        assert all(
            f"{said} of 1 case" in pages[name].split("less than")[-1] for name in (FRONT, UPDATES)
        ), old
    nothing_learned = {**known, "loss": [[[0.5, 0.7], [0.9, 0.6]]]}
    text = page.render(findings_of(records), [study.Study(nothing_learned)])[UPDATES]
    assert "turn the gradient" not in text, "where the best rate is 0, nothing is old"


def test_scores_at_an_edge_of_the_grid_are_marked(records):
    own = records[0]
    rates = own.settings.rates
    marks = {rates[0]: " ▾", rates[1]: "", rates[-1]: " ▴"}
    for rate, mark in marks.items():
        found = dataclasses.replace(own, best_rate=rate)
        assert words.score(Run(found)) == words.score(Run(own)).rstrip(" ▾▴") + mark
    text = page.render(findings_of([dataclasses.replace(own, best_rate=rates[-1])]))
    assert row(text[DETAILS], "Scores", "`D_RTRL`")[0].endswith(" ▴")
    assert "In 0 of 1 run the best learning rate is the lowest, in 1 the highest" in text[FRONT]


@pytest.mark.parametrize(
    ("edge", "beside", "leads"),
    [((0.8, 0.8, 0.8), (0.6, 0.7, 0.8), False), ((0.8, 0.8, 0.8), (0.65, 0.7, 0.75), True)],
)
@pytest.mark.parametrize("highest", [False, True])
def test_an_edge_matters_where_it_is_clearly_better_than_the_rate_beside(
    records, edge, beside, leads, highest
):
    rates = (0.01, 0.02, 0.04)
    scores = [[(value,) for value in values] for values in (edge, beside, (0.1, 0.1, 0.1))]
    curves = record.Curves((10,), tuple(map(tuple, reversed(scores) if highest else scores)))
    settings = dataclasses.replace(records[0].settings, rates=rates)
    found = dataclasses.replace(
        records[0], settings=settings, curves=curves, best_rate=rates[-highest]
    )
    assert Run(found).leads_at_edge is leads


def test_programs_that_are_priced_twice_tell_the_error_of_prices(records):
    own = records[0]
    other = dataclasses.replace(own, settings=dataclasses.replace(own.settings, cell="gru"))
    twins = [renamed(own, "eprop", seconds=0.8), renamed(other, "eprop", seconds=1.5)]
    twins += [with_other_optimizer(renamed(own, "d_rtrl-rmsprop", seconds=1.1))]
    pages = page.render(findings_of([own, other, *twins]))
    for name in (FRONT, DETAILS):
        assert "repeated timings of a program have ratios of 0.80 to 1.50" in pages[name]
        assert "half of 3 pairs agree within a factor of 1.25" in pages[name]
    assert "repeated timings" not in page.render(findings_of(records[2:4]))[DETAILS]


def wide(found, cell, way, mean, **changed):
    settings = dataclasses.replace(found.settings, table="wide", cell=cell)
    changed |= {"settings": settings, "failed": ()}
    return scored(dataclasses.replace(found, **changed), way, mean)


def test_the_wide_table_may_be_incomplete(records):
    pages = page.render(findings_of(records))
    assert "no runs yet" in pages[WIDE] and "Other tasks and cells" not in pages[FRONT]
    angle = record.Cosine((0, 1), (1.0, 0.9995), (1.0, 0.9995))
    found = [
        wide(records[0], "rtu", "bptt", 0.95),
        wide(records[0], "rtu", "d_rtrl", 0.9, cosine=angle),
        wide(records[0], "lru", "immediate", 0.6),
    ]
    pages = page.render(findings_of([*records, *found]))
    kept = ["1 of 1", "0.94 (0.94), 1/0/0", "–"]
    assert row(pages[FRONT], "Other tasks and cells", "RTU") == kept
    assert row(pages[FRONT], "Other tasks and cells", "LRU") == ["0 of 0", "–", "–"]
    assert "In 1 pair of task and cell (RTU)" in pages[WIDE]
    assert "rounding: 0.05 at most (copy, RTU)" in pages[WIDE]
    assert row(pages[WIDE], "RTU", "copy") == ["0.95 ± 0.00", "0.90 ± 0.00", "–"]
    assert row(pages[WIDE], "LRU", "copy") == ["–", "–", "0.60 ± 0.00"]


def test_the_pages_that_are_there_are_those_of_the_records_that_are_there():
    findings = page.load()
    if not findings.runs:
        pytest.skip("A distribution of the sources has no records.")
    studies = study.load(record.FOLDER)
    pages = page.render(findings, studies)
    for name, text in pages.items():
        assert (page.DOCS / page.GENERATED / name).read_text() == text, name
    answer = (page.DOCS / "evidence.md").read_text()
    rows = answer[answer.index("| method |") :].partition("\n\n")[0].splitlines()
    assert set(rows) <= set(pages[FRONT].splitlines())
    assert not MACHINE.search("".join(path.read_text() for path in record.FOLDER.glob("*.json")))
    for cell in runs.CORE_CELLS:  # what the hand-written part says of copies
        own, exact = (findings.find("copy with lag", cell, way) for way in ("d_rtrl", "bptt"))
        assert exact.learned and not own.learned


@pytest.mark.nightly
def test_plots_are_small_and_the_same_for_the_same_records(records, tmp_path):
    records = [*records, wide(records[0], "rtu", "bptt", 0.95)]
    assert page.draw(findings_of(records[-1:]), [], tmp_path / "begun"), "a table that has begun"
    records += [wide(records[0], "rtu", way, 0.9) for way in ("d_rtrl", "immediate")]
    findings = findings_of(records)
    studies = [STUDY]
    first, second = (page.draw(findings, studies, tmp_path / name) for name in ("one", "two"))
    for path, again in zip(first, second, strict=True):
        assert path.read_bytes() == again.read_bytes()
        pages = page.render(findings, studies)
        assert f"{words.PICTURES}/{path.name}" in "".join(pages.values())
    for found in records:
        record.write(tmp_path / "records", found)
    (tmp_path / "records" / "online-updates-copy.json").write_text(json.dumps(STUDY.found))
    written = page.write(tmp_path / "records", tmp_path)
    assert written == [
        *(tmp_path / page.GENERATED / name for name in pages),
        *(tmp_path / words.PICTURES / one.name for one in first),
    ]
    assert {path.name: path.read_text() for path in written[: len(pages)]} == pages
    with pytest.raises(ValueError, match="no records"):
        page.write(tmp_path)
