"""What has to survive a restart: answers, pages and what was spent. One SQLite file, for several processes at a time.

The file belongs on a local disk: SQLite's write-ahead log does not work over a network.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from retrieval_server.errors import SearchUnavailableError, SettingsError

logger = logging.getLogger(__name__)

_VERSION = 1
_BUSY_S = 10.0
_DAY_S = 86_400.0
_SCHEMA = """
CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, stored REAL NOT NULL, body BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS pages (key TEXT PRIMARY KEY, stored REAL NOT NULL, body BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS spending (provider TEXT PRIMARY KEY, spent INTEGER NOT NULL) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS answers_stored ON answers (stored);
CREATE INDEX IF NOT EXISTS pages_stored ON pages (stored);
"""


class WebState:
    """Cache and account. Safe to use from several threads, and from several processes on one file."""

    def __init__(self, path: Path, cache_days: float, clock: Callable[[], float] = time.time) -> None:
        """Open or make the file; raises SettingsError when that is impossible or it is no such file.

        ``cache_days`` 0 keeps nothing; what is older is not returned, and removed when the file is opened.
        """
        self._path, self._keep_s, self._clock = path, cache_days * _DAY_S, clock
        self._lock = threading.Lock()
        try:
            self._connection = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
        except sqlite3.Error as error:
            raise SettingsError(
                f"state_path {path} cannot be opened ({error}): name a file in a writable folder"
            ) from None
        try:
            self._prepare()
        except sqlite3.Error as error:
            self._connection.close()
            raise SettingsError(
                f"state_path {path} cannot be used ({error}): make it writable, or move a damaged file away, "
                "which also forgets what was spent"
            ) from None
        self._put_failures = 0

    def _prepare(self) -> None:
        _retry_while_locked(lambda: self._connection.execute("PRAGMA journal_mode = WAL"))
        self._connection.execute("PRAGMA synchronous = FULL")  # what was spent must survive a power cut too
        with self._transaction() as connection:
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
            if version != _VERSION and (version or tables):
                raise sqlite3.DatabaseError(f"it is not a state file of version {_VERSION} but of {version}")
            for statement in _SCHEMA.split(";"):
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {_VERSION}")
            for table in ("answers", "pages"):
                connection.execute(f"DELETE FROM {table} WHERE stored <= ?", (self._clock() - self._keep_s,))

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            finally:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")

    # -----------------------------------------------------------------------------------------------------------------
    # Cache

    def answer(self, key: str) -> str | None:
        """Return what is kept under a key and has not expired."""
        return self._get("answers", key, self._keep_s)

    def keep_answer(self, key: str, body: str) -> None:
        """Keep an answer. One that cannot be written is only logged: it has been paid for and is about to be used."""
        self._put("answers", key, body)

    def page(self, key: str) -> str | None:
        """Return the text of a page; "" for one that could not be read within the last day."""
        text = self._get("pages", key, self._keep_s)
        return self._get("pages", key, min(self._keep_s, _DAY_S)) if text == "" else text

    def keep_page(self, key: str, text: str) -> None:
        """Keep the text of a page, "" for one that could not be read."""
        self._put("pages", key, text)

    def _get(self, table: str, key: str, keep_s: float) -> str | None:
        if keep_s <= 0:
            return None
        query = f"SELECT body FROM {table} WHERE key = ? AND stored > ?"
        try:
            with self._lock:
                row = self._connection.execute(query, (key, self._clock() - keep_s)).fetchone()
            return None if row is None else zlib.decompress(row[0]).decode()
        except (sqlite3.Error, zlib.error, UnicodeDecodeError) as error:
            # Not a miss: that would pay for the same answer again, for as long as the file is damaged.
            raise SearchUnavailableError(f"cannot read the cache in {self._path}: {error}", 60) from None

    def _put(self, table: str, key: str, body: str) -> None:
        if self._keep_s <= 0:
            return
        row = (key, self._clock(), zlib.compress(body.encode()))
        try:
            with self._lock:
                self._connection.execute(f"INSERT OR REPLACE INTO {table} VALUES (?, ?, ?)", row)
        except sqlite3.Error as error:
            self._put_failures += 1
            if self._put_failures == 1 or self._put_failures % 1000 == 0:
                logger.error("cannot write the cache %s (%d times): %s", self._path, self._put_failures, error)

    # -----------------------------------------------------------------------------------------------------------------
    # Account

    def spend(self, provider: str, limit: int | None) -> bool:
        """Count one request before it is sent, in one atomic step; False when that would be above the limit.

        Raises SearchUnavailableError when it cannot be counted: what is not counted must not be sent.
        """
        try:
            with self._transaction() as connection:
                connection.execute("INSERT OR IGNORE INTO spending VALUES (?, 0)", (provider,))
                changed = connection.execute(
                    "UPDATE spending SET spent = spent + 1 WHERE provider = ? AND (? IS NULL OR spent < ?)",
                    (provider, limit, limit),
                )
                return changed.rowcount == 1
        except sqlite3.Error as error:
            raise SearchUnavailableError(f"cannot count a paid request in {self._path}: {error}", 60) from None

    def refund(self, provider: str) -> None:
        """Take back one request that was counted and is certain not to be billed."""
        try:
            with self._lock:
                self._connection.execute("UPDATE spending SET spent = spent - 1 WHERE provider = ?", (provider,))
        except sqlite3.Error as error:
            logger.error("a request that was not billed stays counted in %s: %s", self._path, error)

    def spent(self, provider: str) -> int:
        """Return the requests counted for a provider since the file was made."""
        row = self._one("SELECT spent FROM spending WHERE provider = ?", provider)
        return 0 if row is None else int(row[0])

    def sizes(self) -> dict[str, int]:
        """Return the number of kept answers and pages."""
        return {table: int(self._one(f"SELECT count(*) FROM {table}")[0]) for table in ("answers", "pages")}

    def _one(self, query: str, *values: Any) -> Any:
        try:
            with self._lock:
                return self._connection.execute(query, values).fetchone()
        except sqlite3.Error as error:
            raise SearchUnavailableError(f"cannot read {self._path}: {error}", 60) from None

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._connection.close()


def _retry_while_locked(action: Callable[[], Any]) -> None:
    """Switching to the write-ahead log does not wait for a lock as everything else does."""
    deadline = time.monotonic() + _BUSY_S
    while True:
        try:
            action()
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.05)
