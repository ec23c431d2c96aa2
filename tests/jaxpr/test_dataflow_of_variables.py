"""Lattices with one entry for each variable: linearity and binding times.

For every primitive, what the engine calls proportional is so in numbers, and what it calls constant
does not change.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dataflow_cases import CASES
from dataflow_trials import drawn
from test_dataflow import each, first_forms, sets_of, traced

from braintrace._jax import Primitive
from braintrace._jaxpr import program_of
from braintrace._jaxpr.dataflow import (
    BindingTime,
    Constants,
    Kind,
    flows_of_outputs,
    kinds_of,
    kinds_of_outputs,
    question_of_taint,
)

pytestmark = pytest.mark.usefixtures("float64_in_every_thread")
CONSTANT, PARAMETER, DATA = BindingTime
ROUNDED = {"convert_element_type", "reduce_precision"}
TAINT = question_of_taint()


def inexact(case):
    return [i for i in case.places if np.issubdtype(case.operands[i].dtype, np.inexact)]


OF_NUMBERS = [case for case in CASES if inexact(case)]


@each([*first_forms(OF_NUMBERS), *(c for c in OF_NUMBERS if str(c) == "scatter-applied")])
def test_what_the_engine_calls_proportional_is(case):
    """In each operand by itself, and in all of them together."""
    jaxpr, generator = traced(case), np.random.default_rng(0)
    single = [[i] for i in inexact(case)]
    for moving in [*single, inexact(case)]:
        is_moving = [i in moving for i in range(len(case.operands))]
        kinds = kinds_of_outputs(jaxpr, [Kind.LINEAR if m else Kind.FREE for m in is_moving])
        if not {Kind.LINEAR, Kind.ZERO} & {*kinds}:
            continue
        first, second = ([drawn(generator, x) for x in case.operands] for _ in range(2))
        second = [y if m else x for x, y, m in zip(first, second, is_moving, strict=True)]
        pairs = zip(first, second, is_moving, strict=True)
        both = [2 * x + y if m else x for x, y, m in pairs]
        found = [
            [*map(np.asarray, jax.tree.leaves(case.function(*jax.device_put(operands))))]
            for operands in (first, second, both)
        ]
        for kind, f, g, h in zip(kinds, *found, strict=True):
            if kind is Kind.LINEAR:
                rounding = 1e-2 if case.name in ROUNDED else 1e-9
                np.testing.assert_allclose(2 * f + g, h, rounding, rounding)
            if kind is Kind.ZERO:
                assert not np.any(h)


def alike(name):
    primitive = Primitive(name)
    primitive.def_abstract_eval(lambda *x: x[0])
    return primitive


def test_an_unknown_primitive_is_not_proportional():
    (kind,) = kinds_of(alike("tests_alike").bind, jnp.ones(3))
    assert kind is Kind.OTHER


def test_a_value_is_proportional_where_its_body_is():
    """Whatever its derivative is, about which `Derivative.nonlinear` says more."""

    def with_rules(function):
        forward, backward = jax.custom_jvp(function), jax.custom_vjp(function)
        forward.defjvp(lambda x, t: (function(*x), jnp.sin(*t)))
        backward.defvjp(lambda x: (function(x), None), lambda _, g: (jnp.sin(g),))
        return forward, backward

    doubles, squares = with_rules(lambda x: 2 * x), with_rules(lambda x: x * x)
    found = kinds_of(lambda x: [f(x) for f in (*doubles, *squares)], jnp.ones(3))
    assert found == [Kind.LINEAR] * 2 + [Kind.OTHER] * 2


@each(CASES)
def test_data_reach_what_depends_on_them(case):
    """Where no element depends on data, an engine that says less is not wrong."""
    jaxpr = traced(case)
    times = [DATA if i in case.places else CONSTANT for i in range(len(case.operands))]
    found = flows_of_outputs(TAINT, Constants(program_of(jaxpr)), times)
    sizes = np.cumsum([0, *(var.aval.size for var in jaxpr.jaxpr.outvars)])
    depends = sets_of(case, jaxpr).any(1)
    for time, start, end in zip(found, sizes[:-1], sizes[1:], strict=True):
        assert time is DATA or not depends[start:end].any()


def times_of(function, *times):
    jaxpr = jax.make_jaxpr(function)(*(jnp.ones(3) for _ in times))
    return flows_of_outputs(TAINT, Constants(program_of(jaxpr)), times)


def test_a_parameter_is_followed_as_far_as_a_derivative_goes():
    def function(w, x):
        index = jnp.argmax(w)
        return 2 * w, jax.lax.stop_gradient(w), x[index], w * x, jax.lax.stop_gradient(x), w[index]

    assert times_of(function, PARAMETER, DATA) == [PARAMETER, CONSTANT, DATA, DATA, DATA, PARAMETER]
    assert times_of(function, PARAMETER, CONSTANT)[2] is CONSTANT


def test_what_a_loop_carries_is_data_if_a_later_step_or_its_end_is():
    def shifted(w, x):
        return jax.lax.scan(lambda c, _: ((c[1], c[2], x), None), (w, w, w), None, length=3)[0]

    def until(w, x):
        return jax.lax.while_loop(lambda c: c[0].sum() < x.sum(), lambda c: (2 * c[0],), (w,))

    assert times_of(shifted, PARAMETER, DATA) == [DATA] * 3
    assert times_of(shifted, PARAMETER, CONSTANT) == [PARAMETER] * 3
    assert times_of(until, PARAMETER, DATA) == [DATA]
    assert times_of(until, PARAMETER, CONSTANT) == [PARAMETER]


def test_random_numbers_without_a_key_are_data():
    def function(w):
        key = jax.random.key(0)
        return w, jax.random.normal(key, (3,)), jax.lax.rng_uniform(0.0, 1.0, (3,))

    assert times_of(function, PARAMETER) == [PARAMETER, CONSTANT, DATA]


def test_a_parameter_behind_a_custom_derivative_is_followed_though_its_value_is_held():
    held = jax.custom_vjp(jax.lax.stop_gradient)
    held.defvjp(lambda w: (held(w), None), lambda _, g: (g,))
    assert times_of(held, PARAMETER) == [PARAMETER]
