"""Logged numbers as deferred sums: kept on the device, reduced over ranks once per logging window.

Each name has an open ``[sum, count]`` on every rank; :meth:`DeferredMetrics.add` only adds to it. A *report*
all-reduces all of them in one small float64 tensor and starts the window anew:

    pack = [[flag, 0], [sum, count] of name 0, [sum, count] of name 1, ...]    names in the agreed order

The pack's shape must be the same on every rank, but names may differ. A rank with names that are not agreed
yet raises ``flag`` and keeps those sums open. Every rank reads the reduced flag at the *next* report, where
the names are exchanged and everything that was kept open goes out. So nothing is lost and nothing counted
twice; at worst it is reported a window later. The first report and :meth:`DeferredMetrics.flush` exchange
names at once.

The two halves are apart: :class:`OpenWindow` is the arithmetic on one rank and never communicates;
:class:`DeferredMetrics` decides when to pack, and has its collectives passed in.
"""

from __future__ import annotations

import atexit
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch

from .failures import during

Scalar = float | int | torch.Tensor

# Bytes. Monitors make file and series names of them, where only rank 0 would fail, for which the others wait.
LONGEST_NAME = 200

_LOST = "Parameters are those of the last optimizer step; the open metrics are lost."


class OpenWindow:
    """The sums and counts that one rank has not reported yet.

    One float64 tensor of a row per name, plus row 0, which is the pack's header and always zero here. Agreed
    names come first, in an order that is the same on every rank, so that a pack is a prefix of the rows.

    Example, two ranks without any process group::

        for window, loss in ((a, 2.0), (b, 4.0)):
            window.add("loss", loss, 1)
            window.agree(["loss"])
        total = a.pack() + b.pack()         # [[0, 0], [6, 2]]
        a.close(); b.close()
    """

    def __init__(self, device: torch.device | str) -> None:
        self.agreed: list[str] = []
        self._rows: dict[str, int] = {}
        self._sums = torch.zeros(8, 2, dtype=torch.float64, device=device)

    def add(self, name: str, total: Scalar, count: Scalar) -> None:
        """Add ``total`` and ``count`` (numbers or one-element tensors of any real dtype) to a name's row.

        Device tensors are not read by the host. NaN and infinity pass through to the report.

        Raises:
            TypeError: the name is no string.
            ValueError: the name is empty, not printable or longer than ``LONGEST_NAME``; or the total or the count is
                something else than one real number.
        """
        # Both are checked before either is added, and the name before it is exchanged with other ranks.
        total = _scalar(name, total, self._sums.device)
        count = _scalar(name, count, self._sums.device)
        row = self._rows.get(name)
        if row is None:
            row = self._new_row(name)
        self._sums[row, 0].add_(total)
        self._sums[row, 1].add_(count)

    def names(self) -> list[str]:
        """All names of this rank, agreed or not."""
        return list(self._rows)

    def has_new_names(self) -> bool:
        """Whether this rank holds a name that is not agreed."""
        return len(self._rows) > len(self.agreed)

    def agree(self, names: Iterable[str]) -> None:
        """Append the new ones of ``names`` to the agreed order, sorted; ``names`` is the union over ranks."""
        known = set(self.agreed)
        new = set(names) - known
        if not new:
            return
        self.agreed += sorted(new)
        order = self.agreed + [name for name in self._rows if name not in known | new]
        sums = torch.zeros(_capacity(len(order)), 2, dtype=self._sums.dtype, device=self._sums.device)
        for row, name in enumerate(order, start=1):
            if name in self._rows:
                sums[row] = self._sums[self._rows[name]]
        self._rows = {name: row for row, name in enumerate(order, start=1)}
        self._sums = sums

    def pack(self) -> torch.Tensor:
        """A new ``[1 + agreed names, 2]`` float64 tensor to be summed over ranks. The window stays open."""
        pack = self._sums[: 1 + len(self.agreed)].clone()
        pack[0, 0].fill_(self.has_new_names())  # setting the item would copy from the host, which waits there
        return pack

    def close(self) -> None:
        """Start the agreed names anew, after their pack was reduced. Other names stay open."""
        self._sums[: 1 + len(self.agreed)] = 0

    def clear(self) -> None:
        """Drop every open sum."""
        self._sums.zero_()

    def _new_row(self, name: str) -> int:
        if not isinstance(name, str):
            raise TypeError(f"metric name: got {name!r}; expected a string")
        if not (name.isprintable() and 0 < len(name.encode()) <= LONGEST_NAME):
            raise ValueError(f"metric name: got {name!r}; expected 1 to {LONGEST_NAME} bytes of printable text")
        row = 1 + len(self._rows)
        if row == len(self._sums):
            grown = self._sums.new_zeros(_capacity(row), 2)
            grown[:row] = self._sums
            self._sums = grown
        self._rows[name] = row
        return row


