"""What is said on stderr while something takes long."""

import pytest

from kvjax.cli import progress
from kvjax.cli.progress import Progress, TimeLeft, spell


class Told(Progress):
    """Keeps what it is told."""

    def __init__(self):
        super().__init__()
        self.lines: list[str] = []

    def __call__(self, stage: str, done: int = 0, total: int = 0) -> None:
        self.lines.append(stage)


def test_a_stage_is_said_once_where_no_terminal_shows_it(capsys):
    with Progress() as say:
        for done in (0, 50, 100):
            say("load", done, 100)
        say("write")
    assert capsys.readouterr().err == "load …\nwrite …\n"


def test_a_terminal_shows_a_share_in_place(capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with Progress() as say:
        say("load", 1, 4)
        say("load", 2, 4)
    start = "\r\033[K"
    assert capsys.readouterr().err == f"{start}load 25 % …{start}load 50 % …{start}"


def test_the_time_left_follows_from_what_is_done(monkeypatch):
    now = 100.0
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now)
    told = Told()
    say = TimeLeft(told)
    say("a", 0, 40)
    now += 29  # nothing is said twice in half a minute
    say("b", 2, 40)
    now += 31
    say("c", 10, 40)
    assert told.lines == ["0/40: a", "10/40, 3 min left: c"]
    # A stage that goes on where an earlier run was begins its own clock.
    now += 60
    say("d", 90, 100)
    now += 60
    say("d", 94, 100)
    assert told.lines[2:] == ["90/100: d", "94/100, 2 min left: d"]


@pytest.mark.parametrize(
    ("seconds", "said"), [(89.4, "89 s"), (90, "2 min"), (5399, "90 min"), (5400, "1.5 h")]
)
def test_durations_are_said_as_people_do(seconds, said):
    assert spell(seconds) == said
