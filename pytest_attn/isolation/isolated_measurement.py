"""What times a function that runs in a process of its own: the claim of that process, and this one's clock."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch

from pytest_attn.cases.measurement import Measurement
from pytest_attn.correctness.spec import CheckSpec
from pytest_attn.isolation.isolated_function import IsolatedFunction, Recorded
from pytest_attn.latency.kernel_work import Call, KernelWork
from pytest_attn.latency.result import Latency
from pytest_attn.latency.statistics import Interval
from pytest_attn.latency.timer import Mode
from pytest_attn.latency.work import LatencyDirection, StaleError
from pytest_attn.processes.worker import own_processes

__tracebackhide__ = True  # pytest shows a kernel's own frames, not ours

#: calls in a row, at least and at most, the seconds that they are to take, and the bytes of what they return
_FEWEST, _MOST, _SECONDS, _BYTES = 2, 512, 0.05, 1 << 30
#: forward passes of which a backward pass alone gets one: their graphs keep memory
_SETS = 32
#: at the results of how many of them is looked, which nobody knows before
_LOOKS = 8
#: by how much such calls may be slower than was claimed, in all and each; and how often that is tried
_SLACK_SECONDS, _SLACK_OF_CALL, _SLOWER, _TRIES = 2e-3, 4e-6, 1.5, 8
#: and by how much where nobody knows whether they waited for a core
_SLOWER_UNSEEN = 4.0


@dataclass(frozen=True, kw_only=True)
class IsolatedMeasurement(Measurement):
    """A function that times itself in its process; what it claims is compared with calls in a row by this one's clock."""

    function: IsolatedFunction

    def _take(self, mode: Mode | None) -> Latency:
        """Time the function. Raises StaleError where calls in a row are slower than was claimed, or wrong."""
        spec, direction = self.spec.for_subject(self.subject), self.direction
        work = self._work()
        work.rotate_over(0)
        recorded, _ = self._recorded(work, made=1)
        told = _told(spec)
        claimed = self.function.measured(
            spec=told,
            is_told=told.workload == spec.workload and not self.subject.is_approximate,
            direction=direction,
            mode=mode,
            cold=self.session.settings.l2 == "cold",
            threads=torch.get_num_threads(),
            own=sorted(own_processes()),
        )
        try:
            latency = latency_of(claimed, spec.workload.id, self.subject.name, direction, spec.device.type)
        except (KeyError, TypeError, ValueError, OverflowError):
            self.function.start().give_up("its process returned garbage in place of a time")
        return self._held_to(latency, work, recorded[0].given)

    def _recorded(self, work: KernelWork, made: int) -> tuple[list[Recorded], list[Call]]:
        """Return so many calls that were made, each on data of its own, after a look at the result of the last."""
        calls = []
        with self.function.recording() as recorded, work.context():
            for _ in range(made):
                calls.append(call := work.stage(replayed=True))
                value = call()
        work.verify_call("called on new data", call, value)
        return recorded, calls

    def _held_to(self, latency: Latency, work: KernelWork, given: Sequence[torch.Tensor]) -> Latency:
        """Raise StaleError where calls in a row take longer than was claimed; where that cannot be told, say why."""
        each = latency.p50 if latency.mode == "host" else latency.p50 + latency.launch
        fits = max(_FEWEST, _BYTES // max(1, sum(one.nbytes for one in given)))
        is_backward = work.direction == "backward"
        number = int(min(max(_FEWEST, _SECONDS / each), _SETS if is_backward else _MOST, fits))
        made = number if is_backward else _FEWEST
        system, found = random.SystemRandom(), list[float]()
        for _ in range(_TRIES):
            recorded, calls = self._recorded(work, made)
            chosen, row = list[tuple[Recorded, Call]](), list[tuple[int, ...]]()  # what is called, and how it is asked for
            for at in range(number):
                last = system.randrange(made)  # whose dout it is
                if is_backward:
                    chosen.append((recorded[last], work.with_qkv_at(calls[last], calls[at].given.qkv)))
                    row.append((at, 0, 0, 0, last))
                else:
                    call, further = work.moved(calls[last])
                    chosen.append((recorded[last], call))
                    row.append((last, *further, last))
            seconds, waited = self.function.in_a_row(recorded, work.direction, row)
            for one in system.sample(range(number), min(number, _LOOKS)):
                result, call = chosen[one]
                result.keep(result.call.fetched(one), work.direction)
                with self.function.replaying(result), work.context():
                    value = call()
                work.verify_call("called in a row", call, value)
            most = number * (each * (_SLOWER_UNSEEN if waited is None else _SLOWER) + _SLACK_OF_CALL) + _SLACK_SECONDS
            if seconds <= most:
                return latency
            found.append(seconds - (waited or 0.0))  # threads may wait for one another, too
        if min(found) <= most:
            unknown = "the time that its process claims could not be verified, because other processes used the cores"
            return replace(latency, disturbances=(*latency.disturbances, unknown))
        raise StaleError(
            f"its process says that a call takes {each * 1e6:.4g} us, but {number} calls in a row took at least"
            f" {min(found) / number * 1e6:.4g} us each, by the clock of the process that judges"
        )


def _told(spec: CheckSpec) -> CheckSpec:
    """Return what a process learns of a case: neither the draws of its run, nor functions that only the test can import."""
    w = spec.workload
    mask = None if w.mask is None or w.mask.function is not None else w.mask
    workload = w if mask is w.mask and w.score_mod is None else w.replace(mask=mask, score_mod=None)
    return replace(spec, workload=workload, seed=random.SystemRandom().getrandbits(31), parameters={})


def latency_of(claimed: dict[str, Any], workload: str, subject: str, direction: LatencyDirection, kind: str) -> Latency:
    """Return what another process claims to have measured on a kind of device.

    Raises KeyError, TypeError or ValueError for what cannot have been.
    """

    def number(value: Any) -> float:
        if type(value) not in (int, float) or not 0 <= value < 1e6:
            raise ValueError(f"no number of seconds: {value!r}")
        return float(value)

    def texts(values: Any) -> tuple[str, ...]:
        return tuple("".join(filter(str.isprintable, str(one)[:300])) for one in list(values)[:20])

    p50, low, high, confidence = map(number, (claimed["p50"], *claimed["interval"]))
    if not p50 or claimed["mode"] not in (get_args(Mode) if kind == "cuda" else ("host",)):
        raise ValueError("no time")
    numbers: dict[str, Any] = {name: int(number(claimed[name])) for name in ("blocks", "calls")}
    numbers |= {name: number(claimed[name]) for name in ("launch", "spent")}
    numbers |= {name: None if claimed[name] is None else int(claimed[name]) for name in ("memory", "threads")}
    return Latency(
        workload=workload,
        subject=subject,
        direction=direction,
        p50=p50,
        interval=Interval(low, high, confidence),
        samples=tuple(map(number, claimed["samples"][:100_000])),
        mode=claimed["mode"],
        l2="cold" if claimed["l2"] == "cold" else "warm",
        anchors={str(name)[:40]: number(value) for name, value in list(claimed["anchors"].items())[:20]},
        disturbances=texts(claimed["disturbances"]),
        notes=texts(claimed["notes"]),
        conditions={name: value for name, value in claimed["conditions"].items() if type(value) in (int, float, str)},
        **numbers,
    )
