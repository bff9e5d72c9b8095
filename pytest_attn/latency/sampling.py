"""How calls are sampled on a GPU: the mode, how many calls share a sample, how many replays of a graph."""

from __future__ import annotations

import math

from pytest_attn.latency.timer import Mode

#: seconds of device time from which a call has a pair of events of its own; below, calls share what a pair adds (about 4 us)
OWN_EVENTS_SECONDS = 250e-6
#: seconds of a shared sample, and the most calls of one: the host launches batches anew while the device is kept waiting
_SAMPLE_SECONDS: dict[Mode, float] = {"graph": 0.8e-3, "replay": 0.8e-3, "batched": 0.2e-3}
_MOST_CALLS: dict[Mode, int] = {"graph": 40, "replay": 40, "batched": 20}
_FEWEST_CALLS = 4
#: seconds of a call in a graph from which its samples are several replays, and theirs: causal flash attention scatters by 4 %
#: from call to call, and the median of few long samples knows more of that than that of many short ones
_LONG_SECONDS, _LONG_SAMPLE_SECONDS = 100e-6, 2.4e-3
#: a host that needs longer than both to launch a call is what the user waits for, and is timed; below, the gate looks at it.
#: The ratio: to the device's time of the call
_HOST_BOUND_SECONDS, _HOST_BOUND_RATIO = 2e-3, 4.0


def choose_mode(recorded: Mode | None, launch: float, device: float | None) -> Mode:
    """Return the mode for a call that takes the host `launch` seconds to launch, and the device `device` seconds.

    recorded: the baseline's, which is kept unless the call is bound by the host. device: None if it cannot be kept waiting.
    """
    if device is None or launch > _host_bound_from(recorded, device):
        return "host"
    if recorded in (None, "host"):
        return "graph" if device < OWN_EVENTS_SECONDS else "events"
    return recorded


def _host_bound_from(recorded: Mode | None, device: float) -> float:
    """Return the seconds of launching from which a call is bound by the host, shifted so that one near it keeps its mode."""
    bound = max(_HOST_BOUND_SECONDS, _HOST_BOUND_RATIO * device)
    if recorded is None:
        return bound
    return 0.5 * bound if recorded == "host" else 2.0 * bound


def replays_per_sample(calls: int, seconds: float, sets: int) -> int:
    """Return how many replays of a graph share a sample, by the device's time of a call; as many as have their own sets."""
    return max(1, min(round(_LONG_SAMPLE_SECONDS / (calls * seconds)), sets // calls)) if seconds >= _LONG_SECONDS else 1


def calls_per_sample(seconds: float, mode: Mode) -> int:
    """Return how many calls share a sample of a mode, by the device's time of one."""
    if mode == "events":
        return 1
    return min(max(_FEWEST_CALLS, math.ceil(_SAMPLE_SECONDS[mode] / max(seconds, 1e-9))), _MOST_CALLS[mode])
