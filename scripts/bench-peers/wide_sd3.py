"""A transformer of Stable Diffusion 3 medium's width with seeded random weights.

Knows nothing of timing, text encoders or files.
"""

import torch
from accelerate import init_empty_weights
from diffusers import SD3Transformer2DModel

N_LAYERS = 24
TEXT_TOKENS = 77 + 256  # CLIP's context and the zero tokens in place of T5.
DTYPES = {"fp32": torch.float32, "fp16": torch.float16}


def config(n_layers=N_LAYERS):
    """SD3-medium's, but for the depth."""
    return dict(
        sample_size=128,
        patch_size=2,
        in_channels=16,
        out_channels=16,
        num_layers=n_layers,
        attention_head_dim=64,
        num_attention_heads=24,
        joint_attention_dim=4096,
        caption_projection_dim=1536,
        pooled_projection_dim=2048,
        pos_embed_max_size=192,
    )


def count_bytes(n_layers, dtype):
    """Size of the weights, the position table included."""
    with init_empty_weights(include_buffers=True):
        model = SD3Transformer2DModel(**config(n_layers))
    return sum(tensor.numel() for tensor in model.state_dict().values()) * dtype.itemsize


def random_transformer(n_layers, seed, dtype=torch.float32):
    """The model in float32. Matrices keep the scale of what passes through them and biases are not
    zero; all weights are rounded to `dtype`, so that a file in `dtype` holds exactly them."""
    with init_empty_weights():  # Skips torch's own initialisation, which would be thrown away.
        model = SD3Transformer2DModel(**config(n_layers))
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, parameter in model.named_parameters():
        weight = torch.empty(parameter.shape).normal_(generator=generator)
        if parameter.dim() > 1:
            weight *= parameter[0].numel() ** -0.5
        else:
            weight *= 0.02
        weights[name] = weight.to(dtype).float()
    missing, _ = model.load_state_dict(weights, strict=False, assign=True)
    assert missing == ["pos_embed.pos_embed"], missing
    model.pos_embed.pos_embed.copy_(model.pos_embed.pos_embed.to(dtype))
    return model.requires_grad_(False).eval()


def random_inputs(batch, latent_side, seed):
    """The arguments of one step for `batch` rows, by name."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.empty(shape).normal_(generator=generator)

    return dict(
        hidden_states=normal(batch, 16, latent_side, latent_side),
        encoder_hidden_states=normal(batch, TEXT_TOKENS, 4096),
        pooled_projections=normal(batch, 2048),
        timestep=torch.linspace(900.0, 300.0, batch),
    )
