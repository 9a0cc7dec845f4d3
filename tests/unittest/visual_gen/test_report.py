import errno
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest

from attention_backend import register_backend, selection
from attention_backend.sdpa import SDPABackend
from visual_gen.config import CROSS_KV_MODES, Override, RunConfig, load_config
from visual_gen.runtime import plots
from visual_gen.runtime.files import check_writable, report_paths, written_whole
from visual_gen.runtime.record import RunRecord
from visual_gen.runtime.report import CROSS_KV_NOTES, build_report, write_report
from visual_gen.runtime.units import format_bytes, format_count, format_seconds
from visual_gen.runtime.video import write_video

CONFIG = Path(__file__).parents[3] / "configs" / "wan_shapes_t2v.yaml"


def clip(frames: int = 5, height: int = 32, width: int = 48) -> np.ndarray:
    """A red square that moves over navy, float [F, H, W, 3]."""
    video = np.empty((frames, height, width, 3), np.float32)
    video[:] = (0.05, 0.08, 0.30)
    for i, frame in enumerate(video):
        frame[8:24, 4 + 4 * i : 20 + 4 * i] = (0.9, 0.1, 0.1)
    return video


def decode(path: Path) -> np.ndarray:
    import av

    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def test_a_video_has_its_frames_colours_and_rate(tmp_path):
    write_video(tmp_path / "a.mp4", clip(), 12.5)
    import av

    with av.open(str(tmp_path / "a.mp4")) as container:
        stream = container.streams.video[0]
        found = (stream.codec_context.name, stream.codec_context.pix_fmt, float(stream.average_rate), stream.frames)
    assert found == ("h264", "yuv420p", 12.5, 5)
    frames = decode(tmp_path / "a.mp4") / 255
    assert frames.shape == (5, 32, 48, 3)
    assert np.abs(frames[0, 16, 12] - (0.9, 0.1, 0.1)).max() < 0.03
    assert np.abs(frames[-1, 4, 4] - (0.05, 0.08, 0.30)).max() < 0.03


def test_uint8_and_float_frames_give_the_same_video(tmp_path):
    write_video(tmp_path / "a.mp4", clip(), 16)
    write_video(tmp_path / "b.mp4", (clip() * 255).round().astype(np.uint8), 16)
    # Pixels, not bytes: x264's rate control may choose otherwise with the same frames at other addresses.
    assert np.abs(decode(tmp_path / "a.mp4").astype(int) - decode(tmp_path / "b.mp4")).max() <= 2


@pytest.mark.parametrize(("path", "frames", "said"), [
    (clip(), "a.mp4", "path is of type ndarray; it must be the name of a file, and frames come after it"),
    ("a.mp4", "b.mp4", r"frames are 'b.mp4'; a video needs an array \[frames, height, width, 3\]"),
    ("a.mp4", Path("b.mp4"), "frames are PosixPath"),
    ("a.mp4", 3.0, r"frames have shape \(\)"),
])  # fmt: skip
def test_arguments_in_another_order_are_told_apart(tmp_path, monkeypatch, path, frames, said):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=said):
        write_video(path, frames, 16)
    assert list(tmp_path.iterdir()) == []


def test_a_higher_crf_takes_fewer_bytes(tmp_path):
    noise = np.random.default_rng(0).random((5, 32, 48, 3))
    sizes = []
    for crf in (0, 18, 51):
        write_video(tmp_path / "a.mp4", noise, 16, crf=crf)
        sizes.append((tmp_path / "a.mp4").stat().st_size)
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == 3


@pytest.mark.parametrize(
    ("frames", "said"),
    [
        (clip()[0], r"shape \(32, 48, 3\); a video needs \[frames, height, width, 3\]"),
        (clip()[:0], "a video needs"),
        (clip(height=33), "48×33; H.264 in yuv420p needs an even width and height"),
        (clip().astype(np.int64), "are int64; a video needs uint8, or floats in 0..1"),
        (np.full((2, 8, 8, 3), np.nan), "NaN or infinite values; nothing was written"),
    ],
)
def test_frames_that_are_no_video_are_refused_and_leave_nothing(tmp_path, frames, said):
    with pytest.raises(ValueError, match=said):
        write_video(tmp_path / "a.mp4", frames, 16)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("moment", ["while it encodes", "before it is renamed"])
