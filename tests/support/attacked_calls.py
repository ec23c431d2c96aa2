"""Every public function, method and layer with good arguments, one of which an attack replaces.

A call is made with names of arguments alone, and leaves the learners of the bench as they are
unless it succeeds.
"""

import dataclasses
import functools
import inspect
import tempfile
from collections.abc import Callable

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import saiunit as u
import wrong_calls
from initial_weights import quick_draws
from matrices import csr
from wrong_calls import CASE, XS, YS, X

import braintrace
from braintrace import nn


@dataclasses.dataclass(frozen=True)
class Fresh:
    """An argument that is made for each call."""

    make: Callable


@dataclasses.dataclass(frozen=True)
class Call:
    """A call that may be attacked.

    Attributes
    ----------
    function
        Takes the bench and arguments by name.
    good
        Arguments that it needs.
    names
        All arguments that may be replaced.
    """

    function: Callable
    good: dict
    names: tuple

    def __call__(self, bench, **replaced):
        """Call the function with some arguments replaced."""
        good = {n: v.make() if isinstance(v, Fresh) else v for n, v in self.good.items()}
        return self.function(bench, **{**good, **replaced})


def options_of(function, *without):
    """Return the names of the options of a function."""
    kinds = inspect.Parameter
    return tuple(
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)
        and name not in ("self", "learner", *without)
    )


def call(function, good=(), names=(), of=None):
    """Return a call; `of` is a function whose arguments it takes as well."""
    good = dict(good)
    every = dict.fromkeys([*good, *names, *(options_of(of) if of else ())])
    return Call(function, good, tuple(every))


def direct(function, **good):
    """Return a call of a function that knows no bench."""
    return call(lambda bench, **given: function(**given), good, of=function)


SIGNAL, KERNEL = jax.device_put((np.ones((2, 5, 2), np.float32), np.ones((3, 2, 4), np.float32)))
WEIGHT = jnp.ones((3, 4))
MATRIX = csr(np.float32([[0.0, 2.0], [3.0, 0.0]]))
OPERATIONS = {
    "matmul": direct(braintrace.matmul, x=X, weight=WEIGHT),
    "conv": direct(
        braintrace.conv, x=SIGNAL, kernel=KERNEL, dimension_numbers=("NWC", "WIO", "NWC")
    ),
    "sparse_matmul": direct(
        braintrace.sparse_matmul, x=jnp.ones(2), weight_data=MATRIX.data, sparse_mat=MATRIX
    ),
    "lora_matmul": direct(braintrace.lora_matmul, x=X, B=jnp.ones((3, 2)), A=jnp.ones((2, 4))),
    "feedback_matmul": direct(braintrace.feedback_matmul, x=X, weight=WEIGHT, feedback=WEIGHT),
    "grouped_matmul": direct(
        braintrace.grouped_matmul, x=jnp.ones((2, 2, 3)), weight=jnp.ones((2, 3, 4))
    ),
    "embedding": direct(braintrace.embedding, indices=jnp.ones(2, int), weight=X),
    "einsum": direct(braintrace.einsum, equation="bk,kn->bn", x=X, weight=WEIGHT),
    "element_wise": direct(braintrace.element_wise, weight=X),
    "inline": direct(braintrace.inline, fn=lambda x: x),
    "three_factor_loss": direct(braintrace.three_factor_loss, h=X, modulator=X),
    "get_primitive_spec": direct(braintrace.get_primitive_spec, primitive=braintrace.etp_mm_p),
    "register_primitive_spec": direct(braintrace.register_primitive_spec, spec=None),
    "check_primitive": call(
        lambda b, primitive, x, w, **params: braintrace.check_primitive(primitive, x, w, **params),
        {"primitive": braintrace.etp_mm_p, "x": X, "w": WEIGHT},
        ["batched", "weight_fn"],
    ),
    "ETPPrimitive": direct(braintrace.ETPPrimitive, name="one", implementation=jnp.add,
                           batched=False, gradient_enabled=False),
    "InputFilter": direct(braintrace.InputFilter, init=jnp.sin, add=jnp.sin, pull_back=jnp.sin),
}  # fmt: skip


# --- from a model to a learner


ALGORITHMS = [
    "D_RTRL", "EProp", "ES_D_RTRL", "Immediate", "KF_RTRL", "OSTLFeedforward", "OSTLRecurrent",
    "OTTT", "RFLO", "RTRL", "SnAp", "UORO", "IODimVjpAlgorithm", "ParamDimVjpAlgorithm", "pp_prop",
]  # fmt: skip
OPTIONS = options_of(braintrace.ES_D_RTRL, "model")


