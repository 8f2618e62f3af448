"""The bench: its mathematics in Chromium against the vectors and the Python, and what a visitor sees, drags and chooses."""

import json
import math
import os
from pathlib import Path

import gradio as gr
import pytest
import torch

from cactus.divergences import DIVERGENCES, kl
from cactus.page.app import ASSETS
from cactus.page.strings import STRINGS
from cactus.replay import GRID
from cactus.rules import TAS, Cactus, Interpolation, SpS, acceptance, optimal

pytestmark = pytest.mark.browser

VECTORS = Path(os.environ.get("CACTUS_VECTORS", Path(__file__).parents[1] / "data" / "vectors.json"))
CASES = json.loads(VECTORS.read_text())["cases"]
TOLERANCE = 1e-9
DELTAS = [0.0, 1e-4, 0.01, 0.1, 0.2112, 0.5, 1.0, 2.0]
METHODS = [
    (name, solver) for name in DIVERGENCES for solver in ("taylor", "exact") if solver == "exact" or DIVERGENCES[name].curvature
]
FOLDER = f"gradio_api/file={ASSETS}/"
MOUNT = "import(new URL(props.folder + 'bench.js', document.baseURI)).then((bench) => bench.mount(element, props));"
MODULE = f"const m = await import(new URL('{FOLDER}mathematics.js', document.baseURI));"

P, Q, N = [0.05, 0.8, 0.15], [0.3, 0.35, 0.35], 1  # the worked example, on which the bench opens


