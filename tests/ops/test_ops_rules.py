"""The rules of every primitive, against explicit Jacobians of plain JAX.

The oracle keeps the whole Jacobian ``J[u, w]`` of each output element with respect to each
weight and runs the trace recursion on it; the library must give the same contraction with
whatever smaller trace it keeps.
"""

import copy
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops_catalogue import OPERATIONS, array, quick_jit, restored_registries

from braintrace._etrace_op import (
    ETP_PRIMITIVE_SPECS,
    ETP_PRIMITIVES,
    accumulate,
    contract,
    conv,
    element_wise,
    embedding,
    get_primitive_spec,
    grouped_matmul,
    init_trace,
    input_derivative,
    is_joined,
    is_linear_in_input,
    lora_matmul,
    matmul,
    propagate,
    pull_back,
    register_primitive,
    select_outputs,
    squared_norms,
)

WIDTH = ("NWC", "WIO", "NWC")
PLANE = ("NHWC", "HWIO", "NHWC")


def conv_case(numbers, x_shape, kernel_shape, *, bias=True, **options):
    """A convolution in the library's own layout, so that its operands are the arguments."""
    space = len(x_shape) - 2
    strides = options.pop("strides", (1,) * space)
    padding = options.pop("padding", "SAME")

    def marked(x, weights):
        return conv(
            x, *weights, strides=strides, padding=padding, dimension_numbers=numbers, **options
        )

    def plain(x, weights):
        y = jax.lax.conv_general_dilated(
            x, weights[0], strides, padding, dimension_numbers=numbers, **options
        )
        return y + weights[1] if bias else y

    weights = (array(1, *kernel_shape), array(2, kernel_shape[-1]))
    return marked, plain, array(0, *x_shape), weights if bias else weights[:1]


CASES = {
    operation.primitive: (operation.marked, operation.plain, operation.x, operation.weights)
    for operation in OPERATIONS
    if operation.primitive != "etp_elemwise"
}
INDEXED = {
    name: (
        lambda x, weights: embedding(x, *weights),
        lambda x, weights: weights[0][x],
        jnp.asarray(index),
        (array(3, 3, 4),),
    )
    for name, index in (("etp_embed", [1, 0]), ("etp_row", 2))
}
CASES |= INDEXED
CASES["etp_elemwise"] = (
    lambda x, weights: element_wise(weights[0]),
    lambda x, weights: weights[0],
    None,
    (array(0, 2, 3),),
)
CASES["etp_mm without bias"] = (
    lambda x, weights: matmul(x, *weights),
    lambda x, weights: x @ weights[0],
    array(0, 2, 3),
    (array(1, 3, 4),),
)
CASES["etp_conv grouped"] = conv_case(
    WIDTH, (2, 6, 4), (3, 2, 6), feature_group_count=2, strides=(2,)
)
CASES["etp_conv depthwise"] = conv_case(
    PLANE, (2, 4, 5, 3), (2, 3, 1, 6), feature_group_count=3, rhs_dilation=(2, 1)
)
CASES["etp_conv transposed, without bias"] = conv_case(
    PLANE, (2, 3, 2, 2), (2, 2, 2, 3), bias=False, lhs_dilation=(2, 1), padding=((1, 1), (0, 1))
)
CASES["etp_conv grouped, everything dilated and cropped"] = conv_case(
    WIDTH,
    (2, 7, 4),
    (2, 2, 6),
    feature_group_count=2,
    strides=(2,),
    lhs_dilation=(2,),
    rhs_dilation=(3,),
    padding=((-1, 3),),
)
CASES["etp_conv with a kernel larger than its input"] = conv_case(
    WIDTH, (2, 3, 2), (4, 2, 3), padding="VALID"
)
CASES["etp_conv 3-D"] = conv_case(
    ("NDHWC", "DHWIO", "NDHWC"), (2, 3, 2, 3, 2), (2, 1, 2, 2, 2), padding="VALID"
)


WITH_DERIVATIVES = (
    "etp_mm",
    "etp_fb_mv",
    "etp_gmm",
    "etp_sp_mm",
    "etp_lora_mv",
    "etp_conv grouped, everything dilated and cropped",
)


