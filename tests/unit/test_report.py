"""Reports: what a page holds, how big it gets, which files are refused, and that nothing is left half-written."""

from __future__ import annotations

import copy
import json
import math
import random
import re
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

pytest.importorskip("jinja2", reason="needs jinja2: pip install 'dropmatch[report]'")
pytest.importorskip("matplotlib", reason="needs matplotlib: pip install 'dropmatch[report]'")

from dropmatch.bench.comparison import read_finished
from dropmatch.bench.summary import summarize
from dropmatch.cli import main
from dropmatch.core.reasons import Reason
from dropmatch.errors import ConfigError, DataError
from dropmatch.report import charts, page
from dropmatch.report.palette import STYLES

MOST_BYTES = 5_000_000  # of a page with 200 prompts under 14 rules: what a mail still carries
NASTY = "</script><!--<b>&\u2028 \ud800 \U0001f9ea שלום \x00"


def record(rng: random.Random, rule: str, length: int, *, graded: bool, pieces: bool) -> dict[str, Any]:
    """An answer of so many tokens. Lossy rules keep every seventh token against the target."""
    is_lossy = rule not in ("plain", "lossless")
    at = range(3, length, 7) if is_lossy else []
    reasons = [int(Reason.JS) if i in at else int(Reason.EXACT) for i in range(length)]
    tokens = [1000 + i if i in at else i for i in range(length)]
    judged = [[-1, None, None, 0, 0.1], [3, rng.random() / 9, rng.random() / 5, int(Reason.JS), 0.2]] * (length // 7)
    return {
        "tokens": tokens,
        **({"pieces": [f" w{token}" for token in tokens]} if pieces else {}),
        "text": "".join(f" w{token}" for token in tokens),
        "reasons": reasons,
        "logprobs": [-rng.random() for _ in tokens],
        "finish": "eos",
        "rounds": length // 3,
        "drafted": length,
        "accepted": length // 2,
        "drafted_at": [] if rule == "plain" else [length // 3] * 3,
        "accepted_at": [] if rule == "plain" else [length // 4, length // 5, length // 6],
        "lossy": [
            {"index": i, "token": tokens[i], "best_token": i, "prob": 0.25, "best_prob": 0.5, "reason": "js"}
            for i in at
        ],
        "judged": judged if is_lossy else [],
        "score": {"correct": rng.random() < 0.6 if graded else None, "metrics": {}, "extracted": None},
    }


def comparison(
    *, items: int = 4, arms: int = 3, length: int = 20, graded: bool = True, pieces: int = 2, timed: bool = True
) -> dict[str, Any]:
    """A results file as `dropmatch compare` writes it: plain, lossless, then lossy rules."""
    rng = random.Random(0)
    names = ["plain", "lossless L=3", *(f"dropmatch@p=0.{i} L=3" for i in range(1, arms - 1))]
    ids = [f"gsm8k/test/{i}" for i in range(items)]
    rules = {name: name.removesuffix(" L=3") for name in names}
    seconds = {name: {ids[0]: [4.0 / (i + 1)]} for i, name in enumerate(names)}
    time = {"target_s": 2.0, "judge_s": 0.5}
    result: dict[str, Any] = {
        "kind": "compare",
        "format": 1,
        "settings": {"target": "big", "draft": "small", "dtype": "torch.float32", "k": 5, "p_drop": 0.3},
        "prompts": {item: {"task": "gsm8k", "turns": [f"question {item}"]} for item in ids},
        "arms": {
            name: {
                "rule": rules[name],
                "draft_length": 0 if name == "plain" else 3,
                "items": {
                    item: record(rng, rules[name], length, graded=graded, pieces=i < pieces)
                    for i, item in enumerate(ids)
                },
            }
            for name in names
        },
        "speed": {
            "items": ids[:1],
            "repeats": 1,
            "arms": {name: {"seconds": seconds[name], "tokens": {ids[0]: 8}, "time": time} for name in names},
        }
        if timed
        else None,
        "provenance": {"command": "dropmatch compare", "date": "2026-01-01", "commit": None},
    }
    return {**result, "summary": summarize(result)}


class Page(HTMLParser):
    """A page's tables, pictures and data."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: list[list[list[str]]] = []
        self.links: list[str] = []
        self.open: list[str] = []
        self.data: Any = None
        self.scripts = 0
        self._is_data = False
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        self.open.append(tag)
        self.links += [value or "" for name, value in attributes if name in ("src", "href", "xlink:href")]
        self.scripts += tag == "script"
        self._is_data = given.get("id") == "data"
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("th", "td"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        self._is_data = False

    def handle_data(self, text: str) -> None:
        if self._is_data:
            self.data = json.loads(text)
        elif self.tables and self.tables[-1] and self.tables[-1][-1]:
            self.tables[-1][-1][-1] += " ".join(text.split()) + " "


def rendered(result: dict[str, Any]) -> Page:
    return Page(page.render(result, source="results.json"))


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["dropmatch", "report", *arguments])
    try:
        main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def write(path: Path, result: Any) -> Path:
    path.write_text(json.dumps(result), encoding="utf-8")
    return path


# -- the page -------------------------------------------------------------------------------------------------------


def test_tables_hold_the_summary_with_intervals_and_differences() -> None:
    result = comparison()
    row = result["summary"][2]
    quality, text, speed = rendered(result).tables[:3]
    cells = " | ".join(quality[3])
    assert row["arm"] in cells
    assert f"{100 * row['accuracy']:.1f}%" in cells
    assert f"{100 * row['accuracy_low']:.1f} to {100 * row['accuracy_high']:.1f}" in cells
    low, high = (f"{100 * row[key]:+.1f}".replace("-", "−") for key in ("difference_low", "difference_high"))
    assert f"{low} to {high}" in cells
    assert f"+{row['gained']}, −{row['lost']}" in cells
    assert "reference" in " ".join(quality[2])
    assert f"{row['lossy_tokens']} of {row['emitted']}" in " ".join(text[3])
    assert f"{row['over_plain']['median']:.2f}×" in " ".join(speed[3])


def test_a_page_links_to_nothing_outside_itself() -> None:
    text = page.render(comparison(), source="results.json")
    assert all(link.startswith(("#", "data:")) for link in Page(text).links)
    assert not re.search(r"url\((?!#)|@import", text)


def test_ids_of_pictures_do_not_meet() -> None:
    text = page.render(comparison(), source="results.json")
    ids = re.findall(r'\sid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    assert {link[1:] for link in Page(text).links if link.startswith("#")} <= set(ids)


def test_strips_carry_reason_probability_and_the_targets_own_token() -> None:
    result = comparison()
    data = rendered(result).data
    strips = data["strips"]
    assert [strip["item"] for strip in strips] == ["gsm8k/test/0", "gsm8k/test/1"]
    strip = strips[0]["arms"]["dropmatch@p=0.1 L=3"]
    assert strip["lossy"]["3"] == [3, " w3", 0.25, 0.5]
    assert strip["reasons"][3] == Reason.JS
    assert data["reasons"]["3"][0] == "js"


def test_the_targets_own_token_is_named_in_words_where_they_are_known() -> None:
    result = comparison()
    answer = result["arms"]["dropmatch@p=0.1 L=3"]["items"]["gsm8k/test/0"]
    answer["lossy"][0]["best_piece"] = " named"
    answer["lossy"][1]["best_token"] = 77_777
    strip = rendered(result).data["strips"][0]["arms"]["dropmatch@p=0.1 L=3"]
    assert strip["lossy"]["3"][:2] == [3, " named"]
    assert strip["lossy"]["10"][:2] == [77_777, None]


def test_the_end_of_a_split_character_is_not_taken_for_a_tokens_text() -> None:
    result = comparison()
    for arm in result["arms"].values():
        arm["items"]["gsm8k/test/1"].pop("pieces")
    plain = result["arms"]["plain"]["items"]["gsm8k/test/0"]
    for name in ("lossless L=3", "dropmatch@p=0.1 L=3"):
        result["arms"][name]["items"]["gsm8k/test/0"].pop("pieces")
    plain["pieces"][2:4] = ["", "é"]
    assert 3 not in page._known_pieces(result)
    assert page._known_pieces(result)[4] == " w4"


def test_points_are_told_in_the_order_in_which_they_are_drawn() -> None:
    """The page pairs points with marks by their order alone."""
    result = comparison()
    ((name, chart),) = charts.radius_charts(result)
    told = rendered(result).data["points"][0]
    assert told["arm"] == name
    assert [[told_point[1], told_point[2]] for told_point in told["points"]] == [
        [point.index, point.reason] for point in chart.points
    ]
    drawn = [
        (float(x), float(y))
        for line in chart.draw().axes[0].lines
        if str(line.get_gid()).startswith("points-")
        for x, y in zip(*line.get_data(), strict=True)
    ]
    assert drawn == [(point.radius, point.js) for point in chart.points]
    groups = [g for g in ET.fromstring(charts.inline_svg(chart, "x")).iter() if "points-" in g.get("id", "")]
    marks = [mark for group in groups for mark in group.iter() if mark.tag.endswith("}use")]
    assert len(marks) == len(chart.points)
    across = [float(mark.attrib["x"]) for mark in marks]
    assert [across[i] for i in sorted(range(len(across)), key=lambda i: chart.points[i].radius)] == sorted(across)


def test_reasons_are_shares_of_all_tokens() -> None:
    result = comparison()
    shares = rendered(result).tables[3]
    assert [cell.strip() for cell in shares[0]] == ["rule", "exact", "js"]
    assert [cell.strip() for cell in shares[2]] == ["lossless L=3", "100.0%", "–"]
    assert [cell.split()[0] for cell in shares[3][1:]] == ["85.0%", "15.0%"]


def test_speed_has_a_bootstrap_interval_over_prompts() -> None:
    result = comparison(timed=False)
    ids = list(result["prompts"])
    seconds = {"plain": [4.0, 4.0, 4.0], "lossless L=3": [2.0, 2.0, 2.0], "dropmatch@p=0.1 L=3": [1.0, 2.0, 4.0]}
    arms = {
        name: {
            "seconds": {item: [s] for item, s in zip(ids, given, strict=False)},
            "tokens": dict.fromkeys(ids[:3], 8),
            "time": {"target_s": 1.0, "judge_s": 0.1},
        }
        for name, given in seconds.items()
    }
    result["speed"] = {"items": ids[:3], "repeats": 1, "arms": arms}
    result["summary"] = summarize(result)
    bars = {row["arm"]: charts._speed(result, row) for row in result["summary"]}
    assert bars["plain"] == (1.0, 1.0, 1.0)
    assert bars["dropmatch@p=0.1 L=3"] == (2.0, 1.0, 4.0)
    chart = charts.task_charts(result, "gsm8k")[1]
    assert "bootstrap over 3 timed prompts" in chart.words


def test_answers_stand_from_the_word_at_which_they_part() -> None:
    entry = rendered(comparison()).data["answers"][0]
    arm = entry["arms"]["dropmatch@p=0.1 L=3"]
    assert arm["token"] == 3
    assert entry["texts"][arm["text"]][: arm["at"]] == " w0 w1 w2 "
    assert arm["rest"].startswith("w1003 w4")
    assert entry["arms"]["plain"]["token"] is None


@pytest.mark.parametrize(
    ("a", "b", "at"),
    [
        ("same", "same", 4),
        ("", "x", 0),
        ("a bc", "a bd", 2),
        ("abc", "abd", 0),
        ("a b", "a b c", 3),
        ("字" * 40, "字" * 39, 39),
    ],
)
def test_texts_part_at_the_start_of_a_word(a: str, b: str, at: int) -> None:
    assert page._parting(a, b) == at


def test_hostile_text_stays_text() -> None:
    result = comparison()
    result["settings"]["target"] = NASTY
    result["prompts"]["gsm8k/test/0"]["turns"] = [NASTY]
    answer = result["arms"]["dropmatch@p=0.1 L=3"]["items"]["gsm8k/test/0"]
    answer["text"], answer["pieces"][0] = NASTY, NASTY
    text = page.render(result, source="a<b>.json")
    text.encode("utf-8")
    read = Page(text)
    assert read.scripts == 2
    assert "b" not in read.open[: read.open.index("main")]
    assert read.data["strips"][0]["arms"]["dropmatch@p=0.1 L=3"]["pieces"][0] == NASTY.replace("\ud800", "\ufffd")


def test_without_grades_quality_is_log_probability() -> None:
    result = comparison(graded=False, timed=False)
    drawn = charts.task_charts(result, "gsm8k")
    assert [chart.title for chart in drawn] == ["Log-probability against tau", "Acceptance by position"]
    assert "nats a token" in charts.inline_svg(drawn[0], "x")
    assert len(rendered(result).tables) == 3  # quality, text, reasons; no speed


def test_points_without_divergence_or_radius_are_left_out() -> None:
    result = comparison()
    (name, chart), *others = charts.radius_charts(result)
    assert (name, others) == ("dropmatch@p=0.1 L=3", [])
    points = sum(entry[1] is not None for r in result["arms"][name]["items"].values() for entry in r["judged"])
    assert f"js ({points})" in charts.inline_svg(chart, "x")
    for answer in result["arms"][name]["items"].values():
        answer["judged"] = [[3, None, None, 3, 0.1]]
    assert charts.radius_charts(result) == []


def test_the_front_is_filled_and_the_rest_is_not() -> None:
    result = comparison()
    drawn = next(c for c in charts.task_charts(result, "gsm8k") if c.name == "quality-tau").draw()
    points = [
        line for line in drawn.axes[0].lines if line.get_marker() in ("o", "s", "D") and line.get_markersize() == 7
    ]
    filled = [line.get_markerfacecolor() != charts.SURFACE for line in points]
    assert filled == [row["pareto"] for row in result["summary"]]
    assert True in filled
    assert False in filled


@pytest.mark.parametrize("reason", [Reason.JS, Reason.EXPECTED_MAJORITY])
def test_legends_lie_within_their_pictures(reason: Reason) -> None:
    """That of `expected-majority` was cut at the right."""
    long = f"dropmatch-expected{'@guard-ratio=0.05' * 5}+{'x' * 70}"
    result = json.loads(json.dumps(comparison()).replace("dropmatch@p=0.1", long))
    for arm in result["arms"].values():
        for answer in arm["items"].values():
            answer["judged"] = [[3, 0.1, 0.2, int(reason), 0.1], [-1, 0.2, 0.1, 0, 0.1], [-1, 0.1, 0.2, 5, 0.1]] * 40
    for chart in (*charts.task_charts(result, "gsm8k"), charts.radius_charts(result)[0][1]):
        with charts._settings():
            figure = chart.draw()
            figure.canvas.draw()
            (legend,) = figure.legends
            box = legend.get_window_extent()
        assert 0 <= box.x0 <= box.x1 <= figure.bbox.width
        assert 0 <= box.y0 <= box.y1 <= figure.bbox.height


def test_long_names_are_broken_and_kept_whole() -> None:
    name = "dropmatch-expected@p=0.2@k=20@guard-ratio=0.05@heads=shortlist+judge L=10"
    assert charts._wrapped(name).split("\n") == [
        "dropmatch-expected@p=0.2@k=20",
        "@guard-ratio=0.05@heads=shortlist+judge",
        " L=10",
    ]
    assert charts._wrapped("plain") == "plain"
    assert charts._wrapped("x" * 100).replace("\n", "") == "x" * 100


def test_rules_look_different_in_a_picture() -> None:
    arms = ["plain", "lossless L=5", "lossless L=10", *(f"dropmatch@p=0.{i}" for i in range(14))]
    assert len({charts._style(arms, arm, arm.split(" ")[0]) for arm in arms}) == len(arms)


def test_every_reason_has_a_look_of_its_own_kind() -> None:
    assert set(STYLES) == set(Reason)
    assert len({style.label for style in STYLES.values()}) == len(STYLES)


def _luminance(colour: str) -> float:
    """Relative luminance of WCAG 2."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _contrast(a: str, b: str) -> float:
    low, high = sorted((_luminance(a), _luminance(b)))
    return (high + 0.05) / (low + 0.05)


def test_colours_are_seen_and_text_on_them_is_read_on_light_and_dark_pages() -> None:
    """WCAG asks 3 of what is drawn and 4.5 of text. A lossy token's colour is mixed into the page's at 45%."""
    css = (Path(page.__file__).parent / "page.css").read_text(encoding="utf-8")
    light, dark = (
        dict(re.findall(r"--(\w+): (#\w{6})", block)) for block in re.findall(r":root \{(.*?)\}", css, re.S)[:2]
    )
    assert "var(--reason) 45%" in css
    for ground in (light, dark):
        for text in ("ink", "faint", "link"):
            assert _contrast(ground[text], ground["surface"]) >= 4.5
        for colour in {*charts.SERIES, *(style.colour for style in STYLES.values())}:
            assert _contrast(colour, ground["surface"]) >= 3.0
            mixed = [
                round(0.45 * int(colour[i : i + 2], 16) + 0.55 * int(ground["surface"][i : i + 2], 16))
                for i in (1, 3, 5)
            ]
            assert _contrast(ground["ink"], "#" + "".join(f"{x:02x}" for x in mixed)) >= 4.5


def test_a_large_comparison_stays_small() -> None:
    result = comparison(items=200, arms=14, length=256, pieces=4)
    text = page.render(result, source="results.json")
    assert len(text.encode()) < MOST_BYTES
    assert 0 < len(Page(text).data["answers"]) <= 200


# -- the terminal ---------------------------------------------------------------------------------------------------


def test_the_terminal_shows_the_tables_and_writes_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    result = comparison()
    results = write(tmp_path / "r.json", result)
    assert command(monkeypatch, str(results), "--terminal") == 0
    said = capsys.readouterr().out
    row = result["summary"][2]
    assert f"{row['tau']:.2f} ({row['tau_low']:.2f}-{row['tau_high']:.2f})" in said
    assert f"+{row['gained']}, -{row['lost']}" in said
    assert "reference" in said
    assert "over lossless" in said
    assert max(map(len, said.splitlines())) <= 160
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]


def test_transformers_generate_has_a_column_where_it_was_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    result = comparison()
    for row in result["summary"]:
        row["over_generate"] = {"median": 3.25, "min": 3.0, "max": 3.5}
    output = tmp_path / "r.html"
    assert command(monkeypatch, str(write(tmp_path / "r.json", result)), "--terminal", "-o", str(output)) == 0
    page, said = output.read_text(), capsys.readouterr().out
    assert "over generate" in said
    assert "3.25" in said
    assert "over generate" in page
    assert "3.25" in page
    assert command(monkeypatch, str(write(tmp_path / "r.json", comparison())), "--terminal", "-o", str(output)) == 0
    assert "over generate" not in output.read_text() + capsys.readouterr().out


def test_square_brackets_in_names_are_no_markup(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    result = json.loads(
        json.dumps(comparison()).replace("dropmatch@p=0.1", "[bold]rule[/red]").replace('"gsm8k"', '"[x]"')
    )
    assert (
        command(monkeypatch, str(write(tmp_path / "r.json", result)), "--terminal", "-o", str(tmp_path / "r.html")) == 0
    )
    said = capsys.readouterr().out
    assert "[bold]rule[/red] L=3" in said
    assert "[x], 4 prompts" in said
    assert (tmp_path / "r.html").exists()


# -- files ----------------------------------------------------------------------------------------------------------


def test_a_page_and_pictures_are_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    results = write(tmp_path / "r.json", comparison())
    assert command(monkeypatch, str(results), "--plots", str(tmp_path / "plots")) == 0
    assert (tmp_path / "r.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    names = {path.name for path in (tmp_path / "plots").iterdir()}
    stems = {"quality-tau-gsm8k", "quality-speed-gsm8k", "acceptance-gsm8k", "js-radius-dropmatch-p=0.1-L=3"}
    assert names == {f"{stem}.{form}" for stem in stems for form in ("png", "svg")}
    assert (tmp_path / "plots" / "acceptance-gsm8k.png").read_bytes().startswith(b"\x89PNG")
    assert "place in the draft" in (tmp_path / "plots" / "acceptance-gsm8k.svg").read_text()


def test_the_same_results_make_the_same_page() -> None:
    assert page.render(comparison(), source="r") == page.render(comparison(), source="r")


def damage(*keys: Any, value: Any = None) -> Callable[[dict[str, Any]], None]:
    """Takes a key away, or sets it."""

    def change(result: dict[str, Any]) -> None:
        inner: Any = result
        for key in keys[:-1]:
            inner = inner[key]
        if value is None:
            del inner[keys[-1]]
        else:
            inner[keys[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (damage("kind", value="bench-quick"), "'bench-quick'"),
        (damage("summary", 0, "p_value", value=10**400), "summary[0].p_value is too large a number"),
        (damage("summary", 0, "tau", value=1e300), "summary[0].tau is too large a number"),
        (damage("arms", "plain", "items", "gsm8k/test/1", "logprobs", value=[1e200] * 20), "entry that is too large"),
        (damage("arms", "plain", "items", "gsm8k/test/1", "tokens", value=[-1] * 20), "has -1, which is no token"),
        (damage("format", value=2), "format 1"),
        (damage("summary"), "'summary' is missing"),
        (damage("provenance"), "'provenance' is missing"),
        (damage("summary", 0, "tau"), "summary[0].tau is missing"),
        (damage("summary", 0, "tau", value="fast"), "summary[0].tau is not a finite number"),
        (damage("arms", "plain", "items", "gsm8k/test/1"), "arms['plain'].items['gsm8k/test/1'] is missing"),
        (damage("arms", "plain", "items", "gsm8k/test/1", "logprobs"), ".logprobs is missing"),
        (damage("arms", "plain", "items", "gsm8k/test/1", "logprobs", value=[1.0]), "20 entries"),
        (damage("arms", "plain", "items", "gsm8k/test/1", "logprobs", value=[math.nan] * 20), "it holds NaN"),
        (damage("arms", "plain", "items", "gsm8k/test/1", "logprobs", value=[None] * 20), "not a finite number"),
        (damage("arms", "plain", "items", "gsm8k/test/0", "pieces", value=[None] * 20), "not text"),
        (damage("arms", "plain", "items", "gsm8k/test/1", "reasons", value=[99] * 20), "99"),
        (damage("arms", "plain", "items", "gsm8k/test/1", "judged", value=[[1]]), "judged[0]"),
        (damage("arms", "plain", "items", "gsm8k/test/1", "judged", value=[[20, 0.1, 0.1, 3, 0.1]]), "judged[0]"),
        (damage("settings", "draft"), "settings.draft is missing"),
        (damage("provenance", "date"), "provenance.date is missing"),
        (damage("speed", "arms", "plain", "tokens"), "speed.arms['plain'].tokens is missing"),
        (damage("speed", "arms", "plain", "seconds", "gsm8k/test/0", value=[0.0]), "no time or no token"),
        (damage("speed", "items", value=["other"]), "prompts['other'] is missing"),
        (damage("summary", 0, "over_plain", "min"), "summary[0].over_plain.min is missing"),
        (damage("summary", 0, "acceptance_by_position", value=["all"]), "acceptance_by_position has an entry"),
        (damage("prompts", "gsm8k/test/0"), "prompts['gsm8k/test/0'] is missing"),
    ],
)
def test_damaged_results_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    change: Callable[[dict[str, Any]], None],
    message: str,
) -> None:
    result = copy.deepcopy(comparison())
    change(result)
    results = write(tmp_path / "r.json", result)
    assert command(monkeypatch, str(results)) == 2
    said = capsys.readouterr().err
    assert str(results) in said
    assert message in said
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "column 1"),
        (b"\xff\xfe{", "not UTF-8 text but UTF-16"),
        (b"\xe9{", "not UTF-8 text"),
        (b"[" * 100_000, "nested too deep"),
        (b"[1]", "no results of a known kind"),
        (b'{"kind": "tune", "format": 1}', "results of kind 'tune'; a comparison of format 1 is needed"),
        (b'{"kind": "compare", "format": 7}', "a comparison of format 7; a comparison of format 1 is needed"),
        (None, "No such file"),
    ],
)
def test_what_is_no_comparison_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    content: bytes | None,
    message: str,
) -> None:
    results = tmp_path / "r.json"
    if content is not None:
        results.write_bytes(content)
    assert command(monkeypatch, str(results)) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {results}")
    assert message in said
    assert not (tmp_path / "r.html").exists()


