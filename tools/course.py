"""Write the index of the course: nbs/README.md, chapter pages, map, pictures and lesson links.

`make index` writes them, `python tools/course.py --check` lists what is not up to date, and
`python tools/course.py --measure` runs every lesson and notes its CPU time in
tools/lesson_seconds.json. What a lesson enables a reader to do is the sentence under its title.
"""

import json
import os
import re
import sys
from pathlib import Path

from pictures import DIAGRAMS, diagram, picture

ROOT = Path(__file__).parent.parent
LESSONS = ROOT / "nbs"
SECONDS = Path(__file__).with_name("lesson_seconds.json")

CHAPTERS = {  # folder -> title, what a reader can do after it
    "01_tokenizer": ("Tokenizer", "turn text into token ids and back, chats included"),
    "02_data": ("Data", "get from any file to checked, packed batches"),
    "03_model": (
        "Model",
        "build a transformer that gives Llama's numbers, and generate text with it",
    ),
    "04_train": (
        "Training",
        "train anything that has a loss, resume it exactly, and see what it did",
    ),
    "05_lora": ("LoRA", "fine-tune 1 % of the parameters, and merge them"),
    "06_quant": ("Quantization", "store a model in 8 or 4 bits, and know the error"),
    "07_memory": ("Memory", "predict how much memory a run needs, and make it fit"),
    "08_align": (
        "Alignment",
        "train on preferences and on scores: DPO, KTO, reward models, PPO, GRPO",
    ),
    "09_eval": ("Evaluation", "say which of two models is better, and how sure that is"),
    "10_interop": (
        "Interoperability",
        "exchange models with Hugging Face, PEFT, TRL, llama.cpp and Ollama",
    ),
    "11_recipes": ("Recipes", "run a whole experiment from one config, in Python or from a shell"),
    "12_widgets": ("Widgets", "train, compare, label and explore with buttons in a notebook"),
    "13_projects": ("Projects", "do all of it on your own data and on a free GPU"),
    "14_engine": (
        "Engine",
        "serve a model to many clients at once, in the form that they ask for",
    ),
    "15_audit": (
        "Audit",
        "check any training loop for silent errors, and repeat what was found",
    ),
    "90_toolbox": (
        "Toolbox",
        "look up files, configs, charts and progress bars; nothing here must be read first",
    ),
}
# The main road, in the order in which a person learns; a picture has the name of its lesson
ROAD = [
    "00_tour",
    "01_tokenizer/bpe",
    "01_tokenizer/tokenizer",
    "02_data/columns",
    "02_data/quality",
    "01_tokenizer/chat",
    "03_model/attention",
    "03_model/transformer",
    "03_model/anatomy",
    "03_model/generation",
    "04_train/optimizers",
    "04_train/trainer",
    "04_train/instruction_tuning",
    "05_lora/lora",
    "05_lora/adapters",
    "06_quant/nf4",
    "07_memory/memory",
    "08_align/dpo",
    "08_align/rl",
    "09_eval/scores",
    "10_interop/hugging_face",
    "10_interop/gguf",
    "04_train/distributed",
    "11_recipes/recipes",
    "12_widgets/panel",
    "13_projects/your_data",
    "13_projects/free_gpu",
    "13_projects/troubleshooting",
    "13_projects/final_project",
]
LINKS, MAP = "course-links", "course-map"  # Ids of the cells that are written here
BEGIN = {
    MAP: ("| | Lesson |", "The map is written here"),
    LINKS: ("---\n← [", "---\n[Index](", "---\n[Map](", "---\n**Begin"),
}


def read(path):
    return json.loads(path.read_text(encoding="utf-8"))


def source(cell):
    return "".join(cell["source"])


def written_here(cell, *names):
    "Whether it is one of these cells, also where a tool has given it a new id."
    if cell["cell_type"] != "markdown":
        return False
    return any(cell.get("id") == name or source(cell).startswith(BEGIN[name]) for name in names)


def name_of(path):
    "A lesson's name: chapter and file, as in `05_lora/01_lora`."
    return path.relative_to(LESSONS).with_suffix("").as_posix()


def lessons():
    "Every lesson's path, in the order of the course."
    paths = [p for p in LESSONS.rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts]
    return sorted(paths, key=lambda path: (path.parent != LESSONS, name_of(path)))


