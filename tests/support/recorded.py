"""Any brainstate model as a case for the oracles, with no description written by hand.

One step of a model is traced once, with the ETP operations replaced by plain ones that record
where their input, operands and output are. `RecordedCase.step` then runs the recorded equations
one by one and hands those values to an oracle's `ops`, which reads or replaces them.

Control flow that may hold ETP operations is traced in its plain form: a loop as a Python loop,
a branch as a selection, a mapped function as one call per sample.
"""

import contextlib
from collections import defaultdict
from unittest import mock

import brainstate
import jax
import jax.numpy as jnp
import marks
import numpy as np
import saiunit
from ops_catalogue import plain_feedback

import braintrace


class Recorder:
    """Plain versions of the ETP operations; keeps what they saw."""

    def __init__(self):
        self.operations, self.mixed, self.spikes = [], [], []

    def matmul(self, x, weight, bias=None):
        return self._record(lambda x, w, *b: sum(b, x @ w), x, weight, bias)

    def element_wise(self, weight, fn=lambda w: w):
        return self._record(lambda _, value: value, None, fn(weight))

    def feedback_matmul(self, x, weight, feedback, bias=None):
        def plain(x, weight, feedback, *bias):
            return sum(bias, plain_feedback(x, weight, feedback))

        return self._record(plain, x, weight, feedback, bias)

    def grouped_matmul(self, x, weight, bias=None):
        def plain(x, weight, *bias):
            return sum(bias, jnp.einsum("bgi,gio->bgo", x, weight))

        return self._record(plain, x, weight, bias)

    def einsum(self, equation, x, weight):
        """What sums nothing up, or has no letters of weight and result alone, mixes nothing."""
        x_letters, weight_letters, result = map(set, equation.replace("->", ",").split(","))
        if weight_letters - x_letters and (weight_letters & x_letters) - result:
            return self._record(lambda x, w: jnp.einsum(equation, x, w), x, weight)
        return jnp.einsum(equation, x, self.element_wise(weight))

    def embedding(self, indices, weight):
        """A product with a one-hot input."""
        return self._record(lambda x, w: x @ w, jax.nn.one_hot(indices, len(weight)), weight)

    def lora_matmul(self, x, B, A, bias=None, *, alpha=1.0):
        return self._record(lambda x, B, A, *b: sum(b, alpha * (x @ B @ A)), x, B, A, bias)

    def conv(self, x, kernel, bias=None, *, strides=1, padding="SAME", **options):
        def plain(x, kernel, *bias):
            window = (strides,) * (x.ndim - 2) if isinstance(strides, int) else strides
            return sum(bias, jax.lax.conv_general_dilated(x, kernel, window, padding, **options))

        return self._record(plain, x, kernel, bias)

    def sparse_matmul(self, x, weight_data, *, sparse_mat, bias=None):
        columns = np.asarray(sparse_mat.indices)
        rows = np.repeat(np.arange(sparse_mat.shape[0]), np.diff(sparse_mat.indptr))

        def plain(x, data, *bias):
            entries = jnp.zeros(sparse_mat.shape).at[rows, columns].add(saiunit.get_mantissa(data))
            matrix = saiunit.Quantity(entries, unit=saiunit.get_unit(data))
            return sum(bias, saiunit.math.matmul(x, saiunit.maybe_decimal(matrix)))

        return self._record(plain, x, weight_data, bias)

    def mixing(self, value):
        self.mixed.append(_own_variable(value))
        return self.mixed[-1]

    def spike(self, value):
        self.spikes.append(value)
        return value

    def _record(self, plain, x, *operands):
        x, operands = _own_variable((x, [w for w in operands if w is not None]))
        y = _own_variable(plain(x, *operands))
        self.operations.append({"x": x, "operands": operands, "y": y})
        return y


def _own_variable(tree):
    """The same values, each with a variable of its own in the recorded equations."""
    return jax.tree.map(jnp.copy, tree)


def _python_loop(body, *xs, **_):
    length = len(jax.tree.leaves(xs)[0])
    steps = [body(*jax.tree.map(lambda leaf, i=i: leaf[i], xs)) for i in range(length)]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *steps)


