"""Compare the hand-written rules of an operation with the derived ones."""

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..derive import DerivedRule, accumulate, completed
from ..input_derivative import derivative_by_unit_vectors, input_derivative, is_joined
from ..registry import Arrays
from ..spec import DERIVED, ETPPrimitiveSpec
from .example import Example

Side = Callable[[Example], Arrays]


def overrides_of(spec: ETPPrimitiveSpec, has_derivative: bool) -> dict[str, tuple[Side, Side]]:
    """Return hand-written and derived sides of each rule that could be derived.

    Parameters
    ----------
    spec
        The declaration of an operation.
    has_derivative
        Whether its input has floating-point numbers.
    """
    underivable, derived = set(), _derived(spec)
    if not has_derivative:
        underivable |= {"joins_input", "input_derivative"}
    if not isinstance(derived.yw_to_w, DerivedRule):
        underivable.add("yw_to_w")
    if spec.effective_weights is not None:  # its traces have other shapes than the operands
        underivable |= {"accumulate", "yw_to_w"}
    rules = {field: getattr(spec, field) for field in _SIDES if field not in underivable}
    return {
        field: (functools.partial(_SIDES[field], spec), functools.partial(_SIDES[field], derived))
        for field, rule in rules.items()
        if rule is not None and not isinstance(rule, DerivedRule)
    }


def _derived(spec: ETPPrimitiveSpec) -> ETPPrimitiveSpec:
    """Return a declaration without hand-written rules."""
    optional: dict[str, Any] = dict.fromkeys(field for field in _SIDES if field != "yw_to_w")
    return completed(replace(spec, yw_to_w=DERIVED, xy_to_dw=DERIVED, **optional))


def _one_step(example: Example) -> tuple[Any, Any, Arrays]:
    """Return the arguments of rules for instantaneous terms."""
    x = example.draws["x1"]
    return None if x is None else x[None], example.draws["f1"][None], example.weights


def _operands(example: Example) -> list[Any]:
    operands = list(example.draws["operands"])
    if example.spec.x_invar_index is not None:
        operands[example.spec.x_invar_index] = example.draws["x1"]
    return operands


# --- the result of each rule of a declaration


def _terms(spec: ETPPrimitiveSpec, example: Example) -> Arrays:
    return accumulate(spec, example.params, *_one_step(example))


def _trace(spec: ETPPrimitiveSpec, example: Example) -> Arrays:
    terms = _terms(_derived(spec), example)
    trace: Arrays = spec.yw_to_w(example.draws["f1"], terms, **example.params)
    return trace


def _squared_norms(spec: ETPPrimitiveSpec, example: Example) -> Arrays:
    if spec.squared_norms is not None:
        norms: Arrays = spec.squared_norms(*_one_step(example), **example.params)
        return norms
    lead = 1 if spec.batched else 0
    return {
        name: jnp.sum((term * term.conj()).real, axis=tuple(range(lead, term.ndim)))
        for name, term in _terms(example.spec, example).items()
    }


def _some_outputs(array: Any) -> Any:
    return array[..., :1]


def _selected_outputs(spec: ETPPrimitiveSpec, example: Example) -> Arrays:
    operands, select, params = _operands(example), spec.select_outputs, example.params
    selected = None if select is None else select(example.weights, _some_outputs, **params)
    if selected is None:  # the parameters may not allow it
        return {"x": _some_outputs(spec.impl(*operands, **params))}
    for name, place in spec.resolve_trainable_invars(params).items():
        operands[place] = selected[name]
    return {"x": spec.impl(*operands, **params)}


def _input_derivative(spec: ETPPrimitiveSpec, example: Example) -> Arrays:
    """Return the derivatives of all pairs of elements; none where they are not joined."""
    operands = _operands(example)
    jaxpr = jax.make_jaxpr(lambda *values: example.primitive.bind(*values, **example.params))
    equation, lead = jaxpr(*operands).eqns[0], 1 if spec.batched else 0
    sizes = (math.prod(example.draws[name].shape[lead:]) for name in ("x1", "f1"))
    inputs, outputs = np.indices(tuple(sizes))
    rule = derivative_by_unit_vectors if spec.input_derivative is None else input_derivative
    derivative = rule(equation, operands, inputs, outputs)
    if spec.joins_input is not None:
        derivative = jnp.where(is_joined(equation, inputs, outputs), derivative, 0)
    return {"x": derivative}


def _joined_derivative(spec: ETPPrimitiveSpec, example: Example) -> Arrays:
    return _input_derivative(replace(spec, input_derivative=None), example)


_SIDES: dict[str, Callable[[ETPPrimitiveSpec, Example], Arrays]] = {
    "accumulate": _terms,
    "yw_to_w": _trace,
    "squared_norms": _squared_norms,
    "select_outputs": _selected_outputs,
    "joins_input": _joined_derivative,
    "input_derivative": _input_derivative,
}
"""Result of a rule of a declaration, by the name of the rule."""
