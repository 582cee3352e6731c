"""A Llava of a few thousand weights with its processor, saved as a folder, and pictures of three colours."""

from __future__ import annotations

from pathlib import Path

import torch

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% for p in m['content'] %}{% if p['type'] == 'image' %}"
    "<image>\n{% else %}{{ p['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
COLOURS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255)}


def save_llava(folder: Path) -> Path:
    """Write the model and its processor: 28 x 28 pixels, 4 tokens an image."""
    from transformers import CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    from workbench.components import tiny_llama

    tokenizer = tiny_llama.build_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    text = tiny_llama.config()
    text.vocab_size, text.num_hidden_layers = len(tokenizer), 1
    vision = CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
    )
    config = LlavaConfig(
        vision_config=vision, text_config=text, vision_feature_layer=-1,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlavaForConditionalGeneration(config).save_pretrained(folder)
    pixels = CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    LlavaProcessor(
        pixels, tokenizer, patch_size=14, vision_feature_select_strategy="default", num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    ).save_pretrained(folder)  # fmt: skip
    return folder


def save_pictures(folder: Path) -> None:
    """Write one picture of each colour."""
    from PIL import Image

    for name, colour in COLOURS.items():
        Image.new("RGB", (40, 30), colour).save(folder / f"{name}.png")
