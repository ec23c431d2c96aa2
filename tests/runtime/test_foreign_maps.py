"""An algorithm for one sample, mapped by somebody else, learns as with a batch of its own."""

import brainstate
import catalogue
import jax
import jax.numpy as jnp
import pytest
from assertions import assert_gradients_close
from drivers import calls_gradient, catalogue_gradient, expected_warnings, named
from operation_cases import BATCH, CASES, Diagonal, bptt, by_name, es_d_rtrl, loss
from rules import RULES

import braintrace

DECAY = {"decay_or_rank": 0.7}
OPERATIONS = [
    case
    for case in CASES
    if case.name in ("matmul", "element_wise", "strided 1-D conv with bias")
    or case.name.startswith(("sparse", "lora", "feedback", "grouped", "embed"))
]
LANES = {"axis_size": BATCH, "state_tag": "lane"}


def initialised(model, algorithm, x, *maps, **options):
    """An algorithm that is initialised under maps of brainstate's, the outermost one last."""
    instance = RULES[algorithm].algorithm(model, **{**RULES[algorithm].options, **options})

    def initialise(x):
        brainstate.nn.init_all_states(model)
        instance.compile_graph(x)

    for lanes in maps:
        initialise = brainstate.transform.vmap_new_states(initialise, **lanes)
    initialise(x)
    return instance


@pytest.mark.rows(
    "matmul-d_rtrl",
    "matmul-es_d_rtrl",
    "lora_matmul with bias-es_d_rtrl",
    "grouped_matmul with bias-es_d_rtrl",
)
@pytest.mark.core
@pytest.mark.parametrize("algorithm", ["d_rtrl", "es_d_rtrl"])
@pytest.mark.parametrize("case", OPERATIONS, ids=lambda case: case.name)
def test_every_operation(case, algorithm):
    options = DECAY if algorithm == "es_d_rtrl" else {}
    model = Diagonal(case)
    instance = initialised(model, algorithm, case.inputs[0], LANES, **options)
    run = brainstate.nn.Vmap(instance, vmap_states="lane")
    found = calls_gradient(model, lambda x: loss(run(x)), case.inputs)
    expected = es_d_rtrl(case, alpha=0.7) if options else bptt(case)
    assert_gradients_close(by_name(found), expected, 1e-5, case.name)


@pytest.mark.parametrize(
    ("name", "algorithm", "options"),
    [("ALIFLateThreshold", "immediate", {}), ("ALIFLateThreshold", "ottt", {})],
)
def test_models_windows_and_resets(name, algorithm, options):
    """Packed traces, weights with fan-out, probes on old values, windows of steps."""
    case, window = catalogue.BY_NAME[name], options.get("window", 1)
    xs, targets = (part.reshape(-1, window, *part.shape[1:]) for part in case.sequences(BATCH, 6))
    model = case.build()
    with expected_warnings(case, algorithm):
        instance = initialised(model, algorithm, xs[0, 0], LANES, **options)
    run = brainstate.nn.Vmap(instance, vmap_states="lane")

    def window_loss(inputs, wanted):
        steps = braintrace.MultiStepData(jnp.swapaxes(inputs, 0, 1))
        return jax.vmap(case.loss)(jnp.swapaxes(run(steps), 0, 1), wanted).sum()

    lanes = {"in_states": instance.states("lane"), "out_states": instance.states("lane")}
    found = named(calls_gradient(model, window_loss, xs, targets))
    brainstate.transform.vmap(instance.reset_state, axis_size=BATCH, **lanes)()
    again = named(calls_gradient(model, window_loss, xs, targets))
    expected = catalogue_gradient(case, algorithm, "mapped", BATCH, 6, **options)
    assert_gradients_close(found, expected, 1e-5, case.name)
    assert_gradients_close(again, expected, 1e-5, f"{case.name} after a reset")


def test_maps_around_maps_sum_the_gradients_of_all_lanes():
    case = CASES[0]
    inputs = jnp.stack([case.inputs, -case.inputs], axis=1)
    model = Diagonal(case)
    outer = {"axis_size": 2, "state_tag": "outer"}
    instance = initialised(model, "d_rtrl", inputs[0], LANES, outer)
    run = brainstate.nn.Vmap(instance, vmap_states="lane")
    run = brainstate.nn.Vmap(run, vmap_states="outer")
    found = calls_gradient(model, lambda x: jax.vmap(loss)(run(x)).sum(), inputs)
    # The recurrence is odd, and the loss even: both halves have the same gradient.
    expected = jax.tree.map(lambda leaf: 2 * leaf, bptt(case))
    assert_gradients_close(by_name(found), expected, 1e-5)
