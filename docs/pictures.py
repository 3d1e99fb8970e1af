"""The pictures of structure in docs/assets, drawn as SVG: `python docs/pictures.py` writes them.

Coordinates are pixels of a picture that is 720 wide. A page scales it down to about 700.
"""

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

ASSETS = Path(__file__).parent / "assets"
WIDTH = 720

# Fill and edge of each kind of box, on a light page and on a dark one.
COLORS = {
    "a": ("#cfe4ff", "#2f6fbf", "#1d3d63", "#6ea8f0"),
    "b": ("#ffdfb8", "#b8690f", "#5c3b10", "#e6a454"),
    "c": ("#d2efd4", "#36873f", "#1c4a27", "#6cc077"),
    "later": ("#eef0f3", "#8b95a1", "#2a3038", "#76818d"),
    "frame": ("none", "#8b95a1", "none", "#76818d"),
    "some": ("#ffffff", "#57606a", "#1e2129", "#aab4be"),
}
INK = ("#1f2328", "#e4e9ee")
PAGE = ("#ffffff", "#1e2129")


def style() -> str:
    def rules(shade: int) -> str:
        ink, page = INK[shade], PAGE[shade]
        found = [
            f".page,.ring{{fill:{page}}}",
            f"text,.dot,.head{{fill:{ink}}}",
            f".line,.ring{{stroke:{ink}}}",
        ]
        for kind, colors in COLORS.items():
            fill, edge = colors[2 * shade : 2 * shade + 2]
            found.append(f".{kind}{{fill:{fill};stroke:{edge}}}")
        return "".join(found)

    return (
        "<style>text{font:13px system-ui,'Segoe UI',Roboto,'DejaVu Sans',sans-serif}"
        ".middle{text-anchor:middle}.end{text-anchor:end}.strong{font-weight:600}"
        ".line{fill:none;stroke-width:1.4}.faint{opacity:.25}.empty,.some{stroke-dasharray:4 3}"
        f"{rules(0)}@media(prefers-color-scheme:dark){{{rules(1)}}}</style>"
    )


class Picture:
    """Parts are drawn in the order of the calls, later ones over earlier ones."""

    def __init__(self, height: int) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
            f'viewBox="0 0 {WIDTH} {height}">',
            style(),
            '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            'markerHeight="7" orient="auto-start-reverse">'
            '<path class="head" d="M0 0L8 4L0 8z"/></marker>',
            f'<rect class="page" width="{WIDTH}" height="{height}"/>',
        ]

    def box(
        self, x: float, y: float, width: float, height: float, kind: str, text: str = ""
    ) -> None:
        self.parts.append(
            f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height}" rx="3"/>'
        )
        self.text(x + width / 2, y + height / 2 + 4.5, text, "middle")

    def text(self, x: float, y: float, text: str, classes: str = "") -> None:
        if text:
            self.parts.append(f'<text class="{classes}" x="{x:g}" y="{y:g}">{escape(text)}</text>')

    def line(
        self,
        points: Sequence[tuple[float, float]],
        classes: str = "",
        *,
        head: bool = True,
        both: bool = False,
    ) -> None:
        """An arrow through the points, with a head at its end, at both ends or at none."""
        path = "M" + "L".join(f"{x:g} {y:g}" for x, y in points)
        end = ' marker-end="url(#head)"' if head else ""
        end += ' marker-start="url(#head)"' if both else ""
        self.parts.append(f'<path class="line {classes}" d="{path}"{end}/>')

    def mark(self, x: float, y: float, writes: bool, reads: bool) -> None:
        if reads:
            self.parts.append(
                f'<circle class="ring" cx="{x:g}" cy="{y:g}" r="6" stroke-width="1.6"/>'
            )
        if writes:
            self.parts.append(
                f'<circle class="dot" cx="{x:g}" cy="{y:g}" r="{3 if reads else 6}"/>'
            )

    def svg(self) -> str:
        return "\n".join([*self.parts, "</svg>", ""])


