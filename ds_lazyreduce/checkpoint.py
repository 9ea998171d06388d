"""The open logging window in checkpoints: a small JSON file of its own in the checkpoint's directory.

Plain DeepSpeed ignores the file, and a checkpoint of plain DeepSpeed simply lacks it. Sums are those of all
ranks, so that they stay right on any other number of ranks:

    {"version": 1, "metrics": {"train_loss": {"sum": "12.5", "count": "4.0"}}}

Numbers are strings, because JSON has neither NaN nor infinity; Python reads them back to the bit.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import Any

WINDOW_FILE = "lazy_reduce_window.json"
_VERSION = 1

Window = dict[str, tuple[float, float]]


class CheckpointError(RuntimeError):
    """A checkpoint's part of this extension cannot be read or written."""


def write_window(path: str, window: Mapping[str, tuple[float, float]]) -> None:
    """Writes ``{name: (sum, count)}`` to ``path``, replacing an older file in one step."""
    metrics = {name: {"sum": repr(total), "count": repr(count)} for name, (total, count) in window.items()}
    os.makedirs(os.path.dirname(path), exist_ok=True)
    replace_file(path, json.dumps({"version": _VERSION, "metrics": metrics}, indent=1))


def replace_file(path: str, text: str) -> None:
    """Writes ``text`` to ``path``: a crash or a full disk leaves the old file or the new one, never half of one."""
    temporary = f"{path}.tmp"
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def read_window(path: str) -> Window:
    """The window in ``path``; empty where there is no such file.

    Raises:
        CheckpointError: the file is not what :func:`write_window` writes; names the file.
    """
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from error
    try:
        version, metrics = content["version"], content["metrics"]
        window = {name: (float(row["sum"]), float(row["count"])) for name, row in metrics.items()}
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{path}: not an open logging window ({problem})") from error
    if version != _VERSION:
        raise CheckpointError(f"{path}: version {version!r}, this release reads {_VERSION}")
    return window


def window_path(directory: str, tag: Any) -> str:
    """Where the window of checkpoint ``tag`` lies."""
    return os.path.join(directory, str(tag), WINDOW_FILE)


def latest_tag(comm: Any, directory: str, latest: str) -> str | None:
    """The tag that file ``latest`` names on rank 0, where other ranks may lack it (node-local storage). Collective.

    Raises:
        CheckpointError: on every rank, if only others have the file, or it is damaged.
    """
    path, tag, error = os.path.join(directory, latest), None, None
    try:
        with open(path, encoding="utf-8") as file:
            tag = file.read().strip()
    except OSError:
        pass  # stock says so
    except ValueError as caught:
        error = CheckpointError(f"{path}: cannot be read: {caught}")
    first, *others = raise_on_every_rank(comm, error, tag)
    for rank, other in enumerate(others, start=1):
        if first is None and other is not None:
            raise CheckpointError(f"{path}: not there on rank 0, and names {other!r} on rank {rank}")
    return first


def on_rank_zero(comm: Any, action: Callable[[], Any]) -> Any:
    """The result of ``action`` on rank 0, on every rank; an error there is raised on every rank. Collective.

    Args:
        comm: ``torch.distributed``; the comms logger of ``deepspeed.comm`` ends the process at an object exchange.
    """
    outcome: list[Any] = [None, None]
    if comm.get_rank() == 0:
        try:
            outcome[0] = action()
        except (CheckpointError, OSError) as error:
            outcome[1] = error
        except Exception as error:  # the others must not wait for it, and not every error can be pickled
            outcome[1] = CheckpointError(f"{type(error).__name__}: {error}")
    comm.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def raise_on_every_rank(comm: Any, error: Exception | None, value: Any = None, group: Any = None) -> list[Any]:
    """The ``value`` of every rank; raises on all of them where one or more have an ``error``. Collective.

    Args:
        comm: ``torch.distributed``; the comms logger of ``deepspeed.comm`` ends the process at an object exchange.
    """
    answers: list[Any] = [None] * comm.get_world_size(group=group)
    comm.all_gather_object(answers, (None if error is None else str(error), value), group=group)
    if error is not None:
        raise error
    for rank, (message, _) in enumerate(answers):
        if message is not None:
            raise CheckpointError(f"rank {rank}: {message}")
    return [value for _, value in answers]
