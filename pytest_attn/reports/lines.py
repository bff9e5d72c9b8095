"""Lines of text: numbers and times as they are read, labels, and tables that a narrow terminal has room for."""

import math
import os
import re
import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pkgutil import resolve_name
from typing import Any

from pytest_attn.seam import added, guests
from pytest_attn.workloads.functions import printable

#: characters of the labels of a mismatch or a regression
LABEL_WIDTH = 10
#: characters of what an exception says
_LONGEST = 1000
#: numbers from which on powers of ten are easier to read than digits
_LARGE = 1e6


def figure(value: float, plain: str) -> str:
    """Return a number as `plain` formats it, and by its power of ten where it is large: "3.1e30", "infinite"."""
    if math.isinf(value):
        return "infinite" if value > 0 else "-infinite"
    if math.isnan(value) or abs(value) < _LARGE:
        return format(value, plain)
    digits, power = f"{value:.1e}".split("e")
    return f"{digits}e{int(power)}"


def z_figure(z: float) -> str:
    """Return a z as it is written everywhere: "7.31", "21,825", "3.1e30"."""
    return figure(z, ".2f" if z < 100 else ",.0f")


def told_apart(one: float, other: float, least: int = 6) -> tuple[str, str]:
    """Return two numbers as they are read, in `least` digits, or with as many as show that they differ."""
    short = tuple(figure(x, f".{least}g") if math.isfinite(x) else f"{x}" for x in (one, other))
    texts = (short, *(tuple(f"{x:.{digits}g}" for x in (one, other)) for digits in (6, 9, 17)))  # float32 needs 9, float64 17
    first, second = next((both for both in texts if both[0] != both[1]), short)
    return first, second


def raised_words(kind: str, text: str) -> str:
    """Return the kind of an exception with the first line of its text that has words, if any: "ValueError: no softcap"."""
    said = f"{kind}: {next(filter(None, map(str.strip, text.splitlines())), '')}".removesuffix(": ")
    return printable(said, _LONGEST)


