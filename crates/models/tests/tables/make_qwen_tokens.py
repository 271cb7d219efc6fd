#!/usr/bin/env python3
"""Writes qwen_tokens.json: what transformers' Qwen2Tokenizer makes of awkward texts, for several ways of storing a tokenizer.

    pip install transformers tokenizers
    python make_qwen_tokens.py
"""
import json
import random
import tempfile
from pathlib import Path

import tokenizers
import transformers

HERE = Path(__file__).resolve().parent

CORPUS = [
    "a photo of a cat sitting on the green grass, the quick brown fox jumps over the lazy dog", "it's don't we're I've they'll he'd I'm",
    "user\nassistant\nsystem\n<think>\n\n</think>\n\n", "Describe the image by detailing the color, shape, size, texture, quantity", "café naïve straße привет мир 日本語",
    "  indented\n\n\n  lines\t\ttabs", "hello!!! (what?) [yes] 1234 + 56.78 = x",
]
TEXTS = [
    "", " ", "\n", "\n\t ", "  ", "   a", "a   ", "a \n b", "a\n\n\nb", "a \n \n  b", "a\r\nb\r\n", "\r", " \r\n x", "a  b   c    d", "\t\tx", "x\t\t", " \t \n\t y", "a photo of a cat", "A Photo OF a CAT!",
    "it's, don't, we're, I've, I'm, they'll, he'd", "IT'S DON'T WE'RE I'VE I'M THEY'LL HE'D", "'s 'S 'ſ 're 'rE 'x '' 'tis ''s", "it\u2019s", "7 o'clock, 1234 567,8.9", "½ ² Ⅷ ٣ 一二三", "a1b22c", "1a 2b",
    "café CAFÉ cafe\u0301 naïve", "ÅNGSTRÖM \u212b \u2126 \ufb01", "straße STRASSE İstanbul ΣΊΣΥΦΟΣ", "привет, мир", "日本語のテキスト", "한국어 \u1112\u1161\u11ab", "مرحبا بالعالم", "हिन्दी कि", "ไทย",
    "👍🏽 👩‍👩‍👧‍👦 🇩🇪 ❤️", "a👍b", "e\u0301\u0327", "\u0301abc x\u0301", "zero\u200bwidth\u200djoiner\ufeff", "no\u00a0break\u2003em\u3000ideographic\u0085next", "line\u2028sep\u2029para", "\u00a0\u00a0x \u3000 y\u3000", "a\x1c\x1db \x1e\x1f c",
    "tab\tvertical\vform\fcr\r\nnul\u0000bell\u0007", "hello!!! wow... (what?) [yes] {no} <tag> #hash @at $5 100% a&b a_b a-b a/b a\\b", "!!!\n\n x", " !!\r\n\r\n  y", "a.\n", ". \n", "-\n-\n\n", "\"quoted\" 'single' “curly” ‘single’ — – …",
    "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n", "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n", "<|endoftext|>", "a <|endoftext|> b", "a  <|im_end|>  b", " <think> x </think>\n", "<think", "<|im_start|", "<|<|im_start|>|>",
    "<|IM_START|>", "<|image_pad|><|image_pad|>", "the<tool>the <tool> the", "x <a\u030a> <\u00e5> \u212b", "the quick brown fox " * 12, "x" * 300, "the" * 60, "!" * 50, " " * 40, "\n" * 20, "1" * 40, "é" * 60,
    *(f"x{c}-{c}y" for c in "\u089b\u1c89\u208f\u209e\ua7cb\ua7ce\U00010940\U00016ea0\U00018df2\U000323af\U000323b0\U0003d000"), "x\u1acb\u1ac4\u0316", "\u1ac3\u1ad0\u1abe\u1afb\u1add", "x\u0301\U00010efd", "\U000105d2\u0307", "\U00011382\U000113c9",
    "A red fox, sitting on the green grass (photo, 4k) - it's 7 o'clock!", "\u00aa\u00ba \u02b0 \u3007 \u24d0 \u2160", "Ġhello Ċ Â",
]