class Readback:
    """A tensor on its way to the host, from the current stream; on the CPU it is there at once."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._host, self._event = tensor, None
        if tensor.device.type != "cpu":
            # Pinned, or the copy would make the host wait for everything queued before it.
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.get_device_module(tensor.device).Event()
            self._event.record()

    def ready(self) -> bool:
        """Whether :meth:`wait` would return at once. Ranks may answer differently."""
        return self._event is None or self._event.query()

    def wait(self) -> list[list[float]]:
        """The values, blocking until they are there."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.tolist()


class _Report(NamedTuple):
    readback: Any  # of the reduced pack
    names: tuple[str, ...]  # of its rows after the header
    samples: int


class DeferredMetrics:
    """Metrics of one rank, reported together with those of the other ranks of a group.

    Calls marked *collective* must be made by every rank of the group at the same point.

    Args:
        device: where sums are kept and packs are reduced.
        interval: optimizer steps between two reports, >= 1; None reports only on :meth:`flush`.
        all_reduce: sums a float64 tensor over the group, in place, in the order of the current stream.
        gather_names: takes this rank's names, returns every rank's as a list; see :func:`over_group`.
        publish: called on every rank with ``{name: sum / count}`` and ``samples`` for each report that is not
            empty, when the host has its values.
        readback: how values get to the host; replaced in tests.

    Attributes:
        collectives: metric all-reduces so far.
        exchanges: exchanges of names so far.
    """

    def __init__(
        self,
        *,
        device: torch.device | str,
        interval: int | None,
        all_reduce: Callable[[torch.Tensor], Any],
        gather_names: Callable[[list[str]], list[list[str]]],
        publish: Callable[[dict[str, float], int], Any] = lambda values, samples: None,
        readback: Callable[[torch.Tensor], Any] = Readback,
    ) -> None:
        if interval is not None and interval < 1:
            raise ValueError(f"interval: got {interval}; expected at least 1 optimizer step, or None")
        self.interval = interval
        self.collectives = 0
        self.exchanges = 0
        self._window = OpenWindow(device)
        self._all_reduce = all_reduce
        self._gather_names = gather_names
        self._publish = publish
        self._readback = readback
        self._pending: _Report | None = None
        self._agree_next = True  # the same on every rank whenever a report begins
        self._last: dict[str, float] = {}
        self._last_on_device = torch.empty(0, dtype=torch.float64, device=device)

    def add(self, name: str, total: Scalar, count: Scalar) -> None:
        """Add to a name's open sum and count; no collective, no host read. See :meth:`OpenWindow.add`."""
        self._window.add(name, total, count)

    def end_of_step(self, global_steps: int, samples: int) -> None:
        """Call after every optimizer step, skipped ones included. Collective every ``interval`` steps.

        Args:
            global_steps: optimizer steps so far, the same on every rank.
            samples: samples so far, passed on to ``publish``.
        """
        if self.interval is not None and global_steps % self.interval == 0:
            self._report(samples)
        if self._pending is not None and self._pending.readback.ready():  # on the CPU, at once
            self._collect()

    def flush(self, samples: int) -> dict[str, float]:
        """Report the open window now, with all names of all ranks. Collective; the host waits.

        Returns:
            ``{name: value}`` of this window, empty where no rank counted anything.
        """
        self._agree_next = True
        self._report(samples)
        return self._collect()

    def finish(self, patience: float = 5.0) -> None:
        """Publish the report on its way, before the process or the engine ends. Does not communicate.

        Gives up after ``patience`` seconds: where another rank has died, the values never come.
        """
        deadline = time.monotonic() + patience
        while self._pending is not None:
            if self._pending.readback.ready():
                self._collect()
            elif time.monotonic() > deadline:
                self._pending = None
            else:
                time.sleep(0.01)

    def finish_at_exit(self) -> None:
        """Have :meth:`finish` called when the interpreter exits, should this object still exist then."""
        weakref.finalize(self, atexit.unregister, atexit.register(partial(_finish_if_alive, weakref.ref(self))))

    @property
    def last(self) -> dict[str, float]:
        """``{name: value}`` of the last report that was not empty; waits for it where it is on its way."""
        self._collect()
        return dict(self._last)

    def last_on_device(self, name: str) -> torch.Tensor:
        """A name's last reported value as a float64 0-d device tensor, without a host read; NaN before that.

        Unlike :attr:`last` it keeps the value of a name that the last report did not have. Later reports do
        not change a tensor returned earlier.
        """
        if name in self._window.agreed:
            row = self._window.agreed.index(name)
            if row < len(self._last_on_device):
                return self._last_on_device[row]
        return self._last_on_device.new_full((), torch.nan)

    def export_open_window(self) -> dict[str, tuple[float, float]]:
        """``{name: (sum, count)}`` of the open window, summed over ranks, for a checkpoint. Collective.

        The window stays open.
        """
        self._agree()
        pack = self._window.pack()
        self._reduce(pack)
        rows = zip(self._window.agreed, pack.tolist()[1:], strict=True)
        return {name: (total, count) for name, (total, count) in rows if total != 0 or count != 0}

    def import_open_window(self, window: Mapping[str, tuple[float, float]], *, is_first_rank: bool) -> None:
        """Replace the open window by an exported one. Every rank calls it; it does not communicate.

        The sums are of all ranks, so one rank takes them all, which is right for any number of ranks.
        """
        self._window.clear()
        self._agree_next = True
        if is_first_rank:
            for name, (total, count) in window.items():
                self._window.add(name, total, count)

    def _report(self, samples: int) -> None:
        self._collect()  # the previous report: its flag decides whether names are exchanged now
        if self._agree_next:
            self._agree()
        pack = self._window.pack()
        self._reduce(pack)
        self._window.close()
        self._remember_on_device(pack)
        self._pending = _Report(self._readback(pack), tuple(self._window.agreed), samples)

    def _reduce(self, pack: torch.Tensor) -> None:
        self._all_reduce(pack)
        self.collectives += 1

    def _agree(self) -> None:
        self._collect()  # a flag that is still on its way asks for the very exchange that follows
        gathered = self._gather_names(self._window.names())
        self.exchanges += 1
        self._window.agree(name for names in gathered for name in names)
        self._agree_next = False

    def _collect(self) -> dict[str, float]:
        """Finish the report on its way, if any: note its flag, publish. Returns its values."""
        if self._pending is None:
            return {}
        report, self._pending = self._pending, None
        (flag, _), *rows = report.readback.wait()
        self._agree_next = self._agree_next or flag > 0
        pairs = zip(report.names, rows, strict=True)
        values = {name: total / count for name, (total, count) in pairs if count != 0}
        if values:
            self._last = values
            self._publish(dict(values), report.samples)
        return values

    def _remember_on_device(self, pack: torch.Tensor) -> None:
        total, count = pack[1:].unbind(1)
        before = torch.full_like(total, torch.nan)
        before[: len(self._last_on_device)] = self._last_on_device
        self._last_on_device = torch.where(count != 0, total / count, before)


