"`trainkit studio`: its command, who may see it, and the application in a real browser."

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch
from urllib.parse import urlsplit

import pytest
from support.contrast import faint_texts
from support.processes import ROOT, call

from trainkit.recipes.control import read_state
from trainkit.train.runs import read_run
from trainkit.widgets import studio

PATIENCE = 1_800_000  # ms. A wait ends with what it waits for; only a hang takes so long


def test_the_command_hands_its_options_on(tmp_path):
    "Folder, port and browser reach the server; a wrong port is refused."
    calls = []
    with patch.object(studio, "serve_studio", lambda *options: calls.append(options)):
        assert call("studio", cwd=tmp_path).returncode == 0
        words = ("studio", "somewhere", "--port", 9000, "--no-browser")
        assert call(*words, cwd=tmp_path).returncode == 0
        assert call("studio", "--port", 99999, cwd=tmp_path).returncode == 2
    assert calls == [(Path("."), 8866, True), (Path("somewhere"), 9000, False)]
    assert "Type: trainkit studio" in call("webui", cwd=tmp_path).stderr


def test_without_voila_one_sentence_says_what_to_install(tmp_path):
    with patch.dict(sys.modules, {"voila": None, "voila.app": None}):
        end = call("studio", tmp_path, "--no-browser", cwd=tmp_path)
    assert end.returncode == 1 and end.stdout == ""
    line = end.stderr.splitlines()[0]
    assert line == "Error: trainkit studio needs Voilà: pip install 'trainkit-llm[studio]'"
    end = call("studio", tmp_path / "missing", cwd=tmp_path)
    assert end.returncode == 1 and "missing is not a folder" in end.stderr


def test_the_page_takes_nothing_from_another_server(tmp_path):
    "The notebook and its page are files of the package, and name no other server."
    notebook = studio.write_page(tmp_path)
    assert [c["cell_type"] for c in json.loads(notebook.read_text())["cells"]] == ["code"]
    texts = [p.read_text() for p in tmp_path.rglob("*") if p.is_file()]
    assert len(texts) == 3 and not any("http" in text for text in texts)


