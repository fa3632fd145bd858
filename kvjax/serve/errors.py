"""What clients are told when something is wrong: OpenAI's form, one line, never a traceback."""

import json
from collections.abc import Mapping
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.responses import Response

from kvjax.checks import shown
from kvjax.errors import UserError

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
}
"""By status; all others are the server's."""
_WORDS = {
    "extra_forbidden": "this server knows no such field",
    "missing": "it is missing",
    "json_invalid": "the body is no JSON",
}
"""What a failed check is called, where the library's words say less."""


class ApiError(Exception):
    """An answer that is an error."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.message = str(UserError(message))
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status) or ("server_error" if self.status >= 500 else _TYPES[400])
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> Response:
        return json_response(self.body, self.status, self.headers)


def json_response(
    value: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """JSON in ASCII, so that no text can fail to be written."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return Response(text, status, headers, media_type="application/json")


def no_json() -> ApiError:
    """Of a body that cannot be read."""
    return ApiError(400, "the body is no JSON: send one JSON object", code="invalid_json")


def of_validation(error: RequestValidationError) -> ApiError:
    """The first thing that is wrong with a body."""
    first, *others = error.errors()
    # Of a field that may be several things, what is wrong with the one that it nearly is.
    alike = [first, *(other for other in others if other["loc"][:2] == first["loc"][:2])]
    found = min(alike, key=lambda one: (one["type"].endswith("_type"), -len(one["loc"])))
    path = [str(part) for part in found["loc"] if part != "body"]
    name = path[0] if path else None
    path = [part for part in path if "[" not in part and part not in ("str", "int", "float")]
    if found["type"] == "json_invalid":
        return no_json()
    words = _WORDS.get(found["type"]) or found["msg"]
    value = "" if found["type"] == "missing" else f" {shown(found.get('input'))}"
    # Of a path that goes deep, also the field it ends at.
    where = ".".join([*path[:3], *path[3:][-1:]]) or "the body"
    return ApiError(400, f"{where}{value}: {words[:1].lower()}{words[1:]}", param=name)
