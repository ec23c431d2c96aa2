"""The analysis of a model is quick, and its work grows with the number of equations."""

import pathlib
import sys
import time
import tracemalloc

import brainstate
import jax
import jax.numpy as jnp
import pytest

import braintrace
from braintrace._compiler.core.analysis import Analysis
from braintrace._compiler.core.candidates import candidates_of
from braintrace._compiler.core.step_graph import step_graph
from braintrace._compiler.frontend.trace import trace_model
from braintrace._compiler.groups.alignment import Alignment
from braintrace._compiler.groups.hidden_groups import find_hidden_groups

WIDTH, BATCH = 16, 8
PACKAGE = str(pathlib.Path(braintrace.__file__).parent)


class Layer(brainstate.nn.Module):
    """About 50 equations, a matrix and a diagonal weight."""

    def __init__(self):
        super().__init__()
        self.w = brainstate.ParamState(jnp.eye(WIDTH))
        self.leak = brainstate.ParamState(jnp.zeros(WIDTH))

    def init_state(self, batch_size):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, WIDTH)))

    def update(self, x):
        drive = braintrace.matmul(x, self.w.value)
        for _ in range(20):
            drive = jnp.tanh(1.1 * drive)
        decay = braintrace.element_wise(self.leak.value, jax.nn.sigmoid)
        self.h.value = decay * self.h.value + drive
        return self.h.value


def stack_of(layers, batch=BATCH):
    model = brainstate.nn.Sequential(*(Layer() for _ in range(layers)))
    brainstate.nn.init_all_states(model, batch_size=batch)
    return model


def compiled(model, batch=BATCH):
    return braintrace.compile_etrace_graph(model, jnp.ones((batch, WIDTH)))


def lines_run(layers, batch=BATCH):
    """Lines of the library that an analysis executes: the same in every run."""
    compiled(stack_of(layers, batch), batch)  # what a process finds once is not counted
    model, count = stack_of(layers, batch), 0

    def line(frame, event, _):
        nonlocal count
        count += event == "line"
        return line

    def enter(frame, event, _):
        return line if frame.f_code.co_filename.startswith(PACKAGE) else None

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        compiled(model, batch)
    finally:
        sys.settrace(before)
    return count


def test_the_work_grows_linearly_with_the_number_of_layers():
    few, more, many = (lines_run(layers) for layers in (2, 4, 8))
    assert many - more == pytest.approx(2 * (more - few), rel=0.03)


def test_the_work_does_not_grow_with_the_batch():
    assert lines_run(1, 64) == lines_run(1, 256)


def test_what_is_computed_element_by_element_shares_its_positions():
    traced, _ = trace_model(stack_of(1), (jnp.ones((BATCH, WIDTH)),), None, 32)
    analysis = Analysis(traced.program)
    alignment = Alignment(analysis, candidates_of(traced, analysis, ()))
    graph = step_graph(traced, analysis, alignment.candidates)
    _, ((walk,),) = find_hidden_groups(
        traced, alignment, graph, (), every_state=False, jacobian="elementwise"
    )
    reached = [ids for ids in walk.ids.values() if ids.shape == (BATCH, WIDTH)]
    assert len(reached) > 40
    assert len({id(ids) for ids in reached}) == 1


def bytes_of_analysis(units, batch):
    """What an analysis of an LSTM takes at most, at once."""
    model = braintrace.nn.LSTMCell(4, units)
    brainstate.nn.init_all_states(model, batch_size=batch)
    tracemalloc.start()
    try:
        braintrace.compile_etrace_graph(model, jnp.ones((batch, 4)))
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_an_analysis_takes_a_few_copies_of_the_largest_positions():
    bytes_of_analysis(4, 2)
    units, batch = 128, 64
    positions = 4 * (batch * 4 * units)  # of the four gates side by side
    grown = bytes_of_analysis(units, batch) - bytes_of_analysis(4, 2)
    assert grown < 20 * positions


def test_ten_layers_of_500_equations_take_less_than_two_seconds():
    model = stack_of(10)
    start = time.process_time()
    graph = compiled(model)
    assert time.process_time() - start < 2.0
    assert len(graph.traced.program.equations) > 450
