"""The rules, the paths, and which of their products are run by day."""

import dataclasses
from collections.abc import Mapping

import braintrace
from golden.nets import NETS


@dataclasses.dataclass(frozen=True, eq=False)
class Rule:
    """A learning rule with its options.

    algorithm: the class.
    is_windowed: with `vjp_method="multi-step"`.
    loss: "squared", or "three factor".
    is_by_path: `ES_D_RTRL` in its place for some parameters.
    """

    algorithm: type
    options: Mapping = dataclasses.field(default_factory=dict)
    is_windowed: bool = False
    loss: str = "squared"
    is_by_path: bool = False


SINGLE = {
    "d_rtrl": Rule(braintrace.D_RTRL),
    "es_d_rtrl": Rule(braintrace.ES_D_RTRL, {"decay_or_rank": 0.7}),
    "es_d_rtrl rank 5": Rule(braintrace.ES_D_RTRL, {"decay_or_rank": 5}),
    "eprop": Rule(braintrace.EProp),
    "rflo": Rule(braintrace.RFLO),
    "immediate": Rule(braintrace.Immediate),
    "rtrl": Rule(braintrace.RTRL),
    "ostl_recurrent": Rule(braintrace.OSTLRecurrent),
    "ostl_feedforward": Rule(braintrace.OSTLFeedforward),
    "ottt": Rule(braintrace.OTTT, {"decay": 0.7}),
    "snap 1": Rule(braintrace.SnAp, {"n": 1}),
    "snap 2": Rule(braintrace.SnAp, {"n": 2}),
    "uoro": Rule(braintrace.UORO, {"seed": 3}),
    "kf_rtrl": Rule(braintrace.KF_RTRL, {"seed": 3}),
    "three factor": Rule(braintrace.D_RTRL, loss="three factor"),
    "by path": Rule(braintrace.D_RTRL, is_by_path=True),
}
WINDOWED = {
    f"{name}, windows": dataclasses.replace(rule, is_windowed=True)
    for name, rule in SINGLE.items()
    if name not in ("es_d_rtrl rank 5", "three factor")
}
RULES = SINGLE | WINDOWED
RANDOM = ("uoro", "kf_rtrl")

CHUNKS = ("chunks of 1", "chunks of 3", "chunks of 7")
STEPWISE = ("stream", "stream, every 2")
"""What is stored for these is the parameters after descent."""

PATHS = (
    *CHUNKS,
    "mask",
    "reset",
    "mask and reset",
    "after a reset",
    "two calls",
    "functional",
    "own gradient",
    "foreign vmap",
    "mapped",
    *STEPWISE,
)
OF_WINDOWS = (
    *CHUNKS,
    "mask",
    "reset",
    "two calls",
    "own gradient",
    "own windows",
    *STEPWISE,
)


IN_FULL = ("indrnn", "lstm")
"""Models of which every rule is run on every path; of the others the pairs below."""

OFTEN = ("d_rtrl", "es_d_rtrl", "rtrl")
SHORT = ("chunks of 3", "mask and reset", "own gradient", "stream")
MORE = (*CHUNKS, "mask and reset", "two calls", "own gradient", "foreign vmap", "stream, every 2")
SHORT_WINDOWS = ("chunks of 3", "own windows")


def paths_of(net, rule):
    """The paths that a rule is run on with a model."""
    is_often = rule.removesuffix(", windows") in (*OFTEN, "immediate", "snap 2")
    if RULES[rule].is_windowed:
        return OF_WINDOWS if net in IN_FULL else SHORT_WINDOWS if is_often else ()
    own = PATHS if net in IN_FULL else MORE if rule in OFTEN else SHORT
    extra = [p for p in TESTED.get((net, rule), ()) if p not in own]
    return tuple(p for p in (*own, *extra) if not (RULES[rule].is_by_path and p == "foreign vmap"))


def all_rows():
    """(model, rule, path) of everything that is stored."""
    return [(net, rule, path) for net in NETS for rule in RULES for path in paths_of(net, rule)]


TESTED = {
    ("indrnn", "d_rtrl"): ("chunks of 1", "own gradient", "foreign vmap"),
    ("indrnn", "rtrl"): ("stream, every 2",),
    ("two_indrnn", "ostl_feedforward"): ("mapped",),
    ("two_indrnn", "by path"): ("chunks of 3",),
    ("gru", "snap 2"): ("mask",),
    ("gru", "uoro"): ("two calls",),
    ("gru", "es_d_rtrl"): ("functional",),
    ("gru", "ostl_feedforward"): ("chunks of 7",),
    ("lstm", "d_rtrl"): ("stream",),
    ("lstm", "kf_rtrl"): ("chunks of 3",),
    ("lstm", "d_rtrl, windows"): ("chunks of 3", "own windows"),
    ("alif", "eprop"): ("reset",),
    ("alif", "three factor"): ("chunks of 7",),
    ("alif_forward", "ottt"): ("chunks of 3",),
    ("skip", "ostl_recurrent"): ("mask and reset",),
    ("skip", "snap 1"): ("after a reset",),
    ("feedback", "rflo"): ("chunks of 3",),
    ("units", "es_d_rtrl rank 5"): ("chunks of 3",),
    ("units", "immediate"): ("chunks of 7",),
}
"""What a test runs: every model, rule and path at least once."""
