"""Gradients of a recurrent model in plain JAX, computed the slow and literal way.

Nothing here imports the library. A *model* offers, for one sample or with leading axes,

    model.step(ops, params, states, x) -> new states, output         as a user writes it
    model.by_layer(ops, params, states, x, mixing, seen) -> the same  with paths taken apart

and writes its operations with the methods of `ops`. All arrays are in float64.

`loop` is one loop over time. A rule is two step functions of it: what a gradient passes *inside* a
window, and what *carries* it into the window from before:

    BPTT, RTRL       the step; the step
    D-RTRL           products from state to state cut, layers cut; the same
    OSTL             layers cut; the same
    Immediate        the step; nothing
    window of any    the step; what the rule carries

The other rules are not derivatives of a program, and are written as their recursions.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

stop = jax.lax.stop_gradient


# --- operations -----------------------------------------------------------------------------------


class Plain:
    """What a step does in its operations, in plain JAX; numbered in the order of their calls.

    inputs: used instead of the operations' own inputs. taps: added to their outputs.
    """

    def __init__(self, inputs=None, taps=None):
        self.inputs, self.outputs = [], []
        self._given, self._taps = inputs, taps

    def matmul(self, x, w, b=None):
        return self._call(lambda x: x @ w if b is None else x @ w + b, x)

    def element_wise(self, w, fn):
        return self._call(lambda _: fn(w), None)

    def lora(self, x, B, A, alpha):
        return self._call(lambda x: alpha * (x @ B @ A), x)

    def einsum(self, equation, x, w):
        return self._call(lambda x: jnp.einsum(equation, x, w), x)

    def grouped(self, x, w):
        return self._call(lambda x: jnp.einsum("...gi,gio->...go", x, w), x)

    def conv(self, x, kernel):
        """Along one axis, as it comes: y[p, o] = sum_k x[p + k] kernel[k, 0, o]."""
        size = kernel.shape[0]

        def convolve(x):
            patches = jnp.stack([x[..., k : x.shape[-1] - size + 1 + k] for k in range(size)], -1)
            return patches @ kernel[:, 0]

        return self._call(convolve, x)

    def sparse(self, x, data, rows, columns, shape):
        return self._call(lambda x: x @ jnp.zeros(shape, data.dtype).at[rows, columns].set(data), x)

    def embedding(self, index, table):
        return self._call(lambda x: x @ table, jax.nn.one_hot(index, len(table), dtype=table.dtype))

    def _call(self, operation, x):
        number = len(self.inputs)
        x = x if self._given is None else self._given[number]
        y = operation(x)
        self.inputs.append(x)
        self.outputs.append(y)
        return y if self._taps is None else y + self._taps[number]


# --- rules that are derivatives of a program ------------------------------------------------------


def step_of(model, kind):
    """(params, states, x) -> (new states, output): what a gradient may pass in one step."""
    if kind == "full":
        return functools.partial(model.step, Plain())
    return lambda p, h, x: model.by_layer(Plain(), p, h, x, kind)


RULES = {
    "bptt": ("full", "full"),
    "rtrl": ("full", "full"),
    "d_rtrl": ("cut", "cut"),
    "ostl_recurrent": ("kept", "kept"),
    "immediate": ("full", None),
}


def gradient_by_rule(model, rule, params, xs, loss, window=None, mask=None, reset=None):
    """The gradient of the weighted sum of the losses, by one of `RULES`."""
    inside, carries = RULES[rule]
    if window is not None or carries is None:
        inside, window = "full", window or 1
    inside = step_of(model, inside)
    carries = carries and step_of(model, carries)
    start = model.start(*np.shape(xs)[1:2])
    return loop(params, start, xs, loss, inside, carries, window, mask, reset)


def loop(params, start, xs, loss, inside, carries, window=None, mask=None, reset=None):
    """Gradient of sum_t mask[t] loss(t, y[t]); samples with a flag in reset[t] start anew at t."""
    times = np.arange(len(xs))
    given = {"t": times, "x": xs, "weight": np.ones(len(xs)) if mask is None else np.array(mask)}
    given["is_first"] = times % (window or len(xs)) == 0
    given |= {} if reset is None else {"reset": reset}

    def advance(p, both, now):
        before, states = both
        first = before if carries else jax.tree.map(stop, states)
        states = jax.tree.map(functools.partial(jnp.where, now["is_first"]), first, states)
        if reset is not None:
            before, states = (started_anew(now["reset"], s, start) for s in (before, states))
        after = carries(p, before, now["x"])[0] if carries else before
        states, y = inside(p, states, now["x"])
        before = states if carries is inside else after
        weight = now["weight"]
        return (before, states), jnp.where(weight == 0, 0, weight * loss(now["t"], y))

    def total(p, given):
        both = jax.tree.map(jnp.asarray, (start, start))
        return jax.lax.scan(functools.partial(advance, p), both, given)[1].sum()

    return jax.jit(jax.grad(total))(params, given)


def started_anew(flags, states, start):
    """The states of a batch, those of the flagged samples as they were at the start.

    A state without an axis for samples starts anew with all of them.
    """

    def anew(now, first):
        samples = [axis for axis, size in enumerate(now.shape) if size == len(flags)][:1]
        others = [axis for axis in range(now.ndim) if axis not in samples]
        flag = jnp.expand_dims(flags if samples else flags.all(), others)
        return jnp.where(flag, first, now)

    return jax.tree.map(anew, states, start)


def snap_n(model, params, xs, loss, n, mask=None, reset=None, window=None):
    """SnAp-n of one layer: eps' = P (J eps + F), P what a parameter reaches within n steps.

    gradient = sum_t signal . eps' + late . eps + direct

    With windows, it is BPTT in each window, and late . eps of the states before it.
    """
    facts_of = jax.jit(functools.partial(_facts_of_step, model, loss, "kept"))
    theta, unravel = ravel_pytree(params)
    samples, total = [], np.zeros(theta.size)
    for b in range(xs.shape[1]):
        states, steps = model.start(), []
        for t, x in enumerate(xs[:, b]):
            is_new = t == 0 or (reset is not None and reset[t, b])
            states = model.start() if is_new else states
            facts = facts_of(params, states, x, t, b)
            if window:
                given = (xs, t, b, window, mask, reset)
                facts["direct"], facts["late"] = _within(model, loss, params, states, *given)
                facts["signal"], weight = 0 * facts["signal"], float(t % window == 0)
            else:
                weight = 1.0 if mask is None else mask[t]
            steps.append((is_new, weight, facts))
            states = facts["states"]
        samples.append(steps)
    every = [facts for steps in samples for _, _, facts in steps]
    rng = np.random.default_rng(0)  # in the sequence itself, a unit may never spike
    for _ in range(50):
        states = jax.tree.map(lambda value: rng.normal(size=value.shape), model.start())
        every.append(facts_of(params, states, rng.normal(size=xs[0, 0].shape), 0, 0))
    J, F = (np.any([np.abs(f[kind]) > 1e-14 for f in every], 0) for kind in ("D", "F"))
    pattern = F
    for _ in range(n - 1):
        pattern = F | (J @ pattern)
    for steps in samples:
        eps = 0 * F
        for is_new, weight, facts in steps:
            before = 0 * F if is_new else eps
            eps = pattern * (facts["D"] @ before + facts["F"])
            late, direct = (ravel_pytree(facts[kind])[0] for kind in ("late", "direct"))
            total = total + weight * (facts["signal"] @ eps + late @ before + direct)
    return unravel(jnp.asarray(total))


# --- rules with a filter of their inputs ----------------------------------------------------------


def es_d_rtrl(model, params, xs, loss, alpha, mask=None, reset=None, window=None):
    """ES-D-RTRL, for each sample:

    eps_x = alpha eps_x + x        eps_f = alpha D eps_f + (1 - alpha) Df
    gradient = sum_t direct + signal . eps_f / (1 - alpha^t), the latter pulled back through
               y = op(eps_x, params)

    With windows, direct is BPTT in a window, and signal the derivative by the states before it.
    """

    def advance(eps_f, D, Df):
        return [alpha * D @ e + (1 - alpha) * f for e, f in zip(eps_f, Df, strict=True)]

    def read(eps_f, steps):
        return [e / (1 - alpha**steps) for e in eps_f]

    return _filtered(model, params, xs, loss, alpha, advance, read, mask, reset, window)


def ottt(model, params, xs, loss, decay, mask=None, reset=None, window=None):
    """OTTT: eps_x = decay eps_x + x; gradient = sum_t direct + signal . Df, pulled back alike."""
    return _filtered(
        model, params, xs, loss, decay, lambda _, D, Df: Df, lambda f, _: f, mask, reset, window
    )


def _filtered(model, params, xs, loss, decay, advance, read, mask, reset, window):
    mask = np.ones(len(xs)) if mask is None else mask
    reset = np.zeros(xs.shape[:2], bool) if reset is None else reset
    total = jax.tree.map(np.zeros_like, params)
    facts_of = jax.jit(functools.partial(_facts_of_step, model, loss, "cut"))
    pull = jax.jit(functools.partial(_pull_back, model))
    for b in range(xs.shape[1]):
        states, old = model.start(), None
        for t, x in enumerate(xs[:, b]):
            if reset[t, b]:
                states, old = model.start(), None
            facts = facts_of(params, states, x, t, b)
            D, Df, inputs = facts["D"], facts["Df"], facts["inputs"]
            if old is None:
                zeros = [jnp.zeros_like(i) if i is not None else None for i in inputs]
                old = zeros, [jnp.zeros_like(f) for f in Df], 0
            eps_x = [i if i is None else decay * e + i for e, i in zip(old[0], inputs, strict=True)]
            new = eps_x, advance(old[1], D, Df), old[2] + 1
            weight, pairs = mask[t], ((facts["signal"], new), (facts["late"], old))
            found = facts["direct"]
            if window:
                found, late = _within(model, loss, params, states, xs, t, b, window, mask, reset)
                weight, pairs = float(t % window == 0), ((late, old),)
            for signal, (eps, f, steps) in pairs:
                if steps:
                    factors = [signal @ e for e in read(f, steps)]
                    past = pull(params, states, x, eps, factors)
                    found = jax.tree.map(jnp.add, found, past)
            if weight:
                total = jax.tree.map(lambda a, g, w=weight: a + w * g, total, found)
            states, old = facts["states"], new
    return total


def _within(model, loss, params, states, xs, start, b, window, mask, reset):
    """BPTT in a window of one sample, by parameters and by the states before it."""

    def total(params, S):
        states, value = with_S(S), 0.0
        for t in range(start, min(start + window, len(xs))):
            states = model.start() if reset[t, b] and t > start else states
            states, y = model.step(Plain(), params, states, xs[t, b])
            value += mask[t] * loss(t, y, b)
        return value

    S, with_S = ravel_pytree(states)
    return jax.grad(total, (0, 1))(params, S)


# --- parameters that change in a stream -----------------------------------------------------------


def descend(model, params, xs, loss, rate):
    """Parameters and losses of a stream in which D-RTRL descends after every step.

    eps' = D eps + F at the parameters of each step
    gradient = signal . eps' + late . eps + direct
    """
    facts_of = jax.jit(functools.partial(_facts_of_step, model, loss, "cut"))
    batch, losses = range(xs.shape[1]), []
    states, eps = [model.start() for _ in batch], [0.0 for _ in batch]
    for t, x in enumerate(xs):
        theta, unravel = ravel_pytree(params)
        gradient, value = 0.0, 0.0
        for b in batch:
            value += loss(t, model.step(Plain(), params, states[b], x[b])[1], b)
            facts = facts_of(params, states[b], x[b], t, b)
            before = eps[b] if t else 0 * facts["F"]
            eps[b], states[b] = facts["D"] @ before + facts["F"], facts["states"]
            direct = ravel_pytree(facts["direct"])[0]
            gradient = gradient + facts["signal"] @ eps[b] + facts["late"] @ before + direct
        params = unravel(theta - rate * gradient)
        losses.append(value)
    return params, np.array(losses)


def _facts_of_step(model, loss, mixing, params, states, x, t, b):
    """One step of one sample, hidden states as vectors.

    D = dS'/dS, F = dS'/dparams and Df = dS'/dy, products cut or kept; signal = dL/dS' within the
    step, of a layer also by way of those above it; late = dL/dS, S' held fixed; direct =
    dL/dparams, S and S' held fixed.
    """
    ops = Plain()
    new, _ = model.by_layer(ops, params, states, x, mixing)
    zeros = [jnp.zeros_like(y) for y in ops.outputs]
    S, with_S = ravel_pytree(states)
    theta, with_theta = ravel_pytree(params)

    def carried(theta, S, taps):
        ops, p = Plain(taps=taps), with_theta(theta)
        return ravel_pytree(model.by_layer(ops, p, with_S(S), x, mixing)[0])[0]

    def loss_of(params, S, added):
        def seen(name, value):
            return stop(value) + added[name]

        return loss(t, model.by_layer(Plain(), params, with_S(S), x, mixing, seen)[1], b)

    F, D, Df = jax.jacrev(carried, (0, 1, 2))(theta, S, zeros)
    none = jax.tree.map(jnp.zeros_like, states)
    direct, late, signal = jax.grad(loss_of, (0, 1, 2))(params, S, none)
    Df = [f.reshape(S.size, -1) for f in Df]
    own = {"signal": ravel_pytree(signal)[0], "late": late, "direct": direct}
    return {**own, "D": D, "F": F, "Df": Df, "inputs": ops.inputs, "states": new}


def _pull_back(model, params, states, x, inputs, factors):
    """Gradient of the parameters, given that of all outputs, had the operations these inputs."""

    def outputs(params):
        ops = Plain(inputs=inputs)
        model.by_layer(ops, params, states, x, "cut")
        return ops.outputs

    found, pull = jax.vjp(outputs, params)
    return pull([f.reshape(y.shape) for f, y in zip(factors, found, strict=True)])[0]


# --- rules with random signs ----------------------------------------------------------------------


def uoro(model, params, xs, loss, signs, mask=None, reset=None):
    """UORO; signs: (time, samples, n), states by name. For each sample, eps ~ s (x) t:

    s' = r0 J s + r1 nu        t' = t / r0 + nu F / r1        r0, r1 balance the norms
    """
    theta, unravel = ravel_pytree(params)

    def start(facts):
        return np.zeros(len(facts["J"])), np.zeros(theta.size)

    def past(facts, traces):
        s, t = traces
        return (facts["mu"] @ s) * t

    def advance(facts, traces, nu):
        s, t = traces
        pushed, entering = facts["J"] @ s, nu @ facts["F"]
        (r0, r0_inverse), (r1, r1_inverse) = balance(t, pushed), balance(entering, nu)
        return r0 * pushed + r1 * nu, r0_inverse * t + r1_inverse * entering

    return unravel(_random(model, params, xs, loss, signs, start, past, advance, mask, reset))


def kf_rtrl(model, params, xs, loss, signs, mask=None, reset=None):
    """KF-RTRL of products without a bias; signs: (time, samples, products). eps ~ A (x) u, each:

    u' = p0 u + p1 nu x        A' = J A / p0 + nu Df / p1        p0, p1 balance the norms
    An operation without an input has u = 1 and A' = J A + Df.
    """
    _, unravel = ravel_pytree(params)
    pull = jax.jit(functools.partial(_pull_back_of_step, model))

    def start(facts):
        return [
            (None if x is None else np.zeros(x.shape), np.zeros(f.shape))
            for x, f in zip(facts["inputs"], facts["Df"], strict=True)
        ]

    def past(facts, traces):
        us, factors = zip(*((u, facts["mu"] @ A) for u, A in traces), strict=True)
        return np.asarray(pull(params, facts["before"], facts["x"], list(us), list(factors)))

    def advance(facts, traces, nus):
        nus, after = iter(nus), []
        for (u, A), x, f in zip(traces, facts["inputs"], facts["Df"], strict=True):
            pushed = facts["J"] @ A
            if x is None:
                after.append((None, pushed + f))
                continue
            nu = next(nus)
            (p0, p0_inverse), (p1, p1_inverse) = balance(pushed, u), balance(f, x)
            after.append((p0 * u + p1 * nu * x, p0_inverse * pushed + p1_inverse * nu * f))
        return after

    return unravel(_random(model, params, xs, loss, signs, start, past, advance, mask, reset))


def _random(model, params, xs, loss, signs, start, past, advance, mask, reset):
    facts_of, total = jax.jit(functools.partial(_facts_of_whole, model, loss)), 0.0
    for b in range(xs.shape[1]):
        states, traces = model.start(), None
        for t, x in enumerate(xs[:, b]):
            if reset is not None and reset[t, b]:
                states, traces = model.start(), None
            facts = facts_of(params, states, x, t, b)
            facts = {**jax.tree.map(np.asarray, facts), "before": states, "x": x}
            traces = start(facts) if traces is None else traces
            found = facts["direct"] + past(facts, traces)
            total = total + (1.0 if mask is None else mask[t]) * found
            traces, states = advance(facts, traces, signs[t, b]), facts["states"]
    return total


def _facts_of_whole(model, loss, params, states, x, t, b):
    """J = dS'/dS, F = dS'/dparams, Df = dS'/dy; mu = dL/dS; direct = dL/dparams, S held fixed."""
    theta, with_theta = ravel_pytree(params)
    S, with_S = ravel_pytree(states)
    ops = Plain()
    new, _ = model.step(ops, params, states, x)

    def after(theta, S, taps):
        ops = Plain(taps=taps)
        return ravel_pytree(model.step(ops, with_theta(theta), with_S(S), x)[0])[0]

    def loss_of(theta, S):
        return loss(t, model.step(Plain(), with_theta(theta), with_S(S), x)[1], b)

    F, J, Df = jax.jacrev(after, (0, 1, 2))(theta, S, [jnp.zeros_like(y) for y in ops.outputs])
    direct, mu = jax.grad(loss_of, (0, 1))(theta, S)
    Df = [f.reshape(S.size, -1) for f in Df]
    own = {"J": J, "F": F, "Df": Df, "mu": mu, "direct": direct}
    return {**own, "inputs": ops.inputs, "states": new}


