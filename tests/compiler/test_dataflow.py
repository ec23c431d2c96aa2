"""Every operation of JAX between a weight and a state: its gradient is exact, or it is reported.

A table has a function for each primitive. It stands behind a weight, in the memory of a state, and
on the way to an output; many models of one step share a program.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from random_models import BATCH, INPUTS, UNITS
from toys import Toy, bptt, compiled, deviation, gradient, warned

pytestmark = pytest.mark.usefixtures("float64")
TOGETHER, STEPS = 12, 3
XS = np.random.default_rng(2).normal(size=(STEPS, BATCH, INPUTS))


@dataclasses.dataclass(frozen=True)
class Row:
    """A function of values between 0 and 1, (samples, UNITS) -> (samples, UNITS).

    place: where it stands in a model.
    is_reported: whether the compiler has to say that something is cut; None if either is right.
    """

    name: str
    function: Callable
    place: str
    is_reported: bool | None


ROWS: list[Row] = []
BEHIND, MEMORY, BOTH = "behind a weight", "in the memory", "in both"


def add(functions, **places):
    """Add functions in places where they are reported, or not."""
    for place, is_reported in places.items():
        ROWS.extend(Row(k, f, globals()[place], is_reported) for k, f in functions.items())


def exact(**functions):
    """Several in one state, which is exact if all are."""
    names = [*functions]
    for part in (names[i : i + 5] for i in range(0, len(names), 5)):
        total = functools.partial(mean_of, [functions[name] for name in part])
        add({", ".join(part): total}, BOTH=False)


def mean_of(functions, x):
    return sum(function(x) for function in functions) / len(functions)


def moves(**functions):
    """Behind a weight, an output drives another unit; in the memory, units reach each other."""
    add(functions, BEHIND=False, MEMORY=True)


def couples(**functions):
    add(functions, BEHIND=True, MEMORY=True)


def either(**functions):
    add(functions, BEHIND=None)


# --- elementwise ----------------------------------------------------------------------------------


def with_cosine(operation):
    return lambda x: operation(x, jnp.cos(x))


UNARY = """
    abs acos asin asinh atan atanh bessel_i0e bessel_i1e cbrt cos cosh digamma erf erf_inv erfc exp
    exp2 expm1 lgamma log log1p logistic neg rsqrt sin sinh sqrt square tan tanh
