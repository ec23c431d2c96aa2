"""Fit the synapses of a worm's connectome to the activity of its neurons, from a stream.

The 302 neurons of C. elegans with their chemical synapses and gap junctions (Cook et al. 2019) are
a leaky rate network. Neurons with GABA alone inhibit, all others excite (Wang et al. 2024). Each
synapse and each gap junction has one gain that learns. A hidden copy with other gains produces the
activity, driven by noise into the sensory neurons. The network learns online to follow it: by
D_RTRL in windows of 20 steps, and by exact RTRL, whose trace has 302 numbers per gain.

    pip install cect
    python docs/examples/connectome.py                 # a minute on two cores
    python docs/examples/connectome.py --steps 10000   # the gains as well
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

LEAK, WINDOW = 0.2, 20
METHODS = {"D_RTRL, windows of 20": ("d_rtrl", WINDOW), "RTRL": ("rtrl", None)}


# --- the connectome ----------------------------------------------------------------------


def load_connectome():
    """Return signed chemical synapses, gap junctions (both ``(from, to)``), and sensory neurons."""
    from cect.Cells import PREFERRED_HERM_NEURON_NAMES, SENSORY_NEURONS_COOK
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
    sensory = np.array([name in SENSORY_NEURONS_COOK for name in neurons])
    return signs[:, None] * chemical, np.minimum(gaps, gaps.T), sensory


class Worm(brainstate.nn.Module):
    """Leaky rates; the log gains of synapses and gap junctions are parameters."""

    def __init__(self, chemical, gaps, sensory, rng=None):
        super().__init__()
        draw = np.zeros if rng is None else (lambda size: 0.5 * rng.normal(size=size))
        self.sensory = sensory
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
        self.v = brainstate.HiddenState(jnp.zeros((*batch, len(self.sensory))))

    def update(self, x):
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
        drive = chemical + jnp.zeros_like(v).at[..., np.flatnonzero(self.sensory)].set(x)
        self.v.value = v + LEAK * (drive - v) + electrical
        return self.v.value


# --- learning ----------------------------------------------------------------------------


def make_stream(connectome, steps, rng):
    """Return the inputs of the sensory neurons, the activity of the hidden copy, and its gains."""
    hidden = Worm(*connectome, rng)
    xs = rng.normal(size=(steps, 1, connectome[2].sum())).astype(np.float32)
    for t in range(1, steps):
        xs[t] = 0.95 * xs[t - 1] + 0.3 * xs[t]
    brainstate.nn.init_all_states(hidden, batch_size=1)
    activity = brainstate.transform.for_loop(hidden, jnp.asarray(xs))
    return xs, np.asarray(activity), gains_of(hidden)


def gains_of(worm):
    return np.concatenate([np.asarray(worm.gain.value), np.asarray(worm.junction_gain.value)])


def learn(connectome, rule, window, stream, rate):
    """Return the errors of a stream, the last activity, the gains and the seconds per step."""
    xs, activity, _ = stream
    worm = Worm(*connectome)
    learner = braintrace.compile(worm, rule, xs[0], batch_size=1, window=window)

    def step_fn(x, target):
        predicted = learner(x)
        return jnp.mean((predicted - target) ** 2), predicted

    start = time.perf_counter()
    errors, predicted = learner.etrace_online(
        xs, activity, step_fn=step_fn, optimizer=optax.adam(rate), every=WINDOW, has_aux=True
    )
    jax.block_until_ready(errors)
    seconds = (time.perf_counter() - start) / len(xs)
    return np.asarray(errors), np.asarray(predicted), gains_of(worm), seconds


# --- figure ------------------------------------------------------------------------------


def draw(stream, results, path):
    figure = Figure(figsize=(11, 6), layout="constrained")
    grid = figure.subplots(2, 3)
    (_, activity, gains), scale = stream, np.var(stream[1])
    for (name, (errors, predicted, found, _)), axes in zip(results.items(), grid, strict=True):
        error, fit, scatter = axes
        blocks = errors[: len(errors) // 50 * 50].reshape(-1, 50).mean(axis=1) / scale
        error.semilogy(50 * np.arange(len(blocks)), blocks)
        error.set(title=name, xlabel="step", ylabel="error / variance")
        for offset, neuron in enumerate(np.argsort(-activity.std(axis=0)[0])[10:60:10]):
            fit.plot(activity[-200:, 0, neuron] + 2 * offset, "0.7", lw=3)
            fit.plot(predicted[-200:, 0, neuron] + 2 * offset, "C0", lw=1)
        fit.set(title="last 200 steps of five neurons", yticks=[])
        scatter.plot(gains, found, ".", ms=2)
        scatter.set(
            title=f"correlation {np.corrcoef(gains, found)[0, 1]:.2f}", xlabel="hidden log gain"
        )
        scatter.set_ylabel("learned log gain")
    figure.savefig(path, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--rate", type=float, default=0.03)
    parser.add_argument("--out", default="connectome.png", help="file of the figure")
    options = parser.parse_args()
    connectome = load_connectome()
    synapses, junctions = (
        np.count_nonzero(part) for part in (connectome[0], np.triu(connectome[1]))
    )
    print(f"{len(connectome[2])} neurons, {synapses} synapses, {junctions} gap junctions")
    stream = make_stream(connectome, options.steps, np.random.default_rng(0))
    results, last = {}, slice(-len(stream[0]) // 10, None)
    for name, (rule, window) in METHODS.items():
        results[name] = errors, _, found, seconds = learn(
            connectome, rule, window, stream, options.rate
        )
        error = errors[last].mean() / np.var(stream[1][last])
        correlation = np.corrcoef(stream[2], found)[0, 1]
        print(
            f"{name:22} error {error:.4f}  gains {correlation:.2f}  {1e3 * seconds:.2f} ms per step"
        )
    draw(stream, results, options.out)


if __name__ == "__main__":
    main()
