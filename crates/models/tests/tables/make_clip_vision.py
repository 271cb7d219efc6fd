#!/usr/bin/env python3
"""Writes clip_vision.json: hidden states of transformers' CLIPVisionModel for a picture.

    pip install torch transformers
    python make_clip_vision.py
"""
import json
from pathlib import Path

import torch
import transformers

HERE = Path(__file__).resolve().parent
BASE = {"model_type": "clip_vision_model", "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 12, "patch_size": 4, "projection_dim": 5}
CASES = [(BASE, transformers.CLIPVisionModelWithProjection), ({**BASE, "hidden_act": "gelu", "num_hidden_layers": 3, "patch_size": 6, "layer_norm_eps": 0.01}, transformers.CLIPVisionModel)]


def main():
    cases = []
    for seed, (config, cls) in enumerate(CASES):
        model = cls(transformers.CLIPVisionConfig(**config))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_((torch.randn(parameter.shape, generator=generator) * 0.4).to(torch.bfloat16).float())
        weights = {name: {"shape": list(p.shape), "bf16": "".join(f"{b & 0xFFFF:04x}" for b in p.to(torch.bfloat16).view(torch.int16).flatten().tolist())} for name, p in model.state_dict().items()}
        side = config["image_size"]
        i = torch.arange(side * side * 3)
        pixels = (((37 * i + i * i // 11) % 101).float() / 50 - 1).reshape(1, side, side, 3).permute(0, 3, 1, 2)
        with torch.no_grad():
            states = model.double().eval()(pixels.double(), output_hidden_states=True).hidden_states
        cases.append({"config": config, "weights": weights, "states": [[float(f"{x:.9g}") for x in s.flatten().tolist()] for s in states]})
    table = {"versions": {"transformers": transformers.__version__}, "cases": cases}
    (HERE / "clip_vision.json").write_text(json.dumps(table, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