def over_group(
    comm: Any, objects: Any, group: Any
) -> tuple[Callable[[torch.Tensor], Any], Callable[[list[str]], list[list[str]]]]:
    """``(all_reduce, gather_names)`` from ``deepspeed.comm`` and ``torch.distributed``.

    Args:
        comm: a module with ``all_reduce`` and ``get_world_size``.
        objects: a module with ``all_gather_object``. Not ``deepspeed.comm``: its comms logger does not know
            that call and ends the process.
        group: the process group whose ranks are summed, None for all.
    """

    def gather_names(names: list[str]) -> list[list[str]]:
        gathered: list[Any] = [None] * comm.get_world_size(group=group)
        with during("the exchange of names for the metric report", _LOST, group):
            objects.all_gather_object(gathered, names, group=group)
        return gathered

    def all_reduce(tensor: torch.Tensor) -> None:
        with during("the all-reduce of the metric report", _LOST, group):
            comm.all_reduce(tensor, group=group)

    return all_reduce, gather_names


def _finish_if_alive(reference: weakref.ref[DeferredMetrics]) -> None:
    metrics = reference()
    if metrics is not None:
        metrics.finish()


def _scalar(name: str, value: Scalar, device: torch.device) -> float | torch.Tensor:
    if not isinstance(value, torch.Tensor):
        try:
            number = None if isinstance(value, (str, bytes)) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = None
        if number is None:
            raise ValueError(f"metric {name!r}: got {value!r}; expected one real number")
        return number
    if value.numel() != 1 or value.is_complex():
        shape, dtype = tuple(value.shape), value.dtype
        raise ValueError(f"metric {name!r}: got a {dtype} tensor of shape {shape}; expected one real number")
    value = value.detach().reshape(())
    # An operand on the CPU is passed by value to a device operation, so it needs no copy.
    return value if value.device.type == "cpu" else value.to(device)


def _capacity(names: int) -> int:
    """Rows for a header and ``names`` names, with room to double."""
    return max(8, 2 * (names + 1))
