"""An unfinished run: what is kept, what is refused."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from filelock import FileLock, Timeout

from dropmatch.bench.journal import Journal
from dropmatch.bench.results import write_whole
from dropmatch.errors import ConfigError, DataError

SETTINGS = {"rules": ["lossless"], "num": 3}


def entries(output: Path, **options: bool) -> list[dict[str, object]]:
    with Journal(output, SETTINGS, **options) as journal:
        return journal.entries


def write(output: Path, *added: dict[str, object], raw: str = "") -> None:
    """Leave a journal with these entries and then a raw text."""
    with Journal(output, SETTINGS) as journal:
        for entry in added:
            journal.add(entry)
    with journal.path.open("a", encoding="utf-8") as file:
        file.write(raw)


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "results" / "run.json"


def test_entries_come_back_in_order(output: Path) -> None:
    write(output, {"item": 1}, {"item": 2})
    assert entries(output) == [{"item": 1}, {"item": 2}]


def test_a_line_cut_short_is_dropped_and_written_over(output: Path) -> None:
    write(output, {"item": 1}, raw='{"item": 2, "tex')
    assert entries(output) == [{"item": 1}]
    write(output, {"item": 3})
    assert entries(output) == [{"item": 1}, {"item": 3}]


def test_other_settings_are_refused_by_name(output: Path) -> None:
    write(output, {"item": 1})
    with pytest.raises(ConfigError, match=r"num: 3 then, 4 now.*--restart"):
        Journal(output, {**SETTINGS, "num": 4})


def test_restart_throws_the_old_run_away(output: Path) -> None:
    write(output, {"item": 1})
    assert entries(output, restart=True) == []


@pytest.mark.parametrize("line", ["nonsense\n", "[1]\n"])
def test_a_damaged_line_is_named(output: Path, line: str) -> None:
    write(output, {"item": 1}, raw=line)
    with pytest.raises(DataError, match="journal, line 3"):
        Journal(output, SETTINGS)


def test_a_journal_cut_in_its_first_line_begins_anew(output: Path) -> None:
    write(output)
    output.with_name(output.name + ".journal").write_text('{"rul')
    assert entries(output) == []


def test_a_finished_run_leaves_no_journal(output: Path) -> None:
    with Journal(output, SETTINGS) as journal:
        journal.remove()
    assert not journal.path.exists()


def test_a_second_run_is_refused_while_one_writes(output: Path) -> None:
    """Both wrote, and the first to end removed the other's journal."""
    with Journal(output, SETTINGS) as journal:
        with pytest.raises(ConfigError, match="Another run is writing"):
            Journal(output, SETTINGS, restart=True)
        journal.add({"item": 1})
    assert entries(output) == [{"item": 1}]
    assert [path.name for path in output.parent.iterdir()] == ["run.json.journal"]


def test_a_refused_journal_is_let_go(output: Path) -> None:
    write(output, {"item": 1})
    with pytest.raises(ConfigError):
        Journal(output, {**SETTINGS, "num": 4})
    assert entries(output) == [{"item": 1}]


def test_settings_that_older_versions_did_not_know_fit(output: Path) -> None:
    write(output, {"item": 1})
    with Journal(output, {**SETTINGS, "weights": "a"}, newer=("weights",)) as journal:
        assert journal.entries == [{"item": 1}]
    with pytest.raises(ConfigError, match="weights: null then"):
        Journal(output, {**SETTINGS, "weights": "a"})
    other = output.with_name("other.json")
    with Journal(other, {**SETTINGS, "weights": "a"}) as journal:
        journal.add({"item": 1})
    with pytest.raises(ConfigError, match='"a" then, "b" now'):
        Journal(other, {**SETTINGS, "weights": "b"}, newer=("weights",))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"[" * 100_000, "nested too deep"),
        (b"\0" * 50, "zero bytes"),
        ('{"item": 1}'.encode("utf-16"), "not UTF-8 text but UTF-16"),
        (b'\xef\xbb\xbf{"item": 1}', "byte-order mark; save it as UTF-8 without"),
        (b'{"item": "\xe9"}', "not UTF-8 text"),
    ],
)
def test_what_is_no_text_is_named_in_plain_words(output: Path, line: bytes, message: str) -> None:
    write(output, {"item": 1})
    with output.with_name(output.name + ".journal").open("ab") as file:
        file.write(line + b"\n")
    with pytest.raises(DataError, match=f"journal, line 3: .*{message}"):
        Journal(output, SETTINGS)


