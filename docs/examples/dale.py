"""Train excitatory and inhibitory spiking neurons to compare two cues over a delay.

Delayed match-to-sample: one of two groups of inputs fires for 20 ms, all are silent for 60 ms, one
of the groups fires again, and the network says whether it is the same group. Eighty excitatory and
twenty inhibitory neurons with adaptive thresholds have random connections, one pair in ten. Half of
the excitatory neurons receive the inputs, the other half is read, so the cue must pass through the
recurrent weights, whose signs never change (Dale's law).

D_RTRL follows the eligibility of every connection through synapse, potential and threshold. The
baselines are `Immediate`, without traces, and fixed recurrent weights, with three seeds each.
D_RTRL answers 93 % of new trials correctly, fixed recurrent weights 84 %, and Immediate 64 %.

    python docs/examples/dale.py           300 updates, in two to three minutes on two cores
    python docs/examples/dale.py --full    500 updates, in four
"""

import argparse
import time
from typing import NamedTuple

import brainstate
import jax.numpy as jnp
import numpy as np
import optax
import saiunit as u
from matplotlib.figure import Figure

import braintrace
from braintrace import nn

CUE, DELAY, ANSWER = 20, 60, 15  # ms, one step each; the loss covers the last ones
STEPS = CUE + DELAY + CUE
INPUTS, EXCITATORY, INHIBITORY, BATCH = 20, 80, 20, 16
NEURONS = EXCITATORY + INHIBITORY
SEEING = EXCITATORY // 2
PART = 25  # updates of one call
TRIALS = 60  # batches of test trials
SIGNS = np.repeat([1.0, -1.0], [EXCITATORY, INHIBITORY])


# --- the task ----------------------------------------------------------------------------


def make_trials(rng, count):
    """Return input spikes ``(count * STEPS, BATCH, INPUTS)`` and answers ``(count, BATCH)``."""
    cues = rng.integers(0, 2, (2, count, BATCH))
    groups = np.arange(INPUTS) * 2 // INPUTS
    rates = np.full((count, STEPS, BATCH, INPUTS), 0.01)
    for cue, start in zip(cues, (0, CUE + DELAY), strict=True):
        fires = groups == cue[..., None]
        rates[:, start : start + CUE] += 0.2 * fires[:, None]
    spikes = (rng.random(rates.shape) < rates).astype(np.float32)
    return spikes.reshape(-1, BATCH, INPUTS), (cues[0] == cues[1]).astype(int)


def when(count):
    """Return the first steps of trials in a stream, and the weights of their losses."""
    time_in_trial = np.tile(np.arange(STEPS), count)
    return time_in_trial == 0, (time_in_trial >= STEPS - ANSWER).astype(np.float32)


def hits(logits, answers):
    """Return which trials of a stream are answered correctly."""
    late = logits.reshape(-1, STEPS, BATCH, 2)[:, -ANSWER:].mean(axis=1)
    return np.asarray(late.argmax(-1) == answers)


# --- the network -------------------------------------------------------------------------


def sparse(weights):
    return u.sparse.CSR.fromdense(jnp.asarray(weights, jnp.float32) * u.mA)


