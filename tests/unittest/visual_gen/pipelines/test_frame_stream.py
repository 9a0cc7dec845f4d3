"""Delivery of a stream's frames: order, bounds, and faults that stay with their stream."""

import itertools

import numpy as np
import pytest
import torch

from visual_gen.pipelines.frame_stream import FrameDecoder, FrameStream


class StubDecoder(FrameDecoder):
    """Makes frames that say which latents they were made of, and fails at some."""

    def __init__(self, fail_at: float | None = None) -> None:
        self.fail_at, self.seen = fail_at, []

    def decode(self, latents):
        value = float(latents.flatten()[0])
        if value == self.fail_at:
            raise RuntimeError(f"no frames of {value}")
        self.seen.append(value)
        return np.full((latents.shape[2], 2, 2, 3), value, np.uint8)

    def fork(self):
        other = StubDecoder(self.fail_at)
        other.seen = list(self.seen)
        return other


class StubStream:
    """Makes chunks 1, 2, 3, … one for each step, and is full at two that nobody took."""

    def __init__(self, last: int = 1000) -> None:
        self.made, self.last, self.state, self.error, self._waiting = 0, last, "idle", None, []

    def step(self):
        if self.state == "idle" and len(self._waiting) < 2:
            self.made += 1
            self._waiting.append(torch.full((1, 4, 3, 2, 2), float(self.made)))
            if self.made == self.last:
                self.close()

    def take_latents(self):
        taken, self._waiting = self._waiting, []
        return taken

    def close(self):
        self.state = "closed"

    def fork(self, *, seed):
        other = StubStream(self.last)
        other.made, other.seed = self.made, seed
        return other


class StubEngine:
    def __init__(self, *streams) -> None:
        self.streams, self.steps = streams, 0

    def step(self, streams=None, *, until):
        assert until == "chunk"
        self.steps += 1
        for stream in self.streams if streams is None else streams:
            stream.step()
        return []


def values(frames) -> list[int]:
    return [int(chunk[0, 0, 0, 0]) for chunk in frames]


def test_iterating_steps_the_engine_and_gives_chunk_after_chunk():
    stream = StubStream()
    frames = FrameStream(StubEngine(stream), stream, StubDecoder())
    assert values(itertools.islice(frames, 5)) == [1, 2, 3, 4, 5]
    assert values(itertools.islice(frames, 2)) == [6, 7]
    assert frames.chunks >= 7


def test_a_closed_stream_ends_after_what_it_had_made():
    stream = StubStream(last=3)
    assert values(FrameStream(StubEngine(stream), stream, StubDecoder())) == [1, 2, 3]


def test_a_callback_gets_every_chunk_at_once():
    stream, got = StubStream(), []
    frames = FrameStream(StubEngine(stream), stream, StubDecoder(), on_frames=got.append)
    for _ in range(3):
        stream.step()
        frames.pump()
    assert values(got) == [1, 2, 3]
    assert (frames.waiting, frames.take()) == (0, [])
    with pytest.raises(ValueError, match="frames go to on_frames"):
        next(iter(frames))


@pytest.mark.parametrize("room", [1, 2, 3])
def test_a_reader_that_stops_stops_its_stream_and_no_other(room):
    stopped, other = StubStream(), StubStream()
    engine = StubEngine(stopped, other)
    decoder = StubDecoder()
    unread, read = FrameStream(engine, stopped, decoder, max_waiting=room), FrameStream(engine, other, StubDecoder())
    got = []
    for _ in range(20):
        engine.step(until="chunk")
        unread.pump()
        got += values(read.take())
    assert got == list(range(1, 21))
    assert unread.waiting == len(decoder.seen) == room
    assert stopped.made <= room + 4  # two that the stream holds, and two on their way to the decoder
    assert values(itertools.islice(unread, 12)) == list(range(1, 13))  # and goes on, with none lost


def test_a_decoder_that_fails_fails_its_stream_alone():
    bad, good = StubStream(), StubStream()
    engine = StubEngine(bad, good)
    broken, fine = FrameStream(engine, bad, StubDecoder(fail_at=3)), FrameStream(engine, good, StubDecoder())
    got = []
    for _ in range(6):
        engine.step(until="chunk")
        got.append((values(broken.take()), values(fine.take())))
    assert [a for a, _ in got] == [[1], [2], [], [], [], []]
    assert [b for _, b in got] == [[1], [2], [3], [4], [5], [6]]
    assert (bad.state, good.state) == ("closed", "idle")
    assert str(broken.error) == "no frames of 3.0" and fine.error is None


def test_an_iterator_gives_what_was_made_before_the_fault():
    stream, got = StubStream(), []
    with pytest.raises(RuntimeError, match="no frames of 3.0"):
        for chunk in FrameStream(StubEngine(stream), stream, StubDecoder(fail_at=3)):
            got.append(chunk)
    assert values(got) == [1, 2]


def test_a_stream_that_failed_in_the_engine_raises_its_error():
    stream = StubStream()
    frames = FrameStream(StubEngine(stream), stream, StubDecoder())
    stream.step()
    stream.state, stream.error = "failed", ArithmeticError("chunk 1 gave NaN")
    iterator = iter(frames)
    assert values([next(iterator)]) == [1]
    with pytest.raises(ArithmeticError, match="chunk 1 gave NaN"):
        next(iterator)


def test_a_callback_that_fails_fails_its_stream():
    def full(frames):
        raise OSError("disk full")

    stream = StubStream()
    frames = FrameStream(StubEngine(stream), stream, StubDecoder(), on_frames=full)
    stream.step()
    frames.pump()
    assert (str(frames.error), stream.state) == ("disk full", "closed")
    assert frames.pump() == 0


def test_ctrl_c_passes_through_and_loses_nothing(monkeypatch):
    stream, got, interrupts = StubStream(), [], iter([True, False])

    def interrupted(frames):
        got.append(frames)
        if next(interrupts):
            raise KeyboardInterrupt

    def interrupted_decode(latents):
        raise KeyboardInterrupt

    decoder = StubDecoder()
    frames = FrameStream(StubEngine(stream), stream, decoder, on_frames=interrupted)
    stream.step()
    with pytest.raises(KeyboardInterrupt):
        frames.pump()
    assert (frames.error, stream.state) == (None, "idle")
    stream.step()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(decoder, "decode", interrupted_decode)
        frames.pump()
    frames.pump()
    assert values(got) == [1, 2]


def test_a_fork_goes_on_with_a_decoder_of_its_own():
    stream = StubStream()
    frames = FrameStream(StubEngine(stream), stream, StubDecoder())
    stream.step()
    fork = frames.fork(seed=7, max_waiting=1)
    assert (fork.stream.seed, fork.waiting, frames.waiting) == (7, 0, 1)  # what was made is the first one's
    fork.stream.step()
    assert values(fork.take()) == [2]
    assert (fork.decoder.seen, frames.decoder.seen) == ([1.0, 2.0], [1.0])
    for _ in range(2):
        stream.step()
    frames.pump()
    stream.step()
    with pytest.raises(ValueError, match="2 chunks of frames wait to be taken, and more to be decoded"):
        frames.fork()


@pytest.mark.parametrize("room", [0, -1, True, 1.5])
def test_room_for_no_chunk_is_refused(room):
    with pytest.raises(ValueError, match=f"max_waiting is {room}"):
        FrameStream(StubEngine(), StubStream(), StubDecoder(), max_waiting=room)


def test_a_callback_must_be_callable():
    with pytest.raises(ValueError, match="on_frames is 'x.mp4'"):
        FrameStream(StubEngine(), StubStream(), StubDecoder(), on_frames="x.mp4")