def count(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun, which is in the plural but after 1."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def some(names: Sequence[str], most: int = 6) -> str:
    """Return the first of some names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most:,} more" if len(names) > most else "")


def labeled(label: str, text: str, width: int = LABEL_WIDTH) -> str:
    """Return one indented line, such as "  where      all 4 heads"."""
    return f"  {label:<{width}} {text}"


def taken_apart(text: str, width: int = LABEL_WIDTH) -> list[dict[str, str]]:
    """Return the lines of a text, each with its label, "" where it has none: what `labeled` put together."""
    long = re.compile(rf"  (\S{{{width},}}) (\S.*)")  # or as long as the column is wide
    lines = []
    for line in text.splitlines():
        label, rest = line[2 : 2 + width], line[2 + width :]
        is_short = line[:2] == "  " and label[:1].strip() and label[-1] == " " and rest[:1] == " " and rest[1:2].strip()
        found = (label.rstrip(), rest[1:]) if is_short else m.groups() if (m := long.fullmatch(line)) else ("", line)
        lines.append({"label": found[0], "text": found[1]})
    return lines


def together(lines: Sequence[Mapping[str, str]]) -> str:
    """Return the text of lines that were taken apart, whatever their labels' width was."""
    return "\n".join(labeled(line["label"], line["text"]) if line["label"] else line["text"] for line in lines)


def duration(seconds: float, milliseconds_from: float = 1e-4) -> str:
    """Return a time with four digits and its unit: "6.81 us", "0.398 ms", "1.21 s".

    milliseconds_from: the seconds below which it is in microseconds.
    """
    for limit, factor, unit in ((milliseconds_from, 1e6, "us"), (1.0, 1e3, "ms")):
        if seconds < limit:
            return f"{seconds * factor:.4g} {unit}"
    return f"{seconds:.4g} s"


def compared_by() -> str:
    """Say what decides over times beside other work, which none of another hour can; "" where no guest does."""
    return next((guest.compares for guest in guests() if guest.compares), "")


def timed_as(mode: str, calls: int, l2: str) -> str:
    """Return how a time was taken: "host clock, 4 calls a sample, L2 warm"."""
    return f"{'host clock' if mode == 'host' else mode}, {count(calls, 'call')} a sample, L2 {l2}"


def duration_in_column(seconds: float) -> str:
    """Return a time with its unit, aligned by the decimal point within a unit."""
    if seconds < 1e-4:
        return f"{seconds * 1e6:.2f} us"
    return f"{seconds * 1e3:.4f} ms" if seconds < 1e-2 else f"{seconds * 1e3:.2f} ms"


def said_by_guests(latency: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what guests say of a latency's fields of theirs: the field, and a line. latency: as records have it."""
    for name, field in added("latency").items():
        if latency.get(name):
            yield name, resolve_name(field.line)(latency[name])


# -- tables: columns of equal width --------------------------------------------------------------------------------------

_GAP, _INDENT = 2, 4
#: how narrow a column of words may become before it goes on the next line, in characters: what takes fewest lines is taken
_LEAST = (20, 30, 40, 60)
#: the columns that stand on the same line, with their widths
_Band = dict[int, int]


def room(is_terminal: bool) -> int | None:
    """Return what a line may have, in characters: a terminal's width, or what COLUMNS says; None where neither does.

    Less than 40 is not believed, as pytest does not.
    """
    width = shutil.get_terminal_size().columns
    return (width if width >= 40 else 80) if is_terminal or os.environ.get("COLUMNS") else None


def aligned(
    table: Sequence[Sequence[str]], right: tuple[int, ...] = (), width: int | None = None, indent: str = ""
) -> list[str]:
    """Return rows as text with columns of equal width.

    right: the columns whose cells end at the same place. width: what a line may have, in characters; None: what it needs.
    Where a row is wider, its cells are wrapped at spaces, and columns that find no room even then follow below, indented.
    indent: what every line begins with.
    """
    inner = width and width - len(indent)
    layouts = []
    for least in _LEAST if inner else _LEAST[:1]:
        bands = _bands(table, inner, least)
        rows = ([line for band in bands for line in _lines(row, band, right, band is not bands[0])] for row in table)
        layouts.append(["\n".join(lines) for lines in rows])
    fewest = min(layouts, key=lambda texts: sum(text.count("\n") for text in texts))
    return [textwrap.indent(text, indent) for text in fewest]


def narrowed(table: Sequence[Sequence[str]], width: int | None, expendable: Sequence[str]) -> list[list[str]]:
    """Return the table without as many of the expendable columns, named by their titles, as must go for it to fit."""
    kept = [list(row) for row in table]
    for title in expendable:
        if width is None or max(map(len, aligned(kept))) <= width:
            break
        at = kept[0].index(title)
        kept = [row[:at] + row[at + 1 :] for row in kept]
    return kept


def _bands(table: Sequence[Sequence[str]], width: int | None, least: int) -> list[_Band]:
    """Spread the columns over as few lines as hold them."""
    columns = list(zip(*table, strict=True))
    natural = {at: max(map(len, cells)) for at, cells in enumerate(columns)}
    if width is None or _taken(natural) <= width:
        return [natural]
    bands: list[_Band] = [{}]
    for at, cells in enumerate(columns):
        longest_word = max((len(word) for cell in cells for word in cell.split()), default=0)
        narrowest = min(natural[at], max(least, longest_word))
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


def _lines(row: Sequence[str], band: _Band, right: tuple[int, ...], is_below: bool) -> Iterator[str]:
    """Yield what stands of a row in the columns of a band; nothing where all that would follow below is empty."""
    if is_below and not any(row[at] for at in band):
        return
    indent = " " * _INDENT if is_below else ""
    wrapped = (
        textwrap.wrap(row[at], width, break_on_hyphens=False) if len(row[at]) > width else [row[at]]
        for at, width in band.items()
    )
    for cells in zip_longest(*wrapped, fillvalue=""):
        placed = zip(cells, band.items(), strict=True)
        padded = [cell.rjust(width) if at in right else cell.ljust(width) for cell, (at, width) in placed]
        yield (indent + (" " * _GAP).join(padded)).rstrip()
