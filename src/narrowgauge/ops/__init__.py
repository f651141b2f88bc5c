"""Products of low-precision operands: which backend runs them, the three GEMMs of a linear layer, and their gradient."""
