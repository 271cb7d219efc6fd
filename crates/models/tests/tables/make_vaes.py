#!/usr/bin/env python3
"""Writes vaes.json: what diffusers' autoencoders of Stable Diffusion, FLUX, Qwen-Image and Wan make of latents and pixels, for several configurations.

    pip install torch diffusers
    python make_vaes.py

Weights and inputs are torch's normal numbers from seeds, which the test draws too: see `draw` and `set_weights`. Latents and pixels are
laid out as the program holds them: [batch, n_frames h, w, c], scaled as a denoiser sees them. Of each result every STRIDE-th number is
kept. Computed in float64, so that the numbers are the same on every processor.
"""
import json
import math
from pathlib import Path

import diffusers
import torch

HERE = Path(__file__).resolve().parent
STRIDE = 7

FLUX2 = {"block_out_channels": [8, 16, 16, 24], "latent_channels": 4, "layers_per_block": 1, "norm_num_groups": 4}
STILL = {"base_dim": 6, "z_dim": 4, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 1,
         "latents_mean": [-0.7, 0.1, 0.5, -1.2], "latents_std": [2.8, 1.4, 0.9, 1.9]}
WAN22 = {**STILL, "is_residual": True, "in_channels": 12, "out_channels": 12, "patch_size": 2, "scale_factor_spatial": 16,
         "dim_mult": [1, 2, 4, 4], "decoder_base_dim": 8}
KL = {"block_out_channels": [8, 16, 16], "down_block_types": ["DownEncoderBlock2D"] * 3, "up_block_types": ["UpDecoderBlock2D"] * 3,
      "latent_channels": 3, "layers_per_block": 1, "norm_num_groups": 4}
# Class, configuration, latents [batch, n_frames, h, w].
CASES = [
    ("AutoencoderKL", KL, [2, 1, 1, 2]),
    ("AutoencoderKL", {**KL, "scaling_factor": 1.5305, "shift_factor": 0.6, "use_quant_conv": False, "use_post_quant_conv": False}, [1, 1, 2, 3]),
    ("AutoencoderKL", {**KL, "mid_block_add_attention": False, "layers_per_block": 2, "latents_mean": [-1.6, 1.9, 0.4], "latents_std": [8.5, 5.9, 0.7]}, [1, 1, 1, 1]),
    ("AutoencoderKLFlux2", FLUX2, [2, 1, 1, 2]),
    ("AutoencoderKLFlux2", {**FLUX2, "decoder_block_out_channels": [4, 8, 12, 12], "batch_norm_eps": 0.3}, [1, 1, 2, 1]),
    ("AutoencoderKLFlux2", {**FLUX2, "use_quant_conv": False, "use_post_quant_conv": False, "mid_block_add_attention": False}, [1, 1, 1, 1]),
    ("AutoencoderKLQwenImage", STILL, [2, 1, 3, 2]),
    ("AutoencoderKLQwenImage", {**STILL, "dim_mult": [1, 2, 2], "temperal_downsample": [True, False], "num_res_blocks": 2}, [1, 1, 2, 3]),
    ("AutoencoderKLWan", STILL, [1, 1, 2, 3]),
    ("AutoencoderKLWan", STILL, [2, 4, 2, 1]),
    ("AutoencoderKLWan", {**STILL, "num_res_blocks": 2, "dim_mult": [1, 1, 2, 2], "temperal_downsample": [True, True, False]}, [1, 3, 1, 2]),
    ("AutoencoderKLWan", {**STILL, "temperal_downsample": [False, True, False], "scale_factor_temporal": 2}, [1, 3, 1, 2]),
    ("AutoencoderKLWan", WAN22, [1, 4, 1, 2]),
    ("AutoencoderKLWan", {**WAN22, "num_res_blocks": 2, "decoder_base_dim": None, "dim_mult": [1, 1, 2, 2], "temperal_downsample": [True, True, False]}, [2, 2, 1, 1]),
    ("AutoencoderKLWan", {**WAN22, "dim_mult": [4, 1, 2, 2]}, [1, 3, 2, 1]),
]


def draw(shape, seed):
    """float32 normal numbers in row-major order, widened."""
    return torch.randn(math.prod(shape), generator=torch.Generator().manual_seed(seed), dtype=torch.float32).reshape(shape).double()


