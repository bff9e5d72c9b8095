"""The guest mutants: faulty kernels in place of those of its tests."""

from typing import TYPE_CHECKING

from pytest_attn.seam import Guest
from pytest_attn.session.option_types import switch

if TYPE_CHECKING:
    from pytest_attn.session.options import Settings

_HERE = "pytest_attn.guests.mutants"
_OPTIONS = {
    "mutants": switch(
        "Run the tests with faulty kernels in place of theirs, and print which of these they find",
        group="run",
        short="run faulty kernels: which do the tests find?",
    ),
}


def contradiction(settings: "Settings") -> str:
    """Say which option does not go with --attn-mutants; "" where all do."""
    if not settings.more["mutants"]:
        return ""
    if settings.more.get("fuzz"):
        return "--attn-fuzz: draws workloads for the test's own kernels; leave out --attn-mutants"
    needing_times = {
        **{f"--attn-{name.replace('_', '-')}": settings.more.get(name) for name in ("tune", "rank_to", "rank")},
        "--attn-latency=require": settings.latency == "require",
        **dict.fromkeys(settings.serial_flags, True),
    }
    flag = next((flag for flag, is_given in needing_times.items() if is_given), "")
    return f"{flag}: needs times, and --attn-mutants takes none; leave one of them out" if flag else ""


GUEST = Guest(
    options=_OPTIONS,
    contradiction=f"{_HERE}.mutants_guest:contradiction",
    fields=f"{_HERE}.mutation_score:MutantFields",
    results=f"{_HERE}.mutation_score:mutation_results",
    kernels={"mutants": f"{_HERE}.mutant_run:Mutants"},
)
