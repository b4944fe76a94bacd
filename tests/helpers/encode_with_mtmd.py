"""A projector file in llama.cpp's own library: `encode_with_mtmd.py TEXT.gguf MMPROJ.gguf MODALITY...` loads both, encodes a
picture (vision) and a second of sound (audio), and prints what came out as JSON.

A program of its own, since the library ends the process that it is in when something does not fit.
"""

import ctypes
import json
import sys

import llama_cpp
import numpy as np
from llama_cpp import mtmd_cpp as mtmd


def encoded(context: object, bitmap: object, width: int) -> np.ndarray:
    """The embeddings of a picture or sound, float32 [tokens, width]."""
    chunks = mtmd.mtmd_input_chunks_init()
    marker = mtmd.mtmd_default_marker()
    text = mtmd.mtmd_input_text(text=marker, text_len=len(marker), add_special=False, parse_special=True)
    bitmaps = (mtmd.mtmd_bitmap_p_ctypes * 1)(bitmap)
    if mtmd.mtmd_tokenize(context, chunks, ctypes.byref(text), bitmaps, 1):
        raise SystemExit("not tokenized")
    found = []
    for i in range(mtmd.mtmd_input_chunks_size(chunks)):
        chunk = mtmd.mtmd_input_chunks_get(chunks, i)
        if mtmd.mtmd_input_chunk_get_type(chunk) == mtmd.MTMD_INPUT_CHUNK_TYPE_TEXT:
            continue
        if mtmd.mtmd_encode_chunk(context, chunk):
            raise SystemExit("not encoded")
        count = mtmd.mtmd_input_chunk_get_n_tokens(chunk)
        values = np.ctypeslib.as_array(mtmd.mtmd_get_output_embd(context), (count * width,))
        found.append(values.reshape(count, width).copy())
    return np.concatenate(found)


def main(text_path: str, projector_path: str, *modalities: str) -> None:
    """Prints {modality: {"tokens": n, "finite": all of them, "spread": standard deviation over tokens}}."""
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(text_path.encode(), llama_cpp.llama_model_default_params())
    if not model:
        raise SystemExit("the text model does not load")
    params = mtmd.mtmd_context_params_default()
    params.use_gpu, params.n_threads, params.warmup = False, 1, False
    context = mtmd.mtmd_init_from_file(projector_path.encode(), model, params)
    if not context:
        raise SystemExit("the projector does not load")
    rng, bitmaps = np.random.default_rng(0), {}
    if "vision" in modalities:
        picture = rng.integers(0, 256, (112, 112, 3), np.uint8)
        bitmaps["vision"] = mtmd.mtmd_bitmap_init(112, 112, (ctypes.c_uint8 * picture.size).from_buffer(picture))
    if "audio" in modalities:
        sound = rng.standard_normal(mtmd.mtmd_get_audio_sample_rate(context)).astype(np.float32)
        bitmaps["audio"] = mtmd.mtmd_bitmap_init_from_audio(sound.size, (ctypes.c_float * sound.size).from_buffer(sound))
    result = {}
    for modality, bitmap in bitmaps.items():
        values = encoded(context, bitmap, llama_cpp.llama_model_n_embd(model))
        spread = float(values.std(axis=0).mean())
        result[modality] = {"tokens": len(values), "finite": bool(np.isfinite(values).all()), "spread": spread}
    print(json.dumps(result))


main(*sys.argv[1:])