"""
BINARY = "add atan2 div max min mul pow rem sub"
exact(**{name: getattr(lax, name) for name in UNARY.split()})
exact(**{name: with_cosine(getattr(lax, name)) for name in BINARY.split()})
exact(
    integer_pow=lambda x: lax.integer_pow(x, 3),
    acosh=lambda x: lax.acosh(x + 1.5),
    log2=jnp.log2,  # a primitive since JAX 0.12
    clamp=lambda x: lax.clamp(0.3, x, 0.7),
    select_n=lambda x: lax.select_n(x > 0.5, x, 0.5 * x),
    floor=lambda x: x * (1 + lax.floor(2 * x)),
    sign=lambda x: x * lax.sign(x - 0.5),
    is_finite=lambda x: jnp.where(jnp.isfinite(1 / x), x, 0.0),
    comparisons=lambda x: jnp.where((x > 0.2) & ~(x >= 0.8) | (x == 0.5), x, 2 * x),
    integers=lambda x: x * (1 + jnp.bitwise_xor((9 * x).astype(int), 3)),
    complex=lambda x: jnp.real(lax.complex(x, 2 * x) * 1j * lax.conj(lax.complex(x, x))),
    absolute_of_complex=lambda x: jnp.abs(lax.complex(x, 0.5 + 0 * x)),
    less_precision=lambda x: lax.reduce_precision(x, 11, 52),
    copied=lambda x: jnp.array(x, copy=True) + checkpoint_name(x, "x"),
    barrier=lambda x: lax.optimization_barrier((x, 2 * x))[1],
    stopped=lambda x: x * lax.stop_gradient(x),
    betainc=lambda x: lax.betainc(jnp.full_like(x, 2), jnp.full_like(x, 3), x),
    cast=lambda x: x.astype(np.float32).astype(float),
    ceil=lambda x: x * (1 + lax.ceil(2 * x)),
    at_most=lambda x: jnp.where(x <= 0.5, x, 2 * x),
    igamma=lambda x: lax.igamma(jnp.full_like(x, 1.5), x),
    igammac=lambda x: lax.igammac(jnp.full_like(x, 2.5), x),
)

# --- moves ----------------------------------------------------------------------------------------

THERE, BACK = np.array([2, 0, 3, 1]), np.array([1, 3, 0, 2])
exact(
    broadcast=lambda x: (x[..., None] * jnp.ones(3))[..., 1],
    reshaped=lambda x: x.reshape(2, -1).reshape(x.shape),
    transposed=lambda x: jnp.sin(x.T).T,
    squeezed=lambda x: lax.squeeze(lax.expand_dims(x, (1,)), (1,)),
    sliced=lambda x: jnp.concatenate([jnp.sin(x[:, :1]), x[:, 1:]], -1),
    padded=lambda x: jnp.pad(x, ((0, 0), (1, 2)))[:, 1:-2],
    split=lambda x: jnp.concatenate([p * p for p in jnp.split(x, 2, -1)], -1),
    reversed_twice=lambda x: lax.rev(jnp.sin(lax.rev(x, (1,))), (1,)),
    gathered_back=lambda x: jnp.sin(x[:, THERE])[:, BACK],
    gathered_here=lambda x: x[:, np.arange(UNITS)],
    written=lambda x: x.at[:, 1:3].set(0.5),
    added_to=lambda x: x.at[:, ::2].add(x[:, ::2] ** 2),
    multiplied=lambda x: x.at[:, 1].multiply(0.5),
    subtracted_from=lambda x: x.at[:, ::2].subtract(0.3 * x[:, ::2] ** 2),
    sliced_at=lambda x: lax.dynamic_update_slice(
        x, jnp.tanh(lax.dynamic_slice(x, (0, 1), (BATCH, 2))), (0, 1)
    ),
)
moves(
    rolled=lambda x: jnp.roll(x, 1, -1),
    reversed=lambda x: lax.rev(x, (1,)),
    gathered=lambda x: x[:, THERE],
    halves_swapped=lambda x: jnp.concatenate([x[:, 2:], x[:, :2]], -1),
    flat_move=lambda x: x.reshape(-1).reshape(UNITS, BATCH).T,
    samples_swapped=lambda x: x[::-1],
)
couples(
    smallest_so_far=lambda x: lax.cummin(x, axis=1),
    scattered=lambda x: x.at[:, THERE].add(0.5 * x),
    shifted=lambda x: jnp.pad(x[:, 1:], ((0, 0), (0, 1))) + x,
    gathered_by_data=lambda x: x[:, jnp.argsort(x[0])],
    sliced_by_data=lambda x: x + lax.dynamic_slice_in_dim(x, (4 * x[0, 0]).astype(int), 1, 1),
)

# --- along axes, products and windows -------------------------------------------------------------

SQUARE = jnp.linspace(-0.6, 0.6, UNITS * UNITS).reshape(UNITS, UNITS)


def convolved(x):
    return lax.conv_general_dilated(
        x[..., None], jnp.ones((2, 1, 1)), (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
    )[..., 0]


def window(start, operation):
    return lambda x: lax.reduce_window(x, start, operation, (1, 2), (1, 1), "SAME")


couples(
    sum=lambda x: x - x.sum(-1, keepdims=True),
    max=lambda x: x - x.max(-1, keepdims=True),
    min=lambda x: x * x.min(-1, keepdims=True),
    prod=lambda x: x + x.prod(-1, keepdims=True),
    over_samples=lambda x: x + x.mean(0),
    cumsum=lambda x: lax.cumsum(x, 1),
    cumprod=lambda x: lax.cumprod(x, 1),
    cummax=lambda x: lax.cummax(x, 1),
    cumlogsumexp=lambda x: lax.cumlogsumexp(x, 1),
    sort=lambda x: lax.sort(x, dimension=1),
    top_k=lambda x: lax.top_k(x, UNITS)[0],
    softmax=lambda x: jax.nn.softmax(x),
    logsumexp=lambda x: x - jax.nn.logsumexp(x, -1, keepdims=True),
    norm=lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True),
    fft=lambda x: jnp.fft.ifft(jnp.fft.fft(x) * jnp.arange(UNITS)).real,
    dot=lambda x: x @ SQUARE,
    gram=lambda x: x @ (x.T @ x),
    conv=convolved,
    window_sum=window(0.0, lax.add),
    window_max=window(-np.inf, lax.max),
    solve=lambda x: jnp.linalg.solve(SQUARE + 2 * jnp.eye(UNITS), x.T).T,
    triangular=lambda x: lax.linalg.triangular_solve(SQUARE + 2 * jnp.eye(UNITS), x, lower=True),
)
exact(
    einsum=lambda x: jnp.einsum("bh,bh->bh", x, 2 * x),
    stacked_sum=lambda x: jnp.stack([x, x**2], -1).sum(-1),
    batched_dot=lambda x: jnp.einsum(
        "bhi,bhi->bh", x[..., None] * jnp.ones(2), x[..., None] * jnp.ones(2)
    ),
    # Without the barrier, XLA rounds the operand of the maximum twice, and divides by no maxima.
    stacked_max=lambda x: lax.optimization_barrier(jnp.stack([x, 0.9 - x], 0)).max(0),
    cumsum_of_copies=lambda x: lax.cumsum(jnp.stack([x, 2 * x]), 0)[1],
)
either(
    argmax=lambda x: x * (1 + jnp.argmax(x, -1, keepdims=True)),
    sort_of_other=lambda x: x * lax.sort(lax.stop_gradient(x), dimension=1),
    cholesky=lambda x: x @ lax.linalg.cholesky(jnp.eye(UNITS) + x.T @ x),
    qr=lambda x: x + jnp.linalg.qr(x.T)[1].sum(),
)

# --- calls, branches and loops --------------------------------------------------------------------


def with_jvp(tangent):
    function = jax.custom_jvp(jnp.sin)
    function.defjvp(lambda x, t: (jnp.sin(x[0]), tangent(x[0], t[0])))
    return function


def with_vjp(backward):
    function = jax.custom_vjp(jnp.sin)
    function.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (backward(x, g),))
    return function


def scan(step, length=3):
    return lambda x: lax.scan(lambda c, _: (step(c, x), None), x, None, length=length)[0]


LINEAR = {
    "scaled": lambda x, g: g / (1 + jnp.abs(x)) ** 2,
    "selected": lambda x, g: jnp.where(x < 0.5, g, 0.0),
    "by a branch": lambda x, g: lax.cond(x.sum() > 2, lambda g: g, lambda g: 0.5 * g, g),
    "by a scan": lambda x, g: lax.scan(lambda c, _: (0.5 * c, None), g * x, None, length=2)[0],
    "NaN to zero": lambda x, g: jnp.nan_to_num(g * x),
    "there and back": lambda x, g: jnp.roll(0.5 * jnp.roll(g, 1, -1), -1, -1),
}
NONLINEAR = {
    "clipped": lambda x, g: jnp.clip(g, -0.01, 0.01),
    "shifted": lambda x, g: g + 0.3,
    "bent": lambda x, g: jnp.arctan(9 * g),
    "squared": lambda x, g: g * jnp.abs(g),
    "rounded": lambda x, g: jnp.round(8 * g) / 8,
    "branch on it": lambda x, g: lax.cond(g.sum() > 0, lambda g: g, lambda g: 0.1 * g, g),
    "by its norm": lambda x, g: g / (1 + jnp.linalg.norm(g)),
    "halved until small": lambda x, g: lax.while_loop(
        lambda c: jnp.abs(c).sum() > 0.1, lambda c: 0.5 * c, g
    ),
    "bent one step later": lambda x, g: lax.scan(
        lambda c, _: ((c[0] + c[1], jnp.abs(c[0])), None), (g, 0 * g), None, length=3
    )[0][0],
}
exact(
    jit=jax.jit(jnp.sin),
    remat=jax.checkpoint(jnp.sin),
    vmap=jax.vmap(jnp.sin),
    cond=lambda x: lax.cond(x.sum() > 2, jnp.sin, jnp.cos, x),
    switch=lambda x: lax.switch((x[0, 0] * 3).astype(int), [jnp.sin, jnp.cos, jnp.tanh], x),
    scan=scan(lambda c, x: c + 0.1 * (jnp.tanh(x) - c)),
    fori_loop=lambda x: lax.fori_loop(0, 3, lambda _, c: jnp.sin(c), x),
    map=lambda x: lax.map(jnp.sin, x),
    scan_of_columns=lambda x: lax.scan(lambda c, row: (c, jnp.sin(row)), 0.0, x.T)[1].T,
    rolled_back=scan(lambda c, x: jnp.roll(jnp.roll(jnp.sin(c), 1, -1), -1, -1)),
    **{
        f"jvp {name}": with_jvp(tangent)
        for name, tangent in LINEAR.items()
        if name != "NaN to zero"
    },
    **{f"vjp {name}": with_vjp(backward) for name, backward in LINEAR.items()},
)
couples(
    scan_that_rolls=scan(lambda c, x: 0.5 * c + 0.1 * jnp.roll(c, 1, -1)),
    running_scan=lambda x: lax.scan(lambda c, row: (c + row, c + row), jnp.zeros(BATCH), x.T)[1].T,
    branch_that_rolls=lambda x: lax.cond(x.sum() > 2, lambda x: x, lambda x: jnp.roll(x, 1, -1), x),
    jvp_that_couples=with_jvp(lambda x, t: t - t.mean(-1, keepdims=True)),
    jvp_that_rolls=with_jvp(lambda x, t: t + 0.5 * jnp.roll(t, 1, -1)),
    jvp_that_sums=with_jvp(lambda x, t: jnp.cumsum(t, -1)),
    **{f"vjp {name}": with_vjp(backward) for name, backward in NONLINEAR.items()},
)


either(
    smallest_of_two=lambda x: lax.reduce_window(x, np.inf, lax.min, (1, 2), (1, 1), "SAME"),
    own_reduction=lambda x: x * lax.reduce(x, 0.0, lambda a, b: a + b + a * b, (1,))[:, None],
)

# --- models ---------------------------------------------------------------------------------------


def inside(value):
    return 0.1 + 0.8 * jax.nn.sigmoid(value)


PLACES = {
    BEHIND: lambda f, drive, h: 0.5 * h + f(inside(drive)),
    MEMORY: lambda f, drive, h: 0.5 * f(inside(h)) + drive,
    BOTH: lambda f, drive, h: 0.5 * h + f(inside(h + drive)),
}


def toy_of(rows):
    """A state and a weight for each row, and a leaky state so that something learns."""
    steps = {f"h{i}": functools.partial(PLACES[r.place], r.function) for i, r in enumerate(rows)}
    steps["leaky"] = functools.partial(PLACES[BEHIND], jnp.tanh)

    def step(ops, p, h, x):
        new = {k: f(ops.matmul(x, p[f"w {k}"]), h[k]) for k, f in steps.items()}
        return new, jnp.concatenate([jnp.sin(value) for value in new.values()], -1)

    weights = {f"w {name}": (INPUTS, UNITS) for name in steps}
    return Toy(step, weights, dict.fromkeys(steps, (UNITS,)))


def parts():
    """Rows of one place and one expectation, a few at a time."""
    ordered = sorted(ROWS, key=lambda row: (row.place, str(row.is_reported)))
    for _, alike in itertools.groupby(ordered, lambda row: (row.place, row.is_reported)):
        alike = [*alike]
        yield from (alike[i : i + TOGETHER] for i in range(0, len(alike), TOGETHER))


PARTS = [*parts()]


@pytest.mark.parametrize("number", range(len(PARTS)), ids=lambda i: PARTS[i][0].place)
def test_an_operation_is_exact_or_reported(number):
    rows = PARTS[number]
    toy = toy_of(rows)
    learner = compiled(toy, xs=XS)
    reported = {path for d in warned(learner) for path in d.paths}
    silent = []
    for i, row in enumerate(rows):
        is_reported = bool({f"h{i}", f"w h{i}"} & reported)
        assert row.is_reported in (None, is_reported), row.name
        if not is_reported:
            silent.append(i)
    if silent:
        found, expected = gradient(learner, xs=XS), bptt(toy, xs=XS)
    for i in silent:
        assert deviation(found, expected, f"w h{i}") < 1e-6, rows[i].name


# --- primitives -----------------------------------------------------------------------------------

WITHOUT_ROWS = """
    approx_top_k argmin bitcast_convert_type clz igamma_grad_a mulhi nextafter population_count
    reduce_and reduce_or reduce_xor rng_bit_generator rng_uniform scatter-max scatter-min
    shift_left shift_right_arithmetic shift_right_logical zeta
    after_all all_gather all_to_all axis_index create_token dce_sink device_put pmax pmin ppermute
    psum ragged_all_to_all sharding_constraint stage
    eq_to le_to lt_to reduce_window select_and_gather_add select_and_scatter tile
"""
"""Primitives without a derivative, those of several devices, and those of JAX's own rules."""


def primitives_in(jaxpr):
    """Yield the names of the primitives of a jaxpr, and of the jaxprs in its equations."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield equation.primitive.name
        inside = jax.tree.leaves([*equation.params.values()], is_leaf=is_jaxpr)
        yield from itertools.chain(*map(primitives_in, filter(is_jaxpr, inside)))


def is_jaxpr(value):
    return hasattr(value, "eqns") or hasattr(value, "jaxpr")


@pytest.mark.core
def test_every_primitive_of_jax_has_a_row():
    x = jnp.full((BATCH, UNITS), 0.4)
    totals = [lambda x, f=row.function: f(x).sum() for row in ROWS]
    functions = [*totals, *map(jax.grad, totals)]
    found = itertools.chain(*(primitives_in(jax.make_jaxpr(f)(x)) for f in functions))
    every = (value for name, value in vars(lax).items() if name.endswith("_p"))
    exported = {value.name for value in every if isinstance(value, Primitive)}
    assert exported - {*found} <= {*WITHOUT_ROWS.split()}
