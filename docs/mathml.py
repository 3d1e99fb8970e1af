"""Formulas of the site as MathML, made at build time: a page then needs no script of another host.

A hook of mkdocs. pymdownx.arithmatex marks the formulas of a page, and browsers draw MathML. The
hook also lets a path or name in a table break after a slash or an underscore.
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
CELL = re.compile(r"<t[dh]\b.*?</t[dh]>", re.S)
CODE = re.compile(r"(?<=<code>)[^<]*(?=</code>)")


def formula(found: re.Match[str]) -> str:
    display = "block" if found["open"] == "[" else "inline"
    made: str = convert(html.unescape(found["tex"]).strip(), display=display)
    # A prime is hardly seen in the size of an index; site.css enlarges it.
    made = made.replace("<mi>&#x02032;</mi>", '<mi class="prime">&#x02032;</mi>')
    return f'<{found["tag"]} class="math">{made}</{found["tag"]}>'


def breakable(cell: re.Match[str]) -> str:
    return CODE.sub(lambda code: re.sub(r"([/_=(])(?=\w)", r"\1<wbr>", code[0]), cell[0])


def on_page_content(content: str, **_: Any) -> str:
    made, count = FORMULA.subn(formula, content)
    if content.count('class="arithmatex"') != count:
        raise ValueError("a formula of this page was not found")
    return CELL.sub(breakable, made)
