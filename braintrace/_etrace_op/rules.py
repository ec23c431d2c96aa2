"""Interface between `_core` and the rules of a primitive.

The functions are linear in ``hidden_dim`` or ``signal``, on plain arrays without units. They never
depend on the identity of a primitive: primitives differ only in their declarations. ``K`` is a
leading time axis; ``x`` is None for a primitive without an input.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp

from .._jax import sharding_dependent
from . import derive
from .derive import DerivedRule, expect_keys, like_operand, operand_gradients, sum_over_steps
from .lookup_counts import count, pull_back_counts, zero_counts
from .primitive import ETPPrimitive, get_primitive_spec
from .registry import Arrays
from .spec import ETPPrimitiveSpec
from .sums import sum_over_samples

Params = Mapping[str, Any]


def pull_back(
    primitive: ETPPrimitive, params: Params, x: Any, hidden_dim: Any, weights: Arrays
) -> Arrays:
    """Pull an output cotangent of ``K`` steps back to the trainable operands.

    Parameters
    ----------
    primitive : ETPPrimitive
        The operation.
    params : mapping
        Static parameters of its equation.
    x : array ``(K, *x_shape)`` or None
        Its inputs.
    hidden_dim : array ``(K, *y_shape)``
        The cotangents.
    weights : dict
        Trainable operands, constant over the ``K`` steps.

    Returns
    -------
    dict
        One gradient per operand, summed over time and batch.
    """
    spec = get_primitive_spec(primitive)
    if x is None:
        return operand_gradients(spec, params, None, hidden_dim.sum(0), weights)

    return _sum_over_steps(operand_gradients, spec, params, x, hidden_dim, weights)


def zero_filter(primitive: ETPPrimitive, params: Params, x_var: Any, y_var: Any) -> Any:
    """Return the filter of inputs at the start of a sequence.

    For the arguments see `init_trace`; ``x_var`` must not be None.
    """
    if get_primitive_spec(primitive).looks_up:
        return zero_counts(x_var, y_var, **params)
    x, y = x_var.aval, y_var.aval
    return jnp.zeros(x.shape, jnp.promote_types(x.dtype, y.dtype))


def add_to_filter(primitive: ETPPrimitive, filtered: Any, x: Any) -> Any:
    """Add one input to a filter of inputs."""
    if get_primitive_spec(primitive).looks_up:
        return count(filtered, x[None], jnp.ones((1, *x.shape), filtered.dtype))
    return filtered + x


def pull_back_filtered(
    primitive: ETPPrimitive, params: Params, filtered: Any, hidden_dim: Any, weights: Arrays
) -> Arrays:
    """Pull an output cotangent of ``K`` steps back, with filters as inputs.

    See `pull_back` for the other arguments and the result.
    """
    spec = get_primitive_spec(primitive)
    if filtered is None or not spec.looks_up:
        return pull_back(primitive, params, filtered, hidden_dim, weights)

    def gradients_of(
        spec: ETPPrimitiveSpec, params: Params, counts: Any, hidden_dim: Any, weights: Arrays
    ) -> Arrays:
        return pull_back_counts(counts, hidden_dim, weights)

    return _sum_over_steps(gradients_of, spec, params, filtered, hidden_dim, weights)


def init_trace(
    primitive: ETPPrimitive, params: Params, x_var: Any, y_var: Any, weight_vars: Mapping[str, Any]
) -> Arrays:
    """Return the zero trace of one hidden state.

    ``x_var`` (None without an input), ``y_var`` and the ``weight_vars`` have an ``aval`` with
    ``shape`` and ``dtype``.
    """
    spec = get_primitive_spec(primitive)
    known = params if isinstance(spec.init_drtrl, DerivedRule) else {}
    trace = spec.init_drtrl(x_var, y_var, dict(weight_vars), 1, **known)
    return {name: array[..., 0] for name, array in trace.items()}


def select_outputs(
    primitive: ETPPrimitive, params: Params, weights: Arrays, pick: Callable[[Any], Any]
) -> Arrays | None:
    """Return the operands of the same operation with fewer outputs, or None.

    ``pick`` takes the entries of an array's last axis that belong to these outputs.
    """
    spec = get_primitive_spec(primitive)
    return None if spec.select_outputs is None else spec.select_outputs(weights, pick, **params)


def propagate(primitive: ETPPrimitive, params: Params, factor: Any, trace: Arrays) -> Arrays:
    """Multiply a trace elementwise by a factor shaped like the output."""
    spec = get_primitive_spec(primitive)
    return expect_keys(spec, "yw_to_w", spec.yw_to_w(factor, trace, **params), trace)


def accumulate(
    primitive: ETPPrimitive, params: Params, x: Any, hidden_dim: Any, weights: Arrays
) -> Arrays:
    """Return the instantaneous terms of ``K`` steps in trace space, summed over time.

    Arguments as in `pull_back`; each sample has its own term.
    """
    return derive.accumulate(get_primitive_spec(primitive), params, x, hidden_dim, weights)


def contract(
    primitive: ETPPrimitive, params: Params, signal: Any, trace: Arrays, weights: Arrays
) -> Arrays:
    """Return the gradients from an output-shaped signal and a trace, batch summed."""
    spec = get_primitive_spec(primitive)

    def products(operands: Any) -> Arrays:
        return product_with_trace(primitive, params, operands[0], operands[1], weights)

    operands = (signal, trace)
    is_summed = spec.contract is not None or not spec.batched
    gradients = products(operands) if is_summed else sum_over_samples(products, operands)
    return {name: like_operand(gradient, weights[name]) for name, gradient in gradients.items()}


def multiplies_complex_numbers(primitive: ETPPrimitive) -> bool:
    """Test whether the product of a signal and a trace is known to treat complex numbers like real.

    Derived rules do: they multiply, sum, and take the real part last. A hand-written rule may
    conjugate a number, or convert it to a real one.
    """
    spec = get_primitive_spec(primitive)
    rules = (spec.yw_to_w, spec.contract)
    return all(rule is None or isinstance(rule, DerivedRule) for rule in rules)


def product_with_trace(
    primitive: ETPPrimitive, params: Params, signal: Any, trace: Arrays, weights: Arrays
) -> Arrays:
    """Apply the rule ``contract``, or ``yw_to_w`` without the sum over the batch."""
    spec = get_primitive_spec(primitive)
    if spec.contract is None:
        return expect_keys(spec, "yw_to_w", propagate(primitive, params, signal, trace), weights)
    gradients = spec.contract(signal, trace, weights, **params)
    return expect_keys(spec, "contract", gradients, weights)


def _fold(array: Any) -> Any:
    return array.reshape(array.shape[0] * array.shape[1], *array.shape[2:])


def _sum_over_steps(
    gradients_of: Callable[..., Arrays],
    spec: ETPPrimitiveSpec,
    params: Params,
    x: Any,
    hidden_dim: Any,
    weights: Arrays,
) -> Arrays:
    if spec.batched:
        return _sum_over_samples_and_steps(
            lambda *pair: gradients_of(spec, params, *pair, weights), x, hidden_dim
        )
    return sum_over_steps(gradients_of, spec, params, x, hidden_dim, weights)


def _sum_over_samples_and_steps(
    gradients_of: Callable[[Any, Any], Arrays], x: Any, hidden_dim: Any
) -> Arrays:
    """Fold steps and samples into one batch for a rule.

    Samples on different devices stay in place only if steps are folded into the sample axis, not
    the reverse. On a single device, that would move every element.
    """

    def steps_first(x: Any, hidden_dim: Any) -> Arrays:
        return gradients_of(_fold(x), _fold(hidden_dim))

    def samples_first(x: Any, hidden_dim: Any) -> Arrays:
        return steps_first(jnp.swapaxes(x, 0, 1), jnp.swapaxes(hidden_dim, 0, 1))

    if x.shape[0] == 1:
        return steps_first(x, hidden_dim)
    gradients: Arrays = sharding_dependent(
        x, hidden_dim, sharded=samples_first, unsharded=steps_first
    )
    return gradients
