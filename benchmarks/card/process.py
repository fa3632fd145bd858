"""Calls as processes: a parent that keeps the time, and children that measure parts."""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import hashlib
import importlib
import importlib.metadata
import io
import itertools
import json
import os
import platform
import re
import subprocess
import sys
import tarfile
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.card import plan
from benchmarks.card.parts import MEMORY_FRACTION, Group, Machine, Part
from benchmarks.card.results import ATTEMPTS, CALLS, gather, results_of
from kvjax.errors import UserError

PLANS = {"first": plan.first, "rest": plan.rest}
SECONDS = {"first": 560, "rest": 200}
"""What a command takes if nobody says: a machine that lends ten minutes has to start, too."""
USUAL_SECONDS = 540
IMPORTED = ("kvjax.engine", "kvjax.cli.throughput.measure")
NO_DEVICE = 4
"""Exit code of a process that found no card: where the first one does not, no other one would."""
COMPILE_LIMIT = 240
"""Seconds after which a process hangs that has not compiled its next part."""
ARCHIVE_BYTES = 15 << 20
"""Most of an archive of compiled programs."""
ARCHIVES = 3
KILL_SECONDS = 20
"""What a killed process has to go."""
MEASURED = ("kernels", "cache", "models", "engine")
"""What of the package runs in every call."""
SERVED = ("cli/throughput",)
"""What of it runs in C, too."""
PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "flax", "numpy")


def groups_of(call: str, small: bool) -> tuple[Group, ...]:
    """The parts of a call, or of a plan over several."""
    if call in PLANS:
        return PLANS[call](lambda call: groups_of(call, small))
    groups = importlib.import_module(f"benchmarks.card.{CALLS[call][0]}").groups(small)
    return tuple(dataclasses.replace(group, call=call) for group in groups)


def check_imports() -> None:
    """Refuse to begin where a package is missing: each part would find out by itself."""
    for name in IMPORTED:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise UserError(f"{name} cannot be imported: {error}") from error