class Case:
    """One equation with its operands, and random factors of four steps."""

    def __init__(self, name):
        marked, self.plain, x, self.weights = CASES[name]
        jaxpr = jax.make_jaxpr(marked)(x, self.weights)
        (equation,) = (e for e in jaxpr.eqns if e.primitive in ETP_PRIMITIVES)
        spec, self.equation = get_primitive_spec(equation.primitive), equation
        layout = spec.resolve_trainable_invars(equation.params)
        self.primitive, self.params, self.names = equation.primitive, equation.params, list(layout)
        self.variables = {name: equation.invars[index] for name, index in layout.items()}
        self.x_var = None if x is None else equation.invars[spec.x_invar_index]
        self.y_var = equation.outvars[0]
        x = None if x is None else np.asarray(x)
        if name in INDEXED:
            self.xs = np.stack([x, -x, (x + 1) % 3, x])
        else:
            self.xs = None if x is None else np.stack([x, -0.5 * x, 0.3 * x[::-1], x**2])
        shape = self.y_var.aval.shape
        self.factors, self.decays = array(5, 4, *shape), array(6, 4, *shape)
        self.signal = array(7, *shape)

    def named(self):
        return dict(zip(self.names, self.weights, strict=True))

    def x(self, step):
        return None if self.xs is None else self.xs[step]

    def steps(self, selection):
        return None if self.xs is None else self.xs[selection]

    def assert_equal(self, got, want):
        assert sorted(got) == sorted(self.names)
        for name, expected in zip(self.names, want, strict=True):
            assert got[name].shape == expected.shape and got[name].dtype == expected.dtype
            np.testing.assert_allclose(got[name], expected, rtol=1e-4, atol=1e-4)

    def term(self, now):
        """The library's terms of a slice of steps."""
        arguments = (self.steps(now), self.factors[now], self.named())
        return accumulate(self.primitive, self.params, *arguments)

    def squared_norms(self):
        arguments = (self.steps(slice(0, 1)), self.factors[:1], self.named())
        return squared_norms(self.primitive, self.params, *arguments)

    def zero_trace(self):
        return init_trace(self.primitive, self.params, self.x_var, self.y_var, self.variables)

    def pulled_back(self):
        arguments = (self.xs, self.factors, self.named())
        return pull_back(self.primitive, self.params, *arguments)

    def for_each_step(self, function, *arrays):
        """All steps in one equation each, of which there are fewer to compile."""
        return jax.vmap(function, (None if self.xs is None else 0, 0))(self.xs, *arrays)

    def vjp_over_steps(self):
        def pulled(x, factor):
            return jax.vjp(functools.partial(self.plain, x), self.weights)[1](factor)[0]

        return [each.sum(0) for each in self.for_each_step(pulled, self.factors)]

    def contracted_trace(self):
        trace = self.zero_trace()
        for step in range(3):
            term = self.term(slice(step, step + 1))
            moved = propagate(self.primitive, self.params, self.decays[step], trace)
            trace = {key: moved[key] + term[key] for key in trace}
        return contract(self.primitive, self.params, self.signal, trace, self.named())

    def contracted_jacobian(self):
        def jacobian(x, _):
            return jax.jacrev(functools.partial(self.plain, x))(self.weights)

        jacobians = self.for_each_step(jacobian, self.factors)
        dense = [0.0] * len(self.weights)
        for step in range(3):
            dense = [
                _by_row(self.decays[step], new[step]) * old
                + _by_row(self.factors[step], new[step]) * new[step]
                for new, old in zip(jacobians, dense, strict=True)
            ]
        return [jnp.tensordot(self.signal, full, self.signal.ndim) for full in dense]

    def selected_outputs(self):
        """Some outputs, by the operands that compute them and out of all; None without a rule."""
        selected = select_outputs(self.primitive, self.params, self.named(), some_outputs)
        if selected is None:
            return None
        weights = tuple(selected[name] for name in self.names)
        found = self.primitive.bind(self.x(0), *weights, **self.params)
        return found, some_outputs(self.plain(self.x(0), self.weights))

    @functools.cached_property
    def results(self):
        """Everything that the tests compare, from one compilation."""
        names = ("xs", "factors", "decays", "signal", "weights")
        return quick_jit(self.compute)({name: getattr(self, name) for name in names})

    def compute(self, arrays):
        # Arguments and not constants: XLA of jax 0.8 folds constant convolutions wrongly.
        case = copy.copy(self)
        vars(case).update(arrays)
        return {
            "pull_back": (case.pulled_back(), case.vjp_over_steps()),
            "recursion": (case.contracted_trace(), case.contracted_jacobian()),
            "together": case.term(slice(0, 4)),
            "single": [case.term(slice(step, step + 1)) for step in range(4)],
            "squared": case.squared_norms(),
            "selected": case.selected_outputs(),
        }


