"""One interpreter runs jaxprs: what is needed, as rules say, through the bodies of equations."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assertions import assert_trees_close

from braintrace._jax import Equation, bind, equations_inside, source_line
from braintrace._jaxpr import evaluate, inlined, program_of

X = np.linspace(-1.0, 1.0, 3, dtype=np.float32)


def names(jaxpr):
    """Names of a jaxpr's primitives, those in its bodies included."""
    every = (e for outer in jaxpr.eqns for e in (outer, *equations_inside(outer)))
    return [equation.primitive.name for equation in every]


# --- what is run


@pytest.fixture
def program():
    def step(x):
        y = jnp.sin(x)
        return y + 1.0, jnp.exp(y), jnp.tanh(x)

    return program_of(jax.make_jaxpr(step)(X))


def recorded(met: list[str]):
    def rule(equation: Equation, operands):
        met.append(equation.primitive.name)

    return rule


def test_only_what_a_target_needs_is_run(program):
    met: list[str] = []
    (found,) = evaluate(
        program, program.out_atoms[1:2], {program.in_vars[0]: X}, rules=recorded(met)
    )
    assert met == ["sin", "exp"]
    np.testing.assert_allclose(found, np.exp(np.sin(X)), rtol=1e-6)


def test_nothing_behind_an_override_is_run(program):
    met: list[str] = []
    (y,) = program.equations[0].outvars
    found = evaluate(program, program.out_atoms[:2], {}, {y: jnp.zeros(3)}, recorded(met))
    assert met == ["add", "exp"]
    np.testing.assert_array_equal(found, np.ones((2, 3)))


def test_an_override_stands_where_its_equation_is_run_for_another_output():
    program = program_of(jax.make_jaxpr(lambda x: jax.lax.top_k(x, 2))(X))
    largest, where = program.equations[0].outvars
    found = evaluate(program, [largest, where], {program.in_vars[0]: X}, {largest: jnp.zeros(2)})
    assert_trees_close(found, [np.zeros(2, np.float32), np.array([2, 1], np.int32)])


# --- source lines


def first(x):
    return jnp.linalg.norm(x)


def second(x):
    return jnp.linalg.norm(x)


@pytest.mark.core
@pytest.mark.parametrize("rule", [None, bind])
def test_what_a_function_of_jax_does_stands_in_the_line_that_calls_it(rule):
    """JAX traces a function of its own once, and keeps the line that called it first."""
    for function in (first, second):
        flat = inlined(jax.make_jaxpr(function)(X), rule)
        line = inspect.getsourcelines(function)[1] + 1
        for equation in flat.eqns:
            assert f"test_interpreter.py:{line}:" in source_line(equation)
