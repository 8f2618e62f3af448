"""Chromium, the servers that it looks at, and a visitor's view of the page."""

import os
import sys
from functools import partial
from pathlib import Path

import gradio as gr
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import serving

from cactus import recordings
from cactus.page.app import ASSETS, HEAD, MOUNT, PLOTLY, SCRIPTS
from cactus.page.strings import STRINGS

# Upper bounds that tell working from hanging on a machine far slower than any the page is meant for.
PATIENCE_MS = 60_000
RUN_PATIENCE_MS = 240_000


class Visit:
    """One visitor's page, and everything the browser found wrong with it."""

    def __init__(self, page, url: str):
        self.page, self.complaints, self.asked = page, [], []
        page.set_default_timeout(PATIENCE_MS)
        page.on("console", self._hear)
        page.on("pageerror", lambda error: self.complaints.append(f"page error: {error}"))
        page.on("requestfailed", self._miss)
        page.on(
            "response", lambda response: response.status >= 400 and self.complaints.append(f"{response.status}: {response.url}")
        )
        page.on("request", lambda request: self.asked.append(request.url))
        page.on("dialog", self._refuse)
        page.goto(url)
        page.wait_for_selector(".tokens .token")

    def _hear(self, message):
        if message.type in ("error", "warning"):
            self.complaints.append(f"console {message.type}: {message.text}")

    def _miss(self, request):
        # Gradio's client ends its event streams itself, which the browser reports as aborted.
        if not (request.failure == "net::ERR_ABORTED" and "/queue/data" in request.url):
            self.complaints.append(f"failed: {request.url} {request.failure}")

    def _refuse(self, dialog):
        self.complaints.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    @property
    def viewer(self):
        return self.page.locator(".cactus-viewer")

    def pane(self, at: int):
        return self.viewer.locator(".pane").nth(at)

    def token_texts(self, at: int, *classes: str) -> list[str]:
        """Text of the token elements of a pane, only those of `classes` if there are any, in the order of the page."""
        selector = ", ".join(f".token.{name}" for name in classes) or ".token"
        return self.pane(at).locator(".tokens").evaluate(
            "(list, selector) => [...list.querySelectorAll(selector)].map((token) => token.textContent)", selector
        )  # fmt: skip

    def kept(self, at: int):
        """The token elements whose texts make up the generated text: no rejected or unjudged draft, no special token."""
        names = "accepted", "rescued", "resampled", "bonus"
        return self.pane(at).locator(".tokens").locator(", ".join(f".{name}:not(.special)" for name in names))

    def text(self, at: int) -> str:
        """What a pane shows as generated text."""
        return "".join(self.kept(at).all_text_contents())

    def legend(self) -> dict[str, list[int]]:
        """Class or overlay to its count in each pane, as the legend says; the entries come in a fixed order."""
        return self.viewer.locator("section.legend").evaluate(
            """(legend) => Object.fromEntries([...legend.querySelectorAll('ul button')].map((button) => [
                 button.querySelector('.token').classList.item(button.querySelector('.token').classList.length - 1),
                 [...button.querySelectorAll('.counts span')].map((count) => Number(count.textContent)),
               ]))"""
        )

    def type_delta(self, delta: float) -> None:
        self.viewer.get_by_label(STRINGS["delta.number"]).fill(str(delta))
        self.settle()

    def settle(self) -> None:
        """Until the frame after the next one: a move of delta is painted in the next."""
        self.page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def focused(self):
        return self.page.evaluate_handle("document.activeElement").as_element()

    def open_settings(self) -> None:
        self.page.locator("#settings button").first.click()
        self.page.locator("#seed input").wait_for()

    def set(self, name: str, value) -> None:
        """Fill in a field, until it keeps what was typed: Gradio puts the first values in some time after the accordion opens."""
        field = self.page.locator(f"#{name} textarea, #{name} input[type=number]").first
        for _ in range(10):
            field.fill(str(value))
            self.page.wait_for_timeout(200)
            if field.input_value() == str(value):
                return
        pytest.fail(f"the field {name} does not keep {value!r}")

    def choose_recording(self, name: str) -> None:
        """Pick a recorded run in the settings and wait until it is drawn."""
        self.page.locator("#recording input").click()
        self.page.get_by_role("option", name=STRINGS[f"recording.{name}"]).click()
        prompt = next(recording.prompt for recording in recordings.RECORDINGS if recording.name == name)
        self.page.wait_for_function("(text) => document.querySelector('.prompt-text').textContent === text", arg=prompt)

    def generate(self) -> None:
        """Press Generate and wait until a live run is drawn."""
        self.page.locator("#generate").click()
        self.page.locator(".badge.live").wait_for(timeout=RUN_PATIENCE_MS)

    def wait_until_ended(self) -> None:
        """Until both panes say how they ended and the server is ready for the next run."""
        self.page.wait_for_function(
            "() => document.querySelectorAll('.ending:not([hidden])').length === document.querySelectorAll('.pane').length",
            timeout=RUN_PATIENCE_MS,
        )
        self.wait_for_status("Ready")

    def wait_for_status(self, start: str) -> None:
        self.page.wait_for_function(
            "(start) => document.querySelector('#status p').textContent.startsWith(start)", arg=start, timeout=RUN_PATIENCE_MS
        )

    def run(self) -> None:
        """Press Generate and wait for the end."""
        self.generate()
        self.wait_until_ended()

    def status(self) -> str:
        return self.page.locator("#status p").inner_text()


