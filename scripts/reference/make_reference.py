#!/usr/bin/env python3
"""Builds tiny random-weight checkpoints in Hugging Face diffusers folder format, one per case,
runs the diffusers pipeline on each in float32 on the CPU, and stores what it computed, so that
another implementation can be compared with it tensor by tensor.

    pip install torch diffusers transformers accelerate safetensors sentencepiece protobuf
    python make_reference.py --out DIR [--only sd15,flux-dev] [--configs families.json]

DIR/<case>/model/
    The checkpoint: diffusers folder layout, float16 safetensors. The run widens them to float32.
DIR/<case>/reference.json
    family, pipeline class, every argument of the call with its resolved value (`call`), `seed`
    (1234), `latents_shape`, timesteps, sigmas, `bf16_error` (relative L2 of each tensor when
    diffusers itself runs the case in bfloat16), library versions.
DIR/<case>/reference.safetensors
    float32 unless said otherwise:

token_ids[.2|.3][.prompt<k>]
    int64 [1, T]. The raw prompt through `tokenizer(p)`: special tokens, no padding, no truncation,
    no chat template, none of the pipeline's own cleaning (PixArt lower-cases and strips, Wan
    cleans, Qwen-Image, Z-Image and FLUX.2 klein apply a chat template first). Suffix .2/.3 =
    tokenizer_2/_3; .prompt<k> for k >= 1 in a batch of prompts. Where tokenizer.json and
    spiece.model are both there, tokenizer.json decides.
encode_prompt.<i>.<n>
    Position i of the tuple that the pipeline's encode_prompt returned; n counts the calls in which
    position i was a tensor. A missing one was None (negatives at guidance <= 1, Qwen-Image's mask
    when all true). sd, sdxl, sd3, pixart, wan: one call returns positive and negative. klein, qwen:
    call 0 is the positive prompt, call 1 the negative (klein's is '').
    `encode_prompt.<i>.list<j>.<n>` (zimage): list element j = prompt j, ragged. FLUX position 2
    (text ids) is all zeros [T, 3].
latents.init
    N(0, 1), *before* the scheduler's init_noise_sigma (sd, sdxl and pixart multiply by it).
    Layouts: sd, sdxl, sd3, pixart, zimage, dit [B, C, h, w]; flux and qwen packed
    [B, (h/2)(w/2), 4C], tokens = 2x2 patches in row-major order, channel order (c, dy, dx);
    flux2klein [B, 4C, h/2, w/2], while its noise_pred and latents.step are [B, (h/2)(w/2), 4C];
    wan [B, C, F, h, w].
noise_pred.<k>, latents.step_<k>
    Exactly what the scheduler's step() was given and returned at its k-th call: after guidance
    (zimage: sign flipped, guidance = pos + s (pos - neg); qwen: after its norm rescaling; flux:
    guidance is an embedded input, not classifier-free). Their number is len(timesteps), which may
    exceed num_inference_steps (PNDM: 6 -> 7). dit: with guidance > 1 the batch is doubled
    (conditional rows first, null class 1000), learned-sigma channels already dropped.
image
    The output before 8-bit rounding, (x / 2 + 0.5) clamped to [0, 1], [B, 3, H, W]; video
    [B, F, 3, H, W].
seeded.image
    The same call without latents given: the pipeline draws its own noise from
    `torch.Generator("cpu").manual_seed(seed)` (its own shape and order of draws, also for
    stochastic samplers).
input.image[.2|.3..], input.mask
    uint8 [h, w, 3] and [h, w]: what a case with a `task` (image-to-image, inpaint, edit,
    image-to-video; also in reference.json) was given, as PIL pictures; a mask is 255 where to paint.
    image-to-image and inpaint start from the picture, so these run with the seed both times:
    `latents.init` is then the N(0, 1) noise that the pipeline drew for the latents (after the noise
    that samples the picture's own latents), and `seeded.image` is `image`. Where the pipeline puts
    the known part back behind each step (inpaint without extra channels), `latents.step_<k>` is
    taken after that. The checkpoint's index names the text-to-image class unless the checkpoint is
    one for the task alone (`saved_as_task`).

Comparison is free-running: each step starts from the implementation's own latents. A batch of
prompts counts as B requests stacked on dimension 0 (there seeded.image, whose noise is one draw for
the whole batch, is not compared). Error = ||x - ref|| / ||ref||; if ||ref|| = 0, and for token ids,
masks and position ids, equality is exact.
"""

import argparse
import copy
import functools
import inspect
import io
import json
import shutil
import sys
from collections import Counter
from pathlib import Path

import diffusers
import numpy
import PIL.Image
import sentencepiece
import tokenizers
import torch
import transformers
from safetensors.torch import save_file
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

