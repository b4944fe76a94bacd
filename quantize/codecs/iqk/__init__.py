"""The IQK types of ik_llama.cpp: codes of non-uniform value tables, with block scales and a table flag per block."""
