"""Small programs around every primitive of JAX, for the tests of the dataflow engine."""

import jax
import jax.numpy as jnp
import numpy as np
from dataflow_trials import PRIMITIVES, Case, floats, integers
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import SingleDeviceSharding

# Rows are read as a table: the primitive, a program, its operands, and what is special.
# fmt: off


def _bind(name, **params):
    return lambda *operands: PRIMITIVES[name].bind(*operands, **params)


def _lax(name):
    return lambda *operands: getattr(lax, name)(*operands)


def _names(listed):
    return listed.split()


# --- elementwise

X, Y, Z = floats(2, 3), floats(2, 3)[::-1].copy(), floats(2, 3, low=-3.0, high=3.0)
COMPLEX = X + 1j * Y
FEW, MANY = integers(2, 3, high=4), integers(2, 3, high=10**9)
DEVICE = jax.devices()[0]
UNARY = _names("""
    abs acos asin asinh atan atanh bessel_i0e bessel_i1e cbrt cos cosh digamma erf erf_inv erfc exp
    exp2 expm1 lgamma log log1p logistic neg rsqrt sin sinh sqrt square tan tanh stop_gradient
""")
BINARY = _names("add atan2 complex div igamma igammac igamma_grad_a max min mul pow rem sub")
OF_BITS = {"and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor"}
SHIFTS = _names("shift_left shift_right_arithmetic shift_right_logical")

ELEMENTWISE = [
    *(Case(n, _lax(n), (X,)) for n in UNARY),
    *(Case(n, _lax(n), (Z,)) for n in _names("ceil floor round sign")),
    *(Case(n, _lax(n), (X, Y)) for n in BINARY),
    *(Case(n, _lax(f), (MANY, FEW)) for n, f in OF_BITS.items()),
    *(Case(n, _lax(n), (MANY, FEW)) for n in SHIFTS),
    *(Case(n, _lax(n), (FEW, FEW)) for n in _names("eq ge gt le lt ne")),
    *(Case(n, _lax(n), (COMPLEX,)) for n in _names("conj imag real")),
    Case("is_finite", lambda x: lax.is_finite(1 / (x - 1.0)), (FEW,)),
    Case("not", lax.bitwise_not, (MANY,)),
    Case("mulhi", _lax("mulhi"), (MANY, MANY)),
    Case("clz", lax.clz, (FEW,)),
    Case("population_count", lax.population_count, (MANY,)),
    Case("acosh", lax.acosh, (X + 1,)),
    Case("nextafter", lambda x, y: 1e16 * (lax.nextafter(x, y) - x), (X, Y)),
    Case("integer_pow", lambda x: lax.integer_pow(x, 3), (X,)),
    Case("add_any", _bind("add_any"), (X, Y)),
    Case("clamp", lax.clamp, (np.asarray(0.3), X, np.asarray(0.7)), "scalars"),
    Case("clamp", lax.clamp, (X, Y, X + 0.1)),
    Case("convert_element_type", lambda x: x.astype(np.float32), (X,)),
    Case("copy", lambda x: jnp.array(x, copy=True), (X,)),
    Case("device_put", lambda x: jax.device_put(x, DEVICE), (X,)),
    Case("name", lambda x: checkpoint_name(x, "x"), (X,)),
    Case("polygamma", lambda m, x: lax.polygamma(m.astype(float), x), (FEW, X)),
    Case("zeta", lax.zeta, (X + 2, Y)),
    Case("reduce_precision", lambda x: lax.reduce_precision(x, 8, 7), (X,)),
    Case("regularized_incomplete_beta", lax.betainc, (X, Y, X)),
    Case("select_n", lax.select_n, (X > 0.5, X, Y)),
    Case("select_n", lax.select_n, (np.asarray(True), X, Y), "scalar"),
    Case("optimization_barrier", lambda *x: lax.optimization_barrier(x), (X, floats(4))),
    Case("sharding_constraint",
         lambda x: lax.with_sharding_constraint(x, SingleDeviceSharding(DEVICE)), (X,)),
]

# --- moves

PLACES = np.array([[2, 0], [0, 1], [1, 2]], np.int32)
ROWS = np.arange(3, dtype=np.int32)
ZERO = np.int32(0)
SQUARE, WIDE = floats(3, 3), floats(3, 4)