def _pull_back_of_step(model, params, states, x, inputs, factors):
    """As `_pull_back`, of the whole step, to the vector of all parameters."""
    theta, with_theta = ravel_pytree(params)

    def outputs(theta):
        ops = Plain(inputs=inputs)
        model.step(ops, with_theta(theta), states, x)
        return ops.outputs

    found, pull = jax.vjp(outputs, theta)
    return pull([f.reshape(y.shape) for f, y in zip(factors, found, strict=True)])[0]


def balance(above, below):
    """sqrt(|above| / |below|) and its inverse; 0 and 0 where there is nothing to balance."""
    above, below = np.linalg.norm(above), np.linalg.norm(below)
    if above == 0 or below == 0:
        return 0.0, 0.0
    return np.sqrt(above / below), np.sqrt(below / above)


# --- comparison -----------------------------------------------------------------------------------


def assert_close(found, expected, tolerance, context=""):
    """Every array agrees, relative to its largest entry (to that of all, where it is zero)."""
    found, expected = map(by_name, (found, expected))
    assert found.keys() == expected.keys(), f"{context}: {sorted(found)} and {sorted(expected)}"
    overall = max(np.abs(v).max() for v in expected.values())
    assert overall > 0, f"{context}: all expected numbers are zero"
    for name, e in expected.items():
        assert found[name].shape == e.shape, f"{context}: {name} has shape {found[name].shape}"
        off = np.abs(found[name] - e).max() / (np.abs(e).max() or overall)
        assert off <= tolerance, f"{context}: {name} is off by {off:.1e}, relative"


def by_name(tree):
    """Leaves of a dict, or of dicts in it."""
    leaves = jax.tree_util.tree_leaves_with_path(dict(tree))
    return {jax.tree_util.keystr(path): np.asarray(leaf, np.float64) for path, leaf in leaves}
