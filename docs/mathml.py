"""Formulas of the site as MathML, made at build time: a page then needs no script of another host.

A hook of mkdocs. pymdownx.arithmatex marks the formulas of a page, and browsers draw MathML.
"""

import html
import re
from typing import Any

from latex2mathml.converter import convert

FORMULA = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">\s*'
    r"\\(?P<open>[\[(])(?P<tex>.*?)\\[\])]\s*</(?P=tag)>",
    re.S,
)


def formula(found: re.Match[str]) -> str:
    display = "block" if found["open"] == "[" else "inline"
    made: str = convert(html.unescape(found["tex"]).strip(), display=display)
    return f'<{found["tag"]} class="math">{made}</{found["tag"]}>'


def on_page_content(content: str, **_: Any) -> str:
    made, count = FORMULA.subn(formula, content)
    if content.count('class="arithmatex"') != count:
        raise ValueError("a formula of this page was not found")
    return made
