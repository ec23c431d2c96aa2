"""Fit the synapses of a worm's connectome to the activity of its neurons, from a stream.

The 302 neurons of C. elegans with their chemical synapses and gap junctions (Cook et al. 2019) are
a leaky rate network. Neurons with GABA alone inhibit, all others excite (Wang et al. 2024). Each
synapse and each gap junction has one gain that learns. A hidden copy with other gains produces the
activity, driven by noise into every neuron. The network learns online to predict the next step of
it, and is pulled to it afterwards: by D_RTRL in windows of 5 steps, and by exact RTRL, whose trace
has 302 numbers per gain, from a twentieth of the stream.

Both predict well. Of the gains, only some can be known: a synapse that is weak beside the others of
its neuron, or whose sender fires with other senders, changes nothing that is seen. The quarter of
the gains of which the activity tells most is found, and the others stay near their start.

    pip install cect
    python docs/examples/connectome.py    # a minute on two cores
"""

import argparse
import time

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
import saiunit as u
from matplotlib.figure import Figure

import braintrace

LEAK, PULL, WINDOW = 0.2, 0.9, 5
# Rule, window, and the part of the stream.
METHODS = {"D_RTRL, windows of 5": ("d_rtrl", WINDOW, 1), "RTRL": ("rtrl", None, 20)}


# --- the connectome ----------------------------------------------------------------------


def load_connectome():
    """Return signed chemical synapses and gap junctions, both ``(from, to)``."""
    from cect.Cells import PREFERRED_HERM_NEURON_NAMES
    from cect.readers import Cook2019HermReader, Wang2024HermReader

    neurons = list(PREFERRED_HERM_NEURON_NAMES)
    data = Cook2019HermReader.get_instance(from_cache=True)
    places = [data.nodes.index(name) for name in neurons]
    chemical, gaps = (
        np.asarray(data.connections[kind])[np.ix_(places, places)]
        for kind in ("Generic_CS", "Generic_GJ")
    )
    transmitters = Wang2024HermReader.get_instance(from_cache=True)

    def senders(name):
        sends = np.asarray(transmitters.connections[name]).any(axis=1)
        return {
            node for node, is_sender in zip(transmitters.nodes, sends, strict=True) if is_sender
        }

    inhibits = senders("GABA") - senders("Acetylcholine") - senders("Glutamate")
    signs = np.where([name in inhibits for name in neurons], -1.0, 1.0)
    np.fill_diagonal(gaps, 0)
    return signs[:, None] * chemical, np.minimum(gaps, gaps.T)


class Worm(brainstate.nn.Module):
    """Leaky rates; the log gains of synapses and gap junctions are parameters."""

    def __init__(self, chemical, gaps, rng=None):
        super().__init__()
        draw = np.zeros if rng is None else (lambda size: 0.5 * rng.normal(size=size))
        strength = np.sqrt((chemical**2).sum(axis=0) + 1)
        self.synapses = u.sparse.CSR.fromdense(jnp.asarray(1.5 * chemical / strength))
        self.gain = brainstate.ParamState(jnp.asarray(draw(self.synapses.data.size), jnp.float32))
        # Each junction has two entries, and lowers both of its diagonal entries.
        self.pairs = np.argwhere(np.triu(gaps))
        a, b = self.pairs.T
        self.conductance = jnp.asarray(0.5 * gaps[a, b] / max(gaps.sum(axis=0)))
        self.junction_gain = brainstate.ParamState(jnp.asarray(draw(len(a)), jnp.float32))
        rows, columns = np.concatenate([a, b, a, b]), np.concatenate([b, a, a, b])
        shape = gaps.shape
        self.junctions = u.sparse.COO((jnp.ones(rows.size), rows, columns), shape=shape)

    def init_state(self, batch_size=None, **_):
        batch = () if batch_size is None else (batch_size,)
        self.v = brainstate.HiddenState(jnp.zeros((*batch, self.synapses.shape[0])))

    def update(self, x, recorded=None):
        """Return the next activity ``(batch, neurons)``, and continue near the recorded one."""
        v, weights = self.v.value, self.synapses.data

        def entries(gain):
            g = jnp.exp(gain) * self.conductance
            return jnp.concatenate([g, g, -g, -g])

        chemical = braintrace.sparse_matmul(
            jnp.tanh(v),
            self.gain.value,
            sparse_mat=self.synapses,
            weight_fn=lambda gain: jnp.exp(gain) * weights,
        )
        electrical = braintrace.sparse_matmul(
            v, self.junction_gain.value, sparse_mat=self.junctions, weight_fn=entries
        )
        v = v + LEAK * (chemical + x - v) + electrical
        self.v.value = v if recorded is None else v + PULL * (recorded - v)
        return v


# --- learning ----------------------------------------------------------------------------


def make_stream(connectome, steps, rng):
    """Return the inputs, the activity of the hidden copy, and the copy."""
    hidden = Worm(*connectome, rng)
    xs = rng.normal(size=(steps, 1, len(connectome[0]))).astype(np.float32)
    for t in range(1, steps):
        xs[t] = 0.95 * xs[t - 1] + 0.3 * xs[t]
    brainstate.nn.init_all_states(hidden, batch_size=1)
    activity = brainstate.transform.for_loop(hidden, jnp.asarray(xs))
    return xs, np.asarray(activity), hidden


