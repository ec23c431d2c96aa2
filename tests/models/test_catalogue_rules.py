"""Every model under the rules of the whole state: equal to their oracles, or refused."""

import functools
import re
import warnings

import jax
import numpy as np
import oracles
import pytest
import random_oracles
from assertions import assert_gradients_close
from catalogue import MODELS, REFUSED
from catalogue_runs import LENGTH, Runs, data, runs_of
from drivers import drawn_signs

import braintrace

TOLERANCE = 1e-9
PATHS = (functools.partial(Runs.sequence, chunk_size=4), Runs.own_gradient, Runs.stream)

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("float64_in_every_thread")]


def gradients(runs):
    """On all paths; a random rule draws the same again."""
    algorithm = runs.learner.algorithm
    for path in PATHS:
        if "draws" in algorithm.compiled.trace_specs:
            algorithm.traces.value = algorithm.zero_traces()
        yield path, path(runs)


@functools.cache
def arguments(entry):
    """The recorded model, what it starts from, and its data."""
    case = entry.recorded()
    return case, *jax.tree.map(np.asarray, (case.params(), case.states())), *data(entry)


@functools.cache
def patterns(entry):
    """Where J and F are not zero in some step."""
    case, params, states, xs, targets = arguments(entry)
    J = F = False
    for x, target in zip(xs, targets, strict=True):
        states, facts = oracles.whole_step(case, params, states, x, target)
        J, F = J | (np.asarray(facts["J"]) != 0), F | (np.asarray(facts["F"]) != 0)
    return J, F


# --- SnAp-n ----------------------------------------------------------------------------------


@functools.cache
def masked(entry, n):
    """The full recursion, of which what is reached within n steps is kept."""
    J, reach = patterns(entry)
    for _ in range(n - 1):
        reach = reach | (J.astype(float) @ reach > 0)
    return oracles.dense_rtrl(*arguments(entry), trace_mask=reach)


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("entry", MODELS, ids=lambda e: e.name)
def test_snap(entry, n):
    if entry.name in REFUSED:
        with pytest.raises(braintrace.CompilationError, match=f"`SnAp` .*{REFUSED[entry.name]}"):
            Runs(entry, "snap", n=n)
        return
    for path, found in gradients(runs_of(entry, "snap", n=n, strict=True)):
        assert_gradients_close(found, masked(entry, n), TOLERANCE, f"{entry.name}, {path}")


# --- OSTL ------------------------------------------------------------------------------------


def layers(entry):
    """{layer: (state, ...)}: groups that depend on each other over time, each after what it reads.

    A state that is in no group is a layer of its own.
    """
    case, _, states, _, _ = arguments(entry)
    slices, (J, _) = oracles.state_slices(states), patterns(entry)
    members = [set(states) & set(group) for group in case.groups.values()]
    members += [{name} for name in slices if not any(name in own for own in members)]

    def reads(a, b):
        return any(J[slices[q], slices[r]].any() for q in a for r in b)

    follows = np.array([[reads(a, b) for b in members] for a in members]) | np.eye(
        len(members), dtype=bool
    )
    for _ in members:
        follows = follows | (follows.astype(int) @ follows > 0)
    found = {}
    for a in sorted(range(len(members)), key=lambda a: follows[a].sum()):
        first = min(b for b in range(len(members)) if follows[a, b] and follows[b, a])
        found.setdefault(str(first), set()).update(members[a])
    return {name: tuple(sorted(own)) for name, own in found.items()}


@functools.cache
def by_layer(entry):
    return oracles.dense_ostl(*arguments(entry), layers(entry))


@pytest.mark.parametrize("entry", MODELS, ids=lambda e: e.name)
def test_ostl_recurrent(entry):
    if entry.name in REFUSED:
        message = f"`OSTLRecurrent` .*{REFUSED[entry.name]}"
        with pytest.raises(braintrace.CompilationError, match=message):
            Runs(entry, "ostl_recurrent")
        return
    for path, found in gradients(runs_of(entry, "ostl_recurrent")):
        assert_gradients_close(found, by_layer(entry), TOLERANCE, f"{entry.name}, {path}")


@pytest.mark.parametrize("entry", MODELS, ids=lambda e: e.name)
def test_ostl_feedforward(entry):
    """What it takes, it learns as by D-RTRL; it refuses layers that read their own past."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            runs = runs_of(entry, "ostl_feedforward")
        except braintrace.CompilationError as refusal:
            assert re.search("OSTLFeedforward", str(refusal)), refusal
            assert not entry.diagonal, entry.name
            return
    expected = oracles.dense_d_rtrl(*arguments(entry))
    for path, found in gradients(runs):
        assert_gradients_close(found, expected, TOLERANCE, f"{entry.name}, {path}")


# --- random rules ----------------------------------------------------------------------------


OTHER_STATES = {
    "FilteredOutput",
    "NoStateAtAllPositions",
    "RandomFeedback",
    "ReadsAnOldState",
    "StridedAndOverlappingSlices",
    "SynapsesOfTwoPopulations",
    "TransposedPair",
    "TransposedState",
}
"""Models with a State that no step reads, or none writes, for which the oracle draws signs, too;
or with samples along different axes of their States."""

SAMPLES = {"VmappedPopulations": 1}
"""Models with samples along another axis than the first."""


@pytest.mark.parametrize(
    "entry", [e for e in MODELS if e.name not in OTHER_STATES], ids=lambda e: e.name
)
def test_uoro_equals_its_recursion_for_the_same_signs(entry):
    if entry.name in REFUSED:
        with pytest.raises(braintrace.CompilationError, match=f"`UORO` .*{REFUSED[entry.name]}"):
            Runs(entry, "uoro")
        return
    runs = runs_of(entry, "uoro", seed=3)
    whole = runs.learner.graph.flat_state
    signs = drawn_signs(runs.learner, (whole.samples, whole.size), LENGTH)
    parts = np.split(signs, np.cumsum(whole.sizes)[:-1], axis=2)
    by_name = {leaf.name: part for leaf, part in zip(whole.leaves, parts, strict=True)}
    signs = np.concatenate([by_name[name] for name in sorted(by_name)], axis=2)
    expected = random_oracles.uoro(*arguments(entry), signs, axis=SAMPLES.get(entry.name, 0))
    for path, found in gradients(runs):
        assert_gradients_close(found, expected, TOLERANCE, f"{entry.name}, {path}")