def test_broken_json_is_refused_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text('{"kind": "compare",\n "format": }')
    with pytest.raises(DataError, match=r"r\.json.*line 2 column 12"):
        read_finished(tmp_path / "r.json")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("-o", "r.json"), "the results file itself"),
        (("--plots", "r.json"), "Name a folder"),
        (("--plots", "p", "--format", "png,bmp"), "'bmp' is not allowed"),
        (("--plots", "p", "--format", ","), "png, svg, pdf"),
        (("-o", "."), "cannot be written"),
    ],
)
def test_bad_options_are_named_and_leave_nothing(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    options: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "r.json", comparison())
    before = (tmp_path / "r.json").read_bytes()
    assert command(monkeypatch, "r.json", *options) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]
    assert (tmp_path / "r.json").read_bytes() == before


def test_a_failed_write_leaves_the_old_page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    old = tmp_path / "r.html"
    old.write_text("old")

    def fail(*given: Any) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", fail)
        with pytest.raises(ConfigError, match=r"cannot be written to \(disk full\)"):
            page.write_report(comparison(), old, source="r.json")
    assert old.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["r.html"]


@pytest.mark.parametrize("package", ["jinja2", "matplotlib"])
def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=re.escape("pip install 'dropmatch[report]'")):
        page.write_report(comparison(), tmp_path / "r.html", source="r.json")


def test_missing_figures_are_dashes_and_no_nan_is_shown() -> None:
    result = comparison(graded=False, timed=False)
    assert all(not (isinstance(v, float) and math.isnan(v)) for row in result["summary"] for v in row.values())
    cells = [cell.strip() for cell in rendered(result).tables[0][3]]
    assert cells[2:] == ["–", "–", "–", "–"]
