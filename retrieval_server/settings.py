"""What a running server can be told. One frozen object, checked when it is made."""

from __future__ import annotations

from dataclasses import dataclass

from retrieval_server.errors import SettingsError

DEFAULT_PORT = 8002
_AT_LEAST_ONE = (
    "topk", "max_topk", "max_queries", "max_documents", "max_body_bytes", "max_batch", "max_queue", "max_connections",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Settings:
    """Limits and defaults of the HTTP service; the index is described by its manifest, not here."""

    topk: int = 3
    """Documents per query when a request says null or 0."""
    max_topk: int = 1000
    """A larger ``topk`` is a 422."""
    max_queries: int = 4096
    """More queries in one request are a 413. A training batch of 512 prompts with 5 samples each needs 2560."""
    max_documents: int = 65_536
    """Queries times topk of one request, above which it is a 413: bounds the size of an answer."""
    max_body_bytes: int = 16 * 1024 * 1024
    """A larger request body is a 413."""
    body_timeout_s: float = 10.0
    """Seconds a client may take to send its body before it gets a 408."""
    header_timeout_s: float = 10.0
    """Seconds from a connection's beginning, or a request's first byte, until its headers are there; else a 408."""
    max_connections: int = 4096
    """Connections at a time; one more gets a 503. The limit on open files is raised to fit, as far as it may be."""
    api_key_env: str = ""
    """Name of the environment variable with the key that clients send as ``Authorization: Bearer KEY``; empty: none.
    Only ``/healthz`` is open then."""
    max_batch: int = 128
    """Queries searched together at most."""
    max_queue: int = 16_384
    """Queries waiting at most, over all requests; beyond that a request gets a 429 with Retry-After."""
    cache_units: int = 50_000
    """Size of the result cache in documents held (plus one per query and per KiB of query text); 0 switches it off."""
    access_log: bool = False
    """One JSON line per request. Off by default: writing to a slow terminal shows up in every response time."""

    def __post_init__(self) -> None:
        if problems := self._problems():
            raise SettingsError("\n".join(problems))

    def _problems(self) -> list[str]:
        """Return what is impossible, one line each."""
        found = [
            f"{name} is {value}; it must be at least 1" for name in _AT_LEAST_ONE if (value := getattr(self, name)) < 1
        ]
        found += [
            f"{name} is {value}; it must be above 0"
            for name in ("body_timeout_s", "header_timeout_s")
            if not (value := getattr(self, name)) > 0
        ]
        if self.cache_units < 0:
            found.append(f"cache_units is {self.cache_units}; it must be 0 (no cache) or more")
        if self.topk > self.max_topk:
            found.append(f"topk {self.topk} is above max_topk {self.max_topk}; lower the one or raise the other")
        if self.max_queries > self.max_queue:
            found.append(
                f"max_queries {self.max_queries} is above max_queue {self.max_queue}: "
                "the largest request could never be accepted"
            )
        return found