def hopper_block() -> str:
    """The block with two states, at the start of a tile. Times are not to scale."""
    picture = Picture(442)
    gates, inverse, loader, stores = 16, 78, 160, 352
    states = (220, 280)
    top, bottom = 212, 318  # of the frame around both states
    picture.box(92, top, 622, bottom - top, "frame")
    for y, high, name, warps in (
        (gates, 30, "gates", "warp 3"),
        (inverse, 44, "inverse", "warpgroup 3"),
        (loader, 30, "loader", "warp 0"),
        (states[0], 30, "state 0", "warpgroup 1"),
        (states[1], 30, "state 1", "warpgroup 2"),
        (stores, 30, "stores", "warps 1, 2"),
    ):
        picture.line([(96, y + high / 2), (710, y + high / 2)], "faint", head=False)
        picture.text(4, y + high / 2 - 2, name, "strong")
        picture.text(4, y + high / 2 + 13, warps)

    def lane(y: float, high: float, boxes: str) -> None:
        """Boxes as "x width kind text", separated by semicolons."""
        for box in boxes.split(";"):
            x, width, kind, text = box.strip().split(" ", 3)
            picture.box(float(x), y, float(width), high, kind, text)

    # Barriers *full* of both chunks.
    for x in (106, 128, 150, 208, 230, 252):
        picture.line([(x, loader + 30), (x, top)])
    picture.line([(106, loader), (106, 146), (140, 146), (140, inverse + 44)])
    picture.line([(208, loader), (208, 146), (228, 146), (228, inverse + 44)])
    for x, trunk, a in ((156, 180, 202), (206, 298, 314)):
        picture.line([(x, gates + 30), (x, 58), (a, 58), (a, inverse)])
        picture.line([(trunk, 58), (trunk, top)])
    for x in (280, 392):
        picture.line([(x, inverse + 11), (x + 8, inverse + 11), (x + 8, top)])
    picture.line([(214, states[0] + 30), (214, 265), (330, 265), (330, states[1])])
    picture.line([(412, states[1]), (412, 265), (484, 265), (484, states[0] + 30)])
    picture.line([(386, bottom), (386, 336), (404, 336), (404, stores)])
    picture.line([(570, bottom), (570, 336), (588, 336), (588, stores)])
    # Barriers *empty* that delay a warp here.
    for x, to in ((310, 340), (498, 576)):
        picture.line([(x, top), (x, 202), (to, 202), (to, loader + 30)], "empty")
    picture.line([(526, top), (526, inverse + 44)], "empty")
    picture.line([(440, stores), (440, 336), (524, 336), (524, bottom)], "empty")
    for x, y, text in (
        (145, 142, "k"), (234, 142, "k"), (207, 73, "gates"), (320, 73, "gates"), (276, 150, "T"),
        (404, 150, "T"), (270, 261, "P"), (440, 261, "P"),
        (394, 332, "o"), (578, 332, "o"),
        (318, 198, "v"), (530, 198, "v"), (531, 150, "T"), (474, 332, "o"),
    ):  # fmt: skip
        picture.text(x, y, text)

    lane(gates, 30, "120 50 a gates;172 50 b gates;224 70 later 2, 3")
    lane(
        inverse,
        44,
        "128 44 a k kᵀ;190 24 a A;306 24 b A;406 24 later A;496 22 later A;520 66 later T",
    )
    lane(inverse, 23, "216 64 a T;332 60 b T;432 60 later T")
    lane(inverse + 24, 20, "216 64 b k kᵀ;332 60 later k kᵀ;432 60 later k kᵀ")
    lane(loader, 30, "96 20 a k;118 20 a v;140 20 a q;198 20 b k;220 20 b v;242 20 b q")
    lane(loader, 30, "264 20 later k;330 20 later v;352 20 later q;374 20 later k")
    lane(loader, 30, "566 20 later v;588 20 later q;610 20 later k")
    lane(states[0], 30, "190 34 a P;224 34 a S k;258 22 a x;292 30 a u;322 60 a o, S")
    lane(states[1], 30, "190 34 a S k;224 22 a x;292 30 a u;322 60 a o, S")
    lane(
        states[0], 30, "388 34 b S k;422 22 b x;444 30 b u;474 60 b o, S;540 168 later P, S k, ..."
    )
    lane(states[1], 30, "388 34 b P;422 34 b S k;456 22 b x;478 30 b u;508 60 b o, S")
    lane(states[1], 30, "574 134 later S k, x, ...")
    lane(stores, 30, "394 50 a o;578 50 b o")
    for x, kind, text in ((92, "a", "a chunk"), (186, "b", "the next"), (280, "later", "later")):
        picture.box(x, 404, 20, 16, kind)
        picture.text(x + 26, 417, text)
    for x, classes, text in (
        (366, "", "full: may be read"),
        (526, "empty", "empty: may be filled"),
    ):
        picture.line([(x, 412), (x + 30, 412)], classes)
        picture.text(x + 36, 417, text)
    return picture.svg()


