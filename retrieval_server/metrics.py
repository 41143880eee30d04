"""The Prometheus metrics of one app. A registry of its own, so that several apps can live in one process."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


class ServerMetrics:
    """What ``/metrics`` shows. Rates (queries per second, hit rate) are derived from the counters by the reader."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        prefix = "retrieval_"
        self.requests = Counter(f"{prefix}requests", "HTTP requests answered", ["path", "status"], registry=registry)
        self.request_seconds = Histogram(
            f"{prefix}request_seconds", "Time from request to answer", ["path"], buckets=_SECONDS, registry=registry
        )
        self.queries = Counter(f"{prefix}queries", "Queries accepted", registry=registry)
        self.cache_hits = Counter(f"{prefix}cache_hits", "Queries answered from the cache", registry=registry)
        self.shared = Counter(
            f"{prefix}shared_queries", "Queries answered by an identical one in flight", registry=registry
        )
        self.cache_weight = Gauge(f"{prefix}cache_weight", "Documents (and queries) in the cache", registry=registry)
        self.queue = Gauge(f"{prefix}queue_length", "Queries waiting to be searched", registry=registry)
        self.queue_seconds = Histogram(
            f"{prefix}queue_seconds",
            "Time in the queue of the query of a batch that waited longest",
            buckets=_SECONDS,
            registry=registry,
        )
        self.abandoned = Counter(
            f"{prefix}abandoned_queries", "Queries not searched because every client that asked left", registry=registry
        )
        self.batch_size = Histogram(
            f"{prefix}batch_size", "Queries searched together", buckets=_SIZES, registry=registry
        )
        self.search_seconds = Histogram(
            f"{prefix}search_seconds", "Time of one batch in the backend", buckets=_SECONDS, registry=registry
        )
        self.stage_seconds = Histogram(
            f"{prefix}stage_seconds",
            "Time of one batch in a stage of the backend",
            ["stage"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.running = Gauge(f"{prefix}running_searches", "Batches in the backend now", registry=registry)
        self.failed_batches = Counter(f"{prefix}failed_batches", "Batches the backend failed on", registry=registry)
        self.ready = Gauge(f"{prefix}ready", "1 when the index is loaded", registry=registry)
        self.connections = Gauge(f"{prefix}connections", "Open connections", registry=registry)
        ProcessCollector(registry=registry)  # CPU seconds, memory and open files of this process

    def render(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return generate_latest(self.registry)
