"""What a run leaves to look at: its journal, and bytes per role."""
