"""Values of the operations, against NumPy and plain JAX."""

import functools
import gc

import brainevent
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit
from jax.experimental import sparse as jax_sparse
from ops_catalogue import CSR, DENSE, ENTRIES, array, quick_jit

from braintrace._errors import OptionError
from braintrace._etrace_op import (
    conv,
    einsum,
    element_wise,
    embedding,
    feedback_matmul,
    grouped_matmul,
    lora_matmul,
    matmul,
    sparse_matmul,
)
from braintrace._etrace_op.sparse import pattern as sparse_pattern_module
from braintrace._jax import open_jaxpr, sub_jaxprs

PREFIXES = ("etp_", "etp_lora_", "etp_fb_", "etp_sp_")


def bound_primitives(function, *arguments):
    jaxpr = jax.make_jaxpr(function)(*arguments)
    return [e.primitive.name for e in jaxpr.eqns if e.primitive.name.startswith("etp_")]


@pytest.mark.parametrize(
    ("leading", "primitive"),
    [((), "etp_mv"), ((2,), "etp_mm"), ((2, 5), "etp_mm"), ((2, 1, 3), "etp_mm"), ((0,), "etp_mm")],
)
def test_leading_axes_are_batch_axes(leading, primitive):
    x, weight, bias = array(0, *leading, 3), array(1, 3, 4), array(2, 4)
    B, A = array(3, 3, 2), array(4, 2, 4)
    names = [primitive.replace("etp_", prefix) for prefix in PREFIXES]

    def products(x):
        dense, low_rank = matmul(x, weight, bias), lora_matmul(x, B, A, alpha=0.5)
        other_way_back = feedback_matmul(x, weight, -weight, bias)
        return dense, low_rank, other_way_back, sparse_matmul(x, ENTRIES, sparse_mat=CSR)

    assert bound_primitives(products, x) == names
    x_now, *operands = map(np.asarray, (x, weight, bias, B, A))
    weight, bias, B, A = operands
    product = x_now @ weight + bias
    wanted = (product, 0.5 * (x_now @ B @ A), product, x_now @ DENSE)
    for found, want in zip(quick_jit(products)(x), wanted, strict=True):
        np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("equation", "primitive"),
    [
        ("bk,kn->bn", "etp_mm"),
        ("k,kn->n", "etp_mv"),
        ("btk,kn->btn", "etp_mm"),  # shared by positions
        ("kb,nk->nb", "etp_mm"),
        ("btk,kmhn->bhmtn", "etp_mm"),
        ("gk,gkn->gn", "etp_gmv"),
        ("tgbkh,nhgk->hbtng", "etp_gmm"),
        (" ... g k , gkn -> g ... n ", "etp_gmm"),
        ("btk,kmn->bn", "etp_mm"),  # letters of one operand alone
        (",n->n", "etp_elemwise"),
        ("tbg,ngm->gtmnb", "etp_elemwise"),  # nothing is summed over
        ("bs,sn->bn", "etp_mm"),  # an axis of length one
        ("bgh,g->hb", "etp_elemwise"),  # nothing is free
        ("bth,hm->h", "etp_elemwise"),
        ("bk,kkn->bn", "etp_mm"),  # diagonals
        ("bb,kbk->bk", "etp_elemwise"),
    ],
)
def test_einsum_is_that_of_numpy(equation, primitive):
    spelled = equation.replace(" ", "").replace("...", "tb")
    x_letters, rest = spelled.split(",")
    size = {"b": 2, "t": 5, "k": 3, "n": 4, "m": 3, "g": 2, "h": 3, "s": 1}
    shapes = [[size[a] for a in letters] for letters in (x_letters, rest.split("->")[0])]
    x, weight = (array(i, *shape) for i, shape in enumerate(shapes))
    y = quick_jit(functools.partial(einsum, equation))(x, weight)
    np.testing.assert_allclose(y, np.einsum(spelled, x, weight), rtol=1e-5, atol=1e-5)
    found = bound_primitives(lambda x, w: einsum(equation, x, w), x, weight)
    assert found == [primitive]


