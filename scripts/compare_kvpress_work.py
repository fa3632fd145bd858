"""The parts of scripts/compare_kvpress.py that need neither a model nor the peer."""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvjax.errors import UserError
from kvjax.eval.results import Result
from kvjax.models.config import LlamaConfig
from kvjax.models.layout import tensor_slots

PEER = Path(__file__).with_name("compare_kvpress_peer.py")
PREFIX = "kvpress:"
EQUAL_KVS = 0.01
"""Budgets that differ by no more than this are one."""


@dataclasses.dataclass(frozen=True)
class Press:
    """A press of kvpress and what it is compared with."""

    like: str | None
    """Our method of the same name; None if there is none."""
    positions: bool = False
    """Whether both are defined alike, so that the positions they keep must be the same."""
    note: str = ""


PRESSES: dict[str, Press] = {
    "snapkv": Press("snapkv-w64-avg5", True),
    "pyramidkv": Press("pyramidkv-exact", note="window 64 and average pooling against 8 and max"),
    "adakv-snapkv": Press("ada-snapkv-kvpress", note="single KVs, masked, against blocks, freed"),
    "expected-attention": Press(None),
    "keydiff": Press(None, note="minus the cosine to the mean key: looks at no query"),
    "streaming-llm": Press("streaming-llm", True),
    "tova": Press("tova", True),
    "observed-attention": Press("h2o", note="mean over the queries that see a KV, no window"),
    "kvzip": Press(None, note="repeats the prompt: several prefills"),
}


def choose_presses(names: Sequence[str]) -> list[str]:
    """The names, checked; "all" stands for every one.

    Raises:
        UserError: there is no such press.
    """
    if list(names) == ["all"]:
        return list(PRESSES)
    for name in names:
        if name not in PRESSES:
            raise UserError(f"no press {name!r}: there are {', '.join(PRESSES)}")
    return list(names)


def peer_method(press: str, budget_of: str) -> str:
    """How results of a press at the KVs of one of our methods are called."""
    return f"{PREFIX}{press}@{budget_of}"


def budgets(press: str, reference: str, kept: Mapping[str, int]) -> list[str]:
    """Methods of ours at whose KVs a press runs: the reference, and the like-named one.

    Both even where they hold as much, because each pair is a line of the table.

    Args:
        press: a name of `PRESSES`.
        reference: the method that every press is compared with.
        kept: KVs that each of our methods really holds of this prompt.
    """
    like = PRESSES[press].like
    names = [reference] if like is None else [reference, like]
    return [name for name in dict.fromkeys(names) if name in kept]


def group_equal(wanted: Mapping[str, int]) -> list[list[str]]:
    """Names whose KVs are equal but for `EQUAL_KVS`, together: they need one run.

    Args:
        wanted: KVs of each name.
    """
    groups: list[list[str]] = []
    for name, kvs in wanted.items():
        for group in groups:
            if abs(kvs - wanted[group[0]]) <= EQUAL_KVS * wanted[group[0]]:
                group.append(name)
                break
        else:
            groups.append([name])
    return groups


def find_equal(rows: Iterable[Result], press: str, kvs: int) -> Result | None:
    """A result of the press at as many KVs, but for `EQUAL_KVS`; None if there is none.

    Args:
        rows: results of one prompt and protocol.
        press: a name of `PRESSES`.
        kvs: KVs that the press may keep.
    """
    own = (row for row in rows if row["method"].startswith(peer_method(press, "")))
    return next((row for row in own if abs(row["kvs_wanted"] - kvs) <= EQUAL_KVS * kvs), None)


def relabelled(row: Result, press: str, budget_of: str, rate: float) -> Result:
    """The same result as that of another method's budget."""
    return {**row, "method": peer_method(press, budget_of), "rate": rate, "agreement": None}


def agreement(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> float:
    """Share of equal positions, over all heads.

    Both keep the best KVs of one order, so where one of them holds fewer, because budgets are
    rounded to blocks here, all of its positions must be among the other's.

    Args:
        ours: positions kept by each head.
        theirs: the same heads in the same order.

    Raises:
        ValueError: not the same number of heads.
    """
    if len(ours) != len(theirs):
        raise ValueError(f"theirs: got {len(theirs)} heads, wanted {len(ours)}")
    equal = sum(len(set(a) & set(b)) for a, b in zip(ours, theirs))
    fewer = sum(min(len(a), len(b)) for a, b in zip(ours, theirs))
    return equal / fewer if fewer else 1.0


def checkpoint_tensors(config: LlamaConfig, stacked: Mapping[Any, Any]) -> dict[str, np.ndarray]:
    """The tensors of a Hugging Face checkpoint, float32, from parameters with stacked layers.

    Args:
        config: the model.
        stacked: parameters by path, as `kvjax.models.layout` names them.
    """
    tensors = {}
    for slot in tensor_slots(config):
        part = stacked[slot.param]
        part = np.asarray(part if slot.layer is None else part[slot.layer])[slot.index]
        rows = part.reshape(slot.file_shape[::-1] if slot.transpose else slot.file_shape)
        rows = rows.T if slot.transpose else rows
        tensors[slot.hf_name] = np.ascontiguousarray(rows, dtype=np.float32)
    return tensors


def checkpoint_config(config: LlamaConfig) -> dict[str, Any]:
    """The same model's config.json."""
    architecture = "Qwen2ForCausalLM" if config.attention_bias else "LlamaForCausalLM"
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling is not None:
        rope |= {"rope_type": "llama3", **dataclasses.asdict(config.rope_scaling)}
    return {
        "architectures": [architecture],
        "model_type": "qwen2" if config.attention_bias else "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_parameters": rope,
        "rope_scaling": None if config.rope_scaling is None else rope,
        "tie_word_embeddings": config.tie_word_embeddings,
        "use_sliding_window": False,
        "torch_dtype": "float32",
    }


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"


def peer_versions(python: str) -> dict[str, str]:
    """Versions of kvpress, transformers and torch in that Python.

    Raises:
        UserError: it does not run, or lacks one of them; says what to install.
    """
    command = [python, str(PEER), "--versions"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except OSError as error:
        raise UserError(
            f"--peer-python {python}: {error.strerror}; give a Python with torch and kvpress"
        ) from error
    except subprocess.CalledProcessError as error:
        why = last_line(error.stderr)
        if why.startswith(("ModuleNotFoundError", "ImportError")):
            why += f"; install it there: {python} -m pip install kvpress torch"
        raise UserError(f"--peer-python {python}: {why}") from error
    return json.loads(last_line(done.stdout))


class PeerProcess:
    """The peer with a model loaded: one job in, one answer out. A context manager."""

    def __init__(self, python: str, folder: Path, script: Path = PEER):
        self._python = python
        self._errors = open(folder / "peer.log", "w+", encoding="utf-8")  # noqa: SIM115
        self._process = subprocess.Popen(
            [python, str(script), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def ask(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a job.

        Raises:
            UserError: the peer ended; names its last words.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self._process.wait()
            self._errors.seek(0)
            raise UserError(
                f"--peer-python {self._python} failed: {last_line(self._errors.read())}"
            )
        return json.loads(line)

    def __enter__(self) -> "PeerProcess":
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            print("the peer had ended already", file=sys.stderr)
        self._process.terminate()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._errors.close()
