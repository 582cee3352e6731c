"""The formats a run can be exported to. Panel, command line and benchmark list them from here."""

from __future__ import annotations

FORMATS: dict[str, str] = {
    "adapter": "the adapter alone (safetensors), small; its base model is loaded beside it",
    "merged": "one whole model (safetensors) with the adapter's update added to the base weights",
    "script": "a plain Python script with its tokens that repeats the run without the workbench",
    "report": "one HTML page with the run's curves, findings and settings, which opens without a network",
    "gguf-f16": "one GGUF file for llama.cpp in float16",
    "gguf-bf16": "one GGUF file for llama.cpp in bfloat16",
    "gguf-q8_0": "one GGUF file for llama.cpp in 8 bits",
    "gguf-q4_0": "one GGUF file for llama.cpp in 4 bits, symmetric blocks",
    "gguf-q4_1": "one GGUF file for llama.cpp in 4 bits, blocks with an offset",
    "onnx": "an ONNX graph in float32 for onnxruntime and, from there, TensorRT",
    "bnb-8bit": "a folder for transformers with bitsandbytes' 8-bit weights",
    "bnb-4bit": "a folder for transformers with bitsandbytes' 4-bit weights (NF4)",
    "torchao-int8": "a folder for transformers with torchao's 8-bit weights",
    "torchao-int4": "a folder for transformers with torchao's 4-bit weights; needs a GPU",
    "gptq": "a folder for transformers with 4-bit weights fitted to the run's own data (GPTQ)",
    "awq": "a folder for transformers with 4-bit weights scaled by the run's own data (AWQ); needs a GPU",
}

# Those that are made from the merged model and graded against it, with the bits that most weights take.
WEIGHT_BITS: dict[str, int] = {
    "merged": 16,
    "gguf-f16": 16,
    "gguf-bf16": 16,
    "gguf-q8_0": 8,
    "gguf-q4_0": 4,
    "gguf-q4_1": 4,
    "onnx": 32,
    "bnb-8bit": 8,
    "bnb-4bit": 4,
    "torchao-int8": 8,
    "torchao-int4": 4,
    "gptq": 4,
    "awq": 4,
}
