"""What does the gradient of a whole sequence cost, next to backpropagation through time?

A leaky tanh RNN with a plain readout and a loss at every step. The cases are run in turn, many
times over, in one process; the table gives the median and its ratio to BPTT. Before timing,
chunked D-RTRL is compared with D-RTRL in chunks of one step; a case that disagrees fails.

    python benchmarks/sequence_gradient.py --steps 64 --batch 32 --hidden 256
"""

import argparse
import statistics
import time

import brainstate
import jax
import jax.numpy as jnp

import braintrace

INPUTS, OUTPUTS = 64, 10


class LeakyRNN(brainstate.nn.Module):
    def __init__(self, hidden):
        super().__init__()
        keys = jax.random.split(jax.random.key(0), 3)
        self.hidden = hidden
        self.w_in = brainstate.ParamState(jax.random.normal(keys[0], (INPUTS, hidden)) / 8)
        self.w_rec = brainstate.ParamState(
            jax.random.normal(keys[1], (hidden, hidden)) / hidden**0.5
        )
        self.w_out = brainstate.ParamState(
            jax.random.normal(keys[2], (hidden, OUTPUTS)) / hidden**0.5
        )

    def init_state(self, batch_size):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, self.hidden)))

    def update(self, x):
        drive = braintrace.matmul(x, self.w_in.value)
        drive += braintrace.matmul(self.h.value, self.w_rec.value)
        self.h.value = 0.9 * self.h.value + 0.1 * jnp.tanh(drive)
        return self.h.value @ self.w_out.value


def bptt(hidden, xs, targets):
    """Compile backpropagation through the same network in plain JAX."""
    model = LeakyRNN(hidden)
    parameters = {path[0]: s.value for path, s in model.states(brainstate.ParamState).items()}

    def loss(parameters):
        def step(h, pair):
            x, target = pair
            drive = x @ parameters["w_in"] + h @ parameters["w_rec"]
            h = 0.9 * h + 0.1 * jnp.tanh(drive)
            return h, jnp.mean((h @ parameters["w_out"] - target) ** 2)

        return jax.lax.scan(step, jnp.zeros((xs.shape[1], hidden)), (xs, targets))[1].mean()

    gradient = jax.jit(jax.grad(loss))
    return lambda: gradient(parameters)


def online(algorithm, chunk, hidden, xs, targets):
    """Compile a sequence gradient that starts from fresh states and traces."""
    batch = xs.shape[1]
    learner = braintrace.compile(LeakyRNN(hidden), algorithm, xs[0], batch_size=batch)

    def step(x, target):
        return jnp.mean((learner(x) - target) ** 2)

    def run():
        learner.reset_state(batch)
        return learner.etrace_grad(xs, targets, step_fn=step, chunk_size=chunk)

    return run


def deviation(found, expected):
    """Return the largest deviation relative to the largest entry."""
    return max(
        float(jnp.abs(found[key] - expected[key]).max() / jnp.abs(expected[key]).max())
        for key in expected
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    keys = jax.random.split(jax.random.key(1), 2)
    shape = (options.steps, options.batch)
    data = (
        jax.random.normal(keys[0], (*shape, INPUTS)),
        jax.random.normal(keys[1], (*shape, OUTPUTS)),
    )

    cases = {"BPTT": bptt(options.hidden, *data)}
    for chunk in sorted({16, options.steps}):
        cases[f"D_RTRL, chunks of {chunk}"] = online("d_rtrl", chunk, options.hidden, *data)
    cases["D_RTRL, auto"] = online("d_rtrl", "auto", options.hidden, *data)
    cases["ES_D_RTRL"] = online("es_d_rtrl", options.steps, options.hidden, *data)

    expected = online("d_rtrl", 1, options.hidden, *data)()
    first, found = {}, {}
    for name, run in cases.items():
        start = time.perf_counter()
        found[name] = jax.block_until_ready(run())
        first[name] = time.perf_counter() - start
    times = {name: [] for name in cases}
    for _ in range(options.repeats):
        for name, run in cases.items():
            start = time.perf_counter()
            jax.block_until_ready(run())
            times[name].append(time.perf_counter() - start)

    print(f"{options.steps} steps, batch {options.batch}, {options.hidden} hidden units, float32")
    print(f"{'':24}{'median':>10}{'over BPTT':>11}{'first call':>12}{'deviation':>11}")
    reference = statistics.median(times["BPTT"])
    failed = False
    for name in cases:
        median = statistics.median(times[name])
        error = deviation(found[name], expected) if name.startswith("D_RTRL") else None
        failed |= error is not None and not error < 1e-4
        shown = "" if error is None else f"{error:.1e}"
        print(
            f"{name:24}{median * 1e3:>8.1f}ms{median / reference:>11.2f}"
            f"{first[name]:>11.2f}s{shown:>11}"
        )
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
