"""SnAp-1 is what its definition says: D-RTRL with the diagonal of what goes through one product."""

import dataclasses
from collections.abc import Callable
from typing import Any

import brainstate
import catalogue
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import references
from assertions import assert_gradients_close
from drivers import (
    build_learner,
    catalogue_gradient,
    quietly_compiled,
)
from matrices import csr
from models import small
from operation_cases import loss
from ops_catalogue import restored_registries

import braintrace
from braintrace import get_primitive_spec, register_primitive_spec

BATCH, STEPS = 2, references.LENGTH


def test_a_state_that_only_a_product_reads_has_a_trace():
    case = catalogue.BY_NAME["ReadByAProductAlone"]
    found = catalogue_gradient(case, "snap")
    assert_gradients_close(found, references.dense_d_rtrl(case, snap=True), 1e-5)
    assert build_learner(case).report().groups[0].downstream == ("h",)
    assert build_learner(case, "snap").report().groups[0].downstream == ()


@catalogue.each([catalogue.BY_NAME["ALIF"]])
def test_without_products_it_is_d_rtrl(case):
    found = catalogue_gradient(case, "snap")
    assert_gradients_close(found, references.bptt(case), 1e-5, case.name)
    snap, d_rtrl = build_learner(case, "snap"), build_learner(case)
    assert snap.report() == d_rtrl.report()


# --- products of all kinds ------------------------------------------------------------------


def normal(seed, *shape):
    return jax.device_put(np.float32(np.random.default_rng(seed).normal(size=shape) / 2))


@dataclasses.dataclass(frozen=True, eq=False)
class Recurrence:
    """``recurrent(h, x, parameters)``, by ETP operations and in plain JAX.

    In the plain form, what goes through two products is held constant.
    """

    name: str
    marked: Callable[[Any, Any, Any], Any]
    plain: Callable[[Any, Any, Any], Any]
    parameters: dict[str, Any]
    hidden: tuple[int, ...] = (4,)
    sample: tuple[int, ...] = (4,)


PATTERN = np.asarray(normal(5, 4, 4)) * np.float32(
    [[1, 0, 1, 0], [0, 0, 1, 1], [1, 1, 1, 0], [0, 1, 0, 0]]
)
CSR = csr(jnp.asarray(PATTERN))
WIDTH = ("NWC", "WIO", "NWC")


def dense_of(data):
    return jnp.zeros((4, 4)).at[np.nonzero(PATTERN)].set(data)


def plain_conv(h, kernel, **options):
    return jax.lax.conv_general_dilated(h, kernel, (1,), "SAME", dimension_numbers=WIDTH, **options)


def same(name, function, parameters, **options):
    """A recurrence without marks of its own."""
    return Recurrence(name, function, function, parameters, **options)


def fed_back(h, weight, feedback):
    held = jax.lax.stop_gradient(h)
    return held @ weight + (h - held) @ jax.lax.stop_gradient(feedback)


def gated(h, x, p):
    """Two gates behind each other: a product of a value that another product has made."""
    gate = jax.nn.sigmoid(braintrace.matmul(h, p["w_r"]))
    return braintrace.matmul(gate * h, p["w"])


def gated_once(h, x, p):
    gate = jax.nn.sigmoid(jax.lax.stop_gradient(h @ p["w_r"]))
    return (gate * h) @ p["w"]


def turned(h):
    return jax.lax.complex(h, 0.5 * h)


def complex_of(p):
    return jax.lax.complex(p["re"], p["im"])


def parts(y):
    return jnp.concatenate([jnp.conj(y).imag, jnp.abs(y)], -1)


