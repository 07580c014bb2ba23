"""Listeners to the stream of events, for tests that want one kind of them."""

from autotune.events import Notice, PhaseStarted, StepFinished


def events_of(kind, call):
    return lambda event: call(event) if isinstance(event, kind) else None


def steps_to(call):
    return events_of(StepFinished, call)


def phases_to(call):
    return events_of(PhaseStarted, lambda event: call(event.name))


def notices_to(call):
    return events_of(Notice, lambda event: call(event.text))
