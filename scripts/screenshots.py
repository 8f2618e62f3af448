"""Take the README's pictures: the page on its recorded run, without any model, into assets/pictures."""

import argparse
import tempfile
from pathlib import Path

import serving
from playwright.sync_api import Browser, Page

FOLDER = serving.ROOT / "assets" / "pictures"
DELTA_OF_DARK = 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where to write (default assets/pictures)")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as empty:
        log = Path(empty) / "log"
        with serving.serving(log, **serving.without_models(Path(empty) / "cache")) as server, serving.chromium() as browser:
            desktop(browser, server.url, folder / "desktop.png")
            phone(browser, server.url, folder / "phone.png")
            dark(browser, server.url, folder / "dark.png")
            detail(browser, server.url, folder / "detail.png")
            tour(browser, server.url, folder / "tour.png")
    for picture in sorted(folder.glob("*.png")):
        print(f"{picture}: {picture.stat().st_size / 1e3:.0f} kB")


def opened(browser: Browser, url: str, width: int = 1280, height: int = 900, **options) -> Page:
    """The page with its plots drawn."""
    page = browser.new_context(viewport={"width": width, "height": height}, reduced_motion="reduce", **options).new_page()
    page.goto(url)
    page.locator(".plot .main-svg").nth(1).wait_for()
    return page


def desktop(browser: Browser, url: str, path: Path) -> None:
    """From the budget to the line under both panes, a token opened."""
    page = opened(browser, url)
    page.locator(".pane").nth(1).locator(".token.rescued").first.click()
    page.evaluate("scrollTo(0, 0)")
    viewer, last = (page.locator(selector).bounding_box() for selector in (".cactus-viewer", ".cactus-viewer .comparison"))
    page.screenshot(path=path, full_page=True, clip=viewer | {"height": last["y"] + last["height"] - viewer["y"]})


def phone(browser: Browser, url: str, path: Path) -> None:
    """The second pane on a phone, a token opened."""
    page = opened(browser, url, 390, 844, has_touch=True, is_mobile=True)
    page.locator(".pane").nth(1).evaluate("(pane) => pane.scrollIntoView({ block: 'start' })")
    page.locator(".pane").nth(1).locator(".token.rescued").first.tap()
    page.screenshot(path=path)


def dark(browser: Browser, url: str, path: Path) -> None:
    """Both panes in the dark theme, judged anew at a larger budget."""
    page = opened(browser, f"{url}?__theme=dark")
    page.evaluate("(delta) => cactusViewer.setDelta(delta)", DELTA_OF_DARK)
    page.locator(".panes").screenshot(path=path)


def detail(browser: Browser, url: str, path: Path) -> None:
    """The detail of a rescued token."""
    page = opened(browser, url, height=1400)
    page.locator(".pane").nth(1).locator(".token.rescued").first.click()
    page.locator(".detail").screenshot(path=path)


def tour(browser: Browser, url: str, path: Path) -> None:
    """The fourth step of the tour: what δ does to one rejected token."""
    page = opened(browser, url)
    page.locator(".tour-start").click()
    for _ in range(3):
        page.locator(".tour-next").click()
    page.screenshot(path=path)


if __name__ == "__main__":
    main()
