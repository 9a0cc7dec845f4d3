"""Prompts → the rows of text that a Wan transformer attends to, and what was lost on the way."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from visual_gen.runtime.prompts import clean_prompt

# A warning lists at most this many words.
_MAX_LISTED_WORDS = 12
# … or as many characters, where words are not told apart.
_MAX_LISTED_CHARACTERS = 48
# As Unicode's names of their characters begin.
_UNSPACED_SCRIPTS = ("CJK ", "HIRAGANA ", "KATAKANA ", "THAI ", "LAO ", "KHMER ", "MYANMAR ")


@dataclass(frozen=True)
class TextRows:
    """Each distinct text once, and the text of each row of a batch.

    hidden [texts, text length, text_dim], zeros past each text's length; text_lens, real tokens of each text, end token
    included; index, which text each row has.
    """

    hidden: torch.Tensor
    text_lens: list[int]
    index: list[int]

    @property
    def lens(self) -> list[int]:
        """Real tokens of each row."""
        return [self.text_lens[i] for i in self.index]

    def __getitem__(self, rows: slice) -> TextRows:
        return replace(self, index=self.index[rows])

    def __add__(self, other: TextRows) -> TextRows:
        """The rows of both, which are rows of one encode."""
        return replace(self, index=self.index + other.index)


@dataclass(frozen=True)
class TokenizedText:
    """ids of one prompt, the end token included; `cut` is the text that did not fit, `unknown` the words that the
    tokenizer has no entry for."""

    ids: list[int]
    cut: str
    unknown: list[str]


def tokenize(tokenizer: Any, text: str, max_sequence_length: int) -> TokenizedText:
    """Tokens of the cleaned `text`, at most `max_sequence_length` of them with the end token."""
    text = clean_prompt(text)
    encoded = tokenizer(
        text,
        add_special_tokens=True,
        truncation=False,
        padding=False,
        return_offsets_mapping=True,
        return_special_tokens_mask=True,
        verbose=False,
    )
    ids, spans = encoded["input_ids"], encoded["offset_mapping"]
    content = [i for i, special in enumerate(encoded["special_tokens_mask"]) if not special]
    room = max_sequence_length - (len(ids) - len(content))
    if room < 0:
        raise ValueError(
            f"max_sequence_length is {max_sequence_length}; this tokenizer's special tokens alone take "
            f"{len(ids) - len(content)}"
        )
    kept, dropped = content[:room], content[room:]
    cut = _from_word_start(text, spans[dropped[0]][0]) if dropped else ""
    unknown = dict.fromkeys(text[slice(*spans[i])].strip() for i in kept if ids[i] == tokenizer.unk_token_id)
    gone = set(dropped)
    return TokenizedText([token for i, token in enumerate(ids) if i not in gone], cut, list(unknown))


def tokenize_all(tokenizer: Any, texts: Sequence[str], max_sequence_length: int) -> list[TokenizedText]:
    """`tokenize` of each text; equal ones once."""
    found = {text: tokenize(tokenizer, text, max_sequence_length) for text in dict.fromkeys(texts)}
    return [found[text] for text in texts]


def _from_word_start(text: str, position: int) -> str:
    """`text` from the start of the word that `position` lies in, or from `position` where words are not told apart."""
    start = position
    if position < len(text) and not text[position].isspace():
        while start > 0 and not text[start - 1].isspace() and not _is_unspaced(text[start - 1 : start + 1]):
            start -= 1
    return text[start:].strip()


def _is_unspaced(text: str) -> bool:
    """Whether a character of `text` is of a script that sets no blanks between words."""
    return any(unicodedata.name(character, "").startswith(_UNSPACED_SCRIPTS) for character in text)


def text_warnings(what: str, tokens: TokenizedText, max_sequence_length: int) -> list[str]:
    """One sentence for words that were cut from `what`, one for words that the model does not know."""
    found = []
    if tokens.cut:
        count, listed = _listed_cut(tokens.cut)
        found.append(
            f"{what} is longer than the text length of {max_sequence_length} tokens: its last {count} were cut: "
            f"{listed!r}. Raise max_sequence_length or shorten it"
        )
    if tokens.unknown:
        listed = ", ".join(repr(word) for word in tokens.unknown[:_MAX_LISTED_WORDS])
        more = len(tokens.unknown) - _MAX_LISTED_WORDS
        found.append(
            f"{what} has words that this model does not know and cannot follow: {listed}"
            + (f" and {more} more" if more > 0 else "")
        )
    return found


def _listed_cut(cut: str) -> tuple[str, str]:
    """How much was cut, and its beginning."""
    if _is_unspaced(cut):
        more = " …" if len(cut) > _MAX_LISTED_CHARACTERS else ""
        return f"{len(cut)} character(s)", cut[:_MAX_LISTED_CHARACTERS] + more
    words = cut.split()
    more = " …" if len(words) > _MAX_LISTED_WORDS else ""
    return f"{len(words)} word(s)", " ".join(words[:_MAX_LISTED_WORDS]) + more


@torch.inference_mode()
def encode(
    text_encoder: torch.nn.Module, rows: Sequence[TokenizedText], max_sequence_length: int, dtype: torch.dtype
) -> TextRows:
    """Hidden states of each row's real tokens, in `dtype`. Rows of the same tokens are one text, encoded once.

    Every text is encoded alone and without padding: a padded token changes no real one (the encoder masks it), so the
    padding would only be computed to be zeroed, and a row's values do not depend on the other rows.
    """
    device = text_encoder.device
    texts = list(dict.fromkeys(tuple(tokens.ids) for tokens in rows))
    hidden = torch.zeros(len(texts), max_sequence_length, text_encoder.config.d_model, dtype=dtype, device=device)
    for i, text in enumerate(texts):
        ids = torch.tensor([text], device=device)
        hidden[i, : len(text)] = text_encoder(ids, torch.ones_like(ids)).last_hidden_state[0].to(dtype)
    place = {text: i for i, text in enumerate(texts)}
    return TextRows(hidden, list(map(len, texts)), [place[tuple(tokens.ids)] for tokens in rows])
