"""The pictures of docs/decode.md in docs/assets: `python -m docs.decode_pictures` writes them."""

import json
import math
from pathlib import Path

from docs.pictures import ASSETS, Picture

# The records of benchmarks.state_rounding.
RECORDS = Path(__file__).parents[1] / "benchmarks" / "results" / "cpu" / "state_rounding.jsonl"


def window() -> str:
    """A head with 6 rows, whose turn is 0, at three positions around a fold."""
    picture = Picture(306)
    rows, left, width = 6, 300, 66
    picture.text(118, 20, "state of the slot", "strong")
    picture.text(left, 20, "window of 6 rows: token t has row t modulo 6", "strong")
    for i, (position, held) in enumerate(((13, 10), (15, 10), (16, 15))):
        y = 36 + 80 * i
        picture.text(4, y + 13, f"position {position}", "strong")
        picture.text(4, y + 29, f"token {position}")
        picture.box(118, y, 150, 36, "a", f"tokens 0 to {held - 1}")
        for row in range(rows):
            token = position - (position - row) % rows
            kind = "b" if token == position else "a" if token >= held else "later"
            x = left + row * (width + 4)
            picture.box(x, y, width, 36, kind, f"token {token}" if token >= held else "")
        if position == 15:
            under = y + 36
            middle = left + 2.5 * width
            picture.line([(middle, under), (middle, under + 18), (193, under + 18), (193, under)])
            picture.text(middle + 8, under + 22, "fold: the state gets tokens 10 to 14")
    for x, kind, text in (
        (118, "a", "read by the step"),
        (264, "b", "record written by the step"),
        (470, "later", "row without a token that counts"),
    ):
        picture.box(x, 276, 20, 16, kind)
        picture.text(x + 26, 288.5, text)
    return picture.svg()


FORMATS = {
    "float32": ("float32", "later"),
    "bfloat16": ("bfloat16", "a"),
    "int8, a scale a value": ("int8", "b"),
    "e4m3, a scale a value": ("fp8 e4m3", "c"),
}
DECADES = (100, 1000, 10_000, 100_000)


def height_of(error: float) -> float:
    """Two strips: 1e-7 to 1e-6 below, and 1e-3 to 1 above, of 58 pixels for a factor of ten."""
    if error < 1e-5:
        return 290 - 40 * (math.log10(error) + 7)
    return 226 - 58 * (math.log10(error) + 3)


def rounding() -> str:
    """The mean error of each format in each decade of steps, for both kinds of gates."""
    records = [json.loads(line) for line in RECORDS.read_text("utf-8").splitlines()]
    picture = Picture(396)
    for left, gates in ((60, "model"), (420, "mild")):
        picture.text(
            left, 20, f"{gates} gates" if gates == "mild" else "gates of a model", "strong"
        )
        for power in (-7, -6, -3, -2, -1, 0):
            y = height_of(10.0**power)
            picture.line([(left, y), (left + 270, y)], "faint", head=False)
            picture.text(left - 8, y + 4.5, f"1e{power}" if power else "1", "end")
        # Two strokes between the strips show that the axis leaves out 1e-6 to 1e-3.
        for y in (235, 241):
            picture.line([(left - 7, y + 4), (left + 7, y - 4)], head=False)
        places = {last: left + 24 + 74 * i for i, last in enumerate(DECADES)}
        for last, x in places.items():
            picture.text(x, 312, f"{last:,}", "middle")
        # Dashed lines lie over solid ones, with which some of them coincide.
        for every, dashes in ((15, ""), (1, ";stroke-dasharray:7 4")):
            for name, (_, kind) in FORMATS.items():
                points = [
                    (places[x["steps"][1]], height_of(x["mean"]))
                    for x in records
                    if (x["gates"], x["format"], x["every"]) == (gates, name, every)
                ]
                path = "M" + "L".join(f"{x:g} {y:.1f}" for x, y in points)
                style = f"fill:none;stroke-width:2.4{dashes}"
                picture.parts.append(f'<path class="{kind}" style="{style}" d="{path}"/>')
    picture.text(360, 332, "steps, up to", "middle")
    for i, (text, kind) in enumerate(FORMATS.values()):
        picture.box(60 + 120 * i, 348, 20, 16, kind)
        picture.text(86 + 120 * i, 360.5, text)
    picture.text(
        60, 388, "dashed: rounded in every step; solid: with a window of 16 rows, once in 15"
    )
    return picture.svg()


PICTURES = {"state_rounding.svg": rounding, "window.svg": window}


if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (ASSETS / name).write_text(draw(), encoding="utf-8")
