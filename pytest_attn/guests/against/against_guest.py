"""The guest against: `pytest --attn-against=REV`."""

from dataclasses import dataclass
from typing import Any

from pytest_attn.seam import Guest
from pytest_attn.session.option_types import action

_HERE = "pytest_attn.guests.against"


def _other_side(text: str) -> Any:
    """Return what the text of the option means; few runs come here."""
    from pytest_attn.guests.against.other_side import other_side

    return other_side(text)


@dataclass(frozen=True)
class AgainstOptions:
    """The option that asks for it."""

    against: str | None = action(
        "Judge this version and another, and time both by turns in new processes, without a baseline: a revision, the python"
        " of an environment that has the other version, or self",
        "REV|PYTHON|self",
        _other_side,
        is_serial=True,
        group="latency",
        short="this version against another, without a baseline",
    )


GUEST = Guest(
    options=AgainstOptions,
    mode=f"{_HERE}.against_run:AgainstOther",
    commands=(f"{_HERE}.compare_records:add_commands",),
    compares="another revision, on this machine, here and now: --attn-against=REV",
)
