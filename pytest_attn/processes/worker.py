"""A worker: a pytest that another one has started to run some of its tests again, and not all that its command line says.

`-p pytest_attn.processes.worker` stands on that command line, beside all arguments of the first pytest: as xdist's workers do,
it takes these as they are, and overrides options once they are parsed. PYTEST_DONT_REWRITE: a forked worker has imported it
before pytest would rewrite its assertions, and where warnings are errors that would end it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING

import pytest

from pytest_attn.processes.lifetime import inherited_channel

if TYPE_CHECKING:
    from pytest_attn.processes.channel import Channel

#: options of pytest and its plugins, by their names in `config.option`, and what they are in a worker
OVERRIDES: Mapping[str, object] = {
    # no other processes, and no debugger: nobody sees it
    "numprocesses": None,
    "maxprocesses": None,
    "dist": "no",
    "distload": False,
    "tx": [],
    "looponfail": False,
    "usepdb": False,
    "trace": False,
    # all of the tests in its first message
    **dict.fromkeys(("lf", "failedfirst", "newfirst", "stepwise", "stepwise_skip", "stepwise_reset", "cacheclear"), False),
    "collectonly": False,
    "maxfail": 0,
    "splits": None,
    "num_shards": 1,
    "shard_id": 0,
    "benchmark_only": False,
    "benchmark_skip": False,
    # no files
    **dict.fromkeys(("xmlpath", "report_log", "htmlpath", "pastebin", "store_durations"), None),
    **dict.fromkeys(("benchmark_json", "benchmark_save", "benchmark_autosave", "benchmark_histogram"), None),
    **dict.fromkeys(("benchmark_compare", "benchmark_compare_fail", "benchmark_cprofile"), None),
    # little text
    "verbose": -1,
    "no_header": True,
    "color": "no",
    "durations": None,
}
#: its last message
FINISHED = {"is_finished": True}


class Worker:
    """This process, as one that another one waits for.

    channel: to that one. told: its first message, with `tests`, the names of the tests to run, `options`, what else overrides
    the command line, `waiting`, the processes that wait for this one, and `is_gated`, whether it waits before its first test.
    """

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.told = channel.recv() or {}

    @classmethod
    def of_this_process(cls) -> Worker | None:
        """Return this process as a worker, None where it is none."""
        global _this
        if (descriptor := inherited_channel()) is not None:
            from pytest_attn.processes.channel import Channel  # only here: each start of pytest asks

            _this = cls(Channel.of_descriptor(descriptor))
        return _this

    def wait_at_gate(self) -> bool:
        """Wait until others have been timed, where this worker was prepared beside them.

        Returns whether the device is known to have worked until then.
        """
        if not self.told.pop("is_gated", False):
            return False
        torch = sys.modules.get("torch")
        self.channel.send(has_touched_cuda=torch is not None and torch.cuda.is_initialized())
        opened = self.channel.recv()
        if opened is None:  # nobody waits any more
            os._exit(1)
        return bool(opened["is_warm"])

    def override(self, config: pytest.Config) -> None:
        """Have pytest run what its first message says instead of what its command line says."""
        if hasattr(config.option, "splits"):  # pytest-split's other option has a name that others may have
            config.option.group = None
        for name, value in {**OVERRIDES, **self.told["options"]}.items():
            if hasattr(config.option, name):
                setattr(config.option, name, value)
        config.args[:] = self.told["tests"]


_this: Worker | None = None


def own_processes() -> frozenset[int]:
    """Return the processes that belong to this measurement: this one, and those that wait for it."""
    worker = Worker.of_this_process()
    waiting = {os.getppid(), *worker.told["waiting"]} if worker else ()  # the first may be a fork server
    return frozenset([os.getpid(), *waiting])


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Take the first message, which may be longer than what a channel holds, before a conftest may keep its sender waiting."""
    Worker.of_this_process()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> Generator[None, object, object]:
    """Override options before any plugin, xdist's included, acts upon them."""
    if worker := Worker.of_this_process():
        worker.override(config)
    return (yield)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    """Say that all tests were run that could be."""
    if worker := Worker.of_this_process():
        worker.channel.send(**FINISHED)
