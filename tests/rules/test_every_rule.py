"""Every rule on every operation, and with groups of one to five states.

A rule equals its own oracle, or refuses the operation by name. Rules that follow all units meet
networks that are recurrent through the operation's input; those that go position by position meet
networks that are not, where D-RTRL is backpropagation through time.
"""

import numpy as np
import pytest
from assertions import assert_gradients_close
from coupled_networks import (
    Model,
    Network,
    bptt,
    decaying,
    es_d_rtrl,
    immediate,
    of_draws,
    ottt,
)
from drivers import drawn_signs
from operation_cases import BATCH, CASES, STEPS, by_name, loss
from rules import RULES, options_of

import braintrace

BY_NAME = {case.name: case for case in CASES}
ALPHA, DECAY = 0.9, RULES["ottt"].options["decay"]
EXACT_TRACES = [
    "matmul on more axes",
    "element_wise",
    "element_wise scalar",
    "einsum in another order, over positions",
]
"""Operations that are no product of one vector with a weight: KF-RTRL has exact traces for them."""


def uoro(network, learner):
    whole = learner.graph.flat_state
    signs = drawn_signs(learner, (whole.samples, whole.size), STEPS)
    parts = np.split(signs, np.cumsum(whole.sizes)[:-1], axis=2)
    by_state = {leaf.name: part for leaf, part in zip(whole.leaves, parts, strict=True)}
    ordered = [by_state[name] for name in sorted(by_state)]
    return of_draws(network, "uoro", np.concatenate(ordered, axis=2))


def kf_rtrl(network, learner):
    if network.case.name in EXACT_TRACES:
        return bptt(network)
    return of_draws(network, "kf_rtrl", drawn_signs(learner, (BATCH, 1), STEPS))


OF_ALL_UNITS = {
    "immediate": lambda network, _: immediate(network),
    "rtrl": lambda network, _: bptt(network),
    "carrying": lambda network, _: bptt(network),
    "snap 2": lambda network, _: bptt(network),  # saturated
    "ostl_recurrent": lambda network, _: bptt(network),
    "uoro": uoro,
    "kf_rtrl": kf_rtrl,
}
BY_POSITION = {
    **dict.fromkeys(
        ["d_rtrl", "snap", "ostl_feedforward", "eprop", "rflo"], lambda network, _: bptt(network)
    ),
    "es_d_rtrl": lambda network, _: es_d_rtrl(network, ALPHA),
    "ottt": lambda network, _: ottt(network, DECAY),
    "decaying": lambda network, _: decaying(network, 0.7),
    "filtering": lambda network, _: ottt(network, 0.7),
}
ORACLES = {**OF_ALL_UNITS, **BY_POSITION}

pytestmark = pytest.mark.usefixtures("float64")


def test_every_rule_has_an_oracle():
    assert ORACLES.keys() == RULES.keys()


def network_of(rule, case, mixing):
    return Network(case, mixing, rule in OF_ALL_UNITS, rule == "rflo")


def compiled(rule, network):
    options = {"decay_or_rank": ALPHA} if rule == "es_d_rtrl" else options_of(rule)
    model, algorithm = Model(network), RULES[rule].algorithm
    return braintrace.compile(
        model, algorithm, np.asarray(network.inputs)[0], batch_size=BATCH, **options
    )


def agrees(rule, network, chunk_size=2):
    learner = compiled(rule, network)
    found = learner.etrace_grad(
        np.asarray(network.inputs),
        step_fn=lambda x: loss(learner(x)),
        reduction="sum",
        chunk_size=chunk_size,
    )
    expected = ORACLES[rule](network, learner)
    assert_gradients_close(by_name(found), expected, 1e-10, f"{rule}, {network.case.name}")
    return learner


REFUSED = {
    **{("kf_rtrl", case.name): "KF_RTRL .*`etp_conv`" for case in CASES if "conv" in case.name},
    ("kf_rtrl", "grouped_matmul with bias"): "KF_RTRL .*`etp_gmm`",
    ("kf_rtrl", "embedding"): "KF_RTRL .*`etp_embed`",
}
ROWS_ELSEWHERE = ("d_rtrl", "es_d_rtrl")
"""Rules that have tests of all operations of their own."""


def each_operation():
    for rule in (rule for rule in RULES if rule not in ROWS_ELSEWHERE):
        for case in CASES:
            yield pytest.param(rule, case, id=f"{rule}-{case.name}")


@pytest.mark.parametrize(
    ("rule", "case"),
    [
        ("carrying", BY_NAME["lora_matmul with bias"]),
        ("decaying", BY_NAME["element_wise"]),
        ("filtering", BY_NAME["embedding"]),
        ("uoro", BY_NAME["grouped 1-D conv"]),
    ],
)
def test_every_operation(rule, case):
    network = network_of(rule, case, ((0.8,),))
    if refusal := REFUSED.get((rule, case.name)):
        with pytest.raises(braintrace.PrimitiveError, match=refusal):
            compiled(rule, network)
    else:
        agrees(rule, network)


MIXINGS = {
    "one": ((0.8,),),
    "two, each other": ((0.8, -0.3), (0.4, 0.6)),
    "three in a circle": ((0.8, 0.0, -0.3), (0.4, 0.6, 0.0), (0.0, 0.5, 0.7)),
    "four in a star": (
        (0.8, 0.2, -0.3, 0.1),
        (0.4, 0.6, 0, 0),
        (0.3, 0, 0.5, 0),
        (-0.2, 0, 0, 0.7),
    ),
    "five in a chain": (
        (0.8, 0, 0, 0, 0.2),
        (0.4, 0.6, 0, 0, 0),
        (0, -0.3, 0.7, 0, 0),
        (0, 0, 0.5, 0.4, 0),
        (0, 0, 0, 0.6, 0.9),
    ),
    "five, all of each other": tuple(
        map(tuple, 0.3 * np.eye(5) + 0.15 * np.cos(np.arange(25)).reshape(5, 5))
    ),
}


@pytest.mark.parametrize(
    ("rule", "name"),
    [
        ("decaying", "two, each other"),
        ("es_d_rtrl", "five in a chain"),
        ("snap 2", "three in a circle"),
    ],
)
def test_groups_of_one_to_five_states(rule, name):
    network = network_of(rule, BY_NAME["matmul with bias"], MIXINGS[name])
    learner = agrees(rule, network, chunk_size=3)  # and a chunk of one step
    (group,) = learner.graph.hidden_groups
    assert group.num_states == len(MIXINGS[name])
