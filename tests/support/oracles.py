"""Gradients of a recurrent model, computed the slow and literal way.

Nothing here imports the library. Each oracle takes a *case* (see `recorded.py`), which offers

    case.step(ops, params, states, x) -> output     one step, written with the methods of `ops`
    case.loss(output, target) -> scalar             the loss of one step
    case.groups      {group: (state, ...)}          in the order in which a step computes them
    case.relations   {operation: (group, ...)}      the groups that an operation's output reaches

and arrays: `params` and `states` (dicts by name) and the sequences `xs` and `targets` (time first).

Notation, for one group with states a, c and positions v (batch included):

    D[a, v, c]   = d h^t[a, v] / d h^{t-1}[c, v]    outputs y of all operations held fixed
    Df[a, v, u]  = d h^t[a, v] / d y^t[u]           old states held fixed
    dY[u, p]     = d y^t[u] / d theta[p]            inputs x of the operation held fixed
    signal[a, v] = d L^t / d h^t[a, v]              the other states of the group held fixed
    late[a, v]   = d L^t / d h^{t-1}[a, v]          all new states held fixed
    direct[p]    = d L^t / d theta[p]               old states held fixed, and the weights of an
                                                    operation held fixed on the way into the
                                                    groups that it has a relation with, but
                                                    for those of its outputs that have none

theta is the flat vector of all parameters, so every trace is one full tensor (a, v, p) and no
position map is needed.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree


class PlainOps:
    """What a step, recorded or written by hand, does in its operations: their values, or others.

    inputs, outputs: {operation: value} used instead of the operation's own x or y.
    hidden: {state: value} that the rest of the step sees as the state's new value.
    held: operations whose weights count as constants.
    cut_mixing: whether mixing between positions counts as constant.
    mixed: {number of a mixing, in the order in which they are computed: value} used instead.
    """

    def __init__(
        self, inputs=None, outputs=None, hidden=None, held=(), cut_mixing=False, mixed=None
    ):
        self.inputs, self.outputs, self.hidden, self.mixed = {}, {}, {}, []
        self._given_inputs = inputs or {}
        self._given_outputs = outputs or {}
        self._given_hidden = hidden or {}
        self._held = held
        self._cut_mixing = cut_mixing
        self._given_mixed = mixed or {}

    def matmul(self, name, x, weight, bias=None):
        """An operation of a step that is written by hand."""
        self.inputs[name] = self._given_inputs.get(name, x)
        weight, bias = self._operands(name, (weight, bias))
        y = self.inputs[name] @ weight
        return self._output(name, y if bias is None else y + bias)

    def element_wise(self, name, weight, fn=lambda w: w):
        return self._output(name, fn(self._operands(name, weight)))

    def new_state(self, name, value):
        self.hidden[name] = self._given_hidden.get(name, value)
        return self.hidden[name]

    def mixing(self, value):
        self.mixed.append(value)
        if len(self.mixed) - 1 in self._given_mixed:
            return self._given_mixed[len(self.mixed) - 1]
        return jax.lax.stop_gradient(value) if self._cut_mixing else value

    def _operands(self, name, operands):
        return jax.lax.stop_gradient(operands) if name in self._held else operands

    def _output(self, name, value):
        self.outputs[name] = self._given_outputs.get(name, value)
        return self.outputs[name]


# The programs are small and run once or twice: compiling them with care costs more than it saves.
compiled = partial(
    jax.jit, static_argnums=0, compiler_options={"xla_backend_optimization_level": 0}
)


# --- backpropagation through time ---------------------------------------------------------


def sequence_loss(case, params, states, xs, targets, step_weights=None):
    """Weighted sum of the losses of all steps."""

    def one_step(states, inputs):
        x, target, weight = inputs
        ops = PlainOps()
        output = case.step(ops, params, states, x)
        return ops.hidden, weight * case.loss(output, target)

    return jax.lax.scan(one_step, states, (xs, targets, _ones(step_weights, xs)))[1].sum()


compiled_loss = compiled(sequence_loss)


@compiled
def _step_gradients(case, params, states, x, target, of_loss, of_new):
    """Loss and new states of one step; and the gradients with respect to params and old states of
    its loss times `of_loss` plus its new states times `of_new`."""
    fixed = {name: state for name, state in states.items() if name not in of_new}

    def step(params, states):
        ops = PlainOps()
        output = case.step(ops, params, {**fixed, **states}, x)
        return (case.loss(output, target), {name: ops.hidden[name] for name in states}), ops.hidden

    differentiated = {name: states[name] for name in of_new}
    (loss, _), pull_back, new = jax.vjp(step, params, differentiated, has_aux=True)
    return loss, new, *pull_back((of_loss.astype(loss.dtype), of_new))


def _steps(case, params, states, xs, targets, step_weights=None):
    """A list of functions from `of_new` to the gradients of a step; the losses; and zeros.

    One program of one step: it compiles in half the time of one of the sequence and its reverse.
    """
    zeros = {
        name: np.zeros_like(state)
        for name, state in states.items()
        if np.issubdtype(np.asarray(state).dtype, np.inexact)
    }
    steps, losses = [], []
    for x, target, weight in zip(
        np.asarray(xs), np.asarray(targets), np.asarray(_ones(step_weights, xs)), strict=True
    ):
        step = partial(_step_gradients, case, params, states, x, target, weight)
        loss, new, *_ = step(zeros)
        states = jax.tree.map(np.asarray, new)
        steps.append(lambda of_new, step=step: jax.tree.map(np.asarray, step(of_new)[2:]))
        losses.append(weight * np.asarray(loss))
    return steps, losses, zeros


def loss_and_gradients(case, params, states, xs, targets, step_weights=None):
    """Loss, and its gradients with respect to the parameters and to the initial states."""
    steps, losses, of_new = _steps(case, params, states, xs, targets, step_weights)
    total = jax.tree.map(np.zeros_like, params)
    for step in reversed(steps):
        of_params, of_new = step(of_new)
        total = jax.tree.map(np.add, total, of_params)
    return sum(losses), (total, of_new)


def bptt(case, params, states, xs, targets, step_weights=None):
    """Gradient of the whole sequence's loss, back to the initial states."""
    return loss_and_gradients(case, params, states, xs, targets, step_weights)[1][0]


