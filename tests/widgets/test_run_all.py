"""Every lesson in JupyterLab, as a learner runs it: Run All Cells, in a copy of the repository.

Nothing is red, every widget is shown, no cell takes long, and git finds no change afterwards.
"""

import os
import re
import shutil
import subprocess
import sys
from datetime import datetime

import pytest
from support.processes import ROOT
from test_browser import jupyter_lab
from test_lessons import LESSONS, name, source

pytestmark = [pytest.mark.browser, pytest.mark.slow]
LIMIT = 20  # Seconds that a cell may take on a quiet machine, unless TRAINKIT_SLOW is set
HANG = 900  # Seconds after which a notebook is not waited for
VIEW = "application/vnd.jupyter.widget-view+json"
TOKEN = "of-this-test"
SETTINGS = {
    "docmanager-extension/plugin": dict(autosave=False),
    # All cells are on the page, so that their widgets are
    "notebook-extension/tracker": dict(recordTiming=True, windowingMode="none"),
}

OPEN_AND_RUN = """async ([path, hang]) => {
    const app = window.jupyterapp
    await app.restored
    const panel = await app.commands.execute('docmanager:open', {path})
    await panel.context.ready
    await panel.sessionContext.ready
    await panel.sessionContext.session.kernel.info
    const end = new Promise(late => setTimeout(late, 1000 * hang))
    await Promise.race([app.commands.execute('notebook:run-all-cells'), end])
}"""
AT_REST = """() => {
    const panel = window.jupyterapp.shell.currentWidget
    return panel.sessionContext.session.kernel.status === 'idle'
        && ![...panel.node.querySelectorAll('.jp-OutputArea-output')]
            .some(e => e.innerText.includes('Loading widget'))
}"""
CELLS = "window.jupyterapp.shell.currentWidget.content.model.toJSON().cells"
OUTPUTS = """() => [...window.jupyterapp.shell.currentWidget.node
    .querySelectorAll('.jp-OutputArea-output')]
    .map(e => [e.querySelector('.jupyter-widgets') !== null, e.innerText])"""
CLOSE = """async () => {
    const panel = window.jupyterapp.shell.currentWidget
    await panel.sessionContext.shutdown()
    panel.dispose()
}"""


def git(folder, *words):
    return subprocess.run(
        ["git", *words], cwd=folder, check=True, capture_output=True, text=True
    ).stdout


@pytest.fixture(scope="session")
def classroom(tmp_path_factory):
    "JupyterLab on a copy of the repository with a git of its own; its address, and the copy."
    folder = tmp_path_factory.mktemp("classroom")
    copy = folder / "course"
    listed = git(ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    for path in filter(None, listed.split("\0")):
        if (ROOT / path).is_file():
            (copy / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, copy / path)
    # An installation has byte code, so that only what a lesson writes is new
    subprocess.run([sys.executable, "-m", "compileall", "-q", "trainkit"], cwd=copy, check=True)
    git(copy, "init", "--quiet")
    git(copy, "add", "--all")
    git(copy, "add", "--force", "trainkit")
    who = ("-c", "user.name=learner", "-c", "user.email=learner@localhost")
    git(copy, *who, "commit", "--quiet", "--message", "As it came")
    env = dict(PYTHONPATH=str(copy), NUMBA_CACHE_DIR=str(folder / "compiled"))
    options = dict(settings=SETTINGS, token=TOKEN, TRAINKIT_SLOW="", **env)
    with jupyter_lab(folder, copy, "--expose-app-in-browser", **options) as address:
        yield address, copy


def run_all(page, lesson):
    "The code cells of a lesson after Run All Cells; (is a widget, text) of each output shown."
    from playwright.sync_api import TimeoutError as Late

    page.evaluate(OPEN_AND_RUN, [f"nbs/{lesson}.ipynb", HANG])
    try:
        page.wait_for_function(AT_REST, timeout=60_000, polling=200)
    except Late:
        pass  # The kernel or a widget hangs: its cell is named below
    cells = [cell for cell in page.evaluate(CELLS) if cell["cell_type"] == "code"]
    shown = page.evaluate(OUTPUTS)
    page.evaluate(CLOSE)
    return cells, shown


def seconds(cell):
    "How long the kernel was busy with a cell; 0 where it was not run to its end."
    times = cell["metadata"].get("execution", {})
    try:
        begin, end = (datetime.fromisoformat(times[f"iopub.status.{s}"]) for s in ("busy", "idle"))
    except KeyError:
        return 0.0
    return (end - begin).total_seconds()


def problems(cells, shown):
    "What a learner would stumble over, one sentence each."
    busy = max(1, os.getloadavg()[0] / (os.cpu_count() or 1))  # How many want each core
    for number, cell in enumerate(cells):
        first = source(cell).strip().partition("\n")[0]
        if first and cell["execution_count"] is None:
            yield f"cell {number} was not run: {first}"
        for output in cell["outputs"]:
            text = "".join(output.get("text", ""))
            if output["output_type"] == "error":
                yield f"cell {number} failed: {output['ename']}: {output['evalue']}"
            elif output.get("name") == "stderr":
                yield f"cell {number} writes in red: {text[:500]}"
        if seconds(cell) > LIMIT * busy:
            yield f"cell {number} took {seconds(cell):.0f} s: {first}"
    lost = [text for _, text in shown if re.search("Loading widget|Error displaying widget", text)]
    yield from (f"a widget is missing: {text[:200]}" for text in lost)
    made = sum(VIEW in output.get("data", {}) for cell in cells for output in cell["outputs"])
    if made != (there := sum(widget for widget, _ in shown)):
        yield f"{there} of {made} widgets are shown"


def left_behind(copy):
    "What git calls changed, new or ignored; JupyterLab's own copies of notebooks do not count."
    status = git(copy, "status", "--porcelain", "--ignored", "--untracked-files=all")
    return [line for line in status.splitlines() if ".ipynb_checkpoints" not in line]


# Slices of the slow tests share the first lesson of each chapter; the others are for test-slow,
# and `make test` runs all of them without a browser
FIRST = {name(path).partition("/")[0]: path for path in reversed(LESSONS)}.values()


@pytest.mark.parametrize(
    "lesson",
    [
        pytest.param(name(path), marks=[] if path in FIRST else [pytest.mark.long])
        for path in LESSONS
    ],
)
def test_run_all(browser, classroom, lesson):
    address, copy = classroom
    page, errors = browser.new_page(), []
    page.on("pageerror", lambda e: errors.append(str(e)))
    # Without the notebooks of the lessons before, which JupyterLab would open again
    page.goto(f"{address}/lab?reset&token={TOKEN}")
    page.wait_for_function("window.jupyterapp")
    found = [*problems(*run_all(page, lesson))]
    page.close()
    assert not found and not errors, "\n".join([*found, *errors])
    assert not left_behind(copy)