def segments() -> str:
    """A sequence in five segments. Only the length of the fold is not to scale."""
    picture = Picture(330)
    left, first, later, row = 104, 120, 110, 44
    ends = [left, *(left + first + later * i for i in range(5))]
    picture.text(4, 30, "uncut", "strong")
    picture.box(left, 12, ends[-1] - left, 28, "later", "walk, with o")
    third = left + first + 144  # the third round's begin
    for x, text in ((left, "1: walk, maps"), (left + first + 8, "2: fold"), (third, "3: walk")):
        picture.text(x, 72, text, "strong")
    for i in range(5):
        y = 84 + row * i
        picture.text(4, y + 19, f"segment {i}", "strong")
        picture.line([(left, y + 14), (712, y + 14)], "faint", head=False)
        if i == 0:
            picture.box(left, y, first, 28, "a", "walk, with o")
            continue
        if i < 4:
            picture.box(left, y, later - 10, 28, "c", "maps M, b")
        x = left + first + 8 + 30 * (i - 1)  # of the segment's start
        source = left + first if i == 1 else x - 4
        picture.line([(source, y - row + 14), (x + 20, y - row + 14), (x + 20, y)])
        if i > 1:
            made = left + later - 30
            picture.line([(made, y - 16), (made, y - 8), (x + 8, y - 8), (x + 8, y)])
        picture.box(x, y, 26, 28, "b", f"S{i}")
        picture.line([(x + 26, y + 14), (third, y + 14)])
        picture.box(third, y, later, 28, "a", "walk, with o")
    picture.line([(left + 2, 318), (left + 140, 318)])
    picture.text(left + 148, 322, "time")
    picture.text(third, 322, "S2 = M S1 + b, and so on")
    return picture.svg()


def lifelines(
    picture: Picture, left: float, top: float, columns: Sequence[float], rows: Iterable[str]
) -> float:
    """A line for each thing in memory, over kernels at the x of `columns`; returns the y below.

    A row has a character for each column: w writes, r reads, e either. It may begin with "<", which
    says that the caller gives it, and end with ">": the caller gets it. An empty row has no line.
    """
    y = top
    for row in rows:
        marks = row.strip("<>")
        used = [x for x, mark in zip(columns, marks, strict=True) if mark != "."]
        if used:
            start = left if row.startswith("<") else used[0]
            end = columns[-1] + 30 if row.endswith(">") else used[-1]
            picture.line([(start, y), (end, y)], head=row.endswith(">"))
        for x, mark in zip(columns, marks, strict=True):
            if mark != ".":
                picture.mark(x, y, writes=mark in "we", reads=mark in "re")
        y += 26
    return y


def marks_explained(picture: Picture, y: float, marks: str) -> None:
    names = {"w": "writes", "r": "reads", "e": "writes or reads"}
    for i, mark in enumerate(marks):
        picture.mark(128 + 80 * i, y, writes=mark in "we", reads=mark in "re")
        picture.text(140 + 80 * i, y + 4.5, names[mark])