def immediate(case, params, states, xs, targets):
    """Gradients of the steps' losses, the states before each of them held constant; their sum."""
    steps, _, zeros = _steps(case, params, states, xs, targets)
    return jax.tree.map(lambda *leaves: np.sum(leaves, axis=0), *(step(zeros)[0] for step in steps))


# --- one step, taken apart ----------------------------------------------------------------


@compiled
def linearise(case, params, states, x, target):
    """One step: its new states, and everything of the notation above that belongs to it."""
    theta, unravel = ravel_pytree(params)
    ops = PlainOps()
    output = case.step(ops, params, states, x)
    facts = {
        "loss": case.loss(output, target),
        "x": ops.inputs,
        "states": states,
        "dY": jax.jacrev(partial(_outputs, case, unravel, states, x, ops.inputs))(theta),
        "direct": jax.grad(partial(_direct_loss, case, unravel, states, x, target))(theta),
        "D": {},
        "Df": {},
        "signal": {},
        "late": {},
    }
    old = {name: states[name] for members in case.groups.values() for name in members}
    late = partial(_loss_of_old, case, params, states, x, target, ops.hidden)
    to_old = jax.grad(late)(old)
    for group, members in case.groups.items():
        old = {name: states[name] for name in members}
        new = {name: ops.hidden[name] for name in members}
        transition = partial(_transition, case, params, states, x, members)
        facts["D"][group], facts["Df"][group] = jax.jacrev(transition, (0, 1))(old, ops.outputs)
        facts["signal"][group] = jax.grad(partial(_loss_of, case, params, states, x, target))(new)
        facts["late"][group] = {name: to_old[name] for name in members}
        untraced = partial(_untraced_outputs, case, params, states, x, target, ops, members)
        for op, Df in facts["Df"][group].items():
            # With more outputs than positions, such as fused gates, some may reach none.
            wide = ops.outputs[op].size > ops.hidden[members[0]].size
            if wide and group in case.relations.get(op, ()):
                facts["direct"] += untraced(op, Df) @ facts["dY"][op].reshape(-1, theta.size)
    return ops.hidden, facts


