"""The page in a real Chromium: its contents, its updates, and its use by keyboard, phone and screen
reader.
"""

import os
import shutil
import time

import pytest

from decisionllm.bidding.journal.journal import Journal
from decisionllm.bidding.server.access import TokenAccess
from decisionllm.bidding.server.app import create_app
from decisionllm.bidding.server.campaign_routes import MAX_LISTED
from decisionllm.bidding.server.shadow import Shadow
from decisionllm.schema import Spec
from tests.bidding.server.test_campaigns import SPEC, STEPS, policy_of
from tests.bidding.server.test_http import MODEL_INFO, serving
from tests.conftest import PATIENCE, make_policy

RESULT = {
    "bid": 0.5,
    "market_price": 0.6,
    "value": 0.01,
    "conversion": 0.01,
    "won": 0.4,
    "volume": 100,
    "spend": 60.0,
    "conversions": 2,
    "exposed_value": 0.4,
}
COMING = {"value": 0.01, "volume": 100}
CHROMIUM = shutil.which("chromium")
DRIVER = shutil.which("chromedriver")

pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER) and "CI" not in os.environ,
    reason="no Chromium: apt-get install chromium chromium-driver",
)


@pytest.fixture(scope="module")
def chromium():
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--window-size=1100,1400",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture
def page(chromium):
    """The page in a new tab; at the end no request was refused and no script failed."""
    before = chromium.current_window_handle
    chromium.switch_to.new_window("tab")
    yield Page(chromium)
    noise = [
        entry
        for entry in chromium.get_log("browser")
        if not {"401", "403", "404", "429"} & {*entry["message"].split()}
    ]
    chromium.close()
    chromium.switch_to.window(before)
    assert not [entry for entry in noise if "ERR_CONNECTION_REFUSED" not in entry["message"]]


class Page:
    def __init__(self, chromium):
        self.chromium = chromium

    def __call__(self, css):
        return self.chromium.find_element("css selector", css)

    def all(self, css):
        return self.chromium.find_elements("css selector", css)

    def open(self, url):
        self.chromium.get(url)

    def until(self, css, words):
        """Wait until this element shows these words. Returns its text."""
        from selenium.webdriver.support.wait import WebDriverWait

        script = (
            "const it = document.querySelector(arguments[0]); return it && "
            "it.checkVisibility() ? it.textContent : ''"
        )
        WebDriverWait(self.chromium, PATIENCE, 0.05).until(
            lambda browser: words in browser.execute_script(script, css),
            f"{css} does not say {words!r}",
        )
        return self(css).text

    def press(self, *keys):
        from selenium.webdriver.common.action_chains import ActionChains

        ActionChains(self.chromium).send_keys(*keys).perform()

    @property
    def focused(self):
        return self.chromium.switch_to.active_element

    def media(self, scheme, width=1100, height=1400):
        self.chromium.execute_cdp_cmd(
            "Emulation.setEmulatedMedia",
            {"features": [{"name": "prefers-color-scheme", "value": scheme}]},
        )
        self.chromium.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500},
        )


@pytest.fixture(scope="module")
def made():
    return policy_of()


def app(made, **options):
    return create_app(made, MODEL_INFO, SPEC, Journal(), **options)


@pytest.fixture
def served(made):
    with serving(app(made)) as client:
        yield client


def opened(client, name, ticks=0, **settings):
    """A campaign that spends 60 for 2 conversions in each step."""
    settings = {"budget": 1000, "target_cpa": 40, "name": name, "horizon": STEPS} | settings
    id = client.post("/v1/campaigns", json=settings).raise_for_status().json()["id"]
    for index in range(ticks):
        tick(client, id, index)
    return id


def tick(client, id, index):
    body = {
        "index": index,
        "key": f"{id}-{index}",
        "result": RESULT if index else None,
        "coming": COMING,
    }
    return client.post(f"/v1/campaigns/{id}/tick", json=body).raise_for_status().json()


