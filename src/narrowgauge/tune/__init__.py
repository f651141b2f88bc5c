"""Which layers of a model can bear which precision: measured, chosen within a budget, and verified by short runs."""
