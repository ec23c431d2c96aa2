"""The generator of mutants, and the table of those that no test can notice."""

import re

import mutations
from mutant_equivalents import EQUIVALENT
from mutants import every_mutant, mutants_of
from mutation_runs import ROOT

LIBRARY = ROOT / "braintrace"

SMALL = '''
"""A module: 1 + 1."""
Size: TypeAlias = int | None
LIMIT = 3


@dataclass(frozen=True)
class Thing:
    """A class."""

    size: int | None = 2

    def __repr__(self):
        return "a" + "b"

    def grown(self, by: int | None = 1) -> int | None:
        """Return more: 1 < 2."""
        if self.size is None and by > LIMIT:
            raise ValueError(f"{self.size + 1} is too much, 1 < 2")
        self.size = self.size + by
        pairs = zip(self.all, by, strict=True)
        return (*pairs, by), self.size
'''
EXPECTED = {
    "f.py:<module>:constant:0": "LIMIT = 4",
    "f.py:Thing:constant:0": "    size: int | None = 3",
    "f.py:Thing.grown:constant:0": "    def grown(self, by: int | None = 2) -> int | None:",
    "f.py:Thing.grown:condition:0": "        if not (self.size is None and by > LIMIT):",
    "f.py:Thing.grown:boolean:0": "        if self.size is None or by > LIMIT:",
    "f.py:Thing.grown:comparison:0": "        if self.size is not None and by > LIMIT:",
    "f.py:Thing.grown:comparison:1": "        if self.size is None and by >= LIMIT:",
    "f.py:Thing.grown:statement:0": "            pass",
    "f.py:Thing.grown:statement:1": "        pass",
    "f.py:Thing.grown:arithmetic:0": "        self.size = self.size - by",
    "f.py:Thing.grown:return:0": "        return ((*pairs, by), self.size)[0]",
}


def test_every_kind_and_nothing_for_people():
    found = {m.name: m.diff(SMALL).split("\n+")[1] for m in mutants_of("f.py", SMALL)}
    assert found == EXPECTED


def test_every_fault_that_is_written_out_has_its_place():
    texts = {m.file: (LIBRARY / m.file).read_text() for m in mutations.MUTATIONS}
    assert [m.name for m in mutations.MUTATIONS if texts[m.file].count(m.old) != 1] == []


def test_every_test_that_is_named_for_a_fault_exists():
    named = {test.partition("[")[0] for m in mutations.MUTATIONS for test in m.tests}
    for file, _, name in (test.partition("::") for test in sorted(named)):
        text = (ROOT / file).read_text()
        assert re.search(rf"\b{name.rpartition('.')[2]}\b", text), (file, name)


def test_the_equivalents_exist():
    every = {mutant.name for own in every_mutant(LIBRARY).values() for mutant in own}
    assert EQUIVALENT.keys() <= every, EQUIVALENT.keys() - every
    assert all(EQUIVALENT.values())
