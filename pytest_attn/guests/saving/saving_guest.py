"""The guest saving: `--attn-save-failures`."""

import os
from importlib import util
from pathlib import Path

from pytest_attn.seam import Guest
from pytest_attn.session.option_types import action

_HERE = "pytest_attn.guests.saving"


def _folder(text: str) -> str:
    """Return a folder that can be written to, made where it is missing."""
    if not text.strip() or text.startswith("-") or "::" in text or Path(text).is_file():
        raise ValueError(f"must be a folder, such as failures, got {text!r}")
    for name in ("safetensors", "numpy"):  # the one writes tensors by way of the other
        if util.find_spec(name) is None:
            raise ValueError(f'needs {name}, which is not installed: pip install "pytest-attn[failures]"')
    folder = Path(os.path.realpath(os.path.expanduser(text)))
    probe = folder / f".{os.urandom(8).hex()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.mkdir()
        probe.rmdir()
    except OSError as error:
        raise ValueError(f"cannot write to {text!r}: {error.strerror or error}") from None
    return str(folder)


_OPTIONS = {
    "save_failures": action(
        "Save the tensors of each failing case in a folder of DIR, with a script that judges the kernel again",
        "DIR",
        _folder,
        group="outputs",
        short="tensors and a script for each failing case",
    ),
}
GUEST = Guest(
    options=_OPTIONS,
    failing={"save_failures": f"{_HERE}.saving_run:save_failure"},
    fields=f"{_HERE}.saving_record:SavingFields",
    advice=f"{_HERE}.saving_record:advice",
    closing={"save_failures": f"{_HERE}.saving_record:print_unsaved"},
)