def test_an_interrupted_video_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, moment):
    (tmp_path / "a.mp4").write_bytes(b"old")
    seen = []

    def interrupt(*args, **kwargs):
        seen.append(len(list(tmp_path.iterdir())))
        raise KeyboardInterrupt

    if moment == "while it encodes":
        monkeypatch.setattr("av.VideoFrame.from_ndarray", interrupt)
    else:
        monkeypatch.setattr("visual_gen.runtime.files.os.replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_video(tmp_path / "a.mp4", clip(), 16)
    assert seen == ([1] if moment == "while it encodes" else [2])  # the encoder opens its file when it has a packet
    assert [path.name for path in tmp_path.iterdir()] == ["a.mp4"]
    assert (tmp_path / "a.mp4").read_bytes() == b"old"


def test_a_file_is_whole_or_absent(tmp_path):
    with pytest.raises(RuntimeError), written_whole(tmp_path / "a.txt") as part:
        part.write_text("half")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    with written_whole(tmp_path / "a.txt") as part:
        part.write_text("whole")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["whole"]


def test_a_file_gets_its_folder_when_it_is_written_and_not_before(tmp_path):
    file = tmp_path / "new" / "deep" / "a.mp4"
    check_writable(file)
    assert list(tmp_path.iterdir()) == []
    with written_whole(file) as part:
        part.touch()
    assert file.exists()


def test_a_name_as_long_as_it_may_be_is_written_and_a_longer_one_is_refused(tmp_path):
    file = tmp_path / ("a" * 251 + ".mp4")
    check_writable(file)
    with written_whole(file) as part:
        part.touch()
    assert list(tmp_path.iterdir()) == [file]
    for longer in (tmp_path / ("a" * 252 + ".mp4"), tmp_path / ("a" * 256) / "a.mp4"):
        with pytest.raises(OSError, match=r"cannot write .* \(File name too long\); name another output"):
            check_writable(longer)


def test_writable_paths_keep_the_file_that_is_there(tmp_path):
    (tmp_path / "old.mp4").write_bytes(b"old")
    check_writable(tmp_path / "old.mp4")
    assert (tmp_path / "old.mp4").read_bytes() == b"old"


def test_paths_that_cannot_be_written_are_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="is a folder, not a file"):
        check_writable(tmp_path)
    with pytest.raises(ValueError, match="is a device, not a file"):
        check_writable("/dev/null")
    with pytest.raises(OSError, match=r"cannot write .*file/a\.mp4 \(.*\); name another output"):
        check_writable(tmp_path / "file" / "a.mp4")


def test_a_folder_without_permission_is_named(tmp_path, monkeypatch):
    def refuse(dir):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("visual_gen.runtime.files.tempfile.TemporaryFile", refuse)
    with pytest.raises(PermissionError, match=r"cannot write .*a\.mp4 \(Permission denied\); name another output"):
        check_writable(tmp_path / "a.mp4")


@pytest.fixture
def config() -> RunConfig:
    prompts = Override("generation.prompt", ["a <b>red</b> square", ""], "test")
    return load_config(CONFIG, [prompts, "generation.seed=3", "attention.cross_kv=packed"])


@pytest.fixture
def record() -> RunRecord:
    return RunRecord(
        stage_seconds={"load": 1.0, "text": 0.5, "denoise": 2.0, "decode": 0.25, "write": 0.25},
        step_seconds=[0.6, 0.5, 0.4, 0.5],
        peak_memory_bytes=3 * 2**29,
        peak_memory_kind="rss",
        warnings=["num_frames 5 is none of this checkpoint's"],
        attention={"self": {"backend": "sdpa", "why": "auto, passing over x"}},
        cross_kv="packed",
        cross_kv_formulations=["packed"],
        metadata={"hits": 4, "builds": 1, "device_copies": 1},
        prompt_tokens=[4, 1],
        device="cpu",
        scheduler="unipc",
    )


def test_the_json_report_says_what_ran_and_what_it_took(tmp_path, config, record):
    files = [tmp_path / "a-0.mp4", tmp_path / "a-1.mp4"]
    json_path, _ = write_report(tmp_path / "a.mp4", config, record, [clip(), clip()], files)
    report = json.loads(json_path.read_text())
    assert report["clips"] == [
        {"prompt": "a <b>red</b> square", "seed": 3, "file": "a-0.mp4", "prompt_tokens": 4},
        {"prompt": "", "seed": 4, "file": "a-1.mp4", "prompt_tokens": 1},
    ]
    assert report["settings"]["generation"]["num_inference_steps"] == config.generation.num_inference_steps
    assert report["settings"]["model"]["path"] == "wan-shapes"
    assert report["attention"]["self"] == {"backend": "sdpa", "why": "auto, passing over x"}
    assert report["cross_kv"]["mode"] == "packed"
    assert "a different video from the one that Wan was trained to give" in report["cross_kv"]["note"]
    assert report["cross_kv"]["formulations"] == {"packed": "no pad row kept"}
    assert report["seconds"]["total"] == 4.0
    assert report["seconds"]["stages"] == record.stage_seconds
    assert report["seconds"]["steps"] == [0.6, 0.5, 0.4, 0.5]
    assert report["peak_memory"] == {"bytes": 3 * 2**29, "kind": "rss"}
    assert report["metadata"] == {"hits": 4, "builds": 1, "device_copies": 1}
    assert report["warnings"] == record.warnings
    assert report["run"]["scheduler"] == "unipc"
    assert {"visual-gen", "python", "torch", "diffusers", "transformers"} <= report["versions"].keys()
    assert report["machine"]["cores"] == os.cpu_count()


