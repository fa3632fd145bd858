"""`kvjax throughput --server` at servers that are none of `kvjax serve`."""

import asyncio
import contextlib
import functools
import http.server
import json
import threading

import numpy as np
import pytest

from kvjax.cli import main_of
from kvjax.cli.main import run_command
from kvjax.cli.throughput.remote import Remote
from kvjax.cli.throughput.work import Arrival


@contextlib.contextmanager
def answering(**said):
    """A server that answers each method (GET, POST) with a status and bytes: its address."""

    class Other(http.server.BaseHTTPRequestHandler):
        def answer(self):
            code, data = said[self.command]
            self.rfile.read(int(self.headers.get("content-length", 0)))
            self.send_response(code)
            self.send_header("content-length", f"{len(data)}")
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = answer

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Other) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


@pytest.mark.parametrize(
    ("code", "body", "says"),
    [
        (404, {"error": "Not Found"}, "Not Found"),
        (404, {"detail": "Not Found"}, "404"),
        (404, ["none"], "404"),
        (200, {"error": "Unexpected endpoint"}, "without 'max_len'"),
        (200, ["none"], "without 'max_len'"),
        (502, None, "502"),
        (200, None, "no answer"),
    ],
)
def test_they_are_told_in_one_line(capsys, code, body, says):
    data = json.dumps(body).encode() if body is not None else b"<html>Bad Gateway</html>"
    command = functools.partial(run_command, "throughput")
    with answering(GET=(code, data)) as address:
        found = main_of(command, ["--server", address])
    err = capsys.readouterr().err
    assert found == 2
    assert err.startswith("error: --server")
    assert says in err
    assert err.count("\n") == 1


EVENT = {"choices": [{"text": "a"}], "usage": {"completion_tokens": 1}}
KEPT = {**EVENT["usage"], "prompt_tokens_details": {"cached_tokens": 0}}


@pytest.mark.parametrize(
    ("code", "lines", "error"),
    [
        (200, [{**EVENT, "usage": KEPT}], None),
        (502, ["<html>Bad Gateway</html>"], "status 502"),
        (429, [{"error": {"message": "too many"}}], "too many"),
        (200, [{"error": {"message": "stopped"}}], "stopped"),
        (200, [{"error": "stopped"}], "a stream that is none of `kvjax serve`"),
        (200, [EVENT], "a stream that is none of `kvjax serve`"),
        (200, [{"text": "a"}], "a stream that is none of `kvjax serve`"),
        (200, [{"choices": [5]}], "a stream that is none of `kvjax serve`"),
        (200, ["data: {broken"], "a stream that is none of `kvjax serve`"),
    ],
)
def test_what_one_answers_in_a_run_loses_that_request_alone(code, lines, error):
    said = [x if isinstance(x, str) else json.dumps(x) for x in lines]
    if code == 200:
        said = [x if x.startswith("data") else f"data: {x}" for x in said]
    status = 200, json.dumps({"max_len": 9}).encode()
    prompts, arrivals = [np.array([1, 2])] * 2, [Arrival(0.0, 2, 1)] * 2
    with answering(GET=status, POST=(code, "\n".join(said).encode())) as address:
        found = asyncio.run(Remote(address, None).serve(prompts, arrivals, {}))
    assert [answer["error"] for answer in found] == [error] * 2
    assert error or [answer["tokens"] for answer in found] == [1, 1]