def _selection(condition, if_true, if_false, *operands):
    chosen, other = if_true(*operands), if_false(*operands)
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), chosen, other)


def _python_while(condition, body, carried):
    """For loops whose number of steps does not depend on data."""
    while condition(carried):
        carried = body(carried)
    return carried


def _mapped(function, in_axes=0, **_):
    def calls(*arguments):
        axes = (in_axes,) * len(arguments) if isinstance(in_axes, int) else in_axes
        length = next(len(a) for a, axis in zip(arguments, axes, strict=True) if axis is not None)
        samples = [
            function(
                *(a if axis is None else a[i] for a, axis in zip(arguments, axes, strict=True))
            )
            for i in range(length)
        ]
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *samples)

    return calls


@contextlib.contextmanager
def recording(recorder):
    """Inside, the ETP operations and the marks of a model go to the recorder."""
    operations = (
        "matmul",
        "element_wise",
        "lora_matmul",
        "conv",
        "sparse_matmul",
        "feedback_matmul",
        "grouped_matmul",
        "einsum",
        "embedding",
    )
    transforms = {
        "for_loop": _python_loop,
        "cond": _selection,
        "vmap": _mapped,
        "while_loop": _python_while,
        "checkpoint": lambda function, **_: function,
    }
    with contextlib.ExitStack() as stack:
        for name in operations:
            for place in (braintrace, braintrace._etrace_op):
                stack.enter_context(mock.patch.object(place, name, getattr(recorder, name)))
        for name, plain in transforms.items():
            stack.enter_context(mock.patch.object(brainstate.transform, name, plain))
        stack.enter_context(mock.patch.object(jax, "checkpoint", lambda function, **_: function))
        stack.enter_context(mock.patch.object(marks, "recorder", recorder))
        yield


