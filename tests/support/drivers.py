"""Ways to run the library over a case, with gradients named as the case names its parameters."""

import contextlib
import functools
import warnings

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from recorded import without_units
from rules import RULES, options_of

import braintrace
from braintrace._core.traces import outliving
from braintrace._rules.full.random_signs import signs

BATCH_STYLES = ("batch axis", "mapped", "single")
SILENT = (
    *("immediate", braintrace.Immediate, "rtrl", braintrace.RTRL, "ostl_recurrent"),
    *("uoro", "kf_rtrl"),
)
"""Rules that have no trace for anything, or one for everything within a layer: they leave out other
things than the cases say."""


def build_learner(case, algorithm="d_rtrl", style="batch axis", batch=2, **options):
    """A compiled learner in one of the batch styles.

    ``'batch axis'``: the model sees the batch. ``'mapped'``: it is written for one sample and
    mapped over the batch. ``'single'``: there is one sample and no batch axis.
    """
    dtype = options.pop("dtype", np.float32)
    options = {**options_of(algorithm), **options}
    rule = RULES[algorithm].algorithm if algorithm in RULES else algorithm
    model = case.build(dtype)
    x0 = case.sequences(None if style == "single" else batch, 1, dtype)[0][0]
    with expected_warnings(case, algorithm, options):
        if style == "single":
            return braintrace.compile(model, rule, x0, **options)
        mapped = style == "mapped"
        return braintrace.compile(model, rule, x0, batch_size=batch, vmap=mapped, **options)


def quietly_compiled(model, algorithm, *example, **options):
    """`braintrace.compile`, whatever the rule leaves out of the model."""
    options = {**options_of(algorithm), **options}
    with warnings.catch_warnings(action="ignore", category=braintrace.ApproximationWarning):
        return braintrace.compile(model, algorithm, *example, **options)


shared_learner = functools.cache(build_learner)
"""One learner for each set of arguments, shared by tests: reset it before its States are used."""


def build_algorithm(case, algorithm=braintrace.D_RTRL, batch=2, dtype=np.float32, **options):
    """A model with initialised states and a compiled algorithm around it."""
    model = case.build(dtype)
    brainstate.nn.init_all_states(model, batch_size=batch)
    options = {**options_of(algorithm), **options}
    instance = algorithm(model, **options)
    with expected_warnings(case, algorithm, options):
        instance.compile_graph(case.sequences(batch, 1, dtype)[0][0])
    return model, instance


def expected_warnings(case, algorithm="d_rtrl", options=None):
    """The compiler warns if, and only if, the case says that something cannot be traced."""
    keeps_neighbours = (options or {}).get("n", 1) > 1
    if case.costs_accuracy and algorithm not in SILENT and not keeps_neighbours:
        return pytest.warns(braintrace.ApproximationWarning)
    return contextlib.nullcontext()


def sequence_gradient(learner, case, xs, targets, **options):
    """`etrace_grad` of the summed loss."""

    def step_loss(x, target):
        return case.loss(learner(x), target)

    options = {"reduction": "sum", **options}
    return named(learner.etrace_grad(xs, targets, step_fn=step_loss, **options))


def summed(gradients):
    """The sum of gradients."""
    return jax.tree.map(lambda *leaves: np.sum(leaves, axis=0), *gradients)


@functools.lru_cache(maxsize=16)
def _sum_of_stream(learner):
    """A State and a function that adds gradients to it: the same for all streams of a learner."""
    total = brainstate.State(None)

    def add(gradients):
        total.value = jax.tree.map(jnp.add, total.value, dict(gradients))

    return total, add


def stream_gradient(learner, *sequences, step_fn, **options):
    """The sum of the gradients of a stream whose parameters stay as they are."""
    weights = weights_of(learner.algorithm.model)
    total, add = _sum_of_stream(learner)
    total.value = {path: jax.tree.map(zeros_like, w.value) for path, w in weights.items()}
    learner.etrace_online(*sequences, step_fn=step_fn, update_fn=add, **options)
    return total.value


def zeros_like(leaf):
    """Zeros that no program has to make."""
    return np.zeros(leaf.shape, leaf.dtype)


def calls_gradient(model, loss, *sequences):
    """The sum of gradients that a user takes of calls, one for each entry of the sequences."""
    step = brainstate.transform.jit(brainstate.transform.grad(loss, weights_of(model)))
    return summed([step(*now) for now in zip(*sequences, strict=True)])


@functools.cache
def catalogue_gradient(case, algorithm="d_rtrl", style="batch axis", batch=2, length=6, **options):
    """`etrace_grad` over the case's own sequence, with a learner of its own; kept for the run."""
    dtype, chunk_size = options.pop("dtype", np.float32), options.pop("chunk_size", "auto")
    learner = build_learner(case, algorithm, style, batch, dtype=dtype, **options)
    xs, targets = case.sequences(None if style == "single" else batch, length, dtype)
    return sequence_gradient(learner, case, xs, targets, chunk_size=chunk_size)


def weights_of(model):
    return model.states(brainstate.ParamState)


def named(gradients):
    """{path tuple: gradient} -> {path: gradient without its units}."""
    return {"/".join(path): without_units(gradient) for path, gradient in gradients.items()}


def snapshot(learner):
    """Values of all states and traces."""
    algorithm = getattr(learner, "algorithm", learner)
    states = {path: state.value for path, state in algorithm.model.states().items()}
    return states, algorithm.traces.value


def rewind(learner, traces):
    """Let the random stream of a rule, which goes on at a reset, be where it was."""
    own = learner.algorithm.traces
    if stream := outliving(learner.algorithm.compiled.trace_specs):
        own.value = {**own.value, **{key: traces[key] for key in stream}}


def drawn_signs(learner, shape, length):
    """The signs that a learner with a random rule draws in its first steps."""
    key = learner.algorithm.zero_traces()["key"]
    steps = [{"key": key, "draws": np.uint32(t)} for t in range(length)]
    return np.stack([signs(step, np.zeros(1), shape, np.float64) for step in steps])


def compiled_once(build):
    """Return what gives a learner as one that is built anew, and builds one in all.

    What has been compiled for it stays.
    """
    made = build()
    pure = made.functional()
    start = jax.tree.map(jnp.copy, pure.state())

    def begin():
        brainstate.random.seed(0)
        made.optimizer_state = None
        pure.restore(jax.tree.map(jnp.copy, start))
        return made

    return begin


@functools.cache
def _starting(_, *arguments, **options):
    return compiled_once(functools.partial(build_learner, *arguments, **options))


def new_learner(*arguments, which=0, **options):
    """Return a learner of `build_learner` as if it were built anew; what it has compiled stays.

    which: its number, where a test has several that are built alike.
    """
    learner = _starting(which, *arguments, **options)()
    learner.reset_state()  # so traces are known to be zero, as those of a new one
    return learner
