"""Rules of the operations: their traces are the explicit Jacobians of plain JAX.

The recurrence is ``h = 0.8 h + tanh(op(x))``. Its paths from state to state go position by
position, so that D_RTRL has to give the contraction with the whole Jacobian, which is
``J = 0.8 J + tanh' dy/dp``.
"""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from operations import BATCH, BY_NAME, OPERATIONS, PLAIN, STEPS, assert_close, convolution, normal

import braintrace

ROWS = pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
DECAY, ALPHA = 0.8, 0.7


class Leaky(brainstate.nn.Module):
    """The recurrence, of one operation."""

    def __init__(self, operation):
        super().__init__()
        self.operation = operation
        self.p = {name: brainstate.ParamState(jnp.asarray(v)) for name, v in operation.p.items()}

    def init_state(self, batch_size=None, **_):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, *self.operation.hidden)))

    def update(self, x):
        y = self.operation.marked(x, {name: state.value for name, state in self.p.items()})
        self.h.value = DECAY * self.h.value + jnp.tanh(y)
        return self.h.value


def loss(h):
    return jnp.sum(h**2 * jnp.linspace(0.5, 1.5, h.size).reshape(h.shape))


def gradient(operation, rule, xs, chunk_size="auto", **options):
    learner = braintrace.compile(
        Leaky(operation), rule, xs[0], batch_size=xs.shape[1], vmap=False, **options
    )
    found = learner.etrace_grad(
        xs, step_fn=lambda x: loss(learner(x)), reduction="sum", chunk_size=chunk_size
    )
    return {path[-1]: value for path, value in found.items()}


def by_jacobians(operation, xs):
    """sum_t signal_t . J_t, with J_t = 0.8 J_{t-1} + tanh'(y_t) dy_t/dp, and nothing left out."""

    @jax.jit
    def total(xs):
        def step(carry, x):
            h, J, found = carry
            h = DECAY * h + jnp.tanh(operation.plain(x, operation.p))
            entering = jax.jacrev(lambda p: jnp.tanh(operation.plain(x, p)))(operation.p)
            J = jax.tree.map(lambda old, new: DECAY * old + new, J, entering)
            signal = jax.grad(loss)(h)
            terms = jax.tree.map(lambda j: jnp.tensordot(signal, j, signal.ndim), J)
            return (h, J, jax.tree.map(jnp.add, found, terms)), None

        shape = (xs.shape[1], *operation.hidden)
        start = jax.tree.map(lambda w: jnp.zeros((*shape, *w.shape)), operation.p)
        zero = jax.tree.map(jnp.zeros_like, operation.p)
        (_, _, found), _ = jax.lax.scan(step, (jnp.zeros(shape), start, zero), xs)
        return found

    return total(xs)


@pytest.mark.core
@pytest.mark.usefixtures("float64")
@ROWS
def test_d_rtrl_keeps_the_jacobian(operation):
    xs = operation.inputs(STEPS, BATCH)
    assert_close(gradient(operation, "d_rtrl", xs, 2), by_jacobians(operation, xs), 1e-10)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("name", "samples"),
    [("matmul", 1), ("matmul", 33), ("lora_matmul", 33), ("conv 1-D", 5), ("sparse_matmul", 33)],
)
def test_any_number_of_samples_adds_up(name, samples):
    operation = BY_NAME[name]
    xs = operation.inputs(2, samples)
    assert_close(gradient(operation, "d_rtrl", xs, 1), by_jacobians(operation, xs), 1e-10)


