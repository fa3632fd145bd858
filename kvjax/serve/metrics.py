"""What an operator asks of the server beside its engine's metrics, in the same registry."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class ServerMetrics:
    """Counters and histograms of the HTTP side."""

    def __init__(self, registry: CollectorRegistry):
        def histogram(name: str, help_: str, labels: tuple[str, ...] = ()) -> Histogram:
            name = f"kvjax_http_{name}"
            return Histogram(name, help_, labels, registry=registry, buckets=_SECONDS)

        self._requests = Counter(
            "kvjax_http_requests", "HTTP requests answered", ("path", "status"), registry=registry
        )
        self.gone = Counter(
            "kvjax_http_clients_gone", "Requests whose client left first", registry=registry
        )
        self.open = Gauge("kvjax_http_requests_open", "HTTP requests open", registry=registry)
        self._seconds = histogram(
            "request_seconds", "From a request's head to the answer's end", ("path",)
        )
        self._first = histogram("time_to_first_token_seconds", "From admission to the first token")
        self._between = histogram(
            "inter_token_latency_seconds", "Between tokens of one answer as they are handed over"
        )

    def answered(self, path: str, status: int, seconds: float) -> None:
        """A request to a known path (a route's, not a client's words) has had its answer."""
        self._requests.labels(path, str(status)).inc()
        self._seconds.labels(path).observe(seconds)

    def sent(self, tokens: int, seconds: float, *, first: bool) -> None:
        """So many tokens of an answer came so long after those before."""
        if not tokens:
            return
        if first:
            # Those that came with it have no time of their own.
            self._first.observe(seconds)
            return
        for _ in range(tokens):
            self._between.observe(seconds / tokens)
