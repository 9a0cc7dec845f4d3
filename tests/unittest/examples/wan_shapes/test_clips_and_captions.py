"""What is drawn stays in the frame, is never held out, and is what the caption says."""

import random
from dataclasses import replace

import pytest
import torch

from examples.wan_shapes.captions import (
    BACKGROUND_WORDS,
    COLOUR_WORDS,
    DEFAULT_BACKGROUND,
    MOTIONS,
    NO_CAPTION,
    SHAPE_WORDS,
    UNKNOWN_WORD,
    caption,
    make_tokenizer,
    vocabulary,
)
from examples.wan_shapes.clips import clip_for, draw, place_shape, plain_clip, random_clip
from examples.wan_shapes.combinations import (
    all_combinations,
    as_prompts,
    held_out_combinations,
    load_prompts,
    make_held_out,
    make_lists,
)
from examples.wan_shapes.settings import Settings


def random_clips(count: int, size=(33, 96, 96), **how):
    rng = random.Random(0)
    return [random_clip(rng, *size, **how) for _ in range(count)]


@pytest.mark.parametrize("size", [(17, 96, 96), (33, 96, 160), (49, 96, 96)])
def test_shapes_stay_inside_the_frame(size):
    clips = [replace(clip, background_rgb=(0.0, 0.0, 0.0)) for clip in random_clips(16, size, two_shapes=0.0)]
    frames = draw(clips)
    border = torch.cat([frames[..., 0].flatten(2), frames[..., -1].flatten(2), frames[..., 0, :].flatten(2),
                        frames[..., -1, :].flatten(2)], -1)
    assert border.max() < -0.9
    assert (frames.amax((1, 3, 4)) > -0.5).all(), "a frame shows no shape"


def test_a_spinning_circle_is_refused():
    with pytest.raises(ValueError, match="looks still"):
        place_shape(random.Random(0), "red", "circle", "spinning", None, None, 33, 96, 96)


def test_clips_of_two_sizes_are_not_drawn_together():
    with pytest.raises(ValueError, match="one size"):
        draw([*random_clips(1), *random_clips(1, (17, 96, 96))])


def test_the_first_frames_of_a_clip_are_those_of_the_clip_cut_short():
    clip = random_clips(1, (33, 32, 32))[0]
    torch.testing.assert_close(draw([replace(clip, num_frames=17)]), draw([clip])[:, :, :17])


def test_held_out_combinations_are_never_drawn():
    held_out = held_out_combinations()
    drawn = {(shape.colour, shape.shape, shape.motion)
             for clip in random_clips(6000, held_out=held_out, two_shapes=0.3) for shape in clip.shapes}
    assert not drawn & held_out
    assert drawn == set(all_combinations()) - held_out


def test_a_tenth_is_held_out_over_all_colours_shapes_and_motions():
    held_out = make_held_out()
    assert len(set(held_out)) == 64
    assert round(len(held_out) / len(all_combinations()), 1) == 0.1
    for part, kinds in enumerate((8, 6, 13)):
        counts = [sum(one[part] == kind for one in held_out) for kind in {one[part] for one in held_out}]
        assert len(counts) == kinds
        assert max(counts) - min(counts) <= 3, counts


def test_the_committed_lists_are_those_that_the_seeds_give():
    for name, prompts in make_lists().items():
        assert load_prompts(name) == prompts, name


def test_scored_lists_keep_apart_what_was_trained_on_and_what_was_not():
    held_out = held_out_combinations()
    for name in ("seen", "spinning", "synonyms", "unknown_words"):
        assert not {(row.colour, row.shape, row.motion) for row in load_prompts(name)} & held_out, name
    assert len(load_prompts("seen")) == len(load_prompts("held_out")) == 64


def test_an_unnamed_background_is_the_default():
    rows = as_prompts(all_combinations()[:16], 0)
    unnamed = [row for row in rows if "background" not in row.prompt]
    assert unnamed and all(row.background == DEFAULT_BACKGROUND for row in unnamed)
    rng = random.Random(1)
    for clip in random_clips(400):
        text = caption(rng, clip)
        if clip.background != DEFAULT_BACKGROUND and UNKNOWN_WORD not in text:
            assert any(word in text for word in BACKGROUND_WORDS[clip.background]), text


def test_captions_say_no_other_colour_or_shape_than_the_clip_has():
    rng = random.Random(2)
    for clip in random_clips(400, two_shapes=0.0):
        text = caption(rng, clip).replace(",", "").replace(".", "").replace("navy blue", "").replace("dark blue", "")
        words, shape = set(text.split()), clip.shapes[0]
        for names, own in ((COLOUR_WORDS, shape.colour), (SHAPE_WORDS, shape.shape)):
            others = {word for name, group in names.items() if name != own for word in group}
            assert not words & others


def test_every_caption_is_made_of_known_words_and_fits_the_text_slots():
    tokenizer, rng = make_tokenizer(), random.Random(3)
    captions = [caption(rng, clip) for clip in random_clips(2000, two_shapes=0.5)]
    for text, ids in zip(captions, tokenizer(captions).input_ids, strict=True):
        assert len(ids) <= Settings().text_slots
        assert UNKNOWN_WORD in text or vocabulary().index(UNKNOWN_WORD) not in ids, text
    assert any(UNKNOWN_WORD in text for text in captions)


def test_some_captions_name_nothing_but_the_shape():
    rng = random.Random(4)
    bare = {f"a {word}" for words in SHAPE_WORDS.values() for word in words}
    assert len({caption(rng, clip) for clip in random_clips(4000, (9, 32, 32), two_shapes=0.0)} & bare) >= 3


def test_the_empty_prompt_is_its_end_token_and_strangers_are_unknown():
    tokenizer = make_tokenizer()
    assert tokenizer("").input_ids == [1]
    assert tokenizer("A Red zeppelin").input_ids[2] == vocabulary().index(UNKNOWN_WORD)


def test_no_caption_is_a_text_of_its_own():
    assert vocabulary().index(NO_CAPTION) in make_tokenizer()(NO_CAPTION).input_ids
    rng = random.Random(5)
    assert not any(NO_CAPTION in caption(rng, clip) for clip in random_clips(400))


def test_a_plain_clip_is_one_ordinary_shape_on_black():
    clips = [plain_clip(random.Random(seed), 17, 96, 96, held_out_combinations()) for seed in range(200)]
    assert {(len(clip.shapes), clip.background) for clip in clips} == {(1, DEFAULT_BACKGROUND)}
    shapes = [clip.shapes[0] for clip in clips]
    assert {(shape.size, shape.speed) for shape in shapes} == {(None, None)}
    assert {shape.motion for shape in shapes} == set(MOTIONS)
    assert not held_out_combinations() & {(shape.colour, shape.shape, shape.motion) for shape in shapes}


def test_clip_for_shows_what_it_is_asked_for():
    clip = clip_for(random.Random(0), "green", "star", "up-left", "navy", 17, 96, 160)
    (shape,) = clip.shapes
    assert (shape.colour, shape.shape, shape.motion, clip.background) == ("green", "star", "up-left", "navy")
    assert shape.x_per_frame < 0 and shape.y_per_frame < 0


def test_a_share_of_the_shapes_can_be_made_to_spin():
    def share(spinning: float) -> float:
        return sum(clip.shapes[0].motion == "spinning" for clip in random_clips(400, spinning=spinning)) / 400

    assert share(1.0) == 1.0 and 0.45 < share(0.5) < 0.65 and share(0.0) < 0.15
