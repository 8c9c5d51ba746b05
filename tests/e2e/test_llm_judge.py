"""The judge against a scripted endpoint: what it asks, what it makes of the replies, and that no reply is lost."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("openai", reason="needs the openai client: pip install 'dropmatch[judge]'")

from dropmatch.bench.chat_endpoint import ChatEndpoint
from dropmatch.bench.llm_judge import (
    JudgeSettings,
    Subject,
    grade_question,
    judge_results,
    key_of,
    komt_rating,
    korean_detector,
    pair_question,
    parse_rating,
    parse_verdict,
)
from dropmatch.bench.tables import table as table_of
from dropmatch.bench.tasks import load_items
from dropmatch.cli import main
from dropmatch.errors import ConfigError, DataError, EndpointError, UnknownNameError
from endpoint import Response, Script, serve, soon
from tabled import column, tables

SECRET = "sk-very-secret-0123456789"
TURNS = ["How fast is boat {}?", "And the train?"]


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def write_results(path: Path, arms: Mapping[str, Mapping[str, Sequence[str]]], task: str = "mt_bench") -> Path:
    """A comparison as `dropmatch compare` writes it, with what a judge reads of it."""
    items = list(dict.fromkeys(item for answers in arms.values() for item in answers))
    num_turns = {item: len(next(answers[item] for answers in arms.values() if item in answers)) for item in items}
    prompts = {
        item: {"task": task, "turns": [turn.format(item) for turn in TURNS[: num_turns[item]]]} for item in items
    }
    records = {
        arm: {
            "rule": arm,
            "draft_length": 5,
            "items": {item: {"text": "\n\n".join(texts), "texts": list(texts)} for item, texts in answers.items()},
        }
        for arm, answers in arms.items()
    }
    result = {"kind": "compare", "format": 1, "settings": {}, "prompts": prompts, "arms": records, "summary": []}
    path.write_text(json.dumps(result))
    return path


def two_arms(path: Path) -> Path:
    lossless = {f"mt_bench/{i}": [f"plain {i}a", f"plain {i}b"] for i in (1, 2, 3)}
    ours = {**lossless, "mt_bench/2": ["ours 2a", "ours 2b"], "mt_bench/3": ["ours 3a", "ours 3b"]}
    return write_results(path, {"lossless L=5": lossless, "dropmatch L=5": ours})


def judge(results: Path, url: str, *, items: Any = (), restart: bool = False, **options: Any) -> dict[str, Any]:
    names = JudgeSettings.__dataclass_fields__
    settings = JudgeSettings(**{name: value for name, value in options.items() if name in names})
    asked = {"retries": 2, "seconds": 20.0, **{name: value for name, value in options.items() if name not in names}}
    endpoint = ChatEndpoint(url=url, model="judge", **asked)
    return judge_results(
        results, endpoint, settings, output=results.with_name("judged.json"), data=items, restart=restart
    )


def rating_of(question: str) -> Response:
    """9 for what ends on "2b", 7 for answers of ours, 4 for the rest: as they are shown last."""
    last = re.findall(r"<(?:answer|assistant)>\n(.*?)\n</", question)[-1]
    rating = 9 if last.endswith("2b") else 7 if last.startswith("ours") else 4
    return Response(f"Because of that.\nMy rating: [[{rating}]]")


def by_rating(question: str, _: int) -> Response:
    return rating_of(question)


# -- ratings --------------------------------------------------------------------------------------------------------


def test_ratings_are_means_over_turns_and_items(tmp_path: Path) -> None:
    with serve(by_rating) as server:
        result = judge(two_arms(tmp_path / "compare.json"), server.url)
    assert result["arms"]["dropmatch L=5"]["mt_bench/2"]["ratings"] == [7.0, 9.0]
    rows = {row["arm"]: row for row in result["summary"]}
    assert rows["lossless L=5"]["score"] == pytest.approx((4 + 4 + 4 + 9 + 4 + 4) / 6)
    ours = rows["dropmatch L=5"]
    assert ours["score"] == pytest.approx((4 + 4 + 7 + 9 + 7 + 7) / 6)
    assert ours["score_by_turn"] == pytest.approx([(4 + 7 + 7) / 3, (4 + 9 + 7) / 3])
    assert 4.0 <= ours["score_low"] < ours["score"] < ours["score_high"] <= 8.0
    assert (ours["n"], ours["ratings"], ours["invalid_ratings"], ours["win_rate"]) == (3, 6, 0, None)
    assert len(server.seen) == 10  # the methods share one item's answers: those two questions are asked once
    assert {body["temperature"] for body in server.seen} == {0.0}
    assert {body["path"] for body in server.seen} == {"/v1/chat/completions"}
    assert json.loads((tmp_path / "judged.json").read_text()) == result


def test_the_second_turn_is_judged_with_the_whole_dialogue_in_view() -> None:
    subject = Subject("mt_bench/1", "mt_bench", ("first?", "second?"))
    system, user = grade_question(subject, ["one", "two"], 1)
    assert system["role"] == "system"
    places = [user["content"].index(text) for text in ("last answer", "first?", "one\n", "second?", "two\n")]
    assert places == sorted(places)
    first = grade_question(subject, ["one", "two"], 0)[1]["content"]
    assert "second?" not in first
    assert "two\n" not in first


def test_references_go_to_mathematics_reasoning_and_coding_alone(tmp_path: Path) -> None:
    rows = [
        {"id": f"mt_bench/{i}", "task": "mt_bench", "turns": TURNS, "meta": {"category": category, "reference": texts}}
        for i, category, texts in ((1, "math", ["REF 1a", "REF 1b"]), (2, "writing", ["REF 2a", "REF 2b"]))
    ]
    data = tmp_path / "mt_bench.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with serve(by_rating) as server:
        result = judge(two_arms(tmp_path / "compare.json"), server.url, items=load_items(data), concurrency=1)
    asked = [body["messages"][1]["content"] for body in server.seen]
    assert [("REF 1a" in text, "REF 1b" in text) for text in asked[:2]] == [(True, False), (False, True)]
    assert not any("REF 2" in text or "reference answer" in text for text in asked[2:])
    assert result["summary"][0]["score_by_category"] == {"math": 4.0, "writing": 6.5}


def test_a_reference_may_be_one_text_and_meta_may_be_anything(tmp_path: Path) -> None:
    """A text was taken apart into letters, and meta that is no object was an error of Python."""
    metas = ({"category": "math", "reference": "REF 1"}, ["some", "words"])
    rows = [
        {"id": f"mt_bench/{i}", "task": "mt_bench", "turns": TURNS, "meta": meta} for i, meta in enumerate(metas, 1)
    ]
    data = tmp_path / "mt_bench.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with serve(by_rating) as server:
        judge(two_arms(tmp_path / "compare.json"), server.url, items=load_items(data), concurrency=1)
    asked = [body["messages"][1]["content"] for body in server.seen]
    assert "<reference answer>\nREF 1\n</reference answer>" in asked[0]
    assert not any("reference answer" in text for text in asked[1:])


def test_data_of_other_items_is_refused(tmp_path: Path) -> None:
    data = tmp_path / "other.jsonl"
    data.write_text(json.dumps({"id": "mt_bench/99", "task": "mt_bench", "turns": TURNS}) + "\n")
    with pytest.raises(DataError, match="mt_bench/99"):
        judge(two_arms(tmp_path / "compare.json"), "http://127.0.0.1:9/v1", items=load_items(data))


@pytest.mark.parametrize(
    ("reply", "rating"),
    [
        ("Good. [[7]]", 7.0),
        ("[[8.5]] and not [[2]]", 8.5),
        ("Rating: [6]", 6.0),
        ("see [3], so [[9]]", 9.0),
        ("ten out of ten", -1.0),
        ("[[11]]", -1.0),
        ("[[0]]", -1.0),
        ("[[seven]]", -1.0),
        ("", -1.0),
    ],
)
def test_the_rating_is_the_first_number_in_double_brackets(reply: str, rating: float) -> None:
    assert parse_rating(reply) == rating


def test_replies_without_a_rating_are_counted_and_left_out(tmp_path: Path) -> None:
    def script(question: str, _: int) -> Response:
        return Response("no idea") if "plain 1a" in question and "plain 1b" not in question else rating_of(question)

    with serve(script) as server:
        result = judge(two_arms(tmp_path / "compare.json"), server.url)
    row = result["summary"][0]
    assert (row["ratings"], row["invalid_ratings"]) == (5, 1)
    assert row["score"] == pytest.approx((4 + 4 + 9 + 4 + 4) / 5)


def test_the_interval_covers_the_mean_of_a_known_spread_about_as_often_as_it_should() -> None:
    """200 draws of 40 ratings with mean 5: a 95% interval misses 10 on average; 25 misses are 5 deviations away."""
    import numpy as np

    from dropmatch.bench.llm_judge import _mean

    draw = np.random.default_rng(3)
    misses = 0
    for _ in range(200):
        _, low, high = _mean([[value] for value in draw.integers(1, 10, 40).astype(float)])
        assert low is not None
        assert high is not None
        misses += not low <= 5.0 <= high
    assert 1 <= misses <= 25


# -- KoMT -----------------------------------------------------------------------------------------------------------


def test_the_square_root_is_taken_where_the_answer_is_not_korean_but_for_two_questions() -> None:
    assert komt_rating(9.0, 1, False) == 3.0
    assert komt_rating(9.0, 1, True) == 9.0
    assert komt_rating(9.0, 138, False) == komt_rating(9.0, 140, False) == 9.0
    assert komt_rating(9.0, 139, False) == 3.0
    assert komt_rating(-1.0, 1, False) == -1.0


def test_korean_scores_stand_beside_plain_ones(tmp_path: Path) -> None:
    korean, english = (
        "하늘이 파란 이유는 공기가 짧은 파장을 더 많이 산란시키기 때문입니다.",
        "The sky is blue because of the air.",
    )
    answers = {"komt/137": [korean], "komt/138": [english], "komt/139": [english]}
    results = write_results(tmp_path / "compare.json", {"plain": answers})
    with serve(lambda *_: Response("[[9]]")) as server:
        result = judge(results, server.url, komt=True)
    assert result["arms"]["plain"]["komt/137"]["korean"] == [True]
    row = result["summary"][0]
    assert row["score"] == 9.0
    assert row["komt_score"] == pytest.approx((9 + 9 + math.sqrt(9)) / 3)


def test_the_language_is_told_alike_each_time_and_numbers_have_none() -> None:
    is_korean = korean_detector()
    mixed = "정답은 42입니다. the answer is forty two and 감사합니다"
    assert len({is_korean(mixed) for _ in range(10)}) == 1
    assert is_korean("42 + 1 = 43")
    assert not is_korean("これは日本語の文です。空は青いです。")


# -- win rates ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reply", "value"),
    [
        ("[[A]]", 1.0),
        ("so [[b]]", 0.0),
        ("[[tie]]", 0.5),
        ("[[A]] or [[B]]", -1.0),
        ("A", -1.0),
        ("[[A]] yes [[A]]", 1.0),
    ],
)
def test_a_verdict_must_be_one(reply: str, value: float) -> None:
    assert parse_verdict(reply) == value


def pick(question: str) -> str:
    first = question.split("assistant B>")[0]
    return "[[A]]" if "ours" in first else "[[B]]"


def test_wins_are_averaged_over_both_orders_and_equal_answers_tie_unasked(tmp_path: Path) -> None:
    def script(question: str, _: int) -> Response:
        if "2a" in question:
            return Response("[[A]]")  # sways to whoever comes first
        return Response(pick(question))

    with serve(script) as server:
        result = judge(two_arms(tmp_path / "compare.json"), server.url, grade=False, against="lossless L=5")
    assert len(server.seen) == 4
    judged = result["arms"]["dropmatch L=5"]
    assert [judged[f"mt_bench/{i}"]["win"] for i in (1, 2, 3)] == [0.5, 0.5, 1.0]
    assert judged["mt_bench/3"]["verdicts"] == [1.0, 0.0]
    row = next(row for row in result["summary"] if row["arm"] == "dropmatch L=5")
    assert row["win_rate"] == pytest.approx(2 / 3)
    assert (row["won"], row["tied"], row["lost"], row["undecided"]) == (1, 2, 0, 0)
    assert row["first_place_share"] == 0.75
    assert row["score"] is None
    assert result["arms"]["lossless L=5"]["mt_bench/1"] == {}


def test_a_pair_counts_only_with_both_verdicts(tmp_path: Path) -> None:
    def script(question: str, _: int) -> Response:
        is_second = "ours" not in question.split("assistant B>")[0]
        return Response("hard to say") if "3a" in question and is_second else Response("[[tie]]")

    with serve(script) as server:
        result = judge(two_arms(tmp_path / "compare.json"), server.url, grade=False, against="lossless L=5")
    row = next(row for row in result["summary"] if row["arm"] == "dropmatch L=5")
    assert (row["undecided"], row["tied"], row["win_rate"]) == (1, 2, 0.5)
    assert result["arms"]["dropmatch L=5"]["mt_bench/3"]["win"] is None


def test_both_orders_show_the_same_but_for_the_places() -> None:
    subject = Subject("prompts/1", "prompts", ("why?",))
    one, other = pair_question(subject, ["x"], ["y"]), pair_question(subject, ["y"], ["x"])
    assert one != other
    text = one[1]["content"]
    assert text.index("<answer of assistant A>\nx") < text.index("<answer of assistant B>\ny")
    assert key_of(one) != key_of(other)


def test_an_unknown_method_and_nothing_to_judge_are_refused(tmp_path: Path) -> None:
    results = two_arms(tmp_path / "compare.json")
    with pytest.raises(UnknownNameError, match="Did you mean 'lossless L=5'"):
        judge(results, "http://127.0.0.1:9/v1", against="lossles L=5")
    with pytest.raises(ConfigError, match="nothing to judge"):
        judge(results, "http://127.0.0.1:9/v1", grade=False)


# -- the endpoint ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_busy_endpoint_is_asked_again(tmp_path: Path, status: int) -> None:
    with serve(lambda question, before: soon(status) if before < 2 else rating_of(question)) as server:
        result = judge(two_arms(tmp_path / "compare.json"), server.url)
    assert result["unanswered"] == {}
    assert len(server.seen) == 30


def test_a_broken_connection_is_made_again(tmp_path: Path) -> None:
    def script(question: str, before: int) -> Response:
        is_cut = before == 0 and "plain 1a" in question and "plain 1b" not in question
        return Response("[[4]]", hang_up=True) if is_cut else rating_of(question)

    with serve(script) as server:
        result = judge(two_arms(tmp_path / "compare.json"), server.url)
    assert result["summary"][0]["ratings"] == 6
    assert len(server.seen) == 11


def test_questions_are_asked_side_by_side_and_no_more_than_allowed(tmp_path: Path) -> None:
    def slow(question: str, _: int) -> Response:
        return Response(rating_of(question).text, delay=0.05)

    with serve(slow) as server:
        judge(two_arms(tmp_path / "compare.json"), server.url, concurrency=3)
    assert 1 < server.most_at_once <= 3


UNUSABLE = {
    "html": Response(body="<html>sorry</html>", content_type="text/html"),
    "half a JSON": Response(body='{"choices": [{"mess'),
    "no choices": Response(body='{"choices": []}'),
    "choices by name": Response(body='{"choices": {"a": 1}}'),
    "no text": Response(body='{"choices": [{"index": 0, "message": {"role": "assistant", "content": null}}]}'),
    "refused": Response(status=400, body='{"error": {"message": "too long"}}'),
    "silence": Response("[[5]]", delay=1.0),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_a_run_with_gaps_writes_nothing_and_fills_them_the_next_time(tmp_path: Path, name: str) -> None:
    results = two_arms(tmp_path / "compare.json")
    is_fixed = False

    def script(question: str, _: int) -> Response:
        is_bad = "ours 3a" in question and "ours 3b" not in question and not is_fixed
        return UNUSABLE[name] if is_bad else rating_of(question)

    with serve(script) as server:
        with pytest.raises(EndpointError, match="1 of 10 questions got no reply"):
            judge(results, server.url, retries=0, seconds=0.5, concurrency=2)
        assert not (tmp_path / "judged.json").exists()
        allowed = judge(results, server.url, retries=0, seconds=0.5, allow_missing=True)
        assert len(allowed["unanswered"]) == 1
        assert allowed["summary"][1]["ratings"] == 5
        is_fixed = True
        asked = len(server.seen)
        result = judge(results, server.url)
    assert len(server.seen) == asked + 1
    assert result["summary"][1]["ratings"] == 6
    assert not (tmp_path / "judged.json.journal").exists()


@pytest.mark.parametrize(
    ("status", "message"), [(401, "OPENAI_API_KEY is set"), (403, "refused"), (404, "knows no model")]
)
def test_a_refusal_of_everything_ends_the_run_at_once(tmp_path: Path, status: int, message: str) -> None:
    body = json.dumps({"error": {"message": f"bad key {SECRET}"}})
    with serve(lambda *_: Response(status=status, body=body)) as server:
        with pytest.raises(EndpointError, match=message) as caught:
            judge(two_arms(tmp_path / "compare.json"), server.url, concurrency=1)
        assert len(server.seen) == 1
    assert SECRET not in str(caught.value)


def test_an_endpoint_that_is_not_there_is_given_up_soon(tmp_path: Path) -> None:
    with serve(by_rating) as server:
        url = server.url  # free again behind the block
    with pytest.raises(
        EndpointError, match=r"answered none of the first 3 questions.*APIConnectionError.*Check the address"
    ):
        judge(two_arms(tmp_path / "compare.json"), url, retries=0, concurrency=2)


def test_questions_that_are_refused_one_by_one_do_not_look_like_an_endpoint_that_is_down(tmp_path: Path) -> None:
    body = json.dumps({"error": {"message": "filtered"}})
    with serve(lambda *_: Response(status=400, body=body)) as server:
        result = judge(two_arms(tmp_path / "compare.json"), server.url, concurrency=1, allow_missing=True)
    assert len(result["unanswered"]) == 10
    assert result["summary"][0]["score"] is None


def test_the_key_goes_to_the_endpoint_and_nowhere_else(tmp_path: Path) -> None:
    with serve(by_rating) as server:
        judge(two_arms(tmp_path / "compare.json"), server.url)
    assert set(server.keys) == {f"Bearer {SECRET}"}
    assert not any(SECRET in path.read_text() for path in tmp_path.iterdir())


def test_a_local_endpoint_needs_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY")
    with serve(by_rating) as server:
        assert judge(two_arms(tmp_path / "compare.json"), server.url)["summary"]
    with serve(lambda *_: Response(status=401, body="{}")) as server, pytest.raises(EndpointError, match="not set"):
        judge(two_arms(tmp_path / "compare.json"), server.url, restart=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "localhost:8000"}, "http or https"),
        ({"url": f"http://me:{SECRET}@localhost/v1"}, "may hold no password"),
        ({"url": f"http://localhost/v1?key={SECRET}"}, "no query"),
        ({"key_variable": SECRET}, "letters, digits and _"),
        ({"model": ""}, "Name one"),
        ({"concurrency": 0}, "at least 1"),
        ({"seconds": 0.0}, "above 0"),
    ],
)
def test_bad_endpoints_are_refused_without_repeating_secrets(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        ChatEndpoint(**{"url": "http://localhost/v1", "model": "judge", **options})
    assert SECRET not in str(caught.value)


def test_the_address_may_be_the_whole_one() -> None:
    for url in ("http://localhost/v1", "http://localhost/v1/", "http://localhost/v1/chat/completions"):
        assert ChatEndpoint(url=url, model="judge").url == "http://localhost/v1"


# -- going on -------------------------------------------------------------------------------------------------------


def test_replies_that_a_run_does_not_ask_for_are_kept(tmp_path: Path) -> None:
    """They were paid for, and dropped from the file."""
    results = two_arms(tmp_path / "compare.json")
    both: Script = lambda question, _: Response(pick(question)) if "assistant B" in question else rating_of(question)  # noqa: E731
    with serve(both) as server:
        first = judge(results, server.url, against="lossless L=5")
        asked = len(server.seen)
        judge(results, server.url)
        again = judge(results, server.url, against="lossless L=5")
        assert len(server.seen) == asked
    assert again["summary"] == first["summary"]


def test_a_finished_file_lends_its_replies_to_more_questions(tmp_path: Path) -> None:
    results = two_arms(tmp_path / "compare.json")
    both: Script = lambda question, _: Response(pick(question)) if "assistant B" in question else rating_of(question)  # noqa: E731
    with serve(both) as server:
        first = judge(results, server.url)
        again = judge(results, server.url)
        assert len(server.seen) == 10
        assert again["summary"] == first["summary"]
        more = judge(results, server.url, against="lossless L=5")
        assert len(server.seen) == 14
        assert more["summary"][1]["win_rate"] == pytest.approx(2.5 / 3)
        assert more["summary"][1]["score"] == first["summary"][1]["score"]
        judge(results, server.url, restart=True)
        assert len(server.seen) == 24
        with pytest.raises(ConfigError, match="another judge"):
            judge(results, server.url, max_tokens=7)


def test_an_interrupt_loses_no_reply(tmp_path: Path) -> None:
    """Ctrl-C in the middle of the real command: what was answered is not asked again."""
    results = two_arms(tmp_path / "compare.json")
    journal = tmp_path / "compare.judged.json.journal"
    is_slow = True

    def script(question: str, _: int) -> Response:
        waits = is_slow and "ours" in question
        return Response(rating_of(question).text, delay=60.0 if waits else 0.0)

    with serve(script) as server:
        command = [sys.executable, "-m", "dropmatch.cli", "llm-judge", str(results), "--endpoint", server.url]
        command += ["--model", "judge", "--concurrency", "2"]
        process = subprocess.Popen(
            command,
            stderr=subprocess.PIPE,
            text=True,
            env=dict(os.environ),
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job in the background ignores it
        )
        deadline = time.monotonic() + 120
        # the method that comes first has 6 questions, then both workers hang on the second's
        while time.monotonic() < deadline and (len(server.seen) < 8 or len(journal.read_text().splitlines()) < 7):
            assert process.poll() is None
            time.sleep(0.05)
        started = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        assert time.monotonic() - started < 30.0  # it does not wait for replies
        assert process.returncode == 130
        assert "Stopped" in errors
        assert "Traceback" not in errors
        assert len(journal.read_text().splitlines()) == 7
        is_slow = False
        output = tmp_path / "compare.judged.json"
        judge_results(results, ChatEndpoint(url=server.url, model="judge"), JudgeSettings(), output=output)
        assert len(server.seen) == 8 + 4
    assert output.exists()
    assert not journal.exists()


# -- the command ----------------------------------------------------------------------------------------------------


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr("sys.argv", ["dropmatch", "llm-judge", *words])
    try:
        main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def test_the_command_prints_a_table_or_one_json_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = str(two_arms(tmp_path / "compare.json"))
    both: Script = lambda question, _: Response(pick(question)) if "assistant B" in question else rating_of(question)  # noqa: E731
    with serve(both) as server:
        words = (results, "--endpoint", server.url, "--model", "judge", "--against", "lossless L=5", "--komt")
        assert run(monkeypatch, *words) == 0
        table = capsys.readouterr().out
        assert run(monkeypatch, *words, "--json") == 0
        again = capsys.readouterr()
        printed = json.loads(again.out)
    assert "83.3% (50.0% to 100.0%)" in table
    assert "wins against lossless L=5" in table
    assert f"Taken over from {tmp_path}/compare.judged.json (finished): " in again.err
    (ratings,) = tables(table_of([(tmp_path / "compare.judged.json", "j.json")]))
    assert column(ratings, "wins against lossless L=5") == ["", "83.3 (50.0 to 100.0)"]
    assert "KoMT-bench score" in ratings[0]
    assert printed["summary"] == json.loads((tmp_path / "compare.judged.json").read_text())["summary"]


def test_files_that_are_no_comparison_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.json"
    other.write_text('{"kind": "quick"}')
    assert run(monkeypatch, str(other), "--endpoint", "http://localhost/v1", "--model", "judge") == 2
    assert "results of kind 'quick'; a comparison of format 1 is needed" in capsys.readouterr().err
    broken = json.loads(two_arms(tmp_path / "compare.json").read_text())
    broken["arms"]["lossless L=5"]["items"]["mt_bench/1"]["texts"].pop()
    other.write_text(json.dumps(broken))
    assert run(monkeypatch, str(other), "--endpoint", "http://localhost/v1", "--model", "judge") == 2
    assert "has not one text for each turn" in capsys.readouterr().err
    (tmp_path / "taken.json").write_text("{}")
    good = str(tmp_path / "compare.json")
    options = ("--endpoint", "http://localhost/v1", "--model", "judge", "-o", str(tmp_path / "taken.json"))
    assert run(monkeypatch, good, *options) == 2
    assert "holds no judgements" in capsys.readouterr().err
    (tmp_path / "taken.json").write_text('{"kind": "llm-judge", "format": 1, "settings": {}}')
    assert run(monkeypatch, good, *options) == 2
    assert "taken.json: 'replies' is missing. The file is damaged." in capsys.readouterr().err
    (tmp_path / "taken.json").write_text("[" * 100_000)
    assert run(monkeypatch, good, *options) == 2
    assert "taken.json: nested too deep. Name another output." in capsys.readouterr().err
