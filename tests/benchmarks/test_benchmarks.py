"""The smallest case of every benchmark runs here, and agrees with its oracle. Nothing is timed."""

import importlib
import json
import sys
import tempfile
from pathlib import Path

import jax.numpy as jnp
import pytest

from benchmarks import catalogue, child, gpu_programs, markdown, networks, plots, processes, results
from benchmarks.__main__ import chosen, line
from benchmarks.case import Case, Prepared, Subject, Target
from benchmarks.questions import (
    compile_time,
    first_call,
    fresh_process,
    gpu_program,
    inference,
    length,
    marks,
    matrix_rate,
    memory,
    operations,
    readouts,
    rules,
    saving,
    sequence,
    short_memory,
    sparse_nets,
    sparse_on_devices,
    stacks,
    streaming,
    trace_bytes,
    trace_dtype,
    training_loop,
    whole_state,
)
from benchmarks.spiking import Net, SpikingTask
from benchmarks.stack import StackTask
from benchmarks.stack_oracles import Layers

pytestmark = pytest.mark.nightly

STACK = StackTask(Layers("LeakyRNN", 2, 8), 16, 2)

# Some have the same programs, which are then compiled once.
SMALLEST = {
    "sequence": sequence.case(16, 8, 2),
    "stacks": stacks.case(STACK),
    "whole_state": whole_state.case(StackTask(Layers("LeakyRNN", 1, 8), 16, 2), compare=True),
    "sparse_nets": sparse_nets.case(SpikingTask(Net("ALIF", 40, 5), 16, 2)),
    "sparse_on_devices": sparse_on_devices.case("d_rtrl", SpikingTask(Net("ALIF", 40, 5), 8, 2)),
    "operations": operations.case("alif", 24, 4, hidden=16),
    "streaming": streaming.case("dense", 8, 2, 2.5, steps=4),
    "training_loop": training_loop.case("dense", 8, 2, steps=4),
    "saving": saving.case(4, 2),
    "readouts": readouts.case("alif", 8, 2, steps=4),
    "rules": rules.case(networks.gru, 8, 2, steps=4),
    "short_memory": short_memory.case(networks.gru, 8, 2, steps=16),
    "marks": marks.case(networks.gru, 8, 2, steps=16),
    "length": length.case((8, 16), hidden=8, batch=2, chunk=16),
    "memory": memory.against_length((16,), 8, 2),
    "first_call": first_call.case("dense", hidden=8, repeats=1, steps=16, batch=2),
    "fresh_process": fresh_process.case(STACK, repeats=1),
    "compile_time": compile_time.case((1,), ((2, 4),)),
    "predict": inference.predict_case("lstm", 4, 2, 8),
    "mask": inference.mask_case(4, 8, 2, 12),
    "trace_bytes": trace_bytes.case("element_wise", "es_d_rtrl", 2, hidden=8),
    "trace_dtype": trace_dtype.case(8, 4, hidden=8, batch=2),
    "matrix_rate": matrix_rate.case("float32", 8, 16, steps=4, batch=2),
}
OF_THE_NIGHT = {
    "compile_time",
    "first_call",
    "fresh_process",
    "length",
    "marks",
    "mask",
    "matrix_rate",
    "operations",
    "predict",
    "readouts",
    "rules",
    "saving",
    "sequence",
    "short_memory",
    "sparse_nets",
    "sparse_on_devices",
    "stacks",
    "streaming",
    "trace_dtype",
    "training_loop",
    "whole_state",
}

FOR_A_GPU = {
    "step": gpu_program.step_case("dense", 8, 2),
    "sequence": gpu_program.sequence_case("dense", 8, 2, 3),
}


