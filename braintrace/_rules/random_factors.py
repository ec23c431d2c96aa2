r"""Random factors of the influence matrix (UORO, KF-RTRL).

The derivative :math:`\epsilon` of the states ``S`` of a sample with respect to parameters is
estimated by an outer product of two factors. `combine` returns factors of the next step whose mean
over random signs :math:`\nu` is the recursion of RTRL, :math:`J \epsilon + F`.

UORO has a pair for all parameters together: ``s`` shaped like the states, ``t`` like the
parameters, with :math:`\rho_0` and :math:`\rho_1` of `combine`:

.. math::

    s' = \rho_0 J s + \rho_1 \nu, \qquad t' = t / \rho_0 + \nu^\top F / \rho_1.

Neither Jacobian is built: :math:`\nu^\top F` is one vector-Jacobian product of the step, and
:math:`J s` one Jacobian-vector product.

KF-RTRL has a pair for each product of parameters: ``u`` shaped like its input :math:`x`, and ``A``
of states by outputs :math:`y`, with :math:`F = \partial S' / \partial y`:

.. math::

    u' = p_0 u + p_1 \nu x, \qquad A' = J A / p_0 + \nu F / p_1.

A bias has the constant input 1, a part of ``x`` and of ``u``. An elementwise parameter (a leak, a
gain) has the exact trace of RTRL, of states by parameters. It is at most as large as an ``A``.

The key of the signs is a trace that a reset does not change.
"""

import dataclasses
import functools
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from .._core.flat_state import (
    equation_of,
    flat_state_of,
    from_rows,
    inputs_of_step,
    places_of,
    row_dtype,
    step_jvp,
    step_vjp,
    to_rows,
    unit_rows,
)
from .._core.sites import over_first_axis, where_flagged
from .._core.traces import as_arrays, widened
from .._errors import PrimitiveError
from .._graph.flat_state import ParameterUse, operand_key
from .._graph.graph import ETraceGraph, TraceSpec, TraceSpecs
from .._graph.method import Chunk, Signal, Traces, Weights
from .._jax import Var, source_line, struct_of
from .._jaxpr.vjp import Kind, kinds_of
from .._typing import PyTree
from .chunk_vjp import chunk_vjp, of_product, parameters_behind
from .rtrl import (
    FullTraces,
    PassingTraces,
    arriving_rows,
    entries,
    followed,
    gradients_like,
    multiply,
    over_steps,
)

KEY = "key"
"""Name of the trace that has the key of the signs."""

IMPLEMENTATION = "threefry2x32"
"""Generator with the same numbers on every device and for every configuration of JAX."""

EXACT = FullTraces()
"""The traces of parameters that KF-RTRL finds in other uses than products."""

Factors: TypeAlias = tuple[PyTree, PyTree]
"""Two pytrees of arrays with samples first, which stand for their outer product by sample."""


@dataclasses.dataclass(frozen=True)
class RandomTraces(PassingTraces):
    """The common part of these rules, which draw their signs from a ``seed``."""

    seed: int
    needs = frozenset({"step", "traces"})
    jacobian = "full"

    @property
    def spec_of_key(self) -> TraceSpec:
        with jax.ensure_compile_time_eval():
            key = jax.random.key(self.seed, impl=IMPLEMENTATION)
            data = np.asarray(jax.random.key_data(key))
        return TraceSpec(
            data.shape,
            data.dtype,
            ("entry",),
            operand=KEY,
            initial=data,
            takes_trace_dtype=False,
            outlives_reset=True,
        )


