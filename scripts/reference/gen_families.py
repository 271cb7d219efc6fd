#!/usr/bin/env python3
"""Writes families.json, the table of reference cases that make_reference.py builds.

    python gen_families.py [--out families.json]

One entry per case: the family, the seed of its weights, the scheduler and the config of every
component (small, but with every option of the real checkpoints that changes the arithmetic), the
shape of the initial latents and the arguments of the pipeline call.
"""

import argparse
import json
from pathlib import Path

# Text encoders: CLIP-L's and CLIP-G's activations on small widths.
CLIP_L = dict(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    hidden_act="quick_gelu",
    projection_dim=32,
)

CLIP_G = dict(
    hidden_size=48,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    hidden_act="gelu",
    projection_dim=48,
)

# Image autoencoders, named after their downsampling factor and latent channels.
VAE_F2_4CH = dict(
    block_out_channels=(16, 32),
    down_block_types=("DownEncoderBlock2D",) * 2,
    up_block_types=("UpDecoderBlock2D",) * 2,
    latent_channels=4,
    norm_num_groups=8,
    layers_per_block=1,
    scaling_factor=0.18215,
)

VAE_SD3 = dict(
    block_out_channels=(16, 32, 32, 32),
    down_block_types=("DownEncoderBlock2D",) * 4,
    up_block_types=("UpDecoderBlock2D",) * 4,
    latent_channels=16,
    norm_num_groups=8,
    layers_per_block=1,
    scaling_factor=1.5305,
    shift_factor=0.0609,
    use_quant_conv=False,
    use_post_quant_conv=False,
)

VAE_FLUX = dict(VAE_SD3, scaling_factor=0.3611, shift_factor=0.1159)

VAE_F8_4CH = dict(
    block_out_channels=(16, 16, 32, 32),
    down_block_types=("DownEncoderBlock2D",) * 4,
    up_block_types=("UpDecoderBlock2D",) * 4,
    latent_channels=4,
    norm_num_groups=8,
    layers_per_block=1,
    scaling_factor=0.13025,
)

# The schedule of Stable Diffusion 1 and its small U-Net.
SD_SCHEDULER = dict(
    beta_start=0.00085,
    beta_end=0.012,
    beta_schedule="scaled_linear",
    num_train_timesteps=1000,
    steps_offset=1,
    clip_sample=False,
    set_alpha_to_one=False,
)


def flow(**options):
    """A flow-matching Euler scheduler's entry."""
    return ["FlowMatchEulerDiscreteScheduler", dict(num_train_timesteps=1000, **options)]


SD15_UNET = dict(
    sample_size=32,
    in_channels=4,
    out_channels=4,
    block_out_channels=(32, 64),
    layers_per_block=2,
    down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
    up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    cross_attention_dim=32,
    attention_head_dim=4,
    norm_num_groups=8,
)

CASES = {}
CASES["sd15"] = dict(
    family="sd",
    scheduler=["DDIMScheduler", SD_SCHEDULER],
    text_encoder=CLIP_L,
    unet=SD15_UNET,
    vae=VAE_F2_4CH,
    slow_tokenizers=True,
    latents=[1, 4, 32, 32],
    call=dict(
        negative_prompt="blurry, low quality",
        height=64,
        width=64,
        num_inference_steps=4,
        guidance_scale=7.5,
    ),
)

CASES["sd21v"] = dict(
    family="sd",
    seed=100,
    scheduler=[
        "EulerDiscreteScheduler",
        dict(
            beta_start=0.00085,
            beta_end=0.012,
            beta_schedule="scaled_linear",
            prediction_type="v_prediction",
            timestep_spacing="leading",
            steps_offset=1,
        ),
    ],
    text_encoder=dict(CLIP_L, hidden_act="gelu", num_hidden_layers=2),
    unet=dict(SD15_UNET, attention_head_dim=(2, 4), use_linear_projection=True, sample_size=24),
    vae=VAE_F2_4CH,
    latents=[1, 4, 24, 40],
    call=dict(height=48, width=80, num_inference_steps=4, guidance_scale=5.0, negative_prompt=""),
)

