"""A map over the weights of an operation takes its mark away, and the compiler says so."""

import brainstate
import jax
import jax.numpy as jnp
import pytest
from models import small
from ops_catalogue import OPERATIONS

import braintrace

COUNT = 3
MAPS = {"jax": jax.vmap, "brainstate": brainstate.transform.vmap}
BY_NAME = {operation.primitive: operation for operation in OPERATIONS}


class Mapped(brainstate.nn.Module):
    """An operation for each of several weights, next to a marked one or not."""

    def __init__(self, operation, mapped, is_beside=False):
        super().__init__()
        self.stack = brainstate.ParamState(jnp.stack([operation.weights[0]] * COUNT))
        self.rest = operation.weights[1:]
        self.gain = brainstate.ParamState(jnp.ones(()))
        self.operation, self.mapped, self.is_beside = operation, mapped, is_beside

    def init_state(self, *_, **__):
        shape = jax.eval_shape(self.operation.plain, self.operation.x, self.operation.weights).shape
        self.h = brainstate.HiddenState(jnp.zeros((COUNT, *shape)))

    def update(self, x):
        drive = self.mapped(x, self.stack.value, self.rest)
        if self.is_beside:
            drive = drive * braintrace.element_wise(self.gain.value)
        self.h.value = 0.9 * self.h.value + drive
        return self.h.value


def over_weights(operation, transform):
    def mapped(x, stack, rest):
        return transform(lambda weight: operation.marked(x, (weight, *rest)))(stack)

    return mapped


def over_both(operation, transform):
    def mapped(x, stack, rest):
        xs = jnp.stack([x] * COUNT)
        return transform(lambda x, weight: operation.marked(x, (weight, *rest)))(xs, stack)

    return mapped


def model_of(name, transform, over=over_weights, **options):
    operation = BY_NAME[name]
    return operation, Mapped(operation, over(operation, transform), **options)


def compiled(model, x, *arguments, **options):
    brainstate.nn.init_all_states(model)
    return braintrace.compile(model, "d_rtrl", x, *arguments, **options)


@pytest.mark.parametrize("transform", MAPS)
@pytest.mark.parametrize("name", ["etp_mm", "etp_conv", "etp_sp_mv", "etp_embed"])
def test_a_warning_names_the_map(name, transform):
    operation, model = model_of(name, MAPS[transform], over_both, is_beside=True)
    with pytest.warns(braintrace.ApproximationWarning, match=f"'stack' reaches 'h' .*`{name}`"):
        learner = compiled(model, operation.x)
    (found,) = [d for d in learner.graph.diagnostics if d.kind == "not-marked"]
    assert (found.level, found.paths) == ("warning", ("stack", "h"))
    assert "ops_catalogue.py" in found.source
    alone = model_of(name, MAPS[transform])[1]
    alone.mapped = jax.jit(alone.mapped)
    with pytest.raises(braintrace.CompilationError, match=f"`{name}`.*over its weight"):
        compiled(alone, operation.x)


def kinds(learner):
    return [diagnostic.kind for diagnostic in learner.graph.diagnostics]


def test_marks_made_by_the_compiler_replace_a_lost_one():
    operation, model = model_of("etp_mm", jax.vmap)
    learner = compiled(model, operation.x, mark="auto")
    assert "not-marked" not in kinds(learner)
    assert ("stack",) in learner.graph.hidden_param_op_relations[0].parameter_paths


@small({"h": (4,)}, w=jnp.ones((3, 4)))
def fast_weights(self, x):
    """A weight that each sample scales by its own input."""
    self.h.value = 0.5 * self.h.value + braintrace.matmul(x, jnp.sum(x) * self.w.value)
    return self.h.value


def test_a_weight_that_differs_between_samples_is_named():
    with pytest.raises(braintrace.CompilationError, match=r"'w' reaches 'h'.*`vmap=True` over"):
        braintrace.compile(fast_weights(), "d_rtrl", jnp.ones((2, 3)), batch_size=2, vmap=True)
