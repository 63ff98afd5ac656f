"Widgets as a learner meets them: two in a cell, math-like words, typos, lost connections."

import re
from types import SimpleNamespace

import pytest
from dataclasses import replace
from test_studio import count, instances

from trainkit.config import load_config
from trainkit.files import show_bytes
from trainkit.recipes.config import RunConfig
from trainkit.widgets.panel import TrainerPanel

pytest.importorskip("ipywidgets")


@pytest.fixture
def panel():
    widget = TrainerPanel(
        load_config(RunConfig, dict(train=dict(max_steps=2000, seed=0))), job=count, key="learner"
    )
    yield widget
    widget.close()


@pytest.fixture
def cell(monkeypatch):
    "Which cell runs, and how often it has, as a notebook would say."
    from trainkit.widgets import form

    now = SimpleNamespace(id="", run=0)
    monkeypatch.setattr(form, "_this_cell", lambda: (now.id, now.run))
    return now


def test_a_cell_may_show_several(cell, tmp_path):
    "Two panels and two browsers of a cell are shown together; those of an earlier run are gone."
    from trainkit.widgets.form import Page
    from trainkit.widgets.run_browser import RunBrowser

    config = load_config(RunConfig, dict(train=dict(max_steps=100_000, seed=0)))

    def make():
        return (TrainerPanel(config, job=count), RunBrowser(tmp_path))

    cell.id, cell.run, before, others, panels = (
        "a",
        1,
        len(instances()),
        set(Page.pages),
        set(TrainerPanel.panels),
    )  # what other tests have left open
    first = [*make(), *make()]
    assert not any(thing.closed for thing in (first[0], first[2], first[1].page, first[3].page))
    first[0].start(), first[2].start()
    cell.id, cell.run = "b", 2
    other = make()
    cell.id, cell.run = "a", 3
    config = replace(config, name="other")  # The same one would go on
    again = make()
    assert all(thing.closed for thing in (first[0], first[2], first[1].page, first[3].page))
    assert first[0].session.wait(10).state == first[2].session.wait(10).state == "stopped"
    assert (
        not other[0].closed
        and not other[1].page.closed
        and len(set(TrainerPanel.panels) - panels) == len(set(Page.pages) - others) == 2
    )
    for thing in (*other, *again):
        thing.close()
    assert set(TrainerPanel.panels) <= panels and set(Page.pages) <= others
    assert len(instances()) == before


def test_what_failed_is_forgotten_when_something_works(panel, tmp_path):
    (tmp_path / "mine.jsonl").write_text(
        "\n".join(f'{{"text": "the {i}th costs $5 and $10"}}' for i in range(200))
    )
    panel.form.field("data.path").widget.value = str(tmp_path / "nowhere.txt")
    panel.data_button.click()
    panel.reader.join()
    assert "nowhere.txt" in panel.alert.value
    panel.form.field("data.path").widget.value = str(tmp_path / "mine.jsonl")
    panel.data_button.click()
    panel.reader.join()
    assert not panel.alert.value and "Row 1: " in panel.data.value and "$" in panel.data.value


def test_a_preset_can_be_chosen_again(panel):
    steps = panel.form.field("train.max_steps").widget
    for _ in range(2):
        steps.value = "7"
        panel.form.preset.value = "as opened"
        assert (steps.value, panel.form.preset.value) == ("2000", "")


