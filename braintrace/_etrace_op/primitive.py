"""ETP primitives: definition and registration.

An ETP primitive computes the same as its implementation; its only purpose is to be visible in a
jaxpr. All JAX rules are derived from the implementation, so that it can be jitted, differentiated
and vmapped. The rules of online learning are derived from its declaration (`rules`), unless they
are written by hand.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._errors import PrimitiveError
from .._jax import Primitive
from .._jax_kernels import define_from_impl, runs_on_several_devices
from .mark import SCOPE
from .registry import (
    BATCHED_PRIMITIVES,
    ETP_PRIMITIVE_SPECS,
    ETP_PRIMITIVES,
    RULES,
    ETPPrimitiveSpec,
    Rule,
)
from .rules import completed


class ETPPrimitive(Primitive):
    """A JAX primitive that marks an operation with trainable operands.

    `register_primitive` and `register_primitive_spec` create it.
    ``bind(*operands, **static_params)`` runs it; it prints as its name.

    Attributes
    ----------
    batched : bool
        Whether input and output have a leading batch axis.
    gradient_enabled : bool
        Whether the compiler passes through it between an output and a hidden state.
    implementation : callable
        The function that it computes, in plain JAX.
    """

    def __init__(self, name: str, implementation: Rule, *, batched: bool, gradient_enabled: bool):
        super().__init__(name)
        self.implementation = implementation
        self.batched = batched
        self.gradient_enabled = gradient_enabled

    def register_yw_to_w(self, rule: Rule) -> Rule:
        """Register the rule that multiplies a trace by an output-shaped factor."""
        return self._register_rule("yw_to_w", rule)

    def register_xy_to_dw(self, rule: Rule) -> Rule:
        """Register the rule that pulls an output cotangent back to trainable operands."""
        return self._register_rule("xy_to_dw", rule)

    def register_init_drtrl(self, rule: Rule) -> Rule:
        """Register the rule that makes a zero parameter-dimension trace."""
        return self._register_rule("init_drtrl", rule)

    def register_init_pp(self, rule: Rule) -> Rule:
        """Register the rule that makes a zero output-dimension trace."""
        return self._register_rule("init_pp", rule)

    def _register_rule(self, kind: str, rule: Rule) -> Rule:
        RULES[kind][self] = rule
        if self not in ETP_PRIMITIVE_SPECS and all(self in rules for rules in RULES.values()):
            self.register_etp_rules(**{name: rules[self] for name, rules in RULES.items()})
        return rule

    def register_etp_rules(self, **fields: Any) -> None:
        """Register all four rules, and the primitive's layout of operands.

        Parameters
        ----------
        **fields
            The fields of `ETPPrimitiveSpec` that `register_primitive` does not name:

            - ``yw_to_w``, ``xy_to_dw``, ``init_drtrl``, ``init_pp``: the rules. One that is left
              out is derived from the implementation; ``yw_to_w`` also needs ``trace_axes``.
            - ``trainable_invars_fn``: ``static_params -> {trainable name: operand index}``; by
              default the operands are ``(x, weight)``, and ``(x, weight, bias)`` with
              ``has_bias=True``. With ``trace_axes``, see `ETPPrimitiveSpec`.
            - ``x_invar_index`` and all optional fields.

        Raises
        ------
        PrimitiveError
            If a rule is missing.
        """
        if not fields.get("trace_axes") and fields.get("trainable_invars_fn") is None:
            fields["trainable_invars_fn"] = _conventional_layout
        own = {"name": self.name, "impl": self.implementation}
        own |= {"batched": self.batched, "gradient_enabled": self.gradient_enabled}
        _register(self, completed(ETPPrimitiveSpec(**own, **fields)))


def _conventional_layout(params: Mapping[str, Any]) -> dict[str, int]:
    return {"weight": 1, "bias": 2} if params.get("has_bias", False) else {"weight": 1}


def _register(primitive: ETPPrimitive, spec: ETPPrimitiveSpec) -> None:
    ETP_PRIMITIVE_SPECS[primitive] = spec
    for kind, rules in RULES.items():
        rules[primitive] = getattr(spec, kind)


def register_primitive(
    name: str, impl: Rule, *, batched: bool = False, gradient_enabled: bool = False
) -> ETPPrimitive:
    """Make an ETP primitive from its implementation.

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
        It runs under every JAX transformation. The compiler uses it once its four rules are
        registered (`ETPPrimitive.register_etp_rules`).

    Raises
    ------
    PrimitiveError
        If the name is taken.

    Examples
    --------
    >>> import braintrace
    >>> double_p = braintrace.register_primitive('double', lambda x, w: 2 * (x @ w))
    >>> print(double_p)
    double
    """
    if any(primitive.name == name for primitive in ETP_PRIMITIVES):
        raise PrimitiveError(
            f"An ETP primitive named `{name}` is registered already; choose another name."
        )
    primitive = ETPPrimitive(name, impl, batched=batched, gradient_enabled=gradient_enabled)
    define_from_impl(primitive, impl, _batch)
    ETP_PRIMITIVES.add(primitive)
    if batched:
        BATCHED_PRIMITIVES.add(primitive)
    return primitive


def register_primitive_spec(spec: ETPPrimitiveSpec) -> ETPPrimitive:
    """Make an ETP primitive from its complete declaration.

    Parameters
    ----------
    spec : ETPPrimitiveSpec
        Implementation, rules and layout.

    Returns
    -------
    ETPPrimitive
        Ready for the compiler; ``get_primitive_spec`` returns its ``spec``.

    Raises
    ------
    PrimitiveError
        If the name is taken or a rule is missing. Nothing is registered in this case.
    """
    complete = completed(spec)
    primitive = register_primitive(
        spec.name, spec.impl, batched=spec.batched, gradient_enabled=spec.gradient_enabled
    )
    _register(primitive, complete)
    return primitive


def register_forms(vector: str, batch: str, **fields: Any) -> tuple[ETPPrimitive, ETPPrimitive]:
    """Register the primitives of an operation for one sample and for a batch, by their names."""
    of_batch = register_primitive_spec(ETPPrimitiveSpec(name=batch, batched=True, **fields))
    of_sample = ETPPrimitiveSpec(name=vector, batched_form=of_batch, **fields)
    return register_primitive_spec(of_sample), of_batch


# --- jax.vmap


def _batch(
    primitive: ETPPrimitive, operands: Sequence[Any], dims: Sequence[Any], params: dict[str, Any]
) -> tuple[Any, int]:
    """Keep the primitive (or its batched form) if only the input is vmapped."""
    if primitive.gradient_enabled and len(operands) == 1:  # the identity
        return primitive.bind(*operands, **params), dims[0]
    spec = ETP_PRIMITIVE_SPECS.get(primitive)
    mapped = [i for i, dim in enumerate(dims) if dim is not None]
    if spec is not None:
        target = primitive if spec.batched else spec.batched_form
        if target is not None and mapped == [spec.x_invar_index]:
            return _fold_into_batch(primitive, target, operands, dims, params)

    def plain(*values: Any) -> Any:
        return primitive.implementation(*values, **params)

    with jax.named_scope(SCOPE):  # the compiler marks what the implementation consists of
        return jax.vmap(plain, in_axes=tuple(dims))(*operands), 0


def _fold_into_batch(
    primitive: ETPPrimitive,
    target: ETPPrimitive,
    operands: Sequence[Any],
    dims: Sequence[Any],
    params: dict[str, Any],
) -> tuple[Any, int]:
    values = list(operands)
    index = next(i for i, dim in enumerate(dims) if dim is not None)
    # Samples that are sharded remain the outer axis: folding them into time needs communication.
    axis = int(primitive.batched and runs_on_several_devices())
    x = jnp.moveaxis(values[index], dims[index], axis)
    leading = x.shape[:2] if primitive.batched else x.shape[:1]
    values[index] = x.reshape(math.prod(leading), *x.shape[len(leading) :])
    y = target.bind(*values, **params)
    return y.reshape(*leading, *y.shape[1:]), axis
