"""Set-up shared by all tests: the CPU platform, a compilation cache, development data, the model.

Tests that need files which are not part of the repository ask for the fixtures below and are
skipped by name where those files are absent. In continuous integration (CI=true, or
KVJAX_NO_SKIPS=1 anywhere) a skip for any reason but `EXPECTED_SKIPS` is a failure.
"""

import contextlib
import gc
import importlib
import itertools
import os
import re
import signal
import tempfile
import zlib
from collections.abc import Generator, Iterator
from pathlib import Path

import hypothesis
import jaxtyping
import pytest

REPOSITORY = Path(__file__).resolve().parent.parent


def _user_cache_dir() -> Path:
    """The folder that `kvjax.models.hub.user_cache_dir` names, without importing JAX first."""
    if folder := os.environ.get("KVJAX_CACHE"):
        return Path(folder)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvjax"


MOST_COMPILED = 1 << 30
"""Bytes of compiled programs that a test run begins with at most."""


def _compilation_cache_dir() -> str:
    """A writable folder in which compiled programs outlive the test run."""
    folder = _user_cache_dir() / "jit-tests"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            drop_oldest(folder, MOST_COMPILED)
            return str(folder)
    except OSError:
        return tempfile.mkdtemp(prefix="kvjax-jit-tests-")


def drop_oldest(folder: Path, most: int) -> None:
    """Delete the oldest files of a folder beyond so many bytes; others may do so at once."""
    held = []
    for path in folder.iterdir():
        with contextlib.suppress(OSError):
            found = path.stat()
            held.append((found.st_mtime, found.st_size, path))
    for _, size, path in sorted(held, reverse=True):
        most -= size
        if most < 0:
            path.unlink(missing_ok=True)


# JAX reads these when it is first imported, which is after this file.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _compilation_cache_dir()
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
# With a size of its own to keep to, JAX would look at every file whenever it writes one.
os.environ.setdefault("JAX_COMPILATION_CACHE_MAX_SIZE", "-1")

# What a shell starts in the background ignores interruptions, and so would the commands that tests
# start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Programs are compiled in haste: compiling is most of what tests take.

    LLVM changes no arithmetic, and what XLA makes of a program is the same. Without slow tests
    fusions go to LLVM by XLA's older and faster way; with `-m slow` they go as users have them.
    """
    flags = ["--xla_backend_optimization_level=0"]
    if config.getoption("markexpr") == "not slow":
        flags.append("--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters")
    given = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = " ".join(
        [given, *(flag for flag in flags if flag.split("=")[0] not in given)]
    ).strip()
    # Tracing makes many objects that stay: looking for lost ones takes a tenth of its time.
    gc.set_threshold(100_000, 20, 20)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", default="1/1", metavar="I/N", help="run one of n parts of the tests")


def part_of(name: str, parts: int) -> int:
    """Which of so many parts of the suite a test belongs to, 1 for the first: always the same, and
    parts take about as long."""
    return zlib.crc32(name.encode()) % parts + 1


LONGEST = ("test_sharded.py", "test_several_processes.py")
"""Files whose tests take minutes each."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that take a minute come first: at the end they would keep one process busy alone."""
    items.sort(key=lambda item: item.path.name not in LONGEST)
    given = str(config.getoption("--part"))
    match = re.fullmatch(r"([0-9]{1,3})/([0-9]{1,3})", given)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise pytest.UsageError(f"--part {given}: give for instance 1/2")
    part, parts = int(match[1]), int(match[2])
    left = [item for item in items if part_of(item.nodeid, parts) != part]
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if part_of(item.nodeid, parts) == part]


# The same examples in every run, so that the suite fails for the change at hand or not at all;
# `pytest --hypothesis-profile=default` draws new ones.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.load_profile("repeatable")


EXPECTED_SKIPS = (
    "needs a GPU",
    "development data absent",  # texts and tokenizers beside a checkout, which few machines have
    "Qwen2.5-Coder-0.5B-Instruct GGUF not cached",  # 500 MB that nothing downloads
    "peak memory is read from Linux's /proc",
    "needs Linux",
    "needs Chromium on PATH",  # the page's tests drive a browser, which no package index has
    "needs a Python with kvpress",  # torch and some gigabytes beside it
    "needs libtpu",  # the extra `tpu`, 0.7 GB
    "needs AMX",  # which not every processor has
    "needs Ray",  # the extra `ray`, 80 MB and what it needs
)
"""How the reasons begin for which tests may be skipped everywhere."""


