"""The report in a real browser: no errors, no network, tokens that answer to mouse and keyboard, no overflow."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tiny
from dropmatch.cli import main

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
LONG = "2" * 60
NASTY = (
    "</script><script>alert(1)</script> <b>&amp; \u202eright-to-left שלום "
    "\U0001f9ea\u200d \U0001f469\u200d\U0001f467 \ud800 \x00"
)


def run(*arguments: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["dropmatch", *arguments])
        try:
            main()
        except SystemExit as stop:
            if stop.code:
                raise


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a real comparison of a tiny pair, with hostile text put into an answer and its tokens."""
    pytest.importorskip("jinja2", reason="needs jinja2: pip install 'dropmatch[report]'")
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install 'dropmatch[report]'")
    pytest.importorskip("playwright", reason="needs playwright: pip install playwright")
    if CHROMIUM is None:
        pytest.skip("needs a chromium on the path")
    folder = tmp_path_factory.mktemp("report")
    pair = tiny.save_pair(folder / "pair")
    data, results = folder / "gsm8k.jsonl", folder / "results.json"
    items = [
        {"id": f"gsm8k/test/{i}", "task": "gsm8k", "prompt": f"how fast is boat {i[0]}", "answer": i[0], "meta": {}}
        for i in ("0", "1", LONG)
    ]
    data.write_text("".join(json.dumps(item) + "\n" for item in items))
    run(
        "compare", "--target", str(pair.target), "--draft", str(pair.draft), "--data", str(data), "-o", str(results),
        "-n", "24", "--rules", "plain,lossless,dropmatch,dropmatch-naive", "--lengths", "3", "--p-drop", "0.1",
        "--speed-items", "1", "--speed-tokens", "8",
    )  # fmt: skip
    result = json.loads(results.read_text())
    record = result["arms"]["dropmatch L=3"]["items"]["gsm8k/test/0"]
    assert record["lossy"]
    record["text"] += NASTY
    record["pieces"][0] = NASTY
    result["prompts"]["gsm8k/test/0"]["turns"] = [NASTY * 3]
    results.write_text(json.dumps(result))
    run("report", str(results))
    return results.with_suffix(".html")


@pytest.fixture(scope="module")
def browser(page_file: Path) -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


class Tab:
    """The report in one window, and what it said and asked for."""

    def __init__(self, browser: Any, page_file: Path, width: int, scheme: str = "light") -> None:
        self.context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
        self.page = self.context.new_page()
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.said.append(dialog.message), dialog.dismiss()))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(page_file.as_uri())


@pytest.fixture
def open_tab(browser: Any, page_file: Path) -> Iterator[Any]:
    tabs: list[Tab] = []

    def open_(width: int = 1200, scheme: str = "light") -> Tab:
        tabs.append(Tab(browser, page_file, width, scheme))
        return tabs[-1]

    yield open_
    for tab in tabs:
        tab.context.close()


def test_a_page_says_nothing_and_asks_for_nothing(open_tab: Any, page_file: Path) -> None:
    tab = open_tab()
    for name in ("prompt", "rule"):
        for field in tab.page.get_by_label(name, exact=True).all():
            for value in [option.get_attribute("value") for option in field.locator("option").all()]:
                field.select_option(value)
    assert tab.said == []
    assert [url for url in tab.asked if not url.startswith("data:")] == [page_file.as_uri()]


def test_hostile_text_is_shown_as_text(open_tab: Any) -> None:
    page = open_tab().page
    page.locator("#strips select").nth(1).select_option(label="dropmatch L=3")
    piece = page.locator(".token").filter(has_text="alert(1)").first
    assert "</script>" in piece.inner_text()
    assert "⟨U+202E⟩" in piece.inner_text()
    assert "\U0001f9ea⟨U+200D⟩ \U0001f469\u200d\U0001f467 \ufffd ⟨U+0000⟩" in piece.inner_text()
    page.locator("#pairs select").nth(1).select_option(label="dropmatch L=3")
    assert "<script>alert(1)</script> <b>&amp; " in page.locator(".parted").last.inner_text()
    assert page.locator("main b", has_text="right-to-left").count() == 0


def test_a_token_answers_to_mouse_and_keyboard(open_tab: Any) -> None:
    page = open_tab().page
    tip = page.locator("#tip")
    page.locator("#strips select").nth(1).select_option(label="dropmatch L=3")
    lossy = page.locator(".tokens .token.lossy").first
    assert tip.is_hidden()
    lossy.hover()
    assert "log-probability −" in tip.inner_text()
    assert "the target's own token is “" in tip.inner_text()
    assert "divergence 0." in tip.inner_text()
    page.mouse.move(0, 0)
    assert tip.is_hidden()
    page.locator(".tokens .token").first.focus()
    assert "place 0" in tip.inner_text()
    page.keyboard.press("ArrowRight")
    assert "place 1" in tip.inner_text()
    page.keyboard.press("End")
    assert "place 23" in tip.inner_text()
    page.keyboard.press("Escape")
    assert tip.is_hidden()
    assert page.locator(".tokens [tabindex='0']").count() == 1


