"""The k-quants, superblocks of 256 with quantised scales: q3_K, q6_K (symmetric), q2_K, q4_K, q5_K (with minima)."""
