"""`kvjax serve` as a command: what it refuses before it serves."""

import argparse
import json
import subprocess

import pytest

from kvjax import extras
from kvjax.cache.methods.speckv import MOST_DRAFTED, Lookahead
from kvjax.cli import Progress, main_of
from kvjax.cli.main import main
from kvjax.cli.serve import (
    KEY_VARIABLE,
    add_options,
    curl_line,
    key_words,
    load_service,
    server_settings,
    warm_up_lengths,
)
from kvjax.errors import UserError
from kvjax.serve import bind


def refusal(capsys, *arguments) -> str:
    """The one line with which the command refuses."""
    assert main_of(main, ["serve", *map(str, arguments)]) == 2
    (line,) = [x for x in capsys.readouterr().err.splitlines() if not x.endswith("…")]
    assert line.startswith("error: ")
    return line


def test_what_is_refused_before_a_model_is_loaded(capsys, monkeypatch):
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        assert f"port {port} of 127.0.0.1: it is taken" in refusal(capsys, "--port", port)
    for arguments, says in (
        (("--port", 70000), "--port 70000"),
        (("--host", "no.such.host.invalid"), "no such address"),
        (("--rate", 0), "rate 0"),
        (("--method", ""), "no method ''"),
        (("--methods", "none-such"), "none-such"),
        (("--warm-up", "a,b"), "--warm-up"),
        (("--warm-up", "64,-1"), "--warm-up -1: give a whole number from 1"),
        (("--api-key", ""), "--api-key"),
        (("--drain", -1), "drain_seconds"),
        (("--max-len", 0), "max_len 0"),
        (("--prefill-scratch", 0), "--prefill-scratch 0"),
        (("--model", "none-such"), "none-such"),
        (("--num-processes", 2), "need --coordinator HOST:PORT, or auto"),
        (("--coordinator", "node0", "--num-processes", 2), "--coordinator 'node0': give HOST:PORT"),
        (("--coordinator", "node0:1", "--draft", "some"), "--draft: models draft in a single"),
        (("--draft", "smollm2-135m", "--methods", "snapkv"), "no method here looks ahead"),
    ):
        assert says in refusal(capsys, *arguments)
    find = extras.find_spec
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == "uvicorn" else find(name))
    assert refusal(capsys).endswith(
        "kvjax serve needs uvicorn: pip install '.[serve]' in kvjax's checkout"
    )


@pytest.mark.parametrize(
    ("given", "max_len", "lengths"),
    [
        (None, 4096, [128, 1024]),
        (None, 1024, [128, 1023]),
        (None, 129, [128]),
        (None, 128, [127]),
        (None, 1, []),
        ("0", 100, []),
        ("99", 100, [99]),
        ("1,0,7", 100, [1, 7]),
        ("1", 1, [1]),
        ("100", 100, None),
        ("2", 1, None),
    ],
)
def test_a_prompt_to_warm_up_for_leaves_room_for_a_token(given, max_len, lengths):
    options = argparse.Namespace(warm_up=given)
    if lengths is None:
        most = max(1, max_len - 1)
        with pytest.raises(UserError, match=f"--warm-up {given}: .* from 1 to {most}$"):
            warm_up_lengths(options, max_len)
    else:
        assert warm_up_lengths(options, max_len) == lengths


@pytest.mark.parametrize(
    ("arguments", "variables", "key"),
    [
        ((), {}, None),
        ((), {KEY_VARIABLE: "k1"}, "k1"),
        ((), {KEY_VARIABLE: "k1,k2"}, "k1"),
        (("--api-key", "secret,other"), {"KEY": "secret"}, "secret"),
        (("--api-key", "secret"), {KEY_VARIABLE: "another", "KEY": "secret"}, "secret"),
    ],
)
def test_the_line_to_try_works_in_a_shell(monkeypatch, arguments, variables, key):
    for name in (KEY_VARIABLE, "KEY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    parser = argparse.ArgumentParser()
    add_options(parser)
    options = parser.parse_args(arguments)
    keys = server_settings(options).api_keys
    line = curl_line("http://[::1]:80", "Ann's $model", key_words(options) if keys else None)
    assert "secret" not in line
    script = f"curl() {{ printf '%s\\n' \"$@\"; }}; {line}"
    told = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)
    url, _, kind, *sent, _, body = told.stdout.splitlines()
    assert url == "http://[::1]:80/v1/chat/completions"
    assert kind == "Content-Type: application/json"
    assert sent == ([] if key is None else ["-H", f"Authorization: Bearer {key}"])
    assert json.loads(body)["model"] == "Ann's $model"


def test_what_does_not_fit_the_model(capsys, tiny_folder, tmp_path):
    small = ("--weights", tiny_folder, "--port", 0, "--warm-up", 0)
    assert "does not fit" in refusal(capsys, *small, "--pool-tokens", 10**10)
    broken = tmp_path / "calibration.safetensors"
    broken.write_bytes(b"nothing of the kind")
    line = refusal(
        capsys, *small, "--pool-tokens", 512, "--method", "predicted-reads", "--calibration", broken
    )
    assert str(broken) in line
    drafted = ("--pool-tokens", 512, "--methods", "speckv", "--draft", tmp_path / "none")
    line = refusal(capsys, *small, *drafted)
    assert str(tmp_path / "none") in line


@pytest.mark.slow
def test_another_model_drafts_as_soon_as_steps_are_compiled(tiny_folder):
    parser = argparse.ArgumentParser()
    add_options(parser)
    given = f"--weights {tiny_folder} --draft {tiny_folder} --method speckv --rate 2"
    small = "--max-batch 1 --max-len 256 --pool-tokens 256 --warm-up 200"
    options = parser.parse_args([*given.split(), *small.split()])
    service, lengths = load_service(options, server_settings(options), Progress())
    llm = service.llm.llm
    assert llm.draft is not None
    drafts = llm.draft.llm
    assert drafts.max_len == llm.max_len + MOST_DRAFTED
    llm.warm_up(lengths)
    assert drafts.metrics.as_dict()["kvjax_output_tokens_total"] == Lookahead().drafted
