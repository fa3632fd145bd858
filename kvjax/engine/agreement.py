"""What the processes of an engine do next: the first one says it, and all do the same.

Every process has the same engine and the same scheduler, whose decisions follow from what came in
and from what the device reports. What came in is known to the first process alone, and so is the
time. So before each round, and before whatever else an engine does with its devices, it sends a
message: the requests that are new, those that end, the call. The others take theirs from it.
"""

import atexit
import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, cast

import jax
import numpy as np

import kvjax
from kvjax.cache import CompressionConfig
from kvjax.cache.calibration import Calibration
from kvjax.cache.config import as_method
from kvjax.engine.checks import checked_request
from kvjax.engine.processes import Processes, leave
from kvjax.engine.request import FinishReason, Request
from kvjax.engine.sampling import SamplingParams
from kvjax.errors import UserError, in_one_line
from kvjax.models import DUMMY
from kvjax.models.decoder import activation_dtype

if TYPE_CHECKING:
    from kvjax.engine.llm import LLM

POLL_MS = 5_000
"""Python sees no signal while it waits for a message."""
BATCH = 64
"""Messages that are deleted together, once all have read them."""
CALLS = ("compress", "forget_prefixes", "reset", "warm_up")
"""What `LLM` does with the devices beside rounds."""

Ending = tuple[Request, FinishReason, str | None]
"""A request that ends in the next round, why, and its error."""


