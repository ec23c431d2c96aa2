"""Operands and layers that are wrong, each with what the answer has to name; see `wrong_calls`."""

import itertools

import brainstate
import jax.numpy as jnp
import saiunit as u
from matrices import csr
from wrong_calls import OBJECTS, RAGGED, STATE, Frame, X

import braintrace
from braintrace import nn

MATRIX = csr(jnp.array([[0.0, 2.0], [3.0, 0.0]]))


def started(layer, *arguments, dt=1.0 * u.ms, batch=2):
    layer.init_state(batch)
    with brainstate.environ.context(dt=dt):
        return layer(*arguments)


BAD_ARRAYS = {
    "None": ("None", None),
    "string": ("'abc'", "abc"),
    "State": (".value", STATE),
    "objects": ("object", OBJECTS),
    "ragged": ("[[1.0,", RAGGED),
    "frame": ("Frame", Frame()),
    "dict": ("dict", {"weight": X}),
}
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


OPERANDS = {
    "matmul": {
        "x": lambda v: braintrace.matmul(v, jnp.ones((3, 4))),
        "weight": lambda v: braintrace.matmul(X, v),
        "bias": lambda v: braintrace.matmul(X, jnp.ones((3, 4)), v),
    },
    "conv": {
        "x": lambda v: conv(v),
        "kernel": lambda v: conv(SIGNAL, v),
        "bias": lambda v: conv(bias=v),
    },
    "sparse_matmul": {
        "x": lambda v: braintrace.sparse_matmul(v, MATRIX.data, sparse_mat=MATRIX),
        "weight_data": lambda v: sparse(weight=v),
        "bias": lambda v: sparse(bias=v),
    },
    "lora_matmul": {
        "x": lambda v: lora(v),
        "B": lambda v: braintrace.lora_matmul(X, v, jnp.ones((2, 4))),
        "A": lambda v: braintrace.lora_matmul(X, jnp.ones((3, 2)), v),
        "bias": lambda v: lora(bias=v),
    },
    "feedback_matmul": {
        "x": lambda v: feedback(v),
        "weight": lambda v: braintrace.feedback_matmul(X, v, jnp.ones((3, 4))),
        "feedback": lambda v: braintrace.feedback_matmul(X, jnp.ones((3, 4)), v),
        "bias": lambda v: feedback(bias=v),
    },
    "grouped_matmul": {
        "x": lambda v: braintrace.grouped_matmul(v, jnp.ones((2, 3, 4))),
        "weight": lambda v: braintrace.grouped_matmul(X, v),
        "bias": lambda v: grouped(bias=v),
    },
    "embedding": {
        "indices": lambda v: braintrace.embedding(v, X),
        "weight": lambda v: braintrace.embedding(jnp.ones(2, int), v),
    },
    "einsum": {
        "x": lambda v: einsum(x=v),
        "weight": lambda v: braintrace.einsum("bk,kn->bn", X, v),
    },
    "element_wise": {"weight": lambda v: braintrace.element_wise(v)},
}
OPERATIONS = {
    **{
        f"{operation} {operand} {kind}": (
            f"`{operation}` `{operand}` {words}",
            lambda b, call=call, value=value: call(value),
        )
        for operation, operands in OPERANDS.items()
        for operand, call in operands.items()
        for kind, (words, value) in BAD_ARRAYS.items()
        if not (operand == "bias" and kind == "None")
        and not (operation == "element_wise" and kind == "dict")
    },
    **{
        f"operation {name}": (words, lambda b, call=call: call())
        for name, (words, call) in {
            "matmul vector weight": ("`weight` (3,)", lambda: braintrace.matmul(X, jnp.ones(3))),
            "matmul weight of three axes": (
                "`weight`",
                lambda: braintrace.matmul(X, jnp.ones((1, 3, 4))),
            ),
            "matmul features": (
                "`x` (2, 3) (5, 4)",
                lambda: braintrace.matmul(X, jnp.ones((5, 4))),
            ),
            "matmul number": ("`x` ()", lambda: braintrace.matmul(1.0, jnp.ones((3, 4)))),
            "matmul bias shape": (
                "`bias` (5,) (4,)",
                lambda: braintrace.matmul(X, jnp.ones((3, 4)), jnp.ones(5)),
            ),
            "matmul bias unit": (
                "`bias` mV mA",
                lambda: braintrace.matmul(X, jnp.ones((3, 4)) * u.mA, jnp.ones(4) * u.mV),
            ),
            "conv ranks": ("`x` (2, 3)", lambda: conv(X)),
            "conv features": ("`x` 5 2", lambda: conv(jnp.ones((2, 4, 5)))),
            "conv strides": ("strides='a'", lambda: conv(strides="a")),
            "conv strides zero": ("strides=0", lambda: conv(strides=0)),
            "conv strides fraction": ("strides=1.5", lambda: conv(strides=1.5)),
            "conv padding": ("padding='MOST'", lambda: conv(padding="MOST")),
            "conv padding number": ("padding=3", lambda: conv(padding=3)),
            "conv padding beyond all sizes": (
                "padding=[(4611686018427387904, 0)]",
                lambda: conv(padding=[(2**62, 0)]),
            ),
            "conv stride beyond all sizes": (
                "strides=2147483648",
                lambda: conv(strides=2**31),
            ),
            "conv dilation": ("rhs_dilation=(1, 2)", lambda: conv(rhs_dilation=(1, 2))),
            "conv lhs dilation": (
                "lhs_dilation=-1",
                lambda: conv(lhs_dilation=-1, padding="VALID"),
            ),
            "conv groups": ("`feature_group_count` 'a'", lambda: conv(feature_group_count="a")),
            "conv groups zero": ("`feature_group_count` 0", lambda: conv(feature_group_count=0)),
            "conv groups fraction": (
                "`feature_group_count` 1.0",
                lambda: conv(feature_group_count=1.0),
            ),
            "conv batch groups": ("`batch_group_count` None", lambda: conv(batch_group_count=None)),
            "conv numbers": ("dimension_numbers=3", lambda: conv(dimension_numbers=3)),
            "conv numbers of other letters": (
                "dimension_numbers",
                lambda: conv(dimension_numbers=("NXC", "WIO", "NWC")),
            ),
            "conv bias": ("`bias` (3,) (4,) (1, 1, 4)", lambda: conv(bias=jnp.ones(3))),
            "conv bias of a layout": (
                "`bias` (1, 4, 1) (4,) (1, 1, 4)",
                lambda: conv(bias=jnp.ones((1, 4, 1))),
            ),
            "sparse entries": ("`weight_data` (3,)", lambda: sparse(weight=jnp.ones(3))),
            "sparse features": ("`x` (5,)", lambda: sparse(jnp.ones(5))),
            "sparse dense matrix": ("`sparse_mat`", lambda: sparse(sparse_mat=jnp.ones((2, 2)))),
            "sparse no matrix": ("`sparse_mat` NoneType", lambda: sparse(sparse_mat=None)),
            "lora ranks": ("B A (3, 2) (3, 4)", lambda: lora(A=jnp.ones((3, 4)))),
            "lora features": ("`x` (2, 3)", lambda: lora(B=jnp.ones((5, 2)))),
            "lora alpha": ("`alpha` 'a'", lambda: lora(alpha="a")),
            "lora alpha None": ("`alpha` None", lambda: lora(alpha=None)),
            "lora alpha infinite": ("`alpha` inf", lambda: lora(alpha=float("inf"))),
            "feedback vector weight": ("`weight` (3,)", lambda: feedback(weight=jnp.ones(3))),
            "feedback features": ("`x` (2, 3) (5, 4)", lambda: feedback(weight=jnp.ones((5, 4)))),
            "feedback transposed": (
                "`feedback` (3, 4) (4, 3)",
                lambda: feedback(matrix=jnp.ones((4, 3))),
            ),
            "feedback unit": (
                "`feedback` mV mA",
                lambda: feedback(weight=jnp.ones((3, 4)) * u.mA, matrix=jnp.ones((3, 4)) * u.mV),
            ),
            "feedback complex": (
                "`feedback` complex64 float32",
                lambda: feedback(matrix=1j * jnp.ones((3, 4))),
            ),
            "grouped matrix": ("`weight` (3, 4)", lambda: grouped(weight=jnp.ones((3, 4)))),
            "grouped features": ("`x` (2, 3) (2, 2, 3)", lambda: grouped(X[0])),
            "grouped groups": ("`x` (5, 3)", lambda: grouped(weight=jnp.ones((5, 3, 4)))),
            "grouped bias": ("`bias` (2, 4) (4,)", lambda: grouped(bias=jnp.ones(4))),
            "grouped bias unit": (
                "`bias` mV mA",
                lambda: grouped(weight=jnp.ones((2, 3, 4)) * u.mA, bias=jnp.ones((2, 4)) * u.mV),
            ),
            "embedding of numbers": ("`indices` integers float32", lambda: embedding(X)),
            "embedding of flags": ("`indices` integers bool", lambda: embedding(X > 0)),
            "embedding of lengths": (
                "`indices` integers int32 unit `m`",
                lambda: embedding(jnp.ones(2, int) * u.meter),
            ),
            "embedding of no row": ("`weight` (0, 3)", lambda: embedding(weight=jnp.ones((0, 3)))),
            "embedding of a number": ("`weight` ()", lambda: embedding(weight=jnp.ones(()))),
            "embedding weight_fn": ("`embedding` `weight_fn` 3", lambda: embedding(weight_fn=3)),
            "einsum number": ("`equation` 3 'bgk,gkn->bgn'", lambda: einsum(3)),
            "einsum without a result": ("'bk,kn'", lambda: einsum("bk,kn")),
            "einsum of three": ("'bk,kn,n->b'", lambda: einsum("bk,kn,n->b")),
            "einsum of digits": ("'1'", lambda: einsum("b1,1n->bn")),
            "einsum of no square": ("'k' different sizes", lambda: einsum("bk,kk->bk")),
            "einsum of two ellipses": ("'...' twice", lambda: einsum("...k...,kn->...n")),
            "einsum of a result twice": ("'n' 'bnn'", lambda: einsum("bk,kn->bnn")),
            "einsum of a new letter": ("'z'", lambda: einsum("bk,kn->bz")),
            "einsum of some axes": ("ellipsis weight", lambda: einsum("b...k,...n->bn")),
            "einsum of lost axes": ("ellipsis result", lambda: einsum("...k,kn->n")),
            "einsum rank of x": ("3 `x` (2, 3)", lambda: einsum("btk,kn->btn")),
            "einsum rank of weight": ("1 `weight` (3, 4)", lambda: einsum("bk,k->b")),
            "einsum sizes": ("'k' (2, 3) (2, 4)", lambda: einsum(weight=jnp.ones((2, 4)))),
            "einsum of one for all": ("'k' (1, 4)", lambda: einsum(weight=jnp.ones((1, 4)))),
            **{
                f"element_wise {name}": (
                    f"`element_wise` `weight{leaf}` {words}",
                    lambda value=value: braintrace.element_wise(value, jnp.exp),
                )
                for name, (leaf, words, value) in {
                    "number": ("", "3", 3),
                    "flag": ("", "True", True),
                    "integers": ("", "int32", jnp.ones(3, int)),
                    "integers in volt": ("", "int32", jnp.ones(3, int) * u.mV),
                    "integers beside floats": ("[1]", "bool", (X, jnp.ones(3, bool))),
                }.items()
            },
            "element_wise fn": ("`fn` 3", lambda: braintrace.element_wise(X, 3)),
            "element_wise fn None": ("`fn` None", lambda: braintrace.element_wise(X, None)),
            "element_wise weight_fn": (
                "`weight_fn` 3",
                lambda: braintrace.element_wise(X, weight_fn=3),
            ),
            "element_wise fn twice": (
                "`fn` `weight_fn`",
                lambda: braintrace.element_wise(X, jnp.abs, weight_fn=jnp.abs),
            ),
            **{
                f"{name} {option}": (
                    f"`{name}` `{option}` 3",
                    lambda call=call, option=option: call(**{option: 3}),
                )
                for name, call in {
                    "matmul": lambda **f: braintrace.matmul(X, jnp.ones((3, 4)), **f),
                    "conv": conv,
                    "sparse_matmul": sparse,
                    "grouped_matmul": grouped,
                }.items()
                for option in ("weight_fn", "bias_fn")
            },
            **{
                f"{name} bias_fn without a bias": (
                    f"`{name}` `bias_fn` `bias`",
                    lambda call=call: call(bias_fn=jnp.abs),
                )
                for name, call in {
                    "matmul": lambda **f: braintrace.matmul(X, jnp.ones((3, 4)), **f),
                    "lora_matmul": lora,
                }.items()
            },
            "einsum weight_fn": ("`einsum` `weight_fn` 3", lambda: einsum(weight_fn=3)),
            "lora bias_fn": ("`lora_matmul` `bias_fn` 3", lambda: lora(bias_fn=3)),
            "matmul weight_fn of a string": (
                "`weight_fn(weight)` 'a'",
                lambda: braintrace.matmul(X, jnp.ones((3, 4)), weight_fn=lambda w: "a"),
            ),
            "matmul weight_fn of a State": (
                "`weight` .value",
                lambda: braintrace.matmul(X, STATE, weight_fn=jnp.abs),
            ),
            "element_wise fn of nothing": (
                "`fn` None",
                lambda: braintrace.element_wise(X, lambda w: None),
            ),
            "element_wise fn of a pair": (
                "`fn` tuple",
                lambda: braintrace.element_wise(X, lambda w: (w, w)),
            ),
            "element_wise fn of a string": (
                "`fn(weight)` 'a'",
                lambda: braintrace.element_wise(X, lambda w: "a"),
            ),
        }.items()
    },
}