def _gather(places, **options):
    numbers = lax.GatherDimensionNumbers(
        offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0, 1)
    )
    return lambda x: lax.gather(x, places, numbers, slice_sizes=(1, 2), **options)


def _cut(size):
    return lambda x, i: lax.dynamic_slice(x, (ZERO, i), (3, size))


def _written(x, update, i):
    return lax.dynamic_update_slice(x, update, (ZERO, i))


MOVES = [
    Case("broadcast_in_dim", lambda x: lax.broadcast_in_dim(x, (4, 2, 3), (1, 2)), (floats(2, 1),)),
    Case("concatenate", lambda *x: lax.concatenate(x, 1), (X, floats(2, 1))),
    Case("reshape", lambda x: x.reshape(3, 4), (floats(2, 6),)),
    Case("reshape", lambda x: lax.reshape(x, (3, 4), (1, 0)), (floats(2, 6),), "in_order"),
    Case("rev", lambda x: lax.rev(x, (1,)), (X,)),
    Case("slice", lambda x: lax.slice(x, (0, 1), (2, 6), (1, 2)), (floats(2, 7),)),
    Case("split", lambda x: lax.split(x, (1, 2), 1), (X,)),
    Case("squeeze", lambda x: lax.squeeze(x, (1,)), (floats(2, 1, 3),)),
    Case("transpose", lambda x: x.transpose(2, 0, 1), (floats(2, 3, 4),)),
    Case("tile", lambda x: lax.tile(x, (2, 3)), (X,)),
    Case("stack", _bind("stack", axis=1), (X, Y)),
    Case("unstack", _bind("unstack", axis=1), (X,)),
    Case("pad", lambda x, v: lax.pad(x, v, ((1, 0, 1), (-1, 2, 0))), (X, floats())),
    Case("gather", _gather(PLACES), (WIDE,), "constant"),
    Case("gather", _gather(PLACES + 1, mode="fill"), (WIDE,), "out_of_bounds"),
    Case("gather", _gather(PLACES + 1, mode="clip"), (WIDE,), "clipped"),
    Case("gather", lambda x, i: x[:, i], (WIDE, ROWS), "places_from_data", False, (0,)),
    Case("gather", lambda x, i: x[i], (SQUARE, ROWS), "followed_places"),
    Case("gather", lambda x, i: jnp.take_along_axis(x, i, 1), (X, FEW - 1), "batched"),
    Case("dynamic_slice", lambda x: lax.dynamic_slice(x, (1, 1), (2, 2)), (WIDE,), "constant"),
    Case("dynamic_slice", _cut(2), (SQUARE, ROWS[1]), is_exact=False),
    Case("dynamic_slice", _cut(1), (SQUARE, ROWS[1]), "places_from_data", followed=(0,)),
    Case("dynamic_update_slice", lambda x, u: lax.dynamic_update_slice(x, u, (1, 1)), (WIDE, X),
         "constant"),
    Case("dynamic_update_slice", _written, (SQUARE, floats(2, 2), ROWS[1]), is_exact=False),
    Case("dynamic_update_slice", _written, (SQUARE, floats(2, 1), ROWS[1]), "places_from_data",
         is_exact=False, followed=(0, 1)),
    Case("dynamic_update_slice", _written, (SQUARE, floats(2, 1), ROWS[1]), "operand", True, (0,)),
    Case("dynamic_update_slice", _written, (SQUARE, floats(3, 1), ROWS[1]), "update", True, (1,)),
    Case("dynamic_update_slice", _written, (SQUARE, floats(2, 1), ROWS[1]), "place", False, (2,)),
    Case("dynamic_slice", _cut(1), (SQUARE, ROWS[1]), "place", True, (1,)),
]

TABLE, UPDATES = floats(4, 5), floats(3, 2)
KINDS = _names("scatter scatter_add scatter_mul scatter_min scatter_max scatter_sub")


def _scatter(kind, **options):
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=(1,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0, 1)
    )
    return lambda x, places, updates: getattr(lax, kind)(x, places, updates, numbers, **options)


def _at(kind, places, **options):
    return lambda x, updates: _scatter(kind, **options)(x, places, updates)


def _columns(x, updates):
    return x.at[jnp.array([1, 0]), :, jnp.array([0, 2])].add(updates)


