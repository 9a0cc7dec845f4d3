"""Prompts on their way to text rows: cleaning, cut words, unknown words, and padding that is not computed."""

import inspect
import re

import pytest
import torch

from visual_gen.config import GenerationConfig
from visual_gen.pipelines.text import clean_prompt, encode, text_warnings, tokenize

UNKNOWN = "zzyzx"


@pytest.mark.parametrize(
    "text, cleaned",
    [
        ("  a\tred \n circle  ", "a red circle"),
        ("a &amp;amp; b &lt;c&gt;", "a & b <c>"),
        ("cafÃ©", "café"),
        ("", ""),
        ("一只　红色的\u00a0猫，＂跑＂！", "一只 红色的 猫,\"跑\"!"),
        ("赤い\u3000円が\r\n動く", "赤い 円が 動く"),
        ("un cercle\u202frouge…&nbsp;ﬁn", "un cercle rouge… fin"),
        ("‘quoted’ “twice”\x1b[31m", "'quoted' \"twice\""),
        ("دائرة حمراء\u200f\u2028تتحرك", "دائرة حمراء\u200f تتحرك"),
        ("a 🔴 circle\ufeff", "a 🔴 circle"),
        ("e\u0301te\u0301", "été"),
    ],
)
def test_prompts_are_cleaned_as_diffusers_cleans_them(text, cleaned):
    from diffusers.pipelines.wan.pipeline_wan import prompt_clean

    assert clean_prompt(text) == prompt_clean(text) == cleaned


def test_the_empty_prompt_is_its_end_token(pipe):
    assert tokenize(pipe.tokenizer, "", 48).ids == [pipe.tokenizer.eos_token_id]


def test_tokens_are_those_of_the_tokenizers_own_truncation(pipe):
    for text in ("a red circle", "a red circle moving left and up", UNKNOWN):
        for length in (1, 2, 4, 64):
            expected = pipe.tokenizer(text, truncation=True, max_length=length, padding=False).input_ids
            assert tokenize(pipe.tokenizer, text, length).ids == expected


def test_words_that_do_not_fit_are_named(pipe, generate):
    tokens = tokenize(pipe.tokenizer, f"a red circle moving left {UNKNOWN}", 4)
    assert tokens.cut == f"moving left {UNKNOWN}"
    assert tokens.unknown == []  # what was cut is not also unknown
    output = generate("a red circle moving left", max_sequence_length=4)
    assert any("prompt is longer" in w and "'moving left'" in w for w in output.record.warnings)
    assert output.record.prompt_tokens == [4]


class CharacterTokenizer:
    """A token for each word of Latin letters and each other character, one at the end; as a fast tokenizer answers."""

    unk_token_id = 1

    def __call__(self, text, **_):
        spans = [match.span() for match in re.finditer(r"[A-Za-z]+|\S", text)]
        end = [(0, 0)]
        return {
            "input_ids": [5] * len(spans) + [2],
            "offset_mapping": spans + end,
            "special_tokens_mask": [0] * len(spans) + [1],
        }


@pytest.mark.parametrize(
    "text, length, cut, said",
    [
        ("一只红色的猫在月亮上奔跑", 8, "月亮上奔跑", "its last 5 character(s) were cut: '月亮上奔跑'"),
        ("一只红色的猫 runs fast", 8, "fast", "its last 1 word(s) were cut: 'fast'"),
        ("ひ" * 600, 512, "ひ" * 89, f"its last 89 character(s) were cut: '{'ひ' * 48} …'"),
        ("a cat-like cat", 3, "cat-like cat", "its last 2 word(s) were cut: 'cat-like cat'"),
        ("猫cats", 2, "cats", "its last 1 word(s) were cut: 'cats'"),
    ],
)
def test_what_is_cut_is_said_in_languages_without_blanks_too(text, length, cut, said):
    tokens = tokenize(CharacterTokenizer(), text, length)
    assert tokens.cut == cut
    (warning,) = text_warnings("prompt", tokens, length)
    assert said in warning


def test_the_authors_512_tokens_are_the_default(pipe):
    assert inspect.signature(pipe.__call__).parameters["max_sequence_length"].default == 512
    assert GenerationConfig().max_sequence_length == 512


