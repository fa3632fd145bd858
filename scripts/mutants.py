"""Breaks the code in one place at a time and runs the tests that are meant to notice.

Why: a suite that is green says nothing of what it would let pass. tests/mutants/AREA.toml lists
single mutations of what matters, each with the tests that catch it; a mutant that survives shows a
hole in these tests.

Examples:
    python scripts/mutants.py                                 # all of them, an hour or so
    python scripts/mutants.py --only '*eos*'                  # those with such a name
    python scripts/mutants.py --area engine --slice 3/10      # the third tenth of an area
    python scripts/mutants.py --list

An entry:
    [[mutant]]
    name = "first-token-eos-ignored"         # unique, says what is broken
    file = "kvjax/engine/insert.py"
    old = "active = ok & ~ended"             # occurs once in the file
    new = "active = ok"
    tests = ["tests/engine/test_decode_loops.py"]  # files or node ids; the fewest and fastest
    # equivalent = "why no test can tell"    # only for mutants that nothing distinguishes
    # needs = "amx"                          # or "chromium": left out where there is none

The tests run in copies of the tree in a temporary folder, so the tree itself may be edited
meanwhile, and in forks of a process that has imported third-party packages (forks.py; --fresh
starts a Python for each instead). They have to pass unmutated first. The last line is one JSON
object; the exit code is 1 if a mutant survives that is not marked equivalent, or could not be
tried.
"""

import argparse
import dataclasses
import fnmatch
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import xml.etree.ElementTree
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from forks import Forks

from kvjax.cli import ArgumentParser, run_script
from kvjax.errors import UserError

REPOSITORY = Path(__file__).resolve().parent.parent
LISTS = Path("tests") / "mutants"
NOT_COPIED = (".*", "__pycache__", "*.egg-info", "build", "dist", "node_modules")
PYTEST = ("-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", "-p", "no:xdist")
# Plugins that are imported already; what they assert is not at issue.
PYTEST += ("-W", "ignore::pytest.PytestAssertRewriteWarning")
# Slow tests as well, where a mutant names them.
PYTEST += ("-m", "slow or not slow")
PASSED, FAILED, NOTHING_RAN = 0, 1, 5
"""Exit codes of pytest."""


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One mutation: `old` becomes `new` in `file`, and `tests` should fail."""

    area: str
    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    equivalent: str | None = None
    needs: str | None = None

    def apply(self, text: str) -> str:
        """The mutated text of the file."""
        if (count := text.count(self.old)) != 1:
            raise UserError(f"{self.title}: `old` occurs {count} times in {self.file}")
        return text.replace(self.old, self.new)

    @property
    def title(self) -> str:
        return f"{self.area}/{self.name}"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of a mutant: killed, SURVIVED, equivalent or ERROR."""

    mutant: Mutant
    verdict: str
    detail: str
    seconds: float = 0.0


def read_mutants(root: Path) -> list[Mutant]:
    """All mutants listed under a project, ordered by the tests they need.

    Raises:
        UserError: a list is no TOML; an entry's fields are wrong; a name is taken.
    """
    mutants: dict[str, Mutant] = {}
    for path in sorted((root / LISTS).glob("*.toml")):
        try:
            listed = tomllib.loads(path.read_text())
        except tomllib.TOMLDecodeError as error:
            raise UserError(f"{path.relative_to(root)}: {error}") from error
        entries = listed.get("mutant", [])
        if set(listed) - {"mutant"} or not all(isinstance(entry, dict) for entry in entries):
            raise UserError(f"{path.relative_to(root)}: give [[mutant]] entries alone")
        for number, entry in enumerate(entries, 1):
            where = f"{path.relative_to(root)}: entry {number} ({entry.get('name')})"
            texts = ("name", "file", "old", "new", "equivalent", "needs")
            tests = entry.get("tests")
            if set(entry) | {"equivalent", "needs"} != {*texts, "tests"}:
                raise UserError(f"{where}: its fields are {sorted(entry)}")
            if not all(isinstance(entry.get(field, ""), str) for field in texts):
                raise UserError(f"{where}: {', '.join(texts)} are texts")
            if (
                not isinstance(tests, list)
                or not all(isinstance(t, str) for t in tests)
                or not tests
            ):
                raise UserError(f"{where}: tests is a list of files or node ids")
            if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", entry["name"]):
                raise UserError(f"{where}: a name is words of a-z and 0-9 joined by -")
            if entry["old"] == entry["new"] or entry.get("equivalent") == "":
                raise UserError(f"{where}: old and new are the same, or equivalent gives no reason")
            if (needs := entry.get("needs")) is not None and needs not in PRESENT:
                raise UserError(f"{where}: it needs {needs}: give {' or '.join(PRESENT)}")
            mutant = Mutant(path.stem, **{**entry, "tests": tuple(tests)})
            if mutant.name in mutants:
                raise UserError(f"{where}: {mutants[mutant.name].title} has that name")
            mutants[mutant.name] = mutant
    return sorted(mutants.values(), key=lambda m: (m.area, m.tests, m.name))


