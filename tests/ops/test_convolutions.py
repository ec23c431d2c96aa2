"""Convolutions in every layout, with every option: values, gradients, and learning."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import drawn
from operations import BATCH, PLAIN, STEPS, assert_close, convolution, normal
from test_rules import by_jacobians, gradient

import braintrace

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


@st.composite
def convolutions(draw):
    """Draw a row whose axes have sizes of up to 6."""
    space = draw(st.integers(1, 2))
    numbers = draw(st.sampled_from(DRAWN[space]))
    groups, per_group, outputs = (draw(st.integers(1, n)) for n in (2, 2, 3))

    def each(low, high):
        return tuple(draw(st.integers(low, high)) for _ in range(space))

    letters = numbers[1].translate(str.maketrans("", "", "OI"))
    window = dict(zip(letters, each(1, 3), strict=True))
    sizes = dict(zip(letters, each(5, 6), strict=True)) | {"C": groups * per_group}
    pairs = st.tuples(*[st.tuples(st.integers(0, 2), st.integers(0, 2))] * space)
    options = {
        "strides": each(1, 2),
        "rhs_dilation": each(1, 2),
        "lhs_dilation": each(1, 2),
        "padding": draw(st.sampled_from(["SAME", "VALID"]) | pairs),
        "feature_group_count": groups,
    }
    if isinstance(options["padding"], str):  # JAX defines them for inputs without holes
        options["lhs_dilation"] = (1,) * space
    window |= {"I": per_group, "O": groups * outputs}
    kernel = tuple(window[letter] for letter in numbers[1])
    sample = tuple(sizes[letter] for letter in numbers[0][1:])
    bias = draw(st.sampled_from([None, window["O"]]))
    return convolution(str((sample, kernel, options)), sample, kernel, bias, numbers, **options)


DRAWN = {
    1: [("NWC", "WIO", "NWC"), ("NCW", "OIW", "NCW"), ("NWC", "IWO", "NCW")],
    2: [("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW"), ("NHCW", "HOWI", "NWHC")],
}


@pytest.mark.usefixtures("float64")
def test_any_convolution_learns():
    @functools.partial(drawn, 3)(convolutions())
    def check(operation):
        xs = operation.inputs(STEPS, BATCH)
        expected = by_jacobians(operation, xs)
        hypothesis.assume(any(map(np.any, expected.values())))  # some windows see padding alone
        assert_close(gradient(operation, "d_rtrl", xs, 2), expected, 1e-10)
