r"""The input/output-dimension trace (ES-D-RTRL, pp-prop).

.. math::

    \epsilon_x^t = \alpha\, \epsilon_x^{t-1} + x^t, \qquad
    \epsilon_f^t[u, a] = \alpha \sum_c D^t[p(u), a, c]\, \epsilon_f^{t-1}[u, c]
                         + (1 - \alpha)\, D_f^t[u, a],

.. math::

    \nabla w = \sum_t \Big( \sum_a \hat l^t[p(u), a]\, \epsilon_f^t[u, a] \Big) \otimes
    \epsilon_x^t, \qquad \hat l^t = l^t / (1 - \alpha^t),

with ``t`` counted in steps since the traces were last zero. A chunk scans the two small
traces and takes the gradient as one product over time and batch.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .._compiler import Columns, ETraceGraph, columns_of
from .._errors import OptionError
from .._etrace_op import ETP_RULES_INIT_PP, get_primitive_spec, pull_back
from .jacobians import Jacobians, Weights, transition_key
from .layout import Link, links, old_state_to_positions, output_keys, x_key
from .live import Probes
from .param_dim import Traces, add, like
from .recursion import num_steps, scan_records, signals
from .restart import at_positions, over_first_axis
from .zero import as_arrays, widened

Arrays = dict[str, Any]


def init(graph: ETraceGraph, every_state: bool) -> Traces:
    """Return zero traces and a zero count of steps.

    Parameters
    ----------
    graph
        The compiled model.
    every_state
        Also for the states that no later step reads position by position.
    """
    inputs: dict[str, Any] = {}
    outputs: dict[str, Any] = {}
    shared = output_keys(graph)
    for link in links(graph):
        relation, reach = link.relation, link.reach
        if relation.x_var is not None:
            aval = relation.x_var.aval
            dtype = jnp.promote_types(aval.dtype, relation.y_var.aval.dtype)
            inputs[x_key(graph, relation)] = jnp.zeros(aval.shape, dtype)
        rule = ETP_RULES_INIT_PP[relation.primitive]
        zero = rule(relation.x_var, relation.y_var, dict(relation.trainable_vars), 1)[..., 0]
        for a in reach.reached if every_state else reach.stored:
            outputs[shared[link.key(a)]] = jnp.zeros(reach.table_shape, zero.dtype)
    kept = _of_columns(graph, outputs)
    return {"x": inputs, "f": kept, "steps": jnp.zeros(_samples(graph), jnp.int32)}


def _samples(graph: ETraceGraph) -> tuple[int, ...]:
    """Return the shape of the count of steps: one per sample, or one for all.

    Samples can start anew one by one where all states have the same first axis.
    """
    leads = {state.shape[:1] for group in graph.traced_groups for state in group.states}
    return leads.pop() if len(leads) == 1 else ()


def _outputs(graph: ETraceGraph) -> dict[str, tuple[Link, int]]:
    """Return the link and state that each output-shaped trace is computed for, by its name."""
    shared = output_keys(graph)
    every = [(link, a) for link in links(graph) for a in link.reach.reached]
    return {link.key(a): (link, a) for link, a in every if shared[link.key(a)] == link.key(a)}


def _columns(graph: ETraceGraph, outputs: Arrays) -> dict[str, Columns]:
    """Return the columns that are kept of the output-shaped traces with others that stay zero."""
    found = {}
    for key, (link, _) in _outputs(graph).items():
        kept = [a for a in link.reach.reached if link.key(a) in outputs]
        columns = columns_of(link.relation, link.reach, kept) if key in outputs else None
        if columns is not None:
            found[key] = columns
    return found


def _of_columns(graph: ETraceGraph, outputs: Arrays) -> Arrays:
    """Return output-shaped traces as they are kept from chunk to chunk."""
    columns = _columns(graph, outputs)
    return {**outputs, **{key: columns[key].pick(outputs[key]) for key in columns}}


def _whole(graph: ETraceGraph, outputs: Arrays) -> Arrays:
    """Return kept output-shaped traces with zeros in the columns that are not kept."""
    whole = dict(outputs)
    for key, columns in _columns(graph, outputs).items():
        link, _ = _outputs(graph)[key]
        example = jnp.zeros(link.reach.table_shape, outputs[key].dtype)
        (whole[key],) = jax.linear_transpose(columns.pick, example)(outputs[key])
    return whole


def _tables(graph: ETraceGraph, jacobians: Jacobians) -> dict[str, dict[str, jax.Array]]:
    """Return ``D[a, c]`` in the layout of each operation's output: ``{trace a: {trace c: D}}``."""
    tables: dict[str, dict[str, jax.Array]] = {}
    for key, (link, a) in _outputs(graph).items():
        group, reached = link.group, link.reach.reached
        tables[key] = {
            link.key(c): link.table(jacobians["D"][transition_key(group, a, c)])
            for b, c in group.transition
            if b == a and c in reached
        }
    return tables


