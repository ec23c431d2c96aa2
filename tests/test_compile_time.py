"""The analysis of a model is quick, and its work grows with the number of equations."""

import pathlib
import sys
import time

import brainstate
import jax
import jax.numpy as jnp
import pytest

import braintrace

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


def stack_of(layers):
    model = brainstate.nn.Sequential(*(Layer() for _ in range(layers)))
    brainstate.nn.init_all_states(model, batch_size=BATCH)
    return model


def compiled(model):
    return braintrace.compile_etrace_graph(model, jnp.ones((BATCH, WIDTH)))


def lines_run(layers):
    """Lines of the library that an analysis executes: the same in every run."""
    model, count = stack_of(layers), 0

    def line(frame, event, _):
        nonlocal count
        count += event == "line"
        return line

    def enter(frame, event, _):
        return line if frame.f_code.co_filename.startswith(PACKAGE) else None

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        compiled(model)
    finally:
        sys.settrace(before)
    return count


def test_the_work_grows_linearly_with_the_number_of_layers():
    few, more, many = (lines_run(layers) for layers in (4, 8, 16))
    assert many - more == pytest.approx(2 * (more - few), rel=0.03)


def test_ten_layers_of_500_equations_take_less_than_two_seconds():
    model = stack_of(10)
    start = time.process_time()
    graph = compiled(model)
    assert time.process_time() - start < 2.0
    assert len(graph.traced.program.equations) > 450
