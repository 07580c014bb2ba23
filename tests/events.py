"""Listeners to the stream of events, for tests that want one kind of them."""

from collections.abc import Callable
from typing import Any

from autotune.events import Event, Notice, OnEvent, PhaseStarted, StepFinished


def events_of(kind: type[Event], call: Callable[[Any], object]) -> OnEvent:
    return lambda event: call(event) if isinstance(event, kind) else None  # type: ignore[func-returns-value,return-value]


def steps_to(call: Callable[[StepFinished], object]) -> OnEvent:
    return events_of(StepFinished, call)


def phases_to(call: Callable[[str], object]) -> OnEvent:
    return events_of(PhaseStarted, lambda event: call(event.name))


def notices_to(call: Callable[[str], object]) -> OnEvent:
    return events_of(Notice, lambda event: call(event.text))
