"""The parts of a batch job without a model: durability, ids on the disk, signals, progress."""

import io
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from jaxinfer.scheduler import SchedulerStats
from jaxinfer.tools.batch_runner import inputs, journal, progress
from jaxinfer.tools.batch_runner.index import Index
from jaxinfer.tools.batch_runner.journal import Journal, JournalError
from jaxinfer.tools.batch_runner.progress import Progress, Totals


def test_a_line_is_in_the_file_when_append_returns(tmp_path):
    """A kill loses nothing that was finished: there is no buffer in the process."""
    with Journal(tmp_path / "out") as out:
        for i in range(5):
            out.append(b"%d\n" % i)
            assert (tmp_path / "out").read_bytes().count(b"\n") == i + 1


def test_a_power_cut_loses_little(tmp_path, monkeypatch):
    """No more than SYNC_LINES lines, or those of the last second, are not on the disk."""
    synced = [0]
    path = tmp_path / "out"
    fsync = os.fsync

    def noted(fd):
        fsync(fd)
        if os.fstat(fd).st_ino == path.stat().st_ino:
            synced.append(os.fstat(fd).st_size // 2)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(journal, "SYNC_SECONDS", 0.05)
    with Journal(path) as out:
        for i in range(2000):
            out.append(b"x\n")
            assert i + 1 - synced[-1] < journal.SYNC_LINES + 1
        deadline = time.monotonic() + 5  # without another append
        while synced[-1] < 2000 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert synced[-1] == 2000
        assert len(synced) < 200  # in groups


def test_a_disk_that_fails_later_is_told(tmp_path, monkeypatch):
    """fsync may report what write did not; the job must not go on as if all were well."""
    out = Journal(tmp_path / "out")

    def fail(fd):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    out.append(b"x\n")
    with pytest.raises(JournalError, match="Input/output error"):
        out.close()


def test_half_a_line_is_taken_back(tmp_path, monkeypatch):
    """The disk is full in the middle of a line: the file ends with the line before it."""
    write = os.write

    def half(fd, data):
        if len(data) <= 5:
            raise OSError(28, "No space left on device")
        return write(fd, data[: len(data) - 5])

    with Journal(tmp_path / "out") as out:
        out.append(b"whole\n")
        monkeypatch.setattr(os, "write", half)
        with pytest.raises(JournalError, match="No space left on device"):
            out.append(b"0123456789\n")
    assert (tmp_path / "out").read_bytes() == b"whole\n"


def test_a_replaced_file_is_whole_or_as_it_was(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(KeyError), journal.replaced(path) as new:
        new.write(b"half")
        raise KeyError
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]
    with journal.replaced(path) as new:
        new.write(b"new")
    assert path.read_bytes() == b"new" and list(tmp_path.iterdir()) == [path]


def test_the_index_finds_what_is_there_twice():
    """Far more ids than its cache of 1 MiB holds."""
    index = Index()
    for i in range(60_000):
        assert index.add(f"id {i}", i) is None
    assert index.add("id 7", 60_000) == 7
    assert "id 59999" in index and "id 60000" not in index
    assert index.claim("id 3", 0) and not index.claim("id 3", 50)
    assert not index.claim("nobody", 60)
    assert index.offset("id 3") == 0 and index.offset("id 4") is None
    index.close()


def test_an_endless_line_is_read_past(tmp_path, monkeypatch):
    """It fails alone, the lines after it keep their numbers, and it is never in memory."""
    monkeypatch.setattr(inputs, "MAX_LINE_BYTES", 1000)
    path = tmp_path / "in.jsonl"
    exact = b'{"a": "' + b"x" * 990 + b'"}'
    path.write_bytes(exact + b"\n" + b"y" * 12_345 + b"\n" + b'{"b": 1}')
    found = list(inputs.read(path, None))
    assert [number for number, _ in found] == [1, 2, 3]
    assert found[0][1] == {"a": "x" * 990} and found[2][1] == {"b": 1}
    assert found[1][1].code == "line_too_long"


WAITING = """
import signal, sys, time
from jaxinfer.tools.batch_runner import interruption
interruption.GRACE_SECONDS = float(sys.argv[1])
with interruption.Interruption("last words") as asked:
    print("ready", flush=True)
    while not (asked and sys.argv[2] == "polite"):
        time.sleep(0.01)
print("left", asked.exit_code, flush=True)
sys.exit(asked.exit_code)
"""


@pytest.mark.parametrize(
    ("grace", "manners", "signals", "code", "says"),
    [
        ("30", "polite", [signal.SIGTERM], 143, "left 143"),
        ("30", "polite", [signal.SIGINT], 130, "left 130"),
        ("0.3", "deaf", [signal.SIGTERM], 143, ""),  # the loop is in a long compile
        ("30", "deaf", [signal.SIGINT, signal.SIGINT], 130, ""),  # an impatient user
    ],
)
def test_signals(grace, manners, signals, code, says):
    command = [sys.executable, "-c", WAITING, grace, manners]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    for signum in signals:
        process.send_signal(signum)
        time.sleep(0.1)
    stdout, stderr = process.communicate(timeout=20)
    assert process.returncode == code
    assert stdout.strip() == says
    assert stderr == ("last words\n" if manners == "deaf" else "")


def test_signal_handlers_are_given_back():
    from jaxinfer.tools.batch_runner.interruption import SIGNALS, Interruption

    before = [signal.getsignal(signum) for signum in SIGNALS]
    threads = threading.active_count()
    with Interruption("") as asked:
        os.kill(os.getpid(), signal.SIGTERM)
        deadline = time.monotonic() + 5
        while not asked and time.monotonic() < deadline:
            time.sleep(0.001)
        assert asked.exit_code == 143
    assert [signal.getsignal(signum) for signum in SIGNALS] == before
    assert threading.active_count() == threads and signal.set_wakeup_fd(-1) == -1


def test_progress_in_a_log():
    """A line a minute: counts, speeds, what runs, and the time left as lines so far predict it."""
    now, stream = [100.0], io.StringIO()
    totals = Totals(num_lines=1000, num_before=100)
    stats = SchedulerStats(
        num_running=8,
        num_waiting=0,
        pages_used=12,
        pages_total=64,
        num_preemptions=0,
        num_prompt_tokens=0,
        num_cached_tokens=0,
    )
    shown = Progress(totals, lambda: stats, lambda: 0, stream, lambda: now[0])
    shown.tick()
    now[0] = 159.0
    shown.tick()
    assert stream.getvalue() == ""
    totals.num_done, totals.num_prompt_tokens, totals.num_output_tokens = 90, 900, 1800
    totals.fail(5, "refused", "too long")
    now[0] = 160.0
    shown.tick()
    # 2,700 tokens of 90 lines in 60 s; 809 lines are left, 24,270 tokens: 539 s
    assert stream.getvalue() == (
        "191/1,000 lines, 15 tok/s in, 30 tok/s out, 1 failed, 8 rows, 12/64 pages, ETA 8 min 59 s\n"
    )
    shown.tick()
    assert stream.getvalue().count("\n") == 1


def test_progress_on_a_terminal():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    now, stream = [0.0], Terminal()
    totals = Totals(num_lines=10)
    stats = SchedulerStats(1, 0, 1, 4, 0, 0, 0)
    shown = Progress(totals, lambda: stats, lambda: 5, stream, lambda: now[0])
    totals.num_done, now[0] = 4, progress.BAR_SECONDS + 1
    shown.tick()
    shown.close()
    assert "4/10" in stream.getvalue() and "1/4 pages" in stream.getvalue()
