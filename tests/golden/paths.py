"""The paths on which a user takes a gradient, each from the stored parameters and states."""

import functools
import warnings

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import saiunit as u

import braintrace
from golden import plain
from golden.nets import BATCH, LENGTH, NETS
from golden.table import RULES

RATE = 0.1
FIRST = 4
"""Steps of the first of two calls: no multiple of a chunk."""


def flat(values):
    """{path: tree of parameters or gradients} as {name: array}, units left out."""
    found = {}
    for path, tree in values.items():
        tree = jax.tree.map(u.get_mantissa, tree, is_leaf=lambda leaf: isinstance(leaf, u.Quantity))
        for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
            name = "/".join([*map(str, path), *(str(key.key) for key in keys)])
            found[name] = np.asarray(leaf)
    return found


def quietly(function, *arguments, **options):
    """Run without the warnings that say what a rule leaves out, or that a spelling is old."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", braintrace.ApproximationWarning)
        return function(*arguments, **options)


class Runs:
    """A model with a rule; every path begins with the same parameters, states and draws."""

    def __init__(self, net, rule):
        self.net, self.rule = NETS[net], RULES[rule]
        inputs = self.net.inputs
        self.xs, self.targets = jnp.asarray(inputs["xs"]), jnp.asarray(inputs["targets"])
        self.mask, self.flags = inputs["mask"], inputs["reset"]
        self.learner = self.compiled(batch_size=BATCH)
        self.pure = self.learner.functional()
        self.start = jax.tree.map(jnp.copy, self.pure.state())

    def compiled(self, **options):
        options = {**self.options, **options}
        if self.rule.is_by_path:
            own = "es_d_rtrl", {"decay_or_rank": 0.7}
            options["rules"] = {lambda path: path[0] in self.net.own_rule: own}
        model, algorithm = self.net.build(), self.rule.algorithm
        return quietly(braintrace.compile, model, algorithm, self.xs[0], **options)

    @property
    def options(self):
        windows = {"vjp_method": "multi-step"} if self.rule.is_windowed else {}
        return {**self.rule.options, **windows}

    def of(self, path):
        """{parameter: array} of one path."""
        self.pure.restore(jax.tree.map(jnp.copy, self.start))
        return flat(PATHS[path](self))

    def loss(self, output, target):
        if self.rule.loss == "three factor":
            return braintrace.three_factor_loss(output, target)
        return plain.loss(output, target)

    def step_of(self, learner):
        return lambda x, target: self.loss(learner(x), target)

    def gradient(self, chunk, begin=0, end=LENGTH, learner=None, **options):
        learner = learner or self.learner
        return learner.etrace_grad(
            self.xs[begin:end],
            self.targets[begin:end],
            step_fn=self.step_of(learner),
            reduction="sum",
            chunk_size=chunk,
            **options,
        )

    def descended(self, **options):
        weights = self.learner.algorithm.model.states(brainstate.ParamState)

        def descend(gradients):
            for path, weight in weights.items():
                change = functools.partial(jax.tree.map, lambda w, g: w - RATE * g)
                weight.value = change(weight.value, gradients[path])

        self.learner.etrace_online(
            self.xs,
            self.targets,
            step_fn=self.step_of(self.learner),
            update_fn=descend,
            **options,
        )
        return {path: weight.value for path, weight in weights.items()}


def added(*gradients):
    """The sum of gradients."""
    return jax.tree.map(lambda *leaves: sum(leaves), *gradients)


def in_chunks(size, runs):
    return runs.gradient(size)


def masked(runs):
    return runs.gradient(3, mask=runs.mask)


def with_resets(runs):
    return runs.gradient(3, reset=runs.flags)


def masked_with_resets(runs):
    return runs.gradient(LENGTH, mask=runs.mask, reset=runs.flags)


def after_a_reset(runs):
    """The sequence again, after another one; what a rule draws goes on."""
    runs.gradient(3, 2)
    runs.learner.reset_state(BATCH)
    return runs.gradient(3)


def two_calls(runs):
    return added(runs.gradient(3, 0, FIRST), runs.gradient(3, FIRST))


def functional(runs):
    """Two calls of the pure functions, from one state to the next."""

    def part(state, begin, end):
        sequences = runs.xs[begin:end], runs.targets[begin:end]
        step = runs.step_of(runs.learner)
        return runs.pure.grad(state, *sequences, step_fn=step, reduction="sum", chunk_size=3)

    @jax.jit
    def both(state):
        state, first = part(state, 0, FIRST)
        return added(first, part(state, FIRST, LENGTH)[1])

    return both(jax.tree.map(jnp.copy, runs.start))


def summed(model, loss, *sequences):
    """The sum of jitted gradients of calls, one for each entry of the sequences."""
    weights = model.states(brainstate.ParamState)
    step = brainstate.transform.jit(brainstate.transform.grad(loss, weights))
    return added(*(step(*now) for now in zip(*sequences, strict=True)))


def own_gradient(runs):
    model = runs.learner.algorithm.model
    return summed(model, runs.step_of(runs.learner), runs.xs, runs.targets)


def own_windows(runs):
    """Gradients of calls with several steps."""

    def window(xs, targets):
        outputs = runs.learner.algorithm(braintrace.MultiStepData(xs))
        return sum(map(runs.loss, outputs, targets))

    parts = [slice(0, 3), slice(3, 6), slice(6, LENGTH)]
    model = runs.learner.algorithm.model
    return summed(model, window, [runs.xs[p] for p in parts], [runs.targets[p] for p in parts])


def foreign_vmap(runs):
    """A model of one sample, initialised and mapped by brainstate."""
    model = runs.net.build()
    algorithm = runs.rule.algorithm(model, **runs.options)

    def initialise(x):
        brainstate.nn.init_all_states(model)
        algorithm.compile_graph(x)

    lanes = {"axis_size": BATCH, "state_tag": "lane"}
    quietly(brainstate.transform.vmap_new_states(initialise, **lanes), runs.xs[0])
    run = brainstate.nn.Vmap(algorithm, vmap_states="lane")
    return summed(model, lambda x, target: runs.loss(run(x), target), runs.xs, runs.targets)


def mapped(runs):
    return runs.gradient(3, learner=runs.compiled(batch_size=BATCH, vmap=True))


def stream(runs):
    return runs.descended()


def stream_every_2(runs):
    return runs.descended(every=2, mask=runs.mask, reset=runs.flags)


PATHS = {
    "chunks of 1": functools.partial(in_chunks, 1),
    "chunks of 3": functools.partial(in_chunks, 3),
    "chunks of 7": functools.partial(in_chunks, 7),
    "mask": masked,
    "reset": with_resets,
    "mask and reset": masked_with_resets,
    "after a reset": after_a_reset,
    "two calls": two_calls,
    "functional": functional,
    "own gradient": own_gradient,
    "own windows": own_windows,
    "foreign vmap": foreign_vmap,
    "mapped": mapped,
    "stream": stream,
    "stream, every 2": stream_every_2,
}