def source(call: str) -> str:
    """What stands for the source that a call measures: what was measured with another one is out of
    date."""
    digest = hashlib.sha256()
    for name in MEASURED + (SERVED if call == "C" else ()):
        for file in sorted((Path(__file__).parents[2] / "kvjax" / name).rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


class Mark(NamedTuple):
    """What a process is at."""

    part: str
    since: float
    limit: float
    """Seconds after which it hangs."""


def running_file(options: argparse.Namespace, share: int) -> Path:
    """Holds the mark of the part that a process compiles or measures."""
    return options.out / f"running-{share}.json"


def peaks_file(options: argparse.Namespace) -> Path:
    """What the processes of one command know of the card."""
    return options.out / "peaks.json"


# The parent.


def run_call(call: str, options: argparse.Namespace, deadline: float) -> int:
    """Measure what is left of a call; 1 if anything failed, is wrong or is still left."""
    cache = Path(os.environ.get("JAX_COMPILATION_CACHE_DIR", "/tmp/kvjax-card-programs"))
    if not options.rehearse:
        unpack_programs(cache, options)
    groups, met = groups_of(call, options.rehearse), False
    for name in {group.call for group in groups}:
        gather(name, options)  # of a command that was broken off
    # What failed may hang: it is tried again when all else was.
    for attempts, group in itertools.product(range(1, ATTEMPTS + 1), groups):
        parts, ran = tuple(part for part in group.parts if options.only in part.name), False
        now, until = source(group.call), deadline
        if group.seconds is not None:
            until = min(deadline, time.monotonic() + group.seconds)
        while pending := results_of(group.call, options).pending(parts, now, attempts):
            left = until - time.monotonic()
            if left < min(part.seconds for part in pending) + 5:
                break
            before, ran = json.dumps(results_of(group.call, options).parts), True
            codes = run_children(call, group, attempts, options, until, cache)
            gather(group.call, options)
            if set(codes) == {NO_DEVICE} and not met:
                return report_of(call, options)
            met = True
            for share in range(group.processes):
                note_failure(group.call, pending, options, share, now, until)
            if json.dumps(results_of(group.call, options).parts) == before:
                break  # nothing fits into what is left
        if ran and not options.rehearse:
            pack_programs(cache, options.out)
    return report_of(call, options)


def run_children(
    call, group: Group, attempts: int, options, deadline: float, cache: Path
) -> list[int | None]:
    """Run the processes of a group, as long as its parts and the group have time; their exit
    codes."""
    environment = dict(os.environ)
    environment |= {
        "PYTHONUNBUFFERED": "1",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.5",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    environment.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    environment.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", str(MEMORY_FRACTION))
    environment |= group.environment
    flags = group.environment.get("XLA_FLAGS", "")
    if options.rehearse:
        environment["JAX_PLATFORMS"], flags = "cpu", ""
        # A program that is interpreted holds one of XLA's threads for each of its own that waits.
        environment.setdefault("NPROC", "16")
        environment.pop("JAX_COMPILATION_CACHE_DIR")
    else:
        # Without a card JAX would take the processor, for hours.
        environment.setdefault("JAX_PLATFORMS", "cuda,cpu")
    environment["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
    command = [sys.executable, "-m", "benchmarks.card", call, "--child", group.name]
    command += ["--out", str(options.out), "--only", options.only, "--attempts", str(attempts)]
    command += ["--card", options.card]
    command += ["--seconds", str(max(1.0, deadline - time.monotonic()))]
    command += ["--rehearse"] if options.rehearse else []
    command += ["--resume", str(options.resume)] if options.resume else []
    begun = time.monotonic()
    running = [running_file(options, share) for share in range(group.processes)]
    marks = [Mark("", begun, COMPILE_LIMIT)] * group.processes
    processes: list[subprocess.Popen] = []
    try:
        for share, file in enumerate(running):
            file.unlink(missing_ok=True)
            processes.append(
                subprocess.Popen(
                    [*command, "--share", str(share)],
                    env=environment,
                    cwd=Path(__file__).parents[2],
                )
            )
        waited = dict(enumerate(processes))
        while waited := {n: p for n, p in waited.items() if p.poll() is None}:
            time.sleep(0.2)
            now = time.monotonic()
            for share, process in list(waited.items()):
                # Between two parts there is none for a moment.
                mark = marks[share] = read_running(running[share]) or marks[share]
                if now > deadline + 3 or now - mark.since > mark.limit:
                    end(process)
                    del waited[share]
    finally:
        for process in processes:
            end(process)
    return [process.poll() for process in processes]


def end(process: subprocess.Popen) -> None:
    """Kill a process; one that the device holds may take longer to go than anybody waits."""
    if process.poll() is None:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(KILL_SECONDS)


def read_running(file: Path) -> Mark | None:
    try:
        return Mark(*json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def write_running(file: Path, part: str, limit: float) -> None:
    draft = file.with_suffix(".draft")
    draft.write_text(json.dumps(Mark(part, time.monotonic(), limit)), encoding="utf-8")
    draft.replace(file)


def note_failure(
    call: str, pending: list[Part], options, share: int, now: str, deadline: float
) -> None:
    """A part in the middle of which its process ended has failed, unless the call's time was up."""
    found = read_running(running_file(options, share))
    running_file(options, share).unlink(missing_ok=True)
    if found is None or time.monotonic() > deadline:
        return
    part = next(part for part in pending if part.name == found.part)
    seconds = time.monotonic() - found.since
    error = f"the process ended after {seconds:.0f} s, of at most {found.limit:.0f}"
    results_of(call, options).note(part, now, {"error": error})


def report_of(call: str, options: argparse.Namespace) -> int:
    """Print what became of every part."""
    bad = 0
    for group in groups_of(call, options.rehearse):
        results, now = results_of(group.call, options), source(group.call)
        for part in group.parts:
            if options.only not in part.name:
                continue
            row = results.parts.get(part.name, {})
            if row.get("source") != now:
                row = {"error": "not measured: no time was left"}
            failed = not part.optional and ("error" in row or not row.get("good", True))
            bad += failed
            print(
                f"{group.call} {'FAILED ' if failed else ''}{part.name}: {said_of(row)}", flush=True
            )
    return 1 if bad else 0


def said_of(row: dict[str, Any]) -> str:
    """A row in one line."""
    skipped = (
        "source",
        "date",
        "attempts",
        "optional",
        "rows",
        "memory",
        "versions",
        "limits",
        "trace",
    )
    text = ", ".join(f"{key} {value}" for key, value in row.items() if key not in skipped)
    return text if len(text) <= 300 else f"{text[:300]} …"


def unpack_programs(cache: Path, options: argparse.Namespace) -> None:
    """Put programs that earlier calls compiled where JAX looks for them."""
    cache.mkdir(parents=True, exist_ok=True)
    for folder in {options.out, options.resume or options.out}:
        for archive in sorted(folder.glob("programs-*.tar")):
            try:
                with tarfile.open(archive) as tar:
                    tar.extractall(cache, filter="data")
            except (tarfile.TarError, EOFError, OSError) as error:
                print(f"{archive}: {error}; what it held is compiled anew", flush=True)


def pack_programs(cache: Path, out: Path) -> None:
    """Put the compiled programs into a few archives that fit through a narrow door."""
    files = sorted(cache.rglob("*"), key=lambda f: f.stat().st_mtime)
    files = [f for f in files if f.is_file() and f.stat().st_size < ARCHIVE_BYTES // 2]
    for number in range(ARCHIVES):
        size, content = 0, io.BytesIO()
        with tarfile.open(fileobj=content, mode="w") as tar:
            while files and size + files[-1].stat().st_size < ARCHIVE_BYTES:
                size += files[-1].stat().st_size + 2048
                tar.add(files[-1], files[-1].relative_to(cache))
                files.pop()
        if size:
            draft = out / "programs.draft"
            draft.write_bytes(content.getvalue())
            draft.replace(out / f"programs-{number}.tar")


# The child.


def child(options: argparse.Namespace) -> int:
    """Measure the pending parts of one group, each written at once."""
    deadline = time.monotonic() + options.seconds
    (call,) = options.calls
    (group,) = (g for g in groups_of(call, options.rehearse) if g.name == options.child)
    parts = tuple(part for part in group.parts if options.only in part.name)
    now = source(group.call)
    machine = Machine(small=options.rehearse, peaks_file=peaks_file(options))
    results = results_of(group.call, options)
    pending = results.pending(parts, now, options.attempts)
    if group.processes > 1:
        pending = pending[options.share :: group.processes]
        results.file = results.file.with_suffix(f".{options.share}.json")
    if group.on_device:
        try:
            results.content["machine"] = machine_here()
        except RuntimeError as error:
            print(f"no card: {error}", flush=True)
            return NO_DEVICE
    running = running_file(options, options.share)
    for part, compiled in compiled_parts(machine, group, pending, running, deadline):
        left = deadline - time.monotonic()
        if left < part.seconds:
            running.unlink(missing_ok=True)
            print(f"{part.name}: {left:.0f} s are not enough", flush=True)
            continue
        # Interpreters take longer than kernels.
        limit = part.limit + (COMPILE_LIMIT if options.rehearse else 0)
        write_running(running, part.name, limit)
        start = time.monotonic()
        try:
            found: dict[str, Any] = part.run(machine, compiled())
        except Exception as error:
            traceback.print_exc()
            found = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
        found["took_seconds"] = round(time.monotonic() - start, 2)
        results.note(part, now, found)
        running.unlink(missing_ok=True)
        print(f"{part.name}: {said_of(found)}", flush=True)
        if "error" in found and "CUDA_ERROR" in found["error"]:
            return 1  # nothing runs in this process any more
    return 0


def end_with_the_parent() -> None:
    """Nobody is left to end a child whose parent was killed."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def compiled_parts(
    machine: Machine, group: Group, pending: list[Part], running: Path, deadline: float
) -> Iterator[tuple[Part, Any]]:
    """Each part when its programs are compiled, with a function that gives them.

    Threads compile ahead: XLA uses one core for most of it. What traces for them is the thread that
    measures, while it waits: Python runs one thread at a time, and a time taken beside another one
    that traces is several times too long.
    """
    pool = concurrent.futures.ThreadPoolExecutor(max(2, (os.cpu_count() or 2) - 1))
    futures: dict[str, concurrent.futures.Future] = {}
    ahead = list(pending)

    def begin(part: Part) -> None:
        futures[part.name] = future = concurrent.futures.Future()
        try:
            programs = part.programs(machine).items()
            lowered = {name: machine.lowered(program) for name, program in programs}
        except Exception as error:
            future.set_exception(error)
        else:
            if lowered:
                futures[part.name] = pool.submit(lambda: {n: c() for n, c in lowered.items()})
            else:
                future.set_result({})

    try:
        for part in pending:
            write_running(running, part.name, COMPILE_LIMIT)
            while ahead and time.monotonic() < deadline:
                mine = futures.get(part.name)
                if group.overlap and mine is not None and mine.done():
                    break
                begin(ahead.pop(0))
            # Each program is let go with its part.
            mine = futures.pop(part.name, None)
            if mine is None:
                break
            wanted = [mine, *(() if group.overlap else futures.values())]
            concurrent.futures.wait(wanted, max(0.0, deadline - time.monotonic()))
            if not mine.done():
                break
            yield part, mine.result
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def machine_here() -> dict[str, Any]:
    """The card, its driver, and the versions of what runs on it."""
    import jax

    device = jax.devices()[0]
    versions: dict[str, str] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    found = {"device": device.device_kind, "card": card_here(), "versions": versions}
    return found | {"bytes": (device.memory_stats() or {}).get("bytes_limit")}


def card_here() -> str | None:
    """Name, driver and memory of the card, as its driver says."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return next(iter(done.stdout.strip().splitlines()), None)


def prefix_of(card: str | None) -> str:
    """How the files of a card begin: what was measured on two is not to be mixed."""
    found = re.search(r"\b[A-Z]{1,2}\d{1,3}\b", card or "")
    return found[0].lower() if found else "gpu"


# Without the card.


def compile_only(options: argparse.Namespace) -> int:
    """Compile the programs of the calls for an H200: seconds, peak of memory, what fails."""
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    from benchmarks.kernels.compile import absent_device, check_toolchain

    check_toolchain("h200")
    machine, failed = Machine(target=absent_device("h200")), 0
    groups = [group for call in options.calls for group in groups_of(call, small=False)]
    for part in (part for group in groups for part in group.parts):
        programs = part.programs(machine) if options.only in part.name else {}
        for name, program in programs.items():
            start = time.monotonic()
            try:
                said = memory_of(machine.lowered(program)().memory_analysis())
            except Exception as error:
                failed += 1
                said = f"FAILED: {type(error).__name__}: {error}".splitlines()[0][:300]
            print(f"{part.name}: {name}: {time.monotonic() - start:.1f} s, {said}", flush=True)
    return 1 if failed else 0


def memory_of(analysis: Any) -> str:
    """The peak of a program's memory, in words."""
    peak = analysis.argument_size_in_bytes + analysis.temp_size_in_bytes
    peak += analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return f"{peak / 1e9:.2f} GB, {analysis.temp_size_in_bytes / 1e9:.3f} GB of it temporary"
