"""Stand-ins for the curves of a run.

A run of four steps draws 10 to 30 of them, which took a third of its time in the tests. Lessons
draw the real ones, and so do tests that use `drawn`
or the fixture `real_curves`.
"""

import json
from contextlib import contextmanager
from unittest.mock import patch

from trainkit.charts import as_points
from trainkit.display import Picture, clean
from trainkit.train import reports

draw = reports._draw_series


def sketch(text):
    "A picture without lines; it has the size and the words of the real one."
    series, title, _ = json.loads(text)
    points = {name: [y for _, y in as_points(data)] for name, data in series.items()}
    ends = [f"{name} from {ys[0]:g} to {ys[-1]:g}" for name, ys in points.items() if ys]
    label = clean(": ".join(filter(None, (title, "; ".join(ends)))))
    return Picture(
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 480 260" role="img" '
        f'aria-label="{label}" style="width:100%;max-width:480px"><text>{label}</text></svg>'
    )


def sketch_curves():
    "From now on this process draws no curves of runs."
    reports._draw_series = sketch


@contextmanager
def drawn():
    "The real curves, until the block ends."
    draw.cache_clear()
    with patch.object(reports, "_draw_series", draw):
        yield
    draw.cache_clear()
