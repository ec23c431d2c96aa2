"""An operation of one's own, registered in either style, learns as a built-in one does."""

import dataclasses
import functools
import itertools

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from operations import assert_close, normal

import braintrace
from braintrace import _etrace_op as registries

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


STYLES = [by_spec, by_class, by_single_rules, by_axes, by_axes_and_class]


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


def gradient(operation, algorithm="d_rtrl", times=1, chunk_size=2, window=None):
    learner = braintrace.compile(Leaky(operation), algorithm, XS[0], batch_size=2)
    for _ in range(times):
        found = learner.etrace_grad(
            XS, step_fn=lambda x: (learner(x) ** 2).sum(), chunk_size=chunk_size, window=window
        )
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


def twice(rule):
    return lambda *args, **params: jax.tree.map(lambda leaf: 2 * leaf, rule(*args, **params))


def in_half(rule):
    return lambda *args, **params: jax.tree.map(jnp.float16, rule(*args, **params))


ENTRIES = [
    (registries.ETP_RULES_YW_TO_W, twice, "d_rtrl"),
    (registries.ETP_RULES_XY_TO_DW, twice, "d_rtrl"),
    (registries.ETP_RULES_XY_TO_DW, twice, "es_d_rtrl"),
]


@pytest.mark.parametrize(("registry", "change", "algorithm"), ENTRIES)
def test_a_replaced_entry_changes_the_gradient(registry, change, algorithm, monkeypatch):
    before = gradient(braintrace.matmul, algorithm, times=2)
    rule = registry[braintrace.etp_mm_p]
    monkeypatch.setitem(registry, braintrace.etp_mm_p, change(rule))
    after = gradient(braintrace.matmul, algorithm, times=2)
    assert not np.array_equal(after["w",], before["w",])


@pytest.mark.parametrize(("name", "algorithm"), [("DRTRL", "d_rtrl"), ("PP", "es_d_rtrl")])
def test_a_replaced_entry_makes_other_traces(name, algorithm, monkeypatch):
    exact = gradient(braintrace.matmul, algorithm, times=2)
    registry = getattr(registries, f"ETP_RULES_INIT_{name}")
    monkeypatch.setitem(registry, braintrace.etp_mm_p, in_half(registry[braintrace.etp_mm_p]))
    learner = braintrace.compile(Leaky(braintrace.matmul), algorithm, XS[0], batch_size=2)
    traces = learner.functional().state().traces
    assert "float16" in {str(leaf.dtype) for leaf in jax.tree.leaves(traces)}
    rounded = gradient(braintrace.matmul, algorithm, times=2)
    assert not np.array_equal(rounded["w",], exact["w",])
    assert_close(rounded, exact, tolerance=1e-3)


def test_an_entry_that_is_replaced_by_an_equal_one_changes_nothing(monkeypatch):
    """The entries alone give the gradient that fused forms give."""
    for algorithm in ("d_rtrl", "es_d_rtrl"):
        before = gradient(braintrace.matmul, algorithm, times=2)
        with monkeypatch.context() as patch:
            for name in ("YW_TO_W", "XY_TO_DW"):
                registry = getattr(registries, f"ETP_RULES_{name}")
                rule = registry[braintrace.etp_mm_p]
                patch.setitem(registry, braintrace.etp_mm_p, functools.partial(rule))
            assert_close(gradient(braintrace.matmul, algorithm, times=2), before)


@pytest.mark.filterwarnings("ignore::braintrace.ApproximationWarning")
@pytest.mark.parametrize("is_passed", [False, True])
def test_gradient_enabled_decides_whether_a_weight_before_it_has_a_trace(is_passed):
    own = braintrace.register_primitive_spec(
        braintrace.ETPPrimitiveSpec(
            name=new_name(),
            impl=lambda weight: weight,
            trace_axes={"weight": ("output",)},
            x_invar_index=None,
            gradient_enabled=is_passed,
        )
    )
    model = Leaky(lambda x, w, b: own.bind(braintrace.matmul(x, w)) + braintrace.element_wise(b))
    learner = braintrace.compile(model, "d_rtrl", XS[0], batch_size=2)
    weights = {
        path for r in learner.graph.hidden_param_op_relations for path in r.trainable_paths.values()
    }
    assert (("w",) in weights) == is_passed


@pytest.mark.parametrize("algorithm", [braintrace.D_RTRL, braintrace.ES_D_RTRL])
def test_an_operation_with_rules_by_hand_trains(algorithm):
    options = {"decay_or_rank": 0.5} if algorithm is braintrace.ES_D_RTRL else {}
    primitive = by_spec(yw_to_w=twice_in_trace)
    model = Leaky(lambda *operands: primitive.bind(*operands, **PARAMS))
    learner = algorithm(model, **options)
    brainstate.nn.init_all_states(model, batch_size=2)
    learner.compile_graph(XS[0])
    first = None
    for _ in range(30):
        learner.reset_state()
        found, loss = learner.etrace_grad(
            XS, step_fn=lambda x: ((learner(x) - 1) ** 2).mean(), return_value=True
        )
        first = float(jnp.mean(loss)) if first is None else first
        for path, value in found.items():
            state = model.states(brainstate.ParamState)[path]
            state.value = state.value - 0.1 * value
    assert float(jnp.mean(loss)) < 0.5 * first


def test_rules_by_hand_do_not_depend_on_chunks():
    primitive = by_spec(yw_to_w=twice_in_trace)
    learner = braintrace.compile(
        Leaky(lambda *operands: primitive.bind(*operands, **PARAMS)), "d_rtrl", XS[0], batch_size=2
    )
    found = []
    for size in (1, 2, 4):
        learner.reset_state()
        found.append(
            dict(
                learner.etrace_grad(XS, step_fn=lambda x: (learner(x) ** 2).sum(), chunk_size=size)
            )
        )
    assert_close(found[0], found[1])
    assert_close(found[0], found[2])


def test_rules_by_hand_carry_into_windows():
    found, expected = (
        gradient(lambda *operands, own=own: own.bind(*operands, **PARAMS), window=2, chunk_size=4)
        for own in (by_spec(), by_axes())
    )
    assert_close(found, expected)


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
