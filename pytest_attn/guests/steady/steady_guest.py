"""The guest steady: `attn.check_steady`, and runs that only compile."""

from typing import TYPE_CHECKING

from pytest_attn.seam import Guest
from pytest_attn.session.option_types import switch

if TYPE_CHECKING:
    from pytest_attn.session.options import Settings

_HERE = "pytest_attn.guests.steady"
COMPILE_ONLY = "--attn-compile-only"
_OPTIONS = {
    "compile_only": switch(
        "Call each kernel once per case, so that what it compiles is kept, and judge nothing; the run fails unless"
        " --attn-unjudged=warn",
        group="run",
        short="call each kernel once, to compile; judge nothing",
    ),
}


def contradiction(settings: "Settings") -> str:
    """Say which option does not go with --attn-compile-only; "" where all do."""
    judging = {
        "--attn-fuzz": settings.more.get("fuzz"),
        **dict.fromkeys(settings.serial_flags, True),
        "--attn-mutants": settings.more.get("mutants"),
        "--attn-latency=require": settings.latency == "require",
    }
    flag = next((flag for flag, is_given in judging.items() if is_given), "") if settings.more["compile_only"] else ""
    return f"{flag}: judges or times, and {COMPILE_ONLY} does neither; leave one of them out" if flag else ""


GUEST = Guest(
    methods={"check_steady": f"{_HERE}.steady_case:check_steady"},
    options=_OPTIONS,
    contradiction=f"{_HERE}.steady_guest:contradiction",
    kernels={"compile_only": f"{_HERE}.compile_run:CompiledOnly"},
)
