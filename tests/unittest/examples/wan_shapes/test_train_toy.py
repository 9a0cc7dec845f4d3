"""The whole training at toy size: it stops, goes on, and leaves a folder that the pipeline runs."""

import json
from dataclasses import replace

import pytest
import torch

from examples.wan_shapes.captions import NO_CAPTION, make_tokenizer
from examples.wan_shapes.run_folder import RunFolder, settings_from
from examples.wan_shapes.settings import TOY, Settings
from examples.wan_shapes.train import main
from examples.wan_shapes.transformer_stage import TransformerTrainer, first_round
from visual_gen import WanPipeline


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("run")
    # A limit that is used up at once: every stage stops after its first steps, and the next call goes on.
    stopped = main(["--run", str(folder), "--toy", "--device", "cpu", "--stages", "vae=0.001"])
    finished = main(["--run", str(folder), "--device", "cpu"])
    torch.set_num_threads(threads)
    return folder, stopped, finished


def test_a_stage_cut_short_says_so_and_the_next_call_finishes_it(trained):
    folder, stopped, finished = trained
    assert (stopped, finished) == (3, 0)
    log = (folder / "log.txt").read_text()
    assert "vae is not finished; call again" in log and "vae: going on from step" in log
    assert "transformer: finished at step 8 of 8" in log and "refine: finished at step 4 of 4" in log


def test_settings_are_kept_with_the_run(trained):
    folder, _, _ = trained
    assert settings_from(json.loads((folder / "settings.json").read_text()), Settings) == TOY
    assert RunFolder(folder, Settings()).settings == TOY


def test_the_pipeline_runs_what_was_trained(trained):
    folder, _, _ = trained
    pipeline = WanPipeline.from_pretrained(folder / "pipeline", dtype=torch.float32, device="cpu", progress=False)
    frames = pipeline(prompt=["a red circle", ""], height=32, width=48, num_frames=9, num_inference_steps=2,
                      max_sequence_length=64, generator=torch.Generator().manual_seed(0), progress=False).frames
    assert frames.shape == (2, 9, 32, 48, 3)


def test_weights_are_fp16_and_all_that_was_trained(trained):
    from diffusers import AutoencoderKLWan
    from safetensors.torch import load_file

    folder, _, _ = trained
    state = torch.load(folder / "refine.pt", weights_only=True)
    saved = load_file(folder / "pipeline/transformer/diffusion_pytorch_model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.float16}
    averages = dict(zip(state["transformer"], state["averages"], strict=False))
    name = "blocks.0.attn1.to_q.weight"
    torch.testing.assert_close(saved[name], averages[name].half())
    config = AutoencoderKLWan.load_config(folder / "pipeline/vae")
    assert min(config["latents_std"]) >= 0.25 and config["latents_std"] != [1.0] * 8


@pytest.mark.parametrize("arguments", [["--stages", "vae=481"], ["--stages", "bake"], ["--set", "colour=1"]])
def test_bad_arguments_are_refused(arguments, tmp_path):
    with pytest.raises((SystemExit, ValueError)):
        main(["--run", str(tmp_path / "run"), *arguments])


def test_a_stage_asks_for_the_one_before(tmp_path):
    with pytest.raises(ValueError, match="stage 'vae' is not finished"):
        main(["--run", str(tmp_path / "run"), "--toy", "--device", "cpu", "--stages", "latents"])


def test_an_exported_folder_can_be_trained_further(trained, tmp_path):
    folder, _, _ = trained
    run = ["--run", str(tmp_path / "run"), "--device", "cpu", "--set", "refine_steps=0"]
    stages = ["--stages", "refine_latents", "refine", "export"]
    assert main([*run, "--toy", "--start-from", str(folder / "pipeline"), *stages]) == 0
    # No step was made, so that what comes out is what went in.
    for part in ("vae", "transformer"):
        name = f"{part}/diffusion_pytorch_model.safetensors"
        assert (tmp_path / "run/pipeline" / name).read_bytes() == (folder / "pipeline" / name).read_bytes()
    spinning = torch.load(tmp_path / "run/refine_latents.pt", weights_only=True)
    assert sum(len(latents) for latents, _ in spinning["chunks"]) == TOY.refine_clips
    with pytest.raises(ValueError, match="has vae and transformer already"):
        main([*run, "--start-from", str(folder / "pipeline"), "--stages"])


def test_the_vae_alone_can_be_taken_over(trained, tmp_path):
    folder, _, _ = trained
    run = ["--run", str(tmp_path / "run"), "--toy", "--device", "cpu", "--set", "transformer_steps=1"]
    assert main([*run, "--vae-from", str(folder / "pipeline"), "--stages", "latents", "transformer", "export"]) == 0
    name = "vae/diffusion_pytorch_model.safetensors"
    assert (tmp_path / "run/pipeline" / name).read_bytes() == (folder / "pipeline" / name).read_bytes()
    with pytest.raises(ValueError, match="has vae already"):
        main([*run, "--vae-from", str(folder / "pipeline"), "--stages"])
    with pytest.raises(SystemExit):
        main([*run, "--vae-from", str(folder / "pipeline"), "--start-from", str(folder / "pipeline")])


def test_clips_for_the_empty_prompt_are_a_share_of_both_rounds(trained):
    folder, _, _ = trained
    for name in ("latents", "refine_latents"):
        for _, ids in torch.load(folder / f"{name}.pt", weights_only=True)["chunks"]:
            # Of four clips a chunk, one has the empty caption: its end token alone.
            assert sum(int((ids[i] != 0).sum()) == ids.shape[1] for i in range(4)) == 1


def test_a_dropped_caption_is_not_the_empty_one():
    trainer = TransformerTrainer(TOY, replace(first_round(TOY), dropped_captions=1.0), torch.device("cpu"))
    latents, ids = torch.zeros(4, 8, 3, 4, 4), torch.full((4, 2, TOY.text_slots), 7, dtype=torch.int16)
    _, drawn = trainer.batch([(latents, ids)])
    tokenizer = make_tokenizer()
    (expected,) = tokenizer([NO_CAPTION], padding="max_length", max_length=TOY.text_slots).input_ids
    assert (drawn == torch.tensor(expected)).all() and tokenizer("").input_ids != expected[:1]


def test_weights_of_another_size_do_not_start_a_run(trained, tmp_path):
    with pytest.raises(ValueError, match="the run's settings say"):
        main(["--run", str(tmp_path / "run"), "--device", "cpu", "--start-from", str(trained[0] / "pipeline")])
    assert not (tmp_path / "run/vae.pt").exists()
