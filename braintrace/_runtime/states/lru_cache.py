"""LRU cache: a dict of bounded size."""

import collections
from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class LRUCache(collections.OrderedDict[Key, Value]):
    """Dict of the most recently used entries, up to a maximum number.

    Parameters
    ----------
    most
        Maximum number of entries.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def __getitem__(self, key: Key) -> Value:
        self.move_to_end(key)
        return super().__getitem__(key)

    def __setitem__(self, key: Key, value: Value) -> None:
        super().__setitem__(key, value)
        if len(self) > self.most:
            del self[next(iter(self))]
