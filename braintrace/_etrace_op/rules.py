r"""Rules of an operation: derived from its declaration, and applied by learning rules.

``xy_to_dw`` is the VJP of the implementation. The instantaneous term of a trace is ``xy_to_dw`` of
each sample separately. ``yw_to_w`` multiplies a trace by a factor shaped like the output: the two
are aligned along the axes that both have, and the factor is the same along the other axes. For
entries of a sparse operand, the operation says which output each of them reaches (``at_entries``).
Traces have the shape of their terms.

An operation whose operands cannot have a trace names arrays that can, as a function of its operands
(``effective_weights``). A signal times a trace is summed over samples and spatial axes, and pulled
back through that function.

Learning rules call the entries of the registries. A form that needs more than the entries
(``accumulate``, ``effective_weights``, ``batched_form``, fewer outputs) is used only for an entry
that is the registered one. The functions are linear in ``hidden_dim`` or ``signal``, on plain
arrays without units. ``K`` is a leading time axis; ``x`` is None for a primitive without an input.
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
from .._jax import Primitive, struct_of
from .._jax_kernels import runs_on_several_devices
from .registry import RULES, Arrays, ETPPrimitiveSpec, TraceAxis, get_primitive_spec
from .sums import sum_over_samples

Params = Mapping[str, Any]

# Axes of a trace that the output has as well.
OF_OUTPUT = frozenset({"output", "group"})


# --- derived rules


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

    Raises
    ------
    PrimitiveError
        Naming a rule that does not follow from the others.
    """
    functions: dict[str, Callable[..., Any]] = {
        "trainable_invars_fn": _trainable_operands,
        "xy_to_dw": _xy_to_dw,
        "init_drtrl": _init_drtrl,
        "init_pp": _init_pp,
    }
    axes, has_entries = (spec.trace_axes or {}).values(), spec.at_entries is not None
    if axes and all("output" in n or ("entry" in n and has_entries) for n in axes):
        functions["yw_to_w"] = _yw_to_w
    names = [field.name for field in dataclasses.fields(spec)]
    derived = [name for name in names if isinstance(getattr(spec, name), DerivedRule)]
    changes: dict[str, Any] = dict.fromkeys(derived)
    spec = replace(spec, **changes) if changes else spec
    for name, function in functions.items():
        if getattr(spec, name) is None:
            changes = {name: DerivedRule(function, spec)}
            spec = replace(spec, **changes)
    for name in ("impl", "trainable_invars_fn", *RULES):
        if not callable(getattr(spec, name)):
            raise PrimitiveError(
                f"`{name}` of `{spec.name}` must be callable: give it, or the `trace_axes` that "
                "it follows from."
            )
    return spec


def _trainable_operands(spec: ETPPrimitiveSpec, params: Params) -> dict[str, int]:
    # A variadic parameter such as ``*bias`` is one operand, present if ``has_bias`` is set.
    layout: dict[str, int] = {}
    for place, parameter in enumerate(inspect.signature(spec.impl).parameters.values()):
        is_optional = parameter.kind is parameter.VAR_POSITIONAL
        if parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_KEYWORD):
            break
        if place != spec.x_invar_index and (params.get("has_bias") or not is_optional):
            layout[parameter.name] = place
    return layout


def _xy_to_dw(
    spec: ETPPrimitiveSpec, x: Any, hidden_dim: Any, weights: Arrays, **params: Any
) -> Arrays:
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


def _yw_to_w(spec: ETPPrimitiveSpec, hidden_dim: Any, trace: Arrays, **params: Any) -> Arrays:
    assert spec.trace_axes is not None  # otherwise the rule is written by hand
    result = {}
    for name, array in trace.items():
        axes, factor = spec.trace_axes[name], hidden_dim
        if spec.at_entries is not None and axes == ("entry",):
            factor = spec.at_entries(hidden_dim, **params)
        elif not set(axes) <= OF_OUTPUT:
            lead = array.ndim - len(axes)
            sizes = zip(axes, array.shape[lead:], strict=True)
            aligned = (size if axis in OF_OUTPUT else 1 for axis, size in sizes)
            factor = hidden_dim.reshape(*hidden_dim.shape[:lead], *aligned)
        result[name] = array * factor
    return result


