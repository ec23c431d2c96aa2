"""UORO and KF-RTRL, computed the slow and literal way, sample by sample, from given random signs.

Nothing here imports the library. Each step contributes, with the past of every sample ``b``,

    gradient of the step's loss, old states held constant  +  sum_b mu_b . eps_b,   mu = dL / dS

where ``S`` are the states before the step (`oracles.flat_state`), and ``eps_b`` is an estimate of
what they are worth in the parameters ``theta``:

    UORO       eps = s (x) t,              s' = r0 J s + r1 nu     t' = t / r0 + nu F / r1
    KF-RTRL    eps = sum_op A_op (u, op),  u' = p0 u + p1 nu x     A' = J A / p0 + nu F / p1

``J = dS'/dS``; ``F`` is ``dS'/dtheta`` in the first, ``dS'/dy`` of one operation's output in the
other. The factors balance the norms, ``r0 = sqrt(|t| / |J s|)``; where a norm is zero, so is the
product that it belongs to, and both of its parts are left out. For an operation without an input
``u = 1``, and ``A' = J A + F`` is exact.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from oracles import PlainOps, _as_tree, compiled, flat_state, state_slices, whole_step


def uoro(
    case, params, states, xs, targets, signs, step_weights=None, resets=None, rate=0.0, axis=0
):
    """Gradient by UORO; signs: (time, batch, n), the states of a sample in alphabetical order.

    With a rate, parameters descend between steps, and those after the last are returned. The axis
    is that of samples in all states.
    """
    rows, start = rows_of_samples(states, axis), states
    samples, theta, unravel = range(len(rows)), *ravel_pytree(params)
    s, t = np.zeros(rows.shape), np.zeros((len(rows), theta.size))
    gradient = 0.0
    for index in range(len(xs)):
        if resets is not None:
            flags, states = after_reset(resets[index], states, start)
            s[flags], t[flags] = 0.0, 0.0
        states, facts = derivatives(case, unravel(theta), states, xs[index], targets[index])
        found = facts["one_step"] + sum(facts["mu"][rows[b]] @ s[b] * t[b] for b in samples)
        for b in samples:
            own, nu = rows[b], signs[index, b]
            pushed, entering = facts["J"][np.ix_(own, own)] @ s[b], nu @ facts["F"][own]
            (r0, r0_inverse), (r1, r1_inverse) = balance(t[b], pushed), balance(entering, nu)
            s[b] = r0 * pushed + r1 * nu
            t[b] = r0_inverse * t[b] + r1_inverse * entering
        gradient = gradient + weight_of(step_weights, index) * found
        theta = theta - rate * found
    return _as_tree(params, theta if rate else gradient)


def kf_rtrl(case, params, states, xs, targets, signs, step_weights=None, resets=None, rate=0.0):
    """Gradient by KF-RTRL; signs: {operation with an input: (time, batch)}. See `uoro`."""
    rows, start = rows_of_samples(states), states
    samples, theta, unravel = range(len(rows)), *ravel_pytree(params)
    u, A, gradient = {}, {}, 0.0
    for index, x in enumerate(xs):
        if resets is not None:
            flags, states = after_reset(resets[index], states, start)
            u.update({key: 0 * u[key] for key in u if flags[key[1]] and key[0] in signs})
            A.update({key: 0 * A[key] for key in A if flags[key[1]]})
        before, now = states, unravel(theta)
        inputs, has_bias, Fs = factors(case, now, before, x)
        states, facts = derivatives(case, now, before, x, targets[index])
        parts = dict.fromkeys(Fs, (0.0, 0.0))
        for op, F in Fs.items():
            for b in samples:
                own = np.append(inputs[op][b], has_bias[op]) if op in inputs else np.ones(1)
                old_u = u.get((op, b), np.zeros(own.size) if op in inputs else own)
                old_A = A.get((op, b), np.zeros(F[b].shape))
                onto = facts["mu"][rows[b]] @ old_A
                weight, bias = parts[op]
                parts[op] = weight + np.outer(old_u[:-1], onto), bias + old_u[-1] * onto
                JA = facts["J"][np.ix_(rows[b], rows[b])] @ old_A
                if op not in inputs:
                    u[op, b], A[op, b] = old_u, JA + F[b]
                    continue
                nu = signs[op][index, b]
                (p0, p0_inverse), (p1, p1_inverse) = balance(JA, old_u), balance(F[b], own)
                u[op, b] = p0 * old_u + p1 * nu * own
                A[op, b] = p0_inverse * JA + p1_inverse * nu * F[b]
        past = pulled_to_parameters(case, now, before, x, parts)
        found = facts["one_step"] + np.asarray(past)
        gradient = gradient + weight_of(step_weights, index) * found
        theta = theta - rate * found
    return _as_tree(params, theta if rate else gradient)


def balance(above, below):
    """sqrt(|above| / |below|) and its inverse; 0 and 0 where there is nothing to balance."""
    above, below = np.linalg.norm(above), np.linalg.norm(below)
    if above == 0 or below == 0:
        return 0.0, 0.0
    return np.sqrt(above / below), np.sqrt(below / above)


def derivatives(case, params, states, x, target):
    """New states of one step, and J, F, and the gradients of its loss by S and by theta."""
    new, facts = whole_step(case, params, states, x, target)
    facts = jax.tree.map(np.asarray, facts)
    facts["mu"] = facts["signal"] @ facts["J"] + facts["late"]
    facts["one_step"] = facts["signal"] @ facts["F"] + facts["direct"]
    return new, facts


def after_reset(flags, states, start):
    """One flag per sample, and states in which these samples start anew."""
    flags = np.broadcast_to(flags, len(next(iter(states.values()))))
    return flags, {
        name: jnp.where(flags[:, None], start[name], value) for name, value in states.items()
    }


def rows_of_samples(states, axis=0):
    """(batch, n): which entries of S are the states of a sample."""
    slices = state_slices(states)
    entries = np.arange(max(own.stop for own in slices.values()))
    shaped = [entries[own].reshape(states[name].shape) for name, own in slices.items()]
    first = [np.moveaxis(of_state, axis, 0) for of_state in shaped]
    return np.concatenate([of_state.reshape(len(of_state), -1) for of_state in first], axis=1)


def weight_of(step_weights, index):
    return 1.0 if step_weights is None else step_weights[index]


class OperandOps(PlainOps):
    """Also records the operands of products, and whether they have a bias."""

    def __init__(self, **options):
        super().__init__(**options)
        self.operands = {}

    def _operands(self, name, value):
        if jnp.ndim(self.inputs.get(name, value)):  # an element-wise operation has no input
            weight, bias = self.operands.get(name, (None, None))
            self.operands[name] = (weight, value) if value.ndim == 1 else (value, bias)
        return super()._operands(name, value)


def factors(case, params, states, x):
    """Inputs of products {op: (batch, in)}, whether they have a bias, and F of every operation.

    F: (batch, n, outputs), d S' / d y of every sample.
    """
    inputs, has_bias, Fs = jax.tree.map(np.asarray, _factors(case, params, states, x))
    rows = rows_of_samples(states)
    found = {}
    for op, F in Fs.items():
        own = [F[rows[b]] for b in range(len(rows))]
        if op in inputs:  # every sample has outputs of its own
            own = [part[:, b] for b, part in enumerate(own)]
        found[op] = np.stack(own)
    return inputs, has_bias, found


@compiled
def _factors(case, params, states, x):
    ops = OperandOps()
    case.step(ops, params, states, x)

    def new(op, y):
        changed = PlainOps(outputs={op: y})
        case.step(changed, params, states, x)
        return flat_state(changed.hidden)[0]

    Fs = {op: jax.jacrev(partial(new, op))(y) for op, y in ops.outputs.items()}
    has_bias = {op: float(operands[1] is not None) for op, operands in ops.operands.items()}
    return {op: ops.inputs[op] for op in ops.operands}, has_bias, Fs


@compiled
def pulled_to_parameters(case, params, states, x, parts):
    """Gradient of theta, given that of weight and bias of each product, or of an output."""
    theta, unravel = ravel_pytree(params)

    def operands(theta):
        ops = OperandOps()
        case.step(ops, unravel(theta), states, x)
        rest = {op: y for op, y in ops.outputs.items() if op not in ops.operands}
        return ops.operands, rest

    (products, rest), pull = jax.vjp(operands, theta)
    of_products = {
        op: (parts[op][0], None if bias is None else parts[op][1])
        for op, (_, bias) in products.items()
    }
    of_rest = {op: parts[op][1].reshape(y.shape) for op, y in rest.items()}
    return pull((of_products, of_rest))[0]


def of_one_product(rule, network, params, S, xs, signs):
    """Gradient of the losses of steps with one product, by either rule.

    network: with ``step(S, x, params, added=0)`` of one sample, its states one vector, ``added``
        to the product's output of a given ``shape``; ``operand(S, x)``, the vector of the
        product's input, and a one for its bias; ``pulled(u, onto, params)``, like params:
        ``onto`` the output, pulled back at such a vector; ``loss(S')`` of all samples.
    S: (batch, n); xs: (time, batch, *shape); signs: as for the rule.
    """
    theta, unravel = ravel_pytree(params)

    @jax.jit
    @partial(jax.vmap, in_axes=(None, 0, 0))
    def facts(theta, S, x):
        def new(theta, S, added=0.0):
            return network.step(S, x, unravel(theta), added)

        J, F = jax.jacrev(new, 1)(theta, S), jax.jacrev(new)(theta, S)
        Df = jax.jacrev(new, 2)(theta, S, jnp.zeros(network.shape)).reshape(S.size, -1)
        return new(theta, S), J, F, Df, network.operand(S, x)

    pulled = jax.jit(lambda u, onto: ravel_pytree(network.pulled(u, onto, params))[0])
    signal_of, gradient, left = jax.jit(jax.grad(network.loss)), 0.0, None
    for x, now in zip(xs, signs, strict=True):
        S, Js, Fs, Dfs, us = jax.tree.map(np.asarray, facts(theta, S, x))
        if left is None:
            left, right = map(np.zeros_like, (S, Fs[:, 0]) if rule == "uoro" else (us, Dfs))
        for b, signal in enumerate(np.asarray(signal_of(S))):
            mu, nu = signal @ Js[b], now[b]
            if rule == "uoro":
                past, carried = mu @ left[b] * right[b], (Js[b] @ left[b], right[b])
                entering = (nu, nu @ Fs[b])
            else:
                past, carried = pulled(left[b], mu @ right[b]), (left[b], Js[b] @ right[b])
                entering = (nu * us[b], nu * Dfs[b])
            gradient = gradient + signal @ Fs[b] + past
            (p0, p0_inverse), (p1, p1_inverse) = balance(*carried[::-1]), balance(*entering[::-1])
            left[b] = p0 * carried[0] + p1 * entering[0]
            right[b] = p0_inverse * carried[1] + p1_inverse * entering[1]
    return unravel(gradient)
