#!/usr/bin/env python3
"""Writes tokens.json: what transformers' CLIPTokenizer makes of awkward texts, for the tests of the tokenizer.

    pip install transformers
    python make_tokens.py
"""
import json
import random
import shutil
import tempfile
from pathlib import Path

import transformers
from transformers import CLIPTokenizer

HERE = Path(__file__).resolve().parent
DATA = HERE.parents[3] / "tests" / "data"

TEXTS = [
    "", " ", "\n\t ", "a photo of a cat", "A Photo OF a CAT!", "  leading and   inner\n\nspace\t ", "it's, don't, we're, I've, I'm, they'll, he'd",
    "IT'S DON'T WE'RE", "o'clock ''s '' 'x 're're", "7 o'clock, 1234 567,8.9", "½ ² Ⅷ ٣ 一二三", "café CAFÉ cafe\u0301 naïve", "ÅNGSTRÖM \u212b \u2126",
    "straße STRASSE İstanbul ΣΊΣΥΦΟΣ", "привет, мир", "日本語のテキスト", "한국어 \u1112\u1161\u11ab", "مرحبا بالعالم", "हिन्दी कि", "ไทย",
    "👍🏽 👩‍👩‍👧‍👦 🇩🇪 ❤️", "a👍b", "e\u0301\u0327", "zero\u200bwidth\u200djoiner\ufeff", "no\u00a0break\u2003em\u3000ideographic\u0085next", "line\u2028sep\u2029para",
    "tab\tvertical\vform\fcr\r\nnul\u0000bell\u0007", "hello!!! wow... (what?) [yes] {no} <tag> #hash @at $5 100% a&b a_b a-b a/b a\\b",
    "\"quoted\" 'single' “curly” ‘single’ — – …", "<|startoftext|>", "<|endoftext|>", "<|STARTOFTEXT|> and <|EndOfText|>", "a<|endoftext|>b <|endoftext|>", "!<|startoftext|>!",
    "<|startoftext", "<|endoftext|", "<|<|endoftext|>|>", "<|startofTEXT|><|endoftext|>", "!!", "cat!", "! cat !dog! 'll!", "a</w>b </w>", "Ġhello Ċ Â", "\u0142\u0130\u0149\ufb01\u1e9e",
    "the quick brown fox jumps over the lazy dog " * 12, "x" * 400, "the" * 90, "!" * 100, "1" * 100, "' " * 60, "é" * 120, "\U0001f600" * 40,
    # Characters younger than the tables of the tokenizers library: its letters are those of Unicode 16, its NFC is that of Unicode 9.
    *(f"x{c}-{c}y" for c in "\u089b\u1c89\u208f\u209e\ua7cb\ua7ce\U00010940\U00016ea0\U00018df2\U000323af\U000323b0\U0003d000"),
    "x\u1acb\u1ac4\u0316", "\u1ac3\u1ad0\u1abe\u1afb\u1add", "x\u0301\U00010efd", "x\u0300\u0897\u0323", "\U000105d2\u0307", "\U00011382\U000113c9",
    "A red fox, sitting on the green grass (photo, 4k) - it's 7 o'clock!", "#version: 0.2", "\u0300\u0301abc", "\u00aa\u00ba \u02b0 \u3007 \u24d0 \u2160",
]


def fuzz(n):
    r = random.Random(7)
    pool = list("abcdeThE'’!<|>0123 \t\n.,") + ["'s", "'LL", "<|endoftext|>", "<|ENDOFTEXT|>", "<|startoftext|>", "é", "e\u0301", "ß", "İ", "中", "ª", "²", "Ⅷ",
                                               "👍", "\u200d", "\u00a0", "\u0130", "\u0345", "ﬁ", "Å", "ก", "ा", "\u1e9e", "Σ", "ς", "the ", "fox"]
    return ["".join(r.choice(pool) for _ in range(r.randint(1, 14))) for _ in range(n)]


def added(content, normalized):
    return {"content": content, "lstrip": False, "normalized": normalized, "rstrip": False, "single_word": False, "special": True}


def variants():
    yield "sd35m/model/tokenizer", None
    yield "sd35m/model/tokenizer_2", None
    yield "emoji-dit/model/tokenizer", None
    roles = {"bos_token": "<|startoftext|>", "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>", "tokenizer_class": "CLIPTokenizer"}
    # As the published text encoders of Stable Diffusion 3 have it: begin and end are looked for in the normalized text.
    yield "sd35m/model/tokenizer_2", {**roles, "model_max_length": 12, "pad_token": "!", "added_tokens_decoder": {
        "0": added("!", False), "634": added("<|startoftext|>", True), "635": added("<|endoftext|>", True)}}
    yield "emoji-dit/model/tokenizer", {"model_max_length": 9, "tokenizer_class": "CLIPTokenizer", "pad_token": "<|endoftext|>",
                                        "bos_token": {"__type": "AddedToken", **added("<|startoftext|>", True)}, "extra_special_tokens": ["the"]}


def main():
    cases = []
    for source, config in variants():
        with tempfile.TemporaryDirectory() as folder:
            for name in ("vocab.json", "merges.txt", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
                if (DATA / source / name).exists() and not (config and name == "special_tokens_map.json"):
                    shutil.copy(DATA / source / name, folder)
            if config:
                (Path(folder) / "tokenizer_config.json").write_text(json.dumps(config))
            tokenizer = CLIPTokenizer.from_pretrained(folder)
            texts = TEXTS + fuzz(250)
            fitted = [t for t in texts if len(t) > 20]
            cases.append({"source": source, "config": config, "max_length": tokenizer.model_max_length,
                          "ids": [[t, tokenizer(t).input_ids] for t in texts],
                          "fitted": [[t, tokenizer(t, padding="max_length", max_length=tokenizer.model_max_length, truncation=True).input_ids]
                                     for t in fitted[:40] + ["", "a cat"]]})
    table = {"versions": {"transformers": transformers.__version__}, "cases": cases}
    (HERE / "tokens.json").write_text(json.dumps(table, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