CASES["sdxl"] = dict(
    family="sdxl",
    seed=200,
    scheduler=[
        "EulerDiscreteScheduler",
        dict(
            beta_start=0.00085,
            beta_end=0.012,
            beta_schedule="scaled_linear",
            timestep_spacing="leading",
            steps_offset=1,
        ),
    ],
    text_encoder=CLIP_L,
    text_encoder_2=CLIP_G,
    unet=dict(
        sample_size=32,
        in_channels=4,
        out_channels=4,
        block_out_channels=(16, 32),
        layers_per_block=2,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=(2, 4),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        transformer_layers_per_block=(1, 2),
        projection_class_embeddings_input_dim=8 * 6 + 48,
        cross_attention_dim=32 + 48,
        norm_num_groups=8,
    ),
    vae=VAE_F8_4CH,
    latents=[1, 4, 16, 12],
    call=dict(
        height=128,
        width=96,
        num_inference_steps=4,
        guidance_scale=5.0,
        negative_prompt="blurry, low quality",
    ),
)

# Distilled to take the guidance scale as an input, and a timestep's noise anew at each step.
CASES["sdxl-lcm"] = dict(
    CASES["sdxl"],
    seed=250,
    scheduler=[
        "LCMScheduler",
        dict(
            beta_start=0.00085,
            beta_end=0.012,
            beta_schedule="scaled_linear",
            clip_sample=False,
        ),
    ],
    unet=dict(
        CASES["sdxl"]["unet"],
        layers_per_block=1,
        transformer_layers_per_block=(1, 1),
        time_cond_proj_dim=16,
    ),
    latents=[1, 4, 8, 12],
    call=dict(height=64, width=96, num_inference_steps=4, guidance_scale=3.0),
)

SD3_TRANSFORMER = dict(
    sample_size=16,
    patch_size=2,
    in_channels=16,
    num_layers=3,
    attention_head_dim=8,
    num_attention_heads=4,
    joint_attention_dim=96,
    caption_projection_dim=32,
    pooled_projection_dim=80,
    out_channels=16,
    pos_embed_max_size=24,
)

CASES["sd3"] = dict(
    family="sd3",
    seed=300,
    scheduler=flow(shift=3.0),
    transformer=SD3_TRANSFORMER,
    vae=VAE_SD3,
    text_encoder=CLIP_L,
    text_encoder_2=CLIP_G,
    text_encoder_3=dict(d_model=96, d_kv=16, num_heads=4),
    latents=[1, 16, 16, 12],
    call=dict(
        height=128,
        width=96,
        num_inference_steps=4,
        guidance_scale=7.0,
        negative_prompt="blurry, low quality",
    ),
)

CASES["sd35m"] = dict(
    family="sd3",
    seed=350,
    scheduler=flow(shift=3.0),
    transformer=dict(
        SD3_TRANSFORMER, qk_norm="rms_norm", dual_attention_layers=(0, 1), num_layers=3
    ),
    vae=VAE_SD3,
    text_encoder=CLIP_L,
    text_encoder_2=CLIP_G,
    latents=[1, 16, 16, 16],
    call=dict(height=128, width=128, num_inference_steps=3, guidance_scale=4.5, negative_prompt=""),
)

FLUX_TRANSFORMER = dict(
    patch_size=1,
    in_channels=64,
    num_layers=2,
    num_single_layers=2,
    attention_head_dim=16,
    num_attention_heads=4,
    joint_attention_dim=32,
    pooled_projection_dim=32,
    guidance_embeds=True,
    axes_dims_rope=(4, 6, 6),
)

