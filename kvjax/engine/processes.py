"""Several processes with devices of their own that run one engine: `jax.distributed`.

Steps run over the devices of all processes, so every process has to make the same calls in the same
order, and one that does not come leaves the others waiting in a collective for ever. What they tell
each other goes through the key-value store of JAX's coordination service, which the first process
keeps. Each says there, every second, that it lives; where one has been silent for `SILENCE_SECONDS`
or says that it cannot go on, all the others end with a line that names it.
"""

import atexit
import contextlib
import functools
import itertools
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import jax
from jax._src import clusters, distributed  # neither has a public name yet

from kvjax.checks import check_number, check_whole, shown
from kvjax.engine.link import Link
from kvjax.errors import UserError, in_one_line

AUTO = "auto"
"""The coordinator that JAX finds by itself."""
MOST_PROCESSES = 2**16
JOIN_SECONDS = 120.0
PULSE_SECONDS = 1.0
SILENCE_SECONDS = 15.0
"""A process that has said nothing for so long counts as dead."""
EXCHANGE_MS = 24 * 3600 * 1000
"""Where processes wait for each other: some load their weights for long. A dead one is noticed."""
LINGER_SECONDS = 1.0
"""The coordination service ends with the first process: others read the last words before."""
_LEAVE_SECONDS = 5.0
_BESIDE_PROXIES = "no_grpc_proxy"
"""The variable of the environment in which gRPC looks for hosts that no proxy stands before."""
_MOST_SECONDS = 24 * 3600
_ROOT = "kvjax"