def _by_row(factor, jacobian):
    """Shape a factor so that it multiplies each output element's row of a Jacobian."""
    return factor.reshape(factor.shape + (1,) * (jacobian.ndim - factor.ndim))


case_of = functools.cache(Case)


@pytest.mark.parametrize(
    "name",
    [
        "etp_lora_mm",
        "etp_fb_mv",
        "etp_gmv",
        "etp_row",
        "etp_elemwise",
        "etp_mm without bias",
        "etp_conv with a kernel larger than its input",
    ],
)
def test_pull_back_is_the_vjp_over_time_and_batch(name):
    case_of(name).assert_equal(*case_of(name).results["pull_back"])


@pytest.mark.parametrize("name", CASES)
def test_trace_recursion_is_that_of_the_full_jacobian(name):
    case_of(name).assert_equal(*case_of(name).results["recursion"])


@pytest.mark.parametrize("name", CASES)
def test_accumulate_over_time_is_the_sum_of_steps(name):
    case = case_of(name)
    trace = jax.eval_shape(case.zero_trace)
    for key, value in case.results["together"].items():
        assert (value.shape, value.dtype) == (trace[key].shape, trace[key].dtype)
        total = sum(np.asarray(term[key]) for term in case.results["single"])
        np.testing.assert_allclose(value, total, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_squared_norms_are_those_of_the_terms_of_a_step(name):
    case, spec = case_of(name), get_primitive_spec(case_of(name).primitive)
    found = case.results["squared"]
    assert (found is not None) == (spec.squared_norms is not None)
    for key, squared in (found or {}).items():
        term = np.asarray(case.results["single"][0][key])
        axes = tuple(range(int(spec.batched), term.ndim))
        np.testing.assert_allclose(squared, (term**2).sum(axes), rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        *([name, "its own"] for name in WITH_DERIVATIVES),
        ["etp_mm", "none"],
    ],
)
def test_the_derivative_to_the_input_is_the_jacobian_of_a_sample(name, rule):
    case = case_of(name)
    spec = get_primitive_spec(case.primitive)
    x, y = case.xs[0], np.asarray(case.factors)[0]
    x, y = (x[:1], y[:1]) if spec.batched else (x, y)
    outputs, inputs = np.indices((y.size, x.size))

    def both(x, weights):
        found = input_derivative(case.equation, [x, *weights], inputs, outputs)
        return found, jax.jacrev(case.plain)(x, weights).reshape(y.size, x.size)

    with restored_registries():
        if rule == "none":
            without = dataclasses.replace(spec, joins_input=None, input_derivative=None)
            ETP_PRIMITIVE_SPECS[case.primitive] = without
        joined = is_joined(case.equation, inputs, outputs)
        assert is_linear_in_input(case.equation)
        found, jacobian = quick_jit(both)(x, case.weights)
    np.testing.assert_allclose(np.where(joined, found, 0), jacobian, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(joined, jacobian != 0)


@pytest.mark.parametrize("dtypes", [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_rules_with_mixed_dtypes(dtypes):
    x = array(0, 2, 3).astype(dtypes[0])
    weights = {"weight": array(1, 3, 4).astype(dtypes[1]), "bias": array(2, 4).astype(dtypes[1])}
    jaxpr = jax.make_jaxpr(matmul)(x, *weights.values())
    (equation,) = (e for e in jaxpr.eqns if e.primitive.name == "etp_mm")
    arguments = (equation.primitive, equation.params)
    factor = array(3, 1, 2, 4)
    gradients = pull_back(*arguments, x[None], factor, weights)
    want = np.asarray(x, np.float32).T @ np.asarray(factor[0])
    assert gradients["weight"].dtype == dtypes[1]
    np.testing.assert_allclose(np.asarray(gradients["weight"], np.float32), want, rtol=2e-2)


def test_rules_of_a_complex_product_are_not_conjugated():
    x = array(0, 2, 3) + 1j * array(1, 2, 3)
    factor = array(2, 2, 4) + 1j * array(3, 2, 4)
    (primitive,) = (p for p in ETP_PRIMITIVES if p.name == "etp_mm")
    for weight in (array(4, 3, 4), array(4, 3, 4) + 0j):
        want = np.asarray(x).T @ np.asarray(factor)
        want = want if jnp.iscomplexobj(weight) else want.real
        weights, params = {"weight": weight}, {"has_bias": False}
        direct = pull_back(primitive, params, x[None], factor[None], weights)["weight"]
        term = accumulate(primitive, params, x[None], jnp.ones_like(factor)[None], weights)
        traced = contract(primitive, params, factor, term, weights)["weight"]
        for got in (direct, traced):
            assert got.dtype == weight.dtype
            np.testing.assert_allclose(got, want, rtol=1e-5)


def largest(jaxpr):
    return max(np.prod(out.aval.shape) for e in jaxpr.eqns for out in e.outvars)


@pytest.mark.parametrize("name", ["etp_conv", "etp_conv grouped", "etp_lora_mm"])
def test_pull_back_builds_no_trace(name):
    case = case_of(name)
    trace = jax.eval_shape(case.zero_trace)
    steps = 4

    def chunk(xs, factors):
        return pull_back(case.primitive, case.params, xs, factors, case.named())

    jaxpr = jax.make_jaxpr(chunk)(case.xs, case.factors)
    per_step = max(case.xs[0].size, case.y_var.aval.size, max(w.size for w in case.weights))
    assert largest(jaxpr) <= steps * per_step
    assert largest(jaxpr) < steps * max(array.size for array in trace.values())


LARGE = {
    "matmul": (matmul, array(0, 4, 64), (array(1, 64, 128),)),
    "grouped_matmul": (grouped_matmul, array(0, 4, 2, 64), (array(1, 2, 64, 64),)),
    "lora_matmul": (lora_matmul, array(0, 4, 64), (array(1, 64, 2), array(2, 2, 128))),
    "embedding": (embedding, jnp.arange(4), (array(1, 64, 128),)),
}


@pytest.mark.usefixtures("optimised")
@pytest.mark.parametrize("name", LARGE)
def test_the_term_of_one_step_is_added_to_a_trace_without_being_written_out(name):
    operation, x, weights = LARGE[name]
    (equation,) = jax.make_jaxpr(operation)(x, *weights).eqns
    layout = get_primitive_spec(equation.primitive).resolve_trainable_invars(equation.params)
    named = dict(zip(layout, weights, strict=True))
    variables = {name: equation.invars[index] for name, index in layout.items()}
    call, y = (equation.primitive, equation.params), equation.outvars[0]
    trace = init_trace(*call, equation.invars[0], y, variables)

    def step(trace, x, decay, factor):
        moved = propagate(*call, decay, trace)
        return jax.tree.map(jnp.add, moved, accumulate(*call, x[None], factor[None], named))

    factor = array(3, *y.aval.shape)
    compiled = jax.jit(step, donate_argnums=0).lower(trace, x, factor, factor).compile()
    size = sum(leaf.nbytes for leaf in trace.values())
    assert compiled.memory_analysis().temp_size_in_bytes < size / 2


@pytest.fixture
def registrations():
    with restored_registries():
        yield


@pytest.mark.usefixtures("registrations")
def test_default_rules_of_an_unbatched_primitive_without_batched_form():
    primitive = register_primitive("outer_by_hand", lambda x, w: x @ w)
    primitive.register_etp_rules(
        yw_to_w=lambda hidden_dim, trace: {"weight": trace["weight"] * hidden_dim},
        xy_to_dw=lambda x, hidden_dim, weights: {"weight": jnp.outer(x, hidden_dim)},
        init_drtrl=lambda x, y, w, n: {"weight": jnp.zeros((*w["weight"].aval.shape, n))},
        init_pp=lambda x, y, w, n: jnp.zeros((*y.aval.shape, n)),
    )
    xs, factors, weights = array(0, 5, 3), array(1, 5, 4), {"weight": array(2, 3, 4)}
    want = np.asarray(xs).T @ np.asarray(factors)
    for rule in (pull_back, accumulate):
        np.testing.assert_allclose(rule(primitive, {}, xs, factors, weights)["weight"], want, 1e-5)


def some_outputs(value):
    """The first and the last entry of the last axis."""
    return jnp.concatenate([value[..., :1], value[..., -1:]], axis=-1)


@pytest.mark.core
@pytest.mark.parametrize("name", CASES)
def test_selected_operands_compute_the_selected_outputs(name):
    case = case_of(name)
    if case.results["selected"] is None:
        assert case.primitive.name in ("etp_elemwise", "etp_sp_mm", "etp_sp_mv") or (
            case.params["feature_group_count"] > 1
        )
        return
    np.testing.assert_allclose(*case.results["selected"], rtol=1e-5, atol=1e-5)
