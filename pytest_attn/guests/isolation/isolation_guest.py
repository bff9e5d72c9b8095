"""The guest isolation: `--attn-isolated`."""

import re
from typing import TYPE_CHECKING

from pytest_attn.seam import Guest
from pytest_attn.session import option_types

if TYPE_CHECKING:
    from pytest_attn.session.options import Settings

_HERE = "pytest_attn.guests.isolation"


def _functions(text: str) -> str:
    """Return names of functions, "module:function", or "" for none."""
    for name in option_types.names(text):
        if not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*", name):
            raise ValueError(
                f"must be MODULE:FUNCTION, got {name!r}; where a path follows, say --attn-isolated=MODULE:FUNCTION,"
                " or write --attn-isolated behind the path"
            )
    return ",".join(option_types.names(text))


_OPTIONS = {
    "isolated": option_types.action(
        "Run each callable given as module:function in a process of its own, which alone imports the module; refuse all"
        " others. With names, these are the backends unless --attn-backends says otherwise",
        "MODULE:FUNCTION",
        _functions,
        in_child=True,
        alone="",
        group="judge",
        short="run named callables in a process of their own",
    ),
}


def contradiction(settings: "Settings") -> str:
    """Say which option does not go with --attn-isolated; "" where all do."""
    if settings.more["isolated"] is None or not (settings.profile or settings.cupti):
        return ""
    flag = "--attn-profile" if settings.profile else "attn_cupti"
    return f"{flag}: sees the kernels of this process; leave out --attn-isolated"


GUEST = Guest(
    options=_OPTIONS,
    contradiction=f"{_HERE}.isolation_guest:contradiction",
    elsewhere={"isolated": f"{_HERE}.isolated_run:IsolatedFunctions"},
)
