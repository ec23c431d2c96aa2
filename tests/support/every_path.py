"""The gradient of one model on every path that a user can take, next to BPTT and other oracles."""

import functools

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
from backpropagation import backpropagated
from drivers import calls_gradient, stream_gradient
from recorded import without_units

import braintrace


def loss(output):
    """The loss of one step, summed over samples."""
    return ((output - 0.3) ** 2).sum()


class Paths:
    """One model under one rule.

    Parameters
    ----------
    make
        Returns a model of which `init_state` takes the batch, or none.
    xs, targets
        Inputs, and targets if the loss takes any, time and samples first.
    rule, options
        Of `braintrace.compile`.
    loss
        Of the output of a step, and of its target.
    """

    def __init__(self, make, xs, rule="d_rtrl", *targets, loss=loss, **options):
        self.make, self.xs, self.rule, self.options = make, xs, rule, options
        self.sequences, self.loss = (xs, *targets), loss
        self._is_new = True

    @property
    def batch(self):
        return self.xs.shape[1]

    @functools.cached_property
    def learner(self):
        return self._compiled(batch_size=self.batch)

    def _compiled(self, **more):
        return braintrace.compile(self.make(), self.rule, self.xs[0], **more, **self.options)

    def sequence(self, chunk_size=2):
        self._start()
        return self._at_once(self.learner, chunk_size=chunk_size)

    def two_calls(self):
        self._start()
        parts = [self._at_once(self.learner, part) for part in (slice(3), slice(3, None))]
        return jax.tree.map(jnp.add, *parts)

    def after_a_reset(self):
        self._is_new = False
        self._at_once(self.learner, slice(None, None, -1))
        self.learner.reset_state(where=np.array(True))
        return self._at_once(self.learner)

    def stream(self):
        """By `etrace_online`, which adds up what would change the parameters."""
        self._start()
        step_fn = functools.partial(self.loss_of, self.learner)
        return _by_name(stream_gradient(self.learner, *self.sequences, step_fn=step_fn))

    def own_gradient(self):
        """Step by step, each in a gradient of the user's own."""
        self._start()
        return self._step_by_step(self.learner, self.learner.algorithm.model)

    def mapped_by_the_compiler(self):
        return self._at_once(self._compiled(vmap=True))

    def foreign_vmap(self):
        model = self.make()
        algorithm = braintrace.compile(
            self.make(), self.rule, self.xs[0, 0], **self.options
        ).algorithm
        algorithm = type(algorithm)(model, **self.options)

        def initialise(x):
            brainstate.nn.init_all_states(model)
            algorithm.compile_graph(x)

        lanes = {"axis_size": self.batch, "state_tag": "lane"}
        brainstate.transform.vmap_new_states(initialise, **lanes)(self.xs[0])
        return self._step_by_step(brainstate.nn.Vmap(algorithm, vmap_states="lane"), model)

    def loss_of(self, run, x, *targets):
        """The loss of one step."""
        return self.loss(run(x), *targets)

    def _start(self):
        """A new learner is at the beginning, which a reset needs a program for."""
        if not self._is_new:
            self.learner.reset_state(self.batch)
        self._is_new = False
        brainstate.random.seed(7)

    def _at_once(self, learner, part=slice(None), chunk_size=2):
        step_fn = functools.partial(self.loss_of, learner)
        sequences = [sequence[part] for sequence in self.sequences]
        options = {"reduction": "sum", "chunk_size": chunk_size}
        return _by_name(learner.etrace_grad(*sequences, step_fn=step_fn, **options))

    def _step_by_step(self, run, model):
        step_fn = functools.partial(self.loss_of, run)
        return _by_name(calls_gradient(model, step_fn, *self.sequences))

    def bptt(self):
        """The gradient by `jax.grad` through all steps, without an algorithm."""
        return self._through_time(self.xs, batch_size=self.batch)

    def _through_time(self, xs, **batch):
        def step(model, x):
            return self.loss(model(x))

        return _by_name(backpropagated(self.make(), step, xs, **batch))


PATHS = (
    Paths.sequence,
    Paths.two_calls,
    Paths.after_a_reset,
    Paths.stream,
    Paths.own_gradient,
    Paths.mapped_by_the_compiler,
    Paths.foreign_vmap,
)
OF_SAMPLES = PATHS[-2:]
"""Those of the step of one sample."""


def _by_name(gradients):
    return {"/".join(map(str, path)): without_units(value) for path, value in gradients.items()}