def fault(mutant: Mutant, root: Path) -> str | None:
    """Why a mutant cannot be tried, as far as its entry and the files say; None if it can."""
    source = root / mutant.file
    if not source.is_file():
        return f"there is no {mutant.file}"
    try:
        text = mutant.apply(source.read_text())
    except UserError as error:
        return str(error)
    if source.suffix == ".py":
        try:
            compile(text, mutant.file, "exec")
        except SyntaxError as error:
            return f"the mutated {mutant.file} is no Python: line {error.lineno}: {error.msg}"
    for item in mutant.tests:
        name, _, inner = item.partition("::")
        if not (root / name).exists():
            return f"there is no {name}"
        inner = inner.partition("[")[0].split("::")[-1]
        if inner and not re.search(rf"\b{re.escape(inner)}\b", (root / name).read_text()):
            return f"{name} has no {inner}"
    return None


def has_amx() -> bool:
    """Whether the processor has AMX, and the system lets one use it."""
    from kvjax.kernels import numba_tiles

    return numba_tiles.available()


def chromium() -> str | None:
    """The browser that the page's tests drive (tests/serve/test_page.py), if it is on PATH."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


PRESENT = {"amx": has_amx, "chromium": chromium}
"""What a mutant's tests may need, without which they are skipped: whether it is there."""


