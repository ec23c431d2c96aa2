"""Functions that take the same options have one definition of them."""

import functools
import gc
import inspect
import re
import typing
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace
from braintrace import FunctionalLearner, Learner
from braintrace._compiler import CompilerOptions
from braintrace._learner.calls.options import FIELDS, Options, WatchOptions

XS = np.ones((3, 2, 3), np.float32)
WATCH = {"progress": False, "log_every": None, "on_log": None}
REQUIRED = inspect.Parameter.empty
CHUNKS = {"chunk_size": "auto", "memory_budget": None}
TAKEN = {
    "etrace_grad": {
        "step_fn": REQUIRED,
        "window": None,
        "mask": None,
        "reduction": "mean",
        **CHUNKS,
        "has_aux": False,
        "return_value": False,
        "unit_aware": False,
        "reset": None,
        "weights": None,
    },
    "etrace_online": {
        "step_fn": REQUIRED,
        "optimizer": None,
        "update_fn": None,
        "every": 1,
        "window": None,
        "mask": None,
        "nonfinite": "skip",
        "has_aux": False,
        "unit_aware": False,
        "reset": None,
    },
    "etrace_evolve": {**CHUNKS, "reset": None, "return_outputs": True},
    "predict": {"reset": None},
}
"""What the reference promises: the options of each method, with their defaults."""
METHODS = [*TAKEN]
OF_PLAN = {"chunk_size": 2, "memory_budget": 1000, "every": 2}
"""Other values for the options that `plan` takes for the methods that have them."""


def twin_of(method):
    return getattr(FunctionalLearner, method.removeprefix("etrace_"))


def functions_of(method):
    """Return the public functions with a signature that take a method's options, by name."""
    export = {"export_step": Learner.export_step} if method == "etrace_online" else {}
    return {"method": getattr(Learner, method), "twin": twin_of(method), **export}


def shown(function):
    """Return the options that the signature of a function shows, with their defaults."""
    parameters = inspect.signature(function).parameters.values()
    assert not [p for p in parameters if p.kind is p.VAR_KEYWORD]
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def for_type_checkers(function):
    """Yield the options that each overload of a function declares, with their types."""
    innermost = inspect.unwrap(function)
    for declared in typing.get_overloads(innermost) or [innermost]:
        hints = typing.get_type_hints(declared)
        (options,) = typing.get_args(hints.pop("options"))
        explicit = {name: kind for name, kind in hints.items() if name in FIELDS}
        yield typing.get_type_hints(options) | explicit


def is_same_type(declared, defined):
    """Tell whether types are the same; an overload decides on the result by a literal."""
    if typing.get_origin(declared) is typing.Literal:
        return all(isinstance(value, defined) for value in typing.get_args(declared))
    return declared == defined


@pytest.fixture(scope="module")
def learner():
    return braintrace.compile(braintrace.nn.IndRNN(3, 4), "d_rtrl", XS[0], batch_size=2)


def calls_of(learner, method):
    """Return the public functions that take a method's options, called with options alone."""
    pure = learner.functional()
    twin = getattr(pure, method.removeprefix("etrace_"))
    calls = {
        "method": lambda **options: getattr(learner, method)(XS, **options),
        "twin": lambda **options: twin(pure.state(), XS, **options),
        "lower": lambda **options: learner.lower(method, XS, **options),
    }
    if method == "etrace_online":
        calls["export_step"] = lambda **options: learner.export_step(XS[0], **options)
    return calls


def needed(learner, method):
    """Return what a method cannot be called without."""
    options = {
        "step_fn": lambda x: jnp.sum(learner(x)),
        "update_fn": lambda gradients: None,
    }
    return {name: value for name, value in options.items() if name in TAKEN[method]}


@pytest.mark.core
@pytest.mark.parametrize("method", METHODS)
def test_signatures_show_the_options_of_the_definition(method):
    for name, function in functions_of(method).items():
        expected = TAKEN[method] | (WATCH if name == "method" else {})
        assert list(shown(function).items()) == list(expected.items()), name
    for name, default in (TAKEN[method] | WATCH).items():
        assert FIELDS[name].default == default, name


@pytest.mark.core
@pytest.mark.parametrize("method", METHODS)
def test_type_checkers_know_the_same_options(method):
    types = typing.get_type_hints(Options)
    for function in functions_of(method).values():
        names = shown(function).keys()
        for declared in for_type_checkers(function):
            optional = {"has_aux", "return_value", "return_outputs"}
            assert declared.keys() | (optional & names) == names
            wrong = [n for n, t in declared.items() if not is_same_type(t, types[n])]
            assert wrong == [], function


@pytest.mark.parametrize("method", METHODS)
def test_other_names_are_refused_with_the_same_list(learner, method):
    pytest.importorskip("flatbuffers", reason="the extra `export` is not installed")
    options = needed(learner, method)
    for name, call in calls_of(learner, method).items():
        with pytest.raises((TypeError, braintrace.OptionError), match="`resets`") as caught:
            call(**options, resets=None)
        message = str(caught.value)
        assert "did you mean 'reset'?" in message
        listed = re.findall(r"`(\w+)`", message.partition("its options are")[2])
        assert listed == [*TAKEN[method], *(WATCH if name == "method" else {})], name
        assert isinstance(caught.value, TypeError) == (name != "lower")
        if "step_fn" in options:
            with pytest.raises((TypeError, braintrace.OptionError), match="needs `step_fn`"):
                call()


@pytest.mark.parametrize("method", METHODS)
def test_docstrings_explain_every_option(method):
    _, _, text = inspect.getdoc(getattr(Learner, method)).partition("Parameters\n----------\n")
    heads = re.findall(r"^[\w*, ]+$", text.partition("\n\nReturns\n")[0], re.MULTILINE)
    named = [name for head in heads if head[0] != " " for name in head.split(", ")]
    assert {*named} == {"*sequences", *TAKEN[method], *WATCH}


