"""The Jacobian of one step of a model, by JAX alone, as edges between named arrays.

The model's plain step comes from `recorded.py`; nothing here imports the library.
"""

import jax
import jax.numpy as jnp
import numpy as np
import oracles
from recorded import RecordedCase

POINTS = (0, 2, 5)
ROUNDING = 1e-12


class NotFiniteError(AssertionError):
    """JAX has no number: of a maximum, for example, that it computes twice with other rounding."""


class _Edges:
    """Keeps what a step computes at each node, and lets the step continue with a given value."""

    def __init__(self, given_outputs=None, given_hidden=None):
        self.inputs, self.outputs, self.hidden = {}, {}, {}
        self._given_inputs = {}
        self._outputs, self._hidden = given_outputs or {}, given_hidden or {}

    def new_state(self, name, value):
        self.hidden[name] = value
        return self._hidden.get(name, value)

    def mixing(self, value):
        return value

    def _operands(self, name, operands):
        return operands

    def _output(self, name, value):
        self.outputs[name] = value
        return self._outputs.get(name, value)


class StepJacobian:
    """Derivatives between the nodes of one step, at several points of a trajectory.

    A node is ``("old", state)``, ``("parameter", path)``, ``("marked", operation)``,
    ``("new", state)`` or ``("output", "")``. An edge leads from one node to another without
    passing a third one. Names of states with a ``#`` are States that are no hidden states.

    rows: {node: its elements among those of all nodes}.
    shapes: {node: shape}; the leaves of a parameter are joined.
    direct: (points, elements, elements), derivatives along single edges, sinks first.
    """

    def __init__(self, entry, xs):
        case = RecordedCase(entry.name, entry.started(), xs[0], {})
        params, states, xs = jax.tree.map(np.asarray, (case.params(), case.states(), xs))
        trajectory = _trajectory(case, params, states, xs)
        found = [_edges(case, params, trajectory[i], xs[i]) for i in POINTS]
        self.rows, self.shapes = {}, {}
        for node, shape in found[0][1].items():
            start, size = sum(map(len, self.rows.values())), int(np.prod(shape))
            self.rows[node], self.shapes[node] = np.arange(start, start + size), shape
        self.direct = np.stack([self._matrix(edges) for edges, _ in found])
        if not np.isfinite(self.direct).all():
            raise NotFiniteError(f"{entry.name} has a derivative that is not finite")

    def _matrix(self, edges):
        size = sum(map(len, self.rows.values()))
        matrix = np.zeros((size, size))
        for sink, by_source in edges.items():
            for source, block in by_source.items():
                rows, columns = self.rows[sink], self.rows[source]
                matrix[np.ix_(rows, columns)] += np.reshape(block, (len(rows), len(columns)))
        return matrix

    def names(self, kind):
        """Return the names of all nodes of one kind."""
        return [name for own, name in self.rows if own == kind]

    def edges(self):
        """Whether each element depends directly on each other one."""
        return (np.abs(self.direct) > ROUNDING).any(0)

    def total(self, held=()):
        """Whether each element depends on each other one, some nodes held fixed.

        A held node still has derivatives with respect to it, and none of its own.
        """
        direct = self.direct.copy()
        for node in held:
            direct[:, self.rows[node]] = 0
        total = power = direct
        while power.any():
            power = power @ direct
            total = total + power
        return (np.abs(total) > ROUNDING).any(0)

    def block(self, total, sink, source):
        """The part of such a matrix that leads from one node to another."""
        return total[np.ix_(self.rows[sink], self.rows[source])]


def _trajectory(case, params, states, xs):
    """The states before each step, moved off the kinks of the start."""
    generator = np.random.default_rng(0)

    def moved(value):
        if not np.issubdtype(value.dtype, np.floating):
            return value
        scale = 0.1 * (np.ptp(value) or 1.0) if value.size else 0.0
        return value + scale * generator.standard_normal(value.shape)

    found = []
    for x in xs:
        found.append({name: moved(value) for name, value in states.items()})
        states = jax.tree.map(np.asarray, _jacobian(case, params, states, x)[-1])
    return found


@oracles.compiled
def _jacobian(case, params, states, x):
    """Derivatives along single edges, what is at either end of them, and the states afterwards."""
    ops = oracles.PlainOps()
    case.step(ops, params, states, x)
    floating = {name for name, value in states.items() if _is_float(value)}
    sources = {
        "old": {name: states[name] for name in floating},
        "parameter": params,
        "marked": ops.outputs,
        "new": {name: ops.hidden[name] for name in floating if name in ops.hidden},
    }

    def sinks(sources):
        edges = _Edges(sources["marked"], sources["new"])
        output = case.step(edges, sources["parameter"], {**states, **sources["old"]}, x)
        new = {name: edges.hidden[name] for name in sources["new"]}
        leaves = [jnp.ravel(leaf) for leaf in jax.tree.leaves(output) if _is_float(leaf)]
        found = {"marked": edges.outputs, "new": new, "output": {"": jnp.concatenate(leaves)}}
        return found, found

    after = {name: ops.hidden.get(name, value) for name, value in states.items()}
    jacobian, found = jax.jacrev(sinks, has_aux=True)(sources)
    return jacobian, sources, found, after


def _edges(case, params, states, x):
    """Blocks by sink and source, and the shapes of all nodes; the leaves of a parameter joined."""
    of_step = _jacobian(case, params, states, x)
    jacobian, sources, sinks, _ = jax.tree.map(np.asarray, of_step)  # reshaped without programs
    shapes = {
        (kind, name): np.shape(value) if kind != "parameter" else (_size(value),)
        for kind, by_name in {**sources, "output": sinks["output"]}.items()
        for name, value in by_name.items()
    }
    blocks = {}
    for kind, by_name in jacobian.items():
        for name, by_source in by_name.items():
            rows = int(np.prod(shapes[kind, name]))
            blocks[kind, name] = {
                (own, source): np.concatenate(
                    [np.reshape(leaf, (rows, -1)) for leaf in jax.tree.leaves(block)], axis=1
                )
                for own, by_source_name in by_source.items()
                for source, block in by_source_name.items()
            }
    return blocks, shapes


def _size(tree):
    return sum(int(np.size(leaf)) for leaf in jax.tree.leaves(tree))


def _is_float(value):
    return jnp.issubdtype(jnp.asarray(value).dtype, jnp.floating)