CASES["flux-dev"] = dict(
    family="flux",
    seed=400,
    scheduler=flow(
        shift=3.0,
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=1.15,
        base_image_seq_len=256,
        max_image_seq_len=4096,
    ),
    transformer=FLUX_TRANSFORMER,
    vae=VAE_FLUX,
    text_encoder=CLIP_L,
    text_encoder_2=dict(d_model=32, d_kv=8, num_heads=4),
    latents=[1, 8 * 6, 64],
    call=dict(
        height=128, width=96, num_inference_steps=4, guidance_scale=3.5, max_sequence_length=64
    ),
)

CASES["flux-schnell"] = dict(
    family="flux",
    seed=450,
    scheduler=flow(shift=1.0),
    transformer=dict(FLUX_TRANSFORMER, guidance_embeds=False),
    vae=VAE_FLUX,
    text_encoder=CLIP_L,
    text_encoder_2=dict(d_model=32, d_kv=8, num_heads=4),
    latents=[1, 64, 64],
    call=dict(
        height=128, width=128, num_inference_steps=2, guidance_scale=0.0, max_sequence_length=32
    ),
)

CASES["pixart"] = dict(
    family="pixart",
    seed=500,
    scheduler=[
        "DPMSolverMultistepScheduler",
        dict(
            beta_start=0.0001,
            beta_end=0.02,
            beta_schedule="linear",
            algorithm_type="dpmsolver++",
            solver_order=2,
        ),
    ],
    transformer=dict(
        sample_size=16,
        num_layers=3,
        patch_size=2,
        attention_head_dim=8,
        num_attention_heads=4,
        caption_channels=32,
        in_channels=4,
        cross_attention_dim=32,
        out_channels=8,
        norm_type="ada_norm_single",
        use_additional_conditions=False,
    ),
    vae=VAE_F8_4CH,
    text_encoder=dict(d_model=32, d_kv=8, num_heads=4),
    latents=[1, 4, 16, 12],
    call=dict(
        height=128,
        width=96,
        num_inference_steps=5,
        guidance_scale=4.5,
        negative_prompt="",
        use_resolution_binning=False,
        clean_caption=False,
        max_sequence_length=40,
    ),
)

CASES["dit"] = dict(
    family="dit",
    seed=550,
    scheduler=[
        "DDIMScheduler",
        dict(beta_start=0.0001, beta_end=0.02, beta_schedule="linear", clip_sample=False),
    ],
    transformer=dict(
        sample_size=16,
        num_layers=3,
        patch_size=2,
        attention_head_dim=8,
        num_attention_heads=4,
        in_channels=4,
        out_channels=8,
        norm_type="ada_norm_zero",
        activation_fn="gelu-approximate",
        num_embeds_ada_norm=1000,
        norm_elementwise_affine=False,
        attention_bias=True,
    ),
    vae=VAE_F8_4CH,
    dit_latents=[1, 4, 16, 16],
    call=dict(class_labels=[3], guidance_scale=4.0, num_inference_steps=4),
)

CASES["zimage"] = dict(
    family="zimage",
    seed=600,
    scheduler=flow(shift=3.0),
    transformer=dict(
        dim=48,
        n_layers=3,
        n_refiner_layers=1,
        n_heads=3,
        n_kv_heads=3,
        cap_feat_dim=32,
        axes_dims=[4, 6, 6],
        axes_lens=[256, 64, 64],
        in_channels=16,
    ),
    vae=VAE_FLUX,
    text_encoder=dict(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=1024,
    ),
    latents=[1, 16, 16, 12],
    call=dict(
        height=128,
        width=96,
        num_inference_steps=4,
        guidance_scale=3.0,
        negative_prompt="blurry",
        max_sequence_length=64,
    ),
)

CASES["flux2-klein"] = dict(
    family="flux2klein",
    seed=650,
    scheduler=flow(
        shift=3.0,
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=1.15,
        base_image_seq_len=256,
        max_image_seq_len=4096,
    ),
    transformer=dict(
        patch_size=1,
        in_channels=32,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=48,
        timestep_guidance_channels=32,
        axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=False,
    ),
    vae=dict(
        block_out_channels=(16, 32, 32, 32),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        latent_channels=8,
        norm_num_groups=8,
        layers_per_block=1,
    ),
    text_encoder=dict(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=6,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=1024,
    ),
    latents=[1, 32, 8, 6],
    call=dict(
        height=128,
        width=96,
        num_inference_steps=3,
        guidance_scale=4.0,
        max_sequence_length=64,
        text_encoder_out_layers=(1, 3, 5),
    ),
)