def in_this_process(interpreter, module, *arguments, devices=1):
    """What a process of its own would write."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        out = Path(folder) / "out.json"
        patch.setattr(sys, "argv", [module, *arguments, "--out", str(out)])
        importlib.import_module(f"benchmarks.{module}").main()
        return json.loads(out.read_text())


def agreeing(case):
    found = child.run(case, rounds=1, budget=0.0)
    assert found["error"] is None
    assert found["disagrees"] == []
    assert found["deviations"]
    return found


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.nightly) if name in OF_THE_NIGHT else name
        for name in SMALLEST
    ],
)
def test_smallest_case_agrees_with_its_oracle(name, monkeypatch):
    monkeypatch.setattr(processes, "run_module", in_this_process)
    found = agreeing(SMALLEST[name])
    assert found["missing"] == {}
    for row in found["targets"]:
        assert row["value"] is not None, row["name"]
    assert json.loads(json.dumps(found)) == found


@pytest.mark.parametrize("name", FOR_A_GPU)
def test_programs_for_a_gpu_are_counted_or_the_plugin_is_named(name):
    found = agreeing(FOR_A_GPU[name])
    compiled = {
        label for target in FOR_A_GPU[name].targets for label in (target.label, target.over)
    }
    assert all("jax[cuda12]" in reason for reason in found["missing"].values())
    assert compiled == set(found["facts"]) | set(found["missing"])
    assert all(value > 0 for value in found["facts"].values())


@pytest.mark.nightly
@pytest.mark.parametrize("case", sparse_on_devices.cases("cpu"), ids=lambda case: case.name)
def test_a_large_sparse_net_is_divided_over_eight_devices(case):
    """As on one device, with an eighth of the bytes each, and no more memory than planned."""
    found = agreeing(case)
    assert all(row["holds"] in (True, None) for row in found["targets"]), found["targets"]


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
    slow = {"matrix_rate", "memory", "gpu_program", "fresh_process", "sparse_on_devices"}
    assert quick == tested - slow


def test_traces_of_every_network_are_as_large_as_their_definition():
    """The formulas, once more, from the shapes of weights and states."""
    sizes = {"inputs": 3, "hidden": 5}
    assert networks.dense(**sizes).trace_elements == 3 * 5 + 5 * 5
    assert networks.lstm(**sizes).trace_elements == 8 * 15
    assert networks.alif(**sizes).trace_elements == 2 * (3 * 5 + 5 * 5)
    assert networks.conv(size=4, channels=2, inputs=1).trace_elements == (9 + 18) * 2 * 16


def made_up(value, **names):
    """A case of one function, whose result deviates by some value."""
    subject = Subject(lambda: jnp.ones(2), deviation=lambda _: value)
    return Case(
        name="sequence/made up",
        parameters={"steps": 64, "hidden": 256, "batch": 32},
        build=lambda: Prepared({"BPTT": lambda: subject, **names}),
        targets=(Target("missing", "BPTT", 1.0), Target("BPTT", "BPTT", 1.0)),
    )


@pytest.mark.by_day("nan")
@pytest.mark.parametrize("value", [1e-3, float("nan"), float("inf")])
def test_a_case_that_disagrees_is_reported_as_failed(value):
    found = child.run(made_up(value), rounds=2, budget=0.0)
    assert found["disagrees"] == ["BPTT"]
    assert results.failed(found)
    assert line(found).startswith("FAILED sequence/made up: disagrees: BPTT")
    page = "\n".join(markdown.section("question", "", [found], None))
    assert "**FAILED**" in page


def test_a_name_that_the_library_lacks_is_a_dash_and_other_errors_are_failures():
    import braintrace

    case = made_up(0.0, missing=lambda: braintrace.no_such_operation)
    found = child.run(case, rounds=2, budget=0.0)
    assert not results.failed(found)
    assert "no_such_operation" in found["missing"]["missing"]
    missing, itself = found["targets"]
    assert (missing["value"], missing["holds"]) == (None, None)
    assert (itself["value"], itself["holds"]) == (1.0, True)
    page = "\n".join(markdown.section("question", "", [found], None))
    assert f"| missing / BPTT | {markdown.DASH} |" in page

    broken = made_up(0.0, missing=lambda: 1 / 0)
    assert child.run(broken, 1, 0.0)["error"].startswith("ZeroDivisionError")
    lenient = child.run(broken, 1, 0.0, lenient=True)
    assert lenient["error"] is None
    assert "ZeroDivisionError" in lenient["missing"]["missing"]


def test_line_through_times():
    steps = [64, 512, 4096]
    a, b = length.line(steps, [0.5 + 0.25 * count for count in steps])
    assert (a, b) == (pytest.approx(0.5), pytest.approx(0.25))


def test_page_plots_and_headline(tmp_path):
    found = child.run(made_up(0.0), rounds=2, budget=0.0)
    machine = {"name": "A processor, 2 cores", "python": "3.11", "versions": {"jax": "0.10"}}
    name = next(iter(markdown.HEADLINE))
    everything = {"machine": machine, "other": None, "cases": {name: found | {"name": name}}}
    drawn = plots.draw(everything, tmp_path / "machine")
    assert all((tmp_path / plot).stat().st_size > 0 for plot in drawn)
    page = markdown.page(everything, [("question", "", [found])], drawn)
    assert "A processor, 2 cores" in page

    front = tmp_path / "benchmarks.md"
    front.write_text(f"before\n{markdown.BEGIN}\nold\n{markdown.END}\nafter\n")
    markdown.put_into(front, markdown.headline(everything))
    text = front.read_text()
    assert "old" not in text
    assert "64 steps, 256 units, batch 32" in text
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")


def test_cases_that_ran_on_an_earlier_version_say_so():
    def machine(version):
        return {"name": "A processor", "python": "3.11", "versions": {"braintrace": version}}

    case = child.run(made_up(0.0), rounds=2, budget=0.0)
    first, second = list(markdown.HEADLINE)[:2]
    cases = {name: case | {"name": name} for name in (first, second)}
    found = {"machine": machine("0.1.0"), "other": None, "cases": cases}
    results.renew(found, machine("0.1.0"))
    assert not any("machine" in case for case in found["cases"].values())
    for version in ("0.2.0", "0.3.0"):
        results.renew(found, machine(version))
        found["cases"][first] = case | {"name": first}
    sections = [("question", "", list(found["cases"].values()))]
    page = markdown.page(found, sections, [])
    assert page.startswith("# Benchmarks\n\nA processor. Python 3.11, braintrace 0.3.0.\n\n† marks")
    assert f"| {second.partition('/')[2]} † |" in page and "braintrace 0.1.0" in page
    assert f"| {first.partition('/')[2]} † |" not in page and "braintrace 0.2.0" not in page
    block = markdown.headline(found)
    assert "braintrace 0.3.0" in block and "braintrace 0.1.0" in block