def _of_one_kind(kind):
    name, adds = kind.replace("_", "-"), kind != "scatter"
    return [
        Case(name, _at(kind, PLACES), (TABLE, UPDATES), "constant"),
        Case(name, _at(kind, PLACES + 2), (TABLE, UPDATES), "out_of_bounds"),
        Case(name, _at(kind, PLACES + 2, mode="clip"), (TABLE, UPDATES), "clipped", adds),
        Case(name, _at(kind, PLACES * 0), (TABLE, UPDATES), "same_place", adds),
        Case(name, _scatter(kind), (TABLE, PLACES, UPDATES), "places_from_data", False, (0, 2)),
        Case(name, _scatter(kind), (TABLE, PLACES, UPDATES), "followed_places", False),
        Case(name, _scatter(kind), (TABLE, PLACES, UPDATES), "places_alone_from_data", True, (0,)),
    ]


SCATTERS = [
    *(case for kind in KINDS for case in _of_one_kind(kind)),
    Case("scatter", lambda x: x.at[ROWS[1:]].apply(jnp.sin), (floats(4, 2),), "applied"),
    Case("scatter", lambda x, i: x.at[i].apply(jnp.sin), (floats(4, 2), ROWS[1:]), "applied_places",
         False),
    Case("scatter-add", _columns, (floats(2, 3, 4), X), "window_between"),
]

# --- along axes


def _reduce(x, y, a, b):
    def both(left, right):
        return left[0] + right[0], left[1] * right[1] + left[0]

    return lax.reduce((x, y), (a, b), both, (1,))


ALONG = [
    *(Case(f"reduce_{n}", lambda x, n=n: getattr(jnp, n)(x, axis=(0, 2)), (floats(2, 3, 2),))
      for n in _names("sum max min prod")),
    Case("reduce_and", lambda x: x.all(1), (X > 0.5,)),
    Case("reduce_or", lambda x: x.any(1), (X > 0.5,)),
    Case("reduce_xor", lambda x: lax.reduce(x, ZERO, lax.bitwise_xor, (1,)), (MANY,)),
    *(Case(n, lambda x, n=n: getattr(lax, n)(x, 1, np.int32), (X,))
      for n in _names("argmax argmin")),
    Case("reduce", _reduce, (X, Y, floats(), floats()), is_exact=False),
    Case("reduce", _reduce, (X, Y, floats(), floats()), "one", False, (0,)),
    *(Case(n, lambda x, n=n: getattr(lax, n)(x, 1), (floats(2, 5),))
      for n in _names("cumsum cumprod cummax cummin cumlogsumexp")),
    Case("cumsum", lambda x: lax.cumsum(x, 0, reverse=True), (floats(5, 2),), "reverse"),
    Case("sort", lambda x, y: lax.sort((x, y), dimension=1, num_keys=1), (X, Y), is_exact=False),
    Case("sort", lambda x: lax.sort(x, dimension=0), (floats(3, 2),), "one"),
    Case("top_k", lambda x: lax.top_k(x, 2), (floats(2, 4),)),
    Case("fft", lambda x: lax.fft(x, "FFT", (3,)), (COMPLEX,)),
    Case("fft", lambda x: lax.fft(x, "RFFT", (4,)), (floats(2, 4),), "real", False),
]

# --- products


def _dot(*numbers):
    return lambda x, y: lax.dot_general(x, y, numbers)


def _conv(x, kernel, **options):
    layout = ("NHWC", "HWIO", "NHWC")
    params = {"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": layout, **options}
    return lambda x, k: lax.conv_general_dilated(x, k, **params), (floats(*x), floats(*kernel))


CONVS = {
    "plain": _conv((1, 4, 3, 2), (3, 2, 2, 2)),
    "strides": _conv((2, 4, 3, 1), (3, 2, 1, 1), window_strides=(2, 1), padding=((1, 0), (0, 2))),
    "lhs_dilation": _conv((1, 3, 4, 1), (2, 2, 1, 1), lhs_dilation=(2, 1),
                          padding=((1, 1), (-1, 1))),
    "one_axis": _conv((1, 4, 2), (3, 2, 1), dimension_numbers=("NHC", "HIO", "NHC"),
                      window_strides=(2,)),
    "rhs_dilation": _conv((1, 3, 5, 1), (2, 2, 1, 1), rhs_dilation=(1, 2)),
    "groups": _conv((1, 3, 2, 4), (2, 1, 2, 4), feature_group_count=2),
    "batch_groups": _conv((4, 3, 2, 1), (2, 1, 1, 4), batch_group_count=2),
    "layout": _conv((2, 3, 2, 4), (3, 2, 2, 1), dimension_numbers=("CHNW", "OWIH", "HNWC")),
}
CUBE = floats(2, 3, 4)
PRODUCTS = [
    Case("dot_general", _dot(((1,), (0,)), ((), ())), (X, floats(3, 2)), "matrix"),
    Case("dot_general", _dot(((), ()), ((), ())), (X, floats(4)), "outer"),
    Case("dot_general", _dot(((0, 1), (1, 0)), ((), ())), (X, floats(3, 2)), "inner"),
    Case("dot_general", _dot(((2,), (1,)), ((0,), (2,))), (CUBE, floats(3, 4, 2)), "batched"),
    Case("dot_general", _dot(((1,), (2,)), ((2,), (0,))), (floats(3, 4, 2), CUBE), "batch_last"),
    *(Case("conv_general_dilated", *case, what) for what, case in CONVS.items()),
]