class Network(brainstate.nn.Module):
    """Neurons that excite or inhibit, on one synapse with their inputs."""

    def __init__(self, rng, recurrent_weights=brainstate.ParamState):
        super().__init__()
        sees = rng.random((INPUTS, NEURONS)) < 0.5 * (np.arange(NEURONS) < SEEING)
        drive = rng.normal(0.0, 2.0, sees.shape)
        connected = (rng.random((NEURONS, NEURONS)) < 0.1) & ~np.eye(NEURONS, dtype=bool)
        strength = np.where(SIGNS > 0, 1.0, 4.0)[:, None] * rng.gamma(2.0, 0.5, connected.shape)
        weights = {
            "input": nn.SparseLinear(sparse(drive * sees)),
            "recurrent": nn.SparseLinear(
                sparse(strength * connected), w_sign=SIGNS, param_type=recurrent_weights
            ),
        }
        self.current = nn.Projection(weights, nn.Expon(NEURONS, 5.0 * u.ms, 0.0 * u.mA))
        self.neurons = nn.ALIF(NEURONS, tau=20.0 * u.ms, tau_a=200.0 * u.ms, beta=0.3 * u.mV)
        read = rng.normal(0.0, 0.02, (EXCITATORY - SEEING, 2)).astype(np.float32)
        self.readout = nn.LeakyRateReadout(EXCITATORY - SEEING, 2, tau=20.0 * u.ms, w_init=read)

    def update(self, x):
        sent = {"input": x, "recurrent": self.neurons.get_spike()}
        spikes = self.neurons(self.current(sent))
        return self.readout(spikes[..., SEEING:EXCITATORY]), spikes

    def recurrent_matrix(self):
        """Return the signed weights between neurons, in mA."""
        one_spike_each = jnp.eye(NEURONS)
        return u.get_mantissa(self.current.weights["recurrent"](one_spike_each))


# --- learning ----------------------------------------------------------------------------


class Method(NamedTuple):
    """A rule, the kind of the recurrent weights, and a learning rate."""

    rule: str
    recurrent_weights: type  # only a ParamState learns
    rate: float


METHODS = {
    "D_RTRL": Method("d_rtrl", brainstate.ParamState, 0.03),
    "recurrent fixed": Method("d_rtrl", brainstate.LongTermState, 0.03),
    "Immediate": Method("immediate", brainstate.ParamState, 0.003),  # higher ones diverge
}


class Run(NamedTuple):
    """Results of a network, and its recurrent weights before and after training."""

    learned: np.ndarray  # share of correct answers per update
    accuracy: float  # in new trials, after training
    shown: np.ndarray  # answers of the first batch of these
    before: tuple  # logits and spikes in them
    after: tuple
    matrices: tuple


def answer(learner, trials):
    """Return logits and spikes of a stream of trials."""
    xs, answers = trials
    first, _ = when(len(answers))
    learner.reset_state()
    return learner.predict(xs, reset=first)