def _transition(case, params, states, x, members, old, outputs, mixed=None):
    """(old states of a group, y of all operations) -> its new states, mixing cut."""
    ops = PlainOps(outputs=outputs, cut_mixing=True, mixed=mixed)
    case.step(ops, params, {**states, **old}, x)
    return jnp.stack([ops.hidden[name].ravel() for name in members])


def _outputs(case, unravel, states, x, inputs, theta):
    """theta -> y of all operations, their inputs held fixed."""
    ops = PlainOps(inputs=inputs)
    case.step(ops, unravel(theta), states, x)
    return ops.outputs


def _loss_of(case, params, states, x, target, hidden):
    """New states of one group -> loss, everything downstream computed anew."""
    return case.loss(case.step(PlainOps(hidden=hidden), params, states, x), target)


def _untraced_outputs(case, params, states, x, target, ops, members, op, Df):
    """d L^t / d y for the outputs of an operation that have no relation with a group, by its way
    through that group's states; zero for the others."""

    def loss(y):
        changed = PlainOps(outputs={op: y})
        case.step(changed, params, states, x)
        hidden = {**ops.hidden, **{name: changed.hidden[name] for name in members}}
        return _loss_of(case, params, states, x, target, hidden)

    reached = jnp.any(Df != 0, axis=(0, 1))
    return jnp.where(reached, 0, jax.grad(loss)(ops.outputs[op])).ravel()


def _loss_of_old(case, params, states, x, target, hidden, old):
    """Old states of the groups -> loss, as far as the output reads them itself."""
    return _loss_of(case, params, {**states, **old}, x, target, hidden)


def _direct_loss(case, unravel, states, x, target, theta):
    """theta -> loss, leaving out the ways of theta that the traces carry."""
    params, hidden = unravel(theta), {}
    for group, members in case.groups.items():
        held = [name for name, groups in case.relations.items() if group in groups]
        ops = PlainOps(hidden=hidden, held=held)
        case.step(ops, params, states, x)
        hidden = {**hidden, **{name: ops.hidden[name] for name in members}}
    return _loss_of(case, params, states, x, target, hidden)


def facts_of_steps(case, params, states, xs, targets, snap=False, resets=None):
    """A list with one dict of NumPy arrays per step, shaped as in the notation above.

    snap: whether D has what products pass from each position to itself.
    resets: (time, batch), the samples that start anew before these steps.
    """
    steps, start = [], states
    for t, (x, target) in enumerate(zip(np.asarray(xs), np.asarray(targets), strict=True)):
        if resets is not None:
            states = {name: _kept_rows(~resets[t], states[name], start[name]) for name in states}
        states, facts = _facts_of_step(case, params, states, x, target, snap)
        steps.append(facts)
    _check_description(case, steps)
    return steps


def _facts_of_step(case, params, states, x, target, snap):
    """The new states, and the facts of one step."""
    new, facts = linearise(case, params, states, x, target)
    facts = _flatten(case, jax.tree.map(np.asarray, facts))
    if snap:
        for group, passed in through_products(case, params, states, x).items():
            facts["D"][group] = facts["D"][group] + np.asarray(passed)
    return new, facts


def _flatten(case, facts):
    """The same facts, positions and units of an output as one axis each."""
    for group, members in case.groups.items():
        signal, D, Df = (facts[kind][group] for kind in ("signal", "D", "Df"))
        facts["signal"][group] = np.stack([signal[name].ravel() for name in members])
        late = facts["late"][group]
        facts["late"][group] = np.stack([late[name].ravel() for name in members])
        diagonals = [_own_position(case, group, D[name]) for name in members]
        facts["D"][group] = np.stack(diagonals, axis=-1)
        facts["Df"][group] = {op: d.reshape(*d.shape[:2], -1) for op, d in Df.items()}
    facts["dY"] = {op: d.reshape(-1, d.shape[-1]) for op, d in facts["dY"].items()}
    return facts