SIZES = {
    "negative": -2,
    "zero": 0,
    "string": "3",
    "float": 3.0,
    "bool": True,
    "None": None,
}
LAYERS_OF_SIZES = {
    "Linear": (("in_size", "out_size"), lambda a, b: nn.Linear(a, b)),
    "FeedbackLinear": (("in_size", "out_size"), lambda a, b: nn.FeedbackLinear(a, b)),
    "GroupedLinear": (
        ("in_size", "out_size"),
        lambda a, b: nn.GroupedLinear((2, a), (2, b)),
    ),
    "Embedding": (("num_embeddings", "embedding_size"), lambda a, b: nn.Embedding(a, b)),
    "SignedWLinear": (("in_size", "out_size"), lambda a, b: nn.SignedWLinear(a, b)),
    "ScaledWSLinear": (("in_size", "out_size"), lambda a, b: nn.ScaledWSLinear(a, b)),
    "AllToAll": (("in_size", "out_size"), lambda a, b: nn.AllToAll(a, b)),
    "LoRA": (("in_features", "out_features"), lambda a, b: nn.LoRA(a, 1, b)),
    "ValinaRNNCell": (("num_in", "num_out"), lambda a, b: nn.ValinaRNNCell(a, b)),
    "LeakyRNN": (("num_in", "num_out"), lambda a, b: nn.LeakyRNN(a, b)),
    "IndRNN": (("num_in", "num_out"), lambda a, b: nn.IndRNN(a, b)),
    "MinimalRNNCell": (("num_in", "num_out"), lambda a, b: nn.MinimalRNNCell(a, b)),
    "GRUCell": (("num_in", "num_out"), lambda a, b: nn.GRUCell(a, b)),
    "MGUCell": (("num_in", "num_out"), lambda a, b: nn.MGUCell(a, b)),
    "LSTMCell": (("num_in", "num_out"), lambda a, b: nn.LSTMCell(a, b)),
    "URLSTMCell": (("num_in", "num_out"), lambda a, b: nn.URLSTMCell(a, b)),
    "LRUCell": (("num_in", "num_out"), lambda a, b: nn.LRUCell(a, b)),
    "RTUCell": (("num_in", "num_out"), lambda a, b: nn.RTUCell(a, b)),
    "MiniGRU": (("num_in", "num_out"), lambda a, b: nn.MiniGRU(a, b)),
    "MiniLSTM": (("in_size", "out_size"), lambda a, b: nn.MiniLSTM(in_size=a, out_size=b)),
    "CFNCell": (("in_size", "num_out"), lambda a, b: nn.CFNCell(in_size=a, num_out=b)),
    "LeakyRateReadout": (("in_size", "out_size"), lambda a, b: nn.LeakyRateReadout(a, b)),
    "LeakySpikeReadout": (("in_size", "out_size"), lambda a, b: nn.LeakySpikeReadout(a, b)),
    "OneToOne": (("in_size",), lambda a, b: nn.OneToOne(a)),
    "LIF": (("in_size",), lambda a, b: nn.LIF(a)),
    "ALIF": (("in_size",), lambda a, b: nn.ALIF(a)),
    "GIF": (("in_size",), lambda a, b: nn.GIF(a)),
    "Expon": (("in_size",), lambda a, b: nn.Expon(a)),
    "Alpha": (("in_size",), lambda a, b: nn.Alpha(a)),
    "DualExpon": (("in_size",), lambda a, b: nn.DualExpon(a)),
    "Conv2d": (("in_size", "out_channels"), lambda a, b: nn.Conv2d(a, b, 3)),
}


