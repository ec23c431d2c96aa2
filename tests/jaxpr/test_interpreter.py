"""One interpreter runs jaxprs: what is needed, as rules say, through the bodies of equations."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assertions import assert_trees_close
from ops_catalogue import quick_jit

from braintrace._jax import Equation, bind, equations_inside, source_line
from braintrace._jaxpr import evaluate, evaluate_all, inlined, program_of, rebuilt

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


def test_rules_by_index_are_about_single_equations(program):
    doubled = {1: lambda equation, operands: [2 * value for value in bind(equation, operands)]}
    found = evaluate(program, program.out_atoms, {program.in_vars[0]: X}, rules=doubled)
    whole = evaluate_all(program.jaxpr, [X], doubled)
    wanted = [2 * (np.sin(X) + 1), np.exp(np.sin(X)), np.tanh(X)]
    assert_trees_close(found, wanted)
    assert_trees_close(whole, wanted)


def test_effects_are_run_where_they_are_asked_for():
    def step(x):
        jax.debug.print("{}", jnp.cos(x))
        return jnp.sin(x)

    program = program_of(jax.make_jaxpr(step)(X))
    inputs = {program.in_vars[0]: X}
    for effects, wanted in ((False, {"sin"}), (True, {"sin", "cos", "debug_print"})):
        met: list[str] = []
        evaluate(program, program.out_atoms, inputs, rules=recorded(met), effects=effects)
        assert {name.replace("debug_callback", "debug_print") for name in met} == wanted


# --- bodies


def a_call(function):
    return jax.jit(lambda x: jnp.sum(function(x)))


def a_checkpoint(function):
    return jax.checkpoint(lambda x: jnp.sum(jnp.exp(function(x))))


def a_branch(function):
    def branches(x):
        return jax.lax.cond(x[0] < 0, lambda v: function(v).sum(), lambda v: v.sum(), x)

    return branches


def a_scan(function):
    def loop(x):
        def body(carried, now):
            return carried * function(now * x[1]), carried + now

        last, stacked = jax.lax.scan(body, x[0], x, reverse=True)
        return last + stacked @ x

    return loop


def a_while(function):
    def loop(x):
        last = x[2] + 2

        def goes_on(carried):
            return carried[0] + function(0.0) < last

        def body(carried):
            return carried[0] + 1, carried[1] + function(x * carried[0])

        return jax.lax.while_loop(goes_on, body, (x[1], x))[1].sum()

    return loop


def a_jvp_rule(function):
    @jax.custom_jvp
    def doubled(x):
        return function(x).sum()

    @doubled.defjvp
    def _(primals, tangents):
        y, dy = jax.jvp(lambda x: function(x).sum(), primals, tangents)
        return y, 2 * dy

    return doubled


def a_vjp_rule(function):
    @jax.custom_vjp
    def clipped(x):
        return function(x).sum()

    def forward(x):
        return clipped(x), x

    def backward(x, g):
        (found,) = jax.vjp(lambda x: function(x).sum(), x)[1](g)
        return (jnp.clip(found, -0.6, 0.6),)

    clipped.defvjp(forward, backward)
    return clipped


HOLDS = {
    a_call: None,
    a_checkpoint: "checkpoint",
    a_branch: "cond",
    a_scan: "scan",
    a_while: "while",
    a_jvp_rule: "custom_jvp_call",
    a_vjp_rule: "custom_vjp_call",
}
"""What holds the function's body, and is not flattened."""


def doubled_waves(equation, operands):
    """Double a wave and its derivative, in whatever body they stand."""
    if equation.primitive.name in ("sin", "cos"):
        return [2 * value for value in bind(equation, operands)]
    return rebuilt(equation, operands, lambda body, v: evaluate_all(body, v, doubled_waves))


@pytest.mark.core
@pytest.mark.parametrize("build", HOLDS)
def test_bodies_are_run_and_what_holds_them_is_rebuilt(build):
    before, wanted = build(jnp.sin), build(lambda x: 2 * jnp.sin(x))

    def rewritten(x):
        return evaluate_all(jax.make_jaxpr(before)(x), [x], doubled_waves)[0]

    found = names(jax.make_jaxpr(rewritten)(X))
    assert HOLDS[build] is None or HOLDS[build] in {
        name.replace("remat2", "checkpoint") for name in found
    }
    differentiated = (lambda function: function) if build is a_while else jax.value_and_grad
    run = quick_jit(lambda x: (differentiated(rewritten)(x), differentiated(wanted)(x)))
    assert_trees_close(*run(X))


def test_an_equation_without_bodies_is_not_rebuilt(program):
    assert rebuilt(program.equations[0], [X], evaluate_all) is None


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
