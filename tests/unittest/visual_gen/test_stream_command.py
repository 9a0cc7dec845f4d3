"""`visual-gen stream`, on a causal model of random weights that makes frames of 32×32."""

import errno
import json
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest

from tests.unittest.visual_gen.compiling import counted_graphs
from visual_gen.checkpoint import PACKAGED_CHECKPOINTS, resolve_folder
from visual_gen.cli import main
from visual_gen.commands import stream_videos
from visual_gen.commands.stream_request import parse_switches
from visual_gen.commands.stream_videos import Spread
from visual_gen.config import ConfigError
from visual_gen.pipelines import GenerationError, stream_engine
from visual_gen.pipelines.frame_stream import FrameDecoder
from visual_gen.runtime.video import VideoWriter

CONFIG = Path(__file__).parents[3] / "configs" / "wan_shapes_stream.yaml"
FRAMES = 5, 8  # of the first chunk, of each later one: 2 latent frames each


@pytest.fixture
def stream(random_causal_folder, tmp_path):
    """Runs `visual-gen stream`, 3 chunks of 2 latent frames in 2 steps into tmp_path/out.mp4; the exit code."""

    def stream(*arguments: str, config: Path | None = None) -> int:
        settings = [f"model.path={random_causal_folder}", "device=cpu", "generation.height=32", "generation.width=32",
                    "generation.max_sequence_length=48", "generation.guidance_scale=4.0", "causal.frames_per_chunk=2",
                    "causal.recent_frames=4", "causal.steps=[1000, 500]", "output.crf=0"]  # fmt: skip
        given = [text for setting in settings for text in ("--set", setting)]
        given += [] if "--output" in arguments else ["--output", str(tmp_path / "out.mp4")]
        given += [] if "--chunks" in arguments else ["--chunks", "3"]
        return main(["stream", "--config", str(config or CONFIG), *given, *arguments])

    return stream


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def pixels(file: Path) -> np.ndarray:
    import av

    with av.open(str(file)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def report_of(tmp_path: Path) -> dict:
    return json.loads((tmp_path / "out.report.json").read_text())


def test_a_stream_is_a_video_and_a_report(stream, random_causal_folder, tmp_path, capsys, caplog):
    assert stream("--prompt", "a red <b>circle</b>", "--seed", "7") == 0
    assert names(tmp_path) == ["out.mp4", "out.report.html", "out.report.json"]
    captured = capsys.readouterr()
    assert captured.out.splitlines() == [str(tmp_path / n) for n in ("out.mp4", "out.report.json", "out.report.html")]
    assert f"{random_causal_folder}: random weights" in captured.err and "self attention: sdpa" in captured.err
    size, words = caplog.messages
    assert "height x width 32x32 is none of this checkpoint's sizes" in size
    assert "prompt has words that this model does not know and cannot follow: '<'" in words
    assert pixels(tmp_path / "out.mp4").shape == (FRAMES[0] + 2 * FRAMES[1], 32, 32, 3)
    report = report_of(tmp_path)
    [video] = report["videos"]
    assert video | {"chunk_seconds": ...} == {
        "prompt": "a red <b>circle</b>", "seed": 7, "file": "out.mp4", "chunks": 3, "frames": 21, "switches": [],
        "chunk_seconds": ..., "fault": None,
    }  # fmt: skip
    assert len(video["chunk_seconds"]) == 3 and video["chunk_seconds"] == sorted(video["chunk_seconds"])
    assert report["timeline"]["rows"] == [2] * 9  # 2 steps and the commit of 3 chunks, both branches of guidance
    assert report["timeline"]["committing"] == [0, 0, 1] * 3
    settings = report["settings"]
    assert set(settings["generation"]) == {
        "prompt", "negative_prompt", "height", "width", "guidance_scale", "seed", "max_sequence_length", "fps",
    }  # fmt: skip
    assert set(settings) == {
        "model", "dtype", "device", "compile", "attention", "generation", "output", "causal", "stream",
    }  # fmt: skip
    assert report["run"]["checkpoint"] == str(random_causal_folder)
    assert set(settings["attention"]) == {"self", "cross_text", "cross_kv"}
    assert max(report["timeline"]["used_blocks"]) == report["run"]["peak_blocks"] > 0
    assert report["timeline"]["at_s"][0] == 0
    assert set(report["seconds"]["stages"]) == {"load", "compile", "denoise", "decode", "write"}
    assert report["run"]["frames"] == 21 and report["frames_per_second"] > 0
    assert not report["interrupted"] and report["checkpoint_label"] == "random weights"
    assert report["run"]["reads"] == ["extent 9", "block table 0", "staged 0"]
    assert report["attention"]["self"]["reads"] == [
        {"read": "extent", "forwards": 9, "why": "every row is one run of blocks"}
    ]
    assert report["attention"]["cross_text"]["reads"] == [
        {"read": "extent", "forwards": 9, "why": "every row's prompt lies in one piece in the text pool"}
    ]
    page = (tmp_path / "out.report.html").read_text()
    assert "extent in 9 forwards: every row is one run of blocks" in page and "extent 9, block table 0" in page
    assert "a red &lt;b&gt;circle" in page and "<b>circle" not in page
    assert page.count("<svg") == 2 and page.count("data:image/png;base64,") == 1
    assert "rows of each forward" in page and "blocks in use, of" in page


def test_the_checkpoint_of_the_report_is_the_folder_that_its_name_stands_for(stream, random_causal_folder, tmp_path,
                                                                             monkeypatch):  # fmt: skip
    monkeypatch.setitem(PACKAGED_CHECKPOINTS, "named", random_causal_folder)
    assert stream("--chunks", "1", "--set", "model.path=named") == 0
    report = report_of(tmp_path)
    assert (report["run"]["checkpoint"], report["settings"]["model"]["path"]) == (str(random_causal_folder), "named")


def test_blocks_may_be_compiled_and_what_that_took_is_no_part_of_the_forwards(stream, tmp_path):
    arguments = ["--prompt", "a red circle", "--prompt", "a blue square"]
    videos = []
    for compile in ("true", "false"):
        with counted_graphs() as graphs:
            assert stream(*arguments, "--set", f"compile={compile}") == 0
        videos.append([pixels(tmp_path / f"out-{i}.mp4").astype(int) for i in range(2)])
        assert graphs.frame_count == (compile == "true")  # growing and full windows, denoising and committing
        stages = report_of(tmp_path)["seconds"]["stages"]
        assert stages["compile"] > 0.05 if compile == "true" else stages["compile"] == 0
        assert stages["denoise"] > 0
    assert max(np.abs(a - b).max() for a, b in zip(*videos, strict=True)) <= 2


def test_a_stream_that_cannot_be_compiled_is_refused_before_it_loads(stream, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CXX", "no-such-c++")
    assert stream("--prompt", "a", "--set", "compile=true") == 2
    assert "compile is true, and torch.compile on a CPU needs a C++ compiler" in capsys.readouterr().err
    assert names(tmp_path) == []


def test_a_seed_gives_one_video_and_another_another(stream, tmp_path):
    videos = []
    for seed in ("1", "1", "2"):
        assert stream("--seed", seed, "--chunks", "2", "--set", "output.report=false") == 0
        videos.append(pixels(tmp_path / "out.mp4").astype(int))
    assert names(tmp_path) == ["out.mp4"]
    assert np.abs(videos[0] - videos[1]).max() <= 2
    assert np.abs(videos[0] - videos[2]).max() > 2


@pytest.mark.parametrize(("read", "reads"), [("block_table", "block table 3"), ("staged", "staged 3")])
def test_the_report_says_which_read_ran(stream, tmp_path, read, reads):
    assert stream("--chunks", "1", "--set", f"causal.read={read}") == 0
    report = report_of(tmp_path)
    [taken] = report["attention"]["self"]["reads"]
    assert taken == {"read": read, "forwards": 3, "why": "named when the cache was made"}
    assert report["timeline"]["read"] == [read] * 3 and reads in report["run"]["reads"]
    assert f"{reads.removesuffix(' 3')} in 3 forwards: named" in (tmp_path / "out.report.html").read_text()


def test_sessions_are_made_in_one_batch_with_a_prompt_and_a_seed_each(stream, tmp_path):
    (tmp_path / "prompts.txt").write_text("\ufeffa red circle\n\n  a blue square\n")
    arguments = ["--prompts", str(tmp_path / "prompts.txt"), "--sessions", "3", "--seed", "5", "--chunks", "2"]
    assert stream(*arguments) == 0
    report = report_of(tmp_path)
    assert [(v["prompt"], v["seed"], v["file"]) for v in report["videos"]] == [
        ("a red circle", 5, "out-0.mp4"), ("a blue square", 6, "out-1.mp4"), ("a red circle", 7, "out-2.mp4")
    ]  # fmt: skip
    assert report["timeline"]["rows"] == [6] * 6 and report["batch_sizes"] == {"6": 6}
    assert report["settings"]["generation"]["prompt"] == ["a red circle", "a blue square", "a red circle"]
    assert (tmp_path / "out.report.html").read_text().count("data:image/png;base64,") == 3
    together = pixels(tmp_path / "out-1.mp4").astype(int)
    alone = ["--prompt", "a blue square", "--seed", "6", "--chunks", "2", "--set", "output.report=false"]
    assert stream(*alone) == 0
    assert np.abs(pixels(tmp_path / "out.mp4").astype(int) - together).max() <= 2


@pytest.mark.parametrize(
    ("setting", "changed"),
    [("generation.fps=9", lambda v: float(v.average_rate) == 9), ("generation.height=48", lambda v: v.height == 48)],
)
def test_a_setting_reaches_the_video(stream, tmp_path, setting, changed):
    import av

    assert stream("--chunks", "1", "--set", setting, "--set", "output.report=false") == 0
    with av.open(str(tmp_path / "out.mp4")) as container:
        assert changed(container.streams.video[0])


@pytest.mark.parametrize(
    ("key", "value", "name"),
    [
        ("generation.guidance_scale", "1", "guidance_scale"),
        ("generation.max_sequence_length", "50", "max_sequence_length"),
        ("causal.recent_frames", "6", "causal"),
        ("dtype", "bfloat16", "dtype"),
        ("attention.cross_text", "sdpa", "attention"),
        ("stream.deterministic", "true", "deterministic"),
    ],
)
def test_a_setting_reaches_the_engine(stream, monkeypatch, key, value, name):
    seen = []

    def engine(path, **settings):
        seen.append(settings)
        raise ValueError("enough seen")

    monkeypatch.setattr(stream_engine.StreamEngine, "from_pretrained", engine)
    assert stream() == 2
    assert stream("--set", f"{key}={value}") == 2
    own = {name, "batch_rows"} if name == "guidance_scale" else {name}
    assert {key for key in seen[0] if seen[0][key] != seen[1][key]} == own


def test_the_first_chunk_may_have_another_length(stream, tmp_path):
    assert stream("--chunks", "2", "--set", "causal.first_chunk_frames=1") == 0
    assert report_of(tmp_path)["videos"][0]["frames"] == 1 + 8


def test_switches_reach_every_stream_before_their_chunk(stream, tmp_path, monkeypatch):
    seen = []
    switch = stream_engine.Stream.switch_prompt

    def noting(self, prompt, *, recache):
        seen.append((self.id, self.chunk_index, self.state, prompt, recache))
        return switch(self, prompt, recache=recache)

    monkeypatch.setattr(stream_engine.Stream, "switch_prompt", noting)
    switches = ["--switch", "2:a green star: up", "--switch", "1: a blue square"]
    assert stream("--sessions", "2", *switches, "--recache", "window") == 0
    assert seen == [(i, chunk, "idle", text, "window")
                    for chunk, text in ((1, "a blue square"), (2, "a green star: up")) for i in (0, 1)]  # fmt: skip
    told = [{"chunk": 1, "prompt": "a blue square"}, {"chunk": 2, "prompt": "a green star: up"}]
    assert [video["switches"] for video in report_of(tmp_path)["videos"]] == [told, told]
    assert "from chunk 2 on: a green star: up" in (tmp_path / "out.report.html").read_text()


def test_a_switch_changes_what_comes_after_it_alone(stream, tmp_path):
    videos = []
    for switch in ([], ["--switch", "2:a green star moving up"]):
        assert stream(*switch, "--set", "output.report=false") == 0
        videos.append(pixels(tmp_path / "out.mp4").astype(int))
    before = FRAMES[0] + FRAMES[1]
    assert np.abs(videos[0][:before] - videos[1][:before]).max() <= 2
    assert (videos[0][before:] != videos[1][before:]).any()


@pytest.mark.parametrize("text", ["6", "a blue square", ":a", "6:", "6:  ", "-1:a", "1.5:a", "x:a", "²:a", ""])
def test_a_malformed_switch_is_refused_with_its_value(text):
    with pytest.raises(ConfigError, match=r"--switch .*: wants CHUNK:TEXT") as caught:
        parse_switches([text], 10)
    assert f"--switch {text}:" in str(caught.value)


@pytest.mark.parametrize(
    ("texts", "says"),
    [
        (["0:a"], "--switch 0:a: chunk 0 has the prompt itself"),
        (["10:a"], "--switch 10:a: there is no chunk 10; the last of 10 is 9"),
        (["6:a", "6:b"], "--switch 6:b: chunk 6 has a switch already, to 'a'"),
    ],
)
def test_a_switch_that_no_chunk_can_follow_is_refused(texts, says):
    with pytest.raises(ConfigError, match=says):
        parse_switches(texts, 10)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--chunks", "0"], "--chunks: stream.chunks = 0: wants 1 or more"),
        (["--chunks", "33", "--set", "causal.rope_max_seq_len=null"], "66 latent frames and the model knows 64"),
        (["--chunks", "33", "--set", "causal.rope_max_seq_len=65"], "66 latent frames and the model knows 65"),
        (["--set", "causal.rope_max_seq_len=2000000"], "causal.rope_max_seq_len = 2000000: wants 500000 or less"),
        (["--recache", "all"], "--recache: stream.recache = 'all': wants 'none' or 'window'"),
        (["--seed", "-1"], "--seed: generation.seed = -1: wants 0 or more"),
        (["--switch", "6"], "--switch 6: wants CHUNK:TEXT"),
        (["--switch", "3:a"], "--switch 3:a: there is no chunk 3; the last of 3 is 2"),
        (["--switch", "1:a\udcff"], "--switch is 'a\\udcff'; it must be whole characters"),
        (["--sessions", "0"], "--sessions 0: wants at least 1"),
        (["--sessions", "1", "--prompt", "a", "--prompt", "b"], "--sessions 1: wants at least the 2 prompts"),
        (["--prompts", "nowhere.txt"], "--prompts nowhere.txt: cannot be read (No such file or directory)"),
        (["--prompts", "nowhere.txt", "--prompt", "a"], "--prompts nowhere.txt and --prompt: give one of the two"),
        (["--output", "a.avi"], "output.path = 'a.avi': wants a name that ends in .mp4"),
        (["--output", "/proc/none/a.mp4"], "cannot write /proc/none/a.mp4"),
        (["--set", "generation.num_frames=9"], "generation.num_frames is of whole videos: leave it out; --chunks says"),
        (["--set", "generation.cfg=batched"], "generation.cfg is of whole videos"),
        (["--set", "generation.image=a.png"], "generation.image is of whole videos: leave it out; a stream is made"),
        (["--set", "lora=[{path: a.safetensors}]"], "lora: is for whole videos"),
        (["--set", "offload=experts"], "offload = 'experts': is for a pair of transformers, and a stream has one"),
        (["--set", "causal.steps=[500, 1000]"], "causal.steps = [500, 1000]: wants a list of noise levels that fall"),
        (["--set", "generation.height=40"], "height is 40; it must be a multiple of 16"),
        (["--set", "attention.self=FA9"], "no attention backend 'FA9'"),
        (["--set", "model.path=nowhere"], "checkpoint folder 'nowhere' not found"),
        (["--set", "attention.cross_kv=packed_pad_exact"], "packed_pad_exact"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2_before_any_weights(
    stream, tmp_path, monkeypatch, capsys, arguments, said
):
    monkeypatch.setattr("visual_gen.checkpoint.WeightFiles.tensors", lambda *_, **__: pytest.fail("weights were read"))
    assert stream(*arguments) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("visual-gen: error: ")]
    assert len(errors) == 1 and said in errors[0]
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"expand_timesteps": True}, "is made for image-to-video: a stream is made from text by one transformer"),
        (
            {"transformer_2": ["diffusers", "WanTransformer3DModel"], "boundary_ratio": 0.9},
            "has a second transformer (two experts, as in Wan 2.2 A14B): a stream is made from text by one transformer",
        ),
    ],
)
def test_a_checkpoint_that_no_stream_is_made_with_is_refused(stream, tmp_path, capsys, facts, said):
    folder, whole = tmp_path / "folder", resolve_folder("wan-shapes")
    shutil.copytree(whole, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    if "transformer_2" in facts:
        shutil.copytree(folder / "transformer", folder / "transformer_2")
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index | facts))
    assert stream("--set", f"model.path={folder}") == 2
    assert said in capsys.readouterr().err
    for command in ("plan", "warmup"):
        assert main([command, "--config", str(CONFIG), "--set", f"model.path={folder}"]) == 2
        assert said in capsys.readouterr().err