def fuzz(n):
    r = random.Random(11)
    pool = list("abctheTS'’!<|>012 \t\n\r.,-") + ["'s", "'LL", "'ſ", "<|im_end|>", "<think>", "<tool>", "é", "e\u0301", "ß", "中", "ª", "²", "Ⅷ", "👍", "\u200d", "\u00a0", "\u3000", "\u0345", "ﬁ", "\u212b", "  ", "\n\n", "\r\n", " the", "fox", "\u0085"]
    return ["".join(r.choice(pool) for _ in range(r.randint(1, 16))) for _ in range(n)]


def token(content, **flags):
    return {"content": content, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True, **flags}


def variants(joint):
    """Files of each variant beside tokenizer_config.json, the vocabulary's by name only, and that configuration."""
    config = {"tokenizer_class": "Qwen2Tokenizer", "model_max_length": 512, "pad_token": "<|endoftext|>"}
    special = ["<|im_start|>", "<|im_end|>", "<|image_pad|>"]
    n = len(joint["model"]["vocab"])
    yield {"tokenizer.json": joint}, {**config, "extra_special_tokens": special}
    # As published checkpoints have it: all added tokens in the configuration.
    decoder = [token("<|endoftext|>"), *map(token, special), token("<think>", special=False), token("</think>", special=False, normalized=True), token("<tool>", special=False, lstrip=True, rstrip=True), token("<a\u030a>", special=False, normalized=True)]
    yield {"vocab.json": None, "merges.txt": None}, {**config, "additional_special_tokens": special, "add_prefix_space": False, "add_bos_token": False, "bos_token": None, "eos_token": "<|im_end|>", "errors": "replace", "split_special_tokens": False,
                                                     "unk_token": None, "added_tokens_decoder": {str(n + i): t for i, t in enumerate(decoder)}}
    merges = [" ".join(pair) for pair in joint["model"]["merges"]]
    old = {**joint, "model": {**joint["model"], "merges": merges}, "post_processor": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
           "added_tokens": [{"id": n + i, **t} for i, t in enumerate(decoder)]}
    yield {"tokenizer.json": old, "special_tokens_map.json": {"additional_special_tokens": special[:2], "eos_token": token("<|im_end|>", lstrip=True), "pad_token": token("<|endoftext|>")}}, {**config, "tokenizer_class": "Qwen2TokenizerFast"}
    yield {"vocab.json": None, "merges.txt": None, "added_tokens.json": {"<think>": n + 1, "<|endoftext|>": n, "<|im_end|>": n + 2}}, {**config, "eos_token": token("<|im_end|>", rstrip=True, __type="AddedToken"), "extra_special_tokens": ["<tool>"]}


def main():
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=420, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    trained.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.train_from_iterator(CORPUS * 3, trainer)
    model = json.loads(trained.to_str())["model"]
    base = transformers.Qwen2Tokenizer(vocab=model["vocab"], merges=[tuple(pair) for pair in model["merges"]])
    base.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    base.add_tokens(["<think>", "</think>"])
    with tempfile.TemporaryDirectory() as folder:
        base.save_pretrained(folder)
        joint = json.loads((Path(folder) / "tokenizer.json").read_text())
    vocabulary = {"vocab.json": joint["model"]["vocab"], "merges.txt": "#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in joint["model"]["merges"])}
    cases = []
    for files, config in variants(joint):
        with tempfile.TemporaryDirectory() as folder:
            for name, content in {**files, "tokenizer_config.json": config}.items():
                content = vocabulary[name] if content is None else content
                (Path(folder) / name).write_text(content if isinstance(content, str) else json.dumps(content))
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
            assert type(tokenizer).__name__ == "Qwen2Tokenizer"
            texts = TEXTS + fuzz(200)
            fitted = [t for t in texts if len(t) > 20][:40] + ["", "a cat"]
            cases.append({"files": files, "config": config, "max_id": max(tokenizer.get_vocab().values()), "ids": [[t, tokenizer(t).input_ids] for t in texts],
                          "fitted": [[t, tokenizer(t, padding="max_length", max_length=24, truncation=True).input_ids] for t in fitted]})
    table = {"versions": {"transformers": transformers.__version__, "tokenizers": tokenizers.__version__}, "vocabulary": vocabulary, "cases": cases}
    (HERE / "qwen_tokens.json").write_text(json.dumps(table, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