def compiled(bench, model, algorithm, x, **options):
    return braintrace.compile(model, algorithm, x, **{"batch_size": 2, **options})


def constructed(bench, algorithm, model=None, **options):
    model = CASE.build() if model is None else model
    given = {"decay": 0.5} if algorithm == "OTTT" else {}
    return getattr(braintrace, algorithm)(model, **{**given, **options})


def graph_compiled(bench, x, **options):
    model = CASE.build()
    brainstate.nn.init_all_states(model, batch_size=2)
    algorithm = braintrace.D_RTRL(model)
    algorithm.compile_graph(x, **options)


def etrace_graph(bench, model, x, **options):
    if isinstance(model, brainstate.nn.Module):
        brainstate.nn.init_all_states(model, batch_size=2)
    return braintrace.compile_etrace_graph(model, x, **options)


def checked(bench, model, algorithm, xs, ys, loss, **options):
    options = {"batch_size": 2, **options}
    return braintrace.gradient_check(model, algorithm, xs, ys, loss, **options)


def compared(bench, model, xs, **options):
    given = {"rules": ["d_rtrl"], "windows": [None], "repeats": 1, "batch_size": 2}
    return braintrace.compare_rules(model, xs, **{**given, "progress": False, **options})


def squares(output, y):
    return jnp.sum((output - y) ** 2)


def pure_step(params, state, x):
    h = 0.5 * state["h"] + braintrace.matmul(x, params["w"])
    return {"h": h}, h


def planned(bench, network, algorithm, x, **options):
    return braintrace.plan(network, algorithm, x, **{"batch_size": 2, **options})


def from_function(bench, step, params, state):
    return compiled(bench, braintrace.from_function(step, params, state), "d_rtrl", X)


COMPILATION = {
    "compile": call(
        compiled,
        {"model": Fresh(CASE.build), "algorithm": "d_rtrl", "x": X},
        ["batch_size", "vmap", "rules", *OPTIONS, "n", "seed"],
    ),
    "compile, es_d_rtrl": call(
        compiled, {"model": Fresh(CASE.build), "algorithm": "es_d_rtrl", "x": X}, OPTIONS
    ),
    **{
        name: call(
            lambda bench, algorithm=name, **options: constructed(bench, algorithm, **options),
            of=getattr(braintrace, name),
        )
        for name in ALGORITHMS
    },
    "Learner": direct(braintrace.Learner, algorithm=None),
    "compile_graph": call(graph_compiled, {"x": X}, ["batch_size"]),
    "compile_etrace_graph": call(
        etrace_graph, {"model": Fresh(CASE.build), "x": X}, of=braintrace.compile_etrace_graph
    ),
    "gradient_check": call(
        checked,
        {"model": Fresh(CASE.build), "algorithm": "d_rtrl", "xs": XS, "ys": YS, "loss": CASE.loss},
        ["batch_size", "vmap", *OPTIONS],
    ),
    "compare_rules": call(
        compared, {"model": Fresh(CASE.build), "xs": XS}, of=braintrace.compare_rules
    ),
    "from_function": call(
        from_function,
        {"step": pure_step, "params": {"w": WEIGHT}, "state": {"h": jnp.zeros((2, 4))}},
    ),
    "plan": call(
        planned,
        {"network": CASE.build, "algorithm": "d_rtrl", "x": X},
        [*options_of(braintrace.plan, "network", "algorithm"), *OPTIONS],
    ),
}


# --- methods of a learner


def evolved(b, sequence, **options):
    return b.learner.etrace_evolve(sequence, **options)


def predicted(b, sequence, **options):
    return b.learner.predict(sequence, **options)


def graded(b, sequence, target, **options):
    return b.learner.etrace_grad(sequence, target, **{"step_fn": b.loss, **options})


def streamed(b, sequence, target, **options):
    if "optimizer" not in options:
        options = {"update_fn": lambda gradients: None, **options}
    return b.learner.etrace_online(sequence, target, **{"step_fn": b.loss, **options})


def lowered(b, method, sequence, target, **options):
    return b.learner.lower(method, sequence, target, **{"step_fn": b.loss, **options})


def exported(b, x, y, **options):
    given = {"step_fn": b.loss, "optimizer": optax.sgd(0.1), **options}
    return b.learner.export_step(x, y, **given)


@functools.cache
def of_forecasts():
    return wrong_calls.compiled()


def forecast(b, x):
    return of_forecasts().forecast(x), of_forecasts().init_forecasts(x)


