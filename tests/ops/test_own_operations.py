"""An operation of one's own, registered in either style, learns as a built-in one does."""

import dataclasses
import itertools

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from operations import assert_close, normal

import braintrace

NUMBERS = itertools.count()
XS, W, B = (np.float32(normal(i, *shape)) for i, shape in enumerate([(4, 2, 3), (3, 4), (4,)]))
PARAMS = {"scale": 1.5, "has_bias": True}


def new_name():
    """Names are registered for good."""
    return f"own_operation_{next(NUMBERS)}"


def product(x, weight, *bias, scale=1.0, has_bias=False):
    y = scale * (x @ weight)
    return y + bias[0] if has_bias else y


def yw_to_w(hidden_dim, trace, *, scale=1.0, has_bias=False):
    moved = {"weight": trace["weight"] * jnp.expand_dims(hidden_dim, -2)}
    return {**moved, "bias": trace["bias"] * hidden_dim} if has_bias else moved


def xy_to_dw(x, hidden_dim, weights, **params):
    def forward(weights):
        return product(x, *(weights[name] for name in trainable(params)), **params)

    return jax.vjp(forward, weights)[1](hidden_dim)[0]


def init_drtrl(x_var, y_var, weight_vars, num_hidden_state):
    lead, states = x_var.aval.shape[0], num_hidden_state
    return {k: jnp.zeros((lead, *v.aval.shape, states)) for k, v in weight_vars.items()}


def init_pp(x_var, y_var, weight_vars, num_hidden_state):
    return jnp.zeros((*y_var.aval.shape, num_hidden_state))


def trainable(params):
    return {"weight": 1, "bias": 2} if params.get("has_bias") else {"weight": 1}


RULES = {
    "yw_to_w": yw_to_w,
    "xy_to_dw": xy_to_dw,
    "init_drtrl": init_drtrl,
    "init_pp": init_pp,
}
AXES = {"weight": ("input", "output"), "bias": ("output",)}


def spec_of(**changes):
    fields = {"name": new_name(), "impl": product, **RULES, "trainable_invars_fn": trainable}
    fields |= {"x_invar_index": 0, "batched": True}
    return braintrace.ETPPrimitiveSpec(**{**fields, **changes})


def by_spec(**changes):
    return braintrace.register_primitive_spec(spec_of(**changes))


def by_class(**rules):
    primitive = braintrace.register_primitive(new_name(), product, batched=True)
    primitive.register_etp_rules(**{**RULES, **rules})
    return primitive


def by_single_rules():
    primitive = braintrace.register_primitive(new_name(), product, batched=True)
    for kind, rule in RULES.items():
        assert getattr(primitive, f"register_{kind}")(rule) is rule
    return primitive


def by_axes():
    """Only the axes of the traces are declared."""
    return braintrace.register_primitive_spec(
        braintrace.ETPPrimitiveSpec(name=new_name(), impl=product, trace_axes=AXES, batched=True)
    )


def by_axes_and_class():
    primitive = braintrace.register_primitive(new_name(), product, batched=True)
    primitive.register_etp_rules(trace_axes=AXES)
    return primitive


def by_another_name():
    return by_spec(yw_to_w=None, dt_to_t=yw_to_w)


STYLES = [by_spec, by_class, by_single_rules, by_axes, by_axes_and_class, by_another_name]


class Leaky(brainstate.nn.Module):
    def __init__(self, operation):
        super().__init__()
        self.operation = operation
        self.w, self.b = brainstate.ParamState(W), brainstate.ParamState(B)

    def init_state(self, batch_size=None, **_):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, 4)))

    def update(self, x):
        y = self.operation(x, self.w.value, self.b.value)
        self.h.value = 0.8 * self.h.value + jnp.tanh(y)
        return self.h.value


def gradient(operation, algorithm="d_rtrl", times=1):
    learner = braintrace.compile(Leaky(operation), algorithm, XS[0], batch_size=2)
    for _ in range(times):
        found = learner.etrace_grad(XS, step_fn=lambda x: (learner(x) ** 2).sum(), chunk_size=2)
    return dict(found)


@pytest.mark.parametrize("register", [by_spec, by_class, by_axes])
def test_a_style_learns_as_the_built_in_operation(register):
    primitive = register()
    algorithm = "es_d_rtrl" if register is by_axes else "d_rtrl"
    found = gradient(lambda *operands: primitive.bind(*operands, **PARAMS), algorithm)
    assert_close(found, gradient(lambda x, w, b: braintrace.matmul(x, 1.5 * w, b), algorithm))