def by_filters(operation, xs):
    """ES_D_RTRL, with the sums of its two filters written out.

    eps_f = alpha 0.8 eps_f + (1 - alpha) tanh'(y); the filtered inputs are pulled back one by one,
    as every operation is linear in its input, which a bias does not have.
    """

    @jax.jit
    def total(xs):
        h, eps_f, pulls, found = 0.0, 0.0, [], None
        for t, x in enumerate(xs, 1):
            y, pull = jax.vjp(lambda p, x=x: operation.plain(x, p), operation.p)
            h = DECAY * h + jnp.tanh(y)
            eps_f = ALPHA * DECAY * eps_f + (1 - ALPHA) * (1 - jnp.tanh(y) ** 2)
            factor = jax.grad(loss)(h) * eps_f / (1 - ALPHA**t)
            pulls.append(pull)
            for age, pull in enumerate(reversed(pulls)):
                (term,) = pull(ALPHA**age * factor)
                term |= {"b": 0 * term["b"]} if age and "b" in term else {}
                found = term if found is None else jax.tree.map(jnp.add, found, term)
        return found

    return total(xs)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    "name",
    ["conv 2-D", "conv grouped", "sparse_matmul", "lora_matmul", "feedback_matmul", "einsum"],
)
def test_es_d_rtrl_filters_the_input_of(name):
    operation = BY_NAME[name]
    xs = operation.inputs(STEPS, BATCH)
    found = gradient(operation, "es_d_rtrl", xs, 2, decay_or_rank=ALPHA)
    assert_close(found, by_filters(operation, xs), 1e-10)


# --- declarations ---------------------------------------------------------------------------------


def operands_of(equation):
    """Random operands of an equation, with the indices that it had."""
    values = []
    for seed, var in enumerate(equation.invars):
        is_index = jnp.issubdtype(var.aval.dtype, jnp.integer)
        drawn = np.arange(var.aval.size) % 3 if is_index else normal(seed, var.aval.size)
        values.append(jnp.asarray(drawn.reshape(var.aval.shape), var.aval.dtype))
    return values


@pytest.mark.parametrize("name", ["matmul", "sparse_matmul", "lora_matmul"])
def test_the_declaration_agrees_with_automatic_differentiation(name):
    equation = BY_NAME[name].equation()
    operands = operands_of(equation)
    report = braintrace.check_primitive(equation.primitive, *operands, **equation.params)
    assert report.ok, str(report)


@ROWS
def test_the_four_rules_have_the_shapes_and_values_of_their_signatures(operation):
    equation, states = operation.equation(), 3
    primitive, params = equation.primitive, equation.params
    spec, operands = braintrace.get_primitive_spec(primitive), operands_of(equation)
    layout = spec.resolve_trainable_invars(params)
    weights = {name: operands[index] for name, index in layout.items()}
    variables = {name: equation.invars[index] for name, index in layout.items()}
    (y,) = equation.outvars
    x_var = None if spec.x_invar_index is None else equation.invars[spec.x_invar_index]
    x = None if x_var is None else operands[spec.x_invar_index]

    def run(weights):
        values = list(operands)
        for name, index in layout.items():
            values[index] = weights[name]
        return primitive.bind(*values, **params)

    factor = jnp.asarray(normal(7, *y.aval.shape), jnp.float32)

    @jax.jit
    def both(weights):
        pulled = jax.vjp(run, weights)[1](factor)[0]
        return spec.xy_to_dw(x, factor, weights, **params), pulled

    assert_close(*both(weights), 1e-4)
    traces = spec.init_drtrl(x_var, y, variables, states, **params)
    of_state = {name: trace[..., 0] for name, trace in traces.items()}
    moved = jax.eval_shape(lambda *a: spec.yw_to_w(*a, **params), factor, of_state)
    for name, trace in traces.items():
        assert trace.shape == (*moved[name].shape, states) and not np.any(trace)
    assert spec.init_pp(x_var, y, variables, states).shape == (*y.aval.shape, states)


def test_only_an_element_wise_operation_is_passed_through():
    passed = {o.name for o in OPERATIONS if o.equation().primitive.gradient_enabled}
    assert passed == {"element_wise"}
    layout = braintrace.get_primitive_spec(braintrace.etp_lora_mm_p).resolve_trainable_invars
    assert layout({"has_bias": True}) == {"lora_b": 1, "lora_a": 2, "bias": 3}
    assert braintrace.get_primitive_spec(braintrace.etp_elemwise_p).x_invar_index is None


