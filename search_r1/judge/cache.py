"""Replies that were paid for once: an SQLite file shared by processes and runs."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from verl.errors import ResourceError

_BUSY_S = 30.0
"""How long a process waits while another writes."""


class ReplyCache:
    """Key -> (reply, prompt tokens, reply tokens). Every call opens the file anew, so that forks do not share handles.

    Raises ResourceError naming the file when it cannot be used.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with closing(self._open()) as file, file:
                file.execute(
                    "CREATE TABLE IF NOT EXISTS replies"
                    " (key TEXT PRIMARY KEY, text TEXT NOT NULL, prompt_tokens INTEGER, reply_tokens INTEGER)"
                )
        except (OSError, sqlite3.Error) as error:
            raise self._unusable(error) from error

    def get(self, key: str) -> tuple[str, int, int] | None:
        """Return what is kept under a key."""
        try:
            with closing(self._open()) as file:
                row = file.execute(
                    "SELECT text, prompt_tokens, reply_tokens FROM replies WHERE key = ?", (key,)
                ).fetchone()
        except sqlite3.Error as error:
            raise self._unusable(error) from error
        return None if row is None else (str(row[0]), int(row[1]), int(row[2]))

    def put(self, key: str, text: str, prompt_tokens: int, reply_tokens: int) -> None:
        """Keep a reply; an earlier one under the same key stays."""
        try:
            with closing(self._open()) as file, file:
                file.execute(
                    "INSERT OR IGNORE INTO replies VALUES (?, ?, ?, ?)", (key, text, prompt_tokens, reply_tokens)
                )
        except sqlite3.Error as error:
            raise self._unusable(error) from error

    def _open(self) -> sqlite3.Connection:
        return sqlite3.connect(self._path, timeout=_BUSY_S)

    def _unusable(self, error: Exception) -> ResourceError:
        return ResourceError(f"judge.cache_path={self._path}: cannot be used ({error}); name another file, or null")
