"""The generator of mutants, and the table of those that no test can notice."""

import ast
import json

import generated_mutants
import mutations
import pytest
from mutant_equivalents import EQUIVALENT
from mutants import PACKAGES, every_mutant, mutants_of, sample
from mutation_runs import ROOT

LIBRARY = ROOT / "braintrace"
FILES = ("_sharding/layout.py", "nn/_spiking/neurons.py", "_compiler/core/walk.py")

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
        assert name.rpartition(".")[2] in (ROOT / file).read_text(), (file, name)


@pytest.mark.parametrize("file", FILES)
def test_every_mutant_is_another_program(file):
    text = (LIBRARY / file).read_text()
    mutants, program = mutants_of(file, text), ast.dump(ast.parse(text))
    assert len(mutants) > 50
    assert len({m.name for m in mutants}) == len(mutants)
    for mutant in mutants:
        assert ast.dump(ast.parse(mutant.changed(text))) != program, mutant.name


def test_names_stay_where_other_functions_change():
    text = (LIBRARY / "_sharding/parts.py").read_text()
    more = text.replace("\ndef parts_of(", "\ndef more(a, b):\n    return a + b\n\n\ndef parts_of(")
    before, after = ({m.name for m in mutants_of("f.py", t)} for t in (text, more))
    assert after - before == {"f.py:more:arithmetic:0", "f.py:more:return:0"}
    assert before <= after


def test_a_sample_has_a_part_of_every_package():
    mutants = every_mutant(LIBRARY)
    chosen = sample(mutants, 300, seed=0)
    counts = {package: sum(m.package == package for m in chosen) for package in PACKAGES}
    assert 300 <= sum(counts.values()) <= 310
    assert min(counts.values()) >= 20
    assert max(counts, key=counts.get) == "_compiler"
    assert {m.name for m in sample(mutants, 200, seed=0)} < {m.name for m in chosen}
    assert {m.name for m in sample(mutants, 300, seed=1)} != {m.name for m in chosen}


def test_the_equivalents_exist():
    every = {mutant.name for own in every_mutant(LIBRARY).values() for mutant in own}
    assert EQUIVALENT.keys() <= every, EQUIVALENT.keys() - every
    assert all(EQUIVALENT.values())


def test_shares_are_killed_over_tried():
    assert [generated_mutants.share_of(text) for text in ("1/6", "6/6")] == [(0, 6), (5, 6)]
    nights = [generated_mutants.datetime.date(2030, 1, day) for day in range(1, 7)]
    tonight = {generated_mutants.share_of("tonight/6", day) for day in nights}
    assert tonight == {(i, 6) for i in range(6)}
    with pytest.raises(generated_mutants.argparse.ArgumentTypeError):
        generated_mutants.share_of("7/6")


def test_the_quickest_row_of_each_test_comes_first():
    lines = [
        {"test": "a.py::slow", "seconds": 50, "ran": ["f.py:g"]},
        {"test": "a.py::rows[1]", "seconds": 9, "ran": ["f.py:g", "f.py:h"]},
        {"test": "b.py::rows[2]", "seconds": 2, "ran": ["f.py:g"]},
        {"test": "a.py::rows[3]", "seconds": 5, "ran": ["f.py:g"]},
    ]
    reached = generated_mutants.condensed(lines)
    first, files = generated_mutants.tests_for(reached, "f.py:g")
    assert first == ["b.py::rows[2]", "a.py::rows[3]", "a.py::slow"]
    assert files == ["b.py", "a.py"]
    within, _ = generated_mutants.tests_for(reached, "f.py:g", limit=10)
    assert within == ["b.py::rows[2]", "a.py::rows[3]"]
    everything, _ = generated_mutants.tests_for(reached, "f.py:<module>")
    assert everything == ["b.py::rows[2]", "a.py::rows[3]", "a.py::rows[1]"]


@pytest.mark.parametrize(("killed", "enough"), [(17, True), (16, False)])
def test_a_report_lists_survivors_and_asks_for_enough(killed, enough, tmp_path, capsys):
    results = tmp_path / "results.jsonl"
    options = generated_mutants.parse(["--package", "nn", "--results", str(results)])
    own = sample(every_mutant(LIBRARY, ["nn"]), 20, seed=0)[:20]
    with results.open("w") as file:
        for number, mutant in enumerate(own):
            result = "killed" if number < killed else "survived"
            line = {"key": generated_mutants.key_of(mutant), "result": result, "seconds": 2}
            file.write(json.dumps(line) + "\n")
    assert generated_mutants.report(own, options) is enough
    printed = capsys.readouterr().out
    assert f"{5 * killed}% of 20 killed" in printed
    assert printed.count("survived: ") == 20 - killed
    assert all(mutant.name in printed for mutant in own[killed:])
