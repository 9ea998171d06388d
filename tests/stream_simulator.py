"""An accelerator with streams that exist on paper only, for tests of the order of work.

Within ``with Simulator() as sim:`` every torch operation that writes is put into the queue of the current stream
instead of being run, as on a GPU; ``sim.run(choose)`` runs the queues, in any order that their events allow. At the
same time vector clocks tell whether any two accesses to the same bytes, one of them a write, are unordered: such a
race goes wrong in *some* order, whether or not it was run. Allocating counts as a write by the stream whose pool the
memory comes from, and so does freeing, except for streams that ``record_stream`` was called with.

A wait can be left out: ``sim.waits`` are the places in the package that made one wait, and ``without=place`` ignores
the waits of one place.
"""

import contextlib
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import ds_lazyreduce

PACKAGE = str(Path(ds_lazyreduce.__file__).parent)


@dataclass(eq=False)
class Event:
    stream: str
    clock: dict[str, int]
    after: str  # the last thing the stream was given
    happened: bool = False


class Stream:
    def __init__(self, sim, name):
        self.sim, self.name = sim, name
        self.queue, self.clock, self.last = [], {name: 0}, ""
        self.waited_for = []

    def record_event(self):
        event = Event(self.name, dict(self.clock), self.last)
        self.queue.append(("record", event))
        return event

    def wait_event(self, event):
        if self.sim.is_left_out("wait_event"):
            return
        self.waits_for(event)

    def wait_stream(self, other):
        if self.sim.is_left_out("wait_stream"):
            return
        self.waits_for(other.record_event())

    def waits_for(self, event):
        self.waited_for.append(event)
        self.queue.append(("wait", event))
        for name, at in event.clock.items():
            self.clock[name] = max(at, self.clock.get(name, 0))

    def comes_after(self, stream, at):
        return self.clock.get(stream, 0) >= at


@dataclass
class Memory:
    """What happened to one storage. accesses: (first byte, end, stream, its time, is a write, what)."""

    storage: torch.UntypedStorage
    pool: str  # the stream that allocated it
    accesses: list = field(default_factory=list)
    recorded: list = field(default_factory=list)


class Work:
    """Of a collective: ``wait`` makes the current stream wait, as with NCCL."""

    def __init__(self, sim, stream):
        self.sim, self.done = sim, stream.record_event()

    def wait(self):
        if not self.sim.is_left_out("work.wait"):
            self.sim.current.waits_for(self.done)
        self.sim.current.last = "work.wait"