RECURRENCES = [
    Recurrence(
        "conv",
        lambda h, x, p: braintrace.conv(h, p["w"], padding="SAME", dimension_numbers=WIDTH),
        lambda h, x, p: plain_conv(h, p["w"]),
        {"w": normal(0, 3, 2, 2)},
        hidden=(5, 2),
        sample=(5, 2),
    ),
    same(
        "plain grouped conv",
        lambda h, x, p: plain_conv(h, 0.5 * jnp.ones((3, 1, 2)), feature_group_count=2),
        {},
        hidden=(5, 2),
        sample=(5, 2),
    ),
    Recurrence(
        "grouped",
        lambda h, x, p: braintrace.einsum("bgi,gio->bgo", h.reshape(-1, 2, 2), p["w"]).reshape(
            -1, 4
        ),
        lambda h, x, p: jnp.einsum("bgi,gio->bgo", h.reshape(-1, 2, 2), p["w"]).reshape(-1, 4),
        {"w": normal(0, 2, 2, 2)},
    ),
    Recurrence(
        "sparse",
        lambda h, x, p: braintrace.sparse_matmul(h, p["w"], sparse_mat=CSR),
        lambda h, x, p: h @ dense_of(p["w"]),
        {"w": CSR.data},
    ),
    Recurrence(
        "low rank",
        lambda h, x, p: braintrace.lora_matmul(h, p["B"], p["A"], alpha=0.7),
        lambda h, x, p: 0.7 * h @ p["B"] @ p["A"],
        {"B": normal(0, 4, 2), "A": normal(1, 2, 4)},
    ),
    Recurrence(
        "feedback",
        lambda h, x, p: braintrace.feedback_matmul(h, p["w"], jax.lax.stop_gradient(2 * p["w"])),
        lambda h, x, p: fed_back(h, p["w"], 2 * p["w"]),
        {"w": normal(0, 4, 4)},
    ),
    Recurrence(
        "one number for all, broadcast",
        lambda h, x, p: -jax.nn.relu(braintrace.matmul(jnp.tanh(h), p["w"]) + 2),
        lambda h, x, p: -jax.nn.relu(jnp.tanh(h) @ p["w"] + 2),
        {"w": normal(0, 4, 1)},
    ),
    Recurrence(
        "the size of a complex number for all",
        lambda h, x, p: -0.4 * jnp.abs(braintrace.matmul(turned(h), complex_of(p))),
        lambda h, x, p: -0.4 * jnp.abs(turned(h) @ complex_of(p)),
        {"re": normal(0, 4, 1), "im": normal(1, 4, 1)},
    ),
    Recurrence(
        "parts of complex numbers",
        lambda h, x, p: parts(braintrace.matmul(turned(h), complex_of(p))),
        lambda h, x, p: parts(turned(h) @ complex_of(p)),
        {"re": normal(0, 4, 2), "im": normal(1, 4, 2)},
    ),
    same("plain, broadcast", lambda h, x, p: -0.2 * (h @ jnp.ones((4, 1))), {}),
    same("einsum", lambda h, x, p: jnp.einsum("oi,bi->bo", 0.3 * normal(3, 4, 4), h**2), {}),
    same(
        "a matrix of each sample and step",
        lambda h, x, p: (
            jnp.einsum("bi,bj,bi->bj", h, x, x) * 0.3
            + jnp.einsum("bi,bij->bj", jnp.sin(h), x[:, :, None] + x[:, None, :])
        ),
        {},
    ),
    Recurrence(
        "halves that change places",
        lambda h, x, p: braintrace.matmul(jnp.concatenate([h[:, 2:], x, h[:, :2]], 1), p["w"]),
        lambda h, x, p: jnp.concatenate([h[:, 2:], x, h[:, :2]], 1) @ p["w"],
        {"w": normal(0, 8, 4)},
    ),
    Recurrence(
        "interleaved gates",
        lambda h, x, p: jnp.prod(braintrace.matmul(h, p["w"]).reshape(-1, 4, 3), axis=-1),
        lambda h, x, p: jnp.prod((h @ p["w"]).reshape(-1, 4, 3), axis=-1),
        {"w": normal(0, 4, 12)},
    ),
    Recurrence(
        "twice the same state",
        lambda h, x, p: braintrace.matmul(jnp.concatenate([h, h**2], -1), p["w"]),
        lambda h, x, p: jnp.concatenate([h, h**2], -1) @ p["w"],
        {"w": normal(0, 8, 4)},
    ),
    Recurrence("two products", gated, gated_once, {"w": normal(0, 4, 4), "w_r": normal(1, 4, 4)}),
]


class Recurrent(brainstate.nn.Module):
    """``h' = tanh(0.5 h + recurrent(h, x) + u x)``."""

    def __init__(self, recurrence):
        super().__init__()
        self.recurrence = recurrence
        values = {**recurrence.parameters, "u": normal(7, *recurrence.hidden)}
        self.parameters_of = {name: brainstate.ParamState(v) for name, v in values.items()}

    def init_state(self, batch_size=None, **_):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, *self.recurrence.hidden)))

    def update(self, x):
        p = {name: state.value for name, state in self.parameters_of.items()}
        drive = braintrace.element_wise(p["u"]) * x
        h = 0.5 * self.h.value + self.recurrence.marked(self.h.value, x, p) + drive
        self.h.value = jnp.tanh(h)
        return self.h.value


def literal(recurrence, xs):
    """The sum over steps, by full Jacobians of which the diagonal is kept."""
    parameters = {**recurrence.parameters, "u": normal(7, *recurrence.hidden)}

    def step(p, h, x):
        return jnp.tanh(0.5 * h + recurrence.plain(h, x, p) + p["u"] * x)

    @jax.jit
    def facts(h, x):
        new = step(parameters, h, x)
        J = jax.jacrev(step, 1)(parameters, h, x).reshape(h.size, h.size)
        F = jax.jacrev(step)(parameters, h, x)
        return new, jnp.diag(J).reshape(h.shape), F, jax.grad(loss)(new)

    h, eps, total = np.zeros((BATCH, *recurrence.hidden), np.float32), None, None
    for x in xs:
        h, D, F, signal = jax.tree.map(np.asarray, facts(h, x))

        def carried(old, term, D=D):
            return term + D.reshape(*D.shape, *[1] * (term.ndim - D.ndim)) * old

        eps = F if eps is None else jax.tree.map(carried, eps, F)
        found = jax.tree.map(lambda e, s=signal: np.tensordot(s, e, s.ndim), eps)
        total = found if total is None else jax.tree.map(np.add, total, found)
    return total