def _scan(
    graph: ETraceGraph,
    alpha: float,
    jacobians: Jacobians,
    traces: Traces,
    result: Callable[[Arrays, Arrays, Any], Any],
    signal: Any = None,
) -> tuple[Traces, Any]:
    """Return the traces after a chunk, and ``result(ε_x, ε_f, signal)`` of every step."""
    by_key = _outputs(graph)
    dtypes = {key: link.relation.y_var.aval.dtype for key, (link, _) in by_key.items()}

    def step(kept: Traces, recorded: Any) -> Any:
        x, Df, D, restart, signal_now = recorded
        before_x = {key: widened(eps, x[key].dtype) for key, eps in kept["x"].items()}
        before_f = {key: widened(eps, dtypes[key]) for key, eps in kept["f"].items()}
        if restart:
            before_x = _started_anew(graph, before_x, restart[""])
        eps_x = {key: alpha * before_x[key] + x[key] for key in before_x}
        eps_f = {}
        for key, (link, _) in by_key.items():
            terms = [alpha * D[key][c] * before_f[c] for c in D[key] if c in before_f]
            terms += [(1 - alpha) * Df[key]] if key in Df else []
            shape = link.reach.table_shape
            eps_f[key] = sum(terms[1:], terms[0]) if terms else jnp.zeros(shape, dtypes[key])
        after = {
            "x": {key: eps_x[key].astype(old.dtype) for key, old in kept["x"].items()},
            "f": {key: eps_f[key].astype(old.dtype) for key, old in kept["f"].items()},
        }
        return after, result(eps_x, eps_f, signal_now)

    tables = _tables(graph, jacobians)
    restart = jacobians.get("restart", {})
    recorded = (jacobians["x"], jacobians["Df"], tables, restart, signal)
    start = as_arrays({"x": traces["x"], "f": traces["f"]})
    start["f"] = _whole(graph, start["f"])
    after, results = scan_records(step, start, recorded, num_steps(graph, jacobians))
    kept = _of_columns(graph, after["f"])
    return {"x": after["x"], "f": kept, "steps": _counts(graph, jacobians, traces)[-1]}, results


def _counts(graph: ETraceGraph, jacobians: Jacobians, traces: Traces) -> jax.Array:
    """Return the number of steps that the traces of every step have seen."""
    before = as_arrays(traces["steps"])
    index = over_first_axis(1 + jnp.arange(num_steps(graph, jacobians)), 1 + before.ndim)
    index = index.astype(before.dtype)
    if "restart" not in jacobians:
        return before + index
    restart = over_first_axis(jacobians["restart"][""], index.ndim)
    began = jax.lax.cummax(jnp.where(restart, index, 0), axis=0)
    return jnp.where(began == 0, before + index, index - began + 1)


def _started_anew(graph: ETraceGraph, inputs: Arrays, restart: jax.Array) -> Arrays:
    """Return traces of the inputs that start anew for some samples.

    Those of the outputs do so by a transition of zero.
    """
    inputs = dict(inputs)
    for link in links(graph):
        if link.relation.x_var is not None:
            key = x_key(graph, link.relation)
            rows = over_first_axis(_rows(link, restart), inputs[key].ndim)
            inputs[key] = jnp.where(rows, 0, inputs[key])
    return inputs


def _rows(link: Link, restart: jax.Array) -> jax.Array:
    """Return which rows of an operation's input belong to samples that start anew."""
    if restart.ndim == 0:
        return restart
    if not get_primitive_spec(link.relation.primitive).batched:
        raise OptionError(
            f"The input of '{link.relation.key}' is shared by all samples, so that this algorithm "
            "cannot restart them one by one. Give `reset` one value per step, or use `D_RTRL`."
        )
    at_elements = link.table(at_positions(link.group, 0, restart))
    if link.has_fan_out:
        at_elements = at_elements.any(0)
    return at_elements.any(tuple(range(1, at_elements.ndim)))


