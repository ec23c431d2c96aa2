"""The gradients of every benchmark are those of oracles, at the smallest size; nothing is timed."""

import operator

import benchmark_oracles
import jax.numpy as jnp
import pytest

from benchmarks import catalogue, markdown, results, timing
from benchmarks.__main__ import chosen, line
from benchmarks.case import Case, Subject, Target
from benchmarks.modules import Layers, Net
from benchmarks.networks import NETWORKS
from benchmarks.questions import (
    saving,
    sequence,
    sparse_nets,
    stacks,
    streaming,
    training_loop,
    windows,
)
from benchmarks.subjects import Task

pytestmark = pytest.mark.nightly

STACK = Task(Layers("LeakyRNN", 2, 8), 16, 2)

# Some have the same programs, which are then compiled once.
SMALLEST = {
    "sequence": sequence.case(16, 8, 2),
    "stacks": stacks.case(STACK),
    "windows": windows.case("dense", Task(NETWORKS["dense"](hidden=8), 16, 2), (4,)),
    "sparse_nets": sparse_nets.case(Task(Net("ALIF", 40, 5), 16, 2)),
    "streaming": streaming.case("dense", 8, 2, 2.5, steps=4),
    "training_loop": training_loop.case("dense", 8, 2, steps=4),
    "saving": saving.case(4, 2),
}
COMPARED = [
    SMALLEST["sequence"],
    SMALLEST["stacks"],
    stacks.case(Task(Layers("GRUCell", 1, 8), 16, 2)),
    SMALLEST["windows"],
    windows.case("gru", Task(NETWORKS["gru"](hidden=8), 16, 2), (4, 16)),
    SMALLEST["sparse_nets"],
    SMALLEST["streaming"],
    *(streaming.case(name, 8, 2, 2.5, steps=4) for name in ("alif", "lstm")),
    SMALLEST["training_loop"],
    SMALLEST["saving"],
]


@pytest.mark.parametrize("case", COMPARED, ids=operator.attrgetter("name"))
def test_gradients_are_those_of_an_oracle(case):
    compared = 0
    for label, make in case.subjects.items():
        subject = make()
        if subject.before is not None:
            subject.before()
        result = subject.run()
        if not subject.rule or subject.rule.startswith("es_d_rtrl, windows"):
            continue
        compared += 1
        found, expected = subject.found(result), benchmark_oracles.expected(case.task, subject.rule)
        tolerance = benchmark_oracles.tolerance(case.task, subject.rule)
        assert benchmark_oracles.deviation(found, expected) <= tolerance, label
    assert compared >= 3, case.name


@pytest.mark.parametrize("name", SMALLEST)
def test_the_smallest_case_has_all_its_numbers(name):
    found = timing.run(SMALLEST[name], rounds=1, budget=0.0)
    assert found["error"] is None
    for row in found["targets"]:
        assert row["value"] is not None, row["name"]


def test_every_question_is_tested_and_every_case_has_its_own_name():
    assert list(SMALLEST) == list(catalogue.QUESTIONS)
    for platform in ("cpu", "gpu"):
        names = [case.name for case in catalogue.all_cases(platform)]
        assert len(names) == len(set(names))
    quick = {case.name.partition("/")[0] for case in chosen("cpu", True)}
    assert quick == set(SMALLEST)


def made_up(**subjects):
    """A case of one function and some others."""
    return Case(
        "sequence/made up",
        {"BPTT": lambda: Subject(lambda: jnp.ones(2)), **subjects},
        (Target("lacking", None, 1.0), Target("BPTT", "BPTT", 1.0)),
    )


def test_a_missing_number_is_a_dash_and_an_error_is_a_failure():
    found = timing.run(made_up(), rounds=2, budget=0.0)
    missing, itself = found["targets"]
    assert (missing["value"], missing["holds"]) == (None, None)
    assert (itself["value"], itself["holds"]) == (1.0, True)
    page = "\n".join(markdown.section("question", "", [found]))
    assert f"| lacking | {markdown.DASH} |" in page
    assert line(found).endswith("1 of 1 targets held")

    broken = timing.run(made_up(broken=lambda: 1 / 0), 1, 0.0)
    assert line(broken).startswith("FAILED sequence/made up: ZeroDivisionError")
    assert "**FAILED**" in "\n".join(markdown.section("question", "", [broken]))


def test_the_page_names_the_version_of_each_case():
    def machine(version):
        return {"name": "A processor", "python": "3.11", "versions": {"braintrace": version}}

    case = timing.run(made_up(), rounds=2, budget=0.0)
    first, second = "sequence/one", "sequence/two"
    cases = {name: case | {"name": name} for name in (first, second)}
    found = {"machine": machine("0.1.0"), "cases": cases}
    results.renew(found, machine("0.1.0"))
    assert not any("machine" in case for case in found["cases"].values())
    for version in ("0.2.0", "0.3.0"):
        results.renew(found, machine(version))
        found["cases"][first] = case | {"name": first}
    page = markdown.page(found, [("question", "", list(found["cases"].values()))])
    assert page.startswith("# Benchmarks\n\nA processor. Python 3.11, braintrace 0.3.0.\n\n† marks")
    assert "| two † |" in page
    assert "braintrace 0.1.0" in page
    assert "| one † |" not in page
    assert "braintrace 0.2.0" not in page
