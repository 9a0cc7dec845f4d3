"""Frames to an mp4 file."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np

from visual_gen.runtime.files import written_whole

BT709 = 1  # the number that H.264 gives to this matrix, these primaries and this transfer curve
LIMITED_RANGE = 1


def write_video(path: str | Path, frames: np.ndarray, fps: float, *, crf: int = 18) -> None:
    """Write frames as H.264 (yuv420p, BT.709) in an mp4 file, which appears whole or not at all.

    frames [F, H, W, 3], uint8, or float in 0..1, H and W even; fps in frames per second; crf from 0 (lossless) to 51.
    Raises ValueError if the frames are anything else.
    """
    import av  # here, so that a machine without video libraries can use all else

    pixels = _to_uint8(frames)
    _, height, width, _ = pixels.shape
    rate = Fraction(fps).limit_denominator(100_000)
    if rate <= 0:
        raise ValueError(f"fps is {fps}; it must be more than 0.00001")
    with (
        written_whole(path) as part,
        av.open(str(part), "w", format="mp4", options={"movflags": "+faststart"}) as container,
    ):
        stream = container.add_stream("libx264", rate=rate, options={"crf": str(crf)})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        context = stream.codec_context
        context.colorspace = context.color_primaries = context.color_trc = BT709
        context.color_range = LIMITED_RANGE
        for image in pixels:
            frame = av.VideoFrame.from_ndarray(image, format="rgb24")
            container.mux(stream.encode(frame.reformat(format="yuv420p", dst_colorspace="ITU709")))
        container.mux(stream.encode())


def _to_uint8(frames: np.ndarray) -> np.ndarray:
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
