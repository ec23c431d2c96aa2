"""Registering one's own operation, and the checks that hold its rules."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops_catalogue import OPERATIONS, array, restored_registries

from braintrace import _etrace_op
from braintrace._errors import PrimitiveError
from braintrace._etrace_op import (
    ETPPrimitiveSpec,
    check_primitive,
    get_primitive_spec,
    register_primitive,
    register_primitive_spec,
)

BATCHED = {"etp_conv", "etp_embed", "etp_fb_mm", "etp_gmm", "etp_lora_mm", "etp_mm", "etp_sp_mm"}
RULE_REGISTRIES = {
    "yw_to_w": _etrace_op.ETP_RULES_YW_TO_W,
    "xy_to_dw": _etrace_op.ETP_RULES_XY_TO_DW,
    "init_drtrl": _etrace_op.ETP_RULES_INIT_DRTRL,
    "init_pp": _etrace_op.ETP_RULES_INIT_PP,
}


@pytest.fixture(autouse=True)
def registrations():
    with restored_registries():
        yield


def scaled_impl(x, weight, *bias, scale=1.0, has_bias=False):
    y = scale * (x @ weight)
    return y + bias[0] if has_bias else y


def scaled_yw_to_w(hidden_dim, trace, *, scale=1.0, has_bias=False):
    result = {"weight": trace["weight"] * hidden_dim[:, None, :]}
    return {**result, "bias": trace["bias"] * hidden_dim} if has_bias else result


def scaled_xy_to_dw(x, hidden_dim, weights, *, scale=1.0, has_bias=False):
    result = {"weight": scale * (x.T @ hidden_dim)}
    return {**result, "bias": hidden_dim.sum(0)} if has_bias else result


def scaled_init_drtrl(x_var, y_var, weight_vars, n):
    batch = x_var.aval.shape[0]
    return {k: jnp.zeros((batch, *v.aval.shape, n)) for k, v in weight_vars.items()}


def scaled_init_pp(x_var, y_var, weight_vars, n):
    return jnp.zeros((*y_var.aval.shape, n))


RULES = {
    "yw_to_w": scaled_yw_to_w,
    "xy_to_dw": scaled_xy_to_dw,
    "init_drtrl": scaled_init_drtrl,
    "init_pp": scaled_init_pp,
}
OPERANDS = (array(0, 2, 3), array(1, 3, 4), array(2, 4))
PARAMS = {"scale": 2.0, "has_bias": True}


def scaled_layout(params):
    return {"weight": 1, "bias": 2} if params["has_bias"] else {"weight": 1}


def scaled_spec(**changes):
    fields = {
        "name": "scaled",
        "impl": scaled_impl,
        **RULES,
        "trainable_invars_fn": scaled_layout,
        "x_invar_index": 0,
        "batched": True,
    }
    return ETPPrimitiveSpec(**{**fields, **changes})


def own_names(primitives):
    """Names of the library's own primitives, without those of other tests and of docstrings."""
    made = {p.name: p.implementation for p in primitives}
    return {
        name
        for name, function in made.items()
        if function.__module__.startswith("braintrace.")
        and not function.__code__.co_filename.startswith("<doctest")
    }


def test_the_built_in_primitives_have_all_rules():
    names = {operation.primitive for operation in OPERATIONS}
    assert own_names(_etrace_op.ETP_PRIMITIVES) == names
    assert own_names(_etrace_op.BATCHED_PRIMITIVES) == BATCHED
    for registry in (*RULE_REGISTRIES.values(), _etrace_op.ETP_PRIMITIVE_SPECS):
        assert own_names(registry) == names
    passed_through = [p for p in _etrace_op.ETP_PRIMITIVES if p.gradient_enabled]
    assert own_names(passed_through) == {"etp_elemwise"}


AXES = {"weight": ("input", "output"), "bias": ("output",)}


def declared(register):
    """Register the operation without any rule."""
    if register == "by spec":
        spec = ETPPrimitiveSpec(name="scaled", impl=scaled_impl, trace_axes=AXES, batched=True)
        return register_primitive_spec(spec)
    primitive = register_primitive("scaled", scaled_impl, batched=True)
    primitive.register_etp_rules(trace_axes=AXES)
    return primitive


