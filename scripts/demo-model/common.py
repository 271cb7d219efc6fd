"""What every script shares: the folders, the sizes of the models, seeds and picture grids."""

import json
import os
import random
from pathlib import Path

import numpy as np
import torch

from vocabulary import CORE

BUILD = Path(os.environ.get("BUILD", "build"))  # Scratch: data, checkpoints of the training runs.
OUT = Path(os.environ.get("OUT", "out"))  # Where the finished folders go.
N_THREADS = int(os.environ.get("THREADS", "2"))

CONTEXT = 20  # Tokens that the tiny text encoders take, CLIP's 77.
SIDE = 64  # Side of a picture in pixels.
LATENT_SIDE = 16
PATCHES = (LATENT_SIDE // 2) ** 2  # Image tokens of the transformer, whose patches are 2 x 2.

# The VAE config's scaling_factor and shift_factor; latents.py makes them true.
SCALE, SHIFT = 1.5305, 0.0609


def setup(seed):
    """Threads and every random generator."""
    torch.set_num_threads(N_THREADS)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def load_items():
    """The emoji that the diffusion models learn, as data.py wrote them."""
    return json.loads((BUILD / "items.json").read_text())


def load_pictures():
    """All pictures as a uint8 tensor [N, SIDE, SIDE, 4], colours premultiplied by alpha."""
    return torch.from_numpy(np.load(BUILD / "all.npz")["rgba"])


def on_white(rgba):
    """uint8 pictures [N, H, W, 4] as floats [N, 3, H, W] in -1..1 on a white background."""
    x = rgba.float().permute(0, 3, 1, 2) / 255
    return ((x[:, :3] + 1 - x[:, 3:]) * 2 - 1).clamp(-1, 1)


def load_training_set(core):
    """(latents, items) of the emoji to learn: all, or the 100 of vocabulary.CORE."""
    latents = torch.load(BUILD / "latents.pt")["z"]
    items = load_items()
    if core:
        keep = [i for i, item in enumerate(items) if item["label"] in CORE]
        if len(keep) != len(CORE):
            missing = CORE - {items[i]["label"] for i in keep}
            raise SystemExit(f"not among the pictures: {', '.join(sorted(missing))}")
        latents, items = latents[keep], [items[i] for i in keep]
    print(len(items), "emoji", flush=True)
    return latents, items


def absent_components(name):
    """diffusers wants the empty T5 slot of an SD3 folder named as None."""
    return dict(text_encoder_3=None, tokenizer_3=None) if name == "emoji-dit" else {}


def grid(images, n_columns, pad=2):
    """uint8 pictures [H, W, 3] of one size, side by side on grey."""
    height, width, _ = images[0].shape
    n_rows = -(-len(images) // n_columns)
    shape = (n_rows * (height + pad) + pad, n_columns * (width + pad) + pad, 3)
    sheet = np.full(shape, 200, np.uint8)
    for i, image in enumerate(images):
        y = pad + (i // n_columns) * (height + pad)
        x = pad + (i % n_columns) * (width + pad)
        sheet[y : y + height, x : x + width] = image
    return sheet