def title(notebook):
    return source(notebook["cells"][0]).split("\n")[0].removeprefix("# ")


def sentence(notebook):
    "The line under the title: what a reader will be able to do (`>Text` or `> Text`)."
    return source(notebook["cells"][0]).split("\n>")[1].strip()


def checkpoint(notebook):
    "The title of the exercise that ends a chapter, and its sentence, or None."
    for cell in notebook["cells"]:
        if found := re.match(r"### Checkpoint: (\S.*)\n\n> (\S.*)", source(cell)):
            return found[1][0].upper() + found[1][1:], found[2]
    return None


def plain_name(name):
    "`01_tokenizer/03_bpe` -> `01_tokenizer/bpe`: the number may change, the name stays."
    chapter, _, stem = name.rpartition("/")
    return f"{chapter}/{re.sub(r'^[0-9]+_', '', stem)}" if chapter else name


def road():
    "The lessons of the main road, by name, in order; those that are not there are left out."
    names = {plain_name(name_of(path)): name_of(path) for path in lessons()}
    return [names[plain] for plain in ROAD if plain in names]


def chapters():
    "Chapter -> its lessons, by name, in order; the tour stands alone."
    names_of = {folder: [] for folder in CHAPTERS}
    for path in lessons():
        if path.parent != LESSONS:
            names_of[path.parent.name].append(name_of(path))
    return {folder: names for folder, names in names_of.items() if names}


def minutes(notebook):
    "Reading time, computed: 180 words of prose or 20 lines of code a minute."
    cells = [c for c in notebook["cells"] if not written_here(c, LINKS, MAP)]
    prose = sum(len(source(c).split()) for c in cells if c["cell_type"] == "markdown")
    code = [
        source(c) for c in cells if c["cell_type"] == "code" and not source(c).startswith("#| hide")
    ]
    lines = sum(len([line for line in text.splitlines() if line.strip()]) for text in code)
    return max(5, round((prose / 180 + lines / 20) / 5) * 5)


def cpu_time(name):
    "How long the lesson's cells take one core, in words."
    if name == "00_tour":
        return "1–2 min"  # With all of its steps; a test takes few
    seconds = read(SECONDS).get(plain_name(name)) if SECONDS.exists() else None
    if seconds is None:
        return "–"
    return next(
        (f"< {most} s" for most in (5, 10, 20, 30, 60) if seconds < most), f"{seconds / 60:.0f} min"
    )


def link(name, around=""):
    "The relative address of a lesson, from the folder `around` of nbs."
    return os.path.relpath(f"{name}.ipynb", around or ".")


def picture_name(name):
    return re.sub(r"^[0-9]+_", "", name.rpartition("/")[2])


def diagram_name(folder):
    "The diagram of a chapter, from its folder."
    return f"../images/chapter_{folder}.svg"


def neighbours():
    "Lesson -> (the one before, the one after): along the main road, elsewhere by number."
    every, main, out = [name_of(path) for path in lessons()], road(), {}
    for i, name in enumerate(every):
        order, at = (main, main.index(name)) if name in main else (every, i)
        out[name] = (order[at - 1] if at else None, order[at + 1] if at + 1 < len(order) else None)
    return out


def links(name, around, titles):
    "The line at the end of a lesson."
    folder, (before, after) = os.path.dirname(name), around
    words = [f"← [{titles[before]}]({link(before, folder)})"] if before else []
    words.append(
        f"[Index]({os.path.relpath('README.md', folder or '.')})"
        if name != "00_tour"
        else "**Begin here**"
    )
    words += [f"[{titles[after]}]({link(after, folder)}) →"] if after else []
    return "---\n" + " · ".join(words)


def table(names, notebooks, folder="", marked=True):
    "Lessons as a Markdown table: what a reader will be able to do, reading time, CPU time."
    main, rows = (
        road(),
        ["| Lesson | What you will be able to do | Reading | CPU |", "|---|---|---:|---:|"],
    )
    for name in names:
        star = " ★" if marked and name in main else ""
        book = notebooks[name]
        rows.append(
            f"| [{title(book)}]({link(name, folder)}){star} | {sentence(book)} | "
            f"{minutes(book)} min | {cpu_time(name)} |"
        )
    return "\n".join(rows)


