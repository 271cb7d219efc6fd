#!/usr/bin/env python3
"""Says how often the training picture nearest to an output is the one that the prompt named.

    python nearest.py --list > prompts.txt && mkdir pictures
    denoised generate --prompts prompts.txt --model DIR --seed 0 --n 1 -o 'pictures/{index}.png'
    python nearest.py --pictures pictures [--sheet grid.png]
    python nearest.py --draw emoji-unet [--steps 20] [--guidance 4.0] [--sheet grid.png]

The prompts are captions as training draws them, one for each of 50 emoji of vocabulary.CORE; emoji
and captions come from a fixed seed. --pictures takes any program's PNG files of them, named by
their index from 0, with --n pictures of every prompt in a row; --draw makes them with diffusers
from a folder in $OUT. The distance is the Euclidean one between RGB pixels on white. The first
figure compares with the pictures that the denoiser learned, a second with all that data.py chose,
which include many lookalikes that it never saw. A third says what a perfect denoiser would reach:
it takes the autoencoder's reconstructions of the learned pictures for outputs.

Where a prompt uses a name that several emoji have ("a tree"), each of them counts as named.
"""

import argparse
import random
import re
import textwrap
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL
from PIL import Image, ImageDraw

from captions import caption, plain
from common import BUILD, SIDE, grid, load_items, load_pictures, on_white, setup
from vocabulary import CORE

SEED = 1
LINE_HEIGHT, N_LINES, N_COLUMNS = 11, 3, 6


def prompts_of(items, n_prompts, names_only):
    """(prompt, item) for `n_prompts` learned emoji, in the order of the Unicode table."""
    rng = random.Random(SEED)
    learned = [item for item in items if item["label"] in CORE]
    chosen = sorted(rng.sample(range(len(learned)), n_prompts))
    drawn = [(caption(learned[i], rng), learned[i]) for i in chosen]
    return [(plain(item), item) for _, item in drawn] if names_only else drawn


def says(prompt, name):
    return re.search(rf"(?<![a-z]){re.escape(name)}(?![a-z])", prompt) is not None


def is_named(prompt, item, other):
    """Whether `prompt`, a caption of `item`, names `other` just as well."""
    if other["label"] == item["label"]:
        return True
    said = [name for name in item["names"] + item["unique_tags"] if says(prompt, name)]
    # "a red apple" says "apple" too; the longest name is the one that was meant.
    return bool(said) and max(said, key=len) in other["names"]


def pixels(items):
    """uint8 [N, SIDE, SIDE, 3]: the items' pictures on white."""
    x = on_white(load_pictures()[[item["pic"] for item in items]])
    return ((x + 1) * 127.5).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()


def distances(outputs, references):
    """[outputs, references]: root mean square differences of pixels, in 0..255."""
    a = torch.from_numpy(np.stack(outputs)).double().flatten(1)
    b = torch.from_numpy(references).double().flatten(1)
    return (torch.cdist(a, b) / a.shape[1] ** 0.5).numpy()


@torch.no_grad()
def reconstructions(pictures):
    """The pictures after the autoencoder of $BUILD/vae, as uint8 [N, SIDE, SIDE, 3]."""
    vae = AutoencoderKL.from_pretrained(BUILD / "vae", dtype=torch.float32)
    x = torch.from_numpy(pictures).permute(0, 3, 1, 2).float() / 127.5 - 1
    y = [vae.decode(vae.encode(part).latent_dist.mode()).sample for part in x.split(32)]
    y = (torch.cat(y).clamp(-1, 1) + 1) * 127.5
    return y.round().to(torch.uint8).permute(0, 2, 3, 1).numpy()


def score(title, jobs, outputs, items, references):
    """Prints the share of outputs nearest to a named picture. Returns each one's nearest item."""
    table = distances(outputs, references)
    order = table.argsort(1)
    named = [[is_named(prompt, item, other) for other in items] for prompt, item in jobs]
    ranks = [next(k for k, j in enumerate(o) if named[i][j]) for i, o in enumerate(order)]
    n_first, n_five = sum(r == 0 for r in ranks), sum(r < 5 for r in ranks)
    n = len(jobs)
    print(
        f"{title}: nearest is the named one for {n_first} of {n} ({100 * n_first / n:.1f} %), "
        f"among the nearest five for {n_five} ({100 * n_five / n:.1f} %)"
    )
    return [(items[o[0]], table[i, o[0]], ranks[i]) for i, o in enumerate(order)]


