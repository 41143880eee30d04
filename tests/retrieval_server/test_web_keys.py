"""API keys: required at load, sent to the provider, and found nowhere else whatever goes wrong."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus

import httpx
import pytest
from fake_search_api import (
    CSE_ID,
    ENVIRONMENT,
    KEY,
    PAGED,
    Behaviour,
    FakeApi,
    cut_short,
    hang,
    open_web,
    raw,
    reset,
    running_api,
    status,
    web_spec,
)

from retrieval_server.app import create_app
from retrieval_server.backends import load
from retrieval_server.backends.web import pacing
from retrieval_server.backends.web.credentials import Credentials
from retrieval_server.errors import SearchUnavailableError, SettingsError
from retrieval_server.settings import Settings
from retrieval_server.types import LoadProgress

VARIABLES = {
    "serper": ["SERPER_API_KEY"],
    "serpapi": ["SERPAPI_API_KEY"],
    "google": ["GOOGLE_API_KEY", "GOOGLE_CSE_ID"],
    "brave": ["BRAVE_API_KEY"],
    "tavily": ["TAVILY_API_KEY"],
}


def spellings(provider: str) -> set[str]:
    secrets = (KEY, CSE_ID) if provider == "google" else (KEY,)
    return {form(secret) for secret in secrets for form in (str, quote, quote_plus, lambda s: quote(s, safe=""))}


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeApi]:
    monkeypatch.setattr(pacing, "_BACKOFF_S", 0.001)
    with running_api() as api:
        yield api


@pytest.mark.parametrize("provider", PAGED)
def test_a_missing_key_is_named_at_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, provider: str) -> None:
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    names = VARIABLES[provider]
    spec = web_spec(None, tmp_path, provider)
    wanted = f"the environment has no {' and no '.join(names)}: export it before the server starts"
    with pytest.raises(SettingsError, match=f"^{wanted}$"):
        load(spec, LoadProgress())
    for name in names:
        monkeypatch.setenv(name, " \n")
    with pytest.raises(SettingsError, match=names[-1]):
        load(spec, LoadProgress())
    assert not spec.state_path.exists()  # refused before anything was made
    for name in names:
        monkeypatch.setenv(name, f" {KEY}\n")  # as read from a file
    retriever = load(spec, LoadProgress())
    retriever.close()


@pytest.mark.parametrize("value", ["two words", "kéy-of-letters", "line\nbreak", "tab\tkey", "null\0key"])
def test_a_key_that_no_header_can_carry_is_not_quoted(value: str) -> None:
    with pytest.raises(SettingsError, match="SERPER_API_KEY holds characters that no key has") as caught:
        Credentials.from_environment(["SERPER_API_KEY"], {"SERPER_API_KEY": value})
    assert value not in str(caught.value)


def test_credentials_do_not_show_themselves() -> None:
    credentials = Credentials([KEY])
    assert KEY not in f"{credentials!r} {credentials}"
    echoed = f"{KEY} {quote(KEY, safe='')} {quote_plus(KEY)} rest".encode()
    assert credentials.redact(echoed) == b"*** *** *** rest"
    assert Credentials(["ab"]).redact(b"abab") == b"abab"  # too short to be a key; cutting it out would garble texts


def echo(code: int) -> Behaviour:
    """Repeat everything that identifies the caller, in every place there is."""
    return lambda handler: handler.send(
        code,
        {"error": f"bad key {KEY} of {CSE_ID}", "message": f"{quote(KEY, safe='')} {quote_plus(KEY)}"},
        X_Echo=KEY,
        Location=f"https://elsewhere.example/?api_key={quote(KEY, safe='')}",
        Retry_After="0",
    )


def echo_in_results(handler: Any) -> None:
    """Repeat the key in the middle of results, as a page about somebody's leaked key would."""
    row = {"title": f"T {KEY}", "snippet": f"S {KEY} {CSE_ID}", "content": f"S {KEY}", "description": f"S {KEY}"}
    row |= {"link": f"https://a.example/?k={quote(KEY, safe='')}", "url": f"https://a.example/?k={quote_plus(KEY)}"}
    rows = [row]
    handler.send(
        200, {"organic": rows, "organic_results": rows, "items": rows, "web": {"results": rows}, "results": rows}
    )


