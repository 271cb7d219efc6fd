#!/usr/bin/env python3
"""Writes a random checkpoint of real size: a step of it costs what a step of the real one costs.

    python random_model.py sd15|sd3m FOLDER [--small]

A diffusers folder in bf16 with the denoiser of SD1.5 (860 million parameters) or of SD3-medium (2.0
billion); --small shrinks its depth and width. Text encoders have the real widths, one layer and the
small vocabulary of the reference cases; tokenizers, scheduler and autoencoder are those of the
reference cases in tests/data. Matrices keep the scale of what passes through them, so that activations
stay finite. The same options give the same files.
"""

import argparse
import json
import shutil
from pathlib import Path

import torch

from files import read_tensors, write_tensors
from nets import NETS, position_table

CASES = Path(__file__).resolve().parents[2] / "tests" / "data"
UNET = dict(
    sample_size=64,
    block_out_channels=[320, 640, 1280, 1280],
    cross_attention_dim=768,
    attention_head_dim=8,
    norm_num_groups=32,
    layers_per_block=2,
    down_block_types=["CrossAttnDownBlock2D"] * 3 + ["DownBlock2D"],
    up_block_types=["UpBlock2D"] + ["CrossAttnUpBlock2D"] * 3,
)
UNET_SMALL = dict(block_out_channels=[64, 128, 128, 128], cross_attention_dim=64, layers_per_block=1)
MMDIT = dict(
    sample_size=128,
    num_layers=24,
    num_attention_heads=24,
    attention_head_dim=64,
    joint_attention_dim=4096,
    caption_projection_dim=1536,
    pooled_projection_dim=2048,
    pos_embed_max_size=192,
)
MMDIT_SMALL = dict(
    num_layers=2,
    num_attention_heads=2,
    joint_attention_dim=192,
    caption_projection_dim=128,
    pooled_projection_dim=128,
)


def with_spread(shapes):
    """{name: (shape, (standard deviation, mean))}: matrices preserve scale, norms are one and zero."""
    tensors = {}
    for name, shape in shapes.items():
        shape = torch.Size(shape)
        if "embedding.weight" in name:
            spread = (0.02, 0.0)
        elif len(shape) > 1:
            spread = (shape[1:].numel() ** -0.5, 0.0)
        elif "norm" in name and name.endswith("weight"):
            spread = (0.0, 1.0)
        else:
            spread = (0.0 if "norm" in name else 0.02, 0.0)
        tensors[name] = (shape, spread)
    return tensors


def write_component(folder, config, tensors, file, seed):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    write_tensors(folder / file, tensors, seed=seed)


def write_denoiser(folder, kind, config, seed):
    with torch.device("meta"):
        shapes = {name: x.shape for name, x in NETS[kind](config).state_dict().items()}
    tensors = with_spread(shapes)
    if kind == "sd3m":
        table = tensors["pos_embed.pos_embed"][0]
        n_heads, head_dim = config["num_attention_heads"], config["attention_head_dim"]
        base_side = config["sample_size"] // config["patch_size"]
        values = position_table(n_heads * head_dim, config["pos_embed_max_size"], base_side)
        tensors["pos_embed.pos_embed"] = (table, values)
    write_component(folder, config, tensors, "diffusion_pytorch_model.safetensors", seed)


def clip_shapes(config, prefix, has_projection):
    n, n_inner = config["hidden_size"], config["intermediate_size"]
    layer = f"{prefix}encoder.layers.0."
    linears = {f"self_attn.{name}_proj": (n, n) for name in ("q", "k", "v", "out")}
    linears |= {"mlp.fc1": (n_inner, n), "mlp.fc2": (n, n_inner)}
    shapes = {
        f"{prefix}embeddings.token_embedding.weight": (config["vocab_size"], n),
        f"{prefix}embeddings.position_embedding.weight": (config["max_position_embeddings"], n),
    }
    for name, shape in linears.items():
        shapes |= {f"{layer}{name}.weight": shape, f"{layer}{name}.bias": shape[:1]}
    for norm in (f"{layer}layer_norm1", f"{layer}layer_norm2", f"{prefix}final_layer_norm"):
        shapes |= {f"{norm}.weight": (n,), f"{norm}.bias": (n,)}
    if has_projection:
        shapes["text_projection.weight"] = (config["projection_dim"], n)
    return shapes


