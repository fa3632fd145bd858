"""`python -m benchmarks.scale`: its sums against the arrays that the cache allocates."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from benchmarks.kernels.compile import absent_devices
from benchmarks.scale import PLANNED, exchanges, main
from kvjax.cache import init_cache
from kvjax.cli import main_of
from kvjax.errors import UserError

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def scale(capsys):
    def run(*arguments):
        code = main_of(main, [str(a) for a in arguments])
        out, err = capsys.readouterr()
        return code, out and json.loads(out.splitlines()[-1]), err

    return run


def test_sizes_are_those_of_the_arrays(scale):
    code, found, err = scale(
        "--model", "smollm2-135m", "--devices", 1, "--sequences", 4, "--prompt-len", 4096,
        "--rate", 8, "--kv-bytes", 4,
    )  # fmt: skip
    assert code == 0, err
    blocks = found["pool_blocks_per_device"]
    cache = jax.eval_shape(
        lambda: init_cache(
            num_slots=4, num_layers=30, num_kv_heads=3, head_dim=64, num_blocks=blocks,
            max_blocks_per_head=found["block_table_width"],
        )
    )  # fmt: skip
    sizes = found["bytes_per_device"]
    assert sizes["pool, keys and values"] == 2 * cache.k.size * 4
    assert sizes["pool, metric and position"] == 4 * (cache.metric.size + cache.position.size)
    assert sizes["block tables"] == 4 * cache.block_table.size
    assert sizes["context lengths"] == 4 * cache.context_len.size
    assert sizes["free blocks"] == sum(x.size * 4 for x in jax.tree.leaves(cache.free))
    assert found["cap_tokens"] == 496
    assert blocks == (4 * (31 + 1) + 512) * 90
    assert found["exchanged_bytes_per_decode_step"] == 0
    assert found["weight_bytes"] == pytest.approx(2 * 134.5e6, rel=0.01)


def test_the_largest_case_fits_and_devices_share_it(scale):
    code, found, err = scale()
    assert code == 0
    assert found["fits"]
    assert found["pool_elements_per_device"] > 2**31
    assert found["full_cache_sequences"] < 50
    assert "fits" in err
    assert not scale("--devices", 1)[1]["fits"]


def test_replicas_have_less_of_the_weights_and_more_of_the_pool(scale):
    case = ("--model", "llama3.1-405b", "--devices", 16)
    none, twice = (scale(*case, "--kv-replicas", n)[1] for n in (1, 2))
    assert none["fits"]
    assert not twice["fits"]
    for name in ("pool, keys and values", "pool, metric and position"):
        sizes = none["bytes_per_device"][name], twice["bytes_per_device"][name]
        assert sizes[1] / sizes[0] == pytest.approx(2)
    assert twice["bytes_per_device"]["block tables"] == none["bytes_per_device"]["block tables"]
    # A sixteenth of all weights, and of keys' and values' matrices as much again.
    own = twice["weight_bytes"] / 16
    both = 126 * 16384 * 2 * 8 * 128 * 2 / 16
    assert twice["bytes_per_device"]["weights"] == pytest.approx(own + both, rel=1e-3)
    # Of 16 query heads of 128 each, the other replica's.
    more = twice["exchanged_bytes_per_decode_step"] - none["exchanged_bytes_per_decode_step"]
    assert more == 126 * 1000 * 8 * 128 * 2
    for replicas, said in ((3, "give a divisor of 16"), (16, ""), (32, "give a divisor of 16")):
        code, _, err = scale(*case, "--kv-replicas", replicas)
        assert (code, said in err) == (2 if said else 0, True)
    code, _, err = scale("--model", "llama3.1-405b", "--devices", 32, "--kv-replicas", 32)
    assert code == 2
    assert "give at most 16" in err


def test_weights_of_few_bits_leave_room_for_a_pool(scale):
    one = ("--devices", 1, "--sequences", 100, "--prompt-len", 32768)
    assert not scale(*one)[1]["fits"]
    code, found, _ = scale(*one, "--weight-dtype", "float8_e4m3fn")
    assert code == 0
    assert found["fits"]
    # One byte each, and two for every output's scale.
    assert found["bytes_per_device"]["weights"] == pytest.approx(70.6e9, rel=0.002)
    small = ("--model", "llama3.1-8b", *one[:2], "--device-gib", 22.3, "--sequences", 16)
    assert scale(*small, "--weight-dtype", "int8")[1]["fits"]


def test_the_largest_numbers_are_still_arithmetic(scale):
    for name in ("prompt-len", "block-size"):
        assert scale(f"--{name}", 10**9)[0] == 0
    names = ("sequences", "output-len", "rate", "prefill-chunk", "device-gib")
    for name in (*names, "kv-bytes", "longest-head"):
        assert scale(f"--{name}", 10**12)[0] == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--devices", 3), "give a divisor"),
        (("--rate", 0), "--rate 0"),
        (("--rate", "nan"), "--rate nan"),
        (("--longest-head", "inf"), "--longest-head inf"),
        (("--devices", -1), "--devices -1"),
        (("--sequences", 10**30), "--sequences 10"),
        (("--prompt-len", "x"), "'x'"),
        (("--model", "llama9"), "llama9"),
        (("--weight-dtype", "int4"), "int4"),
        (("--compile", "gtx"), "gtx"),
    ],
)
def test_bad_input_gets_one_line(scale, arguments, says):
    code, _, err = scale(*arguments)
    assert code == 2
    assert says in err
    assert len(err.splitlines()) == 1


def test_more_devices_than_heads_have_places_that_are_empty(scale):
    """Of 16 devices each has a place for one of 8 heads in every layer."""
    few = scale("--model", "llama3.1-405b", "--devices", 8)[1]["bytes_per_device"]
    many = scale("--model", "llama3.1-405b", "--devices", 16)[1]["bytes_per_device"]
    assert many["block tables"] == few["block tables"]
    assert many["pool, keys and values"] * 2 == few["pool, keys and values"]
    layers, hidden, kv, mlp, vocab = 126, 16384, 1024, 53248, 128256
    attention = layers * hidden * (2 * hidden + 2 * kv) * 2
    rest = (layers * 3 * hidden * mlp + 2 * vocab * hidden) * 2
    for devices, found in ((8, few), (16, many)):
        wanted = attention / 8 + rest / devices
        assert found["weights"] == pytest.approx(wanted, rel=1e-3)


def test_a_compiler_that_is_not_installed(scale, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    code, _, err = scale("--compile", "v6e")
    assert code == 2
    assert "target 'v6e' needs libtpu: pip install" in err


def test_tpus_come_in_certain_numbers():
    with pytest.raises(UserError, match="6 devices of v5e: give one of 1, 4, 8"):
        absent_devices("v5e", 6)


def test_exchanges_are_those_of_the_programs_text():
    """Whether they are waited for at once or later; what only reads their results is none."""
    text = """
    %all-reduce.1 = f32[8,1,64]{2,1,0} all-reduce(%add), to_apply=%sum
    ROOT %all-reduce.2 = f32[8,1,64]{2,1,0} all-reduce(%other), to_apply=%sum
    %both = (s32[3]{0:T(128)}, pred[]) all-reduce(%a, %b), to_apply=%sum
    %ag-start = (bf16[2,4]{1,0}, bf16[2,16]{1,0:T(8,128)(2,1)}) all-gather-start(%x), dimensions={1}
    %ag-done = bf16[2,16]{1,0} all-gather-done(%ag-start)
    %fusion = f32[8,1,64]{2,1,0} fusion(%all-reduce.1), calls=%all-reduce-of-one
    """
    assert exchanges(text) == {
        "all-gather bf16[2,4], bf16[2,16]": 1,
        "all-reduce f32[8,1,64]": 2,
        "all-reduce s32[3], pred[]": 1,
    }


EXCHANGED = {
    "decode": ("4,49152", "4,1", {"all-gather s32[17,3]": 1}),
    "prefill in pool": ("49152", "1,512", {}),
}
"""Logits, the residual stream, and what the host is told of each device, as they are exchanged."""


@pytest.mark.slow
def test_what_comes_into_compiled_steps_is_what_was_planned():
    """On three devices that a CPU is made to look like."""
    command = [sys.executable, "-m", "benchmarks.scale", "--compile", "--model", "smollm2-135m"]
    command += ["--devices", "3", "--sequences", "4", "--prompt-len", "4096", "--rate", "8"]
    done = subprocess.run(
        [*command, "--prefill-chunk", "512"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout.splitlines()[-1])
    planned = sum(found["bytes_per_device"][name] for name in PLANNED)
    for step in ("decode", "prefill in pool"):
        told = found["compiled"][step]
        # Beside the plan: which heads lie where, the arguments of the call.
        assert 1 <= told["arguments"] / planned < 1.001
        pool = sum(size for name, size in found["bytes_per_device"].items() if "pool" in name)
        assert told["in place"] >= pool
        assert told["results"] < 2**20
        # Those of a layer, in a loop, with the embeddings' and the logits': nothing of the pool.
        rows, tokens, blocks = EXCHANGED[step]
        assert told["exchanges"] == {
            f"all-gather f32[{rows}]": 1,
            **blocks,
            f"all-reduce f32[{tokens},576]": 3,
            "all-reduce s32[]": 1,
        }
