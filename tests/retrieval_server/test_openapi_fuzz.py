"""The service does what its OpenAPI description says, whatever is sent; and never answers with a wrong document."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import requests
import schemathesis
from hypothesis import strategies
from live_server import Live, live
from retrieval_helpers import ScriptedRetriever, open_index
from schemathesis import GenerationMode
from schemathesis.core.failures import FailureGroup
from schemathesis.specs.openapi.checks import negative_data_rejection

from retrieval_server.app import create_app
from retrieval_server.settings import Settings
from retrieval_server.types import Retriever

TOPK = 2
SETTINGS: dict[str, Any] = {"topk": TOPK, "max_queries": 20}  # few, so that too many are generated quickly


@pytest.fixture(scope="module")
def server(built: tuple[Path, Path]) -> Iterator[Live]:
    with live(open_index(*built), **SETTINGS) as server:
        yield server


@pytest.fixture(scope="module")
def oracle(built: tuple[Path, Path]) -> Retriever:
    return open_index(*built)


def described(path: str, method: str) -> Any:
    app = create_app(ScriptedRetriever({}), Settings(**SETTINGS))
    return schemathesis.openapi.from_dict(app.openapi())[path][method]


def cases(path: str, method: str) -> strategies.SearchStrategy[Any]:
    operation = described(path, method)
    return strategies.one_of(
        operation.as_strategy(generation_mode=GenerationMode.POSITIVE),
        operation.as_strategy(generation_mode=GenerationMode.NEGATIVE),
    )


def fuzz(server: Live, oracle: Retriever, path: str, method: str, n: int) -> Counter[int]:
    """Send n generated requests; return how often each status came."""
    statuses: Counter[int] = Counter()
    with requests.Session() as session:

        @hypothesis.settings(
            max_examples=n,
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=list(hypothesis.HealthCheck),
            phases=[hypothesis.Phase.generate],
        )
        @hypothesis.given(case=cases(path, method))
        def send(case: Any) -> None:
            # Text that is a number is understood, as in the published server: not every departure is refused.
            response = case.call_and_validate(
                base_url=server.url, session=session, excluded_checks=[negative_data_rejection]
            )
            statuses[response.status_code] += 1
            assert response.headers["x-request-id"]
            if path == "/retrieve" and response.status_code == 200:
                assert_right(json.loads(response.request.body), response.json()["result"], oracle)

        send()
        healthy = session.post(f"{server.url}/retrieve", json={"queries": ["festival"]}).json()
    assert [found["id"] for found in healthy["result"][0]] == ["town:2"]
    return statuses


def assert_right(asked: Any, result: list[Any], oracle: Retriever) -> None:
    """Assert that the answer is what the index itself finds."""
    queries = asked["queries"]
    assert all(isinstance(query, str) for query in queries)
    k = int(asked.get("topk") or 0) or TOPK
    expected = [oracle.search([query], k)[0] if query.strip() else [] for query in queries]
    found = [[hit.get("document", hit)["id"] for hit in hits] for hits in result]
    assert found == [[hit.document.id for hit in hits] for hits in expected]


def test_a_few_hundred_generated_requests(server: Live, oracle: Retriever) -> None:
    statuses = fuzz(server, oracle, "/retrieve", "POST", 200)
    assert {200, 422} <= set(statuses) <= {200, 413, 422}
    assert min(statuses[200], statuses[422]) > 30


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/info", "/metrics"])
def test_the_other_routes_are_as_described(server: Live, oracle: Retriever, path: str) -> None:
    assert set(fuzz(server, oracle, path, "GET", 10)) == {200}


def test_reranking_without_a_reranker_is_refused_as_described(server: Live, oracle: Retriever) -> None:
    assert set(fuzz(server, oracle, "/rerank", "POST", 10)) == {404}


@pytest.mark.slow
def test_five_thousand_generated_requests(server: Live, oracle: Retriever) -> None:
    statuses = fuzz(server, oracle, "/retrieve", "POST", 5000)
    assert set(statuses) <= {200, 413, 422}


def test_a_server_that_departs_from_its_description_is_noticed(server: Live) -> None:
    """The checks above can fail: a document without its title, and a status that no one described."""
    operation = described("/retrieve", "POST")
    response = requests.post(f"{server.url}/retrieve", json={"queries": ["festival"]})
    case = operation.Case(body={"queries": ["festival"]}, media_type="application/json")
    case.validate_response(response)
    good = response.content
    response._content = good.replace(b'"title"', b'"titel"')
    with pytest.raises(FailureGroup) as departed:
        case.validate_response(response)
    assert "Response violates schema" in str(departed.value.exceptions)
    response._content = good
    response.status_code = 418
    with pytest.raises(FailureGroup) as departed:
        case.validate_response(response)
    assert "Undocumented status code" in str(departed.value.exceptions)