def test_what_is_logged_is_an_option_of_methods_alone():
    assert [*WatchOptions.__annotations__] == [*WATCH]


CHECKED = [
    (method, name)
    for method in METHODS
    for name, option in FIELDS.items()
    if name in TAKEN[method] and option.metadata
]


@pytest.mark.parametrize(("method", "option"), CHECKED)
def test_values_are_refused_in_the_same_words(learner, method, option):
    pytest.importorskip("flatbuffers", reason="the extra `export` is not installed")
    options = {**needed(learner, method), option: 0.5}
    words, calls = set(), [*calls_of(learner, method).values()]
    if option in OF_PLAN:
        calls.append(lambda **_: plan_of(method, **{option: 0.5}))
    for call in calls:
        with pytest.raises(braintrace.OptionError, match=f"`{option}`") as caught:
            call(**options)
        words.add(str(caught.value))
    assert len(words) == 1, words


# --- programs


STATIC = {
    "every": 2,
    "window": 2,
    "reduction": "sum",
    "chunk_size": 2,
    "memory_budget": 1000,
    "nonfinite": "ignore",
    "has_aux": True,
    "unit_aware": True,
    "return_outputs": False,
}


def test_programs_are_compiled_for_options_that_change_them():
    plain = Options().static
    for name, value in STATIC.items():
        assert Options(**{name: value}).static != plain, name
    given = {"mask": XS, "reset": XS, "weights": {}, "return_value": True, "progress": True}
    assert Options(**given).static == plain


def test_a_program_serves_its_own_options_and_keeps_no_array_of_a_call(learner):
    mask, reset = jnp.ones(3), jnp.zeros(3, bool)
    arrays = [weakref.ref(mask), weakref.ref(reset)]
    call = functools.partial(learner.etrace_grad, XS, step_fn=lambda x: jnp.sum(learner(x)))
    learner.reset_state()
    mean = call(mask=mask, reset=reset)
    learner.reset_state()
    total = call(mask=mask, reset=reset, reduction="sum")
    for path, gradient in mean.items():
        for a, b in zip(jax.tree.leaves(total[path]), jax.tree.leaves(gradient), strict=True):
            np.testing.assert_allclose(a, 3 * b, rtol=1e-5)
    del mask, reset
    gc.collect()
    assert [array() for array in arrays] == [None, None]


# --- plans


def plan_of(method, **options):
    return braintrace.plan(
        braintrace.nn.IndRNN(3, 4), "d_rtrl", XS[0], batch_size=2, method=method, **options
    )


def test_a_plan_has_the_defaults_of_the_methods():
    parameters = inspect.signature(braintrace.plan).parameters
    common = parameters.keys() & FIELDS.keys()
    assert common == {"optimizer", *OF_PLAN}
    hints, types = typing.get_type_hints(braintrace.plan), typing.get_type_hints(Options)
    for name in common:
        assert parameters[name].default == FIELDS[name].default
        assert hints[name] == types[name]


@pytest.mark.parametrize("method", METHODS)
def test_a_plan_takes_the_options_of_its_method(method):
    for name, value in OF_PLAN.items():
        if name in TAKEN[method]:
            plan_of(method, steps=2, **{name: value})
        else:
            with pytest.raises(braintrace.OptionError, match=f"does not accept `{name}`"):
                plan_of(method, steps=2, **{name: value})


# --- compilation


OF_COMPILER = {"strict": False, "unroll_limit": 32, "mark": None}
OF_ALGORITHM = {"window": None, "vjp_method": "single-step", **OF_COMPILER, "trace_dtype": None}
OF_COMPILE = {"batch_size": None, "vmap": False, "rules": None}
ALGORITHMS = [
    kind
    for name, kind in vars(braintrace).items()
    if name[0] != "_" and isinstance(kind, type) and issubclass(kind, braintrace.ETraceAlgorithm)
]


def defaults(function):
    return {p.name: p.default for p in inspect.signature(function).parameters.values()}


@pytest.mark.core
@pytest.mark.parametrize("kind", ALGORITHMS)
def test_algorithms_take_the_options_of_all_of_them(kind):
    assert OF_ALGORITHM.items() <= defaults(kind).items()


def test_the_compiler_has_the_defaults_of_the_algorithms():
    for function in (braintrace.compile_etrace_graph, CompilerOptions):
        assert OF_COMPILER.items() <= defaults(function).items()
    for function in (braintrace.compile, braintrace.plan):
        assert OF_COMPILE.items() <= defaults(function).items()


@pytest.mark.parametrize("option", OF_COMPILER)
def test_values_for_the_compiler_are_refused_in_the_same_words(option):
    def made():
        return braintrace.nn.IndRNN(3, 4)

    given = {option: 0.5}

    def loss(output, y):
        return jnp.sum(output - y)

    calls = [
        lambda: braintrace.D_RTRL(made(), **given),
        lambda: braintrace.compile(made(), "d_rtrl", XS[0], batch_size=2, **given),
        lambda: braintrace.compile(
            made(), "d_rtrl", XS[0], batch_size=2, rules={"u": "es_d_rtrl"}, **given
        ),
        lambda: plan_of("predict", **given),
        lambda: braintrace.gradient_check(made(), "d_rtrl", XS, XS, loss, batch_size=2, **given),
        lambda: braintrace.compile_etrace_graph(made(), XS[0], **given),
    ]
    words = set()
    for call in calls:
        with pytest.raises(braintrace.OptionError, match=f"`{option}`") as caught:
            call()
        words.add(str(caught.value))
    assert len(words) == 1, words