# --- windows

STARTS = {"sum": (0.0, lax.add), "max": (-np.inf, lax.max), "min": (np.inf, lax.min)}


def _window(kind, window=(1, 2), strides=(1, 1), padding=((0, 0), (1, 0)), **options):
    return lambda x: lax.reduce_window(x, *STARTS[kind], window, strides, padding, **options)


_pooled = _window("max", (2, 3), (1, 2), ((0, 1), (1, 1)))
DILATIONS = {"base_dilation": (1, 2), "window_dilation": (1, 3)}
DILATED = {"strides": (1, 2), "padding": ((0, 0), (2, -1)), **DILATIONS}


def _any_window(x, start):
    return lax.reduce_window(x, start, lambda a, b: a * b + a + b, (1, 2), (1, 1), "SAME")


POOLED = floats(3, 5)
WINDOWS = [
    *(Case(f"reduce_window_{k}", _window(k), (floats(2, 4),)) for k in STARTS),
    Case("reduce_window_sum", _window("sum", **DILATED), (floats(2, 5),), "dilated"),
    Case("reduce_window", _any_window, (floats(2, 4), floats()), is_exact=False),
    Case("reduce_window", _any_window, (floats(2, 4), floats()), "operand", True, (0,)),
    Case("reduce_window", _any_window, (floats(2, 4), floats()), "start", True, (1,)),
    Case("select_and_scatter_add", lambda x, g: jax.vjp(_pooled, x)[1](g)[0], (POOLED, SQUARE)),
    Case("select_and_gather_add", lambda x, t: jax.jvp(_pooled, (x,), (t,))[1], (POOLED, POOLED)),
]

# --- linear algebra: matrices of a batch


def _positive(x):
    return jnp.einsum("bij,bkj->bik", x, x) + 3 * jnp.eye(x.shape[-1])


def _solved(a, b, left, lower, transposed):
    options = {"left_side": left, "lower": lower, "transpose_a": transposed}
    return lax.linalg.triangular_solve(a + 2 * jnp.eye(3), b, **options)


OPTIONS = [(a, b, c) for a in (True, False) for b in (True, False) for c in (True, False)]
MATRICES, SYSTEM = floats(2, 3, 3, low=-1.0, high=1.0), floats(4, 4) + 4 * np.eye(4)
LINEAR = [
    *(Case(n, lambda x, n=n: getattr(lax.linalg, n)(x), (MATRICES,), is_exact=False)
      for n in _names("eigh hessenberg lu qr schur svd")),
    *(Case(n, lambda x, n=n: getattr(lax.linalg, n)(_positive(x)), (MATRICES,), is_exact=False)
      for n in _names("cholesky tridiagonal")),
    Case("eig", lambda x: [abs(leaf) for leaf in lax.linalg.eig(x)], (MATRICES,), is_exact=False),
    *(Case("triangular_solve", lambda b, o=o: _solved(SQUARE, b, *o), (SQUARE,), f"{o}")
      for o in OPTIONS),
    *(Case("triangular_solve", jax.vmap(lambda a, b, o=o: _solved(a, b, *o)), (MATRICES, MATRICES),
           f"matrix_{o}", False) for o in OPTIONS),
    Case("lu_pivots_to_permutation", lambda p: lax.linalg.lu_pivots_to_permutation(p, 4),
         (integers(2, 3, low=0, high=4),), is_exact=False),
    Case("custom_linear_solve", lambda b: jnp.linalg.solve(SYSTEM, b), (floats(4, 2),)),
    Case("custom_linear_solve", lambda a, b: jnp.linalg.solve(a + 4 * jnp.eye(4), b),
         (floats(4, 4), floats(4)), "matrix", False),
]

