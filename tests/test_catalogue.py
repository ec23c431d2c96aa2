"""Model catalogue: each model learns as by BPTT, and has its stored verdict of the compiler.

``pytest tests/test_catalogue.py --update`` writes ``tests/verdicts.txt`` again. Compare each
changed line with the model by hand before you commit it.
"""

import pathlib
import re
import zlib

import brainstate
import catalogue_cells  # noqa: F401 (adds its models)
import catalogue_foreign  # noqa: F401
import catalogue_spiking  # noqa: F401
import jax
import pytest
import saiunit as u
from catalogue_models import BATCH, ENTRIES, STEPS
from oracle import assert_close

import braintrace

pytestmark = [
    pytest.mark.usefixtures("float64"),
    pytest.mark.filterwarnings("ignore::braintrace.ApproximationWarning"),
]

NO_LOSS = ("LeakyRNNWithFeedback",)
"""Models whose gradient is not the derivative of a loss, by design."""


def loss(output):
    return (u.get_mantissa(output) ** 2).sum()


def bptt(entry, xs):
    """Return the gradient of the summed loss by a plain scan of the model's own step."""
    model = entry.build()
    is_vmapped = "vmap" in dict(entry.options)
    brainstate.nn.init_all_states(model, **({} if is_vmapped else {"batch_size": BATCH}))
    weights = model.states(brainstate.ParamState)
    example = xs[0, 0] if is_vmapped else xs[0]
    step = brainstate.transform.StatefulFunction(model.update, return_only_write=False)
    step.make_jaxpr(example)
    states = step.get_states(example)
    paths = {id(state): path for path, state in weights.items()}

    def total(params, xs):
        def advance(values, x):
            new, output = step.jaxpr_call(values, x)
            kept = [v if n is None else n for n, v in zip(new, values, strict=True)]
            return kept, output

        start = [params[paths[id(s)]] if id(s) in paths else s.value for s in states]
        _, outputs = jax.lax.scan(advance, start, xs)
        return loss(outputs)

    def total_of_batch(params):
        if is_vmapped:
            return jax.vmap(total, (None, 1))(params, xs).sum()
        return total(params, xs)

    return jax.jit(jax.grad(total_of_batch))({p: s.value for p, s in weights.items()})


def gradient_of(entry, xs, learner, **options):
    def step_loss(x):
        return loss(learner(x))

    gradients = learner.etrace_grad(xs, step_fn=step_loss, reduction="sum", **options)
    model = learner.module
    is_function = isinstance(model, braintrace.FunctionModel)
    return model.by_path(gradients) if is_function else gradients


def compiled(entry, xs, rule):
    return braintrace.compile(entry.build(), rule, xs[0], **dict(entry.options))


@pytest.fixture(autouse=True)
def settings():
    with brainstate.environ.context(precision=64):
        yield


@pytest.mark.core
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_windows_and_exact_rules_equal_bptt(entry):
    """A window also for a third of the models that D-RTRL is exact for."""
    xs, draw = entry.inputs(), zlib.crc32(entry.name.encode())
    rule = "d_rtrl" if entry.is_exact else "rtrl"
    found = gradient_of(entry, xs, compiled(entry, xs, rule), chunk_size=1 + draw % STEPS)
    expected = found if entry.name in NO_LOSS else bptt(entry, xs)
    assert_close(found, expected, 1e-8)
    if not entry.is_exact or draw % 3 == 0:
        rule = ("d_rtrl", "immediate", "es_d_rtrl")[draw // 3 % 3]
        options = {"window": STEPS, "chunk_size": ("auto", STEPS)[draw % 2]}
        assert_close(gradient_of(entry, xs, compiled(entry, xs, rule), **options), expected, 1e-8)


# --- stored verdicts ------------------------------------------------------------------------------

STORED = pathlib.Path(__file__).parent / "verdicts.txt"


def verdict_of(entry):
    """Return the relations, hidden groups and diagnostics of a model, one in each line."""
    graph = compiled(entry, entry.inputs(), "d_rtrl").graph
    lines = []
    for relation in graph.hidden_param_op_relations:
        groups = [states_of(group) for group in relation.hidden_groups]
        lines.append(f"{relation.key} -> {' | '.join(groups)}")
    lines += [f"group: {states_of(group)}" for group in graph.hidden_groups]
    for diagnostic in graph.diagnostics:
        place = re.search(r"\((.*)\)$", diagnostic.source or "")
        where = f" in {place[1].rpartition('.')[2]}" if place else ""
        paths = ", ".join(diagnostic.paths)
        lines.append(f"{diagnostic.level}, {diagnostic.kind}: {paths}{where}")
    return "\n".join(lines)


def states_of(group):
    return ", ".join(state.name for state in group.hidden_states)


def read_stored():
    parts = STORED.read_text().split("\n\n") if STORED.exists() else []
    return dict(part.strip().split("\n", 1) for part in parts)


def test_verdicts(request):
    pytest.importorskip("brainpy")  # with all extras, so that every model can be made
    verdicts = {f"# {entry.name}": verdict_of(entry) for entry in ENTRIES}
    if request.config.getoption("--update"):
        STORED.write_text("\n\n".join(f"{k}\n{v}" for k, v in verdicts.items()) + "\n")
    assert verdicts == read_stored()
