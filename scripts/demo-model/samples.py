#!/usr/bin/env python3
"""Draws sheets of sample pictures with an exported folder in $OUT into $OUT/samples.

    python samples.py emoji-dit [--steps 20] [--guidance 4.0] [--only common]

common: prompts that people would try first; unseen: words and combinations outside the training
set; vocabulary: the name of every learned emoji.
"""

import argparse

import numpy as np
import torch
from diffusers import DiffusionPipeline
from PIL import Image, ImageDraw

from captions import plain
from common import LATENT_SIDE, OUT, SIDE, absent_components, grid, load_items, setup
from joint import T5_TOKENS, FoldedZeros
from vocabulary import CORE

COMMON = """a red apple|a green apple|a banana|a slice of pizza|a hamburger|a cup of coffee|
a birthday cake|a strawberry|a dog|a cat|a penguin|an elephant|a butterfly|a fish|a frog|a panda|
a red car|a rocket|an airplane|a bicycle|a house|a sailboat|a guitar|a soccer ball|
a smiling face with sunglasses|a crying face|a red heart|a blue heart|a robot|a sunflower|a tree|
a star""".replace("\n", "")
UNSEEN = """a blue apple|a purple banana|a green dog|a red star|a yellow car|a blue house|
a pink cat|a green rocket|an orange bird|a purple strawberry|a black rose|a cat with sunglasses|
a dog in a hat|a red ball|an apple and a banana|sdkfjh qwe""".replace("\n", "")
BATCH = 16
LABEL_HEIGHT = 12


class Artist:
    """The pipeline with its settings."""

    def __init__(self, name, n_steps, guidance):
        self.pipe = DiffusionPipeline.from_pretrained(
            OUT / name, dtype=torch.float32, **absent_components(name)
        )
        self.pipe.set_progress_bar_config(disable=True)
        self.call = dict(num_inference_steps=n_steps, guidance_scale=guidance, output_type="np")
        if name == "emoji-dit":  # One zero token for all: the same pictures, faster.
            attention = FoldedZeros()
            attention.stand_for(T5_TOKENS)
            self.pipe.transformer.set_attn_processor(attention)
            self.call["max_sequence_length"] = 1

    def draw(self, prompts, seeds):
        """uint8 pictures of every prompt with every seed."""
        jobs = [(prompt, seed) for prompt in prompts for seed in seeds]
        shape = (1, 4, LATENT_SIDE, LATENT_SIDE)
        pictures = []
        for start in range(0, len(jobs), BATCH):
            part = jobs[start : start + BATCH]
            generators = [torch.Generator().manual_seed(seed) for _, seed in part]
            latents = torch.cat([torch.randn(shape, generator=g) for g in generators])
            images = self.pipe([prompt for prompt, _ in part], latents=latents, **self.call).images
            pictures += list((images * 255).round().astype(np.uint8))
        return pictures

    def sheet(self, prompts, seeds, n_columns):
        """One cell per prompt: its pictures side by side over the prompt's text."""
        pictures, cells = self.draw(prompts, seeds), []
        width = (SIDE + 2) * len(seeds) - 2
        for i, prompt in enumerate(prompts):
            cell = np.full((SIDE + LABEL_HEIGHT, width, 3), 255, np.uint8)
            for j, picture in enumerate(pictures[i * len(seeds) : (i + 1) * len(seeds)]):
                x = j * (SIDE + 2)
                cell[:SIDE, x : x + SIDE] = picture
            labelled = Image.fromarray(cell)
            text = prompt.removeprefix("a ").removeprefix("an ")[: width // 6]
            ImageDraw.Draw(labelled).text((1, SIDE), text, fill=(0, 0, 0))
            cells.append(np.asarray(labelled))
        return Image.fromarray(grid(cells, n_columns))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=["emoji-dit", "emoji-unet"], help="folder in $OUT")
    parser.add_argument("--steps", type=int, default=20, help="default: %(default)s")
    parser.add_argument("--guidance", type=float, default=4.0, help="default: %(default)s")
    parser.add_argument(
        "--only", choices=["common", "unseen", "vocabulary"], help="one sheet (default: all)"
    )
    args = parser.parse_args()
    setup(0)
    learned = [plain(item) for item in load_items() if item["label"] in CORE]
    sheets = {
        "common": (COMMON.split("|"), [0, 1], 8),
        "unseen": (UNSEEN.split("|"), [0, 1], 8),
        "vocabulary": (learned, [0], 20),
    }
    artist = Artist(args.name, args.steps, args.guidance)
    (OUT / "samples").mkdir(parents=True, exist_ok=True)
    for title in [args.only] if args.only else sheets:
        path = OUT / "samples" / f"{args.name}-{title}.png"
        artist.sheet(*sheets[title]).save(path)
        print(path)


if __name__ == "__main__":
    main()