def test_stages_that_did_nothing_are_left_out(tmp_path, config, record):
    record.stage_seconds = {"load": 0.0, "text": 0.5, "image": 0.0, "denoise": 2.0}
    paths = write_report(tmp_path / "a.mp4", config, record, [clip(), clip()], [Path("a"), Path("b")])
    assert json.loads(paths[0].read_text())["seconds"]["stages"] == {"text": 0.5, "denoise": 2.0}
    assert "loading included" not in paths[1].read_text() and "</i>image" not in paths[1].read_text()


def test_the_kernel_packages_of_the_backends_taken_are_listed(config, record, monkeypatch):
    monkeypatch.setattr(selection, "_classes", dict(selection.backend_classes()))
    monkeypatch.setattr(_Foreign, "__module__", "pytest.somewhere")  # a package that is here
    register_backend(_Foreign)
    assert "pytest" not in build_report(config, record, [None, None])["versions"]
    record.attention["cross_text"] = {"backend": "foreign", "why": "named"}
    assert build_report(config, record, [None, None])["versions"]["pytest"] == pytest.__version__
    record.attention["cross_text"] = {"backend": "paged_flash_attn3", "why": "named"}
    monkeypatch.setattr("visual_gen.runtime.versions.metadata.version", {"vllm": "0.9"}.get)
    assert build_report(config, record, [None, None])["versions"]["vllm"] == "0.9"


class _Foreign(SDPABackend):
    name = "foreign"


def test_the_page_needs_no_other_file_and_escapes_what_users_wrote(tmp_path, config, record):
    files = [tmp_path / "a-0.mp4", tmp_path / "b 1#.mp4"]
    _, html_path = write_report(tmp_path / "a.mp4", config, record, [clip(), clip()], files)
    page = html_path.read_text()
    assert "a &lt;b&gt;red&lt;/b&gt; square" in page
    assert "<b>red</b>" not in page
    assert "(empty prompt)" in page
    assert page.count("data:image/png;base64,") == 2
    assert page.count("<svg") == 2
    assert 'href="b%201%23.mp4"' in page
    assert not re.search(r'(src|href)="(?!data:|a-0\.mp4|b%201%23\.mp4|#)', page)
    assert "a different video from the one that Wan was trained to give" in page
    assert "Formulation taken: <code>packed</code>, no pad row kept." in page
    assert "1.50 GiB" in page
    assert "median 500 ms" in page
    assert "num_frames 5 is none of this checkpoint&#39;s" in page


def test_a_report_without_steps_or_warnings_has_no_empty_parts(tmp_path, config, record):
    record.step_seconds, record.warnings = [], []
    _, html_path = write_report(tmp_path / "a.mp4", config, record, [clip(), clip()], [Path("a"), Path("b")])
    page = html_path.read_text()
    assert "Denoising steps" not in page
    assert "Warnings" not in page


def test_the_report_says_what_the_checkpoint_calls_itself(tmp_path, config, record):
    record.checkpoint_label = "experimental: only <shapes>"
    paths = write_report(tmp_path / "a.mp4", config, record, [clip(), clip()], [Path("a"), Path("b")])
    assert json.loads(paths[0].read_text())["checkpoint_label"] == "experimental: only <shapes>"
    assert "experimental: only &lt;shapes&gt;" in paths[1].read_text()


def test_every_cross_mode_has_its_note():
    assert tuple(CROSS_KV_NOTES) == CROSS_KV_MODES


def test_the_strip_has_the_frames_that_are_asked_for(tmp_path, config, record):
    pages = []
    for count in (1, 3, 32):
        config = config.model_copy(update={"output": config.output.model_copy(update={"report_frames": count})})
        _, html_path = write_report(tmp_path / "a.mp4", config, record, [clip(), clip()], [Path("a"), Path("b")])
        pages.append(len(html_path.read_text()))
    assert pages == sorted(pages)
    assert len(set(pages)) == 3


def test_reports_lie_beside_their_video():
    assert report_paths("out/demo.mp4") == (Path("out/demo.report.json"), Path("out/demo.report.html"))


def test_shares_of_stages_add_up():
    legend = plots.stage_legend({"load": 1.0, "denoise": 3.0, "other": 0.0})
    assert [(name, share) for name, _, _, share in legend] == [("load", 0.25), ("denoise", 0.75), ("other", 0.0)]
    assert "<svg" in plots.stage_shares({"load": 0.0})


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.00035, "350 µs"), (0.042, "42.0 ms"), (0.9996, "1000 ms"), (3.14159, "3.14 s"), (59.9, "59.9 s"),
     (125, "2 min 05 s")],
)  # fmt: skip
def test_seconds_for_people(seconds, text):
    assert format_seconds(seconds) == text


def test_sizes_and_counts_for_people():
    assert [format_bytes(n) for n in (0, 999, 1536, 3 * 2**30)] == ["0 B", "999 B", "1.50 KiB", "3 GiB"]
    assert [format_count(n) for n in (12, 1.5e12, 2e21)] == ["12", "1.50 T", "2000 E"]
