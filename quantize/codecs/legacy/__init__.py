"""The legacy types, blocks of 32 with float16 scales: q4_0, q5_0, q6_0, q8_0 (symmetric), q4_1, q5_1 (with a minimum)."""