def test_the_lesson_of_the_panel_begins_with_a_live_panel():
    "The first code that a reader sees is a panel."
    cells = json.loads((ROOT / "nbs/12_widgets/01_panel.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    first = next(text for text in code if not text.startswith("#|"))
    assert "TrainerPanel(" in first and first.splitlines()[-1].endswith(".show()")


def test_questions_of_a_file_with_columns_of_its_own(tmp_path, monkeypatch):
    "The tab Label asks where the questions are, and the tab Train lists the labels."
    from trainkit.config import load_config
    from trainkit.recipes.config import RunConfig
    from trainkit.widgets.settings import find_data

    pytest.importorskip("ipywidgets")
    monkeypatch.chdir(tmp_path)
    Path("fragen.csv").write_text("Frage,Antwort\nWas ist 1 und 1?,Zwei.\n")
    Path("known.csv").write_text("prompt,completion\nWas ist 1 und 1?,Zwei.\n")
    Path("labels").mkdir()
    for name in ("mine.jsonl", "mine.journal.jsonl"):
        Path("labels", name).write_text(json.dumps(dict(prompt="a", chosen="b", rejected="c")))
    page, samples = studio.LabelPage("columns"), []
    monkeypatch.setattr(page, "_sample", lambda *words: samples.append(words))
    page.model.options = [("a model", "model")]
    page.data.value = "known.csv"
    assert page.column.layout.display == "none"
    page.data.value = "fragen.csv"
    assert page.column.layout.display is None
    page.begin_button.click()
    assert "Choose the column" in page.page.alert.value and not samples
    page.column.value = "Frage"
    page.begin_button.click()
    page.page.wait(60)
    [(_, _, path, _, columns, length)] = samples
    assert length == 80
    assert studio.read_questions(path, 1, columns) == ["Was ist 1 und 1?"]
    page.close()
    page = studio.LabelPage("columns", lambda path: dict(prompt="Frage") if "fr" in path else {})
    page.data.value = "fragen.csv"
    assert page.column.value == "Frage", "that was said in the panel"
    page.close()
    dpo = load_config(RunConfig, dict(method="dpo", init_from="any"))
    offered = [value for _, value in find_data(dpo)]
    assert str(Path("labels/mine.jsonl")) in offered
    assert not any("journal" in value for value in offered)


@contextmanager
def running_studio(folder, log, **more):
    "The process of `trainkit studio`, with more in its environment, and the address it prints."
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JUPYTER_CONFIG_DIR": str(log.parent / "none")}
    env.update(more)
    env.pop("IN_TEST", None)
    words = ["studio", str(folder), "--port", str(port), "--no-browser"]
    with open(log, "w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "trainkit", *words],
            env=env,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    end = time.monotonic() + PATIENCE / 1000
    try:
        while not (found := re.search(r"http://\S+", log.read_text())):
            assert time.monotonic() < end and process.poll() is None, log.read_text()[-3000:]
            time.sleep(0.2)
        yield process, found[0]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(PATIENCE / 1000)


def kernels(process):
    "The kernels that a server has started."
    psutil = pytest.importorskip("psutil")
    try:
        children = psutil.Process(process.pid).children()
    except psutil.NoSuchProcess:
        return []

    def command(child):
        try:
            return " ".join(child.cmdline())
        except psutil.Error:  # It has ended in between
            return ""

    return [c for c in children if "ipykernel_launcher" in command(c)]


def status_of(address):
    "The status of an answer, and where it came from."
    try:
        answer = urllib.request.urlopen(address, timeout=60)
        return answer.status, answer.url
    except urllib.error.HTTPError as error:
        return error.code, address


def answer_to(address, path, method="GET", **headers):
    "The status of an answer to a request with these headers, whatever a browser would send."
    where = urlsplit(address)
    line = f"{method} {path} HTTP/1.1\r\n"
    headers = {"Host": where.netloc, "Connection": "close", **headers}
    text = line + "".join(f"{k.replace('_', '-')}: {v}\r\n" for k, v in headers.items()) + "\r\n"
    with socket.create_connection((where.hostname, where.port), timeout=120) as connection:
        connection.sendall(text.encode())
        return int(connection.makefile("rb").readline().split()[1])


def test_whose_requests_are_answered():
    "The names of this machine, and pages of the server itself."
    from trainkit.widgets.studio import _asked_here

    for host in ("127.0.0.1:8866", "localhost:8866", "localhost", "[::1]:8866"):
        assert _asked_here(host) and _asked_here(host, f"http://{host}"), host
        for origin in ("null", "http://evil.example", f"http://{host}.evil.example", ""):
            assert not _asked_here(host, origin) and not _asked_here(host, f"http://{host}", origin)
    wrong = ("evil.example:8866", "127.0.0.1.evil.example:8866", "127.0.0.1@evil.example", "[::1")
    for host in (*wrong, "", "0.0.0.0:8866", "evil.example#127.0.0.1"):
        assert not _asked_here(host) and not _asked_here(host, f"http://{host}"), host
    assert not _asked_here(
        "127.0.0.1:8866", "http://127.0.0.1:80"
    )  # Another server of this machine


@pytest.mark.slow
def test_a_forged_host_or_origin_is_refused(tmp_path):
    "Even with the right token, and before a kernel starts; a page of the server may do all."
    pytest.importorskip("voila")
    (tmp_path / "work").mkdir()
    with running_studio(tmp_path / "work", tmp_path / "log") as (process, address):
        token = address.partition("?")[2]
        evil = f"evil.example:{urlsplit(address).port}"
        for path in ("/", "/api/kernels/0", "/voila/files/a", "/login"):
            for forged in (dict(Host=evil), dict(Origin=f"http://{evil}"), dict(Origin="null")):
                assert answer_to(address, f"{path}?{token}", **forged) == 403, (path, forged)
        assert not kernels(process)
        page = urllib.request.urlopen(address, timeout=PATIENCE / 1000)
        cookie = "; ".join(c.partition(";")[0] for c in page.headers.get_all("Set-Cookie"))
        kernel = re.search(rb"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", page.read())[0].decode()
        socket_of = dict(Upgrade="websocket", Connection="Upgrade", Sec_WebSocket_Version=13)
        socket_of["Sec_WebSocket_Key"] = "dGhlIHNhbXBsZSBub25jZQ=="
        own, channels = f"http://{urlsplit(address).netloc}", f"/api/kernels/{kernel}/channels"
        for words, secret in ((f"?{token}", {}), ("", dict(Cookie=cookie))):
            asked = {**socket_of, **secret}
            assert answer_to(address, channels + words, **asked, Origin=own) == 101
            for origin in (f"http://{evil}", "http://evil.example", "null"):
                assert answer_to(address, channels + words, **asked, Origin=origin) == 403
            assert answer_to(address, channels + words, **{**asked, "Host": evil}) == 403
            end = f"/voila/api/shutdown/{kernel}{words}"
            assert answer_to(address, end, "POST", **secret, Origin=f"http://{evil}") == 403
        assert len(kernels(process)) == 1


LATE = """
import time
from ipykernel.iostream import IOPubThread
send = IOPubThread._really_send
def late(self, message, *args, **options):
    if any(b"display_data" in part for part in message):
        time.sleep(6)
    return send(self, message, *args, **options)
IOPubThread._really_send = late
"""


@pytest.mark.slow
def test_the_page_waits_for_a_kernel_that_is_late(tmp_path):
    "On a busy machine an output may come long after its cell has ended; the page was empty then."
    pytest.importorskip("voila")
    (tmp_path / "work").mkdir()
    startup = tmp_path / "ipython" / "profile_default" / "startup"
    startup.mkdir(parents=True)
    (startup / "late.py").write_text(LATE)
    own = dict(IPYTHONDIR=str(tmp_path / "ipython"))
    with running_studio(tmp_path / "work", tmp_path / "log", **own) as (_, address):
        page = urllib.request.urlopen(address, timeout=PATIENCE / 1000).read().decode()
    assert "application/vnd.jupyter.widget-view+json" in page, page[-3000:]


def tab(page, name):
    page.locator(f".lm-TabBar-tabLabel:text-is('{name}')").first.click()


def scroll(page, place=None):
    "Where the page stands, after it is scrolled there if asked."
    return page.evaluate(
        """place => {
            let e = document.querySelector(".trainkit-studio");
            while (e.parentElement && !(e.scrollHeight > e.clientHeight &&
                getComputedStyle(e).overflowY != "visible")) e = e.parentElement;
            if (place != null) e.scrollTop = place;
            return e.scrollTop }""",
        place,
    )


def press(page, word):
    page.locator(f"button:text-is('{word}'):visible").first.click()


def fill(page, label, value):
    field = page.get_by_label(label).first
    field.fill(value)
    field.press("Tab")


def shoot(page, name):
    "At both widths nothing sticks out, and all can be read; a picture is saved if asked."
    for width in (1280, 420):
        page.set_viewport_size(dict(width=width, height=1100))
        page.wait_for_timeout(500)
        if shots := os.environ.get("TRAINKIT_SHOTS"):
            page.screenshot(path=f"{shots}/studio-{name}-{width}.png")
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth + 1"), name
        assert not (faint := faint_texts(page)), f"{name} at {width}: {faint}"
    page.set_viewport_size(dict(width=1280, height=1100))


def wait_for_step(page, least):
    "Wait until the headline names this step or a later one."
    page.wait_for_function(
        'least => [...document.querySelectorAll("div")].some(d => Number(d.innerText?.match('
        '/^(running|stopped|paused) · step ([0-9,]+)/)?.[2].replace(",", "")) >= least)',
        arg=least,
    )


@pytest.mark.browser
@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_from_a_file_to_a_chat_in_the_application(browser, tmp_path, scheme):
    "The same clicks as in a notebook, with either stack."
    from test_browser import tune_and_chat, write_table
    from test_studio import small_start

    small_start(tmp_path / "work" / "runs")
    write_table(tmp_path / "work")
    with running_studio(tmp_path / "work", tmp_path / "log") as (_, address):
        look = dict(viewport=dict(width=1280, height=2400), color_scheme=scheme)
        page = browser.new_context(**look).new_page()
        page.set_default_timeout(PATIENCE)
        errors = []
        page.on("pageerror", lambda e: errors.append(str(e)))
        page.goto(address)
        tune_and_chat(page)
        page.context.close()
    assert not errors, errors


@pytest.mark.browser
@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_application_in_a_browser(browser, tmp_path, scheme):
    """Train, close the page, find the run again, kill it, continue it, and end by Ctrl-C.

    Without the token nothing is shown and no kernel starts. Everything comes from this machine.
    """
    work = tmp_path / "work"
    work.mkdir()
    (work / "story.txt").write_text("The sky is blue. The grass is green. " * 800)
    with running_studio(work, tmp_path / "log") as (process, address):
        plain = address.partition("?")[0]
        for wrong in (plain, f"{plain}?token=wrong"):
            status, where = status_of(wrong)
            assert status in (401, 403) or "/login" in where, (status, where)
        assert status_of(f"{plain}api/kernels/0-0-0-0-0")[0] == 403
        assert status_of(f"{plain}voila/files/story.txt")[0] in (403, 404)
        assert not kernels(process)

        look = dict(viewport=dict(width=1280, height=1100), color_scheme=scheme)
        page = browser.new_context(**look).new_page()
        page.set_default_timeout(PATIENCE)
        errors, addresses = [], []
        page.on("pageerror", lambda e: errors.append(str(e)))
        page.on("request", lambda r: addresses.append(r.url))
        page.on("websocket", lambda s: addresses.append(s.url))
        page.goto(address)
        page.locator("button:text-is('Start')").wait_for()
        data = page.get_by_label("data.path")
        data.select_option(data.locator("option", has_text="story.txt").inner_text())
        for label, value in (
            ("Name of the run", "mine"),
            ("Width of the model", "36"),
            ("Layers of the model", "1"),
            ("Steps at most", "100000"),
            ("Longest row, in tokens", "32"),
        ):
            fill(page, label, value)
        press(page, "More settings")
        page.get_by_label("Group").select_option("tokenizer")
        fill(page, "tokenizer.vocab_size", "270")
        press(page, "More settings")
        shoot(page, f"train-{scheme}")
        press(page, "Start")
        wait_for_step(page, 20)
        page.close(run_before_unload=True)  # Its kernel ends, the run does not
        end = time.monotonic() + PATIENCE / 1000
        while kernels(process):
            assert time.monotonic() < end, "the kernel ends with its page"
            time.sleep(0.2)

        page = page.context.new_page()
        page.set_default_timeout(PATIENCE)
        page.on("pageerror", lambda e: errors.append(str(e)))
        page.on("request", lambda r: addresses.append(r.url))
        page.goto(plain)  # The token is in a cookie now
        page.locator("text=/^running · step/").first.wait_for()
        press(page, "Pause")
        page.locator("text=/^paused · step/").first.wait_for()
        press(page, "Resume")
        page.locator("text=/^running · step/").first.wait_for()
        shoot(page, f"running-{scheme}")
        page.reload()  # What was saved by Pause is enough to continue from
        page.locator("text=/^running · step/").first.wait_for()
        folder = work / "runs" / "mine"
        while not [*folder.glob("checkpoints/checkpoint-*/*")]:
            page.wait_for_timeout(200)
        os.kill(read_state(folder)["pid"], signal.SIGKILL)
        for kernel in kernels(process):
            kernel.kill()
        page.locator(".jupyter-widgets-disconnected").first.wait_for(state="attached")
        page.reload()
        page.locator("text=/mine stopped at step [\\d,]+ of 100,000/").first.wait_for()
        press(page, "Look at it")
        page.locator("text=/^stopped · step/").first.wait_for()
        page.wait_for_function("[...document.querySelectorAll('input')].some(e => e.value == 36)")
        shoot(page, f"looked-{scheme}")
        press(page, "Continue")
        page.locator("text=/^running · step/").first.wait_for()
        assert scroll(page, 300) > 0
        page.wait_for_timeout(300)
        there = scroll(page)
        tab(page, "Runs")
        page.locator("text=1 run").first.wait_for()
        assert scroll(page) < there
        tab(page, "Train")
        page.wait_for_timeout(500)
        assert scroll(page) == there, "a tab keeps its place on the page"
        tab(page, "Runs")
        shoot(page, f"runs-{scheme}")
        tab(page, "Label")
        press(page, "Begin")
        page.locator("text=Choose a model and questions first").or_(
            page.locator("text=/answers? .* questions|Opening/")
        ).first.wait_for()
        shoot(page, f"label-{scheme}")
        tab(page, "Chat")
        press(page, "Open")
        page.get_by_role("alert").filter(has_text="Choose a model first").first.wait_for()
        shoot(page, f"chat-{scheme}")

        before = len((tmp_path / "log").read_text())  # With what the killed kernel has left
        process.send_signal(signal.SIGINT)
        process.wait(PATIENCE / 1000)
        text = (tmp_path / "log").read_text()
        assert "ping timeout" not in text, "no connection is closed since a page is slow"
        text = text[before:]
        assert "mine finishes its step and saves its model" in text, text
        assert process.returncode in (0, 130) and "Traceback" not in text, text
        run = read_run(work / "runs" / "mine")
        assert run.status == "stopped", run.status
        assert (work / "runs" / "mine" / "model" / "model.safetensors").exists()
        page.context.close()
    own = re.compile(r"(http|ws)://127\.0\.0\.1:|data:|blob:")
    assert not [a for a in addresses if not own.match(a)] and not errors, errors