class Processes:
    """The processes of an engine, as one of them sees the others."""

    def __init__(self, client: Any, index: int, count: int):
        """Say nothing yet: `watch` begins.

        Args:
            client: of JAX's coordination service.
            index: of this process.
            count: of all of them.
        """
        self.client, self.index, self.count = client, index, count
        self.leads = index == 0
        """Whether the others follow this one."""
        self.on_lost: Callable[[str], None] = lambda reason: None
        """Called by a thread, with the reason, before this process ends because of another one."""
        self.on_asked: Callable[[], None] = lambda: None
        """Called by a thread where another process was asked to end (`ask_to_end`)."""
        self._numbers = itertools.count()
        self._over, self._closed = threading.Event(), threading.Event()
        self._watching = threading.Thread(target=self._watch, name="kvjax processes", daemon=True)
        self._told = threading.Lock()
        self._heard: dict[int, tuple[str, float]] = {}
        """What each process has said last, and when it was new."""

    def watch(self) -> None:
        """From now on say that this process lives, and end it where another one has ended."""
        atexit.register(self.close)
        self._hook, sys.excepthook = sys.excepthook, self._uncaught
        self._watching.start()

    def next_number(self) -> int:
        """One more than the last: the same in all processes, if all ask as often."""
        return next(self._numbers)

    # What all of them say

    def exchange(self, own: str) -> list[str]:
        """What each process says, in their order. All of them have to call it."""
        name = f"{_ROOT}/said/{self.next_number()}"
        self.client.key_value_set(f"{name}/{self.index}", own)
        return [
            self.client.blocking_key_value_get(f"{name}/{index}", EXCHANGE_MS)
            for index in range(self.count)
        ]

    def least(self, own: int) -> int:
        """The least of the numbers that the processes have."""
        return min(map(int, self.exchange(str(own))))

    def meet(self) -> None:
        """Wait until all processes are here."""
        self.client.wait_at_barrier(f"{_ROOT}/met/{self.next_number()}", EXCHANGE_MS)

    def compare(self, own: Mapping[str, Any]) -> None:
        """Refuse processes that were started otherwise than the first one.

        Args:
            own: what has to be the same everywhere, by name.

        Raises:
            UserError: names the process, what it has and what the first one has.
        """
        name, others = f"{_ROOT}/same/{self.next_number()}", range(1, self.count)
        settings = {key: value if isinstance(value, str) else repr(value) for key, value in
                    own.items()}  # fmt: skip
        self.client.key_value_set(f"{name}/{self.index}", json.dumps(settings))
        # Whoever counts other processes than the first one does is not waited for.
        for index in others if self.leads else (0,):
            told = json.loads(self.client.blocking_key_value_get(f"{name}/{index}", EXCHANGE_MS))
            first, other = (settings, told) if self.leads else (told, settings)
            of = index if self.leads else self.index
            for key in dict.fromkeys((*first, *other)):
                if first.get(key) != other.get(key):
                    self.stop_watching()
                    if self.leads:
                        time.sleep(LINGER_SECONDS)
                    raise UserError(
                        f"process {of} has {key} {shown(other.get(key))} and process 0 "
                        f"{shown(first.get(key))}: start all with the same settings and version"
                    )

    # Ends

    def ask_to_end(self) -> None:
        """Have the first process end all of them, in its own time."""
        self.client.key_value_set(f"{_ROOT}/asked/{self.index}", "", allow_overwrite=True)

    @property
    def asked(self) -> bool:
        """Whether any process was asked to end."""
        return bool(self.client.key_value_dir_get(f"{_ROOT}/asked"))

    def fail(self, reason: str) -> None:
        """This process cannot go on: the others end, too."""
        with self._told:
            if self._over.is_set():
                return
            self._over.set()
            with contextlib.suppress(Exception):
                key = f"{_ROOT}/failed/{self.index}"
                self.client.key_value_set(key, reason, allow_overwrite=True)
                if self.leads:
                    time.sleep(2 * PULSE_SECONDS)

    def end_together(self, reason: str) -> NoReturn:
        """End this process, with exit code 1, and all others, for something that went wrong.

        Where it went wrong because another one has ended, that is what is said.
        """
        with contextlib.suppress(Exception):
            before = self._beats()
            time.sleep(3 * PULSE_SECONDS)
            after = self._beats()
            quiet = [n for n in range(self.count) if after.get(n) == before.get(n)]
            if quiet:
                reason = f"process {quiet[0]} of {self.count} has ended: {reason}"
        self.fail(reason)
        self.on_lost(reason)
        leave(reason)

    def stop_watching(self) -> None:
        """From now on a process may end."""
        self._over.set()

    def close(self) -> None:
        """Leave the coordination service, when all others do."""
        self.stop_watching()
        jax.distributed.shutdown()
        # Until here it is said that this process lives. Python must not end while the thread is on
        # its way back from the service: it would take the process with it, in words of its own.
        self._closed.set()
        if self._watching.is_alive():
            self._watching.join(_LEAVE_SECONDS)

    def _uncaught(self, kind: type[BaseException], error: BaseException, trace: Any) -> None:
        """An exception that ends the program: at its exit JAX would wait for the others."""
        self._hook(kind, error, trace)
        self.end_together(in_one_line(error))

    # The others

    def _watch(self) -> None:
        beats = itertools.count()
        while True:
            reason = None
            try:
                own = f"{_ROOT}/alive/{self.index}"
                self.client.key_value_set(own, str(next(beats)), allow_overwrite=True)
                if not self._over.is_set():
                    reason = self.why_lost(time.monotonic())
                    if self.leads and self.asked:
                        self.on_asked()
            except Exception as error:
                if self._over.is_set():
                    return
                reason = f"{self.first_gone} ({in_one_line(error)})"
            if reason is not None:
                self._lose(reason)
            if self._closed.wait(PULSE_SECONDS):
                return

    def why_lost(self, now: float) -> str | None:
        """Why this process cannot go on, for the sake of another; None where it can. To be asked
        again and again, at times `now` in seconds."""
        for key, reason in self.client.key_value_dir_get(f"{_ROOT}/failed"):
            return f"process {key.rsplit('/', 1)[-1]}: {reason}"
        told = self._beats()
        for index in range(self.count):
            before, since = self._heard.get(index, ("", now))
            if index not in self._heard or told.get(index, "") != before:
                self._heard[index] = told.get(index, ""), now
            elif now - since > SILENCE_SECONDS:
                return f"process {index} of {self.count} has ended, or hangs"
        return None

    def _beats(self) -> dict[int, str]:
        """What each process has said last."""
        told = self.client.key_value_dir_get(f"{_ROOT}/alive")
        return {int(key.rsplit("/", 1)[-1]): value for key, value in told}

    @property
    def first_gone(self) -> str:
        """What is said of the first process where it does not answer."""
        return f"process 0 of {self.count} has ended, or cannot be reached"

    def lose_first(self) -> None:
        """The connection to the first process is broken: end this one, unless both are to end."""
        self._lose(self.first_gone)

    def _lose(self, reason: str) -> None:
        with self._told:
            if self._over.is_set():
                return
            self._over.set()
        try:
            self.on_lost(reason)
        finally:
            leave(reason)


def leave(reason: str) -> NoReturn:
    """End this process: its other threads may wait for ever in a collective."""
    with contextlib.suppress(Exception):
        line = f"error: {reason}; this process ends, start all of them again"
        print(" ".join(line.split()), file=sys.stderr, flush=True)
    os._exit(1)


def check_process_options(
    coordinator: str | None, num_processes: int | None, process_id: int | None, seconds: float
) -> None:
    """Refuse what `join` would, before anything slow.

    Raises:
        UserError: no address, or numbers that do not go together.
    """
    if coordinator is None:
        if num_processes is not None or process_id is not None:
            raise UserError(
                "--num-processes and --process-id need --coordinator HOST:PORT, or auto"
            )
        return
    check_number("--coordinator-timeout", seconds, 0, above=True)
    if num_processes is not None:
        check_whole("--num-processes", num_processes, 1, MOST_PROCESSES)
    if process_id is not None:
        check_whole("--process-id", process_id, 0, (num_processes or MOST_PROCESSES) - 1)
    if coordinator != AUTO:
        _address(coordinator)


