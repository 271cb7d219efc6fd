"""The denoisers of SD1.5 and SD3-medium in plain PyTorch, for machines without diffusers.

Names and shapes of the weights are those of diffusers' checkpoints, so that the modules also say what
a checkpoint holds. Knows only the options that those two checkpoints use, and nothing of files.
Formulas: Rombach et al. 2022 (U-Net) and Esser et al. 2024 (MMDiT), as diffusers computes them.
"""

import math

import torch
from torch import nn
from torch.nn import functional as F

N_GROUPS = 32


def named(**children):
    """Children whose names need not be identifiers: `_0` stands for `0`."""
    return nn.ModuleDict({name.removeprefix("_"): child for name, child in children.items()})


def sinusoids(times, n):
    """[cos, sin] of `times` at n / 2 frequencies from 1 down to 1e-4."""
    frequencies = torch.exp(torch.arange(n // 2, device=times.device) * (-math.log(1e4) / (n // 2)))
    angles = times.float()[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def attend(q, k, v, n_heads):
    q, k, v = (x.unflatten(-1, (n_heads, -1)).transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class TwoLinears(nn.Module):
    def __init__(self, n_in, n):
        super().__init__()
        self.linear_1, self.linear_2 = nn.Linear(n_in, n), nn.Linear(n, n)

    def forward(self, x):
        return self.linear_2(F.silu(self.linear_1(x)))


class ResBlock(nn.Module):
    def __init__(self, n_in, n, n_time):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(N_GROUPS, n_in), nn.Conv2d(n_in, n, 3, padding=1)
        self.time_emb_proj = nn.Linear(n_time, n)
        self.norm2, self.conv2 = nn.GroupNorm(N_GROUPS, n), nn.Conv2d(n, n, 3, padding=1)
        self.conv_shortcut = nn.Conv2d(n_in, n, 1) if n_in != n else nn.Identity()

    def forward(self, x, time):
        out = self.conv1(F.silu(self.norm1(x))) + self.time_emb_proj(F.silu(time))[:, :, None, None]
        return self.conv_shortcut(x) + self.conv2(F.silu(self.norm2(out)))


class Attention(nn.Module):
    def __init__(self, n, n_context, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.to_q = nn.Linear(n, n, bias=False)
        self.to_k = nn.Linear(n_context, n, bias=False)
        self.to_v = nn.Linear(n_context, n, bias=False)
        self.to_out = nn.ModuleList([nn.Linear(n, n)])

    def forward(self, x, context):
        attended = attend(self.to_q(x), self.to_k(context), self.to_v(context), self.n_heads)
        return self.to_out[0](attended)


class TextBlock(nn.Module):
    """Self-attention, attention to the text and GEGLU."""

    def __init__(self, n, n_context, n_heads):
        super().__init__()
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(n) for _ in range(3))
        self.attn1, self.attn2 = Attention(n, n, n_heads), Attention(n, n_context, n_heads)
        self.ff = named(net=named(_0=named(proj=nn.Linear(n, 8 * n)), _2=nn.Linear(4 * n, n)))

    def forward(self, x, context):
        normed = self.norm1(x)
        x = x + self.attn1(normed, normed)
        x = x + self.attn2(self.norm2(x), context)
        out, gate = self.ff["net"]["0"]["proj"](self.norm3(x)).chunk(2, dim=-1)
        return x + self.ff["net"]["2"](out * F.gelu(gate))


class ImageTransformer(nn.Module):
    def __init__(self, n, n_context, n_heads):
        super().__init__()
        self.norm = nn.GroupNorm(N_GROUPS, n, eps=1e-6)
        self.proj_in, self.proj_out = nn.Conv2d(n, n, 1), nn.Conv2d(n, n, 1)
        self.transformer_blocks = nn.ModuleList([TextBlock(n, n_context, n_heads)])

    def forward(self, x, context):
        tokens = self.proj_in(self.norm(x)).flatten(2).transpose(1, 2)
        tokens = self.transformer_blocks[0](tokens, context)
        return x + self.proj_out(tokens.transpose(1, 2).unflatten(2, x.shape[2:]))


class Level(nn.Module):
    """Res blocks, each with a transformer where the level has them, then a change of resolution."""

    def __init__(self, widths, n_time, transformer, resample, is_up):
        super().__init__()
        self.is_up = is_up
        self.resnets = nn.ModuleList(ResBlock(n_in, n, n_time) for n_in, n in widths)
        if transformer:
            self.attentions = nn.ModuleList(ImageTransformer(*transformer) for _ in widths)
        self.has_attention = bool(transformer)
        if resample:
            n, stride = widths[-1][1], 2 if resample == "downsamplers" else 1
            conv = named(conv=nn.Conv2d(n, n, 3, stride=stride, padding=1))
            setattr(self, resample, nn.ModuleList([conv]))
        self.resample = resample

    def forward(self, x, time, context, skips):
        """Downwards it pushes what it computes on `skips`, upwards it pops them."""
        for idx, resnet in enumerate(self.resnets):
            x = resnet(torch.cat([x, skips.pop()], dim=1) if self.is_up else x, time)
            if self.has_attention:
                x = self.attentions[idx](x, context)
            if not self.is_up:
                skips.append(x)
        if self.resample == "downsamplers":
            x = self.downsamplers[0]["conv"](x)
            skips.append(x)
        elif self.resample == "upsamplers":
            x = self.upsamplers[0]["conv"](F.interpolate(x, scale_factor=2.0, mode="nearest"))
        return x


class Unet(nn.Module):
    """SD1.5's: `forward(latents [B, 4, h, w], times [B], text [B, tokens, n])`."""

    def __init__(self, config):
        super().__init__()
        widths, n_layers = config["block_out_channels"], config["layers_per_block"]
        context, n_heads = config["cross_attention_dim"], config["attention_head_dim"]
        n_time = 4 * widths[0]
        self.n_sinusoids = widths[0]
        self.conv_in = nn.Conv2d(config["in_channels"], widths[0], 3, padding=1)
        self.time_embedding = TwoLinears(widths[0], n_time)
        self.down_blocks, self.up_blocks = nn.ModuleList(), nn.ModuleList()
        skips, n = [widths[0]], widths[0]
        for idx, width in enumerate(widths):
            is_last = idx + 1 == len(widths)
            pairs = [(n if layer == 0 else width, width) for layer in range(n_layers)]
            transformer = None if is_last else (width, context, n_heads)
            resample = None if is_last else "downsamplers"
            self.down_blocks.append(Level(pairs, n_time, transformer, resample, False))
            skips += [width] * (n_layers + (not is_last))
            n = width
        self.mid_block = nn.Module()
        self.mid_block.resnets = nn.ModuleList(ResBlock(n, n, n_time) for _ in range(2))
        self.mid_block.attentions = nn.ModuleList([ImageTransformer(n, context, n_heads)])
        for idx, width in enumerate(reversed(widths)):
            pairs = []
            for _ in range(n_layers + 1):
                pairs.append((n + skips.pop(), width))
                n = width
            transformer = (width, context, n_heads) if idx else None
            resample = "upsamplers" if idx + 1 < len(widths) else None
            self.up_blocks.append(Level(pairs, n_time, transformer, resample, True))
        self.conv_norm_out = nn.GroupNorm(N_GROUPS, n)
        self.conv_out = nn.Conv2d(n, config["out_channels"], 3, padding=1)

    def forward(self, latents, times, text):
        time = self.time_embedding(sinusoids(times, self.n_sinusoids).to(latents.dtype))
        x = self.conv_in(latents)
        skips = [x]
        for level in self.down_blocks:
            x = level(x, time, text, skips)
        x = self.mid_block.resnets[0](x, time)
        x = self.mid_block.resnets[1](self.mid_block.attentions[0](x, text), time)
        for level in self.up_blocks:
            x = level(x, time, text, skips)
        return self.conv_out(F.silu(self.conv_norm_out(x)))


def modulated(x, scale, shift):
    return F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale[:, None]) + shift[:, None]


class JointBlock(nn.Module):
    """Attention over picture and text together; the last block leaves the text behind."""

    def __init__(self, n, n_heads, is_last):
        super().__init__()
        self.n_heads, self.is_last = n_heads, is_last
        self.norm1 = named(linear=nn.Linear(n, 6 * n))
        self.norm1_context = named(linear=nn.Linear(n, (2 if is_last else 6) * n))
        names = ["to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj"]
        names += [] if is_last else ["to_add_out"]
        self.attn = named(to_out=named(_0=nn.Linear(n, n)), **{x: nn.Linear(n, n) for x in names})
        for name in ["ff"] if is_last else ["ff", "ff_context"]:
            net = named(_0=named(proj=nn.Linear(n, 4 * n)), _2=nn.Linear(4 * n, n))
            setattr(self, name, named(net=net))

    def finish(self, x, attended, chunks, ff):
        _, _, gate, mlp_shift, mlp_scale, mlp_gate = chunks
        x = x + gate[:, None] * attended
        out = ff["net"]["0"]["proj"](modulated(x, mlp_scale, mlp_shift))
        return x + mlp_gate[:, None] * ff["net"]["2"](F.gelu(out, approximate="tanh"))

    def forward(self, x, text, time):
        mine = self.norm1["linear"](time).chunk(6, dim=1)
        theirs = self.norm1_context["linear"](time).chunk(2 if self.is_last else 6, dim=1)
        normed = modulated(x, mine[1], mine[0])
        # The last block's text modulation is stored scale first.
        scale, shift = theirs if self.is_last else (theirs[1], theirs[0])
        normed_text = modulated(text, scale, shift)
        pairs = [("to_q", "add_q_proj"), ("to_k", "add_k_proj"), ("to_v", "add_v_proj")]
        joint = [torch.cat([self.attn[a](normed), self.attn[b](normed_text)], 1) for a, b in pairs]
        attended = attend(*joint, self.n_heads)
        n = x.shape[1]
        x = self.finish(x, self.attn["to_out"]["0"](attended[:, :n]), mine, self.ff)
        if not self.is_last:
            text_out = self.attn["to_add_out"](attended[:, n:])
            text = self.finish(text, text_out, theirs, self.ff_context)
        return x, text


class Mmdit(nn.Module):
    """SD3-medium's: `forward(latents [B, 16, h, w], times [B], text [B, tokens, n], pooled [B, n])`."""

    def __init__(self, config):
        super().__init__()
        n_heads, n_layers = config["num_attention_heads"], config["num_layers"]
        n = n_heads * config["attention_head_dim"]
        self.patch, self.table_side = config["patch_size"], config["pos_embed_max_size"]
        self.pos_embed = named(proj=nn.Conv2d(config["in_channels"], n, self.patch, self.patch))
        base_side = config["sample_size"] // self.patch
        table = position_table(n, self.table_side, base_side)
        self.pos_embed.register_buffer("pos_embed", table)
        self.time_text_embed = named(
            timestep_embedder=TwoLinears(256, n),
            text_embedder=TwoLinears(config["pooled_projection_dim"], n),
        )
        self.context_embedder = nn.Linear(config["joint_attention_dim"], n)
        self.transformer_blocks = nn.ModuleList(
            JointBlock(n, n_heads, idx + 1 == n_layers) for idx in range(n_layers)
        )
        self.norm_out = named(linear=nn.Linear(n, 2 * n))
        self.proj_out = nn.Linear(n, self.patch**2 * config["out_channels"])

    def forward(self, latents, times, text, pooled):
        time = self.time_text_embed["timestep_embedder"](sinusoids(times, 256).to(latents.dtype))
        time = F.silu(time + self.time_text_embed["text_embedder"](pooled))
        x = self.pos_embed["proj"](latents)
        h, w = x.shape[2:]
        top, left = (self.table_side - h) // 2, (self.table_side - w) // 2
        table = self.pos_embed.pos_embed.unflatten(1, (self.table_side, self.table_side))
        table = table[:, top : top + h, left : left + w].flatten(1, 2)
        x, text = x.flatten(2).transpose(1, 2) + table, self.context_embedder(text)
        for block in self.transformer_blocks:
            x, text = block(x, text, time)
        scale, shift = self.norm_out["linear"](time).chunk(2, dim=1)
        x = self.proj_out(modulated(x, scale, shift))
        x = x.unflatten(2, (self.patch, self.patch, -1)).unflatten(1, (h, w))
        return x.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)


def position_table(n, side, base_side):
    """[1, side * side, n]: sines and cosines of the column first, then those of the row."""
    omega = 1e4 ** -(torch.arange(n // 4, dtype=torch.float64) / (n / 4))
    angles = (torch.arange(side, dtype=torch.float32) / (side / base_side))[:, None] * omega
    waves = torch.cat([angles.sin(), angles.cos()], dim=1).float()
    columns, rows = waves[None].expand(side, -1, -1), waves[:, None].expand(-1, side, -1)
    return torch.cat([columns, rows], dim=2).reshape(1, side * side, n)


NETS = {"sd15": Unet, "sd3m": Mmdit}
