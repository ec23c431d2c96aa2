"""A model of the catalogue in the hands of a learner, on the paths that a user can take."""

import functools
import warnings

import brainstate
import jax
import numpy as np
from catalogue import BATCH
from drivers import snapshot
from every_path import Paths

import braintrace

LENGTH = 6
CHUNK_SIZES = (4, 3, 1, LENGTH)


def data(entry):
    return entry.sequences(BATCH, LENGTH, float)


class Runs(Paths):
    """One model with one algorithm; every path starts anew.

    Each returns the gradient of the summed loss, as leaves without units.
    """

    batch = BATCH

    def __init__(self, entry, algorithm, **options):
        xs, *targets = data(entry)
        super().__init__(entry.module, xs, algorithm, *targets, loss=entry.loss, **options)
        brainstate.random.seed(7)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", braintrace.ApproximationWarning)
            self.learner  # noqa: B018 - it is compiled, or refused

    def after(self):
        """The states and traces that a path has left."""
        return snapshot(self.learner)


PATHS = {
    **{f"chunks of {n}": functools.partial(Runs.sequence, chunk_size=n) for n in CHUNK_SIZES},
    "own gradient": Runs.own_gradient,
    "stream": Runs.stream,
}
"""Each gives the gradient of a `Runs`."""


@functools.cache
def runs_of(entry, algorithm, **options):
    return Runs(entry, algorithm, **options)


@functools.cache
def case_of(entry):
    """The recorded model and what it starts from; without a hand-written description."""
    case = entry.recorded()
    return case, jax.tree.map(np.asarray, (case.params(), case.states()))


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
