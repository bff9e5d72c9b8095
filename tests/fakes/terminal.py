"""A terminal of 80 columns: what is written to it, and what of that stays on the screen."""

import os
import pty
import re
import select
import subprocess
import sys
import time

WIDTH = 80


def on_a_terminal(folder, *args, **environment):
    """Run pytest in a folder, on a pseudo-terminal; return all that it wrote."""
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "pytest", "--color=no", *args]
    known = {**os.environ, "COLUMNS": str(WIDTH), "TERM": "xterm", **environment}
    with subprocess.Popen(command, cwd=folder, stdin=slave, stdout=slave, stderr=slave, env=known) as process:
        os.close(slave)
        written, deadline = b"", time.monotonic() + 120
        while time.monotonic() < deadline:
            if select.select([master], [], [], 1)[0]:
                try:
                    written += os.read(master, 65536)
                except OSError:  # the other end is closed
                    break
            elif process.poll() is not None:
                break
        process.kill()
    os.close(master)
    return written.decode()


def as_seen(written):
    """Return the lines that stay: what is written later covers what was there, and long lines go on below.

    Knows the escapes that move up (A), right (C) and left (D), and that erase what is right of the cursor (K).
    """
    rows, row, at = [[]], 0, 0
    for escape, count, letter in re.findall(r"(\x1b\[(\d*)[A-Za-z])|(.)", written, re.DOTALL):
        number = int(count or 1)
        if escape:
            move = escape[-1]
            row -= number if move == "A" else 0
            at += number if move == "C" else -number if move == "D" else 0
            assert 0 <= at < WIDTH
            if move == "K":
                del rows[row][at:]
        elif letter == "\r":
            at = 0
        elif letter == "\n" or at == WIDTH:
            row, at = row + 1, at if letter == "\n" else 0
            rows += [[]] if row == len(rows) else []
        if letter and letter not in "\r\n":
            rows[row] += " " * (at - len(rows[row]))
            rows[row][at : at + 1] = [letter]
            at += 1
    return ["".join(cells).rstrip() for cells in rows]


def between_tests(lines):
    """Return all lines from the first that names a test's file to the last that does."""
    naming = [number for number, line in enumerate(lines) if "test_it.py" in line]
    return lines[naming[0] : naming[-1] + 1]
