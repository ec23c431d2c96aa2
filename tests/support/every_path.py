"""The gradient of one model on every path that a user can take, next to BPTT and other oracles."""

import functools

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
from drivers import calls_gradient, stream_gradient, summed

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
    xs
        Inputs, time and samples first.
    rule, options
        Of `braintrace.compile`.
    """

    def __init__(self, make, xs, rule="d_rtrl", **options):
        self.make, self.xs, self.rule, self.options = make, xs, rule, options

    @property
    def batch(self):
        return self.xs.shape[1]

    @functools.cached_property
    def learner(self):
        return self._compiled(batch_size=self.batch)

    def _compiled(self, **more):
        return braintrace.compile(self.make(), self.rule, self.xs[0], **more, **self.options)

    def sequence(self):
        self.learner.reset_state(self.batch)
        return self._at_once(self.learner, self.xs)

    def two_calls(self):
        self.learner.reset_state(self.batch)
        parts = [self._at_once(self.learner, xs) for xs in (self.xs[:3], self.xs[3:])]
        return jax.tree.map(jnp.add, *parts)

    def after_a_reset(self):
        self._at_once(self.learner, self.xs[::-1])
        self.learner.reset_state(where=np.array(True))
        return self._at_once(self.learner, self.xs)

    def stream(self):
        self.learner.reset_state(self.batch)
        step_fn = functools.partial(_loss_of, self.learner)
        return _by_name(stream_gradient(self.learner, self.xs, step_fn=step_fn))

    def own_gradient(self):
        self.learner.reset_state(self.batch)
        return self._step_by_step(self.learner, self.learner.algorithm.model)

    def mapped_by_the_compiler(self):
        return self._at_once(self._compiled(vmap=True), self.xs)

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

    def _at_once(self, learner, xs):
        step_fn = functools.partial(_loss_of, learner)
        return _by_name(learner.etrace_grad(xs, step_fn=step_fn, reduction="sum", chunk_size=2))

    def _step_by_step(self, run, model):
        return _by_name(calls_gradient(model, functools.partial(_loss_of, run), self.xs))

    def bptt(self):
        """The gradient by `jax.grad` through all steps, without an algorithm."""
        return self._through_time(self.xs, batch_size=self.batch)

    def bptt_of_samples(self):
        """The same, of one sample after the other by the step of one."""
        each = [self._through_time(self.xs[:, i]) for i in range(self.batch)]
        return summed(each)

    def _through_time(self, xs, **batch):
        model = self.make()
        brainstate.nn.init_all_states(model, **batch)
        weights = model.states(brainstate.ParamState)

        def total():
            return sum(loss(model(x)) for x in xs)

        return _by_name(brainstate.transform.grad(total, weights)())


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


def _loss_of(run, x):
    return loss(run(x))


def _by_name(gradients):
    return {"/".join(map(str, path)): np.asarray(value) for path, value in gradients.items()}