@pytest.mark.parametrize("shape", [(5, 4), (5,), (5, 2, 3), (5, 0)])
@pytest.mark.parametrize("dtype", ["int32", "int8", "uint8"])
def test_embedding_returns_rows_of_the_table(shape, dtype):
    weight = array(0, *shape)
    each = [np.asarray(indices, dtype) for indices in ([[4, 0, 1], [1, 3, 3]], [], 2)]
    found = quick_jit(lambda each: [embedding(indices, weight) for indices in each])(each)
    for rows, indices in zip(found, each, strict=True):
        np.testing.assert_array_equal(rows, np.asarray(weight)[indices])


def test_an_index_beyond_the_table_gives_nan_and_no_gradient():
    indices, weight = np.array([-1, 3, 300, -4], np.int16), np.asarray(array(0, 3, 2))

    @quick_jit
    def value_and_gradient(weight):
        y, pull_back = jax.vjp(lambda w: embedding(indices, w), weight)
        return y, pull_back(jnp.ones((4, 2)))[0]

    y, gradient = map(np.asarray, value_and_gradient(weight))
    np.testing.assert_array_equal(y[0], weight[2])
    assert np.isnan(y[1:]).all()
    np.testing.assert_array_equal(gradient, [[0, 0], [0, 0], [1, 1]])


@pytest.mark.parametrize(
    ("x_dtype", "weight_dtype", "result_dtype"),
    [
        ("float32", "float32", "float32"),
        ("bfloat16", "float32", "float32"),
        ("float32", "bfloat16", "float32"),
        ("bfloat16", "bfloat16", "bfloat16"),
        ("float16", "float16", "float16"),
        ("int32", "float32", "float32"),
        ("complex64", "float32", "complex64"),
        ("complex64", "complex64", "complex64"),
    ],
)
def test_results_have_the_promoted_dtype(x_dtype, weight_dtype, result_dtype):
    x = array(0, 2, 3).astype(x_dtype)
    weight = array(1, 3, 4).astype(weight_dtype)
    if "complex" in x_dtype:
        x = x + 1j * array(2, 2, 3)
    wide = complex if "complex" in result_dtype else float
    want = np.asarray(x).astype(wide) @ np.asarray(weight).astype(wide)
    tolerance = 2e-2 if "16" in x_dtype + weight_dtype else 1e-5

    @quick_jit
    def products(x, weight):
        return [
            matmul(x, weight),
            grouped_matmul(x[:, None], weight[None])[:, 0],
            feedback_matmul(x, weight, jnp.ones(weight.shape, int)),
            sparse_matmul(x, weight[CSR_ROWS, CSR_COLUMNS], sparse_mat=FULL),
            conv(x[..., None, :], weight[None], dimension_numbers=("NWC", "WIO", "NWC"))[:, 0],
        ]

    with jax.numpy_dtype_promotion("standard"):
        results = products(x, weight)
    for result in results:
        assert result.dtype == result_dtype
        np.testing.assert_allclose(
            np.asarray(result).astype(wide), want, rtol=tolerance, atol=tolerance
        )


CSR_ROWS, CSR_COLUMNS = np.indices((3, 4)).reshape(2, -1)
FULL = saiunit.sparse.COO((jnp.ones(12), CSR_ROWS, CSR_COLUMNS), shape=(3, 4))


def test_double_precision_is_kept():
    with jax.enable_x64(True):
        x, weight = array(0, 2, 3, dtype=np.float64), array(1, 3, 4, dtype=np.float64)
        y = matmul(x, weight)
        assert y.dtype == np.float64
        np.testing.assert_allclose(y, np.asarray(x) @ np.asarray(weight), rtol=1e-14)


def test_element_wise_applies_its_function():
    weight = array(0, 3, 2)
    np.testing.assert_array_equal(element_wise(weight), weight)
    np.testing.assert_allclose(element_wise(weight, fn=jnp.abs), np.abs(weight))
    assert element_wise(2.0).shape == ()


def square(weight):
    return weight**2


def halved(bias):
    return 0.5 * bias


