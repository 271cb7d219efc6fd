#!/usr/bin/env python3
"""Writes qwen_image.json: what diffusers' QwenImageTransformer2DModel predicts, with and without pictures to edit.

    pip install torch diffusers
    python make_qwen_image.py

Weights and inputs are torch's normal numbers from seeds, which the test draws too: see `draw` and `set_weights` of make_vaes.py.
Latents are [batch, h, w, c]. Of the prediction every STRIDE-th number is kept. Computed in float64.
"""
import json
from pathlib import Path

import diffusers
import torch

from make_vaes import draw, set_weights

HERE = Path(__file__).resolve().parent
STRIDE = 3
BASE = {"in_channels": 16, "out_channels": 4, "num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 3,
        "joint_attention_dim": 10, "axes_dims_rope": [4, 6, 6]}
# Configuration, latents [batch, h, w], pictures to edit [h, w], tokens of the text, timesteps.
CASES = [
    ({}, [2, 6, 10], [], 5, [999.0, 3.25]),
    ({}, [1, 4, 2], [[6, 8], [2, 2]], 1, [500.5]),
    ({"zero_cond_t": True}, [2, 4, 6], [[4, 10]], 7, [250.0, 20.0]),
    ({"zero_cond_t": True, "num_layers": 1, "axes_dims_rope": [8, 4, 4]}, [1, 2, 14], [], 3, [700.0]),
]


def packed(x):
    """[b, h, w, c] as patches of 2x2, features (c, dy, dx)."""
    b, h, w, c = x.shape
    return x.reshape(b, h // 2, 2, w // 2, 2, c).permute(0, 1, 3, 5, 2, 4).reshape(b, h * w // 4, 4 * c)


def main():
    torch.set_grad_enabled(False)
    cases = []
    for variant, (batch, h, w), references, n_text, timesteps in CASES:
        config = {**BASE, **variant}
        model = diffusers.QwenImageTransformer2DModel(**config).double().eval()
        weights = set_weights(model)
        sides = [[h, w], *references]
        pictures = [draw([batch, *side, 4], 1 + idx) for idx, side in enumerate(sides)]
        text = draw([batch, n_text, config["joint_attention_dim"]], 100)
        out = model(
            hidden_states=torch.cat([packed(x) for x in pictures], dim=1),
            encoder_hidden_states=text,
            timestep=torch.tensor(timesteps, dtype=torch.float64) / 1000,
            img_shapes=[[(1, h // 2, w // 2) for h, w in sides]] * batch,
            return_dict=False,
        )[0][:, : h * w // 4]
        out = out.reshape(batch, h // 2, w // 2, 4, 2, 2).permute(0, 1, 4, 2, 5, 3).reshape(batch, h, w, 4)
        values = [float(f"{value:.8g}") for value in out.flatten()[::STRIDE].tolist()]
        config = {key: value for key, value in model.config.items() if not key.startswith("_")}
        cases.append({"config": config, "weights": weights, "batch": batch, "sides": sides, "n_text": n_text,
                      "timesteps": timesteps, "values": values})
    table = {"versions": {"torch": torch.__version__, "diffusers": diffusers.__version__}, "stride": STRIDE, "cases": cases}
    (HERE / "qwen_image.json").write_text(json.dumps(table, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
