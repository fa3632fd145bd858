"""Examples do what they say, and what they print is so."""

import re

from examples import compress_by_hand, many_prompts
from kvjax.models import load_model


def test_compress_by_hand(capsys):
    compress_by_hand.main()
    said = capsys.readouterr().out
    # 4 layers of 2 heads: 64 blocks of 16 KVs each.
    assert "prompt of 1024 tokens: 512 blocks" in said
    assert "448 blocks are free again" in said
    share = re.search(r"([0-9]+)% of the", said)
    assert share is not None
    assert int(share[1]) > 90
    kept = re.search(r"with \[(.*)\] KVs", said)
    assert kept is not None
    layers = [int(n) for n in kept[1].split(",")]
    assert 0 < sum(layers) <= 64 * 16
    # 8 heads took 40 KVs more: three blocks each, as the last of each was full.
    assert "40 tokens later: 88 blocks, length 1064" in said
    assert "released: 0 blocks" in said


def test_many_prompts(tiny_folder, capsys):
    texts = {"short": "one two " * 20, "long": "three " * 60, "endless": "x" * 5000}
    many_prompts.ask(load_model(weights=tiny_folder), texts, "?", new_tokens=4)
    short, long, endless, *_, last = capsys.readouterr().out.splitlines()
    for line in (short, long):
        before, after = map(int, re.findall(r"([0-9]+) blocks → ([0-9]+)", line)[0])
        assert 3 * after < before
    assert "first token after" in short
    assert endless.startswith("endless (")
    assert "first token" not in endless
    assert last.startswith("3 prompts in batches of up to 2; ")
