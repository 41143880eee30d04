"""The Lucene process without a JVM: the real message loop around an index that is a JSON file.

``<index>/fake.json`` is a list of [id, text]. A query matches the texts that share a word with it, and some words do
what a process in trouble does.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# By path, as the real one runs: importing the package would take longer than the whole test.
_spec = importlib.util.spec_from_file_location(
    "lucene_process", ROOT / "retrieval_server" / "backends" / "lucene_process.py"
)
assert _spec is not None and _spec.loader is not None
lucene_process = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(lucene_process)


class FakeSearcher:
    """Scores by the number of shared words."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.folder = Path(config["index"])
        self.rows = json.loads((self.folder / "fake.json").read_text(encoding="utf-8"))
        self._trouble(self.folder.name)

    def describe(self) -> dict[str, Any]:
        return {
            "documents": len(self.rows),
            "stored": "raw" if self.rows and self.rows[0][1] is not None else None,
            "sample": [row[0] for row in self.rows],
            "java": "0",
            "lucene": "0",
        }

    def search(self, queries: Sequence[str], k: int) -> list[list[tuple[str, float, str | None]]]:
        with (self.folder / "calls.jsonl").open("a") as calls:
            calls.write(json.dumps({"queries": queries, "k": k}) + "\n")
        for query in queries:
            self._trouble(query)
        return [self._search(set(query.lower().split()))[:k] for query in queries]

    def _search(self, words: set[str]) -> list[tuple[str, float, str | None]]:
        scored = [(id, len(words & set((text or id).lower().split())), text) for id, text in self.rows]
        found = sorted((row for row in scored if row[1]), key=lambda row: (-row[1], row[0]))
        return [(id, float(score), text if self.config["texts"] else None) for id, score, text in found]

    def _trouble(self, words: str) -> None:
        sys.stdout.write("log line\n")
        if "codec" in words:
            raise ValueError("IllegalArgumentException: Could not load codec 'Lucene99'?")
        if "TooOld" in words:
            raise ValueError("IndexFormatTooOldException: Format version is not supported")
        if "fail" in words:
            raise ValueError("scripted\nfailure")
        if "noise" in words:
            sys.stderr.write("\n".join(f"noise {i}" for i in range(20_000)) + "\n")
        if "heap" in words:
            sys.stderr.write("Terminating due to java.lang.OutOfMemoryError: Java heap space\n")
            sys.stderr.flush()
            os._exit(3)
        if "hang" in words:
            time.sleep(600)
        if "die once" in words and not (self.folder / "died").exists():
            (self.folder / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if "die always" in words:
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    lucene_process._die_with_parent(int(sys.argv[2]))
    lucene_process.serve(socket.socket(fileno=int(sys.argv[1])), FakeSearcher)