def _own_position(case, group, jacobian):
    """(a, v, *old state's shape) -> (a, v): the diagonal, after a look at the rest."""
    full = jacobian.reshape(*jacobian.shape[:2], -1)
    diagonal = np.einsum("avv->av", full)
    if np.any(full - diagonal[:, :, None] * np.eye(full.shape[-1])):
        raise AssertionError(f"{case.name}: group {group} couples elements outside `ops.mixing`")
    return diagonal


def _check_description(case, steps):
    """The relations and the position maps are those that the case states."""
    for group in case.groups:
        for op in steps[0]["Df"][group]:
            reached = [np.any(facts["Df"][group][op], axis=0) for facts in steps]
            stated = group in case.relations.get(op, ())
            if np.any(reached) != stated:
                raise AssertionError(f"{case.name}: {op} reaches {group}: stated {stated}")
            if op not in case.broadcast and np.any(np.sum(reached, axis=1) > 1):
                raise AssertionError(f"{case.name}: one element of {op} reaches two positions")


@compiled
def through_products(case, params, states, x):
    """{group: (a, v, c)}: d h^t[a, v] / d h^{t-1}[c, v] by way of one product each, a marked
    operation or a mixing, while all others are held fixed.

    Full Jacobians of h' to the product, of the product to its input, and of that to h: the
    diagonal is taken of all three together.
    """
    ops = PlainOps()
    case.step(ops, params, states, x)
    found = {}
    for group, members in case.groups.items():
        old = {name: states[name] for name in members}
        total = 0.0
        transition = partial(_transition, case, params, states, x, members)
        Df = jax.jacrev(transition, 1)(old, ops.outputs)
        for op, value in ops.inputs.items():
            to_input = partial(_input, case, params, states, x, op, ops.outputs)
            of_input = jax.jacrev(partial(_output, case, params, states, x, op))(value)
            full = _chained(Df[op], of_input, value, jax.jacrev(to_input)(old))
            total = total + _diagonal_of(full, members)
        for k, value in enumerate(ops.mixed):
            of_mixed = partial(_with_mixed, case, params, states, x, members, old, ops.outputs, k)
            to_mixed = partial(_mixed, case, params, states, x, ops.outputs, k)
            full = _chained(jax.jacrev(of_mixed)(value), None, value, jax.jacrev(to_mixed)(old))
            total = total + _diagonal_of(full, members)
        found[group] = total
    return found


def _input(case, params, states, x, op, outputs, old):
    """(old states of a group) -> the input of one operation, the outputs of all held fixed."""
    ops = PlainOps(outputs=outputs, cut_mixing=True)
    case.step(ops, params, {**states, **old}, x)
    return ops.inputs[op]


def _output(case, params, states, x, op, value):
    """(input of one operation) -> its output."""
    ops = PlainOps(inputs={op: value})
    case.step(ops, params, states, x)
    return ops.outputs[op]


def _mixed(case, params, states, x, outputs, k, old):
    """(old states of a group) -> one mixed value, everything else that mixes held fixed."""
    ops = PlainOps(outputs=outputs, cut_mixing=True)
    case.step(ops, params, {**states, **old}, x)
    return ops.mixed[k]


def _with_mixed(case, params, states, x, members, old, outputs, k, value):
    """(one mixed value) -> the new states of a group."""
    return _transition(case, params, states, x, members, old, outputs, {k: value})


