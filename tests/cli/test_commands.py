"""What all commands do alike: exit codes, streams closed or full, signals at any moment."""

import errno
import functools
import io
import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

import kvjax
from kvjax import startup
from kvjax.cli import ArgumentParser, check_output_file, main_of
from kvjax.cli.main import COMMANDS, main, run_command
from kvjax.errors import UserError
from tests.scripts.conftest import SCRIPTS

FULL = "/dev/full"
"""A device on which no space is left, on Linux."""


def raising(error: BaseException):
    def run(arguments):
        raise error

    return run


def masked(interruption: KeyboardInterrupt) -> Exception:
    """What JAX makes of one that comes while it compares arguments."""
    error = ValueError("Exception raised while checking equality")
    error.__cause__ = interruption
    return error


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (masked(KeyboardInterrupt()), 130, "interrupted\n"),
        (masked(startup.Terminated()), 143, "terminated\n"),
        (UserError("rate 0: give\nmore \n than 1"), 2, "error: rate 0: give more than 1\n"),
        (UserError("bad \udcff"), 2, "error: bad \\udcff\n"),
        (FileNotFoundError(2, "No such file", "a.txt"), 2, "error: a.txt: No such file\n"),
        (OSError("odd"), 2, "error: cannot write the output: odd\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (startup.Terminated(), 143, "terminated\n"),
    ],
)
def test_each_end_has_its_line_and_exit_code(capsys, monkeypatch, error, code, says):
    monkeypatch.setattr("sys.stdout", io.StringIO())  # has no descriptor to give up
    assert main_of(raising(error)) == code
    assert capsys.readouterr().err == says


def test_a_long_message_keeps_its_beginning_and_its_end(capsys):
    assert main_of(raising(UserError(f"{'x' * 5000} or give --weights"))) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: xxx")
    assert line.endswith(" or give --weights")
    assert len(line) < 1100


def test_programming_errors_are_not_hidden():
    with pytest.raises(ZeroDivisionError):
        main_of(raising(ZeroDivisionError()))


def test_arguments_with_nul_are_refused():
    parser = ArgumentParser()
    parser.add_argument("--file")
    with pytest.raises(UserError, match="NUL"):
        parser.parse_args(["--file", "a\0b"])


def test_a_file_that_cannot_be_written_is_refused_early(tmp_path):
    check_output_file("--out", str(tmp_path / "new"))
    assert list(tmp_path.iterdir()) == []
    there = tmp_path / "there"
    there.write_text("kept")
    check_output_file("--out", str(there))
    assert there.read_text() == "kept"
    for wrong in (tmp_path, tmp_path / "no" / "folder", tmp_path / ("x" * 500), there / "in"):
        with pytest.raises(UserError, match="--out"):
            check_output_file("--out", str(wrong))


