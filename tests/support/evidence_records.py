"""Records of runs that nobody made, for tests of what is said of records."""

import dataclasses
from pathlib import Path

from benchmarks.learning import record, words
from benchmarks.learning.findings import sort

RECORDS = Path(__file__).parent / "learning_records"
OWN = "copy--leaky--d_rtrl"


def renamed(found, way, *, gain=1.0, seconds=1.0, **changed):
    """The record of another way that gains as many times as much over chance."""
    chance = found.settings.chance
    return dataclasses.replace(
        found,
        settings=dataclasses.replace(found.settings, way=way),
        test=tuple(chance + gain * (score - chance) for score in found.test),
        price=dataclasses.replace(
            found.price, seconds_per_step=seconds * found.price.seconds_per_step
        ),
        **changed,
    )


def scored(found, way, mean, spread=0.0):
    """The record of another way with a mean and a standard deviation over three seeds."""
    test = (mean - spread, mean, mean + spread)
    return dataclasses.replace(renamed(found, way), test=test)


def with_other_optimizer(found):
    settings = dataclasses.replace(found.settings, optimizer="rmsprop")
    return dataclasses.replace(found, settings=settings)


def of_cell(found, cell):
    settings = dataclasses.replace(found.settings, task="copy with lag", cell=cell)
    return dataclasses.replace(found, settings=settings)


def made_up():
    """Those of a way, of one that is refused, of backpropagation and of one that lost a seed."""
    own = record.read(RECORDS / f"{OWN}.json")
    failed = tuple((rate, 1) for rate in own.settings.rates)
    lost = dataclasses.replace(renamed(own, "uoro", gain=0.5), failed=failed)
    return [
        own,
        record.read(RECORDS / "copy--leaky--rflo.json"),
        renamed(own, "bptt", gain=1.25, seconds=4.0),
        renamed(own, "immediate", gain=0.75),
        with_other_optimizer(renamed(own, "immediate-rmsprop", gain=0.5)),
        dataclasses.replace(lost, test=(lost.test[0], None, lost.test[2])),
    ]


def findings_of(records):
    return sort(records, ((), tuple(words.CELLS), tuple(words.WAYS)))