def learn(learner, rng, updates, rate):
    """Train on new trials, one update per batch; return the share of hits of each."""
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adam(optax.cosine_decay_schedule(rate, updates))
    )

    def step_fn(x, answers):
        logits, _ = learner(x)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, answers).mean()
        return loss, logits

    learned = []
    first, counts = when(PART)
    for _ in range(updates // PART):
        xs, answers = make_trials(rng, PART)
        _, logits = learner.etrace_online(
            xs,
            np.repeat(answers, STEPS, axis=0),
            step_fn=step_fn,
            optimizer=optimizer,
            every=STEPS,
            mask=counts,
            reset=first,
            has_aux=True,
        )
        learned.extend(hits(logits, answers).mean(axis=1))
    return np.array(learned)


def first_batch(found):
    return tuple(np.asarray(values[:STEPS]) for values in found)


def run(method, seed, updates):
    """Build a network, train it, and test it before and after."""
    rng = np.random.default_rng(seed)
    network = Network(rng, method.recurrent_weights)
    trials = make_trials(rng, TRIALS)
    example = trials[0][0]
    learner = braintrace.compile(network, method.rule, example, batch_size=BATCH)
    matrix, before = network.recurrent_matrix(), answer(learner, trials)
    learned = learn(learner, rng, updates, method.rate)
    after = answer(learner, trials)
    accuracy = hits(after[0], trials[1]).mean()
    matrices = (matrix, network.recurrent_matrix())
    return Run(learned, accuracy, trials[1][0], first_batch(before), first_batch(after), matrices)


# --- pictures and tables -----------------------------------------------------------------


def draw_trial(column, run, trial, title):
    """Plot spikes before and after training, and the readout, of one trial of the first batch."""
    for axes, name, (_, spikes) in (
        (column[0], "before", run.before),
        (column[1], "after", run.after),
    ):
        times, neurons = np.nonzero(spikes[:, trial])
        colours = np.where(SIGNS[neurons] > 0, "tab:blue", "tab:red")
        axes.scatter(times, neurons, s=6, c=colours, marker="|")
        axes.set(ylim=(0, NEURONS), title=f"{title}, {name} learning", ylabel="neuron")
    for (logits, _), style in ((run.before, ":"), (run.after, "-")):
        says_same = logits[:, trial] @ [-1.0, 1.0]
        column[2].plot(1 / (1 + np.exp(-says_same)), style, color="black")
    column[2].axhline(0.5, color="0.8", zorder=0)
    column[2].set(ylim=(0, 1), xlabel="time (ms)", ylabel='readout: "same"')
    for axes in column:
        axes.set(xlim=(0, STEPS))
        for start in (0, CUE + DELAY):
            axes.axvspan(start, start + CUE, color="0.92", zorder=-1)
    column[2].axvspan(STEPS - ANSWER, STEPS, color="0.8", zorder=-1)


def draw(runs, path):
    """Plot a match and a non-match of the first seed, and all learning curves."""
    figure = Figure(figsize=(11, 6.5), layout="constrained")
    grid = figure.add_gridspec(3, 3, height_ratios=(2, 2, 1), width_ratios=(1, 1, 1.1))
    first = runs["D_RTRL"][0]
    for place, (title, is_same) in enumerate((("match", 1), ("non-match", 0))):
        column = [figure.add_subplot(grid[row, place]) for row in range(3)]
        draw_trial(column, first, np.argmax(first.shown == is_same), title)
    curves = figure.add_subplot(grid[:, 2])
    for number, (name, of_seeds) in enumerate(runs.items()):
        for found in of_seeds:
            smooth = found.learned.reshape(-1, PART).mean(axis=1)
            updates = PART * np.arange(1, len(smooth) + 1)
            (line,) = curves.plot(updates, smooth, color=f"C{number}")
        line.set_label(name)
    curves.axhline(0.5, color="0.8", zorder=0)
    curves.set(xlabel="update", ylabel=f"right answers (mean of {PART} updates)", ylim=(0.4, 1))
    curves.legend(loc="lower right")
    figure.savefig(path, dpi=80)


def tell(runs):
    """Print the accuracies on new trials by name, and whether Dale's law holds."""
    seeds = len(runs["D_RTRL"])
    print(f"right answers in {TRIALS * BATCH} new trials; chance 0.5")
    print(f"{'':16}" + "".join(f"  seed {seed}" for seed in range(seeds)) + "    mean")
    for name, of_seeds in runs.items():
        accuracies = [found.accuracy for found in of_seeds]
        cells = "".join(f"  {accuracy:6.3f}" for accuracy in (*accuracies, np.mean(accuracies)))
        print(f"{name:16}{cells}")
    for seed, found in enumerate(runs["D_RTRL"]):
        before, after = map(np.asarray, found.matrices)
        changed = np.mean(np.abs(after - before)[before != 0] > 0.1)
        print(f"seed {seed}: {changed:.0%} of the recurrent weights changed by more than 0.1 mA")
        assert np.all(after * SIGNS[:, None] >= 0), "a neuron excites and inhibits"
        assert not np.any(after[before == 0]), "a connection has appeared"


def main(arguments=None):
    """Run the example; return the runs by name."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--full", action="store_true", help="500 updates in place of 300")
    parser.add_argument("--updates", type=int, help="batches of trials to learn from")
    parser.add_argument("--seeds", type=int, default=3, help="networks of each kind")
    parser.add_argument("--out", default="dale.png", help="where the picture goes")
    options = parser.parse_args(arguments)
    updates, began = options.updates or (500 if options.full else 300), time.perf_counter()
    with brainstate.environ.context(dt=1.0 * u.ms):
        runs = {
            name: [run(method, seed, updates) for seed in range(options.seeds)]
            for name, method in METHODS.items()
        }
    tell(runs)
    draw(runs, options.out)
    print(f"{time.perf_counter() - began:.0f} seconds")
    return runs


if __name__ == "__main__":
    main()
