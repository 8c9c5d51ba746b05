"""Peers: their environment, the lines that go to and from their processes, and the race beside our own decoding."""

from __future__ import annotations

import io
import json
import os
import sys
import sysconfig
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import dropmatch
import tiny
from commands import Command, runner
from dropmatch.api import Decoder
from dropmatch.bench.peers import child, race
from dropmatch.bench.peers.environment import PEERS, ready_environment
from dropmatch.bench.peers.process import CHILD, PeerError, PeerProcess
from dropmatch.bench.peers.race import Contestant, contestants, race_rows, run_race
from dropmatch.bench.side_by_side import rotated
from dropmatch.bench.tables import table
from dropmatch.bench.tasks import Item
from dropmatch.config import SamplingParams
from dropmatch.drafters.draft_model import DraftModelDrafter
from dropmatch.errors import ConfigError
from tabled import column, tables

SOON = 60.0  # seconds; a fake peer answers at once, on a busy machine too
NEW_TOKENS = 10

# A peer without a model: it gives the tokens that stand in a file, by prompt.
FAKE = """
import json, os, sys
settings = json.loads(sys.stdin.readline())
print(json.dumps({"versions": {"fake": "1.0", "dtype": settings["dtype"]}}), flush=True)
known = json.load(open(sys.argv[1]))
for line in sys.stdin:
    request = json.loads(line)
    tokens = known[json.dumps(request["ids"])][: request["max_new_tokens"]]
    print(json.dumps({"tokens": tokens}), flush=True)
"""


def _process(code: str, *arguments: str, timeout: float = SOON) -> PeerProcess:
    return PeerProcess("fake", [sys.executable, "-c", code, *arguments], {"dtype": "float32"}, timeout=timeout)


# -- the process ----------------------------------------------------------------------------------------------------


def test_a_peer_is_asked_line_by_line(tmp_path: Path) -> None:
    (tmp_path / "known.json").write_text(json.dumps({"[1, 2]": [5, 6, 7], "[3]": [8, 9]}))
    with _process(FAKE, str(tmp_path / "known.json")) as peer:
        assert peer.versions == {"fake": "1.0", "dtype": "float32"}
        assert peer.generate([1, 2], 3, None) == [5, 6, 7]
        assert peer.generate([3], 1, 5) == [8]
        with pytest.raises(PeerError, match="gave 2 tokens, and 4 were asked for"):
            peer.generate([3], 4, None)


READY = "import json, sys, time; sys.stdin.readline(); print('{\"versions\": {}}', flush=True); sys.stdin.readline();"
FAULTS = {
    "an error": (READY + "print(json.dumps({'error': 'ValueError: no'}), flush=True)", "fake failed: ValueError: no"),
    "an end": (READY + "sys.exit('it broke')", "ended without an answer. Its last words: it broke"),
    "a silent end": (READY, "ended without an answer. It said nothing"),
    "no JSON": (READY + "print('loading', flush=True)", "gave 'loading\\\\n' in place of an answer"),
    "another answer": (READY + "print('{\"token\": [1]}', flush=True)", "in place of an answer"),
    "no list": (READY + "print('{\"tokens\": 1}', flush=True)", "gave no tokens, and 1 were asked for"),
    "no object": (READY + "print('[1]', flush=True)", "in place of an answer"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_a_peer_did_wrong_is_said(fault: str) -> None:
    code, message = FAULTS[fault]
    with _process(code) as peer, pytest.raises(PeerError, match=message.replace("[", r"\[").replace("(", r"\(")):
        peer.generate([1], 1, None)


def test_a_peer_that_hangs_is_ended() -> None:
    with _process(READY + "time.sleep(600)") as peer:
        peer._timeout = 0.1
        with pytest.raises(PeerError, match=r"no answer within 0\.1 seconds"):
            peer.generate([1], 1, None)
        assert peer._process.wait(SOON) != 0


def test_a_peer_that_cannot_be_started_or_cannot_load_is_named() -> None:
    with pytest.raises(PeerError, match="could not be started"):
        PeerProcess("fake", ["/nonexistent/python"], {}, timeout=SOON)
    with pytest.raises(PeerError, match="No module named 'not_there'"):
        _process("import not_there")


# -- the child ------------------------------------------------------------------------------------------------------


def _serve(monkeypatch: pytest.MonkeyPatch, lines: Sequence[dict[str, Any]], run: child.Run) -> list[dict[str, Any]]:
    monkeypatch.setitem(child.PEERS, "torch", lambda settings: run)  # a name that has a version
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(json.dumps(line) + "\n" for line in lines)))
    answers: list[dict[str, Any]] = []
    child._serve("torch", answers.append)
    return answers