X, W, C = array(0, 2, 3), array(1, 3, 4), array(2, 4)
SIGNAL, KERNEL = array(3, 2, 5, 3), array(4, 2, 3, 4)
B, A = array(5, 3, 2), array(6, 2, 4)
NWC = {"dimension_numbers": ("NWC", "WIO", "NWC")}
BEFORE = {
    "matmul": (
        lambda w, b, **f: matmul(X, w, b, **f),
        (W, C),
    ),
    "conv": (
        lambda w, b, **f: conv(SIGNAL, w, b, **NWC, **f),
        (KERNEL, C),
    ),
    "sparse_matmul": (
        lambda w, b, **f: sparse_matmul(X, w, sparse_mat=CSR, bias=b, **f),
        (ENTRIES, C),
    ),
    "lora_matmul": (
        lambda w, b, weight_fn=None, **f: lora_matmul(
            X, w if weight_fn is None else weight_fn(w), A, bias=b, **f
        ),
        (B, C),
    ),
    "grouped_matmul": (
        lambda w, b, **f: grouped_matmul(SIGNAL[:, :2], w, b, **f),
        (KERNEL, array(7, 2, 4)),
    ),
    "einsum": (
        lambda w, b, weight_fn=None, **f: einsum("bk,kn->bn", X, w, weight_fn=weight_fn),
        (W, C),
    ),
    "embedding": (
        lambda w, b, weight_fn=None, **f: embedding(jnp.array([2, 0]), w, weight_fn=weight_fn),
        (W, C),
    ),
    "element_wise": (
        lambda w, b, weight_fn=None, bias_fn=None: element_wise(w, weight_fn=weight_fn),
        (W, C),
    ),
}


@pytest.mark.parametrize("name", BEFORE)
def test_functions_of_operands_are_applied_first(name):
    operation, operands = BEFORE[name]

    def within(w, b):
        return operation(w, b, weight_fn=square, bias_fn=halved)

    def before(w, b):
        return operation(square(w), halved(b) if name != "element_wise" else b)

    assert bound_primitives(within, *operands) == bound_primitives(before, *operands)
    np.testing.assert_array_equal(*quick_jit(lambda w, b: (within(w, b), before(w, b)))(*operands))


def test_a_function_makes_the_operand_of_several_arrays():
    pair = {"size": jnp.abs(W), "sign": jnp.sign(W)}
    found = matmul(X, pair, weight_fn=lambda p: p["size"] * p["sign"])
    np.testing.assert_array_equal(found, matmul(X, W))


CONVOLUTIONS = [
    ((2, 7, 4), (3, 2, 6), {"dimension_numbers": ("NWC", "WIO", "NWC"), "strides": 2,
                            "feature_group_count": 2}),
    ((2, 4, 7), (6, 4, 3), {"padding": "VALID", "rhs_dilation": 2}),
    ((7, 2, 3), (2, 3, 4), {"dimension_numbers": ("WNC", "WIO", "NCW"), "padding": "SAME_LOWER"}),
    ((2, 3, 5, 6), (4, 3, 2, 2), {"lhs_dilation": (2, 1), "padding": [(1, 0), (0, 2)]}),
    ((2, 5, 6, 3), (2, 3, 1, 6), {"dimension_numbers": ("NHWC", "HWIO", "NHWC"),
                                  "feature_group_count": 3, "strides": (2, 1)}),
    ((5, 6, 3, 2), (3, 6, 2, 3), {"dimension_numbers": ("HWCN", "IOHW", "HWNC")}),
    ((2, 4, 3, 5, 2), (2, 2, 3, 2, 4), {"dimension_numbers": ("NDHWC", "DHWIO", "NCDHW")}),
    ((2, 4, 3, 5), (2, 4, 2, 2),
     {"dimension_numbers": jax.lax.ConvDimensionNumbers((0, 1, 2, 3), (0, 1, 2, 3), (0, 2, 1, 3))}),
]  # fmt: skip


