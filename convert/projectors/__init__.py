"""Vision and audio towers and their projectors, as llama.cpp's projector files (mmproj) have them."""
