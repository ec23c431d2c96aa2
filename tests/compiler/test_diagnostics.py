"""Kinds of diagnostics: explained on their page, and reported to the rules that they concern."""

import dataclasses
import re
from typing import get_args

import brainstate
import jax
import jax.numpy as jnp
import places
import pytest

import braintrace
from braintrace._compiler import CompilerOptions, compile_model
from braintrace._graph import DiagnosticKind, Jacobian

BATCH, INPUTS, H = 2, 3, 4


def test_the_page_explains_every_kind():
    page = (places.DOCS / "diagnostics.md").read_text()
    headings = re.findall(r"^### `(.+)`$", page, flags=re.MULTILINE)
    assert headings == list(get_args(DiagnosticKind))


@jax.custom_vjp
def clipped(value):
    return value


clipped.defvjp(lambda v: (v, None), lambda _, cotangent: (jnp.clip(cotangent, -0.1, 0.1),))


class Model(brainstate.nn.Module):
    """A recurrent network, plain or marked, with a running mean that is no hidden state."""

    def __init__(self, product, bend=lambda v: v, mean=0.0):
        super().__init__()
        self.product, self.bend, self.mean = product, bend, mean
        keys = jax.random.split(jax.random.key(0))
        self.w = brainstate.ParamState(jax.random.normal(keys[0], (INPUTS, H)))
        self.w_rec = brainstate.ParamState(jax.random.normal(keys[1], (H, H)) / 2)
        self.unused = brainstate.ParamState(jnp.ones(H))

    def init_state(self, batch_size=None, **_):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, H)))
        self.average = brainstate.ShortTermState(jnp.zeros((batch_size, H)))

    def update(self, x):
        recurrent = self.product(self.bend(self.h.value), self.w_rec.value)
        drive = self.product(x, self.w.value)
        from_average = self.product(self.average.value, self.w_rec.value) if self.mean else 0.0
        self.h.value = jnp.tanh(drive + recurrent + from_average)
        if self.mean:
            self.average.value = 0.9 * self.average.value + self.mean * self.h.value
        return self.h.value


@dataclasses.dataclass(frozen=True)
class Rule:
    """All that the compiler asks of a rule: this one carries nothing."""

    jacobian: Jacobian
    carried: bool = True
    needs = frozenset()

    def carries(self, relation):
        return self.carried

    def check(self, graph):
        pass

    def trace_specs(self, graph, every_state):
        return {}


def compiled(model, jacobian, carried=True, **options):
    brainstate.nn.init_all_states(model, batch_size=BATCH)
    x, options = jnp.ones((BATCH, INPUTS)), CompilerOptions(**options)
    return compile_model(model, (x,), None, options, Rule(jacobian, carried))[0]


def kinds(graph, level=None):
    return {d.kind for d in graph.diagnostics if level in (None, d.level)}


@pytest.mark.parametrize("jacobian", ["elementwise", "diagonal"])
def test_a_rule_that_ends_at_weights_hears_of_mixing(jacobian):
    graph = compiled(Model(braintrace.matmul), jacobian)
    found = {(d.kind, d.paths) for d in graph.diagnostics}
    assert found == {("truncated", ("h", "h")), ("no-trace", ("unused",))}
    assert not kinds(graph, "warning")


def test_a_rule_that_passes_weights_hears_of_none():
    graph = compiled(Model(braintrace.matmul), "full", strict=True)
    assert kinds(graph) == {"no-trace"}
    assert graph.hidden_param_op_relations


def test_a_weight_that_a_rule_does_not_carry_is_told():
    graph = compiled(Model(braintrace.matmul), "elementwise", carried=False)
    assert graph.hidden_param_op_relations == ()
    told = {path for d in graph.diagnostics if d.kind == "no-trace" for path in d.paths}
    assert told == {"w", "w_rec", "unused"}


@pytest.mark.parametrize("jacobian", ["elementwise", "diagonal"])
def test_a_model_without_marks_is_refused_where_the_way_ends_at_weights(jacobian):
    with pytest.raises(braintrace.CompilationError, match=r"(?s)No ETP operation.*couples units"):
        compiled(Model(jnp.matmul), jacobian, mark="explicit")


def test_an_untraced_state_behind_a_weight_is_refused_where_weights_are_passed():
    graph = compiled(Model(braintrace.matmul, mean=0.1), "elementwise")
    assert not kinds(graph, "warning")
    assert ("average",) in {d.paths for d in graph.diagnostics if d.kind == "truncated"}
    with pytest.raises(
        braintrace.CompilationError, match="'average' carries values that depend on"
    ):
        compiled(Model(braintrace.matmul, mean=0.1), "full")


def test_a_gradient_bent_behind_a_weight_is_refused_where_weights_are_passed():
    assert not kinds(compiled(Model(braintrace.matmul, bend=clipped), "elementwise"), "warning")
    with pytest.raises(braintrace.CompilationError, match="not proportional"):
        compiled(Model(braintrace.matmul, bend=clipped), "full")


class ByUnit(brainstate.nn.Module):
    """A loop over units: a step of it for each."""

    def __init__(self, units):
        super().__init__()
        self.w = brainstate.ParamState(jnp.ones((3, units)))

    def init_state(self, batch_size=None, **kwargs):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, self.w.value.shape[1])))

    def update(self, x):
        drive = 0.9 * self.h.value + braintrace.matmul(x, self.w.value)
        _, h = jax.lax.scan(lambda carry, unit: (carry, jnp.tanh(unit)), 0.0, drive.T)
        self.h.value = h.T
        return self.h.value


def test_loops_are_followed_up_to_a_length():
    learner = braintrace.compile(ByUnit(256), "d_rtrl", jnp.ones((2, 3)), batch_size=2)
    assert learner.graph.diagnostics == ()
    with pytest.raises(braintrace.CompilationError, match="through `scan`, which couples units"):
        braintrace.compile(ByUnit(257), "d_rtrl", jnp.ones((2, 3)), batch_size=2)
