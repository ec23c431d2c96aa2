r"""Derivation of an operation's rules from its forward function and trace axes.

``xy_to_dw`` is the VJP of the implementation. The instantaneous term of a trace is the VJP of each
sample separately. ``yw_to_w`` multiplies a trace by a factor shaped like the output: the two are
aligned along the axes that both have, and the factor is the same along the other axes. For entries
of a sparse operand, the operation says which output each of them reaches (``at_entries``). Traces
have the shape of their terms.

An operation whose operands cannot have a trace names arrays that can, as a function of its operands
(``effective_weights``). A signal times a trace is summed over samples and spatial axes, and pulled
back through that function.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from .._errors import PrimitiveError
from .._jax import struct_of
from .registry import ETP_PRIMITIVE_SPECS, Arrays
from .spec import ETPPrimitiveSpec
from .sums import sum_over_samples

Params = Mapping[str, Any]

OF_OUTPUT = frozenset({"output", "group"})
"""Axes of a trace that the output has as well."""


@dataclass(frozen=True)
class DerivedRule:
    """A rule that is derived from the declaration of an operation."""

    function: Callable[..., Any]
    spec: ETPPrimitiveSpec

    def __call__(self, *arguments: Any, **params: Any) -> Any:
        """Apply the rule; ``params`` are the static parameters of the equation."""
        return self.function(self.spec, *arguments, **params)


def completed(spec: ETPPrimitiveSpec) -> ETPPrimitiveSpec:
    """Add the rules that a declaration leaves out and that can be derived.

    Rules that were derived from another declaration are derived again.
    """
    names = [field.name for field in dataclasses.fields(spec)]
    derived = [name for name in names if isinstance(getattr(spec, name), DerivedRule)]
    changes: dict[str, Any] = dict.fromkeys(derived)
    spec = replace(spec, **changes) if changes else spec
    for name, rule in _derivable(spec).items():
        if getattr(spec, name) is None:
            changes = {name: DerivedRule(rule, spec)}
            spec = replace(spec, **changes)
    return spec


def _derivable(spec: ETPPrimitiveSpec) -> dict[str, Callable[..., Any]]:
    """Return the function that derives each rule; a rule needs only earlier rules."""
    functions: dict[str, Callable[..., Any]] = {
        "trainable_invars_fn": trainable_operands,
        "xy_to_dw": xy_to_dw,
        "init_drtrl": init_drtrl,
        "init_pp": init_pp,
    }
    axes = (spec.trace_axes or {}).values()
    has_entries = spec.at_entries is not None
    if axes and all("output" in n or ("entry" in n and has_entries) for n in axes):
        functions["yw_to_w"] = yw_to_w
    if spec.effective_weights is not None:
        functions["contract"] = contract
    elif axes and spec.x_invar_index is not None and all(n[-1:] == ("output",) for n in axes):
        functions["select_outputs"] = select_outputs
    return functions


def trainable_operands(spec: ETPPrimitiveSpec, params: Params) -> dict[str, int]:
    """Return the operands of an implementation other than the input, by name.

    A variadic parameter such as ``*bias`` is one operand, present if ``has_bias`` is set.
    """
    layout: dict[str, int] = {}
    for place, parameter in enumerate(inspect.signature(spec.impl).parameters.values()):
        is_optional = parameter.kind is parameter.VAR_POSITIONAL
        if parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_KEYWORD):
            break
        if place != spec.x_invar_index and (params.get("has_bias") or not is_optional):
            layout[parameter.name] = place
    return layout


def xy_to_dw(
    spec: ETPPrimitiveSpec, x: Any, hidden_dim: Any, weights: Arrays, **params: Any
) -> Arrays:
    """Pull an output cotangent back to operands, by the VJP of the implementation."""
    layout = spec.resolve_trainable_invars(params)
    dtype = hidden_dim.dtype

    def forward(weights: Arrays) -> Any:
        places = {place: weights[name] for name, place in layout.items()}
        if spec.x_invar_index is not None:
            is_float = jnp.issubdtype(x.dtype, jnp.inexact)
            places[spec.x_invar_index] = x.astype(dtype) if is_float else x
        return spec.impl(*(places[place] for place in sorted(places)), **params)

    wide = {name: weight.astype(dtype) for name, weight in weights.items()}
    (gradients,) = jax.vjp(forward, wide)[1](hidden_dim)
    return {name: like_operand(gradient, weights[name]) for name, gradient in gradients.items()}


def yw_to_w(spec: ETPPrimitiveSpec, hidden_dim: Any, trace: Arrays, **params: Any) -> Arrays:
    """Multiply a trace by an output-shaped factor, along the axes that both have, or by entry."""

    def factor(name: str, array: Any) -> Any:
        assert spec.trace_axes is not None  # otherwise the rule is written by hand
        axes = spec.trace_axes[name]
        if set(axes) <= OF_OUTPUT:
            return hidden_dim
        if spec.at_entries is not None and axes == ("entry",):
            return spec.at_entries(hidden_dim, **params)
        lead = array.ndim - len(axes)
        sizes = zip(axes, array.shape[lead:], strict=True)
        aligned = (size if axis in OF_OUTPUT else 1 for axis, size in sizes)
        return hidden_dim.reshape(*hidden_dim.shape[:lead], *aligned)

    return {name: array * factor(name, array) for name, array in trace.items()}


def init_drtrl(
    spec: ETPPrimitiveSpec,
    x_var: Any,
    y_var: Any,
    weight_vars: Mapping[str, Any],
    num_hidden_state: int,
    **params: Any,
) -> Arrays:
    """Return zeros in the shapes of the instantaneous terms, with a state axis last."""
    x, y = (None if var is None else struct_of(var.aval) for var in (x_var, y_var))
    weights = tuple((name, struct_of(var.aval)) for name, var in weight_vars.items())
    terms = _shapes_of_terms(spec, tuple(params.items()), x, y, weights)
    return {
        name: jnp.zeros((*term.shape, num_hidden_state), y_var.aval.dtype)
        for name, term in terms.items()
    }


# Without the cache, six LSTM layers take 1.5 times as long to analyse (CPU, 2026-11-26).
@functools.lru_cache(maxsize=1024)
def _shapes_of_terms(
    spec: ETPPrimitiveSpec, params: Any, x: Any, y: Any, weights: Any
) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of the instantaneous terms of one step."""
    steps = (None if aval is None else _of_one_step(aval) for aval in (x, y))
    terms: dict[str, jax.ShapeDtypeStruct] = jax.eval_shape(
        functools.partial(accumulate, spec, dict(params)), *steps, dict(weights)
    )
    return terms