def _init_drtrl(
    spec: ETPPrimitiveSpec,
    x_var: Any,
    y_var: Any,
    weight_vars: Mapping[str, Any],
    num_hidden_state: int,
    **params: Any,
) -> Arrays:
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
    def of_one_step(aval: Any) -> jax.ShapeDtypeStruct | None:
        return None if aval is None else jax.ShapeDtypeStruct((1, *aval.shape), aval.dtype)

    rule = functools.partial(terms_of, spec, spec.xy_to_dw, dict(params))
    return jax.eval_shape(rule, of_one_step(x), of_one_step(y), dict(weights))


def _init_pp(
    spec: ETPPrimitiveSpec, x_var: Any, y_var: Any, weight_vars: Any, num_hidden_state: int
) -> Any:
    return jnp.zeros((*y_var.aval.shape, num_hidden_state), y_var.aval.dtype)


def terms_of(
    spec: ETPPrimitiveSpec, xy_to_dw: Any, params: Params, x: Any, hidden_dim: Any, weights: Arrays
) -> Arrays:
    """Return the instantaneous terms of ``K`` steps, hand-written or by ``xy_to_dw``.

    They are complex if a factor is.
    """
    if spec.accumulate is not None and xy_to_dw is spec.xy_to_dw:
        return dict(spec.accumulate(x, hidden_dim, weights, **params))
    dtype = hidden_dim.dtype
    weights = {name: w.astype(jnp.promote_types(w.dtype, dtype)) for name, w in weights.items()}
    pull = functools.partial(_pull_steps, spec, xy_to_dw, params, weights)
    if not spec.batched or x is None:
        return pull(x, hidden_dim)
    return jax.vmap(pull, in_axes=1)(x, hidden_dim)


def _pull_steps(
    spec: ETPPrimitiveSpec, xy_to_dw: Any, params: Params, weights: Arrays, x: Any, hidden_dim: Any
) -> Arrays:
    """Return the gradients of an operation, summed over a leading axis of steps or samples."""
    rule = functools.partial(xy_to_dw, **params)
    if x is None:
        return dict(rule(None, hidden_dim.sum(0), weights))
    if not spec.batched and spec.batched_form is not None and xy_to_dw is spec.xy_to_dw:
        batched = RULES["xy_to_dw"][spec.batched_form]  # time is the batch
        return dict(batched(x, hidden_dim, weights, **params))
    if not spec.batched:
        every = jax.vmap(rule, (0, 0, None))(x, hidden_dim, weights)
        return {name: gradient.sum(0) for name, gradient in every.items()}
    return dict(rule(x, hidden_dim, weights))


def like_operand(gradient: Any, operand: Any) -> Any:
    """Give a gradient the dtype of its operand; a real operand has a real gradient."""
    if jnp.iscomplexobj(gradient) and not jnp.iscomplexobj(operand):
        gradient = gradient.real
    return gradient.astype(operand.dtype)


# --- entries


def _is_registered(primitive: Primitive, *kinds: str) -> bool:
    """Test whether entries are still the ones that the primitive declared."""
    spec = get_primitive_spec(primitive)
    return all(RULES[kind][primitive] is getattr(spec, kind) for kind in kinds)


def has_derived_traces(primitive: Primitive) -> bool:
    """Test whether ``yw_to_w`` is known to be a product with a factor, elementwise.

    A trace after several steps then is a product as well, and need not be updated step by step.
    """
    return isinstance(RULES["yw_to_w"][primitive], DerivedRule)


def has_declared_terms(primitive: Primitive) -> bool:
    """Test whether no rule of a trace is written by an author or replaced."""
    spec = get_primitive_spec(primitive)
    is_known = spec.accumulate is not None or isinstance(spec.xy_to_dw, DerivedRule)
    is_registered = _is_registered(primitive, "yw_to_w", "xy_to_dw", "init_drtrl")
    return is_known and is_registered and has_derived_traces(primitive)


def axes_of_trace(primitive: Primitive, name: str) -> tuple[TraceAxis, ...]:
    """Return the meaning of the last axes of a trace; empty if it is not declared."""
    axes = get_primitive_spec(primitive).trace_axes or {}
    return axes.get(name, ()) if _is_registered(primitive, "init_drtrl") else ()


def selects_outputs(
    primitive: Primitive, y: jax.ShapeDtypeStruct, traces: Mapping[str, jax.ShapeDtypeStruct]
) -> bool:
    """Test whether the last axis of all traces is the last axis of the output.

    Fewer outputs then have the same entries of factors, terms and traces.
    """
    has_terms = get_primitive_spec(primitive).accumulate is not None  # others need every output
    return (
        has_terms
        and has_declared_terms(primitive)
        and all(
            axes_of_trace(primitive, name)[-1:] == ("output",) and trace.shape[-1] == y.shape[-1]
            for name, trace in traces.items()
        )
    )