class RecordedCase:
    """One step of a model, as the oracles of `oracles.py` read it.

    model: a brainstate module with initialised states.
    x: an input of one step.
    groups: {group: (state, ...)}; the columns of a `HiddenGroupState` are ``h[0]``, ``h[1]``.
    canonical: {state: function and its inverse} that brings a state into its group's layout.
    """

    def __init__(self, name, model, x, groups, canonical=None):
        self.name, self.groups, self._canonical = name, groups, canonical or {}
        closed, states, self._output_tree, marked = _trace(model, x)
        self._jaxpr, self._consts = closed.jaxpr, closed.consts
        self._slots = _slots(model, states)
        self._model = model
        # The generator of random numbers is not the model's own: others draw from it later.
        self._start = {name: jax.tree.leaves(state.value) for name, state, _ in self._slots}
        outputs = iter(self._jaxpr.outvars)
        self._output_vars = [next(outputs) for _ in range(self._output_tree.num_leaves)]
        (operations, self._mixed, self._spikes) = jax.tree.unflatten(
            marked, [next(outputs) for _ in range(marked.num_leaves)]
        )
        self._operations = {f"operation {i}": op for i, op in enumerate(operations)}
        self._new_state_vars = list(outputs)
        self.broadcast = tuple(self._operations)
        self.relations = {name: self._reached(op["y"]) for name, op in self._operations.items()}

    # what an oracle starts from

    def params(self):
        """{path: value without its units} of the model's parameters."""
        found = self._model.states(brainstate.ParamState).items()
        return {"/".join(map(str, path)): without_units(state.value) for path, state in found}

    def parameters_of(self, operation):
        """Names of the parameters that an operation's weights are computed from."""
        needed = set(jax.tree.leaves(self._operations[operation]["operands"]))
        for equation in reversed(self._jaxpr.eqns):
            if needed & set(equation.outvars):
                needed |= {atom for atom in equation.invars if not hasattr(atom, "val")}
        inputs = iter(self._jaxpr.invars[-sum(_leaves(state) for _, state, _ in self._slots) :])
        return {
            name
            for name, state, _ in self._slots
            if needed & {next(inputs) for _ in range(_leaves(state))}
            and isinstance(state, brainstate.ParamState)
        }

    def states(self):
        """{state: array} of everything else that the model keeps, as it was recorded."""
        found = {}
        for name, state, _ in self._slots:
            if not isinstance(state, brainstate.ParamState):
                found.update(self._parts(name, state, self._start[name]))
        return found

    @staticmethod
    def loss(output, target):
        """Mean squared error of one step."""
        return ((saiunit.get_mantissa(output) - target) ** 2).mean()

    def step(self, ops, params, states, x):
        """Run one step with the operations and states as `ops` wants them."""
        values = list(jax.tree.leaves(x))
        for name, state, count in self._slots:
            if isinstance(state, brainstate.ParamState):
                values += jax.tree.leaves(params[name])
            else:
                values += self._whole(name, state, count, states)
        found = self._run(values, self._handlers(ops))
        for name, state, new in self._written(found):
            for part, value in self._parts(name, state, new).items():
                if part not in ops.hidden:
                    ops.new_state(part, value)
        return jax.tree.unflatten(self._output_tree, [found(var) for var in self._output_vars])

    def spikes(self, params, states, xs):
        """Fraction of ones among the spikes of a sequence, computed without an oracle."""

        def one_step(states, x):
            ops = _Onlooker()
            self.step(ops, params, states, x)
            return ops.hidden, ops.spikes

        return [float(jnp.mean(s)) for s in jax.lax.scan(one_step, states, xs)[1]]

    # the recorded equations

    def _run(self, values, handlers):
        env = dict(zip(self._jaxpr.invars, values, strict=True))
        env.update(zip(self._jaxpr.constvars, self._consts, strict=True))

        def read(atom):
            return atom.val if hasattr(atom, "val") else env[atom]

        for equation in self._jaxpr.eqns:
            for var, value in zip(equation.outvars, self._one(equation, read), strict=True):
                for handler in handlers.get(var, ()):
                    value = handler(value)
                env[var] = value
        return read

    def _one(self, equation, read):
        used = list(dict.fromkeys(a for a in equation.invars if not hasattr(a, "val")))
        piece = self._jaxpr.replace(
            constvars=[], invars=used, outvars=equation.outvars, eqns=[equation]
        )
        return jax.core.eval_jaxpr(piece, (), *(read(var) for var in used))

    def _handlers(self, ops):
        handlers = defaultdict(list)

        def given_input(name, value):
            ops.inputs[name] = ops._given_inputs.get(name, value)
            return ops.inputs[name]

        for name, operation in self._operations.items():
            if operation["x"] is None:
                ops.inputs[name] = jnp.zeros(())
            for var in jax.tree.leaves(operation["x"]):
                handlers[var].append(lambda value, name=name: given_input(name, value))
            for var in jax.tree.leaves(operation["operands"]):
                handlers[var].append(lambda value, name=name: ops._operands(name, value))
            (var,) = jax.tree.leaves(operation["y"])
            handlers[var].append(lambda value, name=name: ops._output(name, value))
        for var in self._mixed:
            handlers[var].append(ops.mixing)
        for var in self._spikes:
            handlers[var].append(getattr(ops, "spike", lambda value: value))
        for name, state, var in self._written(lambda var: var):
            if isinstance(state, brainstate.HiddenState):
                handlers[var[0]].append(self._hidden_handler(ops, name, state))
        return handlers

    def _hidden_handler(self, ops, name, state):
        def handler(value):
            parts = self._parts(name, state, [value])
            seen = {part: ops.new_state(part, new) for part, new in parts.items()}
            (whole,) = self._whole(name, state, _count(state), seen)
            return whole

        return handler

    def _written(self, read):
        new = iter(self._new_state_vars)
        for name, state, _ in self._slots:
            found = [read(next(new)) for _ in jax.tree.leaves(state.value)]
            if not isinstance(state, brainstate.ParamState):
                yield name, state, found

    # states as the oracles see them

    def _parts(self, name, state, leaves):
        if isinstance(state, brainstate.HiddenState):
            (value,) = mantissas(leaves)
            to_group, _ = self._canonical.get(name, (lambda v: v, None))
            count = _count(state)
            if count is None:
                return {name: to_group(value)}
            return {f"{name}[{i}]": to_group(value[..., i]) for i in range(count)}
        return {f"{name}#{i}": _raw(leaf) for i, leaf in enumerate(mantissas(leaves))}

    def _whole(self, name, state, count, values):
        if isinstance(state, brainstate.HiddenState):
            _, from_group = self._canonical.get(name, (None, lambda v: v))
            if count is None:
                return [from_group(values[name])]
            return [jnp.stack([from_group(values[f"{name}[{i}]"]) for i in range(count)], -1)]
        return [_as(leaf, values[f"{name}#{i}"]) for i, leaf in enumerate(mantissas(state.value))]

    def _reached(self, y):
        """Groups with a path from y that passes no other operation, group or mixing."""
        own = set(jax.tree.leaves(y))
        written = list(self._written(lambda var: var))
        reached = []
        for group, members in self.groups.items():
            ends = {
                var[0] for name, state, var in written if name in {m.split("[")[0] for m in members}
            }
            others = {
                var[0]
                for _, state, var in written
                if isinstance(state, brainstate.HiddenState) and var[0] not in ends
            }
            outputs = {jax.tree.leaves(op["y"])[0] for op in self._operations.values()}
            if ends & self._downstream(own, (outputs | set(self._mixed) | others) - own):
                reached.append(group)
        return tuple(reached)

    def _downstream(self, start, blocked):
        found = set(start)
        for equation in self._jaxpr.eqns:
            used = {atom for atom in equation.invars if not hasattr(atom, "val")}
            if found & used and equation.primitive.name != "stop_gradient":
                found |= {
                    var
                    for var in equation.outvars
                    if var not in blocked and jnp.issubdtype(var.aval.dtype, jnp.inexact)
                }
        return found


