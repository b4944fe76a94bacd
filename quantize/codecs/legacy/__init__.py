"""The types of blocks of 32 with one scale: q4_0, q4_1, q5_0, q5_1, q6_0, q8_0."""
