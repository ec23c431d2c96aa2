"""The learning rules: a row each, by which all laws that hold for every rule are tested on it."""

import dataclasses
import functools
from collections.abc import Callable, Mapping

import oracles
from own_rules import Carrying, Decaying, Filtering

import braintrace
from braintrace._algorithms import algorithm_of


@dataclasses.dataclass(frozen=True, eq=False)
class Rule:
    """One learning rule.

    algorithm: the class.
    oracle: (case, params, states, xs, targets) -> gradient of the summed losses; ``None``: no
        single gradient has one.
    options: those that it needs, and the oracle is for.
    refused: {model of the catalogue: what the error says}.
    case: name of a model that it takes, and the oracle is for.
    variant: what tells it from the row of the same class; of one without names, the name.
    """

    algorithm: type[braintrace.ETraceAlgorithm]
    oracle: Callable | None
    options: Mapping = dataclasses.field(default_factory=dict)
    refused: Mapping = dataclasses.field(default_factory=dict)
    case: str = "ALIFLateThreshold"
    variant: str = ""

    @property
    def name(self):
        return "".join(self.algorithm.names[:1]) + self.variant


OLDEST = [
    Rule(braintrace.D_RTRL, oracles.dense_d_rtrl),
    Rule(braintrace.ES_D_RTRL, functools.partial(oracles.dense_es_d_rtrl, alpha=0.9)),
]
"""Rules that most tests list by themselves, with options of their own."""

OTHERS = [
    Rule(braintrace.Immediate, oracles.immediate),
    Rule(braintrace.SnAp, functools.partial(oracles.dense_d_rtrl, snap=True)),
    Rule(braintrace.OTTT, functools.partial(oracles.dense_ottt, decay=0.7), {"decay": 0.7}),
]

OF_SOME_MODELS = [
    Rule(braintrace.RTRL, oracles.bptt, case="TwoLayers"),
    Rule(braintrace.SnAp, oracles.bptt, {"n": 2}, case="TwoLayers", variant=" 2"),
    Rule(braintrace.OSTLRecurrent, oracles.bptt, case="LSTMFused"),
    Rule(braintrace.OSTLFeedforward, oracles.dense_d_rtrl, case="TwoLayers"),
    Rule(braintrace.EProp, oracles.dense_d_rtrl),
    Rule(braintrace.RFLO, oracles.dense_d_rtrl, case="LeakyRNNWithFeedback"),
    Rule(
        algorithm_of(Carrying("full"), "rule"), oracles.bptt, case="TwoLayers", variant="carrying"
    ),
    Rule(
        algorithm_of(Decaying(0.7), "rule"),
        functools.partial(oracles.dense_d_rtrl, decay=0.7),
        variant="decaying",
    ),
    Rule(
        algorithm_of(Filtering(0.7), "rule"),
        functools.partial(oracles.dense_ottt, decay=0.7),
        variant="filtering",
    ),
]
"""Those that refuse other models, or have another oracle for these."""

RANDOM = [
    Rule(braintrace.UORO, None, case="TanhRNN"),
    Rule(braintrace.KF_RTRL, None, case="TanhRNN"),
]
"""Those that draw anew in every call."""

NEWEST = OF_SOME_MODELS + RANDOM
RULES = {rule.name: rule for rule in OLDEST + OTHERS + NEWEST}


def options_of(algorithm):
    """What a rule needs to be made, given its name or its class."""
    name = algorithm if isinstance(algorithm, str) else "".join(algorithm.names[:1])
    rule = RULES.get(name.lower())
    return rule.options if rule else {}
