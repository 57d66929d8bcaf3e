"""The phase clock: every second has a phase, those of a suspended machine included."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from spotlight.runtime.clock import PhaseClock
from spotlight.scheduler.types import Phase


def test_a_process_is_as_old_as_the_system_says() -> None:
    code = (
        "import time; time.sleep(0.5); from spotlight.runtime.clock import process_age_s as age; print(age())"
    )
    began = time.monotonic()
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert 0.5 <= float(said) <= time.monotonic() - began + 0.05


def test_what_was_spent_before_the_clock_is_set_up() -> None:
    clock = PhaseClock(spent_s=3.0)
    clock.ready()
    assert 3.0 <= clock.take()[Phase.SETUP] <= clock.elapsed_s


@pytest.mark.skipif(not hasattr(time, "CLOCK_BOOTTIME"), reason="only Linux names this clock")
def test_time_goes_on_while_the_machine_is_suspended(monkeypatch: pytest.MonkeyPatch) -> None:
    now = {time.CLOCK_BOOTTIME: 50.0}
    monkeypatch.setattr(time, "clock_gettime", lambda clock: now[clock])
    monkeypatch.setattr(time, "monotonic", lambda: 7.0)  # stands still, as in suspension
    clock = PhaseClock()
    clock.ready()
    with clock.phase(Phase.ROLLOUT):
        now[time.CLOCK_BOOTTIME] += 600
    now[time.CLOCK_BOOTTIME] += 1
    assert clock.elapsed_s == 601
    assert clock.take() == {Phase.ROLLOUT: 600, Phase.IDLE: 1}


def test_without_that_clock_the_monotonic_one_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(time, "CLOCK_BOOTTIME", raising=False)
    now = [3.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    clock = PhaseClock()
    now[0] = 5.0
    assert clock.elapsed_s == 2
