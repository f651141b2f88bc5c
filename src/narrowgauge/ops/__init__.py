"""Products of low-precision operands: which backend runs them, and the three GEMMs of a linear layer."""
