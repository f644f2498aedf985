"""Recorded decode steps: one recording for each bucket and placement, and what became of each step."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from enum import Enum

from engine.device.protocol import Device
from engine.errors import EbbError
from engine.machine.protocol import Recorder
from engine.weights.residency import Traffic


class Step(Enum):
    """How a decode step ran."""

    EAGER = "eager"  # call by call, as asked
    RECORDED = "recorded"  # call by call, and recorded for the steps that follow
    REPLAYED = "replayed"
    FELL_BACK = "fell back"  # call by call, though a recording was asked for


@dataclass(frozen=True)
class Recording:
    """A step that can be replayed: what enqueues it, what it costs by the policy's count and by the device's."""

    replay: Callable[[], None]
    traffic: tuple[Traffic, ...]
    htod_bytes: int
    htod_calls: int


class Recordings:
    """Recordings by key. A key names everything that a recording has baked in: the bucket and the placement.

    Attributes
    ----------
    captures, replays, fallbacks
        Steps recorded, replayed, and run call by call though a recording was asked for.
    invalidations
        How often KV grew, so that the recording in force was put away.
    reasons
        Why steps fell back, each once.
    """

    def __init__(self, device: Device, recorder: Recorder | None, declined: str | None = None) -> None:
        self._device, self._recorder = device, recorder
        self._made: dict[Hashable, Recording] = {}
        self.captures = self.replays = self.fallbacks = self.invalidations = 0
        self.reasons: list[str] = []
        if recorder is not None and declined is not None:
            self.reasons.append(declined)

    @property
    def wanted(self) -> bool:
        """Whether steps are to be replayed."""
        return self._recorder is not None

    @property
    def active(self) -> bool:
        """Whether steps can be replayed: wanted, and nothing has declined."""
        return self.wanted and not self.reasons

    def grown(self) -> None:
        """KV has grown: whatever was in force no longer is."""
        if self.wanted:
            self.invalidations += 1

    def replay(self, key: Hashable) -> Recording | None:
        """Replay the recording of ``key``; None when there is none."""
        recording = self._made.get(key)
        if recording is not None:
            recording.replay()
            # The device counts copies when they are enqueued one by one; a replay enqueues them unseen.
            self._device.counters.htod_bytes += recording.htod_bytes
            self._device.counters.htod_calls += recording.htod_calls
            self.replays += 1
        return recording

    def record(self, key: Hashable, enqueue: Callable[[], None], traffic: Callable[[], tuple[Traffic, ...]]) -> Step:
        """Record a step that has just run call by call, as ``key``; say what became of it."""
        if not self.wanted:
            return Step.EAGER
        if self._recorder is None or not self.active:
            self.fallbacks += 1
            return Step.FELL_BACK
        counters = self._device.counters
        before, calls = counters.htod_bytes, counters.htod_calls
        try:
            replay = self._recorder.record(enqueue)
        except EbbError as error:
            self.reasons.append(str(error))
            self.fallbacks += 1
            return Step.FELL_BACK
        finally:
            # Nothing moved while recording.
            moved, counters.htod_bytes = counters.htod_bytes - before, before
            made, counters.htod_calls = counters.htod_calls - calls, calls
        self._made[key] = Recording(replay, traffic(), moved, made)
        self.captures += 1
        return Step.RECORDED
