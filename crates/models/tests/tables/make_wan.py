#!/usr/bin/env python3
"""Writes wan.json: what diffusers' WanTransformer3DModel makes of a few latents, for several configurations.

    pip install torch diffusers
    python make_wan.py

Weights and inputs are not written: each is `torch.randn` with a generator of its own, whose seed is the place of its name in the list.
"""
import json
from pathlib import Path

import diffusers
import torch

HERE = Path(__file__).resolve().parent

BASE = {
    "patch_size": [1, 2, 2], "num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4, "text_dim": 6,
    "freq_dim": 8, "ffn_dim": 20, "num_layers": 2, "rope_max_seq_len": 16,
}
# Configuration; latents [batch, c, frames, h, w]; tokens that count and tokens in all; whether frames have timesteps of their own.
CASES = [
    ({}, [2, 4, 3, 4, 6], (5, 5), False),
    ({"num_attention_heads": 3, "attention_head_dim": 10, "patch_size": [1, 1, 1], "cross_attn_norm": False, "eps": 1e-3}, [1, 4, 1, 3, 2], (2, 9), False),
    ({"attention_head_dim": 4, "out_channels": 2, "num_layers": 1}, [2, 4, 3, 2, 4], (3, 3), True),
    ({"in_channels": 9, "image_dim": 5, "added_kv_proj_dim": 24}, [2, 9, 2, 4, 4], (7, 512), False),
]
N_IMAGE_TOKENS = 3


def drawn(seed, shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def main():
    cases = []
    for variant, dims, (n_tokens, n_padded), has_frame_timesteps in CASES:
        config = {**BASE, **variant}
        model = diffusers.WanTransformer3DModel(**config).eval()
        shapes = {name: list(parameter.shape) for name, parameter in sorted(model.named_parameters())}
        parameters = dict(model.named_parameters())
        with torch.no_grad():
            for seed, (name, shape) in enumerate(shapes.items()):
                around = 1.0 if "norm" in name and name.endswith("weight") else 0.0
                parameters[name].copy_(around + 0.3 * drawn(seed, shape))
        batch, _, n_frames, h, w = dims
        patch = config["patch_size"][1]
        latents = drawn(1000, dims)
        tokens = drawn(1001, [batch, n_tokens, config["text_dim"]])
        padded = torch.cat([tokens, tokens.new_zeros(batch, n_padded - n_tokens, config["text_dim"])], dim=1)
        timesteps = [[937.0, 41.5][: batch]]
        expanded = torch.tensor(timesteps[0])
        if has_frame_timesteps:
            timesteps = [[0.0, 937.0, 41.5][frame_idx:] + [3.0 + frame_idx] * frame_idx for frame_idx in range(batch)]
            expanded = torch.tensor(timesteps).repeat_interleave(h * w // patch**2, dim=1)
        image = drawn(1002, [batch, N_IMAGE_TOKENS, config["image_dim"]]).double() if "image_dim" in config else None
        with torch.no_grad():
            # In double precision as far as the model lets it be.
            out = model.double()(latents.double(), expanded, padded.double(), image, return_dict=False)[0]
        cases.append({
            "config": config, "weights": list(shapes.items()), "latents": dims, "n_tokens": n_tokens, "n_padded": n_padded,
            "timesteps": timesteps, "n_image_tokens": 0 if image is None else N_IMAGE_TOKENS,
            "output": [float(f"{x:.8g}") for x in out.flatten().tolist()],
        })
    table = {"versions": {"torch": torch.__version__, "diffusers": diffusers.__version__}, "cases": cases}
    (HERE / "wan.json").write_text(json.dumps(table, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
