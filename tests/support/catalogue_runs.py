"""A model of the catalogue in the hands of a learner, on the paths that a user can take."""

import functools
import warnings

import brainstate
import compilation
import jax
import numpy as np
import oracles
from catalogue import BATCH
from drivers import calls_gradient, snapshot, stream_gradient
from recorded import without_units

import braintrace

LENGTH = 6
CHUNK_SIZES = (4, 3, 1, LENGTH)


def data(entry):
    return entry.sequences(BATCH, LENGTH, float)


class Runs:
    """One model with one algorithm; every path starts anew.

    Each returns the gradient of the summed loss, as leaves without units.
    """

    def __init__(self, entry, algorithm, **options):
        self.entry, (self.xs, self.targets) = entry, data(entry)
        brainstate.random.seed(7)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", braintrace.ApproximationWarning)
            self.learner = braintrace.compile(
                entry.module(), algorithm, self.xs[0], batch_size=BATCH, **options
            )

    def loss(self, x, target):
        return self.entry.loss(self.learner(x), target)

    def at_once(self, chunk_size):
        """By `etrace_grad`."""
        self._start()
        found = self.learner.etrace_grad(
            self.xs, self.targets, step_fn=self.loss, reduction="sum", chunk_size=chunk_size
        )
        return _by_path(found)

    def by_own_gradient(self):
        """Step by step, each in a gradient of the user's own."""
        self._start()
        model = self.learner.algorithm.model
        return _by_path(calls_gradient(model, self.loss, self.xs, self.targets))

    def in_a_stream(self):
        """By `etrace_online`, which adds up what would change the parameters."""
        self._start()
        return _by_path(stream_gradient(self.learner, self.xs, self.targets, step_fn=self.loss))

    def after(self):
        """The states and traces that a path has left."""
        return snapshot(self.learner)

    def _start(self):
        self.learner.reset_state(BATCH)
        brainstate.random.seed(7)


PATHS = {
    **{f"chunks of {n}": functools.partial(Runs.at_once, chunk_size=n) for n in CHUNK_SIZES},
    "own gradient": Runs.by_own_gradient,
    "stream": Runs.in_a_stream,
}
"""Each gives the gradient of a `Runs`."""


def _by_path(gradients):
    return {"/".join(map(str, path)): without_units(value) for path, value in gradients.items()}


@compilation.cache
def runs_of(entry, algorithm, **options):
    return Runs(entry, algorithm, **options)


@functools.cache
def case_of(entry):
    """The recorded model and what it starts from; without a hand-written description."""
    case = entry.recorded()
    return case, jax.tree.map(np.asarray, (case.params(), case.states()))


@oracles.compiled
def bptt(case, params, states, xs, targets):
    return jax.grad(lambda p: oracles.sequence_loss(case, p, states, xs, targets))(params)


@functools.cache
def expected(entry, oracle, **options):
    case, (params, states) = case_of(entry)
    return oracle(case, params, states, *data(entry), **options)


def named(group):
    return ", ".join(sorted(state.name for state in group.states))


def reported(relation):
    groups = [named(group) for group in relation.hidden_groups]
    paths = ["/".join(map(str, path)) for path in relation.parameter_paths]
    return f"{','.join(paths)} -> {' | '.join(groups)}"
