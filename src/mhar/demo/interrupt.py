"""Ctrl-C as a request to stop after the current step."""

import signal
import threading
from types import FrameType
from typing import Any, Self


class StopRequest:
    """A context in which the first SIGINT or SIGTERM sets `requested`; a second one acts as it did outside.

    Python handles signals in the main thread only: in other threads the context does nothing.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.requested = False
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._request) for number in self.SIGNALS}
        return self

    def __exit__(self, *exception: object) -> None:
        self._reinstate()

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        self._reinstate()

    def _reinstate(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}