@pytest.mark.parametrize("register", STYLES)
def test_every_style_declares_the_same(register):
    primitive = register()
    assert type(primitive) is braintrace.ETPPrimitive
    assert primitive.batched and not primitive.gradient_enabled
    spec = braintrace.get_primitive_spec(primitive)
    assert spec.name == str(primitive)
    assert spec.resolve_trainable_invars(PARAMS) == {"weight": 1, "bias": 2}
    assert spec.resolve_trainable_invars({"has_bias": False}) == {"weight": 1}
    assert braintrace.check_primitive(primitive, XS[0], W, B, **PARAMS).ok
    mapped = jax.vmap(lambda x: primitive.bind(x, W, B, **PARAMS))
    np.testing.assert_allclose(mapped(XS), 1.5 * (XS @ W) + B, rtol=1e-5)
    assert str(primitive) in str(jax.make_jaxpr(mapped)(XS))


def test_a_declaration_comes_back_and_is_changed_by_replacement():
    spec = spec_of()
    assert braintrace.get_primitive_spec(braintrace.register_primitive_spec(spec)) is spec
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.name = "other"
    other = dataclasses.replace(spec, name=new_name())
    assert braintrace.register_primitive_spec(other).name == other.name


def test_a_trace_that_depends_on_the_value_of_its_weight():
    def squared(x, weight, bias):
        return x @ weight**2 + bias

    spec = braintrace.ETPPrimitiveSpec(
        name=new_name(), impl=squared, trace_axes=AXES, batched=True, linear_in_input=True
    )
    own = braintrace.register_primitive_spec(spec)
    found = gradient(own.bind, times=2)
    assert_close(found, gradient(lambda x, w, b: braintrace.matmul(x, w**2, b), times=2))


def test_an_operation_that_is_passed_through():
    """The identity with a mark: the weight in front of it keeps its trace."""
    spec = dataclasses.replace(
        braintrace.get_primitive_spec(braintrace.etp_elemwise_p), name=new_name()
    )
    own = braintrace.register_primitive_spec(spec)
    assert own.gradient_enabled
    found = gradient(lambda x, w, b: braintrace.matmul(x, w) + own.bind(b))
    assert_close(found, gradient(lambda x, w, b: braintrace.matmul(x, w, b)))


# --- mistakes of authors --------------------------------------------------------------------------


def twice_in_trace(hidden_dim, trace, *, scale=1.0, **params):
    return jax.tree.map(lambda leaf: scale * leaf, yw_to_w(hidden_dim, trace, **params))


def transposed(hidden_dim, trace, **_):
    return {"weight": trace["weight"] * hidden_dim[:, :, None], "bias": trace["bias"] * hidden_dim}


def without_scale(x, hidden_dim, weights, *, scale=1.0, **params):
    return xy_to_dw(x, hidden_dim, weights, **params)


def without_bias(x, hidden_dim, weights, **params):
    return {"weight": xy_to_dw(x, hidden_dim, weights, **params)["weight"]}


def in_half_precision(x, hidden_dim, weights, **params):
    return jax.tree.map(jnp.float16, xy_to_dw(x, hidden_dim, weights, **params))


def centred(x, weight, *bias, **params):
    return product(x - x.mean(0), weight, *bias, **params)


WRONG = {
    "a factor twice": {"yw_to_w": twice_in_trace},
    "transposed": {"yw_to_w": transposed},
    "no factor": {"xy_to_dw": without_scale},
    "no bias": {"xy_to_dw": without_bias},
    "half precision": {"xy_to_dw": in_half_precision},
    "samples that share something": {"impl": centred},
}


@pytest.mark.parametrize("name", WRONG)
def test_check_primitive_finds(name):
    report = braintrace.check_primitive(by_spec(**WRONG[name]), XS[0], W, B, **PARAMS)
    assert not report.ok
    assert "NOT" in str(report)


def test_declarations_that_are_not_complete_are_refused():
    primitive = braintrace.register_primitive(new_name(), product, batched=True)
    primitive.register_yw_to_w(yw_to_w)
    with pytest.raises(braintrace.PrimitiveError, match="init_drtrl"):
        braintrace.get_primitive_spec(primitive)
    with pytest.raises(braintrace.PrimitiveError, match="already"):
        by_spec(name=primitive.name)
    with pytest.raises(braintrace.PrimitiveError, match="dot_general"):
        braintrace.get_primitive_spec(jax.lax.dot_general_p)
    with pytest.raises(braintrace.PrimitiveError, match="trace_axes"):
        bare = braintrace.ETPPrimitiveSpec(name=new_name(), impl=product, batched=True)
        braintrace.register_primitive_spec(bare)
    with pytest.raises(braintrace.PrimitiveError, match="dt_to_t"):
        by_class(dt_to_t=yw_to_w)