SEED = 1234
PROMPT = "A red fox, sitting on the green grass (photo, 4k) - it's 7 o'clock!"
NEGATIVE = "blurry, low quality"
# What the tokenizers' vocabularies are trained on.
CORPUS = [
    PROMPT,
    NEGATIVE,
    "a photo of a cat and a dog",
    "an oil painting of the sea at night",
    "the quick brown fox jumps over the lazy dog",
    "a small house with a blue door in the snow",
    "portrait of an old man, 85mm, f/1.8",
    "a city street in the rain, neon lights",
    "two apples on a table",
] * 4


# ---- tokenizers ----------------------------------------------------------------------------------


def train_bpe(words, vocab_size, suffix=""):
    """Plain byte-pair training with a fixed tie-break (count, then text), so that the same files
    come out every time. `words`: byte-level pre-tokens; the last symbol of each carries `suffix`.
    Returns (vocab, merges)."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    counts = Counter(words)
    split = {word: tuple(word[:-1]) + (word[-1] + suffix,) for word in counts}
    symbols = alphabet + ([c + suffix for c in alphabet] if suffix else [])
    vocab = {symbol: i for i, symbol in enumerate(symbols)}
    merges = []
    while len(vocab) < vocab_size:
        pairs = Counter()
        for word, count in counts.items():
            for pair in zip(split[word], split[word][1:], strict=False):
                pairs[pair] += count
        if not pairs:
            break
        best, count = min(pairs.items(), key=lambda item: (-item[1], item[0]))
        if count < 2:
            break
        merges.append(best)
        vocab.setdefault(best[0] + best[1], len(vocab))
        split = {word: merged(parts, best) for word, parts in split.items()}
    return vocab, merges


def merged(parts, pair):
    """`parts` with every occurrence of the adjacent `pair` joined, left to right."""
    out, i = [], 0
    while i < len(parts):
        n = 2 if parts[i : i + 2] == pair else 1
        out.append("".join(parts[i : i + n]))
        i += n
    return tuple(out)


def pre_tokens(pre_tokenizer, texts):
    return [word for text in texts for word, _ in pre_tokenizer.pre_tokenize_str(text)]


def clip_tokenizer(folder, pad, max_length=77):
    """CLIP's lower-cased byte-level BPE with </w> suffixes, on a small vocabulary.
    Returns (tokenizer, vocabulary size)."""
    pre = tokenizers.pre_tokenizers
    words = tokenizers.Regex(r"""'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+""")
    pre_tokenizer = pre.Sequence(
        [
            pre.Split(words, behavior="removed", invert=True),
            pre.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    lower = [text.lower() for text in CORPUS]
    vocab, merges = train_bpe(pre_tokens(pre_tokenizer, lower), 700, "</w>")
    for special in ("<|startoftext|>", "<|endoftext|>"):
        vocab[special] = len(vocab)
    folder.mkdir(parents=True, exist_ok=True)
    vocab_file, merges_file = folder / "vocab.json", folder / "merges.txt"
    vocab_file.write_text(json.dumps(vocab, ensure_ascii=False))
    lines = ["#version: 0.2"] + [" ".join(pair) for pair in merges]
    merges_file.write_text("\n".join(lines) + "\n")
    tokenizer = transformers.CLIPTokenizer(
        vocab=str(vocab_file),
        merges=str(merges_file),
        model_max_length=max_length,
        pad_token=pad,
    )
    return tokenizer, len(vocab)


def t5_tokenizer(max_length):
    """A unigram SentencePiece model on a small vocabulary.
    Returns (tokenizer, the bytes of spiece.model, vocabulary size)."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=model,
        vocab_size=160,
        model_type="unigram",
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        hard_vocab_limit=False,
        byte_fallback=False,
        minloglevel=2,
    )
    pieces = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    vocab = [(pieces.id_to_piece(i), pieces.get_score(i)) for i in range(pieces.get_piece_size())]
    tokenizer = transformers.T5TokenizerFast(vocab=vocab, extra_ids=0, model_max_length=max_length)
    return tokenizer, model.getvalue(), len(tokenizer)


# The parts of Qwen's chat templates that the pipelines rely on.
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}"
    "{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}"
    "{{- '<think>\\n\\n</think>\\n\\n' }}"
    "{%- endif %}{%- endif %}"
)


def qwen_tokenizer(max_length):
    """Qwen2's byte-level BPE on a small vocabulary, with the chat template's special tokens.
    Returns (tokenizer, vocabulary size)."""
    template_texts = [
        "user\n",
        "assistant\n",
        "system\n",
        "<think>\n\n</think>\n\n",
        (
            "Describe the image by detailing the color, shape, size, texture, quantity, text, "
            "spatial relationships of the objects and background:"
        ),
    ]
    pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    vocab, merges = train_bpe(pre_tokens(pre_tokenizer, CORPUS + template_texts * 3), 600)
    tokenizer = transformers.Qwen2Tokenizer(vocab=vocab, merges=merges, model_max_length=max_length)
    special = ["im_start", "im_end", "vision_start", "vision_end", "image_pad"]
    tokenizer.add_special_tokens({"additional_special_tokens": [f"<|{name}|>" for name in special]})
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer, len(tokenizer)


# ---- components ----------------------------------------------------------------------------------


def clip_text(config, vocab_size, tokenizer, projection):
    """A CLIP text encoder, with or without the final projection. The config may override what
    follows from the tokenizer, as real checkpoints do (their eos_token_id is 2)."""
    defaults = dict(
        vocab_size=vocab_size,
        max_position_embeddings=tokenizer.model_max_length,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    text_config = transformers.CLIPTextConfig(**{**defaults, **config})
    if projection:
        return transformers.CLIPTextModelWithProjection(text_config)
    return transformers.CLIPTextModel(text_config)


def t5_text(config, vocab_size, umt5=False):
    """A T5 (or UMT5) encoder."""
    base = dict(
        vocab_size=vocab_size,
        d_ff=64,
        num_layers=2,
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0,
        tie_word_embeddings=False,
    )
    base.update(config)
    if umt5:
        return transformers.UMT5EncoderModel(transformers.UMT5Config(**base))
    return transformers.T5EncoderModel(transformers.T5Config(**base))


def randomise(module, seed):
    """Fresh weights from one seed: norms near one, biases not zero, so that nothing cancels out
    unseen. Rounded to what float16 represents exactly, so that the files are half the size."""
    generator = torch.Generator().manual_seed(seed)

    def normal(tensor):
        return torch.randn(tensor.shape, generator=generator)

    with torch.no_grad():
        for name, p in module.named_parameters():
            if p.dim() <= 1 or "scale_shift_table" in name:
                is_norm = "norm" in name and name.endswith("weight") or name.endswith("gamma")
                p.copy_((1.0 if is_norm else 0.0) + 0.1 * normal(p))
            else:
                fan_in = p[0].numel()
                p.copy_(normal(p) * (1.2 / fan_in) ** 0.5)
        for name, buffer in module.named_buffers():
            if name.endswith("running_var"):
                buffer.copy_(0.5 + torch.rand(buffer.shape, generator=generator))
            if name.endswith("running_mean"):
                buffer.copy_(0.1 * normal(buffer))
    return module.half().float().eval()


# ---- one builder per family ----------------------------------------------------------------------
# Each takes the case's config, the model folder (tokenizer files are written there first), the seed
# and the scheduler; it returns the pipeline and, where a tokenizer is SentencePiece,
# (tokenizer folder, bytes of spiece.model).


def build_sd(config, model, seed, scheduler):
    tokenizer, vocab_size = clip_tokenizer(model / "tokenizer", "<|endoftext|>")
    text_encoder = clip_text(config["text_encoder"], vocab_size, tokenizer, projection=False)
    pipe = diffusers.StableDiffusionPipeline(
        vae=randomise(diffusers.AutoencoderKL(**config["vae"]), seed + 3),
        text_encoder=randomise(text_encoder, seed + 1),
        tokenizer=tokenizer,
        unet=randomise(diffusers.UNet2DConditionModel(**config["unet"]), seed + 2),
        scheduler=scheduler,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    return pipe, None


def build_sdxl(config, model, seed, scheduler):
    tokenizer, text_encoder = None, None
    if config.get("text_encoder"):  # Refiners have the second only.
        tokenizer, vocab_size = clip_tokenizer(model / "tokenizer", "<|endoftext|>")
        text_encoder = clip_text(config["text_encoder"], vocab_size, tokenizer, projection=False)
        text_encoder = randomise(text_encoder, seed + 1)
    tokenizer_2, vocab_size_2 = clip_tokenizer(model / "tokenizer_2", "!")
    text_encoder_2 = clip_text(config["text_encoder_2"], vocab_size_2, tokenizer_2, projection=True)
    options = {} if config.get("saved_as_task") else config.get("options", {})
    pipe = diffusers.StableDiffusionXLPipeline(
        vae=randomise(diffusers.AutoencoderKL(**config["vae"]), seed + 3),
        text_encoder=text_encoder,
        text_encoder_2=randomise(text_encoder_2, seed + 4),
        tokenizer=tokenizer,
        tokenizer_2=tokenizer_2,
        unet=randomise(diffusers.UNet2DConditionModel(**config["unet"]), seed + 2),
        scheduler=scheduler,
        add_watermarker=False,
        **options,
    )
    return pipe, None


def build_sd3(config, model, seed, scheduler):
    tokenizer, vocab_size = clip_tokenizer(model / "tokenizer", "<|endoftext|>")
    tokenizer_2, vocab_size_2 = clip_tokenizer(model / "tokenizer_2", "!")
    text_encoder = clip_text(config["text_encoder"], vocab_size, tokenizer, projection=True)
    text_encoder_2 = clip_text(config["text_encoder_2"], vocab_size_2, tokenizer_2, projection=True)
    text_encoder_3, tokenizer_3, spiece = None, None, None
    if config.get("text_encoder_3"):
        tokenizer_3, spiece_bytes, vocab_size_3 = t5_tokenizer(256)
        text_encoder_3 = randomise(t5_text(config["text_encoder_3"], vocab_size_3), seed + 5)
        spiece = ("tokenizer_3", spiece_bytes)
    pipe = diffusers.StableDiffusion3Pipeline(
        transformer=randomise(diffusers.SD3Transformer2DModel(**config["transformer"]), seed + 2),
        scheduler=scheduler,
        vae=randomise(diffusers.AutoencoderKL(**config["vae"]), seed + 3),
        text_encoder=randomise(text_encoder, seed + 1),
        tokenizer=tokenizer,
        text_encoder_2=randomise(text_encoder_2, seed + 4),
        tokenizer_2=tokenizer_2,
        text_encoder_3=text_encoder_3,
        tokenizer_3=tokenizer_3,
    )
    return pipe, spiece


def build_flux(config, model, seed, scheduler):
    tokenizer, vocab_size = clip_tokenizer(model / "tokenizer", "<|endoftext|>")
    tokenizer_2, spiece_bytes, vocab_size_2 = t5_tokenizer(512)
    text_encoder = clip_text(config["text_encoder"], vocab_size, tokenizer, projection=False)
    pipe = diffusers.FluxPipeline(
        scheduler=scheduler,
        vae=randomise(diffusers.AutoencoderKL(**config["vae"]), seed + 3),
        text_encoder=randomise(text_encoder, seed + 1),
        tokenizer=tokenizer,
        text_encoder_2=randomise(t5_text(config["text_encoder_2"], vocab_size_2), seed + 5),
        tokenizer_2=tokenizer_2,
        transformer=randomise(diffusers.FluxTransformer2DModel(**config["transformer"]), seed + 2),
    )
    return pipe, ("tokenizer_2", spiece_bytes)


def build_pixart(config, model, seed, scheduler):
    tokenizer, spiece_bytes, vocab_size = t5_tokenizer(300)
    transformer = diffusers.PixArtTransformer2DModel(**config["transformer"])
    pipe = diffusers.PixArtSigmaPipeline(
        tokenizer=tokenizer,
        text_encoder=randomise(t5_text(config["text_encoder"], vocab_size), seed + 1),
        vae=randomise(diffusers.AutoencoderKL(**config["vae"]), seed + 3),
        transformer=randomise(transformer, seed + 2),
        scheduler=scheduler,
    )
    return pipe, ("tokenizer", spiece_bytes)


def build_dit(config, model, seed, scheduler):
    pipe = diffusers.DiTPipeline(
        transformer=randomise(diffusers.DiTTransformer2DModel(**config["transformer"]), seed + 2),
        vae=randomise(diffusers.AutoencoderKL(**config["vae"]), seed + 3),
        scheduler=scheduler,
        id2label={i: f"class {i}" for i in range(10)},
    )
    return pipe, None


def qwen3_config(config, vocab_size, tokenizer):
    return transformers.Qwen3Config(
        vocab_size=vocab_size + 3, pad_token_id=tokenizer.pad_token_id, **config["text_encoder"]
    )


def build_zimage(config, model, seed, scheduler):
    tokenizer, vocab_size = qwen_tokenizer(512)
    text_encoder = transformers.Qwen3Model(qwen3_config(config, vocab_size, tokenizer))
    transformer = diffusers.ZImageTransformer2DModel(**config["transformer"])
    pipe = diffusers.ZImagePipeline(
        scheduler=scheduler,
        vae=randomise(diffusers.AutoencoderKL(**config["vae"]), seed + 3),
        text_encoder=randomise(text_encoder, seed + 1),
        tokenizer=tokenizer,
        transformer=randomise(transformer, seed + 2),
    )
    return pipe, None


def build_flux2klein(config, model, seed, scheduler):
    tokenizer, vocab_size = qwen_tokenizer(512)
    text_encoder = transformers.Qwen3ForCausalLM(qwen3_config(config, vocab_size, tokenizer))
    pipe = diffusers.Flux2KleinPipeline(
        scheduler=scheduler,
        vae=randomise(diffusers.AutoencoderKLFlux2(**config["vae"]), seed + 3),
        text_encoder=randomise(text_encoder, seed + 1),
        tokenizer=tokenizer,
        transformer=randomise(diffusers.Flux2Transformer2DModel(**config["transformer"]), seed + 2),
        is_distilled=config.get("is_distilled", False),
    )
    return pipe, None


def build_qwenimage(config, model, seed, scheduler):
    tokenizer, vocab_size = qwen_tokenizer(1024)
    text_encoder = transformers.Qwen2_5_VLForConditionalGeneration(
        transformers.Qwen2_5_VLConfig(
            text_config=dict(vocab_size=vocab_size + 3, **config["text_encoder"]),
            vision_config=config["vision"],
            image_token_id=tokenizer.convert_tokens_to_ids("<|image_pad|>"),
            vision_start_token_id=tokenizer.convert_tokens_to_ids("<|vision_start|>"),
            vision_end_token_id=tokenizer.convert_tokens_to_ids("<|vision_end|>"),
        )
    )
    transformer = diffusers.QwenImageTransformer2DModel(**config["transformer"])
    pipeline_class, processor = diffusers.QwenImagePipeline, {}
    if config.get("task") == "edit":
        pipeline_class, processor = task_pipeline(config), dict(processor=None)
        folder = model / "processor"
        Qwen2VLImageProcessorPil(**config["processor"]).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    pipe = pipeline_class(
        **processor,
        scheduler=scheduler,
        vae=randomise(diffusers.AutoencoderKLQwenImage(**config["vae"]), seed + 3),
        text_encoder=randomise(text_encoder, seed + 1),
        tokenizer=tokenizer,
        transformer=randomise(transformer, seed + 2),
    )
    return pipe, None


class PictureProcessor:
    """What transformers' Qwen2VLProcessor does for texts with pictures. The class itself insists on a
    processor of videos, which needs torchvision, and with that would resize by other means."""

    def __init__(self, folder):
        self.image_processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def __call__(self, text, images, padding, return_tensors):
        pixels = self.image_processor(images=images, return_tensors=return_tensors)
        n_tokens = (pixels["image_grid_thw"].prod(-1) // self.image_processor.merge_size**2).tolist()
        texts, taken = [], iter(n_tokens)
        for one in text:
            parts = one.split("<|image_pad|>")
            texts.append(parts[0])
            for part in parts[1:]:
                texts[-1] += "<|image_pad|>" * next(taken) + part
        ids = self.tokenizer(texts, padding=padding, return_tensors=return_tensors)
        return transformers.BatchFeature({**ids, **pixels})


def build_wan(config, model, seed, scheduler):
    tokenizer, spiece_bytes, vocab_size = t5_tokenizer(512)
    second = {}
    if config.get("transformer_2"):
        transformer_2 = diffusers.WanTransformer3DModel(**config["transformer_2"])
        second["transformer_2"] = randomise(transformer_2, seed + 6)
        second["boundary_ratio"] = config["boundary_ratio"]
    if config.get("expand_timesteps"):
        second["expand_timesteps"] = True
    pipeline_class = diffusers.WanPipeline
    if config.get("task") == "image-to-video":
        pipeline_class = diffusers.WanImageToVideoPipeline
        second.update(image_encoder=None, image_processor=None)
        if config.get("image_encoder"):
            vision = transformers.CLIPVisionConfig(**config["image_encoder"])
            second["image_encoder"] = randomise(transformers.CLIPVisionModel(vision), seed + 7)
            side = config["image_encoder"]["image_size"]
            second["image_processor"] = transformers.CLIPImageProcessor(
                size={"shortest_edge": side}, crop_size=side
            )
    text_encoder = t5_text(config["text_encoder"], vocab_size, umt5=True)
    pipe = pipeline_class(
        tokenizer=tokenizer,
        text_encoder=randomise(text_encoder, seed + 1),
        vae=randomise(diffusers.AutoencoderKLWan(**config["vae"]), seed + 3),
        scheduler=scheduler,
        transformer=randomise(diffusers.WanTransformer3DModel(**config["transformer"]), seed + 2),
        **second,
    )
    return pipe, ("tokenizer", spiece_bytes)


BUILDERS = {
    "sd": build_sd,
    "sdxl": build_sdxl,
    "sd3": build_sd3,
    "flux": build_flux,
    "pixart": build_pixart,
    "dit": build_dit,
    "zimage": build_zimage,
    "flux2klein": build_flux2klein,
    "qwenimage": build_qwenimage,
    "wan": build_wan,
}


def build_model(config, model):
    """Writes the case's checkpoint to the folder `model`; returns its pipeline class."""
    if config["family"] not in BUILDERS:
        raise SystemExit(f"unknown family {config['family']}; known: {', '.join(BUILDERS)}")
    scheduler_class, scheduler_options = config["scheduler"]
    scheduler = getattr(diffusers, scheduler_class)(**scheduler_options)
    builder = BUILDERS[config["family"]]
    pipe, spiece = builder(config, model, config.get("seed", 0), scheduler)
    pipeline_class = task_pipeline(config)
    if config.get("saved_as_task") and not isinstance(pipe, pipeline_class):
        pipe = pipeline_class(**pipe.components, **config.get("options", {}))
    pipe.to(dtype=torch.float16)
    pipe.save_pretrained(model, safe_serialization=True)
    if config.get("slow_tokenizers"):  # As older repositories ship them: no tokenizer.json.
        for folder in model.glob("tokenizer*"):
            if (folder / "vocab.json").exists():
                (folder / "tokenizer.json").unlink(missing_ok=True)
    if (model / "processor").exists():
        index = json.loads((model / "model_index.json").read_text())
        index["processor"] = ["transformers", "Qwen2VLProcessor"]
        (model / "model_index.json").write_text(json.dumps(index, indent=2) + "\n")
    if spiece:
        folder, spiece_bytes = spiece
        (model / folder / "spiece.model").write_bytes(spiece_bytes)
    return pipeline_class or type(pipe)


# ---- pictures that tasks begin with --------------------------------------------------------------

TASK_PIPELINES = {
    ("sd", "image-to-image"): "StableDiffusionImg2ImgPipeline",
    ("sd", "inpaint"): "StableDiffusionInpaintPipeline",
    ("sdxl", "image-to-image"): "StableDiffusionXLImg2ImgPipeline",
    ("sdxl", "inpaint"): "StableDiffusionXLInpaintPipeline",
    ("sd3", "image-to-image"): "StableDiffusion3Img2ImgPipeline",
    ("sd3", "inpaint"): "StableDiffusion3InpaintPipeline",
    ("flux", "image-to-image"): "FluxImg2ImgPipeline",
    ("flux", "inpaint"): "FluxInpaintPipeline",
    ("flux", "edit"): "FluxKontextPipeline",
    ("flux2klein", "edit"): "Flux2KleinPipeline",
    ("qwenimage", "image-to-image"): "QwenImageImg2ImgPipeline",
    ("qwenimage", "inpaint"): "QwenImageInpaintPipeline",
    ("qwenimage", "edit"): "QwenImageEditPipeline",
    ("zimage", "image-to-image"): "ZImageImg2ImgPipeline",
    ("zimage", "inpaint"): "ZImageInpaintPipeline",
    ("wan", "image-to-video"): "WanImageToVideoPipeline",
}


def task_pipeline(config):
    """The class that carries out the case's task: the one that it names, or that of the table; None
    for text to picture."""
    if "task" not in config:
        return None
    if "pipeline" in config:
        return getattr(diffusers, config["pipeline"])
    key = (config["family"], config["task"])
    if key not in TASK_PIPELINES:
        known = ", ".join(" ".join(key) for key in TASK_PIPELINES)
        raise SystemExit(f"no pipeline for {' '.join(key)}; there are {known}")
    return getattr(diffusers, TASK_PIPELINES[key])


def input_image(seed, height, width):
    """A colourful picture with soft and with sharp places, uint8 [height, width, 3]."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand([1, 3, 5, 4], generator=generator)
    size = (height, width)
    soft = torch.nn.functional.interpolate(coarse, size=size, mode="bicubic", align_corners=False)
    grain = torch.rand([1, 3, height, width], generator=generator)
    picture = 0.85 * soft + 0.15 * grain
    picture[..., height // 3 : height // 2, width // 4 : width // 2] = 1.0 - coarse[..., :1, :1]
    return (picture[0].clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).contiguous()


def input_mask(height, width):
    """White (paint) within an ellipse off the centre, with a soft rim, uint8 [height, width]."""
    y = (torch.arange(height) + 0.5) / height - 0.55
    x = (torch.arange(width) + 0.5) / width - 0.45
    distance = (y[:, None] ** 2 / 0.09 + x[None] ** 2 / 0.06).sqrt()
    return ((1.0 - 4.0 * (distance - 1.0)).clamp(0, 1) * 255).round().to(torch.uint8)


def task_inputs(config):
    """(tensors to store, arguments of the call) of the case's pictures and mask."""
    tensors, images = {}, []
    for k, size in enumerate(config.get("images", [])):
        image = input_image(SEED + k, *size)
        tensors["input.image" + (f".{k + 1}" if k else "")] = image
        images.append(PIL.Image.fromarray(numpy.asarray(image)))
    arguments = {"image": images[0] if len(images) == 1 else images} if images else {}
    if "mask" in config:
        mask = input_mask(*config["mask"])
        tensors["input.mask"] = mask
        arguments["mask_image"] = PIL.Image.fromarray(numpy.asarray(mask))
    return tensors, arguments


# ---- running and recording -----------------------------------------------------------------------


def is_plain(value):
    """Whether `value` can be written to JSON as it is."""
    if isinstance(value, (list, tuple)):
        return all(is_plain(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))


def resolved_call(call, parameters):
    """Every argument of the call with its value: what `call` gives, else the pipeline's default."""
    resolved = {}
    for name, parameter in parameters.items():
        default = parameter.default
        if name in call:
            resolved[name] = call[name]
        elif default is not parameter.empty and default is not None and is_plain(default):
            resolved[name] = default
    resolved.pop("output_type", None)
    resolved.pop("return_dict", None)
    return resolved


def token_ids(pipe, prompts):
    """The raw token ids of every prompt for every tokenizer of the pipeline."""
    tensors = {}
    for name in ("tokenizer", "tokenizer_2", "tokenizer_3"):
        tokenizer = getattr(pipe, name, None)
        if tokenizer is None:
            continue
        suffix = name.removeprefix("tokenizer").replace("_", ".")
        for k, prompt in enumerate(prompts):
            key = f"token_ids{suffix}" + (f".prompt{k}" if k else "")
            tensors[key] = tokenizer(prompt, return_tensors="pt").input_ids
    return tensors


def spy_on_steps(pipe, tensors):
    """Makes the scheduler record every step() in `tensors`; returns the growing list of its
    timesteps."""
    timesteps, step = [], pipe.scheduler.step

    # Pipelines look at the signature before they pass their generator.
    @functools.wraps(step)
    def recorded_step(model_output, timestep, sample, *args, **kwargs):
        out = step(model_output, timestep, sample, *args, **kwargs)
        latents = out[0] if isinstance(out, tuple) else out.prev_sample
        k = len(timesteps)
        timesteps.append(float(timestep))
        tensors[f"noise_pred.{k}"] = model_output.float().clone()
        tensors[f"latents.step_{k}"] = latents.float().clone()
        return out

    pipe.scheduler.step = recorded_step
    return timesteps


def spy_on_noise(pipe):
    """Makes the pipeline's module record the noise that it draws; returns the growing list."""
    drawn, module = [], sys.modules[type(pipe).__module__]
    randn_tensor = module.randn_tensor

    def recorded_randn_tensor(*args, **kwargs):
        drawn.append(randn_tensor(*args, **kwargs))
        return drawn[-1]

    module.randn_tensor = recorded_randn_tensor
    return drawn


def in_shape_of_latents(pipe, noise, shape):
    """Noise as the pipeline drew it in the layout of the case's latents."""
    if list(noise.shape) != list(shape):
        noise = noise.squeeze(1) if noise.dim() == 5 else noise
        noise = pipe._pack_latents(noise, *noise.shape)
    return noise.reshape(shape)


def spy_on_encode_prompt(pipe, tensors):
    """Makes the pipeline, if it has encode_prompt, record every tensor that it returns."""
    encode_prompt = getattr(pipe, "encode_prompt", None)
    if encode_prompt is None:
        return
    seen = Counter()

    def keep(name, tensor):
        tensors[f"{name}.{seen[name]}"] = tensor.clone()
        seen[name] += 1

    def recorded_encode_prompt(*args, **kwargs):
        out = encode_prompt(*args, **kwargs)
        for i, position in enumerate(out if isinstance(out, tuple) else (out,)):
            if torch.is_tensor(position):
                keep(f"encode_prompt.{i}", position)
            elif isinstance(position, (list, tuple)):
                for j, item in enumerate(position):
                    if torch.is_tensor(item):
                        keep(f"encode_prompt.{i}.list{j}", item)
        return out

    pipe.encode_prompt = recorded_encode_prompt


def picture(pipe, family, call):
    """Calls the pipeline with the seeded generator and returns its images or frames as float32."""
    generator = torch.Generator().manual_seed(SEED)
    call = copy.deepcopy(call)  # Some pipelines write into the lists that they are given.
    if family == "dit":  # It has no "pt" output.
        images = pipe(**call, generator=generator, output_type="np").images
        return torch.from_numpy(images).permute(0, 3, 1, 2).contiguous().float()
    out = pipe(**call, generator=generator, output_type="pt")
    images = out.frames if hasattr(out, "frames") else out.images
    if not torch.is_tensor(images):
        images = torch.stack(list(images))
    return images.float()


def run(pipe, config):
    """Calls the pipeline twice (first drawing its own noise, then with latents given) and records
    what passes by. Returns (tensors, JSON-able information)."""
    pipe.set_progress_bar_config(disable=True)
    modules = (c for c in pipe.components.values() if isinstance(c, torch.nn.Module))
    dtype = next(modules).dtype
    parameters = inspect.signature(pipe.__call__).parameters
    family, call = config["family"], dict(config["call"])
    tensors, info = {}, {}
    if "prompt" in parameters:
        call.setdefault("prompt", PROMPT)
        prompts = call["prompt"] if isinstance(call["prompt"], list) else [call["prompt"]]
        tensors.update(token_ids(pipe, prompts))
    info["call"] = resolved_call(call, parameters)
    info["seed"] = SEED
    task = config.get("task")
    if task:
        info["task"] = task
        inputs, arguments = task_inputs(config)
        tensors.update(inputs)
        call.update(arguments)
    starts_from_image = task in ("image-to-image", "inpaint")
    shape = config.get("latents") or config["dit_latents"]
    latents = torch.randn(shape, generator=torch.Generator().manual_seed(SEED), dtype=torch.float32)
    info["latents_shape"] = list(shape)
    with torch.no_grad():
        tensors["seeded.image"] = picture(pipe, family, call)
        tensors["latents.init"] = latents.clone()
        timesteps = spy_on_steps(pipe, tensors)
        spy_on_encode_prompt(pipe, tensors)
        if starts_from_image:
            drawn = spy_on_noise(pipe)
        elif "latents" in parameters:
            call["latents"] = latents.to(dtype)
        if task == "inpaint":

            def keep_latents(_pipe, k, _timestep, passed):
                tensors[f"latents.step_{k}"] = passed["latents"].float().clone()
                return {}

            call["callback_on_step_end"] = keep_latents
        tensors["image"] = picture(pipe, family, call)
        if starts_from_image:
            noise = in_shape_of_latents(pipe, drawn[0], shape)
            tensors["latents.init"] = noise
    info["timesteps"] = timesteps
    sigmas = getattr(pipe.scheduler, "sigmas", None)
    info["sigmas"] = None if sigmas is None else [float(sigma) for sigma in sigmas]
    for name, tensor in tensors.items():
        tensors[name] = (tensor.float() if tensor.is_floating_point() else tensor).contiguous().clone()
    return tensors, info


def relative_errors(tensors, reference):
    """Relative L2 error of every float tensor of `reference` that `tensors` has in its shape."""
    errors = {}
    for name, expected in reference.items():
        found = tensors.get(name)
        if name == "latents.init" or not expected.is_floating_point() or found is None:
            continue
        if found.shape == expected.shape and expected.norm() > 0:
            difference = found.double() - expected.double()
            errors[name] = float(difference.norm() / expected.double().norm())
    return errors


def load(pipeline_class, model, dtype):
    """The pipeline of the files on disk. Components that the folder leaves out (an SD3 folder
    without T5) have to be named to diffusers as None."""
    index = json.loads((model / "model_index.json").read_text())
    absent = {name: None for name, value in index.items() if value == [None, None]}
    if "processor" in index:
        absent["processor"] = None
    pipe = pipeline_class.from_pretrained(model, dtype=dtype, **absent)
    if "processor" in index:
        pipe.processor = PictureProcessor(model / "processor")
    return pipe


def record(folder, case, config, pipeline_class, bf16=True):
    """Runs the checkpoint in `folder`/model and writes reference.safetensors and reference.json."""
    for library in (diffusers, transformers):
        library.utils.logging.disable_progress_bar()
    tensors, info = run(load(pipeline_class, folder / "model", torch.float32), config)
    bad = [n for n, t in tensors.items() if t.is_floating_point() and not t.isfinite().all()]
    if bad:
        raise SystemExit(f"{case}: not finite: {bad}")
    save_file(tensors, folder / "reference.safetensors")
    errors = {}
    if bf16:
        in_bf16, _ = run(load(pipeline_class, folder / "model", torch.bfloat16), config)
        errors = relative_errors(in_bf16, tensors)
    info.update(
        case=case,
        family=config["family"],
        pipeline=pipeline_class.__name__,
        bf16_error=errors,
        versions=dict(
            torch=torch.__version__,
            diffusers=diffusers.__version__,
            transformers=transformers.__version__,
        ),
    )
    (folder / "reference.json").write_text(json.dumps(info, indent=1) + "\n")
    n_bytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    image = tensors["image"]
    print(
        f"{case:14s} {pipeline_class.__name__:28s} {n_bytes / 1e6:6.2f} MB"
        f"  steps {len(info['timesteps'])}  image {tuple(image.shape)}"
        f" mean {image.mean():.3f} std {image.std():.3f}"
        f"  bf16 image error {errors.get('image', float('nan')):.3f}",
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser(
        description="Builds reference cases; the docstring of this script describes their files.",
    )
    parser.add_argument("--out", required=True, type=Path, help="folder that receives the cases")
    parser.add_argument(
        "--configs",
        type=Path,
        default=Path(__file__).resolve().with_name("families.json"),
        help="table of cases (default: families.json beside this script)",
    )
    parser.add_argument("--only", default="", help="comma-separated names of cases (default: all)")
    parser.add_argument(
        "--no-bf16",
        action="store_true",
        help="skip the bfloat16 run (slow on processors without bfloat16 instructions)",
    )
    args = parser.parse_args()
    configs = json.loads(args.configs.read_text())
    names = args.only.split(",") if args.only else list(configs)
    unknown = [name for name in names if name not in configs]
    if unknown:
        raise SystemExit(f"no such case: {', '.join(unknown)}; there are {', '.join(configs)}")
    for case in names:
        folder = args.out / case
        shutil.rmtree(folder, ignore_errors=True)
        pipeline_class = build_model(configs[case], folder / "model")
        record(folder, case, configs[case], pipeline_class, bf16=not args.no_bf16)


if __name__ == "__main__":
    main()
