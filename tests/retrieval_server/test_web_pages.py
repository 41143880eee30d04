"""Pages behind results: which are fetched, what becomes of them, and what they cannot make the server do."""

from __future__ import annotations

import gzip
import ipaddress
import logging
import random
import re
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_search_api import ENVIRONMENT, Behaviour, FakeApi, Received, drip, hang, reset, running_api, status, web_spec

from retrieval_server.backends.web import pages as pages_module
from retrieval_server.backends.web import retriever as retriever_module
from retrieval_server.backends.web.passages import best_window, extract_text
from retrieval_server.backends.web.retriever import WebRetriever
from retrieval_server.backends.web.transport import AddressRefusedError, TransferError, Transport, is_public
from retrieval_server.errors import SettingsError
from retrieval_server.types import Hit, LoadProgress

LOOPBACK = ipaddress.ip_address("127.0.0.1")
FILLER = "Nothing of note is said here at all. " * 60
PAGE = f"{FILLER}\n\nLake Orvel is the deepest lake of the north. It has an area of 12 km.\n\n{FILLER}"
SNIPPET = "... Lake Orvel is the deepest lake ..."


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeApi]:
    monkeypatch.setattr(retriever_module, "_require_trafilatura", lambda: None)  # the pages here are plain text
    with running_api() as api:
        yield api


def serve_pages(api: FakeApi, pages: dict[str, Behaviour | str], host: str = "pages.example") -> None:
    """Let the API find these paths, in this order, on a host that is the fake itself."""
    port = api.url.rpartition(":")[2]
    rows = [
        {"title": f"T{path}", "link": path if "://" in path else f"http://{host}:{port}{path}", "snippet": SNIPPET}
        for path in pages
    ]

    def respond(handler: Any) -> None:
        request: Received = handler.request_received
        page = pages.get(request.path, status(404))
        if request.method == "POST":
            handler.send(200, {"organic": rows})
        elif isinstance(page, str):
            handler.send(200, page.encode(), "text/plain; charset=utf-8")
        else:
            page(handler)

    api.always = respond


def open_pages(api: FakeApi, tmp_path: Path, public: bool = False, **options: Any) -> WebRetriever:
    """A retriever that may fetch from the loopback, or only from public addresses."""
    spec = web_spec(api, tmp_path, **{"fetch_pages": True, "page_chars": 200, "timeout_s": 1, **options})
    progress = LoadProgress()
    if public:
        return WebRetriever.load(spec, progress, ENVIRONMENT, page_resolver=lambda host, port: ["127.0.0.1"])
    return WebRetriever.load(
        spec, progress, ENVIRONMENT, lambda address: address == LOOPBACK, lambda host, port: ["127.0.0.1"]
    )


def fetched(api: FakeApi) -> list[str]:
    return [request.path for request in api.received if request.method == "GET"]


def texts(hits: list[list[Hit]]) -> list[str]:
    return [hit.document.text for hit in hits[0]]


def test_the_passage_that_the_snippet_is_from(api: FakeApi, tmp_path: Path) -> None:
    serve_pages(api, {"/a": PAGE})
    retriever = open_pages(api, tmp_path)
    [[hit]] = retriever.search(["how large is lake orvel"], 3)
    assert hit.document.text.startswith("Lake Orvel is the deepest lake of the north. It has an area of 12 km.")
    assert hit.document.contents == f'"T/a"\n{hit.document.text}'
    assert len(hit.document.text) <= 200
    assert hit.document.id == f"http://pages.example:{api.url.rpartition(':')[2]}/a"
    [request] = [request for request in api.received if request.method == "GET"]
    assert request.headers["user-agent"].startswith("chatr1-retrieval/")
    assert not any("key" in name or "auth" in name or "cookie" in name for name in request.headers)
    retriever.close()


def test_no_more_pages_than_documents_wanted_and_each_once(api: FakeApi, tmp_path: Path) -> None:
    serve_pages(api, {f"/{i}": PAGE for i in range(9)})
    retriever = open_pages(api, tmp_path)
    assert len(retriever.search(["q orvel", "another orvel"], 3)[1]) == 3
    assert sorted(fetched(api)) == ["/0", "/1", "/2"]
    retriever.search(["a third orvel"], 4)
    assert sorted(fetched(api)) == ["/0", "/1", "/2", "/3"]
    info = retriever.info()
    assert info["pages"]["fetched"] == 4
    assert (info["cache"]["pages"], info["spent"]) == (4, 3)  # pages cost nothing
    retriever.close()
    retriever = open_pages(api, tmp_path, page_chars=100)
    assert len(texts(retriever.search(["q orvel"], 4))[0]) <= 100  # cut anew from the page that is kept
    assert len(fetched(api)) == 4
    retriever.close()


