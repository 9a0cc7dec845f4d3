"""What the clips can show, the words for it, and sentences made of them."""

import random

COLOURS = {
    "red": (0.90, 0.10, 0.10),
    "green": (0.10, 0.70, 0.20),
    "blue": (0.15, 0.30, 0.95),
    "yellow": (0.98, 0.90, 0.10),
    "orange": (1.00, 0.55, 0.05),
    "purple": (0.60, 0.15, 0.80),
    "cyan": (0.10, 0.85, 0.90),
    "pink": (1.00, 0.50, 0.75),
}
BACKGROUNDS = {
    "black": (0.02, 0.02, 0.02),
    "white": (0.97, 0.97, 0.97),
    "gray": (0.50, 0.50, 0.50),
    "navy": (0.05, 0.08, 0.30),
}
# A caption that names no background means this one.
DEFAULT_BACKGROUND = "black"
SHAPES = ("circle", "square", "triangle", "star", "ring", "cross")
# Unit steps (right, down) of the motions that have a direction; a diagonal is as fast as the others.
DIRECTIONS = {
    "left": (-1.0, 0.0),
    "right": (1.0, 0.0),
    "up": (0.0, -1.0),
    "down": (0.0, 1.0),
    "up-left": (-0.7071, -0.7071),
    "up-right": (0.7071, -0.7071),
    "down-left": (-0.7071, 0.7071),
    "down-right": (0.7071, 0.7071),
}
MOTIONS = (*DIRECTIONS, "still", "bouncing", "growing", "shrinking", "spinning")

# The first word of each list is the plain one; the others are its synonyms.
COLOUR_WORDS = {
    "red": ("red", "crimson", "scarlet"),
    "green": ("green", "emerald"),
    "blue": ("blue", "azure"),
    "yellow": ("yellow", "golden"),
    "orange": ("orange",),
    "purple": ("purple", "violet"),
    "cyan": ("cyan", "turquoise"),
    "pink": ("pink", "rose"),
}
SHAPE_WORDS = {
    "circle": ("circle", "ball", "disc", "disk", "dot"),
    "square": ("square", "box", "block"),
    "triangle": ("triangle", "pyramid"),
    "star": ("star",),
    "ring": ("ring", "hoop", "donut"),
    "cross": ("cross", "plus", "plus sign"),
}
BACKGROUND_WORDS = {
    "black": ("black", "dark"),
    "white": ("white",),
    "gray": ("gray", "grey"),
    "navy": ("navy", "navy blue", "dark blue"),
}
SIZE_WORDS = {"small": ("small", "little", "tiny"), "large": ("large", "big", "huge")}
SPEED_WORDS = {"slow": ("slowly", "gently"), "quick": ("quickly", "fast", "rapidly")}
MOTION_PHRASES = {
    "left": ("moving left", "moving to the left", "sliding left", "flying to the left", "moves left", "going left"),
    "right": ("moving right", "moving to the right", "sliding right", "flying to the right", "moves right",
              "going right"),
    "up": ("moving up", "moving upward", "rising", "rising up", "going up", "moves up"),
    "down": ("moving down", "moving downward", "falling", "falling down", "going down", "moves down"),
    "up-left": ("moving up and left", "moving diagonally up and to the left", "moving up-left", "flying up and left"),
    "up-right": ("moving up and right", "moving diagonally up and to the right", "moving up-right",
                 "flying up and right"),
    "down-left": ("moving down and left", "moving diagonally down and to the left", "moving down-left",
                  "sliding down and left"),
    "down-right": ("moving down and right", "moving diagonally down and to the right", "moving down-right",
                   "sliding down and right"),
    "still": ("standing still", "that does not move", "staying still", "at rest"),
    "bouncing": ("bouncing", "bouncing up and down", "that bounces", "jumping up and down"),
    "growing": ("growing", "growing bigger", "getting larger", "getting bigger", "that grows"),
    "shrinking": ("shrinking", "shrinking smaller", "getting smaller", "that shrinks"),
    "spinning": ("spinning", "spinning around", "rotating", "turning around", "that spins"),
}
# Clips spin clockwise unless their caption says so, as in "spinning counterclockwise".
COUNTERCLOCKWISE_WORDS = ("counterclockwise", "anticlockwise")
UNNAMED_SHAPES = ("shape", "object", "thing")
WITH_BACKGROUND = (
    "{objects} on a {background} background",
    "{objects} on a {background} background",
    "{objects}, {background} background",
    "{objects} over a {background} backdrop",
    "on a {background} background, {objects}",
    "{background} background, {objects}",
    "{objects} in front of a {background} screen",
    "there is {objects} on a {background} screen",
    "a video of {objects} on a plain {background} background",
    "a simple animation of {objects} over a plain {background} background, flat colors, smooth motion, clean edges",
)
WITHOUT_BACKGROUND = (
    "{objects}",
    "{objects}",
    "{objects}.",
    "a video of {objects}",
    "there is {objects}",
    "a simple animation of {objects}, flat colors, smooth motion, clean edges",
)
# The caption of a clip whose own is left out, and so the negative prompt for guidance. The empty caption is not: it has
# plain clips of its own, since without guidance a model this small cannot choose from all that clips can show.
NO_CAPTION = "anything"
# Stands for a word outside the vocabulary; the tokenizer gives it the id of <unk>.
UNKNOWN_WORD = "<unk>"