def t5_shapes(config):
    n, n_inner, n_heads = config["d_model"], config["d_ff"], config["num_heads"]
    n_attended = n_heads * config["d_kv"]
    attention = "encoder.block.0.layer.0.SelfAttention."
    dense = "encoder.block.0.layer.1.DenseReluDense."
    return {
        "shared.weight": (config["vocab_size"], n),
        f"{attention}q.weight": (n_attended, n),
        f"{attention}k.weight": (n_attended, n),
        f"{attention}v.weight": (n_attended, n),
        f"{attention}o.weight": (n, n_attended),
        f"{attention}relative_attention_bias.weight": (
            config["relative_attention_num_buckets"],
            n_heads,
        ),
        f"{dense}wi_0.weight": (n_inner, n),
        f"{dense}wi_1.weight": (n_inner, n),
        f"{dense}wo.weight": (n, n_inner),
        "encoder.block.0.layer.0.layer_norm.weight": (n,),
        "encoder.block.0.layer.1.layer_norm.weight": (n,),
        "encoder.final_layer_norm.weight": (n,),
    }


def write_clip(case, folder, width, seed):
    config = read_config(case)
    n_heads = max(width // 64, 1)
    config |= dict(hidden_size=width, intermediate_size=4 * width, projection_dim=width)
    config |= dict(num_hidden_layers=1, num_attention_heads=n_heads, dtype="bfloat16")
    has_projection = config["architectures"] == ["CLIPTextModelWithProjection"]
    shapes = clip_shapes(config, "text_model." if has_projection else "", has_projection)
    write_component(folder, config, with_spread(shapes), "model.safetensors", seed)


def write_t5(case, folder, width, seed):
    """Few heads and a narrow inner layer: the encoder's cost is no part of a step."""
    config = read_config(case)
    config |= dict(d_model=width, d_kv=64, num_heads=4, d_ff=512, num_layers=1, dtype="bfloat16")
    tensors = with_spread(t5_shapes(config))
    write_component(folder, config, tensors, "model.safetensors", seed)


def write_sd15_vae(folder):
    """The sd15 case's autoencoder shrinks by 2 and SD1.5's by 8, so this is the sd3 case's, which
    shrinks by 8, with its latents cut down to 4 channels."""
    case = CASES / "sd3" / "model" / "vae"
    config = read_config(case) | dict(latent_channels=4, scaling_factor=0.18215, shift_factor=None)
    tensors = read_tensors(case / "diffusion_pytorch_model.safetensors")
    for name in ("encoder.conv_out.weight", "encoder.conv_out.bias"):
        tensors[name] = tensors[name][:8]
    tensors["decoder.conv_in.weight"] = tensors["decoder.conv_in.weight"][:, :4]
    tensors = {name: (x.shape, x) for name, x in tensors.items()}
    write_component(folder, config, tensors, "diffusion_pytorch_model.safetensors", 0)


def read_config(folder):
    return json.loads((folder / "config.json").read_text())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=NETS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--small", action="store_true", help="a denoiser of toy size")
    args = parser.parse_args()
    is_sd15 = args.kind == "sd15"
    case = CASES / ("sd15" if is_sd15 else "sd3") / "model"
    args.folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(case / "model_index.json", args.folder)
    copied = [*case.glob("tokenizer*"), case / "scheduler"] + ([] if is_sd15 else [case / "vae"])
    for folder in copied:
        shutil.copytree(folder, args.folder / folder.name, dirs_exist_ok=True)
    if is_sd15:
        config = read_config(case / "unet") | UNET | (UNET_SMALL if args.small else {})
        write_denoiser(args.folder / "unet", "sd15", config, 1)
        clip_widths = dict(text_encoder=config["cross_attention_dim"])
        write_sd15_vae(args.folder / "vae")
    else:
        config = read_config(case / "transformer") | MMDIT | (MMDIT_SMALL if args.small else {})
        write_denoiser(args.folder / "transformer", "sd3m", config, 1)
        clip_widths = dict(text_encoder=64 if args.small else 768)
        clip_widths["text_encoder_2"] = config["pooled_projection_dim"] - clip_widths["text_encoder"]
        width = config["joint_attention_dim"]
        write_t5(case / "text_encoder_3", args.folder / "text_encoder_3", width, 4)
    for seed, (name, width) in enumerate(clip_widths.items(), 2):
        write_clip(case / name, args.folder / name, width, seed)
    n_bytes = sum(file.stat().st_size for file in args.folder.rglob("*.safetensors"))
    print(f"{args.folder}: {n_bytes / 1e9:.2f} GB of weights")


if __name__ == "__main__":
    main()
