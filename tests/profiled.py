"""Memory by torch's own profiler, for tests that hold a limit against it."""

import torch


def peak_allocated_bytes(call):
    """The most that `call` has allocated at any moment, on a CPU; its result is kept until the
    end."""
    with torch.profiler.profile(profile_memory=True) as trace:
        kept = call()
    level = most = 0
    for event in trace.profiler.kineto_results.events():
        if event.name() == "[memory]":
            level += event.nbytes()
            most = max(most, level)
    del kept
    return most
