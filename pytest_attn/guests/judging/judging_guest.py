"""The guest judging: `pytest_attn.judge`, and the command `judge` of `python -m pytest_attn`."""

from pytest_attn.seam import Guest

GUEST = Guest(commands=("pytest_attn.guests.judging.judge_command:add_judge",))