class RankOneTraces(RandomTraces):
    """Trace method with a vector like the states and one like the parameters, for every sample."""

    def trace_specs(self, graph: ETraceGraph, every_state: bool) -> TraceSpecs:
        """Return ``s``, ``t`` for each parameter that reaches a state, and the key."""
        flat, dtype = flat_state_of(graph), row_dtype(flat_state_of(graph))
        t = {
            leaf.name: TraceSpec(
                (flat.samples, *leaf.shape),
                jnp.promote_types(dtype, leaf.dtype),
                ("batch", *entries(len(leaf.shape))),
                operand=leaf.name,
            )
            for leaf in followed(graph)
        }
        s = TraceSpec((flat.samples, flat.size), dtype, ("batch", "state"))
        return {"s": s, "t": t, KEY: self.spec_of_key}

    def update(self, chunk: Chunk, traces: Traces) -> Traces:
        """Return the traces after recorded steps, one step at a time."""
        flat = flat_state_of(chunk.graph)
        dtype = jnp.promote_types(row_dtype(flat), jnp.float32)

        def advance(one: Chunk, traces: Traces) -> Traces:
            s, t = widened((traces["s"], traces["t"]), dtype)
            inputs = _inputs_of(one)
            pushed = to_rows(flat, step_jvp(one.graph, inputs, from_rows(flat, s))).astype(dtype)
            nu, key = draw_signs(traces[KEY], s.shape, dtype)
            _, F = chunk_vjp(one, from_rows(flat, nu[None]))
            entering = {name: F[name][:, 0].astype(old.dtype) for name, old in t.items()}
            s, t = combine((pushed, t), (nu, entering))
            return {"s": s, "t": t, KEY: key}

        return over_steps(advance, chunk, traces)

    def carry_in_vjp(self, chunk: Chunk, mu: Signal, traces: Traces) -> Weights:
        """Return the sum over samples of ``(mu . s) t``."""
        traces, selects = as_arrays(traces), chunk.records.zeros_select
        onto = multiply("bq,bq->b", arriving_rows(chunk.graph, mu), traces["s"], selects)
        found = {name: multiply("b,b...->...", onto, t, selects) for name, t in traces["t"].items()}
        return gradients_like(chunk.weights, found)


class KroneckerTraces(RandomTraces):
    """Trace method with a vector and a matrix for every product and sample."""

    needs = frozenset({"step", "traces", "operands"})

    def check(self, graph: ETraceGraph) -> None:
        """Check that every product has one input vector per sample.

        Raises
        ------
        PrimitiveError
            Naming the first operation that is not linear in its input, or whose weights multiply
            several parts of it.
        """
        for use in _products(graph):
            equation, (x, _) = equation_of(graph, use), _factors(graph, use)
            where = f"`{equation.primitive}` ({source_line(equation)})"
            if len(x.shape) != 2 or Kind.OTHER in _kinds(graph, use):
                raise PrimitiveError(
                    "KF_RTRL sums one input vector for each sample and weight, but the gradient of "
                    f"{where} is not linear in a vector: the input of a sample has shape "
                    f"{x.shape[1:]}. Use UORO, which supports every operation, or RTRL."
                )

    def trace_specs(self, graph: ETraceGraph, every_state: bool) -> TraceSpecs:
        """Return ``u`` and ``A`` of each product, the exact traces, and the key of the signs."""
        flat, u, A = flat_state_of(graph), {}, {}
        for use in _products(graph):
            x, y = _factors(graph, use)
            has_bias = any(kind is not Kind.LINEAR for kind in _kinds(graph, use))
            dtype = jnp.result_type(row_dtype(flat), x.dtype, y.dtype)
            axes = ("batch", "state", *entries(len(y.shape) - 1))
            shape = flat.samples, x.shape[1] + has_bias
            u[use.key] = TraceSpec(shape, dtype, ("batch", "input"), use.key, operand="u")
            shape = flat.samples, flat.size, *y.shape[1:]
            A[use.key] = TraceSpec(shape, dtype, axes, use.key, operand="A")
        exact = EXACT.trace_specs(_graph_without_products(graph), every_state)
        return {"u": u, "A": A, "exact": exact, KEY: self.spec_of_key}

    def update(self, chunk: Chunk, traces: Traces) -> Traces:
        """Return the traces after recorded steps, one step at a time."""
        exact = EXACT.update(_without_products(chunk), traces["exact"])
        random = {name: trace for name, trace in traces.items() if name != "exact"}
        return {**over_steps(_advanced, chunk, random), "exact": exact}

    def carry_in_vjp(self, chunk: Chunk, mu: Signal, traces: Traces) -> Weights:
        """Return the sum over samples of ``u (x) (mu . A)``, and the gradients of exact traces."""
        graph, weights, traces = chunk.graph, chunk.weights, as_arrays(traces)
        zeros_select = chunk.records.zeros_select
        gradients = EXACT.carry_in_vjp(_without_products(chunk), mu, traces["exact"])
        arriving = arriving_rows(graph, mu)
        for use in _products(graph):
            u, A = (widened(traces[name][use.key], arriving.dtype) for name in ("u", "A"))
            onto = multiply("bq,bq...->b...", arriving, A, zeros_select)
            if zeros_select:
                u = where_flagged((arriving != 0).any(1), u)
            operands, length = weights[operand_key(use)], _factors(graph, use)[0].shape[1]
            found = _pulled_back(graph, use, u[:, :length], onto, operands)
            if u.shape[1] > length:  # without an input, the result is that of the bias alone
                nothing, onto = jnp.zeros_like(u[:, :length]), _scaled(u[:, -1] - 1, onto)
                of_bias = _pulled_back(graph, use, nothing, onto, operands)
                found = jax.tree.map(jnp.add, found, of_bias)
            gradients[operand_key(use)] |= found
        return gradients


