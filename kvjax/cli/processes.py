"""The options by which a command becomes one of several processes, and what each of them does."""

from __future__ import annotations

import argparse
import contextlib
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from kvjax import startup
from kvjax.errors import UserError, in_one_line

if TYPE_CHECKING:
    import asyncio

    from kvjax.engine import LLM, AsyncLLM
    from kvjax.engine.processes import Processes

READ_SECONDS = 2.0
"""For clients to read why their answers were cut short, before the process ends."""
JOIN_SECONDS = 120.0


def add_process_options(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add the options that `joined` reads."""
    parser.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help="of process 0, for a server of several processes that share the model; auto: as JAX "
        "finds it (SLURM, Open MPI, Kubernetes jobs, TPU pods)",
    )
    parser.add_argument("--num-processes", type=int, metavar="N", help="how many there are")
    parser.add_argument(
        "--process-id", type=int, metavar="I", help="from 0, which takes the requests"
    )
    parser.add_argument(
        "--coordinator-timeout",
        type=float,
        default=JOIN_SECONDS,
        metavar="S",
        help="seconds to wait for the others (%(default)s)",
    )


@contextlib.contextmanager
def joined(options: argparse.Namespace, compared: Sequence[str]) -> Iterator[Processes | None]:
    """Be one of several processes, if the options say so: None if not.

    Without `--tensor-parallel` the model is split over all their devices.

    Args:
        options: of the command.
        compared: those that all processes have to be given alike.

    Raises:
        UserError: the others cannot be reached, or were started otherwise.
    """
    given = options.num_processes, options.process_id
    if options.coordinator is None and given == (None, None):
        options.tensor_parallel = options.tensor_parallel or 1
        yield None
        return
    from kvjax.engine.agreement import versions
    from kvjax.engine.processes import check_process_options, join

    check_process_options(options.coordinator, *given, options.coordinator_timeout)
    # From here on other threads may wait for processes that never come.
    startup.leaves_at_once()
    processes = join(options.coordinator, *given, options.coordinator_timeout)
    if processes is None:
        options.tensor_parallel = options.tensor_parallel or 1
        yield None
        return
    try:
        own = {name.replace("_", " "): getattr(options, name) for name in compared}
        processes.compare({"processes": processes.count, **versions(), **own})
        if options.tensor_parallel is None:
            import jax

            options.tensor_parallel = jax.device_count()
        yield processes
    except BaseException as error:
        processes.fail(in_one_line(error))
        raise
    processes.close()


def follow(llm: LLM) -> None:
    """Do what the first process does with its engine, until that ends.

    The first SIGTERM or Ctrl-C asks it to end; a second one ends this process at once.
    """
    agreement = llm.engine.agreement
    if agreement is None:
        raise UserError("there are no other processes")
    asked: list[int] = []
    thrown: list[BaseException] = []

    def ask(number: int, frame: object) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    def run() -> None:
        try:
            llm.follow()
        except BaseException as error:
            thrown.append(error)

    before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
    # Python sees no signal in a thread that waits for a message.
    thread = threading.Thread(target=run, name="kvjax engine", daemon=True)
    thread.start()
    told = False
    try:
        while thread.is_alive():
            thread.join(0.2)
            if asked and not told:
                told = True
                agreement.processes.ask_to_end()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if thrown:
        raise thrown[0]


def lead(llm: AsyncLLM, stop: asyncio.Event) -> None:
    """Have an engine's server end with the other processes, where there are any.

    Args:
        llm: the engine.
        stop: ends the server as a signal does; an event of the running loop.
    """
    import asyncio

    agreement = llm.llm.engine.agreement
    if agreement is None:
        return
    loop = asyncio.get_running_loop()

    def asked() -> None:
        with contextlib.suppress(RuntimeError):  # it has ended
            loop.call_soon_threadsafe(stop.set)

    def lost(reason: str) -> None:
        llm.lose(reason)
        time.sleep(READ_SECONDS)

    agreement.processes.on_asked, agreement.processes.on_lost = asked, lost
