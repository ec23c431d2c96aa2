"""An operation of one's own, registered in either style, learns under both algorithms."""

import functools

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assertions import assert_gradients_close, assert_gradients_differ
from ops_catalogue import restored_registries

import braintrace

RANDOM = np.random.default_rng(3)
INPUTS = RANDOM.normal(size=(4, 2, 3)).astype(np.float32)
WEIGHT = RANDOM.normal(size=(3, 4)).astype(np.float32) / 2
BIAS = RANDOM.normal(size=4).astype(np.float32) / 2


def product(*args, scale=1.0, has_bias=False):
    y = scale * (args[0] @ args[1])
    return y + args[2] if has_bias else y


def multiply_trace(hidden_dim, trace, *, scale=1.0, has_bias=False):
    result = {"weight": trace["weight"] * jnp.expand_dims(hidden_dim, -2)}
    if has_bias:
        result["bias"] = trace["bias"] * hidden_dim
    return result


def multiply_trace_by_scale_too(hidden_dim, trace, *, scale=1.0, has_bias=False):
    result = multiply_trace(hidden_dim, trace, scale=scale, has_bias=has_bias)
    return {**result, "weight": result["weight"] * scale}


def pull_back(x, hidden_dim, weights, **params):
    def forward(weights):
        bias = [weights["bias"]] if "bias" in weights else []
        return product(x, weights["weight"], *bias, **params)

    return jax.vjp(forward, weights)[1](hidden_dim)[0]


def init_trace(x_var, y_var, weight_vars, num_states):
    batch = x_var.aval.shape[0]
    return {
        name: jnp.zeros((batch, *var.aval.shape, num_states)) for name, var in weight_vars.items()
    }


def init_output_trace(x_var, y_var, weight_vars, num_states):
    return jnp.zeros((*y_var.aval.shape, num_states))


def trainable(params):
    return {"weight": 1, "bias": 2} if params.get("has_bias") else {"weight": 1}


RULES = {"xy_to_dw": pull_back, "init_drtrl": init_trace, "init_pp": init_output_trace}


def by_class(yw_to_w):
    primitive = braintrace.register_primitive("etp_test_scaled", product, batched=True)
    primitive.register_etp_rules(yw_to_w=yw_to_w, **RULES)
    return primitive


def by_spec(yw_to_w):
    spec = braintrace.ETPPrimitiveSpec(
        name="etp_test_scaled",
        impl=product,
        yw_to_w=yw_to_w,
        **RULES,
        trainable_invars_fn=trainable,
        x_invar_index=0,
        batched=True,
    )
    return braintrace.register_primitive_spec(spec)


@pytest.fixture(params=[by_class, by_spec], ids=["class style", "spec style"])
def register(request):
    with restored_registries():
        yield request.param


class Leaky(brainstate.nn.Module):
    def __init__(self, operation):
        super().__init__()
        self.operation = operation
        self.weight = brainstate.ParamState(WEIGHT)
        self.bias = brainstate.ParamState(BIAS)

    def init_state(self, batch_size=None, **kwargs):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, 4)))

    def update(self, x):
        y = self.operation(x, self.weight.value, self.bias.value)
        self.h.value = 0.8 * self.h.value + jnp.tanh(y)
        return self.h.value


def gradient(operation, algorithm, chunk, times=1):
    learner = braintrace.compile(Leaky(operation), algorithm, INPUTS[0], batch_size=2)

    def loss(x):
        return jnp.sum(learner(x) ** 2)

    for _ in range(times):
        found = learner.etrace_grad(INPUTS, step_fn=loss, reduction="sum", chunk_size=chunk)
    return found


def bound(primitive):
    return lambda x, w, b: primitive.bind(x, w, b, scale=1.5, has_bias=True)


def built_in(x, w, b):
    return braintrace.matmul(x, 1.5 * w, b)


@functools.cache
def with_the_built_in_operation(algorithm, chunk):
    return gradient(built_in, algorithm, chunk)


@pytest.mark.parametrize(
    ("register", "algorithm", "chunk"),
    [(by_class, "es_d_rtrl", 3), (by_spec, "d_rtrl", 1), (by_spec, "es_d_rtrl", 3)],
)
def test_it_learns_like_the_built_in_operation(register, algorithm, chunk):
    operation = bound(register(multiply_trace))
    expected = with_the_built_in_operation(algorithm, chunk)
    assert_gradients_close(gradient(operation, algorithm, chunk), expected, 1e-5, algorithm)


def squared(*args):
    return args[0] @ args[1] ** 2 + args[2]


def pull_back_squared(x, hidden_dim, weights):
    def forward(weights):
        return squared(x, weights["weight"], weights["bias"])

    return jax.vjp(forward, weights)[1](hidden_dim)[0]


def test_a_trace_that_depends_on_the_value_of_its_weight():
    """Also where the traces are computed after the sequence, from what was kept of it."""
    spec = braintrace.ETPPrimitiveSpec(
        name="etp_test_squared",
        impl=squared,
        yw_to_w=lambda hidden_dim, trace: multiply_trace(hidden_dim, trace, has_bias=True),
        **{**RULES, "xy_to_dw": pull_back_squared},
        trainable_invars_fn=lambda params: {"weight": 1, "bias": 2},
        x_invar_index=0,
        batched=True,
    )
    with restored_registries():
        found = gradient(braintrace.register_primitive_spec(spec).bind, "d_rtrl", 4, times=2)
    expected = gradient(lambda x, w, b: braintrace.matmul(x, w**2, b), "d_rtrl", 1, times=2)
    assert_gradients_close(found, expected, 1e-5, "squared")


def test_a_trace_rule_that_scales_is_accepted_and_found_out(register):
    primitive = register(multiply_trace_by_scale_too)
    expected = with_the_built_in_operation("d_rtrl", 1)
    assert_gradients_differ(gradient(bound(primitive), "d_rtrl", 1), expected, 1e-2, "scaled")
    report = braintrace.check_primitive(
        primitive, INPUTS[0], WEIGHT, BIAS, scale=1.5, has_bias=True
    )
    assert not report.ok
