"""Frames to an mp4 file."""

from __future__ import annotations

import os
from contextlib import suppress
from fractions import Fraction
from pathlib import Path

import numpy as np

from visual_gen.runtime.files import part_beside

BT709 = 1  # the number that H.264 gives to this matrix, these primaries and this transfer curve
LIMITED_RANGE = 1


def write_video(path: str | Path, frames: np.ndarray, fps: float, *, crf: int = 18) -> None:
    """Write frames as H.264 (yuv420p, BT.709) in an mp4 file, which appears whole or not at all.

    frames [F, H, W, 3], uint8, or float in 0..1, H and W even; fps in frames per second; crf from 0 (lossless) to 51.
    Raises ValueError if the frames are anything else.
    """
    with VideoWriter(path, fps, crf=crf) as writer:
        writer.append(frames)


class VideoWriter:
    """An mp4 file as `write_video` makes it, whose frames come a few at a time: memory does not grow with its length.

    The file has a temporary name until `finish`, which makes it a playable video of all frames so far and puts it in
    its place, or `discard`, which leaves nothing. As a context manager it finishes, or discards after an exception.
    """

    def __init__(self, path: str | Path, fps: float, *, crf: int = 18) -> None:
        if not isinstance(path, str | os.PathLike):
            kind = type(path).__name__
            raise ValueError(f"path is of type {kind}; it must be the name of a file, and frames come after it")
        self._rate = Fraction(fps).limit_denominator(100_000)
        if self._rate <= 0:
            raise ValueError(f"fps is {fps}; it must be more than 0.00001")
        self.path, self.frames = Path(path), 0
        self._crf, self._size = crf, (0, 0)
        self._part: Path | None = None
        self._container = self._stream = None

    def append(self, frames: np.ndarray) -> None:
        """Write more frames, [F, H, W, 3] of one size. The file is begun with the first. Raises ValueError as
        write_video does, and on frames of another size than those before."""
        pixels = _to_uint8(frames)
        if self._container is None:
            self._open(*pixels.shape[1:3])
        elif pixels.shape[1:3] != self._size:
            (height, width), (wanted_height, wanted_width) = pixels.shape[1:3], self._size
            raise ValueError(f"frames are {width}×{height}; this video's are {wanted_width}×{wanted_height}")
        import av

        for image in pixels:
            frame = av.VideoFrame.from_ndarray(image, format="rgb24")
            self._container.mux(self._stream.encode(frame.reformat(format="yuv420p", dst_colorspace="ITU709")))
            self.frames += 1

    def finish(self) -> bool:
        """Whether there is a file: none is made of no frames."""
        if self._container is None:
            return False
        try:
            self._container.mux(self._stream.encode())
            self._container.close()
            os.replace(self._part, self.path)
        except BaseException:  # Ctrl-C included
            self.discard()
            raise
        self._container = None
        return True

    def discard(self) -> None:
        if self._container is not None:
            with suppress(Exception):  # it may be what failed
                self._container.close()
            self._part.unlink(missing_ok=True)
            self._container = None

    def __enter__(self) -> VideoWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if kind is None:
            self.finish()
        else:
            self.discard()

    def _open(self, height: int, width: int) -> None:
        import av  # here, so that a machine without video libraries can use all else

        self._part = part_beside(self.path)
        self._size = (height, width)
        self._container = av.open(str(self._part), "w", format="mp4", options={"movflags": "+faststart"})
        self._stream = self._container.add_stream("libx264", rate=self._rate, options={"crf": str(self._crf)})
        self._stream.width, self._stream.height, self._stream.pix_fmt = width, height, "yuv420p"
        context = self._stream.codec_context
        context.colorspace = context.color_primaries = context.color_trc = BT709
        context.color_range = LIMITED_RANGE


def _to_uint8(frames: np.ndarray) -> np.ndarray:
    if isinstance(frames, str | bytes | os.PathLike):
        raise ValueError(f"frames are {frames!r}; a video needs an array [frames, height, width, 3]")
    frames = np.asarray(frames)
    if frames.ndim != 4 or frames.shape[-1] != 3 or 0 in frames.shape:
        raise ValueError(f"frames have shape {frames.shape}; a video needs [frames, height, width, 3]")
    _, height, width, _ = frames.shape
    if height % 2 or width % 2:
        raise ValueError(f"frames are {width}×{height}; H.264 in yuv420p needs an even width and height")
    if frames.dtype == np.uint8:
        return frames
    if not np.issubdtype(frames.dtype, np.floating):
        raise ValueError(f"frames are {frames.dtype}; a video needs uint8, or floats in 0..1")
    if not np.isfinite(frames).all():
        raise ValueError("frames hold NaN or infinite values; nothing was written")
    return (frames.clip(0, 1) * 255).round().astype(np.uint8)
