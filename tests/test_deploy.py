"""The files of deploy/ ask for what `kvjax serve` has, and fit together."""

import argparse
import os
import re
import shlex
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvjax.cli import serve
from kvjax.engine.processes import check_process_options

FOLDER = Path(__file__).parent.parent / "deploy"
HERE = {
    "LWS_LEADER_ADDRESS": "kvjax-0.kvjax",
    "LWS_GROUP_SIZE": "2",
    "LWS_WORKER_INDEX": "1",
    "KVJAX_ARGS": "--rate 8",
}


def read(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def options_of(command: str) -> argparse.Namespace:
    """What a command line asks for; refused where it is none of `kvjax serve`'s."""
    given = re.sub(r"\$(\w+)", lambda match: HERE[match[1]], command)
    _, _, given = given.rpartition("kvjax serve")
    parser = argparse.ArgumentParser()
    serve.add_options(parser)
    found = parser.parse_args(shlex.split(given))
    serve.engine_settings(found)
    assert serve.server_settings(found).drain_seconds == 60
    check_process_options(
        found.coordinator, found.num_processes, found.process_id, found.coordinator_timeout
    )
    return found


def pod_of(template: dict[str, Any], **labels: str) -> tuple[dict[str, Any], argparse.Namespace]:
    """The only container of a pod, which has more seconds than its server to end in."""
    (container,) = template["spec"]["containers"]
    assert labels.items() <= template.get("metadata", {}).get("labels", {}).items()
    if "command" in container:
        assert container["command"] == ["sh", "-c"]
        (command,) = container["args"]
    else:
        command = shlex.join(container["args"])
    found = options_of(command)
    wait = 0
    if "ports" in container:
        # Who is sent there still, because the Service does not know yet, is answered meanwhile.
        name, seconds = container["lifecycle"]["preStop"]["exec"]["command"]
        assert name == "sleep"
        wait = int(seconds)
        assert wait > 1
    assert template["spec"]["terminationGracePeriodSeconds"] > wait + found.drain
    assert {volume["name"] for volume in template["spec"]["volumes"]} == {
        mount["name"] for mount in container["volumeMounts"]
    }
    # Where the image says that its cache lies.
    (cache,) = re.findall(
        r"^VOLUME (\S+)$", (FOLDER.parent / "Dockerfile").read_text(), re.MULTILINE
    )
    assert cache in {mount["mountPath"] for mount in container["volumeMounts"]}
    (variable,) = container["env"]
    assert variable["name"] == serve.KEY_VARIABLE
    return container, found


def test_groups_of_pods_are_processes_of_one_server():
    group, service = read("leaderworkerset.yaml")
    template = group["spec"]["leaderWorkerTemplate"]
    assert template["restartPolicy"] == "RecreateGroupOnPodRestart"
    assert str(template["size"]) == HERE["LWS_GROUP_SIZE"]
    first, options = pod_of(template["leaderTemplate"], role="leader")
    other, same = pod_of(template["workerTemplate"])
    assert vars(options) == vars(same)
    assert options.num_processes == 2
    assert options.process_id == 1
    assert {"readinessProbe", "livenessProbe"} <= first.keys()
    assert not {"readinessProbe", "livenessProbe"} & other.keys(), "only the first one listens"
    assert first["resources"] == other["resources"]
    assert service["spec"]["selector"]["role"] == "leader"
    assert service["spec"]["ports"][0]["targetPort"] == options.port


def test_replicas_are_servers_of_one_process():
    deployment, service = read("replicas.yaml")
    labels = deployment["spec"]["selector"]["matchLabels"]
    container, options = pod_of(deployment["spec"]["template"], **labels)
    assert options.coordinator is None
    assert deployment["spec"]["replicas"] > 1
    assert service["spec"]["selector"] == labels
    assert service["spec"]["ports"][0]["targetPort"] == options.port
    for probe, path in (("readiness", "/ready"), ("liveness", "/health"), ("startup", "/health")):
        assert container[f"{probe}Probe"]["httpGet"] == {"path": path, "port": options.port}


@pytest.mark.parametrize(
    ("name", "coordinator"), [("kvjax.sbatch", "auto"), ("kvjax.service", None)]
)
def test_jobs_and_units(name, coordinator):
    text = (FOLDER / name).read_text().replace("\\\n", " ")
    (command,) = re.findall(r"kvjax serve +(--[^|\n]*)", text)
    options = options_of(f"kvjax serve {command}")
    assert options.coordinator == coordinator
    (seconds,) = re.findall(r"(?:TERM@|TimeoutStopSec=)(\d+)", text)
    assert int(seconds) > options.drain


@pytest.mark.parametrize("status", [200, 503])
def test_a_container_is_as_healthy_as_its_server(status):
    """Whatever proxy the environment names for others, as Docker hands on its user's."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *_):
            pass

    text = (FOLDER.parent / "Dockerfile").read_text().replace("\\\n", " ")
    (asked,) = re.findall(r"^HEALTHCHECK .*CMD python -c +\"(.*)\"$", text, re.MULTILINE)
    with HTTPServer(("127.0.0.1", 0), Answer) as server, socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        done = subprocess.run(
            [sys.executable, "-c", asked.replace(":8000", f":{server.server_port}")],
            env={**os.environ, "http_proxy": f"http://127.0.0.1:{nobody.getsockname()[1]}"},
            capture_output=True, check=False, timeout=60,
        )  # fmt: skip
        server.shutdown()
    assert (done.returncode == 0) == (status == 200), done.stderr


def test_processes_are_compared_by_all_that_they_have_to_have_alike():
    """What a server's first process alone decides, or the machine of each, is named here, and what
    several processes refuse."""
    parser = argparse.ArgumentParser()
    serve.add_options(parser)
    names = set(vars(parser.parse_args([])))
    of_each = {"weights", "calibration", "memory_fraction", "coordinator", "num_processes",
               "process_id", "coordinator_timeout"}  # fmt: skip
    of_the_first = {
        "host", "port", "served_name", "api_key", "allowed_hosts", "max_waiting", "deadline",
        "max_tokens", "default_max_tokens", "max_body_bytes", "max_choices", "drain", "warm_up",
        "warm_up_logprobs", "page", "log_prompts",
    }  # fmt: skip
    of_one = {"draft"}
    assert names - set(serve.COMPARED) == (of_each | of_the_first | of_one) - set(serve.COMPARED)
    assert set(serve.COMPARED) <= names
