#!/usr/bin/env python3
"""Writes blocks.json: what diffusers 0.42.1 on torch 2.15.0 computes in the blocks of U-Nets, in float64.

    python make_blocks.py

Weights and inputs are sines that the test computes too: see `wave`. Pictures are [batch, h, w, c] in the file.
"""

import json
import math
from pathlib import Path

import torch
from diffusers.models.downsampling import Downsample2D
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from diffusers.models.upsampling import Upsample2D


def wave(shape, phase, scale=1.0, shift=0.0):
    """Element i, in row-major order, is scale sin(0.37 i + 0.11 phase) + shift."""
    values = [scale * math.sin(0.37 * i + 0.11 * phase) + shift for i in range(math.prod(shape))]
    return torch.tensor(values, dtype=torch.float64).reshape(shape).float().double()


def set_weights(module):
    """Weights by name, so that none can be taken for another: the phase is the sum of its bytes."""
    module.double().eval()
    for name, parameter in module.named_parameters():
        shift = 1.0 if "norm" in name and name.endswith("weight") else 0.0
        parameter.data = wave(parameter.shape, sum(name.encode()), 0.3, shift)
    return {name: list(parameter.shape) for name, parameter in module.named_parameters()}


def picture(shape):
    """[batch, h, w, c] as torch wants it."""
    return wave(shape, 3).permute(0, 3, 1, 2)


def entry(weights, out):
    if out.ndim == 4:
        out = out.permute(0, 2, 3, 1)
    values = [float(f"{value:.9g}") for value in out.flatten().tolist()]
    return dict(weights=weights, shape=list(out.shape), out=values)


def main():
    torch.set_grad_enabled(False)
    blocks = {}
    for name, c_out, options in [
        ("resnet-shortcut", 12, dict(output_scale_factor=1.7, eps=1e-3)),
        ("resnet-plain", 8, dict(non_linearity="gelu", eps=1e-5)),
    ]:
        block = ResnetBlock2D(in_channels=8, out_channels=c_out, temb_channels=10, groups=2, **options)
        weights = set_weights(block)
        blocks[name] = entry(weights, block(picture([2, 4, 5, 8]), wave([2, 10], 5)))
    for name, heads, options in [
        ("transformer", 3, dict(num_layers=2)),
        ("transformer-linear-cross", 5, dict(use_linear_projection=True, only_cross_attention=True)),
    ]:
        block = Transformer2DModel(
            heads, 12 // heads, in_channels=12, norm_num_groups=3, cross_attention_dim=10, **options
        )
        weights = set_weights(block)
        out = block(picture([2, 4, 5, 12]), encoder_hidden_states=wave([2, 7, 10], 5)).sample
        blocks[name] = entry(weights, out)
    for padding in (0, 1):
        block = Downsample2D(8, use_conv=True, padding=padding, name="op")
        weights = set_weights(block)
        blocks[f"downsample-{padding}"] = entry(weights, block(picture([2, 5, 6, 8])))
    for h, w in [(6, 8), (5, 8), (5, 7), (7, 9), (7, 8), (5, 9)]:
        block = Upsample2D(8, use_conv=True)
        weights = set_weights(block)
        blocks[f"upsample-{h}x{w}"] = entry(weights, block(picture([2, 3, 4, 8]), (h, w)))
    path = Path(__file__).with_name("blocks.json")
    path.write_text(json.dumps(blocks, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
