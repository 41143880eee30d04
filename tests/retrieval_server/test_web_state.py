"""The cache and the account of the web backend: over restarts, threads and processes, and when the disk fails."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fake_search_api import FakeApi, entry, ids, open_web, running_api, status

from retrieval_server.backends.web import pacing
from retrieval_server.backends.web.state import WebState
from retrieval_server.errors import PartialSearchError, SearchUnavailableError, SettingsError

ROOT = Path(__file__).resolve().parents[2]
DAY_S = 86_400


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeApi]:
    monkeypatch.setattr(pacing, "_BACKOFF_S", 0.001)
    with running_api() as api:
        yield api


# ---------------------------------------------------------------------------------------------------------------------
# Cache


def test_answers_outlive_the_process(api: FakeApi, tmp_path: Path) -> None:
    first = open_web(api, tmp_path)
    found = first.search(["a", "b"], 3)
    assert first.info()["cache"] == {"answers": 2, "pages": 0, "hits": 0, "misses": 2, "hit_rate": 0.0}
    first.close()
    second = open_web(api, tmp_path)
    assert second.search(["b", "a", "c"], 3)[1::-1] == found
    assert second.info()["cache"] == {"answers": 3, "pages": 0, "hits": 2, "misses": 1, "hit_rate": 0.6667}
    assert second.info()["spent"] == len(api.received) == 3
    second.close()


def test_what_an_answer_depends_on_is_in_its_key(api: FakeApi, tmp_path: Path) -> None:
    for options in (
        {"provider": "serper"},
        {"provider": "serpapi"},
        {"provider": "serper", "country": "de"},
        {"provider": "serper", "language": "de"},
    ):
        for _ in range(2):  # the second time from the cache
            retriever = open_web(api, tmp_path, **options)
            retriever.search(["a"], 10)
            retriever.close()
    with running_api() as other:
        retriever = open_web(other, tmp_path)
        retriever.search(["a", " a  "], 10)
        retriever.close()
        assert len(other.received) == 1
    assert len(api.received) == 4


def test_answers_expire(tmp_path: Path) -> None:
    now = 1000.0
    state = WebState(tmp_path / "s.sqlite", 2, lambda: now)
    state.keep_answer("k", "body")
    state.keep_page("p", "text")
    state.keep_page("dead", "")
    now += DAY_S - 1
    assert (state.answer("k"), state.page("p"), state.page("dead")) == ("body", "text", "")
    now += 1
    assert (state.answer("k"), state.page("p"), state.page("dead")) == ("body", "text", None)  # tried again daily
    now += DAY_S
    assert (state.answer("k"), state.page("p")) == (None, None)
    assert state.sizes() == {"answers": 1, "pages": 2}
    state.close()
    state = WebState(tmp_path / "s.sqlite", 2, lambda: now)
    assert state.sizes() == {"answers": 0, "pages": 0}
    state.keep_answer("k", "new")
    state.keep_answer("k", "newer")
    assert state.answer("k") == "newer"
    state.close()


def test_without_days_nothing_is_kept(tmp_path: Path) -> None:
    state = WebState(tmp_path / "s.sqlite", 0)
    state.keep_answer("k", "body")
    assert (state.answer("k"), state.sizes()) == (None, {"answers": 0, "pages": 0})
    state.close()


# ---------------------------------------------------------------------------------------------------------------------
# Budget


def test_a_spent_budget_refuses_what_is_not_cached(
    api: FakeApi, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    retriever = open_web(api, tmp_path, budget=2)
    retriever.search(["a", "b"], 1)
    with pytest.raises(PartialSearchError, match="1 of 3 queries: query 'c': the budget of 2 paid requests") as caught:
        retriever.search(["a", "c", "b"], 1)
    a, c, b = caught.value.outcomes
    assert ids([a, b]) == [[entry("a", 0)[1]], [entry("b", 0)[1]]]
    assert isinstance(c, SearchUnavailableError)
    assert str(c) == (
        "query 'c': the budget of 2 paid requests to serper is spent: raise budget; cached queries are still answered"
    )
    assert c.retry_after_s == 3600
    retriever.close()
    again = open_web(api, tmp_path, budget=2)  # a restart earns nothing
    with pytest.raises(SearchUnavailableError, match="is spent"):
        again.search(["c", "d"], 1)
    assert len(again.search(["a"], 5)[0]) == 5
    assert (again.info()["spent"], again.info()["budget"], len(api.received)) == (2, 2, 2)
    again.close()
    assert sum("is spent" in record.message for record in caplog.records) == 2  # once a process
    raised = open_web(api, tmp_path, budget=3)
    raised.search(["c"], 1)
    with pytest.raises(SearchUnavailableError, match="budget of 3"):
        raised.search(["d"], 1)
    raised.close()


def test_no_budget_and_one_of_zero(api: FakeApi, tmp_path: Path) -> None:
    retriever = open_web(api, tmp_path)
    retriever.search(["a"], 1)
    assert (retriever.info()["spent"], retriever.info()["budget"]) == (1, None)
    retriever.close()
    retriever = open_web(api, tmp_path, budget=0)
    assert len(retriever.search(["a"], 1)[0]) == 1
    with pytest.raises(SearchUnavailableError, match="budget of 0"):
        retriever.search(["b"], 1)
    retriever.close()
    assert len(api.received) == 1


def test_retries_count_and_stop_at_the_budget(api: FakeApi, tmp_path: Path) -> None:
    api.always = status(500)
    retriever = open_web(api, tmp_path, budget=3, retries=9)
    with pytest.raises(SearchUnavailableError, match="budget of 3 paid requests"):
        retriever.search(["a"], 1)
    assert len(api.received) == 3
    retriever.close()


def test_the_second_page_is_paid_for_too(api: FakeApi, tmp_path: Path) -> None:
    retriever = open_web(api, tmp_path, budget=1)
    with pytest.raises(SearchUnavailableError, match="is spent"):
        retriever.search(["a"], 11)
    assert len(retriever.search(["a"], 10)[0]) == 10  # the first page is kept
    retriever.close()


def test_a_request_is_counted_before_it_is_sent(api: FakeApi, tmp_path: Path) -> None:
    counted = []
    path = tmp_path / "web.sqlite"

    def look(handler: object) -> None:
        connection = sqlite3.connect(path)
        counted.append(connection.execute("SELECT spent FROM spending").fetchall())
        connection.close()
        status(500)(handler)  # type: ignore[arg-type]

    api.always = look
    retriever = open_web(api, tmp_path, retries=1)
    with pytest.raises(SearchUnavailableError):
        retriever.search(["a"], 1)
    assert counted == [[(1,)], [(2,)]]
    retriever.close()


def test_threads_never_overspend(api: FakeApi, tmp_path: Path) -> None:
    retriever = open_web(api, tmp_path, budget=25, parallel=16)

    def ask(n: int) -> int:
        try:
            return len(retriever.search([f"q{n}"], 1))
        except SearchUnavailableError:
            return 0

    with ThreadPoolExecutor(16) as pool:
        assert sum(pool.map(ask, range(60))) == 25
    assert len(api.received) == retriever.info()["spent"] == 25
    retriever.close()


SPENDER = """
    import sys
    from pathlib import Path
    from retrieval_server.backends.web.state import WebState
    state = WebState(Path(sys.argv[1]), 30)
    got = 0
    for i in range(60):
        if state.spend("serper", 100):
            got += 1
            state.keep_answer(f"{sys.argv[2]}:{i}", "x" * 2000)
            assert state.answer(f"{sys.argv[2]}:{i}")
    print(got)