def _inputs_of(one: Chunk) -> dict[Var, Any]:
    return inputs_of_step(one.graph, one.weights, [leaf[0] for leaf in one.records.inputs])


def _advanced(one: Chunk, traces: Traces) -> Traces:
    graph, flat = one.graph, flat_state_of(one.graph)
    products, dtype = _products(graph), jnp.promote_types(row_dtype(flat), jnp.float32)
    vjp = step_vjp(graph, _inputs_of(one), unit_rows(flat))
    J = jnp.moveaxis(to_rows(flat, vjp.old), 1, 0).astype(dtype)
    nu, key = draw_signs(traces[KEY], (len(products), flat.samples), dtype)
    new: dict[str, dict[str, jax.Array]] = {"u": {}, "A": {}}
    for use, sign in zip(products, nu, strict=True):
        (place,) = places_of(graph, use)
        u, A = (widened(traces[name][use.key], dtype) for name in ("u", "A"))
        x = _samples_first(vjp.x[use.key], use.x_axis).astype(dtype)
        x = jnp.pad(x, ((0, 0), (0, u.shape[1] - x.shape[1])), constant_values=1)
        F = _samples_first(vjp.at[place], None if use.y_axis is None else use.y_axis + 1)
        moved = multiply("bqr,br...->bq...", J, A, False)
        entering = _scaled(sign, x), _scaled(sign, F.astype(dtype))
        new["u"][use.key], new["A"][use.key] = combine((u, moved), entering)
    return {**new, KEY: key}


