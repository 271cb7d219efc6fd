#!/usr/bin/env python3
"""Writes t5_tokens.json: what transformers' T5Tokenizer makes of awkward texts, for the tests of the tokenizer.

    pip install transformers sentencepiece protobuf
    python make_t5_tokens.py

A case names a folder of tests/data whose files it takes (`source`, without those in `without`), or has files of its own (`files`,
`spiece` in base64, trained here from the texts below), and the configuration. The charsmap of tests/data/sd3 is sentencepiece's
nmt_nfkc; those trained here have a few rules or none, so that the table stays small.
"""
import base64
import io
import json
import random
import shutil
import tempfile
from pathlib import Path

import sentencepiece
import transformers
from transformers import T5Tokenizer
from transformers.convert_slow_tokenizer import import_protobuf

HERE = Path(__file__).resolve().parent
DATA = HERE.parents[3] / "tests" / "data"

TEXTS = [
    "", " ", "\n\t ", "a photo of a cat", "A Photo OF a CAT!", "  leading and   inner\n\nspace\t ", "it's, don't, we're, I've, I'm, they'll, he'd",
    "o'clock ''s '' 'x", "7 o'clock, 1234 567,8.9", "½ ² Ⅷ ٣ 一二三 ① ㍿ ™ … ﷺ", "café CAFÉ cafe\u0301 naïve", "ÅNGSTRÖM \u212b \u2126",
    "straße STRASSE İstanbul ΣΊΣΥΦΟΣ", "привет, мир", "日本語のテキスト", "한국어 \u1112\u1161\u11ab", "مرحبا بالعالم", "हिन्दी कि", "ไทย",
    "👍🏽 👩‍👩‍👧‍👦 🇩🇪 ❤️ 🇩🇪🇫🇷🇯", "a👍b", "e\u0301\u0327", "zero\u200bwidth\u200djoiner\ufeff", "\ufeffbom", "\u200b", "\u00ad\u200e\u200f soft",
    "no\u00a0break\u2003em\u3000ideographic\u0085next", "line\u2028sep\u2029para", "tab\tvertical\vform\fcr\r\nnul\u0000bell\u0007", "\x01\x02a\x1f\x7fb\x80\x9f",
    "hello!!! wow... (what?) [yes] {no} <tag> #hash @at $5 100% a&b a_b a-b a/b a\\b", "\"quoted\" 'single' “curly” ‘single’ — – … 〜 ～ ﹏ ＿",
    "</s>", "<pad>", "<unk>", "a</s>b", "a </s> b", "<unk><unk>a<unk>", "<pad></s><unk>", "</S> <PAD>", "</s", "s>", "<<pad>>", "x<unk", "<extra_id_0>",
    "a <extra_id_3> b <extra_id_99>c<extra_id_100>", "  <extra_id_3>  ", "x  <extra_id_7>\n\ny", "<extra_id_1><extra_id_12>", "<extra_id_", "<sep>  the <Keep> <keep>ed",
    "\u2581", "\u2581\u2581a", "a\u2581b", "a\u2581 \u2581b\u2581", "\u2581a \u2581\u2581 \u2581</s>\u2581", "a" + "\u2581" * 9, "\u2581\u0301a",
    "ﬁ ﬂ ﬃ ﬁ\u0301 ﬁ\u0301\u0301 ª\u0301 ª\u0897 ª\u1acf ª\u1ae0 ª\u200d ¨\u0308 ﬁ\u0903", "e\u0301" * 40, "\u0301\u0301abc", "\u00aa\u00ba \u02b0 \u3007 \u24d0 \u2160",
    "\u1100\u1161\u11a8\u1100\u1161 ｶﾞ ｷﾞｬ ガ", "Ａ Ｂ１２３ ｆｕｌｌｗｉｄｔｈ", "\u0915\u094d\u0937 \u0cb0\u0ccd\u200d\u0c95 \u0d4e\u0d15 \u0600\u0661", "\r\n \n\r a\r\nb",
    "the quick brown fox jumps over the lazy dog " * 12, "x" * 400, "the" * 90, "!" * 100, "1" * 100, "' " * 60, "é" * 120, "\U0001f600" * 40, "日" * 300,
    "\U000e0001\U000e007f tag \ufe0f \ufffd \uffff \U0010ffff", "a\u0300\u0301\u0302\u0303\u0304\u0305", "Dž ĳ ŉ ſ ẛ ϒ ℃ ℉ Å",
    "A red fox, sitting on the green grass (photo, 4k) - it's 7 o'clock!", "0x41 <0x41> <0xE6><0x97><0xA5>", "tokenizer unigram ununun gramgram", "and the the the and",
]

CORPUS = [
    "a photo of a cat and a dog", "an oil painting of the sea at night", "the quick brown fox jumps over the lazy dog", "portrait of an old man, 85mm, f/1.8",
    "A red fox, sitting on the green grass (photo, 4k) - it's 7 o'clock!", "a city street in the rain, neon lights", "two apples on a table", "1234567890",
    "the unigram tokenizer of the anthem", "другой привет, мир", "日本語のテキスト 日本", "café naïve straße", "hello, hello! what? yes; no: 100%",
] * 6


def fuzz(n, seed):
    r = random.Random(seed)
    pool = list("abcdeThE'’!<|>0123 \t\n.,/s_-") + ["the ", "fox", "</s>", "<unk>", "<pad>", "<extra_id_3>", "<extra_id_", "é", "e\u0301", "ß", "İ", "中", "日本", "ª", "²",
                                                  "Ⅷ", "👍", "\u200d", "\u00a0", "\u0345", "ﬁ", "\u0301", "ก", "ा", "Σ", "\u2581", "  ", "мир", "①", "\u3000", "\u200b", "\x07", "🇩🇪",
                                                  "<sep>", "<keep>", "<Keep>", "\u0897", "ｶﾞ", "…"]
    return ["".join(r.choice(pool) for _ in range(r.randint(1, 14))) for _ in range(n)]


