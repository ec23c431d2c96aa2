"""Learn delays that make the pulses of a pattern arrive together.

Eight inputs fire once each, with the lags of one of two patterns, after a random start. Two units
add up the inputs with fixed and equal weights, and answer strongly to pulses that coincide. Only
the delays of the sixteen connections learn, by D_RTRL. The share of correct answers rises from 50 %
to 100 %: most pulses of a pattern then arrive at its unit together.

    python docs/examples/coincidence.py    100 updates, in a few seconds
"""

import argparse
import time

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure

import braintrace

INPUTS, PATTERNS, LONGEST = 8, 2, 9  # delays are at most nine steps
STEPS, BATCH = 24, 64
PART = 25  # updates of one call


def make_pulses(rng, lags, count):
    """Return inputs ``(count * STEPS, BATCH, INPUTS)`` and patterns ``(count, BATCH)``."""
    patterns = rng.integers(0, PATTERNS, (count, BATCH))
    starts = rng.integers(1, 6, (count, 1, BATCH, 1))
    late = np.arange(STEPS)[:, None, None] - starts - lags[patterns][:, None]
    pulses = np.exp(-0.5 * (late / 0.7) ** 2)
    return pulses.reshape(-1, BATCH, INPUTS).astype(np.float32), patterns


class Detectors(brainstate.nn.Module):
    """Leaky units that answer to coincidence more than to the sum of their inputs."""

    def __init__(self, delays):
        super().__init__()
        weights = np.full(delays.shape, 1.5 / INPUTS, np.float32)
        self.inputs = braintrace.nn.DelayedLinear(*delays.shape, LONGEST, weights, d_init=delays)
        self.inputs.weight = brainstate.LongTermState(self.inputs.weight.value)  # does not learn

    def init_state(self, batch_size=None, **_):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, PATTERNS)))

    def update(self, x):
        together = jax.nn.sigmoid(6 * (self.inputs(x) - 0.8))
        self.h.value = 0.3 * self.h.value + 0.7 * together
        return 8 * self.h.value


def train(learner, rng, lags, updates):
    """Train on new pulses, one update per batch; return the share of hits of each."""

    def step_fn(x, patterns):
        logits = learner(x)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, patterns).mean()
        return loss, logits

    hits = []
    for _ in range(updates // PART):
        xs, patterns = make_pulses(rng, lags, PART)
        _, logits = learner.etrace_online(
            xs,
            np.repeat(patterns, STEPS, axis=0),
            step_fn=step_fn,
            optimizer=optax.adam(0.03),
            every=STEPS,
            reset=np.arange(len(xs)) % STEPS == 0,
            has_aux=True,
        )
        peaks = np.asarray(logits).reshape(PART, STEPS, BATCH, PATTERNS).max(axis=1)
        hits.extend((peaks.argmax(-1) == patterns).mean(axis=1))
    return np.array(hits)


def draw(lags, before, after, hits, path):
    """Plot the arrival of each pulse before and after learning, and the learning curve."""
    figure = Figure(figsize=(10, 3), layout="constrained")
    *units, curve = figure.subplots(1, PATTERNS + 1)
    for pattern, axes in enumerate(units):
        for name, delays, style in (
            ("no delay", 0, "x"),
            ("before", before, "o"),
            ("after", after, "o"),
        ):
            delays = np.clip(delays, 0, LONGEST) * np.ones((INPUTS, PATTERNS))
            colour = {"no delay": "0.7", "before": "tab:orange", "after": "tab:blue"}[name]
            arrival = lags[pattern] + delays[:, pattern]
            axes.plot(arrival, np.arange(INPUTS), style, color=colour, label=name)
        axes.set(title=f"pattern {pattern} at its unit", xlabel="arrival (steps)", ylabel="input")
    units[0].legend(fontsize=7)
    curve.plot(hits)
    curve.axhline(1 / PATTERNS, color="0.8", zorder=0)
    curve.set(xlabel="update", ylabel="correct answers", ylim=(0.4, 1.02))
    figure.savefig(path, dpi=80)


def main(arguments=None):
    """Run the example; return the shares of correct answers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=100, help="batches to learn from")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="coincidence.png", help="where the picture goes")
    options = parser.parse_args(arguments)
    rng, began = np.random.default_rng(options.seed), time.perf_counter()
    lags = rng.integers(0, 8, (PATTERNS, INPUTS))
    before = rng.uniform(0, LONGEST, (INPUTS, PATTERNS)).astype(np.float32)
    network = Detectors(before)
    example = jnp.zeros((BATCH, INPUTS))
    learner = braintrace.compile(network, "d_rtrl", example, batch_size=BATCH)
    hits = train(learner, rng, lags, options.updates)
    for name, part in (("first", hits[:10]), ("last", hits[-10:])):
        print(f"correct answers in the {name} ten updates: {part.mean():.2f}")
    draw(lags, before, np.asarray(network.inputs.delay.value), hits, options.out)
    print(f"{time.perf_counter() - began:.0f} seconds")
    return hits


if __name__ == "__main__":
    main()
