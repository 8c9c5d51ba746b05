"""A chat model as judge of the answers in a comparison: ratings from 1 to 10, and win rates against one method.

Ratings follow MT-bench's single-answer grading in our own words: a verdict on each turn, the later ones with the whole
dialogue in view, and reference answers for mathematics, reasoning and coding. Win rates ask about both orders and
average. Knows no decoder; bench/chat_endpoint.py does the asking. Docs: docs/llm-judge.md.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dropmatch.bench.chat_endpoint import ChatEndpoint, Messages, ask_all
from dropmatch.bench.comparison import read_compare
from dropmatch.bench.fields import Fields
from dropmatch.bench.intervals import ratio_interval
from dropmatch.bench.journal import Journal, say_taken_over
from dropmatch.bench.progress import ProgressMeter
from dropmatch.bench.results import read_json, write_result
from dropmatch.bench.tasks import Item
from dropmatch.errors import ConfigError, DataError, EndpointError, UnknownNameError
from dropmatch.provenance import collect

KIND, FORMAT = "llm-judge", 1
INVALID = -1.0
REFERENCE_CATEGORIES = frozenset({"math", "reasoning", "coding"})
KOMT_EXCEPTIONS = frozenset({138, 140})  # KoMT-bench: their answers need not be Korean

_RATING = (re.compile(r"\[\[(\d+(?:\.\d+)?)\]\]"), re.compile(r"\[(\d+(?:\.\d+)?)\]"))
_VERDICT = re.compile(r"\[\[(A|B|tie)\]\]", re.IGNORECASE)
_VALUES = {"a": 1.0, "tie": 0.5, "b": 0.0}

_JUDGE = "You judge how good the answers of an assistant are. You are strict, fair and consistent."
_MERITS = (
    "Ask whether it is correct, does what the user wanted, stays with the subject, and is as thorough, inventive and "
    "detailed as the request calls for. Length alone is no merit."
)
_RATE = (
    "First give your reasons in a few sentences. Then end with a rating between 1 (useless) and 10 (could not be "
    'better), in double square brackets and nothing else in them, as in "My rating: [[4]]".'
)
_CHOOSE = (
    "Neither the order of the two nor their length may sway you. First give your reasons in a few sentences. Then end "
    "with [[A]] if assistant A did better, [[B]] if assistant B did better, or [[tie]] if neither did."
)


@dataclass(frozen=True, slots=True)
class Subject:
    """An item of the comparison as a judge needs it. references: by turn, where the category has them."""

    id: str
    task: str
    turns: tuple[str, ...]
    category: str | None = None
    references: tuple[str, ...] = ()

    @property
    def number(self) -> int | None:
        """The question's number: the digits at the end of its id."""
        digits = re.search(r"\d+$", self.id)
        return int(digits.group()) if digits else None


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeSettings:
    """What to ask. grade: ratings of single answers; against: method for win rates, None for none; komt: add
    KoMT-bench's step behind the ratings; allow_missing: write results although some questions stay without a reply."""

    grade: bool = True
    against: str | None = None
    komt: bool = False
    allow_missing: bool = False


