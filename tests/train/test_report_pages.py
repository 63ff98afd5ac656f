"The pages of runs: what is drawn, compared and listed, where the numbers are given."

import json
import re

import pytest
from support.snapshots import compare

from trainkit.train import reports
from trainkit.train.runs import read_run


@pytest.fixture(autouse=True)
def charts(real_curves, monkeypatch):
    "Each chart as what it is made of."

    def told(chart, series, title, *words, **knobs):
        names = {name: (list(steps), list(values)) for name, (steps, values) in series.items()}
        return reports.Picture(f"<svg>[{chart.__name__} {title} {words} {knobs} {names}]</svg>")

    monkeypatch.setattr(reports, "draw_svg", told)


def run_of(folder, rate, steps=6, **environment):
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(
        f"method: sft\nname: a\noptim: {{learning_rate: {rate}, betas: [0.9, 0.95]}}\nempty: {{}}\n"
    )
    (folder / "environment.json").write_text(json.dumps(environment))
    records = [dict(event="start", time="2026-01-02T10:00:00", step=0)]
    for i in range(1, steps + 1):
        more = dict(memory_gib=i, memory_peak_gib=2 * i, cpu_percent=50) if i % 2 else {}
        record = dict(event="log", step=i, loss=1 / i, grad_norm=rate, learning_rate=rate)
        speed = dict(seconds=i * 30.0, tokens=100 * i, tokens_per_second=10.0 * i, mfu=0.25)
        records += [record | speed | more]
        if i % 3 == 0:
            records += [
                dict(event="eval", step=i, eval_loss=2 / i, eval_f1_score=i, eval_seconds=1.5)
                | dict(eval_tokens=9),
                dict(event="sample", step=i, samples=[["p", f"t{i}"], ["q", f"<{i}>"]]),
            ]
    records += [
        dict(event="health", step=4, symptom="s", evidence="e", remedy="r"),
        dict(event="end", time="2026-01-02T10:09:00", step=steps, reason="max_steps"),
    ]
    text = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "metrics.jsonl").write_text(text)
    return read_run(folder)


def plain(page):
    page = re.sub(r"<style.*?</style>", "", str(page), flags=re.S)
    page = re.sub(
        r"<(\w+)[^>]*>|</(\w+)>",
        lambda tag: "\n" * (tag[1] in ("tr", "dt", "h2", "svg", "figure")),
        page,
    )
    return "\n".join(line.strip() for line in page.splitlines() if line.strip())


def test_the_sections_of_a_report(tmp_path):
    run = run_of(tmp_path / "a", 0.1, git=dict(commit="c"), versions=dict(torch="2"), time="now")
    lines = [f"## {heading}\n{plain(page)}\n" for heading, page in reports.run_sections(run)]
    page = reports.write_report(run.path, "A <title>").read_text()
    head = re.search(r"<header>.*?</header>", page, re.S)[0]
    lines.append(f"## page\n{plain(head)}\n")
    short = run_of(tmp_path / "b", 0.1, steps=1)
    lines += [f"## short {h}\n{plain(page)}\n" for h, page in reports.run_sections(short)]
    compare("\n".join(lines), "report.txt")


def test_what_differs_between_runs(tmp_path):
    runs = [
        run_of(tmp_path / "x" / "a", 0.1, git=dict(commit="c"), machine="m", time="1"),
        run_of(tmp_path / "y" / "a", 0.2, git=dict(commit="d"), machine="m", time="2"),
        run_of(tmp_path / "b", 0.1, 3, git=dict(commit="c"), data_hash=dict(train="h")),
    ]
    lines = []
    for some in (runs[:2], runs[1:], [runs[0], runs[0].path]):
        found = reports.compare_runs(*some)
        lines.append(f"{found.names}\n{found}\n{plain(found.pictures)}\n{found.part('git')}\n")
    compare("\n".join(lines), "comparison.txt")
    with pytest.raises(TypeError, match="two runs or more, and got 1"):
        reports.compare_runs(runs[0])


@pytest.mark.parametrize(
    "moments, shown", [(1, [0]), (2, [0, 1]), (4, [0, 1, 2, 3]), (9, [0, 3, 5, 8])]
)
def test_moments_of_samples(moments, shown):
    "The first and the last, and others evenly between them."

    class Run:
        samples = [(10 * i, [["p", f"t{i}"]]) for i in range(moments)]

    page = plain(reports.samples_html(Run))
    assert [int(n) for n in re.findall(r"pt(\d)", page)] == shown
    assert page.startswith("before, step 0") and ("after, " in page) == (moments > 1)
    if moments == 9:
        assert re.findall(r"pt(\d)", plain(reports.samples_html(Run, 1))) == ["0"]


def test_curves_stand_in_two_columns(tmp_path, monkeypatch):
    monkeypatch.setattr(
        reports, "draw_svg", lambda *args, **knobs: reports.Picture('<svg style="a">x</svg>')
    )
    reports._draw_series.cache_clear()
    run = run_of(tmp_path / "a", 0.1)
    text = reports.write_curves(run.path).read_text()
    places = re.findall(r'x="(\d+)" y="(\d+)" width="480" height="260"', text)
    count = len(reports.draw_run(run))
    assert places == [(str(i % 2 * 500), str(i // 2 * 280)) for i in range(count)]
    assert f'viewBox="0 0 980 {-(-count // 2) * 280 - 20}"' in text


def test_nested_and_broken_configs():
    deep = "a: " + "[" * 199 + "]" * 199
    assert reports.parse_yaml(deep) and not reports.parse_yaml("a: " + "[" * 200 + "]" * 200)
    assert reports.parse_yaml("- a") == reports.parse_yaml("a: [") == {}
    assert reports.flatten_dict({"a": {"b": {}, "c": [1]}, 2: 3}) == {"a.b": {}, "a.c": [1], "2": 3}
    assert reports.flatten_dict({}) == {} and reports.flatten_dict(5, "x") == {"x": 5}


def test_rewards_of_held_out_answers_share_one_picture(tmp_path):
    "Chosen, rejected and margin stand in one chart, and in no other."
    run = run_of(tmp_path / "a", 0.1)
    names = ("chosen", "rejected", "margins")
    more = {f"eval_rewards/{name}": 0.5 for name in names} | {"eval_rewards/accuracies": 1.0}
    text = (run.path / "metrics.jsonl").read_text()
    record = dict(event="eval", step=6, eval_loss=0.3, **more)
    (run.path / "metrics.jsonl").write_text(text + json.dumps(record) + "\n")
    pictures = [str(picture) for picture in reports.draw_run(read_run(run.path))]
    (one,) = [picture for picture in pictures if "argin" in picture]
    assert all(f"'{name}': ([6], [0.5])" in one for name in ("chosen", "rejected", "margin"))
    assert len([picture for picture in pictures if "Rewards/" in picture]) == 1  # accuracies
