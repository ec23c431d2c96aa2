"""Train on a stream in one pass, over several runs.

The network sees random signs and recalls the sign of ten steps ago. It updates at every step, and
saves every thousand steps. After an interrupt, the same command continues from the last checkpoint,
with bit-identical weights.

    python docs/examples/resume.py --folder /tmp/echo
"""

import argparse

import brainstate
import jax.numpy as jnp
import numpy as np
import optax

import braintrace

DELAY, PART, BATCH = 10, 1000, 16
LOG_EVERY = 250


def stream(start):
    """Return inputs ``(steps, BATCH, 1)`` and targets from a step to the end of its part."""
    part, skipped = divmod(start, PART)
    before, now = (
        np.random.default_rng(number).choice([-1.0, 1.0], (PART, BATCH, 1))
        for number in (part, part + 1)
    )
    xs = np.concatenate([before[-DELAY:], now]).astype(np.float32)
    return jnp.asarray(xs[DELAY + skipped :]), jnp.asarray(xs[skipped:-DELAY])


def build():
    """Return a learner with equal weights in every run."""
    brainstate.random.seed(0)
    model = braintrace.nn.LRUCell(1, 1, 64)
    return braintrace.compile(model, "d_rtrl", jnp.zeros((BATCH, 1)), batch_size=BATCH)


def tell(step, metrics):
    print(f"step {step} of this part: loss {metrics['loss']:.3f}")


def train(folder, steps):
    """Train on the remaining steps of the stream; return the losses of all steps."""
    learner, optimizer = build(), optax.adam(3e-3)

    def step_fn(x, target):
        return jnp.mean((learner(x) - target) ** 2)

    learner.init_optimizer(optimizer)
    try:
        losses = braintrace.restore(folder, learner)
        print(f"going on after {len(losses)} steps")
    except braintrace.NoCheckpointError:
        losses = np.zeros(0, np.float32)
    while len(losses) < steps:
        found = learner.etrace_online(
            *stream(len(losses)),
            step_fn=step_fn,
            optimizer=optimizer,
            log_every=LOG_EVERY,
            on_log=tell,
        )
        losses = np.concatenate([losses, found])
        braintrace.save(folder, learner, extra=losses)
    print(f"{len(losses)} steps are saved in {folder}")
    return losses


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", default="echo", help="where the learner is saved")
    parser.add_argument("--steps", type=int, default=20 * PART, help="steps of the stream")
    options = parser.parse_args(arguments)
    return train(options.folder, options.steps)


if __name__ == "__main__":
    main()
