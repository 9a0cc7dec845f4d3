"""`visual-gen stream`: prompts to videos of any length, chunk by chunk and all in one batch, and a report."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from visual_gen.commands.generate import announce, say, writing
from visual_gen.commands.stream_request import StreamRequest, stream_request
from visual_gen.compilation import compile_seconds
from visual_gen.config import RunConfig
from visual_gen.runtime.files import expanded, report_paths

if TYPE_CHECKING:
    from visual_gen.commands.stream_videos import StreamVideo
    from visual_gen.pipelines.stream_engine import StreamEngine
    from visual_gen.runtime.stream_report import StreamRunRecord

logger = logging.getLogger(__name__)


def run(arguments: argparse.Namespace) -> None:
    """Raises ValueError and OSError before anything is written; RuntimeError if a video ended early, KeyboardInterrupt
    if Ctrl-C did that, both after all that was made is in files that play."""
    request = stream_request(arguments)
    folder, label, warnings = check(request)
    for warning in warnings:
        logger.warning(warning)
    start = time.perf_counter()
    engine, videos = open_videos(request)
    loaded = time.perf_counter() - start
    announce(request.config.model.path, label, engine.transformer.attention_choices)
    record = make(request, engine, videos)
    record.stage_seconds = {"load": loaded} | record.stage_seconds
    record.checkpoint, record.warnings, record.checkpoint_label = str(folder), warnings, label
    _report(request.config, record)
    if record.interrupted:
        made = "; ".join(f"{v.file or 'no file'}: {len(v.chunk_seconds)} chunks" for v in record.videos)
        say(f"stopped before chunk {request.stream.chunks}; what was made plays ({made})")
        raise KeyboardInterrupt
    if faults := [f"video {i}: {video.fault}" for i, video in enumerate(record.videos) if video.fault]:
        raise RuntimeError("; ".join(faults) + ". What was made before is kept")


def check(request: StreamRequest) -> tuple[Path, str, list[str]]:
    """The checkpoint's folder, what it calls itself, and warnings. Raises ValueError, before weights are read."""
    from visual_gen.pipelines.stream_opening import check_streams
    from visual_gen.runtime.memory import check_memory
    from visual_gen.runtime.model import find_model
    from visual_gen.runtime.plan import plan

    config, generation = request.config, request.config.generation
    texts = [("prompt", text) for text in dict.fromkeys(generation.prompts)]
    texts += [(f"switch at chunk {chunk}", text) for chunk, text in request.switches.items()]
    if generation.negative_prompt:
        texts.append(("negative prompt", generation.negative_prompt))
    found = check_streams(
        config.model.path, dtype=config.torch_dtype(), device=config.torch_device(), attention=config.attention,
        height=generation.height, width=generation.width, latent_frames=request.latent_frames, causal=config.causal,
        texts=texts, max_sequence_length=generation.max_sequence_length,
        compile=config.compile,
    )  # fmt: skip
    if find_model(config) is not None:
        planned = plan(config)
        weights = sum(planned.memory_bytes.get(name, 0) for name in ("weights", "text_encoder", "vae"))
        needed = weights + len(request.files) * planned.stream.kv_cache_bytes
        check_memory(needed, config.torch_device(), f"the KV caches of {len(request.files)} streams, with the weights,")
    return found


def open_videos(request: StreamRequest) -> tuple[StreamEngine, list[StreamVideo]]:
    """An engine with room for all videos, and each open in it. Nothing is written before a video has frames."""
    from visual_gen.commands.stream_videos import StreamVideo
    from visual_gen.pipelines.stream_engine import StreamEngine

    config, generation, count = request.config, request.config.generation, len(request.files)
    recached = request.switches and request.stream.recache == "window"
    engine = StreamEngine.from_pretrained(
        config.model.path, causal=config.causal, dtype=config.torch_dtype(), device=config.torch_device(),
        attention=config.attention, height=generation.height, width=generation.width, compile=config.compile,
        max_sequence_length=generation.max_sequence_length, guidance_scale=generation.guidance_scale,
        max_streams=count + bool(recached),  # a window is computed anew beside the old one
        batch_rows=count * (2 if generation.guidance_scale > 1 else 1), deterministic=request.stream.deterministic,
    )  # fmt: skip
    return engine, [StreamVideo(engine, request, index) for index in range(count)]


def make(request: StreamRequest, engine: StreamEngine, videos: list[StreamVideo]) -> StreamRunRecord:
    """Step until every video has its chunks or has failed, or Ctrl-C; then finish the files."""
    from visual_gen.commands.stream_progress import StreamProgress
    from visual_gen.runtime.record import peak_memory
    from visual_gen.runtime.stream_report import StreamRunRecord

    seconds = dict.fromkeys(("compile", "denoise", "decode", "write"), 0.0)
    interrupted = False
    start = time.perf_counter()
    try:
        with StreamProgress(request.stream.chunks) as line, stop_on_interrupt() as stopping:
            while not (interrupted := stopping()):
                for video in videos:
                    video.steer()
                going = [video for video in videos if video.going]
                if not going:
                    break
                before, compiled = time.perf_counter(), compile_seconds()
                engine.step([video.stream for video in going])
                compiled = compile_seconds() - compiled
                seconds["compile"] += compiled
                seconds["denoise"] += time.perf_counter() - before - compiled
                for video in going:
                    video.deliver(since=start)
                line.show(videos, engine, time.perf_counter() - start)
    except KeyboardInterrupt:  # a second one, or one where no handler can be set
        interrupted = True
    except Exception:
        say("the run failed; what was made before plays")
        raise
    finally:
        for video in videos:
            video.finish()
        engine.close()
    for video in videos:
        seconds["decode"] += video.decode_seconds
        seconds["write"] += video.write_seconds
    timeline = engine.record().timeline
    return StreamRunRecord(
        videos=[video.record for video in videos], engine=engine.record(), stage_seconds=seconds,
        started_s=timeline[0].at_s if timeline else 0.0, peak_memory=peak_memory(engine.transformer.device),
        device=str(engine.transformer.device), interrupted=interrupted,
    )  # fmt: skip


@contextmanager
def stop_on_interrupt() -> Iterator[Callable[[], bool]]:
    """Within, the first Ctrl-C is only noted, and the function given says so: no forward and no file is cut off half
    way. The second one interrupts. In a thread that gets no signals, Ctrl-C is as ever."""
    noted = []

    def note(number: int, frame: object) -> None:
        if noted:
            raise KeyboardInterrupt
        noted.append(number)
        print("\nvisual-gen: stopping after this step; Ctrl-C again stops at once", file=sys.stderr)

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(noted)
    finally:
        signal.signal(signal.SIGINT, before)


def _report(config: RunConfig, record: StreamRunRecord) -> None:
    from visual_gen.runtime.stream_report import write_stream_report

    paths = [video.file for video in record.videos if video.file is not None]
    if config.output.report:
        path = expanded(config.output.path)
        with writing(report_paths(path)[0]):
            paths += write_stream_report(path, config, record)
    # At the end: a reader of this output that has gone stops us here, and must not cost a video.
    for path in paths:
        print(path)
