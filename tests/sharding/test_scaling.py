"""The page on scaling contains stored counts, and stored counts are those of programs."""

import json
import os
import subprocess
import sys

import places
import pytest

from benchmarks import collectives, results
from benchmarks.scaling import __main__ as scaling
from benchmarks.scaling import cases, page, times

DOCS = places.DOCS


@pytest.fixture(scope="module")
def counted():
    return results.load(scaling.COUNTED)


def test_the_page_is_what_has_been_counted(counted):
    found = page.page(counted)
    assert (DOCS / "_generated" / "scaling.md").read_text() == found
    results = found.partition("| scaling |")[2].partition("\n\n")[0]
    assert results in (DOCS / "sharding.md").read_text()


def test_what_is_planned_now_is_what_has_been_counted(counted):
    case = cases.CASES[0]
    (stored,) = (entry for entry in counted["cases"] if entry["name"] == case.name)
    (plan,) = (
        plan
        for plan in stored["plans"]
        if (plan["way"], plan["data"], plan["model"], plan["every"]) == ("weak", 8, 8, 1)
    )
    now = cases.plan_of(case.network, case.rule, plan["samples"], 1, {"data": 1, "model": 8})
    for field in ("parameters", "traces", "arguments", "results", "flops"):
        assert plan[field] == pytest.approx(getattr(now, field), rel=0.01), field


RATES = times.Rates("", 1e12, 1e12, 1e10, 8, 100e9, 10e9, 1e-6, 1e-5, ())


def test_a_ring_in_a_host_and_between_hosts():
    assert times.all_reduce(1e9, 1, 1, 8, RATES) == 0
    within = 2 * 7 / 8 * 1e9 / 100e9 + 2 * 3 * 1e-6
    assert times.all_reduce(1e9, 1, 8, 8, RATES) == pytest.approx(within)
    between = 2 * 3 / 4 * (1e9 / 8) / 10e9 + 2 * 2 * 1e-5
    assert times.all_reduce(1e9, 1, 32, 8, RATES) == pytest.approx(within + between)
    assert times.all_gather(1e9, 3, 4, 1, RATES) == pytest.approx(3 / 4 * 1e9 / 10e9 + 2 * 3e-5)


def test_the_terms_of_a_step():
    plan = {"data": 8, "model": 1, "every": 10, "samples": 4, "total": 2e10, "flops": 3e9}
    plan |= {"arguments": 6e9, "results": 4e9, "parameters": 1e9, "records": 5e9}
    over_data = {"by step": 0, "by update": 1, "of activity": 0.0, "of parameters": 3.0}
    over_data |= {"of readout": 11.0}
    over_model = {"by step": 2, "by update": 1, "of activity": 1.0, "of parameters": 0.0}
    over_model |= {"of readout": 0.0}
    messages, whole = {"data": over_data, "model": over_model}, {"units": 100, "parameters": 8e9}
    whole["readout"] = 1e9 / 8
    terms = times.terms_of(plan, messages, whole, RATES)
    assert terms.compute == pytest.approx(3e-3)
    assert terms.memory == pytest.approx((1e9 + 2e9 + 1e9) / 1e12)
    assert terms.data == pytest.approx(times.all_reduce(4e9, 1, 8, 8, RATES) / 10)
    assert terms.model == 0
    assert terms.total == pytest.approx(terms.memory + terms.data)
    assert terms.binds == "all-reduce over data"
    assert not terms.fits
    terms = times.terms_of({**plan, "data": 2, "model": 4}, messages, whole, RATES)
    assert terms.data == pytest.approx(times.all_reduce(4e9, 1, 2, 2, RATES) / 10)
    gathered = times.all_gather(4 * 100 * 4 * 10, 21, 4, 8, RATES)
    assert terms.model == pytest.approx(gathered / 10)


PROGRAM = """HloModule jit_run
%body (arg: (f32[4])) -> (f32[4]) {
  %sum = (f32[4]{0}, c64[2,3]{1,0}) all-reduce(%a, %b), replica_groups=[2,4]<=[8], to_apply=%add
}
ENTRY %main (x: f32[4]) -> f32[4] {
  %loop = (f32[4]{0}) while(%x), condition=%c, body=%body
  ROOT %all = bf16[8,2]{1,0} all-gather(%x), channel_id=1, replica_groups={{0,1},{2,3}}
}
"""


def test_messages_are_read_with_their_bytes():
    class Compiled:
        def as_text(self):
            return PROGRAM

    gathered, reduced = sorted(collectives.sent(Compiled()), key=lambda message: message.size)
    assert gathered == collectives.Message("all-gather", 2 * 16, 2, False)
    assert reduced == collectives.Message("all-reduce", 4 * 4 + 8 * 6, 4, True)
    counts = {"once": {"all-gather": 1}, "by step": {"all-reduce": 1}}
    assert collectives.messages(Compiled()) == counts


@pytest.mark.nightly
def test_what_is_counted_is_what_programs_for_simulated_devices_do():
    environment = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "PYTHONPATH": places.SEARCHED,
    }
    command = [sys.executable, str(places.SUPPORT / "scaling_program.py")]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    rows = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(rows) == 52
    for row in rows:
        for what, (expected, found) in row["found"].items():
            assert expected == pytest.approx(found, rel=0.02, abs=64), (what, row)