def slice_of(mutants: Sequence[Mutant], part: str) -> list[Mutant]:
    """The i-th of n runs of mutants, for a part written i/n."""
    match = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", part)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise UserError(f"--slice {part}: give for instance 3/10")
    i, n = int(match[1]), int(match[2])
    return list(mutants[len(mutants) * (i - 1) // n : len(mutants) * i // n])


class Bench:
    """Copies of a project in a temporary folder, and Python run in them.

    A context manager: leaving it ends what runs and removes the copies.
    """

    def __init__(self, root: Path, copies: int, fresh: bool = False):
        self.root = root
        data = root.parent / "shared" / "data"
        self._environment = dict(os.environ)
        # Bytecode in the copies saves time and soils nothing.
        self._environment.pop("PYTHONDONTWRITEBYTECODE", None)
        if data.is_dir():
            self._environment.setdefault("KVJAX_DATA", str(data))
        self._forks = None if fresh else Forks(root, self._environment)
        self._folder = Path(tempfile.mkdtemp(prefix="mutants-"))
        self._running: set[Run] = set()
        self.free = [self._folder / str(i) / root.name for i in range(copies)]

    def __enter__(self) -> "Bench":
        return self

    def __exit__(self, *_: object) -> None:
        with _uninterrupted():
            for run in self._running:
                run.end()
            if self._forks is not None:
                self._forks.end()
            shutil.rmtree(self._folder, ignore_errors=True)

    def take_copy(self) -> Path:
        """A copy of the project for one run; append it to `free` afterwards."""
        folder = self.free.pop()
        if not folder.exists():
            shutil.copytree(self.root, folder, ignore=shutil.ignore_patterns(*NOT_COPIED))
        return folder

    def start(self, folder: Path, *arguments: str, seconds: float) -> "Run":
        """Start Python in a copy of the project, for so long at most."""
        if self._forks is not None:
            self._forks.wait_until_ready()
        with _uninterrupted():
            run = Run(folder, arguments, self._forks or self._environment, seconds)
            self._running.add(run)
        return run

    def wait(self, run: "Run") -> tuple[int | None, str]:
        """Exit code (None if it was ended for its time) and output."""
        while not run.is_done():
            time.sleep(0.02)
        self._running.discard(run)
        return run.code, run.output


class Run:
    """A process in a copy of the project."""

    def __init__(
        self,
        folder: Path,
        arguments: Sequence[str],
        by: Forks | dict[str, str],
        seconds: float,
    ):
        """Start it as a fork, or with the variables of an environment."""
        self.began = time.perf_counter()
        self._seconds = seconds
        self._output = tempfile.NamedTemporaryFile(dir=folder.parent)  # noqa: SIM115 (see `end`)
        if isinstance(by, Forks):
            self._process = by.start(folder, arguments, self._output.name)
        else:
            self._process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=folder,
                env={**by, "PYTHONPATH": str(folder)},
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.code: int | None = None
        """None while it runs, and if it was ended for its time."""
        self.output = ""
        self._ended = False

    def is_done(self) -> bool:
        """Whether it has ended, by itself or because its time was up."""
        if not self._ended:
            with _uninterrupted():
                self.code = self._process.poll()
            if self.code is None and time.perf_counter() - self.began < self._seconds:
                return False
            self.end()
        return True

    def end(self) -> None:
        """End it and all that it has started and left behind; note what it has printed."""
        if self._ended:
            return
        self._ended = True
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with suppress(UserError):  # the process that was forked has ended too
            self._process.wait()
        self._output.seek(0)
        self.output = self._output.read().decode(errors="replace")
        self._output.close()


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Keeps signals back for a moment in which something would be left behind."""
    came: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _: came.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in came:
            signal.raise_signal(number)


def check_unmutated(bench: Bench, mutants: Sequence[Mutant]) -> tuple[dict[str, float], str]:
    """Seconds that each listed test takes in the project as it is, if it passes; and the output.

    Raises:
        UserError: what the tests import is not the copy.
    """
    items = sorted({item for mutant in mutants for item in mutant.tests})
    packages = sorted({Path(mutant.file).parts[0] for mutant in mutants})
    folder = bench.take_copy()
    for package in packages:
        if not (folder / package / "__init__.py").is_file():
            continue
        where = f"import {package}; print({package}.__file__)"
        _, found = bench.wait(bench.start(folder, "-c", where, seconds=600))
        if not Path(found.strip()).is_relative_to(folder):
            raise UserError(f"{package} is imported from elsewhere: {found.strip()}")
    report = folder.parent / "report.xml"
    run = bench.start(
        folder,
        *(*PYTEST, "--continue-on-collection-errors"),
        *(f"--junitxml={report}", "-o", "junit_family=xunit1", *items),
        seconds=7200,
    )
    _, output = bench.wait(run)
    bench.free.append(folder)
    if not report.is_file():
        return {}, output
    seconds: dict[str, float] = {}
    broken: set[str] = set()
    for case in xml.etree.ElementTree.parse(report).iter("testcase"):
        file, name = case.get("file", ""), case.get("name", "")
        holder = case.get("classname", "").rpartition(".")[2]
        plain = name.partition("[")[0]
        ids = (file, *(f"{file}::{n}" for n in (name, plain)))
        ids += tuple(f"{file}::{holder}::{n}" for n in (name, plain)) + (f"{file}::{holder}",)
        for item in {item for item in items if item in ids or _is_within(file, item)}:
            if case.find("failure") is not None or case.find("error") is not None:
                broken.add(item)
            if case.find("skipped") is None:
                seconds[item] = seconds.get(item, 0.0) + float(case.get("time", 0))
    return {item: time for item, time in seconds.items() if item not in broken}, output


def _is_within(file: str, folder: str) -> bool:
    return "::" not in folder and Path(file).is_relative_to(folder)


@dataclasses.dataclass
class Trial:
    """A mutant in a copy of the project, and the run of its tests."""

    mutant: Mutant
    folder: Path
    whole: str
    """The file as it was."""
    run: Run
    seconds: float


def start_trial(bench: Bench, mutant: Mutant, seconds: float) -> Trial:
    """Apply a mutant to a copy and start its tests."""
    folder = bench.take_copy()
    source = folder / mutant.file
    whole = source.read_text()
    _write(source, mutant.apply(whole))
    run = bench.start(folder, *PYTEST, "-x", *mutant.tests, seconds=seconds)
    return Trial(mutant, folder, whole, run, seconds)


def end_trial(bench: Bench, trial: Trial) -> Outcome:
    """Take a mutant back whose tests have ended."""
    mutant = trial.mutant
    code, output = bench.wait(trial.run)
    _write(trial.folder / mutant.file, trial.whole)
    bench.free.append(trial.folder)
    if code is None:
        verdict, detail = "killed", f"by timeout ({trial.seconds:.0f} s)"
    elif code == PASSED:
        verdict, detail = "SURVIVED", " ".join(mutant.tests)
    elif code == NOTHING_RAN:
        verdict, detail = "ERROR", "no test ran"
    elif code == -signal.SIGKILL:
        verdict, detail = "ERROR", "the tests were killed: out of memory?"
    else:
        named = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
        verdict, detail = "killed", named[1] if named else f"exit code {code}"
    if mutant.equivalent and verdict == "SURVIVED":
        verdict, detail = "equivalent", mutant.equivalent
    elif mutant.equivalent and verdict == "killed":
        verdict, detail = "ERROR", f"is marked equivalent and was killed: {detail}"
    return Outcome(mutant, verdict, detail, time.perf_counter() - trial.run.began)


def _write(path: Path, text: str) -> None:
    """Write a source file and forget its bytecode, which may seem to fit: equal size and second."""
    path.write_text(text)
    for stale in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        stale.unlink(missing_ok=True)


def try_all(bench: Bench, mutants: Sequence[Mutant], least_seconds: float) -> Iterator[Outcome]:
    """Outcomes in the order in which they come."""
    usable = []
    for mutant in mutants:
        if problem := fault(mutant, bench.root):
            yield Outcome(mutant, "ERROR", problem)
        else:
            usable.append(mutant)
    if not usable:
        return
    print(f"tests of {len(usable)} mutants, unmutated …", flush=True)
    seconds, output = check_unmutated(bench, usable)
    ready = [m for m in usable if all(item in seconds for item in m.tests)]
    if len(ready) < len(usable):
        print(output, flush=True)
    for mutant in usable:
        if broken := [item for item in mutant.tests if item not in seconds]:
            yield Outcome(mutant, "ERROR", f"fails or does not run unmutated: {' '.join(broken)}")
    trials: list[Trial] = []
    while ready or trials:
        while ready and bench.free:
            mutant = ready.pop(0)
            limit = least_seconds + 10 * sum(seconds[item] for item in mutant.tests)
            trials.append(start_trial(bench, mutant, limit))
        for trial in [trial for trial in trials if trial.run.is_done()]:
            trials.remove(trial)
            yield end_trial(bench, trial)
        time.sleep(0.02)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--area", action="append", help="only that list; repeatable")
    parser.add_argument(
        "--only", action="append", metavar="PATTERN", help="only names like *this*; repeatable"
    )
    parser.add_argument("--slice", default="1/1", metavar="I/N", help="the I-th of N parts")
    parser.add_argument("--list", action="store_true", help="name the chosen mutants and stop")
    parser.add_argument("--jobs", type=int, default=1, help="at once (%(default)s)")
    parser.add_argument(
        "--fresh", action="store_true", help="a new Python for each run of tests, not a fork"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=180.0,
        help="least seconds for a mutant's tests; ten times their own time is added (%(default)s)",
    )
    parser.add_argument("--root", type=Path, default=REPOSITORY, help="project (this one)")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; the exit code."""
    options = parse_arguments(arguments)
    if not 1 <= options.jobs <= 64:
        raise UserError(f"--jobs {options.jobs}: give a whole number from 1 to 64")
    if not 0 < options.timeout < 1e6:
        raise UserError(f"--timeout {options.timeout:g}: give seconds above 0")
    root = options.root.resolve()
    mutants = read_mutants(root)
    for area in options.area or []:
        if area not in {mutant.area for mutant in mutants}:
            raise UserError(f"--area {area}: there is no {LISTS / area}.toml with a mutant")
    mutants = [m for m in mutants if not options.area or m.area in options.area]
    if options.only:
        mutants = [m for m in mutants if any(fnmatch.fnmatch(m.name, p) for p in options.only)]
    mutants = slice_of(mutants, options.slice)
    mutants = [m for m in mutants if m.needs is None or PRESENT[m.needs]()]
    if options.list:
        for mutant in mutants:
            print(f"{mutant.title}  {mutant.file}  {' '.join(mutant.tests)}")
        return 0
    if not mutants:
        raise UserError("no mutant is chosen: see --list")
    begin = time.perf_counter()
    outcomes: list[Outcome] = []
    with Bench(root, options.jobs, options.fresh) as bench:
        for outcome in try_all(bench, mutants, options.timeout):
            outcomes.append(outcome)
            count = f"[{len(outcomes)}/{len(mutants)}]"
            title, took = outcome.mutant.title, f"{outcome.seconds:.1f} s"
            print(f"{count} {outcome.verdict:10} {title}  {took}  {outcome.detail}", flush=True)

    def named(verdict: str) -> list[str]:
        return sorted(o.mutant.title for o in outcomes if o.verdict == verdict)

    result = {
        "mutants": len(outcomes),
        "killed": len(named("killed")),
        "survived": named("SURVIVED"),
        "equivalent": named("equivalent"),
        "errors": named("ERROR"),
        "seconds": round(time.perf_counter() - begin, 1),
    }
    print(json.dumps(result))
    return 1 if result["survived"] or result["errors"] else 0


if __name__ == "__main__":
    run_script(main)
