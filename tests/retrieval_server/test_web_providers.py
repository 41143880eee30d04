"""Each search API: what it is sent, how its answer is read, and how pages make a list of k."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_search_api import CSE_ID, KEY, PAGED, FakeApi, entry, ids, open_web, raw, running_api
from hypothesis import given
from hypothesis import strategies as st

from retrieval_server.backends.web.providers import PROVIDERS, Brave, GoogleCse, SerpApi, Serper, Tavily
from retrieval_server.backends.web.results import canonical_url, clean
from retrieval_server.corpus import split_contents
from retrieval_server.errors import SettingsError


@pytest.fixture
def api() -> Iterator[FakeApi]:
    with running_api() as api:
        yield api


def expected(query: str, n: int) -> list[str]:
    return [entry(query, i)[1] for i in range(n)]


@pytest.mark.parametrize("provider", PAGED)
def test_results_become_documents(api: FakeApi, tmp_path: Path, provider: str) -> None:
    retriever = open_web(api, tmp_path, provider)
    hits, other = retriever.search(["who wrote it", "zürich"], 3)
    assert ids([hits, other]) == [expected("who wrote it", 3), expected("zürich", 3)]
    title, url, snippet = entry("who wrote it", 0)
    assert hits[0].document.contents == f'"{title}"\n{snippet}'
    assert json.loads(hits[0].document.encoded) == {
        "id": url, "contents": hits[0].document.contents, "title": title, "text": snippet,
    }  # fmt: skip
    assert split_contents(hits[0].document.contents) == (title, snippet)
    assert [hit.score for hit in hits] == [1, 1 / 2, 1 / 3]
    retriever.close()


EXPECTED_REQUESTS: dict[str, dict[str, Any]] = {
    "serper": {"path": "/search", "body": {"q": "a b", "num": 10, "page": 1, "gl": "de", "hl": "en"}},
    "serpapi": {"path": "/search", "params": {"engine": "google", "q": "a b", "gl": "de", "hl": "en", "api_key": KEY}},
    "google": {
        "path": "/customsearch/v1",
        "params": {"q": "a b", "num": "10", "start": "1", "gl": "de", "hl": "en", "cx": CSE_ID},
    },
    "brave": {
        "path": "/res/v1/web/search",
        "params": {
            "q": "a b", "count": "20", "offset": "0", "country": "DE", "search_lang": "en", "text_decorations": "false"
        },
    },
    "tavily": {
        "path": "/search",
        "body": {"query": "a b", "max_results": 20, "search_depth": "basic", "country": "germany"},
    },
}  # fmt: skip


@pytest.mark.parametrize("provider", PAGED)
def test_requests_are_in_the_documented_form(api: FakeApi, tmp_path: Path, provider: str) -> None:
    retriever = open_web(api, tmp_path, provider, country="de")
    retriever.search(["  a \t b "], 2)
    [request] = api.received
    form = {"params": {}, "body": None, **EXPECTED_REQUESTS[provider]}
    assert {"path": request.path, "params": request.params, "body": request.body} == form
    assert request.method == ("POST" if form["body"] else "GET")
    assert request.headers["user-agent"].startswith("chatr1-retrieval/")
    retriever.close()


@pytest.mark.parametrize("provider", PAGED)
def test_a_smaller_k_is_a_prefix_and_costs_nothing_more(api: FakeApi, tmp_path: Path, provider: str) -> None:
    retriever = open_web(api, tmp_path, provider)
    size, limit = PAGED[provider], 20 if provider == "tavily" else 30
    for k, n_requests in ((1, 1), (size, 1), (25, -(-25 // size)), (3, -(-25 // size)), (1000, -(-30 // size))):
        wanted = min(k, limit)
        assert ids(retriever.search(["q"], k)) == [expected("q", wanted)], k
        extra = 1 if provider == "serper" and k == 1000 else 0  # only an empty page tells that it was the last
        assert len(api.received) == (1 if provider == "tavily" else n_requests + extra), k
    retriever.close()


def test_the_last_page_ends_the_list(api: FakeApi, tmp_path: Path) -> None:
    api.total = 7
    for provider in PAGED:
        retriever = open_web(api, tmp_path, provider)
        assert ids(retriever.search(["q"], 20)) == [expected("q", 7)]
        retriever.close()
    assert len(api.received) == 6  # two of serper


def test_pages_have_a_limit() -> None:
    n_requests = {name: len(provider("en", "us").requests("q", 1000)) for name, provider in PROVIDERS.items()}
    assert n_requests == {"serper": 10, "serpapi": 10, "google": 10, "brave": 10, "tavily": 1}
    starts = [request.params["start"] for request in GoogleCse("en", "us").requests("q", 1000)]
    assert starts[-1] == 91  # Google refuses what goes beyond result 100
    assert [request.params.get("start") for request in SerpApi("en", "us").requests("q", 30)] == [None, 10, 20]


def test_long_queries_keep_their_end() -> None:
    words = [f"w{i}" for i in range(300)]
    asked = Brave("en", "us").requests(" ".join(words), 1)[0].params["q"]
    assert asked == " ".join(words[-50:])
    assert len(str(Brave("en", "us").requests("x" * 1000, 1)[0].params["q"])) == 400
    body = Tavily("en", "us").requests(" ".join(words), 1)[0].body
    assert body is not None
    assert len(str(body["query"])) <= 400
    assert str(body["query"]).endswith("w299")


def test_tavily_refuses_what_it_has_no_parameter_for() -> None:
    with pytest.raises(SettingsError, match="language is 'de', but tavily has no such parameter"):
        Tavily("de", "us")
    with pytest.raises(SettingsError, match="country 'xx' has no name that tavily is known to take; known: au"):
        Tavily("en", "xx")


# ---------------------------------------------------------------------------------------------------------------------
# SerpAPI's boxes

BOX = {"type": "organic_result", "title": "Box", "link": "https://box.example/", "snippet": "Boxed answer."}
ORGANIC = [{"title": f"O{i}", "link": f"https://o{i}.example/", "snippet": f"Organic {i}."} for i in range(3)]
RELATED = [{"question": f"R{i}?", "link": f"https://r{i}.example/", "snippet": f"Related {i}."} for i in range(2)]
SUCCESS = {"search_metadata": {"status": "Success"}}


def serpapi_titles(api: FakeApi, tmp_path: Path, answer: dict[str, Any], k: int) -> list[str]:
    api.answer = lambda request: {**SUCCESS, **answer}
    retriever = open_web(api, tmp_path, "serpapi", cache_days=0)
    [hits] = retriever.search(["q"], k)
    retriever.close()
    return [hit.document.title for hit in hits]


def test_the_answer_box_comes_first_and_related_questions_last_within_k(api: FakeApi, tmp_path: Path) -> None:
    answer = {"answer_box": BOX, "organic_results": ORGANIC, "related_questions": RELATED}
    published = ["Box", "O0", "O1", "O2", "R0?", "R1?"]
    for k in range(1, 9):
        assert serpapi_titles(api, tmp_path, answer, k) == published[:k]


@pytest.mark.parametrize(
    ("box", "document"),
    [
        ({"title": "T", "answer": "42"}, '"T"\n42'),
        ({"answer": "42"}, '"untitled"\n42'),
        ({"type": "calculator_result", "result": "42"}, '"untitled"\n42'),
        ({"title": "T", "snippet": " ", "result": "42", "link": "https://x.example/a"}, '"T"\n42'),
        ({"title": "T"}, None),
        ({}, None),
        ([BOX], None),
        ("text", None),
        (None, None),
    ],
)
def test_forms_of_an_answer_box(api: FakeApi, tmp_path: Path, box: Any, document: str | None) -> None:
    api.answer = lambda request: {**SUCCESS, "answer_box": box, "organic_results": ORGANIC}
    retriever = open_web(api, tmp_path, "serpapi")
    [hits] = retriever.search(["q"], 4)
    contents = [hit.document.contents for hit in hits]
    organic = [f'"O{i}"\nOrganic {i}.' for i in range(3)]
    assert contents == ([document, *organic] if document else organic)
    retriever.close()


def test_a_box_that_repeats_a_result_is_shown_once(api: FakeApi, tmp_path: Path) -> None:
    answer = {"answer_box": {**BOX, "link": "https://o1.example/#part"}, "organic_results": ORGANIC}
    assert serpapi_titles(api, tmp_path, answer, 10) == ["Box", "O0", "O2"]


def test_no_results_are_no_failure(api: FakeApi, tmp_path: Path) -> None:
    api.answer = lambda request: {**SUCCESS, "error": "Google hasn't returned any results for this query."}
    retriever = open_web(api, tmp_path, "serpapi")
    assert retriever.search(["q"], 3) == [[]]
    assert retriever.search(["q"], 3) == [[]]
    assert len(api.received) == 1  # and kept
    retriever.close()


# ---------------------------------------------------------------------------------------------------------------------
# Answers in which something is missing or wrong

ODD_ENTRIES: list[tuple[dict[str, Any], tuple[str, str] | None]] = [
    ({"link": "https://a.example/x", "snippet": "S"}, ("https://a.example/x", '"a.example"\nS')),
    ({"title": "T", "link": "https://b.example", "snippet": "S"}, ("https://b.example/", '"T"\nS')),
    ({"title": "T", "link": "https://c.example/"}, None),  # nothing to read
    ({"title": "T", "link": "https://c2.example/", "snippet": None}, None),
    ({"title": None, "link": None, "snippet": None}, None),
    ({"title": 3, "link": ["x"], "snippet": {"a": 1}}, None),
    ({"title": "<b>T</b> &amp;\n U", "link": "https://d.example/", "snippet": "1 < 2 &#x27;x&#x27; <strong>S</strong>"},
     ("https://d.example/", "\"T & U\"\n1 < 2 'x' S")),
    ({"title": "T", "link": "javascript:alert(1)", "snippet": "no address"}, ("", '"T"\nno address')),
    ({"title": "T", "link": "https://[bad", "snippet": "bad address"}, ("", '"T"\nbad address')),
    ({"title": "\ud800 x", "link": "https://e.example/", "snippet": "\x00 lone \udc00"},
     ("https://e.example/", '"? x"\nlone ?')),
    ({"title": "T", "link": "https://user:pw@f.example:443/?utm_source=x&id=1#top", "snippet": "S"},
     ("https://f.example/?id=1", '"T"\nS')),
]  # fmt: skip


@pytest.mark.parametrize(("given_entry", "document"), ODD_ENTRIES)
def test_odd_entries(
    api: FakeApi, tmp_path: Path, given_entry: dict[str, Any], document: tuple[str, str] | None
) -> None:
    good = {"title": "Good", "link": "https://good.example/", "snippet": "Good."}
    api.answer = lambda request: {"organic": [given_entry, "text", None, 5, good]}
    retriever = open_web(api, tmp_path)
    [hits] = retriever.search(["q"], 1000)
    found = [(hit.document.id, hit.document.contents) for hit in hits]
    assert found[-1] == ("https://good.example/", '"Good"\nGood.')
    if document is None:
        assert len(found) == 1
    else:
        identifier, contents = document
        assert found[0][1] == contents
        assert found[0][0] == identifier or (not identifier and found[0][0].startswith("sha256:"))
    retriever.close()


@pytest.mark.parametrize("organic", [{}, "text", 5, [[]], [None], {"a": 1}, [], None])
@pytest.mark.parametrize("provider", [Serper, SerpApi, GoogleCse, Brave, Tavily])
def test_malformed_lists_are_empty(provider: Any, organic: Any) -> None:
    parsed = provider("en", "us").parse(
        {"organic": organic, "organic_results": organic, "related_questions": organic, "items": organic, "web": organic,
         "results": organic, "answer_box": organic, "queries": organic, "query": organic, "serpapi_pagination": organic}
    )  # fmt: skip
    assert (parsed.results, parsed.lead, parsed.tail, parsed.more) == ((), (), (), False)


FIELDS = (
    "organic", "organic_results", "items", "web", "results", "answer_box", "queries", "query", "related_questions",
    "serpapi_pagination", "error", "message", "search_metadata", "nextPage",
)  # fmt: skip
INNER = ("title", "link", "url", "snippet", "description", "content", "question", "answer", "next", "message")


def nonsense(draw: random.Random, depth: int) -> Any:
    """A JSON value in which the right names hold values of any type."""
    kind = draw.choice("sllooo" if depth > 2 else "sssslo") if depth else "s"
    if kind == "l":
        return [nonsense(draw, depth - 1) for _ in range(draw.randrange(4))]
    if kind == "o":
        return {
            draw.choice(INNER if depth < 4 else FIELDS): nonsense(draw, depth - 1) for _ in range(draw.randrange(9))
        }
    return draw.choice([None, True, 7, float("nan"), "", "text", "text", "https://a.example", "\ud800"])


def test_no_answer_breaks_a_reader() -> None:
    draw, found = random.Random(1), 0
    for _ in range(1500):
        answer = {name: nonsense(draw, 4) for name in draw.sample(FIELDS, 6)}
        for provider in PROVIDERS.values():
            reader = provider("en", "us")
            parsed = reader.parse(answer)
            assert isinstance(reader.error_of(answer), str)
            results = (*parsed.results, *parsed.lead, *parsed.tail)
            assert all(result.title or result.snippet for result in results)
            found += len(results)
    assert found > 100  # nonsense, but not so much that nothing is ever read


@pytest.mark.parametrize("body", [b"[]", b"null", b'"x"', b"3", b'{"organic": ' + b"[" * 100_000, b"\xff\xfe{}"])
def test_answers_that_are_no_object(api: FakeApi, tmp_path: Path, body: bytes) -> None:
    api.script.append(raw(body))
    retriever = open_web(api, tmp_path, retries=1)
    assert ids(retriever.search(["q"], 1)) == [expected("q", 1)]
    assert len(api.received) == 2
    retriever.close()


# ---------------------------------------------------------------------------------------------------------------------
# Addresses and texts


@pytest.mark.parametrize(
    ("given_url", "canonical"),
    [
        ("HTTP://Example.ORG:80/A?b=C&a=1#x", "http://example.org/A?b=C&a=1"),
        ("https://example.org:443", "https://example.org/"),
        ("https://example.org:8443/x", "https://example.org:8443/x"),
        ("http://user:secret@example.org/", "http://example.org/"),
        ("https://example.org/?fbclid=1&q=a%20b&UTM_medium=z", "https://example.org/?q=a+b"),
        ("https://example.org/?q=a%20b", "https://example.org/?q=a%20b"),
        ("https://example.org/a b", "https://example.org/a%20b"),
        ("https://example.org./", "https://example.org/"),
        ("http://[2001:DB8::1]:80/x", "http://[2001:db8::1]/x"),
        ("https://zürich.example/ü", "https://zürich.example/ü"),
        ("http://example.org?\U00018cd6", "http://example.org/"),
        ("http://example.org/\U00018cd6?a b", "http://example.org/?a%20b"),
        ("ftp://example.org/", ""),
        ("file:///etc/passwd", ""),
        ("//example.org/", ""),
        ("http://", ""),
        ("http://example.org:99999/", ""),
        ("http://exa mple.org/", ""),
        ("", ""),
        (None, ""),
        (7, ""),
    ],
)
def test_canonical_addresses(given_url: Any, canonical: str) -> None:
    assert canonical_url(given_url) == canonical


@given(url=st.text(max_size=60) | st.from_regex(r"https?://[a-z.]{1,9}(:\d{1,5})?/[^\s]{0,20}", fullmatch=True))
def test_a_canonical_address_stays_as_it_is(url: str) -> None:
    once = canonical_url(url)
    assert canonical_url(once) == once


@given(text=st.text(st.characters(codec=None), max_size=40))
def test_clean_text_is_one_line_of_valid_unicode(text: str) -> None:
    cleaned = clean(text)
    cleaned.encode("utf-8")
    assert cleaned == " ".join(cleaned.split())
    assert cleaned.isprintable()