def redirect(location: str, code: int = 302) -> Behaviour:
    return status(code, b"", Location=location)


def endless(handler: Any) -> None:
    """A body without an end."""
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n")
    while not handler.api.stopped.is_set():
        handler.wfile.write(b"orvel " * 10_000)


UNREADABLE: dict[str, Behaviour | str] = {
    "404": status(404, b"Lake Orvel", Content_Type="text/plain"),
    "500": status(500, b"Lake Orvel", Content_Type="text/plain"),
    "204": status(204, b"", Content_Type="text/plain"),
    "a PDF": status(200, b"%PDF Lake Orvel", Content_Type="application/pdf"),
    "JSON": status(200, b'"Lake Orvel"', Content_Type="application/json"),
    "no type": status(200, b"Lake Orvel", Content_Type=""),
    "hang": hang,
    "drip": drip,
    "reset": reset,
    "endless": endless,
    "bomb": status(200, gzip.compress(b"Lake Orvel " * 1_000_000), Content_Type="text/plain", Content_Encoding="gzip"),
    "a circle": redirect("/a"),
    "to a file": redirect("file:///etc/passwd"),
    "to nowhere": redirect("http://"),
    "nothing of it": "Quite another text about towns.",
    "empty": "",
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_the_snippet_stands_in(api: FakeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(pages_module, "_MAX_PAGE_BYTES", 1_000_000)
    pages: dict[str, Behaviour | str] = {"/a": UNREADABLE[name], "/good": PAGE}
    serve_pages(api, pages)
    retriever = open_pages(api, tmp_path, timeout_s=0.4)
    started = time.monotonic()
    bad, good = texts(retriever.search(["orvel"], 2))
    assert bad == SNIPPET
    assert good.startswith("Lake Orvel is the deepest")
    assert time.monotonic() - started < 4
    n_asked = len(fetched(api))
    assert n_asked == 2  # no page twice, not even when it redirects to itself
    retriever.search(["orvel again"], 2)  # what could not be read is not asked for again at once
    assert len(fetched(api)) == n_asked
    retriever.close()


def test_a_chain_of_redirects_ends(api: FakeApi, tmp_path: Path) -> None:
    hops: dict[str, Behaviour | str] = {f"/{i}": redirect(f"/{i + 1}", 301 + i % 2) for i in range(9)}
    serve_pages(api, {"/0": hops["/0"]})
    inner = api.always
    assert inner is not None

    def respond(handler: Any) -> None:
        path = handler.request_received.path
        hop = hops.get(path)
        if hop is None or isinstance(hop, str):
            inner(handler)
        else:
            hop(handler)

    api.always = lambda handler: inner(handler) if handler.request_received.method == "POST" else respond(handler)
    retriever = open_pages(api, tmp_path)
    assert texts(retriever.search(["orvel"], 1)) == [SNIPPET]
    assert fetched(api) == ["/0", "/1", "/2", "/3", "/4"]
    hops.update({"/3": status(200, PAGE.encode(), Content_Type="text/plain")})
    retriever._state._connection.execute("DELETE FROM pages")
    assert texts(retriever.search(["orvel"], 1))[0].startswith("Lake Orvel is")
    retriever.close()


# ---------------------------------------------------------------------------------------------------------------------
# Addresses inside

INSIDE = [
    "127.0.0.1", "127.8.8.8", "0.0.0.0", "10.0.0.1", "172.16.5.5", "192.168.1.1", "169.254.169.254", "100.64.0.1",
    "192.0.2.1", "198.18.0.1", "224.0.0.1", "240.0.0.1", "255.255.255.255",
    "::1", "::", "fe80::1", "fc00::1", "fd12:3456::1", "ff02::1", "2001:db8::1",
    "::ffff:127.0.0.1", "::ffff:10.0.0.1", "2002:7f00:1::", "2002:a00:1::1", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe",
    "2001:0:4136:e378:8000:63bf:80ff:fffe",
]  # fmt: skip
OUTSIDE = ["1.1.1.1", "8.8.8.8", "93.184.216.34", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"]


@pytest.mark.parametrize("address", INSIDE)
def test_addresses_inside(address: str) -> None:
    assert not is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize("address", OUTSIDE)
def test_addresses_outside(address: str) -> None:
    assert is_public(ipaddress.ip_address(address))


def test_a_page_inside_is_never_fetched(api: FakeApi, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    port = api.url.rpartition(":")[2]
    hosts = ("127.0.0.1", "localhost", "[::1]", "0x7f.1", "2130706433", "rebind.example")
    urls = [f"http://{host}:{port}/x" for host in hosts]
    serve_pages(api, dict.fromkeys(urls, PAGE))
    retriever = open_pages(api, tmp_path, public=True)
    assert texts(retriever.search(["orvel"], 10)) == [SNIPPET] * len(urls)
    assert fetched(api) == []
    assert sum("is not on the public internet" in record.getMessage() for record in caplog.records) == len(urls)
    retriever.close()


def test_the_real_resolver_is_checked_too() -> None:
    transport = Transport(is_public)
    for host in ("localhost", "127.0.0.1", "[::1]", "0x7f.1", "2130706433", "0"):
        with pytest.raises(AddressRefusedError, match="is not on the public internet"):
            transport.exchange("GET", f"http://{host}/", {}, None, 5, 1000)
    transport.close()


def test_a_redirect_leads_nowhere_inside(api: FakeApi, tmp_path: Path) -> None:
    port = api.url.rpartition(":")[2]
    serve_pages(api, {"/out": redirect(f"http://inside.example:{port}/secret"), "/secret": PAGE})
    places = {"pages.example": "127.0.0.1", "inside.example": "127.0.0.2"}
    spec = web_spec(api, tmp_path, fetch_pages=True)
    retriever = WebRetriever.load(
        spec, LoadProgress(), ENVIRONMENT, lambda address: address == LOOPBACK, lambda host, port: [places[host]]
    )
    assert texts(retriever.search(["orvel"], 1)) == [SNIPPET]
    assert fetched(api) == ["/out"]
    retriever.close()


def test_the_address_that_was_checked_is_the_one_connected_to(api: FakeApi) -> None:
    """A name that resolves to something harmless first and to something inside later (DNS rebinding)."""
    serve_pages(api, {"/a": PAGE})
    port = int(api.url.rpartition(":")[2])
    asked: list[str] = []

    def resolver(host: str, port: int) -> list[str]:
        asked.append(host)
        return ["127.0.0.1"] if len(asked) == 1 else ["127.0.0.2"]

    transport = Transport(lambda address: address == LOOPBACK, resolver)
    assert transport.exchange("GET", f"http://rebind.example:{port}/a", {}, None, 5, 100_000).status == 200
    assert asked == ["rebind.example"]
    transport.close()
    transport = Transport(lambda address: address == LOOPBACK, resolver)
    with pytest.raises(AddressRefusedError):
        transport.exchange("GET", f"http://rebind.example:{port}/a", {}, None, 5, 100_000)
    transport.close()


def test_a_dead_address_among_several_does_not_use_up_the_time(api: FakeApi) -> None:
    serve_pages(api, {"/a": PAGE})
    port = int(api.url.rpartition(":")[2])
    transport = Transport(lambda address: True, lambda host, port: ["127.0.0.9", "127.0.0.1"])  # nobody is at the first
    assert transport.exchange("GET", f"http://two.example:{port}/a", {}, None, 5, 100_000).status == 200
    transport.close()


def test_only_the_allowed_address_of_a_mixed_name_is_used(api: FakeApi) -> None:
    serve_pages(api, {"/a": PAGE})
    port = int(api.url.rpartition(":")[2])
    transport = Transport(lambda address: address == LOOPBACK, lambda host, port: ["10.255.255.1", "127.0.0.1"])
    assert transport.exchange("GET", f"http://mixed.example:{port}/a", {}, None, 1, 100_000).status == 200
    transport.close()


def test_a_bomb_is_not_unpacked_beyond_the_limit(api: FakeApi) -> None:
    serve_pages(api, {"/a": status(200, gzip.compress(b"a" * 100_000_000), Content_Encoding="gzip")})
    transport = Transport(lambda address: True)
    tracemalloc.start()
    try:
        with pytest.raises(TransferError, match="larger than 1000000 bytes"):
            transport.exchange("GET", f"{api.url}/a", {}, None, 5, 1_000_000)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        transport.close()
    assert peak < 10_000_000


# ---------------------------------------------------------------------------------------------------------------------
# Windows


def test_a_short_text_is_taken_whole() -> None:
    assert best_window("  Lake Orvel is deep. \n", "orvel", "", 100) == "Lake Orvel is deep."
    assert best_window("Lake Orvel is deep.", "quantum", "physics", 100) == ""
    assert best_window("", "a", "b", 100) == ""


def test_rare_words_decide() -> None:
    common = "The town has a river. " * 30
    text = common + "The kingfisher of the town is blue. " + common
    assert "kingfisher" in best_window(text, "the town has a kingfisher", "", 150)


def test_the_query_decides_between_two_places_of_the_snippet() -> None:
    text = f"The lake freezes. {FILLER} The lake is blue. {FILLER}"
    assert best_window(text, "The lake", "blue?", 120).startswith("The lake is blue.")
    assert best_window(text, "The lake", "freezes", 120).startswith("The lake freezes.")


def test_windows_begin_and_end_with_sentences() -> None:
    text = f"{FILLER}\nOn the far side, in winter, the heron stands. It waits there. {FILLER}"
    window = best_window(text, "heron stands", "", 120)
    assert window.startswith("On the far side")
    assert window.endswith(".")


def brute_force(text: str, snippet: str, query: str, size: int) -> float:
    """The most weight that any stretch of at most ``size`` characters holds, by trying all pairs of words."""
    spans = [(m.group().lower(), m.start(), m.end()) for m in re.finditer(r"\w+", text)]
    wanted = [set(re.findall(r"\w+", source.lower())) for source in (snippet, query)]
    words = [word for word, _, _ in spans]
    weight = {w: sum(w in source for source in wanted) / words.count(w) ** 0.5 for w in set(words)}
    best = 0.0
    for i, (_, start, _) in enumerate(spans):
        inside = {word for word, _, end in spans[i:] if end - start <= size}
        best = max(best, sum(weight[word] for word in inside))
    return best


def test_no_stretch_of_the_text_is_better() -> None:
    draw = random.Random(3)
    vocabulary = [f"w{i}" for i in range(12)]
    for _ in range(150):
        text = "".join(word + draw.choice([" ", " ", " ", ". ", "\n"]) for word in draw.choices(vocabulary, k=40))
        snippet, query = " ".join(draw.sample(vocabulary, 4)), " ".join(draw.sample(vocabulary, 2))
        window = best_window(text, snippet, query, 60)
        assert len(window) <= 60
        assert window in text
        found = brute_force(text, snippet, query, 60)
        # The same measure of what was returned, with the frequencies of the whole text.
        words, wanted = re.findall(r"\w+", text), [set(snippet.split()), set(query.split())]
        kept = set(re.findall(r"\w+", window)) & set(words)
        held = sum(sum(word in source for source in wanted) / words.count(word) ** 0.5 for word in kept)
        assert held >= found - 1e-9, (text, snippet, query, window)


# ---------------------------------------------------------------------------------------------------------------------
# HTML


HTML = """<html><head><title>T</title><script>var secret = "script";</script></head><body>
<nav><ul><li><a href="/">Home</a></li><li><a href="/x">Imprint</a></li></ul></nav>
<article><h1>Lake Orvel</h1>
<p>Lake Orvel is the deepest lake of the north, and many travellers come to see it in the summer months.</p>
<p>It has an area of 12 square kilometres. The fishing season begins in May and ends in the first week of October.</p>
</article><footer>Copyright, all rights reserved, cookie settings</footer></body></html>"""


def test_the_main_text_of_a_page() -> None:
    pytest.importorskip("trafilatura", exc_type=ImportError)
    text = extract_text(HTML.encode(), "text/html; charset=utf-8")
    assert "deepest lake of the north" in text
    assert "12 square kilometres" in text
    assert not any(word in text for word in ("script", "Imprint", "cookie"))
    assert "Lake Örvel is" in extract_text(
        HTML.replace("Orvel", "Örvel").encode("latin-1"), "text/html; charset=latin-1"
    )
    assert "Lake Örvel is" in extract_text(HTML.replace("Orvel", "Örvel").encode(), "text/html")
    assert extract_text("Örvel".encode("latin-1"), 'text/plain; charset="iso-8859-1"') == "Örvel"
    assert extract_text(b"orvel \xff", "text/plain; charset=no-such") == "orvel \ufffd"
    for broken in (b"", b"<", b"\x00\xff\xfe" * 100, b"<p>" * 20_000, HTML.encode()[:300]):
        assert isinstance(extract_text(broken, "text/html"), str)


def test_html_pages_become_passages(api: FakeApi, tmp_path: Path) -> None:
    pytest.importorskip("trafilatura", exc_type=ImportError)
    serve_pages(api, {"/a": status(200, HTML.encode(), Content_Type="text/html")})
    retriever = open_pages(api, tmp_path, page_chars=2000)
    assert "12 square kilometres" in texts(retriever.search(["how large is orvel"], 1))[0]
    retriever.close()


def test_a_page_that_breaks_the_parser_costs_only_itself(
    api: FakeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def extract(body: bytes, kind: str) -> str:
        raise RecursionError("deep")

    monkeypatch.setattr(pages_module, "extract_text", extract)
    serve_pages(api, {"/a": PAGE})
    retriever = open_pages(api, tmp_path)
    assert texts(retriever.search(["orvel"], 1)) == [SNIPPET]
    assert "cannot be read (RecursionError: deep)" in caplog.text
    retriever.close()


def test_the_missing_library_is_named_at_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "trafilatura", None)
    with pytest.raises(SettingsError, match=r"fetch_pages needs trafilatura \(.*\): pip install 'chatr1\[web\]'"):
        WebRetriever.load(web_spec(None, tmp_path, fetch_pages=True), LoadProgress(), ENVIRONMENT)
