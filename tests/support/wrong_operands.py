"""Operands and layers that are wrong, each with a part of the message; see `wrong_calls`."""

import brainstate
import jax.numpy as jnp
import saiunit as u
from matrices import csr
from wrong_calls import IS_A_STATE, RAGGED, STATE, X

import braintrace
from braintrace import nn

MATRIX = csr(jnp.array([[0.0, 2.0], [3.0, 0.0]]))


def started(layer, *arguments, dt=1.0 * u.ms, batch=2):
    layer.init_state(batch)
    with brainstate.environ.context(dt=dt):
        return layer(*arguments)


K = jnp.ones((3, 2, 4))
SIGNAL = jnp.ones((2, 5, 2))
NWC = ("NWC", "WIO", "NWC")


def conv(x=SIGNAL, kernel=K, **options):
    return braintrace.conv(x, kernel, **{"dimension_numbers": NWC, **options})


def sparse(x=None, weight=MATRIX.data, **options):
    x = jnp.ones(2) if x is None else x
    return braintrace.sparse_matmul(x, weight, **{"sparse_mat": MATRIX, **options})


def feedback(x=X, weight=None, matrix=None, bias=None):
    weight = jnp.ones((3, 4)) if weight is None else weight
    matrix = jnp.ones((3, 4)) if matrix is None else matrix
    return braintrace.feedback_matmul(x, weight, matrix, bias)


def grouped(x=None, weight=None, bias=None, **options):
    x = jnp.ones((2, 2, 3)) if x is None else x
    weight = jnp.ones((2, 3, 4)) if weight is None else weight
    return braintrace.grouped_matmul(x, weight, bias, **options)


def einsum(equation="bk,kn->bn", x=X, weight=None, **options):
    weight = jnp.ones((3, 4)) if weight is None else weight
    return braintrace.einsum(equation, x, weight, **options)


def embedding(indices=None, weight=X, **options):
    indices = jnp.ones(2, int) if indices is None else indices
    return braintrace.embedding(indices, weight, **options)


def lora(x=X, B=None, A=None, **options):
    B = jnp.ones((3, 2)) if B is None else B
    return braintrace.lora_matmul(x, B, jnp.ones((2, 4)) if A is None else A, **options)


