"""A least-recently-used cache of search results, bounded by what it holds and not by the number of entries."""

from __future__ import annotations

from collections import OrderedDict

from retrieval_server.types import Hit

Key = tuple[str, int]
"""(query, k)"""


class ResultCache:
    """Keeps results up to a total weight. A result weighs its documents, plus one, plus one per KiB of its query.

    So a thousand documents for one query count as a thousand, and memory stays flat whatever is asked.
    """

    def __init__(self, capacity: int) -> None:
        """``capacity`` is the total weight kept; 0 keeps nothing."""
        self._capacity = capacity
        self._entries: OrderedDict[Key, tuple[Hit, ...]] = OrderedDict()
        self.weight = 0
        """Total weight of what is kept now."""

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Key) -> tuple[Hit, ...] | None:
        """Return the result and mark it as used, or None."""
        result = self._entries.get(key)
        if result is not None:
            self._entries.move_to_end(key)
        return result

    def put(self, key: Key, hits: tuple[Hit, ...]) -> None:
        """Keep a result, dropping the longest unused ones; a result heavier than the whole cache is not kept."""
        weight = _weight(key, hits)
        if weight > self._capacity:
            return
        if key in self._entries:
            self.weight -= _weight(key, self._entries.pop(key))
        self._entries[key] = hits
        self.weight += weight
        while self.weight > self._capacity:
            old_key, old_hits = self._entries.popitem(last=False)
            self.weight -= _weight(old_key, old_hits)


def _weight(key: Key, hits: tuple[Hit, ...]) -> int:
    return 1 + len(hits) + len(key[0]) // 1024
