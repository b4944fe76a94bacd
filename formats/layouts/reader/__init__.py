"""Blocks of packed weights read by LLVM code, derived from `formats.layouts`: what GEMV, panels and decoders share."""