FAULTS: dict[str, Behaviour] = {
    **{str(code): echo(code) for code in (200, 302, 400, 401, 403, 404, 422, 429, 432, 500, 503)},
    "results": echo_in_results,
    "echo in HTML": raw(f"<html>{KEY}</html>".encode(), f"text/html; key={KEY}"),
    "echo in a broken header": lambda handler: handler.wfile.write(f"HTTP/1.1 200 OK\r\n{KEY}\r\n\r\n".encode()),
    "echo in the status line": lambda handler: handler.wfile.write(f"HTTP/9 {KEY}\r\n\r\n".encode()),
    "echo in the encoding": status(200, b"{}", Content_Encoding=KEY),
    "hang": hang,
    "cut short": cut_short,
    "reset": reset,
}


def leaks(text: str, provider: str) -> list[str]:
    """What stands around each key that is found."""
    places = [text.find(spelling) for spelling in spellings(provider)]
    return [text[max(0, place - 200) : place + 50] for place in places if place >= 0]


@pytest.mark.parametrize("provider", PAGED)
async def test_no_key_is_written_anywhere(
    api: FakeApi,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    provider: str,
) -> None:
    """Every fault, through the whole server with every log at its most talkative, then a search for the key."""
    caplog.set_level(logging.DEBUG)
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    said: list[str] = []
    retriever = open_web(api, tmp_path, provider, retries=1, timeout_s=0.3)
    app = create_app(retriever, Settings(access_log=True))
    transport = httpx.ASGITransport(app)
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://s") as client:
        for name, fault in {**FAULTS, "good": None}.items():
            api.always = fault
            retriever._api._closed_until = 0.0
            said.append(repr(retriever.__dict__) + repr(retriever._api.__dict__))
            response = await client.post("/retrieve", json={"queries": [f"query {name}"], "return_scores": True})
            said += [response.text, str(response.headers)]
            assert response.status_code in (200, 503), (name, response.text)
            retriever._api._closed_until = 0.0
            try:
                retriever.search([f"another {name}"], 25)
            except SearchUnavailableError as error:
                # With the values of all variables in all frames: what the most talkative crash reporter would send.
                said += traceback.format_exception(error)
                for outcome in getattr(error, "outcomes", []):
                    if isinstance(outcome, Exception):
                        trace = traceback.TracebackException.from_exception(outcome, capture_locals=True)
                        said += [frame for frame in trace.format() if "test_web_keys" not in frame]
        for path in ("/info", "/metrics", "/readyz"):
            said.append((await client.get(path)).text)
    assert len(api.received) > 2 * len(FAULTS)
    sent = "".join(f"{request.params}{request.headers}" for request in api.received)
    assert KEY in sent  # the search below looks for what was really there
    said += [record.getMessage() + str(record.exc_text) + repr(record.args) for record in caplog.records]
    said += [*capfd.readouterr()]
    files = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert len(files) > 1000
    assert leaks("\n".join(said), provider) == []
    assert leaks(files.decode("latin-1"), provider) == []


def test_kept_answers_hold_no_key_in_plain_text(api: FakeApi, tmp_path: Path) -> None:
    """The cache is compressed, so its texts are looked at after unpacking."""
    api.always = echo_in_results
    for provider in PAGED:
        retriever = open_web(api, tmp_path, provider, state_path=tmp_path / provider)
        [hits] = retriever.search(["q"], 1)
        assert hits[0].document.title == "T ***"
        rows = retriever._state._connection.execute("SELECT key FROM answers").fetchall()
        assert rows
        for (key,) in rows:
            assert leaks(key + str(retriever._state.answer(key)), provider) == []
        retriever.close()
