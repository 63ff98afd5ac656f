"""A picture for each lesson of the main road, and a diagram for each chapter, as small SVG files.

The colours stand out from a light ground and from a dark one. `python tools/course.py` writes
the files.
"""

import re
from math import cos, exp, pi, sin

BLUE, ORANGE, GREEN, GREY = "#2f7fc1", "#d9640f", "#2e9e5b", "#8a8f98"
WIDTH, HEIGHT = 120, 60


def box(x, y, w, h, fill=BLUE, opacity=1.0, round=2):
    return (
        f'<rect x="{x:.4g}" y="{y:.4g}" width="{w:.4g}" height="{h:.4g}" rx="{round}" fill="{fill}"'
        + (f' opacity="{opacity:.2g}"' if opacity < 1 else "")
        + "/>"
    )


def line(points, stroke=BLUE, width=2.0, dash=""):
    path = " ".join(f"{x:.3g},{y:.3g}" for x, y in points)
    return (
        f'<polyline points="{path}" fill="none" stroke="{stroke}" stroke-width="{width}"'
        + (f' stroke-dasharray="{dash}"' if dash else "")
        + "/>"
    )


def text(x, y, words, fill=GREY, size=11, anchor="middle"):
    return (
        f'<text x="{x:.4g}" y="{y:.4g}" fill="{fill}" font-size="{size}" '
        f'text-anchor="{anchor}">{words}</text>'
    )


def bars(values, fills, base=54, height=46, left=10, right=110):
    room = (right - left) / len(values)
    return "".join(
        box(left + i * room + 1, base - height * v, room - 2, height * v, fill, round=1)
        for i, (v, fill) in enumerate(zip(values, fills, strict=True))
    )


