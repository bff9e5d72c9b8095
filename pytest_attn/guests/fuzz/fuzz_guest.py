"""The guest fuzz: `--attn-fuzz`."""

from importlib.util import find_spec
from typing import TYPE_CHECKING

from pytest_attn.seam import Guest
from pytest_attn.session import option_types

if TYPE_CHECKING:
    from pytest_attn.session.options import Settings

_HERE = "pytest_attn.guests.fuzz"
_OPTIONS = {
    "fuzz": option_types.option(
        "Also run each marked test on N workloads that Hypothesis draws; a failure shrinks (default: 0)",
        "0",
        "N",
        option_types.whole_number,
        in_child=False,
        instead_of_0="must be a number of workloads to draw, as --attn-fuzz=20",
        group="run",
        short="also run each test on N drawn workloads",
    ),
}


def contradiction(settings: "Settings") -> str:
    """Say what --attn-fuzz lacks; "" where nothing is missing."""
    is_here = not settings.more["fuzz"] or find_spec("hypothesis") is not None
    return "" if is_here else '--attn-fuzz needs Hypothesis: pip install "pytest-attn[fuzz]"'


GUEST = Guest(
    options=_OPTIONS,
    contradiction=f"{_HERE}.fuzz_guest:contradiction",
    cases={"fuzz": f"{_HERE}.fuzz_items:fuzz_cases"},
)