CASES["qwen-image"] = dict(
    family="qwenimage",
    seed=700,
    scheduler=flow(
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=0.9,
        base_image_seq_len=256,
        max_image_seq_len=8192,
        shift_terminal=0.02,
        time_shift_type="exponential",
    ),
    transformer=dict(
        patch_size=2,
        in_channels=64,
        out_channels=16,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=3,
        joint_attention_dim=32,
        axes_dims_rope=(4, 6, 6),
    ),
    vae=dict(
        base_dim=12,
        z_dim=16,
        dim_mult=[1, 2, 4, 4],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
    ),
    text_encoder=dict(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        rope_scaling=dict(type="mrope", rope_type="default", mrope_section=[1, 1, 2]),
    ),
    vision=dict(
        depth=1,
        hidden_size=32,
        intermediate_size=32,
        num_heads=2,
        out_hidden_size=32,
        fullatt_block_indexes=[0],
        patch_size=14,
        window_size=112,
    ),
    latents=[1, 8 * 6, 64],
    call=dict(
        height=128,
        width=96,
        num_inference_steps=3,
        true_cfg_scale=4.0,
        negative_prompt=" ",
        max_sequence_length=64,
    ),
)

WAN_TRANSFORMER = dict(
    patch_size=(1, 2, 2),
    num_attention_heads=2,
    attention_head_dim=12,
    in_channels=16,
    out_channels=16,
    text_dim=32,
    freq_dim=256,
    ffn_dim=32,
    num_layers=2,
    cross_attn_norm=True,
    qk_norm="rms_norm_across_heads",
    rope_max_seq_len=32,
)

CASES["wan21-t2v"] = dict(
    family="wan",
    seed=800,
    scheduler=[
        "UniPCMultistepScheduler",
        dict(
            prediction_type="flow_prediction",
            use_flow_sigmas=True,
            flow_shift=3.0,
            num_train_timesteps=1000,
        ),
    ],
    transformer=WAN_TRANSFORMER,
    vae=dict(
        base_dim=8,
        z_dim=16,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
    ),
    text_encoder=dict(d_model=32, d_kv=8, num_heads=4),
    latents=[1, 16, 3, 8, 6],
    call=dict(
        height=64,
        width=48,
        num_frames=9,
        num_inference_steps=4,
        guidance_scale=5.0,
        negative_prompt="blurry",
        max_sequence_length=48,
    ),
)

CASES["wan22-t2v"] = dict(
    family="wan",
    seed=850,
    scheduler=[
        "UniPCMultistepScheduler",
        dict(
            prediction_type="flow_prediction",
            use_flow_sigmas=True,
            flow_shift=12.0,
            num_train_timesteps=1000,
        ),
    ],
    transformer=WAN_TRANSFORMER,
    transformer_2=WAN_TRANSFORMER,
    boundary_ratio=0.875,
    vae=dict(
        base_dim=8,
        z_dim=16,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
    ),
    text_encoder=dict(d_model=32, d_kv=8, num_heads=4),
    latents=[1, 16, 2, 6, 8],
    call=dict(
        height=48,
        width=64,
        num_frames=5,
        num_inference_steps=6,
        guidance_scale=4.0,
        guidance_scale_2=3.0,
        negative_prompt="",
        max_sequence_length=32,
    ),
)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(__file__).resolve().with_name("families.json"),
        help="file to write (default: families.json beside this script)",
    )
    args = parser.parse_args()
    args.out.write_text(json.dumps(CASES, indent=1) + "\n")


if __name__ == "__main__":
    main()
