"""Real processes on the loopback: one engine over the devices of all of them."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import jax
import numpy as np
import pytest

from kvjax.models.weights import load_params, save_orbax

REPOSITORY = Path(__file__).parent.parent
FLAGS = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
"""Programs are small: compiling them is what takes the time."""
PROGRAM = """
import json, sys
import numpy as np
from kvjax.engine.processes import join

index, count, port, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
together = join(f"127.0.0.1:{port}", count, index, 120) if count > 1 else None
import jax
from kvjax import LLM, CompressionConfig, EngineConfig, SamplingParams, load_model
from kvjax.engine.split import split_of

devices = jax.device_count()
config = EngineConfig(
    max_batch=2, max_len=128, block_size=4, prefill_chunk=32, prefill_scratch=64,
    pool_tokens=400, tensor_parallel=devices,
)
model = load_model(weights=folder, split=split_of(devices, "none"))
asked = CompressionConfig(method="kv-compress", rate=3, floor=4, compress_every=4)
llm = LLM(model, asked, config, calibration="none")
rng = np.random.default_rng(0)
prompts = [rng.integers(0, 256, size).astype(np.int32) for size in (30, 61, 90)]
found = []

def run():
    greedy = SamplingParams(max_tokens=6, ignore_eos=True)
    names = [llm.add_request(prompt, greedy, report_kept=True) for prompt in prompts]
    ended = {}
    while llm.has_unfinished():
        ended |= {out.request_id: out for out in llm.step() if out.finished}
    for name in names:
        out = ended[name]
        at = [np.flatnonzero(head).tolist() for layer in out.stats.kept_tokens for head in layer]
        found.append([out.token_ids, out.stats.kept.tolist(), at, out.error])

run()  # the same program in all of them
if index == 0:  # then one that the others follow
    run()
    if together is not None:
        llm.engine.agreement.end()
else:
    llm.follow()
print(json.dumps(found))
if together is not None:
    together.close()
"""


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.fixture
def running() -> Iterator[list[subprocess.Popen[str]]]:
    """Processes of a test; those that still run in the end are killed."""
    found: list[subprocess.Popen[str]] = []
    yield found
    for one in found:
        with one:
            one.kill()


def started(command: list[str], devices: int = 1) -> subprocess.Popen[str]:
    flags = f"{FLAGS} --xla_force_host_platform_device_count={devices}"
    environment = {**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": str(REPOSITORY)}
    return subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip


def programs(running: list, folder: Path, count: int, devices: int = 1) -> list[list]:
    """What each process's program has found."""
    port = str(free_port())
    here = [
        started(["-c", PROGRAM, str(index), str(count), port, str(folder)], devices)
        for index in range(count)
    ]
    running += here
    found = []
    for one in here:
        out, err = one.communicate(timeout=1200)
        assert one.returncode == 0, err
        found.append(json.loads(out.splitlines()[-1]))
    return found


@pytest.mark.slow
def test_same_tokens_and_same_kvs_as_in_one_process(tiny_folder, running):
    (one,) = programs(running, tiny_folder, 1)
    assert one[:3] == one[3:]
    for count, devices in ((2, 1), (2, 2), (4, 1)):
        first, *others = programs(running, tiny_folder, count, devices)
        assert first == one
        assert others == [one[:3]] * (count - 1)


JOINS = """
import sys
from kvjax.engine.processes import join

together = join(f"127.0.0.1:{sys.argv[2]}", 2, int(sys.argv[1]), 60)
print(together.exchange(sys.argv[1]))
together.close()
"""


def test_no_proxy_stands_between_processes(running, monkeypatch):
    """Whatever the environment names for others, and whatever it leaves out."""
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        for name in ("http_proxy", "https_proxy", "grpc_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{nobody.getsockname()[1]}")
        for name in ("no_proxy", "no_grpc_proxy"):
            monkeypatch.setenv(name, "elsewhere")
        port = str(free_port())
        running += [started(["-c", JOINS, index, port]) for index in ("0", "1")]
        for one in running:
            out, err = one.communicate(timeout=300)
            assert one.returncode == 0, err
            assert out == "['0', '1']\n"
            assert "proxy" not in err, "JAX warns of what cannot be"


