"""The gradients of every benchmark are those of oracles, at the smallest size; nothing is timed."""

import operator

import benchmark_oracles
import jax.numpy as jnp
import pytest

from benchmarks import catalogue, child, gpu_programs, markdown, results
from benchmarks.__main__ import chosen, line
from benchmarks.case import Case, NotOffered, Prepared, Subject, Target
from benchmarks.networks import NETWORKS
from benchmarks.questions import (
    gpu_program,
    memory,
    saving,
    sequence,
    sparse_nets,
    spiking_readout,
    stacks,
    streaming,
    training_loop,
    whole_state,
    windows,
)
from benchmarks.spiking import Net, SpikingTask
from benchmarks.stack import Layers, StackTask
from benchmarks.subjects import Task

pytestmark = pytest.mark.nightly

STACK = StackTask(Layers("LeakyRNN", 2, 8), 16, 2)

# Some have the same programs, which are then compiled once.
SMALLEST = {
    "sequence": sequence.case(16, 8, 2),
    "stacks": stacks.case(STACK),
    "windows": windows.case("dense", Task(NETWORKS["dense"](hidden=8), 16, 2), (4,)),
    "whole_state": whole_state.case(StackTask(Layers("LeakyRNN", 1, 8), 16, 2), compare=True),
    "sparse_nets": sparse_nets.case(SpikingTask(Net("ALIF", 40, 5), 16, 2)),
    "streaming": streaming.case("dense", 8, 2, 2.5, steps=4),
    "spiking_readout": spiking_readout.case(8, 2, 4),
    "training_loop": training_loop.case("dense", 8, 2, steps=4),
    "saving": saving.case(4, 2),
    "memory": memory.against_length((16,), 8, 2),
}
COMPARED = [
    SMALLEST["sequence"],
    SMALLEST["stacks"],
    stacks.case(StackTask(Layers("GRUCell", 1, 8), 16, 2)),
    SMALLEST["windows"],
    windows.case("gru", Task(NETWORKS["gru"](hidden=8), 16, 2), (4, 16)),
    SMALLEST["whole_state"],
    whole_state.case(StackTask(Layers("GRUCell", 1, 8), 16, 2), compare=True),
    SMALLEST["sparse_nets"],
    SMALLEST["streaming"],
    *(streaming.case(name, 8, 2, 2.5, steps=4) for name in ("alif", "lstm")),
    SMALLEST["training_loop"],
    SMALLEST["saving"],
]
FOR_A_GPU = {
    "step": gpu_program.step_case("dense", 8, 2),
    "sequence": gpu_program.sequence_case("dense", 8, 2, 3),
}


@pytest.mark.parametrize("case", COMPARED, ids=operator.attrgetter("name"))
def test_gradients_are_those_of_an_oracle(case):
    compared = 0
    for label, make in case.build().subjects.items():
        subject = make()
        if subject.before is not None:
            subject.before()
        result = subject.run()
        if not subject.rule or subject.rule.startswith(("kf_rtrl", "es_d_rtrl, windows")):
            continue  # BPTT of the plain network is an oracle itself; KF_RTRL is random
        expected = benchmark_oracles.expected(case.task, subject.rule)
        if expected is None:
            continue  # BPTT of a sparse net
        compared += 1
        found = subject.found(result)
        found = benchmark_oracles.comparable(case.task, found)
        tolerance = benchmark_oracles.tolerance(case.task, subject.rule)
        assert benchmark_oracles.deviation(found, expected) <= tolerance, label
    assert compared >= 3, case.name


@pytest.mark.parametrize("name", SMALLEST)
def test_the_smallest_case_has_all_its_numbers(name):
    found = child.run(SMALLEST[name], rounds=1, budget=0.0)
    assert found["error"] is None
    assert found["missing"] == {}
    for row in found["targets"]:
        assert row["value"] is not None, row["name"]


@pytest.mark.parametrize("name", FOR_A_GPU)
def test_programs_for_a_gpu_are_counted_or_the_plugin_is_named(name):
    found = child.run(FOR_A_GPU[name], rounds=1, budget=0.0)
    assert found["error"] is None
    compiled = {
        label for target in FOR_A_GPU[name].targets for label in (target.label, target.over)
    }
    assert all("jax[cuda12]" in reason for reason in found["missing"].values())
    assert compiled == set(found["facts"]) | set(found["missing"])
    assert all(value > 0 for value in found["facts"].values())


