"""Prompts as Wan reads them."""

from __future__ import annotations

import html


def clean_prompt(text: str) -> str:
    """Mend broken Unicode, resolve HTML entities (doubly escaped ones too) and reduce white space to single blanks,
    as Wan's training captions were."""
    import ftfy  # here, so that a machine without it can use what reads no prompts

    return " ".join(html.unescape(html.unescape(ftfy.fix_text(text))).split())