def test_a_campaign_is_drawn_and_updated(served, page):
    id = opened(served, "shoes", ticks=6)
    page.open(str(served.base_url))
    assert page.until("#progress", "Tick 6 of 12") and page("#name").text == "shoes"
    charts = {
        figure.get_attribute("id"): figure.find_element("css selector", "svg")
        for figure in page.all("figure")
    }
    label = lambda name: charts[name].get_attribute("aria-label")  # noqa: E731
    assert (
        label("pacing") == "Spend 300 of 1,000 after 6 of 12 ticks; spent evenly it would be 500."
    )
    assert label("cost") == "CPA 30 so far; the target is 40."
    assert {svg.aria_role for svg in charts.values()} == {"image"} and all(
        svg.accessible_name for svg in charts.values()
    )
    drawn = page("#pacing .ours").get_attribute("d")
    assert drawn.count("L") == 6, "a point before each tick, and one for now"
    answers = served.get(f"/v1/campaigns/{id}").json()["ticks"]
    page("summary").click()
    rows = [
        [cell.text for cell in row.find_elements("css selector", "th, td")]
        for row in page.all("#ticks tr")
    ]
    assert [row[0] for row in rows] == list("012345") and rows[5][4:7] == ["300", "10", "30"]
    shown = [float(row[1].replace(",", "")) for row in rows]
    assert shown == pytest.approx([answer["multiplier"] for answer in answers], rel=1e-3)
    tick(served, id, 6)  # and now without a reload
    assert page.until("#progress", "Tick 7 of 12") and len(page.all("#ticks tr")) == 7
    assert page("#pacing .ours").get_attribute("d") != drawn
    served.delete(f"/v1/campaigns/{id}").raise_for_status()
    assert page.until("#progress", "Ended after 7 of 12 ticks") and page.until(
        "#status", "Live: 0 open"
    )


def test_the_report_after_the_last_step_is_not_a_step(served, page):
    id = opened(served, "whole", ticks=STEPS)
    served.post(
        f"/v1/campaigns/{id}/tick", json={"index": STEPS, "result": RESULT}
    ).raise_for_status()
    page.open(str(served.base_url))
    assert (
        page.until("#progress", "Ended after 12 of 12 ticks")
        and "12 of 12" in page("#campaigns tr").text
    )
    assert (
        page("#pacing svg")
        .get_attribute("aria-label")
        .startswith("Spend 720 of 1,000 after 12 of 12 ticks")
    )
    page("summary").click()
    assert (
        len(page.all("#ticks tr"))
        == page("#multiplier .ours").get_attribute("d").count("L") + 1
        == 12
    )


def test_the_day_in_the_picture_of_the_docs_is_whole():
    from docs.page import NAMES, play

    policy = make_policy(Spec(SPEC.size, 1, 48, (0.0,), (300.0,)))
    with serving(create_app(policy, MODEL_INFO, SPEC, Journal())) as client:
        shown = play(client, opportunities=2000)
        listed = client.get("/v1/campaigns").json()["campaigns"]
    assert [(c["name"], c["status"], c["step"]) for c in reversed(listed)] == [
        (name, "ended", 49) for name in NAMES.values()
    ]
    assert listed[0]["id"] == shown and all(c["spend"] > 0 for c in listed)


def test_the_bids_of_a_shadow_policy_are_a_second_curve(made, page):
    journal = Journal()
    shadow = Shadow(policy_of(target_return=2.0), SPEC, journal, SPEC, name="other")
    with serving(create_app(made, MODEL_INFO, SPEC, journal, shadow=shadow)) as client:
        id = opened(client, "shoes", ticks=4)
        page.open(str(client.base_url))
        page.until("#progress", "Tick 4 of 12")
        while shadow.counts["decided"] < 4:
            time.sleep(0.01)
        page.until("#multiplier .named", "shadow")
        answers = client.get(f"/v1/campaigns/{id}").json()["ticks"]
        assert page("#multiplier .shadow").get_attribute("d").count("L") == 3
        assert "The shadow policy decided 4 ticks" in page("#multiplier svg").get_attribute(
            "aria-label"
        )
        page("summary").click()
        shown = [
            float(row.find_elements("css selector", "td")[1].text.replace(",", ""))
            for row in page.all("#ticks tr")
        ]
    assert shown == pytest.approx([answer["shadow"]["multiplier"] for answer in answers], rel=1e-3)


