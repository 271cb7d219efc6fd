"""The tiny CLIP text encoders and their tokenizer."""

import random

from transformers import CLIPTextConfig, CLIPTextModelWithProjection, CLIPTokenizer

from captions import caption
from common import BUILD, CONTEXT

# (width, heads, activation) of text_encoder and text_encoder_2; the activations are SD3's.
ENCODERS = {1: (96, 3, "quick_gelu"), 2: (64, 2, "gelu")}
DROP_CAPTION = 0.1


def load_tokenizer():
    return CLIPTokenizer.from_pretrained(BUILD / "tokenizer")


def new_encoder(which, vocab_size):
    """Encoder 1 or 2 with fresh weights."""
    width, n_heads, activation = ENCODERS[which]
    config = CLIPTextConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=4 * width,
        projection_dim=width,
        num_hidden_layers=3,
        num_attention_heads=n_heads,
        max_position_embeddings=CONTEXT,
        hidden_act=activation,
        bos_token_id=vocab_size - 2,
        eos_token_id=vocab_size - 1,
        pad_token_id=vocab_size - 1,
    )
    return CLIPTextModelWithProjection(config)


def token_ids(tokenizer, texts):
    """int64 [B, CONTEXT]."""
    return tokenizer(
        texts, padding="max_length", max_length=CONTEXT, truncation=True, return_tensors="pt"
    ).input_ids


def training_captions(items):
    """A random caption for each item; some are dropped, for classifier-free guidance."""
    return ["" if random.random() < DROP_CAPTION else caption(item) for item in items]