class _Onlooker:
    """Changes nothing; keeps states and spikes."""

    def __init__(self):
        self.inputs, self.hidden, self.spikes, self._given_inputs = {}, {}, [], {}

    def new_state(self, name, value):
        self.hidden[name] = value
        return value

    def spike(self, value):
        self.spikes.append(value)
        return value

    def mixing(self, value):
        return value

    def _operands(self, name, value):
        return value

    def _output(self, name, value):
        return value


def _trace(model, x):
    trees = {}

    def step(x):
        recorder = Recorder()
        with recording(recorder):
            output = model.update(x)
        marked = (recorder.operations, recorder.mixed, recorder.spikes)
        trees["output"], trees["marked"] = jax.tree.structure(output), jax.tree.structure(marked)
        return output, marked

    function = brainstate.transform.StatefulFunction(step, return_only_write=False)
    function.make_jaxpr(x)
    key = function.get_arg_cache_key(x)
    closed, states = function.get_jaxpr_by_cache(key), function.get_states_by_cache(key)
    return closed, states, trees["output"], trees["marked"]


def _slots(model, states):
    names = {id(state): "/".join(map(str, path)) for path, state in model.states().items()}
    return [
        (names.get(id(state), f"outside {i}"), state, _count(state))
        for i, state in enumerate(states)
    ]


def _count(state):
    return state.num_state if isinstance(state, brainstate.HiddenGroupState) else None


def mantissas(tree):
    """The leaves of a tree, without their units."""
    return jax.tree.leaves(without_units(tree))


def without_units(tree):
    """The same tree, without its units."""
    is_quantity = lambda leaf: isinstance(leaf, saiunit.Quantity)  # noqa: E731
    return jax.tree.map(saiunit.get_mantissa, tree, is_leaf=is_quantity)


def _leaves(state):
    return len(jax.tree.leaves(state.value))


def _raw(leaf):
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if is_key else leaf


def _as(leaf, raw):
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.wrap_key_data(raw) if is_key else raw


def sequences(shape, outputs, length=5, seed=1):
    """Seeded inputs (time, *shape) and targets (time, *outputs), exact in single precision."""
    generator = np.random.default_rng(seed)
    xs = generator.standard_normal((length, *shape)).astype(np.float32)
    targets = generator.standard_normal((length, *outputs)).astype(np.float32)
    return jax.device_put((xs.astype(float), targets.astype(float)))
