"""A collective that fails: what was being done, and which ranks are missing.

A backend's error names neither. So a rank on which a collective failed adds its number to a list in the store
through which the process group was made, and looks for a moment who else has: whoever is not on the list has
died, is stuck, or has not noticed yet. Before a failure nothing is written, so there is no cost.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

logger = logging.getLogger("ds_lazyreduce")

# Seconds that other ranks get to notice. They wait in the same collective, so most do at the same moment; the
# process group's timeout comes on top.
PATIENCE = 2.0
# Launchers end all ranks of a job as soon as they see one gone, so what is known after this long is logged at once.
_FIRST_WORD = 0.03
_OF_A_BACKEND = re.compile("gloo|ccl|timed out|connection", re.IGNORECASE)
# torchrun keeps one store for all its restarts.
_PREFIX = f"lazy_reduce/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
_LIST = f"{_PREFIX}/failed_ranks"


class CollectiveError(RuntimeError):
    """A collective failed, for instance because a rank died. Names what was being done and who is missing."""


class during:
    """A context in which a backend's error becomes a :class:`CollectiveError`; any other error passes.

    Args:
        what: names the collective, as in "the step's scalar pack".
        outcome: what the failure leaves behind, a sentence.
        group: the process group whose ranks may be missing, None for all.
    """

    __slots__ = ("_what", "_outcome", "_group")

    def __init__(self, what: str, outcome: str, group: Any = None):
        self._what, self._outcome, self._group = what, outcome, group

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind, error, traceback) -> None:
        if is_backend_error(error):
            raise CollectiveError(explain(f"{self._what} failed", error, self._outcome, self._group)) from error


def inherit_timeout(group: Any) -> None:
    """Gives a group that was made without a timeout the default group's. Local; None, the default group, is left alone.

    DeepSpeed makes its groups without the timeout that its caller gave to ``init_distributed``, so that ranks would
    wait for a stopped one for torch's own, half an hour.
    """
    if group is None or group is dist.group.WORLD:
        return
    chosen, current = _timeout_of(dist.group.WORLD), _timeout_of(group)
    if chosen is not None and current == dist.distributed_c10d._get_default_timeout(dist.get_backend(group)):
        dist.distributed_c10d._set_pg_timeout(chosen, group)


def _timeout_of(group: Any) -> timedelta | None:
    devices = sorted(group._device_types, key=lambda device: device.type == "cpu")  # an accelerator's comes first
    backend = group._get_backend(devices[0])
    return getattr(getattr(backend, "options", None), "_timeout", None)  # other backends than gloo and nccl have none


def is_backend_error(error: BaseException | None) -> bool:
    """Whether a backend of torch.distributed raised it. gloo raises bare RuntimeErrors, which only their text tells."""
    bare = type(error) is RuntimeError and _OF_A_BACKEND.search(str(error)) is not None
    return bare or isinstance(error, dist.DistError)


def explain(what: str, error: BaseException, outcome: str, group: Any = None) -> str:
    """The text of a CollectiveError. Takes up to ``PATIENCE`` seconds, in which other ranks may answer.

    Args:
        what: a clause, as in "the step's scalar pack failed".
        error: why.
        outcome, group: see :class:`during`.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    happened = f"lazy_reduce: {what} on rank {rank}: {error}"
    if not is_backend_error(error) or not dist.is_initialized():
        return f"{happened}. {outcome} Restart the job."
    call = _RollCall(rank, dist.get_process_group_ranks(group or dist.group.WORLD))
    known = call.known_after(_FIRST_WORD)
    logger.error("%s. %s", happened, call.missing("reported no failure so far") if known else "")
    call.known_after(PATIENCE)
    return f"{happened}. {call.missing('did not answer (died, stuck, or still waiting)')} {outcome} Restart the job."


class _RollCall:
    """Runs on a thread of its own: a store whose host is stopped answers no call, and none of them times out."""

    def __init__(self, rank: int, ranks: list[int]):
        self._rank, self._ranks = rank, ranks
        self._failed: set[int] | None = None
        self._verdict: str | None = None
        self._started = time.monotonic()
        self._thread = threading.Thread(target=self._call, daemon=True)
        self._thread.start()

    def known_after(self, seconds: float) -> bool:
        """Waits until ``seconds`` after the start, or less if everybody has failed; whether anything is known."""
        self._thread.join(max(self._started + seconds - time.monotonic(), 0.0))
        return self._failed is not None or self._verdict is not None

    def missing(self, how: str) -> str:
        """A sentence on the ranks that have not failed."""
        if self._verdict is not None:
            return self._verdict
        if self._failed is None:
            by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            holder = "the launcher, which holds it," if by_launcher else "rank 0, which holds it,"
            return (
                f"Who is missing cannot be told: the process group's store does not answer; {holder} is gone or stuck."
            )
        missing = [rank for rank in self._ranks if rank not in self._failed]
        if not missing:
            return "All ranks have seen a failure."
        return f"{'Rank' if len(missing) == 1 else 'Ranks'} {', '.join(map(str, missing))} {how}."

    def _call(self) -> None:
        try:
            store = dist.distributed_c10d._get_default_store()
            verdict = f"{_PREFIX}/verdict_of_rank_{self._rank}"
            if store.check([verdict]):  # a later failure in the same group, about which the list says nothing
                self._verdict = store.get(verdict).decode()
                return
            store.append(_LIST, f"{self._rank} ")
            while time.monotonic() < self._started + PATIENCE:
                self._failed = {int(rank) for rank in store.get(_LIST).split()}
                if self._failed.issuperset(self._ranks):
                    break
                time.sleep(0.01)
            store.set(verdict, self.missing("did not answer an earlier failure"))
        except RuntimeError as error:  # its host is gone
            logger.debug("roll call: %s", error)