OPERATIONS = [
    (
        "`weight` of shape (in, out), got shape (3,)",
        lambda: braintrace.matmul(X, jnp.ones(3)),
    ),
    (
        "expected `weight` of shape (in, out)",
        lambda: braintrace.matmul(X, jnp.ones((1, 3, 4))),
    ),
    ("(5, 4); `x` has shape (2, 3)", lambda: braintrace.matmul(X, jnp.ones((5, 4)))),
    ("`x` has shape ()", lambda: braintrace.matmul(1.0, jnp.ones((3, 4)))),
    (
        "`bias` of shape (4,), got (5,)",
        lambda: braintrace.matmul(X, jnp.ones((3, 4)), jnp.ones(5)),
    ),
    (
        "`bias` has unit `mV`, but `x` times the weight has unit `mA`",
        lambda: braintrace.matmul(X, jnp.ones((3, 4)) * u.mA, jnp.ones(4) * u.mV),
    ),
    ("`x` (2, 3) and kernel (3, 2, 4)", lambda: conv(X)),
    ("`x` has 5 features; a kernel with 2", lambda: conv(jnp.ones((2, 4, 5)))),
    ("`conv`: strides='a' must be one positive integer", lambda: conv(strides="a")),
    ("`conv`: strides=0 must be one positive integer", lambda: conv(strides=0)),
    ("`conv`: strides=1.5 must be one positive integer", lambda: conv(strides=1.5)),
    ("padding='MOST' is unknown", lambda: conv(padding="MOST")),
    ("`conv`: padding=3 must be a string or one (low, high) pair", lambda: conv(padding=3)),
    ("padding=[(4611686018427387904, 0)]", lambda: conv(padding=[(2**62, 0)])),
    ("strides=2147483648 must be", lambda: conv(strides=2**31)),
    ("rhs_dilation=(1, 2) must", lambda: conv(rhs_dilation=(1, 2))),
    ("lhs_dilation=-1 must be one", lambda: conv(lhs_dilation=-1, padding="VALID")),
    ("dimension_numbers=3 do not", lambda: conv(dimension_numbers=3)),
    ("dimension_numbers elements", lambda: conv(dimension_numbers=("NXC", "WIO", "NWC"))),
    ("`bias` of shape (4,) or (1, 1, 4), got (3,)", lambda: conv(bias=jnp.ones(3))),
    (
        "`bias` of shape (4,) or (1, 1, 4), got (1, 4, 1)",
        lambda: conv(bias=jnp.ones((1, 4, 1))),
    ),
    (
        "`weight_data` of shape (2,), one number per entry of `sparse_mat`, got (3,)",
        lambda: sparse(weight=jnp.ones(3)),
    ),
    ("`x` has shape (5,)", lambda: sparse(jnp.ones(5))),
    (
        "`sparse_mat` must be a CSR, CSC, COO, BCOO or BCSR matrix",
        lambda: sparse(sparse_mat=jnp.ones((2, 2))),
    ),
    (
        "`sparse_mat` must be a CSR, CSC, COO, BCOO or BCSR matrix, got NoneType",
        lambda: sparse(sparse_mat=None),
    ),
    (
        "`B` of shape (in, rank) and `A` of shape (rank, out), got (3, 2) and (3, 4)",
        lambda: lora(A=jnp.ones((3, 4))),
    ),
    ("`x` has shape (2, 3)", lambda: lora(B=jnp.ones((5, 2)))),
    (
        "`alpha` must be a number that is known at trace time, got 'a'",
        lambda: lora(alpha="a"),
    ),
    (
        "`alpha` must be a number that is known at trace time, got None",
        lambda: lora(alpha=None),
    ),
    ("`alpha` must be finite, got inf", lambda: lora(alpha=float("inf"))),
    ("`weight` of shape (in, out), got shape (3,)", lambda: feedback(weight=jnp.ones(3))),
    ("(5, 4); `x` has shape (2, 3)", lambda: feedback(weight=jnp.ones((5, 4)))),
    (
        "`feedback` of the weight's shape (3, 4), got (4, 3)",
        lambda: feedback(matrix=jnp.ones((4, 3))),
    ),
    (
        "`feedback` has unit `mV`, but `weight` has unit `mA`",
        lambda: feedback(weight=jnp.ones((3, 4)) * u.mA, matrix=jnp.ones((3, 4)) * u.mV),
    ),
    (
        "`feedback` has dtype complex64, but `weight` has dtype float32",
        lambda: feedback(matrix=1j * jnp.ones((3, 4))),
    ),
    (
        "`weight` of shape (groups, in, out), got shape (3, 4)",
        lambda: grouped(weight=jnp.ones((3, 4))),
    ),
    ("`x` must have sizes (2, 3)", lambda: grouped(X[0])),
    ("`x` must have sizes (5, 3)", lambda: grouped(weight=jnp.ones((5, 3, 4)))),
    ("`bias` of shape (2, 4), got (4,)", lambda: grouped(bias=jnp.ones(4))),
    (
        "`bias` has unit `mV`, but `x` times the weight has unit `mA`",
        lambda: grouped(weight=jnp.ones((2, 3, 4)) * u.mA, bias=jnp.ones((2, 4)) * u.mV),
    ),
    ("`indices` to be integers without a unit, got dtype float32", lambda: embedding(X)),
    ("`indices` to be integers without a unit, got dtype bool", lambda: embedding(X > 0)),
    (
        "`indices` to be integers without a unit, got dtype int32 and unit `m`",
        lambda: embedding(jnp.ones(2, int) * u.meter),
    ),
    (
        "`weight` of shape (rows, ...), with a row or more, got shape (0, 3)",
        lambda: embedding(weight=jnp.ones((0, 3))),
    ),
    (
        "`weight` of shape (rows, ...), with a row or more, got shape ()",
        lambda: embedding(weight=jnp.ones(())),
    ),
    (("`equation` is 3", "result, as in 'bgk,gkn->bgn'"), lambda: einsum(3)),
    ("`equation` is 'bk,kn'", lambda: einsum("bk,kn")),
    ("`equation` is 'bk,kn,n->b'", lambda: einsum("bk,kn,n->b")),
    ("names an axis '1'; expected letters", lambda: einsum("b1,1n->bn")),
    ("'k' to axes of different sizes", lambda: einsum("bk,kk->bk")),
    ("has '...' twice in '...k...'", lambda: einsum("...k...,kn->...n")),
    ("'bk,kn->bnn' has 'n' twice in 'bnn'", lambda: einsum("bk,kn->bnn")),
    ("has 'z' only in the result", lambda: einsum("bk,kn->bz")),
    ("an ellipsis in the weight", lambda: einsum("b...k,...n->bn")),
    ("ellipsis in `x` and in the result", lambda: einsum("...k,kn->n")),
    ("`x`, which has shape (2, 3)", lambda: einsum("btk,kn->btn")),
    ("1 axes of `weight`, which has shape (3, 4)", lambda: einsum("bk,k->b")),
    (
        "'k' to axes of different sizes: `x` has shape (2, 3) and `weight` (2, 4)",
        lambda: einsum(weight=jnp.ones((2, 4))),
    ),
    (
        "'k' to axes of different sizes: `x` has shape (2, 3) and `weight` (1, 4)",
        lambda: einsum(weight=jnp.ones((1, 4))),
    ),
    *[
        (
            f"`element_wise`: `weight{leaf}` is {text}",
            lambda value=value: braintrace.element_wise(value, jnp.exp),
        )
        for leaf, text, value in [
            ("", "3", 3),
            ("", "True", True),
            ("", "an array of dtype int32", jnp.ones(3, int)),
            ("", "an array of dtype int32", jnp.ones(3, int) * u.mV),
            ("[1]", "an array of dtype bool", (X, jnp.ones(3, bool))),
        ]
    ],
    (
        "both `fn` and `weight_fn`",
        lambda: braintrace.element_wise(X, jnp.abs, weight_fn=jnp.abs),
    ),
    *[
        (
            f"`{name}` got `bias_fn` without a `bias`",
            lambda call=call: call(bias_fn=jnp.abs),
        )
        for (name, call) in {
            "matmul": lambda **f: braintrace.matmul(X, jnp.ones((3, 4)), **f),
            "lora_matmul": lora,
        }.items()
    ],
    (
        "`weight_fn(weight)` is 'a'",
        lambda: braintrace.matmul(X, jnp.ones((3, 4)), weight_fn=lambda w: "a"),
    ),
    (f"`weight` {IS_A_STATE}", lambda: braintrace.matmul(X, STATE, weight_fn=jnp.abs)),
    ("`fn` of `weight` is None", lambda: braintrace.element_wise(X, lambda w: None)),
    ("`fn` of `weight` is a tuple", lambda: braintrace.element_wise(X, lambda w: (w, w))),
    ("`fn(weight)` is 'a'", lambda: braintrace.element_wise(X, lambda w: "a")),
]