@pytest.fixture(scope="session")
def browser():
    if not serving.find_chromium():
        # A skip nobody sees would make the page's tests vanish where they matter most.
        pytest.fail(serving.NO_CHROMIUM) if os.environ.get("CI") else pytest.skip(serving.NO_CHROMIUM)
    with serving.chromium() as chromium:
        yield chromium


@pytest.fixture
def visit(browser):
    """visit(url, **options of the browser context) opens the page as a new visitor."""
    contexts = []

    def visit(url, **options):
        contexts.append(browser.new_context(**{"viewport": {"width": 1280, "height": 900}, "locale": "en-GB"} | options))
        return Visit(contexts[-1].new_page(), url)

    yield visit
    for context in contexts:
        context.close()


@pytest.fixture(scope="session")
def offline_server(browser, tmp_path_factory):
    """The real page on a machine without models and without a network."""
    folder = tmp_path_factory.mktemp("offline")
    with serving.serving(folder / "log", **serving.without_models(folder / "cache")) as server:
        yield server


@pytest.fixture(scope="session")
def live_server(browser, embedded_folder, tmp_path_factory):
    """The real page with the embedded pair."""
    with serving.serving(tmp_path_factory.mktemp("live") / "log") as server:
        yield server


@pytest.fixture(scope="module")
def serve_log(browser):
    """serve_log(log) serves the very viewer of the page on a log of the test's own; the button «grow» streams it once more. With
    all_values, the page's function of that name, tokens can be asked of the models that the test has put in their place."""
    pages = []

    def serve_log(log, all_values=None):
        with gr.Blocks() as page:
            grow = gr.Button("grow", elem_id="grow")
            viewer = gr.HTML(
                log,
                html_template='<div class="cactus-viewer"></div>',
                js_on_load=MOUNT,
                apply_default_css=False,
                server_functions=[all_values] if all_values else None,
                strings=STRINGS,
                folder=f"gradio_api/file={ASSETS}/",
            )
            grow.click(partial(_growing, log), None, viewer)
        gr.set_static_paths([*SCRIPTS, PLOTLY])
        pages.append(page)
        _, url, _ = page.launch(
            prevent_thread_lock=True, quiet=True, css_paths=[ASSETS / "viewer.css"], head=HEAD, run_history=False, ssr_mode=False
        )
        return url

    yield serve_log
    for page in pages:
        page.close()


def _growing(log):
    lines = log.splitlines(keepends=True)
    for end in range(1, len(lines) + 1):
        yield "".join(lines[:end])