@pytest.mark.rows("low rank", "the size of a complex number for all", "halves that change places")
@pytest.mark.parametrize("recurrence", RECURRENCES, ids=lambda row: row.name)
def test_products_of_all_kinds(recurrence):
    xs = np.asarray(normal(9, STEPS, BATCH, *recurrence.sample))
    model = Recurrent(recurrence)
    learner = quietly_compiled(model, "snap", xs[0], batch_size=BATCH)
    found = learner.etrace_grad(
        xs, step_fn=lambda x: loss(learner(x)), reduction="sum", chunk_size=3
    )
    expected = literal(recurrence, xs)
    if recurrence.name == "two products":  # its own trace of the first weight is that of the step
        expected.pop("w_r")
    found = {path[-1]: value for path, value in found.items() if path[-1] in expected}
    assert_gradients_close(found, expected, 1e-5, recurrence.name)


# --- what is left out, and refused ------------------------------------------------------------


def compiled(recurrence, **options):
    x = normal(9, BATCH, *recurrence.sample)
    return braintrace.compile(Recurrent(recurrence), "snap", x, batch_size=BATCH, **options)


def test_what_goes_through_two_products_is_told():
    by_name = {recurrence.name: recurrence for recurrence in RECURRENCES}
    with pytest.warns(braintrace.ApproximationWarning, match="w_r' reaches 'h' through"):
        found = [str(d) for d in compiled(by_name["two products"]).graph.diagnostics]
    kept = "but for the path of each unit to itself"
    assert any(kept in message for message in found)
    with pytest.warns(braintrace.ApproximationWarning, match=kept):
        compiled(by_name["einsum"])
    # A product that passes nothing to a position itself: the matrix has an empty diagonal.
    learner = compiled(
        Recurrence(
            "sparse, no self",
            lambda h, x, p: braintrace.sparse_matmul(h, p["w"], sparse_mat=OFF_DIAGONAL),
            None,
            {"w": OFF_DIAGONAL.data},
        )
    )
    assert not any(kept in str(d) for d in learner.graph.diagnostics)
    assert learner.graph.hidden_groups[0].diagonals == ((),)


OFF_DIAGONAL = csr(1 - np.eye(4, dtype=np.float32))


def of_own(function):
    """An ETP operation of one's own: a product with a function of its input."""
    dense = get_primitive_spec(braintrace.etp_mm_p)
    return register_primitive_spec(
        dataclasses.replace(
            dense,
            name="etp_own",
            impl=lambda x, weight, **_: function(x) @ weight,
            xy_to_dw=lambda x, f, weights, **_: {"weight": function(x).T @ f},
            accumulate=None,
            select_outputs=None,
            joins_input=None,
            input_derivative=None,
        )
    )


@pytest.mark.parametrize("function", [lambda x: 2 * x, jnp.sin], ids=["linear", "not linear"])
def test_operations_of_ones_own_have_to_be_linear_in_their_input(function):
    with restored_registries():
        own = of_own(function)
        recurrence = Recurrence(
            "own",
            lambda h, x, p: own.bind(h, p["w"]),
            lambda h, x, p: function(h) @ p["w"],
            {"w": normal(0, 4, 4)},
        )
        if function is jnp.sin:
            with pytest.raises(braintrace.PrimitiveError, match=r"(?s)SnAp.*'h'.*`etp_own`"):
                compiled(recurrence)
        else:
            test_products_of_all_kinds(recurrence)


@small({"h": (4,), "o": (2,)}, w_in=normal(0, 3, 4), w_rec=normal(1, 4, 4), w_out=normal(2, 4, 2))
def leaky_readout(self, x):
    """A vanilla cell with a leaky readout."""
    recurrent = braintrace.matmul(self.h.value, self.w_rec.value)
    self.h.value = jnp.tanh(braintrace.matmul(x, self.w_in.value) + recurrent)
    self.o.value = 0.8 * self.o.value + self.h.value @ self.w_out.value
    return self.o.value


def test_linear_readouts_add_nothing_to_what_is_left_out():
    """Backpropagation through time, where the recurrent weight goes back by its diagonal."""
    xs = np.asarray(normal(9, STEPS, BATCH, 3))
    model = leaky_readout()

    @jax.jit
    @jax.grad
    def expected(p):
        h, o, total = jnp.zeros((BATCH, 4)), jnp.zeros((BATCH, 2)), 0.0
        diagonal = jax.lax.stop_gradient(jnp.diag(p["w_rec"]))
        for x in xs:
            held = jax.lax.stop_gradient(h)
            h = jnp.tanh(x @ p["w_in"] + held @ p["w_rec"] + (h - held) * diagonal)
            o = 0.8 * o + h @ p["w_out"]
            total = total + loss(o)
        return total

    parameters = {name: getattr(model, name).value for name in ("w_in", "w_rec", "w_out")}
    learner = braintrace.compile(model, "snap", xs[0], batch_size=BATCH)
    found = learner.etrace_grad(
        xs, step_fn=lambda x: loss(learner(x)), reduction="sum", chunk_size=4
    )
    found = {path[-1]: gradient for path, gradient in found.items()}
    assert_gradients_close(found, expected(parameters), 1e-5)