CHECKPOINTS = """
import json, sys
from pathlib import Path
from kvjax.engine.processes import join

index, count, port, folder, root = *map(int, sys.argv[1:3]), *sys.argv[3:]
together = join(f"127.0.0.1:{port}", count, index, 120)
import jax
import numpy as np
from flax import nnx
from kvjax.errors import UserError
from kvjax.models.decoder import logical_axes
from kvjax.models.parallel import Dealing, Split
from kvjax.models.weights import checkpoint_hash, load_params, save_orbax
from tests.sharded.heads import dealt, mesh_of

config, whole = load_params(folder, stacked=False)
layers, heads, root = config.num_layers, config.num_kv_heads, Path(root)

def split_on(shards, replicas, seed):
    places = -(-heads // shards) + 1
    number = dealt(np.random.default_rng(seed), layers, heads, shards, places)
    return Split(Dealing(number, heads, shards, replicas), mesh_of(shards * replicas))

def same(found, wanted):
    found, wanted = map(jax.tree.leaves, (found, wanted))
    for one, other in zip(found, wanted, strict=True):
        assert one.sharding.is_equivalent_to(other.sharding, one.ndim)
        for part, own in zip(one.addressable_shards, other.addressable_shards, strict=True):
            np.testing.assert_array_equal(part.data, own.data)

devices = jax.device_count()
first, other = split_on(devices, 1, 1), split_on(devices, 1, 2)
shared = split_on(devices // 2, 2, 3)
params = load_params(folder, stacked=False, shardings=first)[1]
there = save_orbax(root / "several", config, params, dealing=first.dealing)
for split in (first, other, shared):
    for stacked in (False, True):
        want = load_params(folder, stacked=stacked, shardings=split)[1]
        for path in (there, root / "one"):
            same(load_params(path, stacked=stacked, shardings=split)[1], want)
stacked = load_params(folder, shardings=shared)[1]
save_orbax(root / "shared", config, stacked, dealing=shared.dealing)
said = []
try:
    save_orbax(root / "shared", config, stacked, dealing=shared.dealing)
except UserError as error:
    said.append(str(error))
told = {checkpoint_hash(path, config, "float32") for path in (folder, there, root / "one")}
print(json.dumps([said, len(told)]))
together.close()
"""


@pytest.mark.slow
def test_each_process_stores_and_reads_its_part_of_a_checkpoint(tiny_folder, running, tmp_path):
    """And what several have stored one reads, and the other way round."""
    config, whole = load_params(tiny_folder)
    save_orbax(tmp_path / "one", config, whole)
    port = str(free_port())
    given = [port, str(tiny_folder), str(tmp_path)]
    here = [started(["-c", CHECKPOINTS, str(n), "2", *given], devices=2) for n in range(2)]
    running += here
    for one in here:
        out, err = one.communicate(timeout=600)
        assert one.returncode == 0, err
        (said,), hashes = json.loads(out.splitlines()[-1])
        assert said.startswith(f"{tmp_path / 'shared'} exists already")
        assert hashes == 1
    for name in ("several", "shared"):
        _, found = load_params(tmp_path / name)
        jax.tree.map(np.testing.assert_array_equal, found, whole)
        # Each process has written a part.
        parts = [(tmp_path / name).glob(f"**/ocdbt.process_{n}/d/*") for n in range(2)]
        assert all(sum(file.stat().st_size for file in part) > 20_000 for part in parts)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "several", "shared"]


DECISIONS = """
import hashlib, json, sys
from kvjax.engine.processes import join

index, count, port = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
together = join(f"127.0.0.1:{port}", count, index, 120)
import dataclasses
from tests.engine.deciding import SIZES, lead, recorded
from tests.sharded.tiny import model_of
from kvjax import LLM, CompressionConfig

config = dataclasses.replace(SIZES, tensor_parallel=count)
usual = CompressionConfig(method="key-norm", rate=3, floor=4, compress_every=6)
llm = LLM(model_of(True), usual, config, calibration="none")
log = recorded(llm)
if index == 0:
    lead(llm, seed=7, rounds=ROUNDS)
    llm.engine.agreement.end()
else:
    llm.follow()
digests, size = [], 1000
for at in range(0, len(log), size):
    digests.append(hashlib.sha256(repr(log[at : at + size]).encode()).hexdigest())
kinds = sorted({str(entry[0]) for entry in log if not str(entry[0]).startswith("request-")})
ends = sorted({entry[2] for entry in log if str(entry[0]).startswith("request-")})
print(json.dumps([len(log), digests, kinds, ends]))
together.close()
"""