def _chained(of_output, of_input, value, to_old):
    """(a, v, *y), (*y, *x), {c: (*x, *v)} -> {c: (a, v, v)}; without the second, y is x."""
    if of_input is not None:
        axes = of_input.ndim - value.ndim
        of_output = jnp.tensordot(of_output, of_input, axes)
    full = {c: jnp.tensordot(of_output, dX, value.ndim) for c, dX in to_old.items()}
    return {c: block.reshape(*block.shape[:2], -1) for c, block in full.items()}


def _diagonal_of(blocks, members):
    return jnp.stack([jnp.einsum("avv->av", blocks[name]) for name in members], axis=-1)


# --- D-RTRL -------------------------------------------------------------------------------


def dense_d_rtrl(case, params, states, xs, targets, step_weights=None, snap=False, decay=None):
    """D-RTRL by its recursion over full traces; with `snap`, SnAp-1 by its D.

    eps^t = D^t eps^{t-1} + Df^t dY^t, with `decay` in the place of D^t if it is given
    gradient = sum_t signal^t . eps^t + late^t . eps^{t-1} + direct^t
    """
    steps = facts_of_steps(case, params, states, xs, targets, snap)
    traces = d_rtrl_traces(case, steps, decay)
    gradient = 0.0
    for t, weight in enumerate(_ones(step_weights, xs)):
        gradient = gradient + weight * _d_rtrl_gradient(case, steps[t], traces[t : t + 2])
    return _as_tree(params, gradient)


def _d_rtrl_gradient(case, facts, traces):
    """The gradient of one step, from the traces before and after it."""
    before, after = traces
    return facts["direct"] + sum(
        _contract(facts["signal"][group], after[group])
        + _contract(facts["late"][group], before[group])
        for group in case.groups
    )


def d_rtrl_traces(case, steps, decay=None, resets=None):
    """The traces {group: (a, v, p)} before the first step and after every step."""
    direct = steps[0]["direct"]
    shapes = {group: steps[0]["signal"][group].shape for group in case.groups}
    history = [{group: np.zeros((*s, direct.size), direct.dtype) for group, s in shapes.items()}]
    for t, facts in enumerate(steps):
        traces, before = {}, _reset_positions(history[-1], resets, t)
        for group in case.groups:
            if decay is None:
                carried = np.einsum("avc,cvp->avp", facts["D"][group], before[group])
            else:
                carried = decay * before[group]
            entering = [facts["Df"][group][op] @ facts["dY"][op] for op in facts["dY"]]
            traces[group] = carried + sum(entering)
        history.append(traces)
    return history


