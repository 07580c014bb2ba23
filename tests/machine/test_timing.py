"""Timings stay within their limit, whatever is timed."""

from statistics import median

from hypothesis import given
from hypothesis import strategies as st

from autotune.machine.rates import MAX_SAMPLES, spread_of, time_calls


@given(st.floats(1e-7, 100), st.floats(0.01, 1))
def test_a_measurement_ends_in_time_and_has_a_sample(call_seconds, limit_seconds):
    now = 0.0

    def call():
        nonlocal now
        now += call_seconds

    seconds = time_calls(call, limit_seconds=limit_seconds, clock=lambda: now)
    assert 1 <= len(seconds) <= MAX_SAMPLES
    assert abs(median(seconds) / call_seconds - 1) < 1e-6
    assert now <= 5 * limit_seconds + 3 * call_seconds + 2e-3


def test_the_first_call_warms_up():
    durations = iter([5.0, *[1.0] * 100])
    now = 0.0

    def call():
        nonlocal now
        now += next(durations)

    assert median(time_calls(call, limit_seconds=3.0, clock=lambda: now)) == 1.0


def test_every_call_is_made_ready_for_where_that_is_asked():
    order, now = [], 0.0

    def call():
        nonlocal now
        now += 1e-6
        order.append("call")

    time_calls(call, limit_seconds=1e-5, setup=lambda: order.append("ready"), clock=lambda: now)
    assert order == ["ready", "call"] * (len(order) // 2)


def test_spread_is_the_interquartile_range_over_the_median():
    assert spread_of([1.0, 1.0, 1.0, 1.0, 1.0]) == 0
    assert spread_of([1.0, 9.0]) == 0
    assert spread_of([1.0, 1.0, 2.0, 3.0, 3.0]) == 1.0
