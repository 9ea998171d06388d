"""What makes ranks late in the workload ``jitter``: delays drawn at random, or measured ones from a file.

    delays = Exponential(mean_ms=50.0)      or      delays = Recorded.read("delays.csv")
    delays.draw(round_index, ranks, micro_steps)        # -> milliseconds [ranks][micro_steps]

A draw depends on its arguments only, so every contender of a round, on every rank, gets the same one.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

FIRST_SEED = 2  # of round 0

Milliseconds = list[list[float]]  # [ranks][micro-steps]


class DelaysError(ValueError):
    """A file of delays that cannot be used: one line that names the file, the place and what would be right."""


@dataclass(frozen=True)
class Exponential:
    """Independent delays of ``mean_ms`` on average for each rank and micro-step."""

    mean_ms: float

    def draw(self, index: int, ranks: int, micro_steps: int) -> Milliseconds:
        """The delays of round ``index``."""
        import torch

        generator = torch.Generator().manual_seed(index + FIRST_SEED)
        drawn = torch.empty(ranks, micro_steps).exponential_(1.0, generator=generator)
        return (drawn.double() * self.mean_ms).tolist()

    def describe(self) -> str:
        return f"exponential delays of {self.mean_ms:g} ms on average"

    def as_json(self) -> dict[str, Any]:
        return {"source": "exponential", "mean_ms": self.mean_ms, "first_seed": FIRST_SEED}


@dataclass(frozen=True)
class Recorded:
    """Measured delays, replayed: ``rows_ms[r]`` is the series of the file's rank ``r``, in milliseconds.

    A round is a stretch of consecutive micro-steps from a random place in the series, the same place for all rows,
    so that ranks that were late together are late together again. The series go on at their beginning where they
    end. Where more ranks run than the file has, they replay its rows once more, from another place.
    """

    source: str
    rows_ms: tuple[tuple[float, ...], ...]

    @staticmethod
    def read(path: Path | str) -> Recorded:
        """Reads a file: JSON if its name ends in ``.json``, else text.

        Text: a line for each rank, milliseconds separated by commas or blanks, one for each micro-step; ``#`` begins
        a comment. JSON: ``{"unit": "ms" or "s", "delays": [[...], ...]}``, a list for each rank.

        Raises:
            DelaysError: no such file, or its content is something else.
        """
        path = Path(path)
        try:
            content = path.read_text(encoding="utf-8")
        except OSError as error:
            raise DelaysError(f"{path}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise DelaysError(f"{path}: no text in UTF-8") from error
        rows = _from_json(path, content) if path.suffix == ".json" else _from_text(path, content)
        if not rows:
            raise DelaysError(f"{path}: no delays; expected a row of them for each rank")
        for number, row in enumerate(rows, 1):
            if len(row) != len(rows[0]) or not row:
                raise DelaysError(
                    f"{path}, row {number}: got {len(row)} delays; expected as many in each row, "
                    f"and row 1 has {len(rows[0])}"
                )
        return Recorded(path.name, tuple(map(tuple, rows)))

    def draw(self, index: int, ranks: int, micro_steps: int) -> Milliseconds:
        """The delays of round ``index``."""
        length = len(self.rows_ms[0])
        generator = random.Random(index + FIRST_SEED)
        starts = [generator.randrange(length) for _ in range(-(-ranks // len(self.rows_ms)))]
        drawn = []
        for rank in range(ranks):
            again, row = divmod(rank, len(self.rows_ms))
            drawn.append([self.rows_ms[row][(starts[again] + step) % length] for step in range(micro_steps)])
        return drawn

    def describe(self) -> str:
        return f"delays from {self.source}, {sum(map(sum, self.rows_ms)) / self._count():.3g} ms on average"

    def as_json(self) -> dict[str, Any]:
        mean = sum(map(sum, self.rows_ms)) / self._count()
        return {"source": self.source, "mean_ms": mean, "first_seed": FIRST_SEED}

    def _count(self) -> int:
        return len(self.rows_ms) * len(self.rows_ms[0])


class _JsonFile(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    unit: Literal["ms", "s"] = "ms"
    delays: list[list[Annotated[float, Field(ge=0, allow_inf_nan=False)]]]


def _from_json(path: Path, content: str) -> Milliseconds:
    try:
        file = _JsonFile.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = "".join(f"[{key}]" if isinstance(key, int) else str(key) for key in first["loc"])
        raise DelaysError(f"{path}: {f'{place}: ' if place else ''}{first['msg']}") from error
    factor = 1e3 if file.unit == "s" else 1.0
    return [[value * factor for value in row] for row in file.delays]


def _from_text(path: Path, content: str) -> Milliseconds:
    rows = []
    for number, line in enumerate(content.splitlines(), 1):
        words = line.split("#")[0].replace(",", " ").split()
        if words:
            rows.append([_milliseconds(f"{path}, line {number}", word) for word in words])
    return rows


def _milliseconds(place: str, word: str) -> float:
    try:
        value = float(word)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise DelaysError(f"{place}: got {word!r}; expected milliseconds, at least 0")
    return value