def test_prompt_files_that_hold_none_are_refused(stream, tmp_path, capsys):
    (tmp_path / "empty.txt").write_text("\n \n")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    for name, said in (("empty", "has no prompt in it"), ("latin", "is not UTF-8 text (byte 3)")):
        assert stream("--prompts", str(tmp_path / f"{name}.txt")) == 2
        assert f"{name}.txt: {said}" in capsys.readouterr().err


def test_a_configuration_without_causal_settings_is_refused(stream, capsys):
    assert main(["stream", "--config", str(CONFIG.with_name("wan_shapes_t2v.yaml")), "--prompt", "a"]) == 2
    assert "there is no causal section" in capsys.readouterr().err


def test_whole_videos_are_not_made_of_stream_settings(capsys):
    assert main(["generate", "--config", str(CONFIG)]) == 2
    assert "causal: generate makes whole videos at once" in capsys.readouterr().err
    other = ["--config", str(CONFIG.with_name("wan_shapes_t2v.yaml")), "--prompt", "a", "--set", "stream.chunks=2"]
    assert main(["generate", *other]) == 2
    assert "stream: generate makes whole videos at once" in capsys.readouterr().err


def test_streams_that_do_not_fit_are_refused_before_any_weights(stream, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("visual_gen.runtime.memory.available_bytes", lambda device: 2**20)
    assert stream("--sessions", "2") == 2
    assert "the KV caches of 2 streams, with the weights, of this request needs about" in capsys.readouterr().err
    assert names(tmp_path) == []


class CountedFrames:
    """In VideoWriter's place: how many frames there were, and no file."""

    def __init__(self, path, fps, *, crf):
        self.path, self.frames = path, 0

    def append(self, frames):
        assert frames.dtype == np.uint8 and frames.shape[1:] == (32, 32, 3)
        self.frames += len(frames)

    def finish(self):
        return self.frames > 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_streams_on_a_gpu(stream, tmp_path, monkeypatch, dtype):
    """Without the encoder: it runs on the CPU, where the tests above cover it, and machines with cards may lack it."""
    monkeypatch.setattr(stream_videos, "VideoWriter", CountedFrames)
    settings = ["--set", "device=cuda", "--set", f"dtype={dtype}"]
    assert stream("--sessions", "2", "--switch", "1:a blue square", "--recache", "window", *settings) == 0
    report = report_of(tmp_path)
    assert report["run"]["device"].startswith("cuda") and report["peak_memory"]["kind"] == "cuda"
    assert [video["frames"] for video in report["videos"]] == [21, 21]


@pytest.mark.parametrize("how", ["signal", "exception"])
def test_ctrl_c_leaves_a_file_that_plays_and_a_report(stream, tmp_path, monkeypatch, capsys, how):
    step, calls = stream_engine.StreamEngine.step, []

    def interrupting(self, *arguments, **settings):
        calls.append(1)
        if len(calls) == 8:  # in the third chunk
            if how == "exception":
                raise KeyboardInterrupt
            os.kill(os.getpid(), signal.SIGINT)
        return step(self, *arguments, **settings)

    monkeypatch.setattr(stream_engine.StreamEngine, "step", interrupting)
    assert stream("--sessions", "2", "--chunks", "20") == 130
    assert len(calls) == 8
    assert names(tmp_path) == ["out-0.mp4", "out-1.mp4", "out.report.html", "out.report.json"]
    assert len(pixels(tmp_path / "out-0.mp4")) == len(pixels(tmp_path / "out-1.mp4")) == 13
    report = report_of(tmp_path)
    assert report["interrupted"] and [video["chunks"] for video in report["videos"]] == [2, 2]
    captured = capsys.readouterr()
    assert "stopped before chunk 20; what was made plays" in captured.err and "out-1.mp4: 2 chunks" in captured.err
    assert "out-0.mp4" in captured.out
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_before_the_first_chunk_leaves_no_video(stream, tmp_path, monkeypatch):
    monkeypatch.setattr(
        stream_engine.StreamEngine, "step", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    assert stream("--set", "output.report=false") == 130
    assert names(tmp_path) == []


def test_a_stream_whose_frames_fail_ends_alone_and_keeps_what_it_had(stream, tmp_path, monkeypatch, capsys):
    decode, decoders = FrameDecoder.decode, []

    def failing(self, latents):
        decoders.extend([self] if self not in decoders else [])
        if self is decoders[0] and self.latent_frames == 4:
            raise RuntimeError("broken convolution")
        return decode(self, latents)

    monkeypatch.setattr(FrameDecoder, "decode", failing)
    assert stream("--sessions", "2") == 1
    assert "RuntimeError: video 0: chunk 2: broken convolution. What was made" in capsys.readouterr().err
    report = report_of(tmp_path)
    assert [(v["frames"], v["fault"]) for v in report["videos"]] == [(13, "chunk 2: broken convolution"), (21, None)]
    assert (len(pixels(tmp_path / "out-0.mp4")), len(pixels(tmp_path / "out-1.mp4"))) == (13, 21)
    assert report["timeline"]["used_blocks"][-1] < report["run"]["peak_blocks"] or len(report["timeline"]["rows"]) == 9
    assert "chunk 2: broken convolution" in (tmp_path / "out.report.html").read_text()


def test_deterministic_keeps_a_videos_bits_when_another_ends(stream, tmp_path, monkeypatch):
    arguments = ["--sessions", "2", "--set", "stream.deterministic=true", "--set", "generation.guidance_scale=1.0"]
    assert stream(*arguments) == 0
    together = pixels(tmp_path / "out-1.mp4")
    decode, decoders = FrameDecoder.decode, []

    def failing(self, latents):
        decoders.extend([self] if self not in decoders else [])
        if self is decoders[0]:
            raise RuntimeError("broken convolution")
        return decode(self, latents)

    monkeypatch.setattr(FrameDecoder, "decode", failing)
    assert stream(*arguments) == 1
    timeline = report_of(tmp_path)["timeline"]
    assert list(zip(timeline["rows"], timeline["pad_rows"], strict=True)) == [(2, 0)] * 3 + [(1, 1)] * 6
    assert np.array_equal(pixels(tmp_path / "out-1.mp4"), together)


def test_a_switch_that_fails_costs_its_video_alone(stream, tmp_path, monkeypatch, capsys):
    switch = stream_engine.Stream.switch_prompt

    def failing(self, prompt, *, recache):
        if self.id == 0:
            raise GenerationError("the window gave NaN", step=0)
        switch(self, prompt, recache=recache)

    monkeypatch.setattr(stream_engine.Stream, "switch_prompt", failing)
    assert stream("--sessions", "2", "--switch", "1:a blue square") == 1
    assert "video 0: the switch at chunk 1: the window gave NaN" in capsys.readouterr().err
    assert [video["frames"] for video in report_of(tmp_path)["videos"]] == [5, 21]


def test_a_disk_that_fills_up_costs_one_video(stream, tmp_path, monkeypatch, capsys):
    append = VideoWriter.append

    def full(self, frames):
        if self.path.name == "out-1.mp4" and self.frames:
            raise OSError(errno.ENOSPC, "No space left on device")
        append(self, frames)

    monkeypatch.setattr(VideoWriter, "append", full)
    assert stream("--sessions", "2") == 1
    assert "video 1: chunk 1: [Errno 28] No space left on device" in capsys.readouterr().err
    assert [video["frames"] for video in report_of(tmp_path)["videos"]] == [21, 5]


@pytest.mark.parametrize("count", [1, 3, 8])
@pytest.mark.parametrize("length", [1, 5, 13, 100, 1001])
def test_pictures_are_spread_evenly_whatever_the_length(count, length):
    spread = Spread(count)
    frames = np.arange(length).reshape(-1, 1, 1, 1)
    for chunk in np.array_split(frames, -(-length // 12)):
        spread.add(chunk)
        assert len(spread._held) < 4 * count
    found = [picture.item() for picture in spread.chosen()]
    assert found[0] == 0 and len(found) == min(count, length)
    if count > 1:
        assert found[-1] == length - 1
        assert np.abs(np.array(found) - np.linspace(0, length - 1, len(found))).max() <= length / (2 * count)


def test_pictures_of_the_report_are_spread_over_the_whole(stream, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr("visual_gen.runtime.stream_report.picture_strip", lambda p: seen.append(len(p)) or b"")
    for count in (4, 32):
        assert stream("--chunks", "2", "--set", f"output.report_frames={count}") == 0
    assert seen == [4, 13]