def judge_results(
    results: Path,
    endpoint: ChatEndpoint,
    settings: JudgeSettings,
    *,
    output: Path,
    data: Iterable[Item] = (),
    restart: bool = False,
) -> dict[str, Any]:
    """Judge the answers of a results file of `dropmatch compare` and write what came out. Returns what was written.

    data: the items with their category and references. Each reply goes to a journal beside the output at once, so that
    a run that is stopped, or that left questions without a reply, goes on from there; replies of a finished output of
    the same judge are taken over too, and stay though this run does not ask for them. Equal questions are asked once.
    restart: take nothing over. Raises ConfigError, DataError, EndpointError.
    """
    if not settings.grade and settings.against is None:
        raise ConfigError("There is nothing to judge: ask for ratings, or name a method to compare with.")
    compared, digest = read_compare(results), hashlib.sha256(results.read_bytes()).hexdigest()
    subjects = _subjects(compared, data)
    answers = _answers(compared, subjects)
    if settings.against is not None and settings.against not in answers:
        raise UnknownNameError("method to compare with", settings.against, answers)
    is_korean = korean_detector() if settings.komt else None
    provenance = collect()
    judge = {"kind": KIND, "endpoint": endpoint.url, "model": endpoint.model, "max_tokens": endpoint.max_tokens}
    grading = _grading_questions(subjects, answers) if settings.grade else {}
    pairing = _pairing_questions(subjects, answers, settings.against) if settings.against is not None else {}
    questions = {key_of(messages): messages for asked in (*grading.values(), *pairing.values()) for messages in asked}
    replies = {} if restart else _earlier_replies(output, judge)
    with Journal(output, judge, restart=restart) as journal:
        finished = len(questions.keys() & replies.keys())
        replies.update((entry["key"], entry["reply"]) for entry in journal.found("key", {"key": str, "reply": str}))
        taken = len(questions.keys() & replies.keys())
        if finished:
            say_taken_over(output, "finished", f"{finished} of {len(questions)} replies")
        journal.say_taken_over(f"{taken - finished} of {len(questions)} replies")
        missing = {key: messages for key, messages in questions.items() if key not in replies}

        def keep(key: str, reply: str) -> None:
            journal.add({"key": key, "reply": reply})
            replies[key] = reply
            meter.advance()

        with ProgressMeter("judging", len(questions), len(questions) - len(missing)) as meter:
            failures = ask_all(endpoint, missing, keep)
        if failures and not settings.allow_missing:
            raise EndpointError(
                f"{len(failures)} of {len(questions)} questions got no reply; the first: "
                f"{next(iter(failures.values()))}\nThe replies so far are kept: give the same command again to ask for "
                "the others, or add --allow-missing to leave them out."
            )
        arms = {
            arm: _judged(arm, subjects, answers, settings.against, grading, pairing, replies, is_korean)
            for arm in answers
        }
        result = {
            "kind": KIND,
            "format": FORMAT,
            "settings": {
                **judge,
                "temperature": 0,
                "results": results.name,
                "results_sha256": digest,
                "grade": settings.grade,
                "against": settings.against,
                "komt": settings.komt,
            },
            "arms": arms,
            "summary": summarize_judged(arms, subjects),
            "questions": len(questions),
            "unanswered": dict(failures),
            "replies": {**{key: replies[key] for key in questions if key in replies}, **replies},
            "provenance": provenance,
        }
        write_result(result, output)
        journal.remove()
    return result


# -- questions ------------------------------------------------------------------------------------------------------


def grade_question(subject: Subject, answers: Sequence[str], turn: int) -> Messages:
    """Ask for a rating of the answer to one turn. answers: up to that turn; turn: from 0."""
    reference = subject.references[turn] if turn < len(subject.references) else None
    compare = "" if reference is None else " Compare it with the reference answer, and say where it goes wrong."
    if turn == 0:
        request = f"Rate the assistant's answer to the user's question. {_MERITS}{compare}"
        shown = [_block("question", subject.turns[0]), _block("answer", answers[0])]
    else:
        request = (
            "Below is a conversation between a user and an assistant. Rate the assistant's last answer alone; what was "
            f"said before it is there so that you understand it. {_MERITS}{compare}"
        )
        shown = [_dialogue(subject.turns[: turn + 1], answers[: turn + 1])]
    if reference is not None:
        shown.insert(1 if turn == 0 else 0, _block("reference answer", reference))
    return _messages(f"{request} {_RATE}", shown)


