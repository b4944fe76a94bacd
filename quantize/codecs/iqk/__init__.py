"""The IQK types of ik_llama.cpp: non-uniform value tables with block scales."""