class Agreement:
    """The messages of one engine; the thread that steps uses it."""

    def __init__(self, llm: "LLM", processes: Processes):
        """Begin with no message.

        Args:
            llm: the engine; every process makes its engines in the same order.
            processes: that have it.
        """
        self.processes, self._llm = processes, llm
        self._folder = f"kvjax/engine/{processes.next_number()}"
        self._count, self._kept = 0, 0
        """Messages so far, and the first batch that is not deleted."""
        self._next: dict[str, Any] | None = None
        """The message that was read and not yet carried out."""
        self._ended = False
        self._own: dict[str, Request] = {}
        """On followers: requests that this process was given, too."""
        if processes.leads:
            atexit.register(self.end)

    def together(self, what: str, **given: Any) -> dict[str, Any]:
        """Do something in all processes: whoever calls it goes on where the others do.

        Args:
            what: is done.
            given: with what; plain values.

        Returns:
            The first process's message.

        Raises:
            UserError: the first process does something else.
        """
        message = _through_json({"do": what, **given})
        if self.processes.leads:
            self._send(message)
            return message
        told, self._next = self.peek(), None
        same = message == told if what in CALLS else what == told["do"]
        if not same:
            raise UserError(
                f"process {self.processes.index} does {_named(message)} where process 0 does "
                f"{_named(told)}: run the same program in all, or LLM.follow() in all but one"
            )
        return told

    def agree(
        self, new: Sequence[Request], ends: Sequence[Ending]
    ) -> tuple[list[Request], list[Ending]]:
        """What comes in with a round: what the first process has taken in.

        Args:
            new: requests that this process was given since the last round.
            ends: those that it would end.
        """
        if self.processes.leads:
            self.together(
                "round",
                new=[self._told(request) for request in new],
                end=[(request.id, reason, error) for request, reason, error in ends],
            )
            return list(new), list(ends)
        told = self.together("round")
        self._own |= {request.id: request for request in new}
        return [self._taken(one) for one in told["new"]], list(self._ends(told["end"]))

    def peek(self) -> dict[str, Any]:
        """The next message of the first process, which stays the next one (waits for it)."""
        while self._next is None:
            key, client = self._key(self._count), self.processes.client
            try:
                self._next = json.loads(client.blocking_key_value_get(key, POLL_MS))
            except Exception as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    leave(f"{self.processes.first_gone} ({in_one_line(error)})")
                continue
            self._count += 1
            if self._count % BATCH == 0:
                own = f"{self._folder}/read/{self.processes.index}"
                client.key_value_set(own, str(self._count // BATCH), allow_overwrite=True)
        return self._next

    def follow(self) -> None:
        """Do what the first process says, until it ends."""
        while True:
            message = dict(self.peek())
            match message.pop("do"):
                case "end":
                    self._next = None
                    return
                case "round":
                    self._llm.step()
                case name if name in CALLS:
                    if name == "warm_up":
                        message["compression"] = _compression(self._llm, message["compression"])
                    getattr(self._llm, name)(**message)
                case name:
                    raise UserError(f"process 0 does {name}, which this version does not know")

    def end(self) -> None:
        """Nothing more will come."""
        if self.processes.leads and not self._ended:
            self._ended = True
            atexit.unregister(self.end)
            with contextlib.suppress(Exception):  # nobody may be there any more
                self._send({"do": "end"})

    # Messages

    def _key(self, number: int) -> str:
        return f"{self._folder}/told/{number // BATCH}/{number}"

    def _send(self, message: Mapping[str, Any]) -> None:
        self.processes.client.key_value_set(self._key(self._count), json.dumps(message))
        self._count += 1
        if self._count % BATCH == 0:
            self._delete_read()

    def _delete_read(self) -> None:
        client = self.processes.client
        read = [int(told) for _, told in client.key_value_dir_get(f"{self._folder}/read")]
        upto = min(read) if len(read) == self.processes.count - 1 else 0
        for batch in range(self._kept, upto):
            client.key_value_delete(f"{self._folder}/told/{batch}")
        self._kept = max(self._kept, upto)

    # Requests

    def _told(self, request: Request) -> dict[str, Any]:
        return {
            "id": request.id,
            "order": request.order,
            "prompt": request.prompt.tolist(),
            "sampling": _fields(request.sampling),
            "compression": plain_compression(self._llm, request.compression),
            "shared": request.shared_tokens,
            "report": request.report_kept,
        }

    def _taken(self, told: Mapping[str, Any]) -> Request:
        """A request that the first process has taken in."""
        own = self._own.pop(told["id"], None)
        if own is not None:
            if _through_json(self._told(own)) != told:
                raise UserError(
                    f"process {self.processes.index} was given another request {own.id!r} than "
                    "process 0: run the same program in all, or LLM.follow() in all but one"
                )
            return own
        request = checked_request(
            self._llm,
            np.asarray(told["prompt"], np.int32),
            SamplingParams(**told["sampling"]),
            cast(CompressionConfig, _compression(self._llm, told["compression"])),
            told["id"],
            told["order"],
        )
        request.waits, request.shared_tokens = False, told["shared"]
        request.report_kept = told["report"]
        self._llm.engine.take_over(request)
        return request

    def _ends(self, told: Sequence[Sequence[Any]]) -> Iterator[Ending]:
        known = self._llm.engine.intake.open
        for name, reason, error in told:
            yield known[name][0], reason, error


def agreed_settings(llm: "LLM", calibration: Calibration | None) -> dict[str, Any]:
    """What has to be the same in all processes of an engine, by name."""
    compression, config = _fields(llm.compression), _fields(llm.config)
    del config["max_waiting"]  # the first process has the queue
    compression["method"] = llm.compression.resolved.name
    config["methods"] = [as_method(method).name for method in llm.config.methods]
    plan = llm.plan
    return {
        **versions(),
        "model": llm.model.config if llm.model.source == DUMMY else llm.model.fingerprint,
        "end-of-sequence tokens": sorted(llm.model.tokenizer.eos_ids),
        **compression,
        **config,
        "calibration": None if calibration is None else _digest(calibration.arrays),
        "cache dtype": plan.spec.codec.name,
        "dtype": activation_dtype(llm.model.params).name,
        "weight dtype": llm.model.config.weight_dtype,
        "weights": plan.weights,
        "blocks": plan.num_blocks,
    }


def versions() -> dict[str, str]:
    """Of what decides which steps there are, and what they compute."""
    return {"kvjax": kvjax.__version__, "jax": jax.__version__, "jaxlib": version("jaxlib")}


def _digest(arrays: Mapping[str, np.ndarray]) -> str:
    found = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        found.update(f"{name} {array.dtype} {array.shape}".encode())
        found.update(np.ascontiguousarray(array).view(np.uint8).data)
    return found.hexdigest()[:16]


def plain_compression(llm: "LLM", compression: CompressionConfig | None) -> dict[str, Any] | None:
    """Settings as a message has them.

    Raises:
        UserError: their method has no name, and is not the engine's own.
    """
    if compression is None:
        return None
    fields = _fields(compression)
    if not isinstance(compression.method, str):
        if compression.method != llm.compression.method:
            raise UserError(
                f"method {compression.method.name} with several processes: a request's method "
                "has to have a name there; make it the engine's own, or add it to the registry"
            )
        fields["method"] = None
    return fields


def _compression(llm: "LLM", told: Mapping[str, Any] | None) -> CompressionConfig | None:
    if told is None:
        return None
    method = llm.compression.method if told["method"] is None else told["method"]
    return CompressionConfig(**{**told, "method": method})


def _fields(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def _through_json(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as the others read it; numbers may be NumPy's."""
    return json.loads(json.dumps(message, default=lambda value: value.item()))


def _named(message: Mapping[str, Any]) -> str:
    given = ", ".join(f"{key}={value!r}" for key, value in message.items() if key != "do")
    return f"{message['do']}({given})" if message["do"] in CALLS else message["do"]
