"""Prefixes that are retained in files, for other engines and for later."""

import dataclasses
import json
import threading
from contextlib import nullcontext
from typing import Any

import jax
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from kvjax.cache import CompressionConfig
from kvjax.cache.methods import METHODS
from kvjax.engine import prefix_files, retaining
from kvjax.engine.llm import LLM
from kvjax.errors import UserError
from kvjax.models import LoadedModel
from kvjax.models.decoder import init_params
from tests.engine.conftest import TINY
from tests.engine.serving import (
    FULL,
    greedy,
    make_llm,
    prompts_of,
    tokens_of,
)
from tests.engine.test_prefixes import (
    DOCUMENT,
    NORMS,
    QUESTIONS,
    SHARED,
    asked,
    forget,
    tighten,
)


def test_a_prefix_is_saved_before_anybody_else_retains_another(tiny_params, tmp_path, monkeypatch):
    path = tmp_path / "document.safetensors"
    llm = make_llm(tiny_params, FULL, **SHARED | {"retained_prefixes": 1})
    (other,) = prompts_of(71)
    refused = []

    def meanwhile():
        with pytest.raises(UserError, match="is using this engine") as caught:
            llm.retain(other)
        refused.append(caught.value)

    def saved(cache, row, whole=retaining.saved):
        thread = threading.Thread(target=meanwhile)
        thread.start()
        thread.join()
        return whole(cache, row)

    monkeypatch.setattr(retaining, "saved", saved)
    llm.save_prefix(path, DOCUMENT)
    assert len(refused) == 1
    found, arrays = prefix_files.read(path)
    assert int(arrays["held.seq_len"]) == len(arrays["tokens"]) == len(DOCUMENT)
    forget(llm)


def test_a_file_without_room_leaves_what_is_retained(tiny_params, tmp_path):
    path, short = tmp_path / "document.safetensors", DOCUMENT[:20]
    llm = make_llm(tiny_params, FULL, **SHARED)
    llm.save_prefix(path, DOCUMENT)
    needs = int(llm.metrics.as_dict()["kvjax_blocks_used"])
    forget(llm)
    for room in (needs - 1, needs):
        undo = tighten(llm, room)
        llm.retain(short)
        with pytest.raises(UserError, match="no room") if room < needs else nullcontext():
            llm.load_prefix(path)
        (output,) = llm.generate([short], greedy(1))
        assert output.stats.cached_tokens == (len(short) if room < needs else 0)
        llm.forget_prefixes()
        undo()
    forget(llm)


@pytest.mark.parametrize(
    ("compression", "dtype"),
    [pytest.param(FULL, "int4", marks=pytest.mark.slow), (NORMS, None)],
    ids=["whole", "compressed"],
)
def test_a_prefix_in_a_file(tiny_params, tmp_path, compression, dtype):
    """Another engine goes on from the file as this one does from its cache."""
    path = tmp_path / "document.safetensors"
    llm = make_llm(tiny_params, compression, cache_dtype=dtype, **SHARED)
    assert llm.save_prefix(path, DOCUMENT) == llm.retain(DOCUMENT) == 70
    wanted = tokens_of(llm.generate([asked(QUESTIONS[0]), DOCUMENT], greedy()))
    other = make_llm(tiny_params, compression, cache_dtype=dtype, **SHARED)
    assert other.load_prefix(path) == other.load_prefix(path) == 70
    outputs = other.generate([asked(QUESTIONS[0]), DOCUMENT], greedy())
    assert [output.stats.cached_tokens for output in outputs] == [70, 70]
    assert tokens_of(outputs) == wanted
    forget(llm)
    forget(other)


def test_a_file_of_something_else_is_refused_in_one_line(tiny_params, tmp_path):
    path = tmp_path / "document.safetensors"
    llm = make_llm(tiny_params, NORMS, **SHARED)
    llm.save_prefix(path, DOCUMENT)

    def refused(other, match, compression=None, path=path):
        with pytest.raises(UserError, match=match) as caught:
            other.load_prefix(path, compression)
        assert "\n" not in str(caught.value)
        if other.config.sharing:
            forget(other)

    refused(make_llm(tiny_params, FULL, **SHARED), "its method is 'key-norm', here it is None")
    smaller = dataclasses.replace(NORMS, max_cache_tokens=12)
    refused(llm, r"its max_cache_tokens is \d+, here it is \d+; save one", smaller)
    refused(make_llm(tiny_params, NORMS, **SHARED | {"block_size": 8}), "its block_size is")
    refused(make_llm(tiny_params, NORMS, cache_dtype="int4", **SHARED), "its cache_dtype is")
    refused(make_llm(tiny_params, NORMS), "nothing is shared")
    changed = jax.tree.map(lambda x: x + 1, tiny_params)
    refused(make_llm(changed, NORMS, **SHARED), "its model is")
    narrow = dataclasses.replace(TINY, weight_dtype="int8")
    model = LoadedModel(
        narrow, init_params(narrow, "float32"), llm.model.tokenizer, "of the same file",
        lambda: llm.model.fingerprint,
    )  # fmt: skip
    same = LLM(model, NORMS, llm.config)
    refused(same, "its weight_dtype is None, here it is 'int8'")
    without = make_llm(tiny_params, NORMS, **SHARED | {"retained_prefixes": 0})
    refused(without, "retained_prefixes is 0: give the engine 1 or more")
    refused(llm, "No such file", path=tmp_path / "nothing")
    broken = tmp_path / "broken"
    broken.write_bytes(path.read_bytes()[:-7])
    refused(llm, "saved whole", path=broken)
    arrays, kind = load_file(path), safe_open(path, "np").metadata()
    mixed = tmp_path / "mixed"
    save_file(arrays | {"held.seq_len": np.array(71, np.int32)}, mixed, kind)
    refused(llm, "70 tokens, and KVs of 71", path=mixed)
    save_file(arrays | {"logits": np.zeros(7, np.float32)}, mixed, kind)
    refused(llm, f"logits \\[7\\], of a vocabulary of {TINY.vocab_size}", path=mixed)
    assert kind is not None
    save_file(arrays, mixed, kind | {"kind": json.dumps({"settings": "CompressionConfig()"})})
    refused(llm, "another release wrote it", path=mixed)


def test_a_file_is_of_settings_however_they_were_given(tiny_params, tmp_path):
    path = tmp_path / "document.safetensors"
    asked = CompressionConfig(method="key-norm", rate=2, floor=16, protected=8)
    llm = make_llm(tiny_params, asked, **SHARED)
    llm.save_prefix(path, DOCUMENT)
    forget(llm)
    for same in ({"rate": 2.0}, {"method": METHODS["key-norm"]}):
        assert llm.load_prefix(path, dataclasses.replace(asked, **same)) == len(DOCUMENT)
        forget(llm)
    own = dataclasses.replace(METHODS["key-norm"], sinks=1)
    with pytest.raises(UserError, match="its method is 'key-norm', here it is"):
        llm.load_prefix(path, dataclasses.replace(asked, method=own))

    class Unnamed:
        """What prints its place in memory."""

        def __hash__(self):
            return 1

    @dataclasses.dataclass(frozen=True)
    class Own(type(METHODS["key-norm"].scorer)):  # type: ignore[misc]
        what: Any

    own = dataclasses.replace(own, name="own", scorer=Own(Unnamed()))
    with pytest.raises(UserError, match="method own: a file tells it by what its parts print"):
        llm.save_prefix(path, DOCUMENT, dataclasses.replace(asked, method=own))
    forget(llm)
