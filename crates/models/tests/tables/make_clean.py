#!/usr/bin/env python3
"""Writes what the cleaning of prompts rests on: src/text/html_entities.txt, HTML's named characters (a name, a space, its code points in
hexadecimal; the HTML standard's list as Python's html.entities holds it), and clean.json, what diffusers makes of awkward prompts.

    pip install diffusers transformers torch
    python make_clean.py

Without ftfy installed, whose repairs are no part of what is compared.
"""
import html.entities
import json
import random
import sys
from pathlib import Path

import diffusers
from diffusers.pipelines.wan import pipeline_wan

HERE = Path(__file__).resolve().parent

TEXTS = [
    "", " ", "a cat", "  A   Cat\n\n\ton a\u00a0mat \u3000", "Tom &amp; Jerry", "&lt;b&gt;bold&lt;/b&gt;", "&amp;amp;amp;amp;amp; &amp;lt;", "&copy 2024 &copy; &notit; &notin; &no", "&",
    "&&amp;", "&;", "&#;", "&#x;", "&#65;&#65 &#x41;&#X41 &#x41g &#65a", "&#0; &#13; &#128; &#129; &#x9f; &#x80 &#xd800; &#xdfff; &#x110000; &#99999999999999999999;",
    "&#1; &#11; &#x7f; &#xfdd0; &#xfffe; &#x1ffff; &#x10ffff; &#xa0;x", "&CounterClockwiseContourIntegral; &CounterClockwiseContourIntegralx;", "&acE; &bne; &NotEqualTilde;",
    "&ampamp; &AMP; &Amp; &aMp;", "&lt&gt&quot&apos &apos;", "&eacute;t&eacute &Eacutex", "&amp#65; &#38;lt; &#38;#38;lt;", "\x1c a \x1d b \x1e\x1f c\x85", "a\u200bb \u200b", "\ufeff x",
    "STRASSE ΟΔΥΣΣΕΥΣ ΑΣ Σ İ ÇA Ǆ", "&NewLine;x&Tab;y &nbsp;z&ensp;", "&x26;", "&#x26;amp; &#x26;#38;", "&" * 50 + "amp;", "&ampersand&" + "x" * 80, "\U0001f600 &#x1f600; &#128512",
]


def fuzz(n):
    r = random.Random(3)
    pool = ["&", "#", ";", "x", "X", "amp", "lt", "gt;", "not", "in", "a", " ", "\t", "\n", "\f", "1", "38", "26", "9", "e", "acute", "\u00a0", "<", "&#", "&#x", "&amp;", "\x1f", "ΑΣ", "é", "Sub"]
    return ["".join(r.choice(pool) for _ in range(r.randint(1, 12))) for _ in range(n)]


def main():
    if pipeline_wan.is_ftfy_available():
        sys.exit("ftfy is installed")
    names = sorted(html.entities.html5.items())
    lines = [f"{name} {','.join(f'{ord(c):x}' for c in value)}\n" for name, value in names]
    (HERE.parents[1] / "src" / "text" / "html_entities.txt").write_text("".join(lines))
    texts = TEXTS + fuzz(400)
    rows = [[text, pipeline_wan.prompt_clean(text), text.lower().strip()] for text in texts]
    table = {"versions": {"diffusers": diffusers.__version__, "python": sys.version.split()[0]}, "wan": rows}
    (HERE / "clean.json").write_text(json.dumps(table, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