def draw_signs(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Return random signs, and the key of the next step."""
    own, after = jax.random.split(jax.random.wrap_key_data(key, impl=IMPLEMENTATION))
    return jax.random.rademacher(own, shape, dtype), jax.random.key_data(after)


def combine(carried: Factors, entering: Factors) -> Factors:
    r"""Return factors of each sample whose product is the sum of two products in the mean.

    From :math:`a \otimes b` and :math:`c \otimes d`, with a random sign in :math:`c` and
    :math:`d`, these are :math:`r_0 a + r_1 c` and :math:`b / r_0 + d / r_1` with :math:`r_0 =
    \sqrt{|b| / |a|}` and :math:`r_1 = \sqrt{|d| / |c|}`. If one factor of a product is zero, both
    are set to zero.
    """
    (r_0, inverse_0), (r_1, inverse_1) = _balance(*carried), _balance(*entering)

    first = jax.tree.map(lambda a, c: _scaled(r_0, a) + _scaled(r_1, c), carried[0], entering[0])
    second = jax.tree.map(
        lambda b, d: _scaled(inverse_0, b) + _scaled(inverse_1, d), carried[1], entering[1]
    )
    return first, second


def _scaled(factors: jax.Array, value: jax.Array) -> jax.Array:
    return over_first_axis(factors, value.ndim) * value


def _balance(first: PyTree, second: PyTree) -> tuple[jax.Array, jax.Array]:
    above, below = _norm(second), _norm(first)
    has_both = (above > 0) & (below > 0)
    factor = jnp.sqrt(jnp.where(has_both, above, 1) / jnp.where(has_both, below, 1))
    return jnp.where(has_both, factor, 0), jnp.where(has_both, 1 / factor, 0)


def _norm(tree: PyTree) -> jax.Array:
    total: Any = 0.0
    for array in jax.tree.leaves(tree):
        row = array.reshape(len(array), -1)
        # A product: not every XLA backend sums the entries of a row at memory bandwidth.
        product = jnp.einsum("bn,bn->b", row, row.conj(), precision=jax.lax.Precision.HIGHEST)
        total = total + product.real
    return jnp.sqrt(total)


# --- products of parameters and an input of every sample


def _products(graph: ETraceGraph) -> list[ParameterUse]:
    return [use for use in flat_state_of(graph).uses if use.kind == "product"]


def _without_products(chunk: Chunk) -> Chunk:
    return chunk._replace(graph=_graph_without_products(chunk.graph))


def _graph_without_products(graph: ETraceGraph) -> ETraceGraph:
    """Return the same model with the other uses of parameters, and the parameters in them, only."""
    flat = flat_state_of(graph)
    others = tuple(use for use in flat.uses if use.kind != "product")
    names = {name for use in others for name in parameters_behind(graph, use)}
    reached = {name: states for name, states in flat.reached.items() if name in names}
    flat = dataclasses.replace(flat, uses=others, reached=reached)
    return dataclasses.replace(graph, flat_state=flat)


def _factors(graph: ETraceGraph, use: ParameterUse) -> list[jax.ShapeDtypeStruct]:
    """Return shapes and dtypes of the input and the output, samples first."""
    equation = equation_of(graph, use)
    atoms = equation.invars[use.x or 0], equation.outvars[0]
    return [
        jax.eval_shape(functools.partial(_samples_first, axis=axis), struct_of(atom.aval))
        for atom, axis in zip(atoms, (use.x_axis, use.y_axis), strict=True)
    ]


def _samples_first(value: jax.Array, axis: int | None) -> jax.Array:
    return value[None] if axis is None else jnp.moveaxis(value, axis, 0)


def _pulled_back(
    graph: ETraceGraph, use: ParameterUse, x: jax.Array, y: jax.Array, operands: dict[str, Any]
) -> dict[str, jax.Array]:
    """Return gradients of a product's operands, given an input and a cotangent, samples first."""
    invars = equation_of(graph, use).invars
    fixed = {invars[int(place)]: value for place, value in operands.items()}
    x, y = (
        (value[0] if axis is None else jnp.moveaxis(value, 0, axis)).astype(factor.dtype)
        for axis, value, factor in zip(
            (use.x_axis, use.y_axis), (x, y), _factors(graph, use), strict=True
        )
    )
    found = of_product(graph, use, fixed, x[None], y[None, None])
    return {str(place): g.sum((0, 1)) for place, g in zip(use.operands, found, strict=True)}


def _kinds(graph: ETraceGraph, use: ParameterUse) -> list[Kind]:
    """Return how the gradients of a product's operands depend on its input."""
    atoms = graph.operand_atoms[operand_key(use)]
    operands = {name: struct_of(atom.aval) for name, atom in atoms.items()}

    def of_input(x: jax.Array, y: jax.Array, operands: dict[str, Any]) -> dict[str, jax.Array]:
        return _pulled_back(graph, use, x, y, operands)

    return kinds_of(of_input, *_factors(graph, use), operands)
