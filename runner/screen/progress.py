"""What a person sees while jobs run: a bar per child on a terminal, plain lines in a pipe.

Drawing happens only when a child reports something, a few times a second at most: nothing redraws by itself while
something is being measured.
"""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

_BAR = 10
_REDRAW_S = 0.12
_PLAIN_EVERY_S = 30.0
_STYLES = (
    (re.compile(r"\S+ ✗.*"), "bold red"),
    (re.compile(r"✓"), "green"),
    (re.compile(r"^ {0,5}(gates|text|latency|lending|note|run|crash) ", re.MULTILINE), "bold"),
)


class Screen:
    """Where lines go. ``width`` is 0 in a pipe: nothing is wrapped or folded there."""

    def __init__(self, file: TextIO | None = None) -> None:
        self._file = file or sys.stdout
        self._console = Console(file=self._file, highlight=False, soft_wrap=True)
        self.terminal = self._console.is_terminal

    @property
    def width(self) -> int:
        """Columns to lay tables out for; 0 means no bound."""
        return max(60, self._console.width) if self.terminal else 0

    def line(self, text: str = "", style: str = "") -> None:
        """Print one line. An output that is closed, full or cannot show it is not an error of the run."""
        with contextlib.suppress(OSError, UnicodeError):
            if not self.terminal:
                print(text, file=self._file, flush=True)
                return
            styled = Text(text, style=style)
            for pattern, look in _STYLES:
                styled.highlight_regex(pattern, look)
            self._console.print(styled)

    def lines(self, texts: Sequence[str]) -> None:
        """Print several."""
        for text in texts:
            self.line(text)

    @contextlib.contextmanager
    def bar(self, label: str, width: int) -> Iterator[Bar]:
        """A bar for one child, gone when the block ends; what is to stay is printed with :meth:`line`."""
        if not self.terminal:
            yield Bar(label, width, None, self)
            return
        with Live(console=self._console, auto_refresh=False, transient=True, redirect_stdout=False) as live:
            yield Bar(label, width, live, self)


class Bar:
    """The progress of one child, fed with its events."""

    def __init__(self, label: str, width: int, live: Live | None, screen: Screen) -> None:
        self._label = label.ljust(width)
        self._live = live
        self._screen = screen
        self._drawn = time.monotonic()
        self._state = "starting"
        self._step = self._steps = self._generation = self._generations = 0
        self._draw(force=True)

    def on_event(self, event: dict[str, Any]) -> None:
        """Take in one event of the child."""
        kind = event["event"]
        if kind == "progress":
            self._step, self._steps = _count(event, "step"), _count(event, "steps")
            self._generation, self._generations = _count(event, "generation") + 1, _count(event, "generations")
            self._state = "prefill" if event.get("phase") == "prefill" else ""
        elif kind in ("hello", "loaded", "ready", "measure_start"):
            self._state = {"hello": "loading", "loaded": "loaded", "ready": "warm", "measure_start": ""}[kind]
        self._draw(force=kind != "progress")

    def finished(self, note: str) -> str:
        """The line that stays of a child that ended well."""
        # Progress is told now and then, so the last word on a step may be missing; the child has ended well.
        self._step, self._generation = self._steps, self._generations
        done = f"{self._counts()}   " if self._steps else ""
        bar = f"{_drawn(1.0)} " if self._live is not None else ""
        return f"{self._label}  {bar}{done}{note}"

    def _draw(self, force: bool) -> None:
        now = time.monotonic()
        if self._live is None:
            if now - self._drawn > _PLAIN_EVERY_S:
                self._drawn = now
                self._screen.line(f"{self._label}  {self._counts()}  {self._state}".rstrip())
            return
        if force or now - self._drawn > _REDRAW_S:
            self._drawn = now
            line = f"{self._label}  {_drawn(self._share())} {self._counts()}  {self._state}".rstrip()
            self._live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)

    def _share(self) -> float:
        return self._step / self._steps if self._steps else 0.0

    def _counts(self) -> str:
        if not self._steps:
            return ""
        return f"{self._step}/{self._steps}  gen {self._generation}/{self._generations}"


def _count(event: dict[str, Any], name: str) -> int:
    value = event.get(name)
    return value if isinstance(value, int) else 0


def _drawn(share: float) -> str:
    full = round(_BAR * min(max(share, 0.0), 1.0))
    return f"▕{'█' * full}{'·' * (_BAR - full)}▏"
