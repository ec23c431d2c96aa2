"""Declaration of an ETP operation for the compiler and `_core`."""

from collections.abc import Callable, Mapping
from dataclasses import InitVar, dataclass
from typing import Any, Literal

from .._errors import PrimitiveError
from .._jax import Primitive

Rule = Callable[..., Any]

TraceAxis = Literal["input", "output", "entry", "group"]
"""The meaning of an axis of an operation's trace."""

RULES = ("yw_to_w", "xy_to_dw", "init_drtrl", "init_pp")
"""The rules of every operation, each with its own registry."""

DERIVED: Any = None
"""Placeholder of a rule that is derived when the operation is registered."""


def conventional_trainable_invars(params: Mapping[str, Any]) -> dict[str, int]:
    """Return the layout ``(x, weight[, bias])``, with a bias if ``has_bias`` is set."""
    return {"weight": 1, "bias": 2} if params.get("has_bias", False) else {"weight": 1}


@dataclass(frozen=True, kw_only=True, eq=False)
class ETPPrimitiveSpec:
    """Declare an operation with trainable operands.

    A forward function and the axes of its traces are enough: omitted rules are derived when the
    operation is registered. Write a rule by hand if it is faster, or if the operands cannot hold a
    trace.

    Parameters
    ----------
    name : str
        Name of the primitive in a jaxpr; must be new.
    impl : callable
        ``impl(*operands, **static_params) -> array``, plain JAX.
    trace_axes : mapping, optional
        The meaning of the last axes of each trace, without the axis of the states:
        ``{'weight': ('input', 'output'), 'bias': ('output',)}``. Each is
        ``'input'``, ``'output'``, ``'entry'`` or ``'group'``. A trace has the shape and the name of
        its operand, or of one of the ``effective_weights``.
        Such axes exist if each entry reaches one output: ``'output'`` and ``'group'`` are the axes
        of the output, in order. A factor shaped like the output is the same along other axes. The
        axes between the batch and these are spatial. Without ``trace_axes``, ``yw_to_w`` is
        required.
    yw_to_w, xy_to_dw, init_drtrl, init_pp : callable, optional
        The four rules; signatures, shapes and meaning in ``_etrace_op/registry.py``. By default
        they are derived from ``trace_axes``, from the VJP of ``impl``, and from the shapes of
        ``accumulate`` and of the output.
    dt_to_t : callable, optional
        Another name of ``yw_to_w``.
    trainable_invars_fn : callable, optional
        ``static_params -> {trainable name: operand index}``. By default all operands but the input
        are trainable, under their names in ``impl``; an operand such as ``*bias`` is present if
        ``has_bias`` is set.
    x_invar_index : int or None
        Index of the input, which is not trainable; None for identity-like operations.
    y_outvar_index : int
        Result that is the output; ETP primitives have one result, so always 0.
    batched : bool
        Whether input and output have a leading batch axis; samples must be independent.
    gradient_enabled : bool
        Whether the compiler passes through this primitive between an output and a hidden state.
        Only for identity-like operations.
    linear_in_input : bool
        Declares that ``xy_to_dw`` is linear in ``x`` for every operand, or does not depend on it.
        Without it, ES_D_RTRL tests this by JAX's transposition (a kernel without a transpose
        fails).
    looks_up : bool
        Whether the input is the index of a row of ``weight``, of ``rows`` rows. ES_D_RTRL then
        filters the one-hot input. Only for `embedding`.
    effective_weights : callable, optional
        ``effective_weights(weights, **static_params) -> arrays``: the arrays that have traces, as a
        function of operands that cannot have traces themselves. It requires ``accumulate``, and its
        names are the names in ``trace_axes``.
    accumulate : callable, optional
        ``accumulate(x, hidden_dim, weights, **static_params) -> trace``: the instantaneous
        terms in trace space, summed over a leading time axis, not over the batch. By default the
        VJP of each sample separately.
    contract : callable, optional
        ``contract(signal, trace, weights, **static_params) -> gradients``: the output-shaped
        signal times a trace, summed over the batch. By default the VJP of ``effective_weights``, or
        the sum of the result of ``yw_to_w``.
    select_outputs : callable, optional
        ``select_outputs(weights, pick, **static_params) -> weights``: the operands of the same
        operation with fewer outputs, where ``pick`` takes these entries of an array's last axis;
        None if the parameters do not allow that. By default these entries of all operands, if their
        last axis in ``trace_axes`` is ``'output'``.
    at_entries : callable, optional
        ``at_entries(hidden_dim, **static_params) -> array``: for each entry of an operand with the
        axis ``'entry'``, the element of an output-shaped array that the entry reaches. ``yw_to_w``
        follows from it.
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

    Declare an operation:

    >>> def scaled(x, weight, bias, *, scale):
    ...     return scale * (x @ weight) + bias
    >>> declaration = braintrace.ETPPrimitiveSpec(
    ...     name='scaled_product',
    ...     impl=scaled,
    ...     trace_axes={'weight': ('input', 'output'), 'bias': ('output',)},
    ...     batched=True,
    ... )
    >>> scaled_p = braintrace.register_primitive_spec(declaration)
    """

    name: str
    impl: Rule
    yw_to_w: Rule = DERIVED
    dt_to_t: InitVar[Rule | None] = None
    xy_to_dw: Rule = DERIVED
    init_drtrl: Rule = DERIVED
    init_pp: Rule = DERIVED
    trainable_invars_fn: Callable[[Mapping[str, Any]], dict[str, int]] = DERIVED
    x_invar_index: int | None = 0
    y_outvar_index: int = 0
    batched: bool = False
    gradient_enabled: bool = False
    linear_in_input: bool = False
    looks_up: bool = False
    effective_weights: Rule | None = None
    accumulate: Rule | None = None
    contract: Rule | None = None
    select_outputs: Rule | None = None
    trace_axes: Mapping[str, tuple[TraceAxis, ...]] | None = None
    at_entries: Rule | None = None
    batched_form: Primitive | None = None
    batching: Rule | None = None

    def __post_init__(self, dt_to_t: Rule | None) -> None:
        object.__setattr__(self, "yw_to_w", one_rule(self.name, self.yw_to_w, dt_to_t))

    def resolve_trainable_invars(self, params: Mapping[str, Any]) -> dict[str, int]:
        """Return ``{trainable name: operand index}`` for an equation's static parameters."""
        return dict(self.trainable_invars_fn(params))


def one_rule(name: str, yw_to_w: Rule | None, dt_to_t: Rule | None) -> Any:
    """Return a rule that was passed under one of two names, or ``None``.

    Raises
    ------
    PrimitiveError
        If it was passed under both.
    """
    if yw_to_w is not None and dt_to_t is not None:
        raise PrimitiveError(
            f"`{name}` got both `yw_to_w` and `dt_to_t`, which are two names of one rule: leave "
            "out one of the two."
        )
    return dt_to_t if yw_to_w is None else yw_to_w


def check_spec(spec: ETPPrimitiveSpec) -> None:
    """Refuse a declaration without a rule that does not follow from the others.

    Raises
    ------
    PrimitiveError
        Naming the rule.
    """
    for field in ("impl", "trainable_invars_fn", *RULES):
        if not callable(getattr(spec, field)):
            raise PrimitiveError(
                f"`{field}` of `{spec.name}` must be callable: give it, or the `trace_axes` that "
                "it follows from."
            )
