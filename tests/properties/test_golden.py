"""Gradients are those of the golden files, and these are what plain JAX gives."""

import functools

import pytest
from golden import make, table
from golden.nets import NETS
from golden.paths import Runs

import braintrace

pytestmark = pytest.mark.usefixtures("float64_in_every_thread")

runs_of = functools.cache(Runs)


def result_of(net, rule, path):
    """What a path gives now, or the name of the error by which the library refuses."""
    runs = make.result_of(lambda: runs_of(net, rule))
    return runs if isinstance(runs, str) else make.result_of(lambda: runs.of(path))


TESTED = [(*key, path) for key, paths in table.TESTED.items() for path in paths]


@pytest.mark.parametrize(("net", "rule", "path"), TESTED)
def test_gradients_are_as_stored(net, rule, path):
    """To 1e-10 of the largest entry of a parameter; `make.TOLERANCE` says why."""
    found, expected = result_of(net, rule, path), make.expected_of(net, rule, path)
    if isinstance(expected, str) or isinstance(found, str):
        assert isinstance(found, str) and found == expected
    else:
        assert make.differing(found, expected) == {}


def test_what_is_stored_is_backpropagation_through_time_where_a_rule_is_exact():
    """For the model whose program is smallest."""
    net, checked = "alif_forward", set()
    for rule in table.RULES:
        for path in table.paths_of(net, rule):
            stored = make.expected_of(net, rule, path)
            expected = None if isinstance(stored, str) else make.exact(net, rule, path)
            if expected is not None:
                assert make.differing(stored, expected) == {}, (rule, path)
                checked.add((rule, path))
    assert {("rtrl", "chunks of 3"), ("rtrl", "mask and reset")} <= checked
    assert {("immediate", "own gradient"), ("immediate, windows", "chunks of 3")} <= checked


def test_every_model_rule_and_path_has_a_tested_row():
    base = braintrace.ETraceAlgorithm
    public = [getattr(braintrace, name) for name in dir(braintrace)]
    classes = {c for c in public if isinstance(c, type) and issubclass(c, base) and c is not base}
    assert classes == {rule.algorithm for rule in table.RULES.values()}
    everything = table.all_rows()
    assert {row[0] for row in TESTED} == set(NETS)
    assert {row[1] for row in TESTED} >= set(table.SINGLE)
    assert {row[2] for row in TESTED} == {row[2] for row in everything}
    for net in NETS:
        stored = {rule: tuple(paths) for rule, paths in NETS[net].rows.items()}
        assert stored == {rule: table.paths_of(net, rule) for rule in table.RULES}
