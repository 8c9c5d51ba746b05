"""An unfinished run: what is kept, what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from dropmatch.bench.journal import Journal
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
    write(output)
    with pytest.raises(ConfigError, match=r"num: 3 then, 4 now.*--restart"):
        Journal(output, {**SETTINGS, "num": 4})


def test_restart_throws_the_old_run_away(output: Path) -> None:
    write(output, {"item": 1})
    assert entries(output, restart=True) == []


@pytest.mark.parametrize("line", ["nonsense\n", "[1]\n"])
def test_a_damaged_line_is_named(output: Path, line: str) -> None:
    write(output, raw=line)
    with pytest.raises(DataError, match="journal, line 2"):
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
    with Journal(other, {**SETTINGS, "weights": "a"}):
        pass
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
    write(output)
    with output.with_name(output.name + ".journal").open("ab") as file:
        file.write(line + b"\n")
    with pytest.raises(DataError, match=f"journal, line 2: .*{message}"):
        Journal(output, SETTINGS)