PROGRAM = """HloModule jit_run, entry_computation_layout={(f32[8,4]{1,0})->f32[4]{0}}

%fused (param_0: f32[8,4]) -> f32[4] {
  %param_0 = f32[8,4]{1,0} parameter(0)
  ROOT %reduce.1 = f32[4]{0} reduce(%param_0), dimensions={0}
}

%inner (arg: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %arg = (s32[], f32[8,4]{1,0}) parameter(0)
  %value = f32[8,4]{1,0} get-tuple-element(%arg), index=1
  %copy.1 = f32[8,4]{1,0} copy(%value)
  ROOT %tuple = (s32[], f32[8,4]{1,0}) tuple(%copy.1)
}

%outer (arg.1: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %arg.1 = (s32[], f32[8,4]{1,0}) parameter(0)
  %copy.2 = (s32[], f32[8,4]{1,0}) copy(%arg.1)
  ROOT %while.1 = (s32[], f32[8,4]{1,0}) while(%copy.2), condition=%c, body=%inner, \
backend_config={"known_trip_count":{"n":"5"}}
}

ENTRY %main (x: c64[8,4]) -> f32[4] {
  %x = c64[8,4]{1,0} parameter(0)
  %two = (f32[4]{0}, pred[]) fusion(%x), kind=kInput, calls=%fused
  %while = (s32[], f32[8,4]{1,0}) while(%two), condition=%c, body=%outer, \
backend_config={"known_trip_count":{"n":"3"}}
  ROOT %first = f32[4]{0} get-tuple-element(%two), index=0
}
"""

CONDITIONAL = """
%more (p: pred[]) -> f32[4] {
  ROOT %either = f32[4]{0} conditional(%p), branch_computations={%a, %b}
}
"""


def test_bytes_and_kernels_of_a_program():
    assert gpu_programs.kernels_started(PROGRAM) == 1 + 3 * (1 + 5 * 1)
    straight = "\n".join(line for line in PROGRAM.splitlines() if " while(" not in line)
    assert gpu_programs.bytes_moved(straight) == 8 * 4 * 8 + (4 * 4 + 1)
    with pytest.raises(ValueError, match="loops"):
        gpu_programs.bytes_moved(PROGRAM)
    for unknown in (PROGRAM.replace("known_trip_count", "other"), PROGRAM + CONDITIONAL):
        with pytest.raises(ValueError, match="how often"):
            gpu_programs.kernels_started(unknown)


def test_every_question_is_tested_and_every_case_has_its_own_name():
    tested = {case.question for case in [*SMALLEST.values(), *FOR_A_GPU.values()]}
    assert tested == set(catalogue.QUESTIONS)
    for platform in ("cpu", "gpu"):
        names = [case.name for case in catalogue.all_cases(platform)]
        assert len(names) == len(set(names))
    parameters = {case.name: case.parameters for case in catalogue.all_cases("cpu")}
    assert all(row.format(**parameters[name]) for name, row in markdown.HEADLINE.items())
    quick = {case.question for case in chosen("cpu", True, None)}
    assert quick == tested - {"memory", "gpu_program"}


def made_up(**subjects):
    """A case of one function and some others."""
    return Case(
        name="sequence/made up",
        parameters={"steps": 64, "hidden": 256, "batch": 32},
        build=lambda: Prepared({"BPTT": lambda: Subject(lambda: jnp.ones(2)), **subjects}),
        targets=(Target("missing", "BPTT", 1.0), Target("BPTT", "BPTT", 1.0)),
    )


def lacking():
    raise NotOffered("needs optax")


def test_a_missing_package_is_a_dash_and_an_error_is_a_failure():
    found = child.run(made_up(missing=lacking), rounds=2, budget=0.0)
    assert not results.failed(found)
    assert "needs optax" in found["missing"]["missing"]
    missing, itself = found["targets"]
    assert (missing["value"], missing["holds"]) == (None, None)
    assert (itself["value"], itself["holds"]) == (1.0, True)
    page = "\n".join(markdown.section("question", "", [found]))
    assert f"| missing / BPTT | {markdown.DASH} |" in page
    assert line(found).endswith("1 of 1 targets held; not available: missing")

    broken = child.run(made_up(missing=lambda: 1 / 0), 1, 0.0)
    assert results.failed(broken)
    assert line(broken).startswith("FAILED sequence/made up: ZeroDivisionError")
    assert "**FAILED**" in "\n".join(markdown.section("question", "", [broken]))


def test_the_page_and_its_headline_name_the_version_of_each_case(tmp_path):
    def machine(version):
        return {"name": "A processor", "python": "3.11", "versions": {"braintrace": version}}

    case = child.run(made_up(), rounds=2, budget=0.0)
    first, second = list(markdown.HEADLINE)[:2]
    cases = {name: case | {"name": name} for name in (first, second)}
    found = {"machine": machine("0.1.0"), "cases": cases}
    results.renew(found, machine("0.1.0"))
    assert not any("machine" in case for case in found["cases"].values())
    for version in ("0.2.0", "0.3.0"):
        results.renew(found, machine(version))
        found["cases"][first] = case | {"name": first}
    page = markdown.page(found, [("question", "", list(found["cases"].values()))])
    assert page.startswith("# Benchmarks\n\nA processor. Python 3.11, braintrace 0.3.0.\n\n† marks")
    assert f"| {second.partition('/')[2]} † |" in page
    assert "braintrace 0.1.0" in page
    assert f"| {first.partition('/')[2]} † |" not in page
    assert "braintrace 0.2.0" not in page

    front = tmp_path / "benchmarks.md"
    front.write_text(f"before\n{markdown.BEGIN}\nold\n{markdown.END}\nafter\n")
    markdown.put_into(front, markdown.headline(found))
    text = front.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old" not in text
    assert "64 steps, 256 units, batch 32" in text
    assert "braintrace 0.3.0" in text
    assert "braintrace 0.1.0" in text