def pair_question(subject: Subject, first: Sequence[str], second: Sequence[str]) -> Messages:
    """Ask which of two sets of answers is better. first, second: answers by turn, shown as A and B."""
    what = "the same question" if len(subject.turns) == 1 else "a conversation with the same user turns"
    request = f"Two assistants, A and B, answered {what}. Decide which of them did better. {_MERITS} {_CHOOSE}"
    references = [_block("reference answer", text) for text in subject.references]
    if len(subject.turns) == 1:
        shown = [_block("question", subject.turns[0]), *references]
        shown += [_block("answer of assistant A", first[0]), _block("answer of assistant B", second[0])]
    else:
        shown = [*references]
        for name, answers in (("A", first), ("B", second)):
            shown.append(_block(f"conversation with assistant {name}", _dialogue(subject.turns, answers)))
    return _messages(request, shown)


def key_of(messages: Messages) -> str:
    """Names a question by what it says."""
    return hashlib.sha256(json.dumps(list(messages)).encode()).hexdigest()[:24]


def _messages(request: str, shown: Sequence[str]) -> Messages:
    return [{"role": "system", "content": _JUDGE}, {"role": "user", "content": "\n\n".join([request, *shown])}]


def _block(name: str, text: str) -> str:
    return f"<{name}>\n{text}\n</{name}>"


def _dialogue(turns: Sequence[str], answers: Sequence[str]) -> str:
    said = [(("user", turn), ("assistant", answer)) for turn, answer in zip(turns, answers, strict=True)]
    return "\n\n".join(_block(role, text) for pair in said for role, text in pair)


def _grading_questions(
    subjects: Mapping[str, Subject], answers: Mapping[str, Mapping[str, Sequence[str]]]
) -> dict[tuple[str, str], list[Messages]]:
    """By method and item: one question a turn."""
    return {
        (arm, item): [grade_question(subjects[item], texts, turn) for turn in range(len(texts))]
        for arm, items in answers.items()
        for item, texts in items.items()
    }


def _pairing_questions(
    subjects: Mapping[str, Subject], answers: Mapping[str, Mapping[str, Sequence[str]]], against: str
) -> dict[tuple[str, str], list[Messages]]:
    """By method and item: both orders, the method first and last. Equal answers need no judge."""
    return {
        (arm, item): [
            pair_question(subjects[item], texts, answers[against][item]),
            pair_question(subjects[item], answers[against][item], texts),
        ]
        for arm, items in answers.items()
        for item, texts in items.items()
        if arm != against and item in answers[against] and texts != answers[against][item]
    }


# -- replies --------------------------------------------------------------------------------------------------------


def parse_rating(reply: str) -> float:
    """The first number in double square brackets, else in single ones; -1 if there is none, or none from 1 to 10."""
    found = next((match for pattern in _RATING if (match := pattern.search(reply))), None)
    rating = INVALID if found is None else float(found.group(1))
    return rating if 1.0 <= rating <= 10.0 else INVALID


def parse_verdict(reply: str) -> float:
    """1 for [[A]], 0 for [[B]], 0.5 for [[tie]]; -1 if the reply names none of them, or several."""
    named = {found.lower() for found in _VERDICT.findall(reply)}
    return _VALUES[named.pop()] if len(named) == 1 else INVALID


def komt_rating(rating: float, number: int | None, is_korean: bool) -> float:
    """KoMT-bench's step behind a rating: the square root where the answer is not Korean, but for two questions."""
    if rating == INVALID or is_korean or number in KOMT_EXCEPTIONS:
        return rating
    return math.sqrt(rating)


def korean_detector() -> Callable[[str], bool]:
    """Tells Korean from other languages, always with the same verdict. Text without letters passes as Korean, since it
    is in no other language."""
    try:
        from langdetect.detector_factory import PROFILES_DIRECTORY, DetectorFactory
        from langdetect.lang_detect_exception import LangDetectException
    except ImportError as error:
        raise ConfigError("langdetect is not installed. Run: pip install 'dropmatch[judge]'.") from error
    factory = DetectorFactory()
    factory.load_profile(PROFILES_DIRECTORY)
    factory.set_seed(0)

    def is_korean(text: str) -> bool:
        if not any(character.isalpha() for character in text):
            return True
        detector = factory.create()
        detector.append(text)
        try:
            return bool(detector.detect() == "ko")
        except LangDetectException:  # nothing that tells languages apart, such as code
            return False

    return is_korean