def test_a_run_that_finished_nothing_leaves_no_journal(output: Path) -> None:
    """Its settings alone made the next run with others stop, though nothing was lost."""
    with pytest.raises(KeyboardInterrupt), Journal(output, SETTINGS):
        raise KeyboardInterrupt
    assert list(output.parent.iterdir()) == []
    with Journal(output, {**SETTINGS, "num": 4}) as journal:
        assert journal.left is None


def test_what_is_taken_over_is_told_with_its_time(output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Journal(output, SETTINGS) as journal:
        journal.say_taken_over("nothing")  # there was no earlier run
        journal.add({"item": 1})
    os.utime(journal.path, (0, 86_400))
    with Journal(output, SETTINGS) as journal:
        journal.say_taken_over("1 of 2 answers")
    said = capsys.readouterr().err
    assert said == f"Taken over from {journal.path} (left on 1970-01-02 00:00 UTC): 1 of 2 answers.\n"


def test_entries_are_found_by_key_and_damaged_ones_named(output: Path) -> None:
    write(output, {"part": "a"}, {"time": {"seconds": 2.0, "split": {"x": 1.0}}}, {"part": 3})
    with Journal(output, SETTINGS) as journal:
        timed = journal.found("time", {"seconds": float, "split": dict}, numbers="split", is_inner=True)
        assert timed == [{"seconds": 2.0, "split": {"x": 1.0}}]
        with pytest.raises(DataError, match=r"journal, line 4: 'part' is not text\. Remove this line"):
            journal.found("part", {"part": str})
        with pytest.raises(DataError, match=r"line 3: time\.rounds is missing"):
            journal.found("time", {"rounds": int}, is_inner=True)
        journal.entries[1]["time"]["split"]["x"] = None
        with pytest.raises(DataError, match=r"line 3: time\.split has an entry that is not a finite number"):
            journal.found("time", {"split": dict}, numbers="split", is_inner=True)


@pytest.mark.parametrize("name", ["run.json.journal", "run.json.journal.lock"])
def test_a_journal_that_cannot_be_opened_is_named(name: str, output: Path) -> None:
    """It ended in a traceback, or in a word on another run that there was not."""
    (output.parent / name).mkdir(parents=True)
    for _ in range(2):  # nothing is left locked
        with pytest.raises(ConfigError, match=rf"{name} cannot be read and written.*another --output"):
            Journal(output, SETTINGS)


def test_a_lock_that_cannot_be_made_is_no_other_run(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a folder takes no files, as in /proc, the lock is not had either."""

    def refuse(lock: FileLock, **_: object) -> None:
        raise Timeout(lock.lock_file)

    monkeypatch.setattr(FileLock, "acquire", refuse)
    with pytest.raises(ConfigError, match="cannot be read and written"):
        Journal(output, SETTINGS)


def test_a_result_that_cannot_be_written_leaves_the_old_one_alone(
    output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk ended in a traceback and left half a file."""
    write_whole("old", output)

    def full(path: Path, *_: object, **__: object) -> int:
        with path.open("w") as file:
            file.write("ha")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(ConfigError, match=r"run\.json cannot be written \(No space left on device\)"):
        write_whole("new", output)
    assert [path.name for path in output.parent.iterdir()] == ["run.json"]
    assert output.read_text() == "old"
