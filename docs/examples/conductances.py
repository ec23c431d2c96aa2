"""Train a conductance-based network of excitatory and inhibitory neurons to remember a stimulus.

One of two groups of inputs fires for 20 ms, and 30 ms later the network has to say which. Synapses
are conductances in nS with reversal potentials of 0 mV (excitation) and -80 mV (inhibition), and
membranes are in mV: a current is g (E - V), in pA. Excitatory neurons adapt, which holds the
memory. No weight changes its sign.

    pip install -e ".[examples]"
    python docs/examples/conductances.py    12 seconds of processor time
"""

import argparse

import brainstate
import jax.numpy as jnp
import numpy as np
import optax
import saiunit as u

import braintrace
from braintrace import nn

INPUTS, EXCITATORY, INHIBITORY = 40, 80, 20
NEURONS, BATCH = EXCITATORY + INHIBITORY, 32
CUE, DELAY, ANSWER = 20, 30, 10
STEPS = CUE + DELAY + ANSWER
MEMBRANE = {"V_rest": -65.0 * u.mV, "V_th": -50.0 * u.mV, "V_reset": -65.0 * u.mV}
MEMBRANE |= {"V_initializer": -65.0 * u.mV, "R": 100.0 * u.Mohm}


def weights(rng, inputs, scale):
    """Return positive conductances in nS from some neurons to all neurons."""
    value = np.abs(rng.normal(0.0, scale, (inputs, NEURONS))) / np.sqrt(inputs)
    return nn.Linear(inputs, NEURONS, w_init=value * u.nS, b_init=None, w_sign=np.ones(inputs))


class Network(brainstate.nn.Module):
    """Adaptive excitatory and fast inhibitory neurons with two kinds of synapses."""

    def __init__(self, seed):
        super().__init__()
        rng = np.random.default_rng(seed)
        from_outside = {
            "input": weights(rng, INPUTS, 12.0),
            "network": weights(rng, EXCITATORY, 6.0),
        }
        from_inside = {"network": weights(rng, INHIBITORY, 12.0)}
        self.ampa = nn.Projection(from_outside, nn.Expon(NEURONS, 5.0 * u.ms, 0.0 * u.nS))
        self.gaba = nn.Projection(from_inside, nn.Expon(NEURONS, 10.0 * u.ms, 0.0 * u.nS))
        self.excite, self.inhibit = nn.COBA(E=0.0 * u.mV), nn.COBA(E=-80.0 * u.mV)
        slow = {"tau": 20.0 * u.ms, "tau_a": 100.0 * u.ms, "beta": 0.5 * u.mV}
        self.excitatory = nn.ALIF(EXCITATORY, **slow, **MEMBRANE)
        self.inhibitory = nn.LIF(INHIBITORY, tau=10.0 * u.ms, **MEMBRANE)
        self.readout = nn.LeakyRateReadout(EXCITATORY, 2, tau=20.0 * u.ms)

    def update(self, x):
        """Advance by 1 ms, given the spikes of the inputs; return the readout."""
        sent = {"input": x, "network": self.excitatory.get_spike()}
        g_excite = self.ampa(sent)
        g_inhibit = self.gaba({"network": self.inhibitory.get_spike()})
        V = u.math.concatenate([self.excitatory.V.value, self.inhibitory.V.value], axis=-1)
        current = self.excite(g_excite, V) + self.inhibit(g_inhibit, V)
        spikes = self.excitatory(current[..., :EXCITATORY])
        self.inhibitory(current[..., EXCITATORY:])
        return self.readout(spikes)


def trials(rng):
    """Return spikes ``(steps, batch, inputs)`` and which group fired, one of two."""
    labels = rng.integers(0, 2, BATCH)
    group = np.arange(INPUTS) // (INPUTS // 2)
    is_cue = np.arange(STEPS)[:, None, None] < CUE
    rate = np.where(is_cue & (group == labels[:, None]), 0.3, 0.01)
    return jnp.asarray(rng.random((STEPS, BATCH, INPUTS)) < rate, jnp.float32), jnp.asarray(labels)


def train(rule, updates=60, seed=0):
    """Return the accuracy on new trials, before and after training."""
    rng = np.random.default_rng(seed)
    with brainstate.environ.context(dt=1.0 * u.ms):
        model = Network(seed)
        xs, _ = trials(rng)
        learner = braintrace.compile(model, rule, xs[0], batch_size=BATCH)
        answers = jnp.asarray(np.arange(STEPS) >= STEPS - ANSWER, jnp.float32)
        parameters = model.states(brainstate.ParamState)
        values = {path: state.value for path, state in parameters.items()}
        optimizer = optax.adam(2e-2)
        moments = optimizer.init(values)

        def loss(x, labels):
            logits = learner(x)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        def accuracy():
            found = []
            for _ in range(4):
                xs, labels = trials(rng)
                learner.reset_state()
                outputs = learner.predict(xs)[-ANSWER:].mean(0)
                found.append(float((outputs.argmax(-1) == labels).mean()))
            return np.mean(found)

        before = accuracy()
        for _ in range(updates):
            xs, labels = trials(rng)
            learner.reset_state()
            labels = jnp.broadcast_to(labels, (STEPS, BATCH))
            gradients = learner.etrace_grad(xs, labels, step_fn=loss, mask=answers)
            changes, moments = optimizer.update(gradients, moments)
            values = optax.apply_updates(values, changes)
            for path, state in parameters.items():
                state.value = values[path]
        return before, accuracy()


def main(arguments=None):
    """Run the example."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=60)
    options = parser.parse_args(arguments)
    for rule in ("d_rtrl", "immediate"):
        before, after = train(rule, options.updates)
        print(f"{rule}: {before:.2f} of new trials correct before training, {after:.2f} after")


if __name__ == "__main__":
    main()