@pytest.mark.parametrize(("x_shape", "kernel_shape", "options"), CONVOLUTIONS)
def test_convolution_in_every_layout(x_shape, kernel_shape, options):
    x, kernel = array(0, *x_shape), array(1, *kernel_shape)
    space = x.ndim - 2
    numbers = jax.lax.conv_dimension_numbers(
        x.shape, kernel.shape, options.get("dimension_numbers")
    )
    bias = array(2, kernel_shape[numbers.rhs_spec[0]])

    def per_axis(name):
        value = options.get(name, 1)
        return (value,) * space if isinstance(value, int) else value

    def of_all_axes(bias):
        shape = [1] * x.ndim
        shape[numbers.out_spec[1]] = -1
        return bias.reshape(shape)

    def plain(x, kernel, bias):
        y = jax.lax.conv_general_dilated(
            x,
            kernel,
            per_axis("strides"),
            options.get("padding", "SAME"),
            per_axis("lhs_dilation"),
            per_axis("rhs_dilation"),
            numbers,
            options.get("feature_group_count", 1),
        )
        return y + of_all_axes(bias)

    def loss(function):
        return lambda *arguments: jnp.sum(jnp.sin(function(*arguments)))

    def marked(x, kernel, bias):
        return conv(x, kernel, bias if space == 1 else of_all_axes(bias), **options)

    @quick_jit
    def values_and_gradients(*arguments):
        return [
            (function(*arguments), jax.grad(loss(function), (0, 1, 2))(*arguments))
            for function in (marked, plain)
        ]

    (got, gradients), (want, want_gradients) = values_and_gradients(x, kernel, bias)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    for left, right in zip(gradients, want_gradients, strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-4)


SPARSE_MATRICES = {
    "saiunit CSR": lambda dense: CSR,
    "saiunit CSC": saiunit.sparse.CSC.fromdense,
    "saiunit COO": saiunit.sparse.COO.fromdense,
    "brainevent CSR": brainevent.CSR.fromdense,
    "brainevent CSC": brainevent.CSC.fromdense,
    "BCOO": jax_sparse.BCOO.fromdense,
    "BCOO with padding": lambda dense: jax_sparse.BCOO.fromdense(dense, nse=12),
    "BCSR": jax_sparse.BCSR.fromdense,
    "BCSR with padding": lambda dense: jax_sparse.BCSR.fromdense(dense, nse=12),
}


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("saiunit CSR", 2),
        ("saiunit CSR", 20),
        ("saiunit CSC", 20),
        ("saiunit COO", 20),
        ("brainevent CSR", 20),
        ("brainevent CSC", 20),
        ("BCOO", 2),
        ("BCOO with padding", 2),
        ("BCSR", 2),
        ("BCSR with padding", 2),
    ],
)
def test_every_sparse_format_gives_the_dense_product(name, rows):
    matrix = sparse_matrix(name)
    x, bias = array(0, rows, 3), array(1, 4)

    def loss(entries):
        y = sparse_matmul(x, entries, sparse_mat=matrix, bias=bias)
        return jnp.sum(jnp.sin(y)), y

    (_, y), gradient = quick_jit(jax.value_and_grad(loss, has_aux=True))(matrix.data)
    want = np.asarray(x) @ DENSE + np.asarray(bias)
    np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-6)
    slopes = np.where(DENSE != 0, np.asarray(x).T @ np.cos(want), 0)
    np.testing.assert_allclose(np.sort(gradient), np.sort(_padded(slopes, gradient)), rtol=1e-4)


@functools.cache
def sparse_matrix(name):
    return SPARSE_MATRICES[name](jnp.asarray(DENSE))


def _padded(slopes, like):
    nonzero = slopes[DENSE != 0]
    return np.concatenate([nonzero, np.zeros(like.size - nonzero.size)])


def test_sparse_product_of_many_rows():
    """Too thin for dense blocks: rows are taken in blocks, and the last has what is left."""
    x = array(0, 45, 90)
    generator = np.random.default_rng(0)
    index = generator.integers((90, 80), size=(30, 2))
    thin = jax_sparse.BCOO((array(1, 30), jax.device_put(index)), shape=(90, 80))

    def loss(x, entries):
        return jnp.sum(jnp.sin(sparse_matmul(x, entries, sparse_mat=thin)))

    def dense_loss(x, entries):
        dense = jnp.zeros((90, 80)).at[index[:, 0], index[:, 1]].add(entries)
        return jnp.sum(jnp.sin(x @ dense))

    @quick_jit
    def results(x, entries):
        gradients = [jax.grad(f, (0, 1))(x, entries) for f in (loss, dense_loss)]
        return sparse_matmul(x, entries, sparse_mat=thin), gradients

    product, (found, expected) = results(x, thin.data)
    full = np.zeros((90, 80), np.float32)
    np.add.at(full, tuple(index.T), thin.data)
    np.testing.assert_allclose(product, np.asarray(x) @ full, rtol=1e-5, atol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, expected
    )


