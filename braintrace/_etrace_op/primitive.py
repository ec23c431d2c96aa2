"""Marker primitives: how one is defined, and what the compiler may know about it.

A marker primitive computes what its implementation computes; its only purpose is to be
found in a jaxpr. Registering one derives all JAX rules from the implementation, so that
it can be jitted, differentiated and mapped; the four rules of online learning are written
by hand (see ``registry``).
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from .._arguments import BOOLEAN, check_option, shown
from .._errors import PrimitiveError
from .._jax import Primitive, define_from_impl
from . import registry
from .input_filter import InputFilter

Rule = Callable[..., Any]

_RULE_REGISTRIES: dict[str, dict] = {
    "yw_to_w": registry.ETP_RULES_YW_TO_W,
    "xy_to_dw": registry.ETP_RULES_XY_TO_DW,
    "init_drtrl": registry.ETP_RULES_INIT_DRTRL,
    "init_pp": registry.ETP_RULES_INIT_PP,
}


def conventional_trainable_invars(params: Mapping[str, Any]) -> dict[str, int]:
    """Return the layout ``(x, weight[, bias])``, the bias present if ``has_bias`` is set."""
    return {"weight": 1, "bias": 2} if params.get("has_bias", False) else {"weight": 1}


@dataclass(frozen=True, kw_only=True)
class ETPPrimitiveSpec:
    """Everything that the compiler and the executor know about one marker primitive.

    Parameters
    ----------
    name : str
        Name of the primitive in a jaxpr; must be new.
    impl : callable
        ``impl(*operands, **static_params) -> array``, plain JAX.
    yw_to_w, xy_to_dw, init_drtrl, init_pp : callable
        The four rules; signatures, shapes and meaning in ``_etrace_op/registry.py``.
    trainable_invars_fn : callable
        ``static_params -> {trainable name: operand index}``.
    x_invar_index : int or None
        Operand that is the (not trainable) input; None for identity-like operations.
    y_outvar_index : int
        Result that is the output; marker primitives have one result, so always 0.
    batched : bool
        Whether input and output carry a batch axis in front, samples independent.
    gradient_enabled : bool
        Whether the compiler passes through this primitive on its way from an output to
        a hidden state. Only for identity-like operations.
    holomorphic : bool
        Whether ``contract`` (by default ``yw_to_w``, summed over samples) multiplies complex
        signals and traces as it does real ones: no conjugate, no absolute value, nothing made
        real before the end. D_RTRL then keeps the traces of two coupled states as one complex
        array, which a step updates in place. The real part is taken afterwards.
    linear_in_input : bool
        Declares that ``xy_to_dw`` is linear in ``x`` for every operand, or does not depend on it.
        Without it, ES_D_RTRL asks JAX whether it is (a kernel without transpose is not).
    input_filter : InputFilter, optional
        What ES_D_RTRL filters of an input that ``xy_to_dw`` is not linear in. Without it, that
        algorithm refuses such an operation.
    accumulate : callable, optional
        ``accumulate(x, hidden_dim, weights, **static_params) -> trace``: the instantaneous
        terms in trace space, summed over a leading time axis, not over the batch. For
        primitives whose parameters' shape cannot hold the exact trace.
    contract : callable, optional
        ``contract(signal, trace, weights, **static_params) -> gradients``: the output-shaped
        signal times a trace, summed over the batch. Goes with ``accumulate``.
    select_outputs : callable, optional
        ``select_outputs(weights, pick, **static_params) -> weights``: the operands of the same
        operation with fewer outputs, where ``pick`` takes these entries of an array's last
        axis; None where the parameters do not allow that.
    batched_form : ETPPrimitive, optional
        The primitive that computes the same for a batch, with the same static parameters.
    batching : callable, optional
        ``batching(primitive, operands, dims, static_params) -> (result, axis)``, the
        ``jax.vmap`` rule; by default a mapped input is folded into the batch axis.

    Examples
    --------
    >>> import braintrace
    >>> spec = braintrace.get_primitive_spec(braintrace.etp_mm_p)
    >>> spec.resolve_trainable_invars({'has_bias': True})
    {'weight': 1, 'bias': 2}
    """

    name: str
    impl: Rule
    yw_to_w: Rule
    xy_to_dw: Rule
    init_drtrl: Rule
    init_pp: Rule
    trainable_invars_fn: Callable[[Mapping[str, Any]], dict[str, int]]
    x_invar_index: int | None = 0
    y_outvar_index: int = 0
    batched: bool = False
    gradient_enabled: bool = False
    holomorphic: bool = False
    linear_in_input: bool = False
    input_filter: InputFilter | None = None
    accumulate: Rule | None = None
    contract: Rule | None = None
    select_outputs: Rule | None = None
    batched_form: "ETPPrimitive | None" = None
    batching: Rule | None = None

    def resolve_trainable_invars(self, params: Mapping[str, Any]) -> dict[str, int]:
        """Return ``{trainable name: operand index}`` for an equation's static parameters.

        Raises
        ------
        PrimitiveError
            If ``trainable_invars_fn`` returns anything but distinct operand indices other
            than the input's.
        """
        layout = dict(self.trainable_invars_fn(params))
        indices = list(layout.values())
        valid = all(isinstance(i, int) and i >= 0 for i in indices)
        if not layout or not valid or len({*indices, self.x_invar_index}) <= len(indices):
            raise PrimitiveError(
                f"`trainable_invars_fn` of `{self.name}` returned {layout} for the parameters "
                f"{sorted(params)}; expected distinct operand indices, none of them the input's "
                f"(x_invar_index={self.x_invar_index})."
            )
        return layout


class ETPPrimitive(Primitive):
    """A JAX primitive that marks an operation with trainable operands.

    Made by `register_primitive` or `register_primitive_spec`. ``bind(*operands,
    **static_params)`` runs it; it prints as its name.

    Attributes
    ----------
    batched : bool
        Whether input and output carry a batch axis in front.
    gradient_enabled : bool
        Whether the compiler passes through it between an output and a hidden state.
    implementation : callable
        What it computes, in plain JAX.
    """

    batched: bool
    gradient_enabled: bool
    implementation: Rule

    def __init__(self, name: str, implementation: Rule, *, batched: bool, gradient_enabled: bool):
        super().__init__(name)
        self.implementation = implementation
        self.batched = batched
        self.gradient_enabled = gradient_enabled

    def register_yw_to_w(self, rule: Rule) -> Rule:
        """Register the rule that multiplies a trace by an output-shaped factor."""
        return _register_rule(self, "yw_to_w", rule)

    def register_xy_to_dw(self, rule: Rule) -> Rule:
        """Register the rule that pulls an output cotangent back to the trainable operands."""
        return _register_rule(self, "xy_to_dw", rule)

    def register_init_drtrl(self, rule: Rule) -> Rule:
        """Register the rule that makes a zero parameter-dimension trace."""
        return _register_rule(self, "init_drtrl", rule)

    def register_init_pp(self, rule: Rule) -> Rule:
        """Register the rule that makes a zero output-dimension trace."""
        return _register_rule(self, "init_pp", rule)

    def register_etp_rules(
        self,
        *,
        yw_to_w: Rule,
        xy_to_dw: Rule,
        init_drtrl: Rule,
        init_pp: Rule,
        trainable_invars_fn: Callable[[Mapping[str, Any]], dict[str, int]] | None = None,
        x_invar_index: int | None = 0,
        input_filter: InputFilter | None = None,
    ) -> None:
        """Register all four rules, and with them the primitive's layout of operands.

        Parameters
        ----------
        yw_to_w, xy_to_dw, init_drtrl, init_pp : callable
            See ``_etrace_op/registry.py``.
        trainable_invars_fn : callable, optional
            ``static_params -> {trainable name: operand index}``; by default the operands
            are ``(x, weight)``, and ``(x, weight, bias)`` where ``has_bias=True``.
        x_invar_index : int or None
            Operand that is the input.
        input_filter : InputFilter, optional
            What ES_D_RTRL filters of the input; see `ETPPrimitiveSpec`.

        Raises
        ------
        PrimitiveError
            If a rule is not callable or one of that kind is registered already.
        """
        _check_input_filter(self.name, input_filter)
        self._declared = {
            "trainable_invars_fn": trainable_invars_fn or conventional_trainable_invars,
            "x_invar_index": x_invar_index,
            "input_filter": input_filter,
        }
        self.register_yw_to_w(yw_to_w)
        self.register_xy_to_dw(xy_to_dw)
        self.register_init_drtrl(init_drtrl)
        self.register_init_pp(init_pp)

    _declared: Mapping[str, Any] = MappingProxyType(
        {"trainable_invars_fn": conventional_trainable_invars}
    )


def register_primitive(
    name: str, impl: Rule, *, batched: bool = False, gradient_enabled: bool = False
) -> ETPPrimitive:
    """Make a marker primitive from its implementation.

    Parameters
    ----------
    name : str
        Name in a jaxpr; must be new.
    impl : callable
        ``impl(*operands, **static_params) -> array``, plain JAX.
    batched, gradient_enabled : bool
        See `ETPPrimitiveSpec`.

    Returns
    -------
    ETPPrimitive
        Runs under every JAX transformation. The compiler uses it once its four rules are
        registered (`ETPPrimitive.register_etp_rules`).

    Raises
    ------
    PrimitiveError
        If the name is taken or ``impl`` is not callable.

    Examples
    --------
    >>> import braintrace
    >>> double_p = braintrace.register_primitive('double', lambda x, w: 2 * (x @ w))
    >>> print(double_p)
    double
    """
    if not isinstance(name, str) or not name:
        raise PrimitiveError(f"A primitive's name must be a non-empty string, got {name!r}.")
    if any(primitive.name == name for primitive in registry.ETP_PRIMITIVES):
        raise PrimitiveError(
            f"A marker primitive named `{name}` is registered already; choose another name."
        )
    for option, value in (("batched", batched), ("gradient_enabled", gradient_enabled)):
        check_option(option, value, BOOLEAN, f"Primitive `{name}`: ")
    if not callable(impl):
        raise PrimitiveError(f"The implementation of `{name}` must be callable, got {impl!r}.")
    primitive = ETPPrimitive(name, impl, batched=batched, gradient_enabled=gradient_enabled)
    define_from_impl(primitive, _one_result(name, impl), _batch)
    registry.ETP_PRIMITIVES.add(primitive)
    if batched:
        registry.BATCHED_PRIMITIVES.add(primitive)
    return primitive


def register_primitive_spec(spec: ETPPrimitiveSpec) -> ETPPrimitive:
    """Make a marker primitive from its complete description.

    Parameters
    ----------
    spec : ETPPrimitiveSpec
        Implementation, rules and layout.

    Returns
    -------
    ETPPrimitive
        Ready for the compiler; ``get_primitive_spec`` gives ``spec`` back.

    Raises
    ------
    PrimitiveError
        If the name is taken, a rule is missing or not callable, or the layout is invalid.
        Nothing is registered then.
    """
    if not isinstance(spec, ETPPrimitiveSpec):
        raise PrimitiveError(f"`spec` is {shown(spec)}; expected an `ETPPrimitiveSpec`.")
    _check_spec(spec)
    primitive = register_primitive(
        spec.name, spec.impl, batched=spec.batched, gradient_enabled=spec.gradient_enabled
    )
    registry.ETP_PRIMITIVE_SPECS[primitive] = spec
    for kind in _RULE_REGISTRIES:
        _register_rule(primitive, kind, getattr(spec, kind))
    return primitive


def get_primitive_spec(primitive: Any) -> ETPPrimitiveSpec:
    """Return the complete description of a marker primitive.

    Raises
    ------
    PrimitiveError
        If ``primitive`` is no marker primitive or lacks rules.
    """
    spec = registry.ETP_PRIMITIVE_SPECS.get(primitive)
    if spec is not None:
        return spec
    if primitive not in registry.ETP_PRIMITIVES:
        raise PrimitiveError(f"`{primitive}` is not a marker primitive of this library.")
    missing = [kind for kind, rules in _RULE_REGISTRIES.items() if primitive not in rules]
    raise PrimitiveError(
        f"Primitive `{primitive}` has no rule {', '.join(f'`{kind}`' for kind in missing)}; "
        "register all four with `primitive.register_etp_rules(...)` before it is compiled."
    )


def _one_result(name: str, impl: Rule) -> Rule:
    @functools.wraps(impl)
    def checked(*operands: Any, **params: Any) -> Any:
        result = impl(*operands, **params)
        if isinstance(result, (tuple, list, dict)) or result is None:
            raise PrimitiveError(
                f"The implementation of `{name}` must return one array, "
                f"got {type(result).__name__}."
            )
        return result

    return checked


def _register_rule(primitive: ETPPrimitive, kind: str, rule: Rule) -> Rule:
    if not callable(rule):
        raise PrimitiveError(f"Rule `{kind}` of `{primitive}` must be callable, got {rule!r}.")
    rules = _RULE_REGISTRIES[kind]
    if primitive in rules:
        raise PrimitiveError(f"Rule `{kind}` of `{primitive}` is registered already.")
    rules[primitive] = rule
    complete = all(primitive in registered for registered in _RULE_REGISTRIES.values())
    if complete and primitive not in registry.ETP_PRIMITIVE_SPECS:
        registry.ETP_PRIMITIVE_SPECS[primitive] = _spec_from_rules(primitive)
    return rule


def _spec_from_rules(primitive: ETPPrimitive) -> ETPPrimitiveSpec:
    return ETPPrimitiveSpec(
        name=primitive.name,
        impl=primitive.implementation,
        **{kind: rules[primitive] for kind, rules in _RULE_REGISTRIES.items()},
        **primitive._declared,
        batched=primitive.batched,
        gradient_enabled=primitive.gradient_enabled,
    )


def _check_spec(spec: ETPPrimitiveSpec) -> None:
    required = ("impl", "trainable_invars_fn", *_RULE_REGISTRIES)
    for field in required:
        if not callable(getattr(spec, field)):
            raise PrimitiveError(
                f"`{field}` of `{spec.name}` must be callable, got {getattr(spec, field)!r}."
            )
    for field in ("accumulate", "contract", "select_outputs", "batching"):
        if getattr(spec, field) is not None and not callable(getattr(spec, field)):
            raise PrimitiveError(
                f"`{field}` of `{spec.name}` must be callable or None, "
                f"got {getattr(spec, field)!r}."
            )
    _check_input_filter(spec.name, spec.input_filter)
    form = spec.batched_form
    if form and spec.input_filter and get_primitive_spec(form).input_filter is None:
        raise PrimitiveError(
            f"`{spec.name}` has an `input_filter`, but its `batched_form` `{form}` has none. Give "
            "it one as well: time takes the place of the batch there."
        )
    index = spec.x_invar_index
    if index is not None and (not isinstance(index, int) or index < 0):
        raise PrimitiveError(
            f"`x_invar_index` of `{spec.name}` must be an operand index or None, got {index!r}."
        )
    if spec.y_outvar_index != 0:
        raise PrimitiveError(
            f"`y_outvar_index` of `{spec.name}` must be 0, got {spec.y_outvar_index!r}: marker "
            "primitives have one result."
        )


def _check_input_filter(name: str, value: Any) -> None:
    if value is not None and not isinstance(value, InputFilter):
        raise PrimitiveError(
            f"`input_filter` of `{name}` must be an `InputFilter` or None, got {value!r}."
        )


# --- jax.vmap


def _batch(
    primitive: ETPPrimitive, operands: Sequence[Any], dims: Sequence[Any], params: dict
) -> tuple[Any, int]:
    """Keep the primitive (or its batched form) where only the input is mapped."""
    spec = registry.ETP_PRIMITIVE_SPECS.get(primitive)
    if spec is not None and spec.batching is not None:
        return spec.batching(primitive, operands, dims, params)
    if spec is not None:
        target = primitive if spec.batched else spec.batched_form
        mapped = [i for i, dim in enumerate(dims) if dim is not None]
        if target is not None and mapped == [spec.x_invar_index]:
            return _fold_into_batch(primitive, target, operands, dims, params), 0

    def plain(*values: Any) -> Any:
        return primitive.implementation(*values, **params)

    return jax.vmap(plain, in_axes=tuple(dims))(*operands), 0


def _fold_into_batch(
    primitive: ETPPrimitive,
    target: ETPPrimitive,
    operands: Sequence[Any],
    dims: Sequence[Any],
    params: dict,
) -> Any:
    values = list(operands)
    index = next(i for i, dim in enumerate(dims) if dim is not None)
    x = jnp.moveaxis(values[index], dims[index], 0)
    leading = x.shape[:2] if primitive.batched else x.shape[:1]
    values[index] = x.reshape(math.prod(leading), *x.shape[len(leading) :])
    y = target.bind(*values, **params)
    return y.reshape(*leading, *y.shape[1:])