"""


def spender(path: Path, name: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(SPENDER), str(path), name]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def test_processes_share_one_file(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"  # made by whoever comes first
    processes = [spender(path, str(i)) for i in range(4)]
    got = [int(process.communicate(timeout=60)[0]) for process in processes]
    assert [process.returncode for process in processes] == [0] * 4
    assert sum(got) == 100
    state = WebState(path, 30)
    assert (state.spent("serper"), state.sizes()["answers"]) == (100, 100)
    state.close()


def test_a_killed_process_leaves_a_good_file(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    WebState(path, 30).close()
    process = spender(path, "a")
    try:
        state = WebState(path, 30)
        while state.spent("serper") < 5:
            assert process.poll() is None
        process.kill()
        process.wait()
        spent = state.spent("serper")
        assert spent >= 5
        assert state.spend("serper", spent + 1)
        assert not state.spend("serper", spent + 1)
        state.close()
    finally:
        process.kill()
        process.communicate()


# ---------------------------------------------------------------------------------------------------------------------
# Failures of the file


def test_files_that_cannot_be_the_state(tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.sqlite"
    damaged.write_bytes(b"this is no database at all, but long enough to look like a file " * 20)
    with pytest.raises(SettingsError, match=r"damaged.sqlite cannot be used \(file is not a database\): make it writ"):
        WebState(damaged, 1)
    foreign = tmp_path / "foreign.sqlite"
    connection = sqlite3.connect(foreign)
    connection.execute("CREATE TABLE t (x)")
    connection.close()
    with pytest.raises(SettingsError, match=r"it is not a state file of version 1 but of 0"):
        WebState(foreign, 1)
    with pytest.raises(SettingsError, match=r"nowhere/s.sqlite cannot be opened \(unable to open database file\)"):
        WebState(tmp_path / "nowhere" / "s.sqlite", 1)
    with pytest.raises(SettingsError, match="cannot be opened"):
        WebState(tmp_path, 1)
    WebState(tmp_path / "good.sqlite", 1).close()
    newer = sqlite3.connect(tmp_path / "good.sqlite")
    newer.execute("PRAGMA user_version = 7")
    newer.close()
    with pytest.raises(SettingsError, match=r"version 1 but of 7"):
        WebState(tmp_path / "good.sqlite", 1)


def fill_up(state: WebState) -> None:
    """As on a full disk: the file cannot grow."""
    (pages,) = state._connection.execute("PRAGMA page_count").fetchone()
    state._connection.execute(f"PRAGMA max_page_count = {pages}")


def test_a_full_disk_costs_the_cache_but_no_answer(
    api: FakeApi, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    retriever = open_web(api, tmp_path)
    api.total = 10
    retriever.search(["before"], 1)
    fill_up(retriever._state)
    for i in range(40):
        assert len(retriever.search([f"a much longer query than before, number {i}"], 10)[0]) == 10
    assert [record.message for record in caplog.records if "cannot write the cache" in record.message] == [
        f"cannot write the cache {tmp_path / 'web.sqlite'} (1 times): database or disk is full"
    ]
    assert retriever.info()["spent"] == 41
    retriever.close()


def test_what_cannot_be_counted_is_not_sent(api: FakeApi, tmp_path: Path) -> None:
    retriever = open_web(api, tmp_path)
    retriever._state._connection.execute("DROP TABLE spending")
    with pytest.raises(SearchUnavailableError, match=r"cannot count a paid request in .*web.sqlite: no such table"):
        retriever.search(["a"], 1)
    assert api.received == []
    with pytest.raises(SearchUnavailableError, match="cannot read"):
        retriever.info()
    retriever.close()


def test_a_cache_that_cannot_be_read_is_not_paid_around(api: FakeApi, tmp_path: Path) -> None:
    retriever = open_web(api, tmp_path)
    retriever.search(["a"], 1)
    retriever._state._connection.execute("UPDATE answers SET body = x'00'")
    with pytest.raises(SearchUnavailableError, match="cannot read the cache in"):
        retriever.search(["a"], 1)
    assert len(api.received) == 1
    retriever.close()


def test_a_locked_file_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    state = WebState(path, 1)
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(state.spend, "serper", 1)
        assert not waiting.done()
        other.execute("COMMIT")
        assert waiting.result(10)
    other.close()
    state.close()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(SettingsError, match="cannot be opened"):
            WebState(tmp_path / "s.sqlite", 1)
    finally:
        tmp_path.chmod(0o700)