def _of_one_step(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((1, *aval.shape), aval.dtype)


def init_pp(
    spec: ETPPrimitiveSpec, x_var: Any, y_var: Any, weight_vars: Any, num_hidden_state: int
) -> Any:
    """Return zeros shaped like the output, with a state axis last."""
    return jnp.zeros((*y_var.aval.shape, num_hidden_state), y_var.aval.dtype)


def accumulate(
    spec: ETPPrimitiveSpec, params: Params, x: Any, hidden_dim: Any, weights: Arrays
) -> Arrays:
    """Return the instantaneous terms of ``K`` steps, by hand-written or derived rule."""
    if spec.accumulate is not None:
        return dict(spec.accumulate(x, hidden_dim, weights, **params))
    return derived_terms(spec, params, x, hidden_dim, weights)


def derived_terms(
    spec: ETPPrimitiveSpec, params: Params, x: Any, hidden_dim: Any, weights: Arrays
) -> Arrays:
    """Derive the terms by the VJP of each sample; they are complex if a factor is."""
    dtype = hidden_dim.dtype
    weights = {name: w.astype(jnp.promote_types(w.dtype, dtype)) for name, w in weights.items()}
    if x is None:
        return operand_gradients(spec, params, None, hidden_dim.sum(0), weights)
    if not spec.batched:
        return sum_over_steps(operand_gradients, spec, params, x, hidden_dim, weights)

    def of_sample(x_of_sample: Any, hidden_of_sample: Any) -> Arrays:
        return operand_gradients(spec, params, x_of_sample, hidden_of_sample, weights)

    terms: Arrays = jax.vmap(of_sample, in_axes=1)(x, hidden_dim)
    return terms


def sum_over_steps(
    gradients_of: Callable[..., Arrays],
    spec: ETPPrimitiveSpec,
    params: Params,
    x: Any,
    hidden_dim: Any,
    weights: Arrays,
) -> Arrays:
    """Return the gradients of an operation on one sample, summed over time."""
    if spec.batched_form is not None:  # time is used as the batch
        form = ETP_PRIMITIVE_SPECS[spec.batched_form]
        return gradients_of(form, params, x, hidden_dim, weights)

    def of_step(x_of_step: Any, hidden_of_step: Any) -> Arrays:
        return gradients_of(spec, params, x_of_step, hidden_of_step, weights)

    gradients = jax.vmap(of_step)(x, hidden_dim)
    return {name: gradient.sum(0) for name, gradient in gradients.items()}


def contract(
    spec: ETPPrimitiveSpec, signal: Any, trace: Arrays, weights: Arrays, **params: Any
) -> Arrays:
    """Sum a signal times a trace over samples and space, and pull it back."""
    assert spec.effective_weights is not None
    rule = functools.partial(spec.effective_weights, **params)
    dtype = jnp.finfo(signal.dtype).dtype  # the dtype of the real and imaginary parts
    wide = {name: w.astype(jnp.promote_types(w.dtype, dtype)) for name, w in weights.items()}
    effective, pull_back = jax.vjp(rule, wide)
    axes = max(trace[name].ndim - array.ndim for name, array in effective.items())
    summed = sum_over_samples(lambda pair: spec.yw_to_w(*pair, **params), (signal, trace), axes)
    (gradients,) = pull_back({k: like_operand(summed[k], v) for k, v in effective.items()})
    return dict(gradients)


def select_outputs(
    spec: ETPPrimitiveSpec, weights: Arrays, pick: Callable[[Any], Any], **params: Any
) -> Arrays:
    """Return the entries of all operands that belong to some outputs."""
    return {name: pick(operand) for name, operand in weights.items()}


def like_operand(gradient: Any, operand: Any) -> Any:
    """Give a gradient the dtype of its operand; a real operand has a real gradient."""
    if jnp.iscomplexobj(gradient) and not jnp.iscomplexobj(operand):
        gradient = gradient.real
    return gradient.astype(operand.dtype)


def operand_gradients(
    spec: ETPPrimitiveSpec, params: Params, x: Any, hidden_dim: Any, weights: Arrays
) -> Arrays:
    """Return the results of ``xy_to_dw``, one gradient for each operand."""
    gradients = spec.xy_to_dw(x, hidden_dim, weights, **params)
    return expect_keys(spec, "xy_to_dw", gradients, weights)


def expect_keys(
    spec: ETPPrimitiveSpec, rule: str, result: Arrays, expected: Mapping[str, Any]
) -> Arrays:
    """Refuse the result of a rule that has unexpected keys."""
    if set(result) != set(expected):
        raise PrimitiveError(
            f"Rule `{rule}` of `{spec.name}` returned the keys {sorted(result)}; "
            f"expected {sorted(expected)}."
        )
    return result