# --- convolutions in every layout, with every option ----------------------------------------------

NUMBERS = jax.lax.ConvDimensionNumbers((0, 1, 2, 3), (0, 1, 2, 3), (0, 2, 1, 3))
LAYOUTS = [
    ((2, 7, 4), (3, 2, 6), ("NWC", "WIO", "NWC"), {"strides": (2,), "feature_group_count": 2}),
    ((2, 4, 7), (6, 4, 3), ("NCW", "OIW", "NCW"), {"padding": "VALID", "rhs_dilation": (2,)}),
    ((7, 2, 3), (2, 3, 4), ("WNC", "WIO", "NCW"), {"padding": "SAME_LOWER"}),
    (
        (2, 3, 5, 6),
        (4, 3, 2, 2),
        ("NCHW", "OIHW", "NCHW"),
        {"lhs_dilation": (2, 1), "padding": [(1, 0), (0, 2)]},
    ),
    (
        (2, 5, 6, 3),
        (2, 3, 1, 6),
        ("NHWC", "HWIO", "NHWC"),
        {"feature_group_count": 3, "strides": (2, 1)},
    ),
    ((5, 6, 3, 2), (3, 6, 2, 3), ("HWCN", "IOHW", "HWNC"), {}),
    ((2, 3, 2, 3, 2), (2, 1, 2, 2, 2), ("NDHWC", "DHWIO", "NCDHW"), {"padding": "VALID"}),
    ((2, 4, 3, 5), (2, 4, 2, 2), NUMBERS, {}),
    ((2, 3, 2), (4, 2, 3), ("NWC", "WIO", "NWC"), {"padding": "VALID"}),  # nothing comes out
    (
        (2, 7, 4),
        (2, 2, 6),
        ("NWC", "WIO", "NWC"),
        {
            "feature_group_count": 2,
            "strides": (2,),
            "lhs_dilation": (2,),
            "rhs_dilation": (3,),
            "padding": [(-1, 3)],
        },
    ),
]


@pytest.mark.parametrize(("x", "kernel", "numbers", "options"), LAYOUTS)
def test_values_and_gradients_in_the_layout(x, kernel, numbers, options):
    rest = {"dimension_numbers": numbers, **options}
    x, kernel = (jnp.asarray(normal(i, *shape), jnp.float32) for i, shape in enumerate((x, kernel)))
    outputs = kernel.shape[
        jax.lax.conv_dimension_numbers(x.shape, kernel.shape, numbers).rhs_spec[0]
    ]
    bias = jnp.asarray(normal(2, outputs), jnp.float32)

    def both(conv):
        return jax.jit(
            lambda *operands: (
                conv(*operands, **rest),
                jax.grad(lambda *o: jnp.sum(jnp.sin(conv(*o, **rest))), (0, 1, 2))(*operands),
            )
        )

    found = both(braintrace.conv)(x, kernel, bias)
    assert_close(found, both(PLAIN.conv)(x, kernel, bias), 2e-5)


def test_one_number_is_that_of_all_axes():
    x, kernel = normal(0, 2, 3, 6, 5), normal(1, 4, 3, 2, 2)
    short = braintrace.conv(x, kernel, strides=2, rhs_dilation=2)
    assert_close(short, braintrace.conv(x, kernel, strides=(2, 2), rhs_dilation=(2, 2)))


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("x", "kernel", "numbers", "options"), [LAYOUTS[i] for i in (3, 6, 9)])
def test_a_convolution_in_the_layout_learns(x, kernel, numbers, options):
    outputs = kernel[jax.lax.conv_dimension_numbers(x, kernel, numbers).rhs_spec[0]]
    operation = convolution("drawn", x[1:], kernel, outputs, numbers, **options)
    xs = operation.inputs(STEPS, BATCH)
    assert_close(gradient(operation, "d_rtrl", xs, 2), by_jacobians(operation, xs), 1e-10)