def test_a_point_tells_its_token_and_leads_to_it(open_tab: Any, page_file: Path) -> None:
    page = open_tab().page
    tip, scatter = page.locator("#tip"), page.locator(".scatters svg").first
    told = page.evaluate("JSON.parse(document.getElementById('data').textContent).points")[0]
    at = next(i for i, point in enumerate(told["points"]) if point[1] >= 0)
    item, index = told["points"][at][:2]
    scatter.scroll_into_view_if_needed()
    scatter.locator('[id*="-points-"] use').nth(at).hover(force=True)
    assert tip.is_visible()
    assert f"token {index} of gsm8k/test/{item}" in tip.inner_text()
    assert "radius 0." in tip.inner_text()
    page.mouse.move(0, 0)
    assert tip.is_hidden()
    scatter.focus()
    page.keyboard.press("End")
    assert "radius" in tip.inner_text()
    widest = max(told["points"], key=lambda point: point[4])
    assert f"radius {widest[4]:.4f}" in tip.inner_text()
    page.keyboard.press("Home")
    for _ in told["points"]:
        if f"token {index} of gsm8k/test/{item}\n" in tip.inner_text():
            break
        page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    assert page.locator("#strips select").nth(0).evaluate("s => s.selectedOptions[0].text") == f"gsm8k/test/{item}"
    assert page.locator("#strips select").nth(1).evaluate("s => s.selectedOptions[0].text") == told["arm"]
    assert page.locator(".token:focus").evaluate("t => Array.from(t.parentNode.children).indexOf(t)") == index
    assert f"place {index}" in tip.inner_text()


def test_a_tap_shows_a_point_and_a_second_one_leads_on(browser: Any, page_file: Path) -> None:
    context = browser.new_context(viewport={"width": 390, "height": 800}, has_touch=True)
    page = context.new_page()
    page.goto(page_file.as_uri())
    told = page.evaluate("JSON.parse(document.getElementById('data').textContent).points")[0]
    at = next(i for i, point in enumerate(told["points"]) if point[1] >= 0)
    scatter = page.locator(".scatters svg").first
    scatter.scroll_into_view_if_needed()
    box = scatter.locator('[id*="-points-"] use').nth(at).bounding_box()
    middle = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.touchscreen.tap(*middle)
    assert "radius" in page.locator("#tip").inner_text()
    assert page.locator(".token:focus").count() == 0
    page.touchscreen.tap(*middle)
    assert page.locator(".token:focus").count() == 1
    context.close()


def test_a_tip_goes_along_and_goes_away_as_the_page_scrolls(open_tab: Any) -> None:
    page = open_tab().page
    tip = page.locator("#tip")
    page.locator(".tokens .token").first.focus()
    before = tip.bounding_box()["y"]
    page.evaluate("window.scrollBy({ top: -40, behavior: 'instant' })")
    for _ in range(100):  # wait_for_function would evaluate text inside the page, which the page's own policy forbids
        if abs(tip.bounding_box()["y"] - before - 40) < 1:
            break
        page.wait_for_timeout(20)
    assert abs(tip.bounding_box()["y"] - before - 40) < 1
    page.evaluate("window.scrollTo({ top: 0, behavior: 'instant' })")
    tip.wait_for(state="hidden")


@pytest.mark.parametrize("width", [390, 1200])
def test_nothing_is_wider_than_the_window(open_tab: Any, width: int) -> None:
    page = open_tab(width).page
    page.locator("#strips select").nth(1).select_option("every")
    for part in ("#strips", "#pairs"):
        page.locator(f"{part} select").nth(0).select_option(index=2)
    assert LONG in page.locator(".strip h3").first.inner_text()
    page.locator(".tokens .token").last.hover()
    box = page.locator("#tip").bounding_box()
    assert 0 <= box["x"] <= box["x"] + box["width"] <= width
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_a_dark_page_draws_its_pictures_light(open_tab: Any) -> None:
    for scheme, is_light in (("light", False), ("dark", True)):
        page = open_tab(scheme=scheme).page
        colour = page.locator("figure svg text").first.evaluate("text => getComputedStyle(text).fill")
        red = int(colour.removeprefix("rgb(").split(",")[0])
        assert (red > 128) == is_light