def size_rows():
    found = {}
    for layer, (names, make) in LAYERS_OF_SIZES.items():
        good = (8, 8, 3) if layer == "Conv2d" else 4
        for (index, name), (kind, value) in itertools.product(enumerate(names), SIZES.items()):
            pair = (value, 4) if index == 0 else (good, value)
            found[f"{layer} {name} {kind}"] = (
                f"`{layer}` `{name}` {value!r}",
                lambda b, make=make, pair=pair: make(*pair),
            )
    return found


LAYERS = {
    **size_rows(),
    **{
        f"layer {name}": (words, lambda b, call=call: call())
        for name, (words, call) in {
            "size of two axes": (
                "`GRUCell` `in_size` (2, 3) tuple of one",
                lambda: nn.GRUCell(in_size=(2, 3), out_size=4),
            ),
            "size by two names": (
                "`GRUCell` `num_in` `in_size`",
                lambda: nn.GRUCell(3, 4, in_size=3),
            ),
            "size by two other names": (
                "`LRUCell` `num_in` `in_size` `d_model`",
                lambda: nn.LRUCell(in_size=3, d_model=3),
            ),
            "hidden size by two names": (
                "`LRUCell` `num_hidden` `d_hidden`",
                lambda: nn.LRUCell(3, 4, 5, d_hidden=5),
            ),
            "size of strings": ("`Linear` `in_size`", lambda: nn.Linear(("a", 3), 2)),
            "size of arrays": ("`Linear` `out_size`", lambda: nn.Linear(3, jnp.ones(2))),
            "initial weight a string": (
                "`Linear` `w_init` 'normal'",
                lambda: nn.Linear(3, 2, w_init="normal"),
            ),
            "initial weight of another shape": (
                "`Linear` `w_init` (2, 2)",
                lambda: nn.Linear(3, 2, w_init=jnp.ones((2, 2))),
            ),
            "initial weight None": ("`Linear` `w_init` None", lambda: nn.Linear(3, 2, w_init=None)),
            "initial bias of another shape": (
                "`GRUCell` `b_init` (7,)",
                lambda: nn.GRUCell(3, 4, b_init=jnp.ones(7)),
            ),
            "initial weight a dict": ("`IndRNN` `u_init` {}", lambda: nn.IndRNN(3, 4, u_init={})),
            "initial state a string": (
                "`LeakyRNN` `state_init` 'zero'",
                lambda: nn.LeakyRNN(3, 4, state_init="zero"),
            ),
            "initial state of another shape": (
                "`LSTMCell` init_state (7,)",
                lambda: started(nn.LSTMCell(3, 4, state_init=jnp.ones(7)), X),
            ),
            "initial potential a string": (
                "`LIF` `V_initializer` 'rest'",
                lambda: nn.LIF(3, V_initializer="rest"),
            ),
            "activation": ("`activation` 'tanhh'", lambda: nn.LeakyRNN(3, 4, activation="tanhh")),
            "activation of brainstate": (
                "`activation` 'tanhh'",
                lambda: nn.GRUCell(3, 4, activation="tanhh"),
            ),
            "activation number": ("`activation` 3", lambda: nn.LSTMCell(3, 4, activation=3)),
            "surrogate": ("`spk_fun` 'relu'", lambda: nn.LIF(3, spk_fun="relu")),
            "kind of reset": ("`spk_reset` 'slow'", lambda: nn.LIF(3, spk_reset="slow")),
            "reset_after": ("`reset_after` 'no'", lambda: nn.GRUCell(3, 4, reset_after="no")),
            "include_self": ("`include_self` 1", lambda: nn.AllToAll(3, 3, include_self=1)),
            "channel_first": (
                "`channel_first` 'yes'",
                lambda: nn.Conv1d((8, 3), 4, 3, channel_first="yes"),
            ),
            "feedback of another shape": (
                "`FeedbackLinear` `feedback_init` (2, 3)",
                lambda: nn.FeedbackLinear(3, 2, feedback_init=jnp.ones((2, 3))),
            ),
            "groups of other numbers": (
                "`GroupedLinear` `in_size` `out_size` (2, 3) (3, 3)",
                lambda: nn.GroupedLinear((2, 3), (3, 3)),
            ),
            "groups of no number": (
                "`GroupedLinear` `in_size` 3 groups",
                lambda: nn.GroupedLinear(3, 3),
            ),
            "words scaled by frequency": (
                "`Embedding` `scale_grad_by_freq` True False",
                lambda: nn.Embedding(3, 2, scale_grad_by_freq=True),
            ),
            "words with a negative padding": (
                "`Embedding` `padding_idx` -1",
                lambda: nn.Embedding(3, 2, padding_idx=-1),
            ),
            "words with a padding beyond": (
                "`Embedding` `padding_idx` 3",
                lambda: nn.Embedding(3, 2, padding_idx=3),
            ),
            "words of a negative norm": (
                "`Embedding` max_norm -1.0",
                lambda: nn.Embedding(3, 2, max_norm=-1.0),
            ),
            "words of numbers": (
                "`embedding` `indices` float32",
                lambda: nn.Embedding(3, 2)(jnp.ones(2)),
            ),
            "feedback None": (
                "`FeedbackLinear` `feedback_init` None",
                lambda: nn.FeedbackLinear(3, 2, feedback_init=None),
            ),
            "adaptive": (
                "`FeedbackLinear` `adaptive` 'yes'",
                lambda: nn.FeedbackLinear(3, 2, adaptive="yes"),
            ),
            "ws_gain": ("`ws_gain` None", lambda: nn.ScaledWSLinear(3, 2, ws_gain=None)),
            "kernel size": ("`Conv1d` `kernel_size` -3", lambda: nn.Conv1d((8, 3), 4, -3)),
            "stride": ("`Conv1d` `stride` 0", lambda: nn.Conv1d((8, 3), 4, 3, stride=0)),
            "groups": ("`Conv1d` `groups` 0", lambda: nn.Conv1d((8, 3), 4, 3, groups=0)),
            "groups that do not divide": (
                "`Conv1d` groups",
                lambda: nn.Conv1d((8, 3), 4, 3, groups=2),
            ),
            "padding of a convolution": (
                "`Conv1d` padding",
                lambda: nn.Conv1d((8, 3), 4, 3, padding="MOST"),
            ),
            "size of a convolution": ("`Conv2d` in_size (8, 3)", lambda: nn.Conv2d((8, 3), 4, 3)),
            "mask of another shape": (
                "`Linear` `w_mask` (2, 2)",
                lambda: nn.Linear(3, 2, w_mask=jnp.ones((2, 2))),
            ),
            "no matrix": ("`SparseLinear` `spar_mat`", lambda: nn.SparseLinear(jnp.ones((2, 2)))),
            "matrix of another size": (
                "`SparseLinear` `in_size` 5 2 inputs",
                lambda: nn.SparseLinear(MATRIX, in_size=5),
            ),
            "low rank of another size": (
                "`LoRA` `in_size` (2, 5) 3 inputs",
                lambda: nn.LoRA(3, 1, 2, in_size=(2, 5)),
            ),
            "rank": ("`LoRA` `lora_rank` 0", lambda: nn.LoRA(3, 0, 2)),
            "factor": ("`LoRA` `lora_b_init` 'zero'", lambda: nn.LoRA(3, 1, 2, lora_b_init="zero")),
            "base module": ("`LoRA` `base_module` 3", lambda: nn.LoRA(3, 1, 2, base_module=3)),
            "radii": ("r_min r_max", lambda: nn.LRUCell(3, 4, r_min=0.9, r_max=0.5)),
            "radius a string": ("`LRUCell` `r_min` 'a'", lambda: nn.LRUCell(3, 4, r_min="a")),
            "odd outputs": ("`RTUCell` `num_out` 3", lambda: nn.RTUCell(3, 3)),
            "time constants alike": (
                "`DualExpon` `tau_decay`",
                lambda: nn.DualExpon(3, tau_decay=1.0 * u.ms, tau_rise=1.0 * u.ms),
            ),
            "time constant of a string": ("`LIF` `tau` 'fast'", lambda: nn.LIF(3, tau="fast")),
            "time constant in another unit": (
                "`tau` mV ms",
                lambda: started(nn.Expon(3, tau=1.0 * u.mV), X * u.mS),
            ),
            "parameters of no type": (
                "`Linear` `param_type`",
                lambda: nn.Linear(3, 2, param_type="ParamState"),
            ),
            "input of other features": ("`x` (2, 5)", lambda: nn.Linear(3, 2)(jnp.ones((2, 5)))),
            "input None": ("`x` None", lambda: nn.Linear(3, 2)(None)),
            "input State": ("`x` .value", lambda: nn.Linear(3, 2)(STATE)),
            "input of a cell": (
                "`LSTMCell` x (2, 5)",
                lambda: started(nn.LSTMCell(3, 4), jnp.ones((2, 5))),
            ),
            "batch of a cell": (
                "`LSTMCell` x (5, 3)",
                lambda: started(nn.LSTMCell(3, 4), jnp.ones((5, 3))),
            ),
            "string into a cell": ("`GRUCell` x 'abc'", lambda: started(nn.GRUCell(3, 4), "abc")),
            "nothing into a cell": ("`LRUCell` `x` None", lambda: started(nn.LRUCell(3, 4), None)),
            "State into a cell": ("`LeakyRNN` .value", lambda: started(nn.LeakyRNN(3, 4), STATE)),
            "input of a convolution": (
                "`Conv1d` (9, 3)",
                lambda: nn.Conv1d((8, 3), 4, 3)(jnp.ones((9, 3))),
            ),
            "nothing into a convolution": (
                "`Conv1d` `x` None",
                lambda: nn.Conv1d((8, 3), 4, 3)(None),
            ),
            "list into a convolution": ("`Conv1d` `x`", lambda: nn.Conv1d((8, 3), 4, 3)(RAGGED)),
            "input without unit": ("`Expon` x mS", lambda: started(nn.Expon(3), X)),
            "current into a neuron": (
                "`LIF` x mV",
                lambda: started(nn.LIF(3, R=1.0 * u.ohm), X * u.mV),
            ),
            "neurons of other number": (
                "`LIF` x (2, 5)",
                lambda: started(nn.LIF(3, R=1.0 * u.ohm), jnp.ones((2, 5)) * u.mA),
            ),
            "string into a synapse": ("`Alpha` x 'a'", lambda: started(nn.Alpha(3), "a")),
            "conductance of a potential": (
                "`COBA` V",
                lambda: nn.COBA(E=0.0 * u.mV)(2.0 * u.mS, V=-60.0),
            ),
            "cell before init_state": ("`LSTMCell` init_state", lambda: nn.LSTMCell(3, 4)(X)),
            "neuron before init_state": ("`LIF` init_state", lambda: neuron_alone()),
            "surrogate of a State": ("`x` .value", lambda: nn.surrogate.triangle(STATE)),
            "surrogate of nothing": ("`x` None", lambda: nn.surrogate.sigmoid(None)),
            "surrogate of a unit": ("`x` mV", lambda: nn.surrogate.gaussian(X * u.mV)),
            "surrogate of no width": ("`width` 0.0", lambda: nn.surrogate.rectangle(X, width=0.0)),
            "surrogate of a string": ("`alpha` 'a'", lambda: nn.surrogate.arctan(X, alpha="a")),
            "surrogate of a negative": (
                "`sigma` -1",
                lambda: nn.surrogate.multi_gaussian(X, sigma=-1),
            ),
            "no time step": ("dt", lambda: started(nn.Expon(3), X * u.mS, dt=None)),
            "batch of a state": (
                "`GRUCell` `batch_size` -1",
                lambda: nn.GRUCell(3, 4).init_state(-1),
            ),
            "batch a string": ("`LIF` `batch_size` '2'", lambda: nn.LIF(3).init_state("2")),
        }.items()
    },
}


def neuron_alone():
    with brainstate.environ.context(dt=1.0 * u.ms):
        return nn.LIF(3)(X[0])


EVERY = {**OPERATIONS, **LAYERS}