LAYERS = [
    (
        "`GRUCell`: `in_size` is (2, 3); expected a positive integer or a tuple of one",
        lambda: nn.GRUCell(in_size=(2, 3), out_size=4),
    ),
    (
        "`GRUCell` got `num_in` by two names, as `num_in` and as `in_size`",
        lambda: nn.GRUCell(3, 4, in_size=3),
    ),
    (
        "`LRUCell` got `num_in` by two names, as `in_size` and as `d_model`",
        lambda: nn.LRUCell(in_size=3, d_model=3),
    ),
    (
        "`LRUCell` got `num_hidden` by two names, as `num_hidden` and as `d_hidden`",
        lambda: nn.LRUCell(3, 4, 5, d_hidden=5),
    ),
    ("`Linear`: `in_size` is ('a', 3)", lambda: nn.Linear(("a", 3), 2)),
    ("`Linear`: `out_size` is an", lambda: nn.Linear(3, jnp.ones(2))),
    (
        ("`Linear`", "`w_init` = an array of dtype float32 and shape (2, 2)"),
        lambda: nn.Linear(3, 2, w_init=jnp.ones((2, 2))),
    ),
    ("`Linear`: `w_init` is None", lambda: nn.Linear(3, 2, w_init=None)),
    (
        ("`GRUCell`", "`b_init` = an array of dtype float32 and shape (7,)"),
        lambda: nn.GRUCell(3, 4, b_init=jnp.ones(7)),
    ),
    (
        ("`LSTMCell`: `init_state` fails", "(7,)"),
        lambda: started(nn.LSTMCell(3, 4, state_init=jnp.ones(7)), X),
    ),
    ("`spk_fun` is 'relu'", lambda: nn.LIF(3, spk_fun="relu")),
    (
        (
            "`FeedbackLinear`",
            "`feedback_init` = an array of dtype float32 and shape (2, 3)",
        ),
        lambda: nn.FeedbackLinear(3, 2, feedback_init=jnp.ones((2, 3))),
    ),
    (
        "`GroupedLinear`: `in_size` is (2, 3) and `out_size` is (3, 3)",
        lambda: nn.GroupedLinear((2, 3), (3, 3)),
    ),
    (
        "`GroupedLinear`: `in_size` is 3 and `out_size` is 3; expected (..., groups, in)",
        lambda: nn.GroupedLinear(3, 3),
    ),
    (
        "`Embedding`: `scale_grad_by_freq` is True; expected False",
        lambda: nn.Embedding(3, 2, scale_grad_by_freq=True),
    ),
    ("`Embedding`: `padding_idx` is 3", lambda: nn.Embedding(3, 2, padding_idx=3)),
    (
        ("`Embedding`", "`embedding_size` = 2, `max_norm` = -1.0"),
        lambda: nn.Embedding(3, 2, max_norm=-1.0),
    ),
    (
        "`embedding`: expected `indices` to be integers without a unit, got dtype float32",
        lambda: nn.Embedding(3, 2)(jnp.ones(2)),
    ),
    (
        "`FeedbackLinear`: `feedback_init` is None",
        lambda: nn.FeedbackLinear(3, 2, feedback_init=None),
    ),
    ("`ws_gain` is None", lambda: nn.ScaledWSLinear(3, 2, ws_gain=None)),
    (
        ("`Conv1d`", "`kernel_size` = 3, `groups` = 2"),
        lambda: nn.Conv1d((8, 3), 4, 3, groups=2),
    ),
    (
        ("`Conv1d`", "`kernel_size` = 3, `padding` = 'MOST'"),
        lambda: nn.Conv1d((8, 3), 4, 3, padding="MOST"),
    ),
    ("`Conv2d`: `__init__` fails for `in_size` = (8, 3)", lambda: nn.Conv2d((8, 3), 4, 3)),
    (
        ("`Linear`", "`w_mask` = an array of dtype float32 and shape (2, 2)"),
        lambda: nn.Linear(3, 2, w_mask=jnp.ones((2, 2))),
    ),
    (
        "`SparseLinear`: `__init__` fails for `spar_mat`",
        lambda: nn.SparseLinear(jnp.ones((2, 2))),
    ),
    (
        "`SparseLinear`: `in_size` is 5, but the weight has 2 inputs",
        lambda: nn.SparseLinear(MATRIX, in_size=5),
    ),
    (
        "`LoRA`: `in_size` is (2, 5), but the weight has 3 inputs",
        lambda: nn.LoRA(3, 1, 2, in_size=(2, 5)),
    ),
    ("`LoRA`: `base_module` is 3", lambda: nn.LoRA(3, 1, 2, base_module=3)),
    ("Expected 0 <= r_min < r_max <= 1", lambda: nn.LRUCell(3, 4, r_min=0.9, r_max=0.5)),
    ("`RTUCell`: `num_out` must be even, got 3", lambda: nn.RTUCell(3, 3)),
    (
        "`DualExpon`: `tau_decay`",
        lambda: nn.DualExpon(3, tau_decay=1.0 * u.ms, tau_rise=1.0 * u.ms),
    ),
    (
        "ms, and the time constant `tau` is 1.0 in mV",
        lambda: started(nn.Expon(3, tau=1.0 * u.mV), X * u.mS),
    ),
    ("`Linear`: `param_type` is", lambda: nn.Linear(3, 2, param_type="ParamState")),
    ("`x` has shape (2, 5)", lambda: nn.Linear(3, 2)(jnp.ones((2, 5)))),
    ("`x` is None", lambda: nn.Linear(3, 2)(None)),
    (f"`x` {IS_A_STATE}", lambda: nn.Linear(3, 2)(STATE)),
    (
        "`x` of shape (..., 3), got an array of dtype float32 and shape (2, 5)",
        lambda: started(nn.LSTMCell(3, 4), jnp.ones((2, 5))),
    ),
    (
        "`LSTMCell`: `update` fails for `x` = an array of dtype float32 and shape (5, 3)",
        lambda: started(nn.LSTMCell(3, 4), jnp.ones((5, 3))),
    ),
    ("`GRUCell`: `x` is 'abc'", lambda: started(nn.GRUCell(3, 4), "abc")),
    ("`LRUCell`: `x` is None", lambda: started(nn.LRUCell(3, 4), None)),
    (f"`LeakyRNN`: `x` {IS_A_STATE}", lambda: started(nn.LeakyRNN(3, 4), STATE)),
    (
        "`Conv1d`: expected an input of shape (8, 3), or a batch of them, got shape (9, 3)",
        lambda: nn.Conv1d((8, 3), 4, 3)(jnp.ones((9, 3))),
    ),
    ("`Conv1d`: `x` is None", lambda: nn.Conv1d((8, 3), 4, 3)(None)),
    ("`Conv1d`: `update` fails for `x`", lambda: nn.Conv1d((8, 3), 4, 3)(RAGGED)),
    (("`Expon`: `update` fails for `x`", "mS"), lambda: started(nn.Expon(3), X)),
    (
        ("`LIF`: `update` fails for `x`", "mV"),
        lambda: started(nn.LIF(3, R=1.0 * u.ohm), X * u.mV),
    ),
    (
        "`LIF`: `update` fails for `x` = an array of dtype float32 and shape (2, 5)",
        lambda: started(nn.LIF(3, R=1.0 * u.ohm), jnp.ones((2, 5)) * u.mA),
    ),
    (
        "`COBA`: `update` fails for `g` = 2.0 in mS, `V`",
        lambda: nn.COBA(E=0.0 * u.mV)(2.0 * u.mS, V=-60.0),
    ),
    ("`LSTMCell` has no 'h', because its `init_state`", lambda: nn.LSTMCell(3, 4)(X)),
    ("`LIF` has no 'V', because its `init_state`", lambda: neuron_alone()),
    ("`x` is None", lambda: nn.surrogate.sigmoid(None)),
    (
        "`x` is an array of dtype float32 and shape (2, 3) in mV",
        lambda: nn.surrogate.gaussian(X * u.mV),
    ),
    (
        "`brainstate.environ.set(dt=1.0 * saiunit.ms)`",
        lambda: started(nn.Expon(3), X * u.mS, dt=None),
    ),
]


def neuron_alone():
    with brainstate.environ.context(dt=1.0 * u.ms):
        return nn.LIF(3)(X[0])


EVERY = [(text, lambda b, call=call: call()) for text, call in [*OPERATIONS, *LAYERS]]
