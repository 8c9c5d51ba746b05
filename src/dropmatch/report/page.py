"""The report of a comparison as one HTML file that needs nothing else: no network, no other file.

Tables and pictures stand in the page as they are. Token strips and answers are data that a short script shows on
demand, since the tokens of many rules would make a page of elements heavy.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dropmatch.bench.arms import PLAIN
from dropmatch.bench.bases import reference_arm
from dropmatch.bench.summary import first_divergence
from dropmatch.core.reasons import Reason
from dropmatch.errors import ConfigError
from dropmatch.report.charts import (
    FORMATS,
    Chart,
    count,
    inline_svg,
    radius_charts,
    require_matplotlib,
    task_charts,
    write_chart,
)
from dropmatch.report.palette import STYLES

MOST_TEXT = 1_500_000  # characters of answers, and of strips, in a page
_LONGEST_WORD = 24


def require_report() -> None:
    """Raise ConfigError where a package that reports need is not installed."""
    require_matplotlib()
    try:
        import jinja2  # noqa: F401
    except ImportError as error:
        raise ConfigError("A report needs jinja2: pip install 'dropmatch[report]'.") from error


def write_report(result: Mapping[str, Any], output: Path, *, source: str) -> None:
    """Write the page. result: of `read_finished`; source: the results file's name, for the heading. The page appears
    whole under its name or not at all. Raises ConfigError where jinja2 or matplotlib is missing, or it cannot be
    written."""
    require_report()
    _replace({output: render(result, source=source).encode("utf-8")})


def write_plots(result: Mapping[str, Any], folder: Path, forms: Sequence[str]) -> list[Path]:
    """Write each picture in each format (of FORMATS), all or none. Returns the files."""
    require_matplotlib()
    unknown = [form for form in forms if form not in FORMATS]
    if unknown or not forms:
        raise ConfigError(f"Format {', '.join(unknown)!r} is not allowed. Give one or more of {', '.join(FORMATS)}.")
    charts = [(task, chart) for task in _tasks(result) for chart in task_charts(result, task)]
    charts += radius_charts(result)
    contents: dict[Path, bytes] = {}
    for about, chart in charts:
        name = f"{chart.name}-{re.sub(r'[^A-Za-z0-9.=]+', '-', about).strip('-') or 'task'}"
        taken = sum(path.stem == name or path.stem.startswith(f"{name}~") for path in contents) // len(forms)
        stem = f"{name}~{taken + 1}" if taken else name
        contents |= {folder / f"{stem}.{form}": write_chart(chart, form) for form in forms}
    _replace(contents)
    return list(contents)


def _replace(contents: Mapping[Path, bytes]) -> None:
    """Write files under temporary names, and rename them when all are written. Folders are made as needed."""
    partial = {path: path.with_name(f"{path.name}.partial") for path in contents}
    try:
        for path, content in contents.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            partial[path].write_bytes(content)
        for path, written in partial.items():
            written.replace(path)
    except OSError as error:
        raise ConfigError(
            f"{next(iter(contents)).parent} cannot be written to ({error}). Name another place."
        ) from error
    finally:
        for written in partial.values():
            written.unlink(missing_ok=True)


def render(result: Mapping[str, Any], *, source: str) -> str:
    """The page's text."""
    import jinja2

    here = Path(__file__).parent
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(here), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    tasks = [
        {
            "name": task,
            "rows": (rows := [row for row in result["summary"] if row["task"] == task]),
            "metrics": sorted({name for row in rows for name in row["metrics"]}),
            "charts": _drawn(task_charts(result, task), f"t{i}"),
        }
        for i, task in enumerate(_tasks(result))
    ]
    reasons = _reasons(result)
    scatters = radius_charts(result)
    page = environment.get_template("page.html.j2").render(
        source=source,
        settings=result["settings"],
        provenance=result["provenance"],
        num_prompts=len(result["prompts"]),
        num_arms=len(result["arms"]),
        tasks=tasks,
        radius=_drawn([chart for _, chart in scatters], "r"),
        reasons=[(reason, STYLES[reason]) for reason in reasons],
        shares=_reason_shares(result, reasons),
        references={arm for arm in result["arms"] if reference_arm(result["arms"], arm) == arm},
        data=_script_json(_payload(result, scatters)),
        plain=_plain,
        count=count,
    )
    return clean(page)


def clean(text: str) -> str:
    """Text that UTF-8 can hold: lone surrogates become U+FFFD."""
    return re.sub("[\ud800-\udfff]", "\ufffd", text)


def _tasks(result: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys(row["task"] for row in result["summary"]))


def _drawn(charts: Sequence[Chart], prefix: str) -> list[dict[str, str]]:
    return [
        {"title": chart.title, "words": chart.words, "svg": inline_svg(chart, f"{prefix}-{i}")}
        for i, chart in enumerate(charts)
    ]


def _plain(value: Any) -> str:
    """A setting as one reads it."""
    if value is None:
        return "–"
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(entry, str | int | float) for entry in value):
        shown = ", ".join(map(str, value[:12]))
        return shown if len(value) <= 12 else f"{shown}, and {len(value) - 12} more"
    return json.dumps(value, ensure_ascii=False)


def _script_json(value: Any) -> str:
    """JSON that no text in it can end: a script element ends at the first "</", whatever it holds."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


# -- strips and answers ---------------------------------------------------------------------------------------------


def _reasons(result: Mapping[str, Any]) -> list[Reason]:
    """Reasons that occur, the target's own first."""
    codes = {code for arm in result["arms"].values() for record in arm["items"].values() for code in record["reasons"]}
    return [Reason(code) for code in sorted(codes)]