def _reset_positions(traces, resets, t):
    """Traces (a, v, ...) with those of the samples that start anew before a step at zero."""
    if resets is None:
        return traces

    def with_zeros(trace):
        return trace * np.repeat(~resets[t], trace.shape[1] // len(resets[t]))[:, None]

    return jax.tree.map(with_zeros, traces)


def _contract(signal, trace):
    """Sum over states a and positions v."""
    return np.einsum("av,av...->...", signal, trace)


# --- ES-D-RTRL ----------------------------------------------------------------------------


def dense_es_d_rtrl(case, params, states, xs, targets, alpha, step_weights=None):
    """ES-D-RTRL by its recursion over an input trace and full output traces.

    eps_x^t = alpha eps_x^{t-1} + x^t
    eps_f^t = alpha D^t eps_f^{t-1} + (1 - alpha) Df^t
    gradient = sum_t direct^t + signal^t . eps_f^t / (1 - alpha^t), the latter pulled back
               through y = op(eps_x^t, theta), and late^t with the traces of step t - 1 alike
    """
    steps = facts_of_steps(case, params, states, xs, targets)
    traces = es_d_rtrl_traces(case, steps, alpha)
    gradient = 0.0
    for t, weight in enumerate(_ones(step_weights, xs)):
        found = _es_d_rtrl_gradient(case, params, xs[t], steps[t], traces[t : t + 2])
        gradient = gradient + weight * found
    return _as_tree(params, gradient)


def _es_d_rtrl_gradient(case, params, x, facts, traces):
    """The gradient of one step, from the traces before and after it."""
    before, after = traces
    inputs = case, params, facts["states"], x
    carried = [(facts["signal"], after), (facts["late"], before)]
    return facts["direct"] + sum(np.asarray(_pull_back(*inputs, *both)) for both in carried)


def es_d_rtrl_traces(case, steps, alpha, resets=None):
    """(eps_x, corrected eps_f) before the first step (all zero) and after every step."""
    eps_x = jax.tree.map(np.zeros_like, steps[0]["x"])
    eps_f = jax.tree.map(np.zeros_like, {group: steps[0]["Df"][group] for group in case.groups})
    history, seen = [(eps_x, eps_f)], jax.tree.map(lambda f: np.zeros((1, f.shape[1], 1)), eps_f)
    for t, facts in enumerate(steps):
        D, Df = facts["D"], facts["Df"]
        eps_x = _kept_inputs(eps_x, resets, t)
        eps_f, seen = (_reset_positions(traces, resets, t) for traces in (eps_f, seen))
        seen = jax.tree.map(lambda steps: steps + 1, seen)
        eps_x = {op: alpha * eps_x[op] + x for op, x in facts["x"].items()}
        eps_f = {
            group: {
                op: alpha * np.einsum("avc,cvu->avu", D[group], trace) + (1 - alpha) * Df[group][op]
                for op, trace in eps_f[group].items()
            }
            for group in case.groups
        }
        history.append((eps_x, jax.tree.map(lambda f, n: f / (1 - alpha**n), eps_f, seen)))
    return history


def _kept_inputs(eps_x, resets, t):
    """Input traces with those of the samples that start anew before a step at zero."""
    if resets is None:
        return eps_x
    return {op: x * _like_rows(~resets[t], x) for op, x in eps_x.items()}


# --- OTTT ---------------------------------------------------------------------------------


def dense_ottt(case, params, states, xs, targets, decay, step_weights=None):
    """OTTT by its recursion over an input trace.

    eps_x^t = decay eps_x^{t-1} + x^t
    gradient = sum_t direct^t + signal^t . Df^t pulled back through y = op(eps_x^t, theta), and
               late^t with the trace and Df of step t - 1 alike
    """
    steps = facts_of_steps(case, params, states, xs, targets)
    traces = ottt_traces(case, steps, decay)
    gradient = 0.0
    for t, weight in enumerate(_ones(step_weights, xs)):
        found = _es_d_rtrl_gradient(case, params, xs[t], steps[t], traces[t : t + 2])
        gradient = gradient + weight * found
    return _as_tree(params, gradient)


def ottt_traces(case, steps, decay, resets=None):
    """(eps_x, Df) before the first step (all zero) and after every step."""
    eps_x = jax.tree.map(np.zeros_like, steps[0]["x"])
    history = [(eps_x, jax.tree.map(np.zeros_like, steps[0]["Df"]))]
    for t, facts in enumerate(steps):
        eps_x = _kept_inputs(eps_x, resets, t)
        eps_x = {op: decay * eps_x[op] + x for op, x in facts["x"].items()}
        history.append((eps_x, facts["Df"]))
    return history


@compiled
def _pull_back(case, params, states, x, signal, traces):
    """Gradient of theta, had every operation its input trace for an input."""
    eps_x, eps_f = traces
    theta, unravel = ravel_pytree(params)
    outputs, vjp = jax.vjp(partial(_outputs, case, unravel, states, x, eps_x), theta)
    to_outputs = {
        op: sum(jnp.einsum("av,avu->u", signal[group], eps_f[group][op]) for group in case.groups)
        for op in outputs
    }
    return vjp({op: to_outputs[op].reshape(y.shape) for op, y in outputs.items()})[0]


def _flat(params):
    """All leaves in one array; see `_as_tree`."""
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(params)])


def _as_tree(params, flat):
    """A flat gradient, made to look like params; without a program for each of the shapes."""
    leaves, tree = jax.tree.flatten(params)
    parts = np.split(np.asarray(flat), np.cumsum([np.size(leaf) for leaf in leaves])[:-1])
    shapes = map(np.shape, leaves)
    return tree.unflatten([part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)])


