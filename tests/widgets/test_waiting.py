"Waiting in a cell: clicks arrive, an interrupt keeps the work, and a kernel that hears nothing."

import queue
import signal
import threading
import time

import nbformat
import pytest
from support.processes import await_here
from test_studio import count, until

from trainkit.config import load_config
from trainkit.recipes.config import RunConfig
from trainkit.widgets import waiting
from trainkit.widgets.panel import TrainerPanel

pytest.importorskip("ipywidgets")

PANEL = """
import sys
sys.path[:0] = {path!r}
from test_studio import count
from trainkit.config import load_config
from trainkit.recipes.config import RunConfig
from trainkit.widgets.panel import TrainerPanel
config = load_config(RunConfig, dict(train=dict(max_steps={steps}, seed=0)))
panel = TrainerPanel(config, job=count, key='kernel', presets={{}})
"""
AWAIT = """
import threading, time
def begin():
    while panel.session.snapshot().step < 2:
        time.sleep(0.01)
    time.sleep(1)  # The panel is drawn, and the cell waits
    print('BEGUN', flush=True)
threading.Thread(target=begin, daemon=True).start()
result = await panel.arun()
print('ENDED', result.model, result.stop_reason)
"""


def panel_cell(steps):
    import sys

    return PANEL.format(path=sys.path, steps=steps)


@pytest.fixture(scope="module")
def kernel():
    "A kernel of its own, and what talks to it."
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel()
    yield manager, client
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def begun(client, seconds=120):
    "Wait for the steps of the run in a cell."
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if "BEGUN" in client.get_iopub_msg(timeout=1)["content"].get("text", ""):
                return
        except queue.Empty:
            continue
    raise TimeoutError("the run did not begin")


def printed(client, request, seconds=120):
    "What a cell has printed until it is over, or its error."
    text, end = "", time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            message = client.get_iopub_msg(timeout=1)
        except queue.Empty:
            continue
        kind, content = message["msg_type"], message["content"]
        if message["parent_header"].get("msg_id") != request:
            continue
        text += content["text"] if kind == "stream" else ""
        text += content["ename"] + content["evalue"] if kind == "error" else ""
        if kind == "status" and content["execution_state"] == "idle":
            return text
    raise AssertionError(f"the cell does not end: {text}")


def test_run_all_ends_by_itself(tmp_path):
    "The panel's cell and `await panel.arun()`, as Run All, nbclient and jupyter execute run them."
    from nbclient import NotebookClient

    cells = [panel_cell(30), "panel.show()", AWAIT]
    notebook = nbformat.v4.new_notebook(cells=[*map(nbformat.v4.new_code_cell, cells)])
    resources = dict(metadata=dict(path=str(tmp_path)))
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources).execute()
    texts = [o.get("text", "") for o in notebook.cells[-1].outputs]  # One line may come in two
    assert "ENDED 30 finished\n" in "".join(texts), notebook.cells[-1].outputs


@pytest.mark.parametrize("waits", ["await panel.arun()", "panel.result()"])
def test_an_interrupt_keeps_the_work(kernel, waits):
    manager, client = kernel
    printed(client, client.execute(panel_cell(100_000)))
    request = client.execute(AWAIT.replace("await panel.arun()", waits))
    begun(client)
    manager.interrupt_kernel()
    text = printed(client, request)
    assert "stopped" in text and "ENDED 100000" not in text and "Error" not in text


@pytest.mark.parametrize("place", ["the form is read", "the session starts", "the thread starts"])
def test_an_interrupt_while_a_run_is_started_keeps_the_work(monkeypatch, place):
    "Wherever it comes, the run is stopped, and neither lost nor left behind unseen."
    config = load_config(RunConfig, dict(train=dict(max_steps=100_000, seed=0)))
    panel = TrainerPanel(config, job=count, key="interrupted", presets={})
    owner, name = {
        "the form is read": (panel.form, "read"),
        "the session starts": (panel.session.run_state, "begin_stages"),
        "the thread starts": (threading.Thread, "start"),
    }[place]
    do, pressed = getattr(owner, name), []

    def interrupted(*arguments):
        if not pressed and threading.current_thread() is threading.main_thread():
            pressed.append(signal.raise_signal(signal.SIGINT))
        return do(*arguments)

    monkeypatch.setattr(owner, name, interrupted)
    session = panel.session if place == "the session starts" else panel
    assert session.result().stop_reason == "stopped"
    assert pressed and threading.current_thread() is threading.main_thread()
    panel.close()


def test_a_click_is_heard_while_a_cell_awaits(kernel):
    "Also with the next cell in the queue, as Run All puts it there."
    _, client = kernel
    printed(client, client.execute(panel_cell(100_000)))
    button = printed(client, client.execute("print(panel.stop_button.model_id)")).strip()
    request = client.execute(AWAIT)
    after = client.execute("print('AFTER', result.stop_reason)")
    begun(client)
    click = dict(comm_id=button, data=dict(method="custom", content=dict(event="click")))
    client.shell_channel.send(client.session.msg("comm_msg", click))
    assert "stopped" in printed(client, request)
    assert "AFTER stopped" in printed(client, after)


def test_the_panel_says_that_a_cell_blocks(monkeypatch):
    monkeypatch.setattr(waiting, "_kernel_version", lambda: (7, 4))
    settings = dict(train=dict(max_steps=300, seed=0))
    panel = TrainerPanel(load_config(RunConfig, settings), job=count, key="blocked", presets={})
    seen = []
    panel.obstacle.observe(lambda change: seen.append(change["new"]), names="value")
    panel.result()
    assert any("blocks the kernel" in text and "await panel.arun()" in text for text in seen)
    assert panel.obstacle.value == "" and not panel.blocked
    panel.close()


def test_arun_waits_for_start_where_something_is_missing():
    "Instead of a run that fails at once."
    import asyncio

    config = load_config(RunConfig, dict(method="lora", train=dict(max_steps=20, seed=0)))
    panel = TrainerPanel(config, job=count, key="missing", presets={})
    panel.handle = type("Page", (), dict(update=lambda self, panel: None))()

    async def main():
        task = asyncio.ensure_future(panel.arun())
        await asyncio.sleep(0.5)
        assert panel.session.state == "idle" and not task.done()
        panel.form.field("init_from").widget.value = "somebody/model"
        panel.start_button.click()
        return await task

    assert await_here(main()).model == 20
    until(lambda: panel.finished)
    panel.close()


class OldKernel:
    "What lets clicks into the cell of an old kernel."

    def __init__(self, other_loop=None):
        self._aproc = other_loop
        self.polls = []

    def __enter__(self):
        return self.polls.append

    def __exit__(self, *error):
        pass


def test_a_loop_in_an_old_kernel_lets_clicks_in_once(monkeypatch):
    "Inside another waiting loop it leaves them to that one."
    for kernel, polls in ((OldKernel(), [10, 10]), (OldKernel("another"), []), (None, None)):
        monkeypatch.setattr(waiting, "_events", lambda kernel=kernel: kernel)
        with waiting.polling() as poll:
            poll()
            poll()
        assert getattr(kernel, "polls", None) == polls
