"""How Sphinx makes the site of what tools/docs.py has laid out for it (`make site`).

Nothing is loaded from elsewhere: formulas are MathML, fonts are the reader's own, and the search
is an index that lies next to the pages.
"""

import html
import re
import sys
from pathlib import Path

from docutils import nodes
from latex2mathml.converter import convert

sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))
project, author = "trainkit", "The trainkit authors"
copyright = author
extensions = ["myst_nb", "sphinx_design", "sphinx_copybutton"]

nb_execution_mode = "off"  # The outputs that the notebooks carry are shown
nb_merge_streams = True
nb_code_prompt_show, nb_code_prompt_hide = "Folded cell", "Folded cell"
myst_enable_extensions = ["dollarmath", "amsmath", "colon_fence", "attrs_block"]
myst_heading_anchors = 4
myst_dmath_allow_space = False
myst_dmath_double_inline = True
myst_heading_slug_func = "api.anchor"

add_module_names = False
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 60
toc_object_entries_show_parents = "hide"

html_theme = "pydata_sphinx_theme"
html_title = "trainkit"
html_math_renderer = "mathml"
html_copy_source = False
html_show_sphinx = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_last_updated_fmt = None
pygments_style = "friendly"
templates_path = []
suppress_warnings = ["mystnb.unknown_mime_type", "misc.highlighting_failure"]
html_theme_options = {
    "logo": {"text": "trainkit"},
    "navbar_align": "left",
    "header_links_before_dropdown": 6,
    "navigation_depth": 3,
    "show_nav_level": 1,
    "show_toc_level": 2,
    "collapse_navigation": False,
    "navigation_with_keys": False,
    "secondary_sidebar_items": ["page-toc"],
    "navbar_end": ["theme-switcher"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "pygments_light_style": "friendly",
    "pygments_dark_style": "github-dark",
    "search_as_you_type": True,
    "back_to_top_button": False,
}
html_sidebars = {"index": []}


def mathml(latex, display):
    "LaTeX as MathML; what cannot be converted stays as it is."
    try:
        return convert(latex, display=display)
    except Exception:
        return f"<code>{html.escape(latex)}</code>"


def inline_math(translator, node):
    translator.body.append(mathml(node.astext(), "inline"))
    raise nodes.SkipNode


def block_math(translator, node):
    formula = mathml(re.sub(r"\s+", " ", node.astext()), "block")
    translator.body.append(f'<div class="math-block">{formula}</div>\n')
    raise nodes.SkipNode


def setup(app):
    app.add_html_math_renderer("mathml", (inline_math, None), (block_math, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