# --- calls, branches and loops


@jax.custom_jvp
def _with_forward(x):
    return jnp.sin(x)


@jax.custom_vjp
def _with_backward(x):
    return jnp.sin(x)


_with_forward.defjvp(lambda x, t: (jnp.sin(x[0]), t[0][..., ::-1]))
_with_backward.defvjp(lambda x: (jnp.sin(x), None), lambda _, g: (g[..., ::-1],))


def _branches(index, x, y):
    return lax.switch(index, [lambda x, y: x, lambda x, y: y[::-1], lambda x, y: x * y], x, y)


def _running(start, x, **options):
    return lax.scan(lambda c, row: (c + row, c), start, x, **options)


def _fixed_places(x):
    places = jnp.array([2, 0, 1])
    return lax.scan(lambda c, _: (0.5 * c[places], None), x, None, length=2)[0]


def _many_steps(x, y):
    return lax.scan(lambda c, row: (c + row, 2 * c), x, jnp.tile(y, (300, 1)))


def _counted(x, y):
    state = (0, x, jnp.zeros(3))
    return lax.while_loop(lambda c: c[0] < 6, lambda c: (c[0] + 1, c[1] + y, c[2] + c[1]), state)


def _decided(x, y):
    return lax.while_loop(lambda c: c[0].sum() < 2, lambda c: (c[0] + 0.5, 2 * c[1]), (x, y))


THREE = floats(3)
CONTROL = [
    Case("jit", jax.jit(jnp.sin), (X,)),
    Case("remat2", jax.checkpoint(lambda x: jnp.sin(x[::-1])), (THREE,)),
    Case("custom_jvp_call", _with_forward, (THREE,)),
    Case("custom_vjp_call", _with_backward, (THREE,)),
    Case("cond", _branches, (ROWS[1], THREE, THREE)),
    Case("cond", _branches, (ROWS[1], THREE, THREE), "choice_from_data", followed=(1, 2)),
    Case("scan", lambda x: lax.scan(lambda c, _: (jnp.roll(c, 1), c[0]), x, None, length=2),
         (floats(5),), "rolled"),
    Case("scan", lambda x: lax.map(lambda row: row - row.mean(), x), (floats(3, 2),), "map"),
    Case("scan", _running, (floats(2), floats(3, 2)), "running"),
    Case("scan", lambda *x: _running(*x, reverse=True), (floats(2), floats(3, 2)), "running_back"),
    Case("scan", _fixed_places, (THREE,), "constant_places"),
    Case("scan", _running, (floats(2), floats(3, 2)), "other_slices", followed=(0,)),
    Case("scan", _running, (floats(2), floats(3, 2)), "other_start", followed=(1,)),
    Case("scan", lambda x: lax.scan(lambda c, _: (c, c), x, None, length=0), (THREE,), "no_step"),
    Case("scan", _many_steps, (floats(2), floats(2)), "many_steps", False),
    Case("while", _counted, (THREE, THREE), "counted"),
    Case("while", _decided, (THREE, THREE), "decided", False),
]

CASES = [
    *(*ELEMENTWISE, *MOVES, *SCATTERS, *ALONG),
    *(*PRODUCTS, *WINDOWS, *LINEAR, *CONTROL),
]

OF_OTHER_VERSIONS = {*_names("""
    copy_p expand_dims log2 one_minus_square pcast pvary random_gamma_grad
""")}
"""Elementwise functions and moves that no version of JAX in use exports."""

OF_THE_LIBRARY = {"braintrace_unsharded", "with_derivative_of", "zeros_mapped_like"}

COUPLED = {*_names("""
    after_all all_gather all_to_all approx_top_k axis_index bitcast_convert_type call
    cholesky_update closed_call create_token custom_lin dce_sink empty2 eq_to get
    householder_product iota le_to lt_to ormqr pmax pmin ppermute psum ragged_all_to_all
    random_bits random_fold_in random_gamma random_seed random_split rng_bit_generator rng_uniform
    select_and_scatter stage swap symmetric_product threefry2x32 tridiagonal_solve xla_pmap
""")}
"""Primitives that count as coupling everything. They have no operands, run on several devices, draw
random numbers, or are not worth a rule."""
