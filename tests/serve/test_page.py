"""The page at /: what it may load, and, in a real browser, what it does."""

import json
import re

import pytest

from kvjax.serve.app import PAGE_FILES
from tests.conftest import REPOSITORY
from tests.scripts.conftest import load_script

FOLDER = REPOSITORY / "kvjax" / "serve" / "page"
EVIL = "<img src=x onerror='document.title=`taken`'><script>document.title='taken'</script>&amp;"


def test_every_file_is_served_under_a_strict_policy(client):
    assert {path.name for path in FOLDER.iterdir()} == set(PAGE_FILES)
    for name, kind in PAGE_FILES.items():
        found = client.get("/" if name == "index.html" else f"/page/{name}")
        assert found.content == (FOLDER / name).read_bytes()
        assert found.headers["content-type"] == kind
        policy = dict(part.split(" ", 1) for part in found.headers[
            "content-security-policy"].split("; "))  # fmt: skip
        assert policy["default-src"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert found.headers["x-content-type-options"] == "nosniff"


def test_the_page_can_be_left_out(serve):
    with serve(page=False) as server, server.client() as client:
        assert client.get("/").status_code == 404
        assert client.get("/page/page.js").status_code == 404


def test_nothing_comes_from_elsewhere_or_becomes_markup():
    for path in FOLDER.iterdir():
        text = path.read_text()
        assert not re.findall(r"(?:https?:)?//[a-z]", re.sub(r"(?m)^\s*//.*|\s// .*", "", text))
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(",
                     "localStorage", "document.cookie", " style=", " onclick="):  # fmt: skip
            assert word not in text, (path.name, word)


@pytest.fixture(scope="module")
def browser():
    path = load_script("mutants").chromium()
    if path is None:
        pytest.skip("needs Chromium on PATH")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser, shared):
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.set_default_timeout(120_000)
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda m: wrong.append(m.text) if m.type == "error" else None)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(shared.url)
    page.wait_for_selector("#send:enabled")
    yield page
    assert not wrong
    assert all(url.startswith((shared.url, "data:")) for url in asked)
    context.close()


def ask(page, text: str) -> None:
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")
    page.wait_for_selector(".answer:not(.waiting)")


TEXT = "A text that is long enough to be compressed, about lighthouses and a number: 48213. " * 2


@pytest.mark.slow
def test_a_chat_shows_what_its_cache_keeps(page, shared):
    page.fill("#rate", "2")
    assert "1/4" in page.text_content("#rate-note")
    ask(page, TEXT)
    cells = page.locator("#heat .cell")
    assert cells.count() == 4
    tokens = page.locator("#tokens span")
    assert page.text_content("#tokens") == f"<user>{TEXT.strip()}<assistant>"
    # Hovering a head marks the tokens that it holds, and no others.
    with shared.client() as client:
        body = {"messages": [{"role": "user", "content": TEXT.strip()}], "temperature": 0,
                "max_tokens": 1, "compression": {"method": "kv-compress", "rate": 4},
                "kvjax": {"detail": True}}  # fmt: skip
        detail = client.post("/v1/chat/completions", json=body).json()["kvjax"]["detail"]
    cells.nth(1).hover()  # the second layer's first head
    label = cells.nth(1).get_attribute("aria-label")
    assert label == f"layer 1, head 0: {detail['kept'][1][0]} KVs"
    marked = page.locator("#tokens span.mine")
    assert marked.count() == detail["kept"][1][0]
    bits = bin(int("1" + detail["heads"][1][0], 16))[3:][: tokens.count()]
    found = [
        i for i in range(tokens.count()) if "mine" in (tokens.nth(i).get_attribute("class") or "")
    ]
    assert found == [i for i, bit in enumerate(bits) if bit == "1"]
    # With the keyboard, too.
    cells.first.focus()
    page.keyboard.press("ArrowDown")
    assert "Layer 0, head 1" in page.text_content("#heat-says")
    page.focus("#tokens")
    for _ in range(4):
        page.keyboard.press("ArrowRight")
    held = sum(int(bin(int("1" + h, 16))[3:][3]) for layer in detail["heads"] for h in layer)
    assert f"held by {held} of 4 heads" in page.text_content("#tokens-says")
    assert page.locator("#heat .holds").count() == held
    # The same question with a full cache beside it.
    page.get_by_text("Ask a full cache").click()
    page.locator(".answer:not(.waiting)").nth(1).wait_for()
    page.locator(".answer.full").get_by_text("Show its cache").click()
    assert page.text_content("#f-rate") == "1.0×"
    assert page.locator("#tokens span.gone").count() == 0


