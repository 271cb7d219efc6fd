#!/usr/bin/env python3
"""Makes the training data from the two packages that fetch.sh fetched.

    python data.py

Writes to $BUILD: all.npz (pictures for the VAE), items.json (what the diffusion models learn:
picture index, names, keywords), tokenizer/ (a CLIP byte-pair tokenizer trained on the names) and
data.png (all pictures, to look at).
"""

import argparse
import io
import json
import re
from collections import Counter

import numpy as np
from fontTools.ttLib import TTFont
from PIL import Image

from common import BUILD, CONTEXT, SIDE, grid
from vocabulary import ALIASES, DROPPED, NO_ARTICLE, PICKED, WHOLE_SUBGROUPS

N_MERGES = 1024
KEYWORD = re.compile(r"[a-z0-9 '\-]{3,20}")


class Font:
    """The bitmaps of Noto Color Emoji by code point."""

    def __init__(self, path):
        font = TTFont(path)
        self.glyph_names = font.getBestCmap()
        self.bitmaps = {}
        for strike in font["CBDT"].strikeData:
            for name, glyph in strike.items():
                self.bitmaps[name] = glyph.imageData

    def has(self, code_point):
        return self.glyph_names.get(code_point) in self.bitmaps

    def picture(self, code_point):
        """[SIDE, SIDE, 4] floats in 0..1, colours premultiplied by alpha before resizing."""
        png = self.bitmaps[self.glyph_names[code_point]]  # 136 x 128 pixels.
        glyph = Image.open(io.BytesIO(png)).convert("RGBA")
        square = Image.new("RGBA", (144, 144), (0, 0, 0, 0))
        square.paste(glyph, ((144 - glyph.width) // 2, (144 - glyph.height) // 2))
        rgba = np.asarray(square).astype(np.float32) / 255
        rgba[..., :3] *= rgba[..., 3:]
        channels = [
            np.asarray(Image.fromarray(rgba[..., c], mode="F").resize((SIDE, SIDE), Image.LANCZOS))
            for c in range(4)
        ]
        return np.clip(np.stack(channels, -1), 0, 1)


def choose(font, package):
    """(code points of all pictures, items to learn in the order of the Unicode table)."""
    table = json.loads((package / "en/data.json").read_text())
    meta = json.loads((package / "meta/groups.json").read_text())
    groups = {int(key): name for key, name in meta["groups"].items()}
    subgroups = {int(key): name for key, name in meta["subgroups"].items()}
    code_points, items = [], []
    for entry in table:
        sequence = [int(part, 16) for part in entry["hexcode"].split("-") if part != "FE0F"]
        if len(sequence) != 1 or not font.has(sequence[0]) or "group" not in entry:
            continue
        label = entry["label"]
        group, subgroup = groups[entry["group"]], subgroups[entry["subgroup"]]
        if group in ("component", "flags") and label not in PICKED:
            continue
        code_points.append(sequence[0])
        if (subgroup in WHOLE_SUBGROUPS and label not in DROPPED) or label in PICKED:
            items.append(
                dict(
                    cp=sequence[0],
                    label=label,
                    group=group,
                    sub=subgroup,
                    tags=entry.get("tags", []),
                    order=entry.get("order", 0),
                )
            )
    items.sort(key=lambda item: item["order"])
    for item in items:
        item["pic"] = code_points.index(item["cp"])
    return code_points, items


def add_names(items):
    """Fills in names, unique_tags (keywords of this item alone), tags and plural."""
    labels = {item["label"].lower() for item in items}
    aliases = {alias for names in ALIASES.values() for alias in names}
    no_article = {name.lower() for name in NO_ARTICLE}
    tag_counts = Counter(tag.lower() for item in items for tag in item["tags"])
    for item in items:
        label = item["label"].replace("’", "'").lower()
        tags = [tag.lower() for tag in item["tags"] if KEYWORD.fullmatch(tag.lower())]
        names = [label] + ALIASES.get(item["label"], [])
        words = set(re.findall(r"[a-z0-9]+", label))
        unique = [t for t in tags if tag_counts[t] == 1 and t not in labels and t not in aliases]
        item["names"] = names
        item["unique_tags"] = [tag for tag in unique if tag not in names][:4]
        item["tags"] = [tag for tag in tags if tag not in words][:6]
        item["plural"] = [name for name in names if name in no_article]


# ---- a CLIP byte-pair vocabulary, trained on the names -------------------------------------------

WORD = re.compile(r"'s|'t|'re|'ve|'m|'ll|'d|[^\W\d_]+|\d|[^\s\w]+|_+")
# Words of the captions' templates and of what people add to a name.
FREQUENT = """a an the of on emoji picture photo image icon drawing white background with and in
red green blue yellow orange purple pink brown black grey gray light dark small big cute simple two
three""".split()


def bytes_to_unicode():
    """GPT-2's table: every byte as a printable character. Returns it in CLIP's vocabulary order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {byte: chr(byte) for byte in printable}
    table.update({byte: chr(256 + n) for n, byte in enumerate(others)})
    return table


def word_counts(items, table):
    """How often each byte-level word counts in training."""
    counts = Counter()

    def add(text, weight):
        for word in WORD.findall(text.lower()):
            counts["".join(table[byte] for byte in word.encode())] += weight

    for item in items:
        for name in item["names"]:
            add(name, 20)
        for tag in item["unique_tags"]:
            add(tag, 6)
        for tag in item["tags"]:
            add(tag, 2)
    for word in FREQUENT:
        add(word, 200)
    return counts


def merged(parts, pair):
    """`parts` with every occurrence of the adjacent `pair` joined, left to right."""
    out, i = [], 0
    while i < len(parts):
        n = 2 if tuple(parts[i : i + 2]) == pair else 1
        out.append("".join(parts[i : i + n]))
        i += n
    return out


def train_merges(counts):
    """Byte-pair merges, most frequent pair first, ties in the order of the text."""
    words = {word: list(word[:-1]) + [word[-1] + "</w>"] for word in counts}
    merges = []
    while len(merges) < N_MERGES:
        pairs = Counter()
        for word, parts in words.items():
            for pair in zip(parts, parts[1:], strict=False):
                pairs[pair] += counts[word]
        if not pairs:
            break
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        words = {word: merged(parts, best) for word, parts in words.items()}
    return merges


def write_tokenizer(folder, items):
    """The classic four files of a CLIP tokenizer. Returns (vocabulary size, number of words)."""
    table = bytes_to_unicode()
    counts = word_counts(items, table)
    merges = train_merges(counts)
    base = list(table.values())
    vocab = base + [c + "</w>" for c in base] + ["".join(pair) for pair in merges]
    assert len(vocab) == len(set(vocab)), "a merge gives a token that another merge gave"
    vocab += ["<|startoftext|>", "<|endoftext|>"]
    special = dict(
        bos_token="<|startoftext|>",
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        unk_token="<|endoftext|>",
    )
    config = dict(
        add_prefix_space=False,
        **special,
        clean_up_tokenization_spaces=True,
        do_lower_case=True,
        errors="replace",
        model_max_length=CONTEXT,
        tokenizer_class="CLIPTokenizer",
    )
    folder.mkdir(exist_ok=True)
    ids = {token: i for i, token in enumerate(vocab)}
    (folder / "vocab.json").write_text(json.dumps(ids, ensure_ascii=False))
    lines = ["#version: 0.2"] + [" ".join(pair) for pair in merges]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n")
    (folder / "special_tokens_map.json").write_text(json.dumps(special, indent=2))
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
    return len(vocab), len(counts)


def main():
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    font = Font(BUILD / "dl/font/usr/share/fonts/truetype/noto/NotoColorEmoji.ttf")
    code_points, items = choose(font, BUILD / "dl/package")
    add_names(items)
    pictures = np.stack([font.picture(code_point) for code_point in code_points])
    np.savez(BUILD / "all.npz", rgba=(pictures * 255 + 0.5).astype(np.uint8))
    (BUILD / "items.json").write_text(json.dumps(items, indent=0, ensure_ascii=False))
    n_tokens, n_words = write_tokenizer(BUILD / "tokenizer", items)
    print(
        f"{len(code_points)} pictures for the VAE, {len(items)} for the diffusion models; "
        f"{n_tokens} tokens from {n_words} words"
    )
    chosen = pictures[[item["pic"] for item in items]]
    on_white = np.clip(chosen[..., :3] + 1 - chosen[..., 3:], 0, 1)
    sheet = grid(list((on_white * 255).astype(np.uint8)), 30)
    Image.fromarray(sheet).save(BUILD / "data.png")


if __name__ == "__main__":
    main()
