"""Learn in parts, and save after each; go on where a run before was ended.

``python saved_runs.py CASE DRIVER FOLDER PARTS HURRY`` prints how many parts are done whenever they
are saved, and at the end the sum of the bits of all that the learner is.
"""

import sys
import zlib

import brainstate
import catalogue
import compilation
import jax
import numpy as np
import optax
from drivers import build_learner

import braintrace


class Run:
    """A learner that learns in parts, each on data of its own."""

    def __init__(self, case="ALIF", driver="online"):
        self.case, self.driver = catalogue.BY_NAME[case], driver
        self.learner = build_learner(self.case, "d_rtrl")
        self.weights = self.learner.algorithm.model.states(brainstate.ParamState)
        self.optimizer = optax.adam(0.01)
        self.momenta = None

    def step_fn(self, x, y):
        return self.case.loss(self.learner(x), y)

    def part(self, number):
        xs, ys = self.case.sequences(2, 4, seed=number)
        if self.driver == "online":
            options = {"step_fn": self.step_fn, "optimizer": self.optimizer}
            return self.learner.etrace_online(xs, ys, **options)
        if number % 3 == 0:
            self.learner.reset_state()
        gradients = self.learner.etrace_grad(xs, ys, step_fn=self.step_fn, chunk_size=3)
        values = {path: weight.value for path, weight in self.weights.items()}
        if self.momenta is None:
            self.momenta = self.optimizer.init(values)
        updates, self.momenta = self.optimizer.update(gradients, self.momenta)
        for path, value in optax.apply_updates(values, updates).items():
            self.weights[path].value = value
        return gradients

    def save(self, folder, done):
        extra = {"done": done, "momenta": self.momenta}
        braintrace.save(folder, self.learner, extra)

    def restore(self, folder):
        """Return how many parts are done."""
        extra = braintrace.restore(folder, self.learner)
        self.momenta = extra["momenta"]
        return extra["done"]

    def state(self):
        return jax.device_get((self.learner.functional().state(), self.momenta))


def main(case, driver, folder, parts, in_a_hurry):
    if in_a_hurry == "True":
        compilation.compile_in_a_hurry()
    brainstate.random.seed(0)
    run = Run(case, driver)
    try:
        start = run.restore(folder)
    except braintrace.NoCheckpointError:
        start = 0
    for number in range(start, int(parts)):
        run.part(number)
        run.save(folder, number + 1)
        print(number + 1, flush=True)
    leaves = jax.tree.leaves(run.state())
    print("sum", zlib.crc32(b"".join(np.asarray(leaf).tobytes() for leaf in leaves)))


if __name__ == "__main__":
    main(*sys.argv[1:])
