"""Declaration of an ETP operation, and the registries of operations and rules.

Learning rules call the entries of four dictionaries, which map a primitive to a rule: written by
hand, or derived from its declaration (`rules`). Everything else about a primitive (abstract
evaluation, lowering, derivatives, batching) follows from its implementation. In all rules
``static_params`` are the keyword arguments of the equation, and the keys of dictionaries are the
names from ``trainable_invars_fn``.

``ETP_RULES_YW_TO_W``: ``yw_to_w(hidden_dim, trace, **static_params) -> trace``
    It multiplies a trace elementwise by a factor ``hidden_dim`` shaped like the output. The trace
    has no state axis here. It must include no other factor: a constant of the forward equation
    belongs to ``xy_to_dw`` alone, otherwise it would be applied again at every step.
``ETP_RULES_XY_TO_DW``: ``xy_to_dw(x, hidden_dim, weights, **static_params) -> gradients``
    It pulls ``hidden_dim`` (shaped like the output) back to every trainable operand, as a VJP does:
    the batch axis of a batched primitive is summed, and each gradient has the shape and dtype of
    its operand. It is linear in ``hidden_dim``.
``ETP_RULES_INIT_DRTRL``: ``init_drtrl(x_var, y_var, weight_vars, num_hidden_state) -> traces``
    Zeros for the parameter-dimension trace: the batch axis first (batched primitives), the state
    axis last. The variables have an ``aval`` with ``shape`` and ``dtype``. Only the shapes and
    dtypes of the result are used. A rule with ``**params`` gets the static parameters as well.
``ETP_RULES_INIT_PP``: ``init_pp(x_var, y_var, weight_vars, num_hidden_state) -> array``
    Zeros for the output-dimension trace: one array shaped like the output, state axis last. Only
    its dtype is used.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import jax

from .._errors import PrimitiveError
from .._jax import Equation, Primitive, equations_inside

Rule = Callable[..., Any]

# Weights, their gradients or their traces, by the name of a trainable operand.
Arrays: TypeAlias = dict[str, jax.Array]

# The meaning of an axis of an operation's trace.
TraceAxis = Literal["input", "output", "entry", "group"]

# Placeholder of a rule that is derived when the operation is registered.
DERIVED: Any = None


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
    yw_to_w, xy_to_dw, init_drtrl, init_pp : callable, optional
        The four rules; signatures, shapes and meaning in ``_etrace_op/registry.py``. By default
        they are derived from ``trace_axes``, from the VJP of ``impl``, and from the shapes of the
        terms and of the output. With a hand-written ``yw_to_w``, `D_RTRL` updates its traces after
        every step; with a derived one, once for each chunk.
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
    trace_axes : mapping, optional
        The meaning of the last axes of each trace, without the axis of the states:
        ``{'weight': ('input', 'output'), 'bias': ('output',)}``. Each is
        ``'input'``, ``'output'``, ``'entry'`` or ``'group'``. A trace has the shape and the name of
        its operand, or of one of the ``effective_weights``.
        Such axes exist if each entry reaches one output: ``'output'`` and ``'group'`` are the axes
        of the output, in order. A factor shaped like the output is the same along other axes. The
        axes between the batch and these are spatial. Without ``trace_axes``, ``yw_to_w`` is
        required.
    effective_weights : callable, optional
        ``effective_weights(weights, **static_params) -> arrays``: the arrays that have traces, as a
        function of operands that cannot have traces themselves. It requires ``accumulate``, and its
        names are the names in ``trace_axes``.
    accumulate : callable, optional
        ``accumulate(x, hidden_dim, weights, **static_params) -> trace``: the instantaneous
        terms in trace space, summed over a leading time axis, not over the batch. By default
        ``xy_to_dw`` of each sample separately.
    at_entries : callable, optional
        ``at_entries(hidden_dim, **static_params) -> array``: for each entry of an operand with the
        axis ``'entry'``, the element of an output-shaped array that the entry reaches. ``yw_to_w``
        follows from it.
    batched_form : ETPPrimitive, optional
        The primitive that computes the same for a batch, with the same static parameters.
    linear_in_input : bool or callable
        Whether ``xy_to_dw`` is linear in ``x`` for every operand, or does not depend on it, as
        ES_D_RTRL needs. Without it, a trial with random numbers decides. A function
        ``(x, **static_params) -> array`` returns the array that takes the place of ``x``, such as
        the one-hot form of an index.

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
    xy_to_dw: Rule = DERIVED
    init_drtrl: Rule = DERIVED
    init_pp: Rule = DERIVED
    trainable_invars_fn: Callable[[Mapping[str, Any]], dict[str, int]] = DERIVED
    x_invar_index: int | None = 0
    y_outvar_index: int = 0
    batched: bool = False
    gradient_enabled: bool = False
    trace_axes: Mapping[str, tuple[TraceAxis, ...]] | None = None
    effective_weights: Rule | None = None
    accumulate: Rule | None = None
    at_entries: Rule | None = None
    batched_form: Primitive | None = None
    linear_in_input: bool | Rule = False

    def resolve_trainable_invars(self, params: Mapping[str, Any]) -> dict[str, int]:
        """Return ``{trainable name: operand index}`` for an equation's static parameters."""
        return dict(self.trainable_invars_fn(params))


