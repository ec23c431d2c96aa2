"""What a type checker knows of the drivers: it is checked by mypy, and not run."""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias, assert_type

import brainstate
import jax

import braintrace

PyTree: TypeAlias = Any
Gradients = PyTree  # by path, or like the parameters of a function


def loss(x: jax.Array) -> jax.Array:
    return x


def descend(gradients: Gradients) -> None:
    pass


def of_a_learner(model: brainstate.nn.Module, xs: jax.Array, flag: bool) -> None:
    learner = braintrace.compile(model, "d_rtrl", xs[0], batch_size=2)
    assert_type(learner, braintrace.Learner)
    grad, online, evolve = learner.etrace_grad, learner.etrace_online, learner.etrace_evolve
    grad(xs, step_fn=loss, chunk_size=4, has_aux=flag)
    grad(xs)  # type: ignore[call-arg]
    grad(xs, step_fn=loss, chunks=4)  # type: ignore[call-arg]
    online(xs, step_fn=loss, update_fn=descend)
    online(xs, step_fn=loss, optimizer=flag, every=2, progress=True)
    online(xs, step_fn=loss, learning_rate=0.1)  # type: ignore[call-arg]
    evolve(xs, chunk_size=4, return_outputs=False)
    learner.predict(xs, reset=xs)
    learner.predict(xs, mask=xs)  # type: ignore[call-arg]


@dataclasses.dataclass(frozen=True)
class Decaying:
    """A learning rule of one's own."""

    decay: float
    jacobian = "none"

    def init(self, site: braintrace.Site) -> PyTree:
        return site.zeros()

    def advance(self, site: braintrace.Site, E: PyTree, J: None, x: PyTree, F: PyTree) -> PyTree:
        return jax.tree.map(lambda old, new: self.decay * old + new, E, site.outer(F, x))

    def contract(self, site: braintrace.Site, E: PyTree, mu: PyTree) -> dict[str, jax.Array]:
        return site.contract(mu, E)


def of_a_rule(model: brainstate.nn.Module, x: jax.Array) -> None:
    rule: braintrace.Rule = Decaying(0.9)
    braintrace.compile(model, rule, x)
    braintrace.compile(model, Decaying(0.9), x, rules={"w": Decaying(0.8)})
    braintrace.compile(model, Decaying, x)  # type: ignore[arg-type]


def of_pure_functions(learner: braintrace.Learner, xs: jax.Array) -> None:
    pure = learner.functional()
    state = pure.state()
    assert_type(state, braintrace.LearnerState)
    assert_type(pure.grad(state, xs, step_fn=loss), tuple[braintrace.LearnerState, Gradients])
    assert_type(
        pure.grad(state, xs, step_fn=loss, return_value=True),
        tuple[braintrace.LearnerState, PyTree],
    )
    assert_type(
        pure.online(state, xs, step_fn=loss, update_fn=descend),
        tuple[braintrace.LearnerState, jax.Array],
    )
    assert_type(pure.evolve(state, xs, chunk_size=4), tuple[braintrace.LearnerState, PyTree])


def of_a_function(
    step: Callable[[PyTree, jax.Array, jax.Array], tuple[jax.Array, jax.Array]], xs: jax.Array
) -> None:
    model = braintrace.from_function(step, {"w": xs[0]}, xs[0])
    assert_type(model, braintrace.FunctionModel)
    learner = braintrace.compile(model, "rtrl", xs[0], batch_size=2)
    gradients, losses = learner.etrace_grad(xs, step_fn=loss, return_value=True)
    model.set_params({"w": model.get_params()["w"] - 0.1 * gradients["w"]})
    assert_type(losses, jax.Array)


def of_a_model(model: brainstate.nn.Module, x: jax.Array) -> None:
    assert_type(braintrace.compile_etrace_graph(model, x), braintrace.ETraceGraph)
    learner = braintrace.D_RTRL(model)
    learner.compile_graph(x)
    assert_type(learner.graph, braintrace.ETraceGraph)
    assert_type(learner.report(), braintrace.Report)