def decisions(running: list, rounds: int, count: int) -> list:
    """How many decisions each process has made, digests of a thousand at a time, their kinds, and
    how requests ended."""
    port, program = str(free_port()), DECISIONS.replace("ROUNDS", str(rounds))
    here = [started(["-c", program, str(n), str(count), port]) for n in range(count)]
    running += here
    found = []
    for one in here:
        out, err = one.communicate(timeout=3600)
        assert one.returncode == 0, err
        found.append(json.loads(out.splitlines()[-1]))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("count", "rounds"), [(2, 4_000), (4, 1_000)])
def test_all_decide_the_same_in_thousands_of_rounds(running, count, rounds):
    first, *others = decisions(running, rounds, count)
    assert others == [first] * (count - 1)
    size, _, kinds, ends = first
    assert size > 2 * rounds
    assert {"Begin", "Chunk", "Insert", "Compress", "Decode", "Preempt", "Remove"} <= set(kinds)
    assert {"length", "stop", "abort", "deadline", "error"} <= set(ends)


SERVE = ["-m", "kvjax", "serve", "--port", "0", "--method", "kv-compress", "--rate", "2"]
SERVE += ["--floor", "8", "--pool-tokens", "2048", "--max-batch", "2", "--max-len", "512"]
SERVE += ["--prefill-chunk", "128", "--prefill-scratch", "256", "--num-processes", "2"]
SERVE += ["--block-size", "4"]


def servers(
    running: list, folder: Path, *options: tuple[str, ...], port: int | None = None
) -> list[subprocess.Popen[str]]:
    """Process 0 and 1 of a server, each with options of its own."""
    where = ["--weights", str(folder), "--coordinator", f"127.0.0.1:{port or free_port()}"]
    here = [
        started([*SERVE, *where, "--process-id", str(index), *options[index]]) for index in (0, 1)
    ]
    running += here
    return here


def url_of(server: subprocess.Popen[str]) -> tuple[str, list[str]]:
    """Where a server is once it is up, and what it has said."""
    lines = []
    for line in server.stderr or ():
        lines.append(line)
        if line.startswith("try: "):
            found = re.search(r"http://127.0.0.1:\d+", "".join(lines))
            assert found
            return found[0], lines
    raise AssertionError(lines)


BODY = {"prompt": "a" * 60, "max_tokens": 12, "ignore_eos": True, "temperature": 0}


@pytest.mark.slow
def test_a_server_of_two_processes(tiny_folder, running):
    """It answers, ends with its followers, a process that dies ends it, and whoever starts it again
    in the same place has it back."""
    texts, port = [], free_port()
    for way in ("second killed", "first killed", "asked"):
        first, second = servers(running, tiny_folder, ("--warm-up", "0"), (), port=port)
        url, said = url_of(first)
        with httpx.Client(base_url=url, trust_env=False, timeout=600) as client:
            answer = client.post("/v1/completions", json=BODY).json()
            assert "choices" in answer, answer
            texts.append(answer["choices"][0]["text"])
            assert answer["kvjax"]["achieved_rate"] > 1.5
            if way == "asked":
                # What a scheduler sends to all processes reaches the follower first.
                second.send_signal(signal.SIGTERM)
                assert first.wait(60) == 0
                assert second.wait(60) == 0
                continue
            gone, left, seconds = (first, second, 10) if way[0] == "f" else (second, first, 30)
            gone.kill()
            start = time.monotonic()
            assert left.wait(60) == 1
            assert time.monotonic() - start < seconds
        said = (said if left is first else []) + list(left.stderr or ())
        (line,) = [line for line in said if line.startswith("error: ")]
        assert line.startswith(f"error: process {0 if gone is first else 1}")
        assert "start all of them again" in line
        # JAX has words of its own for it, and many.
        assert not [line for line in said if "coordination" in line or "Terminating" in line]
    assert len(set(texts)) == 1


@pytest.mark.slow
def test_other_settings_are_refused_by_both(tiny_folder, running):
    for one in servers(running, tiny_folder, (), ("--rate", "3")):
        _, said = one.communicate(timeout=300)
        assert one.returncode == 2, said
        (line,) = [line for line in said.splitlines() if line.startswith("error: ")]
        assert line.startswith("error: process 1 has rate '3.0' and process 0 '2.0': start all")


@pytest.mark.slow
def test_a_process_without_the_others(running):
    where = ["--dummy-weights", "--coordinator", f"127.0.0.1:{free_port()}"]
    where += ["--coordinator-timeout", "2"]
    for index in ("0", "1"):
        one = started([*SERVE, *where, "--process-id", index])
        running.append(one)
        _, said = one.communicate(timeout=300)
        assert one.returncode == 2, said
        assert "error: --coordinator 127.0.0.1:" in said.splitlines()[-1]
        assert "Traceback" not in said