def test_a_line_of_somebody_else_ends_no_look(tmp_path):
    "What a log holds that no run has written is passed over."
    from trainkit.config import save_config
    from trainkit.widgets.session import TrainSession

    save_config(load_config(RunConfig, {}), tmp_path / "config.yaml")
    lines = [
        '{"event": "start", "total_steps": 9}',
        '{"event": "log", "step": "two", "loss": 3}',
        '{"event": "sample"}',
        '{"event": "health"}',
        '{"event": "log", "step": 3, "loss": 2.5}',
        '{"event": "end", "step": 3, "reason": "finished"}',
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    now = TrainSession.attach(tmp_path).snapshot()
    assert (now.state, now.step, now.last["loss"]) == ("done", 3, 2.5)


def test_a_filter_is_read_as_it_is_typed(tmp_path):
    from trainkit.train.runs import list_runs
    from trainkit.widgets.run_browser import find_runs
    from trainkit.train.runs import RunFolder

    for name, rate, end in (("a", 0.01, True), ("b", 0.001, True), ("c", 0.01, False)):
        with RunFolder(tmp_path / name, f"optim:\n  learning_rate: {rate}\n") as folder:
            folder.record("log", dict(step=1, loss=2.0))
            if end:
                folder.record("end", dict(step=1, reason="finished"))

    def names(words):
        return sorted(run.name for run in find_runs(list_runs(tmp_path), words))

    assert (names("finished"), names("unfinished"), names("finish")) == (
        ["a", "b"],
        ["c"],
        ["a", "b"],
    )
    assert names("learning_rate > 5e-3 finished") == names("learning_rate>5e-3  finished") == ["a"]


def test_a_run_that_prepares_is_listed(tmp_path):
    "It has a process, and no line in its log yet."
    import os

    from trainkit.recipes.control import write_state
    from trainkit.train.runs import RunFolder
    from trainkit.widgets.run_browser import RunBrowser, begun_runs, status_of

    with RunFolder(tmp_path / "old", "x: 1\n") as folder:
        folder.record("log", dict(step=1, loss=2.0))
    for state, words in (("preparing", "preparing"), ("gone", None)):
        write_state(tmp_path / "new", state, os.getpid() if words else 2**30)
        listed = {run.name: status_of(run) for run in begun_runs(tmp_path)}
        assert listed == {"old": "unfinished"} | ({"new": words} if words else {})
    write_state(tmp_path / "new", "preparing", os.getpid())
    browser = RunBrowser(tmp_path, key="prepares")
    assert browser.list.options[0] == ("new · preparing", "new")
    assert "new" in browser.picture.value and not browser.page.alert.value
    write_state(tmp_path / "old", "paused", os.getpid())
    assert {run.name: status_of(run) for run in begun_runs(tmp_path)}["old"] == "paused"
    browser.close()


def test_pairs_of_another_model_are_said_to_be_that(tmp_path):
    "Existing labels are continued; the page says how they differ, once."
    import torch

    from trainkit.widgets.labeler import PreferenceLabeler
    from trainkit.model.config import ModelConfig
    from trainkit.model.transformer import Transformer
    from trainkit.tokenizer.bpe_tokenizer import BPETokenizer

    tokenizer = BPETokenizer.train(["hello you"], 258, special_tokens=["<|endoftext|>"])

    def make(seed):
        torch.manual_seed(seed)
        return Transformer(
            ModelConfig(
                vocab_size=tokenizer.vocab_size,
                d_model=16,
                n_heads=1,
                n_layers=1,
                d_ff=32,
                max_seq_len=64,
            )
        )

    def note(seed=0, prompts=("a", "b"), **more):
        widget = PreferenceLabeler.sample(
            tmp_path / "x.jsonl",
            make(seed),
            tokenizer,
            prompts,
            key="said",
            **{"max_new_tokens": 4, **more},
        )
        widget.close()
        return widget.note.value

    assert not note() and not note()
    assert "These 2 pairs" in note(1) and "answers of another model;" in note(1)
    assert (
        "with other prompts;" in note(prompts=("a", "c"))
        and "another" not in note(prompts=("a", "c")).split(";")[0]
    )
    assert "other knobs of sampling" in note(
        temperature=2.0
    ) and "another model and other prompts" in note(1, ("c",))


def test_a_double_click_is_one_verdict(tmp_path, monkeypatch):
    from trainkit.widgets import labeler

    now = SimpleNamespace(time=100.0)
    monkeypatch.setattr(labeler.time, "monotonic", lambda: now.time)
    pairs = [dict(prompt=str(i), answers=["a", "b"]) for i in range(6)]
    widget = labeler.PreferenceLabeler(tmp_path / "x.jsonl", pairs, key="double", repeat=0)

    def verdicts():
        return [v["verdict"] for v in widget.labels.verdicts]

    widget.buttons["left"].click(), widget.buttons["left"].click()
    assert verdicts() == ["left"]
    now.time += 0.5
    widget.buttons["right"].click(), widget.buttons["undo"].click(), widget.buttons["tie"].click()
    assert verdicts() == ["left", "tie"], "what was taken back can be said anew at once"
    widget.keys.value = "ab"
    assert verdicts() == ["left", "tie", "left", "right"], "keys are as quick as the fingers"
    widget.close()


def test_a_folder_without_runs_is_named(tmp_path, monkeypatch):
    from trainkit.widgets.run_browser import RunBrowser
    from trainkit.train.runs import RunFolder

    monkeypatch.chdir(tmp_path)
    browser = RunBrowser("mine", key="none")
    assert f"There is no folder {tmp_path / 'mine'}." in browser.picture.value
    (tmp_path / "mine" / "odd" / "metrics.jsonl").mkdir(
        parents=True
    )  # A folder where a log should be: no run, and no end of the list
    browser.again.click()
    assert (
        f"No run is in {tmp_path / 'mine'}." in browser.picture.value
        and not browser.page.alert.value
    )
    with RunFolder(tmp_path / "mine" / "a", "x: 1\n") as folder:
        folder.record("log", dict(step=1, loss=2.0))
    browser.again.click()
    assert [run.name for run in browser.listed] == ["a"] and not browser.page.alert.value
    browser.words.value = "nobody"
    assert f"The filter matches none of the runs in {tmp_path / 'mine'}." in browser.picture.value
    browser.close()


def test_an_absurd_size_is_given_up(monkeypatch):
    "A million rows are not counted to the end; the panel says so and predicts the next size."
    from trainkit.widgets.panel import expect_memory

    seconds = [0.5, 100]
    monkeypatch.setattr(
        "trainkit.widgets.panel.expect_memory",
        lambda config: expect_memory(config, seconds=seconds.pop(0)),
    )
    small = (
        "model.d_model=32 model.n_heads=2 model.n_layers=1 model.d_ff=64 "
        "tokenizer.vocab_size=300 data.max_length=64"
    ).split()
    widget = TrainerPanel(load_config(RunConfig, {}, small), job=count, key="absurd")
    rows = widget.form.field("train.per_device_train_batch_size").widget
    rows.value = "1000000"
    widget.predict()
    assert "is not known: the prediction was stopped after 0.5 s" in widget.memory.value
    rows.value = "2"
    widget.predict()
    assert "A step will take about" in widget.memory.value
    widget.close()


def test_the_frozen_copy_of_dpo_takes_its_part_of_the_memory(monkeypatch):
    "The reference is as large as the parameters, unless it is the model without its adapter."
    from trainkit.recipes import memory_commands
    from trainkit.widgets.panel import expect_memory

    rooms = []
    others = dict(allocator=200, libraries=50)  # These 50 are part of the process by then
    needs = SimpleNamespace(peak=800, parts=dict(parameters=300), beside=others)

    def plan(config, room, host):
        rooms.append(room)
        return SimpleNamespace(fits=False, peak=500)

    monkeypatch.setattr(memory_commands, "predict_needs", lambda config, resident: needs)
    monkeypatch.setattr(memory_commands, "plan_needs", plan)
    forecasts = [
        expect_memory(load_config(RunConfig, dict(method="dpo", use_lora=adapter)), free=1200)
        for adapter in (False, True)
    ]
    assert [(f.needed, f.free, f.fits) for f in forecasts] == [
        (1300, 1200, False),
        (1000, 1200, True),
    ]
    assert rooms == [700] and f"the least is {show_bytes(1000)}" in forecasts[0].text


def test_a_run_that_is_quicker_than_its_prediction(panel, monkeypatch):
    "A prediction not made before Start is shown as unknown, not as pending; a made one stays."
    monkeypatch.setattr(
        "trainkit.widgets.panel.expect_memory",
        lambda config: SimpleNamespace(text=f"{config.train.max_steps} steps", fits=True),
    )
    panel.predict()
    panel.start()
    panel.predict()
    assert "2000 steps" in panel.memory.value
    panel.stop()
    panel.session.wait(10)
    panel.form.field("train.max_steps").widget.value = "1000"
    panel.start()
    panel.predict()
    assert "the memory of a step is not predicted" in panel.memory.value


def test_a_wrong_field_leaves_no_prediction_pending(panel):
    panel.inside = True
    panel.form.field("optim.learning_rate").widget.value = "fast"
    assert "is being worked out" in panel.memory.value
    panel.predict()
    assert "missing or wrong above" in panel.memory.value


def test_what_cannot_be_pressed_during_a_run_is_not_offered(panel, monkeypatch):
    "Neither the trial of three steps nor a sweep; after the end both are, and memory is pending."
    monkeypatch.setattr(panel, "predict_soon", lambda: None)
    monkeypatch.setattr(
        "trainkit.widgets.panel.expect_memory",
        lambda config: SimpleNamespace(text="predicted", fits=True),
    )
    panel.predict()
    assert "Try 3 steps" in panel.time.value and not panel.sweep.start_button.disabled
    panel.form.field("train.max_steps").widget.value = "1000"
    panel.start()
    panel.refresh(force=True)
    panel.predict()
    assert not panel.time.value and panel.sweep.start_button.disabled
    assert "is not predicted" in panel.memory.value
    panel.stop()
    panel.session.wait(10)
    panel.finish()
    assert "is being worked out" in panel.memory.value
    assert "Try 3 steps" in panel.time.value and not panel.sweep.start_button.disabled
    for shown in ("About a minute", ""):  # What was measured stays in sight
        panel.time.value = shown
        panel._offer_trial()
        assert panel.time.value != shown if not shown else panel.time.value == shown


def test_a_forecast_of_earlier_settings_is_not_shown(panel, monkeypatch):
    steps = panel.form.field("train.max_steps").widget

    def slow(config):  # A field changes while it is worked out
        text = f"{config.train.max_steps} steps"
        steps.value = "9"
        return SimpleNamespace(text=text, fits=True)

    monkeypatch.setattr("trainkit.widgets.panel.expect_memory", slow)
    panel.predict()
    assert "2000 steps" not in panel.memory.value
    panel.predict()
    assert "9 steps" in panel.memory.value


def test_a_run_in_a_kernel_saves_by_time(panel):
    "Only while it trains, and not when a checkpoint is new."

    def session(mode="thread", state="running", step=5, saved=None):
        return SimpleNamespace(
            mode=mode,
            config=panel.session.config,
            snapshot=lambda: SimpleNamespace(state=state, step=step),
            run_state=SimpleNamespace(checkpoint=saved, phase="training"),
            save=lambda: asks.append(step),
        )

    asks: list[int] = []
    old = (-1e9, None)
    for one in (session("process"), session(state="paused"), session(step=0)):
        panel._save_by_time(one, old)
    assert panel._save_by_time(session(saved=3), old)[1] == 3 and not asks
    assert panel._save_by_time(session(), old)[0] > 0 and asks == [5]


def test_a_question_that_fails_is_not_lost():
    from trainkit.tokenizer.chat import set_template
    from trainkit.widgets.chat_compare import ChatCompare
    from trainkit.model.config import ModelConfig
    from trainkit.model.transformer import Transformer
    from trainkit.tokenizer.bpe_tokenizer import BPETokenizer

    tokenizer = BPETokenizer.train(["hello you"], 258, special_tokens=["<|endoftext|>"])
    model = Transformer(
        ModelConfig(
            vocab_size=tokenizer.vocab_size,
            d_model=16,
            n_heads=1,
            n_layers=1,
            d_ff=32,
            max_seq_len=128,
        )
    )
    set_template(tokenizer, "chatml", model)
    chat, seen = ChatCompare({"a": (model, tokenizer)}, key="lost", max_new_tokens=4), []
    ask = chat.state.ask

    def slow(question):  # As it stands before the first token
        seen.append((chat.send_button.disabled, chat.stop_button.disabled))
        yield from ask(question)

    chat.state.ask = slow
    for question, remainder in (("long " * 100, "long " * 100), ("short", "")):
        chat.question.value = question
        chat.send_button.click()
        chat.page.wait(20)
        assert chat.question.value == remainder and (
            "say it shorter" in chat.page.alert.value
        ) == bool(remainder)
    assert (
        len(chat.state.turns) == 1 and not chat.send_button.disabled and seen == [(True, False)] * 2
    )
    chat.state.ask = ask
    seeds = [chat.state.turns[-1].seed]
    for _ in range(2):
        chat.again_button.click()
        chat.page.wait(20)
        seeds.append(chat.state.turns[-1].seed)
    assert seeds == [seeds[0] + i for i in range(3)] and len(chat.state.turns) == 1
    chat.question.value = "another"
    chat.send_button.click()
    chat.page.wait(20)
    chat.xray_button.click()
    assert "another" in re.sub("<[^>]*>", "", chat.inside.value)
    for field, wrong, right in (
        (chat.length, 0, 1),
        (chat.length, 10**9, 100_000),
        (chat.seed, -1, 0),
        (chat.seed, 2**31, 2**31 - 1),
        (chat.temperature, -0.1, 0.0),
        (chat.temperature, 11.0, 10.0),
    ):
        field.value = wrong
        assert field.value == right, "a number out of reach becomes the nearest that is possible"
    chat.close()


def test_no_notebook_makes_a_formula_of_a_text(tmp_path):
    "JupyterLab typesets what stands between two dollar signs in HTML, unless its class says no."
    from html.parser import HTMLParser

    from trainkit.display import Picture, grid, svg, table, text, token_boxes
    from trainkit.widgets.session import RunSnapshot
    from trainkit.widgets.panel import log_html, latest_samples_html, static_html
    from trainkit.display import notice

    words = "from $5 to $10"
    ran = RunSnapshot(
        "failed",
        samples=((1, words, words),),
        log=(words,),
        health=(words,),
        error=words,
        curves={"loss": ((1,), (1.0,))},
        last={words: 1.0},
    )

    class Reader(HTMLParser):
        def __init__(self):
            super().__init__()
            self.open, self.read = [], 0

        def handle_startendtag(self, tag, attrs):
            pass

        def handle_starttag(self, tag, attrs):
            self.open.append((tag, dict(attrs).get("class") or ""))

        def handle_endtag(self, tag):
            self.open.pop()

        def handle_data(self, data):
            if "$" not in data:
                return
            self.read += 1
            assert any(
                "mathjax_ignore" in c and "tex2jax_ignore" in c or tag == "pre"
                for tag, c in self.open
            ), (data, self.open)

    for drawn in (
        svg(99, 9, words, text(0, 0, words)),
        table([{words: words}], words),
        token_boxes([words], title=words),
        grid(Picture(f"<p>{words}</p>")),
        latest_samples_html(ran.samples),
        log_html(ran.log),
        notice(words),
        static_html(ran, words),
    ):
        reader = Reader()
        reader.feed(drawn._repr_html_() if isinstance(drawn, Picture) else drawn)
        assert reader.read, drawn
