r"""Random Kronecker factors as traces of products (KF-RTRL).

The derivative :math:`\epsilon` of the states ``S`` of a sample with respect to the weight of a
product with input :math:`x` is estimated by :math:`u \otimes A`, with ``u`` shaped like the input
and ``A`` of states by outputs :math:`y`:

.. math::

    u' = p_0 u + p_1 \nu x, \qquad A' = J A / p_0 + \nu F / p_1, \qquad
    p_0 = \sqrt{|J A| / |u|}, \quad p_1 = \sqrt{|F| / |x|}

with :math:`F = \partial S' / \partial y` and one random sign :math:`\nu` for each product. The mean
of :math:`u' \otimes A'` over the signs is :math:`u \otimes J A + x \otimes F`. If one factor of a
product is zero, both are set to zero. A bias has the constant input 1, a part of ``x`` and of
``u``.

An elementwise parameter (a leak, a gain) has the exact trace of RTRL, of states by parameters. It
is at most as large as an ``A``.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp

from ..._core.flat_state import (
    flags_of_rows,
    flags_of_samples,
    flat_state_of,
    inputs_of_step,
    places_of,
    row_dtype,
    step_vjp,
    to_rows,
    unit_rows,
)
from ..._core.resets import over_first_axis, where_flagged
from ..._core.zero import as_arrays, unfused, widened
from ..._errors import PrimitiveError
from ..._graph import (
    ETraceGraph,
    Record,
    Records,
    Role,
    Signal,
    Traces,
    TraceSpec,
    TraceSpecs,
    Weights,
)
from ..._jax import source_line
from ..._jaxpr.dataflow import Kind
from .influence_matrix import FullTraces, contracted
from .passing import PassingTraces, over_steps
from .product_uses import (
    Operands,
    Product,
    products_of,
    samples_back,
    samples_first,
    shape_of_sample,
    without_products,
)
from .random_signs import DRAWS, KEY, signs, specs_of_stream
from .rank_one import balance, norms

EXACT = FullTraces()
"""The traces of parameters that are used in another way than in a product."""


@dataclasses.dataclass(frozen=True)
class KroneckerTraces(PassingTraces):
    """Trace method with a vector and a matrix for every product and sample.

    Attributes
    ----------
    seed
        Seed of the random signs.
    """

    seed: int
    needs: ClassVar[frozenset[Record]] = frozenset({"step", "traces", "operands"})

    def check(self, graph: ETraceGraph) -> None:
        """Check that every product has one input vector per sample.

        Raises
        ------
        PrimitiveError
            Naming the first operation that is not linear in its input, or whose weights multiply
            several parts of it.
        """
        for product in products_of(graph):
            where = f"`{product.equation.primitive}` ({source_line(product.equation)})"
            shape = shape_of_sample(product.x_aval.shape, product.use.x_axis)
            if len(shape) != 1:
                raise PrimitiveError(
                    "KF_RTRL stores one vector for the input of a weight. The input of a sample "
                    f"of {where} has shape {shape}: the weight is applied in several places or "
                    "groups, or has rows that are counted. Use UORO, which supports every "
                    "operation, or RTRL."
                )
            if Kind.OTHER in product.kinds().values():
                raise PrimitiveError(
                    f"KF_RTRL sums inputs, but the gradient of {where} is not linear in its "
                    "input. Use UORO, which supports every operation, or RTRL."
                )

    def trace_specs(self, graph: ETraceGraph, every_state: bool) -> TraceSpecs:
        """Return ``u`` and ``A`` of each product, the exact traces, and the random stream."""
        flat, inputs, outputs = flat_state_of(graph), {}, {}
        for product in products_of(graph):
            (length,) = shape_of_sample(product.x_aval.shape, product.use.x_axis)
            inputs[product.key] = TraceSpec(
                (flat.samples, length + bool(product.constants)),
                product.dtype,
                ("batch", "input"),
                relation=product.key,
                operand="u",
                samples=functools.partial(flags_of_samples, flat, 2),
            )
            rest = shape_of_sample(product.y_aval.shape, product.use.y_axis)
            outputs[product.key] = TraceSpec(
                (flat.samples, flat.size, *rest),
                product.dtype,
                ("batch", "state", *_outputs(len(rest))),
                relation=product.key,
                operand="A",
                samples=functools.partial(flags_of_rows, flat, 2 + len(rest)),
            )
        exact = EXACT.trace_specs(without_products(graph), every_state)
        return {"u": inputs, "A": outputs, "exact": exact, **specs_of_stream(self.seed)}

    def update(
        self, graph: ETraceGraph, weights: Weights, records: Records, traces: Traces
    ) -> Traces:
        """Return the traces after recorded steps, one step at a time."""
        exact = traces["exact"]
        if exact:
            exact = EXACT.update(without_products(graph), weights, records, exact)
        random = {name: trace for name, trace in traces.items() if name != "exact"}
        after = over_steps(functools.partial(_advanced, graph, weights), graph, records, random)
        return {**after, "exact": exact}

    def carry_in_vjp(
        self, graph: ETraceGraph, weights: Weights, mu: Signal, traces: Traces, zeros_select: bool
    ) -> Weights:
        """Return the sum over samples of ``u (x) (mu . A)``, and the gradients of exact traces."""
        flat, others, traces = flat_state_of(graph), without_products(graph), as_arrays(traces)
        gradients = EXACT.carry_in_vjp(others, weights, mu, traces["exact"], zeros_select)
        arriving = to_rows(flat, [mu[leaf.name] for leaf in flat.leaves])
        for product in products_of(graph):
            u = widened(traces["u"][product.key], arriving.dtype)
            if zeros_select:
                u = where_flagged((arriving != 0).any(1), u)
            A = traces["A"][product.key]
            onto = contracted("bq,bq...->b...", arriving, A, zeros_select)
            key = product.operand_key
            result = _of_product(product, weights[key], u, onto)
            gradients[key] = {**gradients[key], **result}
        return gradients


def _advanced(graph: ETraceGraph, weights: Weights, records: Records, traces: Traces) -> Traces:
    """Return the traces after one step."""
    flat, products = flat_state_of(graph), products_of(graph)
    dtype = jnp.promote_types(row_dtype(flat), jnp.float32)
    u, A = (widened(traces[kind], dtype) for kind in ("u", "A"))
    inputs = inputs_of_step(graph, weights, tuple(leaf[0] for leaf in records.inputs))
    vjp = step_vjp(graph, inputs, unit_rows(flat))
    J = jnp.moveaxis(to_rows(flat, vjp.old), 1, 0).astype(dtype)
    nu = signs(traces, J, (flat.samples, len(products)), dtype)
    new_u, new_A = {}, {}
    for product, sign in zip(products, nu.T, strict=True):
        key, use, (place,) = product.key, product.use, places_of(graph, product.use)
        x = samples_first(vjp.x[key], use.x_axis).astype(dtype)
        if product.constants:
            x = jnp.concatenate([x, jnp.ones((len(x), 1), dtype)], axis=1)
        F = samples_first(vjp.at[place], None if use.y_axis is None else use.y_axis + 1)
        moved = unfused(jnp.einsum("bqr,br...->bq...", J, A[key]), J)
        after = _combined((u[key], moved), (x, F.astype(dtype)), sign)
        new_u[key], new_A[key] = (
            new.astype(traces[kind][key].dtype) for kind, new in zip("uA", after, strict=True)
        )
    return {"u": new_u, "A": new_A, KEY: traces[KEY], DRAWS: traces[DRAWS] + jnp.uint32(1)}


def _combined(
    carried: tuple[jax.Array, jax.Array], entering: tuple[jax.Array, jax.Array], sign: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return factors of one product whose mean is the sum of two products, samples first."""
    (u, moved), (x, F) = carried, entering
    p_0, inverse_0 = balance(norms(moved), norms(u))
    p_1, inverse_1 = balance(norms(F), norms(x))
    after_u = over_first_axis(p_0, 2) * u + over_first_axis(sign * p_1, 2) * x
    of_old, of_new = (over_first_axis(f, F.ndim) for f in (inverse_0, sign * inverse_1))
    return after_u, of_old * moved + of_new * F


def _outputs(ndim: int) -> tuple[Role, ...]:
    output: Role = "output"
    return (output,) * ndim


def _of_product(
    product: Product, operands: Mapping[str, jax.Array], u: jax.Array, onto: jax.Array
) -> Operands:
    """Return the gradients of a product's operands, with ``u`` in place of its input."""
    constants, use = product.constants, product.use
    of_one = u[:, -1] if constants else None
    x = samples_back(u[:, :-1] if constants else u, use.x_axis).astype(product.x_aval.dtype)

    def pulled(onto: jax.Array) -> Operands:
        y = samples_back(onto, use.y_axis).astype(product.y_aval.dtype)
        return product.gradients(operands, x, y)

    gradients = pulled(onto)
    if of_one is not None:
        added = pulled(over_first_axis(of_one, onto.ndim) * onto)
        gradients.update({name: added[name] for name in constants})
    return gradients