def test_a_guarded_tick_has_a_ring_and_a_remark(served, page):
    opened(served, "poor", ticks=2, budget=60.01)
    page.open(str(served.base_url))
    page.until("#progress", "Tick 2 of 12")
    assert len(page.all("#multiplier .mark")) >= 1 and "guard" in page(
        "#multiplier svg"
    ).get_attribute("aria-label")
    page("summary").click()
    assert page.all("#ticks tr")[1].find_elements("css selector", "td")[-1].text == "budget spent"


def test_the_keyboard_reaches_everything_and_focus_stays(served, page):
    from selenium.webdriver.common.keys import Keys

    opened(served, "first", ticks=1)
    second = opened(served, "second", ticks=2)
    page.open(str(served.base_url))
    page.until("#name", "second")
    page.press(Keys.TAB)
    assert page.focused.text == "To the campaign" and page.focused.is_displayed()
    page.press(Keys.TAB)
    assert page.focused.accessible_name == "Search campaigns"
    page.press(Keys.TAB, Keys.TAB, Keys.TAB)
    assert (
        page.focused.text == "first"
        and page.focused.value_of_css_property("outline-style") == "solid"
    )
    page.press(Keys.ENTER)
    page.until("#name", "first")
    assert [link.text for link in page.all("[aria-current]")] == ["first"]
    tick(served, second, 2)
    opened(served, "third")
    page.until("#campaigns", "third")
    assert page.focused.text == "first", "a new row above it does not take the focus away"
    page.press(Keys.TAB)
    assert page.focused.tag_name == "summary"
    page.press(Keys.ENTER, Keys.TAB)
    assert page.focused.accessible_name == "Ticks of the campaign"


def test_screen_readers_get_roles_and_names(served, page):
    opened(served, "shoes", ticks=1)
    page.open(str(served.base_url))
    page.until("#name", "shoes")
    assert [page.chromium.title, page("html").get_attribute("lang")] == [
        "decisionllm: campaigns",
        "en",
    ]
    assert (
        page("#status").aria_role == "status"
        and page("#progress").get_attribute("aria-live") == "polite"
    )
    assert [page(tag).aria_role for tag in ("header", "main", "table")] == [
        "banner",
        "main",
        "table",
    ]
    assert {x.accessible_name for x in page.all("section")} == {"Latest campaigns", "shoes"}
    assert [x.get_attribute("scope") for x in page.all("thead th")] == ["col"] * 14 and page(
        "tbody th"
    ).get_attribute("scope") == "row"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_readable_on_a_phone(served, page, scheme):
    opened(
        served,
        "a name that is much longer than a phone is wide, and has no end at all " * 2,
        ticks=3,
    )
    page.media(scheme, 360, 800)
    try:
        page.open(str(served.base_url))
        page.until("#progress", "Tick 3")
        assert page.chromium.execute_script(
            "return document.documentElement.scrollWidth <= innerWidth"
        )
        for css in (
            "h1",
            "#status",
            "#campaigns a",
            "#campaigns td",
            "figcaption",
            "dt",
            "dd",
            "summary",
            "thead th",
        ):
            assert contrast(page, css) >= 4.5, css
        bright = luminance(page("body").value_of_css_property("background-color"))
        assert bright > 0.9 if scheme == "light" else bright < 0.1
    finally:
        page.media("light")


def contrast(page, css):
    """Of an element's text with what lies behind it, from 1 to 21."""
    colours = page.chromium.execute_script(
        """let it = document.querySelector(arguments[0]), ink = getComputedStyle(it).color, paper;
        do { paper = getComputedStyle(it).backgroundColor; it = it.parentElement } while (paper === 'rgba(0, 0, 0, 0)')
        return [ink, paper]""",
        css,
    )
    low, high = sorted(luminance(colour) for colour in colours)
    return (high + 0.05) / (low + 0.05)