def test_the_child_loads_once_and_answers_each_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"target": "a", "draft": "b", "dtype": "float32", "device": "cpu", "threads": torch.get_num_threads()}
    asked = [{"ids": [1, 2], "max_new_tokens": 2, "length": None}, {"ids": [3], "max_new_tokens": 1, "length": 5}]
    seen = []

    def run(ids: Any, num_new: int, length: int | None) -> Any:
        seen.append((ids.tolist(), num_new, length))
        return torch.arange(num_new)

    ready, *answers = _serve(monkeypatch, [settings, *asked], run)
    assert ready["versions"]["torch"] == torch.__version__
    assert seen == [([[1, 2]], 2, None), ([[3]], 1, 5)]
    assert [answer["tokens"] for answer in answers] == [[0, 1], [0]]


def test_the_child_names_every_peer_that_can_be_installed() -> None:
    assert child.PEERS.keys() == PEERS.keys()


# -- the environment ------------------------------------------------------------------------------------------------


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where packages of a made environment lie. Makes them empty, without pip, which would take seconds."""
    scheme = "nt_venv" if os.name == "nt" else "posix_venv"
    folder = Path(sysconfig.get_path("purelib", scheme, {"base": str(tmp_path / "venv"), "platbase": ""}))
    made = []

    def create(where: Path, **options: Any) -> None:
        made.append((where, options))
        folder.mkdir(parents=True, exist_ok=True)

    monkeypatch.setattr(venv, "create", create)
    return folder


@pytest.mark.usefixtures("packages")
def test_peers_are_installed_once_at_their_pinned_versions(tmp_path: Path) -> None:
    commands: list[Sequence[str]] = []

    def install(command: Sequence[str]) -> None:
        commands.append(command)

    for _ in range(2):
        python, failures = ready_environment(list(PEERS), folder=tmp_path / "venv", install=install)
        assert failures == {}
        assert python.is_relative_to(tmp_path / "venv")
    assert [command[-1] for command in commands] == ["economize==0.3.2", "flashspec==0.3.1"]
    assert all(command[0] == str(python) for command in commands)


def test_the_environment_sees_our_torch_and_takes_no_other(tmp_path: Path, packages: Path) -> None:
    ready_environment(["flashspec"], folder=tmp_path / "venv", install=lambda command: None)
    assert sysconfig.get_path("purelib") in (packages / "dropmatch-shared.pth").read_text().splitlines()
    constraints = (tmp_path / "venv" / "constraints.txt").read_text().splitlines()
    assert f"torch=={torch.__version__}" in constraints
    assert all("==" in line for line in constraints)


@pytest.mark.usefixtures("packages")
def test_a_peer_that_cannot_be_installed_says_why_and_is_tried_again(tmp_path: Path) -> None:
    def refuse(command: Sequence[str]) -> str | None:
        return "No matching distribution found" if command[-1].startswith("flash") else None

    _, failures = ready_environment(list(PEERS), folder=tmp_path / "venv", install=refuse)
    assert failures == {"flashspec": "flashspec==0.3.1 could not be installed: No matching distribution found"}
    commands: list[Sequence[str]] = []
    _, failures = ready_environment(list(PEERS), folder=tmp_path / "venv", install=lambda c: commands.append(c))
    assert (failures, len(commands)) == ({}, 1)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="DROPMATCH_PEERS_VENV"):
        ready_environment(["flashspec"], folder=tmp_path / "file" / "venv", install=lambda command: None)


# -- the race -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    pair = tiny.save_pair(tmp_path_factory.mktemp("pair"))
    return dropmatch.load(str(pair.target), str(pair.draft), rule="lossless", p_drop=0.0)


ITEMS = [
    Item(f"gsm8k/{i}", "gsm8k", (text,), {}, (), NEW_TOKENS)
    for i, text in enumerate(("a train travels", "why is the sky blue"))
]


@pytest.fixture
def known(decoder: Decoder, tmp_path: Path) -> Path:
    """What plain decoding gives for each prompt; the second one with another fourth token."""
    answers = {}
    for i, item in enumerate(ITEMS):
        ids = decoder.encode(item.prompt)
        params = SamplingParams(max_new_tokens=NEW_TOKENS, eos_ids=())
        tokens = decoder.run([ids], params, engine=decoder.engine(drafter=None)).generations[0].tokens
        answers[json.dumps(ids)] = [*tokens[:3], tokens[3] + i, *tokens[4:]]
    (tmp_path / "known.json").write_text(json.dumps(answers))
    return tmp_path / "known.json"


def _run(decoder: Decoder, output: Path, peers: Sequence[Contestant], **options: Any) -> dict[str, Any]:
    return run_race(
        decoder,
        ITEMS,
        peers,
        **{
            "lengths": [3],
            "max_new_tokens": NEW_TOKENS,
            "repeats": 2,
            "with_transformers": False,
            "left_out": {"flashspec": "flashspec==0.3.1 could not be installed: no network"},
            **options,
        },
        described={"target": "big", "draft": "small", "data": ["gsm8k.jsonl"]},
        output=output,
    )


def test_all_ways_are_timed_and_their_texts_compared(decoder: Decoder, known: Path, tmp_path: Path) -> None:
    fake = Contestant("economize", (sys.executable, "-c", FAKE, str(known)), (None, 3))
    result = _run(decoder, tmp_path / "r.json", [fake], with_transformers=True)
    assert json.loads((tmp_path / "r.json").read_text()) == result
    rows = {row["way"]: row for row in result["summary"]}
    peers = ["economize 0.3.2, default", "economize 0.3.2, L=3"]
    assisted = ["transformers assisted L=3", "transformers assisted, default"]
    assert list(rows) == ["plain", "lossless L=3", "transformers generate", *assisted, *peers]
    for name, row in rows.items():
        ratio = row["over_generate"]
        assert 0 < ratio["min"] <= ratio["median"] <= ratio["max"]
        assert row["same_text"] == (1 if name in peers else 2), name
        assert row["first_difference"] == (4 if name in peers else None)
        assert [len(times) for times in result["ways"][name]["seconds"].values()] == [2, 2]
    assert rows["lossless L=3"]["tau"] > 1.5
    assert rows["plain"]["tau"] == 1.0
    assert [name for name, row in rows.items() if row["is_ours"]] == ["plain", "lossless L=3"]
    fastest = [name for name, row in rows.items() if row["is_fastest_peer"]]
    assert len(fastest) == 1
    assert rows[fastest[0]]["over_fastest_peer"] == pytest.approx({"median": 1.0, "min": 1.0, "max": 1.0})
    assert result["settings"]["versions"] == {"economize": {"fake": "1.0", "dtype": "float32"}}
    (shown,) = tables(table([(tmp_path / "r.json", "results/r.json")]))
    assert column(shown, "text as plain")[-1] == "1 of 2 (4)"
    assert "no network" in table([(tmp_path / "r.json", "results/r.json")])
    assert not (tmp_path / "r.json.journal").exists()


def test_a_peer_that_breaks_is_left_out_with_its_reason(decoder: Decoder, tmp_path: Path) -> None:
    broken = Contestant("economize", (sys.executable, "-c", READY + "sys.exit('out of memory')"), (None,))
    absent = Contestant("flashspec", (sys.executable, "-c", "import not_there"), (None,))
    result = _run(decoder, tmp_path / "r.json", [broken, absent])
    assert [row["way"] for row in result["summary"]] == ["plain", "lossless L=3"]
    assert "out of memory" in result["settings"]["left_out"]["economize"]
    assert "not_there" in result["settings"]["left_out"]["flashspec"]
    assert result["summary"][1]["over_fastest_peer"] is None


def test_a_race_needs_a_draft_model(tmp_path: Path, decoder: Decoder) -> None:
    other = dropmatch.load(decoder.target.model.name_or_path, "ngram", p_drop=0.0)
    with pytest.raises(ConfigError, match="The peers draft with a model"):
        _run(other, tmp_path / "r.json", [])


def test_a_stopped_race_goes_on(decoder: Decoder, known: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Contestant("economize", (sys.executable, "-c", FAKE, str(known)), (None,))
    timed = race._timed
    calls: list[Any] = []

    def stop_at_the_fourth(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return timed(*arguments)

    monkeypatch.setattr(race, "_timed", stop_at_the_fourth)
    with pytest.raises(KeyboardInterrupt):
        _run(decoder, tmp_path / "r.json", [fake])
    result = _run(decoder, tmp_path / "r.json", [fake])
    assert len(calls) == 4 + 2 * 2 * 3 - 3
    assert all(sum(map(len, way["seconds"].values())) == 4 for way in result["ways"].values())


def test_ratios_are_prompt_by_prompt() -> None:
    def entry(way: str, item: str, seconds: float, tokens: Sequence[int]) -> dict[str, Any]:
        return {"way": way, "item": item, "repeat": 0, "seconds": seconds, "tokens": list(tokens)}

    entries = [
        *(entry("plain", item, seconds, [1, 2]) for item, seconds in (("a", 2.0), ("b", 4.0))),
        *(entry("fast", item, seconds, [1, 2]) for item, seconds in (("a", 1.0), ("b", 1.0))),
        *(entry("slow", item, 8.0, [1, 3]) for item in ("a", "b")),
    ]
    rows = {row["way"]: row for row in race_rows(entries, ["plain", "fast", "slow"])}
    assert rows["fast"]["over_plain"] == {"median": 3.0, "min": 2.0, "max": 4.0}
    assert rows["fast"]["tokens_per_second"] == 2.0
    assert rows["fast"]["is_fastest_peer"]
    assert rows["plain"]["over_fastest_peer"]["median"] == pytest.approx(0.375)
    assert rows["plain"]["over_generate"] is None
    assert (rows["slow"]["same_text"], rows["slow"]["first_difference"]) == (0, 2)


# -- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return runner(monkeypatch, capsys)


def test_the_command_measures_without_peers_too(command: Command, decoder: Decoder, tmp_path: Path) -> None:
    record = {"id": "a", "task": "gsm8k", "prompt": "a train travels", "answer": "4"}
    (tmp_path / "gsm8k.jsonl").write_text(json.dumps(record) + "\n")
    assert isinstance(decoder.drafter, DraftModelDrafter)
    models = ("--target", decoder.target.model.name_or_path, "--draft", decoder.drafter.model.model.name_or_path)
    arguments = ("--data", tmp_path / "gsm8k.jsonl", "--num", "1", "-n", "4", "--lengths", "2", "--peers", "none")
    done = command("bench", "peers", *models, *arguments, "-o", tmp_path / "r.json")
    assert done.code == 0, done.err
    assert "lossless L=2" in done.out
    assert [row["same_text"] for row in json.loads((tmp_path / "r.json").read_text())["summary"]] == [1, 1]


def test_a_peer_that_cannot_be_prepared_ends_the_preparation(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    reason = {"flashspec": "flashspec==0.3.1 could not be installed: no network"}
    monkeypatch.setattr("dropmatch.bench.peers.environment.ready_environment", lambda peers: (Path("python"), reason))
    done = command("bench", "peers", "--prepare", "--peers", "economize,flashspec")
    assert done.code == 1
    assert "flashspec==0.3.1 could not be installed: no network" in done.err
    done = command("bench", "peers", "--prepare", "--peers", "transformers")
    assert done.code == 2
    assert "names none of economize, flashspec" in done.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--data", "x", "--peers", "flashpeck"), "Unknown peer 'flashpeck'. Did you mean 'flashspec'?"),
        ((), "Name a file with --data"),
    ],
)
def test_bad_options_are_refused(command: Command, arguments: tuple[str, ...], message: str) -> None:
    done = command("bench", "peers", *arguments)
    assert done.code == 2
    assert message in done.err


# -- the real ones --------------------------------------------------------------------------------------------------


def test_real_peers_give_the_text_of_plain_decoding(decoder: Decoder, peers_python: str, tmp_path: Path) -> None:
    racing = contestants(list(PEERS), [3], Path(peers_python))
    assert all(peer.command[1] == str(CHILD) for peer in racing)
    result = _run(decoder, tmp_path / "r.json", racing, repeats=1, left_out={})
    assert result["settings"]["versions"].keys() == PEERS.keys()
    assert all(row["same_text"] == 2 for row in result["summary"]), result["summary"]
    assert len(result["summary"]) == 2 + 3


def test_every_way_comes_once_and_another_one_first_each_time() -> None:
    turns = [rotated(["a", "b", "c"], start) for start in range(4)]
    assert turns == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"], ["a", "b", "c"]]
