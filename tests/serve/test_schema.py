"""Requests drawn from the schema, good and bad: none makes the server fail."""

from typing import Any

import hypothesis
import pytest
import schemathesis

EXAMPLES = 25


@pytest.mark.slow
@pytest.mark.filterwarnings(  # of schemathesis, not of ours
    "ignore:Do not use the .random. module:hypothesis.errors.HypothesisDeprecationWarning"
)
def test_no_request_of_the_schema_makes_the_server_fail(serve):
    with serve(max_tokens=4, default_max_tokens=2, max_choices=4) as server:
        with server.client() as client:
            described = client.get("/openapi.json").json()
        schema = schemathesis.openapi.from_dict(described)
        schema.config.update(base_url=server.url)
        paths = set()
        for found in schema.get_all_operations():
            operation: Any = found.ok()  # type: ignore[union-attr]
            paths.add(operation.path)

            @hypothesis.settings(
                max_examples=EXAMPLES,
                deadline=None,
                suppress_health_check=[
                    hypothesis.HealthCheck.too_slow,
                    hypothesis.HealthCheck.data_too_large,
                ],
            )
            @hypothesis.given(case=operation.as_strategy())
            def check(case):
                response = case.call()
                assert response.status_code < 500, (case.body, response.text)
                if response.status_code >= 400 and case.method != "HEAD":
                    assert set(response.json()) == {"error"}

            check()
        assert {"/v1/completions", "/v1/chat/completions", "/tokenize", "/health"} <= paths
        with server.client() as client:
            assert client.get("/health").status_code == 200
