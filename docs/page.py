"""Takes the picture of the operator page: a policy's whole day in a market, beside a shadow policy.

python -m docs.page run=runs/auction/logs-0 shadow=runs/auction/nano-0 to=docs/images/page.png
needs Chromium, its driver and selenium.
"""

import io
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from decisionllm.bidding import serve
from decisionllm.bidding.market.advertisers import PUBLISHED
from decisionllm.bidding.market.campaigns import STEPS
from decisionllm.bidding.market.simulation import Entries, PriceReplay
from decisionllm.bidding.serve_options import ServeConfig
from decisionllm.bidding.server import protocol
from decisionllm.command_line import config_folder
from decisionllm.commands.options import read_options

# advertiser: campaign; the last one is shown
NAMES = {19: "garden chairs", 33: "tea", 3: "winter boots", 8: "running shoes"}
PERIOD, WIDTH = 7, 1000


def main(run: str, shadow: str, to: str) -> None:
    """Play a day of each campaign and save the picture."""
    with (
        tempfile.TemporaryDirectory() as folder,
        served(run, shadow, f"{folder}/journal.sqlite") as client,
    ):
        shown = play(client)
        while (
            shadow
            and client.get(f"/v1/campaigns/{shown}").json()["ticks"][STEPS - 1]["shadow"] is None
        ):
            time.sleep(0.1)
        photograph(f"{client.base_url}/#{shown}", to)


@contextmanager
def served(run: str, shadow: str, journal: str) -> Iterator[httpx.Client]:
    """A client of a server of this run and this shadow."""
    from omegaconf import OmegaConf

    config: Any = OmegaConf.to_container(OmegaConf.load(config_folder() / "serve.yaml"))
    config |= {"run": run, "shadow": shadow or None, "journal": journal, "log": "none"}
    app = serve.build_app(read_options(ServeConfig, config))
    server = protocol.server(app, port=0)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        with httpx.Client(
            base_url=f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", timeout=60
        ) as client:
            yield client
    finally:
        server.should_exit = True
        thread.join()


def play(client: httpx.Client, *, opportunities: int = 500_000) -> str:
    """Play a day of every campaign in the prices of our own market.

    Returns the id of the last one.
    """
    N, advertisers = len(NAMES), np.array([*NAMES])
    entries = Entries(np.full(N, PERIOD), advertisers, np.ones(N), np.zeros(N, int))
    replay = PriceReplay(entries, path="", total=opportunities, seed=0)
    budgets, target_cpa = (
        np.array(PUBLISHED[name])[advertisers] for name in ("budgets", "target_cpa")
    )
    ids = [
        client.post("/v1/campaigns", json={"name": name, "budget": budget, "target_cpa": cpa})
        .raise_for_status()
        .json()["id"]
        for name, budget, cpa in zip(
            NAMES.values(), budgets.tolist(), target_cpa.tolist(), strict=True
        )
    ]
    results: list[Any] = [None] * N
    for step in range(STEPS + 1):
        coming: list[Any] = [None] * N
        if step < STEPS:
            coming = [
                {"value": float(v), "volume": float(n)}
                for v, n in zip(*replay.next_opportunities(step), strict=True)
            ]
        ticks = {
            id: {"index": step, "result": results[i], "coming": coming[i]}
            for i, id in enumerate(ids)
        }
        answers = client.post("/v1/ticks", json={"ticks": ticks}).raise_for_status().json()
        if step < STEPS:
            multipliers, remaining = (
                np.array([answers[id][name] for id in ids]) for name in ("multiplier", "remaining")
            )
            made = replay.step(step, multipliers, remaining)
            results = [{name: float(x[i]) for name, x in made.items()} for i in range(N)]
    return ids[-1]


def photograph(url: str, to: str) -> None:
    """Save a picture of the whole page."""
    from PIL import Image
    from selenium import webdriver
    from selenium.webdriver.support.wait import WebDriverWait

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or "chromium"
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--window-size={WIDTH},1400",
    ):
        options.add_argument(argument)
    driver = webdriver.Chrome(
        options=options, service=webdriver.ChromeService(shutil.which("chromedriver"))
    )
    try:
        driver.get(url)
        WebDriverWait(driver, 30).until(
            lambda _: "of 48" in driver.find_element("id", "progress").text
        )
        height = driver.execute_script("return document.documentElement.scrollHeight")
        whole = {"width": WIDTH, "height": height, "deviceScaleFactor": 1, "mobile": False}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", whole)
        picture = Image.open(io.BytesIO(driver.get_screenshot_as_png())).convert(
            "P", palette=Image.Palette.ADAPTIVE, colors=64
        )
        picture.save(Path(to), optimize=True)
    finally:
        driver.quit()


if __name__ == "__main__":
    main(
        **{"shadow": "", "to": "docs/images/page.png"}
        | dict(word.split("=", 1) for word in sys.argv[1:])
    )
