"""The dataflow engine: what it says of each primitive is what a trial shows.

An element that the engine does not name has no influence; for most primitives, every element that
it names has one.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dataflow_cases import CASES, COUPLED, MATRICES, OF_OTHER_VERSIONS, OF_THE_LIBRARY
from dataflow_trials import (
    PRIMITIVES,
    ROUNDING,
    Case,
    dependences_by_trial,
    in_groups,
    jacobian,
)

from braintrace._jax import Primitive, bind, equations_inside
from braintrace._jaxpr import carries_derivative, interpret, program_of
from braintrace._jaxpr.dataflow import (
    BOTTOM,
    ELEMENTWISE,
    IN_ORDER,
    TOP,
    Constants,
    First,
    Labels,
    Question,
    Sets,
    everything,
    flows_back,
    flows_from,
    flows_of_outputs,
    flows_to,
    joined,
    moved_operands,
    sources_of,
    spread,
)
from braintrace._jaxpr.dataflow import flow as engine
from braintrace._jaxpr.dataflow.moves import NOWHERE
from braintrace._jaxpr.dataflow.primitives import TABLE, Entry

pytestmark = pytest.mark.usefixtures("float64_in_every_thread")


def each(cases):
    return pytest.mark.parametrize("case", [pytest.param(c, id=str(c)) for c in cases])


def first_forms(cases):
    """The first case of each primitive; others run the same lines with other numbers."""
    return [*{case.name: case for case in reversed(cases)}.values()]


def moved_by_table(name):
    return name in IN_ORDER or TABLE.get(name, Entry()).role == "move"


OF_FLOATS = [c for c in CASES if all(c.operands[i].dtype == float for i in c.places)]

WITH_DERIVATIVES = (
    *("stop_gradient", "argmax", "argmin", "top_k", "lu", "custom_jvp_call", "custom_vjp_call"),
    *("while-decided", "abs", "clamp", "cumsum", "dot_general-batched", "scan-rolled"),
    *("conv_general_dilated-groups", "scatter-add-window_between", "reduce_window-start"),
)


GROUPS = in_groups(CASES)
GROUPS_WITH_DERIVATIVES = in_groups(OF_FLOATS)


def traced(case):
    if case.name not in PRIMITIVES:
        pytest.skip(f"this version of JAX has no {case.name}")
    jaxpr = jax.make_jaxpr(case.function)(*case.operands)
    names = {e.primitive.name for o in jaxpr.eqns for e in (o, *equations_inside(o))}
    assert case.name in names
    return jaxpr


def sets_of(case, jaxpr, **options):
    """Whether the engine says that each element of the results depends on each that is followed."""
    sizes = [x.size if i in case.places else 0 for i, x in enumerate(case.operands)]
    lattice, starts, start = Sets(sum(sizes)), [], 0
    for x, size in zip(case.operands, sizes, strict=True):
        own = np.zeros((x.size, lattice.count), bool)
        own[np.arange(size), start + np.arange(size)] = True
        starts.append(own.reshape(*x.shape, -1) if size else None)
        start += size
    found = flows_of_outputs(Question(lattice, **options), Constants(program_of(jaxpr)), starts)
    shapes = [var.aval.shape for var in jaxpr.jaxpr.outvars]
    full = [lattice.empty(s) if f is None else f for f, s in zip(found, shapes, strict=True)]
    return np.concatenate([f.reshape(-1, lattice.count) for f in full])


@each(CASES)
def test_an_element_depends_on_what_the_engine_names(case):
    claimed = sets_of(case, traced(case))
    shown = dependences_by_trial(case, claimed, GROUPS[case])
    assert not (shown & ~claimed).any(), "the engine misses a dependence"
    if case.is_exact:
        assert not (claimed & ~shown).any(), "the engine names an element without influence"


@pytest.mark.rows(*WITH_DERIVATIVES)
@each(OF_FLOATS)
def test_a_derivative_that_the_engine_calls_zero_is_zero(case):
    jaxpr = traced(case)
    claimed = sets_of(case, jaxpr, derivatives=True)
    try:
        found = jacobian(case, GROUPS_WITH_DERIVATIVES[case])
    except (NotImplementedError, TypeError, ValueError) as error:
        pytest.skip(f"no derivative: {error}")
    assert not ((np.abs(found) > ROUNDING) & ~claimed).any()


def sets_back(case, jaxpr):
    """Whether the engine lets the cotangent of each element that is followed depend on each result.

    Equations are passed in reverse; the answer has the shape of the Jacobian.
    """
    program, results = program_of(jaxpr), [*jaxpr.jaxpr.outvars]
    constants, lattice = Constants(program), Sets(sum(var.aval.size for var in results))
    rows = np.split(np.eye(lattice.count, dtype=bool), np.cumsum([v.aval.size for v in results]))
    known = {
        v: row.reshape(*v.aval.shape, lattice.count) for v, row in zip(results, rows, strict=False)
    }
    for equation in reversed(program.equations):
        cotangents = [known.get(var) for var in equation.outvars]
        if all(flow is None for flow in cotangents):
            continue
        found = flows_back(lattice, constants, equation, cotangents)
        if found is None:
            one = everything(lattice, cotangents)
            found = [spread(lattice, one, atom.aval.shape) for atom in equation.invars]
        for atom, flow in zip(equation.invars, found, strict=True):
            if flow is not None and carries_derivative(atom):
                known[atom] = joined(lattice, [known.get(atom), flow])
    inputs = [jaxpr.jaxpr.invars[i] for i in case.places]
    full = [lattice.empty(v.aval.shape) if known.get(v) is None else known[v] for v in inputs]
    return np.concatenate([f.reshape(-1, lattice.count) for f in full]).T


@each(first_forms(OF_FLOATS))
def test_a_cotangent_that_the_engine_does_not_name_has_no_influence(case):
    jaxpr = traced(case)
    claimed = sets_back(case, jaxpr)
    try:
        found = jacobian(case, GROUPS_WITH_DERIVATIVES[case])
    except (NotImplementedError, TypeError, ValueError) as error:
        pytest.skip(f"no derivative: {error}")
    assert not ((np.abs(found) > ROUNDING) & ~claimed).any()


@each(CASES)
def test_labels_are_the_image_of_sets(case):
    """A label is that of all elements in the set, or `TOP` if they have several."""
    jaxpr = traced(case)
    sets, generator = sets_of(case, jaxpr), np.random.default_rng(3)
    labels = generator.integers(-1, 3, sets.shape[1]).astype(np.int32)
    starts, start = [], 0
    for place, x in enumerate(case.operands):
        own = labels[start : start + x.size] if place in case.places else None
        starts.append(None if own is None else own.reshape(x.shape))
        start += 0 if own is None else x.size
    found = flows_of_outputs(Question(Labels()), Constants(program_of(jaxpr)), starts)
    shapes = [var.aval.shape for var in jaxpr.jaxpr.outvars]
    full = [Labels().empty(s) if f is None else f for f, s in zip(found, shapes, strict=True)]
    expected = [labels[own][labels[own] != BOTTOM] for own in sets]
    expected = [e[0] if len({*e}) == 1 else TOP if len(e) else BOTTOM for e in expected]
    np.testing.assert_array_equal(np.concatenate([f.ravel() for f in full]), expected)


def test_every_primitive_has_a_case_or_is_known_to_couple_everything():
    named = {case.name for case in CASES}
    assert PRIMITIVES.keys() - named <= COUPLED
    followed = {n for n, entry in TABLE.items() if entry.flow} | engine.DRIVERS.keys()
    assert not followed & COUPLED
    assert followed - named == OF_OTHER_VERSIONS | OF_THE_LIBRARY


@each([Case(n, None, ()) for n in sorted(OF_OTHER_VERSIONS)])
def test_names_of_other_versions(case):
    """They are elementwise, or a view of the same elements."""
    assert case.name in ELEMENTWISE or case.name == "expand_dims"


def moves_of(jaxpr, operands):
    """Each equation of a program that only moves elements, with its operands and results."""
    found = []

    def run(_, equation, values):
        results = bind(equation, values)
        if moved_operands(equation) or equation.primitive.name in IN_ORDER:
            found.append((equation, [*map(np.asarray, values)], [*map(np.asarray, results)]))
        return results

    interpret(jaxpr, operands, run)
    return found


@each([case for case in CASES if moved_by_table(case.name)])
def test_a_moved_element_is_its_source(case):
    jaxpr = traced(case)
    constants = Constants(program_of(jaxpr))
    for equation, values, results in moves_of(jaxpr, case.operands):
        parts, sources = moved_operands(equation), sources_of(constants, equation)
        if parts and sources is not None:
            elements = np.concatenate([values[i].ravel() for i in parts])
            for source, result in zip(sources, results, strict=True):
                is_known = source != NOWHERE
                np.testing.assert_array_equal(elements[source[is_known]], result[is_known])
        if equation.primitive.name in IN_ORDER and not equation.params.get("dimensions"):
            np.testing.assert_array_equal(
                values[0].astype(results[0].dtype).ravel(), results[0].ravel()
            )


def test_an_unknown_primitive_couples_everything():
    primitive = Primitive("tests_alike")
    primitive.def_abstract_eval(lambda x: x)
    case = Case("tests_alike", primitive.bind, (np.ones(3),))
    assert sets_of(case, jax.make_jaxpr(primitive.bind)(np.ones(3))).all()


@each([c for c in CASES if c.name in ("custom_jvp_call", "custom_vjp_call")])
def test_the_body_of_a_custom_derivative_is_not_followed(case):
    assert sets_of(case, traced(case), derivatives=True).all()


def test_flows_between_variables_of_a_program():
    """Of two sums, the flow of the first stands in for what it is computed from."""

    def function(x, y):
        first = x + y
        second = first[::-1] + y
        return first, second, jnp.sin(second)

    program = program_of(jax.make_jaxpr(function)(np.ones(3), np.ones(3)))
    (_, y), (first, second, end) = program.in_vars, program.out_atoms
    numbers, question, constants = np.arange(3), Question(Labels()), Constants(program)
    found = flows_to(question, constants, {first: numbers}, [end, y, first])
    np.testing.assert_array_equal(found[0], [2, 1, 0])
    assert found[1] is None
    np.testing.assert_array_equal(found[2], numbers)
    # A start keeps its flow, though it is computed from another one.
    (kept,) = flows_to(question, constants, {first: numbers, y: numbers + 3}, [first])
    np.testing.assert_array_equal(kept, numbers)
    every = flows_from(question, constants, {y: numbers})
    np.testing.assert_array_equal(every[end], [TOP, 1, TOP])
    early = flows_from(question, constants, {y: numbers}, program.producer[first])
    assert first in early and second not in early


@each([case for case in CASES if case.operands[0] is MATRICES])
def test_matrices_of_a_batch_are_independent(case):
    jaxpr = traced(case)
    starts = [np.arange(len(x)).repeat(x[0].size).reshape(x.shape) for x in case.operands]
    for flow in flows_of_outputs(Question(Labels()), Constants(program_of(jaxpr)), starts):
        for sample, labels in enumerate(flow):
            assert (labels == sample).all()


def test_of_elements_that_meet_the_least_moved_counts():
    def function(v, w):
        rolled = jnp.roll(v, 1)
        again = jnp.roll(rolled, 1)
        return 0.9 * v + rolled, rolled + jnp.roll(v, -1), again + rolled, v + v.sum() * w, w, v @ v

    v, w = (np.arange(1.0, 4.0),) * 2
    program, first = program_of(jax.make_jaxpr(function)(v, w)), First(3)
    start = {program.in_vars[0]: first.numbered(np.arange(3))}
    targets = program.out_atoms
    found = flows_to(Question(first), Constants(program), start, targets)
    expected = [0, 1, 2], [BOTTOM] * 3, [2, 0, 1], [0, 1, 2], None, BOTTOM
    for flow, numbers in zip(found, expected, strict=True):
        own = None if flow is None else first.numbers(flow)
        np.testing.assert_array_equal(own, numbers)