def set_weights(model):
    """Weights by name: the seed is the sum of its bytes. Kernels keep the size of what they are given, norms are near one."""
    shapes = {}
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, tensor in sorted(tensors.items()):
        if not tensor.is_floating_point():
            continue
        drawn = draw(tensor.shape, sum(name.encode()))
        if name.endswith("weight") and tensor.ndim > 1:
            drawn = drawn * math.prod(tensor.shape[1:]) ** -0.5
        elif name.endswith(("gamma", "weight", "running_var")):
            drawn = 1 + 0.1 * drawn
        else:
            drawn = 0.1 * drawn
        tensor.data = drawn.float().double()
        shapes[name] = list(tensor.shape)
    return shapes


def held(x):
    """[b, c, f, h, w] or [b, c, h, w] as [b, f h, w, c]."""
    x = x.unsqueeze(2) if x.ndim == 4 else x
    return x.permute(0, 2, 3, 4, 1).flatten(1, 2)


def entry(x):
    x = held(x)
    return {"shape": list(x.shape), "values": [float(f"{value:.8g}") for value in x.flatten()[::STRIDE].tolist()]}


def main():
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)
    cases = []
    for name, config, (batch, n_frames, h, w) in CASES:
        model = getattr(diffusers, name)(**config).double().eval()
        weights = set_weights(model)
        config = {key: value for key, value in model.config.items() if not key.startswith("_")}
        is_flux2 = name == "AutoencoderKLFlux2"
        is_picture = is_flux2 or name == "AutoencoderKL"
        pack = unpack = lambda x: x
        if name == "AutoencoderKL":
            # As StableDiffusionXLPipeline takes the two lists into account, and StableDiffusion3Pipeline the shift.
            c = config["latent_channels"]
            scale = config["scaling_factor"]
            has_lists = config["latents_mean"] is not None
            mean = torch.tensor(config["latents_mean"] if has_lists else [config["shift_factor"] or 0.0] * c).view(1, c, 1, 1)
            std = torch.tensor(config["latents_std"] if has_lists else [1.0] * c).view(1, c, 1, 1) / scale
            factor = 2 ** (len(config["block_out_channels"]) - 1)
        elif is_flux2:
            c = 4 * config["latent_channels"]
            mean = model.bn.running_mean.view(1, c, 1, 1)
            std = torch.sqrt(model.bn.running_var.view(1, c, 1, 1) + config["batch_norm_eps"])
            pipeline = diffusers.Flux2KleinPipeline
            pack, unpack = pipeline._patchify_latents, pipeline._unpatchify_latents
            factor = 2 ** len(config["block_out_channels"])
        else:
            c = config["z_dim"]
            mean = torch.tensor(config["latents_mean"]).view(1, c, 1, 1, 1)
            std = torch.tensor(config["latents_std"]).view(1, c, 1, 1, 1)
            factor = 2 ** (len(config["dim_mult"]) - 1) * (config.get("patch_size") or 1)
        n_temporal = 2 ** sum(config.get("temperal_downsample", []))
        n_pixel_frames = 1 + (n_frames - 1) * n_temporal

        latents = draw([batch, n_frames, h, w, c], 1).permute(0, 4, 1, 2, 3)
        latents = latents[:, :, 0] if is_picture else latents
        decoded = model.decode(unpack(latents * std + mean), return_dict=False)[0]

        pixels = draw([batch, n_pixel_frames, factor * h, factor * w, 3], 2).mul(0.5).clamp(-1, 1).permute(0, 4, 1, 2, 3)
        pixels = pixels[:, :, 0] if is_picture else pixels
        posterior = model.encode(pixels).latent_dist
        encoded = (pack(posterior.mode()) - mean) / std
        noise = draw([batch, n_frames, h, w, c], 3).permute(0, 4, 1, 2, 3)
        noise = unpack(noise[:, :, 0]) if is_picture else noise
        sampled = (pack(posterior.mean + posterior.std * noise) - mean) / std
        cases.append({"class": name, "config": config, "weights": weights, "latents": [batch, n_frames, h, w, c],
                      "pixels": [batch, n_pixel_frames, factor * h, factor * w, 3],
                      "decoded": entry(decoded), "encoded": entry(encoded), "sampled": entry(sampled)})
        print(name, list(decoded.shape), float(decoded.abs().mean()), float((decoded.abs() >= 1).double().mean()), list(encoded.shape), float(posterior.std.mean()))
    table = {"versions": {"torch": torch.__version__, "diffusers": diffusers.__version__}, "stride": STRIDE, "cases": cases}
    (HERE / "vaes.json").write_text(json.dumps(table, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
