"""The page about what a machine with a GPU said."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.card import report
from kvjax.cli import main_of


def row(**more: Any) -> dict[str, Any]:
    return {"source": "now", "date": "2030-01-02", "attempts": 1, **more}


def timing(us: float, size: float, share: float, **more: Any) -> dict[str, Any]:
    return row(us=us, bytes=int(size), share_of_copy=share, share_of_read=share - 0.05, **more)


def served(rate: float | None, speed: float, host: float, compiling: float = 0.0) -> dict[str, Any]:
    phases = {"prefill": 30.0, "compress": 1.0, "decode": 60.0, "host": host, "compile": compiling}
    return row(
        rate=rate, total_tokens_per_second=speed, output_tokens_per_second=speed / 13,
        seconds=100.0, seconds_by_phase=phases, max_batch=3, expected_batch=4, preemptions=0,
        model="llama3.1-8b", num_prompts=64, input_len=6000, output_len=500, pool_tokens=19500,
    )  # fmt: skip


TRACE = {
    "busy_us": 6000.0,
    "span_us": 7500.0,
    "kernels": [{"kernel": "gemm", "times": 64, "us": 3200.0}],
}


def write_results(folder: Path) -> None:
    """Made-up files of the three calls."""
    machine = {"device": "NVIDIA H200", "card": "NVIDIA H200, 1.2, 3", "versions": {"jax": "9.9"}}
    errors = {"errors": {"out": 1e-3}, "limit": 1e-2, "chosen": "mosaic_gpu"}
    kernels = {
        "peaks": row(copy_bytes_per_s=4.3e12, read_bytes_per_s=4.6e12, flop_per_s=7.9e14),
        "right: llama": row(**errors, good=True),
        "right: other": row(**errors, good=False),
        "ring: bfloat16": row(**errors, good=True, wraps=12.0, repeats=20, differing=0),
        "right: broken": row(error="XlaRuntimeError: a | b"),
        "memory checker": row(good=True, exit_code=0, said=[], optional=True),
        "attention: 8B 256 × 1024 uniform b=16": timing(300, 1.07e9, 0.83),
        "attention: 8B 256 × 1024 uniform b=64": timing(250, 1.07e9, 0.99),
    }
    decode = {
        "peaks": row(error="lost"),
        "attention: 8B 32 × 8192 uniform b=16": timing(300, 1.07e9, 0.9),
        "attention: 8B 32 × 8192 uniform b=16 + statistic": timing(360, 1.07e9, 0.75),
        "rival: 8B 32 × 8192 uniform: another, paged": timing(250, 1.07e9, 0.96),
        "rival: 8B 32 × 8192 uniform: one, dense": timing(240, 1.07e9, 0.99),
        "rival: 8B 32 × 8192 uniform: absent": row(error="no such package", optional=True),
        "attention: 8B 32 × 8192 zipf b=16": timing(310, 1.07e9, 0.86),
        "attention: 8B 64 × 1024 uniform b=16": timing(90, 0.27e9, 0.7),
        "step: llama3.1-8b, 64 × 1024, full": timing(
            7000, 24e9, 0.82, tokens_per_second=9143, trace=TRACE
        ),
        "step: llama3.1-8b, 256 × 1024, full": timing(9000, 50e9, 0.9, tokens_per_second=28444),
        "step: llama3.1-8b, 256 × 1024, large pool, full": timing(
            9900, 50e9, 0.8, tokens_per_second=25858, pool_bytes=55 * 10**9
        ),
        "step: llama3.1-70b": row(skipped="no room"),
    }
    throughput = {
        "trace: rate 64": row(prompts=6, answer=48, seconds=8e-3, trace=TRACE),
        "throughput: rate 64": served(64.0, 6000.0, 2.0, compiling=20.0),
        "throughput: no compression": served(None, 1000.0, 4.0),
        "throughput: rate 1": served(1.0, 990.0, 2.0),
    }
    for name, parts in zip(report.FILES, (kernels, decode, throughput), strict=True):
        content = json.dumps({"machine": machine, "parts": parts})
        (folder / f"h200-{name}.json").write_text(content)


def test_the_page_says_what_was_asked_reached_and_missed(tmp_path, capsys) -> None:
    write_results(tmp_path)
    assert main_of(report.main, ["--results", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("# On a GPU: H200\n\nNVIDIA H200, 1.2, 3; jax 9.9; 2030-01-02")
    assert "from benchmarks/results/h200-*.json" in text
    assert "copies 4.30 TB/s" in text
    answers = {q.asked: (q.got, q.met) for q in report.questions(report.read(tmp_path, "h200")[1])}
    assert answers == {
        "kernels against the reference": ("2 of 4", False),
        "repeats of 20 runs that differ in a bit": ("0", True),
        "compute-sanitizer memcheck": ("nothing found", True),
        "attention, 8B 256 × 1024 uniform b=16: of the copy bandwidth": ("83%", False),
        "attention, 8B 256 × 1024 uniform b=64: of the copy bandwidth": ("99%", True),
        "attention, 8B 256 × 1024 uniform b=16: more with the statistic": ("not measured", None),
        "attention, 8B 256 × 1024 uniform b=64: more with the statistic": ("not measured", None),
        "attention, 8B 32 × 8192 uniform b=16: of the copy bandwidth": ("90%", True),
        "attention, 8B 32 × 8192 zipf b=16: of the copy bandwidth": ("86%", True),
        "attention, 8B 32 × 8192 uniform b=16: more with the statistic": ("20%", False),
        "attention, 8B 32 × 8192 zipf b=16: more with the statistic": ("not measured", None),
        "attention, 8B 32 × 8192 zipf b=16: more per byte than uniform": ("3%", True),
        "attention, 8B 32 × 8192 uniform: time over that of another, paged": ("1.20×", False),
        "attention, 8B 32 × 8192 uniform: time over that of one, dense": ("1.25×", None),
        "attention, 8B 256 × 1024 uniform: more time with b = 16 than with 64": ("20%", None),
        "decode step, llama3.1-8b, 64 × 1024, full: of the copy bandwidth": ("82%", True),
        "decode step, llama3.1-8b, 256 × 1024, full: of the copy bandwidth": ("90%", None),
        "decode step, llama3.1-8b, 256 × 1024, large pool, full: of the copy bandwidth": (
            "80%",
            None,
        ),
        "decode step, llama3.1-8b, 256 × 1024, large pool, full of 55 GB: more than without": (
            "10%",
            False,
        ),
        "tokens per second at 64× over none": ("7.50×", False),
        "rate 1 slower than no compression": ("1.0%", True),
        "host's share, rate 64": ("2.0%", True),
        "host's share, no compression": ("4.0%", False),
        "host's share, rate 1": ("2.0%", True),
        "no kernel runs, rate 64, 6 prompts": ("25.0%", False),
    }
    assert "| tokens per second at 64× over none | ≥ 5.18× | 7.50× | reached |" in text
    assert "| tokens per second at 64× over none | ≥ 8× | 7.50× | **missed** |" in text
    assert "## Kernels: llama3.1-8b, 64 × 1024, full\n\n6.0 ms in which any ran, of 7.5 ms" in text
    assert "| `gemm` | 64 | 50.0 | 53.3% |" in text
    assert "| right: broken | XlaRuntimeError: a / b |" in text
    assert "64 prompts of 6,000 tokens" in text


@pytest.mark.parametrize(
    ("kind", "part", "marked"),
    [
        ("decode", "attention: 8B 32 × 8192 uniform b=16", "8B 32 × 8192 uniform b=16"),
        ("throughput", "throughput: rate 64", "64×"),
    ],
)
def test_the_page_says_where_the_source_has_changed_meanwhile(
    kind: str, part: str, marked: str, tmp_path, capsys
) -> None:
    """That of call C is another one than those of A and B, whose is the same."""
    write_results(tmp_path)
    file = tmp_path / "h200-throughput.json"
    file.write_text(file.read_text().replace('"source": "now"', '"source": "with the command"'))
    said = "Not all of it was measured with the same source"
    assert main_of(report.main, ["--results", str(tmp_path)]) == 0
    assert said not in capsys.readouterr().out
    file = tmp_path / f"h200-{kind}.json"
    content = json.loads(file.read_text())
    content["parts"][part]["source"] = "before"
    file.write_text(json.dumps(content))
    assert main_of(report.main, ["--results", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert said in text
    assert [line for line in text.splitlines() if line.startswith("| ") and "†" in line] == [
        line for line in text.splitlines() if line.startswith(f"| {marked} † |")
    ]
    assert f"| {marked} † |" in text


def test_every_card_has_a_page_of_its_own(tmp_path, capsys) -> None:
    """And none of it figures of another one."""
    write_results(tmp_path)
    machine = {"device": "H100", "card": "NVIDIA H100 80GB HBM3", "versions": {"jax": "9.9"}}
    part = {"attention: slow": timing(777, 2e9, 0.5)}
    (tmp_path / "h100-decode.json").write_text(json.dumps({"machine": machine, "parts": part}))
    (tmp_path / "rehearsal-decode.json").write_text(json.dumps({"machine": {}, "parts": part}))
    assert main_of(report.main, ["--results", str(tmp_path)]) == 0
    first, second = capsys.readouterr().out.split("# On a GPU: ")[1:]
    assert first.startswith("H100\n\nNVIDIA H100 80GB HBM3; ")
    assert "| 777.0" in first
    assert second.startswith("H200\n\nNVIDIA H200")
    assert "| 777.0" not in second
    assert main_of(report.main, ["--results", str(tmp_path), "--prefix", "h100"]) == 0
    assert capsys.readouterr().out == f"# On a GPU: {first[:-1]}"


def test_a_page_without_results_says_how_to_get_them(tmp_path, capsys) -> None:
    assert main_of(report.main, ["--results", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "Nothing was measured on a GPU yet" in text
    assert "python -m benchmarks.card C" in text