def backward() -> str:
    names = {
        "frames, factors": "wrr.rrrr",
        "deal of tiles": "w...rrr.",
        "q kᵀ, T": ".wr.err.",
        "maps M, b": "..wr....",
        "starts of dS": "...wr...",
        "starts of S": "...w.wr.",
        "dS of each chunk": "....w.r.",
        "dv (fp16 also dx)": "....w.r.>",
        "dh0": "....w...>",
        "parts of dbeta, dg": "......wr",
        "dq, dk of slices": "......wr",
        "dq, dk": "......we>",
        "dg, dbeta, ...": ".......w>",
    }
    picture = Picture(68 + 26 * len(names) + 40)
    columns = [154 + 73 * i for i in range(8)]
    steps = (
        "1 frames;2 triangles;cut maps;cut folds;3 walk back;4 walk states;5 walk forward;6 sums"
    )
    for x, step in zip(columns, steps.split(";"), strict=True):
        number, name = step.split(" ", 1)
        optional = number in ("2", "cut", "4")
        picture.box(x - 34, 10, 68, 46, "some" if optional else "a")
        words = name.split(" ")
        picture.text(x, 28, f"{number} {words[0]}" if len(words) > 1 else number, "middle strong")
        picture.text(x, 46, words[-1], "middle")
        picture.line([(x, 56), (x, 68 + 26 * len(names) - 8)], "faint", head=False)
    for i, name in enumerate(names):
        picture.text(4, 80 + 26 * i + 4.5, name)
    below = lifelines(picture, 120, 80, columns, names.values())
    marks_explained(picture, below + 8, "wre")
    picture.box(434, below, 20, 16, "some")
    picture.text(460, below + 12.5, "only in some calls")
    return picture.svg()


def dataflow() -> str:
    rows = {
        "q, k": ("<r.....", "<r."),
        "beta": ("<.r....", "<r."),
        "g": ("<..r...", "<r."),
        "v": ("<...r..", "<.r"),
        "normalised q, k": ("w..rrr", "wr"),
        "activated beta": (".w.r..", "wr"),
        "g_cumsum": ("..wrrr", "wr"),
        "w, u": ("...wr.", ".."),
        "h, v_new": ("....wr", ".."),
        "A_inv": ("......", "wr"),
        "A_qk, its diagonal": ("......", "wr"),
        "final state": ("....w.>", ".w>"),
        "o": (".....w>", ".w>"),
    }
    picture = Picture(70 + 26 * len(rows) + 36)
    steps = [166 + 62 * i for i in range(6)]
    fused = [590, 660]
    picture.text((steps[0] + steps[-1]) / 2, 20, "by steps (float32)", "middle strong")
    picture.text(sum(fused) / 2, 20, "fused (16-bit)", "middle strong")
    kernels = ("norm", "sigmoid", "cumsum", "WY", "state", "output", "prepare", "fused")
    for x, name in zip((*steps, *fused), kernels, strict=True):
        serial = name in ("state", "fused")
        picture.box(x - 29, 30, 58, 26, "b" if serial else "a", name)
        picture.line([(x, 56), (x, 70 + 26 * len(rows) - 8)], "faint", head=False)
    for i, name in enumerate(rows):
        picture.text(4, 82 + 26 * i + 4.5, name)
    lifelines(picture, 128, 82, steps, [pair[0] for pair in rows.values()])
    below = lifelines(picture, 552, 82, fused, [pair[1] for pair in rows.values()])
    marks_explained(picture, below + 4, "wr")
    picture.box(300, below - 4, 20, 16, "b")
    picture.text(326, below + 8.5, "serial over chunks")
    return picture.svg()


# Arrows of docs/assets/layers.svg; tests/project/test_arrows.py compares them with the imports.
OPERATORS = ("chunk", "recurrent", "norm", "conv", "prep")
LAYERS = (
    ("__main__", "demo"),
    ("demo", "gdn_triton"),
    ("gdn_triton", "explanations"),
    ("gdn_triton", "warming"),
    ("integrations", "explanations"),
    ("integrations", "warming"),
    ("layers", "distributed"),
    ("layers", "step"),
    ("explanations", "step"),
    ("distributed", "operators"),
    ("step", "operators"),
    ("explanations", "operators"),
    ("warming", "operators"),
    ("conv", "prep"),
    ("chunk", "fast"),
    ("chunk", "_ranks"),
    ("operators", "reference"),
    ("operators", "_triton"),
    ("_ranks", "_host"),
    ("_triton", "_host"),
    ("_host", "constants"),
    ("reference", "constants"),
)