# --- RTRL ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layered:
    """A case and its layers."""

    case: object
    layers: tuple


@compiled
def layered_step(layered, params, states, x, target):
    """One step: its new states; J, F, signal and late of each layer, see `dense_ostl`; direct."""
    case = layered.case
    theta, unravel = ravel_pytree(params)
    ops = PlainOps()
    case.step(ops, params, states, x)
    hidden = ops.hidden

    def loss_of_old(old):
        return _loss_of(case, params, {**states, **old}, x, target, hidden)

    def loss_of_theta(theta):
        return _loss_of(case, unravel(theta), states, x, target, hidden)

    facts = {"direct": jax.grad(loss_of_theta)(theta)}
    for layer, members in layered.layers:
        others = {name: value for name, value in hidden.items() if name not in members}
        old = {name: states[name] for name in members}

        def new(theta, old, others=others, members=members):
            ops = PlainOps(hidden=others)
            case.step(ops, unravel(theta), {**states, **old}, x)
            return ravel_pytree({name: ops.hidden[name] for name in members})[0]

        F, by_state = jax.jacrev(new, (0, 1))(theta, old)
        J = jnp.concatenate([by_state[n].reshape(len(F), -1) for n in sorted(members)], 1)
        signal = jax.grad(partial(_loss_of, case, params, states, x, target))
        own = {name: hidden[name] for name in members}
        signal, late = (ravel_pytree(g)[0] for g in (signal(own), jax.grad(loss_of_old)(old)))
        facts[layer] = {"J": J, "F": F, "signal": signal, "late": late}
    return hidden, facts


def flat_state(states):
    """All floating-point states as one vector S, in alphabetical order; and a function that puts
    another S into their place."""
    floating = {name: states[name] for name in _floating(states)}
    S, unravel = ravel_pytree(floating)
    return S, lambda S: {**states, **unravel(S)}


def state_slices(states):
    """{state: its slice of S}."""
    names = _floating(states)
    sizes = [sum(map(np.size, jax.tree.leaves(states[name]))) for name in names]
    ends = np.cumsum([0, *sizes])
    return {name: slice(*ends[i : i + 2]) for i, name in enumerate(names)}


def _floating(states):
    return sorted(n for n, value in states.items() if jnp.issubdtype(value.dtype, jnp.floating))


def _floats(states):
    return [states[name] for name in _floating(states)]


def _like_rows(flags, value):
    """Flags of the first axis, or one for all, in a shape that goes with an array."""
    return flags.reshape(flags.shape + (1,) * (value.ndim - 1) if flags.ndim else ())


def _kept_rows(keep, value, start):
    """An array with the rows that do not start anew; a random key goes on, and so does a number
    where the flags are those of samples."""
    goes_on = value.dtype == jnp.uint32 or value.ndim < keep.ndim
    return value if goes_on else jnp.where(_like_rows(keep, value), value, start)


# --- windows ------------------------------------------------------------------------------


@compiled
def window_gradients(case, params, states, start, xs, targets, step_weights, resets):
    """Gradients of a window's loss with respect to the parameters and to the states before it.

    resets: (time, batch), the samples that start anew before these steps, from `start`.
    """

    def loss(params, states):
        def one_step(states, inputs):
            x, target, weight, flags = inputs
            states = {
                name: _kept_rows(~flags, value, start[name]) for name, value in states.items()
            }
            ops = PlainOps()
            output = case.step(ops, params, states, x)
            return ops.hidden, weight * case.loss(output, target)

        return jax.lax.scan(one_step, states, (xs, targets, step_weights, resets))[1].sum()

    return jax.grad(loss, (0, 1), allow_int=True)(params, states)