def arrow(x1, y1, x2, y2, stroke=GREY):
    long = ((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5
    ux, uy = (x2 - x1) / long, (y2 - y1) / long
    return line([(x1, y1), (x2, y2)], stroke, 1.5) + line(
        [
            (x2 - 5 * ux + 3 * uy, y2 - 5 * uy - 3 * ux),
            (x2, y2),
            (x2 - 5 * ux - 3 * uy, y2 - 5 * uy + 3 * ux),
        ],
        stroke,
        1.5,
    )


def words(pieces, y, fills, size=12):
    "Tokens side by side, each in a box of its own."
    out, x, wide = [], 6.0, size * 0.62
    for piece, fill in zip(pieces, fills, strict=True):
        w = wide * len(piece) + 6
        out += [
            box(x, y, w, size + 7, fill, 0.3, 3),
            text(x + w / 2, y + size + 1, piece, fill, size),
        ]
        x += w + 3
    return "".join(out)


def cells(rows, columns, opacity, size=10, left=35, top=5, fill=BLUE):
    return "".join(
        box(left + j * size, top + i * size, size - 1, size - 1, fill, opacity(i, j), 1)
        for i in range(rows)
        for j in range(columns)
        if opacity(i, j)
    )


def falling(x0, x1, y0, y1, rate=3.0, wobble=0.0, n=24):
    return [
        (
            x0 + (x1 - x0) * i / (n - 1),
            y1 + (y0 - y1) * exp(-rate * i / (n - 1)) + wobble * sin(5.1 * i),
        )
        for i in range(n)
    ]


def axes():
    return line([(12, 6), (12, 54), (112, 54)], GREY, 1)


def stack(labels, x=30, w=60, fills=None):
    room = 52 / len(labels)
    fills = fills or [BLUE] * len(labels)
    return "".join(
        box(x, 4 + i * room, w, room - 3, fill, 0.3, 3)
        + text(x + w / 2, 4 + i * room + room / 2 + 2, label, fill, 10)
        for i, (label, fill) in enumerate(zip(labels, fills, strict=True))
    )


def tour():
    stops = [(12 + 24 * i, 40 - 22 * (i % 2) - 4 * i * (i % 2) / 4) for i in range(5)]
    return line(stops, GREY, 2, "4 3") + "".join(
        f'<circle cx="{x:.3g}" cy="{y:.3g}" r="6" fill="{c}"/>'
        for (x, y), c in zip(stops, (BLUE, BLUE, GREEN, ORANGE, GREEN), strict=True)
    )


def bpe():
    return (
        words(["l", "o", "w", "e", "r"], 3, [GREY] * 5)
        + arrow(40, 26, 40, 36)
        + words(["low", "er"], 38, [ORANGE, BLUE])
    )


def tokenizer():
    return (
        words(["To", "ken", "s"], 4, [BLUE, ORANGE, GREEN])
        + arrow(40, 26, 40, 36)
        + words(["84", "512", "82"], 38, [BLUE, ORANGE, GREEN])
    )


def columns():
    return (
        cells(4, 3, lambda i, j: 0.9 if i == 0 else 0.35, 14, 12, 3, BLUE)
        + arrow(60, 30, 74, 30)
        + text(97, 26, "chat?", ORANGE)
        + text(97, 42, "pairs?", GREY)
    )


def quality():
    rows = "".join(
        box(12, 5 + 10 * i, (78, 60, 12, 70, 78)[i], 7, ORANGE if i in (2, 4) else BLUE, 0.7)
        for i in range(5)
    )
    return rows + text(106, 33, "!", ORANGE, 13) + text(106, 53, "=", ORANGE, 13)


def chat():
    return (
        box(8, 6, 64, 18, GREY, 0.4, 8)
        + text(40, 19, "Why?")
        + box(44, 34, 68, 18, GREEN, 0.4, 8)
        + text(78, 47, "Because.", GREEN)
    )


def attention():
    return cells(5, 5, lambda i, j: (0.25 + 0.75 / (1 + i - j)) if j <= i else 0)


def transformer():
    return stack(
        ["logits", "MLP", "attention", "tokens"], fills=[GREEN, BLUE, ORANGE, GREY]
    ) + line([(96, 52), (104, 52), (104, 10), (96, 10)], GREY, 1.5)


def anatomy():
    return "".join(
        line(
            [(20 + 40 * layer, 10 + 20 * a), (60 + 40 * layer, 10 + 20 * b)],
            BLUE if b == a else GREY,
            1 + (a == b),
        )
        for layer in range(2)
        for a in range(3)
        for b in range(a, 3)
    ) + "".join(
        f'<circle cx="{20 + 40 * i}" cy="{10 + 20 * j}" r="4" fill="{ORANGE}"/>'
        for i in range(3)
        for j in range(3)
    )


def generation():
    return (
        words(["Once", "upon", "a"], 8, [GREY] * 3, 11)
        + bars((0.9, 0.45, 0.25, 0.12), (GREEN, GREY, GREY, GREY), 56, 24, 50, 110)
        + text(24, 52, "next?", GREEN)
    )


def optimizers():
    valley = [(8 + 4 * i, 8 + 40 * (1 - ((i - 13) / 13) ** 2)) for i in range(27)]
    return (
        line(valley, GREY, 2)
        + line([(16, 19), (34, 36), (86, 40), (50, 47), (66, 48)], ORANGE, 1.5, "3 2")
        + f'<circle cx="62" cy="48" r="4" fill="{ORANGE}"/>'
    )


def trainer():
    return (
        axes()
        + line(falling(14, 110, 8, 46, 3, 1.2), BLUE)
        + line(falling(14, 110, 8, 40, 3.5), ORANGE, 2, "5 3")
    )


def instruction_tuning():
    return (
        words(["Who?", "Me.", "■"], 20, [GREY, GREEN, GREEN], 13)
        + text(26, 54, "read", GREY, 10)
        + text(75, 54, "learned", GREEN, 10)
    )


def lora():
    return (
        box(10, 6, 44, 44, GREY, 0.5)
        + text(66, 33, "+", GREY, 16)
        + box(76, 6, 8, 44, ORANGE)
        + box(88, 24, 26, 8, ORANGE)
    )


def adapters():
    return box(28, 34, 64, 20, GREY, 0.5) + "".join(
        box(32 + 20 * i, 8, 16, 22, c, 0.9) for i, c in enumerate((BLUE, ORANGE, GREEN))
    )


def nf4():
    marks = (
        -1,
        -0.7,
        -0.53,
        -0.39,
        -0.28,
        -0.18,
        -0.09,
        0,
        0.08,
        0.16,
        0.25,
        0.34,
        0.44,
        0.56,
        0.72,
        1,
    )
    bell = [(10 + 5 * i, 44 - 36 * exp(-(((i - 10) / 4.5) ** 2))) for i in range(21)]
    return line(bell, GREY, 1.5) + "".join(
        line([(60 + 50 * m, 46), (60 + 50 * m, 56)], ORANGE, 1.5) for m in marks
    )


def memory():
    return stack(
        ["activations", "optimizer", "gradients", "weights"], 24, 72, [GREEN, ORANGE, BLUE, GREY]
    )


def dpo():
    up = [(12 + 5 * i, 34 - 26 * i / 19) for i in range(20)]
    down = [(12 + 5 * i, 34 + 20 * i / 19) for i in range(20)]
    return (
        line(up, GREEN)
        + line(down, ORANGE, 2, "5 3")
        + text(104, 26, "✓", GREEN, 13)
        + text(90, 54, "✗", ORANGE, 13)
    )


def rl():
    return (
        "".join(
            line([(14, 30), (58, 6 + 16 * i)], GREEN if good else GREY, 2)
            + text(76, 11 + 16 * i, score, GREEN if good else GREY, 11)
            for i, (score, good) in enumerate((("+1", 1), ("0", 0), ("+1", 1), ("0", 0)))
        )
        + f'<circle cx="14" cy="30" r="6" fill="{BLUE}"/>'
    )


def scores():
    return bars((0.55, 0.8), (GREY, BLUE), 56, 46, 30, 90) + "".join(
        line([(x, y - 8), (x, y + 8)], ORANGE, 2)
        + line([(x - 4, y - 8), (x + 4, y - 8)], ORANGE, 2)
        + line([(x - 4, y + 8), (x + 4, y + 8)], ORANGE, 2)
        for x, y in ((45, 31), (75, 19))
    )


def hugging_face():
    return (
        box(6, 12, 40, 36, BLUE, 0.4, 4)
        + box(74, 12, 40, 36, ORANGE, 0.4, 4)
        + arrow(48, 24, 72, 24)
        + arrow(72, 38, 48, 38)
        + text(26, 34, "ours", BLUE)
        + text(94, 34, "theirs", ORANGE)
    )


def gguf():
    return (
        "".join(box(8, 5 + 17 * i, 34, 13, c, 0.5) for i, c in enumerate((BLUE, GREEN, ORANGE)))
        + arrow(46, 30, 66, 30)
        + box(72, 8, 40, 44, GREY, 0.4, 4)
        + text(92, 34, ".gguf")
    )


def distributed():
    around = [
        (60 + 40 * cos(2 * pi * i / 4 + pi / 4), 30 + 20 * sin(2 * pi * i / 4 + pi / 4))
        for i in range(4)
    ]
    return line([*around, around[0]], GREY, 1.5) + "".join(
        box(x - 9, y - 8, 18, 16, c, 1, 3)
        for (x, y), c in zip(around, (BLUE, GREEN, ORANGE, GREY), strict=True)
    )


def recipes():
    return (
        "".join(
            box(8, 8 + 12 * i, 10, 8, ORANGE)
            + box(22, 9 + 12 * i, (28, 20, 26, 16)[i], 6, GREY, 0.6)
            for i in range(4)
        )
        + arrow(54, 30, 68, 30)
        + line(falling(74, 112, 12, 48), BLUE)
    )


def panel():
    return (
        box(6, 5, 108, 50, GREY, 0.18, 4)
        + line(falling(14, 74, 14, 46, 3, 1), BLUE)
        + '<path d="M84 14 l0 14 l12 -7z" fill="%s"/>' % GREEN
        + box(84, 34, 5, 14, ORANGE)
        + box(92, 34, 5, 14, ORANGE)
    )


def your_data():
    return (
        box(8, 8, 30, 44, GREY, 0.35, 3)
        + "".join(line([(13, 17 + 8 * i), (33, 17 + 8 * i)], GREY, 2) for i in range(4))
        + arrow(42, 30, 58, 30)
        + box(64, 16, 48, 26, GREEN, 0.4, 10)
        + text(88, 33, "answers", GREEN)
    )


def free_gpu():
    pins = "".join(box(x, y, 3, 6, GREY, 0.7) for x in range(14, 60, 8) for y in (6, 48))
    return (
        pins
        + box(10, 12, 50, 36, BLUE, 0.35, 4)
        + text(35, 35, "GPU", BLUE, 14)
        + arrow(64, 30, 78, 30)
        + box(84, 10, 26, 40, GREEN, 0.4, 3)
        + text(97, 34, ".gguf", GREEN)
    )


def troubleshooting():
    return (
        axes()
        + line([*falling(14, 60, 10, 40, 3, n=12), (66, 34), (72, 20), (78, 8)], ORANGE)
        + '<circle cx="94" cy="26" r="10" fill="none" stroke="%s" stroke-width="2.5"/>' % BLUE
        + line([(101, 33), (110, 43)], BLUE, 3)
    )


def final_project():
    "Four requirements, met one after the other."
    return "".join(
        box(5 + 28 * i, 16, 24, 28, fill, 0.35, 4)
        + line([(11 + 28 * i, 31), (15 + 28 * i, 36), (23 + 28 * i, 24)], fill, 2.5)
        for i, fill in enumerate((GREY, BLUE, ORANGE, GREEN))
    )


def picture(
    name,  # A function of this file
    label,  # What it shows, for those who cannot see it
):
    "A whole file of SVG."
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'height="{HEIGHT}" role="img" '
        f'font-family="system-ui,sans-serif"><title>{label}</title>{globals()[name]()}</svg>\n'
    )


# Chapter -> its parts in order, row by row: (what it is, the numbers of the lessons about it)
DIAGRAMS = {
    "01_tokenizer": [
        [("text", ""), ("words", "1, 2"), ("merges", "3"), ("token ids", "4–6")],
        [("chat", ""), ("template", "7"), ("ids and loss mask", "8")],
    ],
    "02_data": [
        [("files", "2–4"), ("rows", "1"), ("checked", "8–12"), ("mixed", "7")],
        [("split", "5, 6"), ("token ids", "13, 14"), ("batches", "15–17"), ("shards", "18")],
    ],
    "03_model": [
        [("shape", "1"), ("attention", "2–4"), ("layers", "5, 6"), ("logits", "7, 8")],
        [("sampling", "9"), ("text", "10"), ("faster", "11–13"), ("experts", "14")],
    ],
    "04_train": [
        [
            ("settings", "5, 29–31"),
            ("loss", "4, 6"),
            ("optimizer step", "1–3, 7, 27"),
            ("loop", "8, 28"),
        ],
        [
            ("checkpoints", "9–14"),
            ("faults", "15, 16"),
            ("devices", "17–19"),
            ("logs", "20–26"),
        ],
    ],
    "05_lora": [
        [("frozen layer", ""), ("+ low-rank update", "1, 2"), ("which layers", "4"), ("rank", "5")],
        [("training", "3"), ("adapter folder", "6"), ("merged model", "7")],
    ],
    "06_quant": [
        [("weights", ""), ("4-bit codes", "1, 3, 7"), ("8-bit codes", "2"), ("layers", "4")],
        [("calibration", "6"), ("quantized model", "5")],
    ],
    "07_memory": [
        [("model and batch", ""), ("predicted bytes", "1, 2"), ("measured bytes", "3")],
        [("offload", "4"), ("a plan that fits", "5"), ("savings measured", "6")],
    ],
    "08_align": [
        [("pairs", "1"), ("log-probs", "2, 3"), ("DPO, KTO", "4–6"), ("reward model", "7")],
        [("prompts", "13, 14"), ("rollouts", "12, 15–17"), ("rewards", "8"), ("PPO, GRPO", "9–11")],
        [("distillation", "18, 19"), ("search, frontier", "20, 21"), ("thinking", "22")],
    ],
    "09_eval": [
        [("held-out rows", ""), ("likelihoods", "4, 5"), ("answers", "1, 2, 8")],
        [("intervals", "3"), ("report", "6"), ("side by side", "7")],
    ],
    "10_interop": [
        [("Hugging Face", "1–3"), ("our model", ""), ("GGUF, 4-bit folders", "4, 9")],
        [("PEFT", "6"), ("TRL", "5, 8"), ("LLaMA-Factory", "7")],
    ],
    "11_recipes": [
        [
            ("config", "2–4"),
            ("data, model", "5, 6"),
            ("training", "1, 9, 10"),
            ("results", "7, 8"),
        ],
        [("memory", "11"), ("processes", "12, 13"), ("shell", "14–17"), ("sweeps", "18")],
        [("configs of other libraries", "19–23")],
    ],
    "12_widgets": [
        [("form", "5, 17"), ("run", "2, 3, 19"), ("panel", "1, 4, 18"), ("application", "20")],
        [
            ("explorers", "6–12"),
            ("chats compared", "13"),
            ("labels", "14"),
            ("runs, drawings", "15, 16"),
        ],
    ],
    "13_projects": [
        [("your data", "1"), ("one free GPU", "2"), ("on your own", "5")],
        [("what goes wrong", "3"), ("silent bugs", "4")],
        [("from scalars up", "6"), ("a race", "7")],
    ],
    "14_engine": [
        [
            ("requests", ""),
            ("rows of a batch", "1"),
            ("compiled steps", "4, 5"),
            ("allowed tokens", "2"),
            ("HTTP", "3, 6"),
        ],
    ],
    "15_audit": [
        [("a trainer", "2"), ("invariants", "1"), ("a page", "3")],
        [("planted bugs", "4")],
    ],
}


def diagram(
    chapter,  # A key of `DIAGRAMS`
):
    "A chapter as boxes and arrows; the numbers in the boxes are those of its lessons."
    rows, wide, high, gap = DIAGRAMS[chapter], 140, 46, 28
    parts = []
    for i, stages in enumerate(rows):
        y = 6 + i * (high + 22)
        for j, (name, lessons) in enumerate(stages):
            x = 6 + j * (wide + gap)
            fill = BLUE if lessons else GREY
            parts.append(box(x, y, wide, high, fill, 0.22, 6))
            parts.append(text(x + wide / 2, y + (20 if lessons else 28), name, fill, 13))
            if lessons:
                plural = "s" if re.search("[,–]", lessons) else ""
                parts.append(text(x + wide / 2, y + 37, f"lesson{plural} {lessons}", GREY, 10.5))
            if j + 1 < len(stages):
                parts.append(arrow(x + wide + 3, y + high / 2, x + wide + gap - 3, y + high / 2))
    width = 12 + max(map(len, rows)) * (wide + gap) - gap
    height = 12 + len(rows) * (high + 22) - 22
    label = "; then ".join(" → ".join(name for name, _ in stages) for stages in rows)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" '
        f'font-family="system-ui,sans-serif"><title>{label}</title>{"".join(parts)}</svg>\n'
    )