@pytest.mark.parametrize("register", ["by spec", "by class"])
def test_the_rules_of_a_declaration_are_those_written_by_hand(register):
    primitive = declared(register)
    spec = get_primitive_spec(primitive)
    assert spec.resolve_trainable_invars(PARAMS) == {"weight": 1, "bias": 2}
    assert spec.resolve_trainable_invars({}) == {"weight": 1}
    assert check_primitive(primitive, *OPERANDS, **PARAMS).ok
    x, weights = OPERANDS[0], {"weight": OPERANDS[1], "bias": OPERANDS[2]}
    factor = array(3, 2, 4)
    trace = {name: array(4, 2, *weight.shape) for name, weight in weights.items()}
    jaxpr = jax.make_jaxpr(lambda *operands: primitive.bind(*operands, **PARAMS))(*OPERANDS)
    x_var, *weight_vars = jaxpr.eqns[0].invars
    variables = x_var, jaxpr.eqns[0].outvars[0], dict(zip(weights, weight_vars, strict=True))

    def results(rules, of_trace):
        return [
            rules["xy_to_dw"](x, factor, weights, **PARAMS),
            rules["yw_to_w"](factor, trace, **PARAMS),
            rules["init_drtrl"](*variables, 3, **of_trace),
            rules["init_pp"](*variables, 3),
        ]

    registered = {kind: registry[primitive] for kind, registry in RULE_REGISTRIES.items()}
    assert_trees_close(results(registered, PARAMS), results(RULES, {}))


