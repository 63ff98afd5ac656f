"A lesson that is named in prose is a link."

import json
import re

from support.processes import ROOT

NBS = ROOT / "nbs"
TITLES = {}  # Title -> lesson
for path in sorted(NBS.rglob("*.ipynb")):
    if ".ipynb_checkpoints" not in path.parts:
        first = json.loads(path.read_text(encoding="utf-8"))["cells"][0]
        TITLES["".join(first["source"]).splitlines()[0].lstrip("# ")] = path
LINK = "\N{LINK SYMBOL}"
NAMED = (
    rf"\blessons? (on|about)\b(?! {LINK}| the main road)[^.;:\n]*",  # The lesson on packing
    rf"\b(next|previous) lesson\b(?![^.\n]*{LINK})[^.\n]*",
    rf"\blesson before\b(?![^.\n]*{LINK})[^.\n]*",
    r"\b\d\d_[a-z]\w+(/\d\d_\w+|\.ipynb)",  # Its file
)


def prose(text):
    "A text without code, quotations of a module, headings and addresses; links are one sign."
    text = re.sub(r"```.*?```|<details>.*?</details>", "", text, flags=re.S)
    text = re.sub(r"\[[^\]]*\]\([^)]*\)", LINK, re.sub(r"`[^`\n]*`", "", text))
    return re.sub(r"^#.*$|https?://\S+", "", text, flags=re.M)


def unlinked(text):
    "The places of a text that name a lesson without a link."
    text = prose(text)
    found = [m[0] for pattern in NAMED for m in re.finditer(pattern, text)]
    # A title with a colon is no phrase that happens to be there
    return found + [title for title in TITLES if ":" in title and title in text]


def test_a_name_without_a_link_is_found():
    title = next(title for title in TITLES if ":" in title)
    for text in (
        "as the lesson on packing shows.",
        "See 02_data/15_packing.",
        "which the next lesson explains.",
        f"See {title}.",
    ):
        assert unlinked(text), text
    for text in (
        "as the lesson on [packing](15_packing.ipynb) shows.",
        "which [the next lesson](b.ipynb) explains.",
        f"See [{title}](a.ipynb), or `02_data/15_packing`.",
    ):
        assert not unlinked(text), text


def test_lessons_named_in_prose_are_links():
    missing = []
    for path in TITLES.values():
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            if cell["cell_type"] == "markdown" and not cell["metadata"].get("nbdev"):
                missing += [(path.stem, words) for words in unlinked("".join(cell["source"]))]
    assert not missing, missing