def _judged(
    arm: str,
    subjects: Mapping[str, Subject],
    answers: Mapping[str, Mapping[str, Sequence[str]]],
    against: str | None,
    grading: Mapping[tuple[str, str], Sequence[Messages]],
    pairing: Mapping[tuple[str, str], Sequence[Messages]],
    replies: Mapping[str, str],
    is_korean: Callable[[str], bool] | None,
) -> dict[str, dict[str, Any]]:
    """What the judge said of a method's answers, by item."""
    judged: dict[str, dict[str, Any]] = {}
    for item, texts in answers[arm].items():
        entry: dict[str, Any] = {}
        if grading:
            keys = [key_of(messages) for messages in grading[arm, item]]
            entry |= {"ratings": [parse_rating(replies.get(key, "")) for key in keys], "rating_keys": keys}
        if grading and is_korean is not None:
            entry["korean"] = [is_korean(text) for text in texts]
            entry["komt_ratings"] = [
                komt_rating(rating, subjects[item].number, korean)
                for rating, korean in zip(entry["ratings"], entry["korean"], strict=True)
            ]
        if against is not None and arm != against and item in answers[against]:
            keys = [key_of(messages) for messages in pairing.get((arm, item), ())]
            verdicts = [parse_verdict(replies.get(key, "")) for key in keys]
            entry |= {"win": _win(verdicts), "verdicts": verdicts, "verdict_keys": keys}
        judged[item] = entry
    return judged


def _win(verdicts: Sequence[float]) -> float | None:
    """Mean of both orders for the method: 1 won, 0.5 tied, 0 lost; None unless both have a verdict. verdicts: of A,
    which is the method in the first order and the other in the second; none at all for equal answers."""
    if not verdicts:
        return 0.5
    first, second = verdicts
    return None if INVALID in verdicts else (first + 1.0 - second) / 2


# -- summary --------------------------------------------------------------------------------------------------------


def summarize_judged(
    arms: Mapping[str, Mapping[str, Mapping[str, Any]]], subjects: Mapping[str, Subject]
) -> list[dict[str, Any]]:
    """One row a method and task, with a row for all tasks where there are several. Intervals: 95%, items resampled.
    Figures that were not asked for, or that no valid reply stands behind, are None."""
    rows = []
    for arm, items in arms.items():
        tasks = list(dict.fromkeys(subjects[item].task for item in items))
        for task in [*tasks, *(["all"] if len(tasks) > 1 else [])]:
            chosen = {item: entry for item, entry in items.items() if task in ("all", subjects[item].task)}
            rows.append({"arm": arm, "task": task, "n": len(chosen), **_figures(chosen, subjects)})
    return rows


def _figures(items: Mapping[str, Mapping[str, Any]], subjects: Mapping[str, Subject]) -> dict[str, Any]:
    ratings = {item: entry["ratings"] for item, entry in items.items() if "ratings" in entry}
    komt = [entry["komt_ratings"] for entry in items.values() if "komt_ratings" in entry]
    flat = [rating for given in ratings.values() for rating in given]
    num_turns = max(map(len, ratings.values()), default=0)
    categories = sorted({category for item in ratings if (category := subjects[item].category) is not None})
    by_category = {c: _mean([r for i, r in ratings.items() if subjects[i].category == c])[0] for c in categories}
    score, low, high = _mean(list(ratings.values()))
    komt_score, komt_low, komt_high = _mean(komt)
    compared = [entry for entry in items.values() if "win" in entry]
    wins = [entry["win"] for entry in compared if entry["win"] is not None]
    decided = [v for entry in compared for v in entry["verdicts"] if v in (0.0, 1.0)]
    win_rate, win_low, win_high = _mean([[win] for win in wins])
    return {
        "ratings": sum(rating != INVALID for rating in flat),
        "invalid_ratings": flat.count(INVALID),
        "score": score,
        "score_low": low,
        "score_high": high,
        "score_by_turn": [_mean([r[t : t + 1] for r in ratings.values()])[0] for t in range(num_turns)],
        "score_by_category": by_category,
        "komt_score": komt_score,
        "komt_low": komt_low,
        "komt_high": komt_high,
        "win_rate": win_rate,
        "win_low": win_low,
        "win_high": win_high,
        "won": sum(win > 0.5 for win in wins),
        "tied": sum(win == 0.5 for win in wins),
        "lost": sum(win < 0.5 for win in wins),
        "undecided": len(compared) - len(wins),
        "first_place_share": sum(decided) / len(decided) if decided else None,
    }


