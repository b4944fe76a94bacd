"""Operations that processors have instructions for, and those instructions as LLVM code."""
