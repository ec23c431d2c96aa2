"""The compiler finds the hidden groups and relations that each case states, and warns."""

import functools

import cases
import pytest
from drivers import build_algorithm


@functools.cache
def compiled(case):
    return build_algorithm(case)[1].graph


@pytest.mark.core
@cases.each(cases.ALL)
def test_hidden_groups(case):
    found = {frozenset(map(".".join, group.paths)) for group in compiled(case).hidden_groups}
    assert found == {frozenset(members) for members in case.groups.values()}
    for group in compiled(case).hidden_groups:
        assert group.hidden_paths == tuple(state.path for state in group.hidden_states)
        assert group.num_state == len(group.hidden_paths)
    assert sum(map(len, found)) == len(compiled(case).hidden_paths)


@pytest.mark.core
@cases.each(cases.ALL)
def test_relations(case):
    relations = compiled(case).hidden_param_op_relations
    found = [
        (
            {".".join(path) for path in relation.trainable_paths.values()},
            sorted(sorted(map(".".join, group.paths)) for group in relation.hidden_groups),
        )
        for relation in relations
    ]
    stated = [
        (
            case.parameters_of(operation),
            sorted(sorted(case.groups[group]) for group in groups),
        )
        for operation, groups in case.relations.items()
        if groups
    ]
    assert sorted(found, key=str) == sorted(stated, key=str)


@pytest.mark.core
@cases.each(cases.ALL)
def test_warnings_are_diagnostics(case):
    """`build_algorithm` asserts the warning itself."""
    levels = {diagnostic.level for diagnostic in compiled(case).diagnostics}
    assert ("warning" in levels) == case.costs_accuracy


@cases.each([case for case in cases.ALL if case.same_step_only])
def test_parameters_without_a_trace_are_listed(case):
    printed = str(compiled(case))
    for name in case.same_step_only:
        assert name.replace(".", "/") in printed