def _mean(groups: Sequence[Sequence[float]]) -> tuple[float | None, float | None, float | None]:
    """Mean of all valid values and its interval, the groups resampled. groups: the values of each item."""
    valid = [[value for value in group if value != INVALID] for group in groups]
    valid = [group for group in valid if group]
    if not valid:
        return None, None, None
    sums, counts = [sum(group) for group in valid], [len(group) for group in valid]
    return (sum(sums) / sum(counts), *ratio_interval(sums, counts))


# -- files ----------------------------------------------------------------------------------------------------------


def _subjects(compared: Mapping[str, Any], data: Iterable[Item]) -> dict[str, Subject]:
    """The comparison's items. data: adds category and references to those with the same id."""
    records = {item.id: item.record for item in data}
    subjects = {}
    for item, prompt in compared["prompts"].items():
        given = records.get(item, {}).get("meta")
        meta = given if isinstance(given, dict) else {}
        category = meta.get("category")
        references = meta.get("gpt4_reference") or meta.get("reference") or ()
        if isinstance(references, str):  # of one turn
            references = (references,)
        if category not in REFERENCE_CATEGORIES:
            references = ()
        subjects[item] = Subject(item, prompt["task"], tuple(prompt["turns"]), category, tuple(references))
    unknown = next((item for item in records if item not in subjects), None)
    if records and not records.keys() & subjects.keys():
        raise DataError(
            f"No item of the comparison is in --data, whose first is {unknown!r}. Give the file it came from."
        )
    return subjects


def _answers(compared: Mapping[str, Any], subjects: Mapping[str, Subject]) -> dict[str, dict[str, list[str]]]:
    """Answers by method and item, one text a turn."""
    answers: dict[str, dict[str, list[str]]] = {}
    for arm, entry in compared["arms"].items():
        answers[arm] = {}
        for item, record in entry["items"].items():
            texts = record.get("texts") or [record.get("text")]
            if item not in subjects or len(texts) != len(subjects[item].turns) or not all(map(_is_text, texts)):
                raise DataError(f"The answer of {arm!r} to {item!r} is missing or has not one text for each turn.")
            answers[arm][item] = list(texts)
    return answers


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _earlier_replies(output: Path, judge: Mapping[str, Any]) -> dict[str, str]:
    """Replies of a finished run of the same judge. Raises ConfigError if it was another."""
    if not output.exists():
        return {}
    result = read_json(output, "Name another output.")
    if not isinstance(result, dict) or result.get("kind") != KIND or result.get("format") != FORMAT:
        raise DataError(f"{output} is there already and holds no judgements. Name another output.")
    fields = Fields(str(output), "The file is damaged. Remove it, or give --restart to write it anew.")
    fields.check("", result, {"settings": dict, "replies": dict})
    fields.entries("replies", result["replies"].values(), str)
    if any(result["settings"].get(name) != value for name, value in judge.items()):
        raise ConfigError(
            f"{output} holds the judgements of another judge ({result['settings'].get('model')!r} at "
            f"{result['settings'].get('endpoint')}). Name another --output, or give --restart to throw them away."
        )
    return dict(result["replies"])
