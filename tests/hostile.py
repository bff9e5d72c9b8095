"""Names that would be code, commands or control characters for who reads them, and what must be true of any text with them."""

import re

NAMES = {
    "newline": "first\nimport os; os.mkdir('pwned')",
    "carriage return": "first\r::error::x",
    "quotes": "it's \"\"\" and ''' {1/0} %s \\",
    "percent": "a%0A::error::x%0D",
    "workflow command": "::error file=x::y",
    "indented command": "  ::stop-commands::x",
    "command of version 1": "x ##[error]y",
    "backticks": "a`` ` ``` $(mkdir pwned) `mkdir pwned`",
    "markup": "</script><script>window.hacked=1</script><img src=x onerror=window.hacked=1>|<!--",
    "ansi": "\x1b[2J\x1b]0;title\x07red\x9b31m",
    "bidi": "user\u202e\u2066 elif\u2069\u200f",
    "surrogates": "test_\udcff\ud800",
    "separators": "a\x0b\x0c\x1c\x85\u2028\u2029b",
    "null": "a\x00b",
    "long": "n" * 10_000,
}
#: none of which may be in a text that people read, beside newlines
CONTROL = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
#: what a runner of GitHub takes for a command: it looks behind spaces, and for the older form anywhere
COMMAND = re.compile(r"^\s*::(?!(?:error|warning|notice) (?:file|title)=[^:]*::)\w.*::|##\[", re.MULTILINE)


def unsafe(text, longest=1_000):
    """Return what is wrong with a text for a terminal or a log: control characters, commands, lines without an end."""
    too_long = [f"{line[:80]}..." for line in text.split("\n") if len(line) > longest]
    return [*CONTROL.findall(text), *COMMAND.findall(text), *too_long]