def visible_combination(shape: str, motion: str) -> bool:
    """False where the motion cannot be seen: a circle or a ring that spins looks still."""
    return not (motion == "spinning" and shape in ("circle", "ring"))


def with_article(words: str) -> str:
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


def plain_caption(colour: str, shape: str, motion: str, background: str | None, long_form: bool = False) -> str:
    """The caption with the first word of every list; `background` None leaves it to the default."""
    text = f"{with_article(f'{colour} {shape}')} {MOTION_PHRASES[motion][0]}"
    if long_form:
        text = f"a video of {text}"
    if background is not None:
        text += f" on a {'plain ' if long_form else ''}{background} background"
    return text


def _word(rng: random.Random, words: tuple[str, ...]) -> str:
    """The plain word most of the time, any of its synonyms otherwise."""
    return words[0] if len(words) == 1 or rng.random() < 0.6 else rng.choice(words[1:])


def _describe(rng: random.Random, shape, partial: bool) -> str:
    def kept(probability: float) -> bool:
        return not partial or rng.random() < probability

    words = []
    if shape.size and kept(0.8):
        words.append(_word(rng, SIZE_WORDS[shape.size]))
    if kept(0.5):
        words.append(_word(rng, COLOUR_WORDS[shape.colour]))
    words.append(_word(rng, SHAPE_WORDS[shape.shape]) if kept(0.75) else rng.choice(UNNAMED_SHAPES))
    text = with_article(" ".join(words))
    if not kept(0.5):
        return text
    motion = _word(rng, MOTION_PHRASES[shape.motion])
    if shape.motion == "spinning" and shape.radians_per_frame < 0:
        motion += " " + rng.choice(COUNTERCLOCKWISE_WORDS)
    if shape.speed and shape.motion != "still" and kept(0.8):
        speed = rng.choice(SPEED_WORDS[shape.speed])
        before = rng.random() < 0.4 and not motion.startswith("that")
        motion = f"{speed} {motion}" if before else f"{motion} {speed}"
    return f"{text} {motion}"


def caption(rng: random.Random, clip) -> str:
    """A sentence for a `clips.Clip`, drawn from `rng`.

    A fifth of the captions of single shapes are partial ("a circle"), an eighth have words that nobody knows, and the
    default background goes unnamed more often than not. Other backgrounds are always named.
    """
    partial = len(clip.shapes) == 1 and rng.random() < 0.2
    objects = " and ".join(_describe(rng, shape, partial) for shape in clip.shapes)
    if clip.background == DEFAULT_BACKGROUND and rng.random() < 0.6:
        text = rng.choice(WITHOUT_BACKGROUND).format(objects=objects)
    else:
        background = _word(rng, BACKGROUND_WORDS[clip.background])
        text = rng.choice(WITH_BACKGROUND).format(objects=objects, background=background)
    return with_unknown_words(rng, text) if rng.random() < 0.12 else text


def with_unknown_words(rng: random.Random, text: str) -> str:
    """One to three unknown words put in, and now and then one that takes the place of a word."""
    words = [UNKNOWN_WORD if rng.random() < 0.06 else word for word in text.split()]
    for _ in range(rng.randint(1, 3)):
        words.insert(rng.randint(0, len(words)), UNKNOWN_WORD)
    return " ".join(words)


def vocabulary() -> list[str]:
    """Every word a caption may hold, the three special tokens first: <pad> is 0, </s> 1 and <unk> 2."""
    lists = [COLOUR_WORDS, SHAPE_WORDS, BACKGROUND_WORDS, SIZE_WORDS, SPEED_WORDS, MOTION_PHRASES]
    phrases = [phrase for words in lists for group in words.values() for phrase in group]
    phrases += [*COUNTERCLOCKWISE_WORDS, *UNNAMED_SHAPES, *WITH_BACKGROUND, *WITHOUT_BACKGROUND, NO_CAPTION, "a an and"]
    text = " ".join(phrases).replace("{objects}", "").replace("{background}", "")
    for mark in ",.-":
        text = text.replace(mark, f" {mark} ")
    return ["<pad>", "</s>", UNKNOWN_WORD, *sorted(set(text.split()))]


def make_tokenizer():
    """A word-level tokenizer over `vocabulary()`: lower-cased, ended with </s>, so that "" is its end token alone."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    ids = {word: index for index, word in enumerate(vocabulary())}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=UNKNOWN_WORD))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", ids["</s>"])])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token=UNKNOWN_WORD,
        model_max_length=512,
        padding_side="right",
    )
