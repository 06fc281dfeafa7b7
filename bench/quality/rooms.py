"""The picture of docs/architecture.md: the rooms of the package, and which imports which.

The rows are the layers of import-linter's contract in pyproject.toml, the arrows the imports that
it found in the code. An arrow that follows from others is left out.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

import grimp
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

ROOT = Path(__file__).parents[2]
PACKAGE = "fp8stack"


def layers() -> list[list[str]]:
    """The rooms of each layer, the highest layer first, from the contract."""
    table = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = table["tool"]["importlinter"]["contracts"]
    contract = next(entry for entry in contracts if entry.get("containers") == [PACKAGE])
    return [[room.strip() for room in layer.split("|")] for layer in contract["layers"]]


def imports() -> set[tuple[str, str]]:
    """Pairs of rooms: one that imports, and the room that it imports."""
    graph = grimp.build_graph(PACKAGE, cache_dir=None)
    rooms = {room for layer in layers() for room in layer}
    pairs = set()
    for module in graph.modules:
        for imported in graph.find_modules_directly_imported_by(module):
            pair = tuple(name.split(".")[1] for name in (module, imported) if "." in name)
            if len(pair) == 2 and pair[0] != pair[1] and rooms.issuperset(pair):
                pairs.add((pair[0], pair[1]))
    return pairs


def reduced(pairs: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """The pairs that do not follow from others, in a graph without circles."""
    below: dict[str, set[str]] = {}

    def reachable(room: str) -> set[str]:
        if room not in below:
            direct = {target for source, target in pairs if source == room}
            below[room] = direct.union(*map(reachable, direct))
        return below[room]

    return {
        (source, target)
        for source, target in pairs
        if not any(
            target in reachable(between)
            for start, between in pairs
            if start == source and between != target
        )
    }


def rooms_picture() -> tuple[Figure, dict[str, float]]:
    """The picture, and the number of rooms and imports between them."""
    pairs = imports()
    rows = layers()
    arrows = sorted(reduced(pairs))
    level = {room: height for height, row in enumerate(rows) for room in row}
    # A room whose arrow passes by other layers stands at the side, so that it crosses no box.
    aside = {source for source, target in arrows if level[target] - level[source] > 1}
    places: dict[str, tuple[float, float]] = {}
    for height, row in enumerate(rows):
        inner = [room for room in row if room not in aside]
        for column, room in enumerate(inner):
            places[room] = (column - (len(inner) - 1) / 2, -height)
        for room in aside.intersection(row):
            places[room] = (-1.0 if row.index(room) == 0 else 1.0, -height)
    figure = Figure(figsize=(6.0, 5.6), layout="constrained")
    axes = figure.add_subplot()
    axes.set_axis_off()
    for room, (x, y) in places.items():
        box = FancyBboxPatch((x - 0.36, y - 0.2), 0.72, 0.4, "round,pad=0.02", fc="white", zorder=2)
        axes.add_patch(box)
        axes.text(x, y, room, ha="center", va="center", zorder=3)
    for source, target in arrows:
        (x0, y0), (x1, y1) = places[source], places[target]
        end, bend = (x1, y1 + 0.22), "arc3"
        if source in aside:
            end, bend = (x1 + (0.38 if x0 > x1 else -0.38), y1), "angle,angleA=-90,angleB=0"
        line = {"arrowstyle": "->", "connectionstyle": bend}
        axes.annotate("", end, (x0, y0 - 0.22), arrowprops=line, zorder=1)
    axes.set_xlim(-1.5, 1.5)
    axes.set_ylim(-len(rows) + 0.6, 0.4)
    return figure, {"rooms": len(places), "imports": len(pairs)}
