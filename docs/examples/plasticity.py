"""Draw the curves of pair and triplet STDP, and learn a choice from delayed rewards by R-STDP.

Left: the change of a weight by one pair of spikes. Middle: the change by sixty pairs; as in cortex,
the triplet rule strengthens synapses if pairs are frequent. Right: one of two groups of inputs
fires for 20 ms. After 10 ms of silence a reward of 1 reaches all synapses if the neuron of this
group has fired more often than the other one, or -1 if less often. After 60 trials, R-STDP is right
in nearly all cases.

    python docs/examples/plasticity.py    # ten seconds on two cores; writes plasticity.png
"""

import argparse

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure

import braintrace
from braintrace import nn

LAGS = np.arange(-50, 51, 2)  # ms, one step each
FREQUENCIES, PAIRS, LAG = np.array([10, 20, 30, 40, 50]), 60, 10
TRIALS, STEPS, BATCH, INPUTS = 60, 30, 16, 20
RATE = 3.0


# --- curves of pairs and triplets --------------------------------------------------------


class Synapse(brainstate.nn.Module):
    """A neuron that a second input makes fire at will."""

    def __init__(self):
        super().__init__()
        start = jnp.array([[0.0], [2.0]])
        self.synapses = nn.Linear(2, 1, w_init=start, b_init=None)
        self.neuron = nn.Leaky(1, beta=0.0)

    def update(self, x):
        self.neuron(self.synapses(x))
        return self.neuron.mem.value


def change_of(rule, spikes):
    """Return the change of the weight of the first input by the spikes of both, one sample each."""
    learner = braintrace.compile(Synapse(), rule, spikes[0][0], batch_size=1)

    def step_fn(x):
        return braintrace.three_factor_loss(learner(x), -1.0)

    changes = []
    for xs in spikes:
        learner.reset_state()
        gradients = learner.etrace_grad(xs, step_fn=step_fn, reduction="sum")
        changes.append(-float(gradients[("synapses", "weight")]["weight"][0, 0]))
    return np.array(changes)


def pairs_of_spikes(times, lags, steps):
    """Return spikes ``(lags, steps, 1, 2)`` at some times, and later by each lag."""
    spikes = np.zeros((len(lags), steps, 1, 2), np.float32)
    for sample, (own, lag) in enumerate(zip(times, lags, strict=True)):
        spikes[sample, own, 0, 0] = spikes[sample, own + lag, 0, 1] = 1.0
    return spikes


def frequency_curve(rule, lag):
    """Return the change by pairs of each frequency."""
    times = [20 + np.arange(PAIRS) * (1000 // f) for f in FREQUENCIES]
    longest = 40 + PAIRS * (1000 // FREQUENCIES.min())
    return change_of(rule, pairs_of_spikes(times, [lag] * len(times), longest))


# --- a choice by delayed reward ----------------------------------------------------------


class Choice(brainstate.nn.Module):
    """Two neurons with noise, and the number of their spikes."""

    def __init__(self):
        super().__init__()
        self.synapses = nn.Linear(INPUTS, 2, w_init=jnp.full((INPUTS, 2), 0.15), b_init=None)
        self.neurons = nn.Leaky(2, beta=0.9)

    def init_state(self, batch_size):
        self.counts = brainstate.ShortTermState(jnp.zeros((batch_size, 2)))

    def update(self, x):
        noise = 0.2 * brainstate.random.randn(len(x), 2)
        spikes = self.neurons(self.synapses(x) + noise)
        self.counts.value += jax.lax.stop_gradient(spikes)
        return self.counts.value, self.neurons.mem.value


def make_trials(rng):
    """Return input spikes, the groups that fire, and flags of first and last steps."""
    groups = rng.integers(2, size=(TRIALS, BATCH))
    fires = (np.arange(INPUTS) * 2 // INPUTS == groups[..., None])[:, None]
    is_on = (np.arange(STEPS) < 20)[:, None, None]
    spikes = rng.random((TRIALS, STEPS, BATCH, INPUTS)) < np.where(fires, 0.15, 0.02) * is_on
    time = np.tile(np.arange(STEPS), TRIALS)
    xs = spikes.reshape(-1, BATCH, INPUTS).astype(np.float32)
    return xs, np.repeat(groups, STEPS, axis=0), time == 0, time == STEPS - 1


def learn_choice(seed=0):
    """Return the mean reward of each trial."""
    xs, groups, is_first, is_last = make_trials(np.random.default_rng(seed))
    rule = braintrace.RewardSTDP(state="mem", tau_eligibility=50.0)
    learner = braintrace.compile(Choice(), rule, xs[0], batch_size=BATCH, seed=seed)

    def step_fn(x, group, is_last):
        counts, potentials = learner(x)
        right, wrong = (counts[jnp.arange(BATCH), g] for g in (group, 1 - group))
        reward = jnp.where(is_last, jnp.sign(right - wrong), 0.0)
        return braintrace.three_factor_loss(potentials, -reward / BATCH), reward

    _, rewards = learner.etrace_online(
        xs,
        groups,
        is_last,
        step_fn=step_fn,
        optimizer=optax.sgd(RATE),
        has_aux=True,
        reset=is_first,
    )
    return np.asarray(rewards)[is_last].mean(axis=1)


# --- figure ------------------------------------------------------------------------------


def draw(pair_curve, frequency_curves, rewards, path):
    figure = Figure(figsize=(10, 3), layout="constrained")
    pairs, frequencies, choice = figure.subplots(1, 3)
    pairs.axhline(0, color="0.8")
    pairs.plot(LAGS, pair_curve, ".-")
    pairs.set(title="pair STDP", xlabel="lag (ms)", ylabel="change of the weight")
    frequencies.axhline(0, color="0.8")
    for name, curve in frequency_curves.items():
        frequencies.plot(FREQUENCIES, curve, ".-", label=name)
    frequencies.set(title=f"{PAIRS} pairs", xlabel="frequency (Hz)", ylabel="change of the weight")
    frequencies.legend(frameon=False, fontsize=8)
    choice.plot(np.arange(1, len(rewards) + 1), rewards)
    choice.set(title="R-STDP", xlabel="trial", ylabel="mean reward", ylim=(-1.05, 1.05))
    figure.savefig(path, dpi=130)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", default="plasticity.png", help="file of the figure")
    options = parser.parse_args()
    pair, triplet = braintrace.PairSTDP(state="mem"), braintrace.TripletSTDP(state="mem")
    pair_curve = change_of(pair, pairs_of_spikes([np.array([60])] * len(LAGS), LAGS, 120))
    frequency_curves = {
        f"{name}, lag {lag:+} ms": frequency_curve(rule, lag)
        for name, rule in {"pairs": pair, "triplets": triplet}.items()
        for lag in (LAG, -LAG)
    }
    rewards = learn_choice()
    print(f"mean reward of the first ten trials {rewards[:10].mean():.2f}, ", end="")
    print(f"of the last ten {rewards[-10:].mean():.2f}")
    draw(pair_curve, frequency_curves, rewards, options.out)


if __name__ == "__main__":
    main()