def test_kvjax_names_its_commands(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    said = capsys.readouterr().out
    assert all(f"  {name} " in said for name in COMMANDS)
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"kvjax {kvjax.__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["decod"], ["--decode"], ["convert"]])
def test_kvjax_refuses_in_one_line(capsys, arguments):
    assert main_of(main, arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("name", COMMANDS)
def test_help_names_the_command_as_it_was_called(capsys, name):
    for script, called in ((False, f"kvjax {name} "), (True, f"python scripts/{name}.py ")):
        with pytest.raises(SystemExit):
            run_command(name, ["--help"], script=script)
        usage, _, text = capsys.readouterr().out.partition("\n\n")
        assert called in text
        assert script == (f"kvjax {name}" not in usage + text)


def test_scripts_are_the_commands():
    for name in COMMANDS:
        script = SCRIPTS / f"{name}.py"
        assert f'main("{name}")' in script.read_text()


@pytest.mark.parametrize("arguments", [["--help"], ["decode", "--help"], ["throughput", "--help"]])
def test_help_does_not_wait_for_jax(arguments):
    command = [sys.executable, "-X", "importtime", "-m", "kvjax", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "kvjax.cli.main" in imported
    assert not imported & {"jax", "numpy", "flax", "rich", "matplotlib"}


# Programs of a few lines, each a process of its own. They do not wait for JAX.
HELLO = """
from kvjax.cli import run_script

def main(arguments):
    print("hello" * 2000)
    return 0

run_script(main)
"""


def python(program: str, *, shell: str = "", **options) -> subprocess.CompletedProcess:
    """Run a program, with what a shell writes behind its command line."""
    command = f'exec "$0" -c "$1" {shell}'
    return subprocess.run(
        ["sh", "-c", command, sys.executable, program],
        capture_output=True,
        text=True,
        timeout=120,
        **options,
    )


@pytest.mark.parametrize(
    ("shell", "says"),
    [(f">{FULL}", "error: cannot write the output: No space left"), (">&-", "stdout is closed")],
)
def test_output_that_goes_nowhere_is_an_error(shell, says):
    done = python(HELLO, shell=shell)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert says in line


def test_a_reader_that_has_gone_is_no_error_to_tell():
    done = python(HELLO, shell="| true; exit ${PIPESTATUS[0]}", executable="/bin/bash")
    assert (done.returncode, done.stderr) == (141, "")


def test_closed_streams_are_not_mistaken_for_others():
    """What is said on stderr must not end up in stdout, nor in a file that got its number."""
    program = """
import os, sys
from kvjax.cli import Progress, run_script

def main(arguments):
    file = os.open(sys.argv[0] if os.path.exists(sys.argv[0]) else os.devnull, os.O_RDONLY)
    assert file > 2
    with Progress() as progress:
        progress("load")
    print("note", file=sys.stderr)
    print(len(sys.stdin.read()))
    return 0

run_script(main)
"""
    done = python(program, shell="<&- 2>&-")
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")


def test_a_name_that_is_no_utf8_can_be_printed():
    program = """
from kvjax.cli import run_script

def main(arguments):
    print("\\udcff")
    return 0

run_script(main)
"""
    done = python(program)
    assert (done.returncode, done.stdout) == (0, "\\udcff\n")


SIGNALS = pytest.mark.parametrize(
    ("number", "code", "word"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")],
)


@SIGNALS
def test_a_signal_while_importing_is_not_swallowed(number, code, word):
    """Whatever catches it: here a bare except, in JAX callbacks and modules written in C++."""
    program = f"""
import os
from kvjax.startup import guard
guard("__main__")
try:
    os.kill(os.getpid(), {number})
    for _ in range(10**9): pass
except BaseException:
    print("caught")
"""
    done = python(program)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", f"{word}\n")


@SIGNALS
def test_a_signal_in_a_callback_comes_again(number, code, word):
    """As one in JAX's callback of the garbage collector, where Python only prints it."""
    program = f"""
import gc, os, time
from kvjax.cli import run_script

def callback(*_):
    if not told:
        told.append(1)
        os.kill(os.getpid(), {number})
        for _ in range(10**6): pass

def main(arguments):
    gc.callbacks.append(callback)
    gc.collect()
    assert told
    time.sleep(20)
    return 0

told = []
run_script(main)
"""
    done = python(program)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", f"{word}\n")


@SIGNALS
@pytest.mark.parametrize("status", [0, 130])
def test_a_command_that_ends_in_its_own_time_says_what_ended_it(number, code, word, status):
    program = f"""
import os, time
from kvjax.cli import run_script

def main(arguments):
    try:
        os.kill(os.getpid(), {number})
        time.sleep(60)
    except KeyboardInterrupt:
        print("what there is so far")
    return {status}

run_script(main)
"""
    done = python(program)
    assert (done.returncode, done.stdout) == (code, "what there is so far\n")


def test_what_a_shell_told_to_ignore_interruptions_does():
    program = """
import os, signal
from kvjax.cli import run_script

def main(arguments):
    os.kill(os.getpid(), signal.SIGINT)
    print("done")
    return 0

run_script(main)
"""
    done = python(f"import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n{program}")
    assert (done.returncode, done.stdout) == (0, "done\n")


def test_modules_that_are_imported_take_over_no_signals():
    before = [signal.getsignal(number) for number in startup.WORDS]
    startup.guard("throughput")
    startup.started()
    startup.ending()
    assert [signal.getsignal(number) for number in startup.WORDS] == before


LONG_CALL = """
import hashlib, sys, time
from kvjax.startup import guard, started
guard()
started()
print("begins", flush=True)
try:
    if sys.argv[1] == "deaf":
        hashlib.pbkdf2_hmac("sha256", b"a", b"b", 2_000_000_000)
    time.sleep(600)
except KeyboardInterrupt:
    print("heard", flush=True)
    try:
        time.sleep(600)
    except KeyboardInterrupt:
        time.sleep(2)
        print("heard again", flush=True)
"""


@pytest.mark.parametrize("deaf", [True, False])
def test_a_second_signal_ends_what_hears_of_none(deaf):
    """One call that computes for minutes; whoever hears of signals is not cut off by them."""
    command = [sys.executable, "-c", LONG_CALL, "deaf" if deaf else "hears"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "begins\n"
            time.sleep(0.2)
            for _ in range(2):
                process.send_signal(signal.SIGTERM)
                time.sleep(1.5)
            said, error = process.communicate(timeout=60)
        finally:
            process.kill()
    if deaf:
        assert (said, error, process.returncode) == ("", "terminated\n", 143)
    else:
        assert (said, error, process.returncode) == ("heard\nheard again\n", "", 0)


@pytest.mark.skipif(not os.path.exists(FULL), reason=f"needs Linux: {FULL}")
def test_text_that_stdout_does_not_take_is_not_lost(tiny_folder, capsys):
    arguments = ["--weights", str(tiny_folder), "--ignore-eos", "--max-new-tokens", "6"]
    arguments += ["--prompt", "once upon a time " * 9]
    command = [sys.executable, SCRIPTS / "decode.py", *arguments]
    with open(FULL, "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: cannot write the text to stdout: ")
    assert "Traceback" not in done.stderr
    assert main_of(functools.partial(run_command, "decode"), [*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["text"] in done.stderr


def test_what_a_signal_breaks_off_says_nothing():
    """An event loop whose making was interrupted objects to being freed, and so do coroutines."""
    script = """
from kvjax.startup import guard
guard()
import os, signal, time
from kvjax.cli import run_script
class Half:
    def __del__(self):
        raise AttributeError("half made")
async def never(): ...
def run(_):
    half, awaited = Half(), never()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(9)
run_script(run)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (143, "terminated\n")


@pytest.mark.slow
@pytest.mark.parametrize("script", ["decode.py", "throughput.py", "convert.py"])
def test_signals_at_random_moments(tiny_folder, tmp_path, script):
    """From the first line of a script to its last, a signal ends it at once and says so."""
    command = {
        "decode.py": ("--weights", tiny_folder, "--prompt", "x" * 100, "--ignore-eos"),
        "throughput.py": (
            *("--weights", tiny_folder, "--rate", "v", "--input-len", "60", "--no-limits"),
            *("--num-prompts", "4", "--output-len", "8", "--max-batch", "4"),
        ),
        "convert.py": (tiny_folder, tmp_path / "converted", "--force"),
    }[script]
    rng = random.Random(script)
    seen = set()
    for at in range(16):
        number, code = ((signal.SIGINT, 130), (signal.SIGTERM, 143))[at % 2]
        with open(tmp_path / f"{at}.txt", "w+") as told:
            process = subprocess.Popen(
                [sys.executable, "-X", "importtime", SCRIPTS / script, *command],
                stdout=subprocess.DEVNULL,
                stderr=told,
            )
            # Before this line it is Python itself that starts.
            while "kvjax.startup\n" not in (tmp_path / f"{at}.txt").read_text():
                time.sleep(0.005)
            time.sleep(rng.uniform(0.03, 4.0))
            process.send_signal(number)
            began = time.monotonic()
            assert process.wait(60) in (0, code), at
            took = time.monotonic() - began
        lines = (tmp_path / f"{at}.txt").read_text().splitlines()
        said = [line for line in lines if not line.startswith("import time:")]
        assert not any("Traceback" in line or "ignored" in line for line in said), "\n".join(said)
        assert process.returncode == 0 or took < 30
        seen.add(process.returncode)
    assert {130, 143} <= seen


def test_errors_of_the_system_have_a_number_or_a_name(capsys):
    error = OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), b"x\xff" * 3000)
    assert main_of(raising(error)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("File name too long")


def test_an_interrupted_command_waits_for_no_thread():
    """Libraries leave threads behind whose work was broken off."""
    program = """
import threading
from kvjax.cli.command import run_script

def run(arguments):
    threading.Thread(target=threading.Event().wait).start()
    print("said so far")
    raise KeyboardInterrupt

run_script(run)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 130
    assert done.stdout == "said so far\n"
    assert done.stderr == "interrupted\n"