def learned(b, loss_fn=CASE.loss, y=YS[0], **options):
    learner = of_forecasts()
    learner.forecast(X)
    if "optimizer" not in options:
        options = {"update_fn": lambda gradients: None, **options}
    return learner.learn(loss_fn, y, **options)


def validated(b, stream=(XS, YS), loss_fn=CASE.loss, learner=None, **options):
    learner = of_forecasts() if learner is None else learner
    return braintrace.ProgressiveValidation(learner, stream, loss_fn, **options)


def regressor(b, loss_fn=CASE.loss, learner=None, **options):
    pytest.importorskip("river")
    learner = of_forecasts() if learner is None else learner
    return braintrace.river_regressor(learner, loss_fn, **options)


def pure(method):
    """Return a call of a pure function of the learner."""

    def run(b, state=None, **options):
        functional = b.learner.functional()
        state = functional.state() if state is None else state
        sequences = [options.pop(name) for name in ("sequence", "target") if name in options]
        if method in ("grad", "online"):
            options = {"step_fn": b.loss, **options}
        if method == "online":
            options = {"update_fn": lambda gradients: None, **options}
        return getattr(functional, method)(state, *sequences, **options)

    return run


BOTH = {"sequence": XS, "target": YS}
FUNCTIONAL = {
    "step": {"sequence": X},
    "grad": BOTH,
    "online": BOTH,
    "evolve": {"sequence": XS},
    "predict": {"sequence": XS},
    "reset": {},
    "restore": {},
}


def saved(b, folder=None, learner=None, **options):
    with tempfile.TemporaryDirectory() as temporary:
        folder = temporary if folder is None else folder
        braintrace.save(folder, b.learner if learner is None else learner, **options)


def restored(b, folder, learner=None):
    braintrace.restore(folder, b.learner if learner is None else learner)


def sharded(b, mesh=None, learner=None, **options):
    mesh = jax.make_mesh((1, 1), ("data", "model")) if mesh is None else mesh
    learner = wrong_calls.compiled() if learner is None else learner
    braintrace.shard(learner, mesh, **options)


def plotted(b, learner=None, path="w_in", sequence=XS, **options):
    learner = b.learner if learner is None else learner
    return braintrace.plot_traces(learner, path, sequence, **options)


def traced_gradients(
    b, decay=0.5, like=None, gradients=None, discount=0.9, errors=None, batch_size=2
):
    trace = braintrace.TDTrace(decay)
    gradients = {"w": jnp.ones((2, 3))} if gradients is None else gradients
    carried = trace.init({"w": jnp.ones(3)} if like is None else like, batch_size)
    carried = trace.update(carried, gradients, discount)
    return trace.gradients(carried, jnp.ones(2) if errors is None else errors)


METHODS = {
    "__call__": call(lambda b, x: b.learner(x), {"x": X}),
    "MultiStepData": call(lambda b, x: b.learner(braintrace.MultiStepData(x)), {"x": XS}),
    "SingleStepData": call(lambda b, x: b.learner(braintrace.SingleStepData(x)), {"x": X}),
    "a window": call(lambda b, x: b.windows(braintrace.MultiStepData(x)), {"x": XS}),
    "a mapped call": call(lambda b, x: b.mapped(x), {"x": X}),
    "currents": call(lambda b, x: b.currents(x), {"x": X * u.mA}),
    "etrace_grad": call(graded, BOTH, of=braintrace.Learner.etrace_grad),
    "etrace_online": call(streamed, BOTH, of=braintrace.Learner.etrace_online),
    "etrace_evolve": call(evolved, {"sequence": XS}, of=braintrace.Learner.etrace_evolve),
    "predict": call(predicted, {"sequence": XS}, of=braintrace.Learner.predict),
    "forecast": call(forecast, {"x": X}),
    "learn": call(learned, of=braintrace.Learner.learn, names=["loss_fn", "y", "delay"]),
    "ProgressiveValidation": call(
        validated, names=["learner", "stream", "loss_fn", "delay", "metrics"]
    ),
    "river_regressor": call(regressor, names=["learner", "loss_fn", "max_delay"]),
    "reset_state": call(
        lambda b, **options: b.learner.reset_state(**options), names=["batch_size", "where"]
    ),
    "lower": call(
        lowered,
        {"method": "etrace_grad", **BOTH},
        options_of(braintrace.Learner.etrace_grad),
    ),
    "export_step": call(exported, {"x": X, "y": YS[0]}, ["step_fn", "optimizer", "every", "mask"]),
    "functional": call(lambda b, own: b.learner.functional(own=own), names=["own"]),
    "eligibility": call(lambda b, path: b.learner.eligibility(path), {"path": "w_in"}),
    "init_optimizer": call(
        lambda b, optimizer: wrong_calls.compiled().init_optimizer(optimizer),
        {"optimizer": optax.sgd(0.1)},
    ),
    "plot": call(lambda b, ax=None: b.learner.plot(ax=ax), names=["ax"]),
    **{
        f"functional().{name}": call(
            pure(name), good, ["state"], of=getattr(braintrace.FunctionalLearner, name)
        )
        for name, good in FUNCTIONAL.items()
    },
    "TDTrace": call(
        traced_gradients,
        names=["decay", "like", "gradients", "discount", "errors", "batch_size"],
    ),
    "save": call(saved, of=braintrace.save, names=["learner"]),
    "restore": call(restored, {"folder": "nowhere"}, ["learner"]),
    "shard": call(sharded, of=braintrace.shard, names=["learner"]),
    "plot_traces": call(plotted, names=["learner", "path", "sequence", "sample", "axes"]),
}


