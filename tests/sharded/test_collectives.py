"""What devices tell each other in a step: the sums that the design names, and nothing of the
pool."""

import re

import numpy as np
import pytest

from tests.sharded.tiny import SIZES, TINY, engine_of

OPERATION = re.compile(
    r'"?stablehlo\.(all_reduce|all_gather|all_to_all|collective_permute|reduce_scatter|'
    r'collective_broadcast)"?\('
)
RESULT = re.compile(r"-> (?:\()?tensor<([^>]*)>")


def collectives(call) -> list[tuple[str, str]]:
    """Name and result of every exchange in a step, as it stands in the program's text."""
    text = call.step.lower(*call.args).as_text()
    found = []
    for match in OPERATION.finditer(text):
        # An all_reduce has a region of its own before its type.
        rest = text[match.end() :]
        end = rest.index("})", rest.index("({")) if match[1] == "all_reduce" else 0
        result = RESULT.search(rest, end)
        assert result is not None
        found.append((match[1], result[1]))
    return sorted(found)


def elements(shape: str) -> int:
    return int(np.prod([int(n) for n in shape.split("x")[:-1]] or [1]))


@pytest.fixture(scope="module")
def engine():
    return engine_of(3, "kv-compress")


def test_a_decode_step(engine):
    groups, hidden = 2, TINY.hidden_size
    call = engine.worker.decode_call([0, 1], 1, None, None)
    stream = ("all_reduce", f"{groups}x1x{hidden}xf32")
    assert collectives(call) == sorted(
        [
            stream,  # embeddings
            stream,  # the layer's attention
            stream,  # the layer's MLP
            ("all_gather", f"{groups}x{-(-TINY.vocab_size // 3) * 3}xf32"),  # logits
            ("all_reduce", "i32"),  # whether every device had room
            ("all_reduce", f"{groups}xi32"),  # told to the host: KVs
            ("all_reduce", f"{groups}xi32"),  # and those of the longest head
        ]
    )


def test_a_compression_tells_no_scores(engine):
    heads = TINY.num_layers * TINY.num_kv_heads
    method = engine.compression.resolved
    slots = list(range(SIZES.max_batch))
    found = collectives(engine.worker.compress_call(slots, slots, slots, method, 10**6, 64))
    assert {name for name, _ in found} == {"all_reduce"}
    # Counts of each sequence, and two of each head: cheaper blocks, and those that cost as much.
    assert max(elements(shape) for _, shape in found) == SIZES.max_batch * heads * 2
    assert all(shape.endswith("i32") for _, shape in found)


def test_one_device_tells_nobody_anything():
    worker = engine_of(1, "kv-compress").worker
    assert collectives(worker.decode_call([0, 1], 1, None, None)) == []
