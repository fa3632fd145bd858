"""`kvjax serve` as a process: what it says, how it ends, and a restart under load."""

import concurrent.futures
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

import httpx
import openai
import pytest

SMALL = ("--pool-tokens", "2048", "--max-batch", "4", "--max-len", "512", "--prefill-chunk", "128")
SMALL += ("--prefill-scratch", "256", "--method", "kv-compress", "--rate", "2", "--floor", "8")


class Served:
    """A process of `kvjax serve` on any port; leaving it ends it."""

    def __init__(self, folder, *arguments, **environment):
        command = [sys.executable, "-m", "kvjax", "serve", "--weights", str(folder), "--port", "0"]
        self.process = subprocess.Popen(
            [*command, *SMALL, *arguments],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
        self.lines: list[str] = []
        self.up = threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        assert self.up.wait(300), self.lines
        found = re.search(r"http://127.0.0.1:\d+", "".join(self.lines))
        assert found, self.lines
        self.url = found[0]

    def _read(self):
        for line in self.process.stderr or ():
            self.lines.append(line)
            if line.startswith("try: "):
                self.up.set()
        self.up.set()

    def __enter__(self):
        return self

    def end(self, number=signal.SIGTERM) -> int:
        self.process.send_signal(number)
        code = self.process.wait(120)
        self._reader.join()
        return code

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._reader.join()
        if self.process.stderr is not None:
            self.process.stderr.close()


@pytest.mark.slow
def test_a_server_from_start_to_end(tiny_folder):
    with Served(tiny_folder, "--warm-up", "64", KVJAX_API_KEY="key-1,key-2") as served:
        said = "".join(served.lines)
        assert "memory: weights" in said
        assert "pool of" in said
        with httpx.Client(base_url=served.url, trust_env=False, timeout=300) as client:
            while client.get("/ready").status_code != 200:
                time.sleep(0.1)
            client.headers["Authorization"] = "Bearer key-2"
            before = metric(client, "compiled_steps")
            (line,) = [line for line in served.lines if line.startswith("try: ")]
            if shutil.which("curl"):
                command = line.removeprefix("try: ").replace("curl ", "curl -sS --noproxy '*' ")
                run = subprocess.run(
                    ["bash", "-c", command],
                    capture_output=True,
                    text=True,
                    env={**os.environ, "KVJAX_API_KEY": "key-1,key-2"},
                )
                assert json.loads(run.stdout)["object"] == "chat.completion", run
            else:
                assert "curl" in line
            body = {"prompt": "a" * 64, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
            whole = client.post("/v1/completions", json=body).json()
            # All of it was compiled for before the server was ready.
            assert metric(client, "compiled_steps") == before
            assert metric(client, "compile_stalls_total") == 0
        with openai.DefaultHttpxClient(trust_env=False) as http:
            asked = openai.OpenAI(base_url=f"{served.url}/v1", api_key="key-1", http_client=http)
            stream = asked.completions.create(
                model=whole["model"], prompt=body["prompt"], max_tokens=40, temperature=0,
                stream=True, extra_body={"ignore_eos": True},
            )  # fmt: skip
            text = "".join(chunk.choices[0].text for chunk in stream)
        assert text == whole["choices"][0]["text"]
        assert served.end() == 0
        lines = [json.loads(line) for line in served.lines if line.startswith("{")]
        assert "stopped" in {line["message"] for line in lines}
        assert not any("Traceback" in line for line in served.lines)


def metric(client, name):
    lines = client.get("/metrics").text.splitlines()
    return float(dict(x.rsplit(" ", 1) for x in lines if x[0] != "#")[f"kvjax_{name}"])


@pytest.mark.slow
def test_a_server_that_is_killed_under_load_is_replaced(tiny_folder):
    body = {"prompt": "a" * 60, "max_tokens": 400, "ignore_eos": True, "temperature": 0}

    def ask(url):
        try:
            with httpx.Client(base_url=url, trust_env=False, timeout=300) as client:
                return client.post("/v1/completions", json=body).json()["choices"][0]["text"]
        except httpx.HTTPError:
            return None

    with concurrent.futures.ThreadPoolExecutor(6) as threads:
        with Served(tiny_folder, "--warm-up", "0") as first:
            whole = ask(first.url)
            cut = [threads.submit(ask, first.url) for _ in range(6)]
            time.sleep(0.2)
            assert first.end(signal.SIGKILL) == -signal.SIGKILL
            assert None in [one.result() for one in cut]
            port = first.url.rsplit(":", 1)[1]
        with Served(tiny_folder, "--warm-up", "0", "--port", port) as second:
            assert second.url == first.url
            again = [threads.submit(ask, second.url) for _ in range(6)]
            assert [one.result() for one in again] == [whole] * 6
            assert second.end(signal.SIGINT) == 0