def layers() -> str:
    picture = Picture(440)
    rows: dict[int, tuple[str, dict[str, int]]] = {
        14: ("later", {"__main__": 130, "demo": 260, "gdn_triton": 390}),
        82: (
            "c",
            {
                "distributed": 12,
                "layers": 132,
                "step": 252,
                "explanations": 372,
                "integrations": 492,
                "warming": 612,
            },
        ),
        182: ("a", {"chunk": 60, "recurrent": 190, "norm": 320, "conv": 450, "prep": 580}),
        276: ("b", {"fast": 60, "_ranks": 200, "_triton": 370, "reference": 530}),
        338: ("b", {"_host": 285}),
        400: ("b", {"constants": 405}),
    }
    wide, high = 100, 30
    boxes = {name: (x, y, wide, high) for y, (_, row) in rows.items() for name, x in row.items()}
    boxes["operators"] = (40, 146, 660, 82)
    x, y, width, height = boxes["operators"]
    picture.box(x, y, width, height, "frame")
    picture.text(x + 12, y + 22, "operators", "strong")
    for a, b in LAYERS:
        from_x, from_y, from_width, from_height = boxes[a]
        to_x, to_y, to_width, _ = boxes[b]
        start, end = from_x + from_width / 2, to_x + to_width / 2
        if from_y == to_y:
            right = to_x > from_x
            sides = (from_x + right * from_width, to_x + (not right) * to_width)
            picture.line([(side, from_y + high / 2) for side in sides])
        elif "operators" in (a, b):  # straight down, from or to the part
            middle = start if b == "operators" else end
            picture.line([(middle, from_y + from_height), (middle, to_y)])
        else:
            picture.line([(start, from_y + from_height), (end, to_y)])
    for y, (kind, row) in rows.items():
        for name, x in row.items():
            picture.box(x, y, wide, high, kind, name)
    return picture.svg()


def slots() -> str:
    """The example of docs/prefill.md, then a decode step of both requests."""
    picture = Picture(338)
    left, high, request_a, pool, request_b = 110, 32, 34, 142, 250
    for y, name, text in (
        (request_a, "request A", "from zeros"),
        (pool, "pool", "8 slots"),
        (request_b, "request B", "from slot 2"),
    ):
        picture.text(4, y + 13, name, "strong")
        picture.text(4, y + 29, text)
    picture.text(left, 20, "chunk_prefill", "strong")
    picture.text(712, 20, "recurrent_step", "strong end")
    ends = [left + 2.7 * tokens for tokens in (0, 64, 128, 150)]
    for begin, end, text in zip(ends, ends[1:], ("64 tokens", "64 tokens", "22"), strict=False):
        picture.box(begin, request_a, end - begin, high, "a", text)
    picture.box(ends[0], request_b, ends[2] - ends[0], high, "some", "the same 128 tokens")
    picture.box(ends[2], request_b, ends[3] - ends[2], high, "b", "22")
    kinds = {1: "c", 2: "c", 4: "a", 6: "b"}
    centers = [left + 29 + 74 * slot for slot in range(8)]
    for slot, x in enumerate(centers):
        picture.box(x - 29, pool, 58, high, kinds.get(slot, "later"), f"slot {slot}")
    under_a, under_pool = request_a + high, pool + high
    for x, bend, slot in ((ends[1], 84, 1), (ends[2], 100, 2), (ends[3] - 6, 116, 4)):
        to = centers[slot]
        picture.line([(x, under_a), (x, bend), (to, bend), (to, pool)])
    start, end = ends[2] + 14, ends[3] - 14
    picture.line([(centers[2], under_pool), (centers[2], 212), (start, 212), (start, request_b)])
    picture.line(
        [(end, request_b), (end, 212), (centers[6] - 14, 212), (centers[6] - 14, under_pool)]
    )
    for y in (request_a, request_b):
        picture.box(624, y, 58, high, "a" if y == request_a else "b", "1 token")
    across = centers[4] + 18
    picture.line([(across, pool), (across, 124), (652, 124), (652, under_a)], both=True)
    across = centers[6] + 14
    picture.line([(across, under_pool), (across, 212), (652, 212), (652, request_b)], both=True)
    for x, kind, text in (
        (110, "c", "checkpoint of A"),
        (256, "a", "state of A"),
        (366, "b", "state of B"),
        (476, "some", "not computed again"),
    ):
        picture.box(x, 308, 20, 16, kind)
        picture.text(x + 26, 320.5, text)
    return picture.svg()


PICTURES = {
    "backward.svg": backward,
    "dataflow.svg": dataflow,
    "hopper-block.svg": hopper_block,
    "layers.svg": layers,
    "segments.svg": segments,
    "slots.svg": slots,
}


if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (ASSETS / name).write_text(draw(), encoding="utf-8")