def dense_multi_step(
    case,
    params,
    states,
    xs,
    targets,
    window,
    alpha=None,
    decay=None,
    snap=False,
    has_past=True,
    step_weights=None,
    resets=None,
):
    """BPTT inside every window of steps, and a trace for all that lies before it.

    gradient = sum over windows of  dL/dtheta  +  dL/dh^0 . eps^0

    with the traces of D-RTRL or SnAp-1, with those of ES-D-RTRL where alpha is given, with those of
    OTTT where decay is, or with none.

    window: number of steps, or the first steps of all windows.
    resets: (time, batch), the samples that start anew before these steps.
    """
    flags = None if resets is None else np.asarray(resets)
    xs, targets = np.asarray(xs), np.asarray(targets)
    steps = facts_of_steps(case, params, states, xs, targets, snap, flags)
    if alpha is not None:
        traces = es_d_rtrl_traces(case, steps, alpha, flags)
    elif decay is not None:
        traces = ottt_traces(case, steps, decay, flags)
    else:
        traces = d_rtrl_traces(case, steps, resets=flags)
    starts = range(0, len(xs), window) if isinstance(window, int) else window
    gradient, before = 0.0, states
    flags = np.zeros(xs.shape[:2], bool) if flags is None else flags
    sequences = xs, targets, np.asarray(_ones(step_weights, xs)), flags
    for begin, end in zip(starts, (*starts[1:], len(xs)), strict=True):
        inputs = steps_of_window(begin, end, *sequences)
        to_params, to_states = window_gradients(case, params, before, states, *inputs)
        gradient = gradient + _flat(to_params)
        if has_past:
            args = case, params, before, xs[begin], to_states, traces[begin]
            gradient = gradient + _window_past(*args, alpha is not None or decay is not None)
        before = _after(case, params, before, states, xs[begin:end], flags[begin:end])
    return _as_tree(params, gradient)


def steps_of_window(begin, end, xs, targets, weights, resets):
    """Inputs of `window_gradients`, as long as the sequence: one program for all windows.

    The last step of the window is repeated, with weights of zero.
    """
    steps = np.minimum(np.arange(begin, begin + len(xs)), end - 1)
    counts = np.where(np.arange(len(xs)) < end - begin, weights[steps], 0)
    return xs[steps], targets[steps], counts, resets[steps]


def _window_past(case, params, before, x, to_states, traces, is_factored):
    """dL/dh^0 . eps^0 of one window."""
    signal = {
        group: np.stack([np.ravel(to_states[name]) for name in members])
        for group, members in case.groups.items()
    }
    if is_factored:
        return np.asarray(_pull_back(case, params, before, x, signal, traces))
    return sum(_contract(signal[group], traces[group]) for group in case.groups)


def _after(case, params, states, start, xs, resets):
    """The states after some steps."""
    for x, flags in zip(xs, resets, strict=True):
        states = _after_step(case, params, states, start, x, flags)
    return states


@compiled
def _after_step(case, params, states, start, x, flags):
    states = {name: _kept_rows(~flags, states[name], start[name]) for name in states}
    ops = PlainOps()
    case.step(ops, params, states, x)
    return ops.hidden


# --- learning at every step ---------------------------------------------------------------


def dense_online(case, params, states, xs, targets, rate, alpha=None, snap=False):
    """Gradient descent at every step: the parameters after the last, and the losses.

    The traces go on with what they have from older parameters; those of D-RTRL or SnAp-1, or those
    of ES-D-RTRL where alpha is given.
    """
    steps = []
    for x, target in zip(np.asarray(xs), np.asarray(targets), strict=True):
        states, facts = _facts_of_step(case, params, states, x, target, snap)
        steps.append(facts)
        if alpha is None:
            gradient = _d_rtrl_gradient(case, steps[-1], d_rtrl_traces(case, steps)[-2:])
        else:
            traces = es_d_rtrl_traces(case, steps, alpha)[-2:]
            gradient = _es_d_rtrl_gradient(case, params, x, steps[-1], traces)
        params = _as_tree(params, _flat(params) - rate * gradient)
    return params, np.stack([facts["loss"] for facts in steps])


def _ones(step_weights, xs):
    return np.ones(len(xs), xs.dtype) if step_weights is None else jnp.asarray(step_weights)
