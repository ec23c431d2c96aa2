# ruff: noqa
"""Temporary: the dataflow engine against the two analyses that it replaces."""

import functools
import warnings

import brainstate
import numpy as np
import pytest
import saiunit as u

import braintrace
from braintrace._compiler import dependence, sample_axes, samples
from braintrace._jaxpr import program_of
from braintrace._jaxpr.dataflow import NONE, Constants, Labels, Question, flows_of_outputs

import nn_models, zoo, readouts
from test_jacobians import graph_of, jacobian_of, REFUSED
from random_cells import Program, programs
from test_random_cells import entry_of
import hypothesis

pytestmark = pytest.mark.usefixtures("float64_in_every_thread")
LOG = []


def compare_samples(jaxpr, given):
    old = OLD(jaxpr, given)
    new = flows_of_outputs(Question(Labels()), Constants(program_of(jaxpr)), given)
    shapes = [v.aval.shape for v in jaxpr.jaxpr.outvars]
    for a, b, s in zip(old, new, shapes):
        assert (a is None) == (b is None), (a, b)
        a, b = (np.full(s, NONE) if x is None else x for x in (a, b))
        LOG.append(("samples", np.array_equal(a, b)))
        if not np.array_equal(a, b):
            finer = ((b == a) | (a == -2)).all()
            LOG.append(("finer" if finer else "COARSER", a, b))
            print("finer" if finer else "COARSER", s)
            assert finer
    return old


OLD = samples.samples_of_outputs


def new_dependences(analysis, targets, starts):
    from braintrace._compiler.jacobian_sparsity import dependences as f

    return f(analysis, targets, starts)


OLD_DEP = dependence.dependences


def compare_dependences(analysis, targets, starts):
    old = OLD_DEP(analysis, targets, starts)
    new = new_dependences(analysis, targets, starts)
    for a, b in zip(old, new):
        same = np.array_equal(a, b)
        LOG.append(("sets", same))
        if not same:
            print("sets", "finer" if not (b & ~a).any() else "COARSER", a.sum(), b.sum())
            assert not (b & ~a).any()
    return old


@pytest.fixture(autouse=True)
def patched(monkeypatch):
    monkeypatch.setattr(sample_axes, "samples_of_outputs", compare_samples)
    monkeypatch.setattr(dependence, "dependences", compare_dependences)
    with brainstate.environ.context(dt=1.0 * u.ms):
        yield


@pytest.mark.parametrize("entry", [*zoo.MODELS, *nn_models.MODELS], ids=lambda e: e.name)
def test_models(entry):
    try:
        graph_of(entry, "snap", n=2)
    except braintrace.CompilationError as e:
        print(str(e)[:100])


def test_cells():
    count = []

    @hypothesis.settings(
        max_examples=150,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(programs())
    def check(program):
        try:
            graph_of(entry_of(program), "snap", n=2)
            count.append(1)
        except braintrace.CompilationError as e:
            count.append(0)

    check()
    print("cells", len(count), sum(count))


import operation_cases
import ops_catalogue


@pytest.mark.parametrize("case", operation_cases.CASES, ids=lambda c: c.name)
def test_operations(case):
    model = operation_cases.Diagonal(case)
    for rule in ("snap", "rtrl"):
        try:
            braintrace.compile(model, rule, case.inputs[0], batch_size=2)
        except braintrace.CompilationError as e:
            print(str(e)[:100])


@pytest.mark.parametrize("operation", ops_catalogue.OPERATIONS, ids=lambda c: c.primitive)
def test_catalogue(operation):
    """Sets through the operation itself and its transformations, as a derivative's program."""
    import jax
    from braintrace._compiler.analysis import Analysis

    for f in (
        operation.marked,
        lambda x, w: jax.vjp(lambda x: operation.plain(x, w), x)[1](operation.plain(x, w))[0],
    ):
        for g, x in ((f, operation.x), (jax.vmap(f, (0, None)), np.stack([operation.x] * 2))):
            try:
                jaxpr = jax.make_jaxpr(g)(x, operation.weights)
            except Exception as e:
                print("no", type(e))
                continue
            program = program_of(jaxpr)
            analysis = Analysis(program)
            start = program.in_vars[0]
            compare_dependences(
                analysis,
                [v for v in jaxpr.jaxpr.outvars],
                {start: np.eye(start.aval.size, dtype=bool)},
            )
            n = start.aval.shape[0]
            given = [samples.laid_out(start.aval.shape, 0, n), *[None] * (len(program.in_vars) - 1)]
            compare_samples(jaxpr, given)


def test_summary():
    import collections

    print(collections.Counter(x[:2] if x[0] in ("samples", "sets") else x[0] for x in LOG))
