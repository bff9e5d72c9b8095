"""Tables of text: columns of equal width, on lines that a narrow terminal has room for."""

from __future__ import annotations

import contextlib
import os
import textwrap
from collections.abc import Iterator, Sequence
from itertools import zip_longest

_GAP, _INDENT = 2, 4
#: how narrow a column of words may become before it goes on the next line, in characters: what takes fewest lines is taken
_LEAST = (20, 30, 40, 60)
#: the columns that stand on the same line, with their widths
_Band = dict[int, int]


def room(is_terminal: bool) -> int | None:
    """Return what a line may have, in characters: a terminal's width, or what COLUMNS says; None where neither does."""
    return terminal_width(1) if is_terminal or os.environ.get("COLUMNS") else None


def terminal_width(descriptor: int) -> int:
    """Return what COLUMNS says, or else the terminal; less than 40 is not believed, as pytest does not."""
    try:
        width = int(os.environ.get("COLUMNS", "0"))
    except ValueError:
        width = 0
    if not width:
        with contextlib.suppress(OSError):  # no terminal, or none any more
            width = os.get_terminal_size(descriptor).columns
    return width if width >= 40 else 80


def aligned(
    table: Sequence[Sequence[str]], right: tuple[int, ...] = (), width: int | None = None, indent: str = ""
) -> list[str]:
    """Return rows as text with columns of equal width.

    right: the columns whose cells end at the same place. width: what a line may have, in characters; None: what it needs.
    Where a row is wider, its cells are wrapped at spaces, and columns that find no room even then follow below, indented.
    indent: what every line begins with.
    """
    inner = width and width - len(indent)
    layouts = (_texts(table, right, _bands(table, inner, least)) for least in (_LEAST if inner else _LEAST[:1]))
    fewest = min(layouts, key=lambda texts: sum(text.count("\n") for text in texts))
    return [textwrap.indent(text, indent) for text in fewest]


def _texts(table: Sequence[Sequence[str]], right: tuple[int, ...], bands: list[_Band]) -> list[str]:
    return ["\n".join(line for band in bands for line in _lines(row, band, right, band is not bands[0])) for row in table]


def narrowed(table: Sequence[Sequence[str]], width: int | None, expendable: Sequence[str]) -> list[list[str]]:
    """Return the table without as many of the expendable columns, named by their titles, as must go for it to fit."""
    left = [list(row) for row in table]
    for title in expendable:
        if width is None or max(map(len, aligned(left))) <= width:
            break
        at = left[0].index(title)
        left = [row[:at] + row[at + 1 :] for row in left]
    return left


def _bands(table: Sequence[Sequence[str]], width: int | None, least: int) -> list[_Band]:
    """Spread the columns over as few lines as hold them."""
    columns = list(zip(*table, strict=True))
    natural = {at: max(map(len, cells)) for at, cells in enumerate(columns)}
    if width is None or _taken(natural) <= width:
        return [natural]
    bands: list[_Band] = [{}]
    for at, cells in enumerate(columns):
        narrowest = min(natural[at], max(least, *map(_longest_word, cells)))
        space = width - (_INDENT if len(bands) > 1 else 0)
        if bands[-1] and _taken({**bands[-1], at: narrowest}) > space:
            bands.append({})
        bands[-1][at] = min(narrowest, width - _INDENT)
    return [_widened(band, natural, width - (_INDENT if band is not bands[0] else 0)) for band in bands]


def _widened(band: _Band, natural: _Band, space: int) -> _Band:
    """Give columns what they need, the narrowest first, while there is room."""
    widths = dict(band)
    for _ in range(space - _taken(band)):
        wanting = [at for at in widths if widths[at] < natural[at]]
        if wanting:
            widths[min(wanting, key=widths.__getitem__)] += 1
    return widths


def _taken(band: _Band) -> int:
    return sum(band.values()) + _GAP * (len(band) - 1)


def _longest_word(cell: str) -> int:
    return max(map(len, cell.split()), default=0)


def _lines(row: Sequence[str], band: _Band, right: tuple[int, ...], is_below: bool) -> Iterator[str]:
    """Yield what stands of a row in the columns of a band; nothing where all that would follow below is empty."""
    if is_below and not any(row[at] for at in band):
        return
    indent = " " * _INDENT if is_below else ""
    for cells in zip_longest(*(_wrapped(row[at], width) for at, width in band.items()), fillvalue=""):
        placed = zip(cells, band.items(), strict=True)
        padded = [cell.rjust(width) if at in right else cell.ljust(width) for cell, (at, width) in placed]
        yield (indent + (" " * _GAP).join(padded)).rstrip()


def _wrapped(cell: str, width: int) -> list[str]:
    return textwrap.wrap(cell, width, break_on_hyphens=False) if len(cell) > width else [cell]