def gains_of(worm):
    return np.concatenate([np.asarray(worm.gain.value), np.asarray(worm.junction_gain.value)])


def information(worm, activity):
    """Return what an activity ``(time, neurons)`` tells of each gain, all others unknown as well.

    It is the inverse of the variance of a linear fit of the gains of one neuron.
    """
    matrix, (a, b), gains = worm.synapses, worm.pairs.T, gains_of(worm)
    count, lengths = len(matrix.data), np.diff(matrix.indptr)
    senders = np.repeat(np.arange(len(lengths)), lengths)
    chemical = LEAK * np.asarray(matrix.data) * np.exp(gains[:count])
    between = np.asarray(worm.conductance) * np.exp(gains[count:])
    between = between * (activity[:, a] - activity[:, b])
    effects = [chemical * np.tanh(activity[:, senders]), -between, between]
    effects, receivers = np.concatenate(effects, 1), np.concatenate([matrix.indices, a, b])
    numbers = np.concatenate([np.arange(count), *2 * [count + np.arange(len(a))]])
    found = np.zeros(len(gains))
    for neuron in np.unique(receivers):
        own = np.flatnonzero(receivers == neuron)
        gram = effects[:, own].T @ effects[:, own] + 1e-9 * np.eye(len(own))
        np.add.at(found, numbers[own], 1 / np.diag(np.linalg.inv(gram)))
    return found


def learn(connectome, rule, window, xs, activity, rate):
    """Return the errors of a stream, the predicted activity, the gains, and the seconds."""
    worm = Worm(*connectome)
    learner = braintrace.compile(worm, rule, xs[0], activity[0], batch_size=1, window=window)

    def step_fn(x, target):
        predicted = learner(x, target)
        return jnp.mean((predicted - target) ** 2), predicted

    start = time.perf_counter()
    errors, predicted = learner.etrace_online(
        xs,
        activity,
        step_fn=step_fn,
        optimizer=optax.adam(optax.cosine_decay_schedule(rate, len(xs) // WINDOW)),
        every=WINDOW,
        has_aux=True,
    )
    jax.block_until_ready(errors)
    seconds = time.perf_counter() - start
    return np.asarray(errors), np.asarray(predicted), gains_of(worm), seconds


# --- figure ------------------------------------------------------------------------------


def draw(activity, gains, is_known, results, path):
    figure = Figure(figsize=(11, 6), layout="constrained")
    grid, scale = figure.subplots(2, 3), np.var(activity)
    for (name, (errors, predicted, found, _)), axes in zip(results.items(), grid, strict=True):
        error, fit, scatter = axes
        blocks = errors[: len(errors) // 50 * 50].reshape(-1, 50).mean(axis=1) / scale
        error.semilogy(50 * np.arange(len(blocks)), blocks)
        error.set(title=name, xlabel="step", ylabel="error / variance")
        last = slice(len(errors) - 200, len(errors))
        for offset, neuron in enumerate(np.argsort(-activity.std(axis=0)[0])[10:60:10]):
            fit.plot(activity[last, 0, neuron] + 2 * offset, "0.7", lw=3)
            fit.plot(predicted[last, 0, neuron] + 2 * offset, "C0", lw=1)
        fit.set(title="last 200 steps of five neurons", yticks=[])
        for inside, color, part in ((~is_known, "0.7", "others"), (is_known, "C0", "best quarter")):
            label = f"{part}: {correlation(gains[inside], found[inside]):.2f}"
            scatter.plot(gains[inside], found[inside], ".", color=color, ms=3, label=label)
        scatter.set(title="gains", xlabel="hidden log gain", ylabel="learned log gain")
        scatter.legend(title="correlation", frameon=False, fontsize=8)
    figure.savefig(path, dpi=110)


def correlation(first, second):
    return np.corrcoef(first, second)[0, 1]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--rate", type=float, default=0.02)
    parser.add_argument("--out", default="connectome.png", help="file of the figure")
    options = parser.parse_args()
    connectome = load_connectome()
    synapses, junctions = (
        np.count_nonzero(part) for part in (connectome[0], np.triu(connectome[1]))
    )
    print(f"{len(connectome[0])} neurons, {synapses} synapses, {junctions} gap junctions")
    xs, activity, hidden = make_stream(connectome, options.steps, np.random.default_rng(0))
    gains, known = gains_of(hidden), information(hidden, activity[:, 0])
    is_known, results = known > np.quantile(known, 0.75), {}
    for name, (rule, window, part) in METHODS.items():
        steps = options.steps // part
        results[name] = errors, _, found, seconds = learn(
            connectome, rule, window, xs[:steps], activity[:steps], options.rate
        )
        error = errors[-steps // 10 :].mean() / np.var(activity)
        print(
            f"{name:22} error {error:.1e}  gains {correlation(gains, found):.2f}, of the best "
            f"quarter {correlation(gains[is_known], found[is_known]):.2f}  "
            f"{1e3 * seconds / steps:.1f} ms per step"
        )
    draw(activity, gains, is_known, results, options.out)


if __name__ == "__main__":
    main()