@pytest.mark.parametrize("rows", [2, 20])
def test_entries_at_the_same_place_add_up(rows):
    x = array(0, rows, 3)
    places = jax.device_put(np.array([[0, 1], [0, 1], [2, 3]]))
    twice = jax_sparse.BCOO((array(1, 3), places), shape=(3, 4))

    def loss(entries):
        product = sparse_matmul(x, entries, sparse_mat=twice)
        return product.sum(), product

    gradient = quick_jit(jax.grad(loss, has_aux=True))
    slopes, product = gradient(np.array([1, 2, 4], np.float32))
    x = np.asarray(x)
    want = np.zeros((rows, 4))
    want[:, 1], want[:, 3] = 3 * x[:, 0], 4 * x[:, 2]
    np.testing.assert_allclose(product, want, rtol=1e-6)
    np.testing.assert_allclose(slopes, x.sum(0)[np.array([0, 0, 2])], rtol=1e-5)


def test_sparse_with_one_weight_for_all_entries():
    x = array(0, 3)
    y = sparse_matmul(x, jnp.float32(2.0), sparse_mat=CSR)
    np.testing.assert_allclose(y, np.asarray(x) @ (2.0 * (DENSE != 0)), rtol=1e-5)


def _sizes(jaxpr):
    opened, constants = open_jaxpr(jaxpr)
    variables = [*opened.invars, *(out for e in opened.eqns for out in e.outvars)]
    sizes = [np.prod(v.aval.shape) for v in variables] + [np.size(c) for c in constants]
    return sizes + [size for e in opened.eqns for body in sub_jaxprs(e) for size in _sizes(body)]


@pytest.mark.parametrize("entries", [50, 20_000])
def test_sparse_builds_nothing_of_size_in_times_out(entries):
    inputs, outputs = 300, 310
    generator = np.random.default_rng(0)
    index = generator.integers((inputs, outputs), size=(entries, 2))
    matrix = jax_sparse.BCOO((jnp.ones(entries), jax.device_put(index)), shape=(inputs, outputs))

    def loss(x, data):
        return jnp.sum(jnp.sin(sparse_matmul(x, data, sparse_mat=matrix)))

    for rows in (2, 20):
        jaxpr = jax.make_jaxpr(jax.grad(loss, (0, 1)))(jnp.ones((rows, inputs)), matrix.data)
        sizes = set(_sizes(jaxpr))
        assert rows * inputs in sizes and inputs * outputs not in sizes
        assert max(sizes) <= max(rows * outputs, rows * entries, inputs * outputs / 2)


def test_equal_patterns_share_one_compilation():
    def run(x, matrix):
        @jax.jit
        def step(x):
            return sparse_matmul(x, ENTRIES, sparse_mat=matrix)

        return step.lower(x).as_text()

    other = saiunit.sparse.CSR.fromdense(jnp.asarray(2 * DENSE))
    assert run(array(0, 3), CSR) == run(array(0, 3), other)
    (first,) = (e.params["sparse_mat"] for e in _sparse_equations(CSR))
    (second,) = (e.params["sparse_mat"] for e in _sparse_equations(other))
    assert first == second and hash(first) == hash(second) and first is not second
    assert first != CSR


def test_a_structure_is_read_once_while_it_lives():
    matrix = saiunit.sparse.CSC.fromdense(jnp.asarray(DENSE))
    before = set(sparse_pattern_module._known)
    first = sparse_pattern_module.sparse_pattern(matrix)
    assert sparse_pattern_module.sparse_pattern(matrix.with_data(2 * matrix.data)) is first
    assert len(sparse_pattern_module._known.keys() - before) == 1
    del matrix
    gc.collect()
    assert not sparse_pattern_module._known.keys() - before


def _sparse_equations(matrix):
    jaxpr = jax.make_jaxpr(lambda x: sparse_matmul(x, ENTRIES, sparse_mat=matrix))(jnp.ones(3))
    return [e for e in jaxpr.eqns if e.primitive.name == "etp_sp_mv"]


def test_a_dilated_input_needs_explicit_padding():
    with pytest.raises(OptionError, match="explicit"):
        conv(array(0, 1, 3, 5), array(1, 4, 3, 2), lhs_dilation=2)