def checkpoints(names, notebooks, folder=""):
    "Lines that link to the checkpoint of a chapter, for its page and for the index."
    lines = []
    for name in names:
        if about := checkpoint(notebooks[name]):
            lines.append(f"**Checkpoint:** [{about[0]}]({link(name, folder)}). {about[1]}")
    return lines


def index(notebooks):
    "nbs/README.md: the whole course on one page."
    main, parts = road(), chapters()
    reading = sum(minutes(notebooks[name]) for name in main)
    text = [
        "# The course",
        "<!-- Written by tools/course.py: `make index` -->",
        f"Build a language model from scratch, in {len(main)} lessons: the main road, "
        "marked ★ everywhere. Begin with the "
        "[tour](00_tour.ipynb), which trains, tunes, aligns and shrinks a small model on one page. "
        "The other "
        f"{len(notebooks) - len(main)} lessons explain how each part is built. You do not need "
        "them to follow the main road; read one when you want to look inside a part.",
        "You need Python, and to have trained or at least seen a neural network in PyTorch. "
        "To start at the bottom instead, with single numbers in plain Python, read "
        "[the ladder](13_projects/06_ladder.ipynb) first: it writes one training step six times, "
        "the last time as a compiled trainer. "
        "Reading the main road takes "
        f"about {reading // 60} hours; a lesson runs in seconds on one CPU core, and the tour, "
        "which trains three models one after the other, in a minute or two.",
        "How to read a lesson: the sentence under the title says what you will be able to do. "
        "A paragraph near the top that consists mostly of names in `code` is the documentation of "
        "the lesson's module; skip it, and come back to it when you use the module. Cells that "
        "begin with `#| export` become the package. The long ones among them are written to be "
        "used, and the text above them says which lines to read first.",
        "A term that is new to you may be in the [glossary](glossary.md). "
        "Every lesson ends with three exercises; each has a check that tells right from wrong, and "
        "a folded solution. A chapter ends with a checkpoint: a larger exercise that needs all of "
        "its parts. You do it without the solution, and the check measures what your code does. "
        "`trainkit course checkpoints` lists them.",
        "## The main road ★",
        table(main, notebooks, marked=False),
        "## Chapters",
    ]
    for folder, names in parts.items():
        heading, able = CHAPTERS[folder]
        text += [
            f"### [{int(folder[:2])}. {heading}]({folder}/README.md)",
            f"After it you can {able}.",
            table(names, notebooks),
            *checkpoints(names, notebooks),
        ]
    text.append(
        "Reading time is computed from the length of a lesson. CPU time is measured on one core "
        "with the `quick` profile, in a process that has already imported torch. In Jupyter a "
        "lesson also starts a kernel and imports the libraries, and the first time Numba compiles "
        "its functions: allow half a minute for that."
    )
    return "\n\n".join(text) + "\n"


def first_page(folder, names, notebooks):
    "The first page of a chapter: its map."
    heading, able = CHAPTERS[folder]
    main, modules = [n for n in names if n in road()], {}
    for name in names:
        exported = notebooks[name]["metadata"].get("nbdev", {}).get("default_exp")
        written = {exported} if exported else set()
        for cell in notebooks[name]["cells"]:
            if note := re.match(r"#\| *exporti? +(\S+)", source(cell)):
                written.add(note[1])
        for module in sorted(filter(None, written)):
            modules.setdefault(module, []).append(name)
    text = [
        f"# {heading}",
        "<!-- Written by tools/course.py: `make index` -->",
        f"After this chapter you can {able}. ★ marks the main road"
        + ("; read these first." if main else "; no lesson here is on it."),
        *([f"![{heading}: its parts]({diagram_name(folder)})"] if folder in DIAGRAMS else []),
        table(names, notebooks, folder),
        *checkpoints(names, notebooks, folder),
    ]
    if modules:
        rows = [
            f"| `trainkit.{module}` | "
            f"{', '.join(f'[{title(notebooks[n])}]({link(n, folder)})' for n in pages)} |"
            for module, pages in sorted(modules.items())
        ]
        text += [
            "## What the lessons export",
            "\n".join(["| Module | Lessons |", "|---|---|", *rows]),
        ]
    text.append("[Index of the course](../README.md)")
    return "\n\n".join(text) + "\n"


