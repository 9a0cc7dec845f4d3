import os

import numpy as np
import pytest

from visual_gen.runtime.machine import peak_rss_bytes
from visual_gen.runtime.video import VideoWriter, write_video


def frames(count: int, size: tuple[int, int] = (32, 48), seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, *size, 3), dtype=np.uint8)


def decoded(path) -> np.ndarray:
    import av

    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def test_frames_in_parts_make_the_file_that_they_make_at_once(tmp_path):
    import av

    clip = frames(11)
    write_video(tmp_path / "whole.mp4", clip, 12.5, crf=0)
    with VideoWriter(tmp_path / "parts.mp4", 12.5, crf=0) as writer:
        for part in np.split(clip, [1, 5, 6]):
            writer.append(part)
        assert writer.frames == 11
    # Pixels, not bytes: x264 may choose otherwise with the same frames at other addresses.
    np.testing.assert_array_equal(decoded(tmp_path / "parts.mp4"), decoded(tmp_path / "whole.mp4"))
    with av.open(str(tmp_path / "parts.mp4")) as container:
        assert container.streams.video[0].average_rate == 12.5


def test_nothing_is_in_its_place_before_the_end(tmp_path):
    (tmp_path / "a.mp4").write_text("old")
    with VideoWriter(tmp_path / "a.mp4", 16) as writer:
        writer.append(frames(3))
        assert (tmp_path / "a.mp4").read_text() == "old"
    assert len(decoded(tmp_path / "a.mp4")) == 3
    assert os.listdir(tmp_path) == ["a.mp4"]


def test_an_exception_leaves_what_was_there(tmp_path):
    (tmp_path / "a.mp4").write_text("old")
    with pytest.raises(KeyboardInterrupt), VideoWriter(tmp_path / "a.mp4", 16) as writer:
        writer.append(frames(3))
        raise KeyboardInterrupt
    assert (tmp_path / "a.mp4").read_text() == "old"
    assert os.listdir(tmp_path) == ["a.mp4"]


def test_no_frames_make_no_file(tmp_path):
    with VideoWriter(tmp_path / "new" / "a.mp4", 16) as writer:
        assert not writer.finish()
    assert os.listdir(tmp_path) == []


def test_a_finish_that_fails_leaves_nothing(tmp_path, monkeypatch):
    writer = VideoWriter(tmp_path / "a.mp4", 16)
    writer.append(frames(3))
    monkeypatch.setattr(os, "replace", lambda *paths: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        writer.finish()
    assert os.listdir(tmp_path) == []


def test_frames_of_another_size_are_refused_and_the_video_goes_on(tmp_path):
    with VideoWriter(tmp_path / "a.mp4", 16) as writer:
        writer.append(frames(2))
        with pytest.raises(ValueError, match="32×32; this video's are 48×32"):
            writer.append(frames(1, (32, 32)))
        with pytest.raises(ValueError, match="needs \\[frames"):
            writer.append(frames(0))
        writer.append(frames(1))
    assert len(decoded(tmp_path / "a.mp4")) == 3


def test_memory_does_not_grow_with_the_length(tmp_path):
    part = frames(8, (64, 96))
    with VideoWriter(tmp_path / "a.mp4", 16, crf=40) as writer:
        for _ in range(15):  # x264 looks some 60 frames ahead
            writer.append(part)
        before = peak_rss_bytes()
        for _ in range(40):
            writer.append(part)
        assert peak_rss_bytes() - before < 4 * 2**20  # all of them are 17 MiB
