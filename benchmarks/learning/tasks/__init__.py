"""Tasks by name; data are read when a task is asked for."""

import functools
import importlib

from .task import SPLITS as SPLITS
from .task import Batch as Batch
from .task import Split as Split
from .task import Task as Task

_CORE = {
    "digits by rows": "digits.by_rows",
    "copy with lag": "working_memory.copy_with_lag",
    "adding problem": "working_memory.adding_problem",
    "delayed XOR": "working_memory.delayed_xor",
    "JapaneseVowels": "recordings.japanese_vowels",
}
_WIDE = {
    "digits by pixels": "digits.by_pixels",
    "BasicMotions": "recordings.basic_motions",
    "GunPoint": "recordings.gun_point",
    "evidence accumulation": "working_memory.evidence_accumulation",
    "delayed match-to-sample": "working_memory.delayed_match_to_sample",
    "real series": "series.next_values",
    "characters": "characters.next_characters",
    "Mackey-Glass": "chaos.mackey_glass",
    "Lorenz": "chaos.lorenz",
    "memory chain": "working_memory.memory_chain",
}
CORE, WIDE = tuple(_CORE), tuple(_WIDE)
ALL = CORE + WIDE


@functools.cache
def load(name: str, **sizes: int) -> Task:
    """Return a task, with other sizes than usual where its function takes them.

    A `MissingPackageError` names the extra whose package has its data.
    """
    module, function = (_CORE | _WIDE)[name].split(".")
    task: Task = getattr(importlib.import_module(f".{module}", __name__), function)(**sizes)
    return task