class Bench:
    """The bench as a visitor has it in front of them, and what the browser complained about."""

    def __init__(self, page, url):
        self.page, self.complaints, self.asked = page, [], []
        page.on("console", lambda message: message.type in ("error", "warning") and self.complaints.append(message.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda request: self.asked.append(request.url))
        page.goto(url)
        page.wait_for_selector(".cactus-bench .grip")
        page.wait_for_load_state("networkidle")
        self.root = page.locator(".cactus-bench")
        self.root.locator("summary").click()
        self.root.locator("tbody tr").first.wait_for()
        self.root.locator(".sentence").scroll_into_view_if_needed()

    def settle(self):
        self.page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def grip(self, row, at):
        return self.root.locator(f".track.{row} .grip").nth(at)

    def value(self, row, at):
        return float(self.grip(row, at).get_attribute("aria-valuenow"))

    def values(self, row):
        return [self.value(row, at) for at in range(self.root.locator(f".track.{row}").count())]

    def press(self, row, at, key, times=1):
        self.grip(row, at).focus()
        for _ in range(times):
            self.page.keyboard.press(key)
            self.settle()

    def drag(self, row, at, *path):
        """With the mouse, from the top of a bar through the heights of the probabilities of `path`; returns the value at each."""
        self.grip(row, at).scroll_into_view_if_needed()
        track, top = self.root.locator(f".track.{row}").nth(at).bounding_box(), self.grip(row, at).bounding_box()
        middle = track["x"] + track["width"] / 2
        self.page.mouse.move(middle, top["y"] + top["height"] / 2)
        self.page.mouse.down()
        reached = []
        for to in path:
            self.page.mouse.move(middle, track["y"] + track["height"] * (1 - to), steps=5)
            self.settle()
            reached.append(self.value(row, at))
        self.page.mouse.up()
        self.settle()
        return reached

    def choose(self, group, value):
        self.root.locator(f"input[name='cactus-bench-{group}'][value='{value}']").check(force=True)
        self.settle()

    def button(self, name):
        self.root.get_by_role("button", name=STRINGS[f"bench.{name}"], exact=True).click()
        self.settle()

    def type(self, name, value):
        self.root.get_by_label(STRINGS[f"bench.{name}.number"]).fill(str(value))
        self.settle()

    def text(self, selector):
        return self.root.locator(selector).inner_text()

    def figure(self, name):
        return self.text(f".figures .{name} strong")

    def line(self, name):
        """The numbers of one row under the bars of the board."""
        return self.root.locator(f".board .numbers.{name} > span:not(.head)").all_inner_texts()

    def table(self):
        """Column to its six-digit numbers, as far as there are any."""
        keys = ["p", "q", "gamma", "phi", "h", "recovery", "out"]
        rows = [row.locator("td").all_inner_texts() for row in self.root.locator("tbody tr").all()]
        return {
            key: [float(cell) for cell in column]
            for key, column in zip(keys, zip(*rows, strict=True), strict=True)
            if "–" not in column
        }


@pytest.fixture(scope="module")
def bench_url(browser):
    gr.set_static_paths([*ASSETS.glob("*.js")])
    with gr.Blocks() as page:
        gr.HTML(
            html_template='<div class="cactus-bench"></div>',
            js_on_load=MOUNT,
            apply_default_css=False,
            strings=STRINGS,
            grid=list(GRID),
            folder=FOLDER,
        )
    _, url, _ = page.launch(
        prevent_thread_lock=True, quiet=True, css_paths=[ASSETS / "bench.css"], run_history=False, ssr_mode=False
    )
    yield url
    page.close()


@pytest.fixture
def visit_bench(browser, bench_url):
    """visit_bench(query, **options of the browser context) opens the bench; at the end nothing may have gone wrong on it."""
    contexts, benches = [], []

    def visit_bench(query="", **options):
        contexts.append(browser.new_context(**{"viewport": {"width": 1280, "height": 900}} | options))
        benches.append(Bench(contexts[-1].new_page(), bench_url + query))
        return benches[-1]

    yield visit_bench
    for context in contexts:
        context.close()
    assert [bench.complaints for bench in benches] == [[] for _ in benches]


@pytest.fixture
def bench(visit_bench):
    return visit_bench()


def rows(*values):
    return [torch.tensor(value, dtype=torch.float64) for value in values]


def random_pairs(count=40):
    """(p, q) of 3 to 8 tokens, flat and peaked; in every fifth the verifier excludes a token."""
    generator = torch.Generator().manual_seed(5)
    for at in range(count):
        p, q = (torch.rand(3 + at % 6, generator=generator, dtype=torch.float64) ** (1 + 3 * (at % 3)) for _ in range(2))
        q[0] *= at % 5 > 0
        yield p / p.sum(), q / q.sum()


def same(actual, expected):
    assert actual == pytest.approx(expected, abs=TOLERANCE, rel=0)


# ---- the module in the browser ----


def test_module_in_the_browser_equals_the_vectors(bench):
    got = bench.page.evaluate(
        f"""async (cases) => {{
          {MODULE}
          return cases.map(({{ p, q, cactus, tas, interp, optimal }}) => ({{
            sps: m.acceptance(m.rules.sps(), p, q), kl_p_q: m.kl(p, q),
            cactus: cactus.map((given) => {{
              const rule = m.rules.cactus({{ divergence: 'kl', solver: given.solver, delta: given.delta }});
              const [gamma, effective] = [rule.gamma(p, q), m.effective(rule, p, q)];
              return {{
                gamma, effective, accept_prob: p.map((x, at) => m.phi(x, gamma[at])), acceptance: m.acceptance(rule, p, q),
                kl_effective_q: m.kl(effective, q), tv_effective_q: m.tv(effective, q),
              }};
            }}),
            tas: tas.map((given) => {{
              const rule = m.rules.tas(given);
              return {{ threshold: rule.threshold(q), acceptance: m.acceptance(rule, p, q), effective: m.effective(rule, p, q) }};
            }}),
            interp: interp.map(({{ alpha: a }}) => {{
              const rule = m.rules.interpolation({{ a }});
              return {{ acceptance: m.acceptance(rule, p, q), effective: m.effective(rule, p, q) }};
            }}),
            optimal: optimal.map((given) => {{
              const {{ h, kl, acceptance }} = m.optimum(p, q, given.kl_budget);
              return {{ effective: h, kl, acceptance }};
            }}),
          }}));
        }}""",
        CASES,
    )
    for case, result in zip(CASES, got, strict=True):
        same(result["sps"], case["sps"]["acceptance"])
        same(result["kl_p_q"], math.inf if case["kl_p_q"] is None else case["kl_p_q"])
        for family in ("cactus", "tas", "interp", "optimal"):
            for given, values in zip(case[family], result[family], strict=True):
                for name, value in values.items():
                    same(value, math.inf if given[name] is None else given[name])


def test_every_divergence_and_solver_equals_the_python(bench):
    pairs = list(random_pairs())
    got = bench.page.evaluate(
        f"""async ({{ pairs, methods, deltas }}) => {{
          {MODULE}
          return methods.map(([divergence, solver]) => deltas.map((delta) => pairs.map(([p, q]) => {{
            const rule = m.rules.cactus({{ divergence, solver, delta }});
            return {{
              gamma: rule.gamma(p, q), target: p.map((_, n) => rule.target(p, q, n)), effective: m.effective(rule, p, q),
              apart: m.divergence(divergence, p, q), acceptance: m.acceptance(rule, p, q),
            }};
          }})));
        }}""",
        {"pairs": [[p.tolist(), q.tolist()] for p, q in pairs], "methods": METHODS, "deltas": DELTAS},
    )
    for (name, solver), by_delta in zip(METHODS, got, strict=True):
        for delta, by_pair in zip(DELTAS, by_delta, strict=True):
            rule = Cactus(delta, solver, name)
            for (p, q), values in zip(pairs, by_pair, strict=True):
                tokens = torch.arange(len(p))
                target = rule.target(p.expand(len(p), -1), q.expand(len(p), -1), tokens)
                same(values["gamma"], rule.gamma(p, q).tolist())
                same([x for row in values["target"] for x in row], target.flatten().tolist())
                same(values["effective"], rule.effective(p, q).tolist())
                same(values["acceptance"], acceptance(rule, p, q).item())
                assert values["apart"] == pytest.approx(DIVERGENCES[name].between(p, q).item(), rel=TOLERANCE)


def test_baselines_and_optimum_equal_the_python(bench):
    pairs, weights, budgets = list(random_pairs()), [0, 0.3, 1], [0.001, 0.01, 0.1, 0.5]
    got = bench.page.evaluate(
        f"""async ({{ pairs, weights, budgets }}) => {{
          {MODULE}
          const one = (rule, p, q) => [...m.effective(rule, p, q), m.acceptance(rule, p, q)];
          return pairs.map(([p, q]) => [
            one(m.rules.sps(), p, q), one(m.rules.tas(), p, q), ...weights.map((a) => one(m.rules.interpolation({{ a }}), p, q)),
            ...budgets.map((budget) => m.optimum(p, q, budget).h),
          ]);
        }}""",
        {"pairs": [[p.tolist(), q.tolist()] for p, q in pairs], "weights": weights, "budgets": budgets},
    )
    for (p, q), values in zip(pairs, got, strict=True):
        rules = [SpS(), TAS(), *map(Interpolation, weights)]
        for rule, value in zip(rules, values, strict=False):
            same(value, [*rule.effective(p, q).tolist(), acceptance(rule, p, q).item()])
        if q[q > 0].min() > 1e-9:  # below that the prefix sums of the Python lose digits
            for budget, value in zip(budgets, values[len(rules) :], strict=True):
                same(value, optimal(p, q, budget).tolist())


# ---- what a visitor sees ----


def test_opens_on_the_worked_example(bench):
    assert bench.line("p") == [".05", ".80", ".15"]
    assert bench.line("q") == [".30", ".35", ".35"]
    assert bench.line("h") == [".16", ".66", ".18"]
    sentence = bench.text(".sentence")
    assert all(part in sentence for part in ("‹b›", "q = .35", "γ = .66", "φ = 82 %", "44 %"))
    assert bench.figure("phi") == "82 %"
    assert bench.figure("gamma") == ".66"
    assert bench.figure("kl_target") == "0.20"
    assert "0.2112" in bench.text(".figures .kl_target") and "ln(1+2δ) = 0.35" in bench.text(".budget")
    p, q = rows(P, Q)
    assert bench.figure("alpha") == f"{100 * acceptance(Cactus(0.2112), p, q).item():.1f} %"
    assert "55.0 %" in bench.text(".figures .alpha")
    bench.type("delta", 0.1)
    assert bench.figure("alpha") == "76.3 %"


def test_every_number_of_the_table_is_that_of_the_python(bench):
    bench.choose("solver", "exact")
    p, q = rows(P, Q)
    n, rule, table = torch.tensor(N), Cactus(0.2112, "exact"), bench.table()
    expected = {"p": p, "q": q, "gamma": rule.gamma(p, q), "h": rule.target(p, q, n), "recovery": rule.recovery(p, q, n)}
    for name, values in (expected | {"out": rule.effective(p, q)}).items():
        assert table[name] == pytest.approx(values.tolist(), abs=6e-7)


def test_divergence_and_solver_are_chosen_by_hand(bench):
    bench.type("delta", 0.05)
    p, q = rows(P, Q)
    for name, solver in METHODS:
        bench.choose("measure", name)
        bench.choose("solver", solver)
        rule = Cactus(0.05, solver, name)
        assert bench.table()["gamma"] == pytest.approx(rule.gamma(p, q).tolist(), abs=6e-7)
        assert bench.table()["out"] == pytest.approx(rule.effective(p, q).tolist(), abs=6e-7)
        gamma = f"{rule.gamma(p, q)[N].item():.2f}".lstrip("0")
        assert bench.text(".formula p:first-child").endswith(gamma)
        assert STRINGS[f"bench.divergence.{name}"] in bench.text(".budget")


def test_rules_are_chosen_by_hand(bench):
    p, q = rows(P, Q)
    for value, rule in {"sps": SpS(), "tas": TAS(), "interpolation": Interpolation(0.5), "cactus": Cactus(0.2112)}.items():
        bench.choose("rule", value)
        out = rule.effective(p, q)
        assert bench.table()["out"] == pytest.approx(out.tolist(), abs=6e-7)
        assert float(bench.figure("kl")) == pytest.approx(kl(out, q).item(), rel=0.06, abs=1e-9)
        assert bench.root.locator(".amount.delta").is_visible() == (value == "cactus")
        assert bench.root.locator(".amount.a").is_visible() == (value == "interpolation")
    assert "h" in bench.table()
    bench.choose("rule", "tas")
    assert "h" not in bench.table() and bench.line("h") == ["–"] * 3  # typical acceptance has no target


def test_total_variation_has_no_taylor_form_to_choose(bench):
    bench.choose("measure", "tv")
    assert bench.root.locator("input[value='taylor']").is_disabled()
    assert bench.root.locator("input[value='exact']").is_checked()
    bench.choose("measure", "js")
    assert bench.root.locator("input[value='taylor']").is_checked()


def test_delta_by_slider_and_by_box(bench):
    slider = bench.root.get_by_label(STRINGS["bench.delta.slider"], exact=True)
    slider.focus()
    bench.page.keyboard.press("Home")
    bench.settle()
    assert "44 %" in bench.text(".sentence") and bench.line("h") == bench.line("q")
    bench.page.keyboard.press("End")
    bench.settle()
    assert bench.figure("phi") == "100 %"
    box = bench.root.get_by_label(STRINGS["bench.delta.number"])
    assert float(box.input_value()) == GRID[-1]
    bench.type("delta", 3)
    assert box.get_attribute("aria-invalid") == "true" and STRINGS["bench.delta.invalid"] in bench.text(".amount.delta")
    assert bench.figure("phi") == "100 %"
    bench.type("delta", 0.2112)
    assert box.get_attribute("aria-invalid") == "false" and bench.figure("phi") == "82 %"


def test_bar_follows_the_mouse_and_the_others_fill_up(bench):
    bench.drag("p", 1, 0.5)
    assert bench.value("p", 1) == pytest.approx(0.5, abs=0.011)
    assert sum(bench.values("p")) == pytest.approx(1, abs=1e-3)
    left, _, right = bench.values("p")
    assert right / left == pytest.approx(3, abs=0.01)
    assert bench.values("q") == Q
    assert bench.figure("phi") == "100 %"


def test_drag_to_the_end_and_back_keeps_the_shape_of_the_others(bench):
    assert bench.drag("q", 0, 1.1, 0.3) == pytest.approx([1, 0.3], abs=0.011)
    assert bench.values("q") == pytest.approx(Q, abs=0.011)


def test_bar_follows_the_keys_and_keeps_the_focus(bench):
    bench.press("q", 1, "ArrowUp", 3)
    assert bench.value("q", 1) == pytest.approx(0.38)
    bench.press("q", 1, "PageDown")
    assert bench.value("q", 1) == pytest.approx(0.28)
    bench.press("q", 1, "ArrowLeft")
    assert bench.value("q", 1) == pytest.approx(0.27)
    assert sum(bench.values("q")) == pytest.approx(1, abs=1e-3)
    assert bench.grip("q", 1).evaluate("(grip) => grip === document.activeElement")
    assert bench.grip("q", 1).get_attribute("aria-valuetext") == ".27"
    bench.press("q", 1, "End")
    assert bench.values("q") == [0, 1, 0]
    bench.press("q", 1, "Home")
    assert bench.values("q") == [0.5, 0, 0.5]
    assert "excludes" in bench.text(".sentence")


def test_drafted_token_is_chosen_by_its_letter_with_the_keyboard(bench):
    bench.root.locator("input[name='cactus-bench-drafted']").nth(1).focus()
    bench.page.keyboard.press("ArrowRight")
    bench.settle()
    assert "‹c›" in bench.text(".sentence")
    p, q = rows(P, Q)
    assert bench.table()["h"] == pytest.approx(Cactus(0.2112).target(p, q, torch.tensor(2)).tolist(), abs=6e-7)


def test_three_to_eight_tokens(bench):
    more, fewer = (bench.root.get_by_label(STRINGS[f"bench.{name}"]) for name in ("more", "fewer"))
    assert fewer.is_disabled()
    for count in range(4, 9):
        more.click()
        bench.settle()
        assert len(bench.line("p")) == len(bench.table()["p"]) == count
        for row in ("p", "q", "out"):
            assert sum(bench.table()[row]) == pytest.approx(1, abs=1e-5)
    assert more.is_disabled()
    bench.choose("drafted", 7)
    fewer.click()
    bench.settle()
    assert "‹g›" in bench.text(".sentence")
    for _ in range(4):
        fewer.click()
        bench.settle()
    assert fewer.is_disabled()
    assert bench.table()["p"] == pytest.approx(P, abs=1e-6)


def test_presets_and_reset(bench):
    before = bench.root.inner_text()
    bench.button("preset.equal")
    assert bench.values("p") == bench.values("q") and bench.figure("alpha") == "100.0 %" and bench.figure("kl") == "0"
    bench.button("preset.sure")
    assert bench.value("p", 0) > 0.9
    bench.button("preset.random")
    for row in ("p", "q"):
        assert sum(bench.values(row)) == pytest.approx(1, abs=1e-9)
    for choice in (("measure", "js"), ("solver", "exact"), ("rule", "interpolation")):
        bench.choose(*choice)
    bench.type("a", 0.9)
    bench.button("reset")
    assert bench.root.inner_text() == before


def test_excluded_token_is_said_to_be_infinite_and_never_accepted(bench):
    bench.button("preset.excluded")
    assert "excludes it" in bench.text(".sentence") and "0 %" in bench.figure("phi")
    assert bench.figure("kl_draft") == "∞" and "infinite" in bench.text(".figures .kl_draft")
    assert float(bench.figure("kl")) > 0
    bench.choose("rule", "interpolation")
    assert bench.figure("kl") == "∞" and "infinite" in bench.text("figcaption")


def test_overspending_is_said_where_it_happens_and_only_there(bench):
    bench.type("delta", 0.1)
    bench.press("q", 1, "End")
    bench.press("q", 1, "PageDown", 2)
    assert "overspends" in bench.text(".budget")
    bench.choose("solver", "exact")
    assert "overspends" not in bench.text(".budget") and "never spends more" in bench.text(".budget")
    bench.choose("solver", "taylor")
    bench.press("q", 1, "PageDown", 7)
    assert "overspends" not in bench.text(".budget")


def test_budget_that_gamma_1_cannot_keep_is_said_to_be_infinite(bench):
    bench.choose("measure", "reverse_kl")
    bench.type("delta", 2)
    assert "infinite" in bench.text(".budget") and bench.figure("gamma") == "1"
    bench.choose("solver", "exact")
    assert "infinite" not in bench.text(".budget") and "never spends more" in bench.text(".budget")


def test_frontier_shows_rule_optimum_and_points(bench):
    shapes = bench.root.locator("svg")
    for selector in ("path.best", "path.curve", "circle.sps", "circle.here", "path.all"):
        assert shapes.locator(selector).count() == 1
    before = shapes.locator("circle.here").get_attribute("cx")
    bench.type("delta", 0.5)
    assert shapes.locator("circle.here").get_attribute("cx") != before
    p, q = rows(P, Q)
    spent = kl(Cactus(0.5).effective(p, q), q)
    best = torch.minimum(p, optimal(p, q, spent)).sum().item()
    assert bench.figure("best") == f"{100 * best:.1f} %"


def test_nothing_asks_the_server(bench):
    asked = len(bench.asked)
    bench.drag("p", 0, 0.4)
    bench.press("q", 2, "ArrowUp", 2)
    bench.choose("measure", "js")
    bench.button("preset.random")
    assert bench.asked[asked:] == []


def test_phone_has_no_sideways_scroll_and_a_thumb_can_drag(visit_bench):
    bench = visit_bench(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    for _ in range(5):
        bench.root.get_by_label(STRINGS["bench.more"]).click()
    bench.settle()
    assert bench.page.evaluate("document.documentElement.scrollWidth") == 390
    assert bench.grip("p", 0).bounding_box()["height"] >= 44
    assert bench.root.locator("svg").bounding_box()["height"] > 150


def test_a_finger_on_the_top_drags_and_elsewhere_scrolls(visit_bench):
    bench = visit_bench(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    for of, moved in ((".track.p", False), (".track.p .grip", True)):
        before = bench.value("p", 1)
        bench.root.locator(of).nth(1).evaluate(
            """(target) => {
              const track = target.closest('.track');
              const { top, height } = track.getBoundingClientRect();
              track.setPointerCapture = () => {};
              const send = (type, y) => target.dispatchEvent(new PointerEvent(type, {
                bubbles: true, cancelable: true, pointerType: 'touch', pointerId: 2, button: 0, clientY: y,
              }));
              send('pointerdown', top + height * 0.2);
              send('pointermove', top + height * 0.6);
              send('lostpointercapture', top + height * 0.6);
            }"""
        )
        bench.settle()
        assert (bench.value("p", 1) != before) == moved


def test_reduced_motion_is_respected(visit_bench):
    for motion, moves in (("reduce", False), ("no-preference", True)):
        bench = visit_bench(reduced_motion=motion)
        duration = bench.root.locator(".track .mass").first.evaluate("(bar) => getComputedStyle(bar).transitionDuration")
        assert (duration != "0s") == moves


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_can_be_read_in_both_themes(visit_bench, theme):
    bench = visit_bench(f"?__theme={theme}")
    lowest = bench.page.evaluate(
        """() => {
          const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
          const rgba = (colour) => {
            canvas.clearRect(0, 0, 1, 1);
            canvas.fillStyle = colour;
            canvas.fillRect(0, 0, 1, 1);
            return [...canvas.getImageData(0, 0, 1, 1).data];
          };
          const light = (rgb) => rgb.slice(0, 3).map((x) => x / 255)
            .map((x) => (x <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4))
            .reduce((sum, x, at) => sum + x * [0.2126, 0.7152, 0.0722][at], 0);
          const ground = (node) => {
            for (let up = node; up; up = up.parentElement) {
              const colour = rgba(getComputedStyle(up).backgroundColor);
              if (colour[3] > 250) return colour;
            }
            return [255, 255, 255];
          };
          const ratios = [...document.querySelectorAll('.cactus-bench *')]
            .filter((node) => [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim()))
            .filter((node) => node.checkVisibility() && !node.closest('svg, :disabled, .chip:has(:disabled)'))
            .map((node) => {
              const [one, other] = [light(rgba(getComputedStyle(node).color)), light(ground(node))].sort((a, b) => b - a);
              return [(one + 0.05) / (other + 0.05), `${node.tagName} ${node.className} ${node.textContent.slice(0, 30)}`];
            });
          return ratios.sort((a, b) => a[0] - b[0])[0];
        }"""
    )
    assert lowest[0] >= 4.5, lowest