def the_map(notebooks):
    "The table of the main road and the lists of the chapters, for the tour."
    rows = ["| | Lesson | Reading |", "|---|---|---:|"]
    for name in road():
        book = notebooks[name]
        rows.append(
            f"| ![{picture_name(name).replace('_', ' ')}](images/{picture_name(name)}.svg) | "
            f"[{title(book)}]({link(name)}): {sentence(book)} | {minutes(book)} min |"
        )
    others = [
        f"- [{CHAPTERS[folder][0]}]({folder}/README.md): {CHAPTERS[folder][1]} ({len(names)} "
        "lessons)"
        for folder, names in chapters().items()
    ]
    return "\n".join(
        [*rows, "", "Every chapter, with the lessons that the main road leaves out:", "", *others]
    )


def with_cell(notebook, name, text):
    "The notebook with this text in the cell of this id; a new one goes to the end."
    lines = [line + "\n" for line in text.split("\n")]
    lines[-1] = lines[-1][:-1]
    old = next((c for c in notebook["cells"] if written_here(c, name)), None)
    if old is not None:
        old["id"] = name
    if name == LINKS and (old is None or notebook["cells"][-1] is not old):
        notebook["cells"] = [c for c in notebook["cells"] if not written_here(c, LINKS)]
        old = dict(cell_type="markdown", id=LINKS, metadata={}, source=[])
        notebook["cells"].append(old)
    if old is not None:
        old["source"] = lines
    return notebook


def everything():
    "Path -> its text as it should be, for all that is written here."
    notebooks = {name_of(path): read(path) for path in lessons()}
    titles, around = {name: title(book) for name, book in notebooks.items()}, neighbours()
    out = {LESSONS / "README.md": index(notebooks)}
    for folder, names in chapters().items():
        out[LESSONS / folder / "README.md"] = first_page(folder, names, notebooks)
        if folder in DIAGRAMS:
            out[LESSONS / folder / diagram_name(folder)] = diagram(folder)
    for name in road():
        drawing = picture(picture_name(name), sentence(notebooks[name]))
        out[LESSONS / "images" / f"{picture_name(name)}.svg"] = drawing
    tour = the_map(notebooks)
    for name, book in notebooks.items():
        with_cell(book, LINKS, links(name, around[name], titles))
        if name == "00_tour":
            with_cell(book, MAP, tour)
        out[LESSONS / f"{name}.ipynb"] = json.dumps(book, indent=1, ensure_ascii=False) + "\n"
    return out


def stale():
    "The files that are not as they should be."
    return {
        path: text
        for path, text in everything().items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    }


def measure(only=()):
    "Run each lesson with one thread in a forked process of its own; return their CPU seconds."
    os.environ.update(
        OMP_NUM_THREADS="1",
        HF_HUB_OFFLINE="1",
        HF_HUB_DISABLE_TELEMETRY="1",
        TOKENIZERS_PARALLELISM="false",
    )
    sys.path.insert(0, str(ROOT / "tests"))
    import support.prewarm  # noqa: F401
    from support.exercise_grading import run_lesson

    seconds_of = read(SECONDS) if SECONDS.exists() else {}
    for path in lessons():
        name = name_of(path)
        if only and not any(word in name for word in only):
            continue
        if not (child := os.fork()):
            quiet = os.open(os.devnull, os.O_WRONLY)
            os.dup2(quiet, 1), os.dup2(quiet, 2)
            os._exit(not run_lesson(path, ())[0])
        _, status, used = os.wait4(child, 0)
        seconds = round(used.ru_utime + used.ru_stime, 1)
        if not status:
            seconds_of[plain_name(name)] = seconds
        print(f"{name}: {seconds} s{' (it failed)' if status else ''}", flush=True)
    names = {plain_name(name_of(path)) for path in lessons()}
    seconds_of = {name: seconds for name, seconds in sorted(seconds_of.items()) if name in names}
    SECONDS.write_text(json.dumps(seconds_of, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if "--measure" in sys.argv:
        measure([word for word in sys.argv[1:] if not word.startswith("--")])
    old = stale()
    for path, text in old.items():
        if "--check" in sys.argv:
            continue
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    state = "not up to date" if "--check" in sys.argv else "written"
    print(*(f"{state}: {path.relative_to(ROOT)}" for path in old), sep="\n")
    sys.exit("--check" in sys.argv and bool(old))
