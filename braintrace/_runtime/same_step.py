"""Fingerprints of compiled steps: the programs of one step serve for another with the same one.

An attribute of a model may change without an effect on its ``update``: a counter, a memo, a setting
of something else. The model is then traced again, and if its fingerprint is the same, its programs
stay.
"""

import dataclasses
import functools
import itertools
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._graph import TracedModel
from .._jax import (
    OWN_BACKWARD,
    TRANSPARENT_CALLS,
    ClosedJaxpr,
    Equation,
    bind,
    call_body,
    equations_inside,
    trace_to_jaxpr,
)
from .._jaxpr import fingerprint
from .._typing import Path
from .digests import digest, digest_of


@dataclasses.dataclass(frozen=True, eq=False)
class Fingerprint:
    """What a step computes, to be compared with what another one does.

    Attributes
    ----------
    traced, outside
        The step, and the States outside the model that it uses.
    rules
        Digests of the custom derivatives in an equation, by its index. They are made when the step
        is compiled: a rule may read attributes of the model, and JAX calls it again whenever a
        derivative is traced.
    """

    traced: TracedModel
    outside: Mapping[Path, Any]
    rules: Mapping[int, str]

    @functools.cached_property
    def value(self) -> Hashable:
        """A value that two steps share if they compute the same values and derivatives."""
        program = fingerprint(self.traced.program.jaxpr)
        return _names(self.traced, self.outside), program, tuple(self.rules.items())


def fingerprint_of(traced: TracedModel, outside: Mapping[Path, Any]) -> Fingerprint:
    """Return the fingerprint of a step, and of the States outside the model that it uses."""
    rules: dict[int, str] = {}
    for index, equation in enumerate(traced.program.equations):
        if own := [_rule(each) for each in _with_own_derivative(equation)]:
            rules[index] = digest(*own)
    return Fingerprint(traced, outside, rules)


def _names(traced: TracedModel, outside: Mapping[Path, Any]) -> Hashable:
    """Return what the inputs and outputs of a step are."""
    leaves = tuple((x.name, x.kind, x.shape, x.dtype) for x in traced.leaves)
    own = tuple((path, id(state)) for path, state in outside.items())
    trees = traced.argument_tree, traced.output_tree, tuple(traced.state_trees.items())
    callbacks = traced.callbacks and fingerprint(traced.callbacks.jaxpr)
    marks = traced.has_found_marks, traced.unmarked
    names = traced.argument_names, traced.written_paths, traced.batch_size
    return leaves, own, trees, callbacks, marks, names


def _with_own_derivative(equation: Equation) -> Iterator[Equation]:
    """Yield the calls of functions with a custom derivative in an equation."""
    for each in (equation, *equations_inside(equation)):
        if call_body(each) is not None and each.primitive.name not in TRANSPARENT_CALLS:
            yield each


_unknown = itertools.count()


def _rule(equation: Equation) -> str:
    try:
        return digest_of(_differentiated(equation))
    except Exception:  # a rule may refuse numbers that it is not meant for
        return f"unknown {next(_unknown)}"


def _differentiated(equation: Equation) -> ClosedJaxpr:
    """Return the derivative of an equation, for tangents or cotangents of one."""

    def run(*operands: Any) -> Any:
        def bound(*values: Any) -> list[Any]:
            return bind(equation, values)

        if equation.primitive.name not in OWN_BACKWARD:
            return jax.jvp(bound, operands, tuple(map(_one, operands)))  # half the time of `vjp`
        results, pull = jax.vjp(bound, *operands)
        return results, pull(list(map(_one, results)))

    return trace_to_jaxpr(run, [atom.aval for atom in equation.invars])


def _one(value: Any) -> Any:
    if jnp.issubdtype(value.dtype, jnp.inexact):
        return jnp.ones_like(value)
    return np.zeros(value.shape, jax.dtypes.float0)
