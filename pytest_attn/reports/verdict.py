"""The verdicts: how one judgment ended, in one word, and what follows from each."""

from __future__ import annotations

from enum import Enum

#: what is untested by a check whose sums in a half precision are too short to show a fault
LONG_SUMS = "long sums"


class Tone(str, Enum):
    """Look of a verdict in a report."""

    BAD = "bad"
    DOUBT = "doubt"
    GOOD = "good"
    PLAIN = "plain"
    NONE = "none"


class Cause(str, Enum):
    """Why there is a verdict, where something follows from it: what a person types next, or how a report shows it."""

    NONE_RECORDED = "none recorded"
    RECORDED_OTHERWISE = "recorded otherwise"  # with another L2 state, layout or number of threads
    ANOTHER_PROTOCOL = "another protocol"
    ANOTHER_SHAPE = "another shape"
    UNUSABLE_FILE = "unusable file"
    DEFECT_NOT_SHOWN = "defect not shown"
    DECLINED = "declined"  # by the kernel itself, in its own words or in those of its capabilities
    NOT_HERE = "not here"  # the machine lacks the library or the device, or cannot import it: none of its cases can run


class Verdict(str, Enum):
    """End of one judgment; the gravest come first, and what says nothing of a kernel comes last.

    The value is the name in JSON, but for those below "as shown": there a report tells apart what JSON calls "passed" or
    "raised". word: as a reader meets it. counted: behind a number. tone: of its color. glyph: beside the color, never without.
    level: of an annotation on a code host, "" for none.
    """

    word: str
    counted: str
    tone: Tone
    glyph: str
    level: str

    def __new__(cls, value: str, word: str, counted: str, tone: Tone, glyph: str, level: str = "") -> Verdict:
        """Make a member that is its name in JSON, with what follows from it."""
        member = str.__new__(cls, value)
        member._value_ = value
        member.word, member.counted, member.tone, member.glyph = word, counted or word, tone, glyph
        member.level = level
        return member

    MISMATCH = "mismatch", "wrong", "", Tone.BAD, "✗", "error"
    BROKEN = "broken", "invariant broken", "with a broken invariant", Tone.BAD, "✗", "error"
    NO_RESULT = "no result", "no result", "without a result", Tone.BAD, "!", "error"  # it hung, or its process ended
    RAISED = "raised", "raised", "", Tone.BAD, "!", "error"
    FAILED = "failed", "failed outside of a judgment", "", Tone.BAD, "!", "error"
    REGRESSED = "regressed", "regressed", "", Tone.BAD, "▼", "error"
    UNCONFIRMED = "unconfirmed", "slower, not confirmed", "slower and not confirmed", Tone.BAD, "▼", "error"
    SLOWER = "slower", "slower", "", Tone.BAD, "▼", "error"  # than the other side
    UNRECORDED = "unrecorded", "not recorded", "", Tone.BAD, "!", "error"
    INCONCLUSIVE = "inconclusive", "inconclusive", "", Tone.DOUBT, "?", "warning"
    KNOWN_DEFECT = "known defect", "known defect", "known defects", Tone.DOUBT, "△", "notice"
    EXPECTED = "expected", "wrong as expected", "", Tone.DOUBT, "△"
    UNEXPECTED = "unexpected", "right despite a known defect", "", Tone.DOUBT, "△"  # as shown
    PASSED = "passed", "right", "", Tone.GOOD, "✓"
    APPROXIMATE = "approximate", "right as approximate", "", Tone.GOOD, "≈"  # as shown
    HELD = "held", "invariants hold", "with all invariants", Tone.GOOD, "✓"
    HELD_IN_PART = "held in part", "invariants hold that apply", "with all invariants that apply", Tone.GOOD, "✓"  # as shown
    FAST = "fast", "as fast as recorded", "", Tone.GOOD, "✓"  # as shown
    FASTER = "faster", "faster", "", Tone.GOOD, "▲"  # than the other side
    ALIKE = "no difference", "no difference", "without a difference", Tone.GOOD, "✓"
    RECORDED = "recorded", "recorded", "", Tone.PLAIN, "○"
    NO_BASELINE = "no baseline", "no baseline", "without a baseline", Tone.PLAIN, "○"
    UNTIMED = "untimed", "not timed", "", Tone.PLAIN, "○"
    MEASURED = "measured", "measured", "", Tone.PLAIN, "○"
    SKIPPED = "skipped", "skipped", "", Tone.NONE, "-"

    def __str__(self) -> str:
        return str(self.value)

    def __format__(self, spec: str) -> str:
        return format(str(self.value), spec)

    @classmethod
    def named(cls, name: str) -> Verdict | None:
        """Return a verdict by its name; None for one that this version does not know."""
        return _BY_NAME.get(name)

    @property
    def is_wrong(self) -> bool:
        """True where it ends a run with a failure: of its test, or of the recording that was asked for."""
        return self.level == "error"

    @property
    def is_doubtful(self) -> bool:
        """True where somebody should look at it although nothing failed."""
        return self.level in ("warning", "notice")


_BY_NAME = {verdict.value: verdict for verdict in Verdict}
