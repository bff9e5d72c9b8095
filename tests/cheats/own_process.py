"""Kernels that replace what their own process does when the judge's clock runs, and say that they take a tenth of their time.

Where another process judges, only its clock and what it is sent can stop them. Texts of modules, as in `cheats.table`.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable

from cheats.runs import MARKER
from cheats.table import PYGPUBENCH_FORGED, Cheat

_PRELUDE = """
import os, threading
import torch
from pytest_attn.guests.isolation import call_server
from pytest_attn.guests.isolation.call_server import CallServer

measured, in_a_row = CallServer._measured, CallServer._in_a_row


def claim(self, order):
    found = measured(self, order)
    low, high, confidence = found["interval"]
    return found | {"p50": found["p50"] / 10, "launch": found["launch"] / 10, "interval": [low / 10, high / 10, confidence]}


CallServer._measured = claim
attention = sdpa


def results_of(order, seed, digests=()):
    given, _, douts = order["call"]
    data, found = call_server.RowData(given, douts, order["direction"], seed), []
    with torch.no_grad():
        for _ in range(order["calls"]):
            q, k, v = data.after(call_server.digest([found[-1]]) if found else None)[0]
            found.append(sdpa(q, k, v))
    return found


class Later:
    '''Results that are computed when they are asked for.'''

    def __init__(self, *args):
        self._args = args

    def __getitem__(self, number):
        self._found = self.__dict__.get("_found") or results_of(*self._args)
        return self._found[number]


def seed_of(self):
    self._answer(ready=True)
    return int.from_bytes(self._frames.receive(), "little")


def answer(self, digests):
    self._words = digests.numel()
    call_server.write(self._returned, [digests.view(-1).view(torch.uint8)])


def zeros_for(order):
    given = order["call"][0]
    return torch.zeros(order["calls"], len(call_server.digest([torch.empty_like(given[0])])), dtype=torch.int64)


def burn(is_over):
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    memory = torch.ones(1 << 14)
    while not is_over.is_set():
        memory.exp().log_()
"""


def _own(name: str, does: str, measure: str = "") -> Callable[[str], Cheat]:
    """Return what makes a cheat of the text of its row of calls."""
    marker = MARKER.replace("Workload(64, heads=2, head_dim=32", "Workload(256, heads=4, head_dim=64")
    marker += ", backward=True" if measure else ""

    def made(code: str) -> Cheat:
        text = f"{_PRELUDE}{textwrap.dedent(code)}\n\nCallServer._in_a_row = row\n"
        return Cheat(name, "replaces the judge", does, PYGPUBENCH_FORGED, text, "isolation", marker=marker, measure=measure)

    return made


OWN_PROCESS = (
    _own("calls_nothing", "says that the calls have been made, and computes what is fetched when it is fetched")("""
        def row(self, order):
            seed = seed_of(self)
            answer(self, zeros_for(order))
            return Later(order, seed)
        """),
    _own("computes_afterwards", "says that the calls have been made, and computes them in a thread meanwhile")("""
        def row(self, order):
            seed = seed_of(self)
            answer(self, zeros_for(order))
            later = Later(order, seed)
            threading.Thread(target=lambda: answer(self, call_server.digest([*later[0:]]))).start()
            return later
        """),
    _own(
        "digest_of_what_was",
        "answers with the digests of results of the data that it has seen, and with these where they are fetched",
    )("""
        def row(self, order):
            q, k, v = order["call"][0]
            kept = sdpa(q, k, v)
            digests = call_server.digest([kept]).repeat(order["calls"])
            seed_of(self)
            answer(self, digests)
            return [kept] * order["calls"]
        """),
    _own("another_digest", "answers with numbers, and bends what is fetched until it has these digests")("""
        class Bent:
            def __init__(self, order, seed):
                self.data = call_server.RowData(order["call"][0], [], "forward", seed)

            def __getitem__(self, number):
                out = sdpa(*self.data.after(torch.zeros(1, dtype=torch.int64) if number else None)[0])
                words = out.view(-1).view(torch.int64).view(-1, 32)
                words[:, 0] -= words.sum(-1)
                return out

        def row(self, order):
            seed = seed_of(self)
            answer(self, zeros_for(order))
            return Bent(order, seed)
        """),
    _own("every_second_call", "makes every second call, and answers it twice")("""
        def row(self, order):
            seed, calls = seed_of(self), order["calls"]
            found = [one for one in results_of(order | {"calls": calls // 2}, seed) for _ in range(2)]
            found += [found[-1]] * (calls - len(found))
            answer(self, call_server.digest(found))
            return found
        """),
    _own("scores_before", "has the probabilities of the keys and queries that it has seen before the time begins")("""
        def row(self, order):
            q, k, v = order["call"][0]
            kept = torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1)
            data, found = call_server.RowData([q, k, v], [], "forward", seed_of(self)), []
            for _ in range(order["calls"]):
                found.append(kept @ data.after(call_server.digest([found[-1]]) if found else None)[0][2])
            answer(self, call_server.digest(found))
            return found
        """),
    _own(
        "gradients_before", "has the gradients of the douts that it has seen before the time begins", measure="backward=True"
    )("""
        def row(self, order):
            given, _, (dout,) = order["call"]
            with torch.enable_grad():
                kept = [*torch.autograd.grad(sdpa(*given), given, dout)]
            digests = call_server.digest(kept).repeat(order["calls"])
            seed_of(self)
            answer(self, digests)
            return [kept] * order["calls"]
        """),
    _own("waits_for_itself", "has threads of its own wait for one core while it is timed")("""
        def row(self, order):
            is_over = threading.Event()
            for _ in range(30):
                threading.Thread(target=burn, args=(is_over,), daemon=True).start()
            try:
                return in_a_row(self, order)
            finally:
                is_over.set()
        """),
    _own("has_another_thread_compute", "waits for one core, behind threads of its own, while a thread computes on another")("""
        def row(self, order):
            is_over, found = threading.Event(), []

            def compute():
                found.extend(in_a_row(self, order))
                is_over.set()

            for _ in range(8):
                threading.Thread(target=burn, args=(is_over,), daemon=True).start()
            threading.Thread(target=compute).start()
            cores = os.sched_getaffinity(0)
            burn(is_over)
            os.sched_setaffinity(0, cores)
            return found
        """),
    _own("slows_the_judge", "keeps all cores busy once it has answered, so that the judge takes more off")("""
        def slow():
            memory = torch.ones(1 << 22)
            for _ in range(200):
                memory.exp()

        def row(self, order):
            found = in_a_row(self, order)
            for _ in range(8):
                threading.Thread(target=slow, daemon=True).start()
            return found
        """),
)