def _reason_shares(result: Mapping[str, Any], reasons: Sequence[Reason]) -> dict[str, list[float | None]]:
    """By rule, the share of its tokens that were kept for each reason; None where there is none."""
    shares = {}
    for name, arm in result["arms"].items():
        counts = Counter(code for record in arm["items"].values() for code in record["reasons"])
        shares[name] = [counts[reason] / counts.total() if counts[reason] else None for reason in reasons]
    return shares


def _payload(result: Mapping[str, Any], scatters: Sequence[tuple[str, Chart]]) -> dict[str, Any]:
    answers = _answers(result)
    items = list(result["prompts"])
    return {
        "reasons": {int(reason): [style.label, style.words] for reason, style in STYLES.items()},
        "items": items,
        "points": [
            {
                "arm": arm,
                "points": [
                    [items.index(p.item), p.index, int(p.reason), round(p.js, 4), round(p.radius, 4), _rounded(p.prob)]
                    for p in chart.points
                ],
            }
            for arm, chart in scatters
        ],
        "strips": _strips(result),
        "strips_of": sum(any(arm["items"][item].get("pieces") for arm in result["arms"].values()) for item in items),
        "answers": answers,
        "answers_of": len(result["prompts"]),
    }


def _strips(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Items whose tokens were written out, with each rule's pieces, reasons and lossy tokens."""
    strips: list[dict[str, Any]] = []
    used = 0
    known = _known_pieces(result)
    for item, prompt in result["prompts"].items():
        arms = {
            name: _strip(record, known)
            for name, arm in result["arms"].items()
            if (record := arm["items"][item]).get("pieces")
        }
        used += sum(len(json.dumps(strip, ensure_ascii=False)) for strip in arms.values())
        if arms and (used <= MOST_TEXT or not strips):
            strips.append({"item": item, "task": prompt["task"], "turns": prompt["turns"], "arms": arms})
    return strips


def _strip(record: Mapping[str, Any], known: Mapping[int, str]) -> dict[str, Any]:
    """Tokens of one answer. lossy: by place, the target's own token (id and text), probability of the kept one and of
    the target's; judged: by place, divergence and radius where the heads were asked. known: texts of tokens by id."""
    return {
        "pieces": record["pieces"],
        "tokens": record["tokens"],
        "reasons": record["reasons"],
        "logprobs": [round(x, 3) for x in record["logprobs"]],
        "lossy": {
            token["index"]: [
                token["best_token"],
                token.get("best_piece", known.get(token["best_token"])),
                _rounded(token["prob"]),
                _rounded(token["best_prob"]),
            ]
            for token in record["lossy"]
        },
        "judged": {index: [_rounded(js), _rounded(radius)] for index, js, radius, *_ in record["judged"] if index >= 0},
    }


def _known_pieces(result: Mapping[str, Any]) -> dict[int, str]:
    """Texts of token ids that occur in strips, for files that do not name the target's own tokens in words."""
    known: dict[int, str] = {}
    for arm in result["arms"].values():
        for record in arm["items"].values():
            pieces = record.get("pieces", ())
            for token, piece, before in zip(record["tokens"], pieces, ["-", *pieces], strict=False):
                if piece and before:  # behind an empty piece stands the end of a character begun there
                    known.setdefault(token, piece)
    return known


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _answers(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each item's answers under each rule beside lossless decoding's, else plain decoding's, from where they part.

    Items whose grade a rule changed come first where not all have room."""
    arms = result["arms"]
    plain = PLAIN if PLAIN in arms else None
    bases = {name: base for name in arms if (base := reference_arm(arms, name) or plain) not in (None, name)}
    entries = [_answer(result, item, bases) for item in result["prompts"]]
    rank = sorted(range(len(entries)), key=lambda i: (-entries[i]["regraded"], -entries[i]["changed"]))
    kept: set[int] = set()
    used = 0
    for i in rank:
        used += len(json.dumps(entries[i], ensure_ascii=False))
        if used > MOST_TEXT and kept:
            break
        kept.add(i)
    return [entry for i, entry in enumerate(entries) if i in kept]


def _answer(result: Mapping[str, Any], item: str, bases: Mapping[str, str]) -> dict[str, Any]:
    """One item. texts: of the references; an arm's text is kept from where it parts from its reference (at)."""
    texts: list[str] = []
    arms: dict[str, Any] = {}
    for name, base in bases.items():
        record, lossless = (result["arms"][arm]["items"][item] for arm in (name, base))
        if lossless["text"] not in texts:
            texts.append(lossless["text"])
        at = _parting(lossless["text"], record["text"])
        arms[name] = {
            "base": base,
            "text": texts.index(lossless["text"]),
            "at": at,
            "token": first_divergence(record, lossless),
            "rest": record["text"][at:],
            "correct": [lossless["score"]["correct"], record["score"]["correct"]],
        }
    prompt = result["prompts"][item]
    return {
        "item": item,
        "task": prompt["task"],
        "turns": prompt["turns"],
        "texts": texts,
        "arms": arms,
        "changed": sum(arm["token"] is not None for arm in arms.values()),
        "regraded": sum(arm["correct"][0] != arm["correct"][1] for arm in arms.values()),
    }


def _parting(a: str, b: str) -> int:
    """Where two texts part, moved back to the start of the word, so that no character made of several is cut.
    Counted in characters; the page counts them alike."""
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    if all(text[at : at + 1].strip() == "" for text in (a, b)):  # both words end here
        return at
    word = next((i for i in range(at, max(0, at - _LONGEST_WORD), -1) if a[i - 1].isspace()), at)
    return 0 if at < _LONGEST_WORD and word == at else word