# --- layers


def quick_linear():
    with quick_draws():
        return nn.Linear(3, 3)


def layers():
    """Yield name, class and the arguments that it needs, of every layer."""
    sizes = {
        "in_size": 3, "out_size": 4, "num_in": 3, "num_out": 4, "out_channels": 4,
        "kernel_size": 3, "num_embeddings": 5, "embedding_size": 4, "in_features": 3,
        "lora_rank": 2, "out_features": 4, "spar_mat": MATRIX, "weights": quick_linear(),
        "synapse": nn.Expon(3), "E": 0.0 * u.mV, "V_rest": 0.0 * u.mV,
    }  # fmt: skip
    for name in vars(nn):
        layer = getattr(nn, name)
        if name.startswith("_") or not isinstance(layer, type):
            continue
        parameters = inspect.signature(layer).parameters.values()
        needed = [p.name for p in parameters if p.default is p.empty and p.kind < 2]
        good = {argument: sizes[argument] for argument in needed}
        if "Conv" in name:
            good["in_size"] = (*(6,) * int(name[-2]), 2)
        elif name == "GroupedLinear":
            good = {"in_size": (2, 3), "out_size": (2, 4)}
        elif name == "MiniLSTM" or name == "CFNCell":
            good = {"in_size": 3, "out_size": 4}
        yield name, layer, good


def made_and_called(layer, good, inputs):
    """Return a call that makes a layer, starts its states, and lets it take a step."""

    def run(bench, x=None, batch_size=2, **given):
        made = layer(**given)
        if layer is nn.COBA:
            return made(inputs if x is None else x, V=-60.0 * u.mV)
        if hasattr(made, "init_state"):
            made.init_state(batch_size)
        with brainstate.environ.context(dt=1.0 * u.ms):
            return made(inputs if x is None else x)

    return run


def input_of(name, good):
    if name == "Embedding":
        return jnp.ones(2, int)
    if name in ("LIF", "ALIF", "GIF"):
        return jnp.ones((2, 3)) * u.mA
    if name in ("Expon", "Alpha", "DualExpon"):
        return jnp.ones((2, 3)) * u.mS
    if name in ("COBA", "CUBA"):
        return jnp.ones((2, 3)) * u.mS
    if name == "SparseLinear":
        return jnp.ones((2, 2))
    size = good.get("in_size", 3)
    return jnp.ones((2, *size) if isinstance(size, tuple) else (2, 3))


LAYERS = {
    f"nn.{name}": call(
        made_and_called(layer, good, input_of(name, good)), good, ["x", "batch_size"], of=layer
    )
    for name, layer, good in layers()
}
SURROGATES = {
    f"nn.surrogate.{name}": direct(getattr(nn.surrogate, name), x=np.zeros(3, np.float32))
    for name in ("arctan", "gaussian", "multi_gaussian", "rectangle", "sigmoid", "super_spike",
                 "triangle")
}  # fmt: skip
EVERY = {**OPERATIONS, **COMPILATION, **METHODS, **LAYERS, **SURROGATES}
MADE_BY_THE_LIBRARY = {
    "BatchedLearner", "Change", "ComparedRule", "Diagnostic", "ETPPrimitiveSpec",
    "ETraceAlgorithm", "ETraceGraph", "EligibilityTraces", "FunctionModel",
    "FunctionalLearner", "GradientCheck", "HiddenGroup",
    "HiddenParamOpRelation", "LearnerState", "Plan", "PrimitiveReport", "Report", "Rule",
    "RuleComparison", "Site", "TraceSpec", "register_primitive",
}  # fmt: skip
"""Public names that users do not call, or whose calls would outlive a test."""

bench = functools.cache(wrong_calls.bench.__wrapped__)