def train(**options):
    model = io.BytesIO()
    options = {"model_type": "unigram", "pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1, "hard_vocab_limit": False, "minloglevel": 2,
               "vocab_size": 420, "num_threads": 1, "character_coverage": 1.0, **options}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(CORPUS), model_writer=model, **options)
    proto = import_protobuf().ModelProto()
    proto.ParseFromString(model.getvalue())
    # The texts it was trained with would be most of the file.
    proto.ClearField("trainer_spec")
    proto.trainer_spec.model_type = 1
    proto.trainer_spec.unk_id = 2
    return proto


def added(content, **flags):
    return {"content": content, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True, **flags}


def joint(proto, normalizer, tokens):
    """A tokenizer.json with the sections that matter; its pre-tokenizer is not T5's, which transformers passes over."""
    vocab = [[piece.piece, piece.score] for piece in proto.pieces]
    vocab += [[f"<extra_id_{i}>", 0.0] for i in range(9, -1, -1)]
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [{"id": i, **token} for i, token in tokens],
        "normalizer": normalizer, "pre_tokenizer": {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": False},
        "post_processor": None, "decoder": None, "model": {"type": "Unigram", "unk_id": 2, "vocab": vocab, "byte_fallback": False},
    }


def variants():
    base = {"tokenizer_class": "T5Tokenizer", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>", "model_max_length": 512}
    source = "sd3/model/tokenizer_3"
    # As the reference cases are: tokenizer.json without rules.
    yield {"source": source}
    # Only spiece.model: nmt_nfkc, a hundred extra tokens behind the vocabulary.
    yield {"source": source, "without": ["tokenizer.json"], "config": base}
    # As published: the tokens are listed in the configuration; white space around extra tokens goes with them.
    listed = {"0": added("<pad>"), "1": added("</s>"), "2": added("<unk>")}
    listed |= {str(177 - i): added(f"<extra_id_{i}>", lstrip=True, rstrip=True) for i in range(100)}
    extra = [f"<extra_id_{i}>" for i in range(100)]
    yield {"source": source, "without": ["tokenizer.json"], "config": {
        **base, "extra_ids": 100, "legacy": True, "sp_model_kwargs": {}, "added_tokens_decoder": listed, "additional_special_tokens": extra}}
    # Tokens of users and control tokens, byte pieces, no rules; roles in special_tokens_map.json.
    proto = train(normalization_rule_name="identity", user_defined_symbols=["<keep>", "and the"], control_symbols=["<sep>"], byte_fallback=True)
    spiece = base64.b64encode(proto.SerializeToString()).decode()
    roles = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": {"content": "<pad>", "lstrip": False, "normalized": False, "rstrip": True, "single_word": False}}
    yield {"spiece": spiece, "files": {"special_tokens_map.json": roles}, "config": {"tokenizer_class": "T5Tokenizer", "extra_ids": 10}}
    # Rules of its own behind another normalizer, which transformers passes over; a token that is looked for in the normalized text.
    with tempfile.NamedTemporaryFile("w", suffix=".tsv") as rules:
        for before, after in [("A", "a"), ("ﬁ", "fi"), ("K", "k"), ("\u200b", ""), ("日本", "ni hon"), ("é", "e"), ("e\u0301", "e"), ("\x07", " "), ("ß", "ss")]:
            rules.write(" ".join(f"{ord(c):X}" for c in before) + "\t" + " ".join(f"{ord(c):X}" for c in after) + "\n")
        rules.flush()
        proto = train(normalization_rule_tsv=rules.name, vocab_size=300)
    charsmap = base64.b64encode(proto.normalizer_spec.precompiled_charsmap).decode()
    normalizer = {"type": "Sequence", "normalizers": [{"type": "Replace", "pattern": {"String": "x"}, "content": "y"},
                                                       {"type": "Precompiled", "precompiled_charsmap": charsmap}]}
    tokens = [(0, added("<pad>")), (1, added("</s>")), (2, added("<unk>")), (400, added("<Keep>", normalized=True, special=False)), (401, added("<sep>", rstrip=True))]
    yield {"files": {"tokenizer.json": joint(proto, normalizer, tokens)}, "config": {**base, "tokenizer_class": "T5TokenizerFast", "extra_ids": 10}}


def main():
    cases = []
    for seed, case in enumerate(variants()):
        with tempfile.TemporaryDirectory() as folder:
            folder = Path(folder)
            if "source" in case:
                for file in (DATA / case["source"]).iterdir():
                    if file.name not in case.get("without", []):
                        shutil.copy(file, folder)
            for name, content in case.get("files", {}).items():
                (folder / name).write_text(json.dumps(content))
            if "spiece" in case:
                (folder / "spiece.model").write_bytes(base64.b64decode(case["spiece"]))
            if "config" in case:
                (folder / "tokenizer_config.json").write_text(json.dumps(case["config"]))
            tokenizer = T5Tokenizer.from_pretrained(folder)
            texts = TEXTS + fuzz(200, seed)
            fits = [(t, n) for n in (1, 2, 7, 77) for t in texts[:30] + ["", "a cat", "the" * 90]]
            cases.append({**case, "max_id": max(tokenizer.get_vocab().values()), "ids": [[t, tokenizer(t).input_ids] for t in texts],
                          "fitted": [[t, tokenizer(t, padding="max_length", max_length=n, truncation=True).input_ids] for t, n in fits]})
    table = {"versions": {"transformers": transformers.__version__}, "cases": cases}
    (HERE / "t5_tokens.json").write_text(json.dumps(table, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