def _skips_fail() -> bool:
    """Whether an unexpected skip is a failure."""
    return any(
        os.environ.get(name, "").lower() not in ("", "0", "false")
        for name in ("CI", "KVJAX_NO_SKIPS")
    )


def _refuse_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Make a failure of an unexpected skip. What is expected to fail counts as skipped too."""
    if not report.skipped or hasattr(report, "wasxfail") or not _skips_fail():
        return
    told = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    reason = told.removeprefix("Skipped: ")
    if not reason.startswith(EXPECTED_SKIPS):
        report.outcome = "failed"
        report.longrepr = f"skipped: {reason}\nnot among EXPECTED_SKIPS of tests/conftest.py"


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    _refuse_skip(report)
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _refuse_skip(report)
    return report


MOST_MAPPINGS = 20_000
"""Linux allows a process 65,530 (vm.max_map_count), and one module's tests take up to 31,000."""


@pytest.fixture(scope="module", autouse=True)
def _bounded_mappings() -> Iterator[None]:
    """Drops compiled programs between modules before they use up the process's memory mappings.

    Each program on a CPU takes tens of them, a test process compiles thousands of programs and
    JAX keeps them all; where no mapping is left, XLA ends the process.
    """
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and len(maps.read_bytes().splitlines()) > MOST_MAPPINGS:
        importlib.import_module("jax").clear_caches()
        gc.collect()


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of development texts, tasks, traces and tokenizers."""
    folder = Path(os.environ.get("KVJAX_DATA") or REPOSITORY.parent / "shared" / "data")
    if not folder.is_dir():
        pytest.skip(f"development data absent: {folder} (set KVJAX_DATA)")
    return folder


def _cached_weights(variable: str, pattern: str) -> Path | None:
    """The file that a variable names, or that lies in the cache; None if neither is there."""
    candidates = [Path(path)] if (path := os.environ.get(variable)) else []
    try:
        hub = importlib.import_module("kvjax.models.hub")
        cache = Path(hub.user_cache_dir())
    except ImportError:
        cache = _user_cache_dir()
    candidates += sorted(cache.rglob(pattern))
    return next((path for path in candidates if path.is_file()), None)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The cached SmolLM2-135M-Instruct GGUF file. Never downloads: `make test` does."""
    path = _cached_weights("KVJAX_SMOLLM2", "SmolLM2-135M-Instruct*.gguf")
    if path is None:
        pytest.skip("SmolLM2-135M-Instruct GGUF not cached (python -m kvjax fetch smollm2-135m)")
    return path


@pytest.fixture(scope="session")
def qwen_coder_path() -> Path:
    """A Qwen2.5-Coder-0.5B-Instruct GGUF file in the cache. Nothing downloads it."""
    path = _cached_weights("KVJAX_QWEN_CODER", "qwen2.5-coder-0.5b-instruct*.gguf")
    if path is None:
        pytest.skip("Qwen2.5-Coder-0.5B-Instruct GGUF not cached (or set KVJAX_QWEN_CODER)")
    return path


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder with random weights and one token per byte."""
    from tests.tiny import write_tiny

    folder = tmp_path_factory.mktemp("tiny")
    write_tiny(folder)
    return folder


@pytest.fixture
def unchecked_signatures() -> Iterator[None]:
    """Leaves signatures unchecked, for tests of what a function itself says to wrong arguments."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(autouse=True)
def _calibrations_of_its_own(monkeypatch, tmp_path_factory) -> None:
    """What one test calibrates does not decide what "auto" means in another."""
    shelf = importlib.import_module("kvjax.engine.calibrate.shelf")
    folder = tmp_path_factory.getbasetemp() / f"calibrations-{next(_NUMBERS)}"
    monkeypatch.setattr(shelf, "user_cache_dir", lambda: folder)


_NUMBERS = itertools.count()
