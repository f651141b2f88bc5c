"""Products of narrow formats in CUDA hardware, through torch's scaled_mm."""