def is_linear_in_input(primitive: Primitive) -> bool:
    """Test whether ``xy_to_dw`` is declared to be linear in its (encoded) input."""
    is_declared = bool(get_primitive_spec(primitive).linear_in_input)
    return is_declared and _is_registered(primitive, "xy_to_dw")


def linear_input(primitive: Primitive, params: Params, x: Any) -> Any:
    """Return the array in which ``xy_to_dw`` is linear: the input, or its encoding."""
    encode = get_primitive_spec(primitive).linear_in_input
    return encode(x, **params) if callable(encode) else x


def init_trace(
    primitive: Primitive, params: Params, x_var: Any, y_var: Any, weight_vars: Mapping[str, Any]
) -> Arrays:
    """Return the zero trace of one hidden state.

    ``x_var`` (None without an input), ``y_var`` and the ``weight_vars`` have an ``aval`` with
    ``shape`` and ``dtype``.
    """
    rule = RULES["init_drtrl"][primitive]
    takes_params = isinstance(rule, DerivedRule) or any(
        parameter.kind is parameter.VAR_KEYWORD
        for parameter in inspect.signature(rule).parameters.values()
    )
    known = params if takes_params else {}
    trace = rule(x_var, y_var, dict(weight_vars), 1, **known)
    return {name: array[..., 0] for name, array in trace.items()}


def propagate(primitive: Primitive, params: Params, factor: Any, trace: Arrays) -> Arrays:
    """Multiply a trace elementwise by a factor shaped like the output."""
    return dict(RULES["yw_to_w"][primitive](factor, trace, **params))


def accumulate(
    primitive: Primitive, params: Params, x: Any, hidden_dim: Any, weights: Arrays
) -> Arrays:
    """Return the instantaneous terms of ``K`` steps in trace space, summed over time.

    Arguments as in `pull_back`; each sample has its own term.
    """
    spec, xy_to_dw = get_primitive_spec(primitive), RULES["xy_to_dw"][primitive]
    return terms_of(spec, xy_to_dw, params, x, hidden_dim, weights)


def contract(
    primitive: Primitive,
    params: Params,
    signal: Any,
    trace: Arrays,
    weights: Arrays,
    pick: Callable[[Any], Any] | None = None,
) -> Arrays:
    """Return the gradients from an output-shaped signal and a trace, batch summed.

    With ``pick``, signal and trace have the entries of the last axis that it takes.
    """
    spec = get_primitive_spec(primitive)
    effective, pull_back, axes = weights, None, int(spec.batched)
    if spec.effective_weights is not None and _is_registered(primitive, "init_drtrl"):
        dtype = jnp.finfo(signal.dtype).dtype  # the dtype of the real and imaginary parts
        wide = {name: w.astype(jnp.promote_types(w.dtype, dtype)) for name, w in weights.items()}
        rule = functools.partial(spec.effective_weights, **params)
        effective, pull_back = jax.vjp(rule, wide)
        axes = max(trace[name].ndim - array.ndim for name, array in effective.items())
    summed = sum_over_samples(
        lambda pair: propagate(primitive, params, *pair), (signal, trace), axes
    )
    summed = {name: like_operand(array, effective[name]) for name, array in summed.items()}
    if pick is not None:
        (summed,) = jax.linear_transpose(lambda every: jax.tree.map(pick, every), effective)(summed)
    gradients = summed if pull_back is None else pull_back(summed)[0]
    return {name: like_operand(gradient, weights[name]) for name, gradient in gradients.items()}


def pull_back(
    primitive: Primitive, params: Params, x: Any, hidden_dim: Any, weights: Arrays
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
    rule = RULES["xy_to_dw"][primitive]
    pull = functools.partial(_pull_steps, spec, rule, params, weights)
    if not spec.batched or x is None:
        return pull(x, hidden_dim)

    # Samples on different devices stay in place only if steps are folded into the sample axis, not
    # the reverse. On a single device, that would move every element.
    if x.shape[0] > 1 and runs_on_several_devices():
        x, hidden_dim = jnp.swapaxes(x, 0, 1), jnp.swapaxes(hidden_dim, 0, 1)
    return pull(_fold(x), _fold(hidden_dim))


def _fold(array: Any) -> Any:
    return array.reshape(array.shape[0] * array.shape[1], *array.shape[2:])
