"""The kernels' benchmarks: what they say about bad input, and a run at small sizes."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from benchmarks.kernels import __main__ as bench
from benchmarks.kernels import compile as compiling
from benchmarks.kernels import memory, targets
from kvjax.cli import main_of


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        (bench, ["--only", "speed"], "invalid choice: 'speed'"),
        (bench, ["--out", "/no/such/folder/x.json"], "x.json': there is no such folder"),
        (compiling, [], "required: --target"),
        (compiling, ["--target", "gtx"], "invalid choice: 'gtx'"),
        (memory, ["--max-len", "0"], "--max-len 0"),
        (memory, ["--max-batch", "0"], "--max-batch 0"),
        (memory, ["--layers", "3", "3"], "--layers 3"),
    ],
)
def test_bad_input_is_one_line(command, arguments: list[str], message: str, capsys) -> None:
    assert main_of(command.main, arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert message in error


def test_missing_toolchain_says_what_to_install(monkeypatch, capsys) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main_of(compiling.main, ["--target", "v5e"]) == 2
    assert "needs libtpu: pip install" in capsys.readouterr().err


IN_PLACE = "bf16[4096,16,128]{2,1,0} fusion(%pool), kind=kLoop"
TURNED = "bf16[4096,16,128]{0,2,1} copy(%pool)"
BEGUN = "(bf16[4096,16,128]{2,1,0}, u32[]) copy-start(%pool)"
OTHER = "bf16[14096,16,128]{0,2,1} copy(%weights)"


@pytest.mark.parametrize(
    ("operations", "count"), [([IN_PLACE, OTHER], 0), ([TURNED, BEGUN, IN_PLACE], 2)]
)
def test_copies_of_the_pool_are_counted(operations: list[str], count: int) -> None:
    """Where memory holds little else, there is no room for one."""
    lines = ["ENTRY %main (a: u32[]) -> u32[] {", *(f"  %x = {o}" for o in operations), "}"]
    program = SimpleNamespace(as_text=lambda: "\n".join(lines))
    assert compiling.copied(program, (4096, 16, 128)) == count


@pytest.mark.slow
def test_no_step_copies_a_pool_of_head_dimension_64() -> None:
    """A decode step of Llama-3.2-1B's shapes, compiled for a TPU that is not there."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("needs libtpu: pip install '.[tpu]'")
    command = [
        "-m",
        "benchmarks.kernels.compile",
        "--target",
        "v5e",
        "--only",
        "steps full d=64 bfloat16",
    ]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    *_, row, summary = done.stdout.splitlines()
    assert json.loads(summary) == {"kernels": 1, "bad": []}, done.stdout + done.stderr[-2000:]
    temporaries = int(row.split("|")[8])
    assert 0 < temporaries < compiling.NARROW_POOL / 20


@pytest.mark.slow
def test_decode_is_timed_at_small_sizes(tmp_path: Path, capsys) -> None:
    """Rows with time, bytes and share of the bandwidth; the last line is the same as the file."""
    path = tmp_path / "bench.json"
    arguments = ["--only", "decode", "--size", "small", "--out", str(path)]
    assert main_of(bench.main, arguments) == 0
    report = json.loads(path.read_text())
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == report
    assert report["copy_bytes_per_s"] > 0
    cases = {(row["case"].split()[-1], row["what"]) for row in report["results"]}
    whats = ("numba", "numba + metric")
    assert cases == {(s, w) for s in ("uniform", "zipf") for w in whats}
    for row in report["results"]:
        assert row["us"] > 0
        assert row["bytes"] % (2 * 128 * 4) == 0
        moved = row["bytes"] / (row["us"] * 1e-6)
        assert row["share"] == pytest.approx(moved / report["copy_bytes_per_s"], rel=0.05, abs=1e-4)


def test_targets_are_judged() -> None:
    """Uniform is fast enough; zipf is slower than it and than a rival; short is too small."""

    def row(case: str, what: str, us: float, share: float, section: str = "decode", **more) -> dict:
        size = {"section": section, "case": case, "what": what, "bytes": 2 * 10**9}
        return size | {"us": us, "share": share} | more

    results = [
        row("8B uniform", "mosaic_gpu", 100, 0.9),
        row("8B uniform", "mosaic_gpu + metric", 114, 0.8),
        row("8B uniform", "rival", 101, 0.89),
        row("8B zipf", "mosaic_gpu", 106, 0.84),
        row("8B zipf", "mosaic_gpu + metric", 130, 0.7),
        row("8B zipf", "rival", 105, 0.85),
        row("8B short", "mosaic_gpu", 9, 0.1) | {"bytes": 10**8},
        row("8B", "w = 8", 1, 0, "window", of_prefill=0.04),
        row("8B", "move_cache", 1, 0.6, "move"),
        row("8B", "full", 1, 0.79, "step"),
        {"section": "decode", "case": "8B zipf", "what": "other", "error": "not installed"},
    ]
    met = {row["target"]: row["met"] for row in targets.targets(results, ("rival", "other"))}
    assert met == {
        "decode 8B uniform: share of the bandwidth": True,
        "decode 8B uniform: time with the metric": True,
        "decode 8B uniform: best rival's time": True,
        "decode 8B zipf: share of the bandwidth": False,
        "decode 8B zipf: time with the metric": False,
        "decode 8B zipf: best rival's time": False,
        "decode 8B zipf: time per byte beside uniform": False,
        "window 8B: share of the prefill": False,
        "move 8B: share of the bandwidth": True,
        "step 8B: share of the bandwidth": False,
    }


def test_the_plan_is_compared_with_the_largest_step(monkeypatch) -> None:
    """A prompt in the scratch stays there while others decode, results count that are not written
    over an argument, and each layer adds what the third one does to two where they do not loop."""
    whole = {"place": 2, "compress": 3}
    two = {"prefill in scratch": 1, "decode": 7, "prefill in pool": 8}
    three = {"prefill in scratch": 2, "decode": 8, "prefill in pool": 6}
    sizes = iter([*whole.values(), *two.values(), *three.values()])

    def compiled(function, arguments, donated, device, options):
        beside = next(sizes) << 20
        found = SimpleNamespace(
            temp_size_in_bytes=beside - 100, output_size_in_bytes=400, alias_size_in_bytes=300
        )
        return SimpleNamespace(memory_analysis=lambda: found)

    monkeypatch.setattr(memory, "compiled", compiled)
    sizes_of_prompts = ["--prefill-chunk", "64", "--prefill-scratch", "128"]
    options = memory.parse_arguments(["--max-batch", "2", "--max-len", "512", *sizes_of_prompts])
    found = memory.compare("smollm2-135m", options, jax.devices()[0])
    assert not list(sizes)
    of_layers = {"prefill in scratch": 1 + 28, "decode": 7 + 28, "prefill in pool": 8}
    assert found["steps"] == {step: size << 20 for step, size in (whole | of_layers).items()}
    # Keys, values and metrics of thirty layers with three heads.
    scratch = 30 * 3 * 128 * (2 * 64 * 2 + 4) + 4
    assert found["beside"]["decode"] == scratch
    assert found["beside"]["prefill in pool"] == 0
    assert found["largest"] == "decode"
    assert found["compiled"] == found["resident"] + (35 << 20) + scratch
    assert found["planned"] == sum(found["planned_parts"].values())
    assert found["difference"] == found["planned"] / found["compiled"] - 1
    weights, pool, tables = (found["planned_parts"][name] for name in memory.PARTS[:3])
    assert found["resident"] == weights + pool + tables
