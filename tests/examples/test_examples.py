"""Examples do what they say, and what they print is so."""

import re

import jax
import jax.numpy as jnp
import numpy as np

from examples import compress_by_hand, many_prompts, own_method
from kvjax.cache.policy import LayerView
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
    said = capsys.readouterr().out
    # Answers of a toy may break lines.
    short, long, endless = re.findall(r"^(?:short|long|endless) \(.*", said, re.M)
    for line in (short, long):
        before, after = map(int, re.findall(r"([0-9]+) blocks → ([0-9]+)", line)[0])
        assert 3 * after < before
    assert "first token after" in short
    assert "first token" not in endless
    assert said.splitlines()[-1].startswith("3 prompts in batches of up to 2; ")


def test_own_method(tiny_folder, capsys):
    own_method.compare(load_model(weights=tiny_folder), "one two three " * 30, "?", new_tokens=3)
    said = re.findall(r"^([a-z-]+): ([0-9]+) blocks → ([0-9]+): ", capsys.readouterr().out, re.M)
    assert [name for name, _, _ in said] == ["full", "attended-values", "snapkv"]
    (_, before, after), *others = said
    assert before == after
    assert all(6 * int(after) < int(before) for _, before, after in others)


def test_own_method_is_its_formula():
    keys = jax.random.split(jax.random.key(1), 3)
    q = jax.random.normal(keys[0], (24, 4, 8))
    k, v = (jax.random.normal(key, (24, 2, 8)) for key in keys[1:])
    view = LayerView(layer=0, q=q, k=k, v=v, length=jnp.int32(24), start=jnp.int32(0))
    got = own_method.AttendedValues().score(view, {}).metric
    wanted = np.zeros((2, 24))
    for head in range(4):
        for query in range(8, 24):
            logits = np.asarray(k)[: query + 1, head // 2] @ np.asarray(q)[query, head] / 8**0.5
            weights = np.exp(logits - logits.max())
            wanted[head // 2, : query + 1] += weights / weights.sum() / 2
    wanted *= np.linalg.norm(np.asarray(v), axis=-1).T
    np.testing.assert_allclose(got, wanted, rtol=1e-4)