def test_a_prompt_that_just_fits_loses_nothing(pipe):
    tokens = tokenize(pipe.tokenizer, "a red circle", 4)
    assert tokens.cut == "" and len(tokens.ids) == 4


def test_unknown_words_are_named_once_and_in_order(pipe, generate, caplog):
    tokens = tokenize(pipe.tokenizer, f"a Qwerty circle {UNKNOWN} qwerty {UNKNOWN}", 48)
    assert tokens.unknown == ["Qwerty", UNKNOWN, "qwerty"]
    output = generate(["a red circle", f"a {UNKNOWN}"], negative_prompt="qwerty", seed=[0, 1])
    warned = [warning for warning in output.record.warnings if "does not know" in warning]
    assert [warning.split(" has ")[0] for warning in warned] == ["prompt 1", "negative prompt"]
    assert repr(UNKNOWN) in warned[0]
    assert warned[0] in caplog.messages


def test_known_words_give_no_warning(generate):
    assert not any("know" in warning for warning in generate("a Red circle").record.warnings)


def test_rows_equal_the_padded_and_masked_computation_and_are_zero_past_their_length(pipe):
    texts = ["a red circle moving left", "", "a star"]
    rows = [tokenize(pipe.tokenizer, text, 16) for text in texts]
    text = encode(pipe.text_encoder, rows, 16, torch.float32)
    assert text.lens == [6, 1, 3]
    padded = pipe.tokenizer(texts, padding="max_length", max_length=16, truncation=True, return_tensors="pt")
    with torch.no_grad():
        expected = pipe.text_encoder(padded.input_ids, padded.attention_mask).last_hidden_state
    for hidden, row, length in zip(text.hidden, expected, text.lens, strict=True):
        assert (hidden[:length] - row[:length]).abs().max() < 1e-5
        assert not hidden[length:].any()


def test_a_rows_bits_do_not_depend_on_its_neighbours(pipe):
    rows = [tokenize(pipe.tokenizer, text, 16) for text in ("a star", "a red circle moving left")]
    together = encode(pipe.text_encoder, rows, 16, torch.float32).hidden
    alone = encode(pipe.text_encoder, rows[:1], 16, torch.float32).hidden
    assert torch.equal(together[:1], alone)


def test_each_distinct_text_is_encoded_once(pipe, generate, monkeypatch):
    texts = ["a red circle", "a star", "a red circle", "a star"]
    alone = [generate(text, seed=seed, output_type="latent").frames for seed, text in enumerate(texts)]
    passes, forward = [], pipe.text_encoder.forward
    monkeypatch.setattr(pipe.text_encoder, "forward", lambda ids, mask: passes.append(ids) or forward(ids, mask))
    together = generate(texts, seed=[0, 1, 2, 3], negative_prompt="", output_type="latent").frames
    assert len(passes) == 3
    assert (together - torch.cat(alone)).abs().max() < 1e-3
    passes.clear()
    generate(["a star", ""], seed=[0, 1], output_type="latent")  # the negative prompt is one of the prompts
    assert len(passes) == 2


@pytest.mark.parametrize(
    "cfg, negative, projected",
    [
        ("batched", "", 3),  # "a star", "" and the pad row, whatever the number of rows and steps
        ("batched", ["", "a star", "a red ball"], 4),
        ("sequential", "", 4),  # each branch with its pad row
        ("sequential", ["a star", "a star", "a star"], 2),  # both branches show the same: one projection
    ],
)
def test_rows_that_show_one_text_share_its_keys_and_values(pipe, generate, cfg, negative, projected):
    """Counted at the first and the last layer, in calls of a request of 3 steps."""
    counts, hooks = {}, []
    for layer in (0, -1):
        site = pipe.transformer.blocks[layer].cross_text
        hooks.append(
            site.to_kv.register_forward_hook(lambda *_, layer=layer: counts.update({layer: counts.get(layer, 0) + 1}))
        )
    try:
        generate(["a star"] * 3, seed=[0, 1, 2], negative_prompt=negative, cfg=cfg, output_type="latent")
    finally:
        for hook in hooks:
            hook.remove()
    assert counts == {0: projected, -1: projected}


def test_a_text_length_without_room_for_the_end_token_is_refused(pipe):
    with pytest.raises(ValueError, match="max_sequence_length is 0"):
        tokenize(pipe.tokenizer, "a", 0)
