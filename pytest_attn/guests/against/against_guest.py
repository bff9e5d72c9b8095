"""The guest against: `pytest --attn-against=REV`."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_attn.seam import Guest
from pytest_attn.session.option_types import action

if TYPE_CHECKING:
    from pytest_attn.session.options import Settings

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


def contradiction(settings: "Settings") -> str:
    """Say which option does not go with --attn-against; "" where all do."""
    if settings.more["against"] is None:
        return ""
    others = {
        "--attn-update-baselines": settings.update_baselines is not None,
        "--attn-fuzz": settings.fuzz,
        "--attn-tune": settings.tune,
        "--attn-isolated": settings.isolated is not None,
    }
    flag = next((flag for flag, is_given in others.items() if is_given), "")
    return f"{flag}: does not go with --attn-against; leave one of them out" if flag else ""


GUEST = Guest(
    options=AgainstOptions,
    contradiction=f"{_HERE}.against_guest:contradiction",
    mode=f"{_HERE}.against_run:AgainstOther",
    compares="another revision, on this machine, here and now: --attn-against=REV",
)
