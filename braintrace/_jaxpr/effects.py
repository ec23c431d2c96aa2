"""Record and replay of callbacks: each runs once, its results are replayed.

A callback or print must run once, although a step is evaluated several times: for its outputs, for
each state, and for derivatives. `recorded` runs a program and keeps the callback results, also
inside of loops and branches. `replayed` runs the program on these results, without effects. The
number of callbacks in a ``while`` loop is unknown, so the results of the whole loop are kept
instead, without a derivative.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from .._jax import (
    TRANSPARENT_CALLS,
    AnyJaxpr,
    Equation,
    Primitive,
    bind,
    call_body,
    define_from_impl,
    open_jaxpr,
    sub_jaxprs,
)
from .._typing import PyTree
from .bodies import loop_of, rebuilt
from .evaluate import interpret

Answers = list[PyTree]
"""The results of each equation with an effect, in order of execution."""


def can_be_replayed(jaxpr: AnyJaxpr) -> bool:
    """Test whether all effects of a program are callbacks whose results can be kept."""
    acting = (equation for equation in open_jaxpr(jaxpr)[0].eqns if equation.effects)
    return all(map(_can_be_kept, acting))


def _can_be_kept(equation: Equation) -> bool:
    name, bodies = equation.primitive.name, [*sub_jaxprs(equation)]
    if not bodies:
        return "callback" in name or "print" in name
    is_known = name in ("scan", "cond", "while") or name in TRANSPARENT_CALLS
    return is_known and all(map(can_be_replayed, bodies))


def _has_answers(equation: Equation) -> bool:
    inside = (inner for body in sub_jaxprs(equation) for inner in open_jaxpr(body)[0].eqns)
    return any(
        _has_answers(inner) if any(True for _ in sub_jaxprs(inner)) else bool(inner.outvars)
        for inner in inside
        if inner.effects
    )


def recorded(jaxpr: AnyJaxpr, values: Sequence[Any]) -> tuple[list[Any], Answers]:
    """Run a program; return its results and its callback results."""
    return _run(jaxpr, values, None)


def replayed(jaxpr: AnyJaxpr, values: Sequence[Any], answers: Answers) -> list[Any]:
    """Run a program on recorded callback results; no callback runs."""
    return _run(jaxpr, values, answers)[0]


def _run(
    jaxpr: AnyJaxpr, values: Sequence[Any], answers: Answers | None
) -> tuple[list[Any], Answers]:
    """Run a program, and record its callback results unless they are given."""
    given = None if answers is None else iter(answers)
    new: Answers = []

    def run(_: int, equation: Equation, operands: list[Any]) -> Sequence[Any]:
        if not equation.effects:
            return bind(equation, operands)
        if given is not None:
            return _acting(equation, operands, next(given))[0]
        results, answer = _acting(equation, operands, None)
        new.append(answer)
        return results

    return interpret(jaxpr, values, run), new


def _acting(
    equation: Equation, operands: list[Any], answers: PyTree | None
) -> tuple[list[Any], PyTree]:
    """Run an equation with effects."""
    name = equation.primitive.name
    if name in TRANSPARENT_CALLS:
        return _run(call_body(equation), operands, answers)
    if name == "scan":
        return _scanned(equation, operands, answers)
    if name == "cond":
        return _branched(equation, operands, answers)
    if answers is None:
        results = bind(equation, operands)
        return results, [] if _is_silent(equation) else results
    if _is_silent(equation):
        silent_results = rebuilt(equation, operands, _silent)
        assert silent_results is not None
        return silent_results, answers
    asked = "while_with_callback" if name == "while" else name
    return [_answering(asked).bind(answer, *operands) for answer in answers], answers


def _is_silent(equation: Equation) -> bool:
    """Test whether an equation is a ``while`` loop whose callbacks return no results."""
    return equation.primitive.name == "while" and not _has_answers(equation)


@functools.cache
def _answering(name: str) -> Any:
    """Return an operation that returns its first operand, named after the callback.

    A jaxpr with it still shows the callback. The result has a derivative by the answer, but none by
    what the callback was asked: to differentiate it by that raises an error.
    """

    def tangent(primals: Any, tangents: Any) -> Any:
        if all(isinstance(asked, SymbolicZero) for asked in tangents[1:]):
            return primals[0], tangents[0]
        raise ValueError(
            f"`{name}` has no derivative. Pass its inputs through `jax.lax.stop_gradient`, or "
            "define a derivative with `jax.custom_jvp`."
        )

    answer = jax.custom_jvp(lambda answer, *asked: answer)
    answer.defjvp(tangent, symbolic_zeros=True)
    primitive = Primitive(name)
    define_from_impl(primitive, answer, lambda _, operands, dims, params: (operands[0], dims[0]))
    return primitive


def _silent(body: AnyJaxpr, values: list[Any]) -> list[Any]:
    """Run a body without its callbacks, which return no results."""

    def run(_: int, equation: Equation, operands: list[Any]) -> Sequence[Any]:
        if not equation.effects:
            return bind(equation, operands)
        if not any(True for _ in sub_jaxprs(equation)):
            return []
        results = rebuilt(equation, operands, _silent)
        assert results is not None
        return results

    return interpret(body, values, run)


def _scanned(
    equation: Equation, operands: list[Any], answers: PyTree | None
) -> tuple[list[Any], PyTree]:
    """Run a ``scan``; record callback results along a leading axis, or replay them."""
    loop, params = loop_of(equation, operands), equation.params

    def body(carried: list[Any], now: tuple[list[Any], PyTree]) -> Any:
        slices, step_answers = now
        values = [*loop.fixed, *carried, *slices]
        results, new_answers = _run(loop.body, values, step_answers)
        return results[: len(carried)], (results[len(carried) :], new_answers)

    options = {name: params[name] for name in ("length", "reverse", "unroll")}
    sequences = loop.sequences, answers
    carried, (stacked, new_answers) = jax.lax.scan(body, loop.carried, sequences, **options)
    return [*carried, *stacked], new_answers


def _branched(
    equation: Equation, operands: list[Any], answers: PyTree | None
) -> tuple[list[Any], PyTree]:
    """Run a branch; the recorded callback results of the other branches are zeros."""
    bodies = equation.params["branches"]
    zeros = []
    if answers is None:
        shapes = [jax.eval_shape(lambda *v, b=b: recorded(b, v)[1], *operands[1:]) for b in bodies]
        zeros = [jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shape) for shape in shapes]

    def branch(place: int) -> Callable[..., Any]:
        def run(*values: Any) -> Any:
            if answers is not None:
                return replayed(bodies[place], values, answers[place]), []
            results, own_answers = recorded(bodies[place], values)
            return results, [*zeros[:place], own_answers, *zeros[place + 1 :]]

        return run

    branches = [branch(place) for place in range(len(bodies))]
    results, new_answers = jax.lax.switch(operands[0], branches, *operands[1:])
    return list(results), new_answers
