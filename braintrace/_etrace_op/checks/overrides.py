"""Compare the hand-written rules of an operation with the derived ones."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..derive import DerivedRule, accumulate, completed, derived_terms
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
    underivable = set()
    if not has_derivative:
        underivable |= {"joins_input", "input_derivative"}
    if not isinstance(_derived(spec).yw_to_w, DerivedRule):
        underivable.add("yw_to_w")
    if spec.effective_weights is not None:  # its traces have other shapes than the operands
        underivable |= {"accumulate", "yw_to_w"}
    rules = {field: getattr(spec, field) for field in _SIDES if field not in underivable}
    return {
        field: _SIDES[field]
        for field, rule in rules.items()
        if rule is not None and not isinstance(rule, DerivedRule)
    }


def _derived(spec: ETPPrimitiveSpec) -> ETPPrimitiveSpec:
    """Return a declaration without hand-written rules."""
    return completed(replace(spec, yw_to_w=DERIVED, xy_to_dw=DERIVED, accumulate=None))


def _one_step(example: Example) -> tuple[Any, Any, Arrays]:
    """Return the arguments of rules for instantaneous terms."""
    x = example.draws["x1"]
    return None if x is None else x[None], example.draws["f1"][None], example.weights


def _operands(example: Example) -> list[Any]:
    operands = list(example.draws["operands"])
    if example.spec.x_invar_index is not None:
        operands[example.spec.x_invar_index] = example.draws["x1"]
    return operands


def _call(example: Example) -> tuple[Any, ...]:
    """Return the operation in a jaxpr, its operands, and all pairs of elements."""
    operands = _operands(example)
    jaxpr = jax.make_jaxpr(lambda *values: example.primitive.bind(*values, **example.params))
    lead = 1 if example.spec.batched else 0
    sizes = (math.prod(example.draws[name].shape[lead:]) for name in ("x1", "f1"))
    return jaxpr(*operands).eqns[0], operands, *np.indices(tuple(sizes))


def _derived_terms(example: Example) -> Arrays:
    return derived_terms(_derived(example.spec), example.params, *_one_step(example))


def _terms(example: Example) -> Arrays:
    assert example.spec.accumulate is not None
    terms: Arrays = example.spec.accumulate(*_one_step(example), **example.params)
    return terms


def _derived_trace(example: Example) -> Arrays:
    rule, terms = _derived(example.spec).yw_to_w, _derived_terms(example)
    trace: Arrays = rule(example.draws["f1"], terms, **example.params)
    return trace


def _trace(example: Example) -> Arrays:
    rule, terms = example.spec.yw_to_w, _derived_terms(example)
    trace: Arrays = rule(example.draws["f1"], terms, **example.params)
    return trace


def _derived_squared_norms(example: Example) -> Arrays:
    lead = 1 if example.spec.batched else 0
    return {
        name: jnp.sum((term * term.conj()).real, axis=tuple(range(lead, term.ndim)))
        for name, term in accumulate(example.spec, example.params, *_one_step(example)).items()
    }


def _squared_norms(example: Example) -> Arrays:
    assert example.spec.squared_norms is not None
    norms: Arrays = example.spec.squared_norms(*_one_step(example), **example.params)
    return norms


def _some_outputs(array: Any) -> Any:
    return array[..., :1]


def _outputs_of_all(example: Example) -> Arrays:
    return {"x": _some_outputs(example.spec.impl(*_operands(example), **example.params))}


def _selected_outputs(example: Example) -> Arrays:
    spec, operands = example.spec, _operands(example)
    assert spec.select_outputs is not None
    selected = spec.select_outputs(example.weights, _some_outputs, **example.params)
    if selected is None:  # the parameters may not allow it
        return _outputs_of_all(example)
    for name, place in spec.resolve_trainable_invars(example.params).items():
        operands[place] = selected[name]
    return {"x": spec.impl(*operands, **example.params)}


def _derived_input_derivative(example: Example) -> Arrays:
    return {"x": derivative_by_unit_vectors(*_call(example))}


def _joined_derivative(example: Example) -> Arrays:
    equation, operands, inputs, outputs = _call(example)
    derivative = derivative_by_unit_vectors(equation, operands, inputs, outputs)
    return {"x": jnp.where(is_joined(equation, inputs, outputs), derivative, 0)}


def _input_derivative(example: Example) -> Arrays:
    equation, operands, inputs, outputs = _call(example)
    derivative = input_derivative(equation, operands, inputs, outputs)
    return {"x": jnp.where(is_joined(equation, inputs, outputs), derivative, 0)}


_SIDES: dict[str, tuple[Side, Side]] = {
    "accumulate": (_terms, _derived_terms),
    "yw_to_w": (_trace, _derived_trace),
    "squared_norms": (_squared_norms, _derived_squared_norms),
    "select_outputs": (_selected_outputs, _outputs_of_all),
    "joins_input": (_joined_derivative, _derived_input_derivative),
    "input_derivative": (_input_derivative, _derived_input_derivative),
}
"""Result of each rule, and result of the derived rule."""