@pytest.mark.slow
def test_what_a_model_writes_is_text(page):
    chunk = {"choices": [{"index": 0, "delta": {"content": EVIL}, "finish_reason": None}]}
    detail = {"layers": 1, "kv_heads": 1, "tokens": [EVIL], "kept": [[1]], "heads": [["80"]]}
    kvjax = {"kvs_before": 1, "kvs_after": 1, "blocks": 1, "blocks_before": 1, "achieved_rate": 1.0}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    events = [{**chunk, "kvjax": {**kvjax, "detail": detail}}, {"choices": [], "usage": usage}]
    lines = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(
        status=200, content_type="text/event-stream", body=lines))  # fmt: skip
    ask(page, f"user {EVIL}")
    assert page.locator(".answer .text").text_content() == EVIL
    assert page.locator(".turn.user .text").text_content() == f"user {EVIL}"
    assert page.text_content("#tokens") == EVIL
    assert page.locator("#log img, #log script, #tokens img").count() == 0
    assert page.title() == "kvjax"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(
        status=200, content_type="text/event-stream",
        body=f"data: {json.dumps({'error': {'message': EVIL}})}\n\n"))  # fmt: skip
    ask(page, "again")
    assert page.locator(".error").text_content() == EVIL


@pytest.mark.slow
def test_it_stops_starts_again_and_fits_a_phone(page):
    page.route("**/v1/chat/completions", lambda route: None)  # never answers
    page.fill("#prompt", "hello")
    page.click("#send")
    assert page.is_disabled("#send")
    page.click("#stop")
    page.wait_for_selector(".answer:not(.waiting)")
    assert "stopped" in page.text_content(".answer .head")
    page.click("#clear")
    assert page.locator(".answer").count() == 0
    assert page.is_visible("#welcome")
    for width in (360, 800, 1280):
        page.set_viewport_size({"width": width, "height": 780})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.is_visible("#prompt")
        assert page.is_visible("#pool-panel") == (width > 860)
    page.set_viewport_size({"width": 360, "height": 780})
    page.click("[data-show=cache]")
    assert page.is_visible("#pool-panel")
    assert not page.is_visible("#prompt")


@pytest.mark.slow
def test_light_and_dark(page):
    def brightness() -> float:
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(map(int, re.findall(r"\d+", colour)[:3])) / 765

    page.emulate_media(color_scheme="light")
    assert brightness() > 0.9
    page.emulate_media(color_scheme="dark")
    assert brightness() < 0.2
    page.click("#theme")
    assert brightness() > 0.9


@pytest.mark.slow
def test_a_key_is_asked_for_and_kept_nowhere(browser, serve):
    with serve(api_keys=("alpha",)) as server:
        page = browser.new_context().new_page()
        page.goto(server.url)
        page.wait_for_selector("#key-form", state="visible")
        page.fill("#key", "alpha")
        page.press("#key", "Enter")
        page.get_by_text("layers").first.wait_for()
        assert page.is_hidden("#key-form")
        ask(page, "hello")
        assert page.locator(".error").count() == 0
        assert page.evaluate("JSON.stringify([localStorage, sessionStorage])") == "[{},{}]"
        page.context.close()


@pytest.mark.slow
def test_what_was_refused_is_no_part_of_the_conversation(page):
    """It lies in the box again, to be mended, and the next question is asked without it."""
    sent = []

    def answer(route):
        sent.append(json.loads(route.request.post_data)["messages"])
        if len(sent) == 1:
            said = json.dumps({"error": {"message": "too long"}})
        else:
            said = json.dumps({"choices": [{"delta": {"content": "yes"}}]})
        return route.fulfill(content_type="text/event-stream", body=f"data: {said}\n\n")

    page.route("**/v1/chat/completions", answer)
    ask(page, "much too long")
    assert page.locator(".error").text_content() == "too long"
    assert page.input_value("#prompt") == "much too long"
    assert page.get_by_text("Ask a full cache").count() == 0
    assert "ended before" in page.text_content("#subject")
    ask(page, "shorter")
    assert page.input_value("#prompt") == ""
    assert sent == [[{"role": "user", "content": text}] for text in ("much too long", "shorter")]
