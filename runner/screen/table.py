"""A small table: rows of text cells, printed for a terminal or as markdown."""

from __future__ import annotations

from dataclasses import dataclass

GAP = 3


@dataclass(frozen=True)
class Table:
    """``header`` has a label column first; rows have the same number of cells. ``notes`` stand beside rows, and may be
    shorter than ``rows``."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()

    def lines(self, width: int = 0) -> list[str]:
        """Text lines, numbers right-aligned. With a ``width``, columns that do not fit go into blocks below, each with
        the label column and the first data column (what the others are compared with) again."""
        if not width:
            return self._block(tuple(range(len(self.header))), notes=True)
        lines: list[str] = []
        for columns in self._fitting(width):
            lines += ([""] if lines else []) + self._block(columns, notes=not lines)
        return lines

    def markdown(self) -> str:
        """A markdown table; notes are its last column when there are any."""
        noted = any(self.notes)
        header = [*self.header, ""] if noted else list(self.header)
        out = ["| " + " | ".join(_escaped(x) for x in header) + " |"]
        out.append("|" + "|".join(["---"] + ["---:"] * (len(self.header) - 1) + (["---"] if noted else [])) + "|")
        for row, note in zip(self.rows, self._padded_notes(), strict=True):
            cells = [*row, note] if noted else list(row)
            out.append("| " + " | ".join(_escaped(x.strip()) for x in cells) + " |")
        return "\n".join(out) + "\n"

    def _padded_notes(self) -> tuple[str, ...]:
        return (*self.notes, *([""] * (len(self.rows) - len(self.notes))))

    def _width(self, column: int) -> int:
        return max(len(row[column]) for row in (self.header, *self.rows))

    def _fitting(self, width: int) -> list[tuple[int, ...]]:
        blocks: list[list[int]] = [[0]]
        used = self._width(0)
        for column in range(1, len(self.header)):
            need = self._width(column) + GAP
            if used + need > width and len(blocks[-1]) > 2:
                blocks.append([0, 1])
                used = self._width(0) + self._width(1) + GAP
            blocks[-1].append(column)
            used += need
        return [tuple(block) for block in blocks]

    def _block(self, columns: tuple[int, ...], notes: bool) -> list[str]:
        widths = [self._width(column) for column in columns]
        lines = []
        for row, note in zip((self.header, *self.rows), ("", *self._padded_notes()), strict=True):
            cells = [row[columns[0]].ljust(widths[0])]
            cells += [row[column].rjust(w) for column, w in zip(columns[1:], widths[1:], strict=True)]
            text = (" " * GAP).join(cells) + (" " * GAP + note if note and notes else "")
            lines.append(text.rstrip())
        return lines


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