def _address(coordinator: str) -> tuple[str, int]:
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 2**16:
        raise UserError(f"--coordinator {shown(coordinator)}: give HOST:PORT of process 0, or auto")
    host = host.strip("[]")
    try:
        host.encode("idna")  # as sockets do
    except UnicodeError as error:
        raise UserError(
            f"--coordinator {shown(coordinator)}: {shown(host)} can be no host ({error})"
        ) from error
    return host, int(port)


def join(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    seconds: float = JOIN_SECONDS,
) -> Processes | None:
    """Become one of several processes, before JAX has looked for its devices.

    Args:
        coordinator: HOST:PORT of the first process; "auto" for what JAX finds by itself (under
            SLURM, Open MPI, Kubernetes jobs and on TPU pods); None for a process of its own.
        num_processes: how many there are; None for what JAX finds.
        process_id: which one this is, from 0 on; likewise.
        seconds: how long others are waited for.

    Returns:
        The processes; None where there is only this one.

    Raises:
        UserError: the coordinator cannot be reached, or not all came in time; values that do not
            go together.
    """
    check_process_options(coordinator, num_processes, process_id, seconds)
    if coordinator is None:
        return None
    given: dict[str, Any] = {"num_processes": num_processes, "process_id": process_id}
    until = time.monotonic() + seconds
    links: list[Link] = []
    if coordinator != AUTO:
        given["coordinator_address"] = coordinator
        if process_id:
            _wait_for(coordinator, until)
        elif process_id == 0:
            _check_port(coordinator)
    # It would take SIGTERM from those who handle it.
    jax.config.update("jax_enable_preemption_service", False)
    # It would warn of variables by which nothing hangs here.
    jax.config.update("jax_check_proxy_envs", False)
    errors: list[Exception] = []

    def initialize() -> None:
        try:
            if coordinator == AUTO or None in given.values():
                given.update(_found(**given))
            if given["process_id"]:
                links.append(Link(_address(given["coordinator_address"])))
                given["coordinator_address"] = links[0].address
            # gRPC would ask the proxy that an environment names for others: for this port, too.
            os.environ[_BESIDE_PROXIES] = _address(given["coordinator_address"])[0]
            jax.distributed.initialize(**given, initialization_timeout=_MOST_SECONDS)
        except Exception as error:
            errors.append(error)

    # Where its own time is up JAX dumps the process's state, and nobody can catch that.
    thread = threading.Thread(target=initialize, name="kvjax joins", daemon=True)
    thread.start()
    thread.join(max(0.0, until - time.monotonic()))
    if thread.is_alive():
        raise UserError(
            f"--coordinator {coordinator}: not all {num_processes or ''} processes came within "
            f"{seconds:g} s; start all of them, with the same address and number"
        )
    if errors and isinstance(errors[0], ValueError | TypeError):
        raise UserError(
            f"--coordinator {coordinator}: JAX finds no number of processes here "
            f"({in_one_line(errors[0])}); give --coordinator HOST:PORT, --num-processes and "
            "--process-id"
        )
    if errors:
        raise UserError(
            f"--coordinator {coordinator}: {in_one_line(errors[0])}; start all processes, with "
            "the same address and number"
        )
    joined = current()
    if joined is not None and links:
        links[0].on_gone = joined.lose_first
    return joined


def _found(
    num_processes: int | None, process_id: int | None, coordinator_address: str | None = None
) -> dict[str, Any]:
    """What is given of the processes, and what JAX finds of the rest, for
    `jax.distributed.initialize`.

    Raises:
        ValueError: it finds nothing.
    """
    names = ("coordinator_address", "num_processes", "process_id", "local_device_ids")
    address = coordinator_address or os.environ.get("JAX_COORDINATOR_ADDRESS")
    found = clusters.ClusterEnv.auto_detect_unset_distributed_params(
        address, num_processes, process_id, None, None, _MOST_SECONDS
    )
    if None in found[:3]:
        raise ValueError("no coordinator, number of processes or process id is set")
    return dict(zip(names, found, strict=True))


def _wait_for(coordinator: str, until: float) -> None:
    """Wait until something answers at the coordinator's address."""
    address, why = _address(coordinator), ""
    while (left := until - time.monotonic()) > 0:
        try:
            with socket.create_connection(address, timeout=left):
                return
        except OSError as error:
            why = error.strerror or str(error)
            time.sleep(min(0.2, left))
    raise UserError(
        f"--coordinator {coordinator}: nobody answers there ({why or 'in no time'}); start "
        "process 0 first, or give its address"
    )


def _check_port(coordinator: str) -> None:
    """Refuse a port that is taken: the coordination service would end the process."""
    host, port = _address(coordinator)
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind(("", port))
    except OSError as error:
        raise UserError(
            f"--coordinator {coordinator}: port {port} cannot be had here "
            f"({error.strerror or error}); give another to all processes"
        ) from error


def current() -> Processes | None:
    """The processes of which this is one; None where there is only this one."""
    if not jax.distributed.is_initialized() or jax.process_count() == 1:
        return None
    return _one()


@functools.cache
def _one() -> Processes:
    client = distributed.global_state.client
    found = Processes(client, jax.process_index(), jax.process_count())
    found.watch()
    return found