def luminance(colour):
    parts = [float(x) / 255 for x in colour.partition("(")[2].rstrip(")").split(",")[:3]]
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    return sum(weight * x for weight, x in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def overlap(page, css):
    """Whether all of an element lies within the window, and within the box that scrolls it."""
    return page.chromium.execute_script(
        """const it = document.querySelector(arguments[0]).getBoundingClientRect();
        const box = document.querySelector('.wide').getBoundingClientRect();
        return it.left >= box.left && it.right <= Math.min(box.right, innerWidth)""",
        css,
    )


@pytest.mark.parametrize("width", [1100, 360])
def test_a_long_name_leaves_room_for_the_numbers(served, page, width):
    name = "W" * 200
    opened(served, name, ticks=3)
    page.media("light", width, 800)
    try:
        page.open(str(served.base_url))
        page.until("#progress", "Tick 3")
        shown = 6 if width > 400 else 4
        for column in range(1, shown + 1):
            assert overlap(page, f"#campaigns tr > :nth-child({column})"), column
        cells = [cell.text for cell in page.all("#campaigns tr > *")]
        assert cells[1:4] == ["open", "30 / 40", "120 / 1,000"]
        assert page("#campaigns a").get_attribute("title") == name
    finally:
        page.media("light")


def test_trouble_is_marked_and_listed_first(served, page):
    """A cost of 30 against a target of 14, money without a conversion, 120 of a budget of 90."""
    opened(served, "spent", ticks=3, budget=90)
    opened(served, "dear", ticks=3, target_cpa=14)
    opened(served, "well", ticks=3)
    ended = opened(served, "over", ticks=3, target_cpa=10)
    served.delete(f"/v1/campaigns/{ended}").raise_for_status()
    opened(served, "new")
    page.open(str(served.base_url))
    assert page.until("#name", "dear") == "dear", "the first one that is open is shown"
    rows = [row.find_elements("css selector", "th, td") for row in page.all("#campaigns tr")]
    messages = [(cells[0].text, cells[1].text) for cells in rows]
    over = "over target"
    assert messages == [
        ("dear", f"open, {over}"),
        ("spent", "open, over budget"),
        ("new", "open"),
        ("well", "open"),
        ("over", f"ended, {over}"),
    ]
    assert [cell.text for cell in page.all("#campaigns .trouble")] == [
        f"open, {over}",
        "open, over budget",
    ]
    assert page("#figures .trouble").text == "30 / 14, over target"
    assert page("#cost svg").get_attribute("aria-label").endswith("14: over target.")


def test_the_model_of_a_campaign_is_shown_and_where_it_changed(made, page, tmp_path):
    journal = tmp_path / "j"
    with serving(create_app(made, MODEL_INFO, SPEC, Journal(journal))) as client:
        id = opened(client, "shoes", ticks=2)
    other = MODEL_INFO | {"model": "m2"}
    app = create_app(made, other, SPEC, Journal(journal), move_campaigns=True)
    with serving(app) as client:
        tick(client, id, 2)
        page.open(str(client.base_url))
        page.until("#progress", "Tick 3 of 12")
        figures = [pair.text.split("\n") for pair in page.all("#figures > div")]
        assert ["Model", "m2"] in figures
        page("summary").click()
        remarks = [row.text.split()[-2:] for row in page.all("#ticks tr")]
        assert remarks[2] == ["model", "m2"] and remarks[1][0] != "model"


def test_a_policy_without_returns_has_no_chart_of_them(page):
    made = policy_of(condition_on="none")
    with serving(app(made)) as client:
        opened(client, "shoes", ticks=3)
        page.open(str(client.base_url))
        page.until("#progress", "Tick 3 of 12")
        shown = [figure.get_attribute("id") for figure in page.all("figure:not([hidden])")]
        assert shown == ["pacing", "cost", "multiplier"]
        assert not page("#togo").is_displayed()


def test_a_name_cannot_turn_the_text_around_it(served, page):
    opened(served, "a\u202etxt.exe\u2066\u0007b", ticks=1)
    page.open(str(served.base_url))
    assert page.until("#name", "a") == "a\ufffdtxt.exe\ufffd\ufffdb"
    assert page("#campaigns a").text == page("#name").text
    for css in ("#campaigns a", "#name"):
        assert page(css).value_of_css_property("unicode-bidi") == "isolate"


def test_a_name_is_escaped(served, page):
    opened(served, "<img src=x onerror=alert(1)>", ticks=1)
    page.open(str(served.base_url))
    assert page.until("#name", "onerror") == "<img src=x onerror=alert(1)>" and not page.all("img")


def test_the_page_prompts_for_a_token_and_keeps_it(made, page):
    from selenium.webdriver.common.keys import Keys

    with serving(app(made, token="secret")) as client:
        client.headers["authorization"] = "Bearer secret"
        opened(client, "shoes", ticks=1)
        page.open(str(client.base_url))
        assert (
            page.until("#status", "A token is needed") and page.focused.accessible_name == "Token"
        )
        assert not page.all("#campaigns tr")
        page.press("wrong", Keys.ENTER)
        page.until("#status", "The token is wrong")
        page("#token").send_keys("secret", Keys.ENTER)
        assert page.until("#name", "shoes") and not page("#key").is_displayed()
        page.chromium.refresh()
        page.until("#name", "shoes")
        assert page.chromium.execute_script("return [localStorage.length, document.cookie]") == [
            0,
            "",
        ]


def test_the_page_says_why_the_server_refuses_it(made, page, tmp_path):
    from selenium.webdriver.common.keys import Keys

    bidder, reader = "b" * 16, "r" * 16
    (tmp_path / "tokens").write_text(
        f'[bidder]\ntoken = "{bidder}"\nrights = ["bid"]\n'
        f'[reader]\ntoken = "{reader}"\nrights = ["read"]\nrate = 0.001\nburst = 1',
        encoding="utf-8",
    )
    (tmp_path / "tokens").chmod(0o600)
    with serving(app(made, access=TokenAccess(None, tmp_path / "tokens"))) as client:
        page.open(str(client.base_url))
        page.until("#status", "A token is needed")
        page.press(bidder, Keys.ENTER)
        page.until("#status", "The token lacks the right to read")
        page("#token").send_keys(reader, Keys.ENTER)
        page.until("#status", "The server answered 429; retrying")


def test_a_stopped_server_is_reported(made, page):
    with serving(app(made)) as client:
        opened(client, "shoes", ticks=1)
        page.open(str(client.base_url))
        page.until("#status", "Live: 1 open")
    assert (
        page.until("#status", "No answer from the server; retrying")
        and page("#name").text == "shoes"
    )


def test_an_address_that_names_no_campaign_is_said(served, page):
    opened(served, "shoes")
    page.open(f"{served.base_url}#%zz")
    assert page.until("#status", "There is no campaign %zz")


def test_older_campaigns_are_found(served, page):
    oldest = opened(served, "Oldest", budget=77)
    for i in range(2 * MAX_LISTED):
        opened(served, f"c{i}")
    page.open(str(served.base_url))
    assert page.until("#status", f"Live: {2 * MAX_LISTED + 1} open") and page.until(
        "#campaigns tr", f"c{2 * MAX_LISTED - 1}"
    )
    assert len(page.all("#campaigns tr")) == MAX_LISTED and not page("#newest").is_displayed()
    page("#older").click()
    page.until("#campaigns tr", f"c{MAX_LISTED - 1}")
    page("#older").click()
    assert page.until("#campaigns tr", "Oldest") and not page("#older").is_displayed()
    page("#newest").click()
    page.until("#campaigns tr", f"c{2 * MAX_LISTED - 1}")
    for part in ("olde", oldest[:6]):
        page("#search").clear()
        page("#search").send_keys(part)
        assert page.until("#campaigns tr", "Oldest") and len(page.all("#campaigns tr")) == 1
    page("#campaigns a").click()
    assert page.until("#name", "Oldest")
    assert (
        served.get("/v1/campaigns", params={"search": "c1", "before": oldest}).json()["campaigns"]
        == []
    )


def test_the_empty_page_explains_how_to_open_a_campaign(served, page):
    page.open(str(served.base_url))
    assert (
        "POST /v1/campaigns" in page.until("#none", "No campaign yet")
        and not page("#campaign").is_displayed()
    )


def test_the_page_loads_nothing_external_or_inline(served):
    for path, kind in (
        ("/", "text/html"),
        ("/page.css", "text/css"),
        ("/page.js", "text/javascript"),
    ):
        answer = served.get(path)
        assert answer.status_code == 200 and answer.headers["content-type"].startswith(kind)
        assert (
            "script-src 'self'" in answer.headers["content-security-policy"]
            and "unsafe" not in answer.headers["content-security-policy"]
        )
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "http://www.w3.org/2000/svg" in answer.text or "://" not in answer.text
    html = served.get("/").text
    assert " style=" not in html and " onclick" not in html and "<style" not in html
