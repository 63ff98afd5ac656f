"""Stand-ins for the pictures in the report of a run, a sweep or a demo.

A run of four steps draws 10 to 30 of them, which took a third of its time in the tests. The real
ones are drawn by tests that use `drawn` or the fixture `real_curves`, by the lessons that define
the drawing, and with `make test-slow` by nearly all lessons.
"""

import json
from contextlib import ExitStack, contextmanager
from functools import cache
from unittest.mock import patch

from trainkit.charts import as_points, curves, draw_svg
from trainkit.display import Picture, clean
from trainkit.recipes import demo, evaluation, runner, sweep
from trainkit.train import reports

draw = reports._draw_series


def picture(label):
    "It has the size and the words of the real one."
    return Picture(
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 480 260" role="img" '
        f'aria-label="{label}" style="width:100%;max-width:480px"><text>{label}</text></svg>'
    )


def sketch(text):
    "A picture without lines."
    series, title, _ = json.loads(text)
    points = {name: [y for _, y in as_points(data)] for name, data in series.items()}
    ends = [f"{name} from {ys[0]:g} to {ys[-1]:g}" for name, ys in points.items() if ys]
    return picture(clean(": ".join(filter(None, (title, "; ".join(ends))))))


def words(value):
    "The names and numbers that a picture would show, and its titles."
    if isinstance(value, dict):
        value = [f"{name} {words(part)}" for name, part in value.items()]
    if isinstance(value, list | tuple):
        return "; ".join(filter(None, map(words, value)))
    return f"{value:g}" if isinstance(value, int | float) else str(value or "")


def sketch_svg(draw, *args, **options):
    "The same for any picture of a report."
    return picture(clean(words([*args, *options.values()])))


@cache
def empty_picture():
    "A run draws one before its first step, so that Matplotlib is in memory: once is enough."
    return draw_svg(curves, {})


SKETCHES = [(module, "draw_svg", sketch_svg) for module in (demo, evaluation, sweep)]
SKETCHES += [
    (runner, "draw_svg", lambda draw, series: empty_picture()),
    (reports, "_draw_series", sketch),
]


def sketch_curves():
    "From now on this process draws no pictures for reports."
    for module, name, stand_in in SKETCHES:
        setattr(module, name, stand_in)


@contextmanager
def drawn():
    "The real pictures, until the block ends."
    draw.cache_clear()
    with ExitStack() as stack:
        for module, name, _ in SKETCHES:
            real = draw if module is reports else draw_svg
            stack.enter_context(patch.object(module, name, real))
        yield
    draw.cache_clear()