def assert_trees_close(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_a_declaration_of_another_function_has_the_rules_of_that_function():
    spec = get_primitive_spec(declared("by spec"))
    tripled = dataclasses.replace(
        spec, name="tripled", impl=lambda x, weight, bias: 3 * (x @ weight) + bias
    )
    primitive = register_primitive_spec(tripled)
    assert get_primitive_spec(primitive).resolve_trainable_invars({}) == {"weight": 1, "bias": 2}
    assert check_primitive(primitive, *OPERANDS).ok


def test_an_operation_without_trace_axes_needs_its_trace_rule():
    spec = ETPPrimitiveSpec(name="scaled", impl=scaled_impl, batched=True)
    with pytest.raises(PrimitiveError, match=r"`yw_to_w` of `scaled` .* or the `trace_axes`"):
        register_primitive_spec(spec)


RENAMED = {"dt_to_t" if kind == "yw_to_w" else kind: rule for kind, rule in RULES.items()}


def by_class(rules=RULES):
    primitive = register_primitive("scaled", scaled_impl, batched=True)
    primitive.register_etp_rules(**rules)
    return primitive


def by_single_rules(rules=RULES):
    primitive = register_primitive("scaled", scaled_impl, batched=True)
    for kind, rule in rules.items():
        assert getattr(primitive, f"register_{kind}")(rule) is rule
    return primitive


@pytest.mark.parametrize(
    "register",
    [
        by_class,
        by_single_rules,
        lambda: register_primitive_spec(scaled_spec()),
        lambda: by_class(RENAMED),
        lambda: by_single_rules(RENAMED),
        lambda: register_primitive_spec(scaled_spec(**RENAMED, yw_to_w=None)),
    ],
)
def test_every_style_gives_a_complete_primitive(register):
    primitive = register()
    assert str(primitive) == "scaled" and type(primitive).__name__ == "ETPPrimitive"
    assert primitive.batched and not primitive.gradient_enabled
    assert primitive in _etrace_op.ETP_PRIMITIVES and primitive in _etrace_op.BATCHED_PRIMITIVES
    for kind, registry in RULE_REGISTRIES.items():
        assert registry[primitive] is RULES[kind]
    spec = get_primitive_spec(primitive)
    assert spec.resolve_trainable_invars(PARAMS) == {"weight": 1, "bias": 2}
    assert spec.resolve_trainable_invars({"has_bias": False}) == {"weight": 1}
    y = primitive.bind(*OPERANDS, **PARAMS)
    np.testing.assert_allclose(y, 2 * (OPERANDS[0] @ OPERANDS[1]) + OPERANDS[2], rtol=1e-5)
    assert check_primitive(primitive, *OPERANDS, **PARAMS).ok


def test_the_spec_comes_back_from_its_primitive():
    spec = scaled_spec()
    assert get_primitive_spec(register_primitive_spec(spec)) is spec
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.name = "other"
    renamed = scaled_spec(**RENAMED, yw_to_w=None)
    assert renamed == spec and dataclasses.replace(renamed, name="other").yw_to_w is spec.yw_to_w


def test_a_rule_has_one_name_at_a_time():
    rules = {**RULES, "dt_to_t": scaled_yw_to_w}
    with pytest.raises(PrimitiveError, match="`scaled` got both `yw_to_w` and `dt_to_t`"):
        scaled_spec(**rules)
    with pytest.raises(PrimitiveError, match="`scaled` got both `yw_to_w` and `dt_to_t`"):
        by_class(rules)


def test_a_registered_primitive_stays_itself_under_vmap():
    primitive = register_primitive_spec(scaled_spec())
    xs = array(3, 5, 2, 3)
    mapped = jax.vmap(lambda x: primitive.bind(x, *OPERANDS[1:], **PARAMS))
    names = [equation.primitive.name for equation in jax.make_jaxpr(mapped)(xs).eqns]
    assert names == ["reshape", "scaled", "reshape"]
    np.testing.assert_allclose(mapped(xs)[1], primitive.bind(xs[1], *OPERANDS[1:], **PARAMS), 1e-5)


def test_missing_rules_are_named():
    primitive = register_primitive("scaled", scaled_impl, batched=True)
    primitive.register_yw_to_w(scaled_yw_to_w)
    with pytest.raises(PrimitiveError, match="`scaled` has no rule `xy_to_dw`, `init_drtrl`"):
        get_primitive_spec(primitive)
    with pytest.raises(PrimitiveError, match="`scaled` is registered already"):
        register_primitive_spec(scaled_spec())
    with pytest.raises(PrimitiveError, match="`dot_general` is not an ETP primitive"):
        get_primitive_spec(jax.lax.dot_general_p)


# --- wrong rules: each one is a way in which an author goes wrong


def _twice_in_trace(hidden_dim, trace, *, scale=1.0, has_bias=False):
    result = scaled_yw_to_w(hidden_dim, trace, has_bias=has_bias)
    return {name: scale * value for name, value in result.items()}


def _without_scale(x, hidden_dim, weights, *, scale=1.0, has_bias=False):
    return scaled_xy_to_dw(x, hidden_dim, weights, has_bias=has_bias)


def _without_bias(x, hidden_dim, weights, *, scale=1.0, has_bias=False):
    return scaled_xy_to_dw(x, hidden_dim, weights, scale=scale)


def _transposed_factor(hidden_dim, trace, *, scale=1.0, has_bias=False):
    return {"weight": trace["weight"] * hidden_dim[:, :, None], "bias": trace["bias"] * hidden_dim}


def _half_precision(x, hidden_dim, weights, *, scale=1.0, has_bias=False):
    gradients = scaled_xy_to_dw(x, hidden_dim, weights, scale=scale, has_bias=has_bias)
    return {name: gradient.astype(jnp.float16) for name, gradient in gradients.items()}


def _centred(x, weight, *bias, scale=1.0, has_bias=False):
    return scaled_impl(x - x.mean(0), weight, *bias, scale=scale, has_bias=has_bias)


WRONG = {
    "a factor twice": {"yw_to_w": _twice_in_trace},
    "no factor": {"xy_to_dw": _without_scale},
    "no bias": {"xy_to_dw": _without_bias},
    "transposed": {"yw_to_w": _transposed_factor},
    "half precision": {"xy_to_dw": _half_precision},
    "samples that share something": {"impl": _centred},
}


@pytest.mark.parametrize("name", WRONG)
def test_check_primitive_catches_a_wrong_rule(name):
    primitive = register_primitive_spec(scaled_spec(**WRONG[name]))
    report = check_primitive(primitive, *OPERANDS, **PARAMS)
    assert not report.ok
    assert "NOT all rules agree" in str(report)


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.primitive)
def test_the_built_in_rules_pass(operation):
    jaxpr = jax.make_jaxpr(operation.marked)(operation.x, operation.weights)
    (equation,) = (e for e in jaxpr.eqns if e.primitive.name == operation.primitive)
    examples = [array(i, *v.aval.shape).astype(v.aval.dtype) for i, v in enumerate(equation.invars)]
    report = check_primitive(equation.primitive, *examples, **equation.params)
    assert report.ok, str(report)