def sheet(jobs, outputs, nearest, pictures):
    """A cell per output: itself, the nearest learned picture and the prompt, in red where the
    nearest is not the named one."""
    width, height = 2 * SIDE + 2, SIDE + LINE_HEIGHT * N_LINES + 2
    cells = []
    for (prompt, _), output, (item, _, rank) in zip(jobs, outputs, nearest, strict=True):
        cell = np.full((height, width, 3), 255, np.uint8)
        cell[:SIDE, :SIDE], cell[:SIDE, SIDE + 2 :] = output, pictures[item["label"]]
        labelled = Image.fromarray(cell)
        lines = textwrap.wrap(prompt, width // 6)[:N_LINES]
        colour = (200, 0, 0) if rank else (0, 0, 0)
        for i, line in enumerate(lines):
            ImageDraw.Draw(labelled).text((1, SIDE + i * LINE_HEIGHT), line, fill=colour)
        cells.append(np.asarray(labelled))
    whole = Image.fromarray(grid(cells, N_COLUMNS))
    return whole.quantize(256, dither=Image.Dither.NONE)  # Small enough to keep in a repository.


def read_pictures(folder, n):
    """`folder`/0.png to `folder`/<n - 1>.png."""
    pictures = []
    for i in range(n):
        picture = np.asarray(Image.open(folder / f"{i}.png").convert("RGB"))
        if picture.shape != (SIDE, SIDE, 3):
            raise SystemExit(f"{folder / f'{i}.png'} has the shape {picture.shape}")
        pictures.append(picture)
    return pictures


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--list", action="store_true", help="print the prompts and do nothing else")
    source.add_argument("--pictures", type=Path, help="folder of finished pictures")
    source.add_argument("--draw", help="draw with this folder in $OUT, through diffusers")
    parser.add_argument("--prompts", type=int, default=50, help="how many (default: %(default)s)")
    parser.add_argument("--names", action="store_true", help="plain names in place of captions")
    parser.add_argument("--n", type=int, default=1, help="pictures of each (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="of --draw (default: %(default)s)")
    parser.add_argument(
        "--guidance", type=float, default=4.0, help="of --draw (default: %(default)s)"
    )
    parser.add_argument("--sheet", type=Path, help="PNG file for outputs beside their nearest")
    return parser.parse_args()


def main():
    args = parse_args()
    setup(0)
    items = load_items()
    chosen = prompts_of(items, args.prompts, args.names)
    if args.list:
        print("\n".join(prompt for prompt, _ in chosen))
        return
    jobs = [job for job in chosen for _ in range(args.n)]
    if args.pictures:
        outputs = read_pictures(args.pictures, len(jobs))
    else:
        from samples import Artist

        artist = Artist(args.draw, args.steps, args.guidance)
        outputs = artist.draw([prompt for prompt, _ in chosen], range(args.n))
    references = pixels(items)
    is_learned = np.array([item["label"] in CORE for item in items])
    learned = [item for item in items if item["label"] in CORE]
    nearest = score("learned", jobs, outputs, learned, references[is_learned])
    score("chosen by data.py", jobs, outputs, items, references)
    references = references[is_learned]
    perfect = [(plain(item), item) for item in learned]
    score("autoencoder alone", perfect, reconstructions(references), learned, references)
    for (prompt, item), (other, distance, rank) in zip(jobs, nearest, strict=True):
        if rank:
            print(
                f"  {prompt!r} means {item['label']!r}, nearest is {other['label']!r} "
                f"(distance {distance:.1f}), the named one comes as number {rank + 1}"
            )
    if args.sheet:
        pictures = {item["label"]: p for item, p in zip(learned, references, strict=True)}
        sheet(jobs, outputs, nearest, pictures).save(args.sheet, optimize=True)
        print(args.sheet)


if __name__ == "__main__":
    main()
