"""What a compiled graph claims about the Jacobian of a step, by the names of its nodes.

The only part of the tests of Jacobians (`test_jacobians.py`) that reads the layout of a graph.
"""

import numpy as np


class Group:
    """The claims of the compiler about one hidden group."""

    def __init__(self, jacobian, group):
        self.index, self.is_delay_line = group.index, group.delay_line
        self.names = tuple(state.name for state in group.states)
        self.place = {
            state.name: np.arange(jacobian.rows["old", state.name].size)
            if layout is None
            else np.ravel(layout)
            for state, layout in zip(group.states, group.old_layouts, strict=True)
        }
        self.transition = {(self.names[a], self.names[c]) for a, c in group.transition}
        self.read_by_output = {self.names[a] for a in group.read_by_output}
        self.downstream = {self.names[a] for a in group.downstream}

    def passed(self, name):
        """The new states of the group that a path to one of them may pass."""
        return {name} if name in self.downstream else {*self.names} - self.downstream

    def is_carried(self, new, old):
        """Whether a trace carries the path from each old element to each new one.

        A state that no later step reads counts as an output of the step.
        """
        as_output = new in self.downstream and old in self.read_by_output
        if (new, old) not in self.transition and not as_output:
            return np.zeros((self.place[new].size, self.place[old].size), bool)
        return self.place[new][:, None] == self.place[old]


class Relations:
    """The claims of the compiler about which ETP outputs reach which elements of states."""

    def __init__(self, graph, jacobian):
        self.jacobian, edges = jacobian, jacobian.edges()
        self.weights = {
            operation: frozenset(
                weight
                for weight in jacobian.names("parameter")
                if jacobian.block(edges, ("marked", operation), ("parameter", weight)).any()
            )
            for operation in jacobian.names("marked")
        }
        self._of, self.pairs, self.with_traces = {}, set(), set()
        for relation in graph.hidden_param_op_relations:
            paths = frozenset("/".join(map(str, path)) for path in relation.parameter_paths)
            self._of.setdefault(paths, []).append(relation)
            self.with_traces |= paths
            self.pairs |= {(path, i.group) for path in paths for i in relation.influences}

    def allowed(self, group, state, operation):
        """Whether each element of an output may reach each element of a new state.

        Operations and relations of the same weights are in the same order. Where their elements
        cannot be matched (an operation that permutes axes inside), a relation allows all.
        """
        weights, shapes = self.weights[operation], self.jacobian.shapes
        relations = self._of.get(weights, [])
        operations = [name for name, own in self.weights.items() if own == weights]
        before, own = operations[: operations.index(operation)], shapes["marked", operation]
        found = [tuple(relation.y_var.aval.shape) for relation in relations]
        start = 0
        if found == [shapes["marked", name] for name in operations]:
            relations = relations[len(before) : len(before) + 1]
        elif found == [(len(operations) * own[0], *own[1:])]:
            start = len(before) * int(np.prod(own))
        else:
            is_related = any((weight, group.index) in self.pairs for weight in weights)
            return np.full((group.place[state].size, int(np.prod(own))), is_related)
        return self._elements(group, state, relations, start, int(np.prod(own)))

    def _elements(self, group, state, relations, start, size):
        allowed = np.zeros((group.place[state].size, size), bool)
        index = group.names.index(state)
        for influence in (i for r in relations for i in r.influences if i.group == group.index):
            if index in {*influence.states, *influence.reached}:
                slots = influence.positions.reshape(influence.fan_out, -1)
                for own in slots[:, start : start + size]:
                    allowed |= (group.place[state][:, None] == own) & (own >= 0)
        return allowed


class FullState:
    """The claims of the compiler about the flattened state of each sample."""

    def __init__(self, jacobian, whole):
        self.samples, self.names = whole.samples, [leaf.name for leaf in whole.leaves]
        elements = [
            _by_sample(np.arange(leaf_size).reshape(leaf.shape), axis)
            for leaf, axis in zip(whole.leaves, whole.axes, strict=True)
            for leaf_size in [int(np.prod(leaf.shape))]
        ]
        self._elements = dict(zip(self.names, elements, strict=True))
        self._jacobian = jacobian

    def rows(self, kind, names):
        """(samples, elements) of some states, in the order of the flattened state."""
        found = [self._jacobian.rows[kind, name][self._elements[name]] for name in names]
        return np.concatenate(found, axis=1)


def _by_sample(elements, axis):
    return elements.reshape(1, -1) if axis is None else _flat(np.moveaxis(elements, axis, 0))


def _flat(elements):
    return elements.reshape(len(elements), -1)
