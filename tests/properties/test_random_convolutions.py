"""A convolution with any arguments learns online as backpropagation through time does."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assertions import assert_gradients_close
from drawn import drawn
from operation_cases import BATCH, Diagonal, bptt, by_name, conv_case, loss

import braintrace

LAYOUTS = {
    1: [("NWC", "WIO", "NWC"), ("NCW", "OIW", "NCW"), ("NWC", "IWO", "NCW")],
    2: [("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW"), ("NHCW", "HOWI", "NWHC")],
}


@st.composite
def convolutions(draw):
    """Draw a case whose sizes of axes are up to 6."""
    space = draw(st.integers(1, 2))
    numbers = draw(st.sampled_from(LAYOUTS[space]))
    groups, per_group, outputs = (draw(st.integers(1, n)) for n in (2, 2, 3))

    def each(low, high):
        return tuple(draw(st.integers(low, high)) for _ in range(space))

    letters = numbers[1].translate(str.maketrans("", "", "OI"))
    window = dict(zip(letters, each(1, 3), strict=True))
    sizes = dict(zip(letters, each(5, 6), strict=True)) | {"N": 1, "C": groups * per_group}
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
    kernel = {**window, "I": per_group, "O": groups * outputs}
    shape = tuple(kernel[letter] for letter in numbers[1])
    bias = draw(st.sampled_from([None, kernel["O"]])) if space == 1 else None
    sample = tuple(sizes[letter] for letter in numbers[0][1:])
    case = conv_case("drawn", sample, (0,) * len(sample), shape, bias, numbers, **options)
    x = jnp.ones((1, *sample))
    hidden = jax.eval_shape(case.plain, x, case.parameters).shape[1:]
    return conv_case(str((numbers, options)), sample, hidden, shape, bias, numbers, **options)


@pytest.mark.parametrize("examples", [3])
def test_any_convolution_learns_as_by_backpropagation(examples):
    @drawn(examples, convolutions())
    def check(case):
        expected = bptt(case)
        hypothesis.assume(any(map(np.any, expected.values())))  # some windows see padding alone
        learner = braintrace.compile(Diagonal(case), "d_rtrl", case.inputs[0], batch_size=BATCH)
        found = learner.etrace_grad(
            case.inputs, step_fn=lambda x: loss(learner(x)), reduction="sum", chunk_size=3
        )
        assert_gradients_close(by_name(found), expected, 1e-5, case.name)
        x = np.asarray(case.inputs[0])
        np.testing.assert_allclose(
            case.marked(x, case.parameters), case.plain(x, case.parameters), rtol=1e-5, atol=1e-6
        )