def _corrected(
    alpha: float, graph: ETraceGraph, signal: dict[int, dict[int, Any]], steps: jax.Array
) -> Arrays:
    """Return ``l / (1 - α^t)`` of one step in the layout of each operation's output, by trace.

    After ``t`` steps the filters have seen ``1 - α^t`` of a constant. ``signal`` has one array
    per state and position of each group.
    """
    seen = 1 - jnp.power(jnp.asarray(alpha, jnp.result_type(float)), jnp.maximum(steps, 1))
    tables = {}
    for key, (link, a) in _outputs(graph).items():
        found = signal[link.group.index].get(a)
        if found is not None:
            corrected = found / at_positions(link.group, a, seen)
            tables[key] = link.table(corrected.astype(found.dtype))
    return tables


def update(
    alpha: float, graph: ETraceGraph, weights: Weights, jacobians: Jacobians, traces: Traces
) -> Traces:
    """Return the traces after a recorded chunk."""
    return _scan(graph, alpha, jacobians, traces, lambda *_: None)[0]


def solve(
    alpha: float,
    graph: ETraceGraph,
    weights: Weights,
    jacobians: Jacobians,
    signal: Probes,
    traces: Traces,
) -> tuple[Weights, Traces]:
    """Return the gradient of a recorded chunk, and the traces after it."""
    by_group = {group.index: signals(group, signal) for group in graph.traced_groups}
    counts = _counts(graph, jacobians, traces)
    corrected = jax.vmap(functools.partial(_corrected, alpha, graph))(by_group, counts)

    def result(eps_x: Arrays, eps_f: Arrays, now: Arrays) -> tuple[Arrays, Arrays]:
        return eps_x, _factors(graph, now, eps_f)

    after, (eps_x, factors) = _scan(graph, alpha, jacobians, traces, result, corrected)
    return _contract(graph, weights, eps_x, factors), after


def solve_step(
    alpha: float,
    graph: ETraceGraph,
    weights: Weights,
    jacobians: Jacobians,
    signal: Probes,
    before: Traces,
    after: Traces,
) -> Weights:
    """Return the gradient of one step; the traces after it lack the states that none reads."""
    return solve(alpha, graph, weights, jacobians, signal, before)[0]


def carried(
    alpha: float,
    graph: ETraceGraph,
    weights: Weights,
    signal: dict[str, jax.Array],
    traces: Traces,
) -> Weights:
    """Return the gradient that reaches the operands through the states before a window."""
    traces = as_arrays(traces)
    dtype = jnp.result_type(*signal.values())
    eps_x = {key: widened(x, dtype) for key, x in traces["x"].items()}
    eps_f = widened(_whole(graph, traces["f"]), dtype)
    by_group = {
        group.index: {
            a: old_state_to_positions(group, a, signal[state.name])
            for a, state in enumerate(group.states)
            if state.name in signal
        }
        for group in graph.traced_groups
    }
    factors = _factors(graph, _corrected(alpha, graph, by_group, traces["steps"]), eps_f)
    return _contract(graph, weights, *jax.tree.map(lambda leaf: leaf[None], (eps_x, factors)))


def _factors(graph: ETraceGraph, signal: Arrays, eps_f: Arrays) -> Arrays:
    """Return ``Σ_a l̂[a] ε_f[a]`` of one step, by the name of the first state's trace."""
    factors: Arrays = {}
    shared = output_keys(graph)
    for link in links(graph):
        keys = [shared[link.key(a)] for a in link.reach.reached]
        terms = [signal[key] * eps_f[key] for key in keys if key in signal and key in eps_f]
        if terms and keys[0] not in factors:
            total = sum(terms[1:], terms[0])
            factors[keys[0]] = jnp.sum(total, axis=0) if link.has_fan_out else total
    return factors


def _contract(graph: ETraceGraph, weights: Weights, eps_x: Arrays, factors: Arrays) -> Weights:
    """Return the gradients of all relations, over time and batch at once."""
    gradients = jax.tree.map(jnp.zeros_like, weights)
    shared = output_keys(graph)
    for link in links(graph):
        relation, name = link.relation, shared[link.key(link.reach.reached[0])]
        if name in factors:
            x = None if relation.x_var is None else eps_x[x_key(graph, relation)]
            part = pull_back(*link.operation, x, factors[name], weights[relation.key])
            gradients = add(gradients, {relation.key: part})
    return like(weights, gradients)


def decay_of(decay_or_rank: float | int) -> float:
    """Return ``α``: a float is ``α`` itself, an integer ``r ≥ 1`` is ``(r - 1) / (r + 1)``.

    Examples
    --------
    >>> decay_of(3)
    0.5
    """
    if isinstance(decay_or_rank, int):
        return (decay_or_rank - 1) / (decay_or_rank + 1)
    return decay_or_rank