class Simulator(TorchDispatchMode):
    """Also the accelerator: ``current_stream()``, ``stream(s)``, ``Stream()``."""

    def __init__(self, without=None):
        super().__init__()
        self.without, self.waits, self.races = without, set(), []
        self.streams, self.memories = {}, {}
        self.current = self.named("home")

    # -- the accelerator

    def named(self, name):
        if name not in self.streams:
            self.streams[name] = Stream(self, name)
        return self.streams[name]

    def Stream(self):  # noqa: N802
        return self.named("reduction")

    def current_stream(self):
        return self.current

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def on(self, name):
        return self.stream(self.named(name))

    def is_left_out(self, what):
        frame = sys._getframe(2)
        while frame and not frame.f_code.co_filename.startswith(PACKAGE):
            frame = frame.f_back
        if frame is None:
            return False
        code = frame.f_code
        place = f"{Path(code.co_filename).name}:{frame.f_lineno} {code.co_name}: {what}"
        self.waits.add(place)
        return place == self.without

    def record_stream(self, tensor, stream):
        if not self.is_left_out("record_stream"):
            self._memory(tensor).recorded.append(stream)

    def free(self, tensor):
        """``tensor``'s memory goes back to the pool of the stream that allocated it, which may use it at once."""
        memory = self._memory(tensor)
        owner = self.streams[memory.pool]
        late = [owner, *memory.recorded]
        for _, _, stream, at, _, what in memory.accesses:
            if not any(other.comes_after(stream, at) for other in late):
                self.races.append(f"{what} on {stream} and freeing to {memory.pool}")

    # -- collectives, as the backend issues them on its own stream

    def collective(self, name, group, receive, send, compute, async_op):
        comm = self.named(f"the {group} communicator")
        comm.waits_for(self.current.record_event())
        with self.stream(comm):
            self._issue(name, [send], [receive], compute)
        work = Work(self, comm)
        if async_op:
            return work
        self.current.waits_for(work.done)  # the backend's own, in a call that is not asynchronous
        return None

    # -- operations

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        schema = func._schema
        if func is torch.ops.aten._local_scalar_dense.default:
            raise AssertionError("the host reads a tensor, which waits for the device")
        written = [
            tensor
            for spec, value in zip(schema.arguments, args, strict=False)
            if spec.alias_info is not None and spec.alias_info.is_write
            for tensor in _tensors(value)
        ]
        aliases = any(spec.alias_info is not None for spec in schema.returns)
        name = schema.name.removeprefix("aten::")
        if not written and aliases:
            return func(*args, **kwargs)  # a view: no access
        read = [t for t in _tensors((args, kwargs)) if not any(t is w for w in written)]
        if written:
            call = (func, tree_map(_alias, args), tree_map(_alias, kwargs))
            self._issue(name, read, written, lambda: call[0](*call[1], **call[2]))
            return args[0] if schema.returns else None
        result = func(*args, **kwargs)  # of the right shape; the values come when the queue runs
        self._allocated(result)
        if not name.startswith("empty"):
            out, inputs = _alias(result), tree_map(_alias, args)
            self._issue(name, read, [result], lambda: out.copy_(func(*inputs, **kwargs)))
        return result

    def _allocated(self, tensor):
        memory = Memory(tensor.untyped_storage(), self.current.name)
        self.memories[tensor.untyped_storage().data_ptr()] = memory  # kept, so that addresses are not used again
        self._access(self.current, tensor, True, "allocating")

    def _issue(self, name, read, written, run):
        stream = self.current
        stream.clock[stream.name] += 1
        stream.last = name
        stream.queue.append(("run", run))
        for tensors, is_write in ((read, False), (written, True)):
            for tensor in tensors:
                self._access(stream, tensor, is_write, name)

    def _access(self, stream, tensor, is_write, what):
        memory = self._memory(tensor)
        if memory is None or not tensor.numel():
            return
        first, end = _extent(tensor)
        for other_first, other_end, name, at, wrote, other in memory.accesses:
            if first < other_end and other_first < end and (is_write or wrote) and not stream.comes_after(name, at):
                self.races.append(f"{other} on {name} and {what} on {stream.name}")
        memory.accesses.append((first, end, stream.name, stream.clock[stream.name], is_write, what))

    def _memory(self, tensor):
        return self.memories.get(tensor.untyped_storage().data_ptr())

    # -- running the queues

    def run(self, choose):
        """Runs everything issued so far. ``choose(names)`` picks one of the streams that can go on."""
        for memory in self.memories.values():
            memory.storage.copy_(torch.full((memory.storage.nbytes(),), 0xFF, dtype=torch.uint8).untyped_storage())
        position = dict.fromkeys(self.streams, 0)
        events = [item for stream in self.streams.values() for kind, item in stream.queue if kind == "record"]
        for event in events:
            event.happened = False
        while True:
            ready = []
            for name, stream in self.streams.items():
                if position[name] < len(stream.queue):
                    kind, item = stream.queue[position[name]]
                    if kind != "wait" or item.happened:
                        ready.append(name)
            if not ready:
                break
            name = choose(ready)
            kind, item = self.streams[name].queue[position[name]]
            position[name] += 1
            if kind == "run":
                item()
            elif kind == "record":
                item.happened = True
        assert all(position[name] == len(stream.queue) for name, stream in self.streams.items()), "a deadlock"


def _tensors(value):
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _alias(value):
    """The same memory under an object of its own."""
    return torch.ops.aten.alias(value) if isinstance(value, torch.Tensor) else value


def _extent(tensor):
    first = tensor.storage_offset() * tensor.element_size()
    span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return first, first + span * tensor.element_size()