ETP_PRIMITIVES: set[Primitive] = set()
BATCHED_PRIMITIVES: set[Primitive] = set()

ETP_RULES_YW_TO_W: dict[Primitive, Rule] = {}
ETP_RULES_XY_TO_DW: dict[Primitive, Rule] = {}
ETP_RULES_INIT_DRTRL: dict[Primitive, Rule] = {}
ETP_RULES_INIT_PP: dict[Primitive, Rule] = {}

RULES: dict[str, dict[Primitive, Any]] = {
    "yw_to_w": ETP_RULES_YW_TO_W,
    "xy_to_dw": ETP_RULES_XY_TO_DW,
    "init_drtrl": ETP_RULES_INIT_DRTRL,
    "init_pp": ETP_RULES_INIT_PP,
}

# The declarations have the derived rules filled in.
ETP_PRIMITIVE_SPECS: dict[Primitive, ETPPrimitiveSpec] = {}


def get_primitive_spec(primitive: Any) -> ETPPrimitiveSpec:
    """Return the complete declaration of an ETP primitive.

    Raises
    ------
    PrimitiveError
        If ``primitive`` is not an ETP primitive or lacks rules.

    Examples
    --------
    >>> import braintrace
    >>> braintrace.get_primitive_spec(braintrace.etp_mm_p).name
    'etp_mm'
    """
    spec = ETP_PRIMITIVE_SPECS.get(primitive)
    if spec is not None:
        return spec
    if primitive not in ETP_PRIMITIVES:
        raise PrimitiveError(f"`{primitive}` is not an ETP primitive of this library.")
    missing = [kind for kind, rules in RULES.items() if primitive not in rules]
    raise PrimitiveError(
        f"Primitive `{primitive}` has no rule {', '.join(f'`{kind}`' for kind in missing)}; "
        "register all four with `primitive.register_etp_rules(...)` before it is compiled."
    )


# The role of an ETP operation in a walk back from a hidden state: the walk ends at an opaque one,
# and continues through the first operand of a transparent one.
MarkedRole = Literal["opaque", "transparent"]


def is_marked(equation: Equation) -> bool:
    """Test whether an equation is an ETP operation."""
    return equation.primitive in ETP_PRIMITIVES


def holds_marked(equation: Equation) -> bool:
    """Test whether a body of an equation (branch, loop, call) has an ETP operation."""
    return any(map(is_marked, equations_inside(equation)))


def role(equation: Equation) -> MarkedRole | None:
    """Return the role of an ETP operation in a walk; ``None`` for any other equation.

    Most ETP operations are opaque: the rules of an operation cannot express nested weights.
    """
    if not is_marked(equation):
        return None
    return "transparent" if equation.primitive.gradient_enabled else "opaque"
