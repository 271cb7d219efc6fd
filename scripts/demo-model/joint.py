"""Attention over one zero token that stands for many."""

import math

import torch
import torch.nn.functional as F

from common import CONTEXT, PATCHES

T5_TOKENS = 256  # Zero tokens that diffusers adds where an SD3 checkpoint has no T5.


class FoldedZeros:
    """diffusers' JointAttnProcessor2_0 with a bias on the last key.

    Without T5 the pipeline hands the transformer N identical zero tokens (N = max_sequence_length,
    256 by default). They stay identical in every block, so one token whose key gets log N added to
    its scores gives exactly the same result and is far cheaper.
    """

    def __init__(self):
        self.bias = None

    def stand_for(self, count):
        """Sets how many zero tokens the one stands for."""
        n_tokens = PATCHES + CONTEXT + 1
        self.bias = torch.zeros(1, 1, n_tokens, n_tokens)
        self.bias[..., -1] = math.log(count) if count else -1e4

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, **unused):
        image, text = hidden_states, encoder_hidden_states
        batch, n_image = image.shape[:2]

        def heads(x):
            return x.view(batch, -1, attn.heads, x.shape[-1] // attn.heads).transpose(1, 2)

        image_query = attn.norm_q(heads(attn.to_q(image)))
        image_key = attn.norm_k(heads(attn.to_k(image)))
        text_query = attn.norm_added_q(heads(attn.add_q_proj(text)))
        text_key = attn.norm_added_k(heads(attn.add_k_proj(text)))
        out = F.scaled_dot_product_attention(
            torch.cat([image_query, text_query], 2),
            torch.cat([image_key, text_key], 2),
            torch.cat([heads(attn.to_v(image)), heads(attn.add_v_proj(text))], 2),
            attn_mask=self.bias,
        )
        out = out.transpose(1, 2).flatten(2)
        image, text = out[:, :n_image], out[:, n_image:]
        if not attn.context_pre_only:
            text = attn.to_add_out(text)
        return attn.to_out[0](image), text
