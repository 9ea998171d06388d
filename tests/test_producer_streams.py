"""The order of work on several streams, with fake streams that remember who waited for whom."""

import contextlib

import pytest

from ds_lazyreduce.producer_streams import OneStream, ProducerStreams, make_streams


class Stream:
    def __init__(self, name):
        self.name, self.clock, self.seen = name, 0, {}

    def wait_stream(self, other):
        self.seen.update({name: max(at, self.seen.get(name, 0)) for name, at in other.seen.items()})
        self.seen[other.name] = max(other.clock, self.seen.get(other.name, 0))

    def work(self):
        self.clock += 1
        return self.name, self.clock

    def comes_after(self, work):
        name, at = work
        return name == self.name or self.seen.get(name, 0) >= at


class Accelerator:
    def __init__(self):
        self.streams = {name: Stream(name) for name in ("main", "side", "other")}
        self.current = self.streams["main"]

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
        return self.stream(self.streams[name])


class Grad:
    def __init__(self):
        self.recorded = []

    def record_stream(self, stream):
        self.recorded.append(stream.name)


class Param:
    def __init__(self):
        self.grad = Grad()


@pytest.fixture
def rig():
    accelerator = Accelerator()
    streams = make_streams(accelerator)
    assert isinstance(streams, ProducerStreams)
    return accelerator, streams


@pytest.mark.parametrize("producer", ["main", "side", "other"])
def test_a_gradient_is_taken_on_home_after_it_was_made(rig, producer):
    accelerator, streams = rig
    streams.settle()
    taken = []

    def take(param):
        taken.append((accelerator.current_stream().name, accelerator.current_stream().comes_after(made)))

    hook = streams.bring_home(take)
    param = Param()
    grad = param.grad
    with accelerator.on(producer):
        made = accelerator.current_stream().work()
        hook(param)
        assert accelerator.current_stream().name == producer
    assert taken == [("main", True)]
    assert grad.recorded == ([] if producer == "main" else ["main"])


def test_home_is_the_stream_that_calls_backward_and_waits_for_the_one_before(rig):
    accelerator, streams = rig
    in_flight = accelerator.current_stream().work()
    with accelerator.on("side"):
        streams.settle()
        assert accelerator.current_stream().comes_after(in_flight)
        names = []
        streams.bring_home(lambda param: names.append(accelerator.current_stream().name))(Param())
    assert names == ["side"]


def test_the_step_comes_after_everything_on_home(rig):
    accelerator, streams = rig
    with accelerator.on("side"):
        streams.settle()
        summed = accelerator.current_stream().work()
    assert not accelerator.current_stream().comes_after(summed)
    streams.join()
    assert accelerator.current_stream().comes_after(summed)


def test_a_parameter_without_a_gradient_is_passed_on(rig):
    accelerator, streams = rig
    param = Param()
    param.grad = None
    seen = []
    with accelerator.on("side"):
        streams.bring_home(seen.append)(param)
    assert seen == [param]


def test_a_device_without_streams_needs_nothing():
    class Cpu:
        def current_stream(self):
            return None

    streams = make_streams(Cpu())
    assert isinstance(streams, OneStream)
    assert streams.bring_home(print) is print
