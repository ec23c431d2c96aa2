"""Messages for common mistakes of new users, and inputs that are accepted."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u
from models import small

import braintrace
from braintrace import nn

XS = np.linspace(-1, 1, 30, dtype=np.float32).reshape(5, 2, 3)


@pytest.fixture(scope="module")
def learner():
    return braintrace.compile(nn.IndRNN(3, 4), "d_rtrl", XS[0], batch_size=2)


def gradient(learner, xs):
    learner.reset_state()
    return learner.etrace_grad(xs, step_fn=lambda x: learner(x).sum())


RAW = {
    "jit": lambda learner: jax.jit(lambda x: learner(x))(XS[0]),
    "scan": lambda learner: jax.lax.scan(lambda carry, x: (carry, learner(x)), 0, XS),
    "grad": lambda learner: jax.grad(lambda x: learner(x).sum())(XS[0]),
    "jit of a method": lambda learner: jax.jit(lambda xs: gradient(learner, xs))(XS),
}


@pytest.mark.parametrize("name", RAW)
def test_a_transformation_of_jax_names_the_two_lines_that_work(name, learner):
    with pytest.raises(braintrace.OptionError) as caught:
        RAW[name](learner)
    message = str(caught.value)
    lines = [line.split("#")[0].strip() for line in message.split("\n")[1:3]]
    assert "…" not in message and "racer" not in message and ".value" not in message
    learner.reset_state()

    @jax.jit
    def run(state, x):
        names = {"pure": learner.functional(), "state": state, "x": x}
        exec(lines[1], names)
        return names["state"], names["output"]

    assert lines[0] == "pure = learner.functional()"
    _, output = run(learner.functional().state(), XS[0])
    np.testing.assert_allclose(output, learner(XS[0]), rtol=1e-6)


class Table:
    """Numbers in a table, such as a data frame."""

    def __init__(self, values):
        self.values = values

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.values, dtype)


def test_a_table_of_numbers_is_a_sequence(learner):
    found, expected = gradient(learner, Table(XS.tolist())), gradient(learner, XS)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    learner.reset_state()
    outputs = learner.predict(Table(XS))
    learner.reset_state()
    np.testing.assert_array_equal(outputs, learner.predict(XS))


def test_a_table_may_stand_beside_a_traced_array(learner):
    pure = learner.functional()

    def gradients(xs):
        def of(ys):
            step_fn = lambda x, y: (learner(x) * y).sum()  # noqa: E731
            return pure.grad(pure.state(), xs, ys, step_fn=step_fn)[1]

        return jax.jit(of)(np.ones((5, 2, 4), np.float32))

    jax.tree.map(np.testing.assert_array_equal, gradients(Table(XS)), gradients(XS))


def test_a_table_of_words_is_no_sequence(learner):
    with pytest.raises(braintrace.DtypeError, match="`sequence 0` is a Table; expected an array"):
        learner.predict(Table([["a", "b"]]))


def test_a_missing_batch_axis_is_told(learner):
    with pytest.raises(braintrace.ShapeError, match=r"`reset_state\(1\)`.*`xs\[:, None\]`"):
        learner.predict(XS[:, 0])
    one = braintrace.compile(nn.IndRNN(3, 4), "d_rtrl", XS[0, :1], batch_size=1)
    with pytest.raises(braintrace.ShapeError, match=r"sample, give it a batch axis: `x\[None\]`"):
        one(XS[0, 0])
    assert one.predict(XS[:, 0][:, None]).shape == (5, 1, 4)


def test_a_module_is_no_step_function():
    with pytest.raises(braintrace.OptionError, match="`step` is the module GRUCell;"):
        braintrace.from_function(nn.GRUCell(3, 4), {"w": jnp.ones(3)}, {"h": jnp.zeros(4)})


def test_two_lines_make_a_step_of_a_flax_module():
    nnx = pytest.importorskip("flax.nnx")
    cell = nnx.SimpleCell(3, 4, rngs=nnx.Rngs(0))
    with pytest.raises(braintrace.OptionError) as caught:
        braintrace.from_function(cell, {"w": jnp.ones(3)}, {"h": jnp.zeros(4)})
    names = {"nnx": nnx, "cell": cell}
    exec("\n".join(line.strip() for line in str(caught.value).split("\n")[1:3]), names)
    params = nnx.to_pure_dict(names["params"])
    model = braintrace.from_function(
        lambda params, state, x: nnx.merge(names["graphdef"], params)(state, x),
        params,
        jnp.zeros((2, 4)),
    )
    learner = braintrace.compile(model, "d_rtrl", XS[0])
    np.testing.assert_allclose(learner(XS[0]), cell(jnp.zeros((2, 4)), XS[0])[1], rtol=1e-6)


def test_a_traced_time_constant_is_told_without_its_tracer():
    def step(tau):
        layer = nn.LeakyRateReadout(3, 2, tau=tau)
        layer.init_state()
        return layer.update(jnp.ones(3))

    told = pytest.raises(braintrace.UnitError, match="an array of dtype float32")
    with brainstate.environ.context(dt=1.0 * u.ms), told as caught:
        brainstate.transform.jit(step)(5.0)
    assert "Tracer" not in str(caught.value)


def test_an_error_of_the_compiler_that_has_another_reason_gets_no_hint():
    """With the right batch size, the message is that of `compile_graph`."""

    @small({"h": (4,)}, w=np.ones((3, 4)))
    def growing(self, x):
        driven = braintrace.matmul(x, self.w.value)
        self.h.value = jnp.concatenate([self.h.value, driven], axis=-1)
        return self.h.value

    with pytest.raises(braintrace.CompilationError) as found:
        braintrace.compile(growing(), "d_rtrl", XS[0], batch_size=2)
    model = growing()
    brainstate.nn.init_all_states(model, batch_size=2)
    with pytest.raises(braintrace.CompilationError) as expected:
        braintrace.D_RTRL(model).compile_graph(XS[0])
    assert str(found.value) == str(expected.value)
